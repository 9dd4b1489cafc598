"""The drift of the runs as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rollstore.example.trainer import Measured


def plot(runs: Mapping[str, Sequence[Measured]], path: Path) -> None:
    """Write drift and entropy over the steps of each run as a PNG. Needs matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit(
            "the plot needs matplotlib: apt-get install python3-matplotlib, or leave out --plot"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), constrained_layout=True)
    for name, history in runs.items():
        steps = [m.step for m in history]
        style = {"label": name, "linestyle": "-" if name == "centred" else "--"}
        left.plot(steps, [m.drift for m in history], **style)
        right.plot(steps, [m.entropy for m in history], **style)
    left.set_ylabel("KL(first policy, now), nats a token")
    left.set_title("Drift where there is nothing to learn", fontsize=10)
    right.set_ylabel("entropy, nats a token")
    right.set_title("Entropy of the policy", fontsize=10)
    for axes in (left, right):
        axes.set_xlabel("training step")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
