"""Putting replies, arrays and recorded sessions, and what is refused."""

from __future__ import annotations

import io
import json
import resource
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replies import DATA, fixtures, make_arrays, make_reply, make_text, sha256

import rollstore

# ---------------------------------------------------------------- arrays


def test_arrays_are_stored_exactly(store: rollstore.Store):
    arrays = make_arrays(50, 8)
    assert store.put("s", 0, **arrays, prompt=[1], weight_version=7, finish_reason="odd")
    with store.snapshot() as snapshot:
        turn = snapshot.sessions["s"][0]
        for name, array in arrays.items():
            assert getattr(turn, name).tobytes() == array.tobytes()
        assert (turn.weight_version, turn.finish_reason) == ("7", "odd")


def test_a_reply_and_its_arrays_are_the_same_turn(store: rollstore.Store):
    store.put_reply("s", 0, make_text(20, 4), prompt=[1, 2])
    arrays = make_arrays(20, 4)
    same = store.put("s", 0, **arrays, prompt=[1, 2], weight_version="1", finish_reason="stop")
    assert same is False


def test_arrays_that_are_not_contiguous_are_converted(store: rollstore.Store):
    arrays = make_arrays(30, 6)
    spread = {name: np.repeat(array, 2, axis=0)[::2] for name, array in arrays.items()}
    spread["topk_ids"] = np.asfortranarray(arrays["topk_ids"])
    spread["token_ids"] = arrays["token_ids"].astype(np.int64)
    store.put("s", 0, **arrays)
    assert store.put("s", 0, **spread) is False


@pytest.mark.parametrize("name", ["token_logprobs", "topk_logprobs"])
@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.complex64, object])
def test_log_probabilities_of_another_dtype_are_a_type_error(store: Any, name: str, dtype: Any):
    arrays = make_arrays(3, 2)
    arrays[name] = arrays[name].astype(dtype)
    with pytest.raises(TypeError, match=f"{name}: a float32 array is needed"):
        store.put("s", 0, **arrays)


@pytest.mark.parametrize("name", ["token_ids", "topk_ids"])
@pytest.mark.parametrize("dtype", [np.float32, np.uint64, bool, object])
def test_ids_of_another_dtype_are_a_type_error(store: Any, name: str, dtype: Any):
    arrays = make_arrays(3, 2)
    arrays[name] = arrays[name].astype(dtype)
    with pytest.raises(TypeError, match=f"{name}: an int32 array is needed"):
        store.put("s", 0, **arrays)


def test_half_precision_widens_without_loss(store: rollstore.Store):
    arrays = make_arrays(3, 2)
    arrays["topk_logprobs"] = arrays["topk_logprobs"].astype(np.float16)
    store.put("s", 0, **arrays)
    with store.snapshot() as snapshot:
        stored = snapshot.sessions["s"][0].topk_logprobs
        assert (stored == arrays["topk_logprobs"].astype(np.float32)).all()
        del stored


def test_arrays_that_do_not_fit_one_another_are_refused(store: rollstore.Store):
    arrays = make_arrays(5, 3)
    wrong = [
        {"token_logprobs": arrays["token_logprobs"][:4]},
        {"topk_ids": arrays["topk_ids"][:4]},
        {"topk_ids": arrays["topk_ids"][:, :2]},
        {"topk_logprobs": arrays["topk_logprobs"][:, :2]},
    ]
    for change in wrong:
        with pytest.raises(rollstore.ReplyError) as caught:
            store.put("s", 0, **{**arrays, **change})
        assert caught.value.kind == "shape"
    with pytest.raises(ValueError, match="topk_ids: an array of 2 dimensions"):
        store.put("s", 0, **{**arrays, "topk_ids": arrays["topk_ids"].ravel()})
    with pytest.raises(TypeError, match="topk_logprobs"):
        store.put("s", 0, **{**arrays, "topk_logprobs": None})
    with pytest.raises(TypeError, match="token_logprobs"):
        store.put("s", 0, token_ids=[1])
    assert store.stat().turn_count == 0


@pytest.mark.parametrize(
    ("name", "at", "value"),
    [
        ("token_logprobs", 1, np.nan),
        ("topk_logprobs", (1, 1), np.inf),
        ("topk_logprobs", (0, 0), 0.5),
        ("token_ids", 2, -1),
        ("topk_ids", (2, 1), -2),
    ],
)
def test_values_are_checked_as_a_replys(store: Any, name: str, at: Any, value: float):
    arrays = make_arrays(4, 2)
    arrays[name][at] = value
    with pytest.raises(rollstore.ReplyError) as caught:
        store.put("s", 0, **arrays)
    assert caught.value.kind == "value"
    assert caught.value.field == name


def test_a_turn_may_have_no_candidates_and_no_tokens(store: rollstore.Store):
    store.put("s", 0, token_ids=[1, 2], token_logprobs=np.float32([-1, -2]))
    store.put("s", 1, token_ids=[], token_logprobs=[])
    with store.snapshot() as snapshot:
        first, second = snapshot.sessions["s"]
        assert (first.n, first.top_k, second.n) == (2, 0, 0)
        assert first.topk_ids.shape == (2, 0)


# ---------------------------------------------------------------- sessions


def test_the_same_again_changes_nothing_and_other_contents_need_replace(store: rollstore.Store):
    one, other = make_text(3, 2, seed=1), make_text(3, 2, seed=2)
    assert store.put_reply("s", 0, one) is True
    assert store.put_reply("s", 0, one) is False
    with pytest.raises(rollstore.ConflictError):
        store.put_reply("s", 0, other)
    assert store.put_reply("s", 0, other, replace=True) is True
    assert store.put_reply("s", 0, other) is False


def test_turns_come_in_order(store: rollstore.Store):
    with pytest.raises(rollstore.OrderError):
        store.put_reply("s", 1, make_text(1, 1))
    for bad in (-1, 2**32, 2**80):
        with pytest.raises(ValueError, match="from 0 to"):
            store.put_reply("s", bad, make_text(1, 1))
    with pytest.raises(TypeError):
        store.put_reply("s", "0", make_text(1, 1))  # type: ignore[arg-type]


def test_an_outcome_is_kept_and_ends_the_session(store: rollstore.Store):
    store.put_reply("s", 0, make_text(1, 1))
    assert store.seal("s", "truncated", reward=0.25, group_index=-3, index=2**40) is True
    assert store.seal("s", "truncated", reward=0.25, group_index=-3, index=2**40) is False
    with pytest.raises(rollstore.ConflictError):
        store.seal("s", "truncated", reward=0.5, group_index=-3, index=2**40)
    with store.snapshot() as snapshot:
        session = snapshot.sessions["s"]
        assert (session.status, session.reward) == ("truncated", 0.25)
        assert (session.group_index, session.index, session.sequence) == (-3, 2**40, 1)
    assert store.seal("s", "failed", replace=True) is True
    with store.snapshot() as snapshot:
        session = snapshot.sessions["s"]
        assert (session.status, session.reward, session.group_index) == ("failed", None, None)
    with pytest.raises(rollstore.SealedError):
        store.put_reply("s", 1, make_text(1, 1))
    with pytest.raises(rollstore.SealedError):
        store.restart("s")
    with pytest.raises(ValueError, match="status"):
        store.seal("s", "done")  # type: ignore[arg-type]
    with pytest.raises(rollstore.NotFoundError):
        store.seal("t")


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "1"])
def test_a_reward_is_a_finite_number_or_none(store: rollstore.Store, reward: Any):
    store.put_reply("s", 0, make_text(1, 1))
    with pytest.raises((TypeError, ValueError), match="reward|must be real"):
        store.seal("s", reward=reward)
    assert store.seal("s", reward=-1e300)


@pytest.mark.parametrize("temperature", [float("nan"), float("-inf"), 1e39, -1, -1e-9, "hot"])
def test_a_temperature_is_a_float32_or_none(temperature: Any):
    with pytest.raises((TypeError, ValueError), match="temperature|must be real"):
        rollstore.decode(make_text(1, 1), temperature=temperature)


def test_a_session_is_restarted_and_released(store: rollstore.Store):
    for turn in range(3):
        store.put_reply("s", turn, make_text(1, 1, seed=turn))
    assert store.restart("s", 1) is True
    with store.snapshot() as snapshot:
        assert len(snapshot.sessions["s"]) == 1
    store.put_reply("s", 1, make_text(2, 1, seed=9))
    store.release("s")
    with pytest.raises(KeyError):
        store.release("s")
    assert store.restart("s") is False


@pytest.mark.parametrize("name", ["", b"", "x" * 4097, b"x" * 4097])
def test_a_session_id_has_1_to_4096_bytes(store: rollstore.Store, name: Any):
    with pytest.raises(rollstore.ArgumentError):
        store.put_reply(name, 0, make_text(1, 1))


def test_a_session_id_may_be_any_text_and_any_bytes(store: rollstore.Store):
    for name in ("a/b", "é 漢", "x" * 4096, b"\xff\xfe", b"nul\x00inside", "lone \udcff"):
        store.put_reply(name, 0, make_text(1, 1))
        with store.snapshot() as snapshot:
            found = snapshot.sessions[name]
            raw = name if isinstance(name, bytes) else name.encode("utf-8", "surrogateescape")
            assert found.id.encode("utf-8", "surrogateescape") == raw
            assert found.key == rollstore.session_key(name)
    with pytest.raises(TypeError, match="session"):
        store.put_reply(3, 0, make_text(1, 1))  # type: ignore[arg-type]
    with pytest.raises(rollstore.ArgumentError, match="session: half of a surrogate pair"):
        store.put_reply("half \ud800", 0, make_text(1, 1))


# ---------------------------------------------------------------- decoded turns


def test_a_decoded_turn_is_put_later_and_its_arrays_stay(store: rollstore.Store):
    turn = rollstore.decode(make_text(10, 4), prompt=[1, 2], temperature=0.7)
    ids = turn.topk_ids
    before = ids.copy()
    assert store.put_reply("a", 0, turn) is True
    assert store.put_reply("b", 0, turn, prompt=[3], temperature=1.5) is True
    assert (ids == before).all()
    with store.snapshot() as snapshot:
        a, b = snapshot.sessions["a"][0], snapshot.sessions["b"][0]
        assert (a.prompt_ids.tolist(), b.prompt_ids.tolist()) == ([1, 2], [3])
        assert (a.temperature, b.temperature) == (np.float32(0.7), 1.5)


def test_a_stored_turn_is_put_elsewhere(store: rollstore.Store):
    store.put_reply("a", 0, make_text(3, 2, seed=1), prompt=[1])
    prompt = [1, *make_arrays(3, 2, seed=1)["token_ids"].tolist(), 8]
    store.put_reply("a", 1, make_text(4, 2, seed=2), prompt=prompt)
    with store.snapshot() as snapshot:
        session = snapshot.sessions["a"]
        with pytest.raises(rollstore.ArgumentError, match="prompt"):
            store.put_reply("b", 0, session[1])
        for number, turn in enumerate(session):
            store.put_reply("b", number, turn, prompt=session.prompt(number))
    with store.snapshot() as snapshot:
        assert snapshot.sessions["b"].prompt(1).tolist() == prompt
        for turn, copy in zip(snapshot.sessions["a"], snapshot.sessions["b"]):
            assert turn.to_reply() == copy.to_reply()


# ---------------------------------------------------------------- several changes


def test_changes_are_all_or_none(store: rollstore.Store):
    with store.changes() as changes:
        changes.put_reply("a", 0, make_text(1, 1), prompt=[1])
        changes.put_reply("a", 1, make_text(1, 1, seed=1))
        changes.seal("a", reward=1.0, group_index=3)
        changes.put_reply("b", 0, make_text(1, 1))
        assert len(changes) == 4
    assert store.stat().turn_count == 3
    with pytest.raises(rollstore.NotFoundError) as caught, store.changes() as changes:
        changes.put_reply("c", 0, make_text(1, 1))
        changes.release("nobody")
    assert caught.value.index == 1
    with pytest.raises(rollstore.ReplyError), store.changes() as changes:
        changes.release("b")
        changes.put_reply("c", 0, b"no JSON")
    assert store.stat().turn_count == 3
    with store.changes() as changes:
        changes.restart("b")
        changes.release("a")
    assert store.stat().session_count == 0


def test_changes_tell_which_changed_something(store: rollstore.Store):
    store.put_reply("a", 0, make_text(1, 1))
    changes = store.changes()
    changes.put_reply("a", 0, make_text(1, 1))
    changes.put_reply("a", 1, make_text(2, 1))
    changes.seal("a")
    assert changes.apply() == [False, True, True]
    assert changes.apply() == []


# ---------------------------------------------------------------- recorded sessions


def recorded(form: str) -> Any:
    path = DATA / "sessions.jsonl"
    if form == "path":
        return path
    if form == "bytes":
        return path.read_bytes()
    if form == "file":
        return io.BytesIO(path.read_bytes())
    if form == "text file":
        return io.StringIO(path.read_text())
    lines = path.read_bytes().splitlines()
    return [json.loads(line) for line in lines] if form == "dicts" else lines


@pytest.mark.parametrize("form", ["path", "bytes", "file", "text file", "lines", "dicts"])
def test_recorded_sessions_give_the_expected_samples(store: rollstore.Store, form: str):
    expected = fixtures("sessions_expected.jsonl")
    result = store.ingest(recorded(form))
    assert (result.turns, result.sealed) == (sum(e["turns"] for e in expected), len(expected))
    assert (result.unchanged, result.refused) == (0, [])
    again = store.ingest(recorded(form))
    assert (again.turns, again.sealed) == (0, 0)
    assert again.unchanged == result.turns + result.sealed
    with store.snapshot() as snapshot:
        for wanted in expected:
            sample = snapshot.sessions[wanted["session_id"]].sample()
            assert len(sample.tokens) == wanted["tokens"]
            assert sample.response_length == wanted["response_length"]
            assert sample.prompt_length == wanted["prompt_length"]
            assert (sample.status, sample.info.top_k) == (wanted["status"], wanted["k"])
            assert sample.weight_versions == wanted["weight_versions"]
            for name, digest in wanted["sha256"].items():
                assert sha256(getattr(sample, name.rsplit("_", 1)[0])) == digest


def test_lines_that_cannot_be_stored_are_told_and_the_rest_is_stored(store: rollstore.Store):
    good = (DATA / "sessions.jsonl").read_bytes().splitlines()
    first = json.loads(good[0])
    ahead = {**first, "session_id": "ahead", "turn": 3}
    lines = [good[0], b"", b"no JSON", json.dumps(ahead).encode(), *good[1:]]
    result = store.ingest(lines)
    assert [(bad.line, bad.error.kind) for bad in result.refused] == [(3, "syntax"), (4, "order")]
    assert result.turns + result.sealed == len(good)
    with pytest.raises(rollstore.ReplyError, match="line 3: ") as caught:
        store.ingest(lines, strict=True)
    assert caught.value.index == 3


def test_the_candidates_of_recorded_sessions_can_be_demanded(store: rollstore.Store):
    result = store.ingest(DATA / "sessions.jsonl", top_k=16)
    assert {bad.error.kind for bad in result.refused if bad.error.field} >= {"shape"}
    assert result.turns == 0


# ---------------------------------------------------------------- capacity


def fill(store: rollstore.Store) -> int:
    """Put sessions until the store is full; returns their number."""
    for number in range(10000):
        try:
            store.put_reply(f"fill-{number}", 0, make_text(200, 32), timeout=0)
        except rollstore.FullError:
            return number
    raise AssertionError("the store never became full")


@pytest.fixture
def small(path: Path):
    with rollstore.open(path, "x", capacity="1M") as opened:
        yield opened


def test_at_capacity_a_put_fails_after_its_timeout_and_nothing_is_lost(small: rollstore.Store):
    count = fill(small)
    assert count > 3
    with pytest.raises(TimeoutError, match="within [0-9]+ ms") as caught:
        small.put_reply("more", 0, make_text(200, 32), timeout=0.25)
    assert isinstance(caught.value, rollstore.FullError)
    assert int(str(caught.value).split("within ")[1].split()[0]) >= 250
    assert small.stat().session_count == count
    assert small.verify().faults == []
    small.release("fill-0")
    assert small.put_reply("more", 0, make_text(200, 32), timeout=0) is True


def test_a_put_that_waits_goes_on_when_another_thread_releases(small: rollstore.Store):
    fill(small)
    waiting = threading.Event()

    def release() -> None:
        waiting.wait(10)
        time.sleep(0.05)
        small.release("fill-0")

    thread = threading.Thread(target=release)
    thread.start()
    waiting.set()
    assert small.put_reply("more", 0, make_text(200, 32), timeout=None) is True
    thread.join()


def test_a_turn_larger_than_the_store_is_refused_at_once(small: rollstore.Store):
    with pytest.raises((rollstore.LimitError, rollstore.FullError)):
        small.put("s", 0, **make_arrays(20000, 32), timeout=0)


@pytest.mark.parametrize("timeout", [-1, float("nan"), "1"])
def test_a_timeout_is_seconds_or_none(store: rollstore.Store, timeout: Any):
    with pytest.raises((TypeError, ValueError), match="timeout|must be real"):
        store.put_reply("s", 0, make_text(1, 1), timeout=timeout)


# ---------------------------------------------------------------- memory


def test_writing_leaks_nothing(store: rollstore.Store):
    """Every way to put a turn and to be refused, again and again, has flat memory."""
    text, parsed, arrays = make_text(50, 8), make_reply(50, 8), make_arrays(50, 8)
    bad = make_reply(50, 8)
    meta = bad["choices"][0]["meta_info"]
    meta["output_top_logprobs_val_flat_b64"] = '"' * 5000  # written out a second time
    lines = (DATA / "sessions.jsonl").read_bytes().splitlines()[:3]
    consumer = store.consumer("c")

    def once() -> None:
        for number in range(100):
            store.put_reply("s", 0, text, prompt=[1, 2, 3], temperature=1)
            store.put_reply("s", 0, parsed, prompt=np.arange(3), replace=True)
            store.put("t", 0, **arrays, weight_version=3, finish_reason="other")
            rollstore.decode(text).to_reply()
            for refused in (bad, text[:-5], b"", "{}", {"choices": []}, 3):
                with pytest.raises((rollstore.ReplyError, TypeError)):
                    store.put_reply("u", 0, refused)
            with pytest.raises(TypeError):
                store.put("u", 0, **{**arrays, "topk_logprobs": arrays["topk_logprobs"] * 1.0j})
            with store.changes() as changes:
                changes.put_reply("v", 0, parsed)
                changes.seal("v", reward=number)
            store.ingest(lines)
            store.ingest([json.loads(line) for line in lines])
            with consumer.take(1, timeout=0) as leases:
                leases.renew()
            consumer.commit(consumer.place())
            for name in ("s", "t", "v"):
                store.release(name)
            store.snapshot().close()
            store.stat()

    once()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(20):
        once()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 2048, f"{grown} KB after 2,000 rounds"
