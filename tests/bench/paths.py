"""Times of the Python module beside those of plain Python, as one JSON object of microseconds.

    paths.py TOOL FOLDER [--quick] [--sessions N]

Replies come from `TOOL bench --reply`. The plain path is json.loads, base64.b64decode and NumPy's
frombuffer, then py-lmdb with a writable map and without syncing: what a worker would write by hand,
without checking a value.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

import lmdb
import numpy as np

import rollstore

TOP_K = 32
SIZES = (500, 2000, 8000)


def median_us(step: Callable[[int], Any], after: Callable[[int], Any], budget: float) -> float:
    """Median time of step(round); after(round) is not timed. At least 7 rounds after two."""
    times: list[float] = []
    end = time.perf_counter() + budget
    number = 0
    while len(times) < 7 or time.perf_counter() < end:
        begun = time.perf_counter_ns()
        step(number)
        taken = time.perf_counter_ns() - begun
        after(number)
        number += 1
        if number > 2:
            times.append(taken / 1000)
    return statistics.median(times)


def made_reply(tool: str, count: int, nested: bool = False) -> bytes:
    command = [tool, "bench", "--reply", str(count), *(["--nested"] if nested else [])]
    return subprocess.run(command, check=True, capture_output=True).stdout


# ---------------------------------------------------------------- plain Python


def sampled(meta: dict[str, Any]) -> list[Any]:
    tokens = meta["output_token_logprobs"]
    return [
        np.array([t[1] for t in tokens], np.int32),
        np.array([t[0] for t in tokens], np.float32),
    ]


def plain_flat(reply: Any) -> list[Any]:
    meta = reply["choices"][0]["meta_info"]
    shape = meta["output_top_logprobs_shape"]
    ids = base64.b64decode(meta["output_top_logprobs_idx_flat_b64"])
    values = base64.b64decode(meta["output_top_logprobs_val_flat_b64"])
    return [
        *sampled(meta),
        np.frombuffer(ids, np.int32).reshape(shape),
        np.frombuffer(values, np.float32).reshape(shape),
    ]


def plain_nested(reply: Any) -> list[Any]:
    meta = reply["choices"][0]["meta_info"]
    rows = meta["output_top_logprobs"]
    return [
        *sampled(meta),
        np.array([[c[1] for c in row] for row in rows], np.int32),
        np.array([[c[0] for c in row] for row in rows], np.float32),
    ]


class PlainStore:
    def __init__(self, folder: str) -> None:
        self.environment = lmdb.open(
            folder, map_size=1 << 28, writemap=True, sync=False, metasync=False
        )

    def put(self, number: int, arrays: list[Any]) -> None:
        with self.environment.begin(write=True) as txn:
            txn.put(b"%08d" % number, b"".join(a.tobytes() for a in arrays))

    def delete(self, number: int) -> None:
        with self.environment.begin(write=True) as txn:
            txn.delete(b"%08d" % number)


# ---------------------------------------------------------------- what is measured


def same(turn: Any, arrays: list[Any]) -> None:
    names = ("token_ids", "token_logprobs", "topk_ids", "topk_logprobs")
    for name, array in zip(names, arrays, strict=True):
        if not np.array_equal(getattr(turn, name), array):
            raise AssertionError(f"{name} is not what plain Python decodes")


def writing(tool: str, store: Any, plain: PlainStore, budget: float) -> dict[str, float]:
    found = {}
    for count in SIZES:
        reply = made_reply(tool, count)
        parsed = json.loads(reply)
        same(rollstore.decode(reply), plain_flat(parsed))

        def release(number: int) -> None:
            store.release(f"p-{number}")

        def put(what: Any) -> Callable[[int], Any]:
            return lambda number: store.put_reply(f"p-{number}", 0, what, top_k=TOP_K)

        def put_plain(load: Callable[[], Any]) -> Callable[[int], Any]:
            return lambda number: plain.put(number, plain_flat(load()))

        found[f"put_reply.{count}"] = median_us(put(reply), release, budget)
        found[f"put_dict.{count}"] = median_us(put(parsed), release, budget)
        loads = put_plain(lambda r=reply: json.loads(r))  # type: ignore[misc]
        found[f"plain.{count}"] = median_us(loads, plain.delete, budget)
        given = put_plain(lambda p=parsed: p)  # type: ignore[misc]
        found[f"plain_dict.{count}"] = median_us(given, plain.delete, budget)
    return found


def nested(tool: str, budget: float) -> dict[str, float]:
    reply = made_reply(tool, 2000, nested=True)
    same(rollstore.decode(reply, request="nested"), plain_nested(json.loads(reply)))

    def nothing(number: int) -> None:
        pass

    return {
        "nested.2000": median_us(
            lambda _: rollstore.decode(reply, request="nested", top_k=TOP_K), nothing, budget
        ),
        "plain_nested.2000": median_us(lambda _: plain_nested(json.loads(reply)), nothing, budget),
    }


def reply_of(positions: int, top_k: int) -> bytes:
    """A native reply with flat candidates, and tokens to them."""
    ids = np.arange(positions * top_k, dtype=np.int32)
    logprobs = np.full(positions * top_k, -0.5, np.float32)
    meta = {
        "output_token_logprobs": [[-0.31004142761230469, 129857, None]] * positions,
        "output_top_logprobs_idx_flat_b64": base64.b64encode(ids.tobytes()).decode(),
        "output_top_logprobs_idx_flat_b64_dtype": "int32",
        "output_top_logprobs_val_flat_b64": base64.b64encode(logprobs.tobytes()).decode(),
        "output_top_logprobs_val_flat_b64_dtype": "float32",
        "output_top_logprobs_shape": [positions, top_k],
        "output_top_logprobs_null_prefix": 0,
    }
    return json.dumps({"text": "", "meta_info": meta}, separators=(",", ":")).encode()


def published(folder: str, budget: float) -> dict[str, float]:
    """Shapes that others have published figures for."""

    def nothing(number: int) -> None:
        pass

    reply = reply_of(32768, 2)
    found = {
        "decode.32768x2": median_us(lambda _: rollstore.decode(reply, top_k=2), nothing, budget)
    }
    ids = np.arange(2000 * TOP_K, dtype=np.int32).reshape(2000, TOP_K)
    logprobs = np.full((2000, TOP_K), -0.5, np.float32)
    names = [f"s-{i}" for i in range(190)]  # of 0.53 MB: 100 MB
    with rollstore.open(f"{folder}/published", "x", capacity="256M") as store:

        def put(number: int) -> None:
            for name in names:
                store.put(
                    name,
                    0,
                    token_ids=ids[:, 0],
                    token_logprobs=logprobs[:, 0],
                    topk_ids=ids,
                    topk_logprobs=logprobs,
                )

        def release(number: int) -> None:
            for name in names:
                store.release(name)

        def get(number: int) -> None:
            with store.snapshot() as snapshot:
                snapshot.batch(names, layout="packed")

        found["put.100MB"] = median_us(put, release, budget)
        put(0)
        found["get.100MB"] = median_us(get, nothing, budget)
    return found


def views(folder: str, session_count: int) -> dict[str, float]:
    ids = np.arange(2, dtype=np.int32)
    logprobs = np.array([-0.5, -1.5], np.float32)
    found = {}
    for count in (10, session_count):
        # A small turn takes a page, and entries in two trees.
        capacity = (16 << 20) + count * 5120
        with rollstore.open(f"{folder}/views-{count}", "x", capacity=capacity) as store:
            for begin in range(count):
                store.put(
                    f"task-{begin}",
                    0,
                    token_ids=ids[:1],
                    token_logprobs=logprobs[:1],
                    topk_ids=ids[None],
                    topk_logprobs=logprobs[None],
                )
            with store.snapshot() as snapshot:
                names = [f"task-{random.randrange(count)}" for _ in range(1000)]

                def look(number: int, snapshot: Any = snapshot, names: Any = names) -> None:
                    for name in names:
                        snapshot.sessions[name][0].topk_ids  # noqa: B018

                found[f"view.{count}_sessions"] = median_us(look, lambda _: None, 0.5) / 1000
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("tool")
    parser.add_argument("folder")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--sessions", type=int, default=20000)
    options = parser.parse_args()
    budget = 0.05 if options.quick else 1.0
    plain = PlainStore(f"{options.folder}/plain")
    found = {}
    with rollstore.open(f"{options.folder}/store", "x", capacity="256M") as store:
        found.update(writing(options.tool, store, plain, budget))
    found.update(nested(options.tool, budget))
    found.update(published(options.folder, budget))
    found.update(views(options.folder, options.sessions))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
