"""The README's part on the session server does what it says."""

from __future__ import annotations

import asyncio
import enum
import importlib.util
import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lab import Lab, run

README = Path(__file__).resolve().parents[4] / "README.md"


def example(beginning: str) -> str:
    """The code of that beginning."""
    text = README.read_text().split("\n## The session server\n")[1].split("\n## ")[0]
    (found,) = [
        code
        for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        if code.startswith(beginning)
    ]
    return str(found)


@dataclass
class Sample:
    """The fields of a Miles sample that training needs, and how they must fit."""

    class Status(enum.Enum):
        COMPLETED = "completed"
        TRUNCATED = "truncated"

    group_index: int
    index: int
    session_id: str
    tokens: list[int]
    response_length: int
    reward: float
    loss_mask: list[int]
    rollout_log_probs: list[float]
    weight_versions: list[str]
    status: Status
    train_metadata: dict[str, Any] = field(default_factory=dict)

    def validate(self) -> None:
        assert len(self.tokens) > self.response_length
        assert len(self.loss_mask) == self.response_length
        assert len(self.rollout_log_probs) == self.response_length
        assert self.train_metadata["topk_ids"].shape == (self.response_length, 4)


def test_what_trainers_read(path: Path) -> None:
    torch = pytest.importorskip(
        "torch", reason="no PyTorch here: the trainers' part was NOT tested"
    )

    async def main() -> None:
        async with Lab(path) as lab:
            for number, turns in ((0, 1), (1, 3)):
                session = await lab.open(group=7, index=number)
                await lab.talk(session, turns, user=str(number))
                await lab.end(session, reward=float(number), status="truncated")
            names: dict[str, Any] = {"store": lab.store()}
            exec(example("import torch"), names)
            with lab.store().snapshot() as snapshot:
                check(torch, names, list(snapshot.ready()))

    run(main)


def check(torch: Any, names: dict[str, Any], sessions: list[Any]) -> None:
    wanted = [session.sample() for session in sessions]
    prompts = [s.tokens[: s.prompt_length].tolist() for s in wanted]
    responses = [s.tokens[s.prompt_length :].tolist() for s in wanted]
    miles = [names["miles_sample"](Sample, session) for session in sessions]
    for made, s in zip(miles, wanted):
        made.validate()
        assert made.tokens == s.tokens.tolist()
        assert (made.group_index, made.status) == (7, Sample.Status.TRUNCATED)
    assert [made.reward for made in miles] == [0.0, 1.0]
    output = names["output"]
    assert output["prompt_token_ids"] == prompts
    assert output["response_ids"] == responses
    assert [sum(mask) for mask in output["loss_masks"]] == [12, 36]
    assert [len(x) for x in output["rollout_logprobs"]] == [len(x) for x in responses]
    assert output["stop_reasons"] == ["stop", "stop"]
    made = names["verl_tensors"](sessions, 9, 64)
    for row, s in enumerate(wanted):
        seen = made["attention_mask"][row].bool()
        assert made["input_ids"][row][seen].tolist() == s.tokens.tolist()
        assert made["position_ids"][row][seen].tolist() == list(range(len(s.tokens)))
        assert made["prompts"][row].tolist()[9 - s.prompt_length :] == prompts[row]
        mask = made["response_mask"][row].bool()
        assert int(mask.sum()) == int(s.loss_mask.sum())
        logprobs = np.array(made["rollout_log_probs"][row][mask].tolist(), np.float32)
        assert np.array_equal(logprobs, s.rollout_logprobs[s.loss_mask == 1])
    assert torch.equal(torch.cat((made["prompts"], made["responses"]), 1), made["input_ids"])
    with pytest.raises((RuntimeError, ValueError)):
        names["verl_tensors"](sessions, 9, 30)


@pytest.mark.skipif(
    importlib.util.find_spec("openai") is None,
    reason="no openai package here: the README's agent was NOT run (tools/check-pypi)",
)
def test_an_agent_that_knows_nothing_of_it(path: Path, tmp_path: Path) -> None:
    """The README's agent as a process of its own, led here by its environment alone."""
    agent = tmp_path / "agent.py"
    agent.write_text(example("import openai"))

    async def main() -> None:
        async with Lab(path, token="t0ken") as lab:
            headers = {"Authorization": "Bearer t0ken"}
            opened = (await lab.ask("POST", "/sessions", {"id": "swe-1/r0"}, headers=headers)).json
            led = {"OPENAI_BASE_URL": opened["base_url"], "OPENAI_API_KEY": opened["api_key"]}
            process = await asyncio.create_subprocess_exec(
                sys.executable, str(agent), env={**os.environ, **led}
            )
            assert await process.wait() == 0
            ended = await lab.ask(
                "POST", "/sessions/swe-1%2Fr0/end", {"reward": 1.0}, headers=headers
            )
            assert (ended.json["turns"], "misaligned" in ended.json) == (3, False)
            with lab.store().snapshot() as snapshot:
                sample = snapshot.sessions["swe-1/r0"].sample()
                assert int(sample.loss_mask.sum()) == 36

    run(main)
