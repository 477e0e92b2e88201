"""What must come out of a case of the theme `sharded` where we decided against TensorFlow's behaviour."""

from __future__ import annotations

from tests.conformance.interp import Expression
from tests.conformance.rewriting import Operation, is_call

_DENSE = ("assign", "assign_add", "assign_sub")


def sharded_index(op: Operation) -> Expression | None:
    return (
        ["getitem", ["tensor", op.args[0]], op.args[1]] if op.name == "getitem" and _is_sharded(op) else None
    )


def order_asked(op: Operation) -> Expression | None:
    return ["getitem", ["tensor", op.args[0]], op.args[1]] if op.name == "sparse_read" else None


def any_layout(op: Operation) -> Expression | None:
    """A scatter, by way of a plain variable."""
    if not op.name.startswith("scatter_") or not _is_sharded(op) or not isinstance(op.args[0], str):
        return None
    return [
        "seq",
        ["let", "_plain", ["var", ["tensor", op.args[0]], {"where": "here"}]],
        [op.name, "$_plain", op.args[1]],
        ["assign", op.args[0], ["tensor", "$_plain"]],
    ]


def surplus_rows(op: Operation) -> Expression | None:
    if op.name not in _DENSE or not _is_sharded(op) or not is_call(op.argument(1), "f", "arr"):
        return None
    shards = op.argument(0)[1:]
    if not all(is_call(shard, "f", "arr") for shard in shards):
        return None
    surplus = len(op.argument(1)[1]) > sum(len(shard[1]) for shard in shards)
    return ["raise", "ValueError"] if surplus else None


def no_shards(op: Operation) -> Expression | None:
    """A limit of 0, which MaxSizePartitioner takes as none."""
    zero = (
        op.name == "partition" and op.args[0].get("kind") == "max_size" and op.args[0].get("max_shards") == 0
    )
    return ["raise", "ValueError"] if zero else None


def _is_sharded(op: Operation) -> bool:
    return is_call(op.argument(0), "sharded")
