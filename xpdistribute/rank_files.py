"""A folder in which the ranks of this machine leave their process ids and statuses, and find the pipes that they write to.

mpiexec starts a few lines of shell for each rank, which connect its streams, note its process id and say with which status it
has ended: what mpiexec itself tells of that differs, and of some it is little. In an elastic job the shell then ends with status 0,
as Open MPI with ULFM may hang or end the others after another one. One more shell waits for the launcher's end, however that comes,
and ends what is left.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Sequence

from xpdistribute.limits import has_room
from xpdistribute.output import ERR, OUT

_SHELL = "/bin/sh"
_RANK = "${XPDISTRIBUTE_RANK:-${OMPI_COMM_WORLD_RANK:-${PMIX_RANK:-$PMI_RANK}}}"

_LOCAL = f"""\
d=$1 elastic=$2 r={_RANK}; shift 2
if [ "$r" = 0 ] && [ -p "$d/0.0" ]; then exec <"$d/0.0"; rm -f "$d/0.0"; else exec </dev/null; fi
if [ -e "$d/2.$r" ]; then exec 3>"$d/2.$r"; else exec 3>&2; fi
if [ -e "$d/1.$r" ]; then exec >"$d/1.$r"; else exec >/dev/null; fi
exec 2>/dev/null # where the shell says "Killed"
{_SHELL} -c 'exec 2>&3 3>&-; d=$1 r=$2; shift 2; echo $$ $PPID >"$d/pid.$r"; exec "$@"' xpdistribute "$d" "$r" "$@"
s=$?
echo "$r $s $$" >"$d/ended"
[ "$elastic" = 0 ] || exit 0
[ "$s" = 0 ] || sleep 0.2 # mpiexec kills the others then, who are to say first what they think of it
exit "$s"
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
  read -r pid group <"$file" && { kill -KILL "-$group"; kill -KILL "$pid"; }
done 2>/dev/null
kill -KILL "$mpiexec" $3 2>/dev/null
rm -rf "$d"
"""


class RankFiles:
    """The folder, its pipes and the process ids in it.

    Args:
        num_processes: how many ranks there are.
        all_output: whether the standard output of all of them is read, or of rank 0 alone; of an elastic job it always is.
        elastic: whether mpiexec is told of no failure.
        terminals: the streams of this process that rank 0 gets a terminal for, as they are terminals.
    """

    def __init__(
        self, num_processes: int, *, all_output: bool, elastic: bool, terminals: Collection[int] = ()
    ) -> None:
        self._elastic = elastic
        self.folder = _new_folder()
        self.pipes: dict[int, tuple[int, int]] = {}
        """Rank and stream by descriptor, to be read without waiting."""
        self.terminals: dict[int, int] = {}
        """Those of them that are terminals, with the descriptor of this process that each is like."""
        self._slaves: list[int] = []
        self.ended = -1
        """The descriptor from which `read_ended` reads."""
        try:
            os.mkfifo(f"{self.folder}/ended", 0o600)
            self.ended = os.open(f"{self.folder}/ended", os.O_RDWR | os.O_NONBLOCK)
            for rank in range(num_processes):
                for stream in (OUT, ERR):
                    if rank == 0 and stream in terminals and self._open_terminal(stream):
                        continue
                    # Another rank than 0 speaks for all when that one is gone.
                    if stream == ERR or rank == 0 or all_output or elastic:
                        path = f"{self.folder}/{stream}.{rank}"
                        os.mkfifo(path, 0o600)
                        # Also for writing, so that the pipe has no end while no rank, or none yet, has it open.
                        self.pipes[os.open(path, os.O_RDWR | os.O_NONBLOCK)] = (rank, stream)
        except BaseException:
            self.remove()
            raise

    def _open_terminal(self, stream: int) -> bool:
        """Whether there is one; some containers have none."""
        from xpdistribute.terminal import open_terminal  # noqa: PLC0415  # pipes are more usual

        try:
            master, slave = open_terminal(stream)
        except OSError:
            return False
        self.pipes[master] = (0, stream)
        self.terminals[master] = stream
        self._slaves.append(slave)
        os.symlink(os.ttyname(slave), f"{self.folder}/{stream}.0")
        return True

    def command(self, program: Sequence[str]) -> list[str]:
        """The command of a rank on this machine."""
        elastic = "1" if self._elastic else "0"
        return [_SHELL, "-c", _LOCAL, "xpdistribute", self.folder, elastic, *program]

    def read_ended(self) -> list[tuple[int, int, int]]:
        """Rank, status and process group of those that have ended since it was last called; 128 + N for signal N."""
        text = b""
        try:
            while data := os.read(self.ended, 1 << 12):
                text += data  # in whole lines: each was written at once
        except BlockingIOError:
            pass
        lines = (map(int, line.split()) for line in text.splitlines())
        return [(rank, status, group) for rank, status, group in lines]

    def pids(self) -> dict[int, tuple[int, int]]:
        """The process id of each rank that has started, and that of its process group, by rank."""
        found = {}
        for name in os.listdir(self.folder):
            kind, _, rank = name.partition(".")
            if kind == "pid":
                with open(f"{self.folder}/{name}", encoding="ascii") as file:
                    text = file.read()
                if text.endswith("\n"):  # it may be just being written
                    pid, group = map(int, text.split())
                    found[int(rank)] = pid, group
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
        for descriptor in (*self.pipes, *self._slaves, *([self.ended] if self.ended >= 0 else [])):
            os.close(descriptor)
        self.pipes.clear()
        self._slaves.clear()
        self.ended = -1
        for name in os.listdir(self.folder):
            os.unlink(f"{self.folder}/{name}")
        os.rmdir(self.folder)


def remote_command(program: Sequence[str], *, all_output: bool) -> list[str]:
    """The command of a rank that may be on another host."""
    return [_SHELL, "-c", _REMOTE, "xpdistribute", "all" if all_output else "first", *program]


def _new_folder() -> str:
    for parent in (os.environ.get("XDG_RUNTIME_DIR"), os.environ.get("TMPDIR"), "/tmp"):
        if parent and os.path.isdir(parent) and has_room(parent):
            folder = f"{parent}/xpdistribute-{os.getpid()}-{os.urandom(4).hex()}"
            os.mkdir(folder, 0o700)
            return folder
    raise ValueError(
        "xpdistribute run: no folder for its pipes can be written and has room, /tmp neither; need one — set TMPDIR"
    )
