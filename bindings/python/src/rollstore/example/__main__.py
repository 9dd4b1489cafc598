"""Run the example: `python -m rollstore.example --help`."""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import sys
import tempfile
import time
from pathlib import Path

import rollstore
from rollstore.example import sampler, trainer
from rollstore.example.plot import plot
from rollstore.example.sampler import Task
from rollstore.example.trainer import Measured

ARMS = {"plain": False, "centred": True}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m rollstore.example",
        description="Train a small policy on rollouts of a coarsely rounded copy of it, with the "
        "plain policy gradient and with the score-centering loss, through a rollstore store. There "
        "is nothing to learn: all that moves is drift.",
    )
    parser.add_argument("--steps", type=int, default=60, help="training steps (60)")
    parser.add_argument("--samplers", type=int, default=2, help="sampler processes (2)")
    parser.add_argument(
        "--levels",
        type=int,
        default=2,
        help="steps each side of zero that samplers' weights are rounded to (2); 0: exact weights",
    )
    parser.add_argument(
        "--stale", type=int, default=0, help="versions that samplers stay behind (0)"
    )
    parser.add_argument("--learning-rate", type=float, default=8.0, help="of plain SGD (8)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, help="write the two runs' drift as a PNG here")
    parser.add_argument(
        "--store",
        type=Path,
        help="keep the store in this folder (default: a "
        "temporary one in /dev/shm, removed at the end)",
    )
    options = parser.parse_args(arguments)
    for name in ("steps", "samplers"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    return options


def run_arm(name: str, folder: Path, options: argparse.Namespace) -> list[Measured]:
    """One run in a store of its own; the samplers are processes, started afresh."""
    task = Task(levels=options.levels, stale=options.stale, seed=options.seed)
    path = str(folder / f"{name}.store")
    weights = folder / f"{name}.weights"
    weights.mkdir()
    rollstore.open(path, "x", capacity="32M").close()
    spawn = multiprocessing.get_context("spawn")
    samplers = [
        spawn.Process(
            target=sampler.run,
            args=(path, weights, task, number, options.samplers, options.steps),
            daemon=True,
        )
        for number in range(options.samplers)
    ]
    for process in samplers:
        process.start()

    def report(measured: Measured) -> None:
        if measured.step % max(1, options.steps // 5) == 0:
            print(
                f"{name:>8}  step {measured.step:4d}  drift {measured.drift:7.4f}"
                f"  entropy {measured.entropy:6.3f}  |log p - log q| {measured.mismatch:6.4f}",
                flush=True,
            )

    try:
        return trainer.run(
            path, weights, task, options.steps, options.learning_rate, ARMS[name], report
        )
    finally:
        for process in samplers:
            process.terminate()
            process.join()


def main(arguments: list[str] | None = None) -> int:
    """Both runs, what came of them, and the plot."""
    options = parse(arguments)
    folder = options.store
    if folder is None:
        parent = "/dev/shm" if Path("/dev/shm").is_dir() else None
        folder = Path(tempfile.mkdtemp(prefix="rollstore-example-", dir=parent))
    else:
        folder.mkdir(parents=True)
    began = time.monotonic()
    try:
        runs = {name: run_arm(name, folder, options) for name in ARMS}
    finally:
        if options.store is None:
            shutil.rmtree(folder, ignore_errors=True)
    plain, centred = (runs[name][-1].drift for name in ARMS)
    print(
        f"{options.steps} steps of 64 sessions, twice, in {time.monotonic() - began:.0f} s.\n"
        "Drift after them: "
        f"{plain:.4f} plain, {centred:.4f} centred ({plain / max(centred, 1e-9):.1f} times less)."
    )
    if options.plot:
        plot(runs, options.plot)
        print(f"The plot is in {options.plot}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
