"""The tables, as people's scripts read them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.forms import (
    Point,
    Run,
    Sweep,
    narrow,
    nccl_footer,
    nccl_header,
    nccl_line,
    osu_header,
    osu_line,
)
from benchmarks.harness import Timing

SWEEP = Sweep("all_reduce_perf", "0.1.0", 2, 4, 1024, 4, 5, 20, True, "a processor")
RUN = Run(Timing((100e-6, 200e-6, 300e-6)), rank_seconds=(100e-6, 300e-6), algbw=5.25, busbw=10.5, wrong=0)
POINT = Point(1024, 256, "float", "sum", -1, RUN, RUN)


def test_the_header_has_the_lines_of_nccl_tests() -> None:
    lines = nccl_header(SWEEP)
    assert lines[0] == "# xpdistribute version 0.1.0, in the form of nccl-tests"
    assert lines[1] == "# Collective test starting: all_reduce_perf"
    assert lines[2] == (
        "# nThread 2 nGpus 0 minBytes 4 maxBytes 1024 step: 4(factor) warmup iters: 5 iters: 20 agg iters: 1 "
        "validation: 1 graph: 0"
    )
    assert lines[4] == "# Using devices"
    assert lines[5].startswith("#  Rank  0 Group  0 Pid ")
    assert lines[6].endswith(" on  localhost device  1 [cpu:1] a processor")
    names = "# size count type redop root time algbw busbw #wrong time algbw busbw #wrong"
    assert lines[-2].split() == [*names.split(), *("p50", "p95", "p99", "min") * 2]
    assert lines[-1].split()[:6] == ["#", "(B)", "(elements)", "(us)", "(GB/s)", "(GB/s)"]


def test_a_line_has_nccl_tests_columns_first_and_ours_to_the_right() -> None:
    line = nccl_line(POINT)
    assert line.startswith(
        "        1024           256     float     sum      -1   200.00    5.25   10.50       0"
    )
    assert line.split() == [
        *("1024", "256", "float", "sum", "-1"),
        *("200.00", "5.25", "10.50", "0") * 2,
        *("200.00", "290.00", "298.00", "100.00") * 2,
    ]
    names, units = nccl_header(SWEEP)[-2:]
    assert len(line) == len(names) == len(units)


def test_what_has_no_in_place_way_says_so_in_as_many_columns() -> None:
    line = nccl_line(replace(POINT, in_place=None))
    assert len(line) == len(nccl_line(POINT))
    assert line.split().count("N/A") == 8


def test_the_footer_counts_what_was_wrong_and_averages_the_bus_bandwidth() -> None:
    assert nccl_footer([POINT], check=True) == [
        "# Out of bounds values : 0 OK",
        "# Avg bus bandwidth    : 10.5 ",
    ]
    wrong = replace(POINT, in_place=replace(RUN, wrong=3, busbw=11.5))
    assert nccl_footer([wrong], check=True) == [
        "# Out of bounds values : 3 FAILED",
        "# Avg bus bandwidth    : 11 ",
    ]


def test_unchecked_results_are_not_called_ok() -> None:
    unchecked = replace(POINT, out_of_place=replace(RUN, wrong=None), in_place=None)
    assert nccl_footer([unchecked], check=False)[0] == "# Out of bounds values : 0 (not checked)"
    assert nccl_line(unchecked).split()[8] == "N/A"


@pytest.mark.parametrize(
    ("value", "width", "text"),
    [
        (0.0, 6, "  0.00"),
        (3.14159, 6, "  3.14"),
        (999.994, 6, "999.99"),
        (12345.6, 7, "12345.6"),
        (123456.7, 7, " 123457"),
        (12345678.0, 7, "1.2e+07"),
    ],
)
def test_numbers_fit_their_column_as_in_nccl_tests(value: float, width: int, text: str) -> None:
    assert narrow(value, width) == text


def test_osu_prints_two_columns_or_five() -> None:
    assert osu_header("all_reduce", full=False)[1:] == [
        "# OSU xpdistribute in-process Allreduce Latency Test",
        "# Size       Avg Latency(us)",
    ]
    assert osu_line(POINT, full=False).split() == ["1024", "200.00"]
    assert osu_header("all_reduce", full=True)[2].split()[1:] == (
        ["Size", "Avg", "Latency(us)", "Min", "Latency(us)", "Max", "Latency(us)", "Iterations"]
    )
    assert osu_line(POINT, full=True).split() == ["1024", "200.00", "100.00", "300.00", "3"]
