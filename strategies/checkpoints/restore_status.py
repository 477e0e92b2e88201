"""What came of a restore."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, final

from strategies.checkpoints.errors import PartialRestoreWarning

_MOST_NAMES = 20


class Outcome(Protocol):
    """What came of a restore, by names; it may still change."""

    @property
    def source(self) -> str:
        """Where the checkpoint came from, in words."""

    @property
    def missing(self) -> list[str]:
        """Names of objects that the checkpoint had no value for."""

    @property
    def unused(self) -> list[str]:
        """Names of values that no object has taken."""


@final
@dataclass(frozen=True)
class NothingRestored:
    """There was no checkpoint: all objects keep their values."""

    missing: list[str]
    unused: list[str] = field(default_factory=list)
    source: str = "restore(None)"


@final
class RestoreStatus:
    """What of a checkpoint has been restored, and what has not.

    If something has not, and none of the methods was called to say that this is expected, or to ask, a
    `PartialRestoreWarning` names it when this object goes away.

    Args:
        outcome: that this is about.
        is_partial: whether a partial one is expected.
    """

    def __init__(self, outcome: Outcome, *, is_partial: bool) -> None:
        self._outcome = outcome
        self._is_settled = is_partial

    @property
    def missing(self) -> list[str]:
        """Names of objects that the checkpoint had no value for; they keep theirs."""
        return self._outcome.missing

    @property
    def unused(self) -> list[str]:
        """Names of values in the checkpoint that no object has taken; they are kept for objects attached later."""
        return self._outcome.unused

    def assert_consumed(self) -> RestoreStatus:
        """Check that every value has been taken, and every object has been given one.

        Raises:
            AssertionError: naming those that were not.
        """
        self._is_settled = True
        if self.missing or self.unused:
            raise AssertionError(f"assert_consumed: {self._told()}")
        return self

    def assert_existing_objects_matched(self) -> RestoreStatus:
        """Check that every object there is has been given a value; values may be left.

        Raises:
            AssertionError: naming the objects.
        """
        self._is_settled = True
        if self.missing:
            raise AssertionError(
                f"assert_existing_objects_matched: {self._outcome.source} has no value for {_listed(self.missing)}"
            )
        return self

    def expect_partial(self) -> RestoreStatus:
        """Say that objects and values may be left over, so that no warning is given."""
        self._is_settled = True
        return self

    def _told(self) -> str:
        parts = []
        if self.missing:
            parts.append(f"no value for {_listed(self.missing)}")
        if self.unused:
            parts.append(f"nothing here takes {_listed(self.unused)}")
        return f"{self._outcome.source}: {'; '.join(parts) or 'all restored'}"

    def __repr__(self) -> str:
        return f"RestoreStatus({self._told()})"

    def __del__(self) -> None:
        if self._is_settled or sys.is_finalizing():
            return
        if self.missing or self.unused:
            warnings.warn(
                f"restore: {self._told()}; call expect_partial() on what restore returned if that is right, "
                "assert_consumed() if it never is",
                PartialRestoreWarning,
                stacklevel=2,
            )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
