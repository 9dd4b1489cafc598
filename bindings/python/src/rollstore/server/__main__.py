"""python -m rollstore.server: see --help."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import sys

from aiohttp import web

from rollstore import RollstoreError
from rollstore.server.app import Server
from rollstore.server.journal import JournalHeld
from rollstore.server.settings import Settings, parse

log = logging.getLogger("rollstore.server")

# A worker thread that has decoded a reply waits this long at most for the interpreter's lock.
SWITCH_SECONDS = 0.0005


async def serve(settings: Settings) -> None:
    """Until SIGTERM or SIGINT; the second one does not wait for running calls."""
    server = Server(settings)
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
        site = web.TCPSite(runner, settings.host, settings.port, backlog=1024)
        await site.start()
        for address in runner.addresses:
            host = f"[{address[0]}]" if ":" in address[0] else address[0]
            print(f"rollstore.server: listening on http://{host}:{address[1]}", flush=True)
        # What was made until now stays: it need not be looked through again and again.
        gc.collect()
        gc.freeze()
        await stop.wait()
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


def main() -> int:
    settings = parse()
    logging.basicConfig(
        level=logging.INFO if settings.log_calls else logging.WARNING,
        format="%(asctime)s %(levelname)s %(message)s",
        stream=sys.stderr,
    )
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        asyncio.run(serve(settings))
    except (RollstoreError, JournalHeld, OSError) as error:
        print(f"rollstore.server: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
