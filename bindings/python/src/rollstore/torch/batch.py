"""Batches for training: the store's arrays as tensors, with rewards and advantages."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict

import numpy as np
import torch

from rollstore._errors import AlignmentError, LimitError
from rollstore.loss import group_advantages
from rollstore.torch.errors import RewardError

if TYPE_CHECKING:
    from rollstore._batch import Sample, SampleInfo
    from rollstore._snapshot import Session, Snapshot

__all__ = ["BatchArguments", "TrainingBatch", "assemble", "sample_dicts"]


class BatchArguments(TypedDict, total=False):
    """How samples are made and put together; as Snapshot.batch says.

    layout: "packed" (one after another, with cu_seqlens; the default) or "padded".
    top_k: candidates a token; 0, the default: the widest turn's of the batch.
    trim_max: most tokens at a turn's end that the next prompt may leave out; 1 by default.
    token_max: leave out the last turns until a sample fits; 0, the default: no limit.
    pad_id, length, response_length: of padded rows.
    threads: how many copy at once; 1 by default.
    """

    layout: Literal["packed", "padded"]
    top_k: int
    trim_max: int
    token_max: int
    pad_id: int
    length: int | None
    response_length: int | None
    threads: int


def check_arguments(arguments: BatchArguments) -> BatchArguments:
    """TypeError for a name that is no argument of a batch, ValueError for a layout that is none."""
    unknown = set(arguments) - set(BatchArguments.__annotations__)
    if unknown:
        raise TypeError(f"{', '.join(sorted(unknown))}: no such argument")
    if arguments.get("layout", "packed") not in ("packed", "padded"):
        raise ValueError(f'layout: {arguments["layout"]!r} is none of "packed", "padded"')
    return arguments


@dataclasses.dataclass(eq=False)
class TrainingBatch:
    """The samples of B sessions as tensors, in memory of their own.

    layout "packed": tokens int32 [sum T], cu_seqlens int32 [B + 1] where each begins,
        cu_response_seqlens int32 [B + 1]; loss_mask uint8, rollout_logprobs float32 [sum R],
        topk_ids int32, topk_logprobs float32 [sum R, K].
    layout "padded": tokens int32 [B, L], token_counts int32 [B]; response_counts int32 [B],
        loss_mask uint8, rollout_logprobs float32 [B, RL], topk_ids int32, topk_logprobs float32
        [B, RL, K]. Filled on the right with pad_id, 0, 0.0, -1, -inf.
    What belongs to the other layout is None. T counts all tokens of a sample, R those after the
    first prompt.

    rewards: float32 [B], NaN for none.
    advantages: float32 [B], each reward less the mean of its group; None without a group size.
    group_indices: int64 [B], -1 for none. sequences: int64 [B], places in the ready order.
    samples: each one's sizes and session, in the order of the batch.
    """

    layout: Literal["packed", "padded"]
    tokens: torch.Tensor
    loss_mask: torch.Tensor
    rollout_logprobs: torch.Tensor
    topk_ids: torch.Tensor
    topk_logprobs: torch.Tensor
    cu_seqlens: torch.Tensor | None
    cu_response_seqlens: torch.Tensor | None
    token_counts: torch.Tensor | None
    response_counts: torch.Tensor | None
    rewards: torch.Tensor
    advantages: torch.Tensor | None
    group_indices: torch.Tensor
    sequences: torch.Tensor
    samples: list[SampleInfo]

    def __len__(self) -> int:
        """B, the number of sessions."""
        return len(self.samples)

    @property
    def session_ids(self) -> list[str]:
        """The sessions' names."""
        return [sample.session.id for sample in self.samples]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that the batch has, by name."""
        named = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: it for name, it in named.items() if isinstance(it, torch.Tensor)}

    def response_advantages(self) -> torch.Tensor:
        """Each session's advantage at each of its response tokens: float32 [sum R] or [B, RL].

        ValueError where there are no advantages.
        """
        if self.advantages is None:
            raise ValueError("the batch has no advantages: it was made without a group size")
        if self.cu_response_seqlens is None:
            return self.advantages[:, None].expand(self.rollout_logprobs.shape)
        counts = self.cu_response_seqlens.diff().long()
        size = self.rollout_logprobs.shape[0]
        return torch.repeat_interleave(self.advantages, counts, output_size=size)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """The batch with all tensors on a device."""
        return self._with(
            {name: it.to(device, non_blocking=non_blocking) for name, it in self.tensors.items()}
        )

    def pin_memory(self) -> Self:
        """The batch in page-locked memory; DataLoader(pin_memory=True) calls it."""
        return self._with({name: it.pin_memory() for name, it in self.tensors.items()})

    def _with(self, tensors: dict[str, torch.Tensor]) -> Self:
        changed: Any = tensors  # a name's type is its field's
        return dataclasses.replace(self, **changed)

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.tokens.shape))
        return f"<rollstore.torch.{type(self).__name__}: {len(self)} sessions, {shape} tokens>"


def assemble(
    snapshot: Snapshot,
    units: Sequence[Sequence[Session]],
    arguments: BatchArguments,
    *,
    grouped: bool,
    pin_memory: bool = False,
) -> TrainingBatch:
    """One batch of the sessions of several units.

    grouped: the units are whole groups, and advantages are wanted.
    Errors have the session's place in the batch as `index`.
    """
    sessions = [session for unit in units for session in unit]
    advantages = None
    if grouped:
        advantages = torch.from_numpy(unit_advantages(units))
    made = snapshot.batch(sessions, torch=True, pin_memory=pin_memory, **arguments)
    found: dict[str, Any] = {name: getattr(made, name) for name in _OF_THE_STORE}
    batch = TrainingBatch(
        layout=made.layout,
        **found,
        rewards=torch.from_numpy(made.rewards),
        advantages=advantages,
        group_indices=torch.from_numpy(made.group_indices),
        sequences=torch.tensor(made.sequences, dtype=torch.int64),
        samples=made.samples,
    )
    if not pin_memory:
        return batch
    pinned = set(made.arrays)
    return batch._with(
        {name: it.pin_memory() for name, it in batch.tensors.items() if name not in pinned}
    )


# What a session can be at fault for. Anything else is a fault of the store or the call.
UNUSABLE = (AlignmentError, LimitError, RewardError)


def unit_at(units: Sequence[Sequence[Any]], place: int) -> int:
    """Which unit has the session at that place of the batch."""
    for number, unit in enumerate(units):
        if place < len(unit):
            return number
        place -= len(unit)
    raise IndexError(f"no session at place {place} after the last")


_OF_THE_STORE = (
    "tokens",
    "loss_mask",
    "rollout_logprobs",
    "topk_ids",
    "topk_logprobs",
    "cu_seqlens",
    "cu_response_seqlens",
    "token_counts",
    "response_counts",
)


def unit_advantages(units: Sequence[Sequence[Session]]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """float32 [sessions]: each reward less the mean of its unit. RewardError."""
    rewards: list[float] = []
    for unit in units:
        for session in unit:
            # The store takes an infinite one from writers in C.
            if session.reward is None or not math.isfinite(session.reward):
                had = "no reward" if session.reward is None else f"the reward {session.reward}"
                raise RewardError(
                    f'session "{session.id}" ({session.status}) was sealed with {had}, and an '
                    "advantage needs a finite one. statuses= leaves out sessions by their status",
                    kind="reward",
                    field="reward",
                    index=len(rewards),
                )
            rewards.append(session.reward)
    # By unit, not by group_index: two units of one batch may have the same.
    numbers = np.repeat(np.arange(len(units)), [len(unit) for unit in units])
    return group_advantages(np.array(rewards, np.float64), numbers)


def sample_dicts(
    unit: Sequence[Session], arguments: BatchArguments, *, grouped: bool
) -> list[dict[str, Any]]:
    """The samples of one unit, each as a dict of tensors and plain values.

    tokens int32 [T]; loss_mask uint8, rollout_logprobs float32 [R]; topk_ids int32, topk_logprobs
    float32 [R, K]; reward (float, NaN for none), advantage (float; only in whole groups),
    session_id, sequence, status, group_index and index (-1 for none), prompt_length,
    response_length, weight_version_min and weight_version_max (-1 for none).
    """
    names = ("top_k", "trim_max", "token_max")
    chosen = {name: value for name, value in arguments.items() if name in names}
    advantages: list[Any] = [None] * len(unit)
    if grouped:
        advantages = [float(advantage) for advantage in unit_advantages([unit])]
    samples = []
    for session, advantage in zip(unit, advantages):
        made: Any = session.sample
        samples.append(_sample_dict(made(torch=True, **chosen), advantage))
    return samples


def _sample_dict(sample: Sample, advantage: float | None) -> dict[str, Any]:
    info = sample.info
    found = {
        "tokens": sample.tokens,
        "loss_mask": sample.loss_mask,
        "rollout_logprobs": sample.rollout_logprobs,
        "topk_ids": sample.topk_ids,
        "topk_logprobs": sample.topk_logprobs,
        "reward": math.nan if sample.reward is None else sample.reward,
        "session_id": sample.session_id,
        "sequence": sample.sequence,
        "status": sample.status,
        "group_index": -1 if sample.group_index is None else sample.group_index,
        "index": -1 if sample.index is None else sample.index,
        "prompt_length": sample.prompt_length,
        "response_length": sample.response_length,
        "weight_version_min": _number(info.weight_version_min),
        "weight_version_max": _number(info.weight_version_max),
    }
    if advantage is not None:
        found["advantage"] = advantage
    return found


def _number(version: int | None) -> int:
    return -1 if version is None else version
