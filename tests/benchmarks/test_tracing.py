"""The benchmark of what it costs to watch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.command_line import run


def test_records_and_steps_are_measured_with_and_without(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "out.json"
    assert run(["tracing", "--quick", "--json", str(path)]) == 0
    record, step = json.loads(path.read_text())["results"]["tracing"]
    assert 0 < record["added_us"] < 50
    assert (step["replicas"], step["batch"], step["wrong"]) == (2, 32, 0)
    assert step["ratio"] == pytest.approx(step["traced"]["p50_us"] / step["untraced"]["p50_us"])
    assert "added" in capsys.readouterr().out
