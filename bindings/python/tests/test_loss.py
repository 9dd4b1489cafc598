"""The score-centering loss: against double-precision cases, a naive double, and its own promises."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from rollstore import loss as rl

CASES = json.loads(
    (Path(__file__).parents[3] / "tests" / "data" / "loss_cases.json").read_text(encoding="utf-8")
)
INF = math.inf
METHODS = ("gathered", "logits", "hidden")
MODES = ("none", "tis", "mis")


def tensor(values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


class Batch:
    """Random tokens with everything the loss takes, in double."""

    def __init__(self, seed, rows=7, vocab=19, k=5, gap=0.7, peak=2.0, temperature=1.0):
        make = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=make, dtype=torch.float64)

        self.logits = normal(rows, vocab) * peak
        q = torch.log_softmax((self.logits + normal(rows, vocab) * gap) / temperature, dim=-1)
        self.topk_logprobs, self.topk_ids = q.topk(k, dim=-1)
        self.token_ids = torch.randint(0, vocab, (rows,), generator=make)
        self.rollout_logprobs = q.gather(1, self.token_ids[:, None])[:, 0]
        self.advantages = normal(rows)
        self.loss_mask = torch.ones(rows, dtype=torch.uint8)
        self.q = q

    def recorded(self):
        return (
            self.rollout_logprobs,
            self.topk_ids,
            self.topk_logprobs,
            self.advantages,
            self.loss_mask,
        )

    def from_logits(self, logits, **settings):
        return rl.score_centering_loss_from_logits(
            logits, self.token_ids, *self.recorded(), **settings
        )


def naive_on_logprobs(batch, log_p, mode="none", clip=2.0, low=0.5, high=5.0, eps=1e-6):
    """The formula as it is written, on the trainer's log-probabilities [T, vocab], in their dtype."""

    def f(r):
        if mode == "none":
            return torch.ones_like(r)
        return r.clamp(max=clip) if mode == "tis" else r * ((r >= low) & (r <= high))

    log_p_y = log_p.gather(-1, batch.token_ids[:, None])[:, 0]
    log_p_h = log_p.gather(-1, batch.topk_ids)
    with torch.no_grad():
        p, q = log_p_h.exp(), batch.topk_logprobs.exp()
        rho = (1 - q.sum(-1)).clamp(min=eps) / (1 - p.sum(-1)).clamp(min=eps)
        alpha = rho * f(1 / rho)
        weight = f((log_p_y - batch.rollout_logprobs).exp())
        centre = q * f(p / q) - alpha[:, None] * p
    return -batch.advantages * (weight * log_p_y - (centre * log_p_h).sum(-1))


def naive(batch, logits, temperature=1.0, **settings):
    """The same from logits, through autograd's log_softmax."""
    return naive_on_logprobs(batch, torch.log_softmax(logits / temperature, dim=-1), **settings)


def grad_of(loss, *inputs):
    return torch.autograd.grad(loss.sum(), inputs)


def close(actual, expected, rtol=1e-5, atol=1e-6):
    torch.testing.assert_close(
        torch.as_tensor(actual).double(),
        torch.as_tensor(expected).double(),
        rtol=rtol,
        atol=atol,
    )


# --- the fixed cases -----------------------------------------------------------------------------


def run_case(case, method, dtype):
    """Loss, gradient on the logits and metrics of one case."""
    logits = tensor([case["logits"]], dtype).requires_grad_()
    token_ids = torch.tensor([case["token_id"]])
    ids = torch.tensor([case["topk_ids"]], dtype=torch.int32)
    logprobs = [-INF if x is None else x for x in case["topk_logprobs"]]
    recorded = (
        tensor([case["rollout_logprob"]], dtype),
        ids,
        tensor([logprobs], dtype),
        tensor([case["advantage"]], dtype),
        torch.ones(1, dtype=torch.uint8),
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
        identity = torch.eye(logits.shape[1], dtype=dtype)
        loss, metrics = rl.score_centering_loss_from_hidden(
            logits, identity, token_ids, *recorded, **settings
        )
    return loss, grad_of(loss, logits)[0], metrics


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_fixed_case(case, method, dtype):
    loss, grad, metrics = run_case(case, method, dtype)
    assert loss.dtype == torch.float32
    assert grad.dtype == dtype
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
    upstream = torch.randn(7, 5, generator=torch.manual_seed(2))
    kept = (batch.topk_ids >= 0) * upstream
    ours = torch.autograd.grad((topk * upstream).masked_fill(batch.topk_ids < 0, 0).sum(), logits)
    theirs = torch.autograd.grad((expected.masked_fill(batch.topk_ids < 0, 0) * kept).sum(), logits)
    close(ours[0], theirs[0])
    from_hidden = rl.gather_logprobs_from_hidden(
        logits, torch.eye(19).double(), batch.token_ids, batch.topk_ids, temperature=temperature
    )
    close(from_hidden[0], token)
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


# --- shapes, chunks, dtypes ----------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 100])
def test_chunk_size_changes_nothing(chunk):
    batch = Batch(9)
    results = []
    for chunk_tokens in (None, chunk):
        logits = batch.logits.float().requires_grad_()
        loss, metrics = batch.from_logits(logits, mode="tis", chunk_tokens=chunk_tokens)
        results.append((loss, grad_of(loss, logits)[0], *metrics))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut_along_length"])
def test_padded_batch_gives_what_its_rows_give(cut):
    """[batch, length], also as the view `logits[:, :-1]`, which is no single matrix."""
    batch = Batch(10, rows=12)
    whole = torch.zeros(3, 5, 19, dtype=torch.float64)
    whole[:, :4] = batch.logits.view(3, 4, 19)
    padded = (whole[:, :4] if cut else whole[:, :4].clone()).requires_grad_()
    recorded = [x.reshape(3, 4, *x.shape[1:]) for x in batch.recorded()]
    loss, metrics = rl.score_centering_loss_from_logits(
        padded, batch.token_ids.view(3, 4), *recorded, chunk_tokens=3, mode="mis"
    )
    flat = batch.logits.clone().requires_grad_()
    flat_loss, flat_metrics = batch.from_logits(flat, mode="mis")
    assert loss.shape == (3, 4)
    close(loss.view(-1), flat_loss)
    close(grad_of(loss, padded)[0].reshape(12, 19), grad_of(flat_loss, flat)[0])
    for one, other in zip(metrics, flat_metrics, strict=True):
        close(one.view(-1), other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_worked_on_in_float32(dtype):
    batch = Batch(11)
    low = batch.logits.to(dtype).requires_grad_()
    full = low.detach().float().requires_grad_()
    loss, metrics = batch.from_logits(low, mode="mis")
    full_loss, full_metrics = batch.from_logits(full, mode="mis")
    assert loss.dtype == torch.float32
    assert torch.equal(loss, full_loss)
    (grad,) = grad_of(loss, low)
    assert grad.dtype == dtype
    assert torch.equal(grad, grad_of(full_loss, full)[0].to(dtype))
    for one, other in zip(metrics, full_metrics, strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_gathered_inputs_get_gradients_of_their_own_dtype(dtype):
    batch = Batch(12)
    log_p = torch.log_softmax(batch.logits, dim=-1)
    token = log_p.gather(1, batch.token_ids[:, None])[:, 0].to(dtype).requires_grad_()
    topk = log_p.gather(1, batch.topk_ids).to(dtype).requires_grad_()
    loss, _ = rl.score_centering_loss(token, topk, *batch.recorded())
    assert loss.dtype == torch.float32
    assert [grad.dtype for grad in grad_of(loss, token, topk)] == [dtype, dtype]


def test_weight_of_another_dtype_and_autocast():
    """A bfloat16 hidden state with a float32 weight, as under autocast: the hidden's dtype holds."""
    batch = Batch(13)
    hidden = torch.randn(7, 4, generator=torch.manual_seed(3)).bfloat16().requires_grad_()
    weight = torch.randn(19, 4, generator=torch.manual_seed(4)).requires_grad_()
    arguments = (hidden, weight, batch.token_ids, *batch.recorded())
    plain, _ = rl.score_centering_loss_from_hidden(*arguments)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under, _ = rl.score_centering_loss_from_hidden(*arguments, chunk_tokens=2)
        grads = grad_of(under, hidden, weight)
    assert torch.equal(plain, under)
    expected = grad_of(plain, hidden, weight)
    assert [grad.dtype for grad in grads] == [torch.bfloat16, torch.float32]
    close(grads[0], expected[0], rtol=0, atol=0)
    # Each chunk's product is rounded to bfloat16 once, and their sum is not.
    close(grads[1], expected[1], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_hidden_or_weight_alone_can_need_a_gradient(frozen):
    batch = Batch(14)
    hidden, weight = torch.randn(7, 4), torch.randn(19, 4)
    trained = weight if frozen == "hidden" else hidden
    trained.requires_grad_()
    loss, _ = rl.score_centering_loss_from_hidden(
        hidden, weight, batch.token_ids, *batch.recorded()
    )
    expected, _ = batch.from_logits(hidden @ weight.t())
    close(grad_of(loss, trained)[0], grad_of(expected, trained)[0], rtol=1e-4, atol=1e-5)


def test_no_tokens_and_no_candidates():
    empty = Batch(15, rows=1)
    none = [x[:0] for x in empty.recorded()]
    logits = empty.logits[:0].clone().requires_grad_()
    loss, metrics = rl.score_centering_loss_from_logits(logits, empty.token_ids[:0], *none)
    assert loss.shape == (0,)
    assert grad_of(loss, logits)[0].shape == (0, 19)
    assert all(metric.shape == (0,) for metric in metrics)

    # Without candidates, by width or because all slots are empty: the plain weighted score.
    batch = Batch(15)
    expected = -batch.advantages * torch.log_softmax(batch.logits, dim=-1).gather(
        1, batch.token_ids[:, None]
    ).squeeze(1)
    for ids in (batch.topk_ids[:, :0], torch.full_like(batch.topk_ids, -1)):
        batch.topk_ids, batch.topk_logprobs = ids, torch.full(ids.shape, -INF)
        loss, metrics = batch.from_logits(batch.logits)
        close(loss, expected)
        assert torch.equal(metrics.rho, torch.ones(7))
        assert not metrics.correction_size.any()


def test_only_the_trainers_logprobs_carry_gradient():
    batch = Batch(16)
    for name in ("rollout_logprobs", "topk_logprobs", "advantages"):
        getattr(batch, name).requires_grad_()
    logits = batch.logits.clone().requires_grad_()
    loss, metrics = batch.from_logits(logits)
    loss.sum().backward()
    assert logits.grad is not None
    assert batch.rollout_logprobs.grad is None
    assert batch.topk_logprobs.grad is None
    assert batch.advantages.grad is None
    assert not any(metric.requires_grad for metric in metrics)


# --- what takes no part --------------------------------------------------------------------------

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


def run_batch(batch, method, logits, mode, support):
    """Loss, and the gradient on the first input of the method (gathered: on the candidates')."""
    settings = {"mode": mode, "support": support}
    logits = logits.clone().requires_grad_()
    if method == "gathered":
        log_p = torch.log_softmax(logits.detach(), dim=-1)
        topk = log_p.gather(1, batch.topk_ids).requires_grad_()
        token = log_p.gather(1, batch.token_ids[:, None])[:, 0].requires_grad_()
        loss, _ = rl.score_centering_loss(token, topk, *batch.recorded(), **settings)
        grad_token, grad_topk = grad_of(loss, token, topk)
        return loss, torch.cat((grad_token[:, None], grad_topk), dim=1)
    if method == "logits":
        loss, _ = batch.from_logits(logits, **settings)
        return loss, grad_of(loss, logits)[0]
    loss, _ = rl.score_centering_loss_from_hidden(
        logits, torch.eye(19).double(), batch.token_ids, *batch.recorded(), **settings
    )
    return loss, grad_of(loss, logits)[0]


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
    """The trainer gives a candidate, and the sampled token, probability 0; and so did the sampler."""
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
        # Here every coefficient of a log 0 is 0, so the naive form with 0 * log 0 = 0 is the answer.
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
    q_tail = torch.tensor([0.9, 0.5, 0.3, 0.1, 0.01, 1e-9]).double()
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


def support_batch(seed):
    """Rows of 5, 3 and fewer candidates, whose logprobs are normalised over the row."""
    batch = Batch(seed, rows=6)
    for row, width in enumerate((5, 3, 1, 2, 4, 5)):
        batch.topk_ids[row, width:] = -1
        batch.topk_logprobs[row, width:] = -INF
        batch.token_ids[row] = batch.topk_ids[row, width - 1]
    batch.topk_logprobs = torch.log_softmax(batch.topk_logprobs, dim=-1)
    batch.rollout_logprobs = batch.topk_logprobs.gather(
        1, (batch.topk_ids == batch.token_ids[:, None]).int().argmax(1, keepdim=True)
    )[:, 0]
    return batch


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


# --- the gradient over the logits ----------------------------------------------------------------


def test_reuse_logits_gives_the_same_gradient_in_the_logits_own_memory():
    batch = Batch(26)
    grads, where = [], []
    for reuse in (False, True):
        base = batch.logits.float().requires_grad_()
        logits = base * 1.0
        logits.register_hook(lambda grad: where.append(grad.data_ptr()))
        loss, _ = batch.from_logits(logits, reuse_logits=reuse, mode="tis", chunk_tokens=2)
        loss.sum().backward()
        grads.append(base.grad)
        where.append(logits.data_ptr())
    assert torch.equal(grads[0], grads[1])
    assert where[0] != where[1]
    assert where[2] == where[3]


def test_reuse_logits_is_refused_or_noticed_where_it_would_be_wrong():
    batch = Batch(27)
    leaf = batch.logits.clone().requires_grad_()
    with pytest.raises(ValueError, match="^reuse_logits: "):
        batch.from_logits(leaf, reuse_logits=True)
    # Someone else saved the logits: autograd's error, not a wrong gradient.
    logits = leaf * 1.0
    loss, _ = batch.from_logits(logits, reuse_logits=True)
    squares = (logits * logits).sum()
    (loss.sum() + 0).backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()
    # A second backward as well.
    loss, _ = batch.from_logits(leaf * 1.0, reuse_logits=True)
    loss.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.sum().backward()


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
    with pytest.raises(ValueError, match="^topk_ids: .*no candidates"):
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
