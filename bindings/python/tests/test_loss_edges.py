"""What takes no part in the loss, -inf, NaN and overflow."""

from __future__ import annotations

import math

import pytest
import torch
from loss_reference import INF, METHODS, MODES, Batch, close, grad_of, naive, run_batch

from rollstore import loss as rl

POISON = {"ninf": -INF, "nan": math.nan}


@pytest.mark.parametrize("poison", POISON.values(), ids=POISON)
@pytest.mark.parametrize("what", ["masked", "zero_advantage"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("support", [False, True], ids=["selected", "support"])
def test_idle_token_is_exactly_zero(support, mode, method, what, poison):
    """Row 2 takes no part and is -inf or NaN everywhere; the other rows do not notice."""
    batch = Batch(17)
    batch.token_ids = batch.topk_ids[:, 0].clone()
    clean_loss, clean_grad = run_batch(batch, method, batch.logits, mode, support)
    (batch.loss_mask if what == "masked" else batch.advantages)[2] = 0
    batch.rollout_logprobs[2] = batch.topk_logprobs[2] = poison
    logits = batch.logits.clone()
    logits[2] = poison
    loss, grad = run_batch(batch, method, logits, mode, support)
    assert loss[2] == 0
    assert (grad[2] == 0).all()
    others = torch.arange(7) != 2
    assert torch.equal(loss[others], clean_loss[others])
    assert torch.equal(grad[others], clean_grad[others])


@pytest.mark.parametrize("poison", POISON.values(), ids=POISON)
def test_idle_hidden_state_does_not_reach_the_weights_gradient(poison):
    batch = Batch(32)
    batch.loss_mask[2] = 0
    grads = []
    for value in (0.0, poison):
        hidden = torch.randn(7, 4, generator=torch.manual_seed(5))
        weight = torch.randn(19, 4, generator=torch.manual_seed(6)).requires_grad_()
        hidden[2] = value
        hidden.requires_grad_()
        loss, _ = rl.score_centering_loss_from_hidden(
            hidden, weight, batch.token_ids, *batch.recorded()
        )
        grads.append(grad_of(loss, hidden, weight))
    for clean, poisoned in zip(*grads, strict=True):
        assert torch.equal(clean, poisoned)


def test_observation_rows_as_a_batch_has_them():
    """Mask 0, rollout logprob 0.0, ids -1, logprobs -inf, and a token id the model never saw."""
    batch = Batch(18)
    batch.loss_mask[3:5] = 0
    batch.rollout_logprobs[3:5] = 0.0
    batch.topk_ids[3:5], batch.topk_logprobs[3:5] = -1, -INF
    batch.token_ids[4] = -1
    logits = batch.logits.clone().requires_grad_()
    loss, metrics = batch.from_logits(logits, mode="tis")
    (grad,) = grad_of(loss, logits)
    assert not loss[3:5].any()
    assert not grad[3:5].any()
    assert torch.isfinite(grad).all()
    for metric in metrics:
        assert not metric[3:5].any()
        assert torch.isfinite(metric).all()


def test_a_row_of_nothing_but_minus_infinity_has_no_nan():
    logits = torch.full((2, 6), -INF)
    logits[1] = 0.0
    logits.requires_grad_()
    gathered = rl.gather_logprobs(logits, torch.tensor([0, 1]), torch.tensor([[2, 3], [4, 5]]))
    assert (gathered[0][0], *gathered[1][0]) == (-INF, -INF, -INF)
    assert torch.isfinite(gathered[0][1])
    (grad,) = torch.autograd.grad(gathered, logits, (torch.ones(2), torch.ones(2, 2)))
    assert torch.isfinite(grad).all()


@pytest.mark.parametrize("mode", MODES)
def test_padded_slots_take_no_part(mode):
    batch = Batch(19)
    plain_logits = batch.logits.clone().requires_grad_()
    plain, plain_metrics = batch.from_logits(plain_logits, mode=mode)
    # Whatever stands beside an id of -1, also NaN.
    junk = torch.tensor([[-INF, math.nan, 0.0]]).expand(7, -1).double()
    batch.topk_ids = torch.cat((batch.topk_ids, torch.full((7, 3), -1)), dim=1)
    batch.topk_logprobs = torch.cat((batch.topk_logprobs, junk), dim=1)
    logits = batch.logits.clone().requires_grad_()
    loss, metrics = batch.from_logits(logits, mode=mode)
    close(loss, plain)
    close(grad_of(loss, logits)[0], grad_of(plain, plain_logits)[0])
    for one, other in zip(metrics, plain_metrics, strict=True):
        close(one, other)


@pytest.mark.parametrize("method", ["gathered", "logits"])
@pytest.mark.parametrize("mode", MODES)
def test_minus_infinity_on_a_token_that_trains_is_never_nan(mode, method):
    """Probability 0 of a candidate or the sampled token, for the trainer, the sampler or both."""
    batch = Batch(20)
    logits = batch.logits.clone()
    for row in range(3):
        logits[row, batch.topk_ids[row, 1]] = -INF
    batch.token_ids[1] = batch.topk_ids[1, 1]
    batch.topk_logprobs[2, 1] = batch.topk_logprobs[3, 0] = -INF
    batch.rollout_logprobs[3] = -INF
    loss, grad = run_batch(batch, method, logits, mode, False)
    assert torch.isfinite(loss).all()
    assert torch.isfinite(grad).all()
    if mode == "tis" and method == "logits":
        # Each coefficient of a log 0 is 0 here, so the naive form with a tiny p is the answer.
        finite = logits.clone()
        finite[finite == -INF] = -700.0
        batch.topk_logprobs[batch.topk_logprobs == -INF] = -700.0
        batch.rollout_logprobs[3] = -700.0
        close(loss, naive(batch, finite, mode="tis"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gap", [60.0, 1000.0, 3e4])
@pytest.mark.parametrize("mode", MODES)
def test_extreme_mismatch_does_not_overflow(mode, gap):
    """p / q of e^1000 and e^-1000: ratios are never formed."""
    batch = Batch(21, rows=4, vocab=6, k=3)
    sign = torch.tensor([1.0, -1.0, 1.0, -1.0]).double()[:, None]
    logits = torch.zeros(4, 6).double()
    logits[:, :1] += sign * gap
    batch.topk_ids = torch.tensor([[0, 1, 2]]).expand(4, -1)
    q = torch.log_softmax(-logits, dim=-1)
    batch.topk_logprobs = q[:, :3]
    batch.token_ids = torch.tensor([0, 0, 1, 1])
    batch.rollout_logprobs = q.gather(1, batch.token_ids[:, None])[:, 0]
    loss, grad = run_batch(batch, "logits", logits, mode, False)
    assert torch.isfinite(loss).all()
    assert torch.isfinite(grad).all()
    _, metrics = batch.from_logits(logits, mode=mode)
    assert all(torch.isfinite(metric).all() for metric in metrics)
    if gap < 100:  # in double the naive form still holds
        naive_logits = logits.clone().requires_grad_()
        expected = naive(batch, naive_logits, mode=mode)
        # Terms of the size of alpha, up to 1 / eps in mode "none", cancel to these.
        rounding = 1e-4 + 5e-7 * metrics.alpha.max().item()
        close(loss, expected, rtol=1e-4, atol=1e-4)
        close(grad, grad_of(expected, naive_logits)[0], rtol=1e-4, atol=rounding)


# --- what was written to between forward and backward --------------------------------------------


@pytest.mark.parametrize("how", ["logits", "hidden"])
@pytest.mark.parametrize("what", ["token_ids", "topk_ids", "temperature"])
def test_what_was_written_to_before_backward_is_told(what, how):
    """A batch's memory that is used again: autograd's error, and never a wrong gradient."""
    batch = Batch(5, rows=6)
    given = {
        "token_ids": batch.token_ids.long(),
        "topk_ids": batch.topk_ids.long(),
        "temperature": torch.ones(6),
    }
    ids = (given["token_ids"], given["topk_ids"])
    logits = batch.logits.float().requires_grad_()
    if how == "logits":
        token, _ = rl.gather_logprobs(logits, *ids, temperature=given["temperature"])
    else:
        token, _ = rl.gather_logprobs_from_hidden(
            logits, torch.eye(logits.shape[1]), *ids, temperature=given["temperature"]
        )
    given[what].fill_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        token.sum().backward()


def test_a_temperature_that_float32_does_not_know_is_refused():
    batch = Batch(6)
    for temperature in (1e-60, 1e60):
        with pytest.raises(ValueError, match="temperature"):
            batch.from_logits(batch.logits, temperature=temperature)
