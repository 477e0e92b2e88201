"""What follows from what the hub tells."""

from __future__ import annotations

from xpdistribute.events import Event, Failed, Joined, Left, Lost, Regrouped
from xpdistribute.membership import Membership


def job(*processes: tuple[str, int], replacements: int = 3, host: str | None = None) -> Membership:
    """An elastic one whose processes, each a host and a process id, have all come."""
    members = Membership(len(processes), elastic=True, replacements=replacements, host=host)
    for number, (name, pid) in enumerate(processes):
        members.handle(Joined(number, pid, name, ""), number)
    return members


def test_processes_of_several_hosts_may_have_the_same_ids() -> None:
    members = job(("a", 7), ("b", 7))
    members.handle(Lost(1, 7, "b", "", "gone"), 1)
    assert members.can_take_in
    members.handle(Regrouped(1, (7,), ("a",)), None)
    members.handle(Left(0, 7, "a", ""), 0)
    assert members.has_ended_well


def test_those_that_the_others_go_on_without_stay_known() -> None:
    members = job(("a", 1), ("a", 2))
    members.handle(Lost(1, 2, "a", "", "gone"), 1)
    members.handle(Regrouped(1, (1,), ("a",)), None)
    assert members.knows(2)
    assert members.has_taken_in(2)
    assert not members.knows(3)


def test_the_first_loss_since_the_job_has_gone_on_is_the_one_that_ended_it() -> None:
    members = job(("a", 1), ("a", 2), ("a", 3))

    def blamed(*events: tuple[Event, int]) -> int | None:
        for event, rank in events:
            members.handle(event, rank)
        return None if members.loss is None else members.loss.process

    assert blamed((Lost(2, 3, "a", "", "gone"), 2)) == 2
    members.handle(Regrouped(1, (1, 2), ("a", "a")), None)
    assert blamed((Failed(0, 1, "a", "", "follows", 1), 0)) == 2
    assert blamed((Failed(1, 2, "a", "", "of its own"), 1), (Failed(0, 1, "a", "", "later"), 0)) == 1


def test_nobody_is_replaced_when_none_is_left_but_those_that_may_still_come_count() -> None:
    members = Membership(2, elastic=True, replacements=3, host=None)
    members.handle(Joined(0, 1, "a", ""), 0)
    assert members.handle(Failed(0, 1, "a", "", "text"), 0).replace == 0
    assert members.can_take_in
    assert members.handle(Lost(1, 0, "", "", "it never came"), 1).replace is None
    assert not members.can_take_in


def test_spares_take_places_as_long_as_there_are_some_and_no_other_process_is_started() -> None:
    members = Membership(2, elastic=True, replacements=3, host="a", num_spares=2)
    for number, pid in enumerate((1, 2)):
        members.handle(Joined(number, pid, "a", ""), number)
    for pid in (3, 4):
        members.handle(Joined(None, pid, "b", ""), None)
    decided = members.handle(Lost(1, 2, "a", "", "gone"), 1)
    assert decided.replace is None
    assert decided.say == "rank 1 (pid 2, host a) has died; a spare will take its place, 1 left"
    members.handle(Regrouped(1, (1, 3), ("a", "b")), None)
    decided = members.handle(Lost(None, 4, "b", "", "gone"), None)
    assert decided.say == "a spare (pid 4, host b) has died, 0 left"
    assert members.handle(Lost(1, 3, "b", "", "gone"), 3).say == (
        "rank 3 (pid 3, host b) has died; no spare is left, so the others go on without it"
    )
    members.handle(Regrouped(2, (1,), ("a",)), None)
    members.handle(Left(0, 1, "a", ""), 0)
    assert members.has_ended_well


def test_the_loss_of_a_spare_that_waits_is_nobodys_fault() -> None:
    members = Membership(1, elastic=True, replacements=0, host=None, num_spares=1)
    members.handle(Joined(0, 1, "a", ""), 0)
    members.handle(Joined(None, 2, "a", ""), None)
    members.handle(Lost(None, 2, "a", "", "gone"), None)
    assert members.loss is None
