"""The policy: a small recurrent network over 32 tokens, and its rounded copy that samplers run."""

from __future__ import annotations

import os
from pathlib import Path

import torch

VOCAB = 32
HEADS, TAILS = 30, 31  # what the environment says of its coin
WORDS = 30  # tokens that the policy speaks with, and prompts are made of


class Policy(torch.nn.Module):
    """Next-token logits, [batch, length, VOCAB], of token ids [batch, length]."""

    def __init__(self, width: int = 48) -> None:
        """Width: of embeddings and recurrent state."""
        super().__init__()
        self.embed = torch.nn.Embedding(VOCAB, width)
        self.recur = torch.nn.GRU(width, width, batch_first=True)
        self.out = torch.nn.Linear(width, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of what follows each token."""
        hidden, _ = self.recur(self.embed(tokens))
        logits: torch.Tensor = self.out(hidden)
        return logits

    def step(
        self, token: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits after one more token, [batch, VOCAB], and the state that goes on from there."""
        hidden, after = self.recur(self.embed(token[:, None]), state)
        return self.out(hidden[:, 0]), after


def rounded(policy: Policy, levels: int) -> Policy:
    """A copy whose weights are rounded to `levels` steps each side of zero; 0 leaves them exact."""
    copy = Policy()
    copy.load_state_dict(policy.state_dict())
    if levels:
        with torch.no_grad():
            for weights in copy.parameters():
                step = weights.abs().max().clamp(min=1e-12) / levels
                weights.copy_((weights / step).round() * step)
    return copy


def publish(policy: Policy, folder: Path, version: int) -> None:
    """Give the weights to the samplers: the file appears whole, under its version's number."""
    part = folder / f"weights-{version}.part"
    torch.save(policy.state_dict(), part)
    os.replace(part, folder / f"weights-{version}.pt")


def published(folder: Path, version: int) -> Policy | None:
    """The weights of that version, or None while there are none."""
    try:
        state = torch.load(folder / f"weights-{version}.pt")
    except FileNotFoundError:
        return None
    policy = Policy()
    policy.load_state_dict(state)
    return policy
