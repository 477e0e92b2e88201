"""Whatever the library that moves the data tells some processes and not others, all conclude the same of a collective."""

from __future__ import annotations

import random

import pytest

from collectives.control.votes import Vote, Votes

NUMBER = 7


def votes(*said: tuple[int, int, bool]) -> Votes:
    made = Votes(lambda _link, _vote: None)
    for process, number, succeeded in said:
        made.take("link", process, Vote(number, succeeded))
    return made


def test_one_part_that_failed_is_enough_also_of_one_who_is_gone() -> None:
    assert votes((2, NUMBER, False)).outcome("link", NUMBER, {0, 1}) is False
    assert (
        votes((0, NUMBER, True), (1, NUMBER, True), (2, NUMBER, False)).outcome("link", NUMBER, {0, 1})
        is False
    )


def test_it_succeeded_when_all_that_live_say_so() -> None:
    assert votes((0, NUMBER, True)).outcome("link", NUMBER, {0, 1}) is None
    assert votes((0, NUMBER, True), (1, NUMBER, True)).outcome("link", NUMBER, {0, 1}) is True
    assert votes((0, NUMBER, True)).outcome("link", NUMBER, {0}) is True
    assert votes().outcome("link", NUMBER, set()) is None


def test_who_is_at_a_later_call_has_seen_it_succeed() -> None:
    made = votes((1, NUMBER + 1, False))
    assert made.outcome("link", NUMBER, {0, 1}) is True
    assert not made.are_in("link", NUMBER, {0, 1})


def test_all_parts_are_in_when_all_that_live_have_voted_of_this_call_or_a_later_one() -> None:
    made = votes((0, NUMBER, False), (1, NUMBER - 1, True))
    assert not made.are_in("link", NUMBER, {0, 1})
    made.take("link", 1, Vote(NUMBER + 1, succeeded=False))
    assert made.are_in("link", NUMBER, {0, 1})
    assert made.are_in("link", NUMBER, {0})


def test_earlier_calls_and_other_links_say_nothing() -> None:
    made = votes((0, NUMBER - 1, True), (1, NUMBER - 1, True))
    made.take("other", 0, Vote(NUMBER, False))
    assert made.outcome("link", NUMBER, {0, 1}) is None
    assert made.outcome("other", NUMBER, {0, 1}) is False


def test_a_vote_is_told_to_the_others_and_forgotten_with_the_make_up_of_the_job() -> None:
    told: list[tuple[str, Vote]] = []
    made = Votes(lambda link, vote: told.append((link, vote)))
    made.cast("link", 0, Vote(NUMBER, succeeded=False))
    assert told == [("link", Vote(NUMBER, succeeded=False))]
    assert made.outcome("link", NUMBER, {0}) is False
    made.clear()
    assert made.outcome("link", NUMBER, {0}) is None


@pytest.mark.parametrize("seed", range(300))
def test_all_conclude_the_same_however_far_what_the_hub_passes_on_has_come(seed: int) -> None:
    # The last process is gone. Its part counts in what the library found out, which has come to some and not to others.
    rng = random.Random(seed)
    size = rng.randint(2, 5)
    live = set(range(size - 1))
    parts = [rng.random() < 0.7 for _ in range(size)]
    found = all(parts) if rng.random() < 0.5 else all(parts[:-1])  # it may have died before its part was in
    knowing = {process for process in live if rng.random() < 0.5}
    log: list[tuple[int, Vote]] = []
    if rng.random() < 0.3:
        log.append((size - 1, Vote(NUMBER, parts[-1])))
        found = all(parts)
    seen, mine = dict.fromkeys(live, 0), {process: Votes(lambda _link, _vote: None) for process in live}
    concluded: dict[int, bool] = {}
    while len(concluded) < len(live):
        process = rng.choice(sorted(live - concluded.keys()))
        voted = any(who == process for who, _ in log)
        if process in knowing and not voted:
            concluded[process] = found
            log.append((process, Vote(NUMBER + found, succeeded=False)))  # the next one fails, as one is gone
            continue
        for who, vote in log[seen[process] :][: rng.randint(0, 3)]:
            mine[process].take("link", who, vote)
            seen[process] += 1
        if not voted:
            log.append((process, Vote(NUMBER, parts[process])))
        if seen[process] >= 1 or log[0][0] != size - 1:  # the hub tells of a vote before it tells of a death
            outcome = mine[process].outcome("link", NUMBER, live)
            if outcome is not None:
                concluded[process] = outcome
                if outcome and not any(vote.number > NUMBER for who, vote in log if who == process):
                    log.append((process, Vote(NUMBER + 1, succeeded=False)))
    assert len(set(concluded.values())) == 1
