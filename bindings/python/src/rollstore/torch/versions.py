"""The limit on staleness: how many weight versions behind a session may be.

Versions are those that the engine recorded turn by turn. A session is as old as its oldest turn.
"""

from __future__ import annotations

import dataclasses
import threading
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

from rollstore.torch.errors import (
    StaleError,
    UnversionedError,
    VersionRestartError,
    VersionRestartWarning,
)

if TYPE_CHECKING:
    from rollstore._snapshot import Session

__all__ = ["Reason", "Staleness", "VersionClock", "Versions"]

Reason = Literal["stale", "restarted", "unversioned"]

_RESTART = (
    "A restarted trainer that counts from 1 again makes every staleness wrong: "
    "continue from the version that the last checkpoint had, or begin with an empty store."
)


class Versions(NamedTuple):
    """The weight versions of a session's turns.

    oldest, newest: of the turns that have a number, or None.
    complete: whether every turn has one.
    """

    oldest: int | None
    newest: int | None
    complete: bool

    @classmethod
    def of(cls, session: Session) -> Versions:
        """Read turn by turn: a session's totals do not tell whether a turn has no number."""
        found = [turn.weight_version_number for turn in session]
        numbers = [number for number in found if number is not None]
        complete = len(numbers) == len(found) and bool(found)
        if not numbers:
            return cls(None, None, complete)
        return cls(min(numbers), max(numbers), complete)


@dataclasses.dataclass(frozen=True, slots=True)
class Staleness:
    """A limit on staleness.

    limit: how many versions behind the oldest turn may be; 0 is on-policy.
    current: the trainer's weight version, or a function that tells it (called from other threads
        too): the newest one that was handed to the engines. Count it up before handing it out.
    over: what becomes of a session over the limit: "drop" (it counts as finished with, and is
        counted) or "raise" (StaleError).
    restart: what becomes of a session that was sampled by a version newer than `current`, and of a
        `current` that goes backwards. Both mean a trainer that was restarted and counts anew.
        "raise" (VersionRestartError), "warn" (VersionRestartWarning, and it is trained on), or
        "drop" (such sessions are dropped; a backward count is warned about).
    unknown: a session with a turn whose version is no number: "raise" (UnversionedError), "keep",
        or "drop".
    """

    limit: int
    current: int | Callable[[], int]
    over: Literal["drop", "raise"] = "drop"
    restart: Literal["raise", "warn", "drop"] = "raise"
    unknown: Literal["raise", "keep", "drop"] = "raise"

    def __post_init__(self) -> None:
        if self.limit < 0:
            raise ValueError(f"limit: a number of versions from 0 is needed, got {self.limit}")
        for name, value, known in (
            ("over", self.over, ("drop", "raise")),
            ("restart", self.restart, ("raise", "warn", "drop")),
            ("unknown", self.unknown, ("raise", "keep", "drop")),
        ):
            if value not in known:
                raise ValueError(f"{name}: {value!r} is none of {known}")

    def judge(self, session_id: str, versions: Versions, now: int) -> Reason | None:
        """Why the session is to be dropped when the trainer is at version `now`, or None."""
        if not versions.complete and self.unknown != "keep":
            if self.unknown == "drop":
                return "unversioned"
            raise UnversionedError(
                f'session "{session_id}" has a turn without a weight version that is a number, so '
                'its staleness is unknown: unknown="keep" or "drop" says what to do with such',
                kind="unversioned",
                field="weight_version",
            )
        if versions.newest is not None and versions.newest > now:
            message = (
                f'session "{session_id}" was sampled by weight version {versions.newest}, but the '
                f"trainer is at {now}. {_RESTART}"
            )
            if self.restart == "drop":
                return "restarted"
            if self.restart == "raise":
                raise VersionRestartError(message, kind="restart", field="weight_version")
            warnings.warn(message, VersionRestartWarning, stacklevel=2)
        if versions.oldest is not None and now - versions.oldest > self.limit:
            if self.over == "drop":
                return "stale"
            raise StaleError(
                f'session "{session_id}" was sampled by weight version {versions.oldest}, '
                f"{now - versions.oldest} behind the trainer's {now}; the limit is {self.limit}",
                kind="stale",
                field="weight_version",
            )
        return None


class VersionClock:
    """The trainer's weight version over time, which must not go backwards."""

    def __init__(self, staleness: Staleness, newest: int | None = None) -> None:
        self._staleness = staleness
        self._lock = threading.Lock()
        self.newest = newest
        """The highest version seen, also before a resume; None before the first."""

    def now(self) -> int:
        """The version now."""
        # One at a time: a thread that was asked earlier and answers later is no step back.
        with self._lock:
            current = self._staleness.current
            now = current() if callable(current) else current
            newest = self.newest
            if newest is None or now >= newest:
                self.newest = now
                return now
            message = f"the trainer's weight version is {now}, but it was {newest}. {_RESTART}"
            if self._staleness.restart == "raise":
                raise VersionRestartError(message, kind="restart", field="weight_version")
            self.newest = now  # warned about once
        warnings.warn(message, VersionRestartWarning, stacklevel=2)
        return now
