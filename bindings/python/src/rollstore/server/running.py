"""The server from its start to its end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import itertools
import logging
import resource
import signal
import socket
from typing import Any

from aiohttp import web

from rollstore.server.app import Server
from rollstore.server.settings import Settings

__all__ = ["raise_open_file_limit", "serve"]

log = logging.getLogger("rollstore.server")

# The interpreter's collector looks when more was made than freed, at all that was made since: with
# hundreds of calls under way that is all of theirs, and 20 ms. Here it looks often and at little. A
# full collection looks at every object of every session, tens of milliseconds with 512 of them: it
# waits for a moment without calls, and comes in spite of calls after _OVERDUE smaller ones.
_YOUNGEST, _YOUNG = 4, 32  # beginnings and ends of requests
_DUE, _OVERDUE = 50, 2_000

_WAITING, _ACCEPTED_AT_ONCE = 1024, 16  # connections
_NO_SUCH_ADDRESS = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)


def raise_open_file_limit() -> None:
    """As far as it goes. A call holds two sockets: under the usual limit of 1,024 files, engines
    could not be reached any more from 500 calls on."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def listen(runner: web.AppRunner, host: str, port: int) -> None:
    """At each address of the host that this machine has. asyncio takes as many connections at one
    go as may wait, and hundreds of them block its loop: so it is told of few, and the system then
    of more."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for number, (family, _, _, _, address) in enumerate(found, 1):
        try:
            listening = socket.create_server(address, family=family, backlog=_WAITING)
        except OSError as error:
            # "localhost" is often of both families where the system has one.
            if error.errno in _NO_SUCH_ADDRESS and (runner.sites or number < len(found)):
                continue
            raise
        await web.SockSite(runner, listening, backlog=_ACCEPTED_AT_ONCE).start()
        listening.listen(_WAITING)


def collect_a_little(step: int) -> None:
    if step % _YOUNG == 0:
        gc.collect(1)
    elif step % _YOUNGEST == 0:
        gc.collect(0)


def make_collecting() -> Any:
    """A middleware around all others."""
    steps = itertools.count(1)

    @web.middleware
    async def collecting(request: web.Request, handler: Any) -> web.StreamResponse:
        collect_a_little(next(steps))
        try:
            answer: web.StreamResponse = await handler(request)
        finally:
            collect_a_little(next(steps))
        return answer

    return collecting


async def serve(settings: Settings) -> None:
    """Until SIGTERM or SIGINT; the second one does not wait for running calls."""
    raise_open_file_limit()
    server = Server(settings)
    server.app.middlewares.insert(0, make_collecting())
    runner = web.AppRunner(server.app, access_log=None, handle_signals=False)
    await runner.setup()
    stop = asyncio.Event()
    now = asyncio.Event()

    def stopping() -> None:
        (now if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping)
    try:
        await listen(runner, settings.host, settings.port)
        for address in runner.addresses:
            host = f"[{address[0]}]" if ":" in address[0] else address[0]
            print(f"rollstore.server: listening on http://{host}:{address[1]}", flush=True)
        # What was made until now stays: it need not be looked through again and again.
        gc.collect()
        gc.freeze()
        gc.disable()
        collector = asyncio.ensure_future(collect_all(server))
        await stop.wait()
        collector.cancel()
        log.info("stopping: waiting for running calls")
        drained = asyncio.ensure_future(server.drain(settings.drain))
        at_once = asyncio.ensure_future(now.wait())
        await asyncio.wait((drained, at_once), return_when=asyncio.FIRST_COMPLETED)
        for task in (drained, at_once):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
    finally:
        await runner.cleanup()


async def collect_all(server: Server) -> None:
    """For ever: what Python's smaller collections leave."""
    while True:
        await asyncio.sleep(1.0)
        smaller = gc.get_count()[2]
        if smaller >= _OVERDUE or (smaller >= _DUE and server.proxy.running == 0):
            gc.collect()
