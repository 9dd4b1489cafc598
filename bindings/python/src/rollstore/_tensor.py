"""Torch tensors over NumPy arrays' memory. Torch is imported when one is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollstore import _rollstore

if TYPE_CHECKING:
    import numpy as np
    import torch

__all__ = ["as_tensor"]


def as_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """A torch tensor over the same memory as `array`, read-only arrays too, with no warning.

    The tensor keeps the array, and so its snapshot, alive. PyTorch has no read-only tensors:
    nothing stops a write to it, which would damage the store (or end the process where the store
    is open with mode "r"). Clone it first.
    """
    from torch.utils.dlpack import from_dlpack

    tensor: torch.Tensor = from_dlpack(_rollstore.dlpack(array))
    return tensor


def as_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The writable NumPy array over a CPU tensor's memory."""
    array: np.ndarray[Any, Any] = tensor.numpy()
    return array
