"""Takes sessions from a consumer, keeps their leases alive, and makes batches of them."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from rollstore._consumer import Consumer, Lease
from rollstore._errors import LeaseError, NotFoundError, RollstoreError, WaitTimeoutError
from rollstore.torch.batch import UNUSABLE, BatchArguments, TrainingBatch, assemble, unit_at
from rollstore.torch.plan import Grouping
from rollstore.torch.prefetch import Exhausted, Prefetcher
from rollstore.torch.ranks import Ranks
from rollstore.torch.versions import Staleness, VersionClock, Versions

if TYPE_CHECKING:
    from rollstore._snapshot import Session, SessionInfo, Snapshot

__all__ = ["ConsumerBatch", "Counts", "Feeder", "Taking"]

# How long a wait may go on before it looks whether it is still wanted.
_PATIENCE_SECONDS = 0.1
# A dead process's leases come back without a commit, so nothing tells of them.
_LOOK_AGAIN_SECONDS = 2.0
# Sessions that one transaction leases where what makes no whole group is handed back.
_CHUNK = 256


class Member(NamedTuple):
    """A session that is leased, and the versions of its turns where staleness is limited."""

    lease: Lease
    info: SessionInfo
    versions: Versions | None


LeasedUnit = tuple[Member, ...]
"""A session, or a whole group."""


@dataclasses.dataclass(eq=False)
class ConsumerBatch(TrainingBatch):
    """A TrainingBatch whose sessions are leased. units: the leases, session by session."""

    units: tuple[LeasedUnit, ...]

    def __reduce__(self) -> Any:
        raise TypeError("a batch of leased sessions belongs to its process: send its tensors")


class Counts(NamedTuple):
    """What became of sessions, in this process since the loader was made.

    batches, trained: batches and sessions acknowledged as trained on.
    Finished with untrained: stale, restarted, unversioned (see Staleness), status (none of those
    asked for), unusable (they give no sample), incomplete (the group was not whole in time),
    released (by force, while leased).
    lost: leases that ended and were given to somebody else.
    """

    batches: int = 0
    trained: int = 0
    stale: int = 0
    restarted: int = 0
    unversioned: int = 0
    status: int = 0
    unusable: int = 0
    incomplete: int = 0
    released: int = 0
    lost: int = 0


@dataclasses.dataclass(frozen=True)
class Taking:
    """How a Feeder takes; see ConsumerLoader, whose arguments these are."""

    batch_units: int
    group_size: int | None
    statuses: Collection[str] | None
    staleness: Staleness | None
    unusable: Literal["raise", "drop"]
    group_timeout: float | None
    drop_last: bool
    follow: bool
    lease: float
    prefetch: int
    rank: int
    world: int
    pin_memory: bool
    device: torch.device | None
    arguments: BatchArguments

    @property
    def coordinated(self) -> bool:
        """Whether other ranks must be looked at before taking."""
        return self.world > 1 or self.group_size is not None


class _Prepared(NamedTuple):
    """A batch that is ready; pending: its tensors' copy to the GPU, which may still run."""

    batch: ConsumerBatch
    pending: Any


class _Held:
    """The leases that this process has and has not settled. Both threads use it."""

    def __init__(self, consumer: Consumer, seconds: float) -> None:
        self._consumer = consumer
        self._seconds = seconds
        self._lock = threading.Lock()
        self._leases: dict[int, Lease] = {}
        self._lost: set[int] = set()
        self._renew_at = math.inf

    def add(self, leases: Sequence[Lease]) -> None:
        """Keep these alive."""
        with self._lock:
            for lease in leases:
                self._leases[lease.sequence] = lease
                self._lost.discard(lease.sequence)
            self._renew_at = min(self._renew_at, time.monotonic() + self._seconds / 3)

    def settled(self, leases: Iterable[Lease]) -> None:
        """These are no longer this process's."""
        with self._lock:
            for lease in leases:
                self._leases.pop(lease.sequence, None)
                self._lost.discard(lease.sequence)

    def is_lost(self, lease: Lease) -> bool:
        """Whether it was found to be somebody else's now."""
        return lease.sequence in self._lost

    def renew(self) -> None:
        """Renew all, when a third of their time is over."""
        if time.monotonic() < self._renew_at:
            return
        with self._lock:
            leases = [it for it in self._leases.values() if it.sequence not in self._lost]
        while leases:
            try:
                self._consumer.renew(leases, self._seconds)
                break
            except LeaseError as error:
                if error.index is None:
                    raise
                with self._lock:
                    self._lost.add(leases.pop(error.index).sequence)
        self._renew_at = time.monotonic() + self._seconds / 3

    def each(self, settle: Callable[[list[Lease]], None], leases: Iterable[Lease]) -> list[Lease]:
        """Settle all that are still ours; returns those that are not."""
        mine = list(leases)
        everything = list(mine)
        lost = []
        while mine:
            try:
                settle(mine)
                break
            except LeaseError as error:
                if error.index is None:
                    raise
                lost.append(mine.pop(error.index))
        self.settled(everything)
        return lost

    def all(self) -> list[Lease]:
        """All of them."""
        with self._lock:
            return list(self._leases.values())


class Feeder:
    """Makes a consumer's batches in a thread. It holds no reference to the loader, which can so be
    collected while the thread runs."""

    def __init__(self, consumer: Consumer, taking: Taking) -> None:
        self._consumer = consumer
        self._taking = taking
        self._held = _Held(consumer, taking.lease)
        self._lock = threading.Lock()
        self._units: collections.deque[LeasedUnit] = collections.deque()  # whole, in no batch yet
        self._members: dict[int, Member] = {}  # of groups that are not whole yet
        self._grouping = Grouping(taking.group_size)
        self._counts: collections.Counter[str] = collections.Counter()
        self._prefetcher: Prefetcher[_Prepared] | None = None
        self._ranks: Ranks | None = None
        self._seen: tuple[int, ...] = ()  # of the consumer, when nothing whole was found
        self._look_at = 0.0
        self._again = False  # the thread may have ended before units came back into line
        self._process = os.getpid()
        self._copier: Any = None
        self.clock = None if taking.staleness is None else VersionClock(taking.staleness)
        """The trainer's weight version, where staleness is limited."""

    # ------------------------------------------------------------ for the loader

    @property
    def started(self) -> bool:
        """Whether the thread was started."""
        return self._prefetcher is not None

    @property
    def counts(self) -> Counts:
        """What became of sessions."""
        with self._lock:
            return Counts(**self._counts)

    def get(self, timeout: float | None) -> ConsumerBatch | None:
        """The next batch; None where there is none but may be one now. Errors as Prefetcher.get."""
        prefetcher = self._prefetcher
        if prefetcher is None:
            prefetcher = self._start()
        try:
            prepared = prefetcher.get(timeout)
        except Exhausted:
            if not self._again:
                raise
            prefetcher.stop()
            self._start()
            return None
        if not self._still_fresh(prepared.batch.units):
            return None
        if prepared.pending is None:
            return prepared.batch
        return prepared.batch._with(prepared.pending.get())

    def _still_fresh(self, units: tuple[LeasedUnit, ...]) -> bool:
        """Whether a batch that was fresh when it was made still is. Else what is left of it goes
        into another one."""
        try:
            kept = self._kept(units)
        except RollstoreError:
            self._return(units)  # where the thread finds it, and fails for good
            raise
        if len(kept) == len(units):
            return True
        self._return(kept)
        return False

    def _return(self, units: Sequence[LeasedUnit]) -> None:
        """Take a batch apart: its units are to be in another one."""
        self._put_back(units)
        self._took(-1)
        self._again = True

    def _start(self) -> Prefetcher[_Prepared]:
        taking = self._taking
        self._again = False
        if taking.coordinated and self._ranks is None:
            self._ranks = Ranks(
                self._consumer.store, self._consumer.name, taking.rank, taking.world
            )
        self._took(0)
        self._prefetcher = Prefetcher(
            self._batches,
            taking.prefetch,
            idle=self._held.renew,
            idle_seconds=min(taking.lease / 4, 60.0),
            name=f"rollstore-{self._consumer.name}",
        )
        return self._prefetcher

    def acknowledge(self, units: Sequence[LeasedUnit]) -> None:
        """The units of one batch were trained on.

        LeaseError when some are somebody else's by now; the others are acknowledged.
        """
        leases = [member.lease for unit in units for member in unit]
        lost = self._held.each(self._consumer.acknowledge, leases)
        self._count(batches=1, trained=len(leases) - len(lost), lost=len(lost))
        if self._ranks is not None:
            self._ranks.trained()
        self._finish()
        if lost:
            raise LeaseError(
                f"{len(lost)} of {len(leases)} sessions of the batch, the first with sequence "
                f"number {lost[0].sequence}, were given to another process, or the consumer was "
                "resumed, before they were acknowledged: they are trained on twice",
                kind="lease",
            )

    def wait_for_other_ranks(self, timeout: float | None) -> None:
        """Until they have acknowledged as many batches as this one. WaitTimeoutError."""
        if self._ranks is not None:
            self._ranks.wait_for_others(timeout)

    def describe(self) -> str:
        """What there is and what is missing, for a message."""
        parts = [
            f"{len(self._units)} of {self._taking.batch_units} "
            f"{'sessions' if self._taking.group_size is None else 'groups'} are there"
        ]
        if self._taking.group_size is not None:
            parts.append(f"{len(self._members)} sessions wait for the rest of their groups")
        missing = [] if self._ranks is None else self._ranks.missing()
        if missing:
            parts.append(f"rank {', '.join(map(str, missing))} is not loading")
        return "; ".join(parts)

    def pause(self) -> None:
        """End the thread, and give back what was not handed out."""
        if self._prefetcher is None or os.getpid() != self._process:
            return
        prefetcher, self._prefetcher = self._prefetcher, None
        out = [unit for prepared in prefetcher.stop() for unit in prepared.batch.units]
        waiting = [*self._units, *out, tuple(self._members.values())]
        self._units.clear()
        self._members.clear()
        self._grouping = Grouping(self._taking.group_size)
        self._give_back(member for unit in waiting for member in unit)
        self._finish()

    def _finish(self) -> None:
        """Tell the other ranks when this one has nothing more to train on."""
        if self._ranks is not None and self._prefetcher is None and not self._held.all():
            self._ranks.finished()

    def close(self) -> None:
        """End the thread, and give back everything that was not acknowledged."""
        if os.getpid() != self._process:
            return  # the leases and the thread are the parent's
        try:
            self.pause()
            self._held.each(self._consumer.give_back, self._held.all())
        finally:
            if self._ranks is not None:
                self._ranks.leave()
                self._ranks = None

    def abandon(self) -> None:
        """As close, where nobody is there to hear of an error: the leases end with the process."""
        with contextlib.suppress(RollstoreError):
            self.close()

    # ------------------------------------------------------------ in the thread

    def _batches(self, prefetcher: Prefetcher[_Prepared]) -> Iterator[_Prepared]:
        while True:
            more = self._fill(prefetcher)
            if prefetcher.stopping:
                return
            if not more and (self._taking.drop_last or not self._units):
                if self._ranks is not None:
                    self._ranks.ended()
                return
            prepared = self._prepare(last=not more)
            if prepared is not None:
                self._took(1)
                yield prepared

    def _fill(self, prefetcher: Prefetcher[_Prepared]) -> bool:
        """Take until there is enough for a batch. False when there will not be."""
        while len(self._units) < self._taking.batch_units:
            if prefetcher.stopping:
                return False
            self._held.renew()
            self._drop_incomplete()
            if self._ranks is not None and not self._ranks.may_take():
                time.sleep(_PATIENCE_SECONDS / 5)
            elif not self._take(prefetcher) and not self._taking.follow:
                return False
        return True

    def _take(self, prefetcher: Prefetcher[_Prepared]) -> bool:
        """Take what there is, or wait a little for it. False when there was nothing."""
        size = self._taking.group_size
        if self._taking.world > 1 and size is not None:
            return self._take_whole_groups(prefetcher)
        missing = self._taking.batch_units - len(self._units)
        timeout = _PATIENCE_SECONDS if self._taking.follow else 0.0
        return self._admit(self._leases(missing if size is None else _CHUNK, timeout))

    def _take_whole_groups(self, prefetcher: Prefetcher[_Prepared]) -> bool:
        """Lease all there is up to enough whole groups, and hand the rest back to the other ranks.

        A rank that kept a part of a group would wait for the part that another one keeps.
        """
        if self._taking.follow and not self._changed():
            return True
        before = len(self._units)
        with self._ranks_taking(prefetcher) as inside:
            if not inside:
                return True
            while len(self._units) < self._taking.batch_units:
                if not self._admit(self._leases(_CHUNK, 0.0)):
                    break
            self._drop_incomplete()
            self._give_back([*self._beyond_a_batch(), *self._members.values()])
            self._members.clear()
            self._grouping = Grouping(self._taking.group_size)
        self._seen = self._look()
        self._look_at = time.monotonic() + _LOOK_AGAIN_SECONDS
        return len(self._units) > before

    def _beyond_a_batch(self) -> list[Member]:
        """Takes whole groups that this batch does not need out of the line."""
        with self._lock:
            surplus = len(self._units) - self._taking.batch_units
            units = [self._units.pop() for _ in range(max(0, surplus))]
        return [member for unit in units for member in unit]

    def _ranks_taking(
        self, prefetcher: Prefetcher[_Prepared]
    ) -> contextlib.AbstractContextManager[bool]:
        if self._ranks is None:
            return contextlib.nullcontext(True)
        return self._ranks.taking(lambda: prefetcher.stopping)

    def _changed(self) -> bool:
        """Whether there may be more than at the last look; waits a little for it."""
        with contextlib.suppress(WaitTimeoutError):
            newest = self._seen[0] if self._seen else 0
            self._consumer.store.wait(newest, _PATIENCE_SECONDS)
        return self._look() != self._seen or time.monotonic() >= self._look_at

    def _look(self) -> tuple[int, ...]:
        stat = self._consumer.stat()
        newest = self._consumer.store.stat().newest_sequence
        return newest, stat.free_count, stat.waiting_count

    def _leases(self, most: int, timeout: float) -> list[Lease]:
        try:
            leases = list(self._consumer.take(most, lease=self._taking.lease, timeout=timeout))
        except WaitTimeoutError:
            return []
        self._held.add(leases)
        return leases

    def _admit(self, leases: list[Lease]) -> bool:
        """Sort the sessions into units. False when there were none."""
        if not leases:
            return False
        with self._consumer.store.snapshot() as snapshot:
            for lease in leases:
                self._admit_one(snapshot, lease)
        return True

    def _admit_one(self, snapshot: Snapshot, lease: Lease) -> None:
        try:
            session = lease.session(snapshot)
        except NotFoundError:
            self._drop_leases([lease], "released")
            return
        taking = self._taking
        if taking.statuses is not None and session.status not in taking.statuses:
            self._drop_leases([lease], "status")
            return
        versions = None if taking.staleness is None else Versions.of(session)
        self._members[lease.sequence] = Member(lease, session.info, versions)
        unit = self._grouping.add(session.info)
        if unit is not None:
            self._put_back([tuple(self._members.pop(info.sequence) for info in unit)], last=True)

    def _drop_incomplete(self) -> None:
        """Finish with groups that were not whole in time."""
        timeout = self._taking.group_timeout
        if timeout is None:
            return
        before = time.time_ns() - int(timeout * 1e9)
        for group, members in list(self._grouping.waiting.items()):
            if min(info.changed_ns for info in members) < before:
                del self._grouping.waiting[group]
                dropped = [self._members.pop(info.sequence).lease for info in members]
                self._drop_leases(dropped, "incomplete")

    def _prepare(self, last: bool) -> _Prepared | None:
        """A batch of the first units. None where some must be dropped and more are needed."""
        with self._lock:
            count = min(self._taking.batch_units, len(self._units))
            units = [self._units.popleft() for _ in range(count)]
        kept = self._kept(units)
        if len(kept) < count and not last:
            self._put_back(kept)
            return None
        batch = self._assemble(kept) if kept else None
        if batch is None:
            return None
        if self._taking.device is None:
            return _Prepared(batch, None)
        return self._to_device(batch, self._taking.device)

    def _assemble(self, units: list[LeasedUnit]) -> ConsumerBatch | None:
        """The units as a batch. None, and they are back in line, where one had to be dropped."""
        taking = self._taking
        with self._consumer.store.snapshot() as snapshot:
            sessions = self._sessions(snapshot, units)
            if sessions is None:
                return None
            try:
                made = assemble(
                    snapshot,
                    sessions,
                    taking.arguments,
                    grouped=taking.group_size is not None,
                    pin_memory=taking.pin_memory,
                )
            except UNUSABLE as error:
                if taking.unusable == "raise" or error.index is None:
                    raise
                self._drop_unit(units, unit_at(units, error.index), "unusable")
                return None
        fields = {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}
        return ConsumerBatch(**fields, units=tuple(units))

    def _sessions(self, snapshot: Snapshot, units: list[LeasedUnit]) -> list[list[Session]] | None:
        found: list[list[Session]] = []
        for number, unit in enumerate(units):
            try:
                found.append([member.lease.session(snapshot) for member in unit])
            except NotFoundError:
                self._drop_unit(units, number, "released")
                return None
        return found

    def _to_device(self, batch: ConsumerBatch, device: torch.device) -> _Prepared:
        if device.type != "cuda":
            return _Prepared(batch.to(device), None)
        if self._copier is None:
            from rollstore.cuda import Copier

            self._copier = Copier(device)
        return _Prepared(batch, self._copier.copy(batch.tensors))

    # ------------------------------------------------------------ what becomes of leases

    def _kept(self, units: Sequence[LeasedUnit]) -> list[LeasedUnit]:
        """Those that may be trained on now. The others are finished with, or given back."""
        now = None if self.clock is None else self.clock.now()
        kept = []
        for unit in units:
            if any(self._held.is_lost(member.lease) for member in unit):
                self._give_back(unit)
                continue
            reason = None if now is None else self._reason(unit, now)
            if reason is None:
                kept.append(unit)
            else:
                self._drop_leases([member.lease for member in unit], reason)
        return kept

    def _reason(self, unit: LeasedUnit, now: int) -> str | None:
        staleness = self._taking.staleness
        for member in unit:
            if staleness is not None and member.versions is not None:
                reason = staleness.judge(member.info.id, member.versions, now)
                if reason is not None:
                    return reason
        return None

    def _put_back(self, units: Sequence[LeasedUnit], last: bool = False) -> None:
        """Into the line of units again, at its front, or at its end."""
        with self._lock:
            if last:
                self._units.extend(units)
            else:
                self._units.extendleft(reversed(units))

    def _drop_unit(self, units: list[LeasedUnit], number: int, reason: str) -> None:
        """Finish with one unit; the others are back in line."""
        self._drop_leases([member.lease for member in units[number]], reason)
        self._put_back(units[:number] + units[number + 1 :])

    def _drop_leases(self, leases: list[Lease], reason: str) -> None:
        lost = self._held.each(self._consumer.acknowledge, leases)
        self._count(**{reason: len(leases) - len(lost)}, lost=len(lost))

    def _give_back(self, members: Iterable[Member]) -> None:
        leases = [member.lease for member in members]
        lost = self._held.each(self._consumer.give_back, leases)
        self._count(lost=len(lost))

    def _took(self, batches: int) -> None:
        if self._ranks is not None:
            self._ranks.took(batches)

    def _count(self, **sessions: int) -> None:
        with self._lock:
            self._counts.update(sessions)
