"""The processes beside the one that measures: an engine that replays, a plain proxy, and the
session server with a watch on its event loop.

    replay_parts.py engine TOKENS DELAY | proxy URL | server ARGUMENT...

Each prints its address, and ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "bindings/python/tests/server"))

from engine import CHAT, END, ROLES, START, WORD, Engine, reply_of  # noqa: E402

TURNS = 4
OBSERVED = 100  # tokens of an observation between two turns


# ---------------------------------------------------------------- the recorded sessions


class Replay(Engine):
    """Answers turn T of session S, which the request's `user` names as "S T", from what it made
    before: all sessions say the same, but for the first token of their prompts."""

    def __init__(self, tokens: int, delay: float) -> None:
        super().__init__(tokens, delay)
        self.cached = {}
        self.prompts = [b""] * TURNS
        self.parts: dict[tuple[Any, ...], tuple[bytes, bytes]] = {}
        self._make_prompts()

    def _make_prompts(self) -> None:
        spoken = reply_of({"messages": [], "logprobs": True, "return_meta_info": True}, self)
        logprobs = spoken["choices"][0]["meta_info"]["output_token_logprobs"]
        output = [token for _, token, _ in logprobs]
        assistant = [START, ROLES["assistant"]]
        prompt = [START, ROLES["user"], *range(WORD, WORD + OBSERVED), END, *assistant]
        for turn in range(TURNS):
            self.prompts[turn] = json.dumps(prompt, separators=(",", ":"))[1:].encode()
            seen = [WORD + 100 * turn + at for at in range(OBSERVED)]
            prompt = [*prompt, *output, START, ROLES["user"], *seen, END, *assistant]

    def _reply(self, request: dict[str, Any]) -> bytes:
        names = ("top_logprobs", "return_flat_raw_output_top_logprobs", "logprobs")
        key = tuple(request.get(name) for name in names)
        if key not in self.parts:
            asked = {**request, "messages": [], "return_prompt_token_ids": True}
            made = reply_of(asked, self)
            made["choices"][0]["prompt_token_ids"] = "HERE"
            head, tail = json.dumps(made, separators=(",", ":")).encode().split(b'"HERE"')
            self.parts[key] = head, tail
        head, tail = self.parts[key]
        session, turn = request["user"].split()
        return b"".join((head, b"[", session.encode(), b",", self.prompts[int(turn)], tail))


# ---------------------------------------------------------------- a plain proxy


def plain_proxy(engine: str) -> web.Application:
    """Nothing but the same library's server and client."""

    async def chat(request: web.Request) -> web.Response:
        body = await request.read()
        async with client[0].post(engine + CHAT, data=body) as reply:
            data = await reply.read()
        return web.Response(body=data, status=reply.status, content_type="application/json")

    async def life(_: web.Application) -> Any:
        connector = aiohttp.TCPConnector(limit=0)
        headers = {"Content-Type": "application/json"}
        client.append(
            aiohttp.ClientSession(connector=connector, headers=headers, read_bufsize=1 << 20)
        )
        yield
        await client[0].close()

    client: list[aiohttp.ClientSession] = []
    app = web.Application(client_max_size=1 << 28)
    app.cleanup_ctx.append(life)
    app.add_routes([web.post(CHAT, chat)])
    return app


async def until_input_ends() -> None:
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


async def run_engine(tokens: int, delay: float) -> None:
    engine = Replay(tokens, delay)
    print(await engine.start(), flush=True)
    await until_input_ends()
    await engine.stop()


async def run_proxy(engine: str) -> None:
    runner = web.AppRunner(plain_proxy(engine), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await until_input_ends()
    await runner.cleanup()


# ---------------------------------------------------------------- the watched server


class Watch:
    """How long each callback of the event loop takes: on the clock, where it may wait for the
    interpreter's lock or be put aside by the system for other processes, and of its thread's CPU
    time."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.count = 0
        self.ended = False

    def install(self) -> None:
        run = asyncio.Handle._run

        def timed(handle: asyncio.Handle) -> None:
            cpu, wall = time.thread_time(), time.perf_counter()
            run(handle)
            self.add(time.perf_counter() - wall, time.thread_time() - cpu)

        asyncio.Handle._run = timed  # type: ignore[method-assign]

    def reset(self, *_: object) -> None:
        """At SIGUSR1: what was until now, such as the store's opening, does not count."""
        self.wall, self.cpu, self.count, self.ended = [], [], 0, False

    def end(self, *_: object) -> None:
        """At SIGUSR2: nor does what comes now, such as its closing."""
        self.ended = True

    def add(self, wall: float, cpu: float) -> None:
        if self.ended:
            return
        self.count += 1
        if wall > 0.001:
            self.wall.append(wall)
            self.cpu.append(cpu)

    def told(self) -> str:
        told = {
            "callbacks": self.count,
            "wall_max": max(self.wall, default=0.0),
            "wall_over_5_ms": sum(wall > 0.005 for wall in self.wall),
            "cpu_max": max(self.cpu, default=0.0),
            "cpu_over_5_ms": sum(cpu > 0.005 for cpu in self.cpu),
            "max_resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        }
        return json.dumps(told)


def run_server(arguments: list[str]) -> None:
    from rollstore.server.__main__ import main

    watch = Watch()
    watch.install()
    signal.signal(signal.SIGUSR1, watch.reset)
    signal.signal(signal.SIGUSR2, watch.end)
    sys.argv[1:] = arguments
    code = main()
    print(watch.told(), flush=True)
    sys.exit(code)


def start() -> None:
    what, *given = sys.argv[1:]
    if what == "engine":
        asyncio.run(run_engine(int(given[0]), float(given[1])))
    elif what == "proxy":
        asyncio.run(run_proxy(given[0]))
    else:
        run_server(given)


if __name__ == "__main__":
    start()
