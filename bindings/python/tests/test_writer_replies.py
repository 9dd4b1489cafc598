"""Putting replies, in every form that they come in, and what is refused."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replies import ARRAYS, fixtures, make_reply, make_text, options, sha256

import rollstore

GOLDEN = list(zip(fixtures("golden.jsonl"), fixtures("golden_expected.jsonl")))
MALFORMED = fixtures("malformed.jsonl")


def as_mmap(text: bytes, folder: Path) -> mmap.mmap:
    file = folder / "reply.json"
    file.write_bytes(text)
    with file.open("rb") as opened:
        return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)


FORMS = ("bytes", "bytearray", "memoryview", "mmap", "str", "dict")


def in_form(reply: dict[str, Any], form: str, folder: Path) -> Any:
    text = json.dumps(reply, ensure_ascii=False).encode()
    if form == "mmap":
        return as_mmap(text, folder)
    if form == "str":
        return text.decode()
    if form == "dict":
        return json.loads(text)
    return {"bytes": bytes, "bytearray": bytearray, "memoryview": memoryview}[form](text)


@pytest.mark.parametrize("form", FORMS)
def test_golden_replies_are_stored_exactly(store: rollstore.Store, form: str, tmp_path: Path):
    for case, _ in GOLDEN:
        reply = in_form(case["reply"], form, tmp_path)
        assert store.put_reply(case["name"], 0, reply, **options(case)) is True
    with store.snapshot() as snapshot:
        for case, expected in GOLDEN:
            turn = snapshot.sessions[case["name"]][0]
            assert (turn.n, turn.top_k) == (expected["n"], expected["k"])
            for name, wanted in expected["sha256"].items():
                assert sha256(getattr(turn, name.rsplit("_", 1)[0])) == wanted, (case["name"], name)


def test_a_dict_gives_the_same_turn_as_its_text():
    for case, _ in GOLDEN:
        text = rollstore.decode(json.dumps(case["reply"]), **options(case))
        parsed = rollstore.decode(case["reply"], **options(case))
        for name in ARRAYS:
            assert getattr(text, name).tobytes() == getattr(parsed, name).tobytes()
        for name in ("finish_reason", "weight_version", "temperature_scaled", "mode", "top_k"):
            assert getattr(text, name) == getattr(parsed, name)


@pytest.mark.parametrize("case", MALFORMED, ids=lambda case: case["name"])
def test_malformed_replies_are_refused_and_nothing_is_stored(store: rollstore.Store, case: Any):
    text = case["raw"] if "raw" in case else json.dumps(case["reply"])
    with pytest.raises(rollstore.ReplyError) as of_text:
        store.put_reply("s", 0, text.encode(), **options(case))
    assert of_text.value.kind == case["error"]
    if "reply" in case:
        with pytest.raises(rollstore.ReplyError) as of_dict:
            store.put_reply("s", 0, case["reply"], **options(case))
        assert of_dict.value.kind == case["error"]
        assert of_dict.value.field == of_text.value.field
        assert of_dict.value.offset is None
    assert store.stat().turn_count == 0


def test_an_error_says_kind_field_and_offset(store: rollstore.Store):
    reply = make_reply(3, 4)
    meta = reply["choices"][0]["meta_info"]
    meta["output_top_logprobs_idx_flat_b64"] = "*" + meta["output_top_logprobs_idx_flat_b64"][1:]
    text = json.dumps(reply)
    with pytest.raises(rollstore.ReplyError) as caught:
        store.put_reply("s", 0, text, top_k=4)
    error = caught.value
    assert (error.kind, error.field) == ("base64", "output_top_logprobs_idx_flat_b64")
    assert error.offset == text.index("*")
    assert isinstance(error, ValueError)


def test_numbers_of_a_dict_keep_every_bit():
    rng = np.random.default_rng(1)
    bits = rng.integers(0x80000000, 0xFF800000, 20000, dtype=np.uint32)  # all of -0.0 to -FLT_MAX
    values = np.concatenate(
        [
            bits.view(np.float32),
            -(np.float32(10) ** rng.uniform(-12, 3, 20000).astype(np.float32)),
            -np.arange(0, 100, 0.5, dtype=np.float32),
            np.float32([-0.0, -1e-4, -9.999999, -10, -99999.99, -1e5, -1e-30, -1e-45, -3.4e38]),
        ]
    ).astype(np.float32)
    reply = make_reply(len(values), 0)
    pairs = [[value, 1, None] for value in values.tolist()]
    reply["choices"][0]["meta_info"]["output_token_logprobs"] = pairs
    assert rollstore.decode(reply).token_logprobs.tobytes() == values.tobytes()


def test_numbers_of_a_dict_that_are_no_float32_are_rounded_as_those_of_a_text():
    rng = np.random.default_rng(2)
    doubles = (-(10.0 ** rng.uniform(-40, 30, 5000))).tolist()
    reply = make_reply(len(doubles), 0)
    pairs = [[value, 1, "a token"] for value in doubles]
    reply["choices"][0]["meta_info"]["output_token_logprobs"] = pairs
    parsed = rollstore.decode(reply).token_logprobs
    assert parsed.tobytes() == rollstore.decode(json.dumps(reply)).token_logprobs.tobytes()
    assert parsed.tobytes() == np.array(doubles).astype(np.float32).tobytes()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_of_a_dict_are_refused(value: float):
    reply = make_reply(2, 1)
    reply["choices"][0]["meta_info"]["output_token_logprobs"][1][0] = value
    with pytest.raises(rollstore.ReplyError) as caught:
        rollstore.decode(reply)
    assert (caught.value.kind, caught.value.field) == ("value", "output_token_logprobs")


@pytest.mark.parametrize("text", ['quote " \\ and \n', "é 漢 🎲", "\x00\x1f\x7f", "half \ud800"])
@pytest.mark.parametrize("repeat", [1, 2000])
def test_any_text_of_a_dict_is_passed_on_as_it_is(text: str, repeat: int):
    reply = make_reply(1, 1)
    meta = reply["choices"][0]["meta_info"]
    meta["output_token_logprobs"][0][2] = text * repeat
    assert rollstore.decode(reply).n == 1
    if repeat == 1 and "\ud800" not in text:
        meta["weight_version"] = text
        assert rollstore.decode(reply).weight_version == text


def test_a_base64_string_of_a_dict_with_an_escape_in_it_is_refused_as_such():
    reply = make_reply(400, 8)
    meta = reply["choices"][0]["meta_info"]
    for bad in ('"', "\\", "\n", "é"):
        good = meta["output_top_logprobs_val_flat_b64"]
        assert len(good) > 4096
        meta["output_top_logprobs_val_flat_b64"] = good[:5000] + bad + good[5001:]
        with pytest.raises(rollstore.ReplyError) as caught:
            rollstore.decode(reply)
        assert caught.value.kind == "base64"
        meta["output_top_logprobs_val_flat_b64"] = good


def test_a_dict_that_no_parser_makes_is_a_type_error():
    for strange in ({1: 2}, {"a": object()}, {"a": {1, 2}}):
        reply = make_reply(1, 1)
        reply["choices"][0]["meta_info"]["weight_version"] = strange
        with pytest.raises(TypeError):
            rollstore.decode(reply)
    nested: Any = []
    for _ in range(5000):
        nested = [nested]
    reply["choices"][0]["meta_info"]["weight_version"] = nested
    with pytest.raises(rollstore.ReplyError, match="nested") as caught:
        rollstore.decode(reply)
    assert caught.value.kind == "syntax"


@pytest.mark.parametrize("strange", [None, 7, 1.5, ["[]"], object()])
def test_a_reply_of_another_type_is_a_type_error(store: rollstore.Store, strange: Any):
    with pytest.raises(TypeError, match="reply"):
        store.put_reply("s", 0, strange)


def test_what_the_reply_does_not_say_is_kept(store: rollstore.Store):
    store.put_reply("s", 0, make_text(4, 2), prompt=[5, 6, 7], temperature=0.5)
    with store.snapshot() as snapshot:
        turn = snapshot.sessions["s"][0]
        assert turn.prompt_ids.tolist() == [5, 6, 7]
        assert turn.temperature == 0.5
        assert (turn.finish_reason, turn.weight_version) == ("stop", "1")
        assert turn.weight_version_number == 1
        assert turn.temperature_scaled is None


@pytest.mark.parametrize(
    "prompt",
    [
        [1, 2, 3],
        (1, 2, 3),
        range(1, 4),
        np.array([1, 2, 3], np.int32),
        np.array([1, 2, 3], np.int64),
        np.array([1, 2, 3], np.uint8),
        np.array([1, 9, 2, 9, 3], np.int32)[::2],
        np.array([1, 2, 3], ">i4"),
        [np.int64(1), np.int32(2), 3],
    ],
    ids=str,
)
def test_a_prompt_may_be_any_list_of_integers(prompt: Any):
    assert rollstore.decode(make_text(1, 1), prompt=prompt).prompt_ids.tolist() == [1, 2, 3]


@pytest.mark.parametrize("prompt", [[1.5], np.array([1.0]), ["a"], np.zeros((2, 2), np.int32), 3])
def test_a_prompt_of_something_else_is_refused(prompt: Any):
    with pytest.raises((TypeError, ValueError), match="prompt|int"):
        rollstore.decode(make_text(1, 1), prompt=prompt)


@pytest.mark.parametrize("prompt", [[-1], [2**31], [2**70], np.array([2**31])])
def test_a_prompt_with_an_id_out_of_range_is_refused(prompt: Any):
    with pytest.raises(rollstore.ReplyError) as caught:
        rollstore.decode(make_text(1, 1), prompt=prompt)
    assert caught.value.kind == "value"
