"""Where we decided against TensorFlow's behaviour: why, and what we do instead.

A decision is recognised by what a case does, not by its name, so that it holds for cases that nobody here has seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from tests.conformance.dataset_results import even_shares, last_round
from tests.conformance.interp import Case, Encoded
from tests.conformance.our_results import (
    UNCONCERNED,
    Evaluate,
    Expect,
    adam,
    add_across_on_read_sum,
    batch_to_device,
    by,
    central_update,
    clipped_before,
    different_calls,
    empty_structure,
    first_of_all,
    hierarchical_odd,
    leaf_by_leaf,
    literal_summed,
    logged_in_steps,
    narrow_integers,
    other_reductions,
    per_replica_across,
    rows_merged,
    scalar_in_all_reduce,
    unaggregated_write,
)
from tests.conformance.sharded_results import (
    any_layout,
    no_shards,
    order_asked,
    sharded_index,
    surplus_rows,
)


@final
@dataclass(frozen=True)
class Deviation:
    """One decision.

    Attributes:
        name: a few words for the report.
        reason: why ours is better.
        ours: what we do.
        expected: our result of a case, if it concerns this decision.
        tol: in the place of the case's, where numbers are only about the same.
        any_order: whether lists are compared as sets, as what replicas log comes in any order.
    """

    name: str
    reason: str
    ours: str
    expected: Expect
    tol: dict[str, float] | None = None
    any_order: bool = False


DEVIATIONS = (
    Deviation(
        "unaggregated write in a replica",
        "TensorFlow lets the copies of an ON_WRITE variable diverge silently; they would never be equal again",
        "a ValueError that names the variable and the ways out; nothing is written",
        by(unaggregated_write),
    ),
    Deviation(
        "PerReplica assigned across replicas",
        "TensorFlow gives each copy of an ON_WRITE variable its own value, so that the copies diverge silently",
        "a ValueError; nothing is written",
        by(per_replica_across),
    ),
    Deviation(
        "assign_add across replicas on ON_READ/SUM",
        "users of four projects took TensorFlow's refusal for a bug; the sum has an obvious meaning",
        "the value is added once, so that the next read is exactly the old value and the change",
        by(add_across_on_read_sum),
    ),
    Deviation(
        "a number that all replicas write",
        "TensorFlow tells by identity whether replicas pass the same object, and refuses to sum it",
        "a number is a value like any other: it is summed over the replicas",
        by(literal_summed),
    ),
    Deviation(
        "update of a central variable by a PerReplica",
        "TensorFlow takes replica 0's value and drops the others silently",
        "a ValueError that says how to reduce the value first",
        by(central_update),
    ),
    Deviation(
        "the first replica of several workers",
        "TensorFlow takes the first replica of each worker, so that the workers' copies differ",
        "replica 0 of all, on every worker",
        by(first_of_all),
    ),
    Deviation(
        "different calls on different replicas",
        "TensorFlow pairs merge points by order only and runs replica 0's function for all",
        "a CollectiveMismatchError that names each replica and its call",
        by(different_calls),
    ),
    Deviation(
        "a Python number in all_reduce",
        "it fails in TensorFlow by accident",
        "numbers are reduced, and the result is a Python number too",
        by(scalar_in_all_reduce),
    ),
    Deviation(
        "nothing to reduce",
        "it fails in TensorFlow by accident",
        "an empty structure is given back",
        by(empty_structure),
    ),
    Deviation(
        "other reductions than SUM and MEAN",
        "TensorFlow has no others",
        "MAX, MIN and PROD work wherever SUM does",
        other_reductions,
    ),
    Deviation(
        "leaves of several dtypes in one all_reduce",
        "TensorFlow reduces int32 by another implementation and refuses the mixture",
        "every leaf is reduced in its own dtype",
        by(leaf_by_leaf),
    ),
    Deviation(
        "booleans and narrow integers",
        "TensorFlow refuses them or lets them wrap around",
        "sums are int64 or uint64, as numpy.sum's; 32 and 64 bits keep their dtype; means are float64, as numpy.mean's",
        by(narrow_integers),
    ),
    Deviation(
        "HierarchicalCopyAllReduce of an odd number of replicas",
        "TensorFlow makes two groups of n // 2 and loses the last replica's contribution",
        "the same result as every other way to communicate",
        hierarchical_odd,
    ),
    Deviation(
        "batch_reduce_to a device",
        "TensorFlow gives as many copies as there are replicas, unlike its reduce_to",
        "the same as reduce_to: one array for one device",
        by(batch_to_device),
    ),
    Deviation(
        "replicas run at the same time",
        "TensorFlow's eager replicas take turns, in order, up to the next merge point",
        "they overlap, so what they do alone happens in any order, and an error in one stops no other",
        logged_in_steps,
        any_order=True,
    ),
    Deviation(
        "shares of a global batch",
        "TensorFlow's default split gives replicas ceil(rows / n) until none are left, its documented one mixes the rows of "
        "neighbouring batches; both leave replicas idle that could work",
        "every batch is split by its own size, as evenly as possible, the first replicas getting one row more",
        even_shares,
    ),
    Deviation(
        "the last round of a dataset function",
        "TensorFlow drops it silently where element shapes are static",
        "no element is dropped: replicas without one get an empty batch; scalars, which have no empty form, are a ValueError",
        last_round,
    ),
    Deviation(
        "Adam's bias correction",
        "TensorFlow computes 1 - beta ** t in float32, which costs digits",
        "it is computed in double precision; weights differ in the sixth digit",
        adam,
        tol={"rtol": 5e-6, "atol": 2e-6},
    ),
    Deviation(
        "gradients are clipped once brought together",
        "TensorFlow clips each replica's gradients before they are summed, so that the direction depends on the number of replicas",
        "clipvalue, clipnorm and global_clipnorm bound the sum of the replicas' gradients",
        by(clipped_before),
    ),
    Deviation(
        "rows of one index in Adagrad",
        "TensorFlow adds the square of each of them to the accumulator: another number than for the same gradient, dense",
        "rows of one index are summed first, over the replicas too",
        by(rows_merged),
    ),
    Deviation(
        "indices of a sharded variable",
        "TensorFlow steps from a start out of range instead of clipping it, applies slices after a new axis to each shard, and "
        "refuses arrays",
        "NumPy's rules, as for every variable",
        by(sharded_index),
    ),
    Deviation(
        "the order of sparse_read",
        "TensorFlow returns the rows by shard, which no caller can use who does not know the shards",
        "the order asked, as in embedding_lookup",
        by(order_asked),
    ),
    Deviation(
        "scatter into shards of any lengths",
        "TensorFlow can only for the lengths that its partitioners give",
        "it works for all",
        by(any_layout),
    ),
    Deviation(
        "more rows than a sharded variable has",
        "TensorFlow ignores them silently",
        "a ValueError; nothing is written",
        by(surplus_rows),
    ),
    Deviation(
        "MaxSizePartitioner of no shards",
        "TensorFlow takes max_shards=0 as no limit, while its other partitioners refuse it",
        "a ValueError; None is no limit",
        by(no_shards),
    ),
)


def find(case: Case, evaluate: Evaluate) -> list[tuple[Deviation, Encoded]]:
    """The decisions that a case contradicts, each with what must come out."""
    found = ((deviation, deviation.expected(case, evaluate)) for deviation in DEVIATIONS)
    return [(deviation, expected) for deviation, expected in found if expected is not UNCONCERNED]
