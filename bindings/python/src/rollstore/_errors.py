"""Every exception that rollstore raises about a reply, a store or a call.

Each is a `RollstoreError`, and beside that the ordinary exception that says the same in Python, so
that `except KeyError`, `except TimeoutError` or `except OSError` also work. Arguments of a wrong
Python type raise `TypeError` as everywhere.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "AccessError",
    "AlignmentError",
    "ArgumentError",
    "BusyError",
    "ClosedError",
    "ConflictError",
    "CorruptError",
    "ExistsError",
    "FileSystemError",
    "ForkedError",
    "FullError",
    "GoneError",
    "HeldError",
    "InputOutputError",
    "LeaseError",
    "LimitError",
    "NoMemoryError",
    "NoSpaceError",
    "NotFoundError",
    "NotStoreError",
    "OrderError",
    "ReadOnlyError",
    "ReadersError",
    "ReplyError",
    "RollstoreError",
    "SealedError",
    "VersionError",
    "WaitTimeoutError",
]


class RollstoreError(Exception):
    """What went wrong, and where.

    code: the C library's number of it (rollstore/error.h), 0 where only Python knows it.
    kind: its short name: "syntax", "full", "not_found", ...
    field: the reply's field or the argument that is at fault, or None.
    offset: byte offset in the reply where that is known, or None.
    index: which element of a list argument is at fault, or None.
    system: errno where the operating system refused, or None.
    """

    code: int
    kind: str
    field: str | None
    offset: int | None
    index: int | None
    system: int | None

    def __init__(
        self,
        message: str = "",
        *,
        code: int = 0,
        kind: str = "unknown",
        field: str | None = None,
        offset: int | None = None,
        index: int | None = None,
        system: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.kind = kind
        self.field = field
        self.offset = offset
        self.index = index
        self.system = system
        if isinstance(self, OSError):
            setattr(self, "errno", system)  # noqa: B010  # only these have one

    def __str__(self) -> str:  # KeyError would show the message's repr
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        # An exception with keyword arguments would not survive the way back from a worker process.
        return _restore, (type(self), self.message, self._details())

    def _details(self) -> dict[str, Any]:
        names = ("code", "kind", "field", "offset", "index", "system")
        return {name: getattr(self, name) for name in names}


def _restore(cls: type[RollstoreError], message: str, details: dict[str, Any]) -> RollstoreError:
    return cls(message, **details)


class ReplyError(RollstoreError, ValueError):
    """A reply, a recorded line or given arrays were refused; nothing was stored.

    kind: "syntax", "missing", "dtype", "shape", "base64", "value" or "type".
    """


class ArgumentError(RollstoreError, ValueError):
    """An argument is outside its documented range."""


class LimitError(RollstoreError, ValueError):
    """A documented limit is exceeded."""


class NoMemoryError(RollstoreError, MemoryError):
    """An allocation failed."""


class ForkedError(RollstoreError, RuntimeError):
    """A snapshot was opened before this process was forked: open a new one here."""


class BusyError(RollstoreError, BufferError):
    """Something is in use: arrays of a snapshot that is to be closed, snapshots of a store."""


class ReadOnlyError(RollstoreError, PermissionError):
    """A write through a store that was opened with mode "r"."""


class NotFoundError(RollstoreError, KeyError, IndexError):
    """There is no such session, turn or consumer."""


class ConflictError(RollstoreError):
    """Other contents are stored there already, and `replace` was not asked for."""


class OrderError(RollstoreError):
    """The turns before this one are not stored."""


class SealedError(RollstoreError):
    """The session has its outcome and takes no more changes."""


class AlignmentError(RollstoreError, ValueError):
    """A prompt contradicts or trims the tokens before it, so there is no sample."""


class HeldError(RollstoreError):
    """A consumer has not finished with the session."""


class LeaseError(RollstoreError):
    """The lease has ended, and the session may have been given to somebody else."""


class FullError(RollstoreError, TimeoutError):
    """The store is at capacity, and nothing was released within the timeout."""


class WaitTimeoutError(RollstoreError, TimeoutError):
    """Nothing came within the timeout."""


class ReadersError(RollstoreError):
    """Every reader slot is taken: close snapshots, or create the store with more readers."""


class NoSpaceError(RollstoreError, OSError):
    """The file system has no room for the store's capacity."""


class ExistsError(RollstoreError, FileExistsError):
    """There is a store, or something else, at the path already."""


class NotStoreError(RollstoreError, FileNotFoundError):
    """There is no store at the path, or files that are none."""


class VersionError(RollstoreError):
    """The store has a format that this library does not know."""


class CorruptError(RollstoreError, ValueError):
    """The store holds bytes that no writer of this format leaves."""


class GoneError(RollstoreError, OSError):
    """The store was deleted while it was open."""


class AccessError(RollstoreError, PermissionError):
    """The operating system refuses access."""


class FileSystemError(RollstoreError, OSError):
    """A file system that cannot hold a store, such as a network one."""


class InputOutputError(RollstoreError, OSError):
    """Any other refusal of the operating system or LMDB."""


class ClosedError(RollstoreError, ValueError):
    """The store or snapshot was closed before."""
