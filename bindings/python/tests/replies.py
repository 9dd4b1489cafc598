"""Replies for tests: the project's fixtures, and made ones."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).resolve().parents[3] / "tests" / "data"

ARRAYS = ("token_ids", "token_logprobs", "topk_ids", "topk_logprobs")


@functools.cache
def fixtures(name: str) -> list[dict[str, Any]]:
    """The lines of one of the fixture files."""
    return [json.loads(line) for line in (DATA / name).read_bytes().splitlines()]


def options(case: dict[str, Any]) -> dict[str, Any]:
    """How a fixture's reply was asked for, as arguments of put_reply."""
    asked = {"mode": case.get("mode", "selected"), "top_k": case["k"]}
    asked["choice"] = case.get("choice", 0)
    # A malformed case says what it was asked for; a golden one is named after it.
    named = "nested" if "error" not in case and "nested" in case["name"] else "flat"
    return {**asked, "request": case.get("request", named)}


def sha256(array: Any) -> str:
    return hashlib.sha256(np.asarray(array).tobytes()).hexdigest()


def make_arrays(n: int, k: int, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """A turn's arrays that obey the rules of value."""
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((n, 4 * k)), axis=1)[:, :k].astype(np.int32)
    logprobs = -np.sort(rng.exponential(4.0, (n, k))).astype(np.float32)
    return {
        "token_ids": ids[:, 0].copy() if k else rng.integers(0, 1000, n).astype(np.int32),
        "token_logprobs": logprobs[:, 0].copy() if k else -rng.random(n).astype(np.float32),
        "topk_ids": ids,
        "topk_logprobs": logprobs,
    }


def make_reply(n: int, k: int, seed: int = 0, version: str = "1") -> dict[str, Any]:
    """A flat base64 chat reply of make_arrays."""
    arrays = make_arrays(n, k, seed)
    pairs = zip(arrays["token_logprobs"].tolist(), arrays["token_ids"].tolist())
    return {
        "id": "chatcmpl-1",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "text"},
                "finish_reason": "stop",
                "meta_info": {
                    "weight_version": version,
                    "output_token_logprobs": [[logprob, id, None] for logprob, id in pairs],
                    "output_top_logprobs_idx_flat_b64": b64(arrays["topk_ids"]),
                    "output_top_logprobs_val_flat_b64": b64(arrays["topk_logprobs"]),
                    "output_top_logprobs_idx_flat_b64_dtype": "int32",
                    "output_top_logprobs_val_flat_b64_dtype": "float32",
                    "output_top_logprobs_shape": [n, k],
                    "output_top_logprobs_null_prefix": 0,
                },
            }
        ],
    }


def b64(array: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(array.tobytes()).decode()


def make_text(n: int, k: int, seed: int = 0, version: str = "1") -> bytes:
    return json.dumps(make_reply(n, k, seed, version)).encode()
