"""The protocol between the suite and a rival's process."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from benchmarks.rivals import rival as rivals
from benchmarks.rivals.rival import Rival, RivalError, find_rival_python

RIVAL = """
import json, sys
print(json.dumps({"Stand-in": "1.0", "logical CPUs": int(sys.argv[1]), "import_seconds": 0.5}), flush=True)
for line in sys.stdin:
    verb, _, rest = line.strip().partition(" ")
    if verb == "quit":
        break
    name, _, details = rest.partition(" ")
    given = json.loads(details)
    if name == "dies":
        print("the last words", file=sys.stderr)
        sys.exit(3)
    if name == "fails":
        print(json.dumps({"error": f"{line.strip()}: no such thing"}), flush=True)
    else:
        print(json.dumps({"seconds": [given["replicas"]] * given["iterations"], "wrong": 1}), flush=True)
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that speaks the protocol, known under the name ``stand_in``."""
    path = tmp_path / "stand_in_rival.py"
    path.write_text(RIVAL, encoding="utf-8")
    monkeypatch.setitem(rivals.PROGRAMS, "stand_in", path)
    return path


def test_a_rival_says_who_it_is_measures_and_ends(program: Path) -> None:
    with Rival("stand_in", sys.executable, 2) as rival:
        assert rival.describe() == "# rival    Stand-in 1.0, logical CPUs 2"
        assert rival.measure("run", 3, replicas=2) == [2.0, 2.0, 2.0]
        assert rival.case("reduce", replicas=1)(2) == [1.0, 1.0]
        assert rival.num_wrong == 2


def test_what_a_rival_fails_at_is_told(program: Path) -> None:
    with Rival("stand_in", sys.executable, 2) as rival, pytest.raises(RivalError, match="no such thing"):
        rival.measure("fails", 1)


def test_the_last_words_of_a_rival_that_dies_are_told(program: Path) -> None:
    with (
        Rival("stand_in", sys.executable, 2) as rival,
        pytest.raises(RivalError, match="status 3: the last words"),
    ):
        rival.measure("dies", 1)


def test_a_rival_that_cannot_be_run_is_told(program: Path, tmp_path: Path) -> None:
    with pytest.raises(RivalError, match=r"could not be run .* need an interpreter that has stand_in"):
        Rival("stand_in", str(tmp_path / "no-python"), 2)


def test_a_missing_rival_asks_for_an_interpreter_that_has_it() -> None:
    with pytest.raises(RivalError, match="name it with --rival-python PATH"):
        find_rival_python("no_such_package", None)
    assert find_rival_python("no_such_package", "its-python") == "its-python"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="tensorflow is not installed")
def test_tensorflow_measures_every_case_and_agrees_with_numpy() -> None:
    with Rival("tensorflow", sys.executable, 2) as rival:
        for mode in ("eager", "function"):
            for replicas in (1, 2):
                for returns in ("nothing", "number"):
                    assert len(rival.measure("run", 2, replicas=replicas, mode=mode, returns=returns)) == 2
                rival.measure("merge_call", 2, replicas=replicas, mode=mode)
                rival.measure("mlp", 2, replicas=replicas, batch=8, mode=mode)
            for ops in ("default", "reduction_to_one_device"):
                rival.measure("all_reduce", 2, replicas=2, num_bytes=64, mode=mode, cross_device_ops=ops)
        rival.measure("reduce", 2, replicas=2, num_bytes=64)
        assert rival.num_wrong == 0
