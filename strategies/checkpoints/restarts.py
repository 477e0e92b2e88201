"""Training that goes on from its last checkpoint after a failure, in the same process or after the job was started again."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TypeVar

from collectives.errors import in_words, is_common
from strategies.checkpoints.checkpoint_manager import CheckpointManager, latest_checkpoint
from strategies.checkpoints.together import Together

RESTART_VARIABLE = "XPDISTRIBUTE_RESTART"
"""How often the launcher has started the job again; unset where it would not."""

T = TypeVar("T")

_log = logging.getLogger("xpdistribute")


def run_with_restarts(
    fn: Callable[[str | None], T],
    checkpoints: CheckpointManager | str | os.PathLike[str],
    max_restarts: int = 3,
) -> T:
    """Run a function that saves checkpoints as it goes, and run it again from the latest one when it fails.

    Where this process is alone it is run again here, whatever exception ended it. In a job of several processes that is done
    only after an exception that all of them have raised in the same step, or in a call that they make together, such as that a checkpoint could not be
    written; all then go on together. When one fails alone or dies, the others have lost what they were about to do with it: they end with a
    `PeerFailedError`, and the launcher starts the whole job again, if it may: ``xpdistribute run --max-restarts 3``.
    This function then finds the latest checkpoint. Its count goes on where the launcher's is.

    Args:
        fn: called with the path of the latest checkpoint, or None. It should skip what is done already, by a step in the checkpoint.
        checkpoints: a manager, whose checkpoint is restored before each call; or the folder of one, where ``fn`` makes its objects
            anew in each call, and restores them.
        max_restarts: how often, by the launcher and here together.

    Returns:
        What ``fn`` returned.

    Raises:
        Exception: what ``fn`` raised last; also the first time, if there is nothing to go back to yet.
        ValueError: ``max_restarts`` below 0.
        CheckpointError: as `CheckpointManager.restore_or_initialize`.
    """
    if max_restarts < 0:
        raise ValueError(f"run_with_restarts: got max_restarts={max_restarts}; need 0 or more")
    by_launcher = _count_of(os.environ.get(RESTART_VARIABLE))
    path, _ = _latest(checkpoints)
    if by_launcher:
        _tell(by_launcher, "the job was started again", path)
    restart = by_launcher
    while True:
        try:
            return fn(path)
        except Exception as error:
            restart += 1
            _require_restartable(error, restart, max_restarts, by_launcher)
            path, missing = _latest(checkpoints)
            if path is None and isinstance(checkpoints, CheckpointManager):
                error.add_note(
                    "run_with_restarts: there is no checkpoint yet to go back to; save one before the first step, or start the program again"
                )
                raise
            if missing:
                error.add_note(
                    f"run_with_restarts: {path} has no value for {', '.join(missing)}, which may have changed since; start the program again"
                )
                raise
            _tell(restart, f"after {in_words(error)}", path)


def _require_restartable(error: Exception, restart: int, max_restarts: int, by_launcher: int) -> None:
    """Raise an error after which this process can't run the function again."""
    together = Together.now()
    if not together.is_alone and not is_common(error):
        error.add_note(
            "run_with_restarts: it was not raised by a step or a call that all processes of the job make together, so whether all have raised "
            "it is not known, and the job can only go on by being started again — xpdistribute run --max-restarts N does that N times"
        )
        raise error
    if restart > max_restarts:
        if max_restarts:
            error.add_note(
                f"run_with_restarts: restarted {restart - 1} times already, {by_launcher} of them by the launcher"
            )
        raise error


def _latest(checkpoints: CheckpointManager | str | os.PathLike[str]) -> tuple[str | None, list[str]]:
    """The path of the latest checkpoint, restored if by a manager, and the names of the objects that it has no value for."""
    if not isinstance(checkpoints, CheckpointManager):
        return latest_checkpoint(checkpoints), []
    restored = checkpoints.restore_latest()
    if restored is None:
        return None, []
    path, status = restored
    return path, status.missing


def _tell(restart: int, why: str, path: str | None) -> None:
    if Together.now().is_chief:
        going_on = "begins anew" if path is None else f"resumes at {path}"
        _log.warning("run_with_restarts: restart %d, %s; it %s", restart, why, going_on)


def _count_of(told: str | None) -> int:
    if not told:
        return 0
    if not told.isdecimal():
        raise ValueError(f"{RESTART_VARIABLE}: got {told!r}; need a whole number, as the launcher sets it")
    return int(told)
