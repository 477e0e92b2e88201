"""Which cases are run: those of this folder, or of another one with ``--cases DIR``."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.conformance.interp import Case

OWN = Path(__file__).parent / "cases"
DEVIATED = pytest.StashKey[Counter[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases", metavar="DIR", help=f"run every *.jsonl of this folder instead of {OWN.name}/"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[DEVIATED] = Counter()
    # Also where the tests themselves are started in several processes, each runs all cases.
    config.addinivalue_line("filterwarnings", "ignore:.*each of them trains on its own:UserWarning")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "recorded" not in metafunc.fixturenames:
        return
    # Without this folder on the command line pytest has not asked for our options.
    folder = Path(metafunc.config.getoption("--cases", default=None) or OWN)
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise pytest.UsageError(f"--cases: got {folder}, which holds no *.jsonl; need a folder of case files")
    cases: dict[str, Case] = {}
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.strip():
                case = json.loads(line)
                name = case["id"] if case["id"] not in cases else f"{case['id']} in {file.stem}"
                cases[name] = case
    metafunc.parametrize("recorded", cases.values(), ids=list(cases))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    deviated = config.stash.get(DEVIATED, Counter())
    if deviated:
        terminalreporter.section("cases that contradict a decision of ours, and agree with it instead")
        for name, count in sorted(deviated.items()):
            terminalreporter.line(f"{count:4d}  {name}")
