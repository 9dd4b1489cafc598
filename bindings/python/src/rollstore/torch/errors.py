"""What the datasets and loaders raise, beside the exceptions of rollstore itself."""

from __future__ import annotations

from rollstore._errors import NotFoundError, RollstoreError

__all__ = [
    "GroupError",
    "MissingSessionError",
    "RewardError",
    "StaleError",
    "StateError",
    "UnversionedError",
    "VersionRestartError",
    "VersionRestartWarning",
]


class GroupError(RollstoreError, ValueError):
    """Whole groups are asked for, and a session belongs to none or its group is not whole."""


class RewardError(RollstoreError, ValueError):
    """An advantage needs a finite reward, and a session has none."""


class MissingSessionError(NotFoundError):
    """A session was released before it was read."""


class StaleError(RollstoreError):
    """A session was sampled by weights that are further behind than the limit."""


class UnversionedError(RollstoreError):
    """A limit on staleness is set, and a turn has no weight version with a number."""


class VersionRestartError(RollstoreError):
    """The trainer's weight version went backwards: it counts anew, and staleness means nothing."""


class VersionRestartWarning(RuntimeWarning):
    """As VersionRestartError, where a warning was asked for."""


class StateError(RollstoreError, ValueError):
    """A state that does not belong to this loader, dataset or store."""
