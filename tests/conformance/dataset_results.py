"""What must come out of a case about datasets where we decided against TensorFlow's behaviour.

As in `our_results`; nothing here is computed by our datasets, but for the last round of a dataset function.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.conformance.interp import Case, Encoded, Expression
from tests.conformance.our_results import UNCONCERNED, Evaluate
from tests.conformance.rewriting import Names, Operation, is_call, operations, resolved, rewritten


def even_shares(case: Case, evaluate: Evaluate) -> Encoded:
    """TensorFlow's rows in TensorFlow's order, every batch cut into even shares."""
    found = [op for op in operations(case) if op.name == "distribute"]
    expect = case["expect"]
    if not found:
        return UNCONCERNED
    if case.get("workers", 1) > 1:
        return _on_workers(case, found[0])
    if any(op.name == "ds_options" and op.args[1] == "OFF" for op in operations(case)):
        # Its steps run over the ends of batches, which have to be found again.
        sizes = _batch_lengths(found[0].args[0], found[0].names)
        if sizes is None or len(found) > 1 or not is_call(case["steps"][-1], "iterate"):
            return UNCONCERNED
        expect = {"list": _in_batches(expect["list"], sizes)}
    return _split_again(expect, case["replicas"])


def _on_workers(case: Case, op: Operation) -> Encoded:
    """As `even_shares`, of what each of several workers sees."""
    own = case["expect"].get("list")
    if own is None:
        return UNCONCERNED
    if not any(other.name == "ds_options" and other.args[1] == "OFF" for other in operations(case)):
        return {"list": _split_over(own, case["replicas"])}
    sizes = _batch_lengths(op.args[0], op.names)
    if sizes is None or not is_call(case["steps"][-1], "iterate"):
        return UNCONCERNED
    local = case["replicas"] // len(own)
    return {
        "list": [
            _all_shares(steps["list"], sizes, case["replicas"], w * local, local)
            for w, steps in enumerate(own)
        ]
    }


def _all_shares(
    steps: Sequence[Encoded], sizes: Sequence[int], num_shares: int, rotation: int, num_local: int
) -> Encoded:
    """The steps of a worker that sees everything: each batch in as many shares as all replicas, beginning with its own sizes."""
    first = steps[0]
    if "per_replica" not in first:
        (kind,) = set(first) & {"tuple", "list", "dict", "fields"}
        keys = list(first[kind]) if isinstance(first[kind], dict) else range(len(first[kind]))
        columns = {
            key: _all_shares([step[kind][key] for step in steps], sizes, num_shares, rotation, num_local)[
                "list"
            ]
            for key in keys
        }
        elements = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        made = [{**first, kind: e if isinstance(first[kind], dict) else list(e.values())} for e in elements]
        return {"list": made}
    rows = _joined([part for step in steps for part in step["per_replica"]])
    shares = []
    at = 0
    for length in sizes:
        size, rest = divmod(length, num_shares)
        for share in range(num_shares):
            stop = at + size + ((share + rotation) % num_shares < rest)
            shares.append(_encode(rows[at:stop]))
            at = stop
    starts = range(0, len(shares), num_local)
    return {"list": [{"per_replica": shares[start : start + num_local]} for start in starts]}


def _split_over(workers: Sequence[Encoded], num_replicas: int) -> list[Encoded]:
    """As `_split_again`, of a PerReplica whose components are spread over workers: their results, by worker."""
    first = workers[0]
    if isinstance(first, list) and all(isinstance(w, list) and len(w) == len(first) for w in workers):
        columns = [_split_over(column, num_replicas) for column in zip(*workers, strict=True)]
        return [list(row) for row in zip(*columns, strict=True)] if columns else list(workers)
    if not isinstance(first, dict) or not all(isinstance(w, dict) and set(w) == set(first) for w in workers):
        return list(workers)
    parts = [part for worker in workers for part in worker.get("per_replica", [])]
    if not parts or not all(isinstance(part, dict) and isinstance(part.get("a"), list) for part in parts):
        split = {key: _split_over([w[key] for w in workers], num_replicas) for key in first}
        return [{key: split[key][w] for key in first} for w in range(len(workers))]
    shares = _split_again({"per_replica": parts}, num_replicas)["per_replica"]
    local = num_replicas // len(workers)
    return [{"per_replica": shares[w * local : (w + 1) * local]} for w in range(len(workers))]


def _batch_lengths(dataset: Expression, names: Names) -> list[int] | None:
    """How many rows each batch of a dataset has; None where the text does not tell."""
    dataset = resolved(dataset, names)
    if is_call(dataset, "ds_map", "ds_prefetch", "ds_options"):
        return _batch_lengths(dataset[1], names)
    if is_call(dataset, "ds_batch", "ds_padded_batch"):
        rows = _num_rows(dataset[1], names)
        if rows is None:
            return None
        full, rest = divmod(rows, dataset[2])
        dropped = len(dataset) > 3 and dataset[3]
        return [dataset[2]] * full + ([rest] if rest and not dropped else [])
    if is_call(dataset, "ds_repeat", "ds_take", "ds_skip") and len(dataset) > 2 and dataset[2] is not None:
        lengths = _batch_lengths(dataset[1], names)
        if lengths is None:
            return None
        count = int(dataset[2])
        changed = {"ds_repeat": lengths * count, "ds_take": lengths[:count], "ds_skip": lengths[count:]}
        return changed[dataset[0]]
    return None


def _num_rows(dataset: Expression, names: Names) -> int | None:
    """How many elements an unbatched dataset has; None where the text does not tell."""
    dataset = resolved(dataset, names)
    if is_call(dataset, "ds_range") and isinstance(dataset[1], int):
        return dataset[1]
    if is_call(dataset, "ds_slices"):
        arrays = dataset[1]
        while isinstance(arrays, dict) or is_call(arrays, "tuple", "list"):
            arrays = next(iter(arrays.values())) if isinstance(arrays, dict) else arrays[1]
        return len(arrays[1]) if is_call(arrays, "f", "i", "arr") else None
    if is_call(dataset, "ds_map", "ds_interleave_pad", "ds_prefetch", "ds_options"):
        return _num_rows(dataset[1], names)
    if is_call(dataset, "ds_repeat", "ds_take", "ds_skip") and len(dataset) > 2 and dataset[2] is not None:
        rows = _num_rows(dataset[1], names)
        if rows is None:
            return None
        count = int(dataset[2])
        return {"ds_repeat": rows * count, "ds_take": min(rows, count), "ds_skip": max(0, rows - count)}[
            dataset[0]
        ]
    return None


def _in_batches(steps: Sequence[Encoded], sizes: Sequence[int]) -> list[Encoded]:
    """The steps' rows, one after the other, in batches of these sizes."""
    first = steps[0]
    if "per_replica" in first:
        rows = _joined([part for step in steps for part in step["per_replica"]])
        bounds = itertools.pairwise([0, *itertools.accumulate(sizes)])
        return [{"per_replica": [_encode(rows[start:stop])]} for start, stop in bounds]
    (kind,) = set(first) & {"tuple", "list", "dict", "fields"}
    keys = list(first[kind]) if isinstance(first[kind], dict) else range(len(first[kind]))
    columns = {key: _in_batches([step[kind][key] for step in steps], sizes) for key in keys}
    batches = [{key: column[index] for key, column in columns.items()} for index in range(len(sizes))]
    return [
        {**first, kind: batch if isinstance(first[kind], dict) else list(batch.values())} for batch in batches
    ]


def _split_again(encoded: Encoded, num_replicas: int) -> Encoded:
    """Every PerReplica of arrays joined, and split evenly, the first replicas getting one row more."""
    if isinstance(encoded, list):
        return [_split_again(item, num_replicas) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    parts = encoded.get("per_replica", [])
    if not parts or not all(isinstance(part, dict) and isinstance(part.get("a"), list) for part in parts):
        return {key: _split_again(value, num_replicas) for key, value in encoded.items()}
    rows = _joined(parts)
    size, rest = divmod(len(rows), num_replicas)
    bounds = itertools.accumulate([size + 1] * rest + [size] * (num_replicas - rest), initial=0)
    return {"per_replica": [_encode(rows[start:stop]) for start, stop in itertools.pairwise(bounds)]}


def _joined(parts: Sequence[Encoded]) -> Any:
    return np.concatenate(
        [np.array(part["a"], part["dtype"]).reshape(part.get("shape", np.shape(part["a"]))) for part in parts]
    )


def _encode(array: Any) -> Encoded:
    encoded = {"a": array.tolist(), "dtype": array.dtype.name}
    return encoded if array.size else {**encoded, "shape": list(array.shape)}


def last_round(case: Case, evaluate: Evaluate) -> Encoded:
    """A last round of a dataset function that has elements for some replicas only."""
    if not any(op.name == "distribute_fn" for op in operations(case)):
        return UNCONCERNED
    changed = rewritten(case, _keep_batch_axis_open)
    if changed is not None:
        return evaluate(changed)
    batched = any(op.name in ("ds_batch", "ds_padded_batch") for op in operations(case))
    return UNCONCERNED if batched else {"error": "ValueError"}


def _keep_batch_axis_open(op: Operation) -> Expression | None:
    """Whole batches, of which it can't be seen beforehand that they are whole."""
    if op.name != "ds_batch" or len(op.args) < 3 or op.args[2] is not True:
        return None
    rows = _num_rows(op.args[0], op.names)
    return None if rows is None else ["ds_take", ["ds_batch", *op.args[:2], False], rows // op.args[1]]
