"""Arguments of the loss that are refused, and group-centred advantages."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from loss_reference import INF, Batch, close, support_batch

from rollstore import loss as rl

# --- arguments -----------------------------------------------------------------------------------


def wrong(name, value):
    def change(arguments):
        arguments[name] = value(arguments[name]) if callable(value) else value

    return name, change


WRONG_ARGUMENTS = [
    (*wrong("logits", lambda x: x.numpy()), TypeError),
    (*wrong("logits", lambda x: x.long()), TypeError),
    (*wrong("logits", lambda x: x[0]), ValueError),
    (*wrong("logits", lambda x: x[:, :0]), ValueError),
    (*wrong("token_ids", lambda x: x.float()), TypeError),
    (*wrong("token_ids", lambda x: x.bool()), TypeError),
    (*wrong("token_ids", lambda x: x[:-1]), ValueError),
    (*wrong("token_ids", lambda x: x + 19), ValueError),
    (*wrong("token_ids", lambda x: x * 0 - 1), ValueError),
    (*wrong("token_ids", lambda x: x * 0 - 2), ValueError),
    (*wrong("rollout_logprobs", lambda x: x.long()), TypeError),
    (*wrong("rollout_logprobs", lambda x: x[:, None]), ValueError),
    (*wrong("topk_ids", lambda x: x.float()), TypeError),
    (*wrong("topk_ids", lambda x: x[:-1]), ValueError),
    (*wrong("topk_ids", lambda x: x[:, 0]), ValueError),
    (*wrong("topk_ids", lambda x: x + 19), ValueError),
    (*wrong("topk_ids", lambda x: x * 0 - 2), ValueError),
    (*wrong("topk_logprobs", None), TypeError),
    (*wrong("topk_logprobs", lambda x: x[:, :-1]), ValueError),
    (*wrong("advantages", lambda x: x.tolist()), TypeError),
    (*wrong("advantages", lambda x: x[0]), ValueError),
    (*wrong("loss_mask", lambda x: x.float()), TypeError),
    (*wrong("loss_mask", lambda x: x[:-1]), ValueError),
    (*wrong("temperature", 0.0), ValueError),
    (*wrong("temperature", -1.0), ValueError),
    (*wrong("temperature", math.nan), ValueError),
    (*wrong("temperature", INF), ValueError),
    (*wrong("temperature", "1"), TypeError),
    (*wrong("temperature", True), TypeError),
    (*wrong("temperature", torch.ones(6)), ValueError),
    (*wrong("temperature", torch.tensor([1.0, 1, 1, 0, 1, 1, 1])), ValueError),
    (*wrong("temperature", torch.tensor([1.0, 1, 1, math.nan, 1, 1, 1])), ValueError),
    (*wrong("temperature", torch.ones(7).int()), TypeError),
    (*wrong("mode", "ppo"), ValueError),
    (*wrong("tis_clip", 0.0), ValueError),
    (*wrong("tis_clip", INF), ValueError),
    (*wrong("tis_clip", "2"), TypeError),
    (*wrong("mis_low", -0.1), ValueError),
    (*wrong("mis_low", 6.0), ValueError),
    (*wrong("mis_high", math.nan), ValueError),
    (*wrong("eps", 0.0), ValueError),
    (*wrong("eps", 2.0), ValueError),
    (*wrong("chunk_tokens", 0), ValueError),
    (*wrong("chunk_tokens", 1.5), TypeError),
    (*wrong("chunk_tokens", True), TypeError),
]


def arguments_of(batch):
    names = ("rollout_logprobs", "topk_ids", "topk_logprobs", "advantages", "loss_mask")
    return {
        "logits": batch.logits,
        "token_ids": batch.token_ids,
        **dict(zip(names, batch.recorded(), strict=True)),
    }


@pytest.mark.parametrize(("name", "change", "error"), WRONG_ARGUMENTS)
def test_wrong_argument_is_named(name, change, error):
    arguments = arguments_of(Batch(28))
    rl.score_centering_loss_from_logits(**arguments)
    arguments.setdefault(name, None)
    change(arguments)
    with pytest.raises(error, match=f"^{name}: "):
        rl.score_centering_loss_from_logits(**arguments)


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        (*wrong("token_logprobs", lambda x: x.int()), TypeError),
        (*wrong("trainer_topk_logprobs", lambda x: x[:, :-1]), ValueError),
        (*wrong("trainer_topk_logprobs", lambda x: x[:-1]), ValueError),
        (*wrong("trainer_topk_logprobs", lambda x: x[:, 0]), ValueError),
        (*wrong("trainer_topk_logprobs", [[0.5]]), TypeError),
        (*wrong("topk_logprobs", lambda x: x.to("meta")), ValueError),
    ],
)
def test_wrong_gathered_argument_is_named(name, change, error):
    arguments = arguments_of(Batch(29))
    token_ids, logits = arguments.pop("token_ids"), arguments.pop("logits")
    arguments["token_logprobs"], arguments["trainer_topk_logprobs"] = rl.gather_logprobs(
        logits, token_ids, arguments["topk_ids"]
    )
    rl.score_centering_loss(**arguments)
    change(arguments)
    # A change of one of two that must match can be told of either.
    other = "topk_ids" if name == "trainer_topk_logprobs" and error is ValueError else name
    with pytest.raises(error, match=f"^({name}|{other}): "):
        rl.score_centering_loss(**arguments)


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        (*wrong("hidden", lambda x: x[0]), ValueError),
        (*wrong("hidden", lambda x: x.int()), TypeError),
        (*wrong("lm_head_weight", lambda x: x[:, :-1]), ValueError),
        (*wrong("lm_head_weight", lambda x: x[:0]), ValueError),
        (*wrong("lm_head_weight", lambda x: x[0]), ValueError),
        (*wrong("lm_head_weight", lambda x: x.int()), TypeError),
        (*wrong("token_ids", lambda x: x + 19), ValueError),
    ],
)
def test_wrong_hidden_argument_is_named(name, change, error):
    arguments = arguments_of(Batch(30))
    del arguments["logits"]
    arguments |= {"hidden": torch.randn(7, 4), "lm_head_weight": torch.randn(19, 4)}
    rl.score_centering_loss_from_hidden(**arguments)
    change(arguments)
    with pytest.raises(error, match=f"^{name}: "):
        rl.score_centering_loss_from_hidden(**arguments)


def test_support_needs_the_token_among_its_candidates():
    batch = support_batch(31)
    batch.token_ids[4] = next(i for i in range(19) if i not in batch.topk_ids[4])
    with pytest.raises(ValueError, match=r"^token_ids: .*\[4\].*candidates"):
        batch.from_logits(batch.logits, support=True)
    batch.loss_mask[4] = 0
    batch.from_logits(batch.logits, support=True)
    batch.topk_ids[3] = -1
    with pytest.raises(ValueError, match=r"^topk_ids: .*no candidates"):
        rl.score_centering_loss(torch.ones(6), torch.ones(6, 5), *batch.recorded(), support=True)


# --- group-centred advantages --------------------------------------------------------------------


def test_group_advantages_centre_each_group():
    rewards = [1.0, 0.0, 3.0, 0.5, 1.0, 0.0]
    groups = [7, -2, 7, 4, 7, -2]
    expected = np.array([-2 / 3, 0, 4 / 3, 0, -2 / 3, 0], dtype=np.float32)
    from_lists = rl.group_advantages(rewards, groups)
    assert from_lists.dtype == np.float32
    np.testing.assert_allclose(from_lists, expected, rtol=1e-6)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        got = rl.group_advantages(torch.tensor([1, 0, 3, 0, 1, 0]).to(dtype), torch.tensor(groups))
        assert got.dtype == torch.float32
        close(got, expected)
    assert rl.group_advantages([], []).shape == (0,)
    assert rl.group_advantages(torch.ones(0), np.zeros(0, np.int32)).shape == (0,)


@pytest.mark.parametrize("reward", [0.1, 1 / 3, -1e30, 5e-324])
def test_equal_rewards_give_exactly_zero(reward):
    assert not rl.group_advantages([reward] * 7, [0] * 7).any()
    assert not rl.group_advantages([reward], [3]).any()


@pytest.mark.parametrize(
    ("rewards", "groups", "name", "error"),
    [
        ([1.0, math.nan], [0, 0], "rewards", ValueError),
        ([1.0, INF], [0, 0], "rewards", ValueError),
        (["a", "b"], [0, 0], "rewards", TypeError),
        ([[1.0]], [[0]], "rewards", ValueError),
        ([1.0, 2.0], [0], "group_index", ValueError),
        ([1.0, 2.0], [0.0, 1.0], "group_index", TypeError),
        ([1.0, 2.0], [True, False], "group_index", TypeError),
    ],
)
def test_wrong_rewards_are_named(rewards, groups, name, error):
    with pytest.raises(error, match=f"^{name}: "):
        rl.group_advantages(rewards, groups)
