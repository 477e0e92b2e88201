"""Saving objects and restoring them: values, other replicas and shardings, what does not match."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import strategies as xpd

MakeStrategy = Callable[[int], xpd.Strategy]


@pytest.fixture
def mirrored() -> Iterator[MakeStrategy]:
    with ExitStack() as stack:
        yield lambda n: stack.enter_context(xpd.MirroredStrategy([f"cpu:{i}" for i in range(n)]))


def local(strategy: xpd.Strategy, variable: xpd.Variable) -> list[Any]:
    return [np.asarray(value).tolist() for value in strategy.experimental_local_results(variable)]


# ------------------------------------------------------------------------ values


@pytest.mark.parametrize(
    "dtype",
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex64 complex128".split(),  # noqa: SIM905
)
def test_a_variable_of_every_dtype_comes_back_bit_for_bit(dtype: str, tmp_path: Path) -> None:
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    words = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 256, 3 * kind.itemsize, np.uint8)
    value = words.view(kind)
    v = xpd.Variable(value)
    path = xpd.Checkpoint(v=v).save(tmp_path / "c")
    v.assign(np.zeros(3, kind))
    xpd.Checkpoint(v=v).restore(path).assert_consumed()
    assert v.numpy().tobytes() == value.tobytes()


def test_scalars_and_empty_arrays_come_back(tmp_path: Path) -> None:
    scalar, empty = xpd.Variable(2.5), xpd.Variable(np.zeros((0, 3)))
    path = xpd.Checkpoint(scalar=scalar, empty=empty).save(tmp_path / "c")
    scalar.assign(0.0)
    xpd.Checkpoint(scalar=scalar, empty=empty).restore(path).assert_consumed()
    assert scalar.numpy() == 2.5


def test_restoring_sets_every_copy_of_a_variable(mirrored: MakeStrategy, tmp_path: Path) -> None:
    strategy = mirrored(3)
    with strategy.scope():
        v = xpd.Variable([1.0, 2.0])
    path = xpd.Checkpoint(v=v).save(tmp_path / "c")
    v.assign([0.0, 0.0])
    xpd.Checkpoint(v=v).restore(path)
    assert local(strategy, v) == [[1.0, 2.0]] * 3


def test_arrays_are_filled_in_place_whatever_their_layout(tmp_path: Path) -> None:
    gaps, big_endian = np.arange(6.0)[::2], np.arange(3, dtype=">i4")
    path = xpd.Checkpoint(gaps=gaps, big_endian=big_endian).save(tmp_path / "c")
    gaps[:], big_endian[:] = 0, 0
    xpd.Checkpoint(gaps=gaps, big_endian=big_endian).restore(path).assert_consumed()
    assert gaps.tolist() == [0, 2, 4]
    assert big_endian.tolist() == [0, 1, 2]


def test_numbers_strings_and_lists_of_them_become_what_they_were(tmp_path: Path) -> None:
    history: dict[str, Any] = {"losses": [2.0, 1.5], "name": "first"}
    checkpoint = xpd.Checkpoint(step=3, best=-np.inf, history=history, done=False, note=None, shape=(1, 2))
    path = checkpoint.save(tmp_path / "c")
    checkpoint.step += 1
    checkpoint.best = 0.5
    history["losses"].append(1.0)
    checkpoint.restore(path).assert_consumed()
    assert (checkpoint.step, checkpoint.best, checkpoint.done) == (3, -np.inf, False)
    assert (checkpoint.note, checkpoint.shape) == (None, (1, 2))
    assert history == {"losses": [2.0, 1.5], "name": "first"}  # the same dict, which the program holds too


def test_integers_beyond_64_bits_are_kept_exactly(tmp_path: Path) -> None:
    checkpoint = xpd.Checkpoint(seed=2**127 + 1)
    path = checkpoint.save(tmp_path / "c")
    checkpoint.seed = 0
    checkpoint.restore(path)
    assert checkpoint.seed == 2**127 + 1


def test_objects_in_lists_dicts_and_other_checkpoints_are_found(tmp_path: Path) -> None:
    def made(fill: float) -> tuple[xpd.Checkpoint, list[xpd.Variable]]:
        v = [xpd.Variable(fill * (i + 1)) for i in range(4)]
        return xpd.Checkpoint(
            layers=[{"w": v[0]}, (v[1],)], inner=xpd.Checkpoint(v=v[2]), p=xpd.PerReplica([v[3]])
        ), v

    first, _ = made(1.0)
    path = first.save(tmp_path / "c")
    second, variables = made(0.0)
    second.restore(path).assert_consumed()
    assert [float(v) for v in variables] == [1.0, 2.0, 3.0, 4.0]
    assert sorted(xpd.load_checkpoint(path)) == ["inner/v", "layers/0/w", "layers/1/0", "p/0"]


def test_a_layer_that_tells_its_variables_is_saved_by_their_names(tmp_path: Path) -> None:
    layer = xpd.SyncBatchNorm(3)
    path = xpd.Checkpoint(norm=layer).save(tmp_path / "c")
    assert {"norm/gamma", "norm/moving_mean"} <= set(xpd.load_checkpoint(path))
    layer.gamma.assign(np.zeros(3, layer.gamma.dtype))
    xpd.Checkpoint(norm=layer).restore(path).assert_consumed()
    assert layer.gamma.numpy().tolist() == [1, 1, 1]


def test_an_object_with_state_and_restore_is_saved_with_its_arrays(tmp_path: Path) -> None:
    class Counter:
        def __init__(self) -> None:
            self.counts, self.label = np.zeros(2), "none"

        def state(self) -> Any:
            return {"counts": self.counts, "inner": [{"label": self.label}]}

        def restore(self, state: Any) -> None:
            self.counts, self.label = state["counts"], state["inner"][0]["label"]

    counter = Counter()
    counter.counts, counter.label = np.array([1.0, 2.0]), "some"
    path = xpd.Checkpoint(counter=counter).save(tmp_path / "c")
    other = Counter()
    xpd.Checkpoint(counter=other).restore(path).assert_consumed()
    assert (other.counts.tolist(), other.label) == ([1.0, 2.0], "some")


def test_other_programs_can_read_the_arrays(tmp_path: Path) -> None:
    path = xpd.Checkpoint(v=xpd.Variable([[1.0, 2.0]]), n=xpd.Variable(3)).save(tmp_path / "c")
    loaded = safetensors.numpy.load_file(path)
    assert {name: array.tolist() for name, array in loaded.items()} == {"v": [[1.0, 2.0]], "n": 3}


# ------------------------------------------------- other replicas, strategies, shardings


@pytest.mark.parametrize(
    ("aggregation", "on_three", "on_one"),
    [
        ("SUM", [2.0, 2.0, 2.0], [6.0]),
        ("MEAN", [2.0, 2.0, 2.0], [2.0]),
        ("ONLY_FIRST_REPLICA", [1.0] * 3, [1.0]),
    ],
)
def test_own_copies_are_saved_as_read_and_restored_as_assigned(
    aggregation: str, on_three: list[float], on_one: list[float], mirrored: MakeStrategy, tmp_path: Path
) -> None:
    three, one = mirrored(3), mirrored(1)
    variables = []
    for strategy in (three, one):
        with strategy.scope():
            variables.append(xpd.Variable(0.0, synchronization="ON_READ", aggregation=aggregation))

    def write() -> None:
        replica = xpd.get_replica_context()
        assert replica is not None
        variables[0].assign(replica.replica_id + 1.0)

    three.run(write)
    path = xpd.Checkpoint(v=variables[0]).save(tmp_path / "c")
    for strategy, variable, expected in zip((three, one), variables, (on_three, on_one), strict=True):
        xpd.Checkpoint(v=variable).restore(path)
        assert local(strategy, variable) == expected


def test_own_copies_without_aggregation_are_refused_by_name(mirrored: MakeStrategy, tmp_path: Path) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        v = xpd.Variable(0.0, synchronization="ON_READ", name="mine")
    with pytest.raises(ValueError, match=r"mine.*aggregation"):
        xpd.Checkpoint(v=v).save(tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_moves_between_all_strategies(mirrored: MakeStrategy, tmp_path: Path) -> None:
    central = xpd.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:0")
    makers: list[xpd.Strategy] = [mirrored(2), central, xpd.OneDeviceStrategy("cpu:0"), mirrored(4)]
    for number, (before, after) in enumerate(zip(makers, makers[1:] + makers[:1], strict=True)):
        with before.scope():
            saved = xpd.Variable([1.0, float(number)])
        with after.scope():
            restored = xpd.Variable([0.0, 0.0])
        xpd.Checkpoint(v=restored).restore(xpd.Checkpoint(v=saved).save(tmp_path / "c"))
        assert restored.numpy().tolist() == [1.0, number]
    central.close()


@pytest.mark.parametrize("rows", [[3, 2], [5], [2, 2, 1, 0], [1, 1, 1, 1, 1]])
@pytest.mark.parametrize("other_rows", [[4, 1], [5], [0, 5]])
def test_a_sharded_variable_restores_into_any_other_sharding(
    rows: list[int], other_rows: list[int], tmp_path: Path
) -> None:
    def sharded(value: Any, sizes: list[int]) -> xpd.ShardedVariable:
        parts = np.split(value, np.cumsum(sizes)[:-1])
        return xpd.ShardedVariable([xpd.Variable(part) for part in parts])

    table = np.arange(15.0).reshape(5, 3)
    path = xpd.Checkpoint(t=sharded(table, rows)).save(tmp_path / "c")
    assert xpd.load_checkpoint(path)["t"].tolist() == table.tolist()
    other = sharded(np.zeros((5, 3)), other_rows)
    xpd.Checkpoint(t=other).restore(path).assert_consumed()
    assert other.numpy().tolist() == table.tolist()


def test_a_plain_variable_and_a_sharded_one_restore_into_each_other(tmp_path: Path) -> None:
    plain = xpd.Variable([1, 2, 3])
    sharded = xpd.ShardedVariable([xpd.Variable([0, 0]), xpd.Variable([0])])
    xpd.Checkpoint(v=sharded).restore(xpd.Checkpoint(v=plain).save(tmp_path / "c"))
    assert sharded.numpy().tolist() == [1, 2, 3]


# --------------------------------------------------------------------- optimizers

RULES: dict[str, Callable[[], xpd.Optimizer]] = {
    "sgd": lambda: xpd.SGD(0.1),
    "nesterov": lambda: xpd.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: xpd.Adam(0.05, amsgrad=True),
}


class Model:
    """Two weights and an optimizer on a strategy, trained on numbers drawn from a generator."""

    def __init__(self, strategy: xpd.Strategy, rule: str, *, seed: int = 0) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.w = xpd.Variable(np.full((4, 3), 0.5), name="w")
            self.b = xpd.Variable(np.full(3, 0.25, np.float32), name="b")
            self.optimizer = RULES[rule]()
        self.rng = np.random.default_rng(seed)
        self.checkpoint = xpd.Checkpoint(
            weights=[self.w, self.b], optimizer=self.optimizer, rng=self.rng, step=0
        )

    def train(self, steps: int) -> list[bytes]:
        n = self.strategy.num_replicas_in_sync
        for _ in range(steps):
            x = self.rng.normal(size=(12, 4))
            self.strategy.run(self._step, (xpd.PerReplica(np.split(x, n)) if n > 1 else x,))
            self.checkpoint.step += 1
        return [self.w.numpy().tobytes(), self.b.numpy().tobytes()]

    def _step(self, x: Any) -> None:
        out = x @ self.w + self.b
        self.optimizer.apply_gradients(
            [(x.T @ out / 12, self.w), (out.sum(0).astype(np.float32) / 12, self.b)]
        )


@pytest.mark.parametrize("rule", RULES)
def test_a_resumed_run_equals_the_uninterrupted_one_to_the_last_bit(
    rule: str, mirrored: MakeStrategy, tmp_path: Path
) -> None:
    uninterrupted = Model(mirrored(2), rule).train(7)
    first = Model(mirrored(2), rule)
    first.train(3)
    path = first.checkpoint.save(tmp_path / "c")
    second = Model(mirrored(2), rule, seed=99)
    second.optimizer.learning_rate = 0.7
    second.checkpoint.restore(path).assert_consumed()
    assert second.optimizer.learning_rate == first.optimizer.learning_rate
    assert second.train(4) == uninterrupted
    assert (second.optimizer.iterations, second.checkpoint.step) == (7, 7)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("replicas", [1, 3, 4])
def test_a_run_resumed_on_other_replicas_differs_by_rounding_only(
    rule: str, replicas: int, mirrored: MakeStrategy, tmp_path: Path
) -> None:
    uninterrupted = Model(mirrored(2), rule)
    uninterrupted.train(3)
    path = uninterrupted.checkpoint.save(tmp_path / "c")
    uninterrupted.train(4)
    resumed = Model(mirrored(replicas), rule)
    resumed.checkpoint.restore(path).assert_consumed()
    resumed.train(4)
    np.testing.assert_allclose(resumed.w.numpy(), uninterrupted.w.numpy(), rtol=1e-6)
    np.testing.assert_allclose(resumed.b.numpy(), uninterrupted.b.numpy(), rtol=1e-5)


def test_restoring_takes_back_updates_made_in_between(mirrored: MakeStrategy, tmp_path: Path) -> None:
    model = Model(mirrored(2), "adam")
    model.train(2)
    path = model.checkpoint.save(tmp_path / "c")
    once = model.train(2)
    model.checkpoint.restore(path).assert_consumed()
    assert model.train(2) == once


def test_slots_are_restored_before_anything_has_been_trained(mirrored: MakeStrategy, tmp_path: Path) -> None:
    first = Model(mirrored(2), "adam")
    first.train(3)
    path = first.checkpoint.save(tmp_path / "c")
    momentum = first.optimizer.slot(first.w, "momentum").copy()
    second = Model(mirrored(2), "adam")
    second.checkpoint.restore(path)
    assert (second.optimizer.slot(second.w, "momentum") == momentum).all()


@pytest.mark.parametrize("optimizer_first", [True, False])
def test_slots_of_a_variable_attached_later_are_restored_then(optimizer_first: bool, tmp_path: Path) -> None:
    w, optimizer = xpd.Variable([1.0, 2.0]), xpd.SGD(0.1, momentum=0.9)
    optimizer.apply_gradients([([1.0, 1.0], w)])
    path = xpd.Checkpoint(w=w, optimizer=optimizer).save(tmp_path / "c")
    later, other = xpd.Variable([0.0, 0.0]), xpd.SGD(0.5, momentum=0.9)
    checkpoint = xpd.Checkpoint()
    status = checkpoint.restore(path)
    for name in ["optimizer", "w"] if optimizer_first else ["w", "optimizer"]:
        setattr(checkpoint, name, {"optimizer": other, "w": later}[name])
    status.assert_consumed()
    assert other.learning_rate == 0.1
    assert later.numpy().tolist() == w.numpy().tolist()
    assert other.slot(later, "momentum").tolist() == optimizer.slot(w, "momentum").tolist()


def test_a_schedule_stays_the_programs_own(tmp_path: Path) -> None:
    optimizer = xpd.SGD(lambda iterations: 1.0 / (1 + iterations))
    path = xpd.Checkpoint(o=optimizer).save(tmp_path / "c")
    fixed = xpd.SGD(0.3)
    xpd.Checkpoint(o=fixed).restore(path).assert_consumed()
    assert fixed.learning_rate == 0.3
    path = xpd.Checkpoint(o=fixed).save(tmp_path / "c")
    xpd.Checkpoint(o=optimizer).restore(path).assert_consumed()
    assert callable(optimizer.learning_rate)


def test_the_loss_scale_and_what_it_depends_on_come_back(tmp_path: Path) -> None:
    def made() -> tuple[xpd.LossScaleOptimizer, xpd.Variable]:
        return xpd.LossScaleOptimizer(xpd.SGD(0.5, momentum=0.9), 4.0, dynamic_growth_steps=2), xpd.Variable(
            [1.0]
        )

    def train(optimizer: xpd.LossScaleOptimizer, w: xpd.Variable, gradients: list[float]) -> list[float]:
        for gradient in gradients:
            optimizer.apply_gradients([(np.array([gradient * optimizer.loss_scale]), w)])
        return [optimizer.loss_scale, optimizer.iterations, optimizer.skipped_steps, float(w[0])]

    optimizer, w = made()
    train(optimizer, w, [1.0, 1.0, np.inf, 1.0])
    path = xpd.Checkpoint(optimizer=optimizer, w=w).save(tmp_path / "c")
    expected = train(optimizer, w, [1.0, 1.0, 1.0])
    optimizer, w = made()
    xpd.Checkpoint(optimizer=optimizer, w=w).restore(path).assert_consumed()
    assert train(optimizer, w, [1.0, 1.0, 1.0]) == expected


def test_metrics_averages_and_replica_generators_come_back(mirrored: MakeStrategy, tmp_path: Path) -> None:
    def made(strategy: xpd.Strategy) -> dict[str, Any]:
        with strategy.scope():
            w = xpd.Variable([0.0, 0.0])
            return {
                "metric": xpd.metrics.Mean(),
                "average": xpd.ExponentialMovingAverage([w], 0.9),
                "generators": xpd.ReplicaGenerators(3),
                "w": w,
            }

    strategy = mirrored(2)
    first = made(strategy)
    strategy.run(lambda: first["metric"].update([1.0, 2.0]))
    first["w"].assign([1.0, 2.0])
    first["average"].update()
    strategy.run(lambda: first["generators"].replica().random())
    path = xpd.Checkpoint(**first).save(tmp_path / "c")
    second = made(strategy)
    xpd.Checkpoint(**second).restore(path).assert_consumed()
    assert second["metric"].result() == first["metric"].result() == 1.5
    assert second["average"].average(second["w"]).tolist() == first["average"].average(first["w"]).tolist()
    for one, other in zip(
        *(
            strategy.experimental_local_results(strategy.run(lambda o=o: o["generators"].replica().random()))
            for o in (first, second)
        ),
        strict=True,
    ):
        assert one == other


@pytest.mark.parametrize(
    "make",
    [
        lambda: xpd.Adagrad(0.1),
        lambda: xpd.RMSprop(0.1, momentum=0.9, centered=True),
        lambda: xpd.LAMB(0.1),
        lambda: xpd.AdamW(0.1),
    ],
    ids=["adagrad", "rmsprop", "lamb", "adamw"],
)
def test_slots_of_every_rule_restore_also_into_shards(
    make: Callable[[], xpd.Optimizer], tmp_path: Path
) -> None:
    def sharded(sizes: list[int], value: Any) -> xpd.ShardedVariable:
        return xpd.ShardedVariable([xpd.Variable(part) for part in np.split(value, np.cumsum(sizes)[:-1])])

    value, gradients = np.arange(10.0).reshape(5, 2) + 1, np.random.default_rng(0).normal(size=(4, 5, 2))
    one, optimizer = sharded([3, 2], value), make()
    for gradient in gradients[:2]:
        optimizer.apply_gradients([(gradient, one)])
    path = xpd.Checkpoint(table=one, optimizer=optimizer).save(tmp_path / "c")
    other, resumed = sharded([1, 4], np.zeros((5, 2))), make()
    xpd.Checkpoint(table=other, optimizer=resumed).restore(path).assert_consumed()
    for slot in optimizer.rule.slots:
        whole, again = (
            np.concatenate([o.slot(shard, slot) for shard in t.shards])
            for o, t in ((optimizer, one), (resumed, other))
        )
        assert (whole == again).all(), slot
    again_path = xpd.Checkpoint(table=other, optimizer=resumed).save(tmp_path / "again")
    assert xpd.load_checkpoint(again_path).keys() == xpd.load_checkpoint(path).keys()


def test_an_optimizer_is_not_saved_without_the_variables_it_has_slots_of(tmp_path: Path) -> None:
    w, optimizer = xpd.Variable([1.0], name="left_out"), xpd.Adam()
    optimizer.apply_gradients([([1.0], w)])
    with pytest.raises(
        ValueError, match="optimizer has slots of left_out, which this checkpoint doesn't hold"
    ):
        xpd.Checkpoint(optimizer=optimizer).save(tmp_path / "c")


def test_two_optimizers_save_slots_of_their_own_variables_only(tmp_path: Path) -> None:
    a, b = xpd.Variable([1.0]), xpd.Variable([1.0])
    first, second = xpd.SGD(0.1, momentum=0.9), xpd.Adam()
    first.apply_gradients([([1.0], a)])
    second.apply_gradients([([1.0], b)])
    path = xpd.Checkpoint(a=a, b=b, first=first, second=second).save(tmp_path / "c")
    names = [name for name in xpd.load_checkpoint(path) if name.count("/") == 2]
    assert sorted(names) == ["first/momentum/a", "second/momentum/b", "second/velocity/b"]


# ------------------------------------------------------------- datasets and randomness


def test_an_iterator_goes_on_where_it_was(mirrored: MakeStrategy, tmp_path: Path) -> None:
    strategy = mirrored(2)

    def batches() -> Any:
        return strategy.distribute_dataset(xpd.from_arrays(np.arange(6)).batch(2))

    iterator = iter(batches())
    next(iterator), next(iterator)
    path = xpd.Checkpoint(it=iterator, step=2).save(tmp_path / "c")
    resumed = iter(batches())
    checkpoint = xpd.Checkpoint(it=resumed, step=0)
    checkpoint.restore(path).assert_consumed()
    assert strategy.gather(next(resumed), 0).tolist() == [4, 5]
    assert checkpoint.step == 2


@pytest.mark.parametrize(
    "bits", [np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64]
)
def test_a_generator_draws_the_numbers_that_would_have_come(bits: Any, tmp_path: Path) -> None:
    rng = np.random.Generator(bits(5))
    rng.integers(0, 10, 3, np.int32)
    path = xpd.Checkpoint(rng=rng, bits=rng.bit_generator).save(tmp_path / "c")
    expected = rng.integers(0, 1000, 5, np.int32).tolist()
    other = np.random.Generator(bits(6))
    xpd.Checkpoint(rng=other, bits=other.bit_generator).restore(path).assert_consumed()
    assert other.integers(0, 1000, 5, np.int32).tolist() == expected


def test_pythons_and_old_numpys_generators_go_on_too(tmp_path: Path) -> None:
    python, old = random.Random(1), np.random.RandomState(1)
    python.gauss(0, 1), old.normal(size=3)
    path = xpd.Checkpoint(python=python, old=old).save(tmp_path / "c")
    expected = [python.gauss(0, 1), python.random(), *old.normal(size=3)]
    python, old = random.Random(), np.random.RandomState()
    xpd.Checkpoint(python=python, old=old).restore(path).assert_consumed()
    assert [python.gauss(0, 1), python.random(), *old.normal(size=3)] == expected


def test_seeds_spawn_the_children_that_would_have_come(tmp_path: Path) -> None:
    seeds, rng = np.random.SeedSequence(3), np.random.default_rng(4)
    seeds.spawn(2), rng.spawn(1)
    path = xpd.Checkpoint(seeds=seeds, rng=rng).save(tmp_path / "c")
    expected = [seeds.spawn(1)[0].generate_state(2).tolist(), rng.spawn(1)[0].random()]
    seeds, rng = np.random.SeedSequence(3), np.random.default_rng(4)
    xpd.Checkpoint(seeds=seeds, rng=rng).restore(path).assert_consumed()
    assert [seeds.spawn(1)[0].generate_state(2).tolist(), rng.spawn(1)[0].random()] == expected


def test_a_generator_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = xpd.Checkpoint(rng=np.random.default_rng(0)).save(tmp_path / "c")
    with pytest.raises(ValueError, match="state of PCG64; this generator is Philox"):
        xpd.Checkpoint(rng=np.random.Generator(np.random.Philox(0))).restore(path)


# ----------------------------------------------------------------- what does not match


def test_every_value_that_does_not_fit_is_named_and_nothing_changes(tmp_path: Path) -> None:
    path = xpd.Checkpoint(a=xpd.Variable([1.0, 2.0]), b=xpd.Variable(1.0), c=xpd.Variable([5.0])).save(
        tmp_path / "c"
    )
    a, b, c = xpd.Variable([0.0]), xpd.Variable(np.float32(0)), xpd.Variable([0.0])
    with pytest.raises(xpd.CheckpointMismatchError) as caught:
        xpd.Checkpoint(a=a, b=b, c=c).restore(path)
    assert caught.value.mismatches == (
        "a: the checkpoint has float64 of shape (2,), the variable is float64 of shape (1,)",
        "b: the checkpoint has float64 of shape (), the variable is float32 of shape ()",
    )
    assert c.numpy().tolist() == [0.0]


def test_a_state_is_not_taken_for_an_array_nor_an_array_for_a_state(tmp_path: Path) -> None:
    path = xpd.Checkpoint(x=xpd.Variable(1.0), y=2).save(tmp_path / "c")
    with pytest.raises(xpd.CheckpointMismatchError) as caught:
        xpd.Checkpoint(x=1, y=xpd.Variable(0.0)).restore(path)
    assert caught.value.mismatches == (
        "y: the checkpoint has a state, here is an array",
        "x: the checkpoint has an array, here is a state",
    )


def test_a_state_that_is_refused_leaves_the_other_objects_as_they_were(tmp_path: Path) -> None:
    def objects(seed: int, value: float) -> dict[str, Any]:
        data = xpd.from_arrays(np.arange(4)).shuffle(seed=seed).batch(2)
        return {"n": value, "rng": random.Random(value), "it": iter(data), "v": xpd.Variable(value)}

    path = xpd.Checkpoint(**objects(1, 1.0)).save(tmp_path / "c")
    mine = objects(2, 0.0)
    checkpoint = xpd.Checkpoint(**mine)
    with pytest.raises(ValueError, match=r"under shuffle seeds") as caught:
        checkpoint.restore(path)
    assert "restore: it refused its state" in "".join(caught.value.__notes__)
    assert checkpoint.n == 0.0
    assert mine["rng"].random() == random.Random(0.0).random()
    assert mine["v"].numpy() == 0.0


def test_leftovers_are_told_on_request(tmp_path: Path) -> None:
    path = xpd.Checkpoint(a=xpd.Variable(1.0), b=2).save(tmp_path / "c")
    status = xpd.Checkpoint(a=xpd.Variable(0.0), x=xpd.Variable(0.0), y=1).restore(path)
    assert (status.missing, status.unused) == (["x", "y"], ["b"])
    with pytest.raises(AssertionError, match=r"no value for x, y; nothing here takes b"):
        status.assert_consumed()
    with pytest.raises(AssertionError, match=r"has no value for x, y"):
        status.assert_existing_objects_matched()
    xpd.Checkpoint(a=xpd.Variable(0.0)).restore(path).assert_existing_objects_matched()


def test_leftovers_that_nobody_asked_about_are_warned_of(tmp_path: Path) -> None:
    path = xpd.Checkpoint(a=xpd.Variable(1.0)).save(tmp_path / "c")
    with pytest.warns(xpd.PartialRestoreWarning, match="no value for other; nothing here takes a"):
        xpd.Checkpoint(other=xpd.Variable(0.0)).restore(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        xpd.Checkpoint(other=xpd.Variable(0.0)).restore(path).expect_partial()
        xpd.Checkpoint(other=xpd.Variable(0.0)).read(path)


def test_a_value_waits_for_its_object_even_if_the_file_is_removed(tmp_path: Path) -> None:
    path = xpd.Checkpoint(inner=xpd.Checkpoint(v=xpd.Variable([7.0]))).save(tmp_path / "c")
    checkpoint = xpd.Checkpoint(inner=xpd.Checkpoint())
    status = checkpoint.restore(path)
    Path(path).unlink()
    v = xpd.Variable([0.0])
    checkpoint.inner.v = v
    status.assert_consumed()
    assert v.numpy().tolist() == [7.0]
    v.assign([8.0])
    checkpoint.inner.v = v  # its value has been given out
    assert v.numpy().tolist() == [8.0]


def test_a_later_object_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    checkpoint = xpd.Checkpoint()
    checkpoint.read(xpd.Checkpoint(v=xpd.Variable([7.0])).save(tmp_path / "c"))
    with pytest.raises(xpd.CheckpointMismatchError, match="v: the checkpoint has"):
        checkpoint.v = xpd.Variable([0.0, 0.0])
    assert not hasattr(checkpoint, "v")


# --------------------------------------------------------------------------- bad calls


def test_what_cannot_be_saved_is_named_with_the_way_out() -> None:
    with pytest.raises(
        TypeError, match=r"checkpoint: model/0 is object; need .* state\(\) and restore\(state\)"
    ):
        xpd.Checkpoint(model=[object()])


@pytest.mark.parametrize("name", ["save", "restore", "objects", "_private", "$about"])
def test_names_that_are_taken_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="need another, this one is taken"):
        xpd.Checkpoint(**{name: 1})


def test_two_objects_of_one_name_and_trees_without_end_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="two objects that are called a/b"):
        xpd.Checkpoint(**{"a": {"b": xpd.Variable(1.0)}, "a/b": 2}).save(tmp_path / "c")
    endless: list[Any] = [xpd.Variable(1.0)]
    endless.append(endless)
    with pytest.raises(ValueError, match="x/1 contains itself"):
        xpd.Checkpoint(x=endless)


def test_saving_and_restoring_are_refused_in_a_step(mirrored: MakeStrategy, tmp_path: Path) -> None:
    checkpoint = xpd.Checkpoint(v=xpd.Variable(1.0))
    path = checkpoint.save(tmp_path / "c")
    strategy = mirrored(2)
    for call in (checkpoint.save, checkpoint.restore):
        with pytest.raises(xpd.ReplicaContextError, match="called in a step"):
            strategy.run(lambda call=call: call(path))


def test_saving_works_in_any_scope(mirrored: MakeStrategy, tmp_path: Path) -> None:
    one, other = mirrored(2), mirrored(3)
    with one.scope():
        v = xpd.Variable(1.0)
    with other.scope():
        path = xpd.Checkpoint(v=v).save(tmp_path / "c")
        v_other = xpd.Variable(0.0, synchronization="ON_READ", aggregation="SUM")
    with one.scope():
        xpd.Checkpoint(v=v_other).restore(path)
    assert float(v_other) == pytest.approx(1.0)
