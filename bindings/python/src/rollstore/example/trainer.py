"""The trainer: takes sealed sessions, computes the loss, steps, publishes, releases."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

import rollstore
from rollstore.example.policy import Policy, publish
from rollstore.example.sampler import Task
from rollstore.loss import group_advantages, score_centering_loss_from_logits


class Measured(NamedTuple):
    """One step: how far the policy has moved, and how far sampler and trainer are apart."""

    step: int
    drift: float  # KL(the policy at the beginning, now), nats a token
    entropy: float  # of the policy now, nats a token
    mismatch: float  # mean |log p - log q| of sampled tokens


def response_rows(batch: rollstore.Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a padded batch's response stands in its tokens.

    Returns rows int64 [B, RL], the position whose logits predict each response token, and filled
    bool [B, RL], false where the response is padded.
    """
    tokens, responses = batch.token_counts.long(), batch.response_counts.long()
    place = torch.arange(batch.loss_mask.shape[1])[None]
    rows = (tokens - responses)[:, None] + place - 1
    return rows.clamp(max=batch.tokens.shape[1] - 1), place < responses[:, None]


def train_on(
    policy: Policy, first: Policy, batch: rollstore.Batch, centred: bool
) -> tuple[torch.Tensor, Measured]:
    """The loss of a padded batch, and what is worth printing."""
    rows, filled = response_rows(batch)
    batch_rows = torch.arange(len(batch))[:, None]
    tokens = batch.tokens.long()
    logits = policy(tokens)[batch_rows, rows]
    targets = tokens[batch_rows, (rows + 1).clamp(max=tokens.shape[1] - 1)].int()
    mask = batch.loss_mask * filled
    advantages = torch.as_tensor(group_advantages(batch.rewards, batch.group_indices))
    k = batch.topk_ids.shape[-1] if centred else 0  # without candidates: the plain policy gradient
    loss, metrics = score_centering_loss_from_logits(
        logits,
        targets,
        batch.rollout_logprobs,
        batch.topk_ids[..., :k],
        batch.topk_logprobs[..., :k],
        advantages[:, None].expand_as(mask),
        mask,
    )
    with torch.no_grad():
        spoken = mask.bool()
        now = torch.log_softmax(logits[spoken], -1)
        then = torch.log_softmax(first(tokens)[batch_rows, rows][spoken], -1)
        measured = Measured(
            step=0,
            drift=float((then.exp() * (then - now)).sum(-1).mean()),
            entropy=float(-(now.exp() * now).sum(-1).mean()),
            mismatch=float(metrics.logprob_gap[spoken].mean()),
        )
    return loss.sum() / mask.sum(), measured


def run(
    path: str,
    folder: Path,
    task: Task,
    steps: int,
    learning_rate: float,
    centred: bool,
    report: Callable[[Measured], None],
) -> list[Measured]:
    """Train for `steps` steps on what the samplers put into the store."""
    torch.manual_seed(task.seed)
    policy, first = Policy(), Policy()
    first.load_state_dict(policy.state_dict())
    optimizer = torch.optim.SGD(policy.parameters(), lr=learning_rate)
    history = []
    with rollstore.open(path, "w") as store:
        consumer = store.consumer("trainer")
        for step in range(steps):
            publish(policy, folder, step)
            leases: list[rollstore.Lease] = []
            while len(leases) < task.groups * task.group_size:
                leases += consumer.take(task.groups * task.group_size - len(leases), timeout=60)
            with store.snapshot() as snapshot:
                batch = snapshot.batch(
                    [lease.session(snapshot) for lease in leases], layout="padded", torch=True
                )
            loss, measured = train_on(policy, first, batch, centred)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            consumer.acknowledge(leases)
            consumer.commit(consumer.place())  # a real trainer writes the place into its checkpoint
            store.release_consumed()
            history.append(measured._replace(step=step + 1))
            report(history[-1])
    return history
