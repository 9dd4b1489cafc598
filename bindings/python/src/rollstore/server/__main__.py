"""python -m rollstore.server: see --help."""

from __future__ import annotations

import asyncio
import logging
import sys

from rollstore import RollstoreError
from rollstore.server.journal import JournalHeld
from rollstore.server.settings import parse

# A worker thread that has decoded a reply waits this long at most for the interpreter's lock.
SWITCH_SECONDS = 0.0005
_NO_AIOHTTP = (
    "rollstore.server: aiohttp is not installed, which the session server needs (3.8 or later): "
    "apt-get install python3-aiohttp, or pip install aiohttp"
)


def main() -> int:
    settings = parse()
    try:
        from rollstore.server.running import serve
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        print(_NO_AIOHTTP, file=sys.stderr)
        return 1
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
