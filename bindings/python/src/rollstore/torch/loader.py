"""A loader over SealedSessions that knows what was trained on, and resumes exactly there."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader

from rollstore.torch.batch import TrainingBatch
from rollstore.torch.datasets import SealedSessions
from rollstore.torch.prefetch import Exhausted, Prefetcher

__all__ = ["Acknowledge", "Loader", "check_acknowledge"]

Acknowledge = Literal["auto", "explicit"]


def check_acknowledge(acknowledge: str) -> None:
    """ValueError unless it is a known way."""
    if acknowledge not in ("auto", "explicit"):
        raise ValueError(f'acknowledge: {acknowledge!r} is none of "auto", "explicit"')


class Loader:
    """Batches of SealedSessions, made ahead of training, in a thread or in worker processes.

        dataset = SealedSessions(store, Plan.of(store, group_size=8, seed=1), batch_size=64)
        loader = Loader(dataset)
        for epoch in range(loader.epoch, epochs):
            loader.set_epoch(epoch)
            for batch in loader:
                train(batch)
                if time_for_a_checkpoint:
                    save(model, loader.state_dict())

    The state tells what was trained on, not what was read ahead: after load_state_dict the next
    pass gives exactly the rest, with any number of workers, and of ranks when all ranks had as many
    batches.

    dataset: with a batch size.
    num_workers: DataLoader workers. 0: a thread of this process, which is the faster way: the store
        fills arrays with the GIL free, and no batch crosses between processes.
    prefetch: batches ahead (of each worker); 0, without workers: each is made when asked for.
    acknowledge: "auto": a batch counts as trained on when the next one is asked for, or when
        state_dict is called: call that after the step. "explicit": when trained(batch) was called.
    pin_memory: page-locked memory, for copies to a GPU that overlap.
    multiprocessing_context: "fork", "spawn" or "forkserver", as DataLoader has it.

    A new pass begins at the beginning of the epoch, also when the one before was left early.
    """

    def __init__(
        self,
        dataset: SealedSessions,
        *,
        num_workers: int = 0,
        prefetch: int = 2,
        acknowledge: Acknowledge = "auto",
        pin_memory: bool = False,
        multiprocessing_context: Any = None,
    ) -> None:
        if dataset.batch_size is None:
            raise ValueError("dataset: one with a batch_size is needed")
        if num_workers < 0:
            raise ValueError(f"num_workers: 0 or more are needed, got {num_workers}")
        if prefetch < (1 if num_workers else 0):
            raise ValueError(f"prefetch: {prefetch} is too few with {num_workers} workers")
        check_acknowledge(acknowledge)
        self._dataset = dataset
        self._num_workers = num_workers
        self._prefetch = prefetch
        self._explicit = acknowledge == "explicit"
        self._pin_memory = pin_memory
        self._context = multiprocessing_context
        self._untrained: list[tuple[int, TrainingBatch | None]] = []

    @property
    def dataset(self) -> SealedSessions:
        """What it reads."""
        return self._dataset

    @property
    def epoch(self) -> int:
        """The epoch of the next pass."""
        return self._dataset.epoch

    def set_epoch(self, epoch: int) -> None:
        """Take the order of another epoch. The same one, as after a resume, changes nothing."""
        self._dataset.set_epoch(epoch)

    def __len__(self) -> int:
        """Batches of the next pass. TypeError where sessions are followed."""
        return len(self._dataset)

    # ------------------------------------------------------------ batches

    def __iter__(self) -> Iterator[TrainingBatch]:
        stop = torch.zeros(1, dtype=torch.uint8)
        if self._num_workers:
            stop.share_memory_()
        source = self._dataset._begin_pass(stop)
        self._untrained.clear()
        with contextlib.closing(self._items(source, stop)) as items:
            for after, batch in items:
                self._untrained.append((after, batch))
                if batch is not None:
                    yield batch
                if not self._explicit:
                    self.trained()
                elif batch is None:
                    self._advance()

    def _items(
        self, source: SealedSessions, stop: torch.Tensor
    ) -> Generator[tuple[int, TrainingBatch | None], None, None]:
        if self._num_workers:
            return self._from_workers(source, stop)
        if self._prefetch:
            return self._from_thread(source, stop)
        return self._pinned(iter(source))

    def _from_workers(
        self, source: SealedSessions, stop: torch.Tensor
    ) -> Generator[Any, None, None]:
        loader = DataLoader(
            source,
            batch_size=None,
            num_workers=self._num_workers,
            prefetch_factor=self._prefetch,
            pin_memory=self._pin_memory,
            multiprocessing_context=self._context,
        )
        items: Any = iter(loader)
        try:
            yield from items
        finally:
            stop.fill_(1)
            # Now, not when the last traceback that names it is collected, which takes seconds.
            items._shutdown_workers()

    def _from_thread(
        self, source: SealedSessions, stop: torch.Tensor
    ) -> Generator[Any, None, None]:
        prefetcher: Prefetcher[Any] = Prefetcher(
            lambda _: self._pinned(iter(source)), self._prefetch, name="rollstore-loader"
        )
        try:
            while True:
                try:
                    item = prefetcher.get()
                except Exhausted:
                    return
                yield item
        finally:
            stop.fill_(1)
            prefetcher.stop()

    def _pinned(self, items: Iterator[Any]) -> Generator[Any, None, None]:
        for after, batch in items:
            yield after, batch.pin_memory() if self._pin_memory and batch is not None else batch

    # ------------------------------------------------------------ place and resume

    def trained(self, *batches: TrainingBatch) -> None:
        """These were trained on; none named: all that were given out.

        The place moves over batches in their order: one that was trained on before an earlier one
        counts when that one does. ValueError for a batch that is not out.
        """
        if not batches:
            self._untrained = [(after, None) for after, _ in self._untrained]
        for batch in batches:
            places = [
                place
                for place, (_, out) in enumerate(self._untrained)
                if out is not None and out.samples is batch.samples
            ]
            if not places:
                raise ValueError("the batch was not given out by this pass, or is done with")
            after, _ = self._untrained[places[0]]
            self._untrained[places[0]] = (after, None)
        self._advance()

    def _advance(self) -> None:
        while self._untrained and self._untrained[0][1] is None:
            after, _ = self._untrained.pop(0)
            self._dataset._reached(after)

    def state_dict(self) -> dict[str, Any]:
        """What was trained on, in numbers and strings. Each rank has one of its own."""
        if not self._explicit:
            self.trained()
        return self._dataset.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next pass gives what the state has not. See SealedSessions.load_state_dict."""
        self._untrained.clear()
        self._dataset.load_state_dict(state)
