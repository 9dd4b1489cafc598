"""Recorded sessions: from files, lines or dicts into a store."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from rollstore import _rollstore
from rollstore._errors import ClosedError, RollstoreError

if TYPE_CHECKING:
    from rollstore._store import Store

__all__ = ["Ingested", "Refused"]

Line = bytes | bytearray | memoryview | str | dict[str, Any]

# A transaction costs about as much as storing 100 KB: shared by that many lines it is nothing, and
# other writers wait for no longer than these take.
_LINES = 64


class Refused(NamedTuple):
    """A line that was not stored: its number from 1, and the error."""

    line: int
    error: RollstoreError


class Ingested(NamedTuple):
    """What ingest did.

    turns: stored. sealed: sessions that got their outcome. unchanged: lines whose turn or outcome
    stood there already. refused: lines that were not stored.
    """

    turns: int
    sealed: int
    unchanged: int
    refused: list[Refused]


def _lines_of(source: Any) -> Iterator[Line]:
    if isinstance(source, (str, os.PathLike)):
        with open(source, "rb") as file:
            yield from file
    elif isinstance(source, (bytes, bytearray, memoryview)):
        yield from bytes(source).split(b"\n")
    else:
        yield from source


def _numbered(source: Any) -> Iterator[tuple[int, Line]]:
    for number, line in enumerate(_lines_of(source), 1):
        if isinstance(line, dict) or (line.strip() if hasattr(line, "strip") else line):
            yield number, line


class _Ingest:
    def __init__(self, store: Store, timeout: float | None, strict: bool) -> None:
        self.store = store
        self.timeout = timeout
        self.strict = strict
        self.waiting: list[tuple[int, tuple[Any, ...]]] = []
        self.turns = self.sealed = self.unchanged = 0
        self.refused: list[Refused] = []

    def refuse(self, number: int, error: RollstoreError) -> None:
        if self.strict:
            error.index = number
            error.message = f"line {number}: {error.message}"
            raise error
        self.refused.append(Refused(number, error))

    def flush(self) -> None:
        """Apply what waits; a change that is refused is taken out, and the others tried again."""
        while self.waiting:
            try:
                changed = self.store._apply(tuple(c for _, c in self.waiting), self.timeout)
            except RollstoreError as error:
                if error.index is None:
                    raise
                number, _ = self.waiting.pop(error.index)
                self.refuse(number, error)
                continue
            for (_, change), new in zip(self.waiting, changed):
                self.turns += new and change[0] == "put"
                self.sealed += new and change[0] == "seal"
                self.unchanged += not new
            self.waiting.clear()


def ingest(
    store: Store,
    source: str | os.PathLike[str] | bytes | Iterable[Line],
    *,
    top_k: int,
    replace: bool,
    timeout: float | None,
    strict: bool,
) -> Ingested:
    """See Store.ingest."""
    if store.closed:
        raise ClosedError(f"{store.path} is closed", kind="closed")
    work = _Ingest(store, timeout, strict)
    for number, line in _numbered(source):
        try:
            change = _rollstore.decode_line(line, top_k=top_k, replace=replace)
        except RollstoreError as error:
            work.flush()
            work.refuse(number, error)
            continue
        work.waiting.append((number, change))
        if len(work.waiting) >= _LINES:
            work.flush()
    work.flush()
    return Ingested(work.turns, work.sealed, work.unchanged, work.refused)
