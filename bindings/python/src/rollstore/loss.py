"""The score-centering loss, for PyTorch 1.13 and later.

The loss of "Score Centering Stabilizes Off-policy Reinforcement Learning" (arXiv 2609.20807), with
the top-k approximation of its Appendix A. For one generated token `y`, with `p` the trainer's
distribution, `q` the distribution that sampled it, `H` the recorded candidates, `A` the advantage,
`f` the importance weight of a ratio and `sg` stop-gradient:

    rho   = max(1 - sum_H q, eps) / max(1 - sum_H p, eps)
    alpha = rho * f(1 / rho)
    c_v   = q_v f(p_v / q_v) - alpha p_v
    loss  = -A * (sg[f(p_y / q_y)] * log p_y - sum_{v in H} sg[c_v] * log p_v)

    mode "none": f(r) = 1      "tis": f(r) = min(r, tis_clip)
    mode "mis":  f(r) = r where mis_low <= r <= mis_high, else 0

With `H` the full vocabulary, mode "none" and a constant advantage, the expected gradient under `q`
is exactly 0. Only `log p_y` and `log p_v` carry gradient.

Three functions compute it, from most to least already done by the caller:

    score_centering_loss               log-probabilities of the token and the candidates, [T, k]
    score_centering_loss_from_logits   logits [T, vocab]
    score_centering_loss_from_hidden   hidden states [T, width] and the output layer's weight

Shapes. `[T]` stands for any leading shape, the same one for all arguments: `[tokens]` of a packed
batch, or `[batch, length]` of a padded one. `k` may be 0. Nothing is reduced: sum or average the
per-token loss as the training recipe says.

Memory. Beside the logits themselves, the forward pass from logits holds [T, k] and float32 work of
one chunk of rows; on an NVIDIA GPU with Triton, where kernels do the work, not even that. The
backward pass holds that and its answer, the gradient of the logits, [T, vocab] in their dtype;
`reuse_logits=True` writes the answer over the logits, so that not even that is a second tensor.
From hidden states nothing of [T, vocab] exists at any time. A softmax of more than one chunk exists
in none of them.

Missing values. A slot with id -1 takes no part, whatever its log-probability. A token with loss
mask 0 or advantage 0 has loss exactly 0 and gradient exactly 0, whatever its log-probabilities. For
other tokens a log-probability of -inf never gives NaN: where its coefficient is 0 its term is 0,
and elsewhere -1e30 stands for it in the value, while the gradient, which does not depend on it, is
that of the formula. NaN and +inf in the inputs of a token that trains are passed on, not hidden.

Arithmetic is float32 whatever the inputs' dtype. Weights are formed in log space, or without any
ratio at all (q min(p / q, c) = min(p, c q)), and cannot overflow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast, overload

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from rollstore._gather import gather_from_hidden, gather_from_logits
from rollstore._loss_arguments import (
    Recorded,
    check_recorded,
    check_reuse,
    check_trained_tokens,
    last,
    plan_for_hidden,
    plan_for_logits,
)
from rollstore._tensors import check_device, check_floating, check_shape

__all__ = [
    "ScoreCenteringMetrics",
    "gather_logprobs",
    "gather_logprobs_from_hidden",
    "group_advantages",
    "score_centering_loss",
    "score_centering_loss_from_hidden",
    "score_centering_loss_from_logits",
]

Mode = Literal["none", "tis", "mis"]

# Stands for log 0 in values: its products with coefficients and their sums stay finite in float32,
# and its exponential is 0.
_LOG_ZERO = -1e30


class ScoreCenteringMetrics(NamedTuple):
    """Detached float32 tensors [T], for logging; 0 where the loss mask is 0.

    correction: the term taken from the token's own, sum_H c_v log p_v, with
        c_v = q_v f(p_v / q_v) - alpha p_v; in nats.
    correction_size: sum_H |c_v|, how much probability the correction moves.
    rollout_head_mass, trainer_head_mass: sum_H q and sum_H p.
    rho, alpha: as in the module's formula; both have no unit.
    token_weight: f(p_y / q_y), the sampled token's weight.
    logprob_gap: |log p_y - log q_y|, in nats.
    """

    correction: torch.Tensor
    correction_size: torch.Tensor
    rollout_head_mass: torch.Tensor
    trainer_head_mass: torch.Tensor
    rho: torch.Tensor
    alpha: torch.Tensor
    token_weight: torch.Tensor
    logprob_gap: torch.Tensor


class _Weighting(NamedTuple):
    """The importance weight f, and the products of it that the loss needs."""

    mode: str
    tis_clip: float
    mis_low: float
    mis_high: float
    eps: float

    def _inside(self, log_ratio: torch.Tensor) -> torch.Tensor:
        low = math.log(self.mis_low) if self.mis_low > 0 else -math.inf
        return (log_ratio >= low) & (log_ratio <= math.log(self.mis_high))

    def of_token(self, log_ratio: torch.Tensor) -> torch.Tensor:
        """f(r), from log r."""
        if self.mode == "none":
            return torch.ones_like(log_ratio)
        if self.mode == "tis":
            return log_ratio.clamp(max=math.log(self.tis_clip)).exp()
        outside = self._inside(log_ratio).logical_not_()
        return log_ratio.masked_fill(outside, -math.inf).exp()

    def of_candidates(self, log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
        """q f(p / q): q, min(p, clip q), or p where the ratio is inside."""
        if self.mode == "none":
            return log_q.exp()
        if self.mode == "tis":
            return torch.minimum(log_p, log_q + math.log(self.tis_clip)).exp()
        return log_p.exp().masked_fill(self._inside(log_p - log_q).logical_not_(), 0.0)

    def of_tail(self, rho: torch.Tensor) -> torch.Tensor:
        """alpha = rho f(1 / rho): rho, min(1, clip rho), or 1 where 1 / rho is inside."""
        if self.mode == "none":
            return rho
        if self.mode == "tis":
            return (rho * self.tis_clip).clamp(max=1.0)
        return self._inside(-rho.log()).to(rho.dtype)


class _WithGradient(torch.autograd.Function):
    """The loss as computed, with a gradient given by constant coefficients.

    Autograd through the products would make NaN of a coefficient 0 and a log-probability -inf.
    """

    @staticmethod
    def forward(
        ctx: Any,
        token: torch.Tensor,
        topk: torch.Tensor,
        loss: torch.Tensor,
        token_grad: torch.Tensor,
        topk_grad: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(token_grad, topk_grad)
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
        token_grad, topk_grad = ctx.saved_tensors
        return grad * token_grad, grad.unsqueeze(-1) * topk_grad, None, None, None


def score_centering_loss(
    token_logprobs: torch.Tensor,
    trainer_topk_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    loss_mask: torch.Tensor,
    *,
    mode: Mode = "none",
    tis_clip: float = 2.0,
    mis_low: float = 0.5,
    mis_high: float = 5.0,
    eps: float = 1e-6,
    support: bool = False,
) -> tuple[torch.Tensor, ScoreCenteringMetrics]:
    """The loss of each token, from gathered log-probabilities.

    Log-probabilities are in nats, at the temperature the tokens were sampled at.

    token_logprobs: float [T], the trainer's log p of each sampled token; carries gradient.
    trainer_topk_logprobs: float [T, k], the trainer's log p of each candidate; carries gradient.
    rollout_logprobs: float [T], the recorded log q of each sampled token.
    topk_ids: integer [T, k], the recorded candidates, -1 in a slot without one. An id twice in a
        row would be counted twice.
    topk_logprobs: float [T, k], the recorded log q of each candidate.
    advantages: float [T].
    loss_mask: bool or integer [T], 1 on generated tokens and 0 on observations.
    mode, tis_clip, mis_low, mis_high, eps: as in the module's formula.
    support: the candidates are all the sampler could choose from (filtered sampling). `p` is then
        normalised over them here (arguments that differ from it by a constant a row, full
        log-probabilities or scaled logits, give the same), and there is no tail: rho = 1 and
        alpha = f(1), which is what the formula gives when both heads hold all mass. The gradient
        does not depend on that alpha, as sum_H p_v grad log p_v is 0.

    Returns (loss, metrics): float32 [T] with gradient, and `ScoreCenteringMetrics`.
    Raises TypeError or ValueError that begins with the argument's name: not a tensor, a dtype or
    shape or device that does not fit, a setting out of range, or, with `support`, a token that
    trains and has no candidates (this check alone reads a result back from the device).
    """
    weighting = _check_weighting(mode, tis_clip, mis_low, mis_high, eps)
    token = check_floating("token_logprobs", token_logprobs)
    shape = tuple(token.shape)
    topk = check_floating("trainer_topk_logprobs", trainer_topk_logprobs)
    check_shape("trainer_topk_logprobs", topk, (*shape, last(topk)), "token_logprobs', then k")
    recorded = check_recorded(
        rollout_logprobs, topk_ids, topk_logprobs, advantages, loss_mask, shape, "token_logprobs"
    )
    check_shape("topk_ids", recorded.topk_ids, topk.shape, "trainer_topk_logprobs'")
    check_device("trainer_topk_logprobs", topk, "token_logprobs", token)
    check_device("topk_ids", recorded.topk_ids, "token_logprobs", token)
    # Casts outside the autograd function give each gradient its own dtype again.
    token, topk = token.float(), topk.float()
    with torch.no_grad():
        loss, token_grad, topk_grad, metrics = _loss_and_gradient(
            token, topk, recorded, weighting, support
        )
    attached = _WithGradient.apply(  # type: ignore[no-untyped-call]
        token, topk, loss, token_grad, topk_grad
    )
    return cast(torch.Tensor, attached), metrics


def score_centering_loss_from_logits(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    loss_mask: torch.Tensor,
    *,
    temperature: float | torch.Tensor = 1.0,
    mode: Mode = "none",
    tis_clip: float = 2.0,
    mis_low: float = 0.5,
    mis_high: float = 5.0,
    eps: float = 1e-6,
    support: bool = False,
    chunk_tokens: int | None = None,
    reuse_logits: bool = False,
) -> tuple[torch.Tensor, ScoreCenteringMetrics]:
    """The loss of each token, from the trainer's logits.

    logits: float [T, vocab], any float dtype: row t predicts token_ids[t]; carries gradient.
    token_ids: integer [T], the sampled tokens; -1 is allowed where the loss mask is 0.
    temperature: the sampling temperature, a number or a float tensor [T]; positive.
    chunk_tokens: rows worked on at once; None is as many as make a float32 buffer of 64 MiB, on a
        GPU 256 MiB. Not used where kernels do the work, which need no such buffer.
    reuse_logits: backward writes the gradient over the logits, and holds no second [T, vocab]. For
        logits that nothing reads afterwards; they must not be a leaf of the graph. Whoever else
        saved them for backward, and a second backward, get autograd's error about a modified
        tensor.
    The other arguments, the result and the errors: as for `score_centering_loss`. Also ValueError
    for an id outside the vocabulary, and, with `support`, for a trained token outside its own
    support. These checks read two answers back from the device.
    """
    _check_weighting(mode, tis_clip, mis_low, mis_high, eps)
    plan = plan_for_logits(logits, token_ids, topk_ids, temperature, chunk_tokens, not support)
    shape = tuple(logits.shape[:-1])
    recorded = check_recorded(
        rollout_logprobs, topk_ids, topk_logprobs, advantages, loss_mask, shape, "logits"
    )
    check_trained_tokens(token_ids, recorded, support)
    check_reuse(logits, reuse_logits)
    token, topk = gather_from_logits(logits, plan, reuse_logits=reuse_logits)
    return score_centering_loss(
        token.view(shape),
        topk.view(topk_ids.shape),
        *recorded.arguments(),
        mode=mode,
        tis_clip=tis_clip,
        mis_low=mis_low,
        mis_high=mis_high,
        eps=eps,
        support=support,
    )


def score_centering_loss_from_hidden(
    hidden: torch.Tensor,
    lm_head_weight: torch.Tensor,
    token_ids: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    loss_mask: torch.Tensor,
    *,
    temperature: float | torch.Tensor = 1.0,
    mode: Mode = "none",
    tis_clip: float = 2.0,
    mis_low: float = 0.5,
    mis_high: float = 5.0,
    eps: float = 1e-6,
    support: bool = False,
    chunk_tokens: int | None = None,
) -> tuple[torch.Tensor, ScoreCenteringMetrics]:
    """The loss of each token, from hidden states: the logits never exist as a whole.

    Logits are hidden @ lm_head_weight^T, made a chunk at a time, and again in backward; there is no
    bias. The product is taken in the dtype of `hidden` (a weight of another dtype is cast once, as
    autocast does; autocast itself is off inside), everything after it in float32. The gradient of
    the weight is summed in float32, [vocab, width].

    hidden: float [T, width], the input of the output layer: row t predicts token_ids[t]; carries
        gradient.
    lm_head_weight: float [vocab, width]; carries gradient.
    chunk_tokens: rows worked on at once; None is as many as make a 512 MiB float32 buffer.
    The other arguments, the result and the errors: as for `score_centering_loss_from_logits`.
    """
    _check_weighting(mode, tis_clip, mis_low, mis_high, eps)
    plan = plan_for_hidden(
        hidden, lm_head_weight, token_ids, topk_ids, temperature, chunk_tokens, not support
    )
    shape = tuple(hidden.shape[:-1])
    recorded = check_recorded(
        rollout_logprobs, topk_ids, topk_logprobs, advantages, loss_mask, shape, "hidden"
    )
    check_trained_tokens(token_ids, recorded, support)
    token, topk = gather_from_hidden(hidden, lm_head_weight, plan)
    return score_centering_loss(
        token.view(shape),
        topk.view(topk_ids.shape),
        *recorded.arguments(),
        mode=mode,
        tis_clip=tis_clip,
        mis_low=mis_low,
        mis_high=mis_high,
        eps=eps,
        support=support,
    )


def gather_logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    temperature: float | torch.Tensor = 1.0,
    chunk_tokens: int | None = None,
    reuse_logits: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log_softmax(logits / temperature) of a few ids a row, with no second [T, vocab] tensor.

    Arguments, memory and errors: as for `score_centering_loss_from_logits`.
    Returns (float32 [T], float32 [T, k]) with gradient: the log-probabilities of token_ids and of
    topk_ids, -inf where the id is -1. These are the first two arguments of `score_centering_loss`.
    """
    plan = plan_for_logits(logits, token_ids, topk_ids, temperature, chunk_tokens, True)
    check_reuse(logits, reuse_logits)
    token, topk = gather_from_logits(logits, plan, reuse_logits=reuse_logits)
    return token.view(token_ids.shape), topk.view(topk_ids.shape)


def gather_logprobs_from_hidden(
    hidden: torch.Tensor,
    lm_head_weight: torch.Tensor,
    token_ids: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    temperature: float | torch.Tensor = 1.0,
    chunk_tokens: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gather_logprobs` of hidden @ lm_head_weight^T, whose logits never exist as a whole.

    Arguments, memory and errors: as for `score_centering_loss_from_hidden`.
    """
    plan = plan_for_hidden(
        hidden, lm_head_weight, token_ids, topk_ids, temperature, chunk_tokens, True
    )
    token, topk = gather_from_hidden(hidden, lm_head_weight, plan)
    return token.view(token_ids.shape), topk.view(topk_ids.shape)


@overload
def group_advantages(rewards: torch.Tensor, group_index: Any) -> torch.Tensor: ...
@overload
def group_advantages(
    rewards: np.ndarray[Any, Any] | Sequence[float], group_index: Any
) -> np.ndarray[Any, np.dtype[np.float32]]: ...
def group_advantages(rewards: Any, group_index: Any) -> Any:
    """Each reward less the mean reward of its group; not divided by the standard deviation.

    rewards: [N] numbers, one for each sample: a tensor, an array or a sequence.
    group_index: [N] integers; samples with one index are of one group. Groups need not be
        neighbours nor of one size. A group of one has advantage 0.
    Returns float32 [N]: a tensor on the rewards' device if they are one, else a NumPy array. Equal
    rewards in a group give exactly 0, the value at which the loss leaves a token out.
    Raises ValueError: not one-dimensional, of different length, or a reward that is NaN or infinite
    (its whole group would be lost); TypeError: not numbers, or a group index that is no integer.
    """
    try:
        values = _to_numpy(rewards).astype(np.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(f"rewards: numbers are needed ({error})") from error
    groups = _to_numpy(group_index)
    if values.ndim != 1:
        raise ValueError(f"rewards: shape [N] is needed, got {values.shape}")
    if groups.shape != values.shape:
        raise ValueError(
            f"group_index: shape {values.shape} is needed (rewards'), got {groups.shape}"
        )
    if values.size and not np.issubdtype(groups.dtype, np.integer):
        raise TypeError(f"group_index: an integer dtype is needed, got {groups.dtype}")
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        raise ValueError(f"rewards: a finite number is needed, got {values[bad[0]]} at {bad[0]}")
    _, first, member = np.unique(groups, return_index=True, return_inverse=True)
    # Relative to one of its own rewards, a group of equal ones has a mean of exactly 0.
    relative = values - values[first][member]
    mean = np.bincount(member, weights=relative) / np.bincount(member)
    centred = (relative - mean[member]).astype(np.float32)
    if isinstance(rewards, torch.Tensor):
        return torch.from_numpy(centred).to(rewards.device)
    return centred


def _loss_and_gradient(
    token: torch.Tensor,
    topk: torch.Tensor,
    recorded: Recorded,
    weighting: _Weighting,
    support: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, ScoreCenteringMetrics]:
    """Loss [T], its gradients on `token` [T] and `topk` [T, k], and the metrics; all float32."""
    generated, trains = recorded.generated, recorded.trains
    valid = (recorded.topk_ids >= 0) & generated.unsqueeze(-1)
    log_p, log_q = _logs(topk, valid), _logs(recorded.topk_logprobs, valid)
    log_p_y, log_q_y = _logs(token, generated), _logs(recorded.rollout_logprobs, generated)
    if support:
        some = valid.any(dim=-1)
        if bool((trains & ~some).any()):
            raise ValueError("topk_ids: a token that trains has no candidates (support mode)")
        log_total = torch.logsumexp(log_p, dim=-1).masked_fill(~some, 0.0)
        log_p_y = log_p_y - log_total
        log_p = (log_p - log_total.unsqueeze(-1)).masked_fill(~valid, _LOG_ZERO)
        rho = torch.ones_like(log_p_y)
    else:
        rho = _tail_mass(log_q, weighting.eps) / _tail_mass(log_p, weighting.eps)
    alpha = weighting.of_tail(rho)
    weight = weighting.of_token(log_p_y - log_q_y)
    p = log_p.exp()
    centre = weighting.of_candidates(log_p, log_q) - alpha.unsqueeze(-1) * p
    correction = (centre * log_p).sum(dim=-1)

    advantages = recorded.advantages.float()
    loss = (-advantages * (weight * log_p_y - correction)).masked_fill(~trains, 0.0)
    token_grad = (-advantages * weight).masked_fill(~trains, 0.0)
    topk_grad = (advantages.unsqueeze(-1) * centre).masked_fill(~(valid & trains.unsqueeze(-1)), 0)
    if support:
        # The gradient on what was given, before it was normalised over the support.
        through = (token_grad + topk_grad.sum(dim=-1)).unsqueeze(-1)
        topk_grad = (topk_grad - p * through).masked_fill(~trains.unsqueeze(-1), 0.0)
    metrics = ScoreCenteringMetrics(
        correction=correction,
        correction_size=centre.abs().sum(dim=-1),
        rollout_head_mass=log_q.exp().sum(dim=-1),
        trainer_head_mass=p.sum(dim=-1),
        rho=rho,
        alpha=alpha,
        token_weight=weight,
        logprob_gap=(log_p_y - log_q_y).abs(),
    )
    shown = ScoreCenteringMetrics(*(m.masked_fill(~generated, 0.0) for m in metrics))
    return loss, token_grad, topk_grad, shown


def _logs(values: torch.Tensor, taking_part: torch.Tensor) -> torch.Tensor:
    """float32 logs with a finite stand-in for log 0, which also fills what takes no part."""
    values = values.float()
    return values.masked_fill(~taking_part | (values == -math.inf), _LOG_ZERO)


def _tail_mass(logs: torch.Tensor, eps: float) -> torch.Tensor:
    """max(1 - sum exp(logs), eps) over the last dimension.

    1 - exp(largest) as one step: near 1 the sum alone would lose a small tail to rounding.
    """
    if logs.shape[-1] == 0:
        return torch.ones(logs.shape[:-1], dtype=logs.dtype, device=logs.device)
    largest, at = logs.max(dim=-1, keepdim=True)
    others = logs.exp().scatter(-1, at, 0.0).sum(dim=-1)
    return (-torch.expm1(largest.squeeze(-1)) - others).clamp(min=eps)


def _check_weighting(
    mode: str, tis_clip: float, mis_low: float, mis_high: float, eps: float
) -> _Weighting:
    if mode not in ("none", "tis", "mis"):
        raise ValueError(f'mode: "none", "tis" or "mis" is needed, got {mode!r}')
    largest = torch.finfo(torch.float32).max
    for name, value in (
        ("tis_clip", tis_clip),
        ("mis_low", mis_low),
        ("mis_high", mis_high),
        ("eps", eps),
    ):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name}: a number is needed, got {type(value).__name__}")
        positive = value > 0 or (name == "mis_low" and value == 0)
        if not positive or not value <= largest:
            raise ValueError(f"{name}: a positive finite number is needed, got {value}")
    if mis_low > mis_high:
        raise ValueError(f"mis_low: {mis_low} is over mis_high, {mis_high}")
    if eps > 1:
        raise ValueError(f"eps: at most 1, the whole mass, is needed, got {eps}")
    return _Weighting(mode, float(tis_clip), float(mis_low), float(mis_high), float(eps))


def _to_numpy(values: Any) -> np.ndarray[Any, Any]:
    if not isinstance(values, torch.Tensor):
        return np.asarray(values)
    values = values.detach().cpu()
    # NumPy has no bfloat16.
    exact: Any = values.double() if values.is_floating_point() else values
    array: np.ndarray[Any, Any] = exact.numpy()
    return array
