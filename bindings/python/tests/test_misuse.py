"""What is done wrong gives an ordinary exception that says what to do, and never a crash."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replies import make_arrays, make_reply, make_text

import rollstore
from rollstore import _errors, _rollstore

SPAWN = multiprocessing.get_context("spawn")
FORK = multiprocessing.get_context("fork")


def program(code: str, *args: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own, with the tests' modules."""
    tests = str(Path(__file__).parent)
    paths = os.pathsep.join([tests, *filter(None, sys.path)])
    return subprocess.run(
        [sys.executable, "-B", "-c", code, *map(str, args)],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
        **options,
    )


def in_child(work: Callable[[], None]) -> None:
    """Run `work` in a forked child; it must come to its end there."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException as error:
            print(f"in the child: {error!r}", file=sys.stderr)
        finally:
            sys.stderr.flush()
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


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


# ---------------------------------------------------------------- fork, spawn, pickle


def test_a_forked_child_opens_the_store_again_by_itself(store: rollstore.Store):
    store.put_reply("parent", 0, make_text(3, 2))
    consumer = store.consumer("c")

    def work() -> None:
        assert store.put_reply("child", 0, make_text(3, 2))
        with store.snapshot() as snapshot:
            assert set(snapshot.sessions) == {"parent", "child"}
        store.seal("child")
        assert store.wait(timeout=5) == 1
        assert consumer.take(1, timeout=5)[0].session_id == "child"
        store.close()

    in_child(work)
    with store.snapshot() as snapshot:
        assert set(snapshot.sessions) == {"parent", "child"}
    assert store.put_reply("after", 0, make_text(3, 2))


def test_a_snapshot_of_the_parent_is_refused_in_the_child(store: rollstore.Store):
    store.put_reply("s", 0, make_text(300, 2))
    snapshot = store.snapshot()
    session = snapshot.sessions["s"]
    turn = session[0]
    arrays = [turn.topk_ids]
    plan = snapshot._measure(["s"])

    def work() -> None:
        calls: list[Callable[[], object]] = [
            lambda: snapshot.sessions["s"],
            lambda: session[0],
            lambda: turn.topk_ids,
            lambda: plan.pack(),
            lambda: snapshot.batch(["s"]),
        ]
        for call in calls:
            with pytest.raises(rollstore.ForkedError, match="open a new one"):
                call()
        assert (arrays[0] == make_arrays(300, 2)["topk_ids"]).all()
        with store.snapshot() as own:
            assert own.sessions["s"][0].n == 300
        snapshot.close()
        gc.collect()

    in_child(work)
    assert turn.n == 300
    assert session[0].topk_ids.shape == (300, 2)
    arrays.clear()
    snapshot.close()
    assert store.stat().readers_used == 0


def test_forking_while_other_threads_write_and_read(store: rollstore.Store):
    stop = threading.Event()
    failures: list[BaseException] = []

    def write(name: str) -> None:
        try:
            while not stop.is_set():
                store.put_reply(name, 0, make_text(20, 4))
                store.release(name)
        except BaseException as error:
            failures.append(error)

    def read() -> None:
        try:
            while not stop.is_set():
                with store.snapshot() as snapshot:
                    snapshot.batch(list(snapshot.sessions))
                with pytest.raises(rollstore.WaitTimeoutError):
                    store.wait(timeout=0.001)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(f"t{n}",)) for n in range(2)]
    threads.append(threading.Thread(target=read))
    for thread in threads:
        thread.start()

    def work() -> None:
        store.put_reply(f"child-{os.getpid()}", 0, make_text(5, 2))
        with store.snapshot() as snapshot:
            assert len(snapshot.sessions) > 0
        store.close()

    for _ in range(10):
        in_child(work)
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert store.stat().session_count == 10
    assert store.verify().faults == []


def put_in_worker(store: rollstore.Store, number: int) -> int:
    store.put_reply(f"w{number}", 0, make_text(5, 2, seed=number))
    with store.snapshot() as snapshot:
        return snapshot.sessions[f"w{number}"].turn_count


@pytest.mark.parametrize("context", [SPAWN, FORK], ids=["spawn", "fork"])
def test_a_store_goes_to_worker_processes(store: rollstore.Store, context: Any):
    with context.Pool(2) as pool:
        assert pool.starmap(put_in_worker, [(store, n) for n in range(8)], chunksize=1) == [1] * 8
    with store.snapshot() as snapshot:
        assert set(snapshot.sessions) == {f"w{n}" for n in range(8)}


def test_a_pickled_store_is_path_and_options(store: rollstore.Store, path: Path):
    store.put_reply("s", 0, make_text(1, 1))
    pickled = pickle.dumps(store)
    assert len(pickled) < 500
    with pickle.loads(pickled) as copy:
        assert (copy.path, copy.mode) == (store.path, "w")
        copy.put_reply("t", 0, make_text(1, 1))
    store.close()
    with rollstore.open(path, "r", trust=True) as reader:
        with pickle.loads(pickle.dumps(reader)) as copy:
            assert copy.mode == "r" and copy._flags == reader._flags
    shutil.rmtree(path)
    with pytest.raises(rollstore.NotStoreError):  # it never creates one
        pickle.loads(pickled)


def test_what_belongs_to_a_process_is_not_pickled(store: rollstore.Store):
    store.put_reply("s", 0, make_text(3, 2))
    with store.snapshot() as snapshot:
        session = snapshot.sessions["s"]
        for thing in (snapshot, session, session[0], snapshot.sessions):
            with pytest.raises(TypeError):
                pickle.dumps(thing)
        info = pickle.loads(pickle.dumps(session.info))
        assert info == session.info
        ids = pickle.loads(pickle.dumps(session[0].topk_ids))
        assert ids.flags.owndata


# ---------------------------------------------------------------- threads and signals


def test_closing_while_other_threads_wait_ends_their_calls(path: Path):
    store = rollstore.open(path, "x", capacity="1M")
    number = 0
    with pytest.raises(rollstore.FullError):
        while True:
            store.put_reply(f"s{number}", 0, make_text(200, 32), timeout=0)
            number += 1
    store.consumer("c")
    ended: list[str] = []

    def wait(call: Callable[[], object], name: str) -> None:
        try:
            call()
        except rollstore.ClosedError:
            ended.append(name)

    calls: dict[str, Callable[[], object]] = {
        "put": lambda: store.put_reply("more", 0, make_text(200, 32), timeout=None),
        "wait": lambda: store.wait(timeout=None),
        "take": lambda: store._consumer_take("c", 1, 0, None),
    }
    threads = [threading.Thread(target=wait, args=(call, name)) for name, call in calls.items()]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    store.close()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert sorted(ended) == ["put", "take", "wait"]


def test_closing_while_other_threads_put(path: Path):
    for _ in range(5):
        shutil.rmtree(path, ignore_errors=True)
        store = rollstore.open(path, "x")
        failures: list[BaseException] = []

        def put(name: str, store: rollstore.Store, failures: list[BaseException]) -> None:
            text = make_text(50, 8)
            try:
                for number in range(10**6):
                    store.put_reply(f"{name}-{number}", 0, text)
            except rollstore.ClosedError:
                pass
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=put, args=(f"t{n}", store, failures)) for n in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.02)
        store.close()
        for thread in threads:
            thread.join(30)
        assert failures == []
        with rollstore.open(path, "r") as again:
            assert again.verify().faults == []


def test_closing_with_a_snapshot_open_is_refused_and_changes_nothing(store: rollstore.Store):
    with store.snapshot() as snapshot:
        with pytest.raises(rollstore.BusyError, match="1 open snapshot"):
            store.close()
        assert not store.closed
        store.put_reply("s", 0, make_text(1, 1))
        assert list(snapshot.sessions) == []
    store.close()


def test_threads_hammer_one_store(store: rollstore.Store):
    failures: list[BaseException] = []

    def work(name: str) -> None:
        try:
            for number in range(60):
                session = f"{name}-{number % 7}"
                reply: Any = make_text(30, 8) if number % 2 else make_reply(30, 8)
                store.put_reply(session, 0, reply, prompt=[1, 2])
                with store.snapshot() as snapshot:
                    turn = snapshot.sessions[session][0]
                    assert (turn.topk_ids == make_arrays(30, 8)["topk_ids"]).all()
                    snapshot.sessions[session].sample()
                store.seal(session)
                store.release(session)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(f"t{n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert store.stat().session_count == 0


def test_a_dict_that_another_thread_changes_does_no_harm(store: rollstore.Store):
    reply = make_reply(200, 4)
    meta = reply["choices"][0]["meta_info"]
    whole = list(meta["output_token_logprobs"])
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            meta["output_token_logprobs"] = []
            meta["output_token_logprobs"] = list(whole)
            meta["output_token_logprobs"].clear()
            meta.pop("weight_version", None)
            meta["weight_version"] = "x" * 100

    thread = threading.Thread(target=change)
    thread.start()
    for _ in range(300):
        try:
            rollstore.decode(reply)
        except rollstore.ReplyError:
            pass
    stop.set()
    thread.join()


WAITS = {
    "wait": "store.wait()",
    "sealed": "next(store.sealed())",
    "take": "store.consumer('c').take()",
    "put": "[store.put_reply(f's{n}', 0, make_text(200, 32), timeout=None) for n in range(9999)]",
}


@pytest.mark.parametrize("call", WAITS)
def test_a_waiting_call_is_interrupted_by_the_keyboard(path: Path, call: str):
    code = f"""
import signal, sys, threading, os, rollstore
from replies import make_text
store = rollstore.open(sys.argv[1], "x", capacity="1M")
threading.Timer(0.6, os.kill, [os.getpid(), signal.SIGINT]).start()
try:
    {WAITS[call]}
except KeyboardInterrupt:
    print("interrupted", store.stat().turn_count >= 0)
"""
    done = program(code, path)
    assert done.stdout == "interrupted True\n", done.stderr


def test_a_signal_handlers_exception_comes_out_of_the_wait(store: rollstore.Store):
    class Rang(Exception):
        pass

    def ring(*_: object) -> None:
        raise Rang

    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Rang):
            store.wait()
    finally:
        signal.signal(signal.SIGALRM, before)
    store.put_reply("s", 0, make_text(1, 1))


# ---------------------------------------------------------------- the interpreter's end


def test_the_interpreter_ends_with_everything_open(path: Path):
    code = """
import importlib.util, sys, threading, time, rollstore
from replies import make_text
store = rollstore.open(sys.argv[1], "x", durability="interval")
store.put_reply("s", 0, make_text(50, 4), prompt=[1])
snapshot = store.snapshot()
turn = snapshot.sessions["s"][0]
ids, view = turn.topk_ids, memoryview(turn.token_ids)
tensor = turn.tensor("topk_logprobs") if importlib.util.find_spec("torch") else None
capsule = turn.topk_ids.base.__dlpack__()
changes = store.changes()
changes.put_reply("t", 0, make_text(5, 4))
def work(call):
    while True:
        call()
for call in (store.wait, lambda: store.put_reply("s", 0, make_text(50, 4)),
             lambda: snapshot.batch(["s"]), lambda: rollstore.decode(make_text(50, 4))):
    threading.Thread(target=work, args=(call,), daemon=True).start()
time.sleep(0.1)
sys.stuck = (store, snapshot, ids, tensor, view, capsule, changes)
print("end")
"""
    for _ in range(3):
        shutil.rmtree(path, ignore_errors=True)
        done = program(code, path)
        assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr
        with rollstore.open(path, "w") as store:
            store.clear_readers()
            assert store.stat().reader_pid in (0, os.getpid())


def test_a_sub_interpreter_is_refused():
    code = """
import _xxsubinterpreters as interpreters
there = interpreters.create()
interpreters.run_string(there, '''
import sys
try:
    import rollstore
except ImportError as error:
    print("refused:", error)
''')
"""
    if sys.version_info >= (3, 13):
        code = code.replace("_xxsubinterpreters", "_interpreters")
    done = program(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("refused:"), done.stdout + done.stderr


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
