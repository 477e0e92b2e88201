"""The plot of a run: time and bus bandwidth over size, with the memory floor and the rivals beside them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.collective_kinds import KINDS
from benchmarks.report import Row

IN_STEP = "all_reduce in a step"
"""The rows that `benchmarks.command_line` records of an all_reduce within `run`."""


_OURS = ("#1f77b4", "#2ca02c", "#17becf", "#8c564b", "#9467bd", "#7f7f7f")
"""As many as there are collectives."""

_RIVALS = ("#d95f02", "#e6ab02", "#e7298a")


def require_matplotlib() -> None:
    """Fail early if there will be no plot.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise RuntimeError(
            "--plot: needs matplotlib, which is not installed; pip install 'xpdistribute[bench]'"
        )


def write_plot(path: Path, results: Mapping[str, Sequence[Row]], about: Mapping[str, Any]) -> bool:
    """Draw what was recorded of collectives, and calls.

    Args:
        path: of the PNG, which appears whole or not at all.
        results: rows by benchmark.
        about: the machine, for the subtitle.

    Returns:
        Whether there was anything to draw.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415  optional, and slow to import

    sweeps = {name: rows for name, rows in results.items() if name in KINDS and rows}
    calls = [row for row in results.get("overhead", []) if "reduce" not in row["call"]]
    draws: list[Callable[[Any], None]] = []
    if sweeps or results.get(IN_STEP):
        draws += [
            lambda axes: _over_size(axes, sweeps, results.get(IN_STEP, []), bandwidth=False),
            lambda axes: _over_size(axes, sweeps, results.get(IN_STEP, []), bandwidth=True),
        ]
    if calls:
        draws.append(lambda axes: _bars(axes, calls))
    if not draws:
        return False
    figure = Figure(figsize=(7.2 * len(draws), 5.4), layout="constrained")
    for axes, draw in zip(figure.subplots(1, len(draws), squeeze=False)[0], draws, strict=True):
        draw(axes)
    blas = str(about["blas"]).split(",")[0]
    figure.suptitle(
        f"xpdistribute {about['xpdistribute']} on {about['machine']}, {about['cores']} cores\n"
        f"NumPy {about['numpy']}, {blas}; commit {about['commit']}, {str(about['date'])[:10]}",
        fontsize=9,
        color="#555555",
    )
    partial = path.with_name(f"{path.name}.partial")
    figure.savefig(partial, format="png", dpi=144)
    os.replace(partial, path)
    return True


def _over_size(
    axes: Any, sweeps: Mapping[str, Sequence[Row]], in_step: Sequence[Row], *, bandwidth: bool
) -> None:
    ranks = next((row["ranks"] for rows in (*sweeps.values(), in_step) for row in rows), 0)

    def line(points: list[tuple[int, Mapping[str, float]]], factor: float, label: str, **style: Any) -> None:
        sizes = [size for size, _ in points]

        def values(key: str) -> list[float]:
            return [
                size * factor / timing[key] * 1e-3 if bandwidth else timing[key] for size, timing in points
            ]

        axes.plot(sizes, values("p50_us"), label=label, **style)
        axes.fill_between(
            sizes, values("min_us"), values("p95_us"), color=style["color"], alpha=0.13, linewidth=0
        )

    of_all_reduce = KINDS["all_reduce"].bus_factor(ranks)
    for color, (name, rows) in zip(_OURS, sweeps.items(), strict=False):
        points = [(row["size"], row["out_of_place"]) for row in rows]
        line(points, KINDS[name].bus_factor(ranks), name, color=color, marker="o", markersize=3.5)
        if floors := [(row["size"], row["floor"]) for row in rows if "floor" in row]:
            line(
                floors,
                of_all_reduce,
                "memory floor of all_reduce",
                color="black",
                linestyle="--",
                linewidth=1.2,
            )
    names = [name for name in dict.fromkeys(n for row in in_step for n in row["timings"]) if name != "floor"]
    for color, name in zip((_OURS[0], *_RIVALS), names, strict=False):
        points = [(row["size"], row["timings"][name]) for row in in_step]
        label = f"{IN_STEP}: {name}"
        line(points, of_all_reduce, label, color=color, linestyle=":", marker="s", markersize=3)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = [4**power for power in range(1, 16)]
    axes.set_xticks(ticks, [_size(tick) for tick in ticks], rotation=45, fontsize=8)
    every = [row["size"] for rows in (*sweeps.values(), in_step) for row in rows]
    axes.set_xlim(min(every) / 1.5, max(every) * 1.5)
    axes.set_xlabel("size of a rank's array")
    axes.set_ylabel("bus bandwidth (GB/s)" if bandwidth else "time (us)")
    what = "Bus bandwidth" if bandwidth else "Time"
    axes.set_title(f"{what} between {ranks} threads: median, band from minimum to p95", fontsize=11)
    axes.grid(visible=True, which="major", alpha=0.35)
    axes.grid(visible=True, which="minor", axis="y", alpha=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    if not bandwidth:
        axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.2), ncols=2)


def _bars(axes: Any, rows: Sequence[Row]) -> None:
    bars: list[tuple[str, Mapping[str, float], str]] = []
    for row in rows:
        bars.append((f"{row['strategy']} {row['replicas']}: {row['call']}", row, _OURS[0]))
        bars += [
            (key.removesuffix(" us"), value, _RIVALS[0])
            for key, value in row.items()
            if key.endswith(" us") and isinstance(value, Mapping)
        ]
    medians = [timing["p50_us"] for _, timing, _ in bars]
    spread = [
        [max(0.0, median - timing["min_us"]) for median, (_, timing, _) in zip(medians, bars, strict=True)],
        [max(0.0, timing["p95_us"] - median) for median, (_, timing, _) in zip(medians, bars, strict=True)],
    ]
    colors = [color for *_, color in bars]
    style = {"height": 0.72, "ecolor": "#555555", "error_kw": {"linewidth": 1}}
    axes.barh(range(len(bars)), medians, xerr=spread, color=colors, **style)
    axes.set_yticks(range(len(bars)), [label for label, *_ in bars], fontsize=8)
    for position, (median, (_, timing, _)) in enumerate(zip(medians, bars, strict=True)):
        axes.text(
            max(median, timing["p95_us"]) * 1.12,
            position,
            f"{median:,.0f}" if median >= 100 else f"{median:.3g}",
            va="center",
            fontsize=7,
        )
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.margins(x=0.12)
    axes.set_axisbelow(True)
    axes.set_xlabel("us a call")
    axes.set_title("Calls: median, line from minimum to p95", fontsize=11)
    axes.grid(visible=True, axis="x", which="major", alpha=0.35)
    axes.spines[["top", "right"]].set_visible(False)


def _size(num_bytes: int) -> str:
    for unit, factor in (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)):
        if num_bytes >= factor:
            return f"{num_bytes // factor} {unit}"
    return f"{num_bytes} B"
