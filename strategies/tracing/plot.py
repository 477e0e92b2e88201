"""A picture of the timeline: a row for each replica, a colour for each thing that it does."""

from __future__ import annotations

import os
from collections.abc import Sequence

from strategies.tracing.summary import Summary, byte_count, duration
from strategies.tracing.timeline import Interval, Kind, Timeline, TracedStep

# Told apart by people who see red and green alike, and in grey: from Okabe and Ito's palette.
_COLOURS = {
    Kind.COMPUTE: "#0072B2",
    Kind.COMMUNICATE: "#E69F00",
    Kind.UPDATE: "#009E73",
    Kind.MERGE: "#CC79A7",
    Kind.WAIT: "#D9D9D9",
}
_WORDS = {
    Kind.COMPUTE: "compute",
    Kind.COMMUNICATE: "communicate",
    Kind.UPDATE: "update variables",
    Kind.MERGE: "merge function",
    Kind.WAIT: "wait",
}
_STEPS = 3
"""How many steps a picture shows where nothing else is said: more are too thin to see."""
_Window = tuple[int, tuple[int, int, list[TracedStep]]]
_LABEL_SHARE = 0.055
"""Of the width, from which an interval has room for its name."""


def save_timeline(
    path: str | os.PathLike[str], timeline: Timeline, title: str, steps: range | None = None
) -> None:
    """Draw some steps.

    Args:
        path: of the picture; its suffix says which kind, such as ``.png``, ``.svg`` or ``.pdf``.
        timeline: what happened.
        title: of the picture.
        steps: their numbers, counted from the beginning of the trace; None takes three that are typical.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: no such steps.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an extra
        from matplotlib.patches import Patch  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"save_plot: no module {error.name}; matplotlib draws the picture — pip install 'xpdistribute[plot]'"
        ) from error
    windows = list(enumerate(timeline.windows()))
    chosen = _typical(windows) if steps is None else windows[steps.start : steps.stop : steps.step]
    if not chosen:
        raise ValueError(
            f"save_plot: got steps={steps} of a trace with {len(windows)} steps; need some of them"
        )
    began = min(first for _, (first, _, _) in chosen)
    ended = max(last for _, (_, last, _) in chosen)
    shown = [
        interval
        for interval in timeline.intervals()
        if interval.kind in _COLOURS
        and not interval.depth
        and interval.began < ended
        and interval.ended > began
    ]
    rows = len(timeline.replicas)
    figure = Figure(figsize=(12, 1.9 + 0.62 * rows), dpi=160, layout="constrained")
    axes = figure.subplots()
    scale, unit = (
        (1e-3, "µs") if ended - began < 2e6 else (1e-6, "ms") if ended - began < 5e9 else (1e-9, "s")
    )
    width = (ended - began) * scale
    for row, replica in enumerate(timeline.replicas):
        # The outer come before the inner, which are drawn over them.
        mine = [interval for interval in shown if interval.replica == replica]
        for kind in _COLOURS:
            bars = [((i.began - began) * scale, (i.ended - i.began) * scale) for i in mine if i.kind is kind]
            level = 3 if kind is Kind.WAIT else 2
            axes.broken_barh(bars, (row - 0.36, 0.72), facecolors=_COLOURS[kind], linewidth=0, zorder=level)
        for interval, from_, to in _labelled(mine):
            start, length = (from_ - began) * scale, (to - from_) * scale
            if length >= _LABEL_SHARE * width and start >= 0:
                dark = interval.kind in (Kind.COMPUTE, Kind.UPDATE)
                axes.text(
                    start + length / 2,
                    row,
                    _label(interval, length / width),
                    ha="center",
                    va="center",
                    fontsize=7.5,
                    color="white" if dark else "black",
                    clip_on=True,
                    zorder=4,
                )
    for number, (first, last, _) in chosen:
        axes.axvline((first - began) * scale, color="#444444", linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
        if last - first > 1.6 * _LABEL_SHARE * (ended - began):
            axes.text(
                ((first + last) / 2 - began) * scale,
                -0.52,
                f"step {number}  {duration((last - first) * 1e-9)}",
                ha="center",
                va="bottom",
                fontsize=8.5,
                color="#444444",
            )
    axes.set_yticks(range(rows), [f"replica {replica}" for replica in timeline.replicas])
    axes.set_ylim(rows - 0.45, -0.85)
    axes.set_xlim(0, width)
    axes.set_xlabel(f"time in {unit}")
    axes.tick_params(labelsize=8.5)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_title(_in_words(timeline, len(chosen)), loc="right", fontsize=8.5, color="#444444")
    present = {interval.kind for interval in shown}
    figure.legend(
        handles=[Patch(facecolor=_COLOURS[kind], label=_WORDS[kind]) for kind in _COLOURS if kind in present],
        loc="outside lower center",
        ncols=len(_COLOURS),
        frameon=False,
        fontsize=8.5,
    )
    figure.savefig(path)


def _typical(windows: list[_Window]) -> list[_Window]:
    """Some steps in a row that take as long as such a row usually does."""
    rows = [windows[start : start + _STEPS] for start in range(max(1, len(windows) - _STEPS + 1))]
    by_length = sorted(rows, key=lambda row: row[-1][1][1] - row[0][1][0] if row else 0)
    return by_length[len(by_length) // 2]


def _labelled(intervals: Sequence[Interval]) -> list[tuple[Interval, int, int]]:
    """Which intervals can bear a name, and from when to when each is not covered by its wait."""
    waits = {
        (i.began, i.depth): i.ended
        for i in intervals
        if i.kind is Kind.WAIT and i.name.startswith("wait for")
    }
    outer = {i.began for i in intervals if i.kind is Kind.UPDATE and i.name.startswith("apply_gradients")}
    found = []
    for interval in intervals:
        if interval.kind is Kind.WAIT or (
            interval.kind is Kind.UPDATE and interval.began in outer and _is_split(interval, intervals)
        ):
            if interval.kind is Kind.WAIT:
                found.append((interval, interval.began, interval.ended))
            continue
        found.append((interval, waits.get((interval.began, interval.depth), interval.began), interval.ended))
    return found


def _is_split(update: Interval, intervals: Sequence[Interval]) -> bool:
    return any(
        i is not update and i.kind is Kind.UPDATE and update.began <= i.began and i.ended <= update.ended
        for i in intervals
    )


def _label(interval: Interval, share: float) -> str:
    if interval.kind is Kind.WAIT:
        return "wait"
    size = interval.args.get("bytes")
    if size is not None and share > 2.2 * _LABEL_SHARE:
        return f"{interval.name}\n{byte_count(size)}"
    return interval.name if share > 1.6 * _LABEL_SHARE else interval.name.split()[0]


def _in_words(timeline: Timeline, num_shown: int) -> str:
    summary = Summary.of(timeline)
    of_all = sum(times.in_steps for times in summary.replicas) or 1.0
    waiting = sum(times.waiting for times in summary.replicas) / of_all
    words = f"{num_shown} of {summary.num_steps} steps; waiting {waiting:.0%} of all steps"
    return words if summary.slowest is None else f"{words}, most for replica {summary.slowest}"
