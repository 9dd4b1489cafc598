"""The tool: ingest, its workers, and what can happen to them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tool_support import (
    DATA,
    TOOL,
    Done,
    floats,
    good,
    integers,
    lines_of,
    ls,
    make_reply,
    read_lines,
    recorded_end,
    recorded_session,
    recorded_turn,
    refused,
    reply_bytes,
    sha,
    tool,
    wait_for,
)


def expect_sessions(store: Path) -> None:
    """The store holds exactly sessions.jsonl, as sessions_expected.jsonl has it."""
    samples = {s["session_id"]: s for s in lines_of(good("dump", store, "--sample"))}
    wanted = read_lines("sessions_expected.jsonl")
    assert len(samples) == len(wanted) == 24
    for want in wanted:
        sample = samples[want["session_id"]]
        assert len(sample["tokens"]) == want["tokens"]
        for member in ("response_length", "prompt_length", "status", "weight_versions", "k"):
            assert sample[member] == want[member]
        hashes = {
            "tokens_i32": sha(integers(sample["tokens"])),
            "loss_mask_u8": sha(np.array(sample["loss_mask"], dtype="u1")),
            "rollout_logprobs_f32": sha(floats(sample["rollout_logprobs"])),
            "topk_ids_i32": sha(integers(sample["topk_ids"])),
            "topk_logprobs_f32": sha(floats(sample["topk_logprobs"])),
        }
        assert hashes == want["sha256"], want["session_id"]


def test_ingest_with_8_jobs_under_three_readers(store: Path) -> None:
    stop = threading.Event()
    failures: list[Done] = []
    rounds: list[int] = []

    def read_on(*command: str) -> None:
        count = 0
        while not stop.is_set() or count == 0:
            done = tool(command[0], store, *command[1:])
            count += 1
            if done.returncode or done.stderr:
                failures.append(done)
        rounds.append(count)

    readers = [
        threading.Thread(target=read_on, args=command)
        for command in (("ls", "--json"), ("dump",), ("verify",))
    ]
    for reader in readers:
        reader.start()
    try:
        text = good("ingest", store, DATA / "sessions.jsonl", "--jobs", "8", "--json")
    finally:
        stop.set()
        for reader in readers:
            reader.join()
    counts = json.loads(text)
    assert (failures, len(rounds)) == ([], 3)
    assert counts["sessions_sealed"] == 24
    assert counts["turns_stored"] == 84
    assert counts["unchanged"] == counts["refused"] == counts["not_stored"] == 0
    assert counts["bytes"] == (DATA / "sessions.jsonl").stat().st_size - 108  # line ends
    expect_sessions(store)

    again = json.loads(good("ingest", store, DATA / "sessions.jsonl", "--json", "-j", "3"))
    assert (again["unchanged"], again["turns_stored"], again["sessions_sealed"]) == (108, 0, 0)
    assert b" 0 faults" in good("verify", store)


def test_ingest_creates_the_store_and_reads_a_pipe(folder: Path) -> None:
    path = folder / "new"
    text = good("ingest", path, "--create", "--capacity", "16M", "--jobs", "2",
                stdin=(DATA / "sessions.jsonl").read_bytes())  # fmt: skip
    assert re.search(rb"^sessions sealed +24\nturns stored +84\nunchanged +0\nrefused +0\n", text)
    assert re.search(rb"^read +2\.2 MiB in [\d.]+ s, [\d.]+ MB/s$", text, re.M)
    expect_sessions(path)


def test_ingest_reads_several_inputs_in_order(store: Path, folder: Path) -> None:
    lines = recorded_session("s", turns=3)
    (folder / "a.jsonl").write_bytes(lines[0].rstrip(b"\n"))
    (folder / "c.jsonl").write_bytes(b"\r\n  \n" + lines[2] + lines[3])
    done = tool("ingest", store, folder / "a.jsonl", "-", folder / "c.jsonl", stdin=lines[1])
    assert (done.returncode, done.stderr) == (0, b"")
    assert ls(store)[0]["turn_count"] == 3
    (folder / "all.jsonl").write_bytes(b"".join(recorded_session("t")))
    with (folder / "all.jsonl").open("rb", buffering=0) as file:
        file.read(len(recorded_session("t")[0]))  # somebody read the first line before
        done = subprocess.run([TOOL, "ingest", store], stdin=file, capture_output=True, check=False)
    assert set(refusals(done.stderr).values()) == {"order"}
    refused("usage", "ingest", store, "-", "-")
    refused("not_found", "ingest", store, folder / "none.jsonl")
    refused("io", "ingest", store, folder)


def test_ingest_stores_a_streams_lines_as_they_come(store: Path) -> None:
    lines = recorded_session("s")
    with subprocess.Popen(
        [TOOL, "ingest", store], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as ingest:
        assert ingest.stdin
        for count, line in enumerate(lines[:2], 1):
            ingest.stdin.write(line)
            ingest.stdin.flush()
            wait_for(lambda: [s["turn_count"] for s in ls(store)] == [count])  # noqa: B023
        ingest.stdin.write(lines[2].rstrip(b"\n"))
        ingest.stdin.close()
        assert ingest.wait(30) == 0
    assert ls(store)[0]["status"] == "completed"


def refusals(stderr: bytes) -> dict[int, str]:
    found = re.findall(r"^rollstore: (\w+): line (\d+) of [^:]+: .+$", stderr.decode(), re.M)
    assert len(found) == stderr.count(b"\n"), stderr
    return {int(number): kind for kind, number in found}


def test_ingest_names_refused_lines_and_stores_the_others(store: Path, folder: Path) -> None:
    fine, cut, bad, last = (recorded_session(name, 3) for name in ("fine", "cut", "bad", "last"))
    odd = recorded_session("odd", 2)
    no_dtype = make_reply(seed=11)
    del no_dtype["choices"][0]["meta_info"]["output_top_logprobs_idx_flat_b64_dtype"]
    lines = [
        fine[0],  # 1
        cut[0],
        cut[1][:200] + b"\n",  # 3: syntax
        bad[0],
        b"hello\n",  # 5: syntax, of nobody
        fine[1],
        recorded_turn("bad", 1, [1, 2, 3], no_dtype),  # 7: dtype
        cut[2],  # 8: order, since turn 1 was refused
        bad[2],  # 9: order
        fine[2],
        cut[3],  # 11: order: the end of a session with refused lines
        last[0],
        last[1],
        last[2].replace(b'"input_ids"', b'"input_ids\\u0000"'),  # 14: missing, the last turn
        bad[3],  # 15
        last[3],  # 16: sealing it would cut it short without a word
        fine[3],
        b'{"turn":1,"session_id":"none","response":{"choices":[]}}\n',  # 18
        recorded_end("never"),  # 19: not_found
        b'{"session_id":7,"turn":0}\n',  # 20: type
        odd[0],
        b'{"turn":1, oops "session_id" : "odd", "request":{}}\n',  # 22: syntax, before its id
        odd[2],  # 23: sealing it would lose turn 1
    ]
    (folder / "mixed.jsonl").write_bytes(b"".join(lines))
    done = tool("ingest", store, folder / "mixed.jsonl", "--jobs", "4", "--json")
    assert done.returncode == 1
    kinds = refusals(done.stderr)
    assert kinds.pop(18) in ("missing", "order")
    assert kinds.pop(14) == "missing"
    assert kinds == {
        3: "syntax", 5: "syntax", 7: "dtype", 8: "order", 9: "order", 11: "order",
        15: "order", 16: "order", 19: "not_found", 20: "type", 22: "syntax", 23: "order",
    }  # fmt: skip
    assert b"session last has refused lines, left open" in done.stderr
    counts = json.loads(done.stdout)
    assert counts["refused"] == 14
    assert counts["refused_by_kind"]["order"] in (6, 7)
    assert sum(counts["refused_by_kind"].values()) == 14
    assert (counts["sessions_sealed"], counts["turns_stored"]) == (1, 3 + 1 + 1 + 2 + 1)
    states = {s["session_id"]: (s["status"], s["turn_count"]) for s in ls(store)}
    assert states == {
        "fine": ("completed", 3), "cut": (None, 1), "bad": (None, 1), "last": (None, 2),
        "odd": (None, 1),
    }  # fmt: skip
    # Once the lines are mended, the rest follows.
    good("ingest", store, "--jobs", "4", stdin=b"".join([*fine, *cut, *bad, *last]))
    good("ingest", store, stdin=b"".join(recorded_session("odd", 3)))
    assert all(s["status"] == "completed" and s["turn_count"] == 3 for s in ls(store))


def test_ingest_refuses_the_end_of_a_session_refused_within_its_batch(store: Path) -> None:
    good("put", store, "s", "0", stdin=reply_bytes(seed=99))
    lines = recorded_session("s") + recorded_session("t")
    done = tool("ingest", store, "--jobs", "1", stdin=b"".join(lines))
    assert refusals(done.stderr) == {1: "conflict", 2: "order", 3: "order"}
    assert {s["session_id"]: s["state"] for s in ls(store)} == {"s": "open", "t": "sealed"}
    # Asked to, they take the other one's place.
    good("ingest", store, "--replace", stdin=b"".join(lines))
    assert {s["session_id"]: s["state"] for s in ls(store)} == {"s": "sealed", "t": "sealed"}


def test_ingest_refuses_an_end_that_says_otherwise(store: Path) -> None:
    good("ingest", store, stdin=b"".join(recorded_session("s")))
    done = tool("ingest", store, stdin=recorded_end("s", "failed"))
    assert refusals(done.stderr) == {1: "conflict"}
    assert ls(store)[0]["status"] == "completed"


def test_ingest_holds_every_turn_to_the_k_that_was_asked_for(store: Path) -> None:
    done = tool("ingest", store, "--top-k", "5", stdin=b"".join(recorded_session("s")))
    assert done.returncode == 1
    assert set(refusals(done.stderr)) == {1, 2, 3}
    assert ls(store) == []


def test_ingest_into_a_full_store_loses_nothing_that_fits(folder: Path) -> None:
    path = folder / "small"
    good("create", path, "--capacity", "1M")
    sessions = [recorded_session(f"s{i}", 2, count=2000) for i in range(20)]
    done = tool("ingest", path, "--jobs", "3", "--timeout", "100ms", "--json",
                stdin=b"".join(line for s in sessions for line in s))  # fmt: skip
    assert done.returncode == 1
    kinds = refusals(done.stderr)
    assert set(kinds.values()) == {"full", "order"}
    counts = json.loads(done.stdout)
    assert counts["turns_stored"] > 2
    assert counts["turns_stored"] + counts["sessions_sealed"] + counts["refused"] == 60
    for session in ls(path):
        assert session["state"] == ("sealed" if session["turn_count"] == 2 else "open")
    assert b" 0 faults" in good("verify", path)
    refused("full", "put", path, "more", "0", "--timeout", "0", stdin=reply_bytes(9000))


def test_ingest_waits_for_a_release(folder: Path) -> None:
    path = folder / "small"
    good("create", path, "--capacity", "1M")
    done = tool("ingest", path, "--timeout", "0", "--jobs", "1",
                stdin=b"".join(recorded_session("old", 40, count=1000)))  # fmt: skip
    assert "full" in refusals(done.stderr).values()
    with subprocess.Popen(
        [TOOL, "ingest", path, "--timeout", "forever"], stdin=subprocess.PIPE
    ) as ingest:
        assert ingest.stdin
        ingest.stdin.write(b"".join(recorded_session("new", 3, count=1000)))
        ingest.stdin.close()
        time.sleep(0.3)
        assert ingest.poll() is None
        good("release", path, "old")
        assert ingest.wait(30) == 0
    assert [s["session_id"] for s in ls(path, "--sealed")] == ["new"]


def workers_of(process: subprocess.Popen[bytes]) -> list[int]:
    text = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [int(pid) for pid in text.split()]


def test_ingest_reports_a_killed_worker_and_counts_its_lines(store: Path) -> None:
    sessions = [recorded_session(f"s{i}") for i in range(12)]
    with subprocess.Popen(
        [TOOL, "ingest", store, "--jobs", "3", "--json"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as ingest:  # fmt: skip
        assert ingest.stdin and ingest.stdout and ingest.stderr
        ingest.stdin.write(b"".join(s[0] for s in sessions))
        ingest.stdin.flush()
        wait_for(lambda: len(ls(store)) == 12)
        victim = workers_of(ingest)[1]
        os.kill(victim, signal.SIGKILL)
        ingest.stdin.write(b"".join(line for s in sessions for line in s[1:]))
        ingest.stdin.close()
        counts = json.loads(ingest.stdout.read())
        complaint = ingest.stderr.read().decode()
        assert ingest.wait(30) == 1
    assert complaint.startswith(f"rollstore: io: worker {victim} was killed by signal 9")
    assert complaint.count("\n") == 1
    assert counts["refused"] == 0
    assert 0 < counts["not_stored"] <= 24 + 12  # its first turns may have been reported or not
    stored = counts["turns_stored"] + counts["sessions_sealed"] + counts["unchanged"]
    assert stored + counts["not_stored"] == 36
    states = {s["state"] for s in ls(store)}
    assert states == {"open", "sealed"}
    assert b" 0 faults" in good("verify", store)
    good("ingest", store, stdin=b"".join(line for s in sessions for line in s))
    assert all((s["state"], s["turn_count"]) == ("sealed", 2) for s in ls(store))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ingest_ends_cleanly_when_it_is_interrupted(store: Path, number: signal.Signals) -> None:
    with subprocess.Popen(
        [TOOL, "ingest", store, "--jobs", "3", "--json"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    ) as ingest:  # fmt: skip
        assert ingest.stdin and ingest.stdout and ingest.stderr
        ingest.stdin.write(b"".join(recorded_session("s")) + recorded_session("t")[0])
        ingest.stdin.flush()
        wait_for(lambda: len(ls(store)) == 2)
        workers = workers_of(ingest)
        # As a terminal does it for Ctrl-C: to the whole group.  SIGTERM comes to the parent.
        if number == signal.SIGINT:
            os.killpg(ingest.pid, number)
        else:
            os.kill(ingest.pid, number)
        assert ingest.wait(30) == -number  # a shell's loop ends too
        counts = json.loads(ingest.stdout.read())
        assert ingest.stderr.read() == b""
    assert counts["interrupted"] is True
    assert (counts["turns_stored"], counts["sessions_sealed"]) == (3, 1)
    assert len(workers) == 3
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    assert {s["session_id"]: s["state"] for s in ls(store)} == {"s": "sealed", "t": "open"}
    assert b" 0 faults" in good("verify", store)


def test_ingest_interrupted_while_it_waits_for_space_ends_all_the_same(folder: Path) -> None:
    path = folder / "small"
    good("create", path, "--capacity", "1M")
    with subprocess.Popen(
        [TOOL, "ingest", path, "--timeout", "forever", "--jobs", "1", "--json"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as ingest:  # fmt: skip
        assert ingest.stdin and ingest.stdout and ingest.stderr
        ingest.stdin.write(b"".join(recorded_session("s", 60, count=500)))
        ingest.stdin.flush()
        wait_for(lambda: bool(ls(path)) and ls(path)[0]["turn_count"] > 3)
        time.sleep(0.2)
        os.kill(ingest.pid, signal.SIGINT)
        assert ingest.wait(30) == -signal.SIGINT
        counts = json.loads(ingest.stdout.read())
        assert ingest.stderr.read() == b""
    assert counts["not_stored"] > 0
    assert counts["turns_stored"] == ls(path)[0]["turn_count"]
    assert ls(path)[0]["state"] == "open"


def test_ingests_workers_end_with_their_parent(store: Path) -> None:
    with subprocess.Popen(
        [TOOL, "ingest", store, "--jobs", "2"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as ingest:
        wait_for(lambda: len(workers_of(ingest)) == 2)
        workers = workers_of(ingest)
        ingest.kill()
        ingest.wait()
        wait_for(lambda: not any(is_running(pid) for pid in workers))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# ---------------------------------------------------------------- what happens meanwhile


def full_store(folder: Path) -> Path:
    """A store in which nothing more has room."""
    path = folder / "full"
    good("create", path, "--capacity", "1M")
    lines = b"".join(recorded_session("s", 60, count=500))
    done = tool("ingest", path, "--timeout", "0", "--jobs", "1", stdin=lines)
    assert done.returncode == 1 and b"rollstore: full: " in done.stderr
    return path


def waiting_put(path: Path) -> subprocess.Popen[bytes]:
    reply = reply_bytes(500, seed=1)
    put = subprocess.Popen(
        [TOOL, "put", path, "t", "0", "--timeout", "forever"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert put.stdin
    put.stdin.write(reply)
    put.stdin.close()
    put.stdin = None
    with pytest.raises(subprocess.TimeoutExpired):
        put.wait(0.5)
    return put


def test_a_put_that_waits_for_space_ends_with_ctrl_c(folder: Path) -> None:
    path = full_store(folder)
    before = ls(path)
    with waiting_put(path) as put:
        put.send_signal(signal.SIGINT)
        assert put.wait(30) == -signal.SIGINT
    assert ls(path) == before
    assert b" 0 faults" in good("verify", path)
    good("release", path, "s", "--force")
    good("put", path, "t", "0", stdin=reply_bytes())


def test_a_put_that_waits_is_told_that_the_store_was_deleted(folder: Path) -> None:
    path = full_store(folder)
    with waiting_put(path) as put:
        shutil.rmtree(path)
        out, errors = put.communicate(timeout=30)
    assert (put.returncode, out) == (1, b"")
    assert errors.startswith(b"rollstore: gone: "), errors


def test_ingest_is_told_that_the_store_was_deleted(store: Path) -> None:
    with subprocess.Popen(
        [TOOL, "ingest", store, "--jobs", "2"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as ingest:  # fmt: skip
        assert ingest.stdin
        ingest.stdin.write(b"".join(recorded_session("s")))
        ingest.stdin.flush()
        wait_for(lambda: len(ls(store)) == 1)
        shutil.rmtree(store)
        _, errors = ingest.communicate(b"".join(recorded_session("t")), timeout=30)
    assert ingest.returncode == 1
    assert b"rollstore: gone: " in errors, errors
    assert not store.exists()
