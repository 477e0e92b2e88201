"""Processes that are killed in the middle of collectives: the others all have the same number of results, and the same error."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from collectives import CollectiveMismatchError, PeerFailedError, ReduceOp
from collectives.backends import make_link
from collectives.calls import Call
from collectives.control.channel import Channel
from collectives.link import Link
from collectives.mpi import agreeing_link, communicators
from collectives.mpi.agreement import Agreement
from collectives.mpi.library import world
from tests.collectives.mpi.contract import connect
from tests.mpi_runner import finish_ranks

TIMEOUT = 15.0


def link_between_hosts(channel: Channel, hosts: list[str]) -> Link:
    return make_link(channel, "auto", [1] * len(hosts), hosts, f"link {channel.epoch}", TIMEOUT)


def one_host_each() -> tuple[Channel, Link]:
    channel = connect(world())
    return channel, link_between_hosts(channel, [f"host{number}" for number in range(world().size)])


def be_killed_after(seconds: float) -> None:
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()


def end(channel: Channel, story: Any) -> None:
    print(json.dumps(story), flush=True)  # noqa: T201  # read by the test
    channel.regroup(None, False, TIMEOUT)  # rank 0 has the hub: it ends when all are done
    channel.goodbye()
    time.sleep(0.2 * (channel.process == 0))
    os._exit(0)


def stories(num_ranks: int, function: Callable[[], None], *arguments: str) -> list[Any]:
    """What the ranks that were left have told, by rank."""
    run = finish_ranks(num_ranks, function, arguments=arguments, options=("--with-ft", "ulfm"), timeout=30)
    assert run.returncode == 0, str(run)
    assert not any("Traceback" in errors for errors in run.errors), str(run)
    return [json.loads(output) for output in run.outputs if output]


# ------------------------------------------------------------------------- dying in a collective


def fold_until_some_are_gone() -> None:
    seed, elements, per_host = (int(one) for one in sys.argv[1:])
    rank, size = world().rank, world().size
    own = f"host{rank // per_host}"
    channel = connect(world())
    link = link_between_hosts(channel, [f"host{number // per_host}" for number in range(size)])
    rng = random.Random(seed)
    victims = rng.sample(range(1, size), rng.choice([1, 2]))
    if rank in victims:
        be_killed_after(random.Random(seed + rank).uniform(0.0, 0.15))
    call, num_results, story = Call("sum", (elements,)), 0, []
    ones, sums = np.ones(elements), np.zeros(elements)
    while len(link.counts) > size - len(victims):
        try:
            link.fold(call, ReduceOp.SUM, [[ones]], [[sums]])
            assert (sums == link.size).all()
            num_results += 1
            sums[:] = 0
        except PeerFailedError as error:
            story.append([num_results, error.process, str(error)])
            regrouped = False
            while not regrouped:
                channel.regroup(None, False, TIMEOUT)
                try:
                    link = link_between_hosts(channel, channel.gather("hosts", own, TIMEOUT))
                    regrouped = True
                except PeerFailedError:
                    continue  # another one is gone meanwhile
    sums[:] = 0
    time.sleep(0.02)
    assert (sums == 0).all()  # nothing comes late
    end(channel, story)


@pytest.mark.parametrize(
    ("elements", "per_host"),
    [(10, 2), (100_000, 2), (100_000, 1)],
    ids=["small", "chain_of_hosts", "mpi_alone"],
)
def test_all_that_are_left_have_the_same_results_and_errors(elements: int, per_host: int) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)  # noqa: T201  # shown where it fails
    told = stories(4, fold_until_some_are_gone, str(seed), str(elements), str(per_host))
    assert len(told) in (2, 3)
    assert told[0]
    assert told.count(told[0]) == len(told)
    assert all("died" in text for _, _, text in told[0])


# ------------------------------------------------------------- hearing of the others or not


class Deaf:
    """An `Agreement` whose other processes hear this one, which does not hear them at one of its exchanges."""

    def __init__(self, *arguments: Any, at: int) -> None:
        self.inner, self.look, self.at, self.number = Agreement(*arguments), arguments[2], at, 0

    def exchange(self, digest: bytes, length: int) -> int:
        flags = self.inner.exchange(digest, length)
        self.number += 1
        while self.number == self.at:
            self.look([], 0.0)
            time.sleep(0.001)
        return flags

    def abandon(self, timeout: float) -> bool:
        return self.inner.abandon(timeout)


def fold_without_hearing_of_the_others() -> None:
    deaf, when, step = json.loads(sys.argv[1]), sys.argv[2], 5
    if world().rank in deaf:
        agreeing_link.Agreement = partial(Deaf, at=step + 1)  # type: ignore[assignment,attr-defined]  # one is for the making of the link
    (channel, link), rank = one_host_each(), world().rank
    sums, story = np.zeros(10), []
    num_folds = itertools.count()
    inner = link._inner  # type: ignore[attr-defined]  # an AgreeingLink's
    fold = inner.fold
    inner.fold = lambda *arguments: (next(num_folds), fold(*arguments))[1]
    try:
        for number in range(1, 20):
            if rank == 2 and number == step and when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == 2 and number == step + 1:
                be_killed_after(
                    0.1
                )  # it has brought its part to the next call, and waits for the others there
            began = time.monotonic()
            link.fold(Call("sum"), ReduceOp.SUM, [[np.ones(10)]], [[sums]])
            story.append(sums[0])
            if rank == 2 and number == step and when == "after":
                time.sleep(0.1)
                os.kill(os.getpid(), signal.SIGKILL)
    except PeerFailedError as error:
        story.append(f"process {error.process}")
    end(channel, [story, time.monotonic() - began, next(num_folds)])


@pytest.mark.parametrize(("when", "num_results"), [("before", 4), ("after", 5), ("in the next one", 5)])
@pytest.mark.parametrize("deaf", [[1], [0, 1]])
def test_those_that_do_not_hear_of_all_conclude_what_the_others_know(
    deaf: list[int], when: str, num_results: int
) -> None:
    told = stories(3, fold_without_hearing_of_the_others, json.dumps(deaf), when)
    assert [story for story, _, _ in told] == [[3.0] * num_results + ["process 2"]] * 2
    assert max(seconds for _, seconds, _ in told) < 5.0
    # What was on its way when they stopped listening may not be taken for something of a later call, so they make none.
    assert [told[rank][2] for rank in deaf] == [5] * len(deaf)


def lose_one_while_another_computes() -> None:
    (channel, link), rank = one_host_each(), world().rank
    elements = 10_000  # sent only when the receiver comes, and brought to the meeting
    sums, story = np.zeros(elements), ""
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        time.sleep(2.0)
    try:
        link.fold(Call("sum"), ReduceOp.SUM, [[np.ones(elements)]], [[sums]])
    except PeerFailedError as error:
        story = f"process {error.process}"
    end(channel, story)


def test_who_still_computes_when_one_is_lost_is_waited_for() -> None:
    assert stories(3, lose_one_while_another_computes) == ["process 2"] * 2


def change_too_often() -> None:
    communicators._LINKS = 1 << 15
    channel = connect(world())
    story: list[Any] = []
    for _ in range(3):
        try:
            link = link_between_hosts(channel, ["host0", "host1"])
            sums = np.zeros(3)
            link.fold(Call("sum"), ReduceOp.SUM, [[np.ones(3)]], [[sums]])
            story.append(sums.tolist())
        except RuntimeError as error:
            story.append(str(error))
        channel.regroup(None, False, TIMEOUT)
    end(channel, story)


def test_a_job_that_changes_more_often_than_it_can_is_told_so_in_all_processes() -> None:
    told = stories(2, change_too_often)
    assert told[0] == told[1]
    assert told[0][:2] == [[2.0] * 3] * 2
    assert told[0][2].startswith("elastic job: its processes have changed 2 times")
    assert "up to 1 changes" in told[0][2]


# -------------------------------------------------------------------- dying elsewhere, and disagreeing


def receive_from_one_who_is_gone() -> None:
    channel, link = one_host_each()
    rank, story = world().rank, ""
    if rank == 2:
        link.send(2, np.arange(3), 0, 0)
        link.barrier(Call("barrier"))
        be_killed_after(0.0)
        time.sleep(10)
    link.barrier(Call("barrier"))
    try:
        if rank == 0:
            assert link.receive(0, 2, 0).tolist() == [0, 1, 2]
            link.receive(0, 2, 0)
        else:
            link.barrier(Call("another barrier"))
    except PeerFailedError as error:
        story = str(error)
    try:
        link.barrier(Call("barrier"))
        again = ""
    except PeerFailedError as error:
        again = str(error)
    end(channel, [story, again])


def test_who_waits_for_a_message_raises_what_those_in_a_collective_raise() -> None:
    told = stories(3, receive_from_one_who_is_gone)
    assert len(told) == 2
    assert told[0] == told[1]
    story, again = told[0]
    assert story.startswith("process 2 of 3 (pid ")
    assert again == story


def call_different_things() -> None:
    channel, link = one_host_each()
    story = ""
    try:
        link.barrier(Call(f"call of {world().rank}"))
    except CollectiveMismatchError as error:
        story = str(error)
    link.barrier(Call("barrier"))
    end(channel, story)


def test_a_mismatch_is_told_to_all_and_the_link_stays_usable() -> None:
    told = stories(3, call_different_things)
    assert len(told) == 3
    assert told[0] == told[1] == told[2]
    assert "process 0 calls call of 0; process 1 calls call of 1" in told[0]


def raise_while_using() -> None:
    channel, link = one_host_each()
    own = np.full(4, world().rank, np.uint8)

    def use(arrays: list[Any]) -> int:
        if world().rank == 1:
            raise ZeroDivisionError("in use")
        return int(sum(array[0] for array in arrays))

    try:
        story: Any = link.all_gather(Call("gather"), [own], use)
    except ZeroDivisionError as error:
        story = str(error)
    link.barrier(Call("barrier"))
    end(channel, story)


def test_what_the_caller_raises_is_his_alone() -> None:
    assert stories(2, raise_while_using) == [1, "in use"]
