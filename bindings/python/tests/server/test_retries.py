"""Failures, retries and aborts: the record stays what the agent saw."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from engine import reply_of
from lab import WORDS, Lab, run, until
from test_calls import assert_is_reply

import rollstore


def turns(lab: Lab, session: str) -> int:
    """Of the session in the store; 0 when it is not there."""
    with lab.store().snapshot() as snapshot:
        entry = snapshot.sessions.get(session)
        return 0 if entry is None else entry.turn_count


@pytest.mark.parametrize("failure", [500, 502, 503, "close", "cut"])
def test_a_failed_attempt_is_made_again(path: Path, failure: Any) -> None:
    async def main() -> None:
        async with Lab(path) as lab:
            session = await lab.open()
            lab.engine.failures.append(failure)
            answer = await lab.chat(session)
            assert answer.status == 200
            assert len(lab.engine.seen) == 2
            assert turns(lab, session) == 1
            assert (await lab.metrics())["engine_retries_total"] == 1

    run(main)


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (500, 500, "engine_error"),
        ("close", 502, "engine_broke_off"),
        ("cut", 502, "engine_broke_off"),
    ],
)
def test_an_engine_that_goes_on_failing(path: Path, failure: Any, status: int, code: str) -> None:
    async def main() -> None:
        async with Lab(path, retries=1) as lab:
            session = await lab.open()
            lab.engine.failures.extend([failure] * 2)
            answer = await lab.chat(session)
            assert answer.status == status
            assert answer.error["type"] in ("server_error", "engine_error")
            assert (await lab.metrics())[f'refusals_total{{kind="{code}"}}'] == 1
            assert turns(lab, session) == 0
            assert (await lab.chat(session)).status == 200
            assert turns(lab, session) == 1

    run(main)


@pytest.mark.parametrize(
    ("failure", "status", "said"),
    [
        (400, 400, "failure 400"),
        (429, 429, "failure 429"),
        ("garbage", 502, "not JSON"),
        ("error", 502, "The request queue is full."),
    ],
)
def test_what_trying_again_does_not_mend(path: Path, failure: Any, status: int, said: str) -> None:
    async def main() -> None:
        async with Lab(path) as lab:
            session = await lab.open()
            lab.engine.failures.append(failure)
            answer = await lab.chat(session)
            assert answer.status == status
            assert said in answer.error["message"]
            assert len(lab.engine.seen) == 1
            assert turns(lab, session) == 0

    run(main)


def test_a_session_leaves_an_engine_that_is_down(path: Path) -> None:
    async def main() -> None:
        async with Lab(path, engines=2) as lab:
            sessions = [await lab.open() for _ in range(4)]
            for session in sessions * 2:
                assert (await lab.chat(session, user=session)).status == 200
            # Each session stays with its engine, and they share the load.
            users = [{seen["user"] for seen in engine.seen} for engine in lab.engines]
            assert [len(found) for found in users] == [2, 2]
            assert not users[0] & users[1]
            await lab.engines[0].stop()
            for session in sessions:
                assert (await lab.chat(session, seed=1)).status == 200
            assert len(lab.engines[1].seen) == 4 + 4
            assert (await lab.ask("GET", "/health")).json["engines_up"] == 1
            await lab.engines[1].stop()
            answer = await lab.chat(sessions[0], seed=2)
            assert answer.status == 502
            assert answer.error["code"] == "engine_unreachable"

    run(main)


def test_a_time_out_is_told_and_stores_nothing(path: Path) -> None:
    async def main() -> None:
        async with Lab(path, timeout=0.3) as lab:
            session = await lab.open()
            lab.engine.failures.append("hang")
            answer = await lab.chat(session)
            assert answer.status == 504
            assert answer.error["code"] == "engine_timeout"
            assert len(lab.engine.seen) == 1
            await until(lambda: lab.engine.aborted == 1)
            assert turns(lab, session) == 0

    run(main)


def test_an_aborted_generation_is_stored_and_its_retry_replaces_it(path: Path) -> None:
    async def main() -> None:
        async with Lab(path) as lab:
            session = await lab.open()
            lab.engine.failures.append("abort")
            answer = await lab.chat(session)
            assert answer.json["choices"][0]["finish_reason"] == "abort"
            with lab.store().snapshot() as snapshot:
                turn = snapshot.sessions[session][0]
                assert (turn.n, turn.finish_reason) == (0, "abort")
                del turn
            # Not the same bytes, but the same prompt.
            assert (await lab.chat(session, seed=5)).status == 200
            with lab.store().snapshot() as snapshot:
                entry = snapshot.sessions[session]
                assert (entry.turn_count, entry[0].n) == (1, 12)

    run(main)


# ---------------------------------------------------------------- the agent's side


def test_a_retry_takes_the_turns_place(path: Path) -> None:
    """The answer was stored and lost on its way: the next answer is what the agent saw."""

    async def main() -> None:
        async with Lab(path) as lab:
            session = await lab.open()
            messages = await lab.talk(session, 2)
            again = {**WORDS, "messages": messages[:-2]}
            lab.engine.salt = 1
            answer = await lab.chat(session, again)
            assert answer.headers["x-rollstore-turn"] == "1"
            with lab.store().snapshot() as snapshot:
                entry = snapshot.sessions[session]
                assert entry.turn_count == 2
                assert_is_reply(entry[1], reply_of(lab.engine.seen[-1], lab.engine), top_k=4)
            metrics = await lab.metrics()
            assert metrics["replaced_turns_total"] == 1
            ended = (await lab.end(session)).json
            assert (ended["turns"], "misaligned" in ended) == (2, False)

    run(main)


def test_a_retry_is_known_without_prompts(path: Path) -> None:
    async def main() -> None:
        async with Lab(path) as lab:
            lab.engine.ignores_prompt = True
            session = await lab.open()
            for salt in range(3):
                lab.engine.salt = salt
                answer = await lab.chat(session)
                assert answer.headers["x-rollstore-turn"] == "0"
            assert turns(lab, session) == 1
            assert (await lab.chat(session, user="other")).headers["x-rollstore-turn"] == "1"

    run(main)


async def leave_early(lab: Lab, session: str) -> None:
    """A call whose client closes its connection while the engine works."""
    lab.engine.failures.append("hang")
    running = asyncio.ensure_future(lab.chat(session))
    await until(lambda: lab.engine.running > 0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


def test_an_agent_that_leaves_stops_the_engine(path: Path) -> None:
    async def main() -> None:
        async with Lab(path) as lab:
            session = await lab.open()
            await leave_early(lab, session)
            await until(lambda: lab.engine.aborted == 1)
            assert turns(lab, session) == 0
            assert (await lab.chat(session)).status == 200
            assert turns(lab, session) == 1

    run(main)


def test_a_retry_does_not_wait_for_the_call_it_repeats(path: Path) -> None:
    async def main() -> None:
        async with Lab(path) as lab:
            session = await lab.open()
            await leave_early(lab, session)
            assert (await lab.chat(session, seed=3)).status == 200
            assert turns(lab, session) == 1

    run(main)


def test_one_call_at_a_time(path: Path) -> None:
    async def main() -> None:
        async with Lab(path) as lab:
            session = await lab.open()
            lab.engine.failures.append("hang")
            first = asyncio.ensure_future(lab.chat(session))
            await until(lambda: lab.engine.running > 0)
            second = await lab.chat(session, user="another")
            assert second.status == 409
            assert second.error["code"] == "concurrent_call"
            assert second.headers["x-should-retry"] == "true"
            # The same request again takes the first one's place.
            assert (await lab.chat(session)).status == 200
            answer = await first
            assert (answer.status, answer.error["code"]) == (409, "superseded")
            assert turns(lab, session) == 1

    run(main)


def test_an_agent_that_left_before_the_answer_has_no_turn(path: Path) -> None:
    """It leaves while its turn waits for space: what it never saw is taken back."""

    async def main() -> None:
        async with Lab(path, capacity="1M", full_timeout=20.0) as lab:
            lab.engine.tokens = 3000
            filler = 0
            store = lab.store()
            while True:
                try:
                    store.put_reply(f"f{filler}", 0, BIG, top_k=0, timeout=0)
                except rollstore.FullError:
                    break
                filler += 1
            session = await lab.open()
            running = asyncio.ensure_future(lab.chat(session))
            await until(lambda: len(lab.engine.seen) == 1 and lab.engine.running == 0)
            await asyncio.sleep(0.2)
            assert turns(lab, session) == 0
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            for at in range(filler):
                store.release(f"f{at}")
            assert lab.server is not None
            server = lab.server
            await until(lambda: server.proxy.running == 0)
            assert turns(lab, session) == 0
            assert (await lab.metrics())["dropped_turns_total"] == 1
            answer = await lab.chat(session)
            assert answer.headers["x-rollstore-turn"] == "0"

    run(main)


def test_a_full_store_is_told(path: Path) -> None:
    async def main() -> None:
        async with Lab(path, capacity="1M", full_timeout=0.2) as lab:
            lab.engine.tokens = 3000
            answers = []
            for _ in range(12):
                session = await lab.open()
                answers.append((session, await lab.chat(session)))
                if answers[-1][1].status != 200:
                    break
            session, last = answers[-1]
            assert last.status == 503
            assert last.error["code"] == "store_full"
            assert last.headers["x-should-retry"] == "true"
            assert turns(lab, session) == 0
            assert len(answers) > 1
            await lab.end(answers[0][0])
            lab.store().release(answers[0][0])
            assert (await lab.chat(session)).status == 200

    run(main)


def test_ending_aborts_the_running_call(path: Path) -> None:
    async def main() -> None:
        async with Lab(path) as lab:
            for act in ("end", "drop"):
                session = await lab.open()
                assert (await lab.chat(session)).status == 200
                lab.engine.failures.append("hang")
                running = asyncio.ensure_future(lab.chat(session, user="b"))
                await until(lambda: lab.engine.running > 0)
                if act == "end":
                    assert (await lab.end(session, status="truncated")).json["turns"] == 1
                else:
                    assert (await lab.ask("DELETE", f"/sessions/{session}")).json["turns"] == 1
                assert (await running).error["code"] == "ended"
                assert (await lab.chat(session)).status == (409 if act == "end" else 404)
                await until(lambda: lab.engine.running == 0)
            assert lab.store().stat().session_count == 1

    run(main)


def test_many_sessions_at_once(path: Path) -> None:
    """512 agents; every session is whole, and the answers are its own."""

    async def agent(lab: Lab, number: int) -> None:
        session = await lab.open()
        first = await lab.chat(session, messages=[{"role": "user", "content": f"w{number}"}])
        assert first.status == 200, first.body
        more = [
            {"role": "user", "content": f"w{number}"},
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": "go on"},
        ]
        assert (await lab.chat(session, messages=more)).status == 200
        ended = (await lab.end(session, group=number)).json
        assert (ended["turns"], "misaligned" in ended) == (2, False)

    async def main() -> None:
        async with Lab(path, engines=2, timeout=100.0) as lab:
            for engine in lab.engines:
                engine.delay = 0.5
            await asyncio.gather(*(agent(lab, number) for number in range(512)))
            stat = lab.store().stat()
            assert (stat.sealed_count, stat.turn_count, stat.open_count) == (512, 1024, 0)
            with lab.store().snapshot() as snapshot:
                prompts = {
                    (entry.group_index, int(entry.prompt(0)[2])) for entry in snapshot.ready()
                }
            assert prompts == {(number, 1000 + number) for number in range(512)}

    run(main)


def test_a_raw_client_that_closes_at_once(path: Path) -> None:
    """Closed connections at any moment leave no call behind."""

    async def main() -> None:
        async with Lab(path) as lab:
            session = await lab.open()
            host, port = lab.url.removeprefix("http://").split(":")
            for cut in (20, 150, 10_000):
                _, writer = await asyncio.open_connection(host, int(port))
                body = b'{"model":"policy","messages":[{"role":"user","content":"x"}]}'
                head = (
                    f"POST /sessions/{session}/v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
                    f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
                )
                writer.write((head.encode() + body)[:cut])
                await writer.drain()
                writer.close()
            assert lab.server is not None
            server = lab.server
            # The last one's call may begin only now: the next call is told to come again.
            answer = await lab.chat(session)
            while answer.status == 409:
                assert answer.error["code"] == "concurrent_call"
                answer = await lab.chat(session)
            assert answer.status == 200
            await until(lambda: server.proxy.running == 0)
            timeout = aiohttp.ClientTimeout(total=5)
            assert (await lab.ask("GET", "/health", timeout=timeout)).status == 200

    run(main)


def make_big() -> bytes:
    """A reply that fills a good part of a small store."""
    import json

    from engine import Engine

    engine = Engine(3000)
    request = {
        **WORDS,
        "logprobs": True,
        "top_logprobs": 4,
        "return_meta_info": True,
        "return_flat_raw_output_top_logprobs": True,
        "return_flat_raw_top_logprobs_b64": True,
    }
    return json.dumps(reply_of(request, engine)).encode()


BIG = make_big()
