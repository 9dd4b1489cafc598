"""Inference engines: which one a session uses, and what is tried when one fails."""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple, Protocol

import aiohttp

from rollstore.server.errors import Refusal, engine_refusal
from rollstore.server.metrics import Metrics
from rollstore.server.settings import Settings

__all__ = ["Engine", "Engines", "Reply"]

CHAT = "/v1/chat/completions"
_HEADERS = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
# Statuses that say nothing about the request: it may be asked again, of another engine.
_AGAIN = frozenset((500, 502, 503, 504))
_FIRST_PAUSE = 0.25
_DOWN_FIRST, _DOWN_LONGEST = 1.0, 30.0
# A reply of a megabyte comes in few pieces.
_READ_SIZE = 1 << 20


class Engine:
    """One engine. sessions: open ones that stick to it."""

    __slots__ = ("down_until", "failures", "sessions", "url")

    def __init__(self, url: str) -> None:
        self.url = url
        self.sessions = 0
        self.failures = 0
        self.down_until = 0.0

    def is_down(self) -> bool:
        return time.monotonic() < self.down_until

    def failed(self) -> None:
        """It could not be reached: leave it alone for a while, longer each time."""
        pause = min(_DOWN_FIRST * 2.0**self.failures, _DOWN_LONGEST)
        self.down_until = time.monotonic() + pause
        self.failures = min(self.failures + 1, 10)

    def answered(self) -> None:
        self.failures = 0
        self.down_until = 0.0


class Sticky(Protocol):
    """A session: what sticks to an engine."""

    engine: Engine | None


class Reply(NamedTuple):
    """An engine's reply of status 200.

    pieces: its body, as it came. Joining them is left to a thread: nested candidates are tens of
    megabytes.
    """

    pieces: list[bytes]
    content_type: str
    seconds: float


class _Failed(Exception):
    """One attempt came to nothing; the refusal is for when it was the last."""

    def __init__(self, refusal: Refusal, moves: bool) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal
        self.moves = moves


class Engines:
    """All engines, over one client."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self.all = [Engine(url) for url in settings.engines]
        self._settings = settings
        self._metrics = metrics
        headers = dict(_HEADERS)
        if settings.engine_token:
            headers["Authorization"] = f"Bearer {settings.engine_token}"
        timeout = aiohttp.ClientTimeout(
            total=settings.timeout or None, sock_connect=settings.connect_timeout or None
        )
        self.client = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, limit_per_host=0, keepalive_timeout=30),
            timeout=timeout,
            headers=headers,
            read_bufsize=_READ_SIZE,
            trust_env=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        await self.client.close()

    # ------------------------------------------------------------ which one

    def of(self, session: Sticky, avoid: Engine | None = None) -> Engine:
        """The session's engine; it gets one, or another one, where that is needed."""
        engine = session.engine
        if engine is not None and engine is not avoid and not engine.is_down():
            return engine
        others = [other for other in self.all if other is not avoid] or self.all
        up = [other for other in others if not other.is_down()] or others
        chosen = min(up, key=lambda other: other.sessions)
        if chosen is not engine:
            self.leave(session)
            session.engine = chosen
            chosen.sessions += 1
        return chosen

    def leave(self, session: Sticky) -> None:
        """The session is over, or moves."""
        if session.engine is not None:
            session.engine.sessions -= 1
            session.engine = None

    # ------------------------------------------------------------ asking

    async def ask(self, session: Sticky, body: bytes) -> Reply:
        """A whole reply of status 200. Nothing of a failed attempt was seen or stored by anybody,
        so asking again is safe. Raises Refusal."""
        avoid: Engine | None = None
        attempt = 0
        while True:
            engine = self.of(session, avoid)
            try:
                return await self._attempt(engine, body)
            except _Failed as failure:
                refusal, moves = failure.refusal, failure.moves
            if attempt == self._settings.retries:
                raise refusal  # not above: it and its _Failed would hold one another
            avoid = engine if moves else None
            self._metrics.engine_retries += 1
            await asyncio.sleep(_FIRST_PAUSE * 2.0**attempt)
            attempt += 1

    async def _attempt(self, engine: Engine, body: bytes) -> Reply:
        began = time.perf_counter()
        try:
            async with self.client.post(
                engine.url + CHAT, data=body, allow_redirects=False
            ) as response:
                pieces = await self._read(response)
                status, content_type = response.status, response.content_type
        except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError):
            engine.failed()
            refusal = Refusal(502, "engine_unreachable", "the engine cannot be reached", retry=True)
            raise _Failed(refusal, True) from None
        except TimeoutError:
            message = f"the engine gave no reply within {self._settings.timeout:g} s"
            raise Refusal(504, "engine_timeout", message, retry=False) from None
        except aiohttp.ClientError as error:
            # aiohttp's stream keeps the error, and that would keep these frames and what was read.
            error.__traceback__ = None
            message = f"the engine's reply broke off: {type(error).__name__}"
            raise _Failed(Refusal(502, "engine_broke_off", message, retry=True), False) from None
        engine.answered()
        if status == 200:
            return Reply(pieces, content_type, time.perf_counter() - began)
        refusal = engine_refusal(status, b"".join(pieces))
        if status in _AGAIN:
            raise _Failed(refusal, True)
        raise refusal

    async def _read(self, response: aiohttp.ClientResponse) -> list[bytes]:
        limit = self._settings.reply_limit
        length = response.content_length
        pieces: list[bytes] = []
        size = 0
        if length is None or length <= limit:
            async for piece in response.content.iter_any():
                size += len(piece)
                if size > limit:
                    break
                pieces.append(piece)
            else:
                return pieces
        response.close()
        message = f"the engine's reply is larger than {limit} bytes (--reply-limit)"
        raise Refusal(502, "reply_limit", message, retry=False)
