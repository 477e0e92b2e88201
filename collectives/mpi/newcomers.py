"""Processes that are started later, and connected with those that are there.

MPI connects a process with the one that has spawned it. From there, between two steps, all make one communicator with it.
That a process dies meanwhile is not always noticed by MPI: a newcomer hears of a death only when it has talked with the one who
dies. So whoever waits looks at the hub as well, and the communicator counts only when all have talked with all in it and the hub knows it.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from collectives.errors import CollectiveError, CollectiveTimeoutError
from collectives.mpi.library import is_loaded, mpi, set_leaving_alone
from collectives.mpi.survivors import survives_losses, survivors

REPLACEMENT = "XPDISTRIBUTE_REPLACEMENT"
"""How to start one, as the launcher says: its command, and the variables that it needs on any host."""

_SECRET = ("XPDISTRIBUTE_HUB", "XPDISTRIBUTE_TOKEN", "XPDISTRIBUTE_SIZE", "XPDISTRIBUTE_ELASTIC")
_TAG = 7
_TO_START = 60.0
"""Seconds that a newcomer has for MPI's start, in which its spawner takes part."""
_TO_END = 5.0
"""Seconds that one may take to start before another one is started beside it."""
_TO_BE_THERE = 5.0
"""Seconds in which the spawner must have what connects it with a newcomer that the hub knows already."""
_LONGEST = 10.0
"""Seconds for becoming one communicator, which takes some milliseconds when nobody dies."""
_AFTER_A_LOSS = 0.5
"""Seconds of them when somebody has."""

_spawning = threading.Lock()
_spawned: dict[int, Any] = {}  # what connects this process with those that it has started, by order
_changed = threading.Condition()


def spawn(number: int, rank: int, host: str | None, environ: Mapping[str, str] | None = None) -> None:
    """Start a process in the place of a lost one, and wait until it is connected with this one.

    If it ends before it initialises MPI, this never returns: call it in a thread of its own.

    Args:
        number: of the hub's order.
        rank: in whose place.
        host: where; None for wherever there is room, as also where MPI knows no such host.
        environ: with what the launcher says; None for the process's environment.

    Raises:
        RuntimeError: it is not possible.
    """
    environ = os.environ if environ is None else environ
    if not is_loaded() or not survives_losses():
        raise RuntimeError("the processes are not connected by MPI")
    told = json.loads(environ[REPLACEMENT])
    own = {"XPDISTRIBUTE_RANK": str(rank), "XPDISTRIBUTE_JOIN": "1", "XPDISTRIBUTE_SPAWN": str(number)}
    # On a command line everybody could read them. Of this, MPI takes only 255 characters.
    own.update({name: environ[name] for name in _SECRET if name in environ})
    passed = {name: environ[name] for name in (REPLACEMENT, *told["passed"]) if name in environ}
    arguments = [
        "-c",
        'exec env "$@"',
        "xpdistribute",
        *(f"{name}={value}" for name, value in passed.items()),
    ]
    # Not two at a time; but one may hang for ever.
    is_free = _spawning.acquire(timeout=_TO_END)
    try:
        _spawned_at(host, own, [*arguments, *told["command"]], number)
    finally:
        if is_free:
            _spawning.release()


def _spawned_at(host: str | None, environ: Mapping[str, str], arguments: Sequence[str], number: int) -> None:
    module = mpi()
    for place in (host, None) if host else (None,):
        info = module.Info.Create()
        try:
            info.Set("PMIX_ENVAR", "\n".join(f"{name}={value}" for name, value in environ.items()))
            if place:
                info.Set("host", place)
            comm = module.COMM_SELF.Spawn("/bin/sh", list(arguments), 1, info=info)
        except module.Exception as error:
            problem = error
            continue
        finally:
            info.Free()
        comm.Set_errhandler(module.ERRORS_RETURN)
        with _changed:
            _spawned[number] = comm
            _changed.notify_all()
        return
    raise RuntimeError(f"MPI could not start it: {problem}")


def begin() -> None:
    """In a process that another one has spawned, before anything else: connect with it."""
    # MPI's start holds Python's lock, so no thread could end it; and a spawner that has died would be waited for, for ever.
    faulthandler.dump_traceback_later(_TO_START, exit=True, file=sys.__stderr__ or 2)
    try:
        mpi()
    finally:
        faulthandler.cancel_dump_traceback_later()
    set_leaving_alone()


def connect_newcomers(
    process: int,
    spawners: Sequence[tuple[int, int]],
    num_survivors: int,
    somebody_is_gone: Callable[[], bool],
    timeout: float,
) -> Any:
    """One communicator of all survivors and newcomers, by their numbers. All call it at the same time.

    Args:
        process: the number of this one.
        spawners: of each newcomer, who has started it and by which order.
        num_survivors: how many were there before; newcomers have the numbers after these.
        somebody_is_gone: whether the hub knows of a loss since these numbers were given out.
        timeout: seconds to wait for the others.

    Raises:
        CollectiveError: it has not become one, here or at some other process.
    """
    module = mpi()
    is_new = process >= num_survivors
    comm = module.COMM_SELF if is_new else survivors(timeout)
    if not is_new and (comm.rank, comm.size) != (process, num_survivors):
        raise CollectiveError(
            f"newcomers: this is process {process} of {num_survivors}, and {comm.rank} of {comm.size} in MPI; need one numbering"
        )
    made = [] if is_new else [comm]
    done: list[Any] = []
    failed: list[BaseException] = []

    def connect() -> None:
        try:
            now = comm
            for newcomer, (spawner, number) in enumerate(spawners, num_survivors):
                if process <= newcomer:
                    now = _one_more(now, process, newcomer, spawner, number, made)
            _talk_with_all(now)
            done.append(now)
        except (module.Exception, CollectiveError) as error:
            failed.append(error)

    # Some of it can't be given up once it is begun.
    thread = threading.Thread(target=connect, name="mpi-connect", daemon=True)
    thread.start()
    end = time.monotonic() + min(timeout, _LONGEST)
    while thread.is_alive() and time.monotonic() < end:
        thread.join(0.002)
        if somebody_is_gone():
            end = min(end, time.monotonic() + _AFTER_A_LOSS)
            thread.join(_AFTER_A_LOSS)
            break
    if done:
        return done[0]
    abandon(made)
    why = failed[0] if failed else "MPI did not become one with it in time"
    raise CollectiveError(f"newcomers: process {process} could not be connected with the others: {why}")


def abandon(comms: Sequence[Any]) -> None:
    """Have nobody wait in these communicators any more."""
    module = mpi()
    for comm in list(comms):
        try:
            comm.Revoke()
        except module.Exception:
            continue  # nobody can be told any more


def _one_more(comm: Any, process: int, newcomer: int, spawner: int, number: int, made: list[Any]) -> Any:
    """The communicator with one more newcomer, which has only itself so far."""
    module = mpi()
    is_newcomer = process == newcomer

    def kept(made_now: Any) -> Any:
        made_now.Set_errhandler(module.ERRORS_RETURN)
        made.append(made_now)
        return made_now

    two = module.COMM_SELF
    if is_newcomer:
        two = kept(module.Comm.Get_parent().Merge(high=True))
    elif process == spawner:
        two = kept(_connection(number).Merge(high=False))
    between = kept(comm.Create_intercomm(0 if is_newcomer else spawner, two, 0 if is_newcomer else 1, _TAG))
    return kept(between.Merge(high=is_newcomer))


def _connection(number: int) -> Any:
    with _changed:
        if not _changed.wait_for(lambda: number in _spawned, _TO_BE_THERE):
            raise CollectiveTimeoutError(
                f"newcomers: MPI did not connect this process with the one that it has started within {_TO_BE_THERE:g} s"
            )
        return _spawned.pop(number)


def _talk_with_all(comm: Any) -> None:
    """A barrier of messages from everybody to everybody."""
    module = mpi()
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    sent, received = np.zeros(1, np.uint8), np.zeros(comm.size, np.uint8)
    requests = [comm.Irecv([received[rank : rank + 1], module.BYTE], rank, _TAG) for rank in others]
    requests += [comm.Isend([sent, module.BYTE], rank, _TAG) for rank in others]
    end = time.monotonic() + _LONGEST
    while not module.Request.Testall(requests):
        if comm.Is_revoked() or time.monotonic() > end:
            raise CollectiveTimeoutError("newcomers: not all processes have answered")
        time.sleep(0.0005)
