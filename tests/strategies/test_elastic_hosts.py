"""Elastic jobs over several hosts: MPI goes on without those that are killed, and so does the training."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
import pytest

from tests.mpi_runner import SETTINGS, find_mpiexec
from tests.strategies.test_elastic import BATCH, undisturbed

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None, reason="needs xpdistribute[mpi], which brings mpiexec"
)

SMALL, LARGE = 10, 60_000
"""Elements of a gradient that is exchanged with the meeting, and of one that goes along the chain of hosts."""

PROGRAM = """
import json, os, sys, time

rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
per_host, seconds, deed, elements = int(sys.argv[2]), float(sys.argv[3]), sys.argv[4], int(sys.argv[5])
os.environ["XPDISTRIBUTE_HOST"] = f"host{rank // per_host}"

import numpy as np
import strategies as xd
from tests.strategies.test_elastic import FEATURES, X, Y, BATCH, gradient


def tell(what, **more):
    line = json.dumps({"what": what, "rank": rank, "pid": os.getpid(), "at": time.monotonic(), **more}) + "\\n"
    with open(f"{sys.argv[1]}/{rank}", "a") as file:
        file.write(line)


if deed == "a spare can't load MPI" and rank == 4:
    os.environ["MPI4PY_LIBMPI"] = "/there/is/none"
if (deed == "dies before MPI" and rank == 1) or (deed == "a spare dies before MPI" and rank == 4):
    os.kill(os.getpid(), 9)
s = xd.MultiWorkerMirroredStrategy(
    communication_options=xd.CommunicationOptions(timeout_seconds=15.0),
    on_membership_change=lambda c: tell("change", lost=c.lost, workers=c.num_workers, seconds=c.seconds),
)
tell("link", link=type(s.link._inner).__name__)
if deed == "dies before the variables" and rank == 1:
    os.kill(os.getpid(), 9)
with s.scope():
    w = xd.Variable(np.zeros(FEATURES), name="w")
    many = xd.Variable(np.zeros(elements), name="many")
    optimizer, slow = xd.SGD(0.02, momentum=0.9), xd.SGD(1.0)
it = iter(s.distribute_dataset(xd.from_arrays((X, Y, np.arange(len(X)) % 7.0)).batch(BATCH).repeat()))
if os.environ.get("XPDISTRIBUTE_SPARES"):
    if rank >= int(os.environ["XPDISTRIBUTE_SIZE"]):
        if deed == "a spare is late":
            time.sleep(1.5)
        tell("waits")
    s.share_state(xd.Checkpoint(w=w, many=many, optimizer=optimizer, slow=slow, iterator=it))
tell("ready")


def step(x, y, number):
    optimizer.apply_gradients([(gradient(w.value(), x, y), w)])
    slow.apply_gradients([(np.full(elements, number.sum()) + np.arange(elements) % 5 * len(number), many)])
    return xd.all_reduce("MAX", float(time.monotonic() > until))


until = time.monotonic() + seconds
steps, is_over, slowest = optimizer.iterations, False, 0.0
while not is_over:
    batch = next(it)
    if steps == 30 and deed == "all raise":
        raise ValueError("no coffee anywhere")
    if steps == 30 and rank == 1:
        if deed == "leaves":
            sys.exit()
        if deed == "raises":
            raise ValueError("out of coffee")
        if deed == "exits":
            sys.exit(3)
    began = time.monotonic()
    is_over = any(map(bool, s.local_results(s.run(step, batch))))
    steps += 1
    if steps > 1:
        slowest = max(slowest, time.monotonic() - began)
tell(
    "end",
    steps=steps,
    w=np.array(w).tolist(),
    sums=[float(np.array(many).sum()), float(np.array(many).max())],
    workers=s.num_workers,
    slowest=slowest,
    link=type(s.link._inner).__name__,
)
"""


@final
class Launched:
    """A job on hosts that are none, and what its ranks have told."""

    def __init__(
        self,
        folder: Path,
        num_ranks: int,
        per_host: int,
        seconds: float,
        deed: str,
        elements: int,
        *,
        under_launcher: bool,
        options: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        script = folder / "program.py"
        script.write_text(PROGRAM)
        self.told = folder / "told"
        self.told.mkdir(exist_ok=True)
        for file in self.told.iterdir():
            file.unlink()
        self.elements = elements
        self._log = (folder / "log").open("w+")
        start = [sys.executable, "-m", "xpdistribute", "run", "--elastic", "--timeout", "60"]
        start += options
        if not under_launcher:
            mpiexec = find_mpiexec()
            assert mpiexec is not None
            start = [mpiexec, "--with-ft", "ulfm"]
        program = [str(script), str(self.told), str(per_host), str(seconds), deed, str(elements)]
        if not under_launcher:
            program = [sys.executable, *program]
        self.process = subprocess.Popen(
            [*start, "-n", str(num_ranks), *program],
            env={**os.environ, **SETTINGS, "PYTHONPATH": str(ROOT), **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def all(self, what: str) -> list[dict[str, Any]]:
        """Everything of that name that ranks have told, by rank."""
        found = [json.loads(line) for file in self.told.iterdir() for line in file.read_text().splitlines()]
        return sorted((one for one in found if one["what"] == what), key=lambda one: one["rank"])

    def until_ready(self, number: int) -> list[int]:
        """Wait until so many ranks are in their loop; their process ids."""
        end = time.monotonic() + 15.0
        while len(self.all("ready")) < number:
            assert time.monotonic() < end, f"it hangs: {self.log()}"
            assert self.process.poll() is None, f"it has ended: {self.log()}"
            time.sleep(0.01)
        return [one["pid"] for one in self.all("ready")]

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()[-6000:]

    def wait(self, seconds: float) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it hangs: {self.log()}") from None

    def finish(self, seconds: float = 20.0) -> list[dict[str, Any]]:
        """What those told that came to the end, which is checked."""
        status = self.wait(seconds)
        assert status == 0, f"status {status}: {self.log()}"
        ends = self.all("end")
        assert ends, self.log()
        steps = ends[0]["steps"]
        many = many_after(steps, self.elements)
        for end in ends:
            assert end["steps"] == steps
            assert end["workers"] == len(ends)
            assert end["w"] == ends[0]["w"]
            np.testing.assert_allclose(end["w"], undisturbed(steps), rtol=1e-9)
            assert end["sums"] == [many.sum(), many.max()]
        return ends

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for pid in {one["pid"] for what in ("link", "ready") for one in self.all(what)}:
            if str(self.told).encode() in command_line(pid):
                os.kill(pid, signal.SIGKILL)
        self._log.close()


def many_after(steps: int, elements: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The large variable after so many steps of integers, which are exact in whatever order."""
    numbers = np.arange(96) % 7.0
    total = sum(numbers[step * BATCH % 96 :][:BATCH].sum() for step in range(steps))
    expected: np.ndarray[Any, np.dtype[np.float64]] = -(total + np.arange(elements) % 5 * BATCH * steps)
    return expected


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


Launch = Callable[..., Launched]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    jobs: list[Launched] = []

    def start(
        num_ranks: int = 4,
        *,
        per_host: int = 2,
        seconds: float = 0.6,
        deed: str = "",
        elements: int = SMALL,
        under_launcher: bool = True,
        options: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> Launched:
        jobs.append(
            Launched(
                tmp_path,
                num_ranks,
                per_host,
                seconds,
                deed,
                elements,
                under_launcher=under_launcher,
                options=options,
                environ=environ,
            )
        )
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


@pytest.mark.parametrize("elements", [SMALL, LARGE])
def test_the_others_go_on_when_a_rank_of_several_hosts_is_killed(launch: Launch, elements: int) -> None:
    job = launch(elements=elements)
    pids = job.until_ready(4)
    time.sleep(0.2)
    os.kill(pids[2], signal.SIGKILL)
    ends = job.finish()
    assert [end["rank"] for end in ends] == [0, 1, 3]
    assert {end["link"] for end in ends} == {"AgreeingLink"}
    assert [one["lost"] for one in job.all("change")] == [[2]] * 3
    assert max(end["slowest"] for end in ends) < 2.0
    assert job.log().count("as nobody can join processes of several hosts later") == 1


def test_when_a_whole_host_is_lost_the_other_one_goes_on_in_shared_memory(launch: Launch) -> None:
    job = launch(elements=LARGE)
    pids = job.until_ready(4)
    time.sleep(0.2)
    for pid in pids[:2]:
        os.kill(pid, signal.SIGKILL)
    ends = job.finish()
    assert [end["rank"] for end in ends] == [2, 3]
    assert {end["link"] for end in ends} == {"SharedMemoryLink"}


def test_without_the_launcher_the_others_go_on_as_well(launch: Launch) -> None:
    job = launch(3, per_host=1, under_launcher=False)
    pids = job.until_ready(3)
    time.sleep(0.2)
    os.kill(pids[1], signal.SIGKILL)
    assert [end["rank"] for end in job.finish()] == [0, 2]


@pytest.mark.parametrize("deed", ["raises", "exits"])
@pytest.mark.parametrize("under_launcher", [True, False])
def test_a_rank_that_fails_is_gone_for_the_others(launch: Launch, deed: str, *, under_launcher: bool) -> None:
    job = launch(deed=deed, under_launcher=under_launcher)
    assert [end["rank"] for end in job.finish()] == [0, 2, 3]
    assert ("out of coffee" in job.log()) == (deed == "raises")


@pytest.mark.parametrize(
    ("deed", "words"),
    [("all raise", "no coffee anywhere"), ("leaves", "has ended its program, and others wait")],
)
@pytest.mark.parametrize("under_launcher", [True, False])
def test_a_job_that_nobody_goes_on_with_has_failed(
    launch: Launch, deed: str, words: str, *, under_launcher: bool
) -> None:
    job = launch(deed=deed, under_launcher=under_launcher)
    assert job.wait(20) == 1
    assert words in job.log()
    assert not job.all("end")


def test_a_rank_may_be_lost_while_variables_are_made(launch: Launch) -> None:
    job = launch(deed="dies before the variables")
    assert [end["rank"] for end in job.finish()] == [0, 2, 3]


def test_a_rank_that_is_lost_before_mpi_starts_fails_the_job_in_words(launch: Launch) -> None:
    job = launch(deed="dies before MPI")
    assert job.wait(20) != 0
    assert (
        "elastic job: 1 of 4 processes died before they were connected by MPI, which processes on host0, host1 need"
        in job.log()
    )


@pytest.mark.slow
@pytest.mark.parametrize("under_launcher", [True, False])
def test_ranks_killed_at_random_times_leave_the_weights_of_an_undisturbed_run(
    launch: Launch, *, under_launcher: bool
) -> None:
    seconds = float(os.environ.get("XPDISTRIBUTE_TEST_KILL_SECONDS", "40"))
    end = time.monotonic() + seconds
    num_jobs = 0
    while time.monotonic() < end:
        seed = random.randrange(1 << 30)
        print("seed", seed)  # noqa: T201  # shown where it fails
        rng = random.Random(seed)
        job = launch(
            6,
            per_host=rng.choice([1, 2, 3]),
            seconds=0.8,
            elements=rng.choice([SMALL, LARGE]),
            under_launcher=under_launcher,
        )
        pids = job.until_ready(6)
        # Without the launcher the hub is in process 0.
        victims = rng.sample(pids[0 if under_launcher else 1 :], rng.choice([1, 2, 3, 5]))
        for pid in victims:
            time.sleep(rng.choice([0.0, rng.uniform(0.0, 0.15)]))
            os.kill(pid, signal.SIGKILL)
        ends = job.finish()
        assert not {end["pid"] for end in ends} & set(victims)
        assert len(ends) == 6 - len(victims), f"{victims} were killed, {ends} came to the end: {job.log()}"
        num_jobs += 1
    assert num_jobs > seconds / 10
