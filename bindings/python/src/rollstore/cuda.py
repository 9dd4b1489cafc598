"""Copies to an NVIDIA GPU that overlap with training.

A copy overlaps only from page-locked memory. Two ways to have that:

    batches   snapshot.batch(..., pin_memory=True) is written into page-locked memory
    the store register(store) locks the store's own pages: what is in the map goes to the GPU
              without a copy on the host

and `Copier` copies either on a stream of its own:

    copier = rollstore.cuda.Copier()
    pending = copier.copy(snapshot.batch(ids, pin_memory=True))
    ...                                   # the step before, meanwhile
    batch = pending.get()                 # on the GPU; the current stream waits, not the host

PyTorch with CUDA is needed; without a GPU everything here raises RuntimeError that says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from rollstore._batch import Batch, Sample
from rollstore._store import Store
from rollstore._tensor import as_tensor

__all__ = ["Copier", "Pending", "Registration", "register"]

T = TypeVar("T")

# Of the CUDA runtime's driver_types.h.
_PORTABLE = 1
_READ_ONLY = 8
_SUCCESS = 0


def _cudart() -> Any:
    if not torch.cuda.is_available():
        raise RuntimeError(
            "rollstore.cuda needs an NVIDIA GPU with its driver and a PyTorch built for CUDA: "
            "torch.cuda.is_available() is False here"
        )
    return torch.cuda.cudart()


class Registration:
    """The store's pages, locked for copies to the GPU; made by `register`.

    unregister(), or the end of a `with` block, undoes it. Copies must have ended by then.
    """

    def __init__(self, store: Store) -> None:
        self._runtime = _cudart()
        # A handle of its own: the map stays where it is for as long as its pages are locked.
        self._store: Store | None = Store(store.path, store._flags)
        self.address = self._store.map_address
        """Where the map begins."""
        self.size = self._store.map_size
        """Bytes that are locked."""
        code = self._lock(_PORTABLE | _READ_ONLY)
        if code != _SUCCESS and not store.read_only:
            # A device that knows no such memory takes a map that may be written as it is.
            code = self._lock(_PORTABLE)
        if code != _SUCCESS:
            self._store.close()
            self._store = None
            raise RuntimeError(self._refusal(code, store))

    def _lock(self, flags: int) -> int:
        """For copies from it only: files on a disk are taken no other way."""
        code = int(self._runtime.cudaHostRegister(self.address, self.size, flags))
        if code != _SUCCESS and torch.cuda.is_available():
            # CUDA keeps the error, and PyTorch takes it for one of its next launch: this one.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device="cuda")
        return code

    def _refusal(self, code: int, store: Store) -> str:
        try:
            reason = str(self._runtime.cudaGetErrorString(self._runtime.cudaError(code)))
        except (AttributeError, TypeError, ValueError):
            reason = f"error {code}"
        mode = ' and the store open with mode "w", for this device' if store.read_only else ""
        return (
            f"CUDA refuses to lock {self.size} bytes of {store.path} ({reason}). The store must be "
            f"in shared memory, the limit of locked memory (ulimit -l) large enough{mode}; else "
            f"copy through batches with pin_memory=True"
        )

    def unregister(self) -> None:
        """Unlock the pages; twice is fine."""
        if self._store is None:
            return
        store, self._store = self._store, None
        code = int(self._runtime.cudaHostUnregister(self.address))
        store.close()
        if code != _SUCCESS:
            raise RuntimeError(f"CUDA could not unlock the store's pages: error {code}")

    def __enter__(self) -> Registration:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.unregister()

    def __repr__(self) -> str:
        state = "undone" if self._store is None else f"{self.size} bytes"
        return f"<rollstore.cuda.Registration: {state}>"


def register(store: Store) -> Registration:
    """Lock the whole map of a store, so that copies from its arrays to the GPU overlap.

    All of the store's capacity is locked in memory; once for each process. RuntimeError where there
    is no GPU, or the driver or file system refuses.
    """
    return Registration(store)


class Pending(Generic[T]):
    """A copy that may still run. It keeps what it copies from alive until it has ended."""

    def __init__(self, copied: T, tensors: list[torch.Tensor], sources: Any, event: Any) -> None:
        self._copied = copied
        self._tensors = tensors
        self._sources = sources
        self._event = event

    @property
    def done(self) -> bool:
        """True when the copy has ended; then the memory it came from may be written again."""
        if self._sources is not None and self._event.query():
            self._sources = None
        return self._sources is None

    def get(self) -> T:
        """What was copied, on the GPU. The current stream waits for the copy, the host does not."""
        for tensor in self._tensors:
            stream: Any = torch.cuda.current_stream(tensor.device)
            stream.wait_event(self._event)
            tensor.record_stream(stream)  # its memory is not given out again before that is done
        return self._copied

    def synchronize(self) -> None:
        """Wait on the host until the copy has ended."""
        self._event.synchronize()
        self._sources = None


class Copier:
    """Copies tensors, arrays, batches and samples to a GPU on a stream of its own.

    device: "cuda", "cuda:1", ...
    """

    def __init__(self, device: str | torch.device = "cuda") -> None:
        _cudart()
        self.device = torch.device(device)
        self.stream = torch.cuda.Stream(self.device)

    def copy(self, source: T) -> Pending[T]:
        """Begin to copy `source`: an array or tensor, or a Batch, Sample or dict of them.

        What comes back has the same shape with tensors on the GPU. NumPy arrays of a registered
        store's snapshot are copied from the map itself; keep the snapshot open until `done`.
        """
        tensors: list[torch.Tensor] = []
        with torch.cuda.stream(self.stream):
            copied = self._copy(source, tensors)
            event = torch.cuda.Event()
            event.record(self.stream)
        return Pending(copied, tensors, source, event)

    def _copy(self, source: Any, tensors: list[torch.Tensor]) -> Any:
        if isinstance(source, np.ndarray):
            source = as_tensor(source)
        if isinstance(source, torch.Tensor):
            copied = source.to(self.device, non_blocking=True)
            tensors.append(copied)
            return copied
        if isinstance(source, Batch):
            arrays = {name: self._copy(array, tensors) for name, array in source.arrays.items()}
            return dataclasses.replace(source, **arrays, _memory={})
        if isinstance(source, Sample):
            names = ("tokens", "loss_mask", "rollout_logprobs", "topk_ids", "topk_logprobs")
            arrays = {name: self._copy(getattr(source, name), tensors) for name in names}
            return dataclasses.replace(source, **arrays)
        if isinstance(source, Mapping):
            return {name: self._copy(value, tensors) for name, value in source.items()}
        raise TypeError(
            f"source: a tensor, array, Batch, Sample or dict of them, got {type(source).__name__}"
        )
