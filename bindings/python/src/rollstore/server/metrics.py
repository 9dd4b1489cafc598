"""Counters and times, as Prometheus reads them."""

from __future__ import annotations

import resource
import time
from bisect import bisect_left
from collections.abc import Iterator

__all__ = ["Histogram", "Metrics"]

_PREFIX = "rollstore_server_"
_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
_LONG = (0.1, 0.5, 1.0, 5.0, 15.0, 30.0, 60.0, 120.0, 300.0, 900.0)


class Histogram:
    """Times in buckets."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...] = _SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds

    def lines(self, name: str) -> Iterator[str]:
        total = 0
        for bound, count in zip(self.bounds, self.counts):
            total += count
            yield f'{name}_bucket{{le="{bound:g}"}} {total}'
        total += self.counts[-1]
        yield f'{name}_bucket{{le="+Inf"}} {total}'
        yield f"{name}_sum {self.sum:.9f}"
        yield f"{name}_count {total}"


class Metrics:
    """Everything that is counted; only touched by the event loop."""

    def __init__(self) -> None:
        self.calls: dict[tuple[str, str], int] = {}
        self.refusals: dict[str, int] = {}
        self.ended: dict[str, int] = {}
        self.tokens = 0
        self.prompt_tokens = 0
        self.request_bytes = 0
        self.reply_bytes = 0
        self.answer_bytes = 0
        self.engine_retries = 0
        self.replaced_turns = 0
        self.dropped_turns = 0
        self.turns_without_prompt = 0
        self.misaligned_sessions = 0
        self.decode = Histogram()
        self.commit = Histogram()
        self.engine = Histogram(_LONG)
        self.loop_lag = Histogram()
        self._started = time.time()

    def call(self, kind: str, outcome: str) -> None:
        key = (kind, outcome)
        self.calls[key] = self.calls.get(key, 0) + 1

    def refusal(self, kind: str) -> None:
        self.refusals[kind] = self.refusals.get(kind, 0) + 1

    def end(self, status: str) -> None:
        self.ended[status] = self.ended.get(status, 0) + 1

    def text(self, gauges: dict[str, tuple[str, float]]) -> str:
        """The exposition. gauges: name -> (help, value), of what is asked for now."""
        lines: list[str] = []
        self._counters(lines)
        for name, (about, value) in gauges.items():
            _plain(lines, name, about, value, "gauge")
        for name, about, histogram in (
            ("decode_seconds", "Decoding a reply.", self.decode),
            ("commit_seconds", "Committing a turn, with waiting for the write lock.", self.commit),
            ("engine_seconds", "From a request to the engine's whole reply.", self.engine),
            ("loop_lag_seconds", "How late the event loop wakes up.", self.loop_lag),
        ):
            _head(lines, name, about, "histogram")
            lines.extend(histogram.lines(_PREFIX + name))
        self._process(lines)
        return "\n".join(lines) + "\n"

    def _counters(self, lines: list[str]) -> None:
        _head(lines, "calls_total", "Calls by session kind and outcome.", "counter")
        for (kind, outcome), count in sorted(self.calls.items()):
            lines.append(f'{_PREFIX}calls_total{{kind="{kind}",outcome="{outcome}"}} {count}')
        _head(lines, "refusals_total", "Requests answered with an error, by kind.", "counter")
        for kind, count in sorted(self.refusals.items()):
            lines.append(f'{_PREFIX}refusals_total{{kind="{kind}"}} {count}')
        _head(lines, "sessions_ended_total", "Sessions ended, by status.", "counter")
        for status, count in sorted(self.ended.items()):
            lines.append(f'{_PREFIX}sessions_ended_total{{status="{status}"}} {count}')
        for name, about, value in (
            ("tokens_total", "Generated tokens stored.", self.tokens),
            ("prompt_tokens_total", "Prompt tokens of stored turns.", self.prompt_tokens),
            ("request_bytes_total", "Bytes of agents' requests.", self.request_bytes),
            ("reply_bytes_total", "Bytes of engines' replies.", self.reply_bytes),
            ("answer_bytes_total", "Bytes of answers to agents.", self.answer_bytes),
            ("engine_retries_total", "Calls asked of an engine again.", self.engine_retries),
            ("replaced_turns_total", "Turns replaced by an agent's retry.", self.replaced_turns),
            (
                "dropped_turns_total",
                "Turns dropped since the agent was gone before its answer.",
                self.dropped_turns,
            ),
            (
                "turns_without_prompt_total",
                "Turns stored without prompt ids, which the engine did not say.",
                self.turns_without_prompt,
            ),
            (
                "misaligned_sessions_total",
                "Sessions ended whose prompts do not continue one another: no samples.",
                self.misaligned_sessions,
            ),
        ):
            _plain(lines, name, about, value, "counter")

    def _process(self, lines: list[str]) -> None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        for name, about, value, kind in (
            ("cpu_seconds_total", "CPU time.", usage.ru_utime + usage.ru_stime, "counter"),
            ("max_resident_bytes", "Largest resident size.", usage.ru_maxrss * 1024, "gauge"),
            ("start_time_seconds", "Unix time of the start.", self._started, "gauge"),
        ):
            lines.append(f"# HELP process_{name} {about}")
            lines.append(f"# TYPE process_{name} {kind}")
            lines.append(f"process_{name} {value:.6f}")


def _head(lines: list[str], name: str, about: str, kind: str) -> None:
    lines.append(f"# HELP {_PREFIX}{name} {about}")
    lines.append(f"# TYPE {_PREFIX}{name} {kind}")


def _plain(lines: list[str], name: str, about: str, value: float, kind: str) -> None:
    _head(lines, name, about, kind)
    lines.append(f"{_PREFIX}{name} {value:.10g}")
