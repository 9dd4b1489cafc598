"""A network is sampled through the server: what a trainer reads is its distribution."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine import WORD, heard
from lab import Lab, run

torch: Any = pytest.importorskip(
    "torch", reason="no PyTorch here: sampling a network was NOT tested"
)

from rollstore.example.policy import Policy  # noqa: E402


@pytest.mark.parametrize(
    "settings", [{}, {"candidates": "nested"}, {"mode": "support", "top_k": 8}]
)
def test_the_record_is_what_the_network_says(path: Path, settings: dict[str, Any]) -> None:
    torch.manual_seed(1)
    policy = Policy()
    support = settings.get("mode") == "support"

    async def main() -> None:
        async with Lab(path, **settings) as lab:
            lab.engine.policy = policy
            session = await lab.open()
            await lab.talk(session, 3, **({"top_k": 8} if support else {}))
            ended = (await lab.end(session, reward=1)).json
            assert (ended["turns"], "misaligned" in ended) == (3, False)
            with lab.store().snapshot() as snapshot:
                sample = snapshot.sessions[session].sample()
        with torch.no_grad():
            logits = policy(torch.tensor([heard(sample.tokens.tolist())]))[0]
        said = torch.log_softmax(logits, -1).numpy()[sample.prompt_length - 1 : -1]
        rows = np.flatnonzero(sample.loss_mask)
        assert len(rows) == 3 * 12
        tokens = sample.tokens[sample.prompt_length :][rows] - WORD
        assert np.allclose(sample.rollout_logprobs[rows], said[rows, tokens], atol=1e-4)
        held = sample.topk_ids[rows] >= 0
        assert held.all() or support
        ids = np.where(held, sample.topk_ids[rows] - WORD, 0)
        wanted = np.take_along_axis(said[rows], ids, axis=1)
        assert np.allclose(sample.topk_logprobs[rows][held], wanted[held], atol=1e-4)
        if not support:
            assert np.array_equal(ids, np.argsort(-said[rows], axis=1)[:, : ids.shape[1]])

    run(main)
