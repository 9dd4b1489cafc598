"""A store's calls for asyncio.

Calls that decode or commit run in the event loop's threads, with the GIL free. Waiting, for space
or for sessions, is sleeping in the event loop, so that a thousand waiting calls hold no thread, and
a cancelled one ends at once. A call that is cancelled while it commits may still be stored; the
same call again then finds it unchanged.
"""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from rollstore import _rollstore
from rollstore._consumer import LEASE_SECONDS, Leases
from rollstore._errors import FullError, WaitTimeoutError

if TYPE_CHECKING:
    from rollstore._ingest import Ingested, Line
    from rollstore._snapshot import SessionInfo
    from rollstore._store import Changes, Store

__all__ = ["AsyncStore"]

T = TypeVar("T")

_SHORTEST = 0.001
_LONGEST = 0.05


async def _in_thread(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    call = functools.partial(function, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(None, call)


class _Pause:
    """Growing sleeps until a timeout. `more` is False when the time is over."""

    def __init__(self, timeout: float | None) -> None:
        if timeout is not None and not timeout >= 0:
            raise ValueError(f"timeout: seconds from 0 on are needed, got {timeout!r}")
        self.until = None if timeout is None else time.monotonic() + timeout
        self.seconds = _SHORTEST

    async def more(self) -> bool:
        left = _LONGEST if self.until is None else self.until - time.monotonic()
        if left <= 0:
            return False
        await asyncio.sleep(min(self.seconds, left))
        self.seconds = min(self.seconds * 2, _LONGEST)
        return True


class AsyncStore:
    """The awaitable forms of a store's calls, with the same arguments; made by Store.aio."""

    __slots__ = ("_store",)

    def __init__(self, store: Store) -> None:
        self._store = store

    async def put_reply(
        self,
        session: str | bytes,
        turn: int,
        reply: Any,
        *,
        replace: bool = False,
        timeout: float | None = 60.0,
        **options: Any,
    ) -> bool:
        """As Store.put_reply."""
        pause = _Pause(timeout)
        try:
            return await _in_thread(
                self._store.put_reply, session, turn, reply, replace=replace, timeout=0, **options
            )
        except FullError:
            if not await pause.more():
                raise
        # Decoded once; only storing is tried again.
        decoded = await _in_thread(_rollstore.decode, reply, **options)
        change = ("put", session, turn, decoded, replace)
        (changed,) = await self._apply((change,), pause)
        return changed

    async def _apply(self, changes: tuple[tuple[Any, ...], ...], pause: _Pause) -> list[bool]:
        while True:
            try:
                return await _in_thread(self._store._apply, changes, 0)
            except FullError:
                if not await pause.more():
                    raise

    async def apply(self, changes: Changes) -> list[bool]:
        """As Changes.apply, of what was collected by store.changes()."""
        pause = _Pause(changes._timeout)
        changed = await self._apply(tuple(changes._changes), pause)
        changes._changes.clear()
        return changed

    async def put(
        self,
        session: str | bytes,
        turn: int,
        *,
        timeout: float | None = 60.0,
        **arrays_and_options: Any,
    ) -> bool:
        """As Store.put."""
        pause = _Pause(timeout)
        while True:
            try:
                return await _in_thread(
                    self._store.put, session, turn, timeout=0, **arrays_and_options
                )
            except FullError:
                if not await pause.more():
                    raise

    async def seal(
        self,
        session: str | bytes,
        status: Literal["completed", "truncated", "aborted", "failed"] = "completed",
        *,
        reward: float | None = None,
        group_index: int | None = None,
        index: int | None = None,
        replace: bool = False,
    ) -> bool:
        """As Store.seal."""
        return await _in_thread(
            self._store.seal,
            session,
            status,
            reward=reward,
            group_index=group_index,
            index=index,
            replace=replace,
        )

    async def restart(self, session: str | bytes, from_turn: int = 0) -> bool:
        """As Store.restart."""
        return await _in_thread(self._store.restart, session, from_turn)

    async def release(self, session: str | bytes, *, force: bool = False) -> bool:
        """As Store.release."""
        return await _in_thread(self._store.release, session, force=force)

    async def release_consumed(self, limit: int = 0) -> int:
        """As Store.release_consumed."""
        return await _in_thread(self._store.release_consumed, limit)

    async def ingest(
        self, lines: str | os.PathLike[str] | bytes | Iterable[Line], **options: Any
    ) -> Ingested:
        """As Store.ingest, in one thread; a cancelled one goes on to its end."""
        return await _in_thread(self._store.ingest, lines, **options)

    async def sync(self) -> None:
        """As Store.sync."""
        await _in_thread(self._store.sync)

    async def wait(self, after: int = 0, timeout: float | None = None) -> int:
        """As Store.wait. WaitTimeoutError."""
        pause = _Pause(timeout)
        while True:
            try:
                return self._store.wait(after, 0)  # a microsecond: no thread is needed
            except WaitTimeoutError:
                if not await pause.more():
                    raise

    async def sealed(
        self, after: int = 0, *, timeout: float | None = None
    ) -> AsyncIterator[SessionInfo]:
        """As Store.sealed: `async for session in store.aio.sealed(): ...`."""
        while True:
            try:
                await self.wait(after, timeout)
            except WaitTimeoutError:
                return
            found = self._store._sealed_after(after)
            if not found:
                after = max(after, self._store.stat().newest_sequence)
            for info in found:
                after = info.sequence
                yield info

    async def take(
        self,
        consumer: str,
        max: int = 1,
        *,
        lease: float = LEASE_SECONDS,
        timeout: float | None = None,
    ) -> Leases:
        """As Consumer.take, of the consumer of that name."""
        pause = _Pause(timeout)
        found = await _in_thread(self._store.consumer, consumer, create=False)
        while True:
            try:
                return await _in_thread(found.take, max, lease=lease, timeout=0)
            except WaitTimeoutError:
                if not await pause.more():
                    raise
