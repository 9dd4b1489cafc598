"""What `_gather` does to rows of logits, as two Triton kernels: one reading each, one writing.

The chunked operations of PyTorch go over a row a dozen times in float32. Here the forward pass
reads the logits once, and the backward pass reads them once and writes their gradient once. One
program works on one row. Triton comes with PyTorch for CUDA; only `_gather` imports this module,
and only once it has logits on a GPU.
"""

from __future__ import annotations

import functools
import warnings

import torch
import triton
import triton.language as tl

_LOG2_E = 1.4426950408889634
_FLOAT32_MAX = 3.4028234663852886e38

LOG2_E = tl.constexpr(_LOG2_E)
LOWEST = tl.constexpr(-_FLOAT32_MAX)

# Logits that a program has in registers at once: enough loads on their way to keep the memory busy.
_BLOCK, _WARPS = 4096, 8
# The token and its candidates, which are compared each with each.
_MOST_SLOTS = 1024
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@triton.jit(do_not_specialize=["inner"])
def _row_sums(  # type: ignore[no-untyped-def]
    logits, row_max, rest_sum, scale, vocab, inner, outer_stride, inner_stride,
    PER_ROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row's largest logit, and the sum of exp of the others relative to it."""
    row = tl.program_id(0).to(tl.int64)
    source = logits + row // inner * outer_stride + row % inner * inner_stride
    log2_scale = tl.load(scale + row) if PER_ROW else scale
    columns = tl.arange(0, BLOCK)
    # Each lane's own: it has seen (1 + rest) exp(top). Nothing yet is rest -1, with no infinity
    # whose difference with another would be NaN.
    top = tl.full([BLOCK], LOWEST, tl.float32)
    rest = tl.full([BLOCK], -1.0, tl.float32)
    for start in range(0, vocab, BLOCK):
        at = start + columns
        logit = tl.load(source + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        gap = logit - top
        term = tl.exp2(-tl.abs(gap) * log2_scale)
        rest = tl.where(gap > 0, (rest + 1) * term, rest + term)
        top = tl.maximum(top, logit)
    largest, lane = tl.max(top, axis=0, return_indices=True)
    others = (rest + 1) * tl.exp2((top - largest) * log2_scale)
    sum_rest = tl.sum(tl.where(columns == lane, rest, others), axis=0)
    nothing = sum_rest < 0  # a row of -inf alone: its log-probabilities are -inf, not NaN
    tl.store(row_max + row, tl.where(nothing, 0.0, largest))
    tl.store(rest_sum + row, tl.where(nothing, 0.0, sum_rest))


@triton.jit
def _fill_with_zeros(target, vocab, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """No product with 0: a row that needs no gradient may hold NaN."""
    zeros = tl.zeros([BLOCK], target.dtype.element_ty)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(target + at, zeros, mask=at < vocab)


@triton.jit(do_not_specialize=["inner", "slots"])
def _row_gradients(  # type: ignore[no-untyped-def]
    logits, grad, ids, at_ids, row_max, log_sum, scale, vocab, slots, inner,
    outer_stride, inner_stride, grad_outer_stride, grad_inner_stride,
    SOFTMAX: tl.constexpr, PER_ROW: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """-sum(at_ids) softmax, and at_ids added at ids; `grad` may be the logits themselves."""
    row = tl.program_id(0).to(tl.int64)
    source = logits + row // inner * outer_stride + row % inner * inner_stride
    target = grad + row // inner * grad_outer_stride + row % inner * grad_inner_stride
    slot = tl.arange(0, SLOTS)
    slot_ids = tl.load(ids + row * slots + slot, mask=slot < slots, other=-1)
    slot_at = tl.load(at_ids + row * slots + slot, mask=slot < slots, other=0.0)
    used = slot_ids >= 0
    busy = tl.max((slot_at != 0).to(tl.int32), axis=0) > 0
    factor = -tl.sum(slot_at, axis=0)
    value = tl.zeros([SLOTS], tl.float32)
    if SOFTMAX:
        log2_scale = tl.load(scale + row) if PER_ROW else scale
        top = tl.load(row_max + row)
        shift = tl.load(log_sum + row) * LOG2_E
        slot_logit = tl.load(source + slot_ids, mask=used, other=0.0).to(tl.float32)
        value = factor * tl.exp2((slot_logit - top) * log2_scale - shift)
    # Each slot of an id has all that is added to it, so that any of them may be stored last.
    for first in range(0, slots, 16):
        other = first + tl.arange(0, 16)
        other_ids = tl.load(ids + row * slots + other, mask=other < slots, other=-2)
        other_at = tl.load(at_ids + row * slots + other, mask=other < slots, other=0.0)
        same = slot_ids[:, None] == other_ids[None, :]
        value += tl.sum(tl.where(same, other_at[None, :], 0.0), axis=1)
    tl.debug_barrier()  # every logit of a slot is read before one is written over
    if SOFTMAX:
        if busy:
            columns = tl.arange(0, BLOCK)
            for start in range(0, vocab, BLOCK):
                at = start + columns
                logit = tl.load(source + at, mask=at < vocab, other=0.0).to(tl.float32)
                softmax = tl.exp2((logit - top) * log2_scale - shift)
                tl.store(target + at, (factor * softmax).to(grad.dtype.element_ty), mask=at < vocab)
        else:
            _fill_with_zeros(target, vocab, BLOCK)
    else:
        _fill_with_zeros(target, vocab, BLOCK)
    tl.debug_barrier()
    tl.store(target + slot_ids, value.to(grad.dtype.element_ty), mask=used & busy)


@triton.jit
def _nothing(place):  # type: ignore[no-untyped-def]
    tl.store(place, 1)


@functools.cache
def works(device: torch.device) -> bool:
    """Whether Triton makes kernels for this GPU here; where it cannot, a warning says why."""
    if int(triton.__version__.split(".")[0]) < 3 or torch.version.cuda is None:
        return False
    if torch.cuda.get_device_capability(device) < (8, 0):
        return False
    place = torch.zeros(1, dtype=torch.int32, device=device)
    try:
        with torch.cuda.device_of(place):
            _nothing[(1,)](place)
    except Exception as error:
        # Triton needs a C compiler and a folder for what it makes, and tells of both in many ways.
        warnings.warn(
            f"Triton cannot make kernels here, and the loss uses slower operations: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


def fits(logits: torch.Tensor, k: int) -> bool:
    """Whether the kernels can walk these logits, and k candidates a row."""
    return (
        type(logits) in (torch.Tensor, torch.nn.Parameter)
        and logits.dtype in _DTYPES
        and logits.numel() > 0
        and logits.stride(-1) == 1
        and logits.shape[-1] < 1 << 30
        and k < _MOST_SLOTS
        and _blocks(logits) is not None
    )


def _blocks(logits: torch.Tensor) -> torch.Tensor | None:
    """A view [outer, inner, vocab], also of a padded batch cut along its length; None: none is."""
    if logits.dim() == 2:
        return logits.unsqueeze(0)
    try:
        return logits.view(-1, *logits.shape[-2:])
    except RuntimeError:
        return None


def _addressed(logits: torch.Tensor) -> tuple[int, tuple[int, int, int]]:
    """Rows, and what the kernels need to find one: inner, outer stride, inner stride."""
    blocks = _blocks(logits)
    assert blocks is not None
    outer, inner, _ = blocks.shape
    return outer * inner, (inner, blocks.stride(0), blocks.stride(1))


def _log2_scale(temperature: float | torch.Tensor) -> float | torch.Tensor:
    """exp(x / temperature) = 2 ** (x * this). Finite: 0 times it must be 0."""
    if isinstance(temperature, torch.Tensor):
        scale: torch.Tensor = (_LOG2_E / temperature).clamp(max=_FLOAT32_MAX).contiguous()
        return scale
    return min(_LOG2_E / temperature, _FLOAT32_MAX)


def row_stats(
    logits: torch.Tensor, temperature: float | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 [rows, 1]: the largest logit, and the log of the scaled sum relative to it."""
    rows, address = _addressed(logits)
    row_max = torch.empty(rows, 1, dtype=torch.float32, device=logits.device)
    rest = torch.empty_like(row_max)
    with torch.cuda.device_of(logits):
        _row_sums[(rows,)](
            logits, row_max, rest, _log2_scale(temperature), logits.shape[-1], *address,
            PER_ROW=isinstance(temperature, torch.Tensor), BLOCK=_BLOCK, num_warps=_WARPS,
        )  # fmt: skip
    return row_max, rest.log1p_()


def write_gradient(
    logits: torch.Tensor,
    target: torch.Tensor,
    ids: torch.Tensor,
    at_ids: torch.Tensor,
    stats: tuple[torch.Tensor, torch.Tensor],
    temperature: float | torch.Tensor,
    normalise: bool,
) -> None:
    """Write the gradient of the logits to `target`, which may be the logits.

    ids, at_ids: contiguous [rows, slots], the ids with a gradient of their own, and it; 0 where the
    id is -1. Rows in which all of those are 0 become exactly 0.
    """
    rows, (inner, *strides) = _addressed(logits)
    _, (_, *target_strides) = _addressed(target)
    with torch.cuda.device_of(logits):
        _row_gradients[(rows,)](
            logits, target, ids, at_ids, *stats, _log2_scale(temperature),
            logits.shape[-1], ids.shape[1], inner, *strides, *target_strides,
            SOFTMAX=normalise, PER_ROW=isinstance(temperature, torch.Tensor),
            BLOCK=_BLOCK, SLOTS=max(16, triton.next_power_of_2(ids.shape[1])), num_warps=_WARPS,
        )  # fmt: skip
