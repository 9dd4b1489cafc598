"""The figures of the tool and of the Python module beside those of other ways, as one table.

    peers.py BUILD FOLDER [--quick] [--sessions N] [--peer-python PYTHON]

Run by tests/bench/run. Ways that this machine cannot run are named with the reason. Prints
Markdown; a target that is missed is no failure.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SIZES = (500, 2000, 8000)
WAYS = {
    "rollstore": "rollstore",
    "safetensors": "safetensors files",
    "lmdb": "py-lmdb, raw bytes",
    "pickle": "pickle over a pipe",
    "ray": "Ray object store",
    "transferqueue": "TransferQueue, by key",
    "dataloader": "torch DataLoader over .npz files",
}

Figures = dict[str, float]


def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, capture_output=True, timeout=600, check=False, **options)


def output_of(command: list[str], **options: Any) -> Any:
    done = run(command, **options)
    if done.returncode:
        sys.stderr.write(done.stderr.decode())
        raise SystemExit(f"{command[0]} failed")
    return json.loads(done.stdout)


class Table:
    """Rows of what was measured, against what, and whether that is enough."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, ...]] = []

    def add(self, what: str, ours: str, other: str, ratio: float, limit: str, met: bool) -> None:
        self.rows.append((what, ours, other, f"{ratio:.2f}", limit, "yes" if met else "**no**"))

    def at_least(self, what: str, ours: float, other: float, limit: float) -> None:
        """How many times as fast as the other."""
        ratio = other / ours
        self.add(what, us(ours), us(other), ratio, f">= {limit:g}", ratio >= limit)

    def at_most(self, what: str, ours: float, other: float, limit: float) -> None:
        """How many times the other's time."""
        ratio = ours / other
        self.add(what, us(ours), us(other), ratio, f"<= {limit:g}", ratio <= limit)

    def show(self) -> None:
        show(("what", "rollstore", "other", "ratio", "target", "met"), self.rows)


def us(value: float) -> str:
    return f"{value:,.2f} µs" if value < 10 else f"{value:,.0f} µs"


def show(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    print("| " + " | ".join(head) + " |")
    print("| --- |" + " ---: |" * (len(head) - 1))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


# ---------------------------------------------------------------- the figures


def show_writing(c: Figures, python: Figures) -> None:
    table = Table()
    for n in SIZES:
        table.at_least(
            f"{n} tokens: put_reply in C / plain Python",
            c[f"put_reply.{n}.hot"],
            python[f"plain.{n}"],
            12,
        )
    for heat in ("hot", "received", "cold"):
        for n in SIZES:
            copies = c[f"memcpy_reply.{n}.{heat}"] + c[f"memcpy_record.{n}.{heat}"]
            what = f"{n} tokens: put_reply in C / memcpy of reply and record, {heat}"
            table.at_most(what, c[f"put_reply.{n}.{heat}"], copies, 2.5)
        what = f"8000 tokens / 2000 tokens, {heat}"
        table.at_most(what, c[f"put_reply.8000.{heat}"], c[f"put_reply.2000.{heat}"], 4.4)
    for n in SIZES:
        in_c = c[f"put_reply.{n}.hot"]
        in_python = python[f"put_reply.{n}"]
        most = in_c * 1.05 + 10
        what = f"{n} tokens: put_reply(bytes) in Python / C"
        table.add(
            what,
            us(in_python),
            us(in_c),
            in_python / in_c,
            f"<= {most / in_c:.2f}",
            in_python <= most,
        )
    for n in SIZES:
        what = f"{n} tokens: put_reply(dict) / base64, NumPy and py-lmdb"
        table.at_least(what, python[f"put_dict.{n}"], python[f"plain_dict.{n}"], 4)
    table.at_least(
        "2000 tokens, nested: decode in C / json.loads and NumPy",
        c["nested.decode.2000"],
        python["plain_nested.2000"],
        15,
    )
    table.show()


def show_others(c: Figures, python: Figures, stages: Figures) -> None:
    table = Table()
    table.at_least("base64 / libb64", stages["base64"], stages["libb64"], 15)
    what = "write lock held by a put / memcpy of the record"
    table.at_most(what, stages["lock"], stages["lock_memcpy"], 1.3)
    one, four = c["writers.1.puts"], c["writers.4.puts"]
    what = "puts a second, four writers / one"
    table.add(what, f"{four:,.0f}/s", f"{one:,.0f}/s", four / one, ">= 1.5", four >= 1.5 * one)
    for where, figures, limit in (("C", c, 1.0), ("Python", python, 5.0)):
        for name in (name for name in figures if name.startswith("view.")):
            count = int(name.removeprefix("view.").removesuffix("_sessions"))
            value = figures[name]
            what = f"a turn's arrays among {count:,} sessions, in {where}"
            table.add(what, us(value), "-", value, f"<= {limit:g} µs", value <= limit)
    one, two = c["batch.64x2000"], c["batch.64x2000.two_threads"]
    table.at_least("batch of 64 / memcpy", one, c["batch.memcpy"], 0.7)
    table.at_least("batch of 64, two threads / one", two, one, 1.0)
    early, late = c["scale.put_reply.first_half"], c["scale.put_reply.second_half"]
    table.at_most("16 times the capacity: latency, second half / first", late, early, 1.25)
    table.show()
    print(
        f"p99 of a put with four writers: {us(c['writers.4.p99'])}; "
        f"with one: {us(c['writers.1.p99'])}."
    )
    print(
        "First puts of a process, into pages it never touched: "
        f"{us(c['put_reply.2000.first_touch'])}.\n"
    )


def show_stages(c: Figures, stages: Figures) -> None:
    parts = {
        "JSON: index, whole grammar": stages["json"],
        "base64, two arrays": 2 * stages["base64"],
        "values checked": stages["check"],
        "decode, all of it": c["decode.2000.hot"],
        "hash of the candidates": stages["hash"],
        "put: plan, hash, reserve, copy, commit": c["put.2000.hot"],
        "memcpy of the reply": c["memcpy_reply.2000.hot"],
        "memcpy of the record": c["memcpy_record.2000.hot"],
    }
    show(("2000 tokens, in cache", "time"), [(k, us(v)) for k, v in parts.items()])


def show_published(python: Figures) -> None:
    """Figures of others, made on other machines."""
    rows = [
        (
            "32,768 positions x k = 2 decoded in Python from 0.70 MB of flat base64",
            f"{python['decode.32768x2'] / 1000:.2f} ms, with the sampled tokens and all checks",
            "1.3 ms",
        ),
        (
            "100 MB of rollout data put, and got",
            f"{python['put.100MB'] / 1000:.0f} + {python['get.100MB'] / 1000:.0f} ms",
            "223 + 293 ms through Ray's object store",
        ),
    ]
    show(("the same shapes", "rollstore here", "published"), rows)


# ---------------------------------------------------------------- from writer to reader


def why_not(done: subprocess.CompletedProcess[bytes]) -> str:
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1][:120] if lines else f"exit status {done.returncode}"


def channel(way: str, pythons: list[str], folder: str) -> tuple[float | None, str]:
    """Microseconds for a sample, the median of three runs; None and why there is none."""
    reason = ""
    for python in pythons:
        times = []
        for _ in range(3):
            with tempfile.TemporaryDirectory(dir=folder) as own:
                try:
                    done = run([python, str(HERE / "channels.py"), way, own])
                except subprocess.TimeoutExpired:
                    reason = "it did not end"
                    break
            if done.returncode:
                reason = why_not(done)
                break
            times.append(float(done.stdout.split()[-1]))
        if len(times) == 3:
            return sorted(times)[1], ""
    return None, reason


def show_channels(pythons: list[str], folder: str) -> None:
    found = {way: channel(way, pythons, folder) for way in WAYS}
    own = found["rollstore"][0]
    if own is None:
        raise SystemExit(f"rollstore: {found['rollstore'][1]}")
    rows = []
    missing = []
    for way, (value, reason) in found.items():
        if value is None:
            missing.append(f"{WAYS[way]}: did not run here ({reason})")
        else:
            rows.append(
                (WAYS[way], us(value), f"{528_000 / value:,.0f} MB/s", f"{value / own:.1f}")
            )
    show(("writer to reader's batch, samples of 0.53 MB", "a sample", "speed", "times ours"), rows)
    for line in missing:
        print(f"- {line}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("build", type=Path)
    parser.add_argument("folder")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--sessions", default="20000")
    parser.add_argument("--peer-python", default=[], action="append")
    options = parser.parse_args()
    tool = str(options.build / "tools/rollstore")
    os.environ["PYTHONPATH"] = str(options.build / "python")
    quick = ["--quick"] if options.quick else []
    sessions = ["--sessions", options.sessions]
    bench = output_of([tool, "bench", "--json", *quick, *sessions, "--folder", options.folder])
    reply = run([tool, "bench", "--reply", "2000"]).stdout
    with tempfile.TemporaryDirectory(dir=options.folder) as own:
        stages = output_of([str(options.build / "tests/bench/bench-stages"), own], input=reply)
    with tempfile.TemporaryDirectory(dir=options.folder) as own:
        paths = [sys.executable, str(HERE / "paths.py"), tool, own]
        python = output_of([*paths, *quick, *sessions])
    c = {name: figure["value"] for name, figure in bench["figures"].items()}
    print(
        f"{bench['cpu']}, {bench['cores']} cores, largest cache {bench['cache_size'] >> 20} MiB; "
        f"{bench['compiler']}; Python {sys.version.split()[0]}; rollstore {bench['version']}, "
        f"base64 {bench['base64']}; load {os.getloadavg()[0]:.1f}\n"
    )
    show_writing(c, python)
    show_others(c, python, stages)
    show_stages(c, stages)
    show_published(python)
    show_channels([sys.executable, *options.peer_python], options.folder)


if __name__ == "__main__":
    main()
