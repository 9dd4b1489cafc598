"""What is done wrong gives an ordinary exception that says what to do, and never a crash."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import program
from replies import make_arrays, make_text

import rollstore
from rollstore import _errors, _rollstore

# ---------------------------------------------------------------- errors


def test_every_error_code_has_its_exception():
    kinds = _rollstore._error_kinds()
    assert len(kinds) > 25
    for code, kind in kinds.items():
        with pytest.raises(rollstore.RollstoreError) as caught:
            _rollstore._raise(code, "what went wrong")
        error = caught.value
        assert type(error) is not rollstore.RollstoreError, kind
        assert (error.code, error.kind, str(error)) == (code, kind, "what went wrong")


@pytest.mark.parametrize("name", _errors.__all__)
def test_exceptions_survive_a_pickle(name: str):
    cls = getattr(rollstore, name)
    error = cls("a message", code=5, kind="k", field="f", offset=7, index=8, system=13)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert str(copy) == "a message"
    assert (copy.field, copy.offset, copy.index, copy.system) == ("f", 7, 8, 13)
    assert cls.__doc__ and name in rollstore.__all__


# ---------------------------------------------------------------- closed things


def public(thing: object) -> set[str]:
    return {name for name in dir(type(thing)) if not name.startswith("_")}


def test_a_closed_store_says_so(store: rollstore.Store, tmp_path: Path):
    consumer = store.consumer("c")
    store.put_reply("s", 0, make_text(1, 1))
    store.seal("s")
    leases = list(consumer.take())
    store.close()
    store.close()
    calls: dict[str, Callable[[], object]] = {
        "aio": lambda: asyncio.run(store.aio.put_reply("s", 0, make_text(1, 1))),
        "put_reply": lambda: store.put_reply("s", 0, make_text(1, 1)),
        "put": lambda: store.put("s", 0, **make_arrays(1, 1)),
        "seal": lambda: store.seal("s"),
        "restart": lambda: store.restart("s"),
        "release": lambda: store.release("s"),
        "release_consumed": lambda: store.release_consumed(),
        "ingest": lambda: store.ingest([]),
        "changes": lambda: store.changes().apply(),
        "snapshot": lambda: store.snapshot(),
        "wait": lambda: store.wait(timeout=0),
        "sealed": lambda: list(store.sealed(timeout=0)),
        "stat": lambda: store.stat(),
        "verify": lambda: store.verify(),
        "sync": lambda: store.sync(),
        "clear_readers": lambda: store.clear_readers(),
        "copy": lambda: store.copy(tmp_path / "copy"),
        "map_address": lambda: store.map_address,
        "map_size": lambda: store.map_size,
        "consumer": lambda: store.consumer("c"),
        "consumers": lambda: store.consumers(),
    }
    assert calls.keys() == public(store) - {"close", "closed", "mode", "path", "read_only"}
    of_consumer: dict[str, Callable[[], object]] = {
        "take": lambda: consumer.take(timeout=0),
        "acknowledge": lambda: consumer.acknowledge(leases),
        "give_back": lambda: consumer.give_back(leases),
        "renew": lambda: consumer.renew(leases),
        "place": lambda: consumer.place(),
        "commit": lambda: consumer.commit(b""),
        "resume": lambda: consumer.resume(b""),
        "stat": lambda: consumer.stat(),
        "drop": lambda: consumer.drop(),
    }
    assert of_consumer.keys() == public(consumer) - {"name", "store"}
    for call in (*calls.values(), *of_consumer.values()):
        with pytest.raises(rollstore.ClosedError, match="is closed"):
            call()
    assert store.closed and "closed" in repr(store)
    assert store.path.endswith("store")


def test_a_closed_snapshot_says_so(store: rollstore.Store):
    store.put_reply("s", 0, make_text(3, 2), prompt=[1])
    snapshot = store.snapshot()
    session = snapshot.sessions["s"]
    turn = session[0]
    sessions = snapshot.sessions
    snapshot.close()
    calls: list[Callable[[], object]] = [
        lambda: sessions["s"],
        lambda: list(sessions),
        lambda: len(sessions),
        lambda: "s" in sessions,
        lambda: session[0],
        lambda: list(session),
        lambda: session.sample(),
        lambda: session.weight_versions,
        lambda: session.prompt(0),
        lambda: turn.topk_ids,
        lambda: turn.prompt_ids,
        lambda: turn.weight_version,
        lambda: turn.tensor("topk_ids"),
        lambda: turn.to_reply(),
        lambda: store.put_reply("t", 0, turn),
        lambda: list(snapshot.ready()),
        lambda: snapshot.batch(["s"]),
        lambda: snapshot.consumers(),
        lambda: snapshot.__enter__(),
    ]
    for call in calls:
        with pytest.raises(rollstore.ClosedError, match="the snapshot is closed"):
            call()
    assert (session.turn_count, turn.n, turn.top_k) == (1, 3, 2)  # what needs no memory stays
    assert "closed" in repr(snapshot)


def test_a_snapshot_that_was_left_open_in_a_loop_ends_with_it(store: rollstore.Store):
    store.put_reply("s", 0, make_text(3, 2))
    for _ in range(2000):  # more than there are reader slots
        store.snapshot().sessions["s"][0].topk_ids  # noqa: B018
    gc.collect()
    assert store.stat().readers_used == 0


def test_reader_slots_run_out_with_an_ordinary_error(path: Path):
    with rollstore.open(path, "x", readers=8) as store:
        opened = []
        with pytest.raises(rollstore.ReadersError, match="close snapshots"):
            for _ in range(1000):
                opened.append(store.snapshot())
        for snapshot in opened:
            snapshot.close()
        store.snapshot().close()


def test_a_store_can_be_referred_to_weakly(path: Path):
    store = rollstore.open(path, "x")
    reference = weakref.ref(store)
    del store
    gc.collect()
    assert reference() is None
    rollstore.open(path, "r").close()


# ---------------------------------------------------------------- opening


@pytest.mark.parametrize("mode", ["r", "w"])
def test_what_is_no_store_is_not_opened(tmp_path: Path, mode: Any):
    with pytest.raises(FileNotFoundError):
        rollstore.open(tmp_path / "nothing", mode)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(rollstore.NotStoreError):
        rollstore.open(empty, mode)
    for contents in (b"", b"hello", os.urandom(4096), os.urandom(100_000), bytes(1 << 20)):
        folder = tmp_path / f"odd-{len(contents)}"
        folder.mkdir()
        (folder / "data.mdb").write_bytes(contents)
        with pytest.raises(rollstore.RollstoreError):
            rollstore.open(folder, mode)
    file = tmp_path / "file"
    file.write_bytes(b"a file")
    with pytest.raises(rollstore.RollstoreError):
        rollstore.open(file, mode)


def test_a_store_is_created_only_when_asked(path: Path):
    with pytest.raises(rollstore.NotStoreError):
        rollstore.open(path, "w")
    rollstore.open(path, "c", capacity="2MiB", durability="interval", interval_ms=50).close()
    with pytest.raises(rollstore.ExistsError):
        rollstore.open(path, "x")
    with rollstore.open(path, "c", capacity="64M") as store:  # an existing one keeps its settings
        stat = store.stat()
        assert (stat.capacity_size, stat.durability, stat.interval) == (2 << 20, "interval", 0.05)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"mode": "a"}, ValueError),
        ({"durability": "none"}, ValueError),
        ({"capacity": 0}, ValueError),
        ({"capacity": -5}, ValueError),
        ({"capacity": "lots"}, ValueError),
        ({"capacity": "1K"}, rollstore.ArgumentError),
        ({"capacity": 1 << 62}, rollstore.RollstoreError),
        ({"capacity": "1e400"}, ValueError),
    ],
)
def test_settings_are_checked(path: Path, options: dict[str, Any], error: type[Exception]):
    with pytest.raises(error):
        rollstore.open(path, **{"mode": "c", **options})
    assert not path.exists()


def test_a_path_may_be_of_any_kind(path: Path, monkeypatch: pytest.MonkeyPatch):
    rollstore.open(str(path), "x").close()
    monkeypatch.chdir(path.parent)
    with rollstore.open("store", "r") as store:
        assert store.path == str(path)
    with pytest.raises(TypeError):
        rollstore.open(3)  # type: ignore[arg-type]


def test_a_path_without_permission_is_refused(path: Path):
    if os.geteuid() == 0:
        code = (
            "import os, sys, rollstore; os.setuid(65534); rollstore.open(sys.argv[1], sys.argv[2])"
        )
        rollstore.open(path, "x").close()
        path.parent.chmod(0o755)
        for mode in ("r", "w"):
            done = program(code, path, mode)
            assert "AccessError" in done.stderr, done.stderr
    else:
        rollstore.open(path, "x").close()
        path.chmod(0)
        with pytest.raises(PermissionError):
            rollstore.open(path, "r")
        path.chmod(0o700)


def test_a_cut_file_is_noticed(path: Path):
    with rollstore.open(path, "x") as store:
        for number in range(20):
            store.put_reply(f"s{number}", 0, make_text(100, 8))
    os.truncate(path / "data.mdb", 20000)
    with pytest.raises(rollstore.CorruptError):
        rollstore.open(path, "r")


def test_a_store_that_was_deleted_says_so(store: rollstore.Store, path: Path):
    store.put_reply("s", 0, make_text(3, 2))
    snapshot = store.snapshot()
    shutil.rmtree(path)
    with pytest.raises(rollstore.GoneError, match="deleted"):
        store.put_reply("t", 0, make_text(3, 2))
    with pytest.raises(rollstore.GoneError):
        store.wait(timeout=None)
    ids = snapshot.sessions["s"][0].topk_ids
    assert (ids == make_arrays(3, 2)["topk_ids"]).all()
    del ids
    snapshot.close()


def test_writing_to_a_store_that_was_opened_to_read_says_how_to_open_it(path: Path):
    rollstore.open(path, "x").close()
    with rollstore.open(path) as reader, pytest.raises(rollstore.ReadOnlyError, match='mode "w"'):
        reader.put_reply("s", 0, make_text(1, 1))


def test_reading_and_writing_at_a_time_is_refused_in_one_process(path: Path):
    rollstore.open(path, "x").close()
    with rollstore.open(path, "r"), pytest.raises(rollstore.BusyError, match="read-only"):
        rollstore.open(path, "w")


# ---------------------------------------------------------------- odd arguments


def test_what_is_made_inside_cannot_be_made_outside():
    for cls in (_rollstore.Turn, _rollstore.Plan, _rollstore.View):
        with pytest.raises(TypeError):
            cls()
    with pytest.raises(TypeError):
        _rollstore.Snapshot(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        _rollstore.Store()  # type: ignore[call-arg]


def test_odd_changes_are_refused(store: rollstore.Store):
    turn = rollstore.decode(make_text(2, 2))
    held = turn.token_ids
    odd: list[tuple[Any, ...]] = [
        (),
        ("put",),
        ("nothing", "s"),
        ("put", "s", 0, "turn", False),
        ("put", "s", -1, turn, False),
        ("seal", "s", "odd", None, None, None, False),
        ("release", 3, False),
    ]
    for change in odd:
        with pytest.raises((TypeError, ValueError)):
            store._apply((change,))
    with pytest.raises(rollstore.BusyError, match="arrays are out"):
        store._apply((("put", "s", 0, turn, False),))
    del held
    with pytest.raises(rollstore.BusyError):
        store._apply((("put", "s", 0, turn, False), ("put", "t", 0, turn, False)))
    assert store._apply((("put", "s", 0, turn, False),)) == [True]
    assert store.stat().turn_count == 1


def test_only_numpy_arrays_become_tensors(torch: Any):
    with pytest.raises(TypeError):
        rollstore.as_tensor([1, 2])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="dtype"):
        rollstore.as_tensor(np.zeros(3, complex))
    with pytest.raises(ValueError, match="byte order"):
        rollstore.as_tensor(np.zeros(3, ">i4"))
    with pytest.raises(ValueError, match="aligned"):
        rollstore.as_tensor(np.zeros(3, [("a", "<i4"), ("b", "i1")])["a"][::1].view())
    empty = rollstore.as_tensor(np.zeros((0, 3), np.float32))
    assert tuple(empty.shape) == (0, 3)
    assert torch.equal(rollstore.as_tensor(np.arange(6)[::-2].copy()), torch.tensor([5, 3, 1]))
