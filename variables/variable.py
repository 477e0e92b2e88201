"""Variables: named arrays that a strategy spreads over its devices.

`Variable` is the interface of all kinds, and calling it makes the kind that the surrounding scope asks for. What
varies between the kinds is which copy a read sees and where a write goes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar, final

import numpy as np
import numpy.typing as npt

from collectives.arrays import Array, as_array, describe, describe_kind, is_narrow_float, require_numbers
from collectives.indexed_slices import IndexedSlices, require_rows
from collectives.reduce_op import parse_member
from collectives.rendezvous import Call
from variables.array_behaviour import ArrayBehaviour
from variables.replica_context import Context, Owner, ReplicaContext, ReplicaContextError, current
from variables.synchronization import VariableAggregation, VariableSynchronization, cast
from variables.values import is_distributed

V = TypeVar("V", bound="Variable")


class Write(Enum):
    """The ways to change a variable, by the method's name."""

    ASSIGN = "assign"
    ASSIGN_ADD = "assign_add"
    ASSIGN_SUB = "assign_sub"
    SCATTER_ADD = "scatter_add"
    SCATTER_SUB = "scatter_sub"
    SCATTER_MUL = "scatter_mul"
    SCATTER_DIV = "scatter_div"
    SCATTER_MIN = "scatter_min"
    SCATTER_MAX = "scatter_max"
    SCATTER_UPDATE = "scatter_update"

    def apply(self, array: Array, value: Any) -> None:
        """Change an array in place, by a value of its shape or by slices of it."""
        if isinstance(value, IndexedSlices):
            if is_narrow_float(array.dtype) and self is not Write.SCATTER_UPDATE:
                _scatter_wide(_SCATTER[self], array, value)
            else:
                _SCATTER[self](array, value.indices, value.values)
        else:
            _DENSE[self](array, value)


_DENSE: dict[Write, Callable[[Array, Array], Any]] = {
    Write.ASSIGN: lambda array, value: np.copyto(array, value),
    Write.ASSIGN_ADD: lambda array, value: np.add(array, value, out=array),
    Write.ASSIGN_SUB: lambda array, value: np.subtract(array, value, out=array),
}
_SCATTER: dict[Write, Callable[[Array, Array, Array], Any]] = {
    Write.SCATTER_ADD: np.add.at,
    Write.SCATTER_SUB: np.subtract.at,
    Write.SCATTER_MUL: np.multiply.at,
    Write.SCATTER_DIV: np.divide.at,
    Write.SCATTER_MIN: np.minimum.at,
    Write.SCATTER_MAX: np.maximum.at,
    Write.SCATTER_UPDATE: lambda array, indices, rows: array.__setitem__(indices, rows),
}


def _scatter_wide(scatter: Callable[[Array, Array, Array], Any], array: Array, slices: IndexedSlices) -> None:
    """Scatter in float32 what half precision would lose, row by row."""
    rows, places = np.unique(slices.indices, return_inverse=True)
    wide = array[rows].astype(np.float32)
    scatter(wide, places, slices.values.astype(np.float32))
    array[rows] = wide.astype(array.dtype)


_NOT_ADDITIVE = (Write.SCATTER_MIN, Write.SCATTER_MAX, Write.SCATTER_UPDATE)


@final
@dataclass(frozen=True)
class VariableSpec:
    """What a new variable is to be; how it is spread is the strategy's part."""

    initial_value: Array
    name: str | None
    trainable: bool
    synchronization: VariableSynchronization
    aggregation: VariableAggregation
    created_at: str
    """``file:line`` of the user's call, for error messages."""

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.initial_value.dtype


class Variable(ArrayBehaviour):
    """A named array that lives as long as the model, spread as the current strategy spreads variables.

    Inside ``strategy.scope()`` this makes what the strategy needs: equal copies on its devices (synchronization ON_WRITE), own
    copies for each replica (ON_READ), or one copy for all. Inside a step, all replicas get the same new variable,
    from replica 0's initial value. Outside any scope it is a plain array on the CPU.

    Arithmetic, NumPy's functions, indexing, ``len`` and conversion work on it as on the array it holds. In a
    replica that is the replica's own copy, not a snapshot. It is read-only: `assign` and its kin change it.

    Args:
        initial_value: an array of any shape, a number, or a function without arguments that gives one. It is copied; a
            function is called once.
        dtype: None keeps the initial value's.
        name: for error messages and checkpoints.
        trainable: whether optimizers update it; None means yes, unless ON_READ.
        synchronization: a `VariableSynchronization` or its name.
        aggregation: a `VariableAggregation` or its name: how the values that replicas write (ON_WRITE) or hold (ON_READ)
            become one.

    Raises:
        ValueError: no initial value, synchronization NONE, or MEAN of a dtype that is not floating.
        TypeError: an initial value that is no array of numbers.
    """

    def __new__(
        cls,
        initial_value: Any = None,
        dtype: npt.DTypeLike | None = None,
        *,
        name: str | None = None,
        trainable: bool | None = None,
        synchronization: VariableSynchronization | str = VariableSynchronization.AUTO,
        aggregation: VariableAggregation | str = VariableAggregation.NONE,
    ) -> Variable:
        synchronization = parse_member(VariableSynchronization, synchronization, "synchronization")
        aggregation = parse_member(VariableAggregation, aggregation, "aggregation")
        if synchronization is VariableSynchronization.AUTO:
            synchronization = VariableSynchronization.ON_WRITE
        if synchronization is VariableSynchronization.NONE:
            raise ValueError(f"Variable {name!r}: got synchronization NONE; need ON_WRITE or ON_READ")
        if trainable is None:
            trainable = synchronization is not VariableSynchronization.ON_READ

        def spec() -> VariableSpec:
            value = _initial_array(initial_value, dtype, name)
            if aggregation is VariableAggregation.MEAN and value.dtype.kind not in "fcV":
                raise ValueError(
                    f"Variable {name!r}: got dtype {value.dtype} with aggregation MEAN, which an integer can't hold; "
                    "need a floating dtype — or SUM, and divide when reading"
                )
            return VariableSpec(value, name, trainable, synchronization, aggregation, created_at)

        created_at = _caller()
        context = current.get()
        if isinstance(context, ReplicaContext):
            return _create_together(context, spec, name)
        if context is not None:
            created = context.strategy.create_variable(spec())
            assert isinstance(created, Variable)
            return created
        # The kinds are built on this interface, so it can meet them only when they exist.
        from variables.local_variable import LocalVariable  # noqa: PLC0415

        return LocalVariable.alone(spec())

    # ------------------------------------------------------------ description

    name: str
    """What it is called in messages and checkpoints."""
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    trainable: bool
    synchronization: VariableSynchronization
    aggregation: VariableAggregation
    owner: Owner | None
    """The strategy that it was made under."""
    distributed: Variable | None = None
    """Of which variable this is a component."""

    @property
    def ndim(self) -> int:
        """How many axes it has."""
        return len(self.shape)

    @property
    def components(self) -> tuple[Variable, ...]:
        """The plain variables that it is made of, by local replica, or by shard; itself if it is plain."""
        raise NotImplementedError  # not @abstractmethod, as type checkers must let users call Variable(...)

    # ---------------------------------------------------------------- reading

    def read_value(self) -> Array:
        """A snapshot of `value`: a new array."""
        return self.value().copy()

    def numpy(self) -> Array:
        """A snapshot in host memory."""
        return np.array(self)

    def value(self) -> Array:
        """The array that a read sees here: in a replica its own copy, across replicas what stands for all.

        Returns:
            Shape `shape`, read-only, and live: it changes with the variable, unless it had to be aggregated.

        Raises:
            ValueError: ON_READ with aggregation NONE, across replicas.
            ReplicaContextError: under another strategy than its own.
        """
        return self._value_in(current.get())

    # ---------------------------------------------------------------- writing

    def assign(self, value: Any, *, read_value: bool = True, already_identical: bool = False) -> Any:
        """Replace the value.

        In a replica, ON_WRITE variables aggregate the replicas' values as their aggregation says and give all copies the
        result, so all replicas must call it; ON_READ ones write to the replica's own copy. Across replicas, all copies
        get the value; of an ON_READ variable with aggregation SUM each copy gets an equal share of it.

        Args:
            value: shape `shape`; it is not broadcast. Its dtype must cast to the variable's without loss of kind.
            read_value: False returns None, and saves the read.
            already_identical: in a replica, promises that all replicas pass equal values, and saves the collective.

        Returns:
            In a replica the new value, or the component written to; across replicas a `Mirrored` of the new values, or
            what a read sees; of a plain variable itself.

        Raises:
            ValueError: another shape; a replica's write with aggregation NONE; a `PerReplica`.
            TypeError: a dtype that does not cast.
            ReplicaContextError: under another strategy than its own.
        """
        return self._write(Write.ASSIGN, value, read_value, already_identical)

    def assign_add(self, delta: Any, *, read_value: bool = True, already_identical: bool = False) -> Any:
        """Add, without broadcasting.

        As `assign`, of which ``delta`` takes the value's place; an ON_READ variable with aggregation SUM adds it once.
        """
        return self._write(Write.ASSIGN_ADD, delta, read_value, already_identical)

    def assign_sub(self, delta: Any, *, read_value: bool = True, already_identical: bool = False) -> Any:
        """Subtract. As `assign_add`."""
        return self._write(Write.ASSIGN_SUB, delta, read_value, already_identical)

    def scatter_add(self, slices: IndexedSlices) -> Any:
        """Add rows; of a row that comes more than once, every one counts.

        In a replica, the replicas' slices are put one after the other before, divided by their number for MEAN; with
        ONLY_FIRST_REPLICA those of replica 0 are used.

        Args:
            slices: rows of the shape that this variable's rows have.

        Raises:
            IndexError: no such row.
            ValueError: rows of another shape; otherwise as `assign`.
            NotImplementedError: ON_READ variables have no scatter.
        """
        return self._write(Write.SCATTER_ADD, slices)

    def scatter_sub(self, slices: IndexedSlices) -> Any:
        """Subtract rows. As `scatter_add`."""
        return self._write(Write.SCATTER_SUB, slices)

    def scatter_mul(self, slices: IndexedSlices) -> Any:
        """Multiply by rows. As `scatter_add`."""
        return self._write(Write.SCATTER_MUL, slices)

    def scatter_div(self, slices: IndexedSlices) -> Any:
        """Divide by rows. As `scatter_add`."""
        return self._write(Write.SCATTER_DIV, slices)

    def scatter_min(self, slices: IndexedSlices) -> Any:
        """Take the minimum with rows. As `scatter_add`, for aggregation NONE and ONLY_FIRST_REPLICA."""
        return self._write(Write.SCATTER_MIN, slices)

    def scatter_max(self, slices: IndexedSlices) -> Any:
        """Take the maximum with rows. As `scatter_min`."""
        return self._write(Write.SCATTER_MAX, slices)

    def scatter_update(self, slices: IndexedSlices) -> Any:
        """Replace rows. As `scatter_min`; of a row that comes more than once, the last one stays."""
        return self._write(Write.SCATTER_UPDATE, slices)

    def __iadd__(self: V, delta: Any) -> V:
        self.assign_add(delta, read_value=False)
        return self

    def __isub__(self: V, delta: Any) -> V:
        self.assign_sub(delta, read_value=False)
        return self

    def __copy__(self) -> Variable:
        return self.__deepcopy__({})

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__deepcopy__({})

    def __deepcopy__(self, memo: Any) -> Variable:
        raise TypeError(
            f"{self.name}: a variable belongs to its strategy and can't be copied; copy read_value()"
        )

    def __repr__(self) -> str:
        parts = [f"<{type(self).__name__} {self.name!r} {describe_kind(self.dtype, self.shape)}"]
        if self.aggregation is not VariableAggregation.NONE:
            parts.append(f"{self.synchronization.name}/{self.aggregation.name}")
        return ", ".join(parts) + ">"

    # ----------------------------------------------------------- for the kinds

    def _value_in(self, context: Context | None) -> Array:
        raise NotImplementedError  # as in components

    def _write_in(
        self, context: Context | None, write: Write, value: Any, read_value: bool, already_identical: bool
    ) -> Any:
        raise NotImplementedError  # as in components

    def _write(
        self, write: Write, value: Any, read_value: bool = True, already_identical: bool = False
    ) -> Any:
        context = current.get()
        if type(context) is not ReplicaContext and self.owner is not None and self.owner.is_closed:
            raise RuntimeError(
                f"{self.name}.{write.value}: called after close() of {self.owner!r}, whose variables can only be read; make a new strategy"
            )
        return self._write_in(context, write, self._checked(write, value), read_value, already_identical)

    def _checked(self, write: Write, value: Any) -> Any:
        """The value in the variable's dtype, or its slices, once it is certain that they fit."""
        where = f"{self.name}.{write.value}"
        if write not in _DENSE:
            return self._checked_slices(value, where)
        if is_distributed(value):
            return value
        if isinstance(value, IndexedSlices):
            raise TypeError(
                f"{where}: got {value}; need a dense array — use scatter_add and its kin for slices"
            )
        if isinstance(value, ArrayBehaviour):
            value = value.value()
        array = cast(value, self.dtype, where)
        if array.shape != self.shape:
            raise ValueError(
                f"{where}: got {describe(array)}; need shape {self.shape}, updates are not broadcast"
            )
        return self._apart(array)

    def _checked_slices(self, slices: Any, where: str) -> IndexedSlices:
        if not isinstance(slices, IndexedSlices):
            raise TypeError(f"{where}: got {type(slices).__name__}; need IndexedSlices(values, indices)")
        if not self.shape or slices.values.shape[1:] != self.shape[1:]:
            raise ValueError(
                f"{where}: got rows of {describe(slices.values)}; the variable has shape {self.shape}"
            )
        require_rows(slices.indices, self.shape[0], where)
        values = self._apart(cast(slices.values, self.dtype, where))
        return IndexedSlices(values, slices.indices, slices.dense_shape)

    def _apart(self, array: Array) -> Array:
        """The array, or a copy of one that lies in this variable: the first copy's write would change it."""
        if array.base is None:  # memory of its own, as most have
            return array
        return array.copy() if any(one._overlaps(array) for one in self.components) else array

    def _overlaps(self, array: Array) -> bool:
        raise NotImplementedError  # of components only

    def _require_own_context(self, context: Context | None) -> None:
        """Refuse to be used under another strategy, whose replicas are none of this variable's."""
        if context is not None and context.strategy is not self.owner:
            kind = "in a replica" if isinstance(context, ReplicaContext) else "in the scope"
            raise ReplicaContextError(
                f"{self.name}: used {kind} of {context.strategy!r}, but was made under {self.owner!r}; "
                "make it under the strategy that uses it: with strategy.scope(): ..."
            )


def require_additive(variable: Variable, write: Write) -> None:
    """Refuse a write whose replicas' values can't be added up.

    Raises:
        NotImplementedError: minimum, maximum and replacement of a variable that sums or averages writes.
    """
    summed = variable.aggregation in (VariableAggregation.SUM, VariableAggregation.MEAN)
    if summed and write in _NOT_ADDITIVE:
        raise NotImplementedError(
            f"{variable.name}.{write.value}: has no meaning with aggregation {variable.aggregation.name}; "
            "need NONE or ONLY_FIRST_REPLICA"
        )


def require_plain(variable: Variable, write: Write, value: Any) -> None:
    """Refuse a distributed value where one array is wanted.

    Raises:
        ValueError: a `PerReplica` or a `Mirrored`.
    """
    if is_distributed(value):
        raise ValueError(
            f"{variable.name}.{write.value}: got {type(value).__name__}; need one array — in a step a replica's own "
            "part, by passing it in args; outside reduce it first: strategy.reduce('MEAN', value, axis=None)"
        )


def require_aggregation(variable: Variable, write: Write, created_at: str) -> None:
    """Refuse a replica's write to equal copies that nothing would keep equal.

    Raises:
        ValueError: the variable has aggregation NONE.
    """
    if variable.aggregation is VariableAggregation.NONE:
        raise ValueError(
            f"{variable.name}.{write.value}: called in a replica, on a variable (made at {created_at}) whose replicas "
            "must stay equal and whose aggregation is NONE; say how the replicas' values become one with "
            "Variable(..., aggregation='SUM', 'MEAN' or 'ONLY_FIRST_REPLICA'), or give each replica a value of its own "
            "with synchronization=ON_READ"
        )


def _create_together(context: ReplicaContext, spec: Callable[[], VariableSpec], name: str | None) -> Variable:
    """Inside a step: one variable for all replicas, from the first one's initial value."""
    context.require_own_thread("Variable")
    first = spec() if context.local_replica_id == 0 else None

    def conclude(specs: Sequence[VariableSpec | None]) -> list[Variable]:
        made = context.strategy.create_variable(specs[0])
        return [made] * len(specs)

    created = context.rendezvous.meet(context.local_replica_id, Call("Variable", (), name), first, conclude)
    assert isinstance(created, Variable)
    return created


def _initial_array(initial_value: Any, dtype: npt.DTypeLike | None, name: str | None) -> Array:
    where = f"Variable {name!r}"
    if callable(initial_value) and not isinstance(initial_value, ArrayBehaviour):
        initial_value = initial_value()
    if initial_value is None or is_distributed(initial_value):
        raise ValueError(
            f"{where}: got initial_value={initial_value!r}; need one array, number, or function giving one"
        )
    array = as_array(initial_value, where) if dtype is None else cast(initial_value, np.dtype(dtype), where)
    require_numbers(array.dtype, where)
    return array


def _caller() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
