"""From an engine's reply to a stored turn, in threads that leave the event loop free."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from rollstore import FullError, LimitError, ReplyError, Store, Turn, _rollstore
from rollstore.server import streaming
from rollstore.server.errors import Refusal
from rollstore.server.journal import Journal
from rollstore.server.rewrite import Training
from rollstore.server.settings import Settings

__all__ = ["Last", "Prepared", "Recorder", "Workers", "prompt_digest"]

T = TypeVar("T")

_PAUSE_FIRST, _PAUSE_LONGEST = 0.002, 0.1
_ADVICE = (
    "; the engine does not know return_flat_raw_output_top_logprobs, or calls its base64 flag "
    "otherwise (--b64-flag): use a build that has it, or start the session server with "
    "--candidates nested"
)


class Workers:
    """The threads that decode and store."""

    def __init__(self, count: int) -> None:
        self._pool = ThreadPoolExecutor(count, "rollstore-record")

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """The function's result, from a thread. It runs to its end even when the caller is
        cancelled."""
        call = functools.partial(function, *args)
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    def close(self) -> None:
        self._pool.shutdown()


def prompt_digest(prompt: bytes | None) -> str | None:
    """By which two prompts are told to be the same; None for none."""
    return hashlib.blake2b(prompt, digest_size=16).hexdigest() if prompt else None


class Last(NamedTuple):
    """The session's turns so far, and what the last one answered."""

    turn_count: int
    fingerprint: str | None
    digest: str | None


class Prepared(NamedTuple):
    """A reply, decoded and ready to be stored."""

    turn: int
    replaces: bool
    decoded: Turn
    tokens: int
    prompt_tokens: int
    digest: str | None
    answer: bytes  # for the agent: the reply, or a stream's events
    decode_seconds: float


class Recorder:
    """Stores replies."""

    def __init__(
        self, store: Store, journal: Journal, workers: Workers, settings: Settings
    ) -> None:
        self._store = store
        self._journal = journal
        self._workers = workers
        self._settings = settings

    async def record(
        self, session: str, last: Last, fingerprint: str, pieces: list[bytes], asked: Training
    ) -> tuple[Prepared, float]:
        """Store the reply as the session's next turn, or in the last one's place when it answers
        the same request again. Returns what was stored, and the seconds of the commit. At capacity
        it waits. Raises Refusal, and nothing is stored."""
        prepared, seconds = await self._workers.run(
            self._decode_and_store, session, last, fingerprint, pieces, asked
        )
        if seconds is None:
            seconds = await self._store_when_there_is_room(session, prepared)
        return prepared, seconds

    def _decode_and_store(
        self, session: str, last: Last, fingerprint: str, pieces: list[bytes], asked: Training
    ) -> tuple[Prepared, float | None]:
        try:
            prepared = self._prepare(last, fingerprint, b"".join(pieces), asked)
        except (ReplyError, LimitError) as error:
            raise _refusal(error) from None
        self._journal.turn(session, prepared.turn, fingerprint, prepared.digest)
        try:
            return prepared, self._store_turn(session, prepared)
        except FullError:
            return prepared, None

    def _prepare(self, last: Last, fingerprint: str, reply: bytes, asked: Training) -> Prepared:
        began = time.perf_counter()
        decoded, answer, logprobs, prompt = _rollstore.decode_and_strip(
            reply,
            top_k=self._settings.top_k,
            mode=self._settings.mode,
            request=self._settings.request,
            prompt=asked.prompt,
            temperature=asked.temperature,
            logprobs=asked.logprobs,
            meta_info=asked.meta_info,
            token_ids=asked.token_ids,
            split=asked.stream,
        )
        seconds = time.perf_counter() - began
        digest = prompt_digest(prompt)
        replaces = last.turn_count > 0 and (
            fingerprint == last.fingerprint or (digest is not None and digest == last.digest)
        )
        if asked.stream:
            answer = _events(answer, logprobs, asked.include_usage)
        return Prepared(
            turn=last.turn_count - 1 if replaces else last.turn_count,
            replaces=replaces,
            decoded=decoded,
            tokens=len(decoded),
            prompt_tokens=len(prompt) // 4 if prompt else 0,
            digest=digest,
            answer=answer,
            decode_seconds=seconds,
        )

    def _store_turn(self, session: str, prepared: Prepared) -> float:
        began = time.perf_counter()
        put = ("put", session, prepared.turn, prepared.decoded, prepared.replaces)
        self._store._apply((put,), 0)
        return time.perf_counter() - began

    async def _store_when_there_is_room(self, session: str, prepared: Prepared) -> float:
        """Agents wait while trainers make room; the event loop does the waiting."""
        until = time.monotonic() + self._settings.full_timeout
        pause = _PAUSE_FIRST
        while time.monotonic() < until:
            await asyncio.sleep(pause)
            pause = min(2 * pause, _PAUSE_LONGEST)
            try:
                return await self._workers.run(self._store_turn, session, prepared)
            except FullError:
                continue
        message = (
            f"the store is at capacity, and nothing was released within "
            f"{self._settings.full_timeout:g} s"
        )
        raise Refusal(503, "store_full", message, retry=True)


def _events(answer: bytes, logprobs: bytes | None, include_usage: bool) -> bytes:
    """Made before the turn is stored: what cannot be streamed is not recorded either."""
    try:
        return streaming.events(answer, logprobs, include_usage)
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        message = f"the engine's reply cannot be made a stream: {error}"
        raise Refusal(502, "reply", message, retry=False) from None


def _refusal(error: ReplyError | LimitError) -> Refusal:
    """What the agent, and so whoever runs it, is told about a reply that cannot be recorded."""
    message = error.message
    if message.startswith("Requested flat output top logprobs"):
        message += _ADVICE
    return Refusal(502, "reply", message, param=error.field or None, retry=False)
