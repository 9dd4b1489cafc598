"""Stores: opening, writing, waiting, and looking after one."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rollstore import _rollstore
from rollstore._async import AsyncStore
from rollstore._consumer import Consumer, ConsumerInfo
from rollstore._errors import WaitTimeoutError
from rollstore._ingest import Ingested, ingest
from rollstore._snapshot import SessionInfo, Snapshot

if TYPE_CHECKING:
    from rollstore._ingest import Line

__all__ = ["Changes", "Stat", "Store", "Verified", "open"]

Mode = Literal["r", "w", "c", "x"]
Durability = Literal["memory", "interval", "full"]
Status = Literal["completed", "truncated", "aborted", "failed"]

_MODES = {
    "r": _rollstore.OPEN_READ_ONLY,
    "w": 0,
    "c": _rollstore.OPEN_CREATE,
    "x": _rollstore.OPEN_CREATE | _rollstore.OPEN_EXCLUSIVE,
}
_DURABILITIES = {
    "memory": _rollstore.DURABILITY_MEMORY,
    "interval": _rollstore.DURABILITY_INTERVAL,
    "full": _rollstore.DURABILITY_FULL,
}
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class Stat(NamedTuple):
    """How a store stands. Sizes in bytes, times in nanoseconds.

    capacity_size: of turns. map_size: of the file. durability, interval (seconds),
    reader_count, created_ns: as created.
    session_count = open_count + sealed_count; released_count: ever.
    turn_count, generated_count (tokens), value_size: stored now.
    newest_sequence: the newest sequence number given out.
    used_size: pages in use. free_size: that the next writes can take. pinned_size: freed pages that
    an open snapshot still holds.
    last_transaction: number of the last commit.
    readers_used: reader slots. reader_pid: process with the oldest open snapshot, 0 when none.
    reader_age: transactions committed since that snapshot.
    read_only_files: this process may not write the data file.
    """

    capacity_size: int
    map_size: int
    durability: str
    interval: float
    reader_count: int
    created_ns: int
    session_count: int
    open_count: int
    sealed_count: int
    released_count: int
    turn_count: int
    generated_count: int
    value_size: int
    newest_sequence: int
    used_size: int
    free_size: int
    pinned_size: int
    last_transaction: int
    readers_used: int
    reader_pid: int
    reader_age: int
    read_only_files: bool


class Verified(NamedTuple):
    """What Store.verify read, and the faults it found, each in words."""

    sessions: int
    turns: int
    bytes: int
    faults: list[str]


def _capacity(capacity: int | str | None) -> int:
    if capacity is None:
        return 0
    if isinstance(capacity, str):
        text = capacity.strip().upper().removesuffix("B").removesuffix("I")
        unit = text[-1:] if text[-1:] in ("K", "M", "G", "T") else ""
        try:
            return int(float(text.removesuffix(unit)) * _UNITS[unit])
        except (ValueError, OverflowError):
            raise ValueError(
                f'capacity: bytes or such as "2G" are needed, got {capacity!r}'
            ) from None
    if capacity <= 0:
        raise ValueError(f"capacity: bytes over 0 are needed, got {capacity}")
    return capacity


def open(
    path: str | os.PathLike[str],
    mode: Mode = "r",
    *,
    capacity: int | str | None = None,
    durability: Durability = "memory",
    interval_ms: int | None = None,
    readers: int | None = None,
    group: bool = False,
    trust: bool = False,
) -> Store:
    """Open a store, a folder in shared memory (/dev/shm/...) or on a local disk.

    mode: "r" to read; "w" to read and write an existing store; "c" creates it when there is none;
        "x" creates it, ExistsError when there is one.
    Settings of creation, which an existing store keeps as they were:
    capacity: bytes of turns, or such as "8G"; None: 1 GiB. All of it is taken from the file system
        now (NoSpaceError), so that it cannot run out later.
    durability: "memory" (never synced: survives the process, not the machine), "interval" (synced
        every `interval_ms`, 100 by default) or "full" (synced at each commit).
    readers: snapshots of all processes that can be open at a time; None: 1024.
    group: files that the group may read and write too.
    Setting of this handle:
    trust: skip the check of each record's contents at its first reading.

    NotStoreError, NoSpaceError, AccessError, VersionError, CorruptError, FileSystemError; BusyError
    where this process has it open with mode "r" and now asks to write.
    """
    if mode not in _MODES:
        raise ValueError(f'mode: {mode!r} is none of "r", "w", "c", "x"')
    if durability not in _DURABILITIES:
        raise ValueError(f'durability: {durability!r} is none of "memory", "interval", "full"')
    flags = _MODES[mode]
    if group and mode in ("c", "x"):
        flags |= _rollstore.OPEN_GROUP
    if trust:
        flags |= _rollstore.OPEN_TRUST
    return Store(
        os.path.abspath(os.fspath(path)),
        flags,
        _capacity(capacity),
        _DURABILITIES[durability],
        interval_ms or 0,
        readers or 0,
    )


def _reopen(path: str, flags: int) -> Store:
    return Store(path, flags)


class Store(_rollstore.Store):
    """A store; made by rollstore.open.

    Works from several threads at once; every call lets go of the GIL while it decodes, waits or
    commits. After a fork the child opens the store again by itself; a pickled store opens it where
    it is unpickled (and never creates it). Closing is the end of a `with` block, or close().
    """

    __slots__ = ("__weakref__",)

    @property
    def mode(self) -> str:
        """ "r", or "w" for a store that can be written, however it was opened."""
        return "r" if self.read_only else "w"

    # ------------------------------------------------------------ writing

    def ingest(
        self,
        lines: str | os.PathLike[str] | bytes | Iterable[Line],
        *,
        top_k: int = 0,
        replace: bool = False,
        timeout: float | None = 60.0,
        strict: bool = False,
    ) -> Ingested:
        """Store recorded sessions: a path, the file's bytes, an open file, or lines.

        lines: each is one JSON object (bytes, str, or a dict as parsed), a turn or an end:
            {"session_id", "turn", "request", "response"} or {"session_id", "end": {"status",
            "reward", "group_index", "index"}}. Blank ones are passed over. The request says how its
            reply is read, and holds the prompt (input_ids) and the temperature.
        top_k: what the candidates a token must be; 0: what each request asked for.
        replace: let other contents take the place of a session's last turn.
        timeout: seconds to wait at capacity at a time, None without end (FullError).
        strict: raise the first line's error; what was before it is stored. Otherwise lines that
            cannot be stored are listed in the result with their errors, and the rest is stored.

        Doing it again is fine: what stands there already is counted as unchanged.
        """
        return ingest(self, lines, top_k=top_k, replace=replace, timeout=timeout, strict=strict)

    def changes(self, *, timeout: float | None = 60.0) -> Changes:
        """Several changes in one transaction, all or none: see Changes."""
        return Changes(self, timeout)

    # ------------------------------------------------------------ reading

    def snapshot(self) -> Snapshot:
        """The store as of the last commit. ReadersError when every slot is taken."""
        return Snapshot(self)

    def sealed(self, after: int = 0, *, timeout: float | None = None) -> Iterator[SessionInfo]:
        """Sealed sessions in ready order, from sequence number `after` on, then new ones.

        It waits for the next session up to `timeout` seconds (None: without end), and ends when
        none came. No snapshot is held while it waits or between two steps, so a session may be
        released before it is read.
        """
        while True:
            try:
                self.wait(after, timeout)
            except WaitTimeoutError:
                return
            found = self._sealed_after(after)
            if not found:
                # The newest was released before it could be seen.
                after = max(after, self.stat().newest_sequence)
            for info in found:
                after = info.sequence
                yield info

    def _sealed_after(self, after: int, limit: int = 256) -> list[SessionInfo]:
        with self.snapshot() as snapshot:
            found = []
            for session in snapshot.ready(after):
                found.append(session.info)
                if len(found) == limit:
                    break
            return found

    # ------------------------------------------------------------ consumers

    def consumer(
        self, name: str, *, start: Literal["oldest", "newest"] = "oldest", create: bool = True
    ) -> Consumer:
        """The consumer of that name, created when there is none.

        start: where a new one begins, at the oldest stored session or at the next to be sealed.
        create: False: NotFoundError when there is none.
        """
        if start not in ("oldest", "newest"):
            raise ValueError(f'start: {start!r} is none of "oldest", "newest"')
        if create:
            self._consumer_create(name, start == "newest")
            return Consumer(self, name)
        found = Consumer(self, name)
        found.stat()
        return found

    def consumers(self) -> list[ConsumerInfo]:
        """All consumers."""
        with self.snapshot() as snapshot:
            return snapshot.consumers()

    # ------------------------------------------------------------ asyncio

    @property
    def aio(self) -> AsyncStore:
        """The same calls for asyncio: `await store.aio.put_reply(...)`."""
        return AsyncStore(self)

    # ------------------------------------------------------------ looking after it

    def stat(self) -> Stat:
        """How it stands; costs no reading of the data."""
        return Stat._make(self._stat())

    def verify(self) -> Verified:
        """Read everything once: each checksum, value, index, total and sample.

        Returns what was read and each fault that was found.
        """
        return Verified._make(self._verify())

    # ------------------------------------------------------------ itself

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.path, self._flags)

    def __repr__(self) -> str:
        return f"<rollstore.Store {self.path}: {'closed' if self.closed else self.mode}>"


class Changes:
    """Several changes in one transaction, all or none.

        with store.changes() as changes:
            changes.put_reply("a", 3, reply, prompt=ids)
            changes.seal("a", reward=1.0)

    Replies are decoded when they are put (ReplyError there and then); the changes are applied in
    their order at the end of the `with` block, or by apply(). After an exception in the block
    nothing is applied. An error's `index` tells the change at fault.
    """

    __slots__ = ("_changes", "_store", "_timeout")

    def __init__(self, store: Store, timeout: float | None = 60.0) -> None:
        self._store = store
        self._timeout = timeout
        self._changes: list[tuple[Any, ...]] = []

    def __len__(self) -> int:
        return len(self._changes)

    def put_reply(
        self, session: str | bytes, turn: int, reply: Any, *, replace: bool = False, **options: Any
    ) -> None:
        """As Store.put_reply; options are those of rollstore.decode."""
        decoded = _rollstore.decode(reply, **options)
        self._changes.append(("put", session, turn, decoded, replace))

    def seal(
        self,
        session: str | bytes,
        status: Status = "completed",
        *,
        reward: float | None = None,
        group_index: int | None = None,
        index: int | None = None,
        replace: bool = False,
    ) -> None:
        """As Store.seal."""
        self._changes.append(("seal", session, status, reward, group_index, index, replace))

    def restart(self, session: str | bytes, from_turn: int = 0) -> None:
        """As Store.restart."""
        self._changes.append(("restart", session, from_turn))

    def release(self, session: str | bytes, *, force: bool = False) -> None:
        """As Store.release."""
        self._changes.append(("release", session, force))

    def apply(self) -> list[bool]:
        """Apply what was collected; returns for each change whether it changed the store."""
        changed = self._store._apply(tuple(self._changes), self._timeout)
        self._changes.clear()
        return changed

    def __enter__(self) -> Changes:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc_type is None:
            self.apply()
        else:
            self._changes.clear()
