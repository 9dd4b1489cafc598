"""The score-centering loss: against double-precision cases and the formula as it is written."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from loss_reference import (
    INF,
    METHODS,
    MODES,
    Batch,
    close,
    grad_of,
    naive,
    naive_on_logprobs,
    support_batch,
)

from rollstore import loss as rl

CASES = json.loads(
    (Path(__file__).parents[3] / "tests" / "data" / "loss_cases.json").read_text(encoding="utf-8")
)


DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=pytest.mark.skipif(
            not torch.cuda.is_available(), reason="no GPU here: the loss was NOT tested on one"
        ),
    ),
]


def tensor(values, dtype=torch.float64, device="cpu"):
    return torch.tensor(values, dtype=dtype, device=device)


# --- the fixed cases -----------------------------------------------------------------------------


def run_case(case, method, dtype, device):
    """Loss, gradient on the logits and metrics of one case."""
    logits = tensor([case["logits"]], dtype, device).requires_grad_()
    token_ids = torch.tensor([case["token_id"]], device=device)
    ids = torch.tensor([case["topk_ids"]], dtype=torch.int32, device=device)
    logprobs = [-INF if x is None else x for x in case["topk_logprobs"]]
    recorded = (
        tensor([case["rollout_logprob"]], dtype, device),
        ids,
        tensor([logprobs], dtype, device),
        tensor([case["advantage"]], dtype, device),
        torch.ones(1, dtype=torch.uint8, device=device),
    )
    settings = {name: case[name] for name in ("mode", "tis_clip", "mis_low", "mis_high", "eps")}
    if method == "gathered":
        log_p = torch.log_softmax(logits.double(), dim=-1)
        picked = log_p.gather(1, ids.long().clamp(min=0)).masked_fill(ids < 0, -INF)
        loss, metrics = rl.score_centering_loss(
            log_p[:, case["token_id"]], picked, *recorded, **settings
        )
    elif method == "logits":
        loss, metrics = rl.score_centering_loss_from_logits(
            logits, token_ids, *recorded, **settings
        )
    else:
        # Hidden states that are the logits: the output layer is the identity.
        identity = torch.eye(logits.shape[1], dtype=dtype, device=device)
        loss, metrics = rl.score_centering_loss_from_hidden(
            logits, identity, token_ids, *recorded, **settings
        )
    return loss, grad_of(loss, logits)[0], metrics


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_fixed_case(case, method, dtype, device):
    loss, grad, metrics = run_case(case, method, dtype, device)
    assert loss.dtype == torch.float32
    assert grad.dtype == dtype
    assert loss.device.type == grad.device.type == metrics.rho.device.type == device
    loss, grad, metrics = loss.cpu(), grad.cpu(), type(metrics)(*(m.cpu() for m in metrics))
    # A tail is 1 less a head, so float32 knows it to about 1e-7, and rho relative to the smaller.
    tail = min(1 - case["rollout_head_mass"], 1 - case["trainer_head_mass"])
    rho_error = 1e-5 + 1.5e-7 / max(tail, case["eps"])
    # alpha scales sum_H p log p in the value, but sum_H p grad log p, about the tail, in the grad.
    entropy = sum(
        math.exp(x) * -x for x in torch.log_softmax(tensor(case["logits"]), dim=-1).tolist()
    )
    value_error = 1e-5 + rho_error * case["alpha"] * entropy * abs(case["advantage"])
    close(loss, [case["loss"]], rtol=1e-5, atol=value_error)
    close(grad[0], case["grad_logits"], rtol=1e-5, atol=2e-6)
    close(metrics.rho, [case["rho"]], rtol=rho_error)
    close(metrics.alpha, [case["alpha"]], rtol=rho_error)
    close(metrics.rollout_head_mass, [case["rollout_head_mass"]], atol=3e-7)
    close(metrics.trainer_head_mass, [case["trainer_head_mass"]], atol=3e-7)
    if case["advantage"] == 0:
        assert loss.item() == 0
        assert not grad.any()


def test_the_cases_are_all_there():
    assert len(CASES) == 60
    assert {case["mode"] for case in CASES} == set(MODES)


# --- against the naive form ----------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("mode", MODES)
def test_gradient_is_that_of_the_naive_form_in_double(mode, temperature):
    batch = Batch(3, rows=40, temperature=temperature)
    logits = batch.logits.clone().requires_grad_()
    expected = naive(batch, logits, temperature, mode=mode)
    (expected_grad,) = grad_of(expected, logits)
    loss, _ = batch.from_logits(logits, mode=mode, temperature=temperature)
    close(loss, expected, rtol=1e-4, atol=1e-5)
    close(grad_of(loss, logits)[0], expected_grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_gradient_is_that_of_finite_differences(mode):
    """The loss with its coefficients held: moved along a direction, in double, both ways."""
    batch = Batch(4, rows=6)
    logits = batch.logits.clone().requires_grad_()
    loss, _ = batch.from_logits(logits, mode=mode)
    (grad,) = grad_of(loss, logits)
    direction = torch.randn(logits.shape, dtype=torch.float64, generator=torch.manual_seed(1))
    step = 1e-5
    log_p = torch.log_softmax(batch.logits, dim=-1).requires_grad_()
    (coefficients,) = grad_of(naive_on_logprobs(batch, log_p, mode), log_p)

    def held(moved):
        return (coefficients * torch.log_softmax(moved, dim=-1)).sum()

    slope = (held(batch.logits + step * direction) - held(batch.logits - step * direction)) / (
        2 * step
    )
    close((grad * direction).sum(), slope, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_expected_gradient_is_zero_with_full_support(mode):
    """Every y of the vocabulary, weighted with q_y: with H complete the scores cancel."""
    vocab = 12
    # A gap so wide that "mis" drops some: p / q itself, all inside, would cancel without H.
    base = Batch(5, rows=1, vocab=vocab, k=vocab, gap=1.5)
    every = Batch(5, rows=1, vocab=vocab, k=vocab, gap=1.5)
    every.token_ids = torch.arange(vocab)
    every.rollout_logprobs = base.q[0]
    every.topk_ids = base.topk_ids.expand(vocab, -1)
    every.topk_logprobs = base.topk_logprobs.expand(vocab, -1)
    every.advantages = torch.full((vocab,), 1.7)
    every.loss_mask = torch.ones(vocab, dtype=torch.bool)
    logits = base.logits.clone().requires_grad_()

    def expected_gradient(**settings):
        loss, _ = every.from_logits(logits.expand(vocab, -1), mode=mode, **settings)
        return torch.autograd.grad((loss * base.q[0].exp()).sum(), logits)[0]

    assert expected_gradient().abs().max() < 1e-6
    # The same without candidates is not 0: the test sees what the correction does.
    every.topk_ids, every.topk_logprobs = every.topk_ids[:, :0], every.topk_logprobs[:, :0]
    assert expected_gradient().abs().max() > 1e-2


# --- the three ways agree ------------------------------------------------------------------------


@pytest.mark.parametrize("support", [False, True], ids=["selected", "support"])
@pytest.mark.parametrize("mode", MODES)
def test_three_ways_agree(mode, support):
    batch = Batch(6, rows=9, temperature=0.7)
    if support:
        batch.token_ids = batch.topk_ids[:, 2]
        batch.rollout_logprobs = batch.topk_logprobs[:, 2]
    make = torch.Generator().manual_seed(7)
    hidden = torch.randn(9, 4, generator=make).requires_grad_()
    weight = torch.randn(19, 4, generator=make).requires_grad_()
    settings = {"mode": mode, "support": support}

    results = []
    logits = hidden @ weight.t()
    log_p = torch.log_softmax(logits / 0.7, dim=-1)
    results.append(
        rl.score_centering_loss(
            log_p.gather(1, batch.token_ids[:, None])[:, 0],
            log_p.gather(1, batch.topk_ids),
            *batch.recorded(),
            **settings,
        )
    )
    results.append(batch.from_logits(hidden @ weight.t(), temperature=0.7, **settings))
    results.append(
        rl.score_centering_loss_from_hidden(
            hidden,
            weight,
            batch.token_ids,
            *batch.recorded(),
            temperature=0.7,
            chunk_tokens=4,
            **settings,
        )
    )
    grads = [grad_of(loss, hidden, weight) for loss, _ in results]
    for (loss, metrics), (grad_hidden, grad_weight) in zip(results, grads, strict=True):
        close(loss, results[0][0], rtol=1e-4, atol=1e-5)
        close(grad_hidden, grads[0][0], rtol=1e-4, atol=1e-5)
        close(grad_weight, grads[0][1], rtol=1e-4, atol=1e-5)
        for one, other in zip(metrics, results[0][1], strict=True):
            close(one, other, rtol=1e-4, atol=1e-5)


def test_gather_logprobs_is_log_softmax():
    batch = Batch(8)
    batch.topk_ids[2, 3] = -1
    logits = batch.logits.clone().requires_grad_()
    temperature = torch.linspace(0.5, 2.0, 7)
    token, topk = rl.gather_logprobs(
        logits, batch.token_ids, batch.topk_ids, temperature=temperature, chunk_tokens=3
    )
    log_p = torch.log_softmax(logits / temperature[:, None].double(), dim=-1)
    expected = log_p.gather(1, batch.topk_ids.clamp(min=0)).masked_fill(batch.topk_ids < 0, -INF)
    close(token, log_p.gather(1, batch.token_ids[:, None])[:, 0])
    close(topk, expected)
    assert topk[2, 3] == -INF
    # Whatever comes down to an empty slot, also NaN, goes no further.
    down = (torch.randn(7), torch.randn(7, 5))
    kept = down[1].clone()
    down[1][2, 3], kept[2, 3] = math.nan, 0
    finite = expected.masked_fill(batch.topk_ids < 0, 0)
    (ours,) = torch.autograd.grad((token, topk), logits, down)
    (theirs,) = torch.autograd.grad(
        (log_p.gather(1, batch.token_ids[:, None])[:, 0], finite), logits, (down[0], kept)
    )
    close(ours, theirs)
    batch.token_ids[1] = -1
    token, _ = rl.gather_logprobs(logits, batch.token_ids, batch.topk_ids)
    assert token[1] == -INF
    assert not torch.autograd.grad(token, logits, torch.ones(7))[0][1].any()
    from_hidden = rl.gather_logprobs_from_hidden(
        logits, torch.eye(19).double(), batch.token_ids, batch.topk_ids, temperature=temperature
    )
    close(from_hidden[0][2:], log_p.gather(1, batch.token_ids[:, None].clamp(min=0))[2:, 0])
    close(from_hidden[1][batch.topk_ids >= 0], topk[batch.topk_ids >= 0])


def test_a_peaked_row_keeps_its_small_tail():
    """float32 logits near 20, tail 1e-6: the plain z - logsumexp(z) is off by as much."""
    logits = torch.tensor([[20.0, 6.2, 5.1, -3.0]], dtype=torch.float64)
    exact = torch.log_softmax(logits, dim=-1)
    token, topk = rl.gather_logprobs(
        logits.float(), torch.tensor([0]), torch.tensor([[0, 1, 2, 3]])
    )
    close(torch.expm1(token), torch.expm1(exact[:, 0]), rtol=1e-5, atol=0)
    close(topk, exact, rtol=1e-5, atol=0)


# --- weights and metrics -------------------------------------------------------------------------
def test_weights_at_their_bounds():
    """The sampled token's weight: clipped at tis_clip; kept inside [low, high] and 0 outside."""
    ratios = torch.tensor([0.1, 0.49, 0.51, 1.0, 1.99, 2.01, 4.99, 5.01, 1e9]).double()
    log_p = torch.full((9,), -30.0).double()
    k0 = torch.zeros(9, 0)
    arguments = (log_p - ratios.log(), k0.long(), k0, torch.ones(9), torch.ones(9).bool())
    for mode, expected in (
        ("none", [1.0] * 9),
        ("tis", [0.1, 0.49, 0.51, 1.0, 1.99, 2.0, 2.0, 2.0, 2.0]),
        ("mis", [0, 0, 0.51, 1.0, 1.99, 2.01, 4.99, 0, 0]),
    ):
        _, metrics = rl.score_centering_loss(log_p, k0, *arguments, mode=mode)
        close(metrics.token_weight, expected, rtol=1e-5)
    _, metrics = rl.score_centering_loss(log_p, k0, *arguments, mode="mis", mis_low=0, mis_high=9)
    close(metrics.token_weight, [*ratios[:8].tolist(), 0.0], rtol=1e-5)
    _, metrics = rl.score_centering_loss(log_p, k0, *arguments, mode="tis", tis_clip=0.5)
    close(metrics.token_weight, ratios.clamp(max=0.5), rtol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_tail_weight_follows_rho(mode):
    """alpha = rho f(1 / rho), with rho from far under to far over 1."""
    q_tail = torch.tensor([0.9, 0.5, 0.3, 3e-6, 0.01, 1e-9]).double()
    p_tail = q_tail.flip(0)
    ones = torch.ones(6)
    _, metrics = rl.score_centering_loss(
        ones.double() * -1,
        torch.log1p(-p_tail)[:, None],
        ones * -1,
        torch.zeros(6, 1, dtype=torch.int32),
        torch.log1p(-q_tail)[:, None],
        ones,
        ones.bool(),
        mode=mode,
    )
    rho = q_tail.clamp(min=1e-6) / p_tail.clamp(min=1e-6)
    f = {"none": ones, "tis": (1 / rho).clamp(max=2), "mis": (1 / rho)}[mode]
    if mode == "mis":
        f = f * ((f >= 0.5) & (f <= 5))
    close(metrics.rho, rho, rtol=1e-5)
    close(metrics.alpha, rho * f, rtol=1e-5)


def test_metrics_are_what_they_say():
    batch = Batch(22)
    _, metrics = batch.from_logits(batch.logits, mode="tis")
    log_p = torch.log_softmax(batch.logits, dim=-1)
    p, q = log_p.gather(1, batch.topk_ids).exp(), batch.topk_logprobs.exp()
    centre = q * (p / q).clamp(max=2.0) - metrics.alpha[:, None] * p
    gap = log_p.gather(1, batch.token_ids[:, None])[:, 0] - batch.rollout_logprobs
    close(metrics.correction, (centre * p.log()).sum(-1), rtol=1e-4)
    close(metrics.correction_size, centre.abs().sum(-1), rtol=1e-4)
    close(metrics.trainer_head_mass, p.sum(-1))
    close(metrics.rollout_head_mass, q.sum(-1))
    close(metrics.token_weight, gap.exp().clamp(max=2.0))
    close(metrics.logprob_gap, gap.abs())


# --- support mode --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_support_is_the_loss_over_the_supports_own_vocabulary(mode):
    """Logits outside the support at -1e9 make the full-vocabulary formula the one over the support.

    Its rho is then eps / eps = 1 and alpha f(1) = 1, which is how support mode defines them.
    """
    batch = support_batch(23)
    logits = batch.logits.clone().requires_grad_()
    loss, metrics = batch.from_logits(logits, mode=mode, support=True, temperature=0.8)
    (grad,) = grad_of(loss, logits)
    inside = torch.zeros(6, 19, dtype=torch.bool)
    for row in range(6):
        inside[row, batch.topk_ids[row][batch.topk_ids[row] >= 0]] = True
    alone = batch.logits.masked_fill(~inside, -1e9).requires_grad_()
    expected = torch.stack(
        [
            naive(one_row(batch, row), alone[row : row + 1], 0.8, mode=mode, eps=1e-3)[0]
            for row in range(6)
        ]
    )
    close(loss, expected, rtol=1e-4, atol=1e-5)
    close(grad, grad_of(expected, alone)[0], rtol=1e-4, atol=1e-5)
    assert not grad[~inside].any()
    assert torch.equal(metrics.rho, torch.ones(6))
    assert torch.equal(metrics.alpha, torch.ones(6))
    close(metrics.trainer_head_mass, torch.ones(6))


def one_row(batch, row):
    one = Batch(0, rows=1)
    keep = batch.topk_ids[row] >= 0
    one.token_ids = batch.token_ids[row : row + 1]
    one.rollout_logprobs = batch.rollout_logprobs[row : row + 1]
    one.advantages = batch.advantages[row : row + 1]
    one.topk_ids = batch.topk_ids[row : row + 1, keep]
    one.topk_logprobs = batch.topk_logprobs[row : row + 1, keep]
    return one


@pytest.mark.parametrize("mode", MODES)
def test_support_of_the_full_vocabulary_is_selected_mode(mode):
    batch = Batch(24, vocab=9, k=9)
    results = []
    for support in (False, True):
        logits = batch.logits.clone().requires_grad_()
        loss, metrics = batch.from_logits(logits, mode=mode, support=support)
        results.append((loss, grad_of(loss, logits)[0], *metrics))
    for one, other in zip(*results, strict=True):
        close(one, other, rtol=1e-4, atol=1e-5)


def test_support_takes_logprobs_scaled_logits_and_normalised_alike():
    batch = support_batch(25)
    ids = batch.topk_ids.clamp(min=0)
    results = []
    for shift in (
        torch.zeros(6, 1).double(),
        torch.logsumexp(batch.logits, dim=-1, keepdim=True),
        torch.logsumexp(
            batch.logits.gather(1, ids).masked_fill(batch.topk_ids < 0, -INF), -1, keepdim=True
        ),
    ):
        logits = batch.logits.clone().requires_grad_()
        values = logits - shift
        loss, _ = rl.score_centering_loss(
            values.gather(1, batch.token_ids[:, None])[:, 0],
            values.gather(1, ids),
            *batch.recorded(),
            mode="tis",
            support=True,
        )
        results.append((loss, grad_of(loss, logits)[0]))
    for loss, grad in results[1:]:
        close(loss, results[0][0], atol=1e-5)
        close(grad, results[0][1], atol=1e-5)
