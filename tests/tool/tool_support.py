"""Running the rollstore tool, and making what it reads.

The environment variable ROLLSTORE_TOOL names the program under test.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).parents[1] / "data"
TOOL = os.environ.get("ROLLSTORE_TOOL", "")
NOBODY = 65534
COMMANDS = "create decode put ingest ls show dump stat verify copy release consumers bench".split()

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


def decode_arguments(case: Json) -> list[str]:
    arguments = ["decode", "--mode", case.get("mode", "selected")]
    request = case.get("request", "nested" if "nested" in case["name"] else "flat")
    arguments += ["--request", request]
    for option, member in (("--top-k", "k"), ("--choice", "choice")):
        if member in case:
            arguments += [option, str(case[member])]
    return arguments
