"""The command ``xpdistribute run``, run as users run it: real mpiexec, real processes, killed and stopped for real."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RANK = """import os, sys, time, signal
rank = int(os.environ.get("XPDISTRIBUTE_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
"""

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None, reason="needs xpdistribute[mpi], which brings mpiexec"
)

Script = Callable[[str], str]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Writes a program that knows its ``rank``; its path."""

    def write(text: str) -> str:
        path = tmp_path / "train.py"
        path.write_text(RANK + textwrap.dedent(text))
        return str(path)

    return write


@pytest.fixture(autouse=True)
def runtime_folder(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """Where the launcher keeps its pipes: nothing is left in it after any test."""
    folder = tmp_path_factory.mktemp("runtime")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONUNBUFFERED"):
        monkeypatch.delenv(name, raising=False)
    yield folder
    assert wait_for(lambda: not list(folder.iterdir())), "the launcher has left files behind"


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "xpdistribute", "run", *arguments]


def run(*arguments: str, timeout: float = 30, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*arguments),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(holds: Callable[[], bool], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def pids_in(folder: Path, count: int) -> list[int]:
    """The process ids that the ranks have written, once all of them have."""
    assert wait_for(lambda: len([f for f in folder.glob("rank.*") if f.read_text()]) == count, 15)
    return [int((folder / f"rank.{rank}").read_text()) for rank in range(count)]


NOTE_PID = "open(sys.argv[1] + f'/rank.{rank}', 'w').write(str(os.getpid()))\n"


# ---------------------------------------------------------------- output


def test_rank_0_alone_is_heard_and_the_errors_of_all(script: Script) -> None:
    done = run("-n", "3", script("print('out', rank); print('err', rank, file=sys.stderr)"))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "out 0\n"
    assert sorted(done.stderr.splitlines()) == ["err 0", "err 1", "err 2"]


def test_all_output_is_shown_and_tagged_on_request(script: Script) -> None:
    program = script("sys.stdout.write(f'one {rank}\\ntwo'); print('err', file=sys.stderr)")
    done = run("-n", "2", "--all-output", "--tag-output", program)
    assert sorted(done.stdout.splitlines()) == ["[0] one 0", "[0] two", "[1] one 1", "[1] two"]
    assert sorted(done.stderr.splitlines()) == ["[0] err", "[1] err"]


def test_much_output_arrives_whole_and_lines_of_ranks_do_not_mix(script: Script) -> None:
    done = run("-n", "3", "--all-output", script("for i in range(4000): print(f'{rank}:{i}:' + 'x' * 90)"))
    lines = done.stdout.splitlines()
    assert len(lines) == 12000
    for rank in range(3):
        own = [line for line in lines if line.startswith(f"{rank}:")]
        assert own == [f"{rank}:{i}:" + "x" * 90 for i in range(4000)]


def test_a_line_is_seen_at_once(script: Script) -> None:
    process = start("-n", "2", script("print('hello'); time.sleep(20)"))
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "hello\n"
        assert process.poll() is None
    finally:
        process.terminate()
        process.communicate(timeout=10)


def test_a_line_that_rank_0_has_begun_is_seen_too(script: Script) -> None:
    process = start("-n", "2", script("print('name? ', end='', flush=True); time.sleep(20)"))
    try:
        assert process.stdout is not None
        assert process.stdout.read(6) == "name? "
    finally:
        process.terminate()
        process.communicate(timeout=10)


def test_standard_input_goes_to_rank_0() -> None:
    done = subprocess.run(
        command("-n", "2", "cat"),
        input="for rank 0\n",
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "for rank 0\n")


# ---------------------------------------------------------------- how it ends


def test_a_rank_that_raises_ends_the_job_with_its_status_and_its_traceback_last(script: Script) -> None:
    began = time.monotonic()
    done = run("-n", "3", script("if rank == 1: raise ValueError('boo')\ntime.sleep(25)"))
    assert done.returncode == 1
    assert time.monotonic() - began < 10
    assert re.search(
        r"ValueError: boo\nxpdistribute run: rank 1 \(pid \d+, host \S+\) ended with status 1; the others were ended\n$",
        done.stderr,
    ), done.stderr
    assert done.stderr.count("ValueError: boo") == 1
    assert "prterun" not in done.stderr


def test_the_status_of_the_rank_is_that_of_the_job(script: Script) -> None:
    assert run("-n", "2", script("if rank == 1: os._exit(7)\ntime.sleep(25)")).returncode == 7


def test_a_killed_rank_gives_128_and_the_signal(script: Script) -> None:
    done = run("-n", "2", script("if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(25)"))
    assert done.returncode == 137
    assert re.fullmatch(
        r"xpdistribute run: rank 1 \(pid \d+, host \S+\) was killed by SIGKILL; the others were ended\n",
        done.stderr,
    )


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_all_ranks_within_2_seconds(
    script: Script, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    process = start("-n", "3", script(NOTE_PID + "time.sleep(30)"), str(tmp_path))
    pids = pids_in(tmp_path, 3)
    began = time.monotonic()
    process.send_signal(number)
    _, err = process.communicate(timeout=10)
    assert time.monotonic() - began < 2
    assert process.returncode == status, err
    assert not any(map(is_running, pids))
    assert f"ended by {number.name}" in err


def test_ranks_that_ignore_signals_are_killed(script: Script, tmp_path: Path) -> None:
    ignoring = "for s in (signal.SIGINT, signal.SIGTERM): signal.signal(s, signal.SIG_IGN)\n"
    process = start("-n", "2", script(ignoring + NOTE_PID + "time.sleep(30)"), str(tmp_path))
    pids = pids_in(tmp_path, 2)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
    assert time.monotonic() - began < 2.5
    assert not any(map(is_running, pids))


def test_ranks_may_end_by_themselves_on_sigterm(script: Script, tmp_path: Path) -> None:
    leave = "signal.signal(signal.SIGTERM, lambda *_: (print('saved', rank, flush=True), os._exit(0)))\n"
    process = start("-n", "2", script(leave + NOTE_PID + "time.sleep(30)"), str(tmp_path))
    pids_in(tmp_path, 2)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=10)
    assert out == "saved 0\n"
    assert process.returncode == 143


def test_no_rank_outlives_a_killed_launcher(script: Script, tmp_path: Path) -> None:
    process = start("-n", "2", script(NOTE_PID + "time.sleep(30)"), str(tmp_path))
    pids = pids_in(tmp_path, 2)
    process.kill()
    process.communicate(timeout=10)
    assert wait_for(lambda: not any(map(is_running, pids)))


def test_a_job_has_no_more_than_its_time(script: Script) -> None:
    began = time.monotonic()
    done = run("-n", "2", "--timeout", "1", script("time.sleep(30)"))
    assert done.returncode == 124
    assert time.monotonic() - began < 5
    assert "--timeout" in done.stderr


# ---------------------------------------------------------------- restarts


def test_a_job_that_fails_is_started_again(script: Script) -> None:
    program = script(
        """
        attempt = int(os.environ['XPDISTRIBUTE_RESTART'])
        if rank == 0: print('attempt', attempt)
        if rank == 1 and attempt < 2: sys.exit(5)
        time.sleep(0.2)
        """
    )
    done = run("-n", "2", "--max-restarts", "3", program)
    assert done.returncode == 0, done.stderr
    assert "attempt 2" in done.stdout
    assert len(re.findall("is started again", done.stderr)) == 2


def test_restarts_end(script: Script) -> None:
    done = run("-n", "2", "--max-restarts", "1", script("if rank == 1: sys.exit(5)\ntime.sleep(20)"))
    assert done.returncode == 5
    assert "(1 of 1)" in done.stderr


# ---------------------------------------------------------------- the environment of the ranks


def test_ranks_know_their_job_and_share_the_cores(script: Script) -> None:
    names = (
        "XPDISTRIBUTE_SIZE",
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "MKL_NUM_THREADS",
        "OMPI_MCA_btl",
    )
    program = script(f"print(*(os.environ.get(n) for n in {names}), 'XPDISTRIBUTE_TOKEN' in os.environ)")
    cores = len(os.sched_getaffinity(0))
    done = run("-n", "2", program)
    size, omp, blas, mkl, btl, has_token = done.stdout.split()
    assert (size, btl, has_token) == ("2", "self,sm,tcp", "True")
    assert omp == blas == mkl
    assert 1 <= int(omp) <= max(1, cores // 2)
    assert run("-n", "2", "--threads", "3", program).stdout.split()[1:4] == ["3", "3", "3"]


def test_what_the_user_has_set_stays(script: Script) -> None:
    program = script(
        "print(os.environ['OMP_NUM_THREADS'], os.environ.get('MKL_NUM_THREADS'), os.environ['OMPI_MCA_btl'])"
    )
    done = run("-n", "2", program, OMP_NUM_THREADS="5", OMPI_MCA_btl="self,tcp")
    assert done.stdout.split() == ["5", "None", "self,tcp"]


def test_more_ranks_than_cores_are_not_bound_to_one(script: Script) -> None:
    count = (os.cpu_count() or 1) + 2
    done = run("-n", str(count), "--all-output", script("print(len(os.sched_getaffinity(0)))"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(len(os.sched_getaffinity(0)))] * count


def test_ranks_find_one_another_by_mpi() -> None:
    code = "from mpi4py import MPI; c = MPI.COMM_WORLD; print(c.Get_size(), c.allreduce(c.Get_rank() + 1))"
    done = run("-n", "3", sys.executable, "-c", code)
    assert (done.returncode, done.stdout) == (0, "3 6\n"), done.stderr


def test_modules_and_other_programs_run_too() -> None:
    assert run("-n", "2", "-m", "json.tool", "--help").stdout.startswith("usage: ")
    assert run("-n", "2", "--", "echo", "-n", "a  b").stdout == "a  b"


def test_a_dry_run_prints_a_command_that_works(script: Script, tmp_path: Path) -> None:
    program = script("print('ran', rank, sys.argv[1:])")
    told = run("-n", "2", "--dry-run", program, "a b", "--flag")
    assert told.returncode == 0
    assert "mpiexec -n 2 " in told.stdout
    assert "OMPI_MCA_btl=self,sm,tcp" in told.stdout
    done = subprocess.run(["sh", "-c", told.stdout], capture_output=True, text=True, timeout=20, check=False)
    assert sorted(done.stdout.splitlines()) == ["ran 0 ['a b', '--flag']", "ran 1 ['a b', '--flag']"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "-n: not given"),
        (["-n", "0", "x.py"], "-n: got '0'; need a whole number from 1"),
        (["-n", "two", "x.py"], "-n: got 'two'"),
        (["-n", "2"], "nothing to run"),
        (["-n", "2", "missing.py"], "no such file"),
        (["-n", "2", "no-such-program"], "not on the PATH"),
        (["-n", "2", "--elastik", "true"], "--elastik"),
        (["-n", "2", "-H", "a:0", "true"], "-H: got '0' slots"),
        (["-n", "2", "-H", "a,a", "true"], "got a twice"),
        (["-n", "2", "-H", "a", "--hostfile", "f", "true"], "both -H and --hostfile"),
        (["-n", "2", "--hostfile", "no-such-file", "true"], "--hostfile"),
        (["-n", "2", "--timeout", "-1", "true"], "--timeout: got '-1'"),
        (["-n", "2", "--threads"], "--threads: got no value"),
    ],
)
def test_wrong_usage_is_named_and_starts_nothing(arguments: list[str], words: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


# ---------------------------------------------------------------- elastic jobs

MEMBER = """
sys.path.insert(0, {root!r})
from collectives.control.channel import Channel

host, pids = os.uname().nodename, sys.argv[1]
number = rank
is_new = os.environ.get("XPDISTRIBUTE_JOIN") == "1"
channel = Channel.connect(
    os.environ["XPDISTRIBUTE_HUB"], os.environ["XPDISTRIBUTE_TOKEN"], None if is_new else number,
    host=host, size=None if is_new else int(os.environ["XPDISTRIBUTE_SIZE"]), join=is_new, timeout=20.0,
)
channel.install_hooks()
if is_new:
    channel.regroup("new", True, 20.0)
    print("new", number, flush=True)
else:
    channel.gather("begin", number, 20.0)
    open(f"{{pids}}/rank.{{number}}", "w").write(str(os.getpid()))
    end = time.monotonic() + 20
    while channel.num_processes == 3 and channel.failure is None:
        assert time.monotonic() < end
        time.sleep(0.01)
    while channel.num_processes < 3 or channel.failure is not None:
        assert time.monotonic() < end
        channel.regroup("old", True, 20.0)
        time.sleep(0.01)
channel.gather("end", number, 20.0)
print("end", number, flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_dead_rank_of_an_elastic_job_is_replaced(
    script: Script, tmp_path: Path, number: signal.Signals
) -> None:
    program = script(MEMBER.format(root=str(ROOT)))
    process = start("-n", "3", "--elastic", "--all-output", program, str(tmp_path))
    os.kill(pids_in(tmp_path, 3)[1], number)
    out, err = process.communicate(timeout=25)
    assert process.returncode == 0, err
    assert sorted(out.splitlines()) == ["end 0", "end 1", "end 2", "new 1"]
    assert re.search(
        r"rank 1 \(pid \d+, host \S+\) has died; another one is started in its place \(1 of 3\)", err
    ), err


def test_a_rank_that_ends_with_status_1_does_not_end_an_elastic_job(script: Script) -> None:
    done = run(
        "-n",
        "3",
        "--elastic",
        "--all-output",
        script("if rank == 1: os._exit(1)\ntime.sleep(1)\nprint(rank)"),
    )
    assert sorted(done.stdout.split()) == ["0", "2"]
    assert done.returncode == 0


def test_nobody_is_replaced_if_no_restart_is_allowed(script: Script, tmp_path: Path) -> None:
    alone = MEMBER.replace("channel.num_processes < 3 or", "").replace("True, 20.0)", "False, 20.0)")
    program = script(alone.format(root=str(ROOT)))
    process = start("-n", "3", "--elastic", "--max-restarts", "0", "--all-output", program, str(tmp_path))
    os.kill(pids_in(tmp_path, 3)[2], signal.SIGKILL)
    out, err = process.communicate(timeout=25)
    assert process.returncode == 0, err
    assert sorted(out.splitlines()) == ["end 0", "end 1"]
    assert "--max-restarts is 0, so the others go on without it" in err


def test_a_replacement_that_can_not_start_is_told_and_not_tried_for_ever(
    script: Script, tmp_path: Path
) -> None:
    alone = MEMBER.replace("channel.num_processes < 3 or", "").replace("True, 20.0)", "False, 20.0)")
    alone = "if 'XPDISTRIBUTE_JOIN' in os.environ: sys.exit(9)\n" + alone + "time.sleep(3)\n"
    program = script(alone.format(root=str(ROOT)))
    process = start("-n", "3", "--elastic", "--max-restarts", "2", "--all-output", program, str(tmp_path))
    os.kill(pids_in(tmp_path, 3)[2], signal.SIGKILL)
    out, err = process.communicate(timeout=25)
    assert process.returncode == 0, err
    assert sorted(out.splitlines()) == ["end 0", "end 1"]
    said = [line.partition(" (pid")[2].partition(") ")[2] for line in err.splitlines()]
    assert said == [
        "has died; another one is started in its place (1 of 2)",
        "ended with status 9 before it joined; another one is started in its place (2 of 2)",
        "ended with status 9 before it joined; it has been replaced 2 times, so the others go on without it",
    ]


def test_an_elastic_job_of_which_every_rank_fails_has_failed(script: Script) -> None:
    done = run("-n", "2", "--elastic", script("sys.exit(6)"))
    assert done.returncode == 6, done.stderr


@pytest.mark.slow
def test_a_stopped_rank_of_an_elastic_job_is_killed_and_replaced(script: Script, tmp_path: Path) -> None:
    program = script(MEMBER.replace("+ 20", "+ 40").replace("20.0", "40.0").format(root=str(ROOT)))
    process = start("-n", "3", "--elastic", "--all-output", program, str(tmp_path))
    stopped = pids_in(tmp_path, 3)[1]
    os.kill(stopped, signal.SIGSTOP)
    out, err = process.communicate(timeout=50)
    assert process.returncode == 0, err
    assert sorted(out.splitlines()) == ["end 0", "end 1", "end 2", "new 1"]
    assert not is_running(stopped)
    assert "does not answer and is treated as dead; another one is started in its place (1 of 3)" in err
