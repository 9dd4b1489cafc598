"""What the session server costs: run by tests/bench/replay, prints Markdown."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

HERE = Path(__file__).resolve().parent
PARTS = str(HERE / "replay_parts.py")
K = 32
TURNS = 4
SESSIONS = 128
KINDS = {
    "none": ["--top-k", "0"],
    "flat": ["--top-k", str(K)],
    "nested": ["--top-k", str(K), "--candidates", "nested"],
}
JSON = {"Content-Type": "application/json"}


def observation(turn: int) -> str:
    return " ".join(f"w{100 * turn + at}" for at in range(100))


def say(text: str = "") -> None:
    print(text, flush=True)


# ---------------------------------------------------------------- processes


class Process:
    """One of the processes that the measured calls go through."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process = process
        self.url = url

    def cpu(self) -> float:
        """CPU seconds until now, of all its threads."""
        nanoseconds = 0
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            nanoseconds += int((task / "schedstat").read_text().split()[0])
        return nanoseconds / 1e9

    async def stop(self, terminate: bool) -> str:
        """Returns what else it said."""
        if terminate:
            self.process.terminate()
        assert self.process.stdin is not None
        self.process.stdin.close()
        said, _ = await self.process.communicate()
        return said.decode()


@asynccontextmanager
async def started(*arguments: str, terminate: bool = False) -> AsyncIterator[Process]:
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-B", *arguments)
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert process.stdout is not None
    line = (await process.stdout.readline()).decode().split()
    if not line:
        raise SystemExit(f"{' '.join(arguments)}: it did not start")
    made = Process(process, line[-1])
    try:
        yield made
    finally:
        if process.returncode is None:
            await made.stop(terminate)


def engine(tokens: int, delay: float) -> Any:
    return started(PARTS, "engine", str(tokens), str(delay))


class Store:
    """A store's folder in shared memory, removed at the end."""

    def __init__(self, capacity: str) -> None:
        shared = "/dev/shm" if os.path.isdir("/dev/shm") else None
        self.folder = tempfile.mkdtemp(prefix="rollstore-replay-", dir=shared)
        self.capacity = capacity

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder)

    def arguments(self, kind: str, url: str) -> list[str]:
        where = ["--store", self.folder + "/store", "--capacity", self.capacity]
        return [*where, "--engine", url, "--port", "0", *KINDS[kind]]


def server(store: Store, kind: str, url: str) -> Any:
    arguments = store.arguments(kind, url)
    return started("-m", "rollstore.server", *arguments, terminate=True)


# ---------------------------------------------------------------- agents


class Client:
    """Plain HTTP, over as many connections as there are agents."""

    def __init__(self, client: aiohttp.ClientSession, tokens: int) -> None:
        self.client = client
        words = " ".join(f"w{number}" for number in range(tokens))
        messages: list[Any] = [{"role": "user", "content": observation(0)}]
        self.messages: list[bytes] = []
        for turn in range(TURNS):
            self.messages.append(json.dumps(messages).encode())
            messages.append({"role": "assistant", "content": words})
            messages.append({"role": "user", "content": observation(turn)})

    async def post(self, url: str, body: bytes) -> bytes:
        async with self.client.post(url, data=body, headers=JSON) as response:
            data = await response.read()
        if response.status >= 300:
            raise SystemExit(f"{url}: {response.status} {data[:300]!r}")
        return data

    def body(self, session: int, turn: int, more: bytes = b"") -> bytes:
        messages = self.messages[turn]
        return b'{"model":"policy","user":"%d %d",%s"messages":%s}' % (
            session,
            turn,
            more,
            messages,
        )

    async def drop(self, url: str, session: str) -> None:
        async with self.client.delete(f"{url}/sessions/{session}") as response:
            assert response.status == 200

    async def replay(self, url: str, session: int, calls: list[float], until: float) -> None:
        """Sessions one after another; each call's seconds go to `calls`. What is ended is dropped:
        a trainer would release it."""
        number = 0
        while time.perf_counter() < until:
            name = f"s{session}.{number}"
            number += 1
            await self.post(url + "/sessions", json.dumps({"id": name}).encode())
            for turn in range(TURNS):
                began = time.perf_counter()
                await self.post(
                    f"{url}/sessions/{name}/v1/chat/completions", self.body(session, turn)
                )
                calls.append(time.perf_counter() - began)
                if time.perf_counter() >= until:
                    break
            ended = json.loads(await self.post(f"{url}/sessions/{name}/end", b"{}"))
            assert "misaligned" not in ended, ended
            await self.drop(url, name)


@asynccontextmanager
async def client(tokens: int) -> AsyncIterator[Client]:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        yield Client(session, tokens)


# ---------------------------------------------------------------- measurements


class Replayed(NamedTuple):
    calls: int
    overhead: float
    overhead_95: float
    cpu: float


async def replay(kind: str, sessions: int, delay: float, seconds: float) -> Replayed:
    """`sessions` agents at once for some seconds, at 2,000 tokens; the engine takes `delay`."""
    with Store("1G") as store:
        async with engine(2000, delay) as source, server(store, kind, source.url) as served:
            async with client(2000) as agents:
                await one_call(agents, served.url)
                before = served.cpu()
                calls: list[float] = []
                until = time.perf_counter() + seconds
                running = [
                    agents.replay(served.url, number, calls, until) for number in range(sessions)
                ]
                await asyncio.gather(*running)
                cpu = (served.cpu() - before) / len(calls)
    over = sorted(call - delay for call in calls)
    return Replayed(len(calls), statistics.median(over), over[len(over) * 95 // 100], cpu)


async def one_call(agents: Client, url: str) -> None:
    """What is made at the first call is made."""
    await agents.post(url + "/sessions", b'{"id":"first"}')
    await agents.post(url + "/sessions/first/v1/chat/completions", agents.body(1, 0))
    await agents.drop(url, "first")


async def cpu_per_reply(kind: str, tokens: int, calls: int) -> tuple[float, float]:
    """CPU seconds of the session server for a call, its session's share included; and megabytes of
    the reply."""
    with Store("1G") as store:
        async with engine(tokens, 0.0) as source, server(store, kind, source.url) as served:
            async with client(tokens) as agents:
                await one_call(agents, served.url)
                before, made = served.cpu(), 0
                while made < calls:
                    seen: list[float] = []
                    stop = [0.0]
                    await one_session(agents, served.url, made, seen, stop)
                    made += len(seen)
                cpu = (served.cpu() - before) / made
                text = await agents.client.get(served.url + "/metrics")
                lines = (await text.text()).splitlines()
    size = next(float(x.split()[1]) for x in lines if "reply_bytes_total " in x and x[0] != "#")
    return cpu, size / (made + 1) / 1e6


async def one_session(
    agents: Client, url: str, number: int, seen: list[float], stop: list[float]
) -> None:
    name = f"c{number}"
    await agents.post(url + "/sessions", json.dumps({"id": name}).encode())
    for turn in range(TURNS):
        began = time.perf_counter()
        await agents.post(f"{url}/sessions/{name}/v1/chat/completions", agents.body(number, turn))
        seen.append(time.perf_counter() - began)
    await agents.post(f"{url}/sessions/{name}/end", b"{}")
    await agents.drop(url, name)


async def added_latency(tokens: int, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of a call through a plain proxy and through the session server, by turns."""
    asks = (
        b'"logprobs":true,"top_logprobs":%d,"return_flat_raw_output_top_logprobs":true,'
        b'"return_flat_raw_top_logprobs_b64":true,"return_meta_info":true,' % K
    )
    plain: list[float] = []
    recorded: list[float] = []
    with Store("1G") as store:
        async with engine(tokens, 0.0) as source:
            async with (
                started(PARTS, "proxy", source.url) as proxy,
                server(store, "flat", source.url) as served,
                client(tokens) as agents,
            ):
                await one_call(agents, served.url)
                for number in range(rounds):
                    for turn in range(TURNS):
                        body = agents.body(number, turn, asks)
                        began = time.perf_counter()
                        await agents.post(proxy.url + "/v1/chat/completions", body)
                        plain.append(time.perf_counter() - began)
                    await one_session(agents, served.url, number, recorded, [])
    return plain, recorded


async def loop_blocks(sessions: int, seconds: float, tokens: int) -> dict[str, Any]:
    """The event loop's longest callbacks with `sessions` agents at once."""
    with Store("3G") as store:
        async with engine(tokens, 1.0) as source:
            arguments = store.arguments("flat", source.url)
            async with started(PARTS, "server", *arguments, terminate=True) as served:
                async with client(tokens) as agents:
                    await one_call(agents, served.url)
                    served.process.send_signal(signal.SIGUSR1)
                    calls: list[float] = []
                    until = time.perf_counter() + seconds
                    running = [
                        agents.replay(served.url, number, calls, until)
                        for number in range(sessions)
                    ]
                    await asyncio.gather(*running)
                    served.process.send_signal(signal.SIGUSR2)
                said = await served.stop(True)
    told: dict[str, Any] = json.loads(said.strip().splitlines()[-1])
    return {**told, "calls": len(calls)}


# ---------------------------------------------------------------- the tables


async def interleaved(
    names: list[Any], rounds: int, measure: Callable[[Any], Awaitable[Any]]
) -> dict[Any, list[Any]]:
    """Each several times, by turns: a machine's slow minute is everybody's."""
    found: dict[Any, list[Any]] = {name: [] for name in names}
    for at in range(rounds):
        for name in names if at % 2 == 0 else names[::-1]:
            found[name].append(await measure(name))
    return found


def machine() -> str:
    model = next(
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    )
    python = ".".join(map(str, sys.version_info[:3]))
    return f"{os.cpu_count()} cores, {model}; Python {python}, aiohttp {aiohttp.__version__}"


async def cpu_table(quick: bool) -> None:
    say("\nCPU of the session server for a reply, k = 32, in milliseconds (a ratio to none):\n")
    say("| tokens | none | flat | nested | flat's reply | nested's reply |")
    say("| ---: | ---: | ---: | ---: | ---: | ---: |")
    for tokens in (500, 2000, 8000):
        calls = {500: 400, 2000: 200, 8000: 60}[tokens] // (10 if quick else 1)
        found = await interleaved(
            list(KINDS),
            1 if quick else 5,
            lambda kind, t=tokens, n=calls: cpu_per_reply(kind, t, n),
        )
        cpu = {kind: statistics.median(one[0] for one in found[kind]) for kind in KINDS}
        size = {kind: found[kind][0][1] for kind in KINDS}
        shown = [f"{cpu['none'] * 1e3:.2f}"]
        shown += [f"{cpu[x] * 1e3:.2f} ({cpu[x] / cpu['none']:.2f})" for x in ("flat", "nested")]
        shown += [f"{size[x]:.1f} MB" for x in ("flat", "nested")]
        say(f"| {tokens:,} | " + " | ".join(shown) + " |")


async def replay_table(quick: bool) -> None:
    seconds = 3.0 if quick else 15.0
    say(
        f"\n{SESSIONS} recorded sessions at once for {seconds:g} s, {TURNS} turns of 2,000 tokens, "
        "an engine that takes 1 s a reply:\n"
    )
    say("| candidates | calls finished | overhead a call, median | 95 % | server's CPU a call |")
    say("| --- | ---: | ---: | ---: | ---: |")
    found = await interleaved(
        list(KINDS), 1 if quick else 3, lambda kind: replay(kind, SESSIONS, 1.0, seconds)
    )
    for kind, runs in found.items():
        calls, over, high, cpu = (statistics.median(column) for column in zip(*runs))
        say(
            f"| {kind} | {calls:.0f} | {over * 1e3:.0f} ms | {high * 1e3:.0f} ms | "
            f"{cpu * 1e3:.1f} ms |"
        )


async def latency_lines(quick: bool) -> None:
    say("\nOne call at a time, k = 32, flat, through a plain proxy (aiohttp) and the server:\n")
    say("| tokens | plain proxy | session server | added |")
    say("| ---: | ---: | ---: | ---: |")
    for tokens in (500, 2000, 8000):
        rounds = {500: 100, 2000: 100, 8000: 25}[tokens] // (10 if quick else 1)
        plain, recorded = await added_latency(tokens, max(rounds, 2))
        one, two = statistics.median(plain) * 1e3, statistics.median(recorded) * 1e3
        say(f"| {tokens:,} | {one:.2f} ms | {two:.2f} ms | {two - one:+.2f} ms |")


async def loop_lines(quick: bool) -> None:
    say(
        "\nThe event loop's callbacks, flat, k = 32, an engine that takes 1 s a reply: the\n"
        "longest, and how many took over 5 ms, of CPU and on the clock:\n"
    )
    say("| sessions at once | tokens | calls | callbacks | CPU | over 5 ms | clock | over 5 ms |")
    say("| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for sessions, tokens in ((32, 2000), (512, 500), (512, 2000)):
        told = await loop_blocks(sessions, 3.0 if quick else 15.0, tokens)
        shown = f"{told['cpu_max'] * 1e3:.1f} ms | {told['cpu_over_5_ms']:,} | "
        shown += f"{told['wall_max'] * 1e3:.1f} ms | {told['wall_over_5_ms']:,}"
        counts = f"{sessions} | {tokens:,} | {told['calls']:,} | {told['callbacks']:,}"
        say(f"| {counts} | {shown} |")


TABLES = {
    "replay": replay_table,
    "cpu": cpu_table,
    "latency": latency_lines,
    "loop": loop_lines,
}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=list(TABLES), help="one of the tables")
    given = parser.parse_args()
    say(machine())
    for name, table in TABLES.items():
        if given.only in (None, name):
            await table(given.quick)


if __name__ == "__main__":
    asyncio.run(main())
