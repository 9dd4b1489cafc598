"""Checks of tensor arguments: every message begins with the argument's name."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_INTEGER_DTYPES = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


def check_tensor(name: str, value: object) -> torch.Tensor:
    """Return `value` if it is a tensor; TypeError otherwise."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: a torch.Tensor is needed, got {type(value).__name__}")
    return value


def check_floating(name: str, value: object) -> torch.Tensor:
    """Return `value` if it is a floating-point tensor; TypeError otherwise."""
    tensor = check_tensor(name, value)
    if not tensor.dtype.is_floating_point:
        raise TypeError(f"{name}: a floating-point dtype is needed, got {tensor.dtype}")
    return tensor


def check_ids(name: str, value: object) -> torch.Tensor:
    """Return `value` if it is an integer tensor; TypeError otherwise."""
    tensor = check_tensor(name, value)
    if tensor.dtype not in _INTEGER_DTYPES:
        raise TypeError(f"{name}: an integer dtype is needed, got {tensor.dtype}")
    return tensor


def check_mask(name: str, value: object) -> torch.Tensor:
    """Return `value != 0` of a bool or integer tensor; TypeError otherwise.

    A floating mask is refused: a weight such as 0.5 would be read as 1.
    """
    tensor = check_tensor(name, value)
    if tensor.dtype is not torch.bool and tensor.dtype not in _INTEGER_DTYPES:
        raise TypeError(f"{name}: a bool or integer dtype is needed, got {tensor.dtype}")
    return tensor != 0


def check_shape(name: str, tensor: torch.Tensor, shape: Sequence[int], like: str) -> None:
    """ValueError unless `tensor` has the shape that `like` describes."""
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(
            f"{name}: shape {tuple(shape)} is needed ({like}), got {tuple(tensor.shape)}"
        )


def check_device(name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """ValueError unless both tensors are on one device."""
    if tensor.device != other.device:
        raise ValueError(
            f"{name}: is on {tensor.device}, but {other_name} is on {other.device}; "
            "all arguments must be on one device"
        )
