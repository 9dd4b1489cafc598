"""What a GPU host gets: batches, the store's own pages and the loss; one Markdown table.

    gpu.py [--sessions N] [--tokens N] [--top-k K]

Needs an NVIDIA GPU, PyTorch with CUDA and the rollstore package; makes a store in /dev/shm. Times
are medians.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rollstore
from rollstore import cuda
from rollstore.loss import score_centering_loss, score_centering_loss_from_logits
from rollstore.torch import ConsumerLoader


def median_ms(step: Callable[[], Any], rounds: int = 15) -> float:
    """Of step() and everything it left to the GPU; after two rounds that do not count."""
    times = []
    for _ in range(rounds + 2):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begun) * 1000)
    return statistics.median(times[2:])


def fill(store: rollstore.Store, sessions: int, tokens: int, top_k: int) -> None:
    random = np.random.default_rng(1)
    for number in range(sessions):
        ids = (
            random.integers(0, 140000, (tokens, 1), np.int32) + np.arange(top_k, dtype=np.int32) * 7
        )
        logprobs = -np.sort(random.exponential(3, (tokens, top_k)).astype(np.float32))
        store.put(
            f"s{number}",
            0,
            prompt=list(range(500)),
            token_ids=ids[:, 0].copy(),
            token_logprobs=logprobs[:, 0].copy(),
            topk_ids=ids,
            topk_logprobs=logprobs,
            weight_version=1,
        )
        store.seal(f"s{number}", reward=float(number % 2), group_index=number // 8, index=number)


def row(what: str, value: str, beside: str = "") -> None:
    print(f"| {what} | {value} | {beside} |", flush=True)


def rate(size: int, ms: float) -> str:
    return f"{ms:.2f} ms, {size / ms / 1e6:.1f} GB/s"


def copies(store: rollstore.Store) -> None:
    """The same sessions as a batch and as turns, from memory that is locked and that is not."""
    copier = cuda.Copier()
    with store.snapshot() as snapshot:
        ready = list(snapshot.ready())
        pinned = snapshot.batch(ready, pin_memory=True)
        plain = snapshot.batch(ready, torch=True)
        size = sum(array.nbytes for array in pinned.arrays.values())
        fast = median_ms(lambda: snapshot.batch(ready, pin_memory=True, out=pinned, threads=4))
        row(f"batch of {size >> 20} MiB into pinned memory, 4 threads", rate(size, fast))
        slow = median_ms(lambda: copier.copy(plain))
        fast = median_ms(lambda: copier.copy(pinned))
        row("pinned batch to the GPU", rate(size, fast), f"{slow / fast:.1f}x pageable memory")

        def turns() -> None:
            for session in ready:
                turn = session[0]
                copier.copy({"ids": turn.topk_ids, "logprobs": turn.topk_logprobs})

        size = sum(session[0].topk_ids.nbytes * 2 for session in ready)
        slow = median_ms(turns)
        begun = time.perf_counter()
        with cuda.register(store) as registration:
            took = time.perf_counter() - begun
            fast = median_ms(turns)
            what = f"turns from the store's map, {registration.size >> 20} MiB locked"
            row(what, rate(size, fast), f"{slow / fast:.1f}x the map not locked")
        row("locking the map, once", f"{took * 1000:.0f} ms")


def overlap(store: rollstore.Store, batch_size: int) -> None:
    """A loop over batches on the GPU with a step of training beside it, and each by itself."""
    left = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        for _ in range(12):
            torch.mm(left, left)

    def loop(consumer: str, body: Callable[[], None]) -> float:
        times = []
        arguments: dict[str, Any] = {"batch_size": batch_size, "threads": 4, "follow": False}
        with ConsumerLoader(store, consumer, device="cuda", prefetch=3, **arguments) as loader:
            begun = time.perf_counter()
            for batch in loader:
                body()
                assert batch.tensors["topk_ids"].is_cuda
                torch.cuda.synchronize()
                times.append((time.perf_counter() - begun) * 1000)
                begun = time.perf_counter()
        return statistics.median(times[4:])

    alone = median_ms(step)
    reading = loop("reads", lambda: None)
    both = loop("trains", step)
    row("a step of training by itself", f"{alone:.1f} ms")
    row(f"a batch of {batch_size} sessions by itself", f"{reading:.1f} ms")
    row("both, with ConsumerLoader(device=...)", f"{both:.1f} ms", f"{both / alone:.2f}x the step")


def loss(tokens: int, top_k: int) -> None:
    vocab = 151936
    make = torch.Generator("cuda").manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=make, device="cuda")

    logits = normal(tokens, vocab).bfloat16().requires_grad_()
    ids = torch.randint(0, vocab, (tokens, top_k), generator=make, device="cuda")
    recorded = (
        normal(tokens) - 12,
        ids,
        normal(tokens, top_k) - 12,
        normal(tokens),
        torch.ones(tokens, dtype=torch.bool, device="cuda"),
    )
    size = logits.nbytes

    def ours() -> None:
        value, _ = score_centering_loss_from_logits(logits, ids[:, 0], *recorded, mode="tis")
        torch.autograd.grad(value.sum(), logits)

    def whole() -> None:
        log_p = torch.log_softmax(logits.float(), dim=-1)
        token = log_p.gather(1, ids[:, :1])[:, 0]
        value, _ = score_centering_loss(token, log_p.gather(1, ids), *recorded, mode="tis")
        torch.autograd.grad(value.sum(), logits)

    def peak(step: Callable[[], None]) -> int:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated() - before

    memory, theirs = peak(ours), peak(whole)
    ms, whole_ms = median_ms(ours), median_ms(whole)
    what = f"loss and gradient, {tokens} tokens x {vocab} logits in bfloat16 ({size / 1e9:.1f} GB)"
    row(what, f"{ms:.1f} ms", f"{whole_ms / ms:.1f}x a float32 log-softmax ({whole_ms:.1f} ms)")
    beside = f"{theirs / 1e9:.1f} GB with the log-softmax"
    row("memory beside the logits, its gradient included", f"{memory / 1e9:.1f} GB", beside)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--top-k", type=int, default=32)
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu.py: no GPU here: nothing was measured", file=sys.stderr)
        return 1
    folder = Path(tempfile.mkdtemp(prefix="rollstore-gpu-", dir="/dev/shm"))
    try:
        print(f"| {torch.cuda.get_device_name()}, torch {torch.__version__} | here | beside |")
        print("| --- | --- | --- |")
        with rollstore.open(folder / "store", "x", capacity="2G") as store:
            fill(store, asked.sessions, asked.tokens, asked.top_k)
            copies(store)
            overlap(store, max(1, asked.sessions // 16))
        loss(8192, asked.top_k)
    finally:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
