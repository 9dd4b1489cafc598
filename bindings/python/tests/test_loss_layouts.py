"""The loss in every layout: shapes, chunks, dtypes, and the gradient over the logits."""

from __future__ import annotations

import pytest
import torch
from loss_reference import INF, Batch, close, grad_of, naive

from rollstore import loss as rl

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
    """bfloat16 hidden states, a float32 weight, as under autocast: the product is bfloat16."""
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


def test_autocast_does_not_lower_a_float32_product():
    batch = Batch(33)
    hidden = torch.randn(7, 4, generator=torch.manual_seed(7)).requires_grad_()
    weight = torch.randn(19, 4, generator=torch.manual_seed(8)).requires_grad_()
    arguments = (hidden, weight, batch.token_ids, *batch.recorded())
    plain, _ = rl.score_centering_loss_from_hidden(*arguments)
    expected = grad_of(plain, hidden, weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under, _ = rl.score_centering_loss_from_hidden(*arguments)
        grads = grad_of(under, hidden, weight)
    assert torch.equal(plain, under)
    for one, other in zip(grads, expected, strict=True):
        assert torch.equal(one, other)


def test_bfloat16_weights_gradient_is_summed_in_float32():
    """512 chunks of one row: summed in bfloat16, each would be rounded to the sum's 8 bits."""
    batch = Batch(34, rows=512)
    batch.advantages = batch.advantages.abs()
    hidden = torch.randn(512, 4, generator=torch.manual_seed(9)).abs().bfloat16()
    weight = torch.randn(19, 4, generator=torch.manual_seed(10)).bfloat16().requires_grad_()
    loss, _ = rl.score_centering_loss_from_hidden(
        hidden, weight, batch.token_ids, *batch.recorded(), chunk_tokens=1
    )
    logits = (hidden @ weight.t()).double()
    exact_loss = naive(batch, logits.detach().requires_grad_())
    exact_logits = logits.detach().requires_grad_()
    (grad_logits,) = grad_of(naive(batch, exact_logits), exact_logits)
    exact = grad_logits.t() @ hidden.double()
    close(loss, exact_loss, rtol=1e-4, atol=1e-5)
    (grad,) = grad_of(loss, weight)
    error = (grad.double() - exact).abs().max() / exact.abs().max()
    assert error < 4e-3  # one rounding to bfloat16 is 2e-3


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
    with pytest.raises(ValueError, match=r"^reuse_logits: "):
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
