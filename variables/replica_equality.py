"""A check for what must never happen: copies that have drifted apart."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import numpy as np

from variables.sharded_variable import ShardedVariable
from variables.variable import Variable


def assert_replicas_equal(variables: Variable | Iterable[Variable]) -> None:
    """Check that the copies of each variable are equal to the last bit.

    Args:
        variables: one or several; those with one copy pass.

    Raises:
        AssertionError: they differ; it names the variable, the copies and the first element that differs.
    """
    variables = [variables] if isinstance(variables, Variable) else variables
    for variable in chain.from_iterable(
        one.shards if isinstance(one, ShardedVariable) else (one,) for one in variables
    ):
        first, *others = [component.value() for component in variable.components]
        for number, other in enumerate(others, start=1):
            if first.tobytes() != other.tobytes():
                # Bytes differ where values compare equal only between 0.0 and -0.0, or between kinds of nan.
                different = np.flatnonzero(
                    ~((first == other) & (np.signbit(first) == np.signbit(other))).ravel()
                )
                index = np.unravel_index(int(different[0]) if len(different) else 0, first.shape)
                raise AssertionError(
                    f"{variable.name}: copies 0 and {number} differ in {max(1, len(different))} of {first.size} elements, first at "
                    f"{tuple(int(i) for i in index)}: {first[index]} and {other[index]}; writes must reach all copies"
                )
