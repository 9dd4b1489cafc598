"""Samples and batches in arrays of their own."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import numpy as np
import pytest
from replies import DATA, fixtures, make_arrays, make_text, sha256

import rollstore

NAMES = ("tokens", "loss_mask", "rollout_logprobs", "topk_ids", "topk_logprobs")
EMPTY = {"loss_mask": 0, "rollout_logprobs": 0.0, "topk_ids": -1, "topk_logprobs": -np.inf}


@pytest.fixture
def recorded(store: rollstore.Store) -> rollstore.Store:
    store.ingest(DATA / "sessions.jsonl")
    return store


def ids_of(snapshot: rollstore.Snapshot) -> list[str]:
    return [session.id for session in snapshot.ready()]


def check_packed(batch: rollstore.Batch, samples: list[rollstore.Sample]) -> None:
    tokens = np.asarray(batch.cu_seqlens)
    responses = np.asarray(batch.cu_response_seqlens)
    assert len(tokens) == len(responses) == len(samples) + 1
    for i, sample in enumerate(samples):
        for name in NAMES:
            bounds = tokens if name == "tokens" else responses
            part = np.asarray(getattr(batch, name))[bounds[i] : bounds[i + 1]]
            assert part.tobytes() == getattr(sample, name).tobytes(), (i, name)
    assert tokens[-1] == len(batch.tokens)
    assert responses[-1] == len(batch.loss_mask)


def check_padded(batch: rollstore.Batch, samples: list[rollstore.Sample], pad_id: int) -> None:
    for i, sample in enumerate(samples):
        assert int(batch.token_counts[i]) == len(sample.tokens)
        assert int(batch.response_counts[i]) == sample.response_length
        for name in NAMES:
            row = np.asarray(getattr(batch, name))[i]
            wanted = getattr(sample, name)
            assert row[: len(wanted)].tobytes() == wanted.tobytes(), (i, name)
            rest = EMPTY.get(name, pad_id)
            assert (row[len(wanted) :] == rest).all(), (i, name)


@pytest.mark.parametrize("as_torch", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
def test_packed_is_one_sample_after_another(
    recorded: Any, as_torch: bool, threads: int, request: pytest.FixtureRequest
):
    if as_torch:
        request.getfixturevalue("torch")
    with recorded.snapshot() as snapshot:
        ids = ids_of(snapshot)
        samples = [snapshot.sessions[name].sample() for name in ids]
        batch = snapshot.batch(ids, torch=as_torch, threads=threads)
        check_packed(batch, samples)
        kinds = {type(array).__name__ for array in batch.arrays.values()}
        assert kinds == {"Tensor" if as_torch else "ndarray"}
        assert batch.token_counts is None and "token_counts" not in batch.arrays
        assert str(batch.cu_seqlens.dtype) == ("torch.int32" if as_torch else "int32")
    assert batch.session_ids == ids
    assert len(batch) == len(ids) == 24


@pytest.mark.parametrize("as_torch", [False, True])
def test_padded_is_filled_on_the_right(
    recorded: Any, as_torch: bool, request: pytest.FixtureRequest
):
    if as_torch:
        request.getfixturevalue("torch")
    with recorded.snapshot() as snapshot:
        ids = ids_of(snapshot)
        samples = [snapshot.sessions[name].sample() for name in ids]
        longest = max(len(sample.tokens) for sample in samples)
        batch = snapshot.batch(ids, layout="padded", pad_id=7, torch=as_torch)
        check_padded(batch, samples, 7)
        assert batch.tokens.shape == (24, longest)
        wider = snapshot.batch(
            ids, layout="padded", length=longest + 9, response_length=longest, torch=as_torch
        )
        check_padded(wider, samples, 0)
        assert tuple(wider.topk_ids.shape) == (24, longest, 32)
        with pytest.raises(ValueError, match=f"length: the longest sample has {longest} tokens"):
            snapshot.batch(ids, layout="padded", length=longest - 1)
        with pytest.raises(ValueError, match="response_length: the longest response"):
            snapshot.batch(ids, layout="padded", response_length=3)


def test_a_batch_says_what_it_is_made_of(recorded: rollstore.Store):
    recorded.put_reply("x", 0, make_text(3, 4, version="no number"), prompt=[1])
    expected = {e["session_id"]: e for e in fixtures("sessions_expected.jsonl")}
    with recorded.snapshot() as snapshot:
        sessions = [*snapshot.ready(), snapshot.sessions["x"]]
        batch = snapshot.batch(sessions)
        assert batch.sequences == [*range(1, 25), 0]
        assert batch.statuses == [session.status for session in sessions]
        for reward, session in zip(batch.rewards.tolist(), sessions):
            assert (
                np.isnan(reward) if session.reward is None else reward == np.float32(session.reward)
            )
        assert batch.rewards.dtype == np.float32 and batch.group_indices.dtype == np.int64
        groups = [-1 if s.group_index is None else s.group_index for s in sessions]
        assert batch.group_indices.tolist() == groups
        assert batch.weight_version_min[-1] is None
        for sample in batch.samples[:-1]:
            wanted = expected[sample.session.id]
            versions = [int(version) for version in wanted["weight_versions"]]
            assert sample.token_count == wanted["tokens"]
            assert (sample.weight_version_min, sample.weight_version_max) == (
                min(versions),
                max(versions),
            )


def test_the_memory_of_a_batch_is_used_again(recorded: rollstore.Store):
    with recorded.snapshot() as snapshot:
        ids = ids_of(snapshot)
        large = snapshot.batch(ids)
        address = large.topk_ids.__array_interface__["data"][0]
        small = snapshot.batch(ids[3:7], out=large)
        assert small.topk_ids.__array_interface__["data"][0] == address
        check_packed(small, [snapshot.sessions[name].sample() for name in ids[3:7]])
        again = snapshot.batch(ids, out=small)
        assert again.topk_ids.__array_interface__["data"][0] == address
        check_packed(again, [snapshot.sessions[name].sample() for name in ids])
        padded = snapshot.batch(ids[:4], layout="padded", out=again)
        assert padded.topk_ids.__array_interface__["data"][0] == address
        check_padded(padded, [snapshot.sessions[name].sample() for name in ids[:4]], 0)
        first = snapshot.batch(ids[:1])
        grown = snapshot.batch(ids, out=first)
        check_packed(grown, [snapshot.sessions[name].sample() for name in ids])


def test_arrays_are_not_used_again_as_tensors(recorded: rollstore.Store, torch: Any):
    with recorded.snapshot() as snapshot:
        arrays = snapshot.batch(ids_of(snapshot))
        tensors = snapshot.batch(ids_of(snapshot), out=arrays, torch=True)
        assert isinstance(tensors.tokens, torch.Tensor)
        memory = tensors.tokens.data_ptr()
        again = snapshot.batch(ids_of(snapshot)[:5], out=tensors, torch=True)
        assert again.tokens.data_ptr() == memory


def test_a_batch_outlives_its_snapshot(recorded: rollstore.Store):
    with recorded.snapshot() as snapshot:
        ids = ids_of(snapshot)
        batch = snapshot.batch(ids)
        digest = sha256(batch.topk_logprobs)
    for name in ids:
        recorded.release(name)
    assert sha256(batch.topk_logprobs) == digest


def test_batches_and_samples_travel_by_pickle(recorded: rollstore.Store):
    with recorded.snapshot() as snapshot:
        ids = ids_of(snapshot)
        large = snapshot.batch(ids)
        batch = snapshot.batch(ids[:2], out=large)
        sample = snapshot.sessions[ids[0]].sample()
    pickled = pickle.dumps(batch)
    assert len(pickled) < sum(array.nbytes for array in batch.arrays.values()) + 4096
    copy = pickle.loads(pickled)
    assert copy.samples == batch.samples
    assert copy.layout == "packed" and copy.token_counts is None
    for name, array in batch.arrays.items():
        assert getattr(copy, name).tobytes() == array.tobytes()
    again = pickle.loads(pickle.dumps(sample))
    assert again.info == sample.info and (again.topk_ids == sample.topk_ids).all()


def test_samples_are_truncated_by_whole_turns(recorded: rollstore.Store):
    with recorded.snapshot() as snapshot:
        session = max(snapshot.ready(), key=len)
        whole = session.sample()
        cut = session.sample(token_max=len(whole.tokens) - 1)
        assert cut.turns_left_out > 0
        assert cut.turn_count + cut.turns_left_out == len(session)
        assert len(cut.weight_versions) == cut.turn_count
        assert (cut.tokens == whole.tokens[: len(cut.tokens)]).all()
        assert len(cut.tokens) <= len(whole.tokens) - 1
        assert session.sample(token_max=len(whole.tokens)).turns_left_out == 0
        with pytest.raises(rollstore.LimitError):
            session.sample(token_max=3)


def test_narrow_turns_are_widened_and_wide_ones_refused(store: rollstore.Store):
    store.put("a", 0, **make_arrays(3, 2), prompt=[1])
    store.put("b", 0, **make_arrays(3, 4), prompt=[1])
    with store.snapshot() as snapshot:
        assert snapshot.sessions["a"].sample().topk_ids.shape == (3, 2)
        wide = snapshot.sessions["a"].sample(top_k=6)
        assert wide.topk_ids.shape == (3, 6)
        assert (wide.topk_ids[:, 2:] == -1).all() and np.isinf(wide.topk_logprobs[:, 2:]).all()
        assert snapshot.batch(["a", "b"]).topk_ids.shape == (6, 4)
        with pytest.raises(rollstore.LimitError):
            snapshot.sessions["b"].sample(top_k=3)


def test_errors_of_a_batch_name_the_session(recorded: rollstore.Store):
    recorded.put_reply("bad", 0, make_text(3, 4, seed=1), prompt=[1, 2])
    recorded.put_reply("bad", 1, make_text(3, 4, seed=2), prompt=[9, 9, 9, 9, 9])
    with recorded.snapshot() as snapshot:
        ids = ids_of(snapshot)[:3]
        with pytest.raises(rollstore.AlignmentError, match='"bad"') as caught:
            snapshot.batch([*ids, "bad"])
        assert caught.value.index == 3
        with pytest.raises(rollstore.NotFoundError, match="nobody") as missing:
            snapshot.batch([ids[0], "nobody", ids[1]])
        assert missing.value.index == 1
        with pytest.raises(ValueError, match="layout"):
            snapshot.batch(ids, layout="flat")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="padded"):
            snapshot.batch(ids, length=100)
        with pytest.raises(rollstore.ArgumentError, match="threads"):
            snapshot.batch(ids, threads=0)
        with pytest.raises(TypeError, match="sessions: ids, sessions or leases"):
            snapshot.batch([3])  # type: ignore[list-item]
        with pytest.raises(TypeError, match="a list of sessions"):
            snapshot.batch(ids[0])
        with pytest.raises(TypeError, match="a list of sessions"):
            snapshot.batch(b"ab")  # type: ignore[arg-type]


def test_a_batch_of_nothing_is_empty(store: rollstore.Store):
    with store.snapshot() as snapshot:
        batch = snapshot.batch([])
        assert len(batch) == 0 and batch.tokens.shape == (0,)
        assert batch.cu_seqlens.tolist() == [0]
        padded = snapshot.batch([], layout="padded", length=5)
        assert padded.tokens.shape == (0, 5)


def test_arrays_to_be_filled_are_checked(recorded: rollstore.Store):
    with recorded.snapshot() as snapshot:
        plan = snapshot._measure(ids_of(snapshot))
        count = plan.sizes[0]
        with pytest.raises(ValueError, match=f"tokens: room for {count} elements"):
            plan.pack(tokens=np.empty(count - 1, np.int32))
        with pytest.raises(TypeError, match="tokens: dtype int32 is needed, got int64"):
            plan.pack(tokens=np.empty(count, np.int64))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="tokens: a NumPy array"):
            plan.pack(tokens=[0] * count)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="tokens: must be C-contiguous"):
            plan.pack(tokens=np.empty(2 * count, np.int32)[::2])
        frozen = np.empty(count, np.int32)
        frozen.flags.writeable = False
        with pytest.raises(ValueError, match="writable"):
            plan.pack(tokens=frozen)
        exact = np.empty(count, np.int32)
        plan.pack(tokens=exact)
        assert sha256(exact) == sha256(snapshot.batch(ids_of(snapshot)).tokens)
    with pytest.raises(rollstore.ClosedError):
        plan.pack()
    with pytest.raises(rollstore.ClosedError):
        plan.samples  # noqa: B018


def test_samples_as_tensors(recorded: rollstore.Store, torch: Any):
    with recorded.snapshot() as snapshot:
        for session in snapshot.ready():
            arrays, tensors = session.sample(), session.sample(torch=True)
            for name in NAMES:
                assert isinstance(getattr(tensors, name), torch.Tensor)
                assert getattr(tensors, name).numpy().tobytes() == getattr(arrays, name).tobytes()


def test_pinned_memory_needs_a_gpu(recorded: rollstore.Store, torch: Any):
    if torch.cuda.is_available():
        pytest.skip("a GPU is here: test_cuda.py checks pinned memory")
    with recorded.snapshot() as snapshot, pytest.raises(RuntimeError, match="pin_memory"):
        snapshot.batch(ids_of(snapshot), pin_memory=True)


def test_threads_share_a_snapshot(recorded: rollstore.Store):
    with recorded.snapshot() as snapshot:
        ids = ids_of(snapshot)
        wanted = sha256(snapshot.batch(ids).topk_logprobs)
        failures: list[BaseException] = []

        def work() -> None:
            try:
                for _ in range(20):
                    assert sha256(snapshot.batch(ids, threads=2).topk_logprobs) == wanted
                    assert snapshot.sessions[ids[0]][0].n > 0
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
