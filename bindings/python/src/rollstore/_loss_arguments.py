"""Arguments of the loss functions: checked, and brought to the shapes the work is done in.

A check that needs a tensor's values costs a wait for the device, so the checks of one kind share
one answer.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from rollstore._gather import HIDDEN_CHUNK_ELEMENTS, LOGITS_CHUNK_ELEMENTS, GatherPlan
from rollstore._tensors import (
    check_device,
    check_floating,
    check_ids,
    check_mask,
    check_shape,
)


class Recorded(NamedTuple):
    """The recorded side of the loss, checked. `trains`: loss mask and advantage are not 0."""

    rollout_logprobs: torch.Tensor
    topk_ids: torch.Tensor
    topk_logprobs: torch.Tensor
    advantages: torch.Tensor
    generated: torch.Tensor
    trains: torch.Tensor

    def arguments(self) -> tuple[torch.Tensor, ...]:
        return self[:5]


def last(tensor: torch.Tensor) -> int:
    """Size of the last dimension, which is k."""
    return tensor.shape[-1] if tensor.dim() else 0


def check_recorded(
    rollout_logprobs: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    loss_mask: torch.Tensor,
    shape: tuple[int, ...],
    like: str,
) -> Recorded:
    ids = check_ids("topk_ids", topk_ids)
    check_shape("topk_ids", ids, (*shape, last(ids)), f"{like}' leading shape, then k")
    generated = check_mask("loss_mask", loss_mask)
    recorded = Recorded(
        check_floating("rollout_logprobs", rollout_logprobs).detach(),
        ids,
        check_floating("topk_logprobs", topk_logprobs).detach(),
        check_floating("advantages", advantages).detach(),
        generated,
        generated,
    )
    for name in ("rollout_logprobs", "advantages"):
        check_shape(name, getattr(recorded, name), shape, f"{like}' leading shape")
    check_shape("loss_mask", generated, shape, f"{like}' leading shape")
    check_shape("topk_logprobs", recorded.topk_logprobs, ids.shape, "topk_ids'")
    for name in ("rollout_logprobs", "topk_logprobs", "advantages"):
        check_device(name, getattr(recorded, name), "topk_ids", ids)
    check_device("loss_mask", generated, "topk_ids", ids)
    return recorded._replace(trains=generated & (recorded.advantages != 0))


def check_trained_tokens(token_ids: torch.Tensor, recorded: Recorded, support: bool) -> None:
    """Each token that trains has an id and, in support mode, lies in its own support."""
    wrong = recorded.trains & (token_ids < 0)
    if support:
        member = (recorded.topk_ids == token_ids.unsqueeze(-1)).any(dim=-1)
        wrong = recorded.trains & ~member
    if bool(wrong.any()):
        at = tuple(int(i) for i in wrong.nonzero()[0])
        reason = "is not among its candidates (support mode)" if support else "has id -1"
        raise ValueError(f"token_ids: the token at {list(at)} trains and {reason}")


def check_reuse(logits: torch.Tensor, reuse_logits: bool) -> None:
    if reuse_logits and logits.requires_grad and logits.is_leaf:
        raise ValueError(
            "reuse_logits: the logits are a leaf, and their gradient would be the leaf itself; "
            "pass the output of a layer"
        )


def plan_for_logits(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    topk_ids: torch.Tensor,
    temperature: float | torch.Tensor,
    chunk_tokens: int | None,
    normalise: bool,
) -> GatherPlan:
    check_floating("logits", logits)
    if logits.dim() < 2 or logits.shape[-1] == 0:
        raise ValueError(f"logits: shape [T, vocab] is needed, got {tuple(logits.shape)}")
    elements = LOGITS_CHUNK_ELEMENTS["cuda" if logits.is_cuda else "cpu"]
    chunk = _check_chunk(chunk_tokens, elements // logits.shape[-1])
    return _plan(
        "logits", logits, logits.shape[-1], token_ids, topk_ids, temperature, chunk, normalise
    )


def plan_for_hidden(
    hidden: torch.Tensor,
    lm_head_weight: torch.Tensor,
    token_ids: torch.Tensor,
    topk_ids: torch.Tensor,
    temperature: float | torch.Tensor,
    chunk_tokens: int | None,
    normalise: bool,
) -> GatherPlan:
    check_floating("hidden", hidden)
    check_floating("lm_head_weight", lm_head_weight)
    if hidden.dim() < 2 or hidden.shape[-1] == 0:
        raise ValueError(f"hidden: shape [T, width] is needed, got {tuple(hidden.shape)}")
    if lm_head_weight.dim() != 2 or lm_head_weight.shape[0] == 0:
        raise ValueError(
            f"lm_head_weight: shape [vocab, width] is needed, got {tuple(lm_head_weight.shape)}"
        )
    vocab = lm_head_weight.shape[0]
    check_shape(
        "lm_head_weight", lm_head_weight, (vocab, hidden.shape[-1]), "vocab, hidden's width"
    )
    check_device("lm_head_weight", lm_head_weight, "hidden", hidden)
    chunk = _check_chunk(chunk_tokens, HIDDEN_CHUNK_ELEMENTS // vocab)
    return _plan("hidden", hidden, vocab, token_ids, topk_ids, temperature, chunk, normalise)


def _plan(
    name: str,
    rows: torch.Tensor,
    vocab: int,
    token_ids: torch.Tensor,
    topk_ids: torch.Tensor,
    temperature: float | torch.Tensor,
    chunk: int,
    normalise: bool,
) -> GatherPlan:
    shape = tuple(rows.shape[:-1])
    count = math.prod(shape)
    check_shape("token_ids", check_ids("token_ids", token_ids), shape, f"{name}' leading shape")
    ids = check_ids("topk_ids", topk_ids)
    check_shape("topk_ids", ids, (*shape, last(ids)), f"{name}' leading shape, then k")
    check_device("token_ids", token_ids, name, rows)
    check_device("topk_ids", ids, name, rows)
    at_temperature, cold = _check_temperature(temperature, name, rows)
    # One answer from the device for all three: an id out of range would end a CUDA context.
    bad_token = ((token_ids < -1) | (token_ids >= vocab)).any()
    bad_topk = ((ids < -1) | (ids >= vocab)).any()
    token_wrong, topk_wrong, temperature_wrong = torch.stack((bad_token, bad_topk, cold)).tolist()
    for wrong, argument in ((token_wrong, "token_ids"), (topk_wrong, "topk_ids")):
        if wrong:
            raise ValueError(f"{argument}: an id is outside [-1, {vocab})")
    if temperature_wrong:
        raise ValueError("temperature: a positive finite number is needed for every token")
    return GatherPlan(
        token_ids.reshape(count).long(),
        ids.reshape(count, ids.shape[-1]).long(),
        at_temperature,
        chunk,
        normalise,
    )


def _check_temperature(
    temperature: float | torch.Tensor, name: str, rows: torch.Tensor
) -> tuple[float | torch.Tensor, torch.Tensor]:
    """The temperature as a plan holds it, and whether any is not positive and finite."""
    none_wrong = torch.zeros((), dtype=torch.bool, device=rows.device)
    if isinstance(temperature, torch.Tensor):
        tensor = check_floating("temperature", temperature).detach()
        check_shape("temperature", tensor, rows.shape[:-1], f"{name}' leading shape")
        check_device("temperature", tensor, name, rows)
        column = tensor.float().reshape(-1, 1)
        return column, ~((column > 0) & (column < math.inf)).all()
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)):
        raise TypeError(
            f"temperature: a number or a tensor is needed, got {type(temperature).__name__}"
        )
    float32 = torch.finfo(torch.float32)  # in which it is worked with
    if not float32.tiny <= temperature <= float32.max:
        raise ValueError(f"temperature: a positive finite number is needed, got {temperature}")
    return float(temperature), none_wrong


def _check_chunk(chunk_tokens: int | None, default: int) -> int:
    if chunk_tokens is None:
        return max(1, default)
    if isinstance(chunk_tokens, bool) or not isinstance(chunk_tokens, int):
        raise TypeError(f"chunk_tokens: an integer is needed, got {type(chunk_tokens).__name__}")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens: at least 1 is needed, got {chunk_tokens}")
    return chunk_tokens
