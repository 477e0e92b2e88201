"""PyTorch tensors and JAX arrays go in without a copy and come back as what they were."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import numpy as np
import pytest

from collectives import Communicator, InProcessCommunicator, asarray
from collectives.arrays import Array, as_array
from strategies import (
    IndexedSlices,
    MirroredStrategy,
    OneDeviceStrategy,
    Variable,
    all_gather,
    all_reduce,
    compute_average_loss,
)

REASON = "needs {}, which is large: make test-frameworks installs it"

OnThreads = Callable[[Sequence[Communicator], Callable[[Communicator], Any]], list[Any]]


@final
class Torch:
    def __init__(self) -> None:
        self.module: Any = pytest.importorskip("torch", reason=REASON.format("PyTorch"))
        self.kind = self.module.Tensor

    def make(self, values: Any, dtype: str = "float32") -> Any:
        return self.module.tensor(values, dtype=getattr(self.module, dtype))

    def address(self, tensor: Any) -> int:
        return int(tensor.data_ptr())


@final
class Jax:
    def __init__(self) -> None:
        self.module: Any = pytest.importorskip("jax", reason=REASON.format("JAX"))
        self.kind = self.module.Array

    def make(self, values: Any, dtype: str = "float32") -> Any:
        return self.module.numpy.array(values, dtype=dtype)

    def address(self, array: Any) -> int:
        return int(array.unsafe_buffer_pointer())


@pytest.fixture
def torch() -> Any:
    return Torch().module


@pytest.fixture
def jax() -> Any:
    return Jax().module


@pytest.fixture(params=[Torch, Jax], ids=["torch", "jax"])
def library(request: pytest.FixtureRequest) -> Torch | Jax:
    made = request.param()
    assert isinstance(made, (Torch, Jax))
    return made


def address_of(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def aligned_zeros(count: int) -> Array:
    memory = np.zeros(count + 16, np.float32)
    start = (-address_of(memory) % 64) // 4
    return memory[start : start + count]


# ------------------------------------------------------------------- one array


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "bool", "complex64"])
def test_an_array_goes_in_without_a_copy_and_keeps_its_dtype(library: Torch | Jax, dtype: str) -> None:
    theirs = library.make([[0, 1, 2], [3, 4, 5]], dtype)
    ours = asarray(theirs)
    assert isinstance(ours, np.ndarray)
    assert ours.dtype.name == dtype
    assert address_of(ours) == library.address(theirs)
    np.testing.assert_array_equal(ours.astype(np.complex64), np.array([[0, 1, 2], [3, 4, 5]]).astype(dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_an_array_goes_there_and_back(library: Torch | Jax, dtype: str) -> None:
    example = library.make([0], dtype)
    back = asarray(asarray(library.make([[1, 2], [3, 4]], dtype)), like=example)
    assert isinstance(back, library.kind)
    assert back.dtype == example.dtype
    np.testing.assert_array_equal(asarray(back).astype(np.float32), [[1, 2], [3, 4]])


def test_an_aligned_array_goes_out_without_a_copy(library: Torch | Jax) -> None:
    array = aligned_zeros(32)
    assert library.address(asarray(array, like=library.make([0.0]))) == address_of(array)


def test_a_variable_goes_out_without_a_copy_and_stays_read_only_to_numpy(library: Torch | Jax) -> None:
    variable = Variable(np.arange(4, dtype=np.float32))
    assert library.address(asarray(variable, like=library.make([0.0]))) == address_of(variable.value())
    assert not variable.value().flags.writeable


def test_scalars_empty_arrays_and_transposed_ones_go_both_ways(library: Torch | Jax) -> None:
    example = library.make([0.0])
    for array in (np.float32(2), np.array(3, np.float32), np.zeros((0, 3), np.float32)):
        theirs = asarray(array, like=example)
        assert tuple(theirs.shape) == array.shape
        np.testing.assert_array_equal(asarray(theirs), array)
    turned = np.arange(6, dtype=np.float32).reshape(2, 3).T[:, ::-1]
    np.testing.assert_array_equal(asarray(asarray(turned, like=example)), turned)


def test_numpy_stays_numpy(library: Torch | Jax) -> None:
    array = np.arange(3)
    assert asarray(array) is array
    assert asarray(array, like=np.empty(0)) is array
    assert isinstance(asarray(library.make([1.0]), like=array), np.ndarray)


def test_a_tensor_that_requires_a_gradient_is_seen_as_its_values(torch: Any) -> None:
    tensor = torch.arange(3.0, requires_grad=True)
    assert address_of(asarray(tensor)) == tensor.data_ptr()
    assert address_of(asarray(torch.nn.Parameter(torch.ones(3)))) != 0


def test_a_subclass_of_tensor_is_a_tensor(torch: Any) -> None:
    class Named(torch.Tensor):  # type: ignore[misc]  # torch is not known to the type checker
        pass

    tensor = torch.ones(3).as_subclass(Named)
    assert address_of(asarray(tensor)) == tensor.data_ptr()


def test_what_numpy_writes_into_a_tensors_memory_the_tensor_shows(torch: Any) -> None:
    tensor = torch.zeros(3)
    asarray(tensor)[:] = 7
    assert tensor.tolist() == [7, 7, 7]


def test_jax_arrays_are_read_only(jax: Any) -> None:
    assert not asarray(jax.numpy.zeros(3)).flags.writeable


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda torch: torch.eye(3).to_sparse(), "which is sparse; need a dense tensor or IndexedSlices"),
        (lambda torch: torch.ones(2, dtype=torch.complex64).conj(), "call resolve_conj"),
        (lambda torch: torch.ones(2, device="meta"), "on meta; need host memory or CUDA's"),
        (lambda torch: torch.ones(2).to(torch.float8_e5m2), "which NumPy cannot see"),
    ],
    ids=["sparse", "conjugate", "meta", "float8"],
)
def test_a_tensor_that_is_no_plain_memory_is_refused_with_the_way_out(
    torch: Any, make: Callable[[Any], Any], words: str
) -> None:
    with pytest.raises(TypeError, match=words):
        as_array(make(torch), "all_reduce")


def test_a_dtype_that_torch_lacks_is_named(torch: Any) -> None:
    with pytest.raises(TypeError, match=r"asarray: got (longdouble|float128)"):
        asarray(np.zeros(2, np.longdouble), like=torch.zeros(1))


def test_an_array_that_jax_is_tracing_is_refused_by_name(jax: Any) -> None:
    with pytest.raises(TypeError, match=r"all_reduce: got float32\[3\] that JAX is tracing.*return it from"):
        jax.jit(lambda x: all_reduce("SUM", x))(jax.numpy.ones(3))


def test_integers_too_large_for_jax_are_refused_instead_of_wrapped(jax: Any) -> None:
    example = jax.numpy.zeros(1)
    assert asarray(np.array([1, 2**31 - 1]), like=example).tolist() == [1, 2**31 - 1]
    with pytest.raises(OverflowError, match="from 1 to 2147483648; JAX holds integers as int32 now"):
        asarray(np.array([1, 2**31]), like=example)


def test_without_ml_dtypes_a_bfloat16_tensor_names_the_extra(
    torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'xpdistribute\[torch\]'"):
        asarray(torch.ones(2, dtype=torch.bfloat16))


def test_any_other_producer_of_dlpack_goes_in_without_a_copy() -> None:
    class Producer:
        def __init__(self, array: Array) -> None:
            self._array = array

        def __dlpack__(self, **kwargs: Any) -> Any:
            return self._array.__dlpack__(**kwargs)

        def __dlpack_device__(self) -> Any:
            return self._array.__dlpack_device__()

    array = np.arange(3.0)
    assert address_of(asarray(Producer(array))) == address_of(array)


# ----------------------------------------------------------------- collectives


def each_collective(end: Communicator, make: Callable[[Any], Any], **like: Any) -> dict[str, Any]:
    mine = make([1.0 + end.rank, 2.0])
    if end.rank == 0:
        end.send(mine, 1)
        received = end.recv(1, like=like.get("like", mine))
    else:
        received = end.recv(0, like=like.get("like", mine))
        end.send(mine, 0)
    return {
        "all_reduce": end.all_reduce(mine, **like),
        "all_reduce_coalesced": end.all_reduce_coalesced([mine], "MAX", **like)[0],
        "reduce": end.reduce(mine, "MEAN", 1, **like),
        "reduce_scatter": end.reduce_scatter(mine, **like),
        "broadcast": end.broadcast(mine, 1, **like),
        "all_gather": end.all_gather(mine, **like),
        "all_to_all": end.all_to_all(mine, **like),
        "recv": received,
    }


EXPECTED: dict[str, list[Any]] = {
    "all_reduce": [[3, 4], [3, 4]],
    "all_reduce_coalesced": [[2, 2], [2, 2]],
    "reduce": [None, [1.5, 2]],
    "reduce_scatter": [[3], [4]],
    "broadcast": [[2, 2], [2, 2]],
    "all_gather": [[1, 2, 2, 2], [1, 2, 2, 2]],
    "all_to_all": [[1, 2], [2, 2]],
    "recv": [[2, 2], [1, 2]],
}


def test_every_collective_gives_back_what_it_was_given(library: Torch | Jax, on_threads: OnThreads) -> None:
    results = on_threads(InProcessCommunicator.group(2, 20.0), lambda end: each_collective(end, library.make))
    for rank, by_name in enumerate(results):
        for name, result in by_name.items():
            expected = EXPECTED[name][rank]
            if expected is None:
                assert result is None
                continue
            assert isinstance(result, library.kind), name
            assert result.tolist() == expected, name


def test_every_collective_gives_back_what_like_is(library: Torch | Jax, on_threads: OnThreads) -> None:
    for make, like in ((library.make, np.empty(0)), (np.array, library.make([0.0]))):
        kind = np.ndarray if isinstance(like, np.ndarray) else library.kind
        body = partial(each_collective, make=make, like=like)
        results = on_threads(InProcessCommunicator.group(2, 20.0), body)
        for rank, by_name in enumerate(results):
            for name, result in by_name.items():
                assert (result is None) if EXPECTED[name][rank] is None else isinstance(result, kind), name


def test_a_tensor_is_reduced_in_place(torch: Any, on_threads: OnThreads) -> None:
    def body(end: Communicator) -> Any:
        tensor, other = torch.full((3,), 1.0 + end.rank), torch.empty(3)
        assert end.all_reduce(tensor, out=other) is other
        assert end.all_reduce(tensor, out=tensor) is tensor
        coalesced = end.all_reduce_coalesced([tensor, tensor], outs=[other, tensor])
        assert coalesced[0] is other
        return tensor.tolist()

    assert on_threads(InProcessCommunicator.group(2, 20.0), body) == [[6, 6, 6]] * 2


def test_out_must_be_an_array_that_can_be_written_to(jax: Any, on_threads: OnThreads) -> None:
    ends = InProcessCommunicator.group(1, 20.0)
    with pytest.raises(ValueError, match="out is read-only"):
        ends[0].all_reduce(np.zeros(3, np.float32), out=jax.numpy.zeros(3))
    with pytest.raises(TypeError, match="all_reduce: got out=list; need an array to write into"):
        ends[0].all_reduce(np.zeros(2), out=[0.0, 0.0])  # type: ignore[arg-type]  # on purpose


def test_bfloat16_accumulates_in_float32(library: Torch | Jax, on_threads: OnThreads) -> None:
    # In bfloat16, 256 + 1 is 256 again; 256 + 1 + 1 in float32 is 258, which bfloat16 holds.
    addends = [256, 1, 1]
    results = on_threads(
        InProcessCommunicator.group(3, 20.0),
        lambda end: end.all_reduce(library.make([addends[end.rank]], "bfloat16")),
    )
    for result in results:
        assert "bfloat16" in str(result.dtype)
        assert float(result[0]) == 258


def test_large_results_live_as_long_as_the_library_holds_them(
    library: Torch | Jax, on_threads: OnThreads
) -> None:
    def body(end: Communicator) -> list[float]:
        kept = [end.all_reduce(library.make([float(step)] * (1 << 18))) for step in range(6)]
        return [float(result[-1]) for result in kept]

    assert on_threads(InProcessCommunicator.group(2, 20.0), body) == [[0, 2, 4, 6, 8, 10]] * 2


# ------------------------------------------------------------------ strategies


@pytest.fixture
def two() -> Any:
    with MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        yield strategy


def test_a_steps_collectives_give_back_what_they_were_given(
    library: Torch | Jax, two: MirroredStrategy
) -> None:
    def step() -> Any:
        t = library.make([0.0, 1.0, 2.0, 3.0])
        nested = all_reduce("SUM", {"a": t, "b": (np.ones(2), 3)})
        return all_reduce("SUM", t), nested, all_gather(t, 0), all_reduce("MEAN", t, weight=1.0)

    summed, nested, gathered, mean = two.run(step)
    for value in (summed, nested["a"], gathered, mean):
        assert all(isinstance(one, library.kind) for one in two.local_results(value))
    assert two.local_results(summed)[1].tolist() == [0, 2, 4, 6]
    assert two.local_results(gathered)[0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert two.local_results(mean)[1].tolist() == [0, 1, 2, 3]
    array, number = (two.local_results(part)[0] for part in nested["b"])
    assert isinstance(array, np.ndarray)
    assert number == 6


def test_a_steps_collectives_give_back_what_like_is(library: Torch | Jax, two: MirroredStrategy) -> None:
    t = library.make([0.0, 1.0])
    back = two.run(lambda: (all_reduce("SUM", np.ones(2), like=t), all_gather(np.ones(2), 0, like=t)))
    assert all(isinstance(one, library.kind) for value in back for one in two.local_results(value))
    number, array = two.run(lambda: (all_reduce("SUM", 1.5, like=t), all_reduce("SUM", t, like=np.ones(1))))
    assert isinstance(two.local_results(number)[0], library.kind)
    assert isinstance(two.local_results(array)[0], np.ndarray)


def test_reduce_and_gather_across_replicas_give_back_what_they_were_given(
    library: Torch | Jax, two: MirroredStrategy
) -> None:
    value = two.distribute_values_from_function(
        lambda context: library.make([[1.0, 2.0], [3.0, 4.0]][context.replica_id_in_sync_group])
    )
    for result, expected in (
        (two.reduce("SUM", value), [4, 6]),
        (two.reduce("MEAN", value, axis=0), 2.5),
        (two.gather(value, axis=0), [1, 2, 3, 4]),
    ):
        assert isinstance(result, library.kind)
        assert result.tolist() == expected
    assert isinstance(two.reduce("SUM", value, like=np.ones(1)), np.ndarray)
    assert isinstance(two.gather(value, axis=0, like=np.ones(1)), np.ndarray)
    losses = two.run(lambda: library.make(2.0))
    assert float(two.reduce("SUM", losses)) == 4
    assert isinstance(two.reduce("SUM", losses), library.kind)


def test_one_replica_gives_back_what_like_is(library: Torch | Jax) -> None:
    with OneDeviceStrategy("cpu:0") as strategy:
        assert isinstance(strategy.reduce("SUM", library.make([1.0]), like=np.ones(1)), np.ndarray)
        assert isinstance(strategy.reduce("SUM", np.ones(1), like=library.make([1.0])), library.kind)
        t = library.make([1.0])
        assert strategy.reduce("SUM", t) is t


def test_variables_take_what_other_libraries_hold(library: Torch | Jax, two: MirroredStrategy) -> None:
    with two.scope():
        variable = Variable(library.make([1.0, 2.0]), aggregation="MEAN")
    variable.assign(library.make([3.0, 4.0]))
    two.run(lambda: variable.assign_add(library.make([1.0, 1.0]), read_value=False))
    np.testing.assert_array_equal(variable, [4, 5])
    assert variable.dtype == np.float32
    slices = IndexedSlices(library.make([10.0]), library.make([1], "int32"))
    variable.scatter_add(slices)
    np.testing.assert_array_equal(variable, [4, 15])


def test_an_average_loss_of_torch_can_be_differentiated(torch: Any, two: MirroredStrategy) -> None:
    def step() -> Any:
        weight = torch.ones(3, requires_grad=True)
        loss = compute_average_loss(weight * 2, sample_weight=np.array([1.0, 0.0, 3.0], np.float32))
        loss.backward()
        return loss.detach(), weight.grad

    loss, gradient = two.run(step)
    assert float(two.reduce("SUM", loss)) == pytest.approx(16 / 6)
    for one in two.local_results(gradient):
        np.testing.assert_allclose(one, np.array([2, 0, 6]) / 6, rtol=1e-6)


def test_an_average_loss_of_jax_can_be_differentiated(jax: Any) -> None:
    def loss(weight: Any) -> Any:
        return compute_average_loss(weight * 2, sample_weight=0.5, global_batch_size=4)

    value, gradient = jax.jit(jax.value_and_grad(loss))(jax.numpy.ones(3))
    assert float(value) == 0.75
    assert gradient.tolist() == [0.25, 0.25, 0.25]


def test_an_average_loss_of_autograd_can_be_differentiated() -> None:
    autograd = pytest.importorskip("autograd", reason=REASON.format("autograd"))
    gradient = autograd.grad(lambda w: compute_average_loss(w * w, global_batch_size=4))(np.arange(3.0))
    np.testing.assert_array_equal(gradient, [0, 0.5, 1])
