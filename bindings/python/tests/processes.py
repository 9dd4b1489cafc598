"""For tests: Python in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def program(code: str, *args: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own, with the tests' modules."""
    tests = str(Path(__file__).parent)
    paths = os.pathsep.join([tests, *filter(None, sys.path)])
    return subprocess.run(
        [sys.executable, "-B", "-c", code, *map(str, args)],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
        **options,
    )


def in_child(work: Callable[[], None]) -> None:
    """Run `work` in a forked child; it must come to its end there."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException as error:
            print(f"in the child: {error!r}", file=sys.stderr)
        finally:
            sys.stderr.flush()
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
