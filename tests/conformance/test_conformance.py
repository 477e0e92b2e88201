"""Every case recorded from TensorFlow gives the same here, or what we decided on instead."""

from __future__ import annotations

import json

import pytest

from tests.conformance.adapter import Adapter
from tests.conformance.conftest import DEVIATED
from tests.conformance.deviations import find
from tests.conformance.interp import Case, Encoded, Interp, same
from tests.conformance.workers import evaluate_on_workers

THEMES = (
    "variables",
    "run",
    "collectives",
    "communication",
    "reduce",
    "indexed_slices",
    "datasets",
    "optimizers",
    "sharded",
    "checkpoint",
    "multi_worker",
)
LATER = {
    "coordinator": "parameter servers and their coordinator are not there yet",
}


def test_case_agrees_with_tensorflow(recorded: Case, pytestconfig: pytest.Config) -> None:
    assert recorded["theme"] in {*THEMES, *LATER}, (
        f"unknown theme {recorded['theme']!r}: add it to THEMES or LATER"
    )
    reason = why_not(recorded)
    if reason is not None:
        pytest.skip(f"{recorded['theme']}: {reason}")
    got = evaluate(recorded)
    if same(recorded["expect"], got, recorded.get("tol")):
        return
    found = find(recorded, evaluate)
    for deviation, expected in found:
        tol = deviation.tol or recorded.get("tol")
        pair = (sort_lists(expected), sort_lists(got)) if deviation.any_order else (expected, got)
        if same(*pair, tol):
            pytestconfig.stash[DEVIATED][deviation.name] += 1
            return
    decided = "".join(f"\n{d.name}: {json.dumps(expected)}" for d, expected in found)
    pytest.fail(
        f"{recorded['what']}\nTensorFlow ({recorded['level']}): {json.dumps(recorded['expect'])}\n"
        f"ours: {json.dumps(got)}{decided}",
        pytrace=False,
    )


def evaluate(case: Case) -> Encoded:
    if case.get("workers", 1) > 1:
        return evaluate_on_workers(case)
    adapter = Adapter()
    try:
        return Interp(adapter).run_case(case)
    finally:
        adapter.close()


def why_not(case: Case) -> str | None:
    """The reason to skip a case, or None."""
    if case["theme"] in LATER:
        return LATER[case["theme"]]
    if case["level"] == "tf-autodiff":
        return "needs automatic differentiation, which this project leaves to others"
    return None


def sort_lists(encoded: Encoded) -> Encoded:
    """The same with the elements of every list in one order."""
    if isinstance(encoded, dict):
        changed = {key: sort_lists(value) for key, value in encoded.items()}
        if "list" in changed:
            changed["list"] = sorted(changed["list"], key=json.dumps)
        return changed
    return [sort_lists(item) for item in encoded] if isinstance(encoded, list) else encoded
