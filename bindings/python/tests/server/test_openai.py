"""The real client: an unmodified openai package records a session."""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path
from typing import Any

import pytest
from lab import Lab, run
from test_calls import TOOL

try:
    openai: Any = importlib.import_module("openai")
except ModuleNotFoundError:
    openai = None

pytestmark = pytest.mark.skipif(
    openai is None, reason="no openai package here: its client was NOT tested (tools/check-pypi)"
)


def client_of(lab: Lab, session: dict[str, Any], **options: Any) -> Any:
    return openai.AsyncOpenAI(
        base_url=session["base_url"], api_key=session.get("api_key", "none"), **options
    )


async def opened(lab: Lab, **settings: Any) -> dict[str, Any]:
    headers = {"Authorization": "Bearer t0ken"}
    answer = await lab.ask("POST", "/sessions", settings, headers=headers)
    return dict(answer.json)


def test_a_session_from_end_to_end(path: Path) -> None:
    async def main() -> None:
        async with Lab(path, token="t0ken") as lab:
            session = await opened(lab, id="swe-1/r0", group=1)
            async with client_of(lab, session) as client:
                messages: list[Any] = [{"role": "user", "content": "hello"}]
                for _ in range(3):
                    reply = await client.chat.completions.create(
                        model="policy", messages=messages, logprobs=True, top_logprobs=3
                    )
                    choice = reply.choices[0]
                    assert choice.finish_reason == "stop"
                    assert len(choice.logprobs.content) == 12
                    assert choice.logprobs.content[0].top_logprobs == []
                    messages.append({"role": "assistant", "content": choice.message.content})
                    messages.append({"role": "user", "content": "more"})
                called = await client.chat.completions.create(
                    model="policy", messages=messages, tools=[TOOL]
                )
                assert called.choices[0].message.tool_calls[0].function.name == "search"
                assert [model.id async for model in client.models.list()] == ["policy"]
            headers = {"Authorization": "Bearer t0ken"}
            ended = await lab.ask(
                "POST", "/sessions/swe-1%2Fr0/end", {"reward": 1.0}, headers=headers
            )
            assert (ended.json["turns"], "misaligned" in ended.json) == (4, False)
            with lab.store().snapshot() as snapshot:
                assert snapshot.sessions["swe-1/r0"].turn_count == 4

    run(main)


def test_a_stream(path: Path) -> None:
    async def main() -> None:
        async with Lab(path, token="t0ken") as lab:
            async with client_of(lab, await opened(lab)) as client:
                stream = await client.chat.completions.create(
                    model="policy",
                    messages=[{"role": "user", "content": "hello"}],
                    stream=True,
                    stream_options={"include_usage": True},
                    tools=[TOOL],
                )
                chunks = [chunk async for chunk in stream]
                assert chunks[0].choices[0].delta.tool_calls[0].function.name == "search"
                assert chunks[-1].usage.completion_tokens == 12

    run(main)


def test_errors_are_the_clients_own(path: Path) -> None:
    async def main() -> None:
        async with Lab(path, token="t0ken") as lab:
            session = await opened(lab)
            async with client_of(lab, session) as client:
                ask = client.chat.completions.create
                words: Any = [{"role": "user", "content": "x"}]
                with pytest.raises(openai.BadRequestError, match="leave it out or send 1"):
                    await ask(model="policy", messages=words, top_p=0.5)
                lab.engine.ignores_flat = True
                with pytest.raises(openai.InternalServerError, match="Requested flat output"):
                    await ask(model="policy", messages=words)
                assert len(lab.engine.seen) == 1  # told not to try that again
            wrong = {**session, "api_key": "x"}
            async with client_of(lab, wrong) as client:
                with pytest.raises(openai.AuthenticationError):
                    await client.chat.completions.create(model="policy", messages=words)

    run(main)


def test_the_clients_own_retry_leaves_one_turn(path: Path) -> None:
    """Its time-out ends the first try; the second one is answered."""

    async def main() -> None:
        async with Lab(path, token="t0ken") as lab:
            session = await opened(lab)
            lab.engine.failures.append("hang")
            async with client_of(lab, session, timeout=1.0, max_retries=2) as client:
                reply = await client.chat.completions.create(
                    model="policy", messages=[{"role": "user", "content": "x"}]
                )
            assert reply.choices[0].finish_reason == "stop"
            await asyncio.sleep(0)
            with lab.store().snapshot() as snapshot:
                assert snapshot.sessions[session["id"]].turn_count == 1

    run(main)
