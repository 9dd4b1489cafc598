"""Processes, threads, signals and the interpreter's end: odd use of them does no harm."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import in_child, program
from replies import make_arrays, make_reply, make_text

import rollstore

SPAWN = multiprocessing.get_context("spawn")
FORK = multiprocessing.get_context("fork")


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
