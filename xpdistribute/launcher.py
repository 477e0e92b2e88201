"""``xpdistribute run``: starts a job, shows what its ranks print, and says who failed.

A thin front to mpiexec: it finds the right one, sets what makes it quick and lets it work everywhere, and hosts the hub
over which the ranks find one another and hear of failures. It outlives every rank.
"""

from __future__ import annotations

import _socket  # what the module socket is built on, without all that it loads
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from xpdistribute.attempt import Attempt
from xpdistribute.environment import inherited, settings
from xpdistribute.host import find_cores
from xpdistribute.hostfile import Host, allocation, are_local
from xpdistribute.limits import is_shortage, raise_limits, shortage
from xpdistribute.mpiexec import Mpiexec, find_mpiexec, shares
from xpdistribute.outcome import Result, how, who
from xpdistribute.output import ERR, OUT, Output, drawing_on
from xpdistribute.own_address import own_address
from xpdistribute.rank_files import RankFiles, remote_command
from xpdistribute.run_options import USAGE, RunOptions, parse
from xpdistribute.words import shortened

if TYPE_CHECKING:
    from types import FrameType

    from xpdistribute.events import Event, Regrouped
    from xpdistribute.hub import Hub

_RESTART_PAUSE = 0.2
"""Seconds before a job is started again, so that one that can't run does not spin."""


def launch(arguments: Sequence[str]) -> int:
    """Run the command ``xpdistribute run``.

    Args:
        arguments: what follows it.

    Returns:
        The exit status: the job's, as `USAGE` says; 2 for wrong usage.
    """
    options = None
    try:
        options = parse(arguments)
        if options is None:
            sys.stdout.write(USAGE)
            return 0
        return _launch(options)
    except ValueError as error:
        Output.say(str(error))
        return 2
    except OSError as error:
        if not is_shortage(error):
            raise
        Output.say(f"{error}. {shortage(options.num_ranks) if options else ''}".removesuffix(". "))
        return 1


def _launch(options: RunOptions) -> int:
    raise_limits(options.num_ranks)
    plan = _Plan(options, os.environ)
    if options.dry_run:
        print(plan.as_shell())
        return 0
    restart = 0
    deadline = None if options.timeout is None else time.monotonic() + options.timeout
    while True:
        result = _attempt(plan, restart, deadline)
        is_final = not result.status or result.signal is not None or result.is_late or not result.has_started
        if is_final or options.elastic or restart == options.max_restarts:
            break
        restart += 1
        what = "it" if result.culprit is None else who(result.culprit)
        Output.say(
            f"{what} ended with status {result.status}; the job is started again ({restart} of {options.max_restarts})"
        )
        time.sleep(_RESTART_PAUSE)
    _conclude(result, plan)
    return result.status


def _attempt(plan: _Plan, restart: int, deadline: float | None) -> Result:
    options = plan.options
    terminals = plan.terminals
    files = RankFiles(
        options.num_ranks,
        all_output=options.all_output,
        elastic=options.elastic,
        terminals=terminals,
    )
    # It listens before there is a hub behind it, which loads while mpiexec starts: who comes early has to wait a little.
    listener = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
    try:
        host, listened = plan.hub_hosts
        listener.bind((listened, 0))
        listener.listen(1024)
        _, port = listener.getsockname()
        token = os.urandom(16).hex()

        def open_hub(on_event: Callable[[Event | Regrouped], None]) -> Hub:
            from socket import socket  # noqa: PLC0415  # as above

            from xpdistribute.hub import HEARTBEAT_SECONDS, Hub  # noqa: PLC0415

            return Hub(
                options.num_processes,
                token,
                host,
                elastic=options.elastic,
                heartbeat_seconds=options.heartbeat or HEARTBEAT_SECONDS,
                num_spares=options.spares,
                sees_ends=plan.is_local,
                on_event=on_event,
                listener=socket(fileno=listener.detach()),
            ).start()

        environment = {
            **plan.environment,
            **plan.settings,
            "XPDISTRIBUTE_HUB": f"{host}:{port}",
            "XPDISTRIBUTE_TOKEN": token,
            "XPDISTRIBUTE_SIZE": str(options.num_processes),
        }
        if options.spares:
            environment["XPDISTRIBUTE_SPARES"] = str(options.spares)
        if options.elastic:
            environment["XPDISTRIBUTE_ELASTIC"] = "1"
        elif options.max_restarts:
            environment["XPDISTRIBUTE_RESTART"] = str(restart)
        attempt = Attempt(
            plan.command(files, environment),
            environment,
            options.program,
            listener.fileno(),
            open_hub,
            files,
            Output(tagged=options.tag_output, of_all=options.all_output, drawing=drawing_on(terminals)),
            num_processes=options.num_processes,
            num_spares=options.spares,
            is_local=plan.is_local,
            elastic=options.elastic,
            replacements=options.max_restarts,
            deadline=deadline,
        )
        with _Signals(attempt):
            return attempt.run()
    finally:
        listener.close()
        files.remove()


class _Plan:
    """All that is decided before anything is started.

    Args:
        options: what was asked for.
        environ: the launcher's environment.
    """

    def __init__(self, options: RunOptions, environ: Mapping[str, str]) -> None:
        self.options = options
        self._environ = environ
        self.mpiexec: Mpiexec = find_mpiexec(environ)
        given = allocation(environ)
        self.is_local = are_local(options.hosts) and (bool(options.hosts) or given is None)
        # What is all on this machine needs no list: mpiexec would ask the resolver for the names.
        self.hosts: tuple[Host, ...] = () if self.is_local else options.hosts
        local = options.num_processes
        if self.hosts:
            local = max(count for _, count in shares(self.hosts, options.num_processes))
        elif not self.is_local:
            local = 1  # the scheduler knows; more threads than cores would be worse than few
        self.environment = inherited(environ)
        self.settings = settings(environ, self.mpiexec, find_cores().available, local, options.threads)
        # Also the check that this mpiexec can do it.
        self._bare = self._mpiexec_command(options.program, list(self.settings))

    @property
    def hub_hosts(self) -> tuple[str, str]:
        """The host by which the ranks reach the hub, and the address that it listens at: "" for everywhere."""
        if self.is_local:
            return "127.0.0.1", "127.0.0.1"
        return own_address([host.name for host in self.hosts if not are_local([host])])

    @property
    def terminals(self) -> list[int]:
        """The streams of this process for which rank 0 gets a terminal."""
        if not self.is_local or self.options.tag_output:
            return []  # mpiexec has no terminals for other hosts; what is drawn on one has no lines to be tagged
        return [stream for stream in (OUT, ERR) if os.isatty(stream)]

    @property
    def likely_reason(self) -> str:
        """Why mpiexec may have started nothing on the hosts, and how the user sees whether that is it."""
        name = allocation(self._environ)
        if not self.hosts and name is not None:
            where, first = f"the hosts of {name} ({self._environ[name]})", "HOST"
        else:
            others = [host.name for host in self.hosts if not are_local([host])]
            where, first = ", ".join(others), others[0]
        by_srun = "srun hostname" if "SLURM_JOB_ID" in self._environ else None
        tries = " or ".join(f"'{one}'" for one in (by_srun, f"ssh {first} {sys.executable} -V") if one)
        return (
            f"Does it reach {where} without a password, is this Python at the same path there, and may they connect to this host? — "
            f"try {tries}"
        )

    def command(self, files: RankFiles, environment: Mapping[str, str]) -> list[str]:
        """The command that starts the ranks with what the launcher needs around them."""
        if self.is_local:
            return self._mpiexec_command(files.command(self.options.program), ())
        passed = [*self.settings, *(name for name in environment if name.startswith("XPDISTRIBUTE_"))]
        program = remote_command(
            self.options.program, all_output=self.options.all_output or self.options.elastic
        )
        return self._mpiexec_command(program, passed)

    def as_shell(self) -> str:
        """The bare command with its environment, to be copied into a shell."""
        import shlex  # noqa: PLC0415  # nothing else needs it

        pairs = [f"{name}={shlex.quote(value)}" for name, value in self.settings.items()]
        return " ".join(["env", *pairs, shlex.join(self._bare)])

    def _mpiexec_command(self, program: Sequence[str], passed: Sequence[str]) -> list[str]:
        return self.mpiexec.command(
            program,
            self.options.num_ranks,
            self.hosts,
            passed=() if self.is_local else passed,
            elastic=self.options.elastic,
            tagged=not self.is_local,
        )


class _Signals:
    """While it is open, signals that would end the launcher end the attempt."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._before: dict[int, object] = {}

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup
                self._before[number] = signal.signal(number, self._stop)
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, self._wake)
        self._before[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, self._resize)

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)  # type: ignore[arg-type]  # what signal.signal itself has returned

    def _stop(self, number: int, _: FrameType | None) -> None:
        self._attempt.stop(number)

    def _resize(self, _: int, __: FrameType | None) -> None:
        self._attempt.resize()

    def _wake(self, _: int, __: FrameType | None) -> None:
        self._attempt.wake()


def _conclude(result: Result, plan: _Plan) -> None:
    options = plan.options
    if result.is_late:
        Output.say(f"the job was not done after {options.timeout:g} s (--timeout) and was ended")
    elif result.signal == signal.SIGPIPE:
        return  # nobody reads the output any more: without a word, as other tools
    elif result.signal is not None:
        Output.say(f"ended by {signal.Signals(result.signal).name}")
    elif result.culprit is not None:
        others = "" if options.num_processes == 1 else "; the others were ended"
        text = "" if result.culprit.is_shown else shortened(result.culprit.text.strip())
        said = ". What it said last:" if text else ""
        Output.say(f"{who(result.culprit)} {how(result.culprit)}{others}{said}")
        if text:
            sys.stderr.write(text + "\n")
    elif result.status and not result.has_started and not plan.is_local:
        Output.say(
            f"mpiexec ended with status {result.status} before any process had started. {plan.likely_reason}"
        )
    elif result.status:
        reason = "" if result.has_started else shortage(options.num_ranks)
        Output.say(
            f"mpiexec ended with status {result.status}{f'. {reason}' if reason else ', and did not say why'}"
        )
