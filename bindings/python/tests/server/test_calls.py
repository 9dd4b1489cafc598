"""Training calls are stored as the engine replied, and answered without candidates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine import DATA, Generation, render, reply_of
from lab import WORDS, Lab, run
from replies import sha256

import rollstore

TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}


def assert_is_reply(turn: rollstore.Turn, reply: Any, **how: Any) -> None:
    """The stored turn is what decoding the engine's reply by itself gives."""
    alone = rollstore.decode(json.dumps(reply), **how)
    for name in ("token_ids", "token_logprobs", "topk_ids", "topk_logprobs"):
        assert np.array_equal(getattr(turn, name), getattr(alone, name)), name
    assert turn.finish_reason == alone.finish_reason
    assert turn.weight_version == alone.weight_version


def test_a_call_is_stored_before_its_answer(path: Path) -> None:
    async def main() -> None:
        async with Lab(path, temperature=0.7) as lab:
            session = await lab.open(group=3, index=7)
            answer = await lab.chat(session)
            assert answer.status == 200
            assert answer.headers["x-rollstore-turn"] == "0"
            with lab.store().snapshot() as snapshot:
                entry = snapshot.sessions[session]
                assert (entry.state, entry.turn_count, entry.top_k) == ("open", 1, 4)
                turn = entry[0]
                reply = reply_of(lab.engine.seen[0], lab.engine)
                assert_is_reply(turn, reply, top_k=4)
                assert turn.temperature == pytest.approx(0.7)
                assert turn.prompt_ids.tolist() == render(WORDS["messages"])
                del turn
            reply["choices"][0]["logprobs"] = None
            del reply["choices"][0]["meta_info"], reply["choices"][0]["prompt_token_ids"]
            assert answer.json == reply
            ended = await lab.end(session, reward=0.5)
            assert ended.json["stored"] is True
            with lab.store().snapshot() as snapshot:
                entry = snapshot.sessions[session]
                assert (entry.state, entry.status, entry.reward) == ("sealed", "completed", 0.5)
                assert (entry.group_index, entry.index) == (3, 7)

    run(main)


def test_the_engine_is_asked_for_candidates(path: Path) -> None:
    async def main() -> None:
        async with Lab(path) as lab:
            session = await lab.open()
            await lab.chat(session, max_tokens=3, user="me")
            (seen,) = lab.engine.seen
            assert seen == {
                **WORDS,
                "max_tokens": 3,
                "user": "me",
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": -1,
                "min_p": 0.0,
                "logprobs": True,
                "top_logprobs": 4,
                "return_flat_raw_output_top_logprobs": True,
                "return_flat_raw_top_logprobs_b64": True,
                "return_meta_info": True,
                "return_prompt_token_ids": True,
            }

    run(main)


def test_messages_pass_as_they_are_spelled(path: Path) -> None:
    async def main() -> None:
        async with Lab(path) as lab:
            session = await lab.open()
            spelled = b'[ {"role" : "user","content":"caf\\u00e9 \\/ \xc3\xa9"} ]'
            body = b'{ "messages":' + spelled + b' , "model": "policy"}'
            assert (await lab.chat(session, body)).status == 200
            assert b'"messages":' + spelled + b"," in lab.engine.bodies[0]

    run(main)


def test_a_large_request_is_as_good_as_a_small_one(path: Path) -> None:
    """It is looked at in a thread, and refused there just the same."""

    async def main() -> None:
        async with Lab(path) as lab:
            session = await lab.open()
            picture = [{"type": "text", "text": "w5 " * 200_000}]
            messages = [{"role": "user", "content": picture}]
            assert (await lab.chat(session, messages=messages)).status == 200
            assert lab.engine.seen[0]["messages"] == messages
            refused = await lab.chat(session, messages=messages, top_p=0.5)
            assert (refused.status, refused.error["param"]) == (400, "top_p")
            again = await lab.chat(session, messages=messages)
            assert again.headers["x-rollstore-turn"] == "0"
            with lab.store().snapshot() as snapshot:
                assert snapshot.sessions[session].turn_count == 1

    run(main)


def test_logprobs_are_given_to_those_who_ask(path: Path) -> None:
    async def main() -> None:
        async with Lab(path) as lab:
            session = await lab.open()
            answer = await lab.chat(session, logprobs=True, top_logprobs=2, return_meta_info=True)
            reply = reply_of(lab.engine.seen[0], lab.engine)["choices"][0]
            choice = answer.json["choices"][0]
            assert choice["logprobs"] == reply["logprobs"]
            assert all(token["top_logprobs"] == [] for token in choice["logprobs"]["content"])
            assert len(choice["logprobs"]["content"]) == 12
            assert not any(name.startswith("output_top") for name in choice["meta_info"])
            tokens = reply["meta_info"]["output_token_logprobs"]
            assert choice["meta_info"]["output_token_logprobs"] == tokens

    run(main)


@pytest.mark.parametrize("b64_flag", ["return_flat_raw_output_top_logprobs_b64", "nothing"])
def test_the_base64_flag_has_the_engines_name(path: Path, b64_flag: str) -> None:
    """An engine that knows another name answers plain arrays, which are recorded as well."""

    async def main() -> None:
        async with Lab(path, b64_flag="return_flat_raw_output_top_logprobs_b64") as lab:
            lab.engine.b64_flag = b64_flag
            session = await lab.open()
            assert (await lab.chat(session)).status == 200
            assert "return_flat_raw_top_logprobs_b64" not in lab.engine.seen[0]
            with lab.store().snapshot() as snapshot:
                reply = reply_of(lab.engine.seen[0], lab.engine)
                assert_is_reply(snapshot.sessions[session][0], reply, top_k=4)

    run(main)


def test_support_mode(path: Path) -> None:
    async def main() -> None:
        async with Lab(path, mode="support", top_k=8) as lab:
            session = await lab.open()
            assert (await lab.chat(session)).status == 400
            answer = await lab.chat(session, top_k=6, top_p=0.9)
            assert answer.status == 200
            seen = lab.engine.seen[0]
            assert seen["sampling_logprobs_mode"] == "support"
            assert "top_logprobs" not in seen
            with lab.store().snapshot() as snapshot:
                turn = snapshot.sessions[session][0]
                reply = reply_of(seen, lab.engine)
                assert_is_reply(turn, reply, top_k=8, mode="support")
                assert turn.widths is not None
                assert len(np.unique(turn.widths)) > 1
                del turn
            assert "sampling" not in answer.body.decode()

    run(main)


@pytest.mark.parametrize(("settings", "k"), [({"candidates": "nested"}, 4), ({"top_k": 0}, 0)])
def test_nested_and_none(path: Path, settings: dict[str, Any], k: int) -> None:
    async def main() -> None:
        async with Lab(path, **settings) as lab:
            session = await lab.open()
            answer = await lab.chat(session, logprobs=True)
            assert answer.status == 200
            assert not any(name.startswith("return_flat") for name in lab.engine.seen[0])
            content = answer.json["choices"][0]["logprobs"]["content"]
            assert [token["top_logprobs"] for token in content] == [[]] * 12
            with lab.store().snapshot() as snapshot:
                turn = snapshot.sessions[session][0]
                assert (turn.n, turn.top_k) == (12, k)
                how = "nested" if k else "none"
                assert_is_reply(turn, reply_of(lab.engine.seen[0], lab.engine), request=how)
                del turn

    run(main)


def test_tool_calls_make_a_sample(path: Path) -> None:
    async def main() -> None:
        async with Lab(path) as lab:
            session = await lab.open()
            messages: list[Any] = [{"role": "user", "content": "look it up"}]
            answer = await lab.chat(session, messages=messages, tools=[TOOL])
            choice = answer.json["choices"][0]
            assert choice["finish_reason"] == "tool_calls"
            assert choice["message"]["tool_calls"][0]["function"]["name"] == "search"
            with lab.store().snapshot() as snapshot:
                assert snapshot.sessions[session][0].finish_reason == "tool_calls"

    run(main)


def test_turns_of_a_conversation_make_one_sample(path: Path) -> None:
    async def main() -> None:
        async with Lab(path) as lab:
            session = await lab.open()
            messages = await lab.talk(session, 4)
            ended = (await lab.end(session)).json
            assert ended["turns"] == 4
            assert ended["tokens"] == 48
            assert "misaligned" not in ended
            with lab.store().snapshot() as snapshot:
                sample = snapshot.sessions[session].sample()
            assert sample.tokens.tolist() == render(messages[:-1])[:-2]
            assert int(sample.loss_mask.sum()) == 48

    run(main)


def test_a_session_whose_prompts_contradict_is_told_at_its_end(path: Path) -> None:
    async def main() -> None:
        async with Lab(path) as lab:
            session = await lab.open()
            await lab.chat(session)
            await lab.chat(session, messages=[{"role": "user", "content": "something else"}])
            ended = (await lab.end(session)).json
            assert ended["turns"] == 2
            assert "turn 1" in ended["misaligned"]
            assert (await lab.metrics())["misaligned_sessions_total"] == 1

    run(main)


def test_recorded_sessions_come_out_as_they_must(path: Path) -> None:
    """All of the fixture through the server; the samples are the fixture's own."""

    async def main() -> None:
        async with Lab(path, top_k=32, temperature=0.8) as lab:
            lab.engine.load_sessions()
            for line in (DATA / "sessions.jsonl").read_bytes().splitlines():
                entry = json.loads(line)
                session = entry["session_id"].replace("/", "%2F")
                if "end" in entry:
                    end = entry["end"]
                    outcome = {"status": end["status"], "reward": end["reward"]}
                    more = {"group": end["group_index"], "index": end["index"]}
                    assert (await lab.end(session, **outcome, **more)).status == 200
                    continue
                if entry["turn"] == 0:
                    await lab.open(id=entry["session_id"])
                answer = await lab.chat(session, entry["request"])
                assert answer.status == 200, answer.body
                assert answer.headers["x-rollstore-turn"] == str(entry["turn"])
                message = entry["response"]["choices"][0]["message"]
                assert answer.json["choices"][0]["message"] == message
            with lab.store().snapshot() as snapshot:
                for line in (DATA / "sessions_expected.jsonl").read_bytes().splitlines():
                    check_sample(snapshot, json.loads(line))

    run(main)


def check_sample(snapshot: rollstore.Snapshot, wanted: dict[str, Any]) -> None:
    sample = snapshot.sessions[wanted["session_id"]].sample()
    assert sample.status == wanted["status"]
    names = {
        "tokens": "tokens_i32",
        "loss_mask": "loss_mask_u8",
        "rollout_logprobs": "rollout_logprobs_f32",
        "topk_ids": "topk_ids_i32",
        "topk_logprobs": "topk_logprobs_f32",
    }
    for name, key in names.items():
        assert sha256(getattr(sample, name)) == wanted["sha256"][key], (wanted, name)


# ---------------------------------------------------------------- streams


def test_a_stream_is_answered_as_one(path: Path) -> None:
    async def main() -> None:
        async with Lab(path) as lab:
            session = await lab.open()
            whole = (await lab.chat(await lab.open())).json
            options = {"include_usage": True}
            answer = await lab.chat(session, stream=True, stream_options=options)
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            assert not {"stream", "stream_options"} & set(lab.engine.seen[-1])
            message, end, usage = answer.events
            assert {chunk["object"] for chunk in answer.events} == {"chat.completion.chunk"}
            assert {chunk["id"] for chunk in answer.events} == {whole["id"]}
            delta = message["choices"][0]["delta"]
            assert delta == {
                "role": "assistant",
                "content": whole["choices"][0]["message"]["content"],
            }
            assert message["choices"][0]["logprobs"] is None
            assert message["choices"][0]["finish_reason"] is None
            assert end["choices"][0]["delta"] == {}
            assert end["choices"][0]["finish_reason"] == "stop"
            assert usage["choices"] == []
            assert usage["usage"] == whole["usage"]
            with lab.store().snapshot() as snapshot:
                assert snapshot.sessions[session].turn_count == 1

    run(main)


def test_a_stream_has_logprobs_and_tool_calls(path: Path) -> None:
    async def main() -> None:
        async with Lab(path) as lab:
            session = await lab.open()
            answer = await lab.chat(session, stream=True, logprobs=True, tools=[TOOL])
            message, end = answer.events
            choice = message["choices"][0]
            assert [call["index"] for call in choice["delta"]["tool_calls"]] == [0]
            assert choice["delta"]["tool_calls"][0]["function"]["name"] == "search"
            reply = reply_of(lab.engine.seen[0], lab.engine)["choices"][0]
            assert choice["logprobs"] == reply["logprobs"]
            assert end["choices"][0]["finish_reason"] == "tool_calls"

    run(main)


# ---------------------------------------------------------------- evaluation


def test_evaluation_passes_untouched_and_stores_nothing(path: Path) -> None:
    async def main() -> None:
        async with Lab(path) as lab:
            session = await lab.open(evaluation=True)
            body = b'{"model":"policy", "messages":[{"role":"user","content":"x"}],"top_p":0.5}'
            answer = await lab.chat(session, body)
            assert lab.engine.bodies == [body]
            assert answer.json == reply_of(json.loads(body), lab.engine)
            streamed = await lab.chat(session, stream=True)
            assert len(streamed.events) > 5
            lab.engine.failures.append(429)
            assert (await lab.chat(session)).status == 429
            ended = (await lab.end(session, reward=1)).json
            assert (ended["stored"], ended["evaluation"]) == (False, True)
            assert lab.store().stat().session_count == 0
            metrics = await lab.metrics()
            assert metrics['calls_total{kind="evaluation",outcome="answered"}'] == 2

    run(main)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("n", True),
        ("temperature", 0.3),
        ("top_p", 0.9),
        ("logit_bias", {"5": 1}),
        ("response_format", {"type": "json_object"}),
        ("tool_choice", "required"),
        ("stream", "yes"),
        ("input_ids", [1, -2]),
        ("input_ids", "text"),
    ],
)
def test_what_cannot_be_recorded_is_refused(path: Path, field: str, value: Any) -> None:
    async def main() -> None:
        async with Lab(path) as lab:
            session = await lab.open()
            answer = await lab.chat(session, **{field: value})
            assert answer.status == 400
            assert answer.error["param"] == field
            assert answer.error["type"] == "invalid_request_error"
            assert answer.headers["x-should-retry"] == "false"
            assert lab.engine.seen == []
            assert lab.store().stat().session_count == 0
            assert (await lab.metrics())['refusals_total{kind="request"}'] == 1

    run(main)


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"n":}', b"\xff", b'{"a":1}{}'])
def test_a_request_that_is_no_object_is_refused(path: Path, body: bytes) -> None:
    async def main() -> None:
        async with Lab(path) as lab:
            answer = await lab.chat(await lab.open(), body)
            assert answer.status == 400
            assert answer.error["code"] == "request"

    run(main)


def test_an_engine_without_flat_fields_is_told_at_the_first_call(path: Path) -> None:
    async def main() -> None:
        async with Lab(path) as lab:
            lab.engine.ignores_flat = True
            session = await lab.open()
            answer = await lab.chat(session)
            assert answer.status == 502
            wanted = "Requested flat output top logprobs but the response has none"
            assert answer.error["message"].startswith(wanted)
            assert "--candidates nested" in answer.error["message"]
            assert answer.headers["x-should-retry"] == "false"
            assert lab.store().stat().session_count == 0

    run(main)


def test_a_reply_over_a_records_limits_is_the_engines_fault(path: Path) -> None:
    async def main() -> None:
        async with Lab(path) as lab:
            session = await lab.open()
            lab.engine.weight_version = "v" * 2000
            answer = await lab.chat(session)
            assert (answer.status, answer.error["param"]) == (502, "weight_version")
            assert lab.store().stat().turn_count == 0

    run(main)


def test_an_engine_that_does_not_say_prompts_is_told_once(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with Lab(path) as lab:
            lab.engine.ignores_prompt = True
            session = await lab.open()
            assert (await lab.chat(session)).status == 200
            assert (await lab.chat(await lab.open())).status == 200
            assert (await lab.metrics())["turns_without_prompt_total"] == 2
            assert len([r for r in caplog.records if "prompt" in r.message]) == 1
            with lab.store().snapshot() as snapshot:
                assert len(snapshot.sessions[session][0].prompt_ids) == 0
            ids = [5, 6, 7]
            assert (await lab.chat(await lab.open(), input_ids=ids)).status == 200
            assert "return_prompt_token_ids" not in lab.engine.seen[-1]
            assert (await lab.metrics())["turns_without_prompt_total"] == 2

    run(main)


def test_the_stand_in_engine_says_what_it_samples() -> None:
    """The tests above compare with it: it must not say the same of different prompts."""
    made = [Generation([1, 2, seed], 5, 4) for seed in (3, 4)]
    assert made[0].tokens != made[1].tokens
    assert np.all(np.diff(made[0].top_logprobs, axis=1) <= 0)
