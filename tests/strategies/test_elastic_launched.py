"""Elastic jobs under the launcher: ranks are killed and stopped from outside at random, and replaced."""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, final

import numpy as np
import pytest

from tests.strategies.test_elastic import BATCH, undisturbed

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None, reason="needs xpdistribute[mpi], which brings mpiexec"
)

PROGRAM = """
import json, os, sys, time
import numpy as np
import strategies as xd
from tests.strategies.test_elastic import BATCH, FEATURES, X, Y, gradient

folder, seconds, num_replicas = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])


def tell(what, **more):
    line = json.dumps({"what": what, "pid": os.getpid(), "at": time.monotonic(), **more}) + "\\n"
    with open(f"{folder}/{os.getpid()}", "a") as file:
        file.write(line)


s = xd.MultiWorkerMirroredStrategy(
    devices=[f"cpu:{n}" for n in range(num_replicas)],
    communication_options=xd.CommunicationOptions(timeout_seconds=20.0),
    on_membership_change=lambda c: tell("change", lost=c.lost, joined=c.num_joined, workers=c.num_workers, seconds=c.seconds),
)
with s.scope():
    w = xd.Variable(np.zeros(FEATURES), name="w")
    seen = xd.Variable(0, dtype=np.int64, name="seen", synchronization="ON_READ", aggregation="SUM")
    optimizer = xd.SGD(0.02, momentum=0.9)
it = iter(s.distribute_dataset(xd.from_arrays((X, Y)).batch(BATCH).repeat()))
state = xd.Checkpoint(w=w, seen=seen, optimizer=optimizer, it=it, step=0)
s.share_state(state)
tell("ready", step=state.step, worker=s.worker_id)
until = float(os.environ["UNTIL"]) if "UNTIL" in os.environ else time.monotonic() + seconds


def step(x, y):
    seen.assign_add(len(x))
    optimizer.apply_gradients([(gradient(w.value(), x, y), w)])
    return xd.all_reduce("MAX", float(time.monotonic() > until))


is_over = False
while not is_over:
    is_over = any(map(bool, s.local_results(s.run(step, next(it)))))
    state.step += 1
    if state.step % 20 == 0:
        tell("step", step=state.step)
    if state.step % 50 == 0:
        assert int(seen.read_value()) == state.step * BATCH, (int(seen.read_value()), state.step * BATCH)
tell(
    "end",
    step=state.step,
    w=np.array(w).tolist(),
    seen=int(seen.read_value()),
    iterations=optimizer.iterations,
    workers=s.num_workers,
)
"""


@final
class Launched:
    """A job under the launcher, and what its ranks have told."""

    def __init__(self, folder: Path, arguments: list[str], seconds: float, num_replicas: int = 1) -> None:
        script = folder / "program.py"
        script.write_text(PROGRAM)
        self.told = folder / "told"
        self.told.mkdir()
        self._log = (folder / "log").open("w+")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "xpdistribute", "run", "--elastic", *arguments),
                *(str(script), str(self.told), str(seconds), str(num_replicas)),
            ],
            env={**os.environ, "PYTHONPATH": str(ROOT), "UNTIL": str(time.monotonic() + seconds)},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def all(self, what: str) -> list[dict[str, Any]]:
        """Everything of that name that ranks have told, in order of time."""
        lines = [line for file in self.told.iterdir() for line in file.read_text().splitlines()]
        found = [json.loads(line) for line in lines]
        return sorted((one for one in found if one["what"] == what), key=lambda one: one["at"])

    def alive(self) -> list[int]:
        """The ranks that are ready and live."""
        return [one["pid"] for one in self.all("ready") if is_running(one["pid"])]

    def until(self, holds: Callable[[], bool], seconds: float = 15.0) -> None:
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, f"it hangs: {self.log()}"
            assert self.process.poll() is None, f"it has ended: {self.log()}"
            time.sleep(0.01)

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()[-6000:]

    def finish(self, seconds: float) -> list[dict[str, Any]]:
        """What those told that came to the end, which is checked."""
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it hangs: {self.log()}") from None
        assert status == 0, self.log()
        ends = self.all("end")
        assert ends, self.log()
        steps = ends[0]["step"]
        expected = undisturbed(steps)
        for end in ends:
            assert (end["step"], end["iterations"]) == (steps, steps)
            assert end["w"] == ends[0]["w"]
            np.testing.assert_allclose(end["w"], expected, rtol=1e-9)
            assert end["seen"] == steps * BATCH
        return ends

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._log.close()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def shared_names() -> set[str]:
    """Of shared memory, but that of MPI's own, which other tests may be using: these ranks never initialise it."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("sm_segment", "mpich_shm"))}


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """Starts a job; after the test none of its processes is left, and no shared memory with a name."""
    names = shared_names()
    jobs: list[Launched] = []

    def start(*arguments: str, seconds: float, num_replicas: int = 1) -> Launched:
        jobs.append(Launched(tmp_path, list(arguments), seconds, num_replicas))
        return jobs[-1]

    yield start
    pids = [one["pid"] for job in jobs for one in job.all("ready")]
    for job in jobs:
        job.close()
    end = time.monotonic() + 3.0
    while any(map(is_running, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    assert not [pid for pid in pids if is_running(pid)]
    assert shared_names() - names == set()


def test_a_killed_rank_is_replaced_and_the_job_ends_as_if_nothing_had_been(
    launch: Callable[..., Launched],
) -> None:
    job = launch("-n", "3", "--timeout", "30", seconds=3.0)
    job.until(lambda: len(job.all("ready")) == 3)
    time.sleep(0.2)
    victim = next(one["pid"] for one in job.all("ready") if one["worker"] == 0)
    os.kill(victim, signal.SIGKILL)
    killed_at = time.monotonic()
    job.until(lambda: len(job.all("ready")) == 4)
    ends = job.finish(20)
    assert [end["workers"] for end in ends] == [3, 3, 3]
    losses = [one for one in job.all("change") if one["lost"]]
    assert [(one["lost"], one["workers"]) for one in losses] == [([0], 2), ([0], 2)]
    assert all(one["at"] - killed_at < 1.0 for one in losses)
    assert job.all("ready")[3]["at"] - killed_at < 3.0
    assert "another one is started in its place (1 of 3)" in job.log()


def test_a_stopped_rank_is_killed_after_the_heartbeat_time_and_replaced(
    launch: Callable[..., Launched],
) -> None:
    job = launch("-n", "2", "--heartbeat", "0.6", "--timeout", "30", seconds=4.0)
    job.until(lambda: len(job.all("ready")) == 2)
    time.sleep(0.2)
    victim = job.alive()[0]
    os.kill(victim, signal.SIGSTOP)
    job.until(lambda: not is_running(victim), 5.0)
    job.until(lambda: len(job.all("ready")) == 3)
    assert len(job.finish(20)) == 2
    assert "does not answer and is treated as dead" in job.log()


def test_without_replacements_the_last_one_that_is_left_ends_the_job_well(
    launch: Callable[..., Launched],
) -> None:
    job = launch("-n", "3", "--max-restarts", "0", "--timeout", "30", seconds=2.0, num_replicas=2)
    job.until(lambda: len(job.all("ready")) == 3)
    first, second, _ = job.alive()
    os.kill(first, signal.SIGKILL)
    os.kill(second, signal.SIGKILL)
    (end,) = job.finish(20)
    assert end["workers"] == 1


def test_heartbeats_are_for_elastic_jobs() -> None:
    for arguments, words in (
        (["-n", "2", "--heartbeat", "3", "true"], "--heartbeat: got it without --elastic"),
        (
            ["-n", "2", "--elastic", "--heartbeat", "no", "true"],
            "--heartbeat: got 'no'; need seconds above 0",
        ),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "xpdistribute", "run", *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
        assert done.returncode == 2
        assert words in done.stderr


@pytest.mark.slow
def test_a_minute_of_kills_at_random_ends_with_the_weights_of_an_undisturbed_run(
    launch: Callable[..., Launched],
) -> None:
    seconds = float(os.environ.get("XPDISTRIBUTE_TEST_KILL_SECONDS", "60"))
    seed = random.randrange(1 << 30)
    print("seed", seed)  # noqa: T201  # shown where it fails
    # It takes longer than a test may that hangs.
    faulthandler.dump_traceback_later(seconds + 80, exit=True, file=2)
    rng = random.Random(seed)
    job = launch("-n", "3", "--max-restarts", "1000", "--heartbeat", "2", "--timeout", "120", seconds=seconds)
    end = time.monotonic() + seconds - 4.0
    doomed: set[int] = set()

    def there() -> list[int]:
        return [pid for pid in job.alive() if pid not in doomed]

    while time.monotonic() < end:
        # Never the last one that has the state.
        job.until(lambda: len(there()) >= 2, 20.0)
        victims = there()
        for pid in rng.sample(victims, min(2 if rng.random() < 0.2 else 1, len(victims) - 1)):
            os.kill(pid, signal.SIGSTOP if rng.random() < 0.1 else signal.SIGKILL)
            doomed.add(pid)
        time.sleep(rng.uniform(0.0, 1.0))
    ends = job.finish(60)
    assert len(doomed) > seconds / 4
    assert len(ends) >= 1
