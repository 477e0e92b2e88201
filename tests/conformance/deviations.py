"""Where we decided against TensorFlow's behaviour: which cases that concerns, why, and what must come out instead.

A deviation is recognised by what a case does, not by its name. What must come out is told in one of two ways: by a
rewriting of the case into operations on which both agree, or by a computation on TensorFlow's own result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

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

_DENSE = ("assign", "assign_add", "assign_sub")
_SCATTER = tuple(f"scatter_{kind}" for kind in ("add", "sub", "mul", "div", "min", "max", "update"))
_WIDE = {"bool": "int64", "int8": "int64", "int16": "int64", "uint8": "uint64", "uint16": "uint64"}


@final
@dataclass(frozen=True)
class Deviation:
    """One decision.

    Attributes:
        name: a few words for the report.
        reason: why ours is better.
        ours: what we do.
        expected: our result of a case, or None if the case does not concern this decision.
        tol: in the place of the case's, where numbers are only about the same.
        any_order: whether lists are compared as sets, as what replicas log comes in any order.
    """

    name: str
    reason: str
    ours: str
    expected: Callable[[Case, Evaluate], Encoded | None]
    tol: dict[str, float] | None = None
    any_order: bool = False


def by(rule: Rule) -> Callable[[Case, Evaluate], Encoded | None]:
    """Expects what the case gives after rewriting."""

    def expected(case: Case, evaluate: Evaluate) -> Encoded | None:
        changed = rewritten(case, rule)
        return None if changed is None else evaluate(changed)

    return expected


# ------------------------------------------------------------------------ variables


def _unaggregated_write(op: Operation) -> Expression | None:
    writes = op.name in (*_DENSE, *_SCATTER) and op.view is View.REPLICA and op.is_mirrored
    return ["raise", "ValueError"] if writes and op.variable() == ("ON_WRITE", "NONE") else None


def _per_replica_across(op: Operation) -> Expression | None:
    variable = op.variable() if op.name in _DENSE and op.view is View.ACROSS and op.is_mirrored else None
    distributed = is_call(op.argument(1), "per_replica", "values_from_function", "run")
    return ["raise", "ValueError"] if variable and variable[0] == "ON_WRITE" and distributed else None


def _add_across_on_read_sum(op: Operation) -> Expression | None:
    adds = op.name in ("assign_add", "assign_sub") and op.view is View.ACROSS and op.is_mirrored
    if not adds or op.variable() != ("ON_READ", "SUM"):
        return None
    variable, delta = op.args[:2]
    nothing = ["sub", delta, delta]
    once = ["per_replica", delta, *[nothing] * (op.num_replicas - 1)]
    change = ["fn", ["component", "delta"], [op.name, "$component", "$delta"]]
    return ["seq", ["update", variable, change, ["list", once]], ["read", variable]]


def _literal_summed(op: Operation) -> Expression | None:
    """A Python number that all replicas write to a variable which sums."""
    writes = op.name in _DENSE and op.view is View.REPLICA and op.is_mirrored
    value = op.argument(1)
    if not writes or op.variable() != ("ON_WRITE", "SUM") or type(value) not in (int, float):
        return None
    return [op.name, op.args[0], _array_of(value, floats="float32", integers="int32")]


def _central_update(op: Operation) -> Expression | None:
    if op.name != "update" or op.case.get("strategy") != "central_storage" or op.num_replicas == 1:
        return None
    given = op.args[2][1:] if len(op.args) > 2 else []
    values = [*given, *(op.args[3].values() if len(op.args) > 3 and isinstance(op.args[3], dict) else [])]
    distributed = any(is_call(resolved(value, op.names), "per_replica", "run") for value in values)
    return ["raise", "ValueError"] if op.variable() and distributed else None


# ---------------------------------------------------------------------- collectives


def _different_calls(op: Operation) -> Expression | None:
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


def _scalar_in_all_reduce(op: Operation) -> Expression | None:
    if op.name != "all_reduce" or not _has_number(op.args[1]):
        return None
    return ["all_reduce", op.args[0], _arrays_for_numbers(op.args[1])]


def _empty_structure(op: Operation) -> Expression | None:
    return op.args[1] if op.name == "all_reduce" and op.args[1] in (["list"], ["tuple"], {}) else None


def _has_number(value: Expression) -> bool:
    if isinstance(value, dict):
        return any(map(_has_number, value.values()))
    if is_call(value, "list", "tuple", "pick"):
        return any(map(_has_number, value[1:]))
    return type(value) in (int, float, bool)


def _arrays_for_numbers(value: Expression) -> Expression:
    if isinstance(value, dict):
        return {key: _arrays_for_numbers(item) for key, item in value.items()}
    if is_call(value, "list", "tuple", "pick"):
        return [value[0], *map(_arrays_for_numbers, value[1:])]
    return _array_of(value) if type(value) in (int, float) else value


def _array_of(number: float, floats: str = "float64", integers: str = "int64") -> Expression:
    return ["arr", number, floats if isinstance(number, float) else integers]


def _leaf_by_leaf(op: Operation) -> Expression | None:
    """A structure in one call, of which every leaf is reduced in a call of its own."""
    if op.name != "all_reduce" or not is_call(op.args[1], "list", "tuple") or len(op.args[1]) < 3:
        return None
    return [op.args[1][0], *(["all_reduce", op.args[0], leaf] for leaf in op.args[1][1:])]


def _narrow_integers(op: Operation) -> Expression | None:
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


def _hierarchical_odd(case: Case, evaluate: Evaluate) -> Encoded | None:
    if case.get("strategy") != "mirrored_hier" or case["replicas"] % 2 == 0:
        return None
    return evaluate({**case, "strategy": "mirrored"})


def _batch_to_device(op: Operation) -> Expression | None:
    pairs = op.args[1][1:] if op.name == "batch_reduce_to" and is_call(op.args[1], "list") else []
    if not any(is_call(pair, "tuple") and isinstance(pair[2], str) and pair[2][0] != "$" for pair in pairs):
        return None
    return ["list", *(["reduce_to", op.args[0], *pair[1:]] for pair in pairs)]


# --------------------------------------------------------------------------- order


def _logged_in_steps(case: Case, evaluate: Evaluate) -> Encoded | None:
    """What the replicas log is the same, in any order; one that raises stops no other."""
    logs = [op for op in operations(case) if op.name == "log" and op.view is View.REPLICA]
    if not logs or case["replicas"] == 1:
        return None
    changed = rewritten(case, _raise_afterwards)
    return case["expect"] if changed is None else evaluate(changed)


def _raise_afterwards(op: Operation) -> Expression | None:
    if op.name != "run" or not is_call(op.args[0], "fn"):
        return None
    raised = [name for name in _raised(op.args[0])]
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


# ------------------------------------------------------------------------- datasets


def _even_shares(case: Case, evaluate: Evaluate) -> Encoded | None:
    """TensorFlow's rows in TensorFlow's order, cut into whole batches and these into even shares."""
    found = [op for op in operations(case) if op.name == "distribute"]
    last = case["steps"][-1]
    if len(found) != 1 or not is_call(last, "iterate") or "list" not in case["expect"]:
        return None
    sizes = _batch_lengths(resolved(found[0].args[0], found[0].names), found[0].names)
    steps = case["expect"]["list"]
    if sizes is None or not steps:
        return None
    return {"list": _resplit(steps, sizes, case["replicas"])}


def _batch_lengths(dataset: Expression, names: Names) -> list[int] | None:
    """How many rows each batch of a dataset has; None where the text does not tell."""
    dataset = resolved(dataset, names)
    if is_call(dataset, "ds_map", "ds_prefetch", "ds_options"):
        return _batch_lengths(dataset[1], names)
    if is_call(dataset, "ds_repeat") and len(dataset) > 2:
        lengths = _batch_lengths(dataset[1], names)
        return None if lengths is None else lengths * dataset[2]
    if is_call(dataset, "ds_take", "ds_skip"):
        lengths = _batch_lengths(dataset[1], names)
        part = slice(dataset[2]) if dataset[0] == "ds_take" else slice(dataset[2], None)
        return None if lengths is None else lengths[part]
    if is_call(dataset, "ds_batch", "ds_padded_batch"):
        rows = _num_rows(dataset[1], names)
        if rows is None:
            return None
        full, rest = divmod(rows, dataset[2])
        dropped = len(dataset) > 3 and dataset[3]
        return [dataset[2]] * full + ([rest] if rest and not dropped else [])
    return None


def _num_rows(dataset: Expression, names: Names) -> int | None:
    """How many elements an unbatched dataset has; None where the text does not tell."""
    dataset = resolved(dataset, names)
    if is_call(dataset, "ds_range"):
        return int(dataset[1])
    if is_call(dataset, "ds_slices"):
        arrays = dataset[1]
        while isinstance(arrays, dict) or is_call(arrays, "tuple", "list"):
            arrays = next(iter(arrays.values())) if isinstance(arrays, dict) else arrays[1]
        return len(arrays[1]) if is_call(arrays, "f", "i", "arr") else None
    if is_call(dataset, "ds_map", "ds_interleave_pad", "ds_prefetch", "ds_options"):
        return _num_rows(dataset[1], names)
    if is_call(dataset, "ds_repeat", "ds_take", "ds_skip") and len(dataset) > 2:
        rows = _num_rows(dataset[1], names)
        if rows is None:
            return None
        return {
            "ds_repeat": rows * dataset[2],
            "ds_take": min(rows, dataset[2]),
            "ds_skip": max(0, rows - dataset[2]),
        }[dataset[0]]
    return None


def _resplit(steps: Sequence[Encoded], sizes: Sequence[int], num_replicas: int) -> list[Encoded]:
    first = steps[0]
    if isinstance(first, dict) and "per_replica" not in first and "a" not in first:
        (kind,) = [key for key in first if key in ("tuple", "list", "dict", "fields")]
        keys = range(len(first[kind])) if isinstance(first[kind], list) else list(first[kind])
        columns = {key: _resplit([step[kind][key] for step in steps], sizes, num_replicas) for key in keys}
        whole = [
            [columns[key][i] for key in keys] if kind in ("tuple", "list") else {key: columns[key][i] for key in keys}
            for i in range(len(sizes))
        ]
        return [{**first, kind: items} for items in whole]
    parts = [part for step in steps for part in step.get("per_replica", [step])]
    dtype = parts[0]["dtype"]
    rows = [row for part in parts for row in part["a"]]
    inner = next(np.array(part["a"]).shape[1:] for part in parts if part["a"])
    batches, start = [], 0
    for size in sizes:
        shares = _even(rows[start : start + size], num_replicas)
        start += size
        batches.append({"per_replica": [_encode_rows(share, dtype, inner) for share in shares]})
    return batches


def _even(rows: list[Any], num_shares: int) -> list[list[Any]]:
    """Sizes differ by one at most, the larger ones first."""
    bounds = [-(-len(rows) * share // num_shares) for share in range(num_shares + 1)]
    lengths = sorted((stop - start for start, stop in zip(bounds, bounds[1:], strict=False)), reverse=True)
    stops = np.cumsum(lengths).tolist()
    return [rows[stop - length : stop] for stop, length in zip(stops, lengths, strict=True)]


def _encode_rows(rows: list[Any], dtype: str, inner: tuple[int, ...]) -> Encoded:
    encoded = {"a": rows, "dtype": dtype}
    return encoded if rows and 0 not in inner else {**encoded, "shape": [len(rows), *inner]}


def _last_round(case: Case, evaluate: Evaluate) -> Encoded | None:
    """A last round of a dataset function that has elements for some replicas only."""
    if not any(op.name == "distribute_fn" for op in operations(case)):
        return None
    changed = rewritten(case, _keep_batch_axis_open)
    if changed is not None:
        return evaluate(changed)
    batched = any(op.name in ("ds_batch", "ds_padded_batch") for op in operations(case))
    return None if batched else {"error": "ValueError"}


def _keep_batch_axis_open(op: Operation) -> Expression | None:
    """Whole batches, of which it can't be seen beforehand that they are whole."""
    if op.name != "ds_batch" or len(op.args) < 3 or op.args[2] is not True:
        return None
    rows = _num_rows(op.args[0], op.names)
    return None if rows is None else ["ds_take", ["ds_batch", *op.args[:2], False], rows // op.args[1]]


# ----------------------------------------------------------------------- optimizers


def _adam(case: Case, evaluate: Evaluate) -> Encoded | None:
    return case["expect"] if any('"adam"' in _text(step) for step in case["steps"]) else None


def _text(expression: Expression) -> str:
    return str(expression).replace("'", '"')


def _new_variable(case: Case, evaluate: Evaluate) -> Encoded | None:
    """A variable that comes later is updated as by a new optimizer of the same kind."""
    known: dict[str, list[Expression]] = {}
    later: set[str] = set()

    def rule(op: Operation) -> Expression | None:
        if op.name != "apply":
            return None
        variables = [pair[2] for pair in op.args[1][1:]]
        first = known.setdefault(op.args[0], variables)
        if all(variable in first for variable in variables):
            return None
        later.add(op.args[0][1:])
        return ["apply", f"{op.args[0]}_later", op.args[1]]

    changed = rewritten(case, rule)
    if changed is None:
        return None
    steps = []
    for step in changed["steps"]:
        steps.append(step)
        if is_call(step, "let") and step[1] in later:
            steps.append(["let", f"{step[1]}_later", step[2]])
    return evaluate({**changed, "steps": steps})


DEVIATIONS = (
    Deviation(
        "unaggregated write in a replica",
        "TensorFlow lets the copies of an ON_WRITE variable diverge silently; they would never be equal again",
        "a ValueError that names the variable and the ways out; nothing is written",
        by(_unaggregated_write),
    ),
    Deviation(
        "PerReplica assigned across replicas",
        "TensorFlow gives each copy of an ON_WRITE variable its own value, so that the copies diverge silently",
        "a ValueError; nothing is written",
        by(_per_replica_across),
    ),
    Deviation(
        "assign_add across replicas on ON_READ/SUM",
        "users of four projects took TensorFlow's refusal for a bug; the sum has an obvious meaning",
        "the value is added once, so that the next read is exactly the old value and the change",
        by(_add_across_on_read_sum),
    ),
    Deviation(
        "a number that all replicas write",
        "TensorFlow tells by identity whether replicas pass the same object, and refuses to sum it",
        "a number is a value like any other: it is summed over the replicas",
        by(_literal_summed),
    ),
    Deviation(
        "update of a central variable by a PerReplica",
        "TensorFlow takes replica 0's value and drops the others silently",
        "a ValueError that says how to reduce the value first",
        by(_central_update),
    ),
    Deviation(
        "different calls on different replicas",
        "TensorFlow pairs merge points by order only and runs replica 0's function for all",
        "a CollectiveMismatchError that names each replica and its call",
        by(_different_calls),
    ),
    Deviation(
        "a Python number in all_reduce",
        "it fails in TensorFlow by accident",
        "a number is reduced as an array without axes",
        by(_scalar_in_all_reduce),
    ),
    Deviation(
        "an empty structure in all_reduce",
        "it fails in TensorFlow by accident",
        "it is given back",
        by(_empty_structure),
    ),
    Deviation(
        "leaves of several dtypes in one all_reduce",
        "TensorFlow reduces int32 by another implementation and refuses the mixture",
        "every leaf is reduced in its own dtype",
        by(_leaf_by_leaf),
    ),
    Deviation(
        "booleans and narrow integers",
        "TensorFlow refuses them or lets them wrap around",
        "sums are int64 or uint64, as numpy.sum's; 32 and 64 bits keep their dtype; means are float64, as numpy.mean's",
        by(_narrow_integers),
    ),
    Deviation(
        "HierarchicalCopyAllReduce of an odd number of replicas",
        "TensorFlow makes two groups of n // 2 and loses the last replica's contribution",
        "the same result as every other way to communicate",
        _hierarchical_odd,
    ),
    Deviation(
        "batch_reduce_to a device",
        "TensorFlow gives as many copies as there are replicas, unlike its reduce_to",
        "the same as reduce_to: one array for one device",
        by(_batch_to_device),
    ),
    Deviation(
        "replicas run at the same time",
        "TensorFlow's eager replicas take turns, in order, up to the next merge point",
        "they overlap, so what they do alone happens in any order, and an error in one stops no other",
        _logged_in_steps,
        any_order=True,
    ),
    Deviation(
        "shares of a global batch",
        "TensorFlow's default split gives replicas ceil(rows / n) until none are left, its documented one mixes the rows of "
        "neighbouring batches; both leave replicas idle that could work",
        "every batch is split by its own size, as evenly as possible, the first replicas getting one row more",
        _even_shares,
    ),
    Deviation(
        "the last round of a dataset function",
        "TensorFlow drops it silently where element shapes are static",
        "no element is dropped: replicas without one get an empty batch; scalars, which have no empty form, are a ValueError",
        _last_round,
    ),
    Deviation(
        "Adam's bias correction",
        "TensorFlow computes 1 - beta ** t in float32, which costs digits",
        "it is computed in double precision; weights differ in the sixth digit",
        _adam,
        tol={"rtol": 5e-6, "atol": 2e-6},
    ),
    Deviation(
        "a variable that the optimizer meets later",
        "Keras knows only the variables of its first update",
        "slots are made for a variable when it is first updated",
        _new_variable,
    ),
)


def find(case: Case, evaluate: Evaluate) -> list[tuple[Deviation, Encoded]]:
    """The decisions that a case contradicts, each with what must come out."""
    found = ((deviation, deviation.expected(case, evaluate)) for deviation in DEVIATIONS)
    return [(deviation, expected) for deviation, expected in found if expected is not None]
