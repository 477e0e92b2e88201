"""A folder of numbered checkpoints, of which the latest and the best are kept."""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal, TypeAlias, final, overload

from collectives.reduce_op import parse_member
from strategies.checkpoints.checkpoint import Checkpoint, about_checkpoint
from strategies.checkpoints.errors import CheckpointError, CheckpointMismatchError
from strategies.checkpoints.pending_save import PendingSave
from strategies.checkpoints.restore_status import RestoreStatus
from strategies.checkpoints.together import Together

_SUFFIX = ".safetensors"

_Found: TypeAlias = tuple[str, float | None]
"""A file's path, and its metric where that counts."""


class Best(Enum):
    """Which metric is the best one."""

    MAX = "max"
    MIN = "min"


@final
class CheckpointManager:
    """Saves a checkpoint again and again under new numbers, and removes the old ones.

    The folder is all it knows: the numbers stand in the files' names, the metrics in the files. It can be
    made anew at any time, as after a crash, and goes on where it was.

    In a job of several processes every one makes the manager and calls `save`, `restore_or_initialize` and `refresh`. Only
    the chief looks into the folder and removes files. What it finds there is told to all of them then, so that they
    agree on which checkpoint is the latest, also where they don't share a disk.

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
        self._told: list[_Found] | None = None
        self.refresh()

    def refresh(self) -> None:
        """Let all processes know what is in the chief's folder now, as after another program has changed it.

        One process alone looks there at every question, and needs no call.

        Raises:
            OSError: the chief can't read the folder.
            CollectiveTimeoutError: some process did not call it.
        """

        def refresh(together: Together) -> None:
            found, error = None, None
            if together.is_chief:
                try:
                    found = self._found()
                except OSError as wrong:
                    error = wrong
            self._hear(together.agree(f"checkpoints in {self.directory}", found, error)[0])

        if not Together.now().is_alone:
            self.checkpoint._outlast_save()
            self.checkpoint._with_all(refresh)

    @property
    def checkpoints(self) -> list[str]:
        """The paths of the files, by number; in a job, of those that `save` or `refresh` told of last."""
        return [path for path, _ in self._listed()]

    @property
    def latest_checkpoint(self) -> str | None:
        """The path of the file with the largest number, among `checkpoints`."""
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
        return self._best_of(self._listed())

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
            metric: how good this one is; a manager with ``best`` needs one. In a job the chief's counts.
            blocking: as for `Checkpoint.save`.

        Returns:
            The path, or a handle to wait with.

        Raises:
            ValueError: no metric where one is needed, or NaN; a negative number; in a job, numbers that differ. Otherwise as
                `Checkpoint.save`.
        """
        return self.checkpoint._with_all(
            lambda together: self._save(together, number, metric, blocking=blocking)
        )

    def _save(
        self, together: Together, number: int | None, metric: float | None, *, blocking: bool
    ) -> str | PendingSave:
        error: Exception | None = None
        try:
            if self._best is not None and (metric is None or math.isnan(metric)):
                raise ValueError(f"save: got metric={metric}; need a number — this manager keeps the best")
            self.checkpoint.wait()  # for the number of a save that is under way
            if number is None:
                # The number after the one of a file that was removed by hand would be taken in the others' eyes only.
                paths = _numbered(self.directory, self._name) if together.is_chief else []
                number = _number(paths[-1]) + 1 if paths else 1 if together.is_chief else None
            if number is not None and number < 0:
                raise ValueError(f"save: got number {number}; need one from 0")
        except Exception as wrong:  # noqa: BLE001  # raised in all processes
            error = wrong
        numbers = together.agree("save", number, error)
        number = numbers[0]
        other = next((process for process, one in enumerate(numbers) if one not in (None, number)), None)
        if other is not None:
            raise ValueError(
                f"save: got number {number} in process 0, {numbers[other]} in process {other}; need one for all processes — are they "
                "at the same step?"
            )
        path = os.path.join(self.directory, f"{self._name}-{number}{_SUFFIX}")
        about = {"number": number, "metric": None if metric is None else float(metric)}
        self._metrics.pop(path, None)
        hear = None if together.is_alone else self._hear
        return self.checkpoint._save(together, path, about, self._clear, hear, blocking=blocking)

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
        found = self.restore_latest()
        if found is None:
            if initialize is not None:
                initialize()
            return None
        return found[0]

    def restore_latest(self) -> tuple[str, RestoreStatus] | None:
        """Restore the latest checkpoint that is whole. Errors as of `restore_or_initialize`.

        Returns:
            Its path, and what came of it; None if there is no checkpoint.
        """
        self.refresh()
        paths = self.checkpoints
        for path in reversed(paths):
            try:
                return path, self.checkpoint.restore(path)
            except CheckpointMismatchError:
                raise
            except CheckpointError as error:
                warnings.warn(f"restore_or_initialize: passed over a checkpoint: {error}", stacklevel=3)
        if paths:
            raise CheckpointError(
                f"restore_or_initialize: none of the {len(paths)} checkpoints in {self.directory!r} is whole; need one — "
                "remove them to begin anew"
            )
        return None

    # ----------------------------------------------------- what is in the folder

    def _listed(self) -> list[_Found]:
        together = Together.now()
        if together.is_alone:
            return self._found()
        if self._told is None and not together.is_elastic:
            self.refresh()  # it was made before there was a job; a newcomer to an elastic one would be the only one to call
        self.checkpoint._outlast_save()  # which tells of the new file
        return self._found() if self._told is None else self._told

    def _found(self) -> list[_Found]:
        paths = _numbered(self.directory, self._name)
        return [(path, None if self._best is None else self._metric(path)) for path in paths]

    def _hear(self, found: Sequence[Sequence[Any]]) -> None:
        self._told = [(path, metric) for path, metric in found]

    def _best_of(self, listed: Sequence[_Found]) -> str | None:
        found = [(path, metric) for path, metric in listed if metric is not None]
        if not found:
            return None
        sign = 1 if self._best is Best.MAX else -1
        return max(found, key=lambda entry: (sign * entry[1], found.index(entry)))[0]

    def _clear(self) -> list[_Found]:
        """On the chief, once a new file is there: remove what is too much; what is left."""
        self._remove_old()
        return self._found()

    def _remove_old(self) -> None:
        if self.max_to_keep is None:
            return
        found = self._found()
        paths = [path for path, _ in found]
        kept = set(paths[-self.max_to_keep :])
        best = self._best_of(found)
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
    """The path of the latest checkpoint that a `CheckpointManager` has saved in a folder; None if there is none.

    In a job of several processes all of them call it, and get what the chief finds.

    Raises:
        OSError: the folder can't be read.
        CollectiveTimeoutError: some process did not call it.
    """
    together = Together.now()
    latest, error = None, None
    if together.is_chief or together.is_alone:
        try:
            latest = next(reversed(_numbered(os.fspath(directory), checkpoint_name)), None)
        except OSError as wrong:
            error = wrong
    found: str | None = together.agree("latest_checkpoint", latest, error)[0]
    return found


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
