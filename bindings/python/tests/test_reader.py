"""Snapshots, sessions and turns: what they hold, where it lies, and how long it lives."""

from __future__ import annotations

import gc
import resource
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replies import ARRAYS, DATA, make_arrays, make_reply, make_text

import rollstore


@pytest.fixture
def recorded(store: rollstore.Store) -> rollstore.Store:
    store.ingest(DATA / "sessions.jsonl")
    store.put_reply("open/1", 0, make_text(40, 8))
    store.put_reply("open/2", 0, make_text(3, 8))
    return store


# ---------------------------------------------------------------- sessions


def test_sessions_are_a_mapping_in_ready_order(recorded: rollstore.Store):
    with recorded.snapshot() as snapshot:
        sessions = snapshot.sessions
        assert len(sessions) == 26
        ids = list(sessions)
        assert ids[:24] == [session.id for session in snapshot.ready()]
        assert set(ids[24:]) == {"open/1", "open/2"}
        assert [s.sequence for s in snapshot.ready()] == list(range(1, 25))
        assert [s.sequence for s in snapshot.ready(20)] == [21, 22, 23, 24]
        assert "open/1" in sessions and b"open/1" in sessions
        assert "nobody" not in sessions and 3 not in sessions
        assert sessions.get("nobody") is None
        assert [session.id for session in sessions.values()] == ids
        assert dict(sessions.items()).keys() == set(ids)
        with pytest.raises(KeyError, match="nobody"):
            sessions["nobody"]
        assert {session.id for session in snapshot.open_sessions()} == {"open/1", "open/2"}


def test_a_session_is_a_sequence_of_its_turns(recorded: rollstore.Store):
    with recorded.snapshot() as snapshot:
        session = max(snapshot.ready(), key=len)
        assert len(session) == session.turn_count > 2
        assert [turn.index for turn in session] == list(range(len(session)))
        assert session[-1].index == len(session) - 1
        assert [turn.index for turn in session[1:3]] == [1, 2]
        assert [turn.index for turn in reversed(session)] == list(range(len(session)))[::-1]
        for outside in (len(session), -len(session) - 1):
            with pytest.raises(IndexError, match="there is no turn"):
                session[outside]


def test_a_session_says_what_is_known_of_it(recorded: rollstore.Store):
    before = time.time()
    recorded.put("s", 0, **make_arrays(5, 3), prompt=[1, 2], weight_version=4)
    recorded.put("s", 1, **make_arrays(7, 2), weight_version=9)
    recorded.seal("s", reward=1.5, group_index=7, index=8)
    with recorded.snapshot() as snapshot:
        s = snapshot.sessions["s"]
        assert (s.state, s.status, s.reward, s.group_index, s.index) == (
            "sealed",
            "completed",
            1.5,
            7,
            8,
        )
        assert (s.turn_count, s.top_k, s.generated_count) == (2, 3, 12)
        assert (s.weight_version_min, s.weight_version_max) == (4, 9)
        assert s.weight_versions == ["4", "9"]
        assert before - 1 < s.created <= s.changed < time.time() + 1
        assert snapshot.session_by_key(s.key).id == "s"
        assert snapshot.session_by_sequence(s.sequence).id == "s"
        open_one = snapshot.sessions["open/1"]
        assert (open_one.state, open_one.status, open_one.sequence) == ("open", None, 0)
        assert (open_one.reward, open_one.group_index, open_one.index) == (None, None, None)
        for session in snapshot.sessions.values():
            assert snapshot.session_by_key(session.key).info == session.info
        with pytest.raises(rollstore.NotFoundError):
            snapshot.session_by_key(bytes(16))
        with pytest.raises(rollstore.NotFoundError):
            snapshot.session_by_key(b"\xff" * 16)
        for sequence in (0, -1, 1000):
            with pytest.raises(rollstore.NotFoundError):
                snapshot.session_by_sequence(sequence)


def test_a_snapshot_does_not_change(store: rollstore.Store):
    store.put_reply("a", 0, make_text(5, 4))
    with store.snapshot() as snapshot:
        ids = snapshot.sessions["a"][0].topk_ids
        before = ids.copy()
        store.put_reply("b", 0, make_text(5, 4))
        store.release("a")
        for number in range(50):
            store.put_reply(f"new-{number}", 0, make_text(50, 8, seed=number))
        assert list(snapshot.sessions) == ["a"]
        assert (ids == before).all()
        del ids
    with store.snapshot() as later:
        assert "a" not in later.sessions
        assert later.id > snapshot.id


def test_the_whole_prompt_is_put_together_again(recorded: rollstore.Store):
    import json

    asked: dict[str, list[list[int]]] = {}
    for line in (DATA / "sessions.jsonl").read_bytes().splitlines():
        parsed = json.loads(line)
        if "request" in parsed:
            asked.setdefault(parsed["session_id"], []).append(parsed["request"]["input_ids"])
    with recorded.snapshot() as snapshot:
        for name, prompts in asked.items():
            session = snapshot.sessions[name]
            for turn, prompt in enumerate(prompts):
                assert session.prompt(turn).tolist() == prompt
            assert session.prompt(-1).tolist() == prompts[-1]


# ---------------------------------------------------------------- arrays


def arrays_of(turn: rollstore.Turn) -> dict[str, np.ndarray]:
    names = (*ARRAYS, "prompt_ids", "widths")
    found = {name: getattr(turn, name) for name in names}
    return {name: array for name, array in found.items() if array is not None}


def test_arrays_lie_in_the_map_and_are_read_only(recorded: rollstore.Store):
    begin, size = recorded.map_address, recorded.map_size
    seen = 0
    with recorded.snapshot() as snapshot:
        for session in snapshot.sessions.values():
            for turn in session:
                for name, array in arrays_of(turn).items():
                    address = array.__array_interface__["data"][0]
                    assert begin <= address <= address + array.nbytes <= begin + size, name
                    assert address % 64 == 0
                    assert not array.flags.writeable and not array.flags.owndata
                    assert array.flags.c_contiguous
                    with pytest.raises(ValueError, match="read-only|WRITEABLE"):
                        array[...] = 0
                    with pytest.raises(ValueError, match="WRITEABLE"):
                        array.flags.writeable = True
                    seen += 1
        del array
    assert seen > 100


def test_arrays_have_their_shapes_and_dtypes(store: rollstore.Store):
    reply = make_reply(6, 4)
    store.put_reply("s", 0, reply, prompt=[9, 8])
    with store.snapshot() as snapshot:
        turn = snapshot.sessions["s"][0]
        shapes = {name: (array.dtype, array.shape) for name, array in arrays_of(turn).items()}
        assert shapes == {
            "token_ids": (np.int32, (6,)),
            "token_logprobs": (np.float32, (6,)),
            "topk_ids": (np.int32, (6, 4)),
            "topk_logprobs": (np.float32, (6, 4)),
            "prompt_ids": (np.int32, (2,)),
        }
        assert len(turn) == turn.n == 6
        assert turn.widths is None


def test_rows_that_differ_in_length_have_widths(store: rollstore.Store):
    arrays = make_arrays(4, 3)
    arrays["topk_ids"][0] = -1
    arrays["topk_logprobs"][0] = -np.inf
    arrays["topk_ids"][2, 1:] = -1
    arrays["topk_logprobs"][2, 1:] = -np.inf
    store.put("s", 0, **arrays)
    with store.snapshot() as snapshot:
        turn = snapshot.sessions["s"][0]
        widths = turn.widths
        assert widths is not None and widths.tolist() == [0, 3, 1, 3]
        assert turn.null_prefix == 1
        del widths


def test_closing_with_an_array_out_is_an_error(store: rollstore.Store):
    store.put_reply("s", 0, make_text(20, 4))
    snapshot = store.snapshot()
    whole = snapshot.sessions["s"][0].topk_ids
    part = whole[3:7, ::2]
    column = part.T[0]
    assert snapshot.arrays == 1
    for held in ("whole", "part", "column"):
        with pytest.raises(BufferError, match="array"):
            snapshot.close()
        if held == "whole":
            del whole
        elif held == "part":
            del part
        else:
            assert column.base is not None
            del column
    assert snapshot.arrays == 0
    snapshot.close()
    snapshot.close()
    assert snapshot.closed


@pytest.mark.parametrize("make", ["memoryview", "tensor", "dlpack", "base", "fortran view"])
def test_whatever_reaches_the_memory_keeps_the_snapshot(
    store: rollstore.Store, make: str, request: pytest.FixtureRequest
):
    if make == "tensor":
        request.getfixturevalue("torch")
    store.put_reply("s", 0, make_text(20, 4))
    snapshot = store.snapshot()
    turn = snapshot.sessions["s"][0]
    before = turn.topk_ids.copy()
    held = {
        "memoryview": lambda: memoryview(turn.topk_ids),
        "tensor": lambda: turn.tensor("topk_ids"),
        "dlpack": lambda: turn.topk_ids.base.__dlpack__(),
        "base": lambda: memoryview(turn.topk_ids.base),
        "fortran view": lambda: turn.topk_ids.T.reshape(4, 20),
    }[make]()
    with pytest.raises(BufferError):
        snapshot.close()
    if make in ("memoryview", "base", "tensor"):
        assert (np.asarray(held) == before).all()
    del held
    snapshot.close()


def test_a_damaged_record_is_refused_at_its_first_reading(store: rollstore.Store, path: Path):
    store.put_reply("s", 0, make_text(20, 4))
    with store.snapshot() as snapshot:
        ids = snapshot.sessions["s"][0].token_ids.tobytes()
    store.close()
    data = (path / "data.mdb").read_bytes()
    assert ids in data
    (path / "data.mdb").write_bytes(data.replace(ids, np.int32(-5).tobytes() + ids[4:]))
    with rollstore.open(path, "r") as reader, reader.snapshot() as snapshot:
        with pytest.raises(rollstore.CorruptError) as info:
            snapshot.sessions["s"][0]
        assert info.value.field == "token_ids"
        with pytest.raises(rollstore.CorruptError):
            snapshot.batch(["s"])
    with rollstore.open(path, "r", trust=True) as reader, reader.snapshot() as snapshot:
        assert snapshot.sessions["s"][0].token_ids[0] == -5


def test_arrays_outlive_every_other_reference(store: rollstore.Store):
    store.put_reply("s", 0, make_text(20, 4))
    ids = store.snapshot().sessions["s"][0].topk_ids
    gc.collect()
    assert (ids == make_arrays(20, 4)["topk_ids"]).all()
    with pytest.raises(rollstore.BusyError, match="1 open snapshot"):
        store.close()
    assert not store.closed
    del ids
    assert store.stat().readers_used == 0


def test_an_exception_is_not_hidden_by_arrays_that_are_out(store: rollstore.Store):
    store.put_reply("s", 0, make_text(20, 4))
    with pytest.raises(ZeroDivisionError), store.snapshot() as snapshot:
        ids = snapshot.sessions["s"][0].topk_ids
        1 / 0  # noqa: B018
    assert not snapshot.closed
    assert ids.shape == (20, 4)
    del ids
    assert snapshot.closed


def test_tensors_share_the_memory_without_a_warning(store: rollstore.Store, torch: Any):
    store.put_reply("s", 0, make_text(20, 4), prompt=[1, 2, 3])
    with store.snapshot() as snapshot, warnings.catch_warnings():
        warnings.simplefilter("error")
        turn = snapshot.sessions["s"][0]
        for name, array in arrays_of(turn).items():
            tensor = turn.tensor(name)
            assert tensor.data_ptr() == array.__array_interface__["data"][0]
            assert tuple(tensor.shape) == array.shape
            assert str(tensor.dtype) == f"torch.{array.dtype}"
            assert torch.equal(tensor, torch.from_numpy(array.copy()))
            assert torch.from_dlpack(array.base).data_ptr() == tensor.data_ptr()
        part = rollstore.as_tensor(turn.topk_logprobs[2:9:3, 1:])
        assert part.stride() == (12, 1)
        assert (part.numpy() == turn.topk_logprobs[2:9:3, 1:]).all()
        with pytest.raises(AttributeError):
            turn.tensor("nothing")
        del array, tensor, part


def test_a_tensor_outlives_its_turn(store: rollstore.Store, torch: Any):
    store.put_reply("s", 0, make_text(20, 4))
    snapshot = store.snapshot()
    tensor = snapshot.sessions["s"][0].tensor("topk_ids")[5:]
    del snapshot
    gc.collect()
    assert (tensor.numpy() == make_arrays(20, 4)["topk_ids"][5:]).all()
    del tensor
    assert store.stat().readers_used == 0


@pytest.mark.parametrize("kind", ["arrays", "tensors"])
def test_views_leak_nothing(store: rollstore.Store, kind: str, request: pytest.FixtureRequest):
    """A loop that opens, reads 10,000 arrays and closes, again and again, has flat memory."""
    store.put_reply("s", 0, make_text(20, 4), prompt=[1])
    if kind == "tensors":
        request.getfixturevalue("torch")

    def once() -> None:
        with store.snapshot() as snapshot:
            session = snapshot.sessions["s"]
            for _ in range(2000):
                for turn in session:
                    for name in (*ARRAYS, "prompt_ids"):
                        turn.tensor(name) if kind == "tensors" else getattr(turn, name)
            assert snapshot.arrays == 0

    once()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    gc.collect()
    blocks = len(gc.get_objects())
    for _ in range(20):
        once()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 2048, f"{grown} KB after 200,000 arrays"  # a leak of 20 bytes each is 4 MB
    gc.collect()
    assert len(gc.get_objects()) - blocks < 100
    assert store.stat().readers_used == 0


def test_a_turn_becomes_a_reply_again(recorded: rollstore.Store):
    with recorded.snapshot() as snapshot:
        for session in snapshot.sessions.values():
            for turn in session:
                again = rollstore.decode(turn.to_reply(), mode=turn.mode, top_k=turn.top_k)
                for name in ARRAYS:
                    assert getattr(again, name).tobytes() == getattr(turn, name).tobytes()
                assert again.weight_version == turn.weight_version
                assert again.finish_reason == turn.finish_reason


# ---------------------------------------------------------------- waiting


def test_waiting_ends_when_a_session_is_sealed(store: rollstore.Store):
    store.put_reply("s", 0, make_text(1, 1))
    with pytest.raises(TimeoutError, match="within [0-9]+ ms"):
        store.wait(timeout=0.12)
    thread = threading.Timer(0.05, store.seal, ["s"])
    thread.start()
    assert store.wait() == 1
    thread.join()
    assert store.wait(0, timeout=0) == 1
    with pytest.raises(rollstore.WaitTimeoutError):
        store.wait(1, timeout=0)


def test_sealed_sessions_are_iterated_and_waited_for(store: rollstore.Store):
    def write() -> None:
        for number in range(300):
            store.put_reply(f"s{number}", 0, make_text(1, 1))
            store.seal(f"s{number}", reward=number)

    thread = threading.Thread(target=write)
    thread.start()
    seen = []
    for info in store.sealed(timeout=None):
        seen.append((info.id, info.reward, info.sequence))
        if len(seen) == 300:
            break
    thread.join()
    assert seen == [(f"s{n}", float(n), n + 1) for n in range(300)]
    assert [info.sequence for info in store.sealed(298, timeout=0)] == [299, 300]


def test_sealed_sessions_that_were_released_are_passed_over(store: rollstore.Store):
    for name in ("a", "b", "c"):
        store.put_reply(name, 0, make_text(1, 1))
        store.seal(name)
    store.release("a")
    store.release("c")
    assert [info.id for info in store.sealed(timeout=0)] == ["b"]


# ---------------------------------------------------------------- looking after a store


def test_stat_counts(store: rollstore.Store):
    store.put_reply("a", 0, make_text(10, 4))
    store.put_reply("b", 0, make_text(5, 4))
    store.seal("a")
    with store.snapshot():
        stat = store.stat()
        assert (stat.session_count, stat.open_count, stat.sealed_count) == (2, 1, 1)
        assert (stat.turn_count, stat.generated_count, stat.newest_sequence) == (2, 15, 1)
        assert (stat.readers_used, stat.reader_age) == (1, 0)
        assert stat.reader_pid != 0
    assert (stat.capacity_size, stat.durability) == (32 << 20, "memory")
    assert stat.used_size + stat.free_size == stat.map_size == store.map_size
    store.release("a")
    assert store.stat().released_count == 1


def test_verify_reads_everything(recorded: rollstore.Store):
    result = recorded.verify()
    stat = recorded.stat()
    assert (result.sessions, result.turns) == (stat.session_count, stat.turn_count)
    assert result.bytes == stat.value_size
    assert result.faults == []


def test_verify_tells_each_damaged_turn(store: rollstore.Store, path: Path):
    store.put_reply("s", 0, make_text(200, 8))
    with store.snapshot() as snapshot:
        ids = snapshot.sessions["s"][0].topk_ids
        at = ids.__array_interface__["data"][0] - store.map_address + 40
        del ids
    store.close()
    with (path / "data.mdb").open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    with rollstore.open(path, "r") as damaged:
        faults = damaged.verify().faults
        assert faults and '"s"' in " ".join(faults)


def test_copy_is_a_store_of_its_own(recorded: rollstore.Store, path: Path):
    copy = path.with_name("copy")
    recorded.copy(copy, capacity=16 << 20)
    with pytest.raises(FileExistsError):
        recorded.copy(copy)
    with rollstore.open(copy, "r") as opened, opened.snapshot() as snapshot:
        assert len(snapshot.sessions) == 26
        assert opened.stat().capacity_size == 16 << 20
        assert opened.verify().faults == []


def test_two_handles_of_a_store_share_their_contents(store: rollstore.Store, path: Path):
    store.put_reply("s", 0, make_text(1, 1))
    with rollstore.open(path, "r") as other, other.snapshot() as snapshot:
        assert list(snapshot.sessions) == ["s"]
        assert other.read_only and other.mode == "r"
        with pytest.raises(PermissionError):
            other.put_reply("t", 0, make_text(1, 1))
