"""Datasets under DataLoaders: the same set of samples whatever reads them."""

from __future__ import annotations

import pickle
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import rollstore

torch = pytest.importorskip("torch", reason="no PyTorch here: datasets were NOT tested")

from torch.utils.data import DataLoader, DistributedSampler  # noqa: E402
from torch_stores import flat, seal, seal_one, seal_unusable, sequences  # noqa: E402

import rollstore.torch as rt  # noqa: E402
from rollstore.loss import group_advantages  # noqa: E402
from rollstore.torch.batch import unit_advantages  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

WORKERS = [(0, None), (1, "fork"), (4, "fork")]
SPAWN = [(1, "spawn"), (4, "spawn")]


def loaded(dataset: Any, workers: int, context: str | None, **more: Any) -> list[Any]:
    reading = iter(
        DataLoader(
            dataset,
            batch_size=None,
            num_workers=workers,
            multiprocessing_context=context,
            **more,
        )
    )
    try:
        return list(reading)
    finally:
        if workers:  # an exception would keep the iterator, and its workers, until it is collected
            reading._shutdown_workers()


def same(left: Any, right: Any) -> bool:
    return left.dtype == right.dtype and torch.equal(left, right)


# ---------------------------------------------------------------- the same set of samples


@pytest.mark.parametrize(("workers", "context"), WORKERS + SPAWN)
def test_batches_are_the_same_and_in_order_with_any_workers(
    store: rollstore.Store, workers: int, context: str | None
):
    seal(store, 26, group_size=2)
    dataset = rt.SealedSessions(store, rt.Plan.of(store, group_size=2, seed=3), batch_size=6)
    here = list(dataset)
    there = loaded(dataset, workers, context)
    assert sorted(flat(sequences(here))) == list(range(1, 27))
    assert sequences(there) == sequences(here)
    for left, right in zip(here, there):
        assert left.tensors.keys() == right.tensors.keys()
        assert all(same(left.tensors[name], right.tensors[name]) for name in left.tensors)
        assert left.samples == right.samples


@pytest.mark.parametrize(("workers", "context"), WORKERS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_with_workers_read_nothing_twice_and_leave_nothing_out(
    store: rollstore.Store, workers: int, context: str | None, world: int
):
    seal(store, 23)
    plan = rt.Plan.of(store, seed=3)
    read = [
        sequences(
            loaded(
                rt.SealedSessions(store, plan, batch_size=2, rank=rank, world=world),
                workers,
                context,
            )
        )
        for rank in range(world)
    ]
    assert sorted(flat(flat(read))) == list(range(1, 24))


@pytest.mark.parametrize(("workers", "context"), WORKERS)
def test_single_samples_and_groups_with_workers(
    store: rollstore.Store, workers: int, context: str | None
):
    seal(store, 12, group_size=3)
    dataset = rt.SealedSessions(store, rt.Plan.of(store, seed=1))
    assert sequences(loaded(dataset, workers, context)) == sequences(dataset)
    grouped = rt.SealedSessions(store, rt.Plan.of(store, group_size=3, seed=1))
    items = loaded(grouped, workers, context)
    assert [[sample["group_index"] for sample in item] for item in items] == [
        [item[0]["group_index"]] * 3 for item in items
    ]
    assert sorted(sample["sequence"] for item in items for sample in item) == list(range(1, 13))


def test_a_second_pass_gives_the_same_again(store: rollstore.Store):
    seal(store, 5)
    dataset = rt.SealedSessions(store, batch_size=2)
    loader = DataLoader(dataset, batch_size=None, num_workers=2, persistent_workers=True)
    assert sequences(loader) == sequences(loader) == [[1, 2], [3, 4], [5]]
    next(iter(dataset))
    assert sequences(dataset) == [[1, 2], [3, 4], [5]]


def test_epochs_change_the_order_and_not_the_set(store: rollstore.Store):
    seal(store, 30)
    dataset = rt.SealedSessions(store, rt.Plan.of(store, seed=1), batch_size=4)
    first = flat(sequences(dataset))
    dataset.set_epoch(1)
    second = flat(sequences(dataset))
    assert first != second
    assert sorted(first) == sorted(second)


def test_the_length_is_the_number_of_items(store: rollstore.Store):
    seal(store, 11)
    for arguments, count in (
        ({}, 11),
        ({"batch_size": 4}, 3),
        ({"batch_size": 4, "drop_last": True}, 2),
    ):
        dataset = rt.SealedSessions(store, **arguments)
        assert len(dataset) == count == len(list(dataset))
    with pytest.raises(TypeError):
        len(rt.SealedSessions(store, rt.Follow()))


def test_datasets_pickle_and_open_the_store_again(store: rollstore.Store):
    seal(store, 4)
    stream = pickle.loads(pickle.dumps(rt.SealedSessions(store, batch_size=2)))
    assert sequences(stream) == [[1, 2], [3, 4]]
    items = pickle.loads(pickle.dumps(rt.SessionDataset(store, batch_size=2)))
    assert sequences([items[0], items[1]]) == [[1, 2], [3, 4]]


def test_a_path_is_opened_to_read(store: rollstore.Store):
    seal(store, 2)
    store.close()
    assert sequences(rt.SealedSessions(store.path, batch_size=2)) == [[1, 2]]
    assert len(rt.SessionDataset(store.path)) == 2


# ---------------------------------------------------------------- the map-style dataset


def test_items_of_the_map_style_dataset(store: rollstore.Store):
    seal(store, 5)
    dataset = rt.SessionDataset(store)
    assert len(dataset) == 5
    assert [dataset[i]["sequence"] for i in range(5)] == [1, 2, 3, 4, 5]
    assert dataset[-1]["session_id"] == "s5"
    for outside in (5, -6):
        with pytest.raises(IndexError, match=f"no item {outside}"):
            dataset[outside]
    assert [item["sequence"] for item in dataset.__getitems__([3, 0])] == [4, 1]


def test_batches_of_the_map_style_dataset(store: rollstore.Store):
    seal(store, 10, group_size=2)
    plan = rt.Plan.of(store, group_size=2, seed=8)
    dataset = rt.SessionDataset(store, plan, batch_size=4)
    stream = rt.SealedSessions(store, plan, batch_size=4)
    assert [dataset[i].sequences.tolist() for i in range(len(dataset))] == sequences(stream)
    assert len(rt.SessionDataset(store, plan, batch_size=4, drop_last=True)) == 2
    assert [len(item) for item in (rt.SessionDataset(store, plan)[i] for i in range(5))] == [2] * 5


@pytest.mark.parametrize(("workers", "context"), WORKERS)
def test_samplers_work_on_the_map_style_dataset(
    store: rollstore.Store, workers: int, context: str | None
):
    seal(store, 12)
    dataset = rt.SessionDataset(store, batch_size=2)
    shuffled = loaded(dataset, workers, context, shuffle=True)
    assert sorted(flat(sequences(shuffled))) == list(range(1, 13))
    singles = rt.SessionDataset(store)
    ranks = [
        DataLoader(
            singles,
            batch_size=4,
            sampler=DistributedSampler(singles, num_replicas=2, rank=rank),
            collate_fn=list,
            num_workers=workers,
            multiprocessing_context=context,
        )
        for rank in range(2)
    ]
    read = [sample["sequence"] for rank in ranks for batch in rank for sample in batch]
    assert sorted(read) == list(range(1, 13))


def test_a_new_epoch_of_the_map_style_dataset(store: rollstore.Store):
    seal(store, 20)
    dataset = rt.SessionDataset(store, rt.Plan.of(store, seed=1))
    first = [dataset[i]["sequence"] for i in range(20)]
    dataset.set_epoch(3)
    second = [dataset[i]["sequence"] for i in range(20)]
    assert first != second
    assert sorted(first) == sorted(second)


# ---------------------------------------------------------------- what a sample and a batch hold


def test_a_sample_is_the_stores_own(store: rollstore.Store):
    seal(store, 3, group_size=3, versions=lambda number: [4, 6])
    group = rt.SessionDataset(store, rt.Plan.of(store, group_size=3), top_k=3)[0]
    with store.snapshot() as snapshot:
        for item, session in zip(group, snapshot.ready()):
            sample = session.sample(top_k=3)
            for name in ("tokens", "loss_mask", "rollout_logprobs", "topk_ids", "topk_logprobs"):
                assert item[name].numpy().tobytes() == getattr(sample, name).tobytes()
                assert item[name].numpy().dtype == getattr(sample, name).dtype
                assert tuple(item[name].shape) == getattr(sample, name).shape
            assert item["topk_ids"].shape[1] == 3
            assert item["session_id"] == session.id
            assert item["reward"] == session.reward
            assert (item["prompt_length"], item["response_length"]) == (2, len(sample.loss_mask))
            assert (item["weight_version_min"], item["weight_version_max"]) == (4, 6)
            assert (item["group_index"], item["index"]) == (0, session.index)
            assert item["status"] == "completed"
    rewards = [item["reward"] for item in group]
    np.testing.assert_array_equal(
        np.float32([item["advantage"] for item in group]), group_advantages(rewards, [0, 0, 0])
    )


def test_what_was_not_said_of_a_session(store: rollstore.Store):
    seal_one(store, 1, versions=["default"], reward=None, index=None)
    item = rt.SessionDataset(store)[0]
    assert np.isnan(item["reward"])
    assert (item["group_index"], item["index"]) == (-1, -1)
    assert (item["weight_version_min"], item["weight_version_max"]) == (-1, -1)
    assert "advantage" not in item


@pytest.mark.parametrize(
    "arguments",
    [
        {"layout": "packed"},
        {"layout": "packed", "top_k": 3, "token_max": 9, "threads": 2},
        {"layout": "padded", "pad_id": 99, "length": 40, "response_length": 30},
        {"layout": "padded"},
    ],
)
def test_a_batch_is_the_stores_own(store: rollstore.Store, arguments: dict[str, Any]):
    seal(store, 6, group_size=3, versions=lambda number: [1] * (1 + number % 3))
    batch = rt.SessionDataset(store, rt.Plan.of(store, group_size=3), batch_size=6, **arguments)[0]
    with store.snapshot() as snapshot:
        own = snapshot.batch([f"s{n}" for n in range(1, 7)], torch=True, **arguments)
    for name, tensor in own.arrays.items():
        assert same(getattr(batch, name), tensor), name
    assert batch.samples == own.samples
    assert batch.session_ids == own.session_ids
    assert batch.sequences.tolist() == own.sequences
    assert batch.rewards.tolist() == own.rewards.tolist()
    assert batch.group_indices.tolist() == own.group_indices.tolist()
    assert len(batch) == 6
    expected = group_advantages(batch.rewards, batch.group_indices)
    assert same(batch.advantages, expected)
    tokens = batch.response_advantages()
    assert tokens.shape == batch.rollout_logprobs.shape
    for number, sample in enumerate(own.samples):
        if batch.layout == "packed":
            begin, end = own.cu_response_seqlens[number : number + 2]
            row = tokens[begin:end]
        else:
            row = tokens[number, : sample.response_count]
        assert row.tolist() == [expected[number].item()] * sample.response_count


def test_advantages_are_centred_by_unit_where_a_group_index_comes_twice(store: rollstore.Store):
    for number, reward in enumerate([0.0, 1.0, 10.0, 20.0], 1):
        seal_one(store, number, group_index=5, reward=reward)
    batch = rt.SessionDataset(store, rt.Plan.of(store, group_size=2), batch_size=4)[0]
    assert batch.advantages.tolist() == [-0.5, 0.5, -5.0, 5.0]


def test_without_groups_there_are_no_advantages(store: rollstore.Store):
    seal(store, 2)
    batch = rt.SessionDataset(store, batch_size=2)[0]
    assert batch.advantages is None
    assert "advantages" not in batch.tensors
    with pytest.raises(ValueError, match="group size"):
        batch.response_advantages()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_reward_that_is_missing_names_the_session(store: rollstore.Store, workers: int):
    seal_one(store, 1, group_size=2)
    seal_one(store, 2, group_size=2, reward=None, status="failed")
    plan = rt.Plan.of(store, group_size=2)
    for arguments in ({"batch_size": 2}, {}):
        dataset = rt.SealedSessions(store, plan, **arguments)
        with pytest.raises(rt.RewardError, match=r'"s2" \(failed\).*reward'):
            loaded(dataset, workers, "fork" if workers else None)


@pytest.mark.parametrize("reward", [None, float("inf"), float("-inf")])
def test_a_reward_that_is_not_finite_gives_no_advantage(reward: float | None):
    good = SimpleNamespace(id="a", reward=1.0, status="completed")
    bad = SimpleNamespace(id="b", reward=reward, status="completed")
    with pytest.raises(rt.RewardError, match='"b"') as raised:
        unit_advantages([[good, good], [good, bad]])
    assert raised.value.index == 3


def test_a_batch_moves_between_devices(store: rollstore.Store):
    seal(store, 4, group_size=2)
    batch = rt.SessionDataset(store, rt.Plan.of(store, group_size=2), batch_size=4)[0]
    moved = batch.to("meta")
    assert {tensor.device.type for tensor in moved.tensors.values()} == {"meta"}
    assert moved.tensors.keys() == batch.tensors.keys()
    assert moved.session_ids == batch.session_ids
    if torch.cuda.is_available():
        assert all(tensor.is_pinned() for tensor in batch.pin_memory().tensors.values())
    else:
        with pytest.raises(RuntimeError):
            batch.pin_memory()


# ---------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("workers", [0, 2])
def test_a_session_released_since_is_raised_or_passed_over(store: rollstore.Store, workers: int):
    seal(store, 8, group_size=2)
    context = "fork" if workers else None
    plan, grouped = rt.Plan.of(store), rt.Plan.of(store, group_size=2)
    store.release("s3", force=True)
    for source in (plan, grouped):
        dataset = rt.SealedSessions(store, source, batch_size=2)
        with pytest.raises(rt.MissingSessionError, match="sequence numbers 3"):
            loaded(dataset, workers, context)
    skipping = rt.SealedSessions(store, plan, batch_size=2, missing="skip")
    assert sequences(loaded(skipping, workers, context)) == [[1, 2], [4], [5, 6], [7, 8]]
    groups = rt.SealedSessions(store, grouped, batch_size=2, missing="skip")
    assert sorted(flat(sequences(loaded(groups, workers, context)))) == [1, 2, 5, 6, 7, 8]
    single = rt.SealedSessions(store, plan, missing="skip")
    assert sorted(flat(sequences(loaded(single, workers, context)))) == [1, 2, 4, 5, 6, 7, 8]
    with pytest.raises(rt.MissingSessionError):
        rt.SessionDataset(store, plan)[2]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_session_without_a_sample_is_named(store: rollstore.Store, workers: int):
    seal(store, 1)
    seal_unusable(store, "torn")
    dataset = rt.SealedSessions(store, batch_size=2)
    with pytest.raises(rollstore.AlignmentError, match="torn"):
        loaded(dataset, workers, "fork" if workers else None)


def test_arguments_are_checked(store: rollstore.Store):
    seal(store, 4, group_size=2)
    plan = rt.Plan.of(store, group_size=2)
    for size in (0, 3, -2):
        with pytest.raises(ValueError, match="batch_size"):
            rt.SealedSessions(store, plan, batch_size=size)
        with pytest.raises(ValueError, match="batch_size"):
            rt.SessionDataset(store, plan, batch_size=size)
    for rank, world in ((1, 1), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match="rank"):
            rt.SealedSessions(store, plan, rank=rank, world=world)
    with pytest.raises(ValueError, match="missing"):
        rt.SealedSessions(store, plan, missing="drop")
    with pytest.raises(TypeError, match="pad: no such argument"):
        rt.SealedSessions(store, plan, pad=0)
    with pytest.raises(ValueError, match="layout"):
        rt.SessionDataset(store, plan, layout="flat")


# ---------------------------------------------------------------- its own state


def test_the_datasets_own_state_resumes_in_this_process(store: rollstore.Store):
    seal(store, 11)
    plan = rt.Plan.of(store, seed=4)
    whole = sequences(rt.SealedSessions(store, plan, batch_size=2))
    for done in range(len(whole) + 1):
        dataset = rt.SealedSessions(store, plan, batch_size=2)
        reading = iter(dataset)
        for _ in range(done):
            next(reading)
        state = dataset.state_dict()
        again = rt.SealedSessions(store, batch_size=2)
        again.load_state_dict(state)
        assert len(again) == len(whole) - done
        assert again.state_dict() == state
        assert sequences(again) == whole[done:]
        assert sequences(again) == whole  # the pass after it is a whole one


def test_a_state_is_not_read_over_and_over_by_workers(store: rollstore.Store):
    seal(store, 4)
    dataset = rt.SealedSessions(store, batch_size=2)
    dataset.load_state_dict(dataset.state_dict())
    with pytest.raises(rt.StateError, match="Loader"):
        loaded(dataset, 1, "fork")


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("drop_last", [False, True])
def test_states_of_workers_resume_in_the_same_workers(
    store: rollstore.Store, monkeypatch: pytest.MonkeyPatch, workers: int, drop_last: bool
):
    """As a stateful DataLoader does it: each worker's dataset is asked, and told, by itself."""
    seal(store, 15)
    plan = rt.Plan.of(store, seed=4)

    def in_worker(number: int, count: int) -> rt.SealedSessions:
        info = None if number < 0 else SimpleNamespace(id=number, num_workers=count)
        monkeypatch.setattr(rt.datasets, "get_worker_info", lambda: info)
        return rt.SealedSessions(store, plan, batch_size=2, drop_last=drop_last)

    for worker in range(workers):
        whole = sequences(in_worker(worker, workers))
        for done in range(len(whole) + 1):
            dataset = in_worker(worker, workers)
            reading = iter(dataset)
            for _ in range(done):
                next(reading)
            state = dataset.state_dict()
            again = in_worker(worker, workers)
            again.load_state_dict(state)
            assert sequences(again) == whole[done:]
        if workers > 1:
            for other in (((worker + 1) % workers, workers), (worker, workers + 1), (-1, 1)):
                with pytest.raises(rt.StateError, match=f"worker {worker} of {workers}"):
                    in_worker(*other).load_state_dict(state)


@pytest.mark.parametrize(
    "damage",
    [
        {"version": 2},
        {"kind": "consumer"},
        {"source": {}},
        {"source": None},
        {"done": None},
        {"world": "2"},
        {"kind": "follow"},
    ],
)
def test_a_damaged_state_is_refused(store: rollstore.Store, damage: dict[str, Any]):
    seal(store, 4)
    dataset = rt.SealedSessions(store, batch_size=2)
    state = dataset.state_dict()
    with pytest.raises(rt.StateError):
        dataset.load_state_dict({**state, **damage})
    for name in state:
        with pytest.raises(rt.StateError):
            dataset.load_state_dict({key: value for key, value in state.items() if key != name})
    assert sequences(dataset) == [[1, 2], [3, 4]]


# ---------------------------------------------------------------- sessions as they are sealed


def test_sessions_are_followed_as_they_are_sealed(store: rollstore.Store):
    seal(store, 3)
    dataset = rt.SealedSessions(store, rt.Follow(), batch_size=2)
    reading = iter(dataset)
    assert next(reading).sequences.tolist() == [1, 2]
    sealing = threading.Thread(target=seal, args=(store, 3))
    sealing.start()
    assert next(reading).sequences.tolist() == [3, 4]
    assert next(reading).sequences.tolist() == [5, 6]
    sealing.join()


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("group_size", [None, 2])
def test_followers_share_the_order(store: rollstore.Store, workers: int, group_size: int | None):
    for number in range(1, 24):
        seal_one(store, number, group_index=number % 3 if number % 7 else 99)
    expected = [n for n in range(1, 24) if group_size is None or n % 7]
    read = []
    for rank in range(2):
        follow = rt.Follow(group_size=group_size, timeout=0)
        dataset = rt.SealedSessions(store, follow, batch_size=2, rank=rank, world=2)
        alone = sequences(dataset)
        assert sequences(loaded(dataset, workers, "fork" if workers else None)) == alone
        read += flat(alone)
    left_out = set(range(1, 24)) - set(read)
    assert len(read) == len(set(read))
    if group_size is None:
        assert sorted(read) == expected
    else:  # at most one session of each group index is left alone
        assert len({n % 3 if n % 7 else 99 for n in left_out}) == len(left_out)


def test_a_follower_leaves_out_what_it_was_told_to(store: rollstore.Store):
    statuses = ["completed", "failed", "completed", "completed", "completed"]
    for number, status in enumerate(statuses, 1):
        seal_one(store, number, status=status, versions=[9 if number != 4 else 1])
    follow = rt.Follow(timeout=0, statuses=["completed"], staleness=rt.Staleness(3, 9))
    for arguments in ({"batch_size": 2}, {}):
        dataset = rt.SealedSessions(store, follow, **arguments)
        assert flat(sequences(dataset)) == [1, 3, 5]
    seal_one(store, 6, versions=["default"])
    with pytest.raises(rt.UnversionedError, match="s6"):
        list(dataset)


def test_a_follower_drops_unusable_sessions(store: rollstore.Store):
    seal(store, 1)
    seal_unusable(store, "torn")
    follow = rt.Follow(timeout=0, unusable="drop")
    assert sequences(rt.SealedSessions(store, follow, batch_size=2)) == [[1]]
    assert sequences(rt.SealedSessions(store, follow)) == [[1]]
    with pytest.raises(rollstore.AlignmentError):
        list(rt.SealedSessions(store, rt.Follow(timeout=0), batch_size=2))


def test_a_gap_is_not_passed_over_in_silence(store: rollstore.Store):
    seal(store, 6, group_size=2)
    for name in ("s2", "s6"):
        store.release(name, force=True)
    follow = rt.Follow(timeout=0)
    with pytest.raises(rt.MissingSessionError, match="sequence numbers 2"):
        list(rt.SealedSessions(store, follow, batch_size=2))
    skipping = rt.SealedSessions(store, follow, batch_size=2, missing="skip")
    assert sequences(skipping) == [[1], [3, 4], [5]]
    groups = rt.Follow(timeout=0, group_size=2)
    with pytest.raises(rt.MissingSessionError, match="2 to 2.*after="):
        list(rt.SealedSessions(store, groups, batch_size=2))
    later = rt.Follow(timeout=0, group_size=2, after=2)
    reading = iter(rt.SealedSessions(store, later, batch_size=2))
    assert next(reading).sequences.tolist() == [3, 4]
    with pytest.raises(rt.MissingSessionError, match="6 to 6"):
        next(reading)


@pytest.mark.parametrize("group_size", [None, 2])
def test_following_resumes_exactly(store: rollstore.Store, group_size: int | None):
    seal(store, 14, group_size=group_size)
    follow = rt.Follow(timeout=0, group_size=group_size)

    def ranks(world: int) -> list[rt.SealedSessions]:
        return [
            rt.SealedSessions(store, follow, batch_size=2, rank=rank, world=world)
            for rank in range(world)
        ]

    for before, after in ((1, 1), (2, 2), (2, 3), (3, 1)):
        for batches in range(14 // (2 * before) + 1):
            read: list[int] = []
            first = ranks(before)
            for dataset in first:
                reading = iter(dataset)
                read += flat(next(reading).sequences.tolist() for _ in range(batches))
            state = first[0].state_dict()
            for dataset in ranks(after):
                dataset.load_state_dict(state)
                read += flat(sequences(dataset))
            assert sorted(read) == list(range(1, 15))


def test_a_state_of_another_following_is_refused(store: rollstore.Store):
    seal(store, 2)
    dataset = rt.SealedSessions(store, rt.Follow(after=1), batch_size=2)
    state = dataset.state_dict()
    for other in (rt.Follow(), rt.Follow(after=1, group_size=2), None):
        with pytest.raises(rt.StateError):
            rt.SealedSessions(store, other, batch_size=2).load_state_dict(state)
    with pytest.raises(ValueError, match="epochs"):
        dataset.set_epoch(1)
    with pytest.raises(ValueError, match="after"):
        rt.Follow(after=-1)
