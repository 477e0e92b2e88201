"""What a spare process does besides waiting for a place: it comes to the start of MPI, which needs all processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import final

from collectives.errors import CollectiveError, CollectiveTimeoutError, in_words
from collectives.mpi.communicators import make_communicator


@final
class Standby:
    """Does it in a thread of its own, whatever the program does meanwhile.

    Args:
        called: set when the others start MPI.
        fail: called when this process can't come, for which the others would wait.
        timeout: seconds to wait for the others.
    """

    def __init__(
        self, called: threading.Event, fail: Callable[[CollectiveError], None], timeout: float
    ) -> None:
        self._called, self._fail, self._timeout = called, fail, timeout
        self._thread = threading.Thread(target=self._serve, name="mpi-standby", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Before this process takes a place: be done, if it was called.

        Raises:
            CollectiveTimeoutError: the others do not come.
        """
        if not self._called.is_set():
            return
        self._thread.join(self._timeout)
        if self._thread.is_alive():
            raise CollectiveTimeoutError(
                f"spare process: it waited {self._timeout:g} s for the others to start MPI before it could take a place; is one stopped?"
            )

    def _serve(self) -> None:
        self._called.wait()
        try:
            make_communicator(self._timeout)
        except CollectiveError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001  # told to the others, which would wait for this process otherwise
            self._fail(
                CollectiveError(f"spare process: it can't start MPI with the others: {in_words(error)}")
            )
