"""Batches for a training run that goes on: sessions as they are sealed, until trained on."""

from __future__ import annotations

import base64
import binascii
import os
import time
import warnings
import weakref
from collections.abc import Collection, Iterator
from types import TracebackType
from typing import Any, Literal, Self, Unpack

import torch

from rollstore._consumer import LEASE_SECONDS
from rollstore._errors import WaitTimeoutError
from rollstore._store import Store
from rollstore.torch.batch import BatchArguments, TrainingBatch, check_arguments
from rollstore.torch.datasets import store_of, units_per_batch
from rollstore.torch.errors import StateError
from rollstore.torch.leases import ConsumerBatch, Counts, Feeder, Taking
from rollstore.torch.loader import Acknowledge, check_acknowledge
from rollstore.torch.plan import check_group_size, check_rank, check_unusable
from rollstore.torch.prefetch import Exhausted
from rollstore.torch.versions import Staleness

__all__ = ["ConsumerLoader"]

_STATE_VERSION = 1


class ConsumerLoader:
    """Batches of sessions as they are sealed, for one consumer of the store.

        with ConsumerLoader(store, "trainer", batch_size=64, group_size=8,
                            staleness=Staleness(4, lambda: version)) as loader:
            loader.load_state_dict(checkpoint)               # where there is one
            for batch in loader:
                train(batch)
                if time_for_a_checkpoint:
                    state = loader.state_dict()
                    save(model, state)
                    loader.checkpointed(state)               # commits, and releases

    A thread leases sessions, and puts the next batches together while training goes on. A session
    is done with when it was trained on, never when it was read: the state tells what was
    acknowledged, and a resume from it gives everything else again, once. Leaving the `with` block
    gives back what was not trained on; a process that dies gives it back by dying.

    store: a Store that can be written, or the path of one.
    consumer: its name; it is created where there is none.
    batch_size: sessions of a batch, whole groups.
    group_size: whole groups of that many sessions only, with advantages. A session without a
        group_index is then a GroupError.
    statuses: only sessions of these statuses; the others count as finished with. None: all.
    staleness: judged when a batch is handed out, by the trainer's version at that moment.
    unusable: a session that gives no sample, or no advantage: "raise", or "drop" it with its group.
    group_timeout: seconds after which a group that is not whole is dropped; None: never.
    acknowledge: "auto": a batch counts as trained on when the next one is asked for, when
        state_dict is called, or when the `with` block ends without an exception. "explicit": when
        trained(batch) was called.
    prefetch: batches that are ready ahead.
    follow: False: the loop ends when nothing more is sealed, with a batch that may be smaller
        (left out with drop_last).
    timeout: seconds to wait for a batch; then WaitTimeoutError says what is missing, and the next
        call waits again. None: without end.
    lease: seconds of a lease. They are renewed while the loader lives: it says how long a process
        that hangs, not one that died, keeps sessions from others.
    start: where a new consumer begins, "oldest" or "newest".
    rank, world: of the ranks that share the store and the consumer. Each has a loader; they take
        by turns, so that none starves another, and all of them wait until the last one is there.
    pin_memory: page-locked memory. device: the batches' tensors are copied there in the thread; a
        GPU implies pin_memory, and the copy overlaps with training.
    arguments: see BatchArguments.

    After an exception out of the loop close the loader; only WaitTimeoutError can be passed over.
    """

    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        consumer: str,
        *,
        batch_size: int,
        group_size: int | None = None,
        statuses: Collection[str] | None = None,
        staleness: Staleness | None = None,
        unusable: Literal["raise", "drop"] = "raise",
        group_timeout: float | None = None,
        acknowledge: Acknowledge = "auto",
        prefetch: int = 2,
        follow: bool = True,
        drop_last: bool = False,
        timeout: float | None = None,
        lease: float = LEASE_SECONDS,
        start: Literal["oldest", "newest"] = "oldest",
        rank: int = 0,
        world: int = 1,
        pin_memory: bool = False,
        device: torch.device | str | None = None,
        **arguments: Unpack[BatchArguments],
    ) -> None:
        check_rank(rank, world)
        check_acknowledge(acknowledge)
        check_unusable(unusable)
        if prefetch < 1:
            raise ValueError(f"prefetch: at least 1 is needed, got {prefetch}")
        if not lease > 0:
            raise ValueError(f"lease: seconds over 0 are needed, got {lease}")
        where = None if device is None else torch.device(device)
        taking = Taking(
            batch_units=units_per_batch(batch_size, check_group_size(group_size)),
            group_size=group_size,
            statuses=statuses,
            staleness=staleness,
            unusable=unusable,
            group_timeout=group_timeout,
            drop_last=drop_last,
            follow=follow,
            lease=lease,
            prefetch=prefetch,
            rank=rank,
            world=world,
            pin_memory=pin_memory or (where is not None and where.type == "cuda"),
            device=where,
            arguments=check_arguments(arguments),
        )
        self._store = store_of(store, "w")
        self._own_store = self._store is not store
        self._consumer = self._store.consumer(consumer, start=start)
        self._rank, self._world = rank, world
        self._explicit = acknowledge == "explicit"
        self._timeout = timeout
        self._feeder = Feeder(self._consumer, taking)
        self._delivered: list[ConsumerBatch] = []
        self._closed = False
        self.lost = 0
        """Sessions that the loaded state did not have, and that were released since."""
        # The thread knows the feeder only, so that a loader nobody closed ends with its last use.
        self._finalize = weakref.finalize(self, self._feeder.abandon)

    @property
    def counts(self) -> Counts:
        """What became of sessions so far."""
        return self._feeder.counts

    # ------------------------------------------------------------ batches

    def __iter__(self) -> Iterator[ConsumerBatch]:
        return self

    def __next__(self) -> ConsumerBatch:
        self._check_open()
        if not self._explicit:
            self.trained()
        deadline = None if self._timeout is None else time.monotonic() + self._timeout
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                batch = self._feeder.get(left)
            except Exhausted:
                self._feeder.pause()
                raise StopIteration from None
            except WaitTimeoutError:
                raise WaitTimeoutError(
                    f'no batch for consumer "{self._consumer.name}" within {self._timeout} s: '
                    f"{self._feeder.describe()}",
                    kind="timeout",
                ) from None
            if batch is not None:
                self._delivered.append(batch)
                return batch

    def trained(self, *batches: TrainingBatch) -> None:
        """These were trained on; none named: all that were handed out.

        ValueError for a batch that is not out. LeaseError when a session was given to somebody else
        meanwhile, or the consumer was resumed; the other sessions are acknowledged.
        """
        for batch in batches or tuple(self._delivered):
            own = [it for it in self._delivered if it.samples is batch.samples]
            if not own:
                raise ValueError("the batch was not handed out by this loader, or is done with")
            self._delivered.remove(own[0])
            self._feeder.acknowledge(own[0].units)

    # ------------------------------------------------------------ checkpoints

    def state_dict(self, timeout: float | None = 60.0) -> dict[str, Any]:
        """The consumer's place, in numbers and strings: what was acknowledged, by all ranks.

        Every rank calls it after the same step. Rank 0's has the place, and is the one to load; it
        waits up to `timeout` seconds until the others have acknowledged as many batches.
        """
        self._check_open()
        if not self._explicit:
            self.trained()
        place = None
        if self._rank == 0:
            self._feeder.wait_for_other_ranks(timeout)
            place = base64.b64encode(self._consumer.place()).decode()
        clock = self._feeder.clock
        return {
            "version": _STATE_VERSION,
            "kind": "consumer",
            "consumer": self._consumer.name,
            "place": place,
            "rank": self._rank,
            "world": self._world,
            "weight_version": None if clock is None else clock.newest,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to the state, before the first batch. Every rank loads rank 0's state.

        What is not in it is given again: nothing is skipped or repeated, with any number of ranks.
        StateError; VersionRestartError when the trainer's weight version is behind the state's; a
        RuntimeWarning, and `lost`, when sessions that are not in it were released since.
        """
        self._check_open()
        if self._feeder.started or self._delivered:
            raise StateError("a state is loaded before the first batch", kind="state")
        place = self._place(state)
        if place is None:
            raise StateError(
                f"the state is that of rank {state['rank']}: rank 0's has the place", kind="state"
            )
        clock = self._feeder.clock
        if clock is not None and state["weight_version"] is not None:
            clock.newest = state["weight_version"]
            clock.now()
        if self._rank != 0:
            return  # rank 0 resumes; nobody takes before all ranks are there
        self.lost = self._consumer.resume(place)
        if self.lost:
            warnings.warn(
                f"{self.lost} sessions were not trained on at that checkpoint and were released "
                "since: they cannot be trained on again",
                RuntimeWarning,
                stacklevel=2,
            )

    def checkpointed(self, state: dict[str, Any], *, release: bool = True) -> int:
        """The checkpoint that holds `state` is safe: what it holds as trained is committed.

        release: release what every consumer has committed. Returns how many sessions were released.
        Until it is called, everything trained since the last checkpoint stays in the store. Ranks
        other than 0 may call it; theirs does nothing.
        """
        self._check_open()
        place = self._place(state)
        if place is None:
            return 0
        self._consumer.commit(place)
        return self.release() if release else 0

    def release(self, limit: int = 0) -> int:
        """Release up to `limit` sessions (0: all) that every consumer has committed."""
        self._check_open()
        return self._store.release_consumed(limit)

    def _place(self, state: dict[str, Any]) -> bytes | None:
        try:
            if state["version"] != _STATE_VERSION or state["kind"] != "consumer":
                raise StateError("not the state of a consumer", kind="state")
            if state["consumer"] != self._consumer.name:
                raise StateError(
                    f'the state is that of consumer "{state["consumer"]}", not of '
                    f'"{self._consumer.name}"',
                    kind="state",
                )
            place = state["place"]
            return None if place is None else base64.b64decode(place, validate=True)
        except (KeyError, TypeError, binascii.Error) as error:
            raise StateError(f"not the state of a consumer: {error!r}", kind="state") from error

    # ------------------------------------------------------------ the end

    def close(self) -> None:
        """End the thread, and give back what was not acknowledged; twice is fine."""
        if self._closed:
            return
        self._closed = True
        self._finalize.detach()
        self._delivered.clear()
        try:
            self._feeder.close()
        finally:
            if self._own_store:
                self._store.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the loader is closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if exc_type is None and not self._explicit and not self._closed:
                self.trained()
        finally:
            self.close()

    def __repr__(self) -> str:
        return f"<rollstore.torch.ConsumerLoader of {self._consumer!r}: {self.counts}>"
