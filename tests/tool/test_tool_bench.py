"""The tool: measuring. What is measured is not judged here: only that it is, and told."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from tool_support import good, refused, tool


def test_bench_tells_every_figure_and_leaves_nothing(tmp_path: Path) -> None:
    found = json.loads(good("bench", "--quick", "--json", "--folder", tmp_path))
    assert list(tmp_path.iterdir()) == []
    assert found["quick"] is True
    assert found["cores"] >= 1
    assert {"version", "base64", "cpu", "cache_size", "compiler"} < found.keys()
    stages = "memcpy_reply memcpy_record decode put put_reply check memcpys".split()
    names = [
        f"{s}.{n}.{heat}"
        for s in stages
        for n in (500, 2000, 8000)
        for heat in ("hot", "received", "cold")
    ]
    names += [f"{size}.{n}" for size in ("reply_size", "record_size") for n in (500, 2000, 8000)]
    names += "nested.decode.2000 nested.put_reply.2000 put_reply.2000.first_touch".split()
    names += "writers.1.puts writers.4.puts writers.4.p99".split()
    names += "view.10_sessions view.1000_sessions view_and_snapshot.10_sessions".split()
    names += "one_read.1000_sessions put_small.10_sessions put_small.1000_sessions".split()
    names += "batch.64x2000 batch.64x2000.two_threads batch.memcpy scale.used scale.file".split()
    assert set(names) <= found["figures"].keys()
    for name, figure in found["figures"].items():
        assert math.isfinite(figure["value"]) and figure["value"] > 0, name
        assert figure["unit"] in ("us", "ratio", "MB/s", "1/s", "bytes"), name
    assert found["figures"]["put.8000.hot"]["unit"] == "us"
    assert 900_000 < found["figures"]["reply_size.2000"]["value"] < 1_000_000
    for target in found["targets"]:
        limit = target.get("at_most", math.inf)
        met = target["value"] <= limit and target["value"] >= target.get("at_least", -math.inf)
        assert target["met"] is met, target
    assert len({target["name"] for target in found["targets"]}) == len(found["targets"]) >= 15


def test_bench_table_fits_a_page(tmp_path: Path) -> None:
    text = good("bench", "--quick", "--folder", tmp_path).decode()
    lines = text.splitlines()
    assert max(map(len, lines)) < 100
    assert "targets met" in lines[-1]


@pytest.mark.parametrize("form", ["flat", "nested"])
def test_bench_replies_decode(form: str) -> None:
    nested = ["--nested"] if form == "nested" else []
    reply = good("bench", "--reply", "50", *nested)
    assert reply == good("bench", "--reply", "50", *nested)
    content = json.loads(reply)["choices"][0]["logprobs"]["content"]
    assert len(content) == 50
    assert [len(token["top_logprobs"]) for token in content] == [32 if nested else 0] * 50
    decoded = json.loads(good("decode", "--request", form, "-k", "32", stdin=reply))
    flat = json.loads(good("decode", "-k", "32", stdin=good("bench", "--reply", "50")))
    assert decoded == flat
    assert (decoded["n"], decoded["k"], decoded["weight_version"]) == (50, 32, "17")


def test_bench_reply_is_stored_as_it_was_decoded(tmp_path: Path) -> None:
    store = tmp_path / "store"
    good("create", store, "--capacity", "16M")
    reply = good("bench", "--reply", "2000")
    good("put", store, "big", "0", stdin=reply)
    good("verify", store)
    good("dump", store, "big:0", "--npz", tmp_path / "big.npz")
    decoded = json.loads(good("decode", stdin=reply))
    with np.load(tmp_path / "big.npz") as arrays:
        assert arrays["topk_ids"].ravel().tolist() == np.ravel(decoded["topk_ids"]).tolist()
        assert arrays["token_ids"].tolist() == decoded["token_ids"]


def test_bench_refuses(tmp_path: Path) -> None:
    assert "--reply" in refused("usage", "bench", "--nested")
    assert "--scale" in refused("usage", "bench", "--capacity", "64M", "--scale", "64M")
    assert tool("bench", "--quick", "--folder", tmp_path / "absent").returncode == 1
