"""Who is said to have ended a job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from xpdistribute.events import Failed, Joined, Left, Lost
from xpdistribute.membership import Membership
from xpdistribute.mpiexec_words import Ending
from xpdistribute.outcome import find_culprit
from xpdistribute.output import ERR, Output
from xpdistribute.rank_files import RankFiles
from xpdistribute.rank_processes import RankProcesses


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RankProcesses]:
    """None of them is on this machine."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    files = RankFiles(2, all_output=True, elastic=False)
    yield RankProcesses(files)
    files.remove()


def members() -> Membership:
    job = Membership(2, elastic=False, replacements=0, host="here")
    for number in range(2):
        job.handle(Joined(number, 100 + number, f"node{number}", ""), number)
    return job


@pytest.mark.parametrize(
    "then",
    [
        Lost(0, 100, "node0", "", "its connection closed"),
        Failed(0, 100, "node0", "", "PeerFailedError: process 1 has ended its program"),
    ],
)
def test_on_other_hosts_a_goodbye_with_a_status_is_mpiexecs_to_tell(
    processes: RankProcesses, then: Lost | Failed
) -> None:
    job, output = members(), Output(tagged=True)
    output.hidden.add((1, ERR))
    output.take(1, ERR, b"no data\n")
    job.handle(Left(1, 101, "node1", ""), 1)
    job.handle(then, 0)
    culprit = find_culprit(3, processes, job, [Ending(1, 101, 3)], output, is_local=False)
    assert culprit is not None
    assert (culprit.rank, culprit.status, culprit.text) == (1, 3, "no data")


def test_one_that_has_left_in_good_order_is_not_blamed_for_what_another_does(
    processes: RankProcesses,
) -> None:
    job = members()
    job.handle(Left(1, 101, "node1", ""), 1)
    job.handle(Failed(0, 100, "node0", "", "ValueError: wrong"), 0)
    culprit = find_culprit(1, processes, job, [Ending(0, 100, 1)], Output(tagged=True), is_local=False)
    assert culprit is not None
    assert (culprit.rank, culprit.status, culprit.text) == (0, 1, "ValueError: wrong")
