"""The rollstore command line tool, driven as a user drives it.

The environment variable ROLLSTORE_TOOL names the program.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

DATA = Path(__file__).parent / "data"
TOOL = os.environ.get("ROLLSTORE_TOOL", "")
NOBODY = 65534
COMMANDS = (
    "create decode put ingest ls show dump stat verify copy release consumers".split()
)

Json = dict[str, Any]
Done = subprocess.CompletedProcess[bytes]


def tool(*arguments: str | bytes | Path, stdin: bytes = b"", **options: Any) -> Done:
    assert TOOL, "ROLLSTORE_TOOL must name the program under test"
    return subprocess.run(
        [TOOL, *arguments], input=stdin, capture_output=True, timeout=60, check=False, **options
    )


def good(*arguments: str | bytes | Path, stdin: bytes = b"") -> bytes:
    """Run the tool and insist that it succeeds without a word on standard error."""
    done = tool(*arguments, stdin=stdin)
    assert (done.returncode, done.stderr) == (0, b""), done
    return done.stdout


def refused(kind: str, *arguments: str | bytes | Path, stdin: bytes = b"") -> str:
    """Run the tool and insist that it fails with one error of that kind and prints nothing."""
    done = tool(*arguments, stdin=stdin)
    text = done.stderr.decode()
    assert done.returncode == (2 if kind == "usage" else 1), done
    assert text.startswith(f"rollstore: {kind}: "), text
    assert text.count("\n") == 1, text
    assert done.stdout == b""
    return text


def lines_of(text: bytes) -> list[Json]:
    return [json.loads(line) for line in text.split(b"\n") if line]


def read_lines(name: str) -> list[Json]:
    # Not splitlines: one fixture holds a raw U+2028.
    return lines_of((DATA / name).read_bytes())


def read_golden() -> list[tuple[Json, bytes]]:
    """Each case with its reply's bytes as they stand in the file, in three spellings of JSON."""
    lines = (DATA / "golden.jsonl").read_bytes().rstrip(b"\n").split(b"\n")
    return [(json.loads(line), line.split(b'"reply":', 1)[1][:-1]) for line in lines]


def sha(array: np.ndarray[Any, Any]) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


def floats(values: list[float | None]) -> np.ndarray[Any, Any]:
    return np.array([-np.inf if v is None else v for v in values], dtype="<f4")


def integers(values: list[int]) -> np.ndarray[Any, Any]:
    return np.array(values, dtype="<i4")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in shared memory that other users may look into."""
    path = Path(tempfile.mkdtemp(prefix="rollstore-tool-", dir="/dev/shm"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def store(folder: Path) -> Path:
    path = folder / "store"
    good("create", path, "--capacity", "32M")
    return path


def make_reply(count: int = 3, topk: int = 4, seed: int = 1, **meta: Any) -> Json:
    rng = np.random.default_rng(seed)
    logprobs = -rng.random(count).astype("<f4") - np.float32(0.1)
    tokens = rng.integers(0, 1000, count)
    ids = (rng.integers(0, 5000, (count, 1)) + np.arange(topk) * 7).astype("<i4")
    values = np.sort(-5 * rng.random((count, topk)).astype("<f4"), axis=1)[:, ::-1]
    info = {
        "finish_reason": {"type": "stop", "matched": 1},
        "weight_version": "7",
        "output_token_logprobs": [
            [float(p), int(t), None] for p, t in zip(logprobs, tokens, strict=True)
        ],
        "output_top_logprobs_idx_flat_b64": base64.b64encode(ids.tobytes()).decode(),
        "output_top_logprobs_idx_flat_b64_dtype": "int32",
        "output_top_logprobs_val_flat_b64": base64.b64encode(values.tobytes()).decode(),
        "output_top_logprobs_val_flat_b64_dtype": "float32",
        "output_top_logprobs_shape": [count, topk],
        "output_top_logprobs_null_prefix": 0,
        **meta,
    }
    return {"choices": [{"index": 0, "meta_info": info}]}


def reply_bytes(*arguments: Any, **options: Any) -> bytes:
    return json.dumps(make_reply(*arguments, **options)).encode()


def recorded_turn(session: str, turn: int, prompt: list[int], reply: Json) -> bytes:
    request = {
        "input_ids": prompt,
        "temperature": 0.8,
        "top_logprobs": 4,
        "return_flat_raw_output_top_logprobs": True,
    }
    line = {"session_id": session, "turn": turn, "request": request, "response": reply}
    return json.dumps(line).encode() + b"\n"


def recorded_end(session: str, status: str = "completed", reward: float = 0.5) -> bytes:
    end = {"status": status, "reward": reward, "group_index": 1, "index": 2}
    return json.dumps({"session_id": session, "end": end}).encode() + b"\n"


def reply_tokens(reply: Json) -> list[int]:
    return [t for _, t, _ in reply["choices"][0]["meta_info"]["output_token_logprobs"]]


def recorded_session(session: str, turns: int = 2, count: int = 3) -> list[bytes]:
    lines: list[bytes] = []
    prompt = [1, 2, 3]
    for turn in range(turns):
        reply = make_reply(count, seed=turn + 10)
        lines.append(recorded_turn(session, turn, prompt, reply))
        prompt = prompt + reply_tokens(reply) + [9]
    lines.append(recorded_end(session))
    return lines


def ls(store: Path, *options: str) -> list[Json]:
    return lines_of(good("ls", store, "--json", *options))


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


# ---------------------------------------------------------------- help and usage


def test_help_lists_every_command_and_each_shows_an_example() -> None:
    text = good("--help").decode()
    for name in COMMANDS:
        assert re.search(rf"^  {name} ", text, re.M)
        own = good(name, "--help").decode()
        assert own.startswith(f"usage: rollstore {name}")
        assert f"example: {'curl' if name == 'decode' else ''}" in own
        assert "Exit status: 0" in own
        assert own == good("help", name).decode()
        assert max(len(line) for line in own.splitlines()) <= 90
    assert len(re.findall(r"^  \w+ +\w", text, re.M)) == len(COMMANDS)


def test_version_is_the_librarys() -> None:
    assert re.match(rb"rollstore \d+\.\d+\.\d+ ", good("--version"))


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["create"],
        ["create", "/x", "/y"],
        ["create", "/x", "--capacity"],
        ["create", "/x", "--capacity", "many"],
        ["create", "/x", "--capacity", "-1"],
        ["create", "/x", "--capacity=1Q"],
        ["create", "/x", "--durability", "eternal"],
        ["create", "/x", "--group=1"],
        ["create", "/x", "--nonsense"],
        ["create", "/x", "-z"],
        ["decode", "--top-k", "32769"],
        ["decode", "--choice", "x"],
        ["put", "/x", "s"],
        ["put", "/x", "s", "one"],
        ["put", "/x", "s", "-1"],
        ["put", "/x", "s", "0", "--prompt", "1", "--prompt-file", "f"],
        ["put", "/x", "s", "0", "--temperature", "nan"],
        ["put", "/x", "s", "0", "--timeout", "soon"],
        ["ingest"],
        ["ingest", "/x", "--jobs", "0"],
        ["ls", "/x", "--group", "1.5"],
        ["show", "/x"],
        ["show", "/x", "s", "--turn", "99999999"],
        ["dump", "/x", "--npz", "f"],
        ["dump", "/x", "s", "--sample", "--replies"],
        ["dump", "/x", "s", "--reply", "--npz", "f"],
        ["dump", "/x", "s", "--sample", "--turn", "1", "--npz", "f"],
        ["release", "/x"],
        ["release", "/x", "s", "--consumed"],
        ["release", "/x", "s", "--limit", "1"],
        ["release", "/x", "--consumed", "--force"],
        ["consumers", "/x", "--create", "a", "--drop", "b"],
        ["consumers", "/x", "--newest"],
    ],
)
def test_a_senseless_command_line_is_refused_with_status_2(arguments: list[str]) -> None:
    refused("usage", *arguments)
    assert not Path("/x").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["ls"],
        ["stat"],
        ["verify"],
        ["show", "s"],
        ["dump"],
        ["release", "s"],
        ["consumers"],
        ["copy", "elsewhere"],
        ["ingest"],
    ],
)
def test_a_store_that_is_not_there_is_not_store(folder: Path, arguments: list[str]) -> None:
    text = refused("not_store", arguments[0], folder / "none", *arguments[1:])
    assert "none" in text
    assert list(folder.iterdir()) == []


# ---------------------------------------------------------------- decode


def decode_arguments(case: Json) -> list[str]:
    arguments = ["decode", "--mode", case.get("mode", "selected")]
    request = case.get("request", "nested" if "nested" in case["name"] else "flat")
    arguments += ["--request", request]
    for option, member in (("--top-k", "k"), ("--choice", "choice")):
        if member in case:
            arguments += [option, str(case[member])]
    return arguments


def test_decode_gives_the_golden_arrays() -> None:
    cases = read_golden()
    wanted = read_lines("golden_expected.jsonl")
    assert len(cases) == len(wanted) == 45
    for (case, raw), want in zip(cases, wanted, strict=True):
        text = good(*decode_arguments(case), stdin=raw)
        assert text.count(b"\n") == 1
        record = json.loads(text)
        assert [record[m] for m in ("n", "k", "width")] == [want["n"], want["k"], want["width"]]
        hashes = {
            "token_ids_i32": sha(integers(record["token_ids"])),
            "token_logprobs_f32": sha(floats(record["token_logprobs"])),
            "topk_ids_i32": sha(integers(record["topk_ids"])),
            "topk_logprobs_f32": sha(floats(record["topk_logprobs"])),
        }
        assert hashes == want["sha256"], case["name"]
        meta = case["reply"]["choices"] if "choices" in case["reply"] else [case["reply"]]
        info = meta[case.get("choice", 0)]["meta_info"]
        assert record["weight_version"] == info["weight_version"]
        assert record["finish_reason"] == info["finish_reason"]["type"]


def test_decode_refuses_each_malformed_reply_and_prints_nothing() -> None:
    cases = read_lines("malformed.jsonl")
    assert len(cases) == 44
    for case in cases:
        raw = case["raw"].encode() if "raw" in case else json.dumps(case["reply"]).encode()
        case.setdefault("request", "flat")
        refused(case["error"], *decode_arguments(case), stdin=raw)


def test_decode_says_what_the_engine_said(folder: Path) -> None:
    (folder / "reply.json").write_bytes(
        reply_bytes(
            finish_reason={"type": "matched \u001b[31m"},
            weight_version=None,
            output_top_logprobs_temperature_scaled=True,
        )
    )
    record = json.loads(good("decode", folder / "reply.json"))
    assert record["finish_reason"] == "matched \u001b[31m"
    assert record["weight_version"] is None
    assert record["temperature_scaled"] is True
    assert (record["mode"], record["null_prefix"]) == ("selected", 0)
    refused("not_found", "decode", folder / "none.json")
    refused("io", "decode", folder)


# ---------------------------------------------------------------- create and put


@pytest.mark.parametrize(
    ("text", "size"),
    [("2M", 2 << 20), ("2MiB", 2 << 20), ("3MB", 3000000), ("1.5m", None), ("2097152", 2 << 20)],
)
def test_create_takes_sizes_in_units(folder: Path, text: str, size: int | None) -> None:
    if size is None:
        refused("usage", "create", folder / "s", "--capacity", text)
        return
    good("create", folder / "s", "--capacity", text)
    stat = json.loads(good("stat", folder / "s", "--json"))
    assert size <= stat["capacity_size"] < size + 4096


def test_create_keeps_what_is_there(folder: Path) -> None:
    path = folder / "s"
    good("create", path, "--capacity", "2M", "--durability", "interval", "--interval", "50")
    before = json.loads(good("stat", path, "--json"))
    assert (before["durability"], before["interval_ms"]) == ("interval", 50)
    refused("exists", "create", path)
    good("create", path, "--capacity", "4M", "--if-missing")
    assert json.loads(good("stat", path, "--json")) == before


def test_create_reports_a_file_system_without_room(folder: Path) -> None:
    refused("no_space", "create", folder / "s", "--capacity", "32T")
    assert list(folder.iterdir()) == []


def test_put_stores_a_reply_once(store: Path) -> None:
    done = json.loads(good("put", store, "s", "0", "--json", stdin=reply_bytes()))
    assert done == {
        "session_id": "s", "turn": 0, "n": 3, "k": 4, "unchanged": False, "sealed": False
    }  # fmt: skip
    again = json.loads(good("put", store, "s", "0", "--json", stdin=reply_bytes()))
    assert again == {**done, "unchanged": True}
    refused("conflict", "put", store, "s", "0", stdin=reply_bytes(seed=2))
    refused("order", "put", store, "s", "2", stdin=reply_bytes())
    good("put", store, "s", "0", "--replace", stdin=reply_bytes(seed=2))
    turn = lines_of(good("dump", store, "s:0"))[0]
    assert turn["token_ids"] == reply_tokens(make_reply(seed=2))
    refused("syntax", "put", store, "s", "1", stdin=b"{")
    assert ls(store)[0]["turn_count"] == 1


def test_put_takes_prompt_temperature_and_outcome(store: Path, folder: Path) -> None:
    (folder / "prompt.json").write_text("[11, 12,\n13]\n")
    good("put", store, "s", "0", "--prompt-file", folder / "prompt.json",
         "--temperature", "0.7", stdin=reply_bytes())  # fmt: skip
    tokens = [11, 12, 13, *reply_tokens(make_reply())]
    good("put", store, "s", "1", "--prompt", ",".join(map(str, [*tokens, 14])), "--end",
         "truncated", "--reward", "-1.5", "--group-index", "3", "--index", "-4",
         stdin=reply_bytes(seed=5))  # fmt: skip
    sample = json.loads(good("dump", store, "s", "--sample", "--json"))
    assert sample["tokens"] == [*tokens, 14, *reply_tokens(make_reply(seed=5))]
    assert sample["loss_mask"] == [1, 1, 1, 0, 1, 1, 1]
    assert sample["response_length"] == 7
    outcome = [sample[m] for m in ("status", "reward", "group_index", "index")]
    assert outcome == ["truncated", -1.5, 3, -4]
    assert sample["weight_versions"] == ["7", "7"]
    first = lines_of(good("dump", store, "s", "--turn", "0"))[0]
    assert np.float32(first["temperature"]) == np.float32(0.7)
    refused("sealed", "put", store, "s", "2", stdin=reply_bytes())


@pytest.mark.parametrize("prompt", ["1,x", "-1", "1;2", "2147483648", "99999999999999999999", "1.5"])
def test_put_refuses_a_prompt_that_is_none(store: Path, prompt: str) -> None:
    refused("value", "put", store, "s", "0", "--prompt", prompt, stdin=reply_bytes())
    assert ls(store) == []


# ---------------------------------------------------------------- ingest


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
    ]
    (folder / "mixed.jsonl").write_bytes(b"".join(lines))
    done = tool("ingest", store, folder / "mixed.jsonl", "--jobs", "4", "--json")
    assert done.returncode == 1
    kinds = refusals(done.stderr)
    assert kinds.pop(18) in ("missing", "order")
    assert kinds.pop(14) == "missing"
    assert kinds == {
        3: "syntax", 5: "syntax", 7: "dtype", 8: "order", 9: "order", 11: "order",
        15: "order", 16: "order", 19: "not_found", 20: "type",
    }  # fmt: skip
    assert b"session last has refused lines, left open" in done.stderr
    counts = json.loads(done.stdout)
    assert counts["refused"] == 12
    assert counts["refused_by_kind"]["order"] in (5, 6)
    assert sum(counts["refused_by_kind"].values()) == 12
    assert (counts["sessions_sealed"], counts["turns_stored"]) == (1, 3 + 1 + 1 + 2)
    states = {s["session_id"]: (s["status"], s["turn_count"]) for s in ls(store)}
    assert states == {
        "fine": ("completed", 3), "cut": (None, 1), "bad": (None, 1), "last": (None, 2)
    }  # fmt: skip
    # Once the lines are mended, the rest follows.
    good("ingest", store, "--jobs", "4", stdin=b"".join([*fine, *cut, *bad, *last]))
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


# ---------------------------------------------------------------- session ids

ODD_IDS = [
    "a/b/c",
    "with spaces and 'quotes' \"too\"",
    "emoji \U0001f600 \u4e2d\u6587",
    "run:7",
    "run:7:8",
    ":",
    ":0",
    "-dash",
    "--json",
    "back\\slash",
    "line\nbreak\ttab",
    "\x1b[31mred\x1b[0m\x07",
    "c1 \u009b31m bidi \u202e mark \u2028 sep",
    "x" * 4096,
    "\u00e9" * 2048,
]


def test_odd_session_ids_go_through_every_command(store: Path) -> None:
    good("ingest", store, stdin=b"".join(b"".join(recorded_session(i)) for i in ODD_IDS))
    assert {s["session_id"] for s in ls(store)} == set(ODD_IDS)
    for odd in ODD_IDS:
        shown = json.loads(good("show", store, "--json", "--", odd))
        assert (shown["session_id"], len(shown["turns"])) == (odd, 2)
        turn = lines_of(good("dump", store, "--", odd + ":1"))
        assert [(t["session_id"], t["turn"]) for t in turn] == [(odd, 1)]
        sample = json.loads(good("dump", store, "--sample", "--", odd))
        assert (sample["session_id"], sample["status"]) == (odd, "completed")
        key = shown["key"]
        assert json.loads(good("show", store, key, "--key", "--json"))["session_id"] == odd
    for text in (good("ls", store), *(good("show", store, "--", odd) for odd in ODD_IDS)):
        shown_text = text.decode()
        bad = [c for c in shown_text if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp")]
        assert set(bad) <= {"\n"}
    assert "line\\nbreak\\ttab" in good("ls", store).decode()
    for odd in ODD_IDS:
        good("release", store, "--", odd)
        assert odd not in {s["session_id"] for s in ls(store)}


def test_errors_quote_names_without_their_control_characters(store: Path) -> None:
    text = refused("not_found", "show", store, "\x1b[31mno\nsuch")
    assert "\x1b" not in text and "such" in text


def test_a_name_that_ends_like_a_turn_comes_first(store: Path) -> None:
    good("put", store, "run", "0", "--prompt", "1", stdin=reply_bytes())
    assert json.loads(good("show", store, "run:0", "--json"))["session_id"] == "run"
    refused("not_found", "show", store, "run:1")
    refused("not_found", "show", store, "run:x")
    good("put", store, "run:0", "0", stdin=reply_bytes(2))
    good("put", store, "run:0", "1", stdin=reply_bytes(2))
    shown = json.loads(good("show", store, "run:0", "--json"))
    assert (shown["session_id"], len(shown["turns"])) == ("run:0", 2)
    shown = json.loads(good("show", store, "run:0:1", "--json"))
    assert (shown["session_id"], [t["turn"] for t in shown["turns"]]) == ("run:0", [1])
    shown = json.loads(good("show", store, "run", "--turn", "0", "--json"))
    assert (shown["session_id"], [t["n"] for t in shown["turns"]]) == ("run", [3])
    refused("not_found", "show", store, "run:0:1", "--turn", "0")


def test_ids_that_cannot_be_typed_are_reached_by_key(store: Path) -> None:
    good("put", store, b"bytes \xff\xfe", "0", stdin=reply_bytes())
    good("ingest", store, stdin=b"".join(recorded_session("nul \0 inside")))
    sessions = {s["session_id"]: s for s in ls(store)}
    assert set(sessions) == {"bytes \ufffd\ufffd", "nul \0 inside"}
    assert bytes.fromhex(sessions["bytes \ufffd\ufffd"]["session_id_hex"]) == b"bytes \xff\xfe"
    assert rb"bytes \xff\xfe" in good("ls", store)
    for session in sessions.values():
        good("show", store, session["key"], "--key")
        good("release", store, session["key"], "--key")
        refused("not_found", "show", store, session["key"], "--key")
    refused("argument", "show", store, "12", "--key")
    assert ls(store) == []


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


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_store_is_refused_with_permission(folder: Path, store: Path) -> None:
    def as_nobody(*arguments: str | Path) -> Done:
        return tool(*arguments, user=NOBODY, group=NOBODY, extra_groups=[])

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
    for arguments in (("ls", store), ("show", store, "s"), ("verify", store), ("stat", store)):
        done = as_nobody(*arguments)
        assert (done.returncode, done.stderr) == (0, b""), done
    done = as_nobody("release", store, "s")
    assert done.stderr.startswith(b"rollstore: permission: ")
    assert len(ls(store)) == 1
