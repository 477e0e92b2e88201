"""What a spare process does until it takes the place of another one: it comes wherever MPI needs all of its processes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import final

from collectives.errors import CollectiveError, CollectiveTimeoutError
from collectives.mpi.survivors import survivors

_log = logging.getLogger("xpdistribute")


@final
class Standby:
    """Does it in a thread of its own, whatever the program does meanwhile.

    Args:
        summons: names of what the others come to together, each once; None when there is nothing more.
        fail: called when this process can't come any more, on which the others would wait.
        timeout: seconds to wait for the others.
    """

    def __init__(
        self, summons: SimpleQueue[str | None], fail: Callable[[CollectiveError], None], timeout: float
    ) -> None:
        self._summons, self._fail, self._timeout = summons, fail, timeout
        self._thread = threading.Thread(target=self._serve, name="mpi-standby", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Come to all that this process has been called to, and to nothing after it.

        Raises:
            CollectiveTimeoutError: the others do not come to the last one.
        """
        self._summons.put(None)
        self._thread.join(self._timeout)
        if self._thread.is_alive():
            raise CollectiveTimeoutError(
                f"spare process: it waited {self._timeout:g} s for the others in MPI before it could take a place; is one stopped?"
            )

    def _serve(self) -> None:
        while (key := self._summons.get()) is not None:
            _log.debug("spare process: called to %s", key)
            try:
                survivors(self._timeout, has_spares=True)
            except CollectiveError as error:
                self._fail(error)
                return
            except Exception as error:  # noqa: BLE001  # told to the others, who would wait for this process otherwise
                self._fail(CollectiveError(f"spare process: it can't come to {key} in MPI: {error}"))
                return
