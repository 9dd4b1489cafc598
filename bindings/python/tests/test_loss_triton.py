"""The kernels of a GPU: what PyTorch's operations give, and what double precision gives.

Without a GPU, Triton's interpreter runs them where it is asked for: TRITON_INTERPRET=1.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch
from loss_reference import INF, MODES, grad_of

from rollstore import _gather
from rollstore import loss as rl

HAS_GPU = torch.cuda.is_available()
INTERPRETED = not HAS_GPU and os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="no GPU here: this was NOT tested on one")
needs_kernels = pytest.mark.skipif(
    not HAS_GPU and not INTERPRETED, reason="no GPU here: the loss's kernels were NOT tested"
)
if HAS_GPU or INTERPRETED:
    kernels = pytest.importorskip("rollstore._gather_triton")

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
# Of one rounding to the dtype; float32's is that of the arithmetic.
ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


class Ways:
    """Runs the same work with the kernels and without, and sees to it that it is so."""

    def __init__(self, monkeypatch):
        self.monkeypatch = monkeypatch
        self.calls = []
        for name in ("row_stats", "write_gradient"):
            monkeypatch.setattr(kernels, name, self.counted(name, getattr(kernels, name)))
        if INTERPRETED:
            monkeypatch.setattr(_gather, "_kernels", self.on_cpu)

    def counted(self, name, function):
        def call(*arguments):
            self.calls.append(name)
            return function(*arguments)

        return call

    @staticmethod
    def on_cpu(logits, plan):
        fits = kernels.fits(logits, plan.topk_ids.shape[1])
        return kernels if fits and os.environ.get("ROLLSTORE_TRITON") != "0" else None

    def kernels(self, work, calls=("row_stats", "write_gradient")):
        self.monkeypatch.delenv("ROLLSTORE_TRITON", raising=False)
        self.calls.clear()
        result = work()
        assert tuple(sorted(set(self.calls))) == tuple(sorted(calls))
        return result

    def operations(self, work):
        self.monkeypatch.setenv("ROLLSTORE_TRITON", "0")
        self.calls.clear()
        result = work()
        assert not self.calls
        return result


@pytest.fixture
def ways(monkeypatch):
    return Ways(monkeypatch)


class Rows:
    """Random logits with all that is odd in some row, ids with gaps, and gradients for them."""

    def __init__(self, rows=9, vocab=1000, k=32, dtype=torch.float32, per_row=False, seed=1):
        make = torch.Generator().manual_seed(seed)
        logits = (torch.randn(rows, vocab, generator=make) * 4).to(dtype)
        logits[1, vocab // 2 :] = -INF
        logits[2] = -INF
        logits[3] = math.nan
        logits[4, :1] += 30
        self.logits = logits.to(DEVICE)
        ids = torch.rand(rows, vocab, generator=make).topk(k, dim=1).indices
        token_ids = torch.randint(0, vocab, (rows,), generator=make)
        ids[5, k // 2 :] = -1
        token_ids[6] = -1
        down = [torch.randn(rows, generator=make), torch.randn(rows, k, generator=make)]
        for grad in down:
            grad[3] = grad[7] = 0  # rows that need no gradient
        self.ids, self.token_ids = ids.to(DEVICE), token_ids.to(DEVICE)
        self.down = tuple(grad.to(DEVICE) for grad in down)
        temperature = torch.rand(rows, generator=make) + 0.5
        self.temperature = temperature.to(DEVICE) if per_row else 0.7

    def gathered(self, logits=None, **settings):
        """Values of the token and the candidates, and the gradient of the logits."""
        logits = (self.logits if logits is None else logits).detach().requires_grad_()
        shape = logits.shape[:-1]
        temperature = self.temperature
        if isinstance(temperature, torch.Tensor):
            temperature = temperature.view(shape)
        values = rl.gather_logprobs(
            logits * 1 if settings.get("reuse_logits") else logits,
            self.token_ids.view(shape),
            self.ids.view(*shape, -1) if self.ids.numel() else self.ids.view(*shape, 0),
            temperature=temperature,
            **settings,
        )
        down = [grad.view(value.shape) for grad, value in zip(self.down, values, strict=True)]
        return (*values, torch.autograd.grad(values, logits, down)[0])

    def exact(self):
        """The same by autograd in double; only rows without NaN have an answer."""
        logits = self.logits.double().requires_grad_()
        temperature = self.temperature
        if isinstance(temperature, torch.Tensor):
            temperature = temperature[:, None].double()
        log_p = torch.log_softmax(logits / temperature, dim=-1)
        ids = torch.cat((self.token_ids[:, None], self.ids), dim=1)
        down = torch.cat((self.down[0][:, None], self.down[1]), dim=1).double()
        picked = log_p.gather(1, ids.clamp(min=0))
        (grad,) = torch.autograd.grad(picked, logits, down.masked_fill(ids < 0, 0))
        picked = picked.masked_fill(ids < 0, -INF)
        return picked[:, 0], picked[:, 1:], grad


def same(one, other, rounding):
    for left, right in zip(one, other, strict=True):
        torch.testing.assert_close(
            left.double(), right.double(), rtol=rounding, atol=3e-6, equal_nan=True
        )


SIZES = [(1, 0), (1, 1), (2, 1), (31, 31), (1000, 0), (1000, 32), (4096, 128), (50257, 32)]
LARGE = [(151936, 1), (151936, 128)]


@needs_kernels
@pytest.mark.parametrize("per_row", [False, True], ids=["temperature", "temperatures"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize(("vocab", "k"), SIZES + LARGE)
def test_kernels_give_what_operations_and_double_precision_give(ways, vocab, k, dtype, per_row):
    rows = Rows(vocab=vocab, k=k, dtype=dtype, per_row=per_row)
    ours = ways.kernels(rows.gathered)
    same(ours, ways.operations(rows.gathered), ROUNDING[dtype])
    assert not ours[2][rows.logits.isnan().any(1)].any()
    assert not ours[2][7].any()
    assert ours[2].dtype == dtype
    finite = ~(rows.logits.isnan() | (rows.logits == -INF).all(1, keepdim=True)).any(1)
    # A float32 z is off by z * 6e-8, which dividing by a temperature makes no better.
    for one, exact in zip(ours, rows.exact(), strict=True):
        torch.testing.assert_close(
            one[finite].double(), exact[finite], rtol=ROUNDING[dtype], atol=1e-5
        )


@needs_kernels
def test_infinities_and_nan_are_passed_on(ways):
    rows = Rows(rows=12)
    rows.logits[5, 3], rows.logits[6, [3, 900]], rows.logits[8, 9] = INF, INF, math.nan
    rows.logits[9, 0], rows.logits[9, 999] = INF, math.nan
    rows.token_ids[5:9] = 3
    ours, theirs = ways.kernels(rows.gathered), ways.operations(rows.gathered)
    same(ours, theirs, 1e-5)
    assert ours[0][[5, 6, 8, 9]].isnan().all()


@needs_kernels
def test_a_peaked_row_keeps_its_small_tail(ways):
    logits = torch.tensor([[20.0, 6.2, 5.1, -3.0]], device=DEVICE)
    exact = torch.log_softmax(logits.double(), dim=-1)
    ids = torch.arange(4, device=DEVICE)[None]
    token, topk = ways.kernels(lambda: rl.gather_logprobs(logits, ids[:, 0], ids), ["row_stats"])
    assert abs(torch.expm1(token.double()) / torch.expm1(exact[:, 0]) - 1).item() < 1e-5
    torch.testing.assert_close(topk.double(), exact, rtol=1e-5, atol=0)


@needs_kernels
def test_an_id_twice_is_counted_twice(ways):
    rows = Rows(rows=9, vocab=40, k=20)
    rows.logits[3] = 0.0
    rows.ids[:, 10:] = rows.ids[:, :10].flip(1)
    rows.token_ids[0] = rows.ids[0, 0]
    ours = ways.kernels(rows.gathered)
    finite = torch.arange(9, device=DEVICE) != 2
    torch.testing.assert_close(
        ours[2][finite].double(), rows.exact()[2][finite], rtol=1e-5, atol=1e-5
    )


def cut_along_length(logits):
    whole = torch.full((2, 7, logits.shape[1]), math.nan, device=DEVICE, dtype=logits.dtype)
    whole[:, :-1] = logits.view(2, 6, -1)
    return whole[:, :-1]


def cut_along_vocabulary(logits):
    whole = torch.full((12, logits.shape[1] + 24), math.nan, device=DEVICE, dtype=logits.dtype)
    whole[:, 8:-16] = logits
    return whole[:, 8:-16]


LAYOUTS = {
    "batch x length": lambda logits: logits.view(2, 6, -1),
    "four dimensions": lambda logits: logits.view(2, 3, 2, -1),
    "cut along length": cut_along_length,
    "cut along vocabulary": cut_along_vocabulary,
}


@needs_kernels
@pytest.mark.parametrize("reuse", [False, True], ids=["fresh", "reuse"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_give_the_same(ways, layout, reuse):
    rows = Rows(rows=12, dtype=torch.bfloat16, per_row=True)
    expected = ways.kernels(rows.gathered)
    logits = LAYOUTS[layout](rows.logits)
    ours = ways.kernels(lambda: rows.gathered(logits, reuse_logits=reuse))
    ours = [one.reshape(other.shape) for one, other in zip(ours, expected, strict=True)]
    if layout == "cut along vocabulary":
        # Its rows begin where other, wider loads are possible, and are summed in another order.
        same(ours, expected, ROUNDING[torch.bfloat16])
        return
    for one, other in zip(ours, expected, strict=True):
        assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))


@needs_kernels
@pytest.mark.parametrize("what", ["columns", "candidates", "subclass"])
def test_operations_do_what_kernels_do_not_take(ways, what):
    rows = Rows(vocab=2000, k=1500 if what == "candidates" else 5)
    logits = rows.logits
    if what == "columns":
        logits = logits.t().contiguous().t()
    elif what == "subclass":
        logits = logits.as_subclass(type("Subclass", (torch.Tensor,), {}))
    ways.kernels(lambda: rl.gather_logprobs(logits, rows.token_ids, rows.ids), calls=())


@needs_kernels
@pytest.mark.parametrize("support", [False, True], ids=["selected", "support"])
@pytest.mark.parametrize("mode", MODES)
def test_losses_are_those_of_the_operations(ways, mode, support):
    rows = Rows(rows=16, vocab=5000, k=20)
    make = torch.Generator(DEVICE).manual_seed(2)
    mask = torch.ones(16, dtype=torch.bool, device=DEVICE)
    mask[[1, 2, 3, 5, 6]] = False
    rows.token_ids[mask] = rows.ids[mask, 4]
    q = torch.randn(16, 20, generator=make, device=DEVICE) - 6
    hidden = torch.randn(16, 8, generator=make, device=DEVICE).requires_grad_()
    weight = torch.randn(5000, 8, generator=make, device=DEVICE).requires_grad_()
    advantages = torch.randn(16, generator=make, device=DEVICE)
    recorded = (rows.token_ids, q[:, 4], rows.ids, q, advantages, mask)
    settings = {"mode": mode, "support": support, "temperature": 0.7}

    def from_logits():
        logits = rows.logits.detach().requires_grad_()
        loss, metrics = rl.score_centering_loss_from_logits(logits, *recorded, **settings)
        return (loss, *metrics, *grad_of(loss, logits))

    def from_hidden():
        loss, metrics = rl.score_centering_loss_from_hidden(
            hidden, weight, *recorded, chunk_tokens=5, **settings
        )
        return (loss, *metrics, *grad_of(loss, hidden, weight))

    calls = ["write_gradient"] if support else ["row_stats", "write_gradient"]
    for work in (from_logits, from_hidden):
        ours, theirs = ways.kernels(work, calls), ways.operations(work)
        # Tails and what is summed over the vocabulary differ in their last bits.
        for one, other in zip(ours, theirs, strict=True):
            scale = 1 + other.abs().max().item()
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * scale)
    assert not from_logits()[-1][~mask].any()


@needs_kernels
def test_every_run_gives_the_same_bits(ways):
    rows = Rows(rows=16 if INTERPRETED else 600, vocab=50000, k=128, dtype=torch.bfloat16)
    rows.ids[:, 64:] = rows.ids[:, :64]
    first = ways.kernels(rows.gathered)
    for _ in range(3):
        for one, other in zip(ways.kernels(rows.gathered), first, strict=True):
            assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))


@needs_gpu
def test_more_logits_than_32_bits_count(ways):
    """16,384 rows of 151,936: the last ones lie 2.4 billion elements in."""
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("not enough memory on this GPU: large offsets were NOT tested")
    rows = Rows(rows=16, vocab=151936, k=32, dtype=torch.bfloat16)
    expected = ways.kernels(rows.gathered)
    logits = torch.empty(16384, 151936, dtype=torch.bfloat16, device=DEVICE)
    logits[-16:] = rows.logits
    many = Rows(rows=16384, vocab=32, k=32)
    many.ids[-16:], many.token_ids[-16:] = rows.ids, rows.token_ids
    for down, last in zip(many.down, rows.down, strict=True):
        down[-16:] = last
    logits[:-16] = 0
    leaf = logits.requires_grad_()
    values = rl.gather_logprobs(leaf, many.token_ids, many.ids, temperature=0.7)
    (grad,) = torch.autograd.grad(values, leaf, many.down)
    for one, other in zip((*values, grad), expected, strict=True):
        assert torch.equal(one[-16:].nan_to_num(7), other.nan_to_num(7))


@needs_gpu
@pytest.mark.parametrize("reuse", [False, True], ids=["fresh", "reuse"])
def test_a_cut_batch_is_not_copied(ways, reuse):
    """Beside the logits: their gradient, or nothing of their size."""
    whole = torch.randn(4, 65, 151936, device=DEVICE, dtype=torch.bfloat16)
    if reuse:
        whole = whole.requires_grad_() * 1
    logits = whole[:, :-1] if reuse else whole[:, :-1].requires_grad_()
    assert not logits.is_contiguous()
    ids = torch.zeros(*logits.shape[:2], 1, dtype=torch.int64, device=DEVICE)

    def beside():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        token, _ = rl.gather_logprobs(logits, ids[..., 0], ids, reuse_logits=reuse)
        (grad,) = torch.autograd.grad(token.sum(), logits)
        assert (grad.data_ptr() == logits.data_ptr()) == reuse
        return torch.cuda.max_memory_allocated() - before

    assert ways.kernels(beside) < (0.1 if reuse else 1.1) * logits.numel() * 2


@needs_gpu
def test_where_triton_cannot_make_kernels_a_warning_says_so(monkeypatch):
    class Broken:
        def __getitem__(self, grid):
            raise RuntimeError("no compiler")

    monkeypatch.setattr(kernels, "_nothing", Broken())
    with pytest.warns(RuntimeWarning, match="slower operations: no compiler"):
        assert not kernels.works.__wrapped__(torch.device("cuda"))


def test_the_loss_does_not_import_triton():
    """With torch alone in memory, neither Triton nor what needs it comes with the loss."""
    program = (
        "import sys, torch; before = set(sys.modules); import rollstore.loss; "
        "print([name for name in sys.modules if 'triton' in name and name not in before])"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"
