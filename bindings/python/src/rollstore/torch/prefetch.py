"""A thread that makes the next items while the caller works on one."""

from __future__ import annotations

import collections
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from rollstore._errors import WaitTimeoutError

__all__ = ["Exhausted", "Prefetcher"]

T = TypeVar("T")


class Exhausted(Exception):
    """The source has ended, and everything that it gave was got."""


class Prefetcher(Generic[T]):
    """Runs an iterator in a thread, up to `depth` items ahead of get().

    source: called in the thread. It must look at `stopping` wherever it waits, and return then.
    depth: items that are ready at most; the next one is begun when there is room for it.
    idle: called in the thread every `idle_seconds` while there is no room; None: never.
    """

    def __init__(
        self,
        source: Callable[[Prefetcher[T]], Iterator[T]],
        depth: int,
        *,
        idle: Callable[[], None] | None = None,
        idle_seconds: float | None = None,
        name: str = "rollstore",
    ) -> None:
        if depth < 1:
            raise ValueError(f"prefetch: at least 1 is needed, got {depth}")
        self._source = source
        self._depth = depth
        self._idle = idle
        self._idle_seconds = idle_seconds
        self._changed = threading.Condition()
        self._ready: collections.deque[T] = collections.deque()
        self._error: BaseException | None = None
        self._ended = False
        self._process = os.getpid()
        self.stopping = False
        """True once stop() was called; the source returns then."""
        # A daemon, so that an interpreter that ends is not kept waiting for one nobody closed.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            source = self._source(self)
            while self._wait_for_room():
                try:
                    item = next(source)
                except StopIteration:
                    break
                with self._changed:
                    self._ready.append(item)
                    self._changed.notify_all()
        except BaseException as caught:  # it is raised in the thread that calls get()
            error = caught
        with self._changed:
            self._error = error
            self._ended = True
            self._changed.notify_all()

    def _wait_for_room(self) -> bool:
        while True:
            with self._changed:
                if self.stopping:
                    return False
                if len(self._ready) < self._depth:
                    return True
                self._changed.wait(self._idle_seconds)
            if self._idle is not None:
                self._idle()

    def get(self, timeout: float | None = None) -> T:
        """The next item; waits for it.

        Exhausted at the end, the source's exception where it failed (what it gave before is given
        first), WaitTimeoutError after `timeout` seconds; RuntimeError in a forked process, which
        has no such thread.
        """
        self.check_process()
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not self._ready:
                if self._error is not None:
                    raise self._error
                if self._ended:
                    raise Exhausted
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise WaitTimeoutError(f"nothing within {timeout} s", kind="timeout")
                self._changed.wait(left)
            item = self._ready.popleft()
            self._changed.notify_all()
            return item

    def check_process(self) -> None:
        """RuntimeError in a process that was forked off the one that began."""
        if os.getpid() != self._process:
            raise RuntimeError(
                "the loader was started before this process was forked off, and its thread is not "
                "here: make a loader in the process that reads"
            )

    def ready(self) -> list[T]:
        """What is ready and was not got."""
        with self._changed:
            return list(self._ready)

    def stop(self) -> list[T]:
        """End the thread and wait for it; returns what is ready and was not got."""
        if os.getpid() != self._process:
            return []
        with self._changed:
            self.stopping = True
            self._changed.notify_all()
        self._thread.join()
        left = list(self._ready)
        self._ready.clear()
        return left
