"""Datasets over sealed sessions: an IterableDataset and a map-style one.

Both pickle, and work in DataLoader workers under fork and spawn: the store is opened again in each
process, and batches are put together there. An item is a session's sample (a dict), a whole group
(a list of dicts), or, with a batch size, a TrainingBatch; a DataLoader takes it as it is with
batch_size=None.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from rollstore._errors import NotFoundError
from rollstore._store import Store, open
from rollstore.torch.batch import (
    UNUSABLE,
    BatchArguments,
    TrainingBatch,
    assemble,
    check_arguments,
    sample_dicts,
    unit_at,
)
from rollstore.torch.errors import MissingSessionError, StateError
from rollstore.torch.follow import Follow, Follower
from rollstore.torch.plan import Plan, Shard, Unit, check_rank
from rollstore.torch.versions import Staleness, VersionClock, Versions

if TYPE_CHECKING:
    from rollstore._snapshot import Session, Snapshot

__all__ = ["Item", "SealedSessions", "SessionDataset"]

Item = dict[str, Any] | list[dict[str, Any]] | TrainingBatch

_STATE_VERSION = 1


def store_of(store: Store | str | os.PathLike[str], mode: Literal["r", "w"] = "r") -> Store:
    """The store, or the one at that path, opened."""
    return store if isinstance(store, Store) else open(store, mode)


def units_per_batch(batch_size: int, group_size: int | None) -> int:
    """How many units `batch_size` sessions are. ValueError when that is no whole number."""
    size = group_size or 1
    if batch_size < 1 or batch_size % size:
        raise ValueError(
            f"batch_size: sessions in whole groups of {size} are needed, got {batch_size}"
        )
    return batch_size // size


class _Reader:
    """Reads units from the store, each call in a snapshot of its own."""

    def __init__(
        self,
        store: Store,
        arguments: BatchArguments,
        *,
        grouped: bool,
        skip_missing: bool = False,
        staleness: Staleness | None = None,
        drop_unusable: bool = False,
    ) -> None:
        self._store = store
        self._arguments = arguments
        self._grouped = grouped
        self._skip_missing = skip_missing
        self._staleness = staleness
        self._clock = None if staleness is None else VersionClock(staleness)
        self._drop_unusable = drop_unusable

    def batch(self, units: Sequence[Unit]) -> TrainingBatch | None:
        """The units as a batch, or None when none of them is left."""
        with self._store.snapshot() as snapshot:
            found = self._found(snapshot, units)
            while found:
                try:
                    return assemble(snapshot, found, self._arguments, grouped=self._grouped)
                except UNUSABLE as error:
                    if not self._drop_unusable or error.index is None:
                        raise
                    del found[unit_at(found, error.index)]
            return None

    def samples(self, units: Sequence[Unit]) -> list[dict[str, Any] | list[dict[str, Any]]]:
        """Each unit that is left as an item: a dict, or a list of them for a group."""
        items: list[dict[str, Any] | list[dict[str, Any]]] = []
        with self._store.snapshot() as snapshot:
            for unit in self._found(snapshot, units):
                try:
                    made = sample_dicts(unit, self._arguments, grouped=self._grouped)
                except UNUSABLE:
                    if not self._drop_unusable:
                        raise
                else:
                    items.append(made if self._grouped else made[0])
        return items

    def _found(self, snapshot: Snapshot, units: Sequence[Unit]) -> list[list[Session]]:
        found = []
        for unit in units:
            sessions = self._unit(snapshot, unit)
            if sessions and not any(map(self._stale, sessions)):
                found.append(sessions)
        return found

    def _unit(self, snapshot: Snapshot, unit: Unit) -> list[Session] | None:
        try:
            return [snapshot.session_by_sequence(sequence) for sequence in unit]
        except NotFoundError as error:
            if self._skip_missing:
                return None
            raise MissingSessionError(
                f"of the sessions of sequence numbers {', '.join(map(str, unit))} one was released "
                'before it was read; missing="skip" passes over such',
                kind="not_found",
                field="sequence",
            ) from error

    def _stale(self, session: Session) -> bool:
        if self._staleness is None or self._clock is None:
            return False
        versions = Versions.of(session)
        return self._staleness.judge(session.id, versions, self._clock.now()) is not None


class SessionDataset(Dataset[Item]):
    """A map-style dataset over a plan.

    store: a Store, or the path of one. plan: None: all that is sealed now, in ready order.
    batch_size: sessions of a batch, whole groups. None: items are samples.
    drop_last: leave out a last batch that is not full.
    arguments: see BatchArguments.

    dataset[i] is the i-th unit in the plan's order as a dict (see sample_dicts) or a list of them,
    or the i-th batch as a TrainingBatch. Samplers and DistributedSampler work as with any dataset.
    """

    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        plan: Plan | None = None,
        *,
        batch_size: int | None = None,
        drop_last: bool = False,
        **arguments: Unpack[BatchArguments],
    ) -> None:
        self._store = store_of(store)
        self.plan = Plan.of(self._store) if plan is None else plan
        self.plan.check_store(self._store)
        self._drop_last = drop_last
        grouped = self.plan.group_size is not None
        self._reader = _Reader(self._store, check_arguments(arguments), grouped=grouped)
        self._size = None
        if batch_size is not None:
            self._size = units_per_batch(batch_size, self.plan.group_size)

    def set_epoch(self, epoch: int) -> None:
        """Put the items into the order of another epoch. Workers that run already do not see it."""
        self.plan = self.plan.with_epoch(epoch)

    def __len__(self) -> int:
        """Number of units, or of batches."""
        if self._size is None:
            return len(self.plan)
        return len(self.plan) // self._size if self._drop_last else -(-len(self.plan) // self._size)

    def __getitem__(self, index: int) -> Item:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Item]:
        """Several items; a DataLoader that makes batches itself asks so."""
        places = [self._place(index) for index in indices]
        if self._size is None:
            return list(self._reader.samples([self.plan.unit(place) for place in places]))
        return [self._batch(place * self._size) for place in places]

    def _place(self, index: int) -> int:
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(f"the dataset has {len(self)} items: there is no item {index}")
        return place

    def _batch(self, begin: int) -> TrainingBatch:
        end = min(begin + (self._size or 1), len(self.plan))
        batch = self._reader.batch([self.plan.unit(place) for place in range(begin, end)])
        if batch is None:
            raise AssertionError("a unit is there, or its absence is raised")
        return batch


class SealedSessions(IterableDataset[Item]):
    """An IterableDataset over a plan, or over sessions as they are sealed.

    store: a Store, or the path of one.
    source: a Plan (it ends), or a Follow (it waits for more); None: a plan over all that is sealed
        now, in ready order.
    batch_size: sessions of a batch, whole groups. None: items are samples.
    rank, world: of the data-parallel ranks that share the store.
    drop_last: over a plan, only as many full batches as every rank can have; what is left out is
        the end of the order. Following: leave out a last batch that is not full.
    missing: a session that was released since: "raise" (MissingSessionError), or "skip" it, with
        its group.
    arguments: see BatchArguments.

    DataLoader(dataset, batch_size=None, num_workers=W) gives the items in the same order for every
    W. Place and resume: `Loader`. Without one state_dict and load_state_dict are for num_workers=0,
    or to be called inside each worker, as torchdata's StatefulDataLoader does.
    """

    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        source: Plan | Follow | None = None,
        *,
        batch_size: int | None = None,
        rank: int = 0,
        world: int = 1,
        drop_last: bool = False,
        missing: Literal["raise", "skip"] = "raise",
        **arguments: Unpack[BatchArguments],
    ) -> None:
        check_rank(rank, world)
        if missing not in ("raise", "skip"):
            raise ValueError(f'missing: {missing!r} is none of "raise", "skip"')
        self._store = store_of(store)
        self._arguments = check_arguments(arguments)
        self._batch_size = batch_size
        self._rank, self._world = rank, world
        self._drop_last = drop_last
        self._skip_missing = missing == "skip"
        self._tagged = False
        self._stop: torch.Tensor | None = None
        self._use(Plan.of(self._store) if source is None else source)

    def _use(self, source: Plan | Follow) -> None:
        if isinstance(source, Plan):
            source.check_store(self._store)
        self.source = source
        self._size = 1
        if self._batch_size is not None:
            self._size = units_per_batch(self._batch_size, source.group_size)
        self._rewind()

    def _rewind(self) -> None:
        """The next pass begins at the beginning; it is where this process stands now, too."""
        self._begin_in: int | None = None  # the process that loaded _begin from a state
        self._begin_is_own = False  # _begin is one worker's, not the rank's
        self._now_is_own = False
        self._begin = self._now = (Shard(self._rank, self._world), 0)

    @property
    def batch_size(self) -> int | None:
        """Sessions of a batch, or None."""
        return self._batch_size

    def set_epoch(self, epoch: int) -> None:
        """Take the order of another epoch, from its beginning. The same epoch changes nothing."""
        if isinstance(self.source, Follow):
            raise ValueError("sessions that are followed as they are sealed have no epochs")
        if epoch != self.source.epoch:
            self._use(self.source.with_epoch(epoch))

    @property
    def epoch(self) -> int:
        """The plan's epoch; 0 where none is."""
        return 0 if isinstance(self.source, Follow) else self.source.epoch

    # ------------------------------------------------------------ reading

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        number, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        shard, done = self._take_begin()
        if self._begin_is_own:
            number, self._begin_is_own = 0, False
        self._now = (shard, done + number * self._size)
        self._now_is_own = count > 1
        batches = self._batches(worker is not None)
        reader = self._reader()
        for after, units in batches(shard, done, self._size, number, count, self._drop_last):
            # Where this worker's next batch begins; with one worker, where the rank's does.
            self._now = (shard, after + (count - 1) * self._size)
            if self._batch_size is not None:
                item: Item | None = reader.batch(units)
            else:
                item = next(iter(reader.samples(units)), None)
            if self._tagged:
                yield after, item
            elif item is not None:
                yield item

    def _take_begin(self) -> tuple[Shard, int]:
        """Where this pass begins; the next one begins at the beginning again."""
        begin = self._begin
        if self._begin_in is not None and not self._tagged:
            if self._begin_in != os.getpid():
                raise StateError(
                    "a state was loaded in the main process, and DataLoader workers read: "
                    "rollstore.torch.Loader resumes with workers",
                    kind="state",
                )
            self._begin_in = None
            self._begin = (Shard(self._rank, self._world), 0)
        return begin

    def _batches(self, in_worker: bool) -> Callable[..., Iterator[tuple[int, list[Unit]]]]:
        if isinstance(self.source, Plan):
            return self.source.batches
        parent = os.getppid()
        flag = self._stop

        def stopped() -> bool:
            return (flag is not None and bool(flag.item())) or (
                in_worker and os.getppid() != parent
            )

        return Follower(self.source, self._store, stopped).batches

    def _reader(self) -> _Reader:
        following = self.source if isinstance(self.source, Follow) else None
        return _Reader(
            self._store,
            self._arguments,
            grouped=self.source.group_size is not None,
            skip_missing=self._skip_missing,
            staleness=None if following is None else following.staleness,
            drop_unusable=following is not None and following.unusable == "drop",
        )

    def __len__(self) -> int:
        """Items of the next pass of this rank. TypeError where sessions are followed."""
        if isinstance(self.source, Follow):
            raise TypeError("sessions that are followed as they are sealed have no number")
        shard, done = self._begin
        total = self.source.unit_count(shard, done, self._size, self._drop_last)
        return max(0, -((done - total) // self._size))

    # ------------------------------------------------------------ for Loader

    def _begin_pass(self, stop: torch.Tensor) -> SealedSessions:
        """A copy for the next pass. It gives (units done, item or None), and no longer waits for
        sessions when stop[0] is not 0. _reached tells this one how far training has come."""
        made = copy.copy(self)
        made._tagged = True
        made._stop = stop
        self._now = self._take_begin()
        return made

    def _reached(self, done: int) -> None:
        """The rank has trained on that many units."""
        self._now = (self._now[0], done)

    # ------------------------------------------------------------ place and resume

    def state_dict(self) -> dict[str, Any]:
        """The source and how much of it this rank has had, in numbers and strings."""
        shard, done = self._now
        worker = get_worker_info() if self._now_is_own else None
        following = isinstance(self.source, Follow)
        return {
            "version": _STATE_VERSION,
            "kind": "follow" if following else "plan",
            "source": self.source.state_dict(),
            "rank": shard.rank,
            "world": shard.world,
            "base": shard.base,
            "done": done,
            "worker": 0 if worker is None else worker.id,
            "workers": 1 if worker is None else worker.num_workers,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next pass begin where the state was taken; its plan takes the place of this one.

        With the same number of ranks each rank loads its own state, or all load one of a moment
        when all had as many batches. With another number of ranks all load one such. StateError.
        """
        try:
            self._load(state)
        except (KeyError, TypeError) as error:
            raise StateError(
                f"not the state of sealed sessions: {error!r}", kind="state"
            ) from error

    def _load(self, state: dict[str, Any]) -> None:
        if state["version"] != _STATE_VERSION or state["kind"] not in ("plan", "follow"):
            raise StateError("not the state of sealed sessions", kind="state")
        worker = get_worker_info()
        own = (0, 1) if worker is None else (worker.id, worker.num_workers)
        # A worker's own part of the order says nothing of the others'.
        part = (state["worker"], state["workers"])
        if part != (0, 1) and part != own:
            raise StateError(
                f"the state is that of worker {state['worker']} of {state['workers']}: another "
                "number of workers resumes through rollstore.torch.Loader",
                kind="state",
            )
        if state["kind"] == "plan":
            self._use(Plan.from_state(state["source"]))
        elif isinstance(self.source, Follow):
            self.source.check_state(state["source"])
        else:
            raise StateError("the state is of a Follow, and this reads a plan", kind="state")
        shard, done = Shard(state["rank"], state["world"], state["base"]), int(state["done"])
        if self._world == shard.world:
            shard = shard._replace(rank=self._rank)
        else:
            shard, done = shard.resharded(done, self._rank, self._world), 0
        self._begin = self._now = (shard, done)
        self._begin_in = os.getpid()
        self._begin_is_own = self._now_is_own = part != (0, 1)
