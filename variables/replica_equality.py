"""A check for what must never happen: copies that have drifted apart."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from collectives.arrays import Array, describe_kind
from collectives.calls import Call
from collectives.errors import common
from collectives.link import Link
from collectives.linked import broadcast_over
from variables.replica_context import current_replica
from variables.sharded_variable import ShardedVariable
from variables.variable import Variable


def assert_replicas_equal(variables: Variable | Iterable[Variable]) -> None:
    """Check that the copies of each variable are equal to the last bit.

    Of strategies of several processes, those of all processes, which all call it with the same variables; they compare digests.

    Args:
        variables: one or several; those with one copy pass.

    Raises:
        AssertionError: they differ; it names the variable, the copies and the first element that differs. In several
            processes all of them raise it, and it names the processes.
    """
    variables = [variables] if isinstance(variables, Variable) else variables
    plain = [
        variable
        for one in variables
        for variable in (one.shards if isinstance(one, ShardedVariable) else (one,))
    ]
    problems = [_difference_here(variable) for variable in plain]
    by_link: dict[Link, list[int]] = {}
    for position, variable in enumerate(plain):
        link = None if variable.owner is None or current_replica() is not None else variable.owner.link
        if link is not None:
            by_link.setdefault(link, []).append(position)
    for link, positions in by_link.items():
        _require_equal_over(link, [plain[p] for p in positions], [problems[p] for p in positions])
    for problem in problems:
        if problem is not None:
            raise AssertionError(problem)


def _difference_here(variable: Variable) -> str | None:
    """In what two copies of this process differ, if they do."""
    first, *others = [component.value() for component in variable.components]
    for number, other in enumerate(others, start=1):
        difference = _difference(first, other)
        if difference is not None:
            return f"{variable.name}: copies 0 and {number} differ {difference}; writes must reach all copies"
    return None


def _difference(first: Array, other: Array) -> str | None:
    if first.tobytes() == other.tobytes():
        return None
    # Bytes differ where values compare equal only between 0.0 and -0.0, or between kinds of nan.
    different = np.flatnonzero(~((first == other) & (np.signbit(first) == np.signbit(other))).ravel())
    index = np.unravel_index(int(different[0]) if len(different) else 0, first.shape)
    return (
        f"in {max(1, len(different))} of {first.size} elements, first at {tuple(int(i) for i in index)}: {first[index]} and "
        f"{other[index]}"
    )


def _require_equal_over(link: Link, variables: Sequence[Variable], problems: Sequence[str | None]) -> None:
    """Compare this process's first copies with those of the others."""
    arrays = [np.ascontiguousarray(variable.components[0].value()) for variable in variables]
    kinds = [f"{v.name} {describe_kind(a.dtype, a.shape)}" for v, a in zip(variables, arrays, strict=True)]
    digests = [hashlib.blake2b(array.tobytes(), digest_size=16).digest() for array in arrays]
    own = [(kinds, digests, [problem for problem in problems if problem is not None])]
    told: list[Any] = link.gather_objects(_CHECK, own * link.counts[link.process])
    by_process = [told[start] for start in link.starts[:-1]]
    for process, (kinds_there, _, _) in enumerate(by_process):
        if kinds_there != by_process[0][0]:
            raise common(
                ValueError(
                    f"assert_replicas_equal: process 0 passes {by_process[0][0]}, process {process} {kinds_there}; need the same "
                    "variables on all processes"
                )
            )
    for process, (_, _, problems_there) in enumerate(by_process):
        if problems_there:
            raise common(AssertionError(f"process {process}: {problems_there[0]}"))
    for position, array in enumerate(arrays):
        if len({digests_there[position] for _, digests_there, _ in by_process}) == 1:
            continue
        first = broadcast_over(link, _CHECK, array)
        words = link.gather_objects(_CHECK, [_difference(first, array)] * link.counts[link.process])
        process, difference = next(
            (process, words[start])
            for process, start in enumerate(link.starts[:-1])
            if words[start] is not None
        )
        raise common(
            AssertionError(
                f"{variables[position].name}: the copies of processes 0 and {process} differ {difference}; writes must reach all copies"
            )
        )


_CHECK = Call("assert_replicas_equal")
