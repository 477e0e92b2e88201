"""What can go wrong with checkpoints.

ValueError
└── CheckpointError               the file is no whole checkpoint of ours
    └── CheckpointMismatchError   it is one, of other variables or states than those here
"""

from __future__ import annotations

from collections.abc import Sequence


class CheckpointError(ValueError):
    """A file that can't be used: truncated, damaged, or not written by `Checkpoint`. Nothing was restored."""


class CheckpointMismatchError(CheckpointError):
    """A whole checkpoint whose values don't fit the objects here. Nothing was restored.

    Attributes:
        mismatches: a sentence for each value that does not fit.
    """

    def __init__(self, message: str, mismatches: Sequence[str]) -> None:
        super().__init__(message)
        self.mismatches = tuple(mismatches)


class PartialRestoreWarning(UserWarning):
    """A checkpoint was restored in part, and nobody said that this was expected."""
