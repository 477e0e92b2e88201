"""How a process tells the others that its program ends, well or not.

The exception that ends it is published before it is printed, and nothing that waits for the others at the exit, such as
MPI's end, keeps a failed process from ending.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn, final

from collectives.errors import PeerFailedError, told_in_full
from xpdistribute.words import MOST, shortened

_TO_BE_READ = 0.2
"""Seconds that mpiexec has to read what a failed process printed before it sees it end."""
_ULFM = "OMPI_MCA_mpi_ft_enable"
"""Set by Open MPI's mpiexec --with-ft ulfm."""


@final
class ExitHooks:
    """Watches the end of this program, from when it is made until `remove`.

    A program that calls ``sys.exit`` with something else than 0 has failed; one that raises SystemExit itself can't be told here from
    one that ended well, as the interpreter shows its status to nobody. Our launcher sees it, and tells the others.

    Args:
        publish: called with the last words of a program that fails, and the process whose failure it follows, if any.
        goodbye: called when the program ends in good order.
    """

    def __init__(self, publish: Callable[[str, int | None], None], goodbye: Callable[[], None]) -> None:
        self._publish = publish
        self._goodbye = goodbye
        self._pid = os.getpid()
        self._has_failed = False
        self._status = 1
        self._old_hook = sys.excepthook
        self._old_exit = sys.exit
        sys.excepthook = self._on_exception
        sys.exit = self._exit
        atexit.register(self._on_end)

    def remove(self) -> None:
        """Watch no longer."""
        atexit.unregister(self._on_end)
        # Another one may have put its own hook before ours; it goes on calling us, and then we only pass on.
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._old_hook
        if sys.exit == self._exit:
            sys.exit = self._old_exit
        self._pid = -1

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        ours = os.getpid() == self._pid and threading.current_thread() is threading.main_thread()
        if ours and not self._has_failed:
            self._has_failed = True
            self._publish(told_in_full(error), followed(error))
        try:
            self._print(kind, error, trace)
        finally:
            if ours and _mpi_is_running():
                # MPI's end waits for all processes, and they may wait for this one.
                _end(130 if issubclass(kind, KeyboardInterrupt) else 1)

    def _print(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if self._old_hook is sys.__excepthook__ and sys.stderr is not None:
            text = "".join(traceback.format_exception(kind, error, trace))
            if len(text) > MOST:
                sys.stderr.write(shortened(text))
                return
        self._old_hook(kind, error, trace)

    def _exit(self, status: Any = None, /) -> NoReturn:
        raise _ObservedExit(status, self._on_status)

    def _on_status(self, status: Any) -> None:
        if (
            status is None
            or (isinstance(status, int) and status == 0)
            or os.getpid() != self._pid
            or self._has_failed
        ):
            return
        self._has_failed = True
        self._status = status if isinstance(status, int) else 1
        self._publish(_ending(status), None)

    def _on_end(self) -> None:
        if os.getpid() != self._pid:
            return
        if not self._has_failed:
            self._goodbye()
        elif _mpi_is_running() and _only_signals_are_noticed():
            _end(self._status)


class _ObservedExit(SystemExit):
    """A SystemExit that knows when the interpreter ends by it: it may be caught before, and means nothing then."""

    def __init__(self, status: Any, on_end: Callable[[Any], None]) -> None:
        super().__init__(*(() if status is None else (status,)))
        self._status = status
        self._on_end = on_end

    def __reduce__(self) -> tuple[type[SystemExit], tuple[Any, ...]]:
        return SystemExit, self.args

    @property
    def code(self) -> Any:  # type: ignore[override]  # the interpreter reads it when nothing has caught it
        try:
            sys._getframe(1)
        except ValueError:
            # No Python code asks: it is the interpreter, and all of the program has been left.
            self._on_end(self._status)
            if isinstance(self._status, str):
                return shortened(self._status)  # it prints that
        return self._status


def _ending(status: Any) -> str:
    if isinstance(status, int):
        return f"it ended with status {status}"
    try:
        return f"it ended with: {shortened(str(status))}"
    except Exception:  # noqa: BLE001  # a user's own class, which the interpreter can't print either
        return "it ended with status 1"


# Whoever prints it sees what he knows.
_ObservedExit.__name__ = _ObservedExit.__qualname__ = "SystemExit"
_ObservedExit.__module__ = "builtins"


def followed(error: BaseException | None) -> int | None:
    """The process whose failure an error comes from, however it was wrapped on its way; None if from none."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, PeerFailedError):
            return error.process
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def _end(status: int) -> NoReturn:
    """End this process here and now, with what it has printed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or there is none
            stream.flush()
    time.sleep(_TO_BE_READ)
    if _only_signals_are_noticed():
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(status)


def _only_signals_are_noticed() -> bool:
    """Whether the others learn of this process's end only if a signal ends it."""
    # Open MPI's mpiexec --with-ft ulfm tells them of a process that ends by a signal or with status 0; of one with another
    # status it tells nobody. Our launcher has a shell between the two. Without it rank 0 hosts the hub: nobody goes on without
    # that one, and its status has to be mpiexec's.
    has_launcher = bool(os.environ.get("XPDISTRIBUTE_HUB"))
    return bool(os.environ.get(_ULFM)) and not has_launcher and os.environ.get("OMPI_COMM_WORLD_RANK") != "0"


def _mpi_is_running() -> bool:
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and bool(mpi.Is_initialized()) and not mpi.Is_finalized()
