"""The training example: the whole chain, with real processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the example trains with torch")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The example as a user starts it."""
    return subprocess.run(
        [sys.executable, "-m", "rollstore.example", *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ,
    )


def test_it_trains_twice_and_plots(tmp_path: Path) -> None:
    plot = tmp_path / "drift.png"
    done = run("--steps", "8", "--plot", str(plot), "--store", str(tmp_path / "kept"))
    assert done.returncode == 0, done.stderr
    last = re.search(r"Drift after them: ([0-9.]+) plain, ([0-9.]+) centred", done.stdout)
    assert last and float(last[1]) > 0 and float(last[2]) > 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    import rollstore

    for name in ("plain", "centred"):
        with rollstore.open(tmp_path / "kept" / f"{name}.store") as store:
            assert not store.verify().faults
            stat = store.consumer("trainer", create=False).stat()
            assert stat.trained_total == 8 * 64
            assert not list(store.snapshot().ready())  # all were released


def test_both_runs_begin_at_the_same_policy_and_the_correction_holds_it() -> None:
    """Where there is nothing to learn, the corrected run moves less."""
    done = run("--steps", "40", "--seed", "1")
    assert done.returncode == 0, done.stderr
    last = re.search(r"Drift after them: ([0-9.]+) plain, ([0-9.]+) centred", done.stdout)
    assert last and float(last[2]) < float(last[1])


def test_wrong_arguments_are_told() -> None:
    done = run("--steps", "0")
    assert done.returncode == 2
    assert "--steps must be at least 1" in done.stderr
