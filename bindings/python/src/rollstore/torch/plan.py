"""Plans: which sessions, in which order, and whose turn it is.

A plan is made once over the sessions that are sealed then, and lists them. Whatever is sealed or
released later, the same plan gives the same order on every rank, in every worker and after a
resume.

Order. Units (sessions, or whole groups) stand in the order in which they were sealed, or shuffled
by a seed and the epoch. The order is position by position that of the whole run: rank r of N takes
the units base + r, base + r + N, base + r + 2N, ... and cuts its own into batches. When each rank
has n batches of b units, the first n * b * N units of the order are done, so that a resume with
another number of ranks goes on from there: no unit is read twice or left out.

Workers. Worker w of W makes the batches w, w + W, ... of its rank. A DataLoader asks its workers by
turns, so the rank's batches come in the rank's order with any number of workers.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import math
import zlib
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from rollstore._errors import AlignmentError, LimitError
from rollstore.torch.errors import GroupError, StateError
from rollstore.torch.versions import Reason, Staleness, VersionClock, Versions

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rollstore._snapshot import Session, SessionInfo, Snapshot
    from rollstore._store import Store

__all__ = ["Grouping", "LeftOut", "Plan", "Shard", "Unit"]

Unit = tuple[int, ...]
"""The sequence numbers of one session, or of a whole group."""

_STATE_VERSION = 1


class Shard(NamedTuple):
    """A data-parallel rank's part of an order of units.

    base: units of the order that were done before the ranks began to take turns.
    """

    rank: int = 0
    world: int = 1
    base: int = 0

    def unit(self, number: int) -> int:
        """The place in the order of the rank's own unit of that number, from 0."""
        return self.base + self.rank + number * self.world

    def count(self, units: int) -> int:
        """How many of `units` units are this rank's."""
        return max(0, -((self.base + self.rank - units) // self.world))

    def resharded(self, done: int, rank: int, world: int) -> Shard:
        """The part of a rank of another number of ranks, when each rank has done `done` units."""
        return Shard(rank, world, self.base + done * self.world)


def check_rank(rank: int, world: int) -> None:
    """ValueError unless 0 <= rank < world."""
    if not 0 <= rank < world:
        raise ValueError(f"rank: 0 to world - 1 is needed, got {rank} with world {world}")


class LeftOut(NamedTuple):
    """Sealed sessions that a plan does not have, by the reason.

    status: none of the statuses asked for. incomplete: its group is not whole.
    stale, restarted, unversioned: as Staleness says. unusable: it gives no sample.
    A group that one member keeps out counts whole.
    """

    status: int = 0
    incomplete: int = 0
    stale: int = 0
    restarted: int = 0
    unversioned: int = 0
    unusable: int = 0


class Grouping:
    """Puts sessions together into units, in the order in which they are given.

    With a group size, `group_size` sessions of one group index are a unit, complete with the last
    of them; what comes later under the same index begins the next one.
    """

    def __init__(self, group_size: int | None) -> None:
        self._size = check_group_size(group_size)
        self.waiting: dict[int, list[SessionInfo]] = {}
        """The sessions whose group is not whole yet, by group index."""

    def add(self, session: SessionInfo) -> list[SessionInfo] | None:
        """The unit that the session completes, by index within its group, or None."""
        if self._size is None:
            return [session]
        members = self.waiting.setdefault(group_of(session), [])
        members.append(session)
        if len(members) < self._size:
            return None
        del self.waiting[group_of(session)]
        return sorted(members, key=place_in_group)

    def waiting_sessions(self) -> list[SessionInfo]:
        """The sessions whose group is not whole yet."""
        return [member for members in self.waiting.values() for member in members]


def check_group_size(group_size: int | None) -> int | None:
    """ValueError unless it is None or at least 1."""
    if group_size is not None and group_size < 1:
        raise ValueError(f"group_size: None or at least 1 is needed, got {group_size}")
    return group_size


def group_of(session: SessionInfo) -> int:
    """Its group index; GroupError when it was sealed without one."""
    if session.group_index is None:
        raise GroupError(
            f'session "{session.id}" was sealed without a group_index, but whole groups are '
            "asked for (group_size)",
            kind="group",
            field="group_index",
        )
    return session.group_index


def place_in_group(session: SessionInfo) -> tuple[float, int]:
    """Sorts the members of a group: by index where they have one, then as they were sealed."""
    return math.inf if session.index is None else session.index, session.sequence


class _Sieve:
    """Which sessions may be in a plan."""

    def __init__(
        self,
        snapshot: Snapshot,
        staleness: Staleness | None,
        drop_unusable: bool,
        sample: dict[str, int],
    ) -> None:
        self._snapshot = snapshot
        self._staleness = staleness
        self._now = None if staleness is None else VersionClock(staleness).now()
        self._drop_unusable = drop_unusable
        self._sample = sample

    def reason(self, unit: list[SessionInfo], rewarded: bool) -> str | None:
        """Why the unit is left out, by the name in LeftOut, or None."""
        return next(filter(None, (self._of_session(member, rewarded) for member in unit)), None)

    def _of_session(self, info: SessionInfo, rewarded: bool) -> str | None:
        if self._staleness is not None and self._now is not None:
            session = self._snapshot.session_by_sequence(info.sequence)
            reason: Reason | None = self._staleness.judge(info.id, Versions.of(session), self._now)
            if reason is not None:
                return reason
        return "unusable" if self._drop_unusable and self._unusable(info, rewarded) else None

    def _unusable(self, info: SessionInfo, rewarded: bool) -> bool:
        if rewarded and not (info.reward is not None and math.isfinite(info.reward)):
            return True
        try:
            self._snapshot._measure((info.id,), **self._sample)
        except (AlignmentError, LimitError):
            return True
        return False


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """Sessions in a fixed order. Plan.of makes one; state_dict and from_state carry it on.

    units: int64 [U, G], sequence numbers; a row is a unit. G is 1 without a group size.
    group_size: as made, or None.
    seed: shuffles the units; None: they stay in the order in which they were complete.
    epoch: shuffles them differently each time.
    store_created_ns: which store it is of.
    left_out: what was sealed within the bounds and is not in it.
    """

    units: NDArray[np.int64]
    group_size: int | None
    seed: int | None
    epoch: int
    store_created_ns: int
    left_out: LeftOut

    @classmethod
    def of(
        cls,
        store: Store,
        *,
        after: int = 0,
        until: int | None = None,
        group_size: int | None = None,
        seed: int | None = None,
        epoch: int = 0,
        statuses: Collection[str] | None = None,
        staleness: Staleness | None = None,
        incomplete: Literal["drop", "raise"] = "drop",
        unusable: Literal["raise", "drop"] = "raise",
        trim_max: int = 1,
        token_max: int = 0,
    ) -> Plan:
        """A plan over the sessions that are sealed now.

        With several ranks make it on one, and hand `plan.state_dict()` to the others: made a moment
        later it may have more sessions.

        after, until: bounds of the sequence numbers, after < number <= until; None: the newest.
        group_size: whole groups of that many sessions only.
        seed, epoch: see Plan.
        statuses: only sessions of these statuses; None: of all.
        staleness: judged once, now. A group with one session over it is left out whole.
        incomplete: groups that are not whole are left out, or GroupError names one.
        unusable: "drop": sessions that give no sample under trim_max and token_max are left out,
            and those without a reward where there is a group size. "raise": that is found out, and
            raised, when they are read.
        """
        if incomplete not in ("drop", "raise"):
            raise ValueError(f'incomplete: {incomplete!r} is none of "drop", "raise"')
        check_unusable(unusable)
        grouping = Grouping(group_size)
        left_out: dict[str, int] = dict.fromkeys(LeftOut._fields, 0)
        found: list[list[int]] = []
        with store.snapshot() as snapshot:
            sample = {"trim_max": trim_max, "token_max": token_max}
            sieve = _Sieve(snapshot, staleness, unusable == "drop", sample)
            for session in _between(snapshot, after, until):
                if statuses is not None and session.status not in statuses:
                    left_out["status"] += 1
                    continue
                unit = grouping.add(session.info)
                if unit is None:
                    continue
                reason = sieve.reason(unit, rewarded=group_size is not None)
                if reason is None:
                    found.append([member.sequence for member in unit])
                else:
                    left_out[reason] += len(unit)
        waiting = grouping.waiting_sessions()
        left_out["incomplete"] = len(waiting)
        if waiting and incomplete == "raise":
            raise GroupError(
                f'the group of session "{waiting[0].id}", group_index {waiting[0].group_index}, is '
                "not whole",
                kind="group",
                field="group_index",
            )
        return cls(
            units=np.array(found, np.int64).reshape(len(found), group_size or 1),
            group_size=group_size,
            seed=seed,
            epoch=epoch,
            store_created_ns=store.stat().created_ns,
            left_out=LeftOut(**left_out),
        )

    def __len__(self) -> int:
        """Number of units."""
        return len(self.units)

    @property
    def session_count(self) -> int:
        """Number of sessions."""
        return self.units.size

    def with_epoch(self, epoch: int) -> Plan:
        """The same sessions in the order of another epoch."""
        return dataclasses.replace(self, epoch=epoch)

    @functools.cached_property
    def order(self) -> NDArray[np.int64]:
        """int64 [U]: the rows of `units` in the order in which they are read."""
        if self.seed is None:
            return np.arange(len(self.units), dtype=np.int64)
        # Not NumPy's generators, whose streams may change from version to version.
        named = hashlib.blake2b(f"{self.seed}/{self.epoch}".encode(), digest_size=8).digest()
        keys = self.units[:, 0].astype(np.uint64) + np.frombuffer(named, "<u8")
        return np.argsort(_mixed(keys), kind="stable").astype(np.int64)

    def unit(self, position: int) -> Unit:
        """The unit at that place of the order."""
        return tuple(self.units[self.order[position]].tolist())

    # ------------------------------------------------------------ whose turn it is

    def unit_count(self, shard: Shard, done: int, size: int, drop_last: bool) -> int:
        """How many units the rank reads in all, `done` of them already read.

        drop_last: only as many as give each rank the same number of full batches of `size` units.
        """
        if not drop_last:
            return shard.count(len(self))
        rest = len(self) - shard.base - done * shard.world
        return done + max(0, rest // (size * shard.world)) * size

    def batches(
        self,
        shard: Shard,
        done: int,
        size: int,
        worker: int = 0,
        workers: int = 1,
        drop_last: bool = False,
    ) -> Iterator[tuple[int, list[Unit]]]:
        """The rank's batches that are the worker's, as (units done after it, units).

        done: units of the rank that were read before. size: units of a batch.
        """
        total = self.unit_count(shard, done, size, drop_last)
        for begin in range(done + worker * size, total, workers * size):
            end = min(total, begin + size)
            yield end, [self.unit(shard.unit(number)) for number in range(begin, end)]

    # ------------------------------------------------------------ in a checkpoint

    def state_dict(self) -> dict[str, Any]:
        """All of it in numbers and strings, for a checkpoint or another rank."""
        steps = np.diff(self.units.reshape(-1), prepend=np.int64(0)).astype("<i8")
        return {
            "version": _STATE_VERSION,
            "units": base64.b64encode(zlib.compress(steps.tobytes())).decode(),
            "unit_count": len(self.units),
            "group_size": self.group_size,
            "seed": self.seed,
            "epoch": self.epoch,
            "store_created_ns": self.store_created_ns,
            "left_out": list(self.left_out),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Plan:
        """The plan that gave the state. StateError."""
        try:
            if state["version"] != _STATE_VERSION:
                raise StateError(f"a plan of version {state['version']} is not known here")
            shape = (state["unit_count"], state["group_size"] or 1)
            return cls(
                units=_decoded(state["units"], shape),
                group_size=state["group_size"],
                seed=state["seed"],
                epoch=state["epoch"],
                store_created_ns=state["store_created_ns"],
                left_out=LeftOut._make(state["left_out"]),
            )
        except StateError:
            raise
        except (KeyError, TypeError, ValueError, zlib.error) as error:
            raise StateError(f"not the state of a plan: {error!r}", kind="state") from error

    def check_store(self, store: Store) -> None:
        """StateError unless the plan is of this store."""
        stat = store.stat()
        last = int(self.units.max(initial=0))
        if stat.created_ns != self.store_created_ns or stat.newest_sequence < last:
            raise StateError(
                f"the plan was made of another store than {store.path}: its sequence numbers name "
                "other sessions here",
                kind="state",
            )

    def __repr__(self) -> str:
        of = "" if self.group_size is None else f" in groups of {self.group_size}"
        return f"<rollstore.torch.Plan: {self.session_count} sessions{of}, epoch {self.epoch}>"


def check_unusable(unusable: str) -> None:
    """ValueError unless it is a known answer to sessions that give no sample."""
    if unusable not in ("raise", "drop"):
        raise ValueError(f'unusable: {unusable!r} is none of "raise", "drop"')


def _between(snapshot: Snapshot, after: int, until: int | None) -> Iterable[Session]:
    for session in snapshot.ready(after):
        if until is not None and session.sequence > until:
            return
        yield session


def _mixed(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's output function: a permutation of the 64-bit numbers that looks random."""
    x = keys + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _decoded(text: str, shape: tuple[int, int]) -> NDArray[np.int64]:
    count = shape[0] * shape[1]
    reader = zlib.decompressobj()
    raw = reader.decompress(base64.b64decode(text, validate=True), count * 8 + 1)
    if len(raw) != count * 8:
        raise StateError(f"not the state of a plan: {len(raw)} bytes for {count} numbers")
    return np.cumsum(np.frombuffer(raw, "<i8"), dtype=np.int64).reshape(shape)
