"""Datasets and loaders for PyTorch 1.13 and later.

    SessionDataset    map-style, over a plan
    SealedSessions    an IterableDataset, over a plan or over sessions as they are sealed (Follow)
    Loader            batches of SealedSessions ahead of training; resumes exactly
    ConsumerLoader    batches of a consumer, for training that goes on while sessions arrive

A `Plan` lists sessions, or whole groups, in an order fixed by a seed. Data-parallel ranks and
DataLoader workers share it with nothing read twice or left out, and a state of numbers and strings
resumes it exactly, with other numbers of workers and ranks. `Staleness` limits how many weight
versions behind a session may be.

Which one: for a fixed set of sessions, several epochs, or repeatable orders take a plan and a
Loader. For reinforcement learning, where each session is trained on once while others arrive, take
a ConsumerLoader: sessions are leased, acknowledged when trained on, and released when a checkpoint
holds that.
"""

from __future__ import annotations

from rollstore.torch.batch import BatchArguments, TrainingBatch
from rollstore.torch.consumer import ConsumerLoader
from rollstore.torch.datasets import SealedSessions, SessionDataset
from rollstore.torch.errors import (
    GroupError,
    MissingSessionError,
    RewardError,
    StaleError,
    StateError,
    UnversionedError,
    VersionRestartError,
    VersionRestartWarning,
)
from rollstore.torch.follow import Follow
from rollstore.torch.leases import ConsumerBatch, Counts
from rollstore.torch.loader import Loader
from rollstore.torch.plan import LeftOut, Plan
from rollstore.torch.versions import Staleness

__all__ = [
    "BatchArguments",
    "ConsumerBatch",
    "ConsumerLoader",
    "Counts",
    "Follow",
    "GroupError",
    "LeftOut",
    "Loader",
    "MissingSessionError",
    "Plan",
    "RewardError",
    "SealedSessions",
    "SessionDataset",
    "StaleError",
    "Staleness",
    "StateError",
    "TrainingBatch",
    "UnversionedError",
    "VersionRestartError",
    "VersionRestartWarning",
]
