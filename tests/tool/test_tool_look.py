"""The tool: looking at a store, dumping, verifying, copying and emptying it."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tool_support import (
    DATA,
    NOBODY,
    TOOL,
    Done,
    decode_arguments,
    floats,
    good,
    lines_of,
    ls,
    read_golden,
    recorded_session,
    refused,
    reply_bytes,
    tool,
    wait_for,
)

# ---------------------------------------------------------------- ls, show, stat


def test_ls_filters(store: Path) -> None:
    good("ingest", store, DATA / "sessions.jsonl")
    good("put", store, "open", "0", stdin=reply_bytes())
    everything = ls(store)
    assert len(everything) == 25
    assert [s["sequence"] for s in everything] == [*range(1, 25), None]
    assert len(ls(store, "--sealed")) == 24
    assert [s["session_id"] for s in ls(store, "--open")] == ["open"]
    assert {s["group_index"] for s in ls(store, "--group", "3")} == {3}
    assert len(ls(store, "--group", "3")) == 4
    assert {s["status"] for s in ls(store, "--status", "truncated")} == {"truncated"}
    assert [s["sequence"] for s in ls(store, "--after", "20", "--limit", "3")] == [21, 22, 23]
    assert ls(store, "-n0") == []
    table = good("ls", store, "--limit", "2").decode().splitlines()
    assert len(table) == 3
    assert table[0].split() == "SEQ STATUS TURNS TOKENS SIZE REWARD AGE SESSION".split()
    assert table[1].split()[-1] == everything[0]["session_id"]


def test_show_fits_80_columns_and_ranks_the_sampled_token(store: Path) -> None:
    good("ingest", store, DATA / "sessions.jsonl")
    lines = good("show", store, "math-0000/rollout-1", "--limit", "0").decode().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["session", "math-0000/rollout-1"]
    assert lines[1].startswith("status   completed, reward 0.")
    assert sum(line.startswith("turn ") for line in lines) == 6
    turn = lines_of(good("dump", store, "math-0000/rollout-1:2"))[0]
    shown = good("show", store, "math-0000/rollout-1:2", "-n", "0").decode().splitlines()
    rows = [line.split() for line in shown if re.match(r" +\d+ ", line)]
    assert len(rows) == turn["n"]
    for i, row in enumerate(rows):
        assert (int(row[0]), int(row[1])) == (i, turn["token_ids"][i])
        assert abs(float(row[2]) - turn["token_logprobs"][i]) < 1e-4
        assert abs(float(row[3].rstrip("%")) - 100 * np.exp(turn["token_logprobs"][i])) < 0.01
        ids = turn["topk_ids"][i * 32 : i * 32 + 32]
        values = turn["topk_logprobs"][i * 32 : i * 32 + 32]
        ranked = [t for _, t in sorted(zip(values, ids, strict=True), key=lambda p: -p[0])]
        sampled = turn["token_ids"][i]
        rank = str(ranked.index(sampled) + 1) if sampled in ranked else ">32"
        assert row[4] == rank
        assert [int(c) for c in row[5::2]] == ranked[: len(row[5::2])]
    some = good("show", store, "math-0000/rollout-1:2", "--from", "3", "--limit", "2").decode()
    assert re.findall(r"^ +(\d+) +\d", some, re.M) == ["3", "4"]
    assert "more tokens" in some


def run_on_terminal(*arguments: str | Path, **environment: str) -> bytes:
    """Run the tool with a terminal of 100 columns as its standard output and error."""
    pid, fd = pty.fork()
    if pid == 0:
        os.execve(TOOL, [TOOL, *map(str, arguments)], {**os.environ, **environment})
    text = b""
    while True:
        try:
            ready, _, _ = select.select([fd], [], [], 30)
            part = os.read(fd, 65536) if ready else b""
        except OSError:  # Linux says EIO at the other end's close
            break
        if not part:
            break
        text += part
    os.close(fd)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, text
    return text


def test_colours_and_progress_are_for_terminals_only(store: Path) -> None:
    bar = run_on_terminal("ingest", store, DATA / "sessions.jsonl")
    assert b"\ringest [" in bar and b"MB/s" in bar
    assert b"\r\x1b[K" in bar
    assert b"\rverify" in run_on_terminal("verify", store)
    name = "math-0000/rollout-1:2"
    assert b"\x1b[1m" in run_on_terminal("show", store, name, TERM="xterm", NO_COLOR="")
    assert b"\x1b[" not in run_on_terminal("show", store, name, TERM="xterm", NO_COLOR="1")
    assert b"\x1b[" not in run_on_terminal("show", store, name, TERM="dumb")
    assert b"\x1b" not in good("show", store, name)


def test_stat_shows_use_and_the_oldest_snapshot(store: Path) -> None:
    good("ingest", store, DATA / "sessions.jsonl")
    stat = json.loads(good("stat", store, "--json"))
    assert (stat["sealed_count"], stat["open_count"], stat["turn_count"]) == (24, 0, 84)
    assert (stat["next_sequence"], stat["durability"]) == (25, "memory")
    assert stat["generated_count"] == sum(s["generated_count"] for s in ls(store))
    assert 0 < stat["value_size"] <= stat["used_size"] < stat["map_size"]
    assert stat["reader_pid"] is None
    # A dump into a pipe that nobody reads stands still with its snapshot.
    with subprocess.Popen([TOOL, "dump", store], stdout=subprocess.PIPE) as dump:
        wait_for(lambda: json.loads(good("stat", store, "--json"))["reader_pid"] == dump.pid)
        good("release", store, "math-0000/rollout-1")
        stat = json.loads(good("stat", store, "--json"))
        assert (stat["reader_pid"], stat["reader_age"]) == (dump.pid, 1)
        assert stat["pinned_size"] > 0
        text = good("stat", store).decode()
        name = Path(TOOL).name[:15]
        assert f"process {dump.pid} ({name}), 1 commit" in text
        assert "held by readers" in text
        dump.kill()
    assert "23 sealed, 0 open; 1 released" in good("stat", store).decode()


# ---------------------------------------------------------------- dump


def test_npz_holds_the_same_arrays_as_json(store: Path, folder: Path) -> None:
    good("ingest", store, DATA / "sessions.jsonl")
    name = "web-0000/rollout-2"
    sample = json.loads(good("dump", store, name, "--sample"))
    good("dump", store, name, "--npz", folder / "sample.npz")
    with np.load(folder / "sample.npz") as arrays:
        k = sample["k"]
        assert arrays["tokens"].dtype == np.int32
        assert arrays["tokens"].tolist() == sample["tokens"]
        assert arrays["loss_mask"].dtype == np.uint8
        assert arrays["loss_mask"].tolist() == sample["loss_mask"]
        assert arrays["topk_ids"].shape == (sample["response_length"], k)
        assert arrays["topk_ids"].ravel().tolist() == sample["topk_ids"]
        assert arrays["topk_logprobs"].tobytes() == floats(sample["topk_logprobs"]).tobytes()
        assert arrays["rollout_logprobs"].tobytes() == floats(sample["rollout_logprobs"]).tobytes()
        assert (str(arrays["session_id"]), str(arrays["status"])) == (name, sample["status"])
        assert float(arrays["reward"]) == sample["reward"]
        assert int(arrays["group_index"]) == sample["group_index"]
    turn = lines_of(good("dump", store, name + ":0"))[0]
    good("dump", store, name, "--turn", "0", "--npz", folder / "turn.npz")
    with np.load(folder / "turn.npz") as arrays:
        assert arrays["token_ids"].tolist() == turn["token_ids"]
        assert arrays["topk_ids"].shape == (turn["n"], turn["k"])
        assert arrays["topk_logprobs"].tobytes() == floats(turn["topk_logprobs"]).tobytes()
        assert arrays["prompt_ids"].tolist() == turn["prompt_ids"]
        assert str(arrays["weight_version"]) == turn["weight_version"]
    unzip = subprocess.run(["/usr/bin/python3", "-m", "zipfile", "-t", folder / "turn.npz"],
                           capture_output=True, check=True)  # fmt: skip
    assert unzip.stdout == b"Done testing\n"
    assert sorted(p.name for p in folder.iterdir()) == ["sample.npz", "store", "turn.npz"]


def test_npz_is_whole_or_not_there(store: Path, folder: Path) -> None:
    good("put", store, "s", "0", stdin=reply_bytes())
    (folder / "old.npz").write_bytes(b"old")
    refused("not_found", "dump", store, "s:1", "--npz", folder / "old.npz")
    assert (folder / "old.npz").read_bytes() == b"old"
    good("dump", store, "s:0", "--npz", folder / "old.npz")
    with np.load(folder / "old.npz") as arrays:
        assert arrays["token_ids"].shape == (3,)
    refused("no_space", "dump", store, "s:0", "--npz", "/dev/full")
    refused("not_found", "dump", store, "s:0", "--npz", folder / "none" / "x.npz")


def test_replies_of_a_dump_ingest_to_the_same_bytes(store: Path, folder: Path) -> None:
    good("ingest", store, DATA / "sessions.jsonl")
    good("put", store, "open", "0", "--prompt", "5,6", stdin=reply_bytes())
    replies = good("dump", store, "--replies")
    assert len(lines_of(replies)) == 84 + 24 + 1
    other = folder / "other"
    good("create", other, "--capacity", "16M")
    good("ingest", other, stdin=replies)
    expected = {json.dumps(line) for line in lines_of(good("dump", store))}
    assert {json.dumps(line) for line in lines_of(good("dump", other))} == expected
    assert good("dump", store, "web-0000/rollout-2:1", "--replies") in replies
    # And one reply by itself.
    reply = good("dump", store, "open:0", "--reply")
    decoded = json.loads(good("decode", stdin=reply))
    turn = lines_of(good("dump", store, "open:0"))[0]
    assert {m: turn[m] for m in decoded} == decoded
    assert json.loads(good("put", store, "open", "0", "--prompt", "5,6", "--json",
                           stdin=reply))["unchanged"]  # fmt: skip


def test_every_golden_reply_survives_put_and_dump(store: Path) -> None:
    for case, raw in read_golden():
        arguments = decode_arguments(case)[1:]
        good("put", store, case["name"], "0", *arguments, stdin=raw)
        reply = good("dump", store, case["name"] + ":0", "--reply")
        how = ["--mode", case["mode"], "--top-k", str(case["k"])]
        again = json.loads(good("put", store, case["name"], "0", "--json", *how, stdin=reply))
        assert again["unchanged"], case["name"]
        record = json.loads(good("decode", *arguments, stdin=raw))
        turn = lines_of(good("dump", store, case["name"] + ":0"))[0]
        assert {m: turn[m] for m in record} == record


def test_dump_reports_a_session_without_a_sample_and_goes_on(store: Path) -> None:
    good("put", store, "bad", "0", "--prompt", "1,2", "--replace", stdin=reply_bytes())
    good("put", store, "bad", "1", "--prompt", "7,8", "--end", "failed", stdin=reply_bytes())
    good("ingest", store, stdin=b"".join(recorded_session("fine")))
    done = tool("dump", store, "--sample")
    assert done.returncode == 1
    assert done.stderr.startswith(b"rollstore: alignment: ") and b"bad" in done.stderr
    assert [s["session_id"] for s in lines_of(done.stdout)] == ["fine"]
    refused("alignment", "dump", store, "bad", "--sample")
    assert len(lines_of(good("dump", store, "bad"))) == 3
    refused("usage", "dump", store, "bad:1", "--sample")
    refused("usage", "dump", store, "bad", "--reply")


# ---------------------------------------------------------------- verify, copy, release


def test_verify_finds_a_flipped_byte(store: Path) -> None:
    good("ingest", store, DATA / "sessions.jsonl")
    good("put", store, "victim", "0", stdin=reply_bytes(100, 8, seed=77))
    assert re.fullmatch(
        rb"25 sessions, 85 turns, \d\.\d MiB read: 0 faults\n", good("verify", store)
    )
    report = json.loads(good("verify", store, "--json"))
    assert (report["faults"], report["turn_count"]) == ([], 85)
    values = lines_of(good("dump", store, "victim:0"))[0]["topk_logprobs"]
    needle = floats(values[64:96]).tobytes()
    data = bytearray((store / "data.mdb").read_bytes())
    assert data.count(needle) == 1
    with (store / "data.mdb").open("r+b") as file:
        file.seek(data.index(needle) + 5)
        file.write(bytes([needle[5] ^ 1]))
    done = tool("verify", store)
    assert (done.returncode, done.stderr) == (1, b"")
    faults = re.findall(r"^fault: corrupt: .*$", done.stdout.decode(), re.M)
    assert len(faults) == 1 and "victim" in faults[0]
    assert re.search(rb": \d+ faults?\n$", done.stdout)
    report = json.loads(tool("verify", store, "--json").stdout)
    assert report["fault_count"] == len(report["faults"]) == len(faults)
    assert report["faults"][0]["kind"] == "corrupt"


def test_copy_of_a_store_in_use_is_consistent_and_compact(store: Path, folder: Path) -> None:
    good("ingest", store, DATA / "sessions.jsonl")
    before = good("dump", store)
    for session in ls(store)[:12]:
        good("release", store, session["session_id"])
    with subprocess.Popen([TOOL, "ingest", store, "-j1"], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as ingest:  # fmt: skip
        assert ingest.stdin
        for i in range(30):
            ingest.stdin.write(b"".join(recorded_session(f"live{i}")))
        ingest.stdin.flush()
        good("copy", store, folder / "copy")
        ingest.stdin.close()
        assert ingest.wait(30) == 0
    assert b" 0 faults" in good("verify", folder / "copy")
    copied = set(good("dump", folder / "copy").split(b"\n"))
    assert copied <= set(good("dump", store).split(b"\n"))
    assert len(copied & set(before.split(b"\n"))) > 12
    refused("exists", "copy", store, folder / "copy")
    good("copy", store, folder / "large", "--capacity", "64M")
    large = json.loads(good("stat", folder / "large", "--json"))
    small = json.loads(good("stat", store, "--json"))
    assert large["capacity_size"] == 2 * small["capacity_size"]
    assert good("dump", folder / "large") == good("dump", store)
    good("ingest", folder / "large", stdin=b"".join(recorded_session("after the copy")))
    good("put", store, "larger than the copy", "0", stdin=reply_bytes(9000, 16))
    refused("argument", "copy", store, folder / "small", "--capacity", "1M")


def test_release_deletes_each_by_itself(store: Path) -> None:
    good("ingest", store, stdin=b"".join(b"".join(recorded_session(i)) for i in "abc"))
    done = tool("release", store, "a", "nobody", "c", "--json")
    assert (done.returncode, json.loads(done.stdout)) == (1, {"released": 2})
    assert done.stderr.startswith(b"rollstore: not_found: ")
    assert [s["session_id"] for s in ls(store)] == ["b"]
    assert good("release", store, "b") == b"released 1\n"


def test_consumers_hold_sessions_until_they_are_dropped(store: Path) -> None:
    good("ingest", store, stdin=b"".join(recorded_session("s")))
    assert json.loads(good("release", store, "--consumed", "--json")) == {"released": 0}
    good("consumers", store, "--create", "trainer \x1b[31m")
    good("consumers", store, "--create", "late", "--newest")
    listed = {c["name"]: c for c in lines_of(good("consumers", store, "--json"))}
    assert set(listed) == {"trainer \x1b[31m", "late"}
    assert listed["trainer \x1b[31m"]["waiting_count"] == 1
    assert listed["late"]["waiting_count"] == 0
    assert b"\x1b" not in good("consumers", store)
    refused_release = tool("release", store, "s")
    assert refused_release.returncode == 1
    assert refused_release.stderr.startswith(b"rollstore: held: ")
    stat = json.loads(good("stat", store, "--json", "--stalled-after", "0"))
    assert {c["name"]: c["stalled"] for c in stat["consumers"]} == {
        "trainer \x1b[31m": True,
        "late": False,
    }
    assert b"stalled" in good("stat", store, "--stalled-after", "0ms")
    assert b"stalled" not in good("stat", store)
    good("consumers", store, "--drop", "trainer \x1b[31m")
    refused("not_found", "consumers", store, "--drop", "trainer")
    assert good("release", store, "--consumed", "--limit", "5") == b"released 1\n"
    good("ingest", store, stdin=b"".join(recorded_session("t")))
    good("release", store, "t", "--force")


# ---------------------------------------------------------------- output and permissions


@pytest.mark.parametrize(
    "arguments",
    ["--help", "--version", "ls --help", "ls", "ls --json", "show", "show --json", "dump",
     "dump --sample", "stat", "stat --json", "verify", "verify --json", "decode", "ingest",
     "release --consumed", "consumers", "put --json"],
)  # fmt: skip
def test_output_that_cannot_be_written_is_a_failure(store: Path, arguments: str) -> None:
    good("put", store, "s", "0", stdin=reply_bytes())
    command, *options = arguments.split()
    more: list[str | Path] = [] if command in ("--help", "--version", "decode") else [store]
    more += {"show": ["s"], "put": ["s", "0"]}.get(command, [])
    line = [TOOL, command, *more, *options]
    stdin = recorded_session("t")[0] if command == "ingest" else reply_bytes()
    with open("/dev/full", "wb") as full:
        done = subprocess.run(line, input=stdin, stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(b"rollstore: no_space: writing standard output: ")
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(line, input=stdin, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert done.returncode == 1
    assert done.stderr.startswith(b"rollstore: io: writing standard output: Broken pipe")
    before = (store / "data.mdb").read_bytes()
    done = subprocess.run(["/bin/sh", "-c", '"$@" >&-', "sh", *line], input=stdin,
                          stderr=subprocess.PIPE, check=False)  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith(b"rollstore: io: writing standard output: ")
    if command not in ("ingest", "put"):
        assert (store / "data.mdb").read_bytes() == before


@pytest.fixture
def public_tool() -> Iterator[dict[str, Any]]:
    """The tool where everybody may run it: the build tree may lie where only root may look."""
    with tempfile.TemporaryDirectory() as public:
        os.chmod(public, 0o755)
        program = shutil.copy(TOOL, public)
        needed = subprocess.run(["ldd", TOOL], capture_output=True, text=True, check=True).stdout
        for library in re.findall(r"=> (\S*/librollstore\S*)", needed):
            shutil.copy(library, public)
        yield {"executable": program, "env": {**os.environ, "LD_LIBRARY_PATH": public}}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_store_is_refused_with_permission(
    folder: Path, store: Path, public_tool: dict[str, Any]
) -> None:
    def as_nobody(*arguments: str | Path) -> Done:
        return tool(*arguments, user=NOBODY, group=NOBODY, extra_groups=[], **public_tool)

    for arguments in (("ls", store), ("create", folder / "mine", "--capacity", "1M"),
                      ("put", store, "s", "0"), ("release", store, "s")):  # fmt: skip
        done = as_nobody(*arguments)
        assert done.returncode == 1 and done.stdout == b""
        assert done.stderr.startswith((b"rollstore: permission: ", b"rollstore: missing: ",
                                       b"rollstore: syntax: ")), done  # fmt: skip
    good("put", store, "s", "0", stdin=reply_bytes())
    done = as_nobody("dump", store, "s:0", "--npz", folder / "x.npz")
    assert done.stderr.startswith(b"rollstore: permission: ")
    # A store that may be read, in a folder that may not be written.
    store.chmod(0o755)
    (store / "data.mdb").chmod(0o644)
    (store / "lock.mdb").chmod(0o666)
    (store / "guard.bin").chmod(0o644)
    for arguments in (("ls", store), ("show", store, "s"), ("verify", store), ("stat", store)):
        done = as_nobody(*arguments)
        assert (done.returncode, done.stderr) == (0, b""), done
    done = as_nobody("release", store, "s")
    assert done.stderr.startswith(b"rollstore: permission: ")
    assert len(ls(store)) == 1
