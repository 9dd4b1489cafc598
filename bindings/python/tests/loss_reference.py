"""For the tests of the loss: random tokens, the formula as it is written, and comparisons."""

from __future__ import annotations

import math

import torch

from rollstore import loss as rl

INF = math.inf
METHODS = ("gathered", "logits", "hidden")
MODES = ("none", "tis", "mis")


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
    """The formula as it is written, on log-probabilities [T, vocab], in their dtype."""

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
