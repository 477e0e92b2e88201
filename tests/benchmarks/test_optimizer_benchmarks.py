"""The benchmarks of optimizers: small sizes, right results."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from benchmarks.command_line import run


def test_sparse_adagrad_is_measured_and_agrees_with_numpy(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "out.json"
    assert run(["sparse_adagrad", "--quick", "--json", str(path)]) == 0
    rows = {row["who"]: row for row in json.loads(path.read_text())["results"]["sparse_adagrad"]}
    assert {"OneDevice", "Mirrored"} <= set(rows)
    assert all(row["wrong"] == 0 for row in rows.values())
    assert "one step of sparse Adagrad" in capsys.readouterr().out
    if "torch" in rows:
        ratio = rows["torch"]["p50_us"] / rows["OneDevice"]["p50_us"]
        assert rows["OneDevice"]["torch_to_this"] == pytest.approx(ratio)


def test_clipping_is_compared_with_a_pass_over_the_bytes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "out.json"
    assert run(["clipping", "--quick", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["results"]["clipping"]
    assert [(row["strategy"], row["wrong"]) for row in rows] == [("OneDevice", 0), ("Mirrored", 0)]
    for row in rows:
        base = row["plain"]["p50_us"] + row["pass"]["p50_us"]
        assert row["ratio"] == pytest.approx(row["clipped"]["p50_us"] / base)
    assert "200 x 1000" in capsys.readouterr().out


def test_torch_asked_for_must_be_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        run(["sparse_adagrad", "--quick", "--against", "torch"])
    assert "--against torch: torch is not installed beside this Python" in capsys.readouterr().err
