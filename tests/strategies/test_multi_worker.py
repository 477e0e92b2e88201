"""What several processes compute is to the last bit what as many replicas compute in one.

Each `contract` is a program that every process runs, and a `MirroredStrategy` too. It returns what is the same everywhere, and
what each local replica has; where plain NumPy tells what must come out, it checks that itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import strategies as xd
from tests.jobs import Job, strategy_of

Contract: TypeAlias = Callable[[xd.Strategy], tuple[Any, Any]]
"""Gives what is the same in all processes, and a sequence of what each local replica has, or ()."""

CONTRACTS: list[Contract] = []
_JOBS: dict[int, Job] = {}


def contract(function: Contract) -> Contract:
    CONTRACTS.append(function)
    return function


@pytest.fixture(scope="module")
def jobs() -> Iterator[Callable[[int], Job]]:
    yield lambda num: _JOBS.setdefault(num, Job(num, 20.0))
    for job in _JOBS.values():
        job.close()
    _JOBS.clear()


@pytest.mark.parametrize(("num_processes", "num_local"), [(2, 1), (2, 2), (3, 1), (3, 2)])
@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda function: function.__name__)
def test_processes_compute_what_one_process_does(
    contract: Contract, num_processes: int, num_local: int, jobs: Callable[[int], Job]
) -> None:
    devices = [f"cpu:{number}" for number in range(num_processes * num_local)]
    with xd.MirroredStrategy(devices) as strategy:
        common, of_each = contract(strategy)
    told = jobs(num_processes).run(_run, contract, num_local)
    for process, (same_there, _) in enumerate(told):
        assert_same(same_there, common, f"process {process}")
    theirs = [one for _, own in told for one in own]
    assert_same(theirs, list(of_each), "replicas")


def _run(contract: Contract, num_local: int) -> tuple[Any, list[Any]]:
    with strategy_of(num_local) as strategy:
        common, of_each = contract(strategy)
    return common, list(of_each)


def assert_same(got: Any, expected: Any, where: str) -> None:
    """Of one type, dtype and shape, and of the same bytes."""
    assert type(got) is type(expected), (where, got, expected)
    if isinstance(expected, (list, tuple)):
        assert len(got) == len(expected), (where, got, expected)
        for number, (one, other) in enumerate(zip(got, expected, strict=True)):
            assert_same(one, other, f"{where}[{number}]")
    elif isinstance(expected, dict):
        assert list(got) == list(expected), where
        for key in expected:
            assert_same(got[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(expected, (np.ndarray, np.generic)):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape), (where, got, expected)
        assert got.tobytes() == expected.tobytes(), (where, got, expected)
    elif isinstance(expected, xd.IndexedSlices):
        assert_same(
            [got.values, got.indices, got.dense_shape],
            [expected.values, expected.indices, expected.dense_shape],
            where,
        )
    else:
        assert got == expected, where


# ------------------------------------------------------------------------ helpers


def replica() -> Any:
    context = xd.get_replica_context()
    assert context is not None
    return context


def rid() -> int:
    return int(replica().replica_id_in_sync_group)


def drawn(number: int, *shape: int, dtype: npt.DTypeLike = "f4") -> Any:
    """The same numbers wherever they are drawn, others for each ``number``."""
    return np.random.default_rng(100 + number).normal(size=shape).astype(dtype)


def of_all(s: xd.Strategy, *shape: int, dtype: npt.DTypeLike = "f4") -> Any:
    return np.stack([drawn(number, *shape, dtype=dtype) for number in range(s.num_replicas_in_sync)])


def each(s: xd.Strategy, value: Any) -> tuple[Any, ...]:
    results = s.local_results(value)
    # What is one and the same object on all replicas of a process comes once.
    return results if len(results) == len(s.devices) else results * len(s.devices)


def copies(s: xd.Strategy, variable: xd.Variable) -> list[Any]:
    return [component.read_value() for component in variable.components]


def train(
    s: xd.Strategy,
    optimizer: Any,
    gradients: Callable[[int, int], list[Any]],
    variables: list[xd.Variable],
    steps: int = 3,
) -> None:
    def step(number: int) -> None:
        optimizer.apply_gradients(zip(gradients(rid(), number), variables, strict=True))

    for number in range(steps):
        s.run(step, (number,))
    xd.assert_replicas_equal(variables)


def weights(s: xd.Strategy, *, dtype: npt.DTypeLike = "f4") -> list[xd.Variable]:
    with s.scope():
        shapes = [(5, 3), (3,), (), (40, 300)]  # the last one does not travel in a page
        return [xd.Variable(drawn(n, *shape, dtype=dtype), name=f"w{n}") for n, shape in enumerate(shapes)]


def dense_gradients(variables: list[xd.Variable]) -> Callable[[int, int], list[Any]]:
    dtypes = [(v.shape, v.dtype) for v in variables]
    return lambda r, step: [
        drawn(1000 * step + 10 * r + i, *shape).astype(d) for i, (shape, d) in enumerate(dtypes)
    ]


# ---------------------------------------------------------------------- optimizers

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "SGD": lambda **o: xd.SGD(0.1, **o),
    "momentum": lambda **o: xd.SGD(0.1, momentum=0.9, nesterov=True, **o),
    "Adam": lambda **o: xd.Adam(0.1, amsgrad=True, **o),
    "AdamW": lambda **o: xd.AdamW(0.1, **o),
    "Adagrad": lambda **o: xd.Adagrad(0.1, **o),
    "RMSprop": lambda **o: xd.RMSprop(0.1, momentum=0.5, centered=True, **o),
    "LAMB": lambda **o: xd.LAMB(0.1, weight_decay=0.01, **o),
}


@contract
def every_optimizer(s: xd.Strategy) -> tuple[Any, Any]:
    seen = {}
    for name, make in OPTIMIZERS.items():
        for gradient_sum in ("sum", "mean"):
            with s.scope():
                optimizer = make(gradient_aggregation=gradient_sum)
            variables = weights(s)
            train(s, optimizer, dense_gradients(variables), variables)
            seen[name, gradient_sum] = [v.read_value() for v in variables]
    return seen, ()


@contract
def sgd_is_the_sum_of_gradients(s: xd.Strategy) -> tuple[Any, Any]:
    variables = weights(s, dtype="f8")
    before = [v.read_value() for v in variables]
    gradients = dense_gradients(variables)
    train(s, xd.SGD(0.5), gradients, variables, steps=1)
    for i, (v, old) in enumerate(zip(variables, before, strict=True)):
        total = sum(gradients(r, 0)[i] for r in range(s.num_replicas_in_sync))
        np.testing.assert_allclose(v.read_value(), old - 0.5 * total, rtol=1e-12)
    return [v.read_value() for v in variables], ()


@contract
def sparse_gradients(s: xd.Strategy) -> tuple[Any, Any]:
    seen = {}

    def gradients(r: int, step: int) -> list[Any]:
        rows = np.array([r % 6, 2, 2, (r + step) % 6][: 2 + r], np.int64)
        slices = xd.IndexedSlices(drawn(r + 10 * step, len(rows), 4), rows, (6, 4))
        return [slices, drawn(r, 3)]

    for name in ("SGD", "momentum", "Adam", "Adagrad", "RMSprop"):
        with s.scope():
            table, bias = xd.Variable(drawn(7, 6, 4)), xd.Variable(drawn(8, 3))
            optimizer = OPTIMIZERS[name]()
        train(s, optimizer, gradients, [table, bias])
        seen[name] = [table.read_value(), bias.read_value()]
    return seen, ()


@contract
def gradients_that_only_some_replicas_have(s: xd.Strategy) -> tuple[Any, Any]:
    """Missing here, sparse there: all do what one process does, and say so."""
    with s.scope():
        table, bias = (
            xd.Variable(np.ones((4, 2), "f4"), name="table"),
            xd.Variable(np.ones(3, "f4"), name="bias"),
        )
        never = xd.Variable(np.ones(2, "f4"), name="never")
        optimizer = xd.SGD(0.5)
    last = s.num_replicas_in_sync - 1

    def gradients(r: int, step: int) -> list[Any]:
        rows = xd.IndexedSlices(np.full((1, 2), 1.0 + r, "f4"), np.array([r % 4]), (4, 2))
        of_table = rows if r != last else xd.to_dense(rows)
        return [of_table, None if r == last else np.full(3, 1.0 + r, "f4"), None]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(s, optimizer, gradients, [table, bias, never], steps=2)
    assert [str(w.message) for w in caught if "bias had no gradient on some replicas" in str(w.message)]
    np.testing.assert_allclose(bias.read_value(), 1 - sum(range(1, last + 1)) * np.ones(3))
    np.testing.assert_array_equal(never.read_value(), [1, 1])
    expected = np.ones((4, 2))
    for r in range(last + 1):
        expected[r % 4] -= 1.0 + r
    np.testing.assert_allclose(table.read_value(), expected)
    return [table.read_value(), bias.read_value()], ()


@contract
def clipping_acts_on_the_sum(s: xd.Strategy) -> tuple[Any, Any]:
    seen = {}
    for bound in ({"clipvalue": 0.1}, {"clipnorm": 0.1}, {"global_clipnorm": 0.1}):
        with s.scope():
            optimizer = xd.SGD(1.0, **bound)  # type: ignore[arg-type]
        variables = weights(s)
        before = [v.read_value() for v in variables]
        train(s, optimizer, dense_gradients(variables), variables, steps=1)
        seen[str(bound)] = [v.read_value() for v in variables]
        changes = [new - old for new, old in zip(seen[str(bound)], before, strict=True)]
        if "global_clipnorm" in bound:
            norm = np.sqrt(sum(np.square(change).sum() for change in changes))
            np.testing.assert_allclose(norm, 0.1, rtol=1e-3)
    return seen, ()


@contract
def an_overflow_on_one_replica_skips_the_step_on_all(s: xd.Strategy) -> tuple[Any, Any]:
    with s.scope():
        v = xd.Variable(np.ones(3, "f4"))
        optimizer = xd.LossScaleOptimizer(xd.SGD(1.0), initial_scale=8.0, dynamic_growth_steps=2)
    last = s.num_replicas_in_sync - 1
    scales = []

    def gradients(r: int, step: int) -> list[Any]:
        return [np.full(3, np.inf if (r, step) == (last, 1) else 8.0, "f4")]

    for step in range(4):
        train(s, optimizer, lambda r, _, step=step: gradients(r, step), [v], steps=1)  # type: ignore[misc]
        scales.append(float(optimizer.loss_scale))
    assert scales[:2] == [8.0, 4.0]
    assert optimizer.skipped_steps == 1
    return [v.read_value(), scales], ()


@contract
def an_accumulator_brings_together_once_in_a_while(s: xd.Strategy) -> tuple[Any, Any]:
    with s.scope():
        v, table = xd.Variable(np.ones(3, "f4")), xd.Variable(np.ones((4, 2), "f4"))
        optimizer, accumulator = xd.SGD(0.5), xd.GradientAccumulator(every=2, reduce=None)

    def step(number: int) -> None:
        slices = xd.IndexedSlices(drawn(number + rid(), 1, 2), np.array([rid() % 4]), (4, 2))
        gradients = accumulator.step([drawn(number + 10 * rid(), 3), slices])
        if gradients is not None:
            optimizer.apply_gradients(zip(gradients, [v, table], strict=True))

    for number in range(4):
        s.run(step, (number,))
    xd.assert_replicas_equal([v, table])
    with s.scope():
        means = xd.GradientAccumulator(every=2, reduce="MEAN")

    def mean_step() -> Any:
        return [means.step([np.full(2, float(rid() + n))]) for n in range(2)][-1]

    of_each = each(s, s.run(mean_step))
    expected = (s.num_replicas_in_sync - 1) / 2 + 0.5
    for one in of_each:
        np.testing.assert_allclose(one[0], np.full(2, expected) * (1 if one[0][0] == expected else 2))
    return [v.read_value(), table.read_value()], of_each


@contract
def half_precision_variables(s: xd.Strategy) -> tuple[Any, Any]:
    seen = {}
    for dtype in (np.dtype("f2"), np.dtype(ml_dtypes.bfloat16)):
        variables = weights(s, dtype=dtype)
        with s.scope():
            total = xd.Variable(np.zeros(3, dtype), aggregation="SUM")
            seen_by_each = xd.Variable(np.zeros(3, dtype), synchronization="ON_READ", aggregation="MEAN")
        train(s, xd.SGD(0.1), dense_gradients(variables), variables)

        def step(total: Any = total, seen_by_each: Any = seen_by_each, dtype: Any = dtype) -> None:
            total.assign_add(drawn(rid(), 3).astype(dtype))
            seen_by_each.assign(drawn(rid(), 3).astype(dtype))

        s.run(step)
        seen[dtype.name] = [v.read_value() for v in [*variables, total, seen_by_each]]
    return seen, ()


@contract
def an_exponential_moving_average(s: xd.Strategy) -> tuple[Any, Any]:
    variables = weights(s)
    with s.scope():
        optimizer = xd.SGD(0.1)
        average = xd.ExponentialMovingAverage(variables, momentum=0.5)
    for step in range(3):
        train(s, optimizer, lambda r, _, n=step: dense_gradients(variables)(r, n), variables, steps=1)  # type: ignore[misc]
        average.update()
    return [average.average(v) for v in variables], ()


# ----------------------------------------------------------------------- variables


@contract
def writes_in_replicas_with_each_aggregation(s: xd.Strategy) -> tuple[Any, Any]:
    seen: dict[Any, Any] = {}
    values = of_all(s, 2, 3)
    for aggregation in ("SUM", "MEAN", "ONLY_FIRST_REPLICA"):
        for write in ("assign", "assign_add", "assign_sub"):
            with s.scope():
                v = xd.Variable(np.ones((2, 3), "f4"), aggregation=aggregation)
            of_step = s.run(lambda v=v, write=write: getattr(v, write)(drawn(rid(), 2, 3)))
            for one in each(s, of_step):
                np.testing.assert_array_equal(one, v.read_value())
            seen[aggregation, write] = copies(s, v)[0]
            xd.assert_replicas_equal(v)
            change = {"SUM": values.sum(0), "MEAN": values.mean(0), "ONLY_FIRST_REPLICA": values[0]}[
                aggregation
            ]
            expected = {"assign": change, "assign_add": 1 + change, "assign_sub": 1 - change}[write]
            np.testing.assert_allclose(v.read_value(), expected, rtol=1e-5, atol=1e-6)
    return seen, ()


@contract
def integers_are_summed_exactly(s: xd.Strategy) -> tuple[Any, Any]:
    n = s.num_replicas_in_sync
    seen = {}
    for dtype in ("i1", "u1", "i2", "i4", "i8", "u8"):
        with s.scope():
            v = xd.Variable(np.ones(2, dtype), aggregation="SUM")
            own = xd.Variable(np.zeros(2, dtype), synchronization="ON_READ", aggregation="SUM")

        def step(v: Any = v, own: Any = own, dtype: Any = dtype) -> None:
            v.assign_add(np.array([rid(), 1], dtype))
            own.assign_add(np.array([rid(), 2], dtype))

        s.run(step)
        np.testing.assert_array_equal(v.read_value(), [1 + n * (n - 1) // 2, 1 + n])
        np.testing.assert_array_equal(own.read_value(), [n * (n - 1) // 2, 2 * n])
        seen[dtype] = [v.read_value(), own.read_value()]
    return seen, ()


@contract
def on_read_variables(s: xd.Strategy) -> tuple[Any, Any]:
    values = of_all(s, 3)
    seen: dict[str, Any] = {}
    for aggregation in ("SUM", "MEAN", "ONLY_FIRST_REPLICA"):
        with s.scope():
            v = xd.Variable(np.zeros(3, "f4"), synchronization="ON_READ", aggregation=aggregation)
        s.run(lambda v=v: v.assign(drawn(rid(), 3)))
        first = v.read_value()
        expected = {"SUM": values.sum(0), "MEAN": values.mean(0), "ONLY_FIRST_REPLICA": values[0]}[
            aggregation
        ]
        np.testing.assert_allclose(first, expected, rtol=1e-5, atol=1e-6)
        v.assign(np.array([2, 4, 6], "f4"))
        np.testing.assert_allclose(v.read_value(), [2, 4, 6], rtol=1e-6)
        second = v.read_value()
        v.assign_add(np.ones(3, "f4"))
        np.testing.assert_allclose(v.read_value(), [3, 5, 7], rtol=1e-6)
        seen[aggregation] = [first, second, v.read_value(), np.array(v) + 1]
    return seen, ()


@contract
def scatters(s: xd.Strategy) -> tuple[Any, Any]:
    seen = {}

    def rows() -> xd.IndexedSlices:
        r = rid()
        return xd.IndexedSlices(1 + np.abs(drawn(r, 1 + r, 2)), np.arange(1 + r, dtype=np.int64) % 5, (5, 2))

    for aggregation in ("SUM", "MEAN", "ONLY_FIRST_REPLICA"):
        for kind in ("add", "sub", "mul", "div", "min", "max", "update"):
            if kind in ("min", "max", "update") and aggregation != "ONLY_FIRST_REPLICA":
                continue
            with s.scope():
                v = xd.Variable(np.full((5, 2), 1.5, "f4"), aggregation=aggregation)
            s.run(lambda v=v, kind=kind: getattr(v, f"scatter_{kind}")(rows()) is None)
            xd.assert_replicas_equal(v)
            seen[aggregation, kind] = v.read_value()
    return seen, ()


@contract
def variables_made_in_a_step_are_the_chiefs(s: xd.Strategy) -> tuple[Any, Any]:
    holder: dict[str, Any] = {}

    def step() -> Any:
        if "v" not in holder:
            made = xd.Variable(lambda: np.full(3, 7.0 + rid()), name="late", aggregation="SUM")
            holder["v"] = made
        holder["v"].assign_add(np.ones(3))
        return holder["v"].value()

    of_each = each(s, s.run(step))
    np.testing.assert_array_equal(holder["v"].read_value(), np.full(3, 7.0 + s.num_replicas_in_sync))
    return holder["v"].read_value(), of_each


@contract
def unseeded_initial_values_agree(s: xd.Strategy) -> tuple[Any, Any]:
    """B17: each process draws its own, all take the chief's."""
    with s.scope():
        v = xd.Variable(lambda: np.random.default_rng().normal(size=3))
        w = xd.Variable(np.random.default_rng().normal(size=20_000))
    xd.assert_replicas_equal([v, w])
    np.testing.assert_array_equal(
        s.gather(s.run(lambda: v.value()[None]), 0), np.tile(v.read_value(), (s.num_replicas_in_sync, 1))
    )
    of_all = s.gather(s.run(lambda: np.array([w.value().sum()])), 0)
    assert len(set(of_all.tolist())) == 1
    return None, ()


@contract
def updates_across_replicas(s: xd.Strategy) -> tuple[Any, Any]:
    with s.scope():
        v = xd.Variable(np.ones(3, "f4"))
    s.extended.update(v, lambda component, x: component.assign_add(x), args=(np.full(3, 2.0, "f4"),))
    np.testing.assert_array_equal(v.read_value(), [3, 3, 3])
    v.assign_add(s.reduce("SUM", s.run(lambda: np.full(3, float(rid()), "f4")), None))
    total = s.reduce_to("MEAN", s.run(lambda: drawn(rid(), 3)), v)
    pairs = [(s.run(lambda: drawn(rid(), 3)), v), (s.run(lambda: drawn(rid() + 5, 2)), v)]
    both = s.batch_reduce_to("SUM", pairs)
    first = [each(s, one)[0] for one in (total, *both)]
    np.testing.assert_allclose(first[0], of_all(s, 3).mean(0), rtol=1e-5)
    xd.assert_replicas_equal(v)
    return [v.read_value(), *first], ()


# ------------------------------------------------------------- values of all replicas


class Pair(NamedTuple):
    a: Any
    b: Any


@contract
def reductions_of_nested_values(s: xd.Strategy) -> tuple[Any, Any]:
    n = s.num_replicas_in_sync

    def step() -> Any:
        r = rid()
        return {
            "a": np.float32(r),
            "b": [drawn(r, 2, 2), Pair(np.int32(r), np.array(r, "i8"))],
            "c": (np.full(3, r == 0),),
        }

    value = s.run(step)
    seen = {op: s.reduce(op, value, None) for op in ("SUM", "MAX", "MIN")}
    assert seen["SUM"]["a"] == n * (n - 1) / 2
    assert seen["MAX"]["b"][1].a == n - 1
    assert seen["SUM"]["c"][0].tolist() == [1, 1, 1]
    seen["MEAN"] = s.reduce("MEAN", s.run(lambda: [drawn(rid(), 4), np.arange(3) * rid()]), None)
    seen["PROD"] = s.reduce("PROD", s.run(lambda: drawn(rid(), 4, dtype="f8")), None)
    assert isinstance(seen["SUM"]["b"][1], Pair)
    return seen | {"kinds": None}, ()


@contract
def reductions_along_axes_of_uneven_and_empty_shares(s: xd.Strategy) -> tuple[Any, Any]:
    n = s.num_replicas_in_sync
    lengths = [0 if r == n - 1 else 3 - r % 3 for r in range(n)]
    seen: dict[Any, Any] = {}
    shares = s.run(lambda: drawn(rid(), lengths[rid()], 2))
    whole = np.concatenate([drawn(r, lengths[r], 2) for r in range(n)])
    for op, numpy in (("SUM", np.sum), ("MEAN", np.mean), ("MAX", np.max), ("MIN", np.min)):
        for axis in (0, (0, 1)):
            got = s.reduce(op, shares, axis)
            np.testing.assert_allclose(got, numpy(whole, axis=axis), rtol=1e-5)
            seen[op, axis] = got
    integers = s.run(lambda: np.arange(lengths[rid()], dtype="i4") - 2)
    for op in ("SUM", "MEAN", "MAX", "MIN"):
        seen["integers", op] = s.reduce(op, integers, 0)
    assert seen["integers", "MIN"] == -2
    seen["booleans"] = [
        s.reduce(op, s.run(lambda: np.ones(lengths[rid()], bool)), 0) for op in ("MAX", "MIN", "SUM")
    ]
    nothing = s.run(lambda: np.zeros((0, 2), "f4"))
    seen["no rows"] = [s.reduce("SUM", nothing, 0)]
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seen["no mean"] = s.reduce("MEAN", nothing, 0)
    assert np.isnan(seen["no mean"]).all()
    with pytest.raises(ValueError, match="no elements along axis 0 on any replica, and MAX"):
        s.reduce("MAX", nothing, 0)
    np.testing.assert_array_equal(s.reduce("SUM", shares, 0), seen["SUM", 0])  # it goes on
    return seen, ()


@contract
def gathers_of_uneven_shares(s: xd.Strategy) -> tuple[Any, Any]:
    n = s.num_replicas_in_sync
    seen = {}
    for axis in (0, 1, 2):

        def shape(r: int, axis: int = axis) -> list[int]:
            return [(r + 1) % n if a == axis else 2 for a in range(3)]

        got = s.gather(s.run(lambda shape=shape: drawn(rid(), *shape(rid()))), axis)
        np.testing.assert_array_equal(got, np.concatenate([drawn(r, *shape(r)) for r in range(n)], axis))
        seen[axis] = got
    words = s.gather(s.run(lambda: {"x": [np.full((1,), rid(), "u1")], "y": np.zeros((rid(), 0))}), 0)
    assert words["x"][0].tolist() == list(range(n))
    assert words["y"].shape == (n * (n - 1) // 2, 0)
    large = s.gather(s.run(lambda: drawn(rid(), 30_000)), 0)
    return [seen, words, large], ()


@contract
def collectives_in_a_step(s: xd.Strategy) -> tuple[Any, Any]:
    n = s.num_replicas_in_sync
    big = 300_000

    def step() -> Any:
        c, r = replica(), rid()
        seen: dict[str, Any] = {}
        for op in ("SUM", "MEAN", "MAX", "MIN", "PROD"):
            seen[op] = c.all_reduce(op, drawn(r, 5))
        seen["nested"] = c.all_reduce("SUM", {"a": np.float32(r), "b": [drawn(r, 2), np.arange(2) + r]})
        seen["large"] = c.all_reduce("SUM", drawn(r, big)).sum()
        seen["number"] = c.all_reduce("SUM", 1.5)
        seen["narrow"] = c.all_reduce("SUM", np.full(2, 100, "i1"))
        seen["half"] = c.all_reduce("SUM", np.full(2, 1000 + r, "f2"))
        seen["bfloat16"] = c.all_reduce("MEAN", drawn(r, 5, dtype=ml_dtypes.bfloat16))
        seen["complex"] = c.all_reduce("SUM", drawn(r, 2) * 1j)
        seen["transposed"] = c.all_reduce("SUM", np.asfortranarray(drawn(r, 3, 4)))
        seen["slices"] = c.all_reduce("SUM", xd.IndexedSlices(drawn(r, 1 + r, 2), np.arange(1 + r), (9, 2)))
        seen["gathered"] = c.all_gather(drawn(r, r, 2), 0)
        seen["columns"] = c.all_gather(drawn(r, 2, 1 + r), 1)
        weight = 0 if r == n - 1 else 1 + r
        seen["weighted"] = c.all_reduce("MEAN", None if not weight else np.full(2, float(r)), weight=weight)
        return seen

    of_each = each(s, s.run(step))
    for one in of_each:
        np.testing.assert_allclose(one["SUM"], of_all(s, 5).sum(0), rtol=1e-5)
        np.testing.assert_array_equal(one["narrow"], [100 * n] * 2)
        np.testing.assert_array_equal(one["gathered"], np.concatenate([drawn(r, r, 2) for r in range(n)]))
        shares = np.arange(1, n)
        np.testing.assert_allclose(one["weighted"], np.full(2, ((shares - 1) * shares).sum() / shares.sum()))
    return None, of_each


@contract
def merge_calls_see_all_replicas(s: xd.Strategy) -> tuple[Any, Any]:
    with s.scope():
        v = xd.Variable(np.zeros(2, "f4"))

    def merged(strategy: xd.Strategy, value: Any, factor: float) -> Any:
        total = strategy.reduce("SUM", value, None)
        v.assign_add(factor * total)
        return total

    def step() -> Any:
        return replica().merge_call(merged, args=(np.full(2, float(rid()), "f4"),), kwargs={"factor": 2.0})

    of_each = each(s, s.run(step))
    n = s.num_replicas_in_sync
    np.testing.assert_array_equal(v.read_value(), [n * (n - 1.0)] * 2)
    xd.assert_replicas_equal(v)
    return v.read_value(), of_each


@contract
def values_from_functions_have_global_ids(s: xd.Strategy) -> tuple[Any, Any]:
    made = s.distribute_values_from_function(
        lambda c: np.array([c.replica_id_in_sync_group, c.num_replicas_in_sync])
    )
    return s.num_replicas_in_sync, each(
        s, s.run(lambda x: np.append(x, [rid(), replica().num_replicas_in_sync]), (made,))
    )


# ---------------------------------------------------------------- what is built upon it


@contract
def metrics_are_of_all_examples(s: xd.Strategy) -> tuple[Any, Any]:
    n = s.num_replicas_in_sync
    rng = np.random.default_rng(3)
    labels, scores = rng.integers(0, 2, 40), rng.random(40)
    with s.scope():
        metrics = [
            xd.metrics.Mean(),
            xd.metrics.MeanSquaredError(),
            xd.metrics.AUC(),
            xd.metrics.Accuracy(),
            xd.metrics.F1Score(),
        ]

    def step() -> None:
        mine = slice(rid(), None, n + 1)  # and some that nobody sees
        metrics[0].update_state(scores[mine])
        for metric in metrics[1:]:
            metric.update_state(labels[mine], scores[mine])

    s.run(step)
    seen_rows = np.concatenate([np.arange(40)[r :: n + 1] for r in range(n)])
    results = [np.asarray(metric.result()) for metric in metrics]
    np.testing.assert_allclose(results[0], scores[seen_rows].mean(), rtol=1e-6)
    np.testing.assert_allclose(results[1], np.square(scores - labels)[seen_rows].mean(), rtol=1e-6)
    for metric in metrics:
        metric.reset_state()
    s.run(step)
    for metric, result in zip(metrics, results, strict=True):
        np.testing.assert_array_equal(np.asarray(metric.result()), result)
    return results, ()


@contract
def normalization_over_all_shares(s: xd.Strategy) -> tuple[Any, Any]:
    n = s.num_replicas_in_sync
    lengths = [1 + r % 2 for r in range(n)]
    lengths[-1] = 0
    with s.scope():
        layer = xd.SyncBatchNorm(4)

    def step() -> Any:
        x = drawn(rid(), lengths[rid()], 4)
        y, kept = layer.forward(x)
        return [*xd.sync_moments(x, axis=0), y, *layer.backward(drawn(rid() + 9, *x.shape), kept)]

    of_each = each(s, s.run(step))
    whole = np.concatenate([drawn(r, lengths[r], 4) for r in range(n)]).astype("f8")
    for mean, variance, *_ in of_each:
        np.testing.assert_allclose(mean, whole.mean(0), rtol=1e-5)
        np.testing.assert_allclose(variance, whole.var(0), rtol=1e-4)
    variables = list(layer.variables.values())
    xd.assert_replicas_equal(variables)
    return [v.read_value() for v in variables], of_each


@contract
def random_streams_are_those_of_as_many_replicas_in_one_process(s: xd.Strategy) -> tuple[Any, Any]:
    with s.scope():
        generators = xd.ReplicaGenerators(7)
    of_each = each(s, s.run(lambda: [generators.replica().normal(size=3), generators.common.normal(size=3)]))
    return generators.across.normal(size=3), of_each


@contract
def averages_of_losses(s: xd.Strategy) -> tuple[Any, Any]:
    def step() -> Any:
        loss = xd.compute_average_loss(drawn(rid(), 3), global_batch_size=3 * s.num_replicas_in_sync)
        return [replica().all_reduce("SUM", loss), xd.scale_regularization_loss(np.float32(6.0))]

    of_each = each(s, s.run(step))
    for loss, regularization in of_each:
        np.testing.assert_allclose(loss, of_all(s, 3).mean(), rtol=1e-5)
        np.testing.assert_allclose(regularization, 6.0 / s.num_replicas_in_sync, rtol=1e-6)
    return None, of_each


# ------------------------------------------------------------------------- datasets


@contract
def global_batches_are_shared_once_and_in_order(s: xd.Strategy) -> tuple[Any, Any]:
    data = {"x": np.arange(23.0), "y": (np.arange(46).reshape(23, 2),)}
    seen = []
    for dataset in (
        xd.from_arrays(data).batch(7),
        xd.from_arrays(data).shuffle(seed=3).batch(7).repeat(2),
        xd.from_arrays(data).batch(2),  # fewer rows than replicas
        xd.from_generator(lambda: iter([data, data])),
        xd.from_arrays(data).filter(lambda row: row["x"] % 3 == 0).batch(4).prefetch(2),
    ):
        distributed = s.distribute_dataset(dataset)
        for _ in range(2):  # each time is another epoch, of this dataset as of the distributed one
            for element, batch in zip(distributed, dataset, strict=True):
                np.testing.assert_array_equal(s.gather(element, 0)["x"], batch["x"])
                seen.append(each(s, element))
    return len(seen), list(zip(*seen, strict=True))


@contract
def a_position_in_a_dataset_is_saved_and_restored(s: xd.Strategy) -> tuple[Any, Any]:
    def make() -> Any:
        return s.distribute_dataset(xd.from_arrays(np.arange(20)).shuffle(seed=1).batch(6))

    iterator = iter(make())
    next(iterator), next(iterator)
    state = iterator.state()
    rest = [s.gather(element, 0) for element in iterator]
    again = iter(make())
    again.restore(state)
    for element, expected in zip(again, rest, strict=True):
        np.testing.assert_array_equal(s.gather(element, 0), expected)
    return [state, rest], ()


# --------------------------------------------------------------------- rarer things


@contract
def variables_as_values_and_values_as_arguments(s: xd.Strategy) -> tuple[Any, Any]:
    n = s.num_replicas_in_sync
    with s.scope():
        v = xd.Variable(np.full(2, 3.0, "f4"))
        own = xd.Variable(np.zeros(2, "f4"), synchronization="ON_READ", aggregation="MEAN")
        empty = xd.Variable(np.zeros((0, 3), "f4"), aggregation="SUM")
        large = xd.Variable(np.zeros(700_000, "f4"), aggregation="MEAN")
        wave = xd.Variable(np.zeros(2, "c8"), aggregation="SUM")

    def step() -> None:
        own.assign(np.full(2, float(rid()), "f4"))
        empty.assign_add(np.zeros((0, 3), "f4"))
        large.assign(drawn(rid(), 700_000))
        wave.assign_add(drawn(rid(), 2, dtype="c8") * np.complex64(1j))

    s.run(step)
    xd.assert_replicas_equal([v, empty, large, wave])
    np.testing.assert_allclose(large.read_value()[:50], of_all(s, 700_000).mean(0)[:50], rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="one and the same on all"):
        s.reduce("SUM", v, None)
    assert s.reduce("MEAN", v, None).tolist() == [3.0] * 2
    assert s.reduce("SUM", own, None).tolist() == [n * (n - 1) / 2] * 2
    placed = s.reduce_to("SUM", s.run(lambda: np.full(2, 1.0, "f4")), v)
    of_each = each(s, s.run(lambda x, y: x + y + rid(), (placed, v)))
    assert s.reduce("SUM", {}, None) == {}
    broadcast = each(s, s.broadcast_to(np.arange(3), v))[0]
    return [large.read_value(), wave.read_value(), own.read_value(), broadcast], of_each


@contract
def sharded_variables(s: xd.Strategy) -> tuple[Any, Any]:
    with s.scope():
        table = xd.ShardedVariable([xd.Variable(drawn(i, 3 - i, 2), aggregation="SUM") for i in range(3)])
        optimizer = xd.Adagrad(0.1)

    def step() -> Any:
        rows = np.array([rid() % 6, 5, 5], np.int64)
        optimizer.apply_gradients([(xd.IndexedSlices(drawn(rid(), 3, 2), rows, (6, 2)), table)])
        return xd.embedding_lookup(table, rows)

    of_each = each(s, s.run(step))
    xd.assert_replicas_equal(table)
    return [shard.read_value() for shard in table.shards], of_each


@contract
def steps_inside_merge_calls(s: xd.Strategy) -> tuple[Any, Any]:
    with s.scope():
        v = xd.Variable(np.zeros(2, "f4"), aggregation="SUM")

    def merged(strategy: xd.Strategy, value: Any) -> Any:
        doubled = strategy.run(lambda x: replica().all_reduce("SUM", 2 * x), (value,))
        strategy.run(lambda: v.assign_add(np.full(2, float(rid()), "f4")))
        return doubled

    of_each = each(s, s.run(lambda: replica().merge_call(merged, args=(np.float32(rid()),))))
    n = s.num_replicas_in_sync
    assert [float(one) for one in of_each] == [n * (n - 1.0)] * len(of_each)
    assert v.read_value().tolist() == [n * (n - 1) / 2] * 2
    return v.read_value(), of_each


@contract
def steps_after_a_caught_error_in_a_function_of_all(s: xd.Strategy) -> tuple[Any, Any]:
    """What is refused before anything is sent leaves all as it was."""
    with s.scope():
        v, w = xd.Variable(np.zeros(2, "f4")), xd.Variable(np.zeros(2, "f4"), aggregation="SUM")

    def step() -> Any:
        for wrong in (
            lambda: v.assign(np.ones(2, "f4")),  # no aggregation
            lambda: w.assign(np.ones(3, "f4")),
            lambda: replica().all_gather(np.float32(1), 0),
            lambda: xd.SGD(0.1).apply_gradients([(np.ones(3, "f4"), w)]),
        ):
            with pytest.raises(ValueError, match=r"need|aggregation is NONE"):
                wrong()
        w.assign_add(np.ones(2, "f4"))
        return replica().all_reduce("SUM", np.ones(2))

    of_each = each(s, s.run(step))
    assert w.read_value().tolist() == [s.num_replicas_in_sync] * 2
    return w.read_value(), of_each
