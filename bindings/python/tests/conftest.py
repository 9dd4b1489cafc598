"""Stores in shared memory, and the project's recorded replies."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rollstore

# What a script starts in the background ignores interrupts, and so does all that it starts itself:
# the tests of them would wait for ever.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """A path for a store: in shared memory where there is some, as in use."""
    shared = Path("/dev/shm")
    room = shutil.disk_usage(shared).free if shared.is_dir() else 0
    if room < 256 << 20:
        yield tmp_path / "store"
        return
    folder = Path(tempfile.mkdtemp(prefix="rollstore-test-", dir=shared))
    yield folder / "store"
    shutil.rmtree(folder)


@pytest.fixture
def store(path: Path) -> Iterator[rollstore.Store]:
    """A new store of 32 MiB."""
    with rollstore.open(path, "x", capacity=32 << 20) as opened:
        yield opened


@pytest.fixture
def torch() -> Any:
    """PyTorch; what needs it is not tested without."""
    return pytest.importorskip("torch", reason="no PyTorch here: tensors were NOT tested")
