"""What may go wrong halfway through, and what is passed in against all advice: nothing is silently wrong after it."""

from __future__ import annotations

import contextvars
import os
import subprocess
import sys
import threading
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collectives import CollectiveMismatchError, IndexedSlices, InProcessCommunicator
from strategies import SGD, MirroredStrategy, ReplicaContextError, all_reduce, get_replica_context, merge_call
from variables import Mirrored, PerReplica, Variable, assert_replicas_equal


@pytest.fixture
def strategy() -> Any:
    with MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        yield strategy


def replica_id() -> int:
    replica = get_replica_context()
    assert replica is not None
    return replica.replica_id


# ------------------------------------------------------------------ copies stay equal


def test_a_write_that_overflows_with_an_error_leaves_equal_copies(strategy: MirroredStrategy) -> None:
    with strategy.scope():
        v = Variable(np.full(3, 3e38, np.float32), aggregation="SUM")
    with np.errstate(over="raise"):
        with pytest.raises(FloatingPointError):
            v.assign_add(np.full(3, 3e38, np.float32))
        assert_replicas_equal(v)
        with pytest.raises(FloatingPointError):
            strategy.run(lambda: v.assign_add(np.full(3, 3e38, np.float32)))
        assert_replicas_equal(v)


def test_an_update_that_overflows_with_an_error_leaves_equal_copies(strategy: MirroredStrategy) -> None:
    with strategy.scope():
        w = [Variable(np.full(40_000, 3e38, np.float32)) for _ in range(2)]
        optimizer = SGD(1.0)
    g = np.full(40_000, -1.5e38, np.float32)
    with np.errstate(over="raise"), pytest.raises(FloatingPointError):
        strategy.run(lambda: optimizer.apply_gradients([(g, v) for v in w]))
    assert_replicas_equal(w)


def test_a_mirrored_value_is_checked_before_anything_is_written(strategy: MirroredStrategy) -> None:
    with strategy.scope():
        v = Variable(np.zeros(3))
    with pytest.raises(ValueError, match="need shape"):
        v.assign(Mirrored([np.ones(4), np.ones(4)]))
    assert_replicas_equal(v)
    np.testing.assert_array_equal(v.read_value(), np.zeros(3))


# ---------------------------------------------------------------------- mismatches


@pytest.mark.parametrize(
    "values",
    [
        [OrderedDict(loss=1.0, acc=100.0), OrderedDict(acc=1.0, loss=100.0)],
        [{"a": 1.0}, {"zzz": 5.0}],
        [[1.0, 2.0], (1.0, 2.0)],
    ],
    ids=["order", "keys", "container"],
)
def test_structures_that_differ_between_replicas_are_a_mismatch(
    strategy: MirroredStrategy, values: list[Any]
) -> None:
    with pytest.raises(CollectiveMismatchError):
        strategy.run(lambda: all_reduce("SUM", values[replica_id()]))


def test_merge_functions_with_other_bound_arguments_are_a_mismatch(strategy: MirroredStrategy) -> None:
    def merge(strategy: Any, k: int) -> int:
        return k

    with pytest.raises(CollectiveMismatchError, match=r"k=0.*k=1"):
        strategy.run(lambda: merge_call(partial(merge, k=replica_id())))
    assert strategy.run(lambda: merge_call(partial(merge, k=3))) == 3


def test_components_of_other_dtypes_are_refused_along_an_axis_too(strategy: MirroredStrategy) -> None:
    value = PerReplica([np.array([1, 2]), np.array([1.5, 2.5])])
    for axis in (None, 0):
        with pytest.raises(ValueError, match=r"replica 0: int64.*replica 1: float64"):
            strategy.reduce("SUM", value, axis=axis)


@pytest.mark.parametrize("count", [1, 3])
def test_a_value_for_another_number_of_replicas_is_refused(strategy: MirroredStrategy, count: int) -> None:
    value = PerReplica([np.ones(1)] * count)
    with pytest.raises(ValueError, match=f"of {count} components for 2 replicas"):
        strategy.run(lambda x: x, (value,))
    with pytest.raises(ValueError, match=f"of {count} components for 2 replicas"):
        strategy.run(lambda x: x, ({"a": [value]},))
    with pytest.raises(ValueError, match=f"of {count} components for 2 replicas"):
        strategy.reduce("SUM", value)


# ------------------------------------------------------------------- overlapping out


@pytest.mark.parametrize("size", [8, 300_000])
def test_out_may_overlap_what_is_passed_in(size: int) -> None:
    ends = InProcessCommunicator.group(2, timeout=10)
    results: dict[int, Any] = {}

    def body(end: InProcessCommunicator) -> None:
        x = np.arange(float(size)) + 100 * end.rank
        part = size // 2
        broadcast = end.broadcast(x[:part], 0, out=x[2 : 2 + part]).copy()
        y = np.arange(float(size)) + 100 * end.rank
        gathered = end.all_gather(y[part:] if end.rank == 0 else y[:part].copy(), out=y).copy()
        z = np.arange(float(size)) + 100 * end.rank
        scattered = end.reduce_scatter(z, out=z[:part]).copy()
        results[end.rank] = (broadcast, gathered, scattered)

    threads = [threading.Thread(target=body, args=(end,)) for end in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    whole, half = np.arange(float(size)), size // 2
    summed = 2 * whole + 100
    for rank in range(2):
        broadcast, gathered, scattered = results[rank]
        np.testing.assert_array_equal(broadcast, whole[:half])
        np.testing.assert_array_equal(gathered, [*whole[half:], *(whole[:half] + 100)])
        np.testing.assert_array_equal(scattered, summed[:half] if rank == 0 else summed[half:])


# ------------------------------------------------------------------------- contexts


def test_a_run_inside_a_step_is_refused_also_where_its_context_is_cut_off(strategy: MirroredStrategy) -> None:
    def step() -> str:
        if replica_id() == 0:
            with pytest.raises(ReplicaContextError, match="called inside a step"):
                contextvars.Context().run(strategy.run, lambda: 1)
        return "went on"

    assert strategy.run(step) == "went on"
    assert strategy.run(lambda: 1) == 1


def test_a_step_after_ctrl_c_has_ended_a_kept_stack_works() -> None:
    program = """
import signal, sys
from strategies import MirroredStrategy, CommunicationOptions, get_replica_context
from strategies import lane
strategy = MirroredStrategy(["cpu:0", "cpu:1"], communication_options=CommunicationOptions(timeout_seconds=5))
import strategies.pace as pace
pace._SHORT = 60.0
def step():
    return get_replica_context().all_reduce("SUM", 1.0)
for _ in range(20):
    strategy.run(step)
stacks = strategy._steps._crews[0].threads._lane._stacks
assert stacks
for stack in stacks.values():
    try:
        stack.throw(KeyboardInterrupt)
    except KeyboardInterrupt:
        pass
    assert stack.dead
for _ in range(600):
    assert strategy.run(step).values == (2.0, 2.0)
print("right")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False, cwd=_ROOT
    )
    assert done.stdout == "right\n", done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_while_another_thread_writes_leaves_a_child_that_writes_too() -> None:
    program = """
import os, threading, numpy as np, warnings
warnings.simplefilter("ignore")
from strategies import Variable, SGD
v, stop = Variable(np.zeros(1_000_000)), False
def write():
    while not stop:
        v.assign_add(np.ones(1_000_000))
thread = threading.Thread(target=write, daemon=True); thread.start()
for _ in range(20):
    child = os.fork()
    if not child:
        v.assign(np.zeros(1_000_000)); Variable(np.ones(3))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
stop = True
print("right")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False, cwd=_ROOT
    )
    assert done.stdout == "right\n", done.stderr


# ------------------------------------------------------------------ odd arrays, odd numbers


def test_half_precision_scatter_accumulates_in_float32(strategy: MirroredStrategy) -> None:
    with strategy.scope():
        v = Variable(np.ones(2, np.float16))
    v.scatter_add(IndexedSlices(np.full(10_000, 1e-4, np.float16), np.zeros(10_000, int)))
    np.testing.assert_allclose(v.read_value(), [2.0, 1.0], rtol=1e-3)


def test_masked_arrays_are_refused_as_their_masks_would_be_ignored(strategy: MirroredStrategy) -> None:
    masked = np.ma.array([1.0, 2.0], mask=[False, True])
    with pytest.raises(TypeError, match="masks are not looked at"):
        strategy.run(lambda: all_reduce("SUM", masked))
    with pytest.raises(TypeError, match="masks are not looked at"):
        strategy.reduce("SUM", PerReplica([masked, masked]))
    with pytest.raises(TypeError, match="masks are not looked at"):
        Variable(masked)


@pytest.mark.parametrize(
    ("value", "dtype", "error"),
    [
        (1.7, np.int32, TypeError),
        (300, np.int8, OverflowError),
        (np.nan, np.int32, TypeError),
        (np.ones(2), int, TypeError),
    ],
    ids=["fraction", "too_large", "nan", "floats"],
)
def test_a_dtype_that_does_not_hold_the_initial_value_is_refused(
    value: Any, dtype: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        Variable(value, dtype=dtype)
    assert Variable(3.0, dtype=np.int8).dtype == np.int8


def test_large_integers_are_shared_out_exactly(strategy: MirroredStrategy) -> None:
    with strategy.scope():
        v = Variable(0, synchronization="ON_READ", aggregation="SUM")
    for value in (2**62 + 2, -(2**62) - 2, -7):
        v.assign(value)
        # An equal share each, towards zero.
        assert int(v) == (value // 2 * 2 if value > 0 else -(-value // 2 * 2))


@pytest.mark.parametrize(
    "view",
    [
        lambda a: np.lib.stride_tricks.sliding_window_view(a, 2),
        lambda a: np.lib.stride_tricks.as_strided(a, (2,), (8,)),
        lambda a: np.asarray(memoryview(a)),
    ],
    ids=["windows", "strided", "memoryview"],
)
def test_a_result_that_is_a_view_of_a_variable_in_a_roundabout_way_is_copied_too(
    strategy: MirroredStrategy, view: Any
) -> None:
    with strategy.scope():
        v = Variable(np.arange(4.0))
    first = strategy.local_results(strategy.run(lambda: view(v.value())))[0]
    before = np.array(first)
    v.assign_add(np.full(4, 100.0))
    np.testing.assert_array_equal(np.array(first), before)


_ROOT = Path(__file__).parents[2]
