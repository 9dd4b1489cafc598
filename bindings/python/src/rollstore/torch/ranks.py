"""Ranks that take from one consumer: a fair share each, and a checkpoint of one moment.

A consumer gives sessions to whoever asks first. Ranks that step together need more than that: one
that reads ahead must not take what another one waits for, or all of them wait for ever; sessions
of one group must not be spread over ranks that each hold a part; and a checkpoint's place must
hold the batches of all ranks or of none. A small file in the store's folder settles it:

- two numbers for each rank, batches taken and batches acknowledged. A rank takes its next batch
  when no other one has taken fewer.
- record locks (of open file descriptions: they end with the process, whatever ends it). One is
  held while taking, one by each rank for as long as it loads. A rank that is gone holds up nobody.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import time
import weakref
from collections.abc import Callable, Iterator

from rollstore._errors import HeldError, WaitTimeoutError
from rollstore._rollstore import session_key
from rollstore._store import Store

__all__ = ["Ranks"]

_MUTEX = 0  # the byte that is locked while taking; rank r's is _LIVE + r
_LIVE = 1
_NUMBER = 8  # bytes; the first one is 1 when all ranks were here at once
_TAKEN, _ACKNOWLEDGED = 0, 1
_LOCK = struct.Struct("hhqqi0q")
_POLL_SECONDS = 0.01
_NEVER = (1 << 64) - 1  # more batches than any rank takes: it wants no more

# A forked process has the same open file, and would keep a rank alive that is gone.
_open_ranks: weakref.WeakSet[Ranks] = weakref.WeakSet()


def _after_fork() -> None:
    for ranks in list(_open_ranks):
        ranks._forget()


os.register_at_fork(after_in_child=_after_fork)


class Ranks:
    """One rank of a consumer, while it loads."""

    def __init__(self, store: Store, consumer: str, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        self._consumer = consumer
        name = f"ranks-{session_key(consumer).hex()}"
        self._file = _open(store.path, name)
        self._joined = world == 1
        self._taken = self._acknowledged = 0
        _open_ranks.add(self)
        try:
            with self.taking(lambda: False):
                self._join()
        except BaseException:
            self.leave()
            raise

    def _join(self) -> None:
        if not self._lock(_LIVE + self._rank, fcntl.F_WRLCK):
            raise HeldError(
                f'rank {self._rank} of consumer "{self._consumer}" is loading already, here or in '
                "another process: give each one its own rank, and their number as world",
                kind="held",
            )
        others = self._others()
        if not others:
            os.pwrite(self._file, bytes(_NUMBER), 0)
        # One that comes later begins where the others stand, not with all that they had.
        self._taken = min((self._taken_by(rank) for rank in others), default=0)
        self._acknowledged = min((self._acknowledged_by(rank) for rank in others), default=0)
        self.took(0)

    # ------------------------------------------------------------ taking

    @contextlib.contextmanager
    def taking(self, stopped: Callable[[], bool]) -> Iterator[bool]:
        """Only one rank at a time is in here. False when `stopped` said so before it was."""
        while not self._lock(_MUTEX, fcntl.F_WRLCK):
            if stopped():
                yield False
                return
            time.sleep(_POLL_SECONDS)
        try:
            yield True
        finally:
            self._lock(_MUTEX, fcntl.F_UNLCK)

    def may_take(self) -> bool:
        """Whether it is this rank's turn, once every rank has come."""
        if not self._joined:
            self._joined = self._all_came()
        return self._joined and all(self._taken_by(rank) >= self._taken for rank in self._others())

    def _all_came(self) -> bool:
        # Kept in the file: one that came and is gone before another one looked was here, too.
        came = (1).to_bytes(_NUMBER, "little")
        if os.pread(self._file, _NUMBER, 0) == came:
            return True
        if self.missing():
            return False
        os.pwrite(self._file, came, 0)
        return True

    def took(self, batches: int) -> None:
        """This rank has so many batches more; fewer where one was taken apart again."""
        self._taken += batches
        self._write(_TAKEN, self._taken)
        self._write(_ACKNOWLEDGED, self._acknowledged)

    def ended(self) -> None:
        """This rank takes no more for now. took() begins again."""
        self._write(_TAKEN, _NEVER)

    # ------------------------------------------------------------ checkpoints

    def trained(self) -> None:
        """This rank has acknowledged one more batch."""
        self._acknowledged += 1
        self._write(_ACKNOWLEDGED, self._acknowledged)

    def finished(self) -> None:
        """This rank has nothing more to acknowledge. took() begins again."""
        self._write(_TAKEN, _NEVER)
        self._write(_ACKNOWLEDGED, _NEVER)

    def wait_for_others(self, timeout: float | None) -> None:
        """Until each rank that is not finished has acknowledged as many. WaitTimeoutError."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            behind = next(filter(self._behind, self._others()), None)
            if behind is None:
                return
            if deadline is not None and time.monotonic() > deadline:
                raise WaitTimeoutError(
                    f"rank {behind} has acknowledged {self._acknowledged_by(behind)} batches and "
                    f"rank {self._rank} {self._acknowledged}, for {timeout} s: a checkpoint needs "
                    "all ranks at one step. Each calls trained() or state_dict() after it",
                    kind="timeout",
                )
            time.sleep(_POLL_SECONDS)

    def _behind(self, rank: int) -> bool:
        return self._acknowledged_by(rank) < self._acknowledged

    # ------------------------------------------------------------ the file

    def missing(self) -> list[int]:
        """The ranks that are not loading."""
        here = [*self._others(), self._rank]
        return [rank for rank in range(self._world) if rank not in here]

    def _others(self) -> list[int]:
        return [rank for rank in range(self._world) if rank != self._rank and self._live(rank)]

    def _live(self, rank: int) -> bool:
        asked = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _LIVE + rank, 1, 0)
        found = fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, asked)
        return bool(_LOCK.unpack(found)[0] != fcntl.F_UNLCK)

    def _lock(self, byte: int, kind: int) -> bool:
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _LOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
        except (BlockingIOError, PermissionError):  # EAGAIN or EACCES: somebody has it
            return False
        return True

    def _taken_by(self, rank: int) -> int:
        return self._read(rank, _TAKEN)

    def _acknowledged_by(self, rank: int) -> int:
        return self._read(rank, _ACKNOWLEDGED)

    def _read(self, rank: int, field: int) -> int:
        found = os.pread(self._file, _NUMBER, _place(rank, field))
        return int.from_bytes(found, "little")

    def _write(self, field: int, number: int) -> None:
        # One number at a time: each is written by another thread.
        os.pwrite(self._file, number.to_bytes(_NUMBER, "little"), _place(self._rank, field))

    def leave(self) -> None:
        """This rank loads no more; twice is fine."""
        if self._file >= 0:
            for byte in (_MUTEX, _LIVE + self._rank):
                self._lock(byte, fcntl.F_UNLCK)
            self._forget()

    def _forget(self) -> None:
        os.close(self._file)
        self._file = -1
        _open_ranks.discard(self)


def _place(rank: int, field: int) -> int:
    """Where a rank's number is in the file, behind the mark that all came."""
    return _NUMBER * (1 + 2 * rank + field)


def _open(folder: str, name: str) -> int:
    """The file, made with the rights of the store's own."""
    mode = os.stat(os.path.join(folder, "data.mdb")).st_mode & 0o666
    path = os.path.join(folder, name)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    if os.fstat(file).st_uid == os.geteuid():
        os.fchmod(file, mode)  # whatever the umask took away
    return file
