"""Modules whose parameters are variables train as plain PyTorch trains them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strategies import (
    SGD,
    Adam,
    CentralStorageStrategy,
    Checkpoint,
    IndexedSlices,
    LocalVariable,
    MirroredStrategy,
    OneDeviceStrategy,
    ReplicaContextError,
    ReplicatedModule,
    Strategy,
    all_reduce,
    asarray,
    get_replica_context,
)
from variables.values import PerReplica

pytest.importorskip("torch", reason="needs PyTorch, which is large: make test-frameworks installs it")
import torch
from torch import nn


@pytest.fixture(autouse=True)
def _own_number_of_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def two() -> Iterator[MirroredStrategy]:
    with MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        yield strategy


def make_net(dtype: Any = None, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))
    return net.to(dtype or torch.float64)


def make_plain(dtype: Any = None, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype or torch.float64)


def batches(count: int = 5, size: int = 8) -> list[tuple[Any, Any]]:
    rng = np.random.default_rng(0)
    return [(rng.standard_normal((size, 6)), rng.standard_normal((size, 3))) for _ in range(count)]


def own_index() -> int:
    context = get_replica_context()
    assert context is not None
    return context.replica_id_in_sync_group


def memory(variable: Any, replica: int) -> int:
    components = variable.components
    component = components[min(replica, len(components) - 1)]
    assert isinstance(component, LocalVariable)
    return int(component.memory.__array_interface__["data"][0])


def train(
    strategy: Strategy, model: ReplicatedModule, optimizer: Any, data: list[tuple[Any, Any]]
) -> list[float]:
    def step(x: Any, y: Any) -> Any:
        model.zero_grad()
        loss = ((model(x) - asarray(y, like=torch.empty(0))) ** 2).sum() / 8
        loss.backward()
        optimizer.apply_gradients(model.gradients())
        return loss.detach()

    losses = []
    for x, y in data:
        shares = strategy.num_replicas_in_sync
        parts = [PerReplica(np.array_split(part, shares)) for part in (x, y)]
        losses.append(float(strategy.reduce("SUM", strategy.run(step, args=parts))))
    return losses


def train_alone(net: Any, make_optimizer: Callable[[Any], Any], data: list[tuple[Any, Any]]) -> list[float]:
    optimizer = make_optimizer(net.parameters())
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = ((net(torch.from_numpy(x)) - torch.from_numpy(y)) ** 2).sum() / 8
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


STRATEGIES = [
    pytest.param(lambda: OneDeviceStrategy("cpu:0"), id="one_device"),
    pytest.param(lambda: MirroredStrategy(["cpu:0", "cpu:1"]), id="mirrored-2"),
    pytest.param(lambda: MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]), id="mirrored-3"),
    pytest.param(lambda: CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:0"), id="central-2"),
]


@pytest.mark.parametrize("make_strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (
            lambda: SGD(0.1, momentum=0.9, nesterov=True),
            lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
        ),
        (lambda: Adam(0.01, epsilon=1e-12), lambda p: torch.optim.Adam(p, 0.01, eps=1e-12)),
    ],
    ids=["sgd", "adam"],
)
def test_a_module_trains_as_in_plain_torch(
    make_strategy: Callable[[], Strategy], ours: Callable[[], Any], theirs: Callable[[Any], Any]
) -> None:
    plain = make_plain()
    expected = train_alone(plain, theirs, batches())
    with make_strategy() as strategy:
        with strategy.scope():
            optimizer = ours()
            model = ReplicatedModule(make_plain(), optimizer)
        losses = train(strategy, model, optimizer, batches())
        state = model.state_dict()
    np.testing.assert_allclose(losses, expected, rtol=1e-9)
    for name, tensor in plain.state_dict().items():
        np.testing.assert_allclose(state[name], tensor, rtol=1e-7, atol=1e-12)


def test_parameters_and_gradients_are_the_memory_of_variables_and_optimizer(two: MirroredStrategy) -> None:
    with two.scope():
        optimizer = SGD(0.1)
        model = ReplicatedModule(make_net(), optimizer)

    def step() -> None:
        model(np.ones((4, 6))).sum().backward()
        replica = own_index()
        pairs = model.gradients()
        for (gradient, variable), parameter in zip(pairs, model.module.parameters(), strict=True):
            assert parameter.data_ptr() == memory(variable, replica)
            assert parameter.grad.data_ptr() == gradient.__array_interface__["data"][0]
            place = optimizer.gradient(variable)
            assert gradient.__array_interface__["data"] == place.__array_interface__["data"]
            assert gradient.any() or not parameter.grad.any()

    two.run(step)
    two.run(step)
    assert [variable.name for variable in model.trainable_variables] == [
        "0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias",
    ]  # fmt: skip


def test_an_assignment_to_a_variable_is_seen_by_every_module(two: MirroredStrategy) -> None:
    with two.scope():
        model = ReplicatedModule(make_net())
    model.variables["0.bias"].assign(np.arange(5.0))
    for bias in two.local_results(two.run(lambda: model.module[0].bias.detach().clone())):
        assert bias.tolist() == [0, 1, 2, 3, 4]


def test_without_an_optimizer_gradients_stay_with_torch_and_are_applied_all_the_same(
    two: MirroredStrategy,
) -> None:
    expected = train_alone(make_plain(), lambda p: torch.optim.SGD(p, 0.1), batches())
    with two.scope():
        model, optimizer = ReplicatedModule(make_plain()), SGD(0.1)
    np.testing.assert_allclose(train(two, model, optimizer, batches()), expected, rtol=1e-9)


def test_gradients_add_up_until_zero_grad(two: MirroredStrategy) -> None:
    with two.scope():
        optimizer = SGD(0.1)
        model = ReplicatedModule(make_plain(), optimizer)

    def step() -> Any:
        sums = []
        for _ in range(2):
            model(np.ones((2, 6))).sum().backward()
            sums.append(float(model.gradients()[3][0].sum()))
        model.zero_grad()
        sums.append(float(model.gradients()[3][0].sum()))
        model.module.zero_grad()  # torch's own takes them away
        assert all(gradient is None for gradient, _ in model.gradients())
        model(np.ones((2, 6))).sum().backward()
        sums.append(float(model.gradients()[3][0].sum()))
        model.zero_grad()
        assert (
            model.module[0].weight.grad.data_ptr() == model.gradients()[0][0].__array_interface__["data"][0]
        )
        return sums

    assert two.run(step)[0].values == (6, 6)
    assert [part.values[1] for part in two.run(step)] == [6, 12, 0, 6]


def test_a_frozen_parameter_has_a_variable_but_no_gradient(two: MirroredStrategy) -> None:
    net = make_plain()
    net[0].weight.requires_grad_(False)
    before = net[0].weight.numpy().copy()
    with two.scope():
        optimizer = SGD(0.1)
        model = ReplicatedModule(net, optimizer)
    train(two, model, optimizer, batches())
    assert [v.name for v in model.trainable_variables] == ["0.bias", "2.weight", "2.bias"]
    assert not model.variables["0.weight"].trainable
    np.testing.assert_array_equal(model.variables["0.weight"], before)


def test_tied_parameters_are_one_variable(two: MirroredStrategy) -> None:
    class Tied(nn.Module):  # type: ignore[misc]  # torch is not known to the type checker
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.other.weight = self.one.weight

        def forward(self, x: Any) -> Any:
            return self.other(self.one(x))

    torch.manual_seed(0)
    tied = Tied()
    with two.scope():
        optimizer = SGD(0.5)
        model = ReplicatedModule(tied, optimizer)
    assert len(model.trainable_variables) == 1
    assert model.variables["one.weight"] is model.variables["other.weight"]
    two.run(lambda: model(np.ones((1, 3), np.float32)).sum().backward())
    two.run(lambda: optimizer.apply_gradients(model.gradients()))
    state = model.state_dict()
    assert torch.equal(state["one.weight"], state["other.weight"])
    Tied().load_state_dict(state)


def test_bfloat16_parameters_share_memory_too(two: MirroredStrategy) -> None:
    with two.scope():
        optimizer = SGD(1.0)
        model = ReplicatedModule(nn.Linear(2, 1, bias=False).to(torch.bfloat16), optimizer)
    model.variables["weight"].assign(np.array([[1, 2]], model.variables["weight"].dtype))

    def step() -> None:
        model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
        optimizer.apply_gradients(model.gradients())

    two.run(step)
    assert model.variables["weight"].dtype.name == "bfloat16"
    assert model.state_dict()["weight"].tolist() == [[-1, 0]]
    assert model.state_dict()["weight"].dtype is torch.bfloat16


# --------------------------------------------------------------------- buffers


def test_running_statistics_are_each_replicas_own_and_averaged_when_read(two: MirroredStrategy) -> None:
    with two.scope():
        model = ReplicatedModule(nn.BatchNorm1d(2, momentum=1.0, dtype=torch.float64))
    x = np.arange(12.0).reshape(6, 2)
    two.run(lambda x: model(x).sum(), args=(PerReplica([x[:3], x[3:]]),))
    means = [x[:3].mean(axis=0), x[3:].mean(axis=0)]
    for own, mean in zip(model.variables["running_mean"].components, means, strict=True):
        np.testing.assert_allclose(own, mean)
    np.testing.assert_allclose(model.variables["running_mean"], np.mean(means, axis=0))
    state = model.state_dict()
    np.testing.assert_allclose(state["running_mean"], np.mean(means, axis=0))
    assert int(state["num_batches_tracked"]) == 1
    assert [buffer.name for buffer in model.buffers] == ["running_mean", "running_var", "num_batches_tracked"]


def test_with_one_copy_for_all_the_buffers_are_those_of_replica_0() -> None:
    with CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:0") as strategy:
        with strategy.scope():
            model = ReplicatedModule(nn.BatchNorm1d(2, momentum=1.0, dtype=torch.float64))
        x = np.arange(12.0).reshape(6, 2)
        strategy.run(lambda x: model(x).sum(), args=(PerReplica([x[:3], x[3:]]),))
        np.testing.assert_allclose(model.variables["running_mean"], x[:3].mean(axis=0))


def test_a_buffer_that_is_not_persistent_is_no_variable(two: MirroredStrategy) -> None:
    class Masked(nn.Module):  # type: ignore[misc]  # as above
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.tensor([1.0, 0.0]), persistent=False)

        def forward(self, x: Any) -> Any:
            return x * self.mask

    with two.scope():
        model = ReplicatedModule(Masked())
    assert not model.variables
    (first, second) = two.local_results(two.run(lambda: model(np.ones(2, np.float32))))
    assert first.tolist() == second.tolist() == [1, 0]


# ----------------------------------------------------------------------- state


def test_the_state_goes_to_a_plain_module_and_back_into_every_replica(two: MirroredStrategy) -> None:
    with two.scope():
        optimizer = SGD(0.1)
        model = ReplicatedModule(make_net(), optimizer)
    train(two, model, optimizer, batches())
    plain = make_net(seed=5)
    plain.load_state_dict(model.state_dict())
    with two.scope():
        other = ReplicatedModule(make_net(seed=7))
    other.load_state_dict(plain.state_dict())
    x = np.ones((2, 6))
    model.eval()
    other.eval()
    expected = plain.eval()(torch.from_numpy(x)).detach()
    for out in two.local_results(two.run(lambda: other(x).detach())):
        np.testing.assert_allclose(out, expected, rtol=1e-12)
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict({})


def test_the_state_is_a_snapshot(two: MirroredStrategy) -> None:
    with two.scope():
        model = ReplicatedModule(make_net())
    state = model.state_dict()
    model.variables["0.bias"].assign(np.full(5, 9.0))
    assert not (state["0.bias"] == 9).any()


def test_a_checkpoint_brings_it_to_another_number_of_replicas(two: MirroredStrategy, tmp_path: Path) -> None:
    with two.scope():
        optimizer = SGD(0.1, momentum=0.9)
        model = ReplicatedModule(make_net(), optimizer)
    train(two, model, optimizer, batches())
    path = Checkpoint(model=model.variables, optimizer=optimizer).save(tmp_path / "net")
    with MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]) as three:
        with three.scope():
            new_optimizer = SGD(0.1, momentum=0.9)
            new = ReplicatedModule(make_net(seed=5), new_optimizer)
        Checkpoint(model=new.variables, optimizer=new_optimizer).restore(path)
        for name, tensor in model.state_dict().items():
            np.testing.assert_allclose(new.state_dict()[name], tensor, rtol=1e-12)
        model.load_state_dict(model.state_dict())  # the mean of the running statistics for both replicas
        new.eval()
        model.eval()
        expected = train(two, model, optimizer, batches())
        np.testing.assert_allclose(train(three, new, new_optimizer, batches()), expected, rtol=1e-9)


def test_training_and_evaluation_are_switched_for_all_or_for_the_own_replica(two: MirroredStrategy) -> None:
    with two.scope():
        model = ReplicatedModule(make_net())
    model.eval()
    assert two.run(lambda: model.module.training) is False

    def step() -> bool:
        if own_index() == 1:
            model.train()
        return bool(model.module.training)

    assert two.local_results(two.run(step)) == (False, True)


# ---------------------------------------------------------------- other things


def test_rows_of_a_sparse_embedding_are_indexed_slices(two: MirroredStrategy) -> None:
    with two.scope():
        optimizer = SGD(1.0)
        model = ReplicatedModule(nn.Embedding(5, 2, sparse=True), optimizer)
    before = np.array(model.variables["weight"])

    def step(rows: Any) -> None:
        model.zero_grad()
        model(rows).sum().backward()
        ((gradient, _),) = pairs = model.gradients()
        assert isinstance(gradient, IndexedSlices)
        optimizer.apply_gradients(pairs)

    two.run(step, args=(PerReplica([np.array([1, 1]), np.array([1, 4])]),))
    change = np.zeros((5, 2))
    change[1], change[4] = 3, 1
    np.testing.assert_allclose(model.variables["weight"], before - change, rtol=1e-6)


def test_each_replica_computes_with_its_share_of_the_threads(two: MirroredStrategy) -> None:
    with two.scope():
        model = ReplicatedModule(nn.Linear(2, 2), num_threads=1)
    torch.set_num_threads(2)
    two.run(lambda: model(np.ones((1, 2), np.float32)).sum().backward())
    assert two.local_results(two.run(lambda: torch.get_num_threads()))[-1] == 1


def test_one_replica_leaves_torchs_threads_alone() -> None:
    torch.set_num_threads(2)
    with OneDeviceStrategy("cpu:0") as strategy:
        with strategy.scope():
            model = ReplicatedModule(nn.Linear(2, 2))
        strategy.run(lambda: model(np.ones((1, 2), np.float32)).sum())
    assert torch.get_num_threads() == 2


def test_backward_runs_in_the_replicas_own_context(two: MirroredStrategy) -> None:
    with two.scope():
        model = ReplicatedModule(nn.Linear(2, 2, bias=False))
    seen: list[tuple[int, float]] = []

    def step() -> None:
        weight = model.module.weight
        # A collective inside of backward: the hooks of all replicas meet.
        hook = weight.register_hook(lambda g: seen.append((own_index(), all_reduce("SUM", g).sum().item())))
        model(np.ones((1, 2), np.float32)).sum().backward()
        hook.remove()

    two.run(step)
    assert sorted(seen) == [(0, 8.0), (1, 8.0)]


def test_a_function_is_called_once_for_each_replica_and_the_first_ones_values_count(
    two: MirroredStrategy,
) -> None:
    made = []

    def make() -> Any:
        made.append(nn.Linear(2, 2))
        return made[-1]

    with two.scope():
        model = ReplicatedModule(make)
    assert len(made) == 2
    first, second = two.local_results(two.run(lambda: model.module.weight.detach().clone()))
    assert torch.equal(first, second)
    assert torch.equal(first, made[0].weight)


def test_outside_any_strategy_it_is_one_plain_replica() -> None:
    optimizer = SGD(1.0)
    model = ReplicatedModule(nn.Linear(2, 1, bias=False), optimizer)
    before = model.state_dict()["weight"]
    model(np.ones((1, 2), np.float32)).sum().backward()
    optimizer.apply_gradients(model.gradients())
    assert torch.allclose(model.state_dict()["weight"], before - 1)


# ----------------------------------------------------------------------- errors


def test_a_parameter_that_was_given_other_memory_is_named(two: MirroredStrategy) -> None:
    with two.scope():
        model = ReplicatedModule(make_net())
    two.run(lambda: model.module.load_state_dict(make_net().state_dict()))
    two.run(model.gradients)
    two.run(lambda: model.module.to(torch.float32))
    with pytest.raises(RuntimeError, match=r"ReplicatedModule: 0.weight no longer lies in the memory"):
        two.run(model.gradients)


def test_a_buffer_that_was_replaced_is_named(two: MirroredStrategy) -> None:
    class Counting(nn.Module):  # type: ignore[misc]  # as above
        calls: Any

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Any) -> Any:
            self.calls = self.calls + 1
            return x

    with two.scope():
        model = ReplicatedModule(Counting())
    two.run(lambda: model(np.ones(1)))
    with pytest.raises(RuntimeError, match="calls no longer lies in the memory of its variable"):
        two.run(model.gradients)


def test_using_it_across_replicas_is_refused_with_the_place_to_use_it(two: MirroredStrategy) -> None:
    with two.scope():
        model = ReplicatedModule(make_net())
    for use in (lambda: model(np.ones((1, 6))), lambda: model.module, model.zero_grad, model.gradients):
        with pytest.raises(ReplicaContextError, match=r"across replicas.*call it in the function passed to"):
            use()


def test_making_or_loading_it_in_a_step_is_refused(two: MirroredStrategy) -> None:
    with pytest.raises(ReplicaContextError, match=r"make it in strategy\.scope"):
        two.run(lambda: ReplicatedModule(make_net()))
    with two.scope():
        model = ReplicatedModule(make_net())
    with pytest.raises(ReplicaContextError, match=r"call it outside strategy\.run"):
        two.run(lambda: model.load_state_dict({}))


@pytest.mark.parametrize("wrong", [3, lambda: 3], ids=["number", "function"])
def test_what_is_no_module_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"got int; need a torch\.nn\.Module, or a function that makes one"):
        ReplicatedModule(wrong)


def test_modules_that_differ_are_refused(two: MirroredStrategy) -> None:
    widths = iter([2, 3])
    with (
        two.scope(),
        pytest.raises(ValueError, match="made for replica 1 differs from the first one in weight"),
    ):
        ReplicatedModule(lambda: nn.Linear(2, next(widths), bias=False))


def test_a_number_of_threads_is_checked() -> None:
    with pytest.raises(ValueError, match="got num_threads=0; need at least 1"):
        ReplicatedModule(make_net(), num_threads=0)
