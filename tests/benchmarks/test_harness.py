"""Timing and statistics."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from benchmarks.harness import Effort, Timeline, Timing, by_turns, call, on_threads, ranks_by_turns
from benchmarks.train import speed


def test_a_timing_knows_its_minimum_median_and_percentiles() -> None:
    timing = Timing(tuple(seconds * 1e-6 for seconds in range(1, 102)))
    assert timing.minimum == pytest.approx(1e-6)
    assert timing.median == pytest.approx(51e-6)
    assert timing.p95 == pytest.approx(96e-6)
    assert timing.describe()["p99_us"] == pytest.approx(100)
    assert timing.describe()["iterations"] == 101


def test_cases_take_turns_and_warm_up_is_left_out() -> None:
    order: list[str] = []

    def case(name: str) -> object:
        def run(iterations: int) -> list[float]:
            order.append(f"{name}{iterations}")
            return [1.0] * iterations

        return run

    effort = Effort(rounds=3, iterations=6, seconds=0.0, warm_up=1)
    timings = by_turns({"a": case("a"), "b": case("b")}, effort)  # type: ignore[dict-item]
    assert order == ["a1", "b1", "a2", "b2", "b2", "a2", "a2", "b2"]
    assert len(timings["a"].seconds) == len(timings["b"].seconds) == 6


def test_short_calls_get_many_iterations_and_long_ones_the_least() -> None:
    effort = Effort(rounds=5, iterations=20, most_iterations=1000, seconds=1.0)
    assert effort.iterations_a_round(1e-6) == 200
    assert effort.iterations_a_round(0.002) == 100
    assert effort.iterations_a_round(10.0) == 4


def test_a_call_is_timed_each_time() -> None:
    seconds = call(lambda: time.sleep(0.002))(3)
    assert len(seconds) == 3
    assert all(taken >= 0.002 for taken in seconds)


def test_an_iteration_ends_when_its_last_rank_ends() -> None:
    begun = np.array([[0, 10], [5, 30]])
    ended = np.array([[10, 40], [25, 35]])
    timeline = Timeline(begun, ended)
    assert timeline.seconds == pytest.approx([20e-9, 15e-9])  # 5 to 25, 25 to 40
    assert timeline.rank_seconds == pytest.approx([20e-9, 12.5e-9])


def test_ranks_run_at_once_and_meet_before_the_clock_starts() -> None:
    barrier = threading.Barrier(2, timeout=10)
    calls = [lambda: barrier.wait()] * 2
    timeline = ranks_by_turns(calls, lambda rank: barrier.wait(), 4, 2, 10)
    assert timeline.begun.shape == timeline.ended.shape == (2, 4)
    assert all(seconds >= 0 for seconds in timeline.seconds)


def test_what_one_rank_raises_reaches_the_caller() -> None:
    def fail() -> None:
        raise ValueError("rank 1 fell over")

    with pytest.raises(ValueError, match="rank 1 fell over"):
        on_threads([lambda: None, fail], timeout=10)


def test_a_rank_that_does_not_end_is_named() -> None:
    release = threading.Event()
    with pytest.raises(
        TimeoutError, match=r"rank 1 still ran after 0.05 s; need all ranks to end — raise -T"
    ):
        on_threads([lambda: None, lambda: release.wait(10)], timeout=0.05)
    release.set()


def test_speed_error_and_jitter_are_those_of_tf_cnn_benchmarks() -> None:
    mean, error, jitter = speed(100, [1.0, 2.0, 4.0])
    assert mean == pytest.approx(100 / (7 / 3))
    assert error == pytest.approx(np.std([100, 50, 25]) / np.sqrt(3))
    assert jitter == pytest.approx(1.4826 * 25)
