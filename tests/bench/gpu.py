"""What a GPU host gets: batches, the store's own pages and the loss; one Markdown table.

    gpu.py [--sessions N] [--batch N] [--tokens N] [--top-k K]

Needs an NVIDIA GPU, PyTorch with CUDA and the rollstore package; makes a store in /dev/shm, 1.8 GB
with the numbers given here. Times are medians.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rollstore
from rollstore import cuda
from rollstore.loss import (
    score_centering_loss,
    score_centering_loss_from_hidden,
    score_centering_loss_from_logits,
)
from rollstore.torch import ConsumerLoader

VOCAB = 151936


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
    """Sealed sessions of one turn, and a long turn of an open one."""
    random = np.random.default_rng(1)

    def put(session: str, tokens: int) -> None:
        first = random.integers(0, 140000, (tokens, 1), np.int32)
        logprobs = np.full((tokens, top_k), -7.5, np.float32)
        store.put(
            session,
            0,
            prompt=list(range(500)),
            token_ids=first[:, 0].copy(),
            token_logprobs=logprobs[:, 0].copy(),
            topk_ids=first + np.arange(top_k, dtype=np.int32) * 7,
            topk_logprobs=logprobs,
            weight_version=1,
        )

    for number in range(sessions):
        put(f"s{number}", tokens)
        store.seal(f"s{number}", reward=float(number % 2), group_index=number // 8, index=number)
    put("long", 64 * tokens)


def row(what: str, value: str, beside: str = "") -> None:
    print(f"| {what} | {value} | {beside} |", flush=True)


def rate(size: int, ms: float) -> str:
    return f"{ms:.2f} ms, {size / ms / 1e6:.1f} GB/s"


def copies(store: rollstore.Store, sessions: int) -> None:
    """The same sessions as a batch and as turns, from memory that is locked and that is not."""
    copier = cuda.Copier()
    with store.snapshot() as snapshot:
        ready = list(snapshot.ready())[:sessions]
        pinned = snapshot.batch(ready, pin_memory=True)
        plain = snapshot.batch(ready, torch=True)
        size = sum(array.nbytes for array in pinned.arrays.values())
        fast = median_ms(lambda: snapshot.batch(ready, pin_memory=True, out=pinned, threads=4))
        row(f"batch of {size >> 20} MiB into pinned memory, 4 threads", rate(size, fast))
        slow = median_ms(lambda: copier.copy(plain))
        fast = median_ms(lambda: copier.copy(pinned))
        row("pinned batch to the GPU", rate(size, fast), f"{slow / fast:.1f}x pageable memory")

        def turns(sessions: Sequence[rollstore.Session]) -> tuple[Callable[[], None], int]:
            """A copy of these sessions' turns, and its bytes."""

            def copy() -> None:
                views = {}
                for session in sessions:
                    turn = session[0]
                    views[session.id] = {"ids": turn.topk_ids, "logprobs": turn.topk_logprobs}
                copier.copy(views)

            return copy, sum(session[0].topk_ids.nbytes * 2 for session in sessions)

        many, many_size = turns(ready)
        long, long_size = turns([snapshot.sessions["long"]])
        slow, long_slow = median_ms(many), median_ms(long)
        begun = time.perf_counter()
        with cuda.register(store) as registration:
            took = (time.perf_counter() - begun) * 1000
            locked = registration.size >> 20
            fast, long_fast = median_ms(many), median_ms(long)
        what = f"{len(ready)} turns, {2 * len(ready)} arrays of {many_size >> 20} MiB, from the map"
        row(f"{what}, locked", rate(many_size, fast), f"{slow / fast:.1f}x the map not locked")
        what = f"one turn, 2 arrays of {long_size >> 20} MiB, from the map"
        speed = rate(long_size, long_fast)
        row(f"{what}, locked", speed, f"{long_slow / long_fast:.1f}x the map not locked")
        copies_worth = f"{took / fast:.0f} copies of those {len(ready)} turns"
        row(f"locking that map of {locked} MiB, once", f"{took:.0f} ms", copies_worth)


def overlap(store: rollstore.Store, batch_size: int) -> None:
    """A loop over batches on the GPU with a step of training beside it, and each by itself."""
    left = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        for _ in range(20):
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
    row(f"a batch of {batch_size} sessions on the GPU by itself", f"{reading:.1f} ms")
    row("both, with ConsumerLoader(device=...)", f"{both:.1f} ms", f"{both / alone:.2f}x the step")


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda")


def recorded_tokens(tokens: int, top_k: int) -> tuple[torch.Tensor, ...]:
    """What the loss takes after the trainer's own output, token ids first."""
    ids = torch.randint(0, VOCAB, (tokens, top_k), device="cuda")
    rollout, candidates, advantages = (
        normal(tokens) - 12,
        normal(tokens, top_k) - 12,
        normal(tokens),
    )
    mask = torch.ones(tokens, dtype=torch.bool, device="cuda")
    return ids[:, 0], rollout, ids, candidates, advantages, mask


def peak(step: Callable[[], None]) -> int:
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated() - before


def loss_from_logits(tokens: int, top_k: int) -> None:
    logits = normal(tokens, VOCAB).bfloat16().requires_grad_()
    token_ids, *recorded = recorded_tokens(tokens, top_k)

    def ours() -> None:
        value, _ = score_centering_loss_from_logits(logits, token_ids, *recorded, mode="tis")
        torch.autograd.grad(value.sum(), logits)

    def whole() -> None:
        log_p = torch.log_softmax(logits.float(), dim=-1)
        token, topk = log_p.gather(1, token_ids[:, None])[:, 0], log_p.gather(1, recorded[1])
        value, _ = score_centering_loss(token, topk, *recorded, mode="tis")
        torch.autograd.grad(value.sum(), logits)

    def without_kernels() -> None:
        os.environ["ROLLSTORE_TRITON"] = "0"
        ours()
        del os.environ["ROLLSTORE_TRITON"]

    ms, whole_ms, slow_ms = median_ms(ours), median_ms(whole), median_ms(without_kernels)
    what = f"loss and gradient, {tokens} tokens x {VOCAB} logits in bfloat16"
    row(what, f"{ms:.1f} ms", f"{whole_ms / ms:.1f}x a float32 log-softmax ({whole_ms:.1f} ms)")
    row("the same without Triton", f"{slow_ms:.1f} ms")
    what = f"memory beside the {logits.nbytes / 1e9:.1f} GB of logits, their gradient included"
    row(what, f"{peak(ours) / 1e9:.1f} GB", f"{peak(whole) / 1e9:.1f} GB with the log-softmax")


def loss_from_hidden(tokens: int, top_k: int, width: int = 4096) -> None:
    hidden = normal(tokens, width).bfloat16().requires_grad_()
    weight = (normal(VOCAB, width) / 64).bfloat16().requires_grad_()
    token_ids, *recorded = recorded_tokens(tokens, top_k)

    def ours() -> None:
        value, _ = score_centering_loss_from_hidden(
            hidden, weight, token_ids, *recorded, mode="tis"
        )
        torch.autograd.grad(value.sum(), (hidden, weight))

    def product() -> None:
        with torch.no_grad():
            torch.mm(hidden, weight.t())

    ms, product_ms = median_ms(ours, 5), median_ms(product, 5)
    what = f"loss and gradients from hidden states of width {width}, no logits"
    row(what, f"{ms:.1f} ms", f"{ms / product_ms:.1f} products of the two ({product_ms:.1f} ms)")
    what = f"memory beside the {(hidden.nbytes + weight.nbytes) / 1e9:.1f} GB, gradients included"
    row(what, f"{peak(ours) / 1e9:.1f} GB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=3072)
    parser.add_argument("--batch", type=int, default=256)
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
        with rollstore.open(folder / "store", "x", capacity="3G") as store:
            fill(store, asked.sessions, asked.tokens, asked.top_k)
            copies(store, asked.batch)
            overlap(store, asked.batch)
        torch.manual_seed(1)
        loss_from_logits(8192, asked.top_k)
        loss_from_hidden(8192, asked.top_k)
    finally:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
