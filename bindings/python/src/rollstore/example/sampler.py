"""A sampler process: episodes with the environment, and replies in an engine's flat format."""

from __future__ import annotations

import base64
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rollstore
from rollstore.example.policy import HEADS, TAILS, WORDS, Policy, published, rounded


@dataclass(frozen=True)
class Task:
    """What all processes of a run agree on. Counts are of tokens, turns and sessions."""

    groups: int = 8  # groups a step
    group_size: int = 8
    turns: int = 4
    turn_tokens: int = 5
    prompt_tokens: int = 3
    top_k: int = 16
    levels: int = 2  # of the samplers' rounded weights; 0: exact
    stale: int = 0  # versions that samplers stay behind
    seed: int = 0


def flat_reply(
    tokens: torch.Tensor,
    logprobs: torch.Tensor,
    ids: torch.Tensor,
    values: torch.Tensor,
    version: int,
) -> bytes:
    """A chat reply as an engine sends it when asked for flat candidates in base64.

    tokens int64 [n], logprobs float32 [n]; ids int64 [n, k], values float32 [n, k].
    """

    def text(array: Any, dtype: str) -> str:
        return base64.b64encode(array.numpy().astype(dtype).tobytes()).decode()

    sampled = [[float(p), int(t), None] for p, t in zip(logprobs, tokens, strict=True)]
    meta = {
        "weight_version": str(version),
        "finish_reason": {"type": "stop"},
        "output_token_logprobs": sampled,
        "output_top_logprobs_idx_flat_b64": text(ids, "<i4"),
        "output_top_logprobs_idx_flat_b64_dtype": "int32",
        "output_top_logprobs_val_flat_b64": text(values, "<f4"),
        "output_top_logprobs_val_flat_b64_dtype": "float32",
        "output_top_logprobs_shape": list(ids.shape),
        "output_top_logprobs_null_prefix": 0,
    }
    choice = {"index": 0, "finish_reason": "stop", "meta_info": meta}
    return json.dumps({"object": "chat.completion", "choices": [choice]}).encode()


@torch.no_grad()
def play_group(
    policy: Policy, version: int, task: Task, group: int, store: rollstore.Store
) -> None:
    """Play a group's episodes at once, put their turns into the store and seal them."""
    draw = torch.Generator().manual_seed(task.seed * 1_000_003 + group)
    size = task.group_size
    prompt = torch.randint(0, WORDS, (1, task.prompt_tokens), generator=draw)
    coin = torch.randint(0, 2, (size,), generator=draw)
    said = torch.where(coin == 1, HEADS, TAILS)
    sequence = torch.cat([prompt.repeat(size, 1), said[:, None]], 1)
    state: torch.Tensor | None = None
    fed = 0
    for turn in range(task.turns):
        start = sequence.shape[1]
        rows = []
        for _ in range(task.turn_tokens):
            while fed < sequence.shape[1]:
                logits, state = policy.step(sequence[:, fed], state)
                fed += 1
            logprobs = torch.log_softmax(logits, -1)
            token = torch.multinomial(logprobs.exp(), 1, generator=draw)
            values, ids = logprobs.topk(task.top_k)
            rows.append((token[:, 0], logprobs.gather(1, token)[:, 0], ids, values))
            sequence = torch.cat([sequence, token], 1)
        tokens, sampled, ids, values = (torch.stack(part, 1) for part in zip(*rows, strict=True))
        for i in range(size):
            reply = flat_reply(tokens[i], sampled[i], ids[i], values[i], version)
            store.put_reply(
                f"version-{version}/group-{group}/{i}",
                turn,
                reply,
                top_k=task.top_k,
                prompt=sequence[i, :start].numpy().astype(np.int32),
                temperature=1.0,
            )
        sequence = torch.cat([sequence, said[:, None]], 1)  # the environment answers
    for i in range(size):
        store.seal(
            f"version-{version}/group-{group}/{i}",
            reward=float(coin[i]),
            group_index=group,
            index=i,
        )


def run(path: str, folder: Path, task: Task, number: int, samplers: int, steps: int) -> None:
    """The process: play its share of each version's groups, then wait for the next version."""
    torch.set_num_threads(1)
    with rollstore.open(path, "w") as store:
        for step in range(steps):
            version = max(0, step - task.stale)
            while (policy := published(folder, version)) is None or not (
                folder / f"weights-{step}.pt"
            ).exists():
                time.sleep(0.002)
            policy = rounded(policy, task.levels)
            for group in range(number, task.groups, samplers):
                play_group(policy, version, task, step * task.groups + group, store)
