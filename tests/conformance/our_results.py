"""What must come out of a case where we decided against TensorFlow's behaviour.

In one of two ways: by rewriting the case into operations on which both agree, or by a computation on TensorFlow's own
result.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from tests.conformance.interp import Case, Encoded, Expression
from tests.conformance.rewriting import (
    Names,
    Operation,
    Rule,
    View,
    is_call,
    operations,
    resolved,
    rewritten,
)

Evaluate: TypeAlias = Callable[[Case], Encoded]
"""Runs a case on our implementation."""
Expect: TypeAlias = Callable[[Case, Evaluate], Encoded]
"""Our result of a case, or `UNCONCERNED`."""

UNCONCERNED = object()
"""In the place of a result (of which None is one): the case has nothing to do with this decision."""

_DENSE = ("assign", "assign_add", "assign_sub")
_SCATTER = tuple(f"scatter_{kind}" for kind in ("add", "sub", "mul", "div", "min", "max", "update"))
_WIDE = {"bool": "int64", "int8": "int64", "int16": "int64", "uint8": "uint64", "uint16": "uint64"}


def by(rule: Rule) -> Expect:
    """Expects what the case gives after rewriting."""

    def expected(case: Case, evaluate: Evaluate) -> Encoded:
        changed = rewritten(case, rule)
        return UNCONCERNED if changed is None else evaluate(changed)

    return expected


# ------------------------------------------------------------------------ variables


def unaggregated_write(op: Operation) -> Expression | None:
    writes = op.name in (*_DENSE, *_SCATTER) and op.view is View.REPLICA and op.is_mirrored
    return ["raise", "ValueError"] if writes and op.variable() == ("ON_WRITE", "NONE") else None


def per_replica_across(op: Operation) -> Expression | None:
    variable = op.variable() if op.name in _DENSE and op.view is View.ACROSS and op.is_mirrored else None
    distributed = is_call(op.argument(1), "per_replica", "values_from_function", "run")
    return ["raise", "ValueError"] if variable and variable[0] == "ON_WRITE" and distributed else None


def add_across_on_read_sum(op: Operation) -> Expression | None:
    adds = op.name in ("assign_add", "assign_sub") and op.view is View.ACROSS and op.has_copies
    if not adds or op.variable() != ("ON_READ", "SUM"):
        return None
    variable, delta = op.args[:2]
    nothing = ["sub", delta, delta]
    once = ["per_replica", delta, *[nothing] * (op.num_replicas - 1)]
    change = ["fn", ["component", "delta"], [op.name, "$component", "$delta"]]
    return ["seq", ["update", variable, change, ["list", once]], ["read", variable]]


def first_of_all(op: Operation) -> Expression | None:
    """What a variable takes from its first replica, on several workers: from the first of all, not of each."""
    if op.case.get("workers", 1) == 1 or not op.has_copies:
        return None
    kind = op.variable() if op.name in (*_DENSE, "read") else None
    if op.name in _DENSE and op.view is View.REPLICA and kind == ("ON_WRITE", "ONLY_FIRST_REPLICA"):
        first = ["all_reduce", "SUM", _of_first(op, op.args[1])]
        return [op.name, op.args[0], first, *op.args[2:]]
    if op.name == "read" and op.view is View.ACROSS and kind == ("ON_READ", "ONLY_FIRST_REPLICA"):
        return ["reduce", "SUM", ["run", ["fn", [], _of_first(op, ["value", op.args[0]])]], None]
    return None


def _of_first(op: Operation, value: Expression) -> Expression:
    """Replica 0's value there, and nothing on the others: the sum of all is what replica 0 has."""
    nothing = ["sub", value, value]
    return ["pick", value, *[nothing] * (op.num_replicas - 1)]


def literal_summed(op: Operation) -> Expression | None:
    """A Python number that all replicas write to a variable which sums."""
    writes = op.name in _DENSE and op.view is View.REPLICA and op.is_mirrored
    value = op.argument(1)
    if not writes or op.variable() != ("ON_WRITE", "SUM") or type(value) not in (int, float):
        return None
    return [op.name, op.args[0], ["arr", value, "float32" if isinstance(value, float) else "int32"]]


def central_update(op: Operation) -> Expression | None:
    if op.name != "update" or op.case.get("strategy") != "central_storage" or op.num_replicas == 1:
        return None
    given = op.args[2][1:] if len(op.args) > 2 else []
    values = [*given, *(op.args[3].values() if len(op.args) > 3 and isinstance(op.args[3], dict) else [])]
    distributed = any(is_call(resolved(value, op.names), "per_replica", "run") for value in values)
    return ["raise", "ValueError"] if op.variable() and distributed else None


# ---------------------------------------------------------------------- collectives


def different_calls(op: Operation) -> Expression | None:
    """A step in which the replicas make equally many, but different calls."""
    if op.name != "run" or not op.is_mirrored or not is_call(op.args[0], "fn"):
        return None
    by_replica = [_calls(op.args[0][2:], replica, op.names) for replica in range(op.num_replicas)]
    differ = any(calls != by_replica[0] for calls in by_replica)
    as_many = all(len(calls) == len(by_replica[0]) for calls in by_replica)
    return ["raise", "CollectiveMismatchError"] if differ and as_many else None


def _calls(expression: Expression, replica: int, names: Names) -> list[Any]:
    """What one replica calls on all, in order, as far as it can be told from the text."""
    if isinstance(expression, dict):
        return [call for value in expression.values() for call in _calls(value, replica, names)]
    if not isinstance(expression, list) or not expression:
        return []
    name, args = expression[0], expression[1:]
    if name == "pick":
        return _calls(args[replica], replica, names)
    if name == "if" and is_call(args[0], "pick") and isinstance(args[0][1 + replica], bool):
        branches = args[1:]
        chosen = 0 if args[0][1 + replica] else 1
        return _calls(branches[chosen], replica, names) if chosen < len(branches) else []
    if name == "fn":
        return []
    inner = [call for arg in expression for call in _calls(arg, replica, names)]
    if name == "all_reduce":
        return [*inner, (name, str(args[0]).upper())]
    if name == "all_gather":
        return [*inner, (name, args[1])]
    if name == "merge_call":
        return [*inner, (name, repr(resolved(args[0], names)))]
    return inner


def scalar_in_all_reduce(op: Operation) -> Expression | None:
    """Python numbers, of which the result can be told at once, and is one again."""
    known = op.name == "all_reduce" and str(op.args[0]).upper() in ("SUM", "MEAN")
    return _reduced(op, op.args[1]) if known and _has_number(op.args[1]) else None


def _reduced(op: Operation, value: Expression) -> Expression:
    if isinstance(value, dict):
        return {key: _reduced(op, item) for key, item in value.items()}
    if is_call(value, "list", "tuple"):
        return [value[0], *(_reduced(op, item) for item in value[1:])]
    numbers = value[1:] if is_call(value, "pick") else [value] * op.num_replicas
    if not all(map(_has_number, numbers)):
        return ["all_reduce", op.args[0], value]
    function = np.sum if str(op.args[0]).upper() == "SUM" else np.mean
    result = json.dumps(function(numbers, axis=0).item())
    # Each replica has an object of its own, as far as Python makes them.
    return ["pick", *(json.loads(result) for _ in range(op.num_replicas))]


def empty_structure(op: Operation) -> Expression | None:
    reduces = op.name in ("all_reduce", "batch_reduce_to")
    return op.args[1] if reduces and op.args[1] in (["list"], ["tuple"], {}) else None


def other_reductions(case: Case, evaluate: Evaluate) -> Encoded:
    """MAX, MIN and PROD as the last thing that a case does, computed from what it is done to."""
    ufuncs = {"MAX": np.maximum, "MIN": np.minimum, "PROD": np.multiply}
    found: list[tuple[str, np.ufunc]] = []

    def rule(op: Operation) -> Expression | None:
        known = op.name in ("all_reduce", "reduce") and str(op.args[0]).upper() in ufuncs
        if not known or (op.name == "reduce" and op.args[2:] not in ([], [None])):
            return None
        found.append((op.name, ufuncs[str(op.args[0]).upper()]))
        return op.args[1]

    changed = rewritten(case, rule)
    parts = evaluate(changed) if changed is not None else None
    components = _components(parts, case)
    if len(found) != 1 or not all(isinstance(part, dict) and "a" in part for part in components):
        return UNCONCERNED
    if not components:
        return UNCONCERNED
    name, ufunc = found[0]
    arrays = [np.array(part["a"], part["dtype"]) for part in components]
    result = {"a": ufunc.reduce(arrays).tolist(), "dtype": components[0]["dtype"]}
    if case.get("workers", 1) > 1:
        local = len(arrays) // case["workers"]
        own = result if name == "reduce" or local == 1 else {"per_replica": [result] * local}
        return {"list": [own] * case["workers"]}
    return result if name == "reduce" else {"per_replica": [result] * len(arrays)}


def _components(parts: Encoded, case: Case) -> list[Encoded]:
    """The components of a result on all replicas, those of several workers one after the other; none if it is something else."""
    if not isinstance(parts, dict):
        return []
    if case.get("workers", 1) == 1:
        return list(parts.get("per_replica", []))
    workers = parts.get("list", [])
    return [part for own in workers if isinstance(own, dict) for part in own.get("per_replica", [own])]


def _has_number(value: Expression) -> bool:
    if isinstance(value, dict):
        return any(map(_has_number, value.values()))
    if is_call(value, "list", "tuple", "pick"):
        return any(map(_has_number, value[1:]))
    return type(value) in (int, float)


def leaf_by_leaf(op: Operation) -> Expression | None:
    """A structure in one call, of which every leaf is reduced in a call of its own."""
    if op.name != "all_reduce" or not is_call(op.args[1], "list", "tuple") or len(op.args[1]) < 3:
        return None
    return [op.args[1][0], *(["all_reduce", op.args[0], leaf] for leaf in op.args[1][1:])]


def narrow_integers(op: Operation) -> Expression | None:
    if op.name not in ("all_reduce", "reduce", "reduce_to") or str(op.args[0]).upper() not in ("SUM", "MEAN"):
        return None
    value = resolved(op.args[1], op.names)
    dtype = _dtype_of(value, op.names)
    if dtype not in _WIDE and dtype not in ("uint32", "uint64"):
        return None
    if str(op.args[0]).upper() == "MEAN":
        return [op.name, op.args[0], _cast(value, "float64"), *op.args[2:]]
    if dtype in _WIDE:
        return [op.name, op.args[0], _cast(value, _WIDE[dtype]), *op.args[2:]]
    return ["cast", [op.name, op.args[0], _cast(value, "int64"), *op.args[2:]], dtype]


def _dtype_of(value: Expression, names: Names) -> str | None:
    value = resolved(value, names)
    if is_call(value, "arr", "cast"):
        return str(value[2])
    if is_call(value, "add", "sub", "mul", "pick", "per_replica"):
        return _dtype_of(value[1], names)
    if is_call(value, "run") and is_call(value[1], "fn"):
        return _dtype_of(value[1][-1], names)
    return None


def _cast(value: Expression, dtype: str) -> Expression:
    if is_call(value, "per_replica"):
        return ["per_replica", *(_cast(item, dtype) for item in value[1:])]
    if is_call(value, "run"):
        function = value[1]
        return ["run", [*function[:-1], _cast(function[-1], dtype)], *value[2:]]
    return ["cast", value, dtype]


def hierarchical_odd(case: Case, evaluate: Evaluate) -> Encoded:
    if case.get("strategy") != "mirrored_hier" or case["replicas"] % 2 == 0:
        return UNCONCERNED
    return evaluate({**case, "strategy": "mirrored"})


def batch_to_device(op: Operation) -> Expression | None:
    pairs = op.args[1][1:] if op.name == "batch_reduce_to" and is_call(op.args[1], "list") else []
    if not any(is_call(pair, "tuple") and isinstance(pair[2], str) and pair[2][0] != "$" for pair in pairs):
        return None
    return ["list", *(["reduce_to", op.args[0], *pair[1:]] for pair in pairs)]


# --------------------------------------------------------------------------- order


def logged_in_steps(case: Case, evaluate: Evaluate) -> Encoded:
    """What the replicas log is the same, in any order; one that raises stops no other."""
    logs = [op for op in operations(case) if op.name == "log" and op.view is View.REPLICA]
    if not logs or case["replicas"] == 1:
        return UNCONCERNED
    changed = rewritten(case, _raise_afterwards)
    return case["expect"] if changed is None else evaluate(changed)


def _raise_afterwards(op: Operation) -> Expression | None:
    if op.name != "run" or not is_call(op.args[0], "fn"):
        return None
    raised = _raised(op.args[0])
    if not raised:
        return None
    return ["seq", ["run", _without_raise(op.args[0]), *op.args[1:]], ["raise", raised[0]]]


def _raised(expression: Expression) -> list[str]:
    if is_call(expression, "raise"):
        return [expression[1]]
    return [name for item in expression for name in _raised(item)] if isinstance(expression, list) else []


def _without_raise(expression: Expression) -> Expression:
    if is_call(expression, "raise"):
        return None
    return [_without_raise(item) for item in expression] if isinstance(expression, list) else expression


# ----------------------------------------------------------------------- optimizers


def adam(case: Case, evaluate: Evaluate) -> Encoded:
    return case["expect"] if any('"adam"' in _text(step) for step in case["steps"]) else UNCONCERNED


def clipped_before(op: Operation) -> Expression | None:
    """Bounds on gradients, where it matters whether they are brought together first."""
    if op.name != "apply" or op.num_replicas == 1 or not _BOUNDS & set(_config(op)):
        return None
    pairs = op.args[1][1:] if is_call(op.args[1], "list") else []
    return [op.name, op.args[0], ["list", *(["list", _on_one(op, pair[1]), pair[2]] for pair in pairs)]]


def _on_one(op: Operation, gradient: Expression) -> Expression:
    """The sum of all replicas' gradients as the first one's, and zeros as the others'."""
    if gradient is None:
        return None
    nothing = ["sub", "$total", "$total"]
    picked = ["pick", "$total", *[nothing] * (op.num_replicas - 1)]
    return ["seq", ["let", "total", ["all_reduce", "SUM", gradient]], picked]


def rows_merged(op: Operation) -> Expression | None:
    """Sparse gradients of Adagrad, to which a row that is zero makes no difference: the same as dense ones."""
    made = op.argument(0) if op.name == "apply" else None
    if made is None or not is_call(made, "optimizer") or made[1] != "adagrad":
        return None
    pairs = op.args[1][1:]
    if not any(_has_slices(pair[1], op.names) for pair in pairs):
        return None
    dense = [
        ["list", ["dense", pair[1]] if _has_slices(pair[1], op.names) else pair[1], pair[2]] for pair in pairs
    ]
    return [op.name, op.args[0], ["list", *dense]]


def _has_slices(expression: Expression, names: Names) -> bool:
    expression = resolved(expression, names)
    if is_call(expression, "slices"):
        return True
    return is_call(expression, "pick") and any(_has_slices(item, names) for item in expression[1:])


_BOUNDS = {"clipvalue", "clipnorm", "global_clipnorm"}


def _config(op: Operation) -> dict[str, Any]:
    made = op.argument(0)
    return made[2] if is_call(made, "optimizer") and len(made) > 2 else {}


def _text(expression: Expression) -> str:
    return str(expression).replace("'", '"')
