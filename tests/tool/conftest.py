"""Folders and stores for the tests of the tool."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tool_support import (
    good,
)


# What a script starts in the background ignores interrupts, and so does all that it starts itself:
# the tests of them would wait for ever.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in shared memory that other users may look into."""
    path = Path(tempfile.mkdtemp(prefix="rollstore-tool-", dir="/dev/shm"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def store(folder: Path) -> Path:
    path = folder / "store"
    good("create", path, "--capacity", "32M")
    return path
