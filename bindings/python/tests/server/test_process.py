"""The server as a process: killed in the middle of calls, and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
from lab import WORDS, Lab, run, until

import rollstore


class Agent:
    """Talks on, trying each call again until it is answered, and remembers what it saw."""

    def __init__(self, lab: Lab, number: int) -> None:
        self.lab = lab
        self.session = f"agent-{number}"
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": f"w{number}"}]
        self.answers: list[str] = []

    async def insist(self, path: str, body: Any) -> Any:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                answer = await self.lab.ask("POST", path, body)
                if answer.status in (200, 201):
                    return answer
                assert answer.status in (409, 503), answer.body
            await asyncio.sleep(0.02)

    async def run(self, turns: int) -> None:
        await self.insist("/sessions", {"id": self.session})
        for turn in range(turns):
            path = f"/sessions/{self.session}/v1/chat/completions"
            answer = await self.insist(path, {**WORDS, "messages": self.messages})
            assert answer.headers["x-rollstore-turn"] == str(turn)
            self.answers.append(answer.text)
            self.messages.append({"role": "assistant", "content": answer.text})
            self.messages.append({"role": "user", "content": f"next {turn}"})
        await self.insist(f"/sessions/{self.session}/end", {"reward": 1})


def text_of(turn: rollstore.Turn) -> str:
    ids: Any = turn.token_ids
    return "".join(f"w{token - 1000} " for token in ids[:-1].tolist())


def test_killing_loses_no_answered_turn(path: Path) -> None:
    """Killed again and again while 16 agents talk: every session is what its agent saw."""

    async def main() -> None:
        async with Lab(path, process=True) as lab:
            lab.engine.delay = 0.03
            agents = [Agent(lab, number) for number in range(16)]
            running = [asyncio.ensure_future(agent.run(8)) for agent in agents]

            def answered() -> int:
                return sum(len(agent.answers) for agent in agents)

            for kill in range(1, 5):
                await until(lambda least=16 * kill: answered() >= least)  # type: ignore[misc]
                lab.engine.salt += 1  # a call that is asked again is answered otherwise
                await lab.kill()
                await lab.start()
            await asyncio.gather(*running)
            with rollstore.open(path, "r") as store, store.snapshot() as snapshot:
                assert len(snapshot.sessions) == 16
                for agent in agents:
                    entry = snapshot.sessions[agent.session]
                    assert entry.state == "sealed"
                    assert [text_of(turn) for turn in entry] == agent.answers
                    assert int(entry.sample().loss_mask.sum()) == 8 * 12

    run(main)


def test_sigterm_waits_for_running_calls(path: Path) -> None:
    async def main() -> None:
        async with Lab(path, process=True) as lab:
            session = await lab.open()
            lab.engine.failures.append("hang")
            running = asyncio.ensure_future(lab.chat(session))
            await until(lambda: lab.engine.running > 0)
            assert lab.process is not None
            lab.process.send_signal(signal.SIGTERM)
            while (await lab.ask("GET", "/health")).status != 503:
                await asyncio.sleep(0.01)
            assert (await lab.chat(session, user="late")).status == 503
            lab.engine.release.set()
            assert (await running).status == 200
            assert await lab.process.wait() == 0
            with rollstore.open(path, "r") as store, store.snapshot() as snapshot:
                assert snapshot.sessions[session].turn_count == 1

    run(main)


def test_sigterm_does_not_wait_for_ever(path: Path) -> None:
    async def main() -> None:
        async with Lab(path, process=True, drain=0.3) as lab:
            session = await lab.open()
            lab.engine.failures.append("hang")
            running = asyncio.ensure_future(lab.chat(session))
            await until(lambda: lab.engine.running > 0)
            assert lab.process is not None
            lab.process.send_signal(signal.SIGTERM)
            answer = await running
            assert (answer.status, answer.error["code"]) == (503, "draining")
            assert await lab.process.wait() == 0
            await until(lambda: lab.engine.aborted == 1)

    run(main)


def test_what_hinders_the_start_is_said(path: Path) -> None:
    async def main() -> None:
        async with Lab(path) as lab:  # its server holds the journal
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "rollstore.server", "--port", "0"),
                *("--store", str(path), "--engine", lab.engine.url),
                stderr=asyncio.subprocess.PIPE,
            )
            _, said = await process.communicate()
            assert process.returncode == 1
            assert b"another server" in said
            assert b"Traceback" not in said

    run(main)


def test_without_aiohttp_it_says_what_to_install(path: Path) -> None:
    """Help needs nothing; a start says what is missing."""
    hiding = "import runpy, sys; sys.modules['aiohttp'] = None; sys.argv[0] = 'rollstore.server'; "
    hiding += "runpy.run_module('rollstore.server', run_name='__main__')"
    command = [sys.executable, "-c", hiding]
    given = ["--store", str(path), "--engine", "http://127.0.0.1:1"]
    shown = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True)
    assert "--top-k" in shown.stdout
    failed = subprocess.run([*command, *given], capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert "apt-get install python3-aiohttp" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert not path.exists()


def test_it_may_open_as_many_files_as_the_system_lets_it(path: Path) -> None:
    files = resource.RLIMIT_NOFILE

    async def main() -> None:
        async with Lab(path, process=True) as lab:
            await lab.stop()
            before = resource.getrlimit(files)
            resource.setrlimit(files, (128, before[1]))
            try:
                await lab.start()
            finally:
                resource.setrlimit(files, before)
            assert lab.process is not None
            assert resource.prlimit(lab.process.pid, files) == (before[1], before[1])

    run(main)
