"""What a hub decides, without sockets and clocks."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from xpdistribute.events import Failed, Joined, Left, Lost, Regrouped, Silent
from xpdistribute.job import Job
from xpdistribute.roster import Drop, Send, Tell

TOKEN = "secret"
Told = dict[int, list[dict[str, Any]]]


class Played:
    """A job whose processes speak when the test says so. Process k has connection 10 + k and pid 100 + k."""

    def __init__(
        self,
        size: int,
        *,
        elastic: bool = False,
        heartbeat: float = 10.0,
        come: bool = True,
        sees_ends: bool = False,
        num_spares: int = 0,
    ) -> None:
        self.job = Job(
            size,
            TOKEN,
            elastic=elastic,
            heartbeat_seconds=heartbeat,
            num_spares=num_spares,
            sees_ends=sees_ends,
        )
        self.now = 0.0
        self.events: list[Any] = []
        self.dropped: list[int] = []
        if come:
            for process in range(size):
                self.come(process)

    def come(self, process: int | None, connection: int | None = None, **fields: Any) -> Told:
        connection = 10 + (process or 0) if connection is None else connection
        self.done(self.job.connected(connection, self.now))
        hello = {
            "process": process,
            "join": False,
            "pid": connection + 90,
            "host": "here",
            "identity": "",
            "size": None,
        }
        return self.say(connection, "hello", **{"token": TOKEN, **hello, **fields})

    def say(self, connection: int, kind: str, /, **fields: Any) -> Told:
        return self.done(self.job.received(connection, {"type": kind, **fields}, self.now))

    def end(self, connection: int) -> Told:
        return self.done(self.job.disconnected(connection, self.now))

    def see_end(self, process: int, pid: int, status: int) -> Told:
        return self.done(self.job.ended(process, pid, status, self.now))

    def wait(self, seconds: float) -> Told:
        self.now += seconds
        return self.done(self.job.tick(self.now))

    def done(self, actions: list[Any]) -> Told:
        told: Told = {}
        for action in actions:
            if isinstance(action, Send):
                for connection in action.connections:
                    told.setdefault(connection, []).append(action.message)
            elif isinstance(action, Drop):
                self.dropped.append(action.connection)
            else:
                assert isinstance(action, Tell)
                self.events.append(action.event)
        return told


def kinds(told: Told) -> dict[int, list[str]]:
    return {connection: [message["type"] for message in messages] for connection, messages in told.items()}


# ------------------------------------------------------------------------ coming


def test_a_process_is_welcomed_with_its_number_and_the_size_of_the_job() -> None:
    job = Played(2, come=False)
    (welcome,) = job.come(1)[11]
    assert (welcome["type"], welcome["process"], welcome["num_processes"]) == ("welcome", 1, 2)
    assert job.events == [Joined(1, 101, "here", "")]


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({"process": 2}, "value", "process 2 (pid 110, host here): need a number in 0..1"),
        ({"process": -1}, "value", "need a number in 0..1"),
        ({"process": 0}, "value", "process 0 (pid 100, host here) has this number already"),
        ({"process": 1, "size": 3}, "value", "got a job of 3 processes; need 2"),
        ({"process": 1, "token": "other"}, "runtime", "XPDISTRIBUTE_TOKEN"),
        ({"process": 1, "token": "\udcff"}, "runtime", "XPDISTRIBUTE_TOKEN"),
        ({"process": None, "join": True}, "runtime", "start it with --elastic"),
        ({"process": None}, "runtime", "process: got NoneType; need int"),
        ({"process": True}, "runtime", "process: got bool; need int"),
        ({"process": 1, "pid": "x"}, "runtime", "pid: got str; need int"),
    ],
)
def test_who_does_not_fit_is_refused_and_hears_why(fields: dict[str, Any], kind: str, words: str) -> None:
    job = Played(2, come=False)
    job.come(0)
    refused = job.come(connection=20, **{"process": 1, **fields})[20][0]
    assert (refused["type"], refused["kind"]) == ("refused", kind)
    assert words in refused["text"]
    assert job.dropped == [20]
    # Nothing is left of it: process 1 can still come.
    assert kinds(job.come(1)) == {11: ["welcome"]}


def test_who_connects_and_says_nothing_is_dropped() -> None:
    job = Played(1, come=False)
    job.job.connected(20, 0.0)
    assert kinds(job.wait(9.0)) == {}
    assert kinds(job.wait(2.0)) == {20: ["refused"]}


def test_who_comes_late_hears_what_has_happened_before() -> None:
    job = Played(3, come=False)
    job.come(0)
    job.come(1)
    job.say(11, "failed", text="KeyError: 'boom'")
    assert kinds(job.come(2))[12] == ["welcome", "failed"]


# ----------------------------------------------------------------------- gathers


def test_a_gather_is_answered_when_all_have_come_with_the_values_by_process() -> None:
    job = Played(3)
    assert job.say(12, "gather", key="k", value="c", epoch=0) == {}
    assert job.say(10, "gather", key="k", value=None, epoch=0) == {}
    told = job.say(11, "gather", key="k", value=[1], epoch=0)
    assert kinds(told) == {10: ["gathered"], 11: ["gathered"], 12: ["gathered"]}
    assert told[10][0]["values"] == [None, [1], "c"]
    # The key is free again.
    assert job.say(10, "gather", key="k", value=1, epoch=0) == {}


@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize("how", ["dies", "fails", "ends"])
def test_a_gather_fails_for_all_who_wait_when_a_process_is_gone(how: str, elastic: bool) -> None:
    job = Played(3, elastic=elastic)
    job.say(10, "gather", key="k", value=1, epoch=0)
    job.say(11, "gather", key="k", value=1, epoch=0)
    if how == "dies":
        told = job.end(12)
    else:
        told = job.say(12, "failed", text="boom") if how == "fails" else job.say(12, "goodbye")
    assert [message["type"] for message in told[10]][1:] == ["gather_failed"]
    assert told[10] == told[11]
    assert told[10][1]["process"] == 2
    # It fails at once for who comes later.
    assert job.say(10, "gather", key="later", value=1, epoch=0)[10][0]["kind"] == "gone"


def test_who_gives_up_a_gather_ends_it_for_all_with_the_names_of_the_missing() -> None:
    job = Played(4, come=False)
    for process in (0, 1, 2):
        job.come(process)
    job.say(10, "gather", key="boot", value=1, epoch=0)
    job.say(11, "gather", key="boot", value=1, epoch=0)
    assert "process 3 (it has not connected yet)" in job.say(10, "who", key="boot")[10][0]["text"]
    told = job.say(10, "give_up", key="boot", waited=5)
    assert told[10] == told[11]
    assert told[10][0]["missing"] == [2, 3]
    assert told[10][0]["text"] == (
        "boot: process 0 (pid 100, host here) waited 5 s for process 2 (pid 102, host here), process 3 (it has not "
        "connected yet)"
    )


def test_a_second_gather_of_a_key_by_one_process_is_refused_and_the_first_goes_on() -> None:
    job = Played(2)
    job.say(10, "gather", key="k", value=1, epoch=0)
    assert job.say(10, "gather", key="k", value=2, epoch=0)[10][0]["kind"] == "value"
    assert job.say(11, "gather", key="k", value=3, epoch=0)[11][0]["values"] == [1, 3]


# ---------------------------------------------------------------- failing, going


def test_the_others_hear_of_a_failure_before_its_process_may_end() -> None:
    job = Played(3)
    actions = job.job.received(11, {"type": "failed", "text": "KeyError: 'boom'"}, 0.0)
    sends = [action for action in actions if isinstance(action, Send)]
    assert [send.message["type"] for send in sends] == ["failed", "heard"]
    assert sends[0].connections == (10, 12)
    job.done(actions)
    assert job.end(11) == {}, "that it ends then is no news"
    assert job.events[3:] == [Failed(1, 101, "here", "", "KeyError: 'boom'", None)]


def test_who_fails_because_another_one_did_is_told_to_the_host_only() -> None:
    job = Played(2)
    job.say(11, "failed", text="KeyError: 'boom'")
    assert kinds(job.say(10, "failed", text="PeerFailedError", follows=1)) == {10: ["heard"]}
    assert [event.follows for event in job.events[2:]] == [None, 1]


def test_who_fails_because_another_one_ended_in_good_order_is_news_to_all() -> None:
    job = Played(3)
    job.say(12, "goodbye")
    told = job.say(11, "failed", text="PeerFailedError: process 2 has ended its program", follows=2)
    assert kinds(told)[10] == ["failed"]
    assert job.events[-1].follows is None


def test_who_fails_because_of_one_whose_own_words_come_later_is_no_culprit() -> None:
    job = Played(3)
    told = job.say(10, "failed", text="PeerFailedError: process 1 failed", follows=1)
    assert kinds(told) == {10: ["heard"], 11: ["failed"], 12: ["failed"]}
    job.say(11, "failed", text="ValueError")
    assert [event.follows for event in job.events[3:]] == [1, None]


def test_who_is_gone_without_a_word_has_died() -> None:
    job = Played(2)
    (lost,) = job.end(11)[10]
    assert (lost["type"], lost["process"], lost["pid"], lost["how"]) == ("lost", 1, 101, "died")
    assert isinstance(job.events[-1], Lost)


def test_who_says_goodbye_has_left_and_the_job_is_finished_when_all_are_gone() -> None:
    job = Played(2)
    assert kinds(job.say(11, "goodbye")) == {10: ["left"], 11: ["heard"]}
    assert job.events[-1] == Left(1, 101, "here", "")
    job.say(10, "goodbye")
    assert not job.job.is_finished
    job.end(11)
    job.end(10)
    assert job.job.is_finished


def test_a_goodbye_is_believed_when_the_status_is_seen_to_be_0() -> None:
    job = Played(2, sees_ends=True)
    assert kinds(job.say(11, "goodbye")) == {11: ["heard"]}
    job.end(11)
    assert kinds(job.see_end(1, 101, 0)) == {10: ["left"]}
    assert job.events[-1] == Left(1, 101, "here", "")


def test_who_says_goodbye_and_ends_with_another_status_has_failed() -> None:
    job = Played(3, sees_ends=True)
    job.say(11, "goodbye")
    assert job.say(10, "gather", key="k", value=1, epoch=0) == {}
    told = job.see_end(1, 101, 3)
    assert kinds(told)[10] == ["failed", "gather_failed"]
    assert kinds(told)[12] == ["failed"]
    assert (told[12][0]["process"], told[12][0]["text"]) == (1, "it ended with status 3")
    assert job.events[-1] == Failed(1, 101, "here", "", "it ended with status 3", None)
    # Who fails because of that is no culprit.
    job.say(10, "failed", text="PeerFailedError", follows=1)
    assert job.events[-1].follows == 1


@pytest.mark.parametrize("by", ["time", "the host"])
def test_a_goodbye_whose_status_nobody_sees_is_believed_in_the_end(by: str) -> None:
    job = Played(2, sees_ends=True)
    job.say(11, "goodbye")
    # A program around it ends some day, under another process id.
    if by == "time":
        assert job.job.seconds_to_tick(job.now) <= 2.0
        assert kinds(job.wait(2.0))[10] == ["left"]
    else:
        assert kinds(job.done(job.job.all_ended(job.now)))[10] == ["left"]
    assert job.see_end(1, 4711, 3) == {}
    assert isinstance(job.events[-1], Left)


def test_the_survivors_of_an_elastic_job_go_on_without_one_that_is_leaving() -> None:
    job = Played(2, elastic=True, sees_ends=True)
    job.say(11, "goodbye")
    assert "regrouped" in kinds(job.say(10, "regroup", admit=False, epoch=0))[10]
    assert "failed" not in kinds(job.see_end(1, 101, 3)).get(10, [])
    assert job.events[-1] == Failed(1, 101, "here", "", "it ended with status 3", None)


def test_the_host_can_declare_dead_who_never_came() -> None:
    job = Played(3, come=False)
    job.come(0)
    job.say(10, "gather", key="boot", value=1, epoch=0)
    told = job.done(job.job.declare_lost(2, "it ended with status 3", 0.0))
    assert kinds(told) == {10: ["lost", "gather_failed"]}
    assert told[10][0]["why"] == "it ended with status 3"


@pytest.mark.parametrize(
    "message",
    [
        {"type": "nonsense"},
        {"type": 3},
        {},
        {"type": "gather", "key": 1, "value": 1, "epoch": 0},
        {"type": "gather", "key": "k"},
        {"type": "report", "kind": "timeout", "about": "", "waited": "long", "state": {}},
        {"type": "state", "id": "1", "state": {}},
        {"type": "regroup", "admit": 1},
        {"type": "failed", "text": None},
        {"type": "give_up", "key": [], "waited": 1.0},
        {"type": "vote", "epoch": 0, "link": "link", "number": "1", "succeeded": True},
    ],
)
def test_who_talks_nonsense_is_dropped_and_told_to_the_others(message: dict[str, Any]) -> None:
    job = Played(2, elastic=True)
    told = job.done(job.job.received(11, message, 0.0))
    assert told[11][-1]["type"] == "refused"
    assert told[10][-1]["type"] == "lost"
    assert "did not understand" in told[10][-1]["why"]
    assert job.dropped == [11]


def test_silence_is_death_in_an_elastic_job_only() -> None:
    job = Played(2, elastic=True, heartbeat=10.0)
    job.wait(6.0)
    job.say(10, "ping")
    told = job.wait(5.0)
    assert kinds(told) == {11: ["expelled"], 10: ["lost"]}
    assert told[10][0]["how"] == "stopped"
    assert isinstance(job.events[-1], Silent)
    assert Played(2).wait(1000.0) == {}


def test_nobody_is_dead_for_the_time_that_the_hub_itself_was_stopped() -> None:
    job = Played(2, elastic=True, heartbeat=10.0)
    job.job.paused(60.0)
    assert job.wait(60.0) == {}


# ----------------------------------------------------------------------- reports


def ask(job: Played, process: int, about: str = "", kind: str = "timeout") -> Told:
    return job.say(
        10 + process,
        "report",
        kind=kind,
        about=about,
        waited=3,
        state={"call": f"call of {process}", "seq": 7},
    )


def test_everybody_gets_one_report_when_all_have_answered() -> None:
    job = Played(3)
    assert kinds(ask(job, 1)) == {10: ["state_wanted"], 12: ["state_wanted"]}
    job.say(10, "state", id=1, state={"call": "zero"})
    told = job.say(12, "state", id=1, state={"call": "two"})
    assert told[10] == told[11] == told[12]
    (report,) = told[10]
    assert [state["call"] for state in report["states"]] == ["zero", "call of 1", "two"]
    assert (report["reporter"], report["waited"]) == (1, 3.0)


def test_who_does_not_answer_in_time_is_reported_silent_with_pid_and_host() -> None:
    job = Played(2)
    ask(job, 0)
    assert job.wait(1.0) == {}
    (report,) = job.wait(0.6)[10]
    assert report["states"][1] == {
        "process": 1,
        "pid": 101,
        "host": "here",
        "silent": True,
        "unheard_seconds": 1.6,
    }


def test_two_who_ask_at_the_same_time_get_the_same_report() -> None:
    job = Played(3)
    ask(job, 0)
    assert ask(job, 2) == {}
    told = job.say(11, "state", id=1, state={"call": "one"})
    assert kinds(told) == {10: ["report"], 11: ["report"], 12: ["report"]}
    assert [state["call"] for state in told[12][0]["states"]] == ["call of 0", "one", "call of 2"]


def test_who_asks_later_about_the_same_gets_the_same_report_and_about_something_else_a_new_one() -> None:
    job = Played(2)
    ask(job, 0, "seq 7", "mismatch")
    first = job.say(11, "state", id=1, state={})[10][0]
    assert ask(job, 1, "seq 7", "mismatch") == {11: [first]}
    assert kinds(ask(job, 1, "seq 8", "mismatch")) == {10: ["state_wanted"]}


def test_a_report_does_not_wait_for_the_dead_and_says_how_they_went() -> None:
    job = Played(4, come=False)
    for process in (0, 1, 2):
        job.come(process)
    job.say(12, "goodbye")
    job.end(12)
    ask(job, 0)
    told = job.end(11)
    states = told[10][-1]["states"]
    assert [state.get("gone") for state in states[1:]] == [
        "it is dead",
        "it has ended its program",
        "it has not connected yet",
    ]


def test_a_process_that_is_alone_reports_alone() -> None:
    assert kinds(ask(Played(1), 0)) == {10: ["report"]}


# ----------------------------------------------------------------------- regroup


def regroup(
    job: Played, connection: int, epoch: int | None = 0, info: Any = None, admit: bool = False
) -> Told:
    return job.say(connection, "regroup", epoch=epoch, info=info, admit=admit)


def test_survivors_go_on_with_dense_numbers_in_their_old_order() -> None:
    job = Played(4, elastic=True)
    job.end(11)
    assert regroup(job, 13, info="three") == {}
    assert regroup(job, 10, info="zero") == {}
    told = regroup(job, 12, info="two")
    assert {connection: messages[0]["process"] for connection, messages in told.items()} == {
        10: 0,
        12: 1,
        13: 2,
    }
    assert [one["old_process"] for one in told[10][0]["members"]] == [0, 2, 3]
    assert [one["info"] for one in told[10][0]["members"]] == ["zero", "two", "three"]
    assert told[10][0]["epoch"] == 1
    assert job.events[-1] == Regrouped(1, (100, 102, 103), ("here",) * 3)
    # With the new numbers everything works as before.
    for connection in (10, 12):
        assert job.say(connection, "gather", key="k", value=connection, epoch=1) == {}
    assert job.say(13, "gather", key="k", value=13, epoch=1)[10][0]["values"] == [10, 12, 13]


def test_a_loss_in_the_middle_of_a_regroup_is_not_waited_for() -> None:
    job = Played(4, elastic=True)
    job.end(13)
    regroup(job, 10)
    regroup(job, 12)
    told = job.end(11)
    assert kinds(told) == {10: ["lost", "regrouped"], 12: ["lost", "regrouped"]}


def test_one_who_had_come_to_the_regroup_and_died_is_not_in_it() -> None:
    job = Played(3, elastic=True)
    job.end(12)
    regroup(job, 11)
    job.end(11)
    told = regroup(job, 10)
    assert [one["old_process"] for one in told[10][0]["members"]] == [0]


def test_who_has_failed_or_left_is_not_waited_for_nor_talked_to_any_more() -> None:
    job = Played(4, elastic=True)
    job.say(11, "failed", text="boom")
    job.say(12, "goodbye")
    regroup(job, 10)
    told = regroup(job, 13)
    assert [one["old_process"] for one in told[10][0]["members"]] == [0, 3]
    assert sorted(job.dropped) == [11, 12]
    assert job.end(11) == {}


def test_a_newcomer_is_parked_until_all_admit_it() -> None:
    job = Played(2, elastic=True)
    told = job.come(None, connection=30, join=True)
    assert told[30][0]["process"] is None
    assert kinds(regroup(job, 30, None, "new", True)) == {10: ["waiting"], 11: ["waiting"]}
    regroup(job, 10, admit=True)
    told = regroup(job, 11, admit=False)
    assert len(told[10][0]["members"]) == 2
    assert told[10][0]["waiting"] == 1
    regroup(job, 10, 1, admit=True)
    told = regroup(job, 11, 1, admit=True)
    assert told[30][0]["process"] == 2
    assert told[10][0]["members"][2] == {
        "pid": 120,
        "host": "here",
        "old_process": None,
        "info": "new",
    }
    assert told[10][0]["waiting"] == 0


def test_newcomers_that_are_not_ready_or_die_hold_nobody_up() -> None:
    job = Played(2, elastic=True)
    job.come(None, connection=30, join=True)
    job.come(None, connection=31, join=True)
    regroup(job, 31, None, None, True)
    assert job.end(31)[10] == [{"type": "waiting", "count": 0}]
    regroup(job, 10, admit=True)
    assert len(regroup(job, 11, admit=True)[10][0]["members"]) == 2


def test_newcomers_are_sent_away_when_the_job_has_ended() -> None:
    job = Played(1, elastic=True)
    job.come(None, connection=30, join=True)
    regroup(job, 30, None, None, True)
    told = job.say(10, "goodbye")
    assert kinds(told)[30] == ["refused"]
    assert kinds(job.come(None, connection=31, join=True))[31] == ["refused"]


def test_who_gives_up_a_regroup_ends_it_for_all_who_wait() -> None:
    job = Played(3, elastic=True)
    regroup(job, 10)
    regroup(job, 11)
    told = job.say(11, "give_up", key=None, waited=2.0)
    assert told[10][0] == told[11][0]
    assert told[10][0]["missing"] == [2]
    assert regroup(job, 12) == {}


def with_spares(size: int, num_spares: int) -> Played:
    """Members, and spares that wait: the first has connection 10 + size."""
    job = Played(size, elastic=True, num_spares=num_spares)
    for number in range(size, size + num_spares):
        job.come(None, 10 + number, join=True, spare=True)
        job.say(10 + number, "regroup", epoch=0, info=None, admit=True)
    return job


def regroup_all(job: Played, *connections: int, epoch: int, admit: bool) -> Told:
    told: Told = {}
    for connection in connections:
        told = job.say(connection, "regroup", epoch=epoch, info=None, admit=admit)
    return told


def test_spares_are_taken_in_only_where_places_are_free() -> None:
    job = with_spares(2, 2)
    told = regroup_all(job, 10, 11, epoch=0, admit=True)
    assert [len(message["members"]) for message in (told[10][-1], told[11][-1])] == [2, 2]
    assert told[10][-1]["waiting"] == 0
    assert set(told) == {10, 11}
    job.end(11)
    told = regroup_all(job, 10, epoch=1, admit=False)
    assert told[10][-1]["waiting"] == 1
    told = regroup_all(job, 10, epoch=2, admit=True)
    assert [one["old_process"] for one in told[10][-1]["members"]] == [0, None]
    assert told[12][-1]["process"] == 1
    assert 13 not in told


def test_members_that_have_ended_in_good_order_leave_no_places() -> None:
    job = with_spares(3, 1)
    job.say(12, "goodbye")
    job.end(11)
    told = regroup_all(job, 10, epoch=0, admit=True)
    assert [one["old_process"] for one in told[10][-1]["members"]] == [0, None]


def test_spares_are_called_once_also_those_that_come_later() -> None:
    job = Played(2, elastic=True, num_spares=2)
    job.come(None, 12, join=True, spare=True)
    assert job.say(10, "call_spares") == {12: [{"type": "spares_called"}]}
    assert job.say(11, "call_spares") == {}
    assert kinds(job.come(None, 13, join=True, spare=True)) == {13: ["welcome", "spares_called"]}


def test_a_job_with_spares_takes_nobody_else_and_one_without_takes_no_spares() -> None:
    told = Played(2, elastic=True, num_spares=1).come(None, 12, join=True)
    assert "takes nobody else" in told[12][-1]["text"]
    told = Played(2, elastic=True).come(None, 12, join=True, spare=True)
    assert told[12][-1]["type"] == "refused"


def test_spares_are_dismissed_when_the_job_has_ended() -> None:
    job = with_spares(1, 2)
    told = job.say(10, "goodbye")
    assert [kinds(told)[connection][-1] for connection in (11, 12)] == ["dismissed"] * 2
    assert job.dropped == [11, 12]


def test_a_spare_that_dies_or_stops_is_told_to_the_host_and_one_that_stops_to_the_members() -> None:
    job = with_spares(1, 2)
    job.end(11)
    assert job.events[-1] == Lost(None, 101, "here", "", "its connection broke")
    job.say(10, "ping")
    job.wait(6.0)
    job.say(10, "ping")
    told = job.wait(6.0)
    assert told[10][-1] == {"type": "spare_stopped", "pid": 102, "host": "here", "identity": ""}
    assert isinstance(job.events[-1], Silent)


def test_a_vote_is_passed_on_to_the_others_before_the_death_of_who_has_cast_it() -> None:
    job = Played(3, elastic=True)
    vote = {"link": "link", "number": 4, "succeeded": False}
    told = job.say(12, "vote", epoch=0, **vote)
    assert told == {
        10: [{"type": "vote", "process": 2, **vote}],
        11: [{"type": "vote", "process": 2, **vote}],
    }
    assert kinds(job.end(12)) == {10: ["lost"], 11: ["lost"]}


def test_a_vote_of_links_that_there_are_no_more_is_not_passed_on() -> None:
    job = Played(3, elastic=True)
    job.end(12)
    job.say(10, "regroup", epoch=0, info=None, admit=True)
    job.say(11, "regroup", epoch=0, info=None, admit=True)
    assert job.say(10, "vote", epoch=0, link="link", number=4, succeeded=False) == {}


def test_a_job_that_is_not_elastic_does_not_regroup() -> None:
    job = Played(2)
    job.end(11)
    assert regroup(job, 10)[10][0]["type"] == "regroup_failed"


def test_nobody_takes_a_number_of_a_job_that_has_changed() -> None:
    job = Played(2, elastic=True)
    job.end(11)
    regroup(job, 10)
    assert "join it as a newcomer" in job.come(1)[11][0]["text"]


@pytest.mark.parametrize("arguments", [{"num_processes": 0}, {"heartbeat_seconds": 0.0}])
def test_a_job_needs_processes_and_a_heartbeat(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Job: got"):
        Job(**{"num_processes": 1, "token": "", "elastic": True, "heartbeat_seconds": 1.0, **arguments})


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_in_whatever_order_nobody_waits_for_the_gone(seed: int) -> None:
    random = Random(seed)
    job = Played(4, elastic=seed % 3 > 0, come=False)
    open_connections: set[int] = set()
    waiting: dict[int, str] = {}  # who waits in a gather, by connection
    epochs: dict[int, int] = {}

    def hear(told: Told) -> None:
        for connection, messages in told.items():
            for message in messages:
                if message["type"] in ("gathered", "gather_failed"):
                    assert waiting.pop(connection) == message["key"]
                elif message["type"] == "regrouped":
                    assert message["epoch"] == epochs.get(connection, message["epoch"] - 1) + 1
                    epochs[connection] = message["epoch"]
                elif message["type"] == "welcome":
                    open_connections.add(connection)
                    if message["process"] is not None:
                        epochs[connection] = message["epoch"]
        for connection in job.dropped:
            open_connections.discard(connection)
            waiting.pop(connection, None)
        job.dropped.clear()

    for number in range(400):
        num_events = len(job.events)
        kind = random.choice(
            [
                "come",
                "join",
                "gather",
                "gather",
                "gather",
                "regroup",
                "regroup",
                "who",
                "give_up",
                "report",
                "state",
                "ping",
                "wait",
                "failed",
                "goodbye",
                "end",
                "lost",
                "nonsense",
            ]
        )
        one = random.choice(sorted(open_connections)) if open_connections else None
        if kind == "come":
            hear(job.come(random.randrange(5), connection=100 + number))
        elif kind == "join":
            hear(job.come(None, connection=100 + number, join=True))
        elif kind == "wait":
            hear(job.wait(random.choice([0.1, 1.0, 4.0])))
        elif kind == "lost":
            if random.random() < 0.1:
                hear(job.done(job.job.declare_lost(random.randrange(4), "killed", job.now)))
        elif one is None:
            continue
        elif kind == "gather":
            if one not in waiting:
                waiting[one] = key = random.choice("ab")
                hear(job.say(one, "gather", key=key, value=one, epoch=epochs.get(one)))
        elif kind == "regroup":
            hear(regroup(job, one, epochs.get(one), one, random.random() < 0.7))
        elif kind == "give_up":
            hear(job.say(one, "give_up", key=random.choice([None, "a", "b"]), waited=1.0))
        elif kind == "who":
            hear(job.say(one, "who", key=random.choice([None, "a"])))
        elif kind == "report":
            hear(job.say(one, "report", kind="timeout", about=random.choice("xy"), waited=1.0, state={}))
        elif kind == "state":
            hear(job.say(one, "state", id=random.randrange(9), state={}))
        elif kind == "ping":
            hear(job.say(one, "ping"))
        elif random.random() < 0.2:
            if kind == "end":
                open_connections.discard(one)
                waiting.pop(one, None)
                hear(job.end(one))
            elif kind == "failed":
                hear(job.say(one, "failed", text="boom", follows=random.choice([None, 1])))
            elif kind == "goodbye":
                hear(job.say(one, "goodbye"))
            else:
                hear(job.say(one, "nonsense"))
        went = (Failed, Left, Lost, Silent)
        if any(isinstance(event, went) and event.process is not None for event in job.events[num_events:]):
            assert not waiting or isinstance(job.events[-1], Regrouped), "somebody waits for one that is gone"
    for connection in sorted(open_connections):
        open_connections.discard(connection)
        hear(job.end(connection))
    job.done(job.job.declare_lost(0, "never came", job.now))
