"""The tool: help, decode, create, put, and how sessions are named."""

from __future__ import annotations

import json
import re
import unicodedata
from pathlib import Path

import numpy as np
import pytest

from tool_support import (
    COMMANDS,
    decode_arguments,
    floats,
    good,
    integers,
    lines_of,
    ls,
    make_reply,
    read_golden,
    read_lines,
    recorded_session,
    refused,
    reply_bytes,
    reply_tokens,
    sha,
)

# ---------------------------------------------------------------- help and usage


def test_help_lists_every_command_and_each_shows_an_example() -> None:
    text = good("--help").decode()
    assert max(len(line) for line in text.splitlines()) <= 80
    for name in COMMANDS:
        assert re.search(rf"^  {name} ", text, re.M)
        own = good(name, "--help").decode()
        assert own.startswith(f"usage: rollstore {name}")
        assert f"example: {'curl' if name == 'decode' else ''}" in own
        assert "Exit status: 0" in own
        assert own == good("help", name).decode()
        assert max(len(line) for line in own.splitlines()) <= 80
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
        ["create", "/x", "--capacity", "0"],
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
        ["put", "/x", "s", "0", "--reward", "1"],
        ["put", "/x", "s", "0", "--temperature", "nan"],
        ["put", "/x", "s", "0", "--temperature", "-1"],
        ["put", "/x", "s", "0", "--temperature", "1e39"],
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
        text = refused(case["error"], *decode_arguments(case), stdin=raw)
        if case["name"] == "no_flat_fields":
            message = "Requested flat output top logprobs but the response has none"
            assert text.startswith(f"rollstore: missing: {message}")
        if case["name"] == "b64_bad_character":
            assert "output_top_logprobs_val_flat_b64" in text and "character 40" in text


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


@pytest.mark.parametrize(
    "prompt", ["1,x", "-1", "1;2", "2147483648", "99999999999999999999", "1.5", "1,,2", ",1", "1,"]
)
def test_put_refuses_a_prompt_that_is_none(store: Path, prompt: str) -> None:
    refused("value", "put", store, "s", "0", "--prompt", prompt, stdin=reply_bytes())
    assert ls(store) == []


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
