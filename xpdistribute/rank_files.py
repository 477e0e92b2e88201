"""A folder in which the ranks of this machine leave their process ids and find the pipes that they write to.

mpiexec starts a few lines of shell for each rank, which note the process id, connect the streams and then become the
program: it keeps the id, the environment and what mpiexec knows of it. A second shell waits for the launcher's end, however that
comes, and ends what is left.
"""

from __future__ import annotations

import errno
import os
import signal
import stat
from collections.abc import Sequence

from xpdistribute.output import ERR, OUT
from xpdistribute.process_identity import identify

_RANK = "${XPDISTRIBUTE_RANK:-${OMPI_COMM_WORLD_RANK:-${PMIX_RANK:-$PMI_RANK}}}"

_LOCAL = f"""\
d=$1 r={_RANK}; shift
echo $$ >"$d/pid.$r"
if [ "$r" = 0 ] && [ -p "$d/0.0" ]; then exec <"$d/0.0"; rm -f "$d/0.0"; else exec </dev/null; fi
if [ -p "$d/2.$r" ]; then exec 2>"$d/2.$r"; fi
if [ -p "$d/1.$r" ]; then exec >"$d/1.$r"; else exec >/dev/null; fi
exec "$@"
"""
_REMOTE = f"""\
if [ "$1" = first ] && [ "{_RANK}" != 0 ]; then exec >/dev/null; fi
shift
exec "$@"
"""
_WATCHER = """\
d=$1 mpiexec=$2
trap '' INT TERM HUP
read -r word && exit
kill -TERM "$mpiexec" 2>/dev/null
sleep 1
for file in "$d"/pid.*; do
  read -r pid <"$file" && { kill -KILL "-$pid" || kill -KILL "$pid"; }
done 2>/dev/null
kill -KILL "$mpiexec" $3 2>/dev/null
rm -rf "$d"
"""
_SHELL = "/bin/sh"


class RankFiles:
    """The folder, its pipes and the process ids in it.

    Args:
        num_processes: how many ranks there are.
        all_output: whether the standard output of all of them is read, or of rank 0 alone.
    """

    def __init__(self, num_processes: int, *, all_output: bool) -> None:
        self.folder = _new_folder()
        self.pipes: dict[int, tuple[int, int]] = {}
        """Rank and stream by descriptor, to be read without waiting."""
        try:
            for rank in range(num_processes):
                for stream in (OUT, ERR):
                    if stream == ERR or rank == 0 or all_output:
                        path = f"{self.folder}/{stream}.{rank}"
                        os.mkfifo(path, 0o600)
                        # Also for writing, so that the pipe has no end while no rank, or none yet, has it open.
                        self.pipes[os.open(path, os.O_RDWR | os.O_NONBLOCK)] = (rank, stream)
        except BaseException as error:
            self.remove()
            if isinstance(error, OSError) and error.errno == errno.EMFILE:
                raise ValueError(
                    f"-n: got {num_processes} processes, and this process may open no more files; need two for each — "
                    "ulimit -n 65536"
                ) from None
            raise

    def command(self, program: Sequence[str]) -> list[str]:
        """The command of a rank on this machine."""
        return [_SHELL, "-c", _LOCAL, "xpdistribute", self.folder, *program]

    def pids(self) -> dict[int, int]:
        """The process ids of the ranks that have started, by rank."""
        found = {}
        for name in os.listdir(self.folder):
            kind, _, rank = name.partition(".")
            if kind == "pid":
                with open(f"{self.folder}/{name}", encoding="ascii") as file:
                    text = file.read().strip()
                if text.isdecimal():  # it may be just being written
                    found[int(rank)] = int(text)
        return found

    def forward_input(self) -> int | None:
        """Start a copy of what this process has as its input to rank 0; its process id, or None if there is nothing to copy.

        mpiexec's own way is not taken: Open MPI's hangs when the input is at its end before the rank has started.
        """
        try:
            mode = os.fstat(0).st_mode
        except OSError:  # it is closed
            return None
        if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)):
            return None  # a terminal is not for programs in the background, which ranks are
        os.mkfifo(f"{self.folder}/0.0", 0o600)
        return os.posix_spawn(
            _SHELL,
            [_SHELL, "-c", 'exec cat >"$1"', "xpdistribute", f"{self.folder}/0.0"],
            os.environ,
            setpgroup=0,
        )

    def watch(self, mpiexec: int, others: Sequence[int] = ()) -> int:
        """Start what ends the ranks, and removes the folder, when this process is killed.

        Args:
            mpiexec: its process id, told first.
            others: of what is killed too.

        Returns:
            A descriptor: a line written to it ends the watch.
        """
        read, keep = os.pipe()
        null = os.open(os.devnull, os.O_RDWR)
        try:
            os.posix_spawn(
                _SHELL,
                [
                    _SHELL,
                    "-c",
                    _WATCHER,
                    "xpdistribute",
                    self.folder,
                    str(mpiexec),
                    " ".join(map(str, others)),
                ],
                os.environ,
                # Not the launcher's output: who reads that would wait for this shell too.
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, read, 0),
                    (os.POSIX_SPAWN_DUP2, null, 1),
                    (os.POSIX_SPAWN_DUP2, null, 2),
                ],
                setpgroup=0,
            )
        finally:
            os.close(read)
            os.close(null)
        return keep

    def remove(self) -> None:
        """Close the pipes and remove the folder."""
        for descriptor in self.pipes:
            os.close(descriptor)
        self.pipes.clear()
        for name in os.listdir(self.folder):
            os.unlink(f"{self.folder}/{name}")
        os.rmdir(self.folder)


def remote_command(program: Sequence[str], *, all_output: bool) -> list[str]:
    """The command of a rank that may be on another host."""
    return [_SHELL, "-c", _REMOTE, "xpdistribute", "all" if all_output else "first", *program]


def is_alive(pid: int) -> bool:
    """Whether a process is there, and no zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:  # it has just ended, or the system has no /proc
        return not os.path.isdir("/proc/self")


def send(pid: int, number: int, identity: str) -> None:
    """Send a signal to the process that `identify` named; SIGKILL goes to its whole group, if it leads one."""
    if identify(pid) != identity:
        return
    try:
        if number == signal.SIGKILL and os.getpgid(pid) == pid:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def _new_folder() -> str:
    for parent in (os.environ.get("XDG_RUNTIME_DIR"), os.environ.get("TMPDIR"), "/tmp"):
        if parent and os.access(parent, os.W_OK | os.X_OK) and stat.S_ISDIR(os.stat(parent).st_mode):
            folder = f"{parent}/xpdistribute-{os.getpid()}-{os.urandom(4).hex()}"
            os.mkdir(folder, 0o700)
            return folder
    raise ValueError(
        "xpdistribute run: no folder for its pipes can be written, /tmp neither; need one — set TMPDIR"
    )
