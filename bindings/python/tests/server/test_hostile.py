"""Engines and agents that behave as none should, and a disk that is full."""

from __future__ import annotations

import asyncio
import gc
import json
import resource
from pathlib import Path

import aiohttp
import pytest
from lab import WORDS, Lab, run

from rollstore.server.errors import Refusal
from rollstore.server.journal import Journal


def test_an_answer_that_breaks_off_breaks_the_connection(path: Path) -> None:
    """The agent has a part of it: nothing that follows may look like the rest."""

    async def main() -> None:
        async with Lab(path) as lab:
            session = await lab.open(evaluation=True)
            lab.engine.failures.append("cut")
            with pytest.raises(aiohttp.ClientError):
                await lab.chat(session)
            assert (await lab.chat(session)).status == 200

    run(main)


def test_an_evaluations_engine_that_is_none_is_told(path: Path) -> None:
    async def main() -> None:
        async with Lab(path) as lab:
            session = await lab.open(evaluation=True)
            for failure, kind in (("close", "engine_broke_off"), ("redirect", "engine_error")):
                lab.engine.failures.append(failure)
                answer = await lab.chat(session)
                assert (answer.status, answer.error["code"]) == (502, kind)

    run(main)


def test_a_compressed_answer_arrives_whole(path: Path) -> None:
    async def main() -> None:
        async with Lab(path) as lab:
            session = await lab.open(evaluation=True)
            lab.engine.failures.append("zip")
            answer = await lab.chat(session)
            assert (answer.status, answer.text != "") == (200, True)

    run(main)


def test_a_redirect_is_not_followed(path: Path) -> None:
    async def main() -> None:
        async with Lab(path, retries=0) as lab:
            session = await lab.open()
            lab.engine.failures.append("redirect")
            answer = await lab.chat(session)
            assert (answer.status, answer.error["code"]) == (502, "engine_error")
            assert (await lab.chat(session)).status == 200  # the engine is not taken for down

    run(main)


def test_what_cannot_be_streamed_is_not_stored(path: Path) -> None:
    async def main() -> None:
        async with Lab(path) as lab:
            session = await lab.open()
            lab.engine.failures.append("odd message")
            answer = await lab.chat(session, stream=True)
            assert (answer.status, answer.error["code"]) == (502, "reply")
            assert lab.store().stat().turn_count == 0

    run(main)


def test_odd_bytes_are_refused_like_others(path: Path) -> None:
    async def main() -> None:
        async with Lab(path, token="secret") as lab:
            host = lab.url.removeprefix("http://")
            for line, header in (
                (b"/sessions/x", b"Authorization: Bearer \xff"),
                (b"/sessions/\xff", b"Authorization: Bearer x"),
            ):
                reader, writer = await asyncio.open_connection(*host.split(":"))
                writer.write(b"GET " + line + b" HTTP/1.1\r\nHost: localhost\r\n" + header)
                writer.write(b"\r\nConnection: close\r\n\r\n")
                status = (await reader.read()).split(b"\r\n")[0]
                assert status.split()[1] in (b"400", b"401"), status
                writer.close()

    run(main)


def test_odd_bodies_are_refused_like_others(path: Path) -> None:
    async def main() -> None:
        async with Lab(path) as lab:
            session = await lab.open()
            number = json.dumps(WORDS)[:-1].encode() + b', "seed": ' + b"9" * 5000 + b"}"
            chat = f"/sessions/{session}/v1/chat/completions"
            assert (await lab.ask("POST", "/sessions", b"[" * 60_000)).status == 400
            answer = await lab.ask("POST", chat, number)
            assert (answer.status, answer.error["param"]) == (400, "seed")
            zipped = {"Content-Encoding": "gzip"}
            assert (await lab.ask("POST", "/sessions", b"{}", headers=zipped)).status in (400, 415)

    run(main)


def test_a_refused_reply_is_not_kept(path: Path) -> None:
    """Nor found only by the garbage collector, which the server calls seldom."""

    def refusals() -> int:
        return sum(isinstance(each, Refusal) for each in gc.get_objects())

    async def main() -> None:
        async with Lab(path, retries=1) as lab:
            session = await lab.open()
            failures: list[int | str] = ["garbage", "cut", 500, "cut", 500, 400]
            gc.collect()
            gc.disable()
            try:
                for failure in failures * 4:
                    lab.engine.failures.append(failure)
                    await lab.chat(session)
                await asyncio.sleep(0.05)
                assert refusals() < 3
            finally:
                gc.enable()

    run(main)


def test_a_line_that_was_cut_by_a_full_disk_takes_no_other_with_it(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(str(path))
    journal.opened("a", False, 1, None)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, before[1]))
    try:
        with pytest.raises(OSError):
            journal.opened("b", False, 1, None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    journal.opened("c", False, 1, None)
    journal.close()
    again = Journal(str(path))
    assert set(again.sessions) == {"a", "c"}
    again.close()
