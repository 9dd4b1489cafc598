"""The ready order as it grows: sessions as they are sealed, with no plan and no consumer.

Every reader counts units for itself and comes to the same numbers: a session's number is its
sequence number, a group's is how many groups were complete before it. So ranks and workers take
turns as they do over a plan (see plan.py), with no word between them.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any, Literal

from rollstore._errors import WaitTimeoutError
from rollstore.torch.errors import MissingSessionError, StateError
from rollstore.torch.plan import Grouping, Shard, Unit, check_group_size, check_unusable
from rollstore.torch.versions import Staleness

if TYPE_CHECKING:
    from rollstore._snapshot import SessionInfo
    from rollstore._store import Store

__all__ = ["Follow", "Follower"]

# How long a wait may go on before it looks whether it is still wanted.
_PATIENCE_SECONDS = 0.2
_STATE_VERSION = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Follow:
    """What to read as it is sealed.

    after: sequence number to begin after. All ranks and workers need the same one.
    group_size: whole groups of that many sessions only; None: each session by itself.
    timeout: seconds without a new session after which it ends; None: it goes on for ever.
    statuses, staleness: sessions to leave out, see Plan.of; staleness is judged when they are read,
        in the process that reads them. What is left out makes its batch smaller.
    unusable: "drop" leaves out sessions that give no sample.

    Released sessions are a gap. A consumer keeps sessions from being released before they were
    trained on; here, whoever releases them must know that they were read.
    """

    after: int = 0
    group_size: int | None = None
    timeout: float | None = None
    statuses: Collection[str] | None = None
    staleness: Staleness | None = None
    unusable: Literal["raise", "drop"] = "raise"

    def __post_init__(self) -> None:
        check_group_size(self.group_size)
        check_unusable(self.unusable)
        if self.after < 0:
            raise ValueError(f"after: a sequence number from 0 is needed, got {self.after}")

    def state_dict(self) -> dict[str, Any]:
        """What numbers its units."""
        return {"version": _STATE_VERSION, "after": self.after, "group_size": self.group_size}

    def check_state(self, state: dict[str, Any]) -> None:
        """StateError unless the state numbers units as this does."""
        if state != self.state_dict():
            raise StateError(f"the state is of {state}, but this follows {self.state_dict()}")


class Follower:
    """Reads the ready order for one rank and worker, until `stopped` says so."""

    def __init__(self, follow: Follow, store: Store, stopped: Callable[[], bool]) -> None:
        self._follow = follow
        self._store = store
        self._stopped = stopped

    def batches(
        self,
        shard: Shard,
        done: int,
        size: int,
        worker: int = 0,
        workers: int = 1,
        drop_last: bool = False,
    ) -> Iterator[tuple[int, list[Unit]]]:
        """As Plan.batches. A unit that is left out is empty."""
        units: list[Unit] = []
        after = done
        for place, unit in self._units(shard.base + done * shard.world):
            number, turn = divmod(place - shard.base, shard.world)
            if number < done or turn != shard.rank:
                continue
            if (number - done) // size % workers != worker:
                continue
            units.append(unit)
            after = number + 1
            if len(units) == size:
                yield after, units
                units = []
        if units and not drop_last:
            yield after, units

    def _units(self, begin: int) -> Iterator[tuple[int, Unit]]:
        """All units of the order with their places, from `begin` at the latest."""
        if self._follow.group_size is None:
            yield from self._sessions(begin)
        else:
            yield from self._groups()

    def _sessions(self, begin: int) -> Iterator[tuple[int, Unit]]:
        first = self._follow.after + 1
        expected = first + begin
        for info, newest in self._sealed(expected - 1):
            # What is not there any more has its number all the same; reading it tells.
            end = newest + 1 if info is None else info.sequence
            for sequence in range(expected, end):
                yield sequence - first, (sequence,)
            expected = end
            if info is not None:
                yield info.sequence - first, (info.sequence,) if self._wanted(info) else ()
                expected = info.sequence + 1

    def _groups(self) -> Iterator[tuple[int, Unit]]:
        grouping = Grouping(self._follow.group_size)
        place = 0
        expected = self._follow.after + 1
        for info, newest in self._sealed(self._follow.after):
            if info is None or info.sequence != expected:
                last = newest if info is None else info.sequence - 1
                raise MissingSessionError(
                    f"sessions of sequence numbers {expected} to {last} were released before they "
                    "were read, so groups cannot be counted: begin after them (after=), or take "
                    "sessions as a consumer, which keeps them until they are trained on",
                    kind="not_found",
                    field="sequence",
                )
            expected += 1
            unit = grouping.add(info) if self._wanted(info) else None
            if unit is not None:
                yield place, tuple(member.sequence for member in unit)
                place += 1

    def _wanted(self, info: SessionInfo) -> bool:
        return self._follow.statuses is None or info.status in self._follow.statuses

    def _sealed(self, after: int) -> Iterator[tuple[SessionInfo | None, int]]:
        """Each sealed session, or None and the newest number where there are none up to it."""
        while self._wait(after):
            newest = self._store.stat().newest_sequence
            found = self._store._sealed_after(after)
            for info in found:
                after = info.sequence
                yield info, newest
            if not found:
                after = newest
                yield None, newest

    def _wait(self, after: int) -> bool:
        """Wait for a number over `after`. False when there will be none."""
        timeout = self._follow.timeout
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while not self._stopped():
            left = deadline - time.monotonic()
            try:
                self._store.wait(after, max(0.0, min(_PATIENCE_SECONDS, left)))
            except WaitTimeoutError:
                if left <= 0:
                    return False
            else:
                return True
        return False
