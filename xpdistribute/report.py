"""A report as text, as tables, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from xpdistribute.doctor import Report
from xpdistribute.link_probe import LinkReport
from xpdistribute.packages import CUDA, PACKAGES, Found, State

SCHEMA = 1
"""Of the JSON: it changes when a field goes or means something else, not when one is added."""

Rows = list[tuple[str, ...]]


def as_json(report: Report, links: LinkReport | None = None) -> str:
    """All of it, for programs."""
    advice = {one.what: one.command for one in report.missing}
    told: dict[str, Any] = {
        "schema": SCHEMA,
        **report.versions,
        "cores": {
            "logical": report.cores.logical,
            "usable": report.cores.usable,
            "limit": report.cores.limit,
            "available": report.cores.available,
        },
        "memory": {
            "total_bytes": report.memory.total,
            "free_bytes": report.memory.free,
            "limit_bytes": report.memory.limit,
        },
        "blas": report.blas,
        "gpus": list(report.gpus),
        "cuda_driver": _package(report.found[CUDA], None),
        "mpiexec": report.mpiexec,
        "packages": {
            package.name: _package(report.found[package.name], advice.get(package.name))
            for package in PACKAGES
        },
        "warnings": list(report.warnings),
        "missing": [{"what": one.what, "use": one.use, "command": one.command} for one in report.missing],
        "required": list(report.required),
        "failures": list(report.failures),
    }
    if links is not None:
        told["links"] = links.as_fields()
    return json.dumps(told, indent=1, ensure_ascii=False)


def as_text(report: Report) -> str:
    """Plain lines, for pipes and files."""
    parts = []
    for title, rows in _tables(report):
        columns = len(rows[0])
        widths = [max(len(row[column]) for row in rows) for column in range(columns)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        parts.append("\n".join([title, *(f"  {line}" for line in lines)]))
    for title, sentences in _lists(report):
        parts.append("\n".join([title, *(f"  - {sentence}" for sentence in sentences)]))
    return "\n\n".join(parts)


def show(report: Report) -> None:
    """Tables in the terminal; plain lines where rich can't be had."""
    try:
        from rich.console import Console  # noqa: PLC0415  # it may be what is broken
        from rich.table import Table  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        console = Console(highlight=False)
        for title, rows in _tables(report):
            table = Table(title=title, title_justify="left", title_style="bold", show_header=False)
            for row in rows:
                table.add_row(*(Text(cell, _STYLES.get(cell, "")) for cell in row))
            console.print(table)
        for title, sentences in _lists(report):
            console.print(Text(title, "bold"))
            for sentence in sentences:
                console.print(Text(f"  - {sentence}"))
    except Exception:  # noqa: BLE001  # the report matters more than how it looks
        print(as_text(report))


_STYLES = {"ok": "green", "missing": "dim", "broken": "bold red", "too old": "yellow"}


def _tables(report: Report) -> list[tuple[str, Rows]]:
    return [("This machine", _machine(report)), ("Packages", _packages(report))]


def _lists(report: Report) -> list[tuple[str, Sequence[str]]]:
    missing = [f"{one.what}, for {one.use}: {one.command}" for one in report.missing]
    lists = (("Warnings", report.warnings), ("Could be installed", missing))
    return [(title, sentences) for title, sentences in lists if sentences]


def _machine(report: Report) -> Rows:
    cores, memory = report.cores, report.memory
    of_cores = f"{cores.logical} logical, {cores.usable} for this process"
    if cores.limit is not None:
        of_cores += f", {cores.limit:g} granted by the container"
    sizes = [("in all", memory.total), ("free", memory.free), ("granted by the container", memory.limit)]
    of_memory = ", ".join(f"{size / 2**30:.1f} GiB {what}" for what, size in sizes if size is not None)
    rows = [
        *report.versions.items(),
        ("cores", of_cores),
        ("memory", of_memory or "not known"),
        *(("BLAS", _blas(pool)) for pool in report.blas),
        ("NVIDIA driver", _driver(report.found[CUDA])),
        (
            "GPUs",
            "; ".join(f"{gpu['name']}, {gpu['bytes'] / 2**30:.1f} GiB" for gpu in report.gpus) or "none",
        ),
        ("mpiexec", report.mpiexec or "none"),
    ]
    return [(name, str(value)) for name, value in rows]


def _driver(found: Found) -> str:
    if found.state is State.MISSING:
        return "none"
    return found.problem or f"for CUDA {found.version}" + (
        f", {found.facts['gpu_problem']}" if "gpu_problem" in found.facts else ""
    )


def _blas(pool: dict[str, Any]) -> str:
    threads = "threads not known" if pool["threads"] is None else f"{pool['threads']} thread(s)"
    kernels = f", {pool['kernels']} kernels" if pool["kernels"] else ""
    return f"{pool['name']} {pool['version']}, {threads}{kernels}"


def _packages(report: Report) -> Rows:
    rows: Rows = []
    for package in PACKAGES:
        found = report.found[package.name]
        rows.append((package.name, found.version or "", found.state.value, package.use, _details(found)))
    return rows


def _details(found: Found) -> str:
    if found.problem and found.state is not State.MISSING:
        return found.problem
    facts = found.facts
    words = {
        "cuda_runtime": "CUDA {}",
        "cuda": "CUDA {}",
        "cuda_driver": "driver for CUDA {}",
        "gpu_problem": "no GPU: {}",
        "nccl": "NCCL {}",
        "nccl_problem": "no NCCL: {}",
        "library": "{}",
        "library_problem": "no MPI library: {}",
        "jaxlib": "jaxlib {}",
        "threads": "{} threads",
    }
    return ", ".join(text.format(facts[name]) for name, text in words.items() if facts.get(name) is not None)


def _package(found: Found, command: str | None) -> dict[str, Any]:
    told = {name: value for name, value in found.facts.items() if name not in ("gpus", "pools", "blas")}
    return {
        "state": found.state.value,
        "version": found.version,
        "problem": found.problem,
        "install": command,
        **told,
    }
