"""A folder of numbered checkpoints, of which the latest and the best are kept."""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Literal, final, overload

from collectives.reduce_op import parse_member
from strategies.checkpoints.checkpoint import Checkpoint, about_checkpoint
from strategies.checkpoints.errors import CheckpointError, CheckpointMismatchError
from strategies.checkpoints.pending_save import PendingSave

_SUFFIX = ".safetensors"


class Best(Enum):
    """Which metric is the best one."""

    MAX = "max"
    MIN = "min"


@final
class CheckpointManager:
    """Saves a checkpoint again and again under new numbers, and removes the old ones.

    The folder is all it knows: the numbers stand in the files' names, the metrics in the files. It can be
    made anew at any time, as after a crash, and goes on where it was.

    Args:
        checkpoint: what is saved.
        directory: where to; made when needed.
        max_to_keep: how many files stay; None for all.
        best: ``"max"`` or ``"min"``: which metric is the best. That one's file stays in any case. None looks at
            no metrics.
        checkpoint_name: what the files' names begin with.

    Raises:
        ValueError: ``max_to_keep`` below 1; a name that is none.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int | None = 5,
        *,
        best: Best | str | None = None,
        checkpoint_name: str = "ckpt",
    ) -> None:
        if max_to_keep is not None and max_to_keep < 1:
            raise ValueError(
                f"CheckpointManager: got max_to_keep={max_to_keep}; need at least 1, or None for all"
            )
        if not checkpoint_name or os.path.basename(checkpoint_name) != checkpoint_name:
            raise ValueError(
                f"CheckpointManager: got checkpoint_name={checkpoint_name!r}; need the start of a file's name, without a folder"
            )
        self.checkpoint = checkpoint
        self.directory = os.fspath(directory)
        self.max_to_keep = max_to_keep
        self._best = (
            None
            if best is None
            else parse_member(Best, best.upper() if isinstance(best, str) else best, "best")
        )
        self._name = checkpoint_name
        self._metrics: dict[str, float | None] = {}

    @property
    def checkpoints(self) -> list[str]:
        """The paths of the files, by number."""
        return _numbered(self.directory, self._name)

    @property
    def latest_checkpoint(self) -> str | None:
        """The path of the file with the largest number."""
        return next(reversed(self.checkpoints), None)

    @property
    def best_checkpoint(self) -> str | None:
        """The path of the file with the best metric, the later of equal ones; None if none has a metric.

        Raises:
            ValueError: the manager was made without ``best``.
        """
        if self._best is None:
            raise ValueError(
                "best_checkpoint: the manager knows no best; need CheckpointManager(..., best='max') or 'min'"
            )
        found = [(path, metric) for path in self.checkpoints if (metric := self._metric(path)) is not None]
        if not found:
            return None
        sign = 1 if self._best is Best.MAX else -1
        return max(found, key=lambda entry: (sign * entry[1], found.index(entry)))[0]

    @overload
    def save(
        self, number: int | None = None, *, metric: float | None = None, blocking: Literal[True] = True
    ) -> str: ...

    @overload
    def save(
        self, number: int | None = None, *, metric: float | None = None, blocking: bool
    ) -> str | PendingSave: ...

    def save(
        self, number: int | None = None, *, metric: float | None = None, blocking: bool = True
    ) -> str | PendingSave:
        """Save under a new number, then remove what is too much.

        Args:
            number: of the file, such as the step; None for the one after the latest. A file of that number is replaced.
            metric: how good this one is; a manager with ``best`` needs one.
            blocking: as for `Checkpoint.save`.

        Returns:
            The path, or a handle to wait with.

        Raises:
            ValueError: no metric where one is needed, or NaN; a negative number. Otherwise as `Checkpoint.save`.
        """
        if self._best is not None and (metric is None or math.isnan(metric)):
            raise ValueError(f"save: got metric={metric}; need a number — this manager keeps the best")
        self.checkpoint.wait()  # for the number of a save that is under way
        if number is None:
            latest = self.latest_checkpoint
            number = 1 if latest is None else _number(latest) + 1
        if number < 0:
            raise ValueError(f"save: got number {number}; need one from 0")
        path = os.path.join(self.directory, f"{self._name}-{number}{_SUFFIX}")
        about = {"number": number, "metric": None if metric is None else float(metric)}
        self._metrics.pop(path, None)
        return self.checkpoint.save(path, blocking=blocking, about=about, then=self._remove_old)

    def restore_or_initialize(self, initialize: Callable[[], object] | None = None) -> str | None:
        """Restore the latest checkpoint that is whole, or begin anew.

        A damaged file is passed over, with a warning; one that doesn't fit the objects is an error.

        Args:
            initialize: called if there is no checkpoint.

        Returns:
            The path of what was restored, or None.

        Raises:
            CheckpointMismatchError: as `Checkpoint.restore`.
            CheckpointError: there are checkpoints, all of them damaged.
        """
        paths = self.checkpoints
        for path in reversed(paths):
            try:
                self.checkpoint.restore(path)
            except CheckpointMismatchError:
                raise
            except CheckpointError as error:
                warnings.warn(f"restore_or_initialize: passed over a checkpoint: {error}", stacklevel=2)
            else:
                return path
        if paths:
            raise CheckpointError(
                f"restore_or_initialize: none of the {len(paths)} checkpoints in {self.directory!r} is whole; need one — "
                "remove them to begin anew"
            )
        if initialize is not None:
            initialize()
        return None

    def _remove_old(self) -> None:
        if self.max_to_keep is None:
            return
        paths = self.checkpoints
        kept = set(paths[-self.max_to_keep :])
        best = None if self._best is None else self.best_checkpoint
        if best is not None and best not in kept:
            # The newest stays too, to go on from.
            kept = (
                {best, *paths[len(paths) - self.max_to_keep + 1 :]}
                if self.max_to_keep > 1
                else {best, paths[-1]}
            )
        for path in paths:
            if path not in kept:
                Path(path).unlink(missing_ok=True)
                self._metrics.pop(path, None)

    def _metric(self, path: str) -> float | None:
        if path not in self._metrics:
            try:
                metric = about_checkpoint(path).get("metric")
            except (CheckpointError, FileNotFoundError):
                metric = None  # damaged, or removed by somebody else
            self._metrics[path] = None if metric is None else float(metric)
        return self._metrics[path]


def latest_checkpoint(directory: str | os.PathLike[str], checkpoint_name: str = "ckpt") -> str | None:
    """The path of the latest checkpoint that a `CheckpointManager` has saved in a folder; None if there is none."""
    return next(reversed(_numbered(os.fspath(directory), checkpoint_name)), None)


def _numbered(directory: str, name: str) -> list[str]:
    try:
        entries = os.listdir(directory)
    except FileNotFoundError:
        return []
    pattern = re.compile(rf"{re.escape(name)}-(\d+){re.escape(_SUFFIX)}")
    found = [entry for entry in entries if pattern.fullmatch(entry)]
    return sorted((os.path.join(directory, entry) for entry in found), key=_number)


def _number(path: str) -> int:
    return int(path.removesuffix(_SUFFIX).rpartition("-")[2])
