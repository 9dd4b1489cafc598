"""Log-probabilities of a few tokens a row: no second [tokens, vocab] tensor.

Two autograd functions with the same result. One starts from logits, the other from hidden states
and the weight of the output layer, so that the logits themselves never exist as a whole. Both keep
two float32 numbers a row (the row's largest logit, and the log of the scaled sum relative to it)
and compute the softmax again in backward.

A row's sum is kept relative to its maximum, and without the maximum's own 1. A peaked row has
`log p` near 0, and a float32 `z - logsumexp(z)` would lose it to the rounding of a large number:
with logits around 20 that error alone, about 1e-6, is a whole tail's mass.

On a GPU the work is done by the Triton kernels of `_gather_triton`. Elsewhere, in layouts that they
do not take, and with ROLLSTORE_TRITON=0 in the environment, PyTorch's operations do it, chunk by
chunk in float32.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch.autograd.function import once_differentiable

# One float32 work buffer of a chunk: 64 MiB, small beside the logits it works on. A GPU needs more
# to do at once, 256 MiB, or it waits for the host between the operations.
LOGITS_CHUNK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 26}
# From hidden states each chunk also reads and writes [vocab, width] once, so chunks are larger.
HIDDEN_CHUNK_ELEMENTS = 1 << 27

_NEG_INF = float("-inf")


class GatherPlan(NamedTuple):
    """What the autograd functions need besides tensors that can have a gradient.

    token_ids: int64 [rows]; topk_ids: int64 [rows, k]; -1 where there is none.
    temperature: float, or float32 [rows, 1].
    chunk: rows worked on at once.
    normalise: False gathers scaled logits instead of log-probabilities.
    """

    token_ids: torch.Tensor
    topk_ids: torch.Tensor
    temperature: float | torch.Tensor
    chunk: int
    normalise: bool

    def tensors(self) -> list[torch.Tensor]:
        """What must be the same in backward as it was in forward."""
        of_rows = [self.temperature] if isinstance(self.temperature, torch.Tensor) else []
        return [self.token_ids, self.topk_ids, *of_rows]

    def rows(self, rows: slice) -> GatherPlan:
        """The plan of some of the rows."""
        temperature = self.temperature
        if isinstance(temperature, torch.Tensor):
            temperature = temperature[rows]
        return self._replace(
            token_ids=self.token_ids[rows], topk_ids=self.topk_ids[rows], temperature=temperature
        )


class _Gathered(NamedTuple):
    token: torch.Tensor  # float32 [rows]
    topk: torch.Tensor  # float32 [rows, k]
    row_max: torch.Tensor  # float32 [rows, 1]
    log_sum: torch.Tensor  # float32 [rows, 1], relative to row_max


def _matrices(tensors: tuple[torch.Tensor, ...]) -> list[tuple[torch.Tensor, ...]]:
    """Views of tensors [..., columns] of one leading shape as [rows, columns], never a copy.

    A padded batch cut along its length, `logits[:, :-1]`, has no single such view, and reshape
    would copy all of it; it is walked one sequence at a time.
    """
    if tensors[0].dim() == 2:
        return [tensors]
    with contextlib.suppress(RuntimeError):
        return [tuple(tensor.view(-1, tensor.shape[-1]) for tensor in tensors)]
    parts = zip(*(tensor.unbind(0) for tensor in tensors), strict=True)
    return [matrix for part in parts for matrix in _matrices(part)]


def _chunks(size: int, *tensors: torch.Tensor) -> Iterator[tuple[slice, tuple[torch.Tensor, ...]]]:
    """Walk tensors [..., columns] together, in views of up to `size` rows, with the rows' place."""
    start = 0
    for group in _matrices(tensors):
        count = group[0].shape[0]
        for low in range(0, count, size):
            high = min(low + size, count)
            yield slice(start + low, start + high), tuple(matrix[low:high] for matrix in group)
        start += count


@functools.cache
def _triton() -> Any:
    """The module with the kernels; None without Triton. Not imported before it is needed."""
    try:
        return importlib.import_module("rollstore._gather_triton")
    except ModuleNotFoundError:
        return None


def _kernels(logits: torch.Tensor, plan: GatherPlan) -> Any:
    """The module with the kernels where they can do this work, else None."""
    if logits.device.type != "cuda" or os.environ.get("ROLLSTORE_TRITON") == "0":
        return None
    kernels = _triton()
    if kernels is None or not kernels.fits(logits, plan.topk_ids.shape[1]):
        return None
    return kernels if kernels.works(logits.device) else None


def _parts(
    plan: GatherPlan, whole: bool, *tensors: torch.Tensor
) -> Iterator[tuple[slice, tuple[torch.Tensor, ...]]]:
    """All rows at once, in whatever layout they are, or matrices of a chunk each."""
    return iter([(slice(None), tensors)]) if whole else _chunks(plan.chunk, *tensors)


def _from_top(
    logits: torch.Tensor, row_max: torch.Tensor, temperature: float | torch.Tensor
) -> torch.Tensor:
    """float32 (logits - row_max) / temperature, always in a buffer of its own.

    In this order: a difference of neighbours is exact, one of scaled and rounded ones is not.
    """
    scores = logits.to(torch.float32, copy=True).sub_(row_max)
    if isinstance(temperature, torch.Tensor) or temperature != 1.0:
        scores.div_(temperature)
    return scores


def _row_stats(logits: torch.Tensor, plan: GatherPlan) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [rows, 1] of logits [..., vocab]: the largest, and log of the sum relative to it."""
    if not plan.normalise:
        zeros = torch.zeros(len(plan.token_ids), 1, dtype=torch.float32, device=logits.device)
        return zeros, zeros
    kernels = _kernels(logits, plan)
    if kernels is not None:
        return cast(
            "tuple[torch.Tensor, torch.Tensor]", kernels.row_stats(logits, plan.temperature)
        )
    largest, at = logits.max(dim=1, keepdim=True)
    row_max = largest.float()
    # A row of nothing but -inf: every log-probability is -inf, not NaN.
    row_max.masked_fill_(row_max == _NEG_INF, 0.0)
    others = _from_top(logits, row_max, plan.temperature).exp_().scatter_(1, at, 0.0)
    return row_max, others.sum(dim=1, keepdim=True).log1p_()


def _pick(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """logits[row, ids[row, j]] of logits [..., vocab], and -inf where the id is -1."""
    shape = (*logits.shape[:-1], ids.shape[1])
    picked = logits.gather(-1, ids.clamp(min=0).view(shape)).view(ids.shape)
    return picked.masked_fill_(ids < 0, _NEG_INF)


def _gather_rows(logits: torch.Tensor, plan: GatherPlan) -> _Gathered:
    """Gather from logits [..., vocab] of any float dtype; with PyTorch's operations, one chunk."""
    row_max, log_sum = _row_stats(logits, plan)
    token, topk = (
        _from_top(_pick(logits, ids), row_max, plan.temperature).sub_(log_sum)
        for ids in (plan.token_ids.unsqueeze(1), plan.topk_ids)
    )
    return _Gathered(token.squeeze(1), topk, row_max, log_sum)


def _grad_rows(
    logits: torch.Tensor,
    target: torch.Tensor,
    rows: slice,
    whole: GatherPlan,
    stats: Sequence[torch.Tensor],
    grad_token: torch.Tensor,
    grad_topk: torch.Tensor,
) -> torch.Tensor:
    """Write the gradient of some rows, logits [..., vocab], to `target`, which may be the logits.

    Returns which rows [rows, 1] of it are exactly 0.
    """
    plan = whole.rows(rows)
    row_max, log_sum = (stat[rows] for stat in stats)
    token_ids = plan.token_ids.unsqueeze(1)
    at_token = grad_token[rows].unsqueeze(1).masked_fill(token_ids < 0, 0.0)
    at_topk = grad_topk[rows].masked_fill(plan.topk_ids < 0, 0.0)
    # The chain rule through logits / temperature, on the small side.
    at_token.div_(plan.temperature)
    at_topk.div_(plan.temperature)
    idle = (at_token == 0).logical_and_((at_topk == 0).all(dim=1, keepdim=True))
    kernels = _kernels(logits, plan)
    if kernels is not None:
        ids, at_ids = torch.cat((token_ids, plan.topk_ids), 1), torch.cat((at_token, at_topk), 1)
        kernels.write_gradient(
            logits, target, ids, at_ids, (row_max, log_sum), plan.temperature, plan.normalise
        )
        return idle
    if plan.normalise:
        total = at_token + at_topk.sum(dim=1, keepdim=True)
        grad = _from_top(logits, row_max, plan.temperature).sub_(log_sum).exp_().mul_(-total)
    else:
        grad = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device)
    # Separately: within each of the two a row's ids differ, so the order of the sum is settled.
    grad.scatter_add_(1, token_ids.clamp(min=0), at_token)
    grad.scatter_add_(1, plan.topk_ids.clamp(min=0), at_topk)
    # A fill, not a product with 0: a row that needs no gradient may hold NaN.
    target.copy_(grad.masked_fill_(idle, 0.0))
    return idle


class _Collector:
    """The outputs of all rows, filled chunk by chunk."""

    def __init__(self, plan: GatherPlan) -> None:
        rows, k = plan.topk_ids.shape
        new = partial(torch.empty, dtype=torch.float32, device=plan.topk_ids.device)
        self.out = _Gathered(new(rows), new(rows, k), new(rows, 1), new(rows, 1))

    def put(self, rows: slice, gathered: _Gathered) -> None:
        for whole, part in zip(self.out, gathered, strict=True):
            whole[rows] = part


def _no_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Products in the dtype of the hidden states, and the same one in forward and backward."""
    if device.type in ("cpu", "cuda"):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


class _FromLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, plan: GatherPlan, reuse_logits: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        collector = _Collector(plan)
        whole = not plan.normalise or _kernels(logits, plan) is not None
        for rows, (part,) in _parts(plan, whole, logits):
            collector.put(rows, _gather_rows(part, plan.rows(rows)))
        out = collector.out
        ctx.save_for_backward(logits, out.row_max, out.log_sum, *plan.tensors())
        ctx.plan, ctx.reuse_logits = plan, reuse_logits
        return out.token, out.topk

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_token: torch.Tensor, grad_topk: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        # Asking for them all makes autograd tell of any that was written to meanwhile.
        logits, *stats = ctx.saved_tensors[:3]
        # detach() shares the version counter: whoever else saved the logits gets autograd's own
        # error, as does a second backward, and never a wrong gradient.
        grad = (
            logits.detach()
            if ctx.reuse_logits
            else torch.empty_like(logits, memory_format=torch.contiguous_format)
        )
        whole = _kernels(logits, ctx.plan) is not None
        for rows, (part, target) in _parts(ctx.plan, whole, logits, grad):
            _grad_rows(part, target, rows, ctx.plan, stats, grad_token, grad_topk)
        return grad, None, None


class _FromHidden(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, plan: GatherPlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cast_weight = weight.to(hidden.dtype)
        collector = _Collector(plan)
        with _no_autocast(hidden.device):
            for rows, (part,) in _chunks(plan.chunk, hidden):
                collector.put(rows, _gather_rows(part @ cast_weight.t(), plan.rows(rows)))
        out = collector.out
        ctx.save_for_backward(hidden, weight, out.row_max, out.log_sum, *plan.tensors())
        ctx.plan = plan
        return out.token, out.topk

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_token: torch.Tensor, grad_topk: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        hidden, weight, *stats = ctx.saved_tensors[:4]
        needs_hidden, needs_weight, _ = ctx.needs_input_grad
        cast_weight = weight.to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        # Summed over the chunks in float32: bfloat16 would round after each of them.
        grad_weight = (
            torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
            if needs_weight
            else None
        )
        with _no_autocast(hidden.device):
            for rows, (part, target) in _chunks(ctx.plan.chunk, hidden, grad_hidden):
                grad = part @ cast_weight.t()
                idle = _grad_rows(grad, grad, rows, ctx.plan, stats, grad_token, grad_topk)
                if needs_hidden:
                    torch.mm(grad, cast_weight, out=target)
                if grad_weight is not None:
                    # Every row is summed into the weight's, and 0 * NaN would stay there.
                    grad_weight.add_(grad.t() @ part.masked_fill(idle, 0.0))
        return (
            grad_hidden if needs_hidden else None,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None,
        )


def gather_from_logits(
    logits: torch.Tensor, plan: GatherPlan, *, reuse_logits: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather from logits [..., vocab]: float32 [rows] and [rows, k], rows flattened."""
    gathered = _FromLogits.apply(logits, plan, reuse_logits)  # type: ignore[no-untyped-call]
    return cast("tuple[torch.Tensor, torch.Tensor]", gathered)


def gather_from_hidden(
    hidden: torch.Tensor, weight: torch.Tensor, plan: GatherPlan
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather from hidden [..., width] and weight [vocab, width]: as `gather_from_logits`."""
    gathered = _FromHidden.apply(hidden, weight, plan)  # type: ignore[no-untyped-call]
    return cast("tuple[torch.Tensor, torch.Tensor]", gathered)
