"""Cases that several processes evaluate, each the same steps: a job of real processes that stays for the whole theme."""

from __future__ import annotations

import atexit
import warnings

from collectives.processes import join
from tests.conformance.adapter import Adapter
from tests.conformance.interp import Case, Encoded, Interp
from tests.jobs import Job, ProcessFailedError

_TIMEOUT = 30.0
"""Seconds for one case; replicas wait for one another for less than that."""

_jobs: dict[int, Job] = {}


def evaluate_on_workers(case: Case) -> Encoded:
    """The list of what the case gives on each worker; where it is an error, and the same is expected, that error."""
    num_workers = int(case["workers"])
    if num_workers not in _jobs:
        job = _jobs[num_workers] = Job(num_workers, _TIMEOUT)
        atexit.register(job.close)
    job = _jobs[num_workers]
    try:
        results = job.run(_evaluate_here, case)
    except ProcessFailedError as failure:
        return {"list": [{"error": [f"{failure}"]}] * num_workers}
    if any("error" in str(result) for result in results):
        # A step that failed in one process has ended the job for all of them.
        job.close()
    if all(_is_error(result) for result in results) and _is_error(case["expect"]):
        return results[0]
    return {"list": results}


def _evaluate_here(case: Case) -> Encoded:
    adapter = Adapter(join().process, int(case["workers"]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a case may do what deserves a warning
        try:
            return Interp(adapter).run_case(case)
        finally:
            adapter.close()


def _is_error(encoded: Encoded) -> bool:
    return isinstance(encoded, dict) and "error" in encoded
