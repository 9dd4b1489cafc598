"""No second [tokens, vocab] tensor: counted at each operation, and under a limit on memory."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from loss_reference import Batch, grad_of, naive
from torch.utils._python_dispatch import TorchDispatchMode

from rollstore import loss as rl

ROWS, VOCAB = 24, 50


class LargeTensors(TorchDispatchMode):
    """Collects each new block of memory that holds at least `elements` elements.

    The tensors are kept, so that no block is given out twice and counted once.
    """

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements = elements
        self.seen: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {value.data_ptr() for value in args if isinstance(value, torch.Tensor)}
        known |= {tensor.data_ptr() for tensor in self.seen}
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            large = isinstance(value, torch.Tensor) and value.numel() >= self.elements
            if large and value.data_ptr() not in known:
                self.seen.append(value)
        return result

    def shapes(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return [(tuple(tensor.shape), tensor.dtype) for tensor in self.seen]


def large_tensors(how: str, dtype: torch.dtype, support: bool = False) -> list[Any]:
    """[tokens, vocab] blocks that loss and gradient make beside the logits themselves."""
    batch = Batch(1, rows=ROWS, vocab=VOCAB)
    if support:
        batch.token_ids = batch.topk_ids[:, 0]
    settings = {"mode": "tis", "chunk_tokens": 4, "support": support}
    logits = batch.logits.to(dtype).requires_grad_()
    hidden, weight = torch.randn(ROWS, 4).to(dtype), torch.randn(VOCAB, 4).to(dtype)
    output = logits * 1
    with LargeTensors(ROWS * VOCAB) as large:
        if how == "naive":
            grad_of(naive(batch, logits.float(), mode="tis"), logits)
        elif how == "logits":
            grad_of(batch.from_logits(logits, **settings)[0], logits)
        elif how == "reuse":
            grad_of(batch.from_logits(output, reuse_logits=True, **settings)[0], output)
        else:
            hidden.requires_grad_()
            weight.requires_grad_()
            loss, _ = rl.score_centering_loss_from_hidden(
                hidden, weight, batch.token_ids, *batch.recorded(), **settings
            )
            grad_of(loss, hidden, weight)
    return large.shapes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("support", [False, True], ids=["selected", "support"])
def test_only_the_gradient_has_the_logits_shape(support, dtype):
    assert large_tensors("logits", dtype, support) == [((ROWS, VOCAB), dtype)]
    assert large_tensors("reuse", dtype, support) == []
    assert large_tensors("hidden", dtype, support) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_count_sees_the_naive_form(dtype):
    """Its log-softmax, in forward, and what its backward makes: more than the gradient alone."""
    assert len(large_tensors("naive", dtype)) >= 3


def test_forward_saves_the_logits_and_nothing_else_of_their_size():
    batch = Batch(2, rows=ROWS, vocab=VOCAB)
    logits = batch.logits.float().requires_grad_()

    def saved_by(make: Any) -> list[torch.Tensor]:
        saved: list[torch.Tensor] = []

        def pack(value: torch.Tensor) -> torch.Tensor:
            if value.numel() >= ROWS * VOCAB:
                saved.append(value)
            return value

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
            make()
        return saved

    ours = saved_by(lambda: batch.from_logits(logits, chunk_tokens=4))
    assert [value.data_ptr() for value in ours] == [logits.data_ptr()]
    theirs = saved_by(lambda: naive(batch, logits))
    assert any(value.data_ptr() != logits.data_ptr() for value in theirs)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: its memory was NOT tested")
@pytest.mark.parametrize("how", ["logits", "reuse", "hidden"])
def test_memory_on_a_gpu_at_real_size(how: str):
    """4,096 tokens of a vocabulary of 151,936 in bfloat16: 1.2 GB of logits."""
    rows, vocab, width, k = 4096, 151936, 256, 32
    make = torch.Generator("cuda").manual_seed(1)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=make, device="cuda", dtype=dtype)

    ids = torch.randint(0, vocab, (rows, k), generator=make, device="cuda")
    tokens = (
        ids[:, 0],
        normal(rows) - 12,
        ids,
        normal(rows, k) - 12,
        normal(rows),
        torch.ones(rows, dtype=torch.bool, device="cuda"),
    )
    hidden, weight = normal(rows, width, dtype=torch.bfloat16), normal(vocab, width).bfloat16()
    hidden.requires_grad_()
    weight.requires_grad_()
    size = rows * vocab * 2
    logits = hidden @ weight.T if how != "hidden" else None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    if logits is None:
        loss, _ = rl.score_centering_loss_from_hidden(hidden, weight, *tokens, mode="tis")
    else:
        loss, _ = rl.score_centering_loss_from_logits(
            logits, *tokens, mode="tis", reuse_logits=how == "reuse"
        )
    (grad,) = grad_of(loss, hidden if logits is None else logits)
    beside = torch.cuda.max_memory_allocated() - before
    assert bool(torch.isfinite(loss).all()) and bool(torch.isfinite(grad).all())
    # Kernels need no buffer of a chunk; without Triton there are some, of 256 MiB.
    buffer = (64 if importlib.util.find_spec("triton") else 256) << 20
    chunk = {"logits": buffer, "reuse": buffer, "hidden": 512 << 20}[how]
    answer = {"logits": size, "reuse": 0, "hidden": vocab * width * 4}[how]
    assert beside < answer + 4 * chunk, f"{beside >> 20} MiB beside {size >> 20} MiB of logits"


PROGRAM = """
import resource, sys, torch
from rollstore import loss as rl
how, allowed, rows, vocab, k = sys.argv[1], float(sys.argv[2]), 256, 65536, 8
torch.set_num_threads(1)

def address_space():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()

def inputs(rows, vocab):
    ids = torch.arange(rows * k).view(rows, k) % vocab
    return (
        torch.arange(rows) % vocab, torch.full((rows,), -2.0), ids, torch.full((rows, k), -3.0),
        torch.ones(rows), torch.ones(rows, dtype=torch.bool),
    )

def work(rows, vocab, logits):
    token_ids, *recorded = inputs(rows, vocab)
    if how == "naive":
        log_p = torch.log_softmax(logits, dim=-1)
        token = log_p.gather(1, token_ids[:, None])[:, 0]
        loss, _ = rl.score_centering_loss(token, log_p.gather(1, recorded[1]), *recorded)
    elif how == "hidden":
        weight = torch.ones(vocab, 2).requires_grad_()
        loss, _ = rl.score_centering_loss_from_hidden(
            torch.ones(rows, 2), weight, token_ids, *recorded, chunk_tokens=8)
    else:
        loss, _ = rl.score_centering_loss_from_logits(
            logits, token_ids, *recorded, chunk_tokens=8, reuse_logits=how == "reuse")
    loss.sum().backward()

def logits_of(rows, vocab):
    leaf = torch.zeros(1).requires_grad_()
    return torch.ones(rows, vocab).add_(leaf)

work(4, 64, logits_of(4, 64))
logits = logits_of(rows, vocab)
limit = address_space() + int(allowed * logits.numel() * logits.element_size())
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    work(rows, vocab, logits)
except (MemoryError, RuntimeError) as error:
    assert isinstance(error, MemoryError) or "allocate memory" in str(error), error
    print("does not fit")
else:
    print("fits")
"""


@pytest.mark.parametrize(
    ("how", "allowed", "answer"),
    [
        ("logits", 1.4, "fits"),
        ("logits", 0.9, "does not fit"),
        ("reuse", 0.4, "fits"),
        ("hidden", 0.4, "fits"),
        ("naive", 1.4, "does not fit"),
        ("naive", 6.0, "fits"),
    ],
)
def test_memory_beyond_the_logits(how, allowed, answer):
    """`allowed` is in units of the logits' own 64 MiB; the naive form sets the scale.

    A limit on the address space is exact, which the kernel's count of resident pages is not.
    """
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, how, str(allowed)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"MALLOC_ARENA_MAX": "1"},
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == answer
