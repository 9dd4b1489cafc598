"""A session server with stand-in engines, in this process or as a process of its own, and a client
that speaks plain HTTP over loopback."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from engine import Engine

import rollstore
from rollstore.server.app import Server
from rollstore.server.running import raise_open_file_limit
from rollstore.server.settings import Settings

WORDS: dict[str, Any] = {
    "model": "policy",
    "messages": [{"role": "user", "content": "please begin"}],
}


class Answer:
    """An HTTP answer, read whole."""

    def __init__(self, status: int, headers: Any, body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error, in OpenAI's shape."""
        error = self.json["error"]
        assert set(error) >= {"message", "type", "param", "code"}
        return dict(error)

    @property
    def text(self) -> str:
        return str(self.json["choices"][0]["message"]["content"])

    @property
    def events(self) -> list[Any]:
        """The stream's data; the last one is [DONE]."""
        parts = self.body.decode().split("\n\n")
        assert parts.pop() == ""
        assert all(part.startswith("data: ") and "\n" not in part for part in parts)
        assert parts.pop() == "data: [DONE]"
        return [json.loads(part.removeprefix("data: ")) for part in parts]


class Lab:
    """`async with Lab(path) as lab`: engines, a server and a client."""

    def __init__(
        self, path: Path, engines: int = 1, process: bool = False, **settings: Any
    ) -> None:
        self.path = path
        self.engines = [Engine() for _ in range(engines)]
        self._given = settings
        self._in_process = not process
        self.process: asyncio.subprocess.Process | None = None
        self.server: Server | None = None
        self._runner: web.AppRunner | None = None
        self.url = ""

    @property
    def engine(self) -> Engine:
        return self.engines[0]

    @property
    def settings(self) -> Settings:
        urls = tuple(engine.url for engine in self.engines)
        defaults = {"capacity": "32M", "top_k": 4, "timeout": 20.0, "full_timeout": 1.0}
        made = Settings(store=str(self.path), engines=urls, port=0)
        return replace(made, **{**defaults, **self._given})

    async def __aenter__(self) -> Lab:
        raise_open_file_limit()  # agents and engines are in this process, too
        for engine in self.engines:
            await engine.start()
        connector = aiohttp.TCPConnector(limit=0)
        self.client = aiohttp.ClientSession(connector=connector)
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()
        await self.stop()
        for engine in self.engines:
            await engine.stop()

    # ------------------------------------------------------------ the server

    async def start(self) -> None:
        if self._in_process:
            self.server = Server(self.settings)
            self._runner = web.AppRunner(self.server.app, access_log=None)
            await self._runner.setup()
            await web.TCPSite(self._runner, "127.0.0.1", 0, backlog=1024).start()
            self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
            return
        settings = self.settings
        arguments = ["--store", settings.store, "--port", "0", "--top-k", str(settings.top_k)]
        arguments += ["--capacity", str(settings.capacity), "--drain", str(settings.drain)]
        for engine in self.engines:
            arguments += ["--engine", engine.url]
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "rollstore.server",
            *arguments,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )
        assert self.process.stdout is not None
        line = (await self.process.stdout.readline()).decode()
        assert "listening on http://" in line, line
        self.url = line.split()[-1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
            assert await self.process.wait() == 0
        self.process = None

    async def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        await self.process.wait()
        self.process = None

    # ------------------------------------------------------------ the client

    async def ask(self, method: str, path: str, body: Any = None, **options: Any) -> Answer:
        if body is not None:
            options["data"] = body if isinstance(body, bytes) else json.dumps(body).encode()
            options["headers"] = {"Content-Type": "application/json", **options.get("headers", {})}
        async with self.client.request(method, self.url + path, **options) as response:
            return Answer(response.status, response.headers, await response.read())

    async def open(self, **settings: Any) -> str:
        """A new session's id."""
        answer = await self.ask("POST", "/sessions", settings)
        assert answer.status in (200, 201), answer.body
        return str(answer.json["id"])

    async def chat(self, session: str, body: Any = None, **more: Any) -> Answer:
        """A call; without a body the shortest one, with `more` in it."""
        given = {**WORDS, **more} if body is None else body
        return await self.ask("POST", f"/sessions/{session}/v1/chat/completions", given)

    async def end(self, session: str, **outcome: Any) -> Answer:
        return await self.ask("POST", f"/sessions/{session}/end", outcome)

    async def metrics(self) -> dict[str, float]:
        """Every sample by name and labels, without the prefix."""
        lines = (await self.ask("GET", "/metrics")).body.decode().splitlines()
        samples = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name.removeprefix("rollstore_server_"): float(value) for name, value in samples}

    async def talk(self, session: str, turns: int, **more: Any) -> list[dict[str, Any]]:
        """An agent: each answer goes into the next call's messages. Returns the messages."""
        messages: list[dict[str, Any]] = list(WORDS["messages"])
        for turn in range(turns):
            answer = await self.chat(session, {**WORDS, "messages": messages, **more})
            assert answer.status == 200, answer.body
            messages.append({"role": "assistant", "content": answer.text})
            messages.append({"role": "user", "content": f"observation {turn}"})
        return messages

    def store(self) -> rollstore.Store:
        """The store, as a trainer opens it."""
        if self.server is not None:
            return self.server.store
        return rollstore.open(self.path, "r")


async def until(condition: Callable[[], bool]) -> None:
    """Wait for it; a test that waits in vain fails."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("waited in vain")


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """A coroutine as a test."""
    asyncio.run(asyncio.wait_for(test(), 120))
