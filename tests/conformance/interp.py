"""Evaluates the conformance cases, and compares what came out with what TensorFlow gave.

A case is a list of statements in a small language of nested lists; the evaluator knows no framework, and calls an
adapter for everything that a framework does. Replicas may evaluate the same function at the same time.
"""

from __future__ import annotations

import math
import threading
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, TypeAlias, final

Case: TypeAlias = dict[str, Any]
Expression: TypeAlias = Any
"""Plain JSON: a number, a string, ``"$name"``, a list whose first element names an operation, a dict."""
Encoded: TypeAlias = Any
"""Plain JSON: a result in the form in which the cases record them."""


class Adapter(Protocol):
    """What the evaluator needs of a framework, besides one ``do_...`` method for each operation."""

    def make_strategy(self, kind: str, num_replicas: int) -> Any:
        """A strategy of that kind over that many devices."""

    def error_names(self, error: Exception) -> list[str]:
        """The classes that the error is an instance of or stands for, the most fitting first."""

    def make_error(self, name: str) -> Exception:
        """An exception of that class."""

    def array(self, data: Any, dtype: str) -> Any:
        """A new array."""

    def replica_id_int(self) -> int:
        """The id of the local replica or of the component that is being updated."""

    def do_worker(self, strategy: Any) -> int:
        """Which of the processes that evaluate the case this is."""

    def to_py(self, value: Any) -> Any:
        """The value as plain Python numbers and lists, for the log."""

    def classify(self, value: Any) -> tuple[str, Any]:
        """What kind of thing a value is, and its parts.

        ``array``: ``(dtype, shape, nested list)``; ``per_replica``, ``mirrored``, ``var``: the components;
        ``slices``: ``(values, indices, dense_shape or None)``; ``opaque``: a word.
        """


@final
class Environment:
    """Names and their values in one block, within those of the blocks around it."""

    def __init__(self, parent: Environment | None = None) -> None:
        self._values: dict[str, Any] = {}
        self._parent = parent

    def bind(self, name: str, value: Any) -> None:
        self._values[name] = value

    def get(self, name: str) -> Any:
        block: Environment | None = self
        while block is not None:
            if name in block._values:
                return block._values[name]
            block = block._parent
        raise KeyError(f"unknown name in case: {name}")


@final
class Function:
    """A function of the case language; its value is that of its last statement."""

    def __init__(self, params: list[str], body: list[Expression], env: Environment, interp: Interp) -> None:
        self._params = params
        self.body = body
        self._env = env
        self._interp = interp

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) > len(self._params):
            raise TypeError("too many arguments for a case function")
        local = Environment(self._env)
        for name, value in zip(self._params, args, strict=False):
            local.bind(name, value)
        for name, value in kwargs.items():
            local.bind(name, value)
        return self._interp.block(self.body, local)


@final
class Caught:
    """An error that a ``try`` has turned into a value."""

    def __init__(self, names: list[str]) -> None:
        self.names = names


@final
class Interp:
    """Evaluates cases against one adapter."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._log: list[Any] = []
        self._target: ContextVar[Any] = ContextVar("target")
        self._named_tuples: dict[tuple[Any, ...], Any] = {}
        self._mutex = threading.Lock()

    def run_case(self, case: Case) -> Encoded:
        """The encoded value of the case's last statement, or the error that ended it."""
        self._log = []
        env = Environment()
        strategy = self._adapter.make_strategy(case.get("strategy", "mirrored"), case["replicas"])
        env.bind("S", strategy)
        with self._targeting(strategy):
            try:
                return self.encode(self.block(case["steps"], env))
            except Exception as error:  # noqa: BLE001  # it is the case's result
                return {"error": self._adapter.error_names(error)}

    def block(self, statements: list[Expression], env: Environment) -> Any:
        """Evaluate statements in order; the value of the last one."""
        result = None
        for statement in statements:
            if isinstance(statement, list) and statement and statement[0] == "let":
                env.bind(statement[1], self.evaluate(statement[2], env))
                result = None
            else:
                result = self.evaluate(statement, env)
        return result

    def evaluate(self, expression: Expression, env: Environment) -> Any:
        if isinstance(expression, str):
            return env.get(expression[1:]) if expression.startswith("$") else expression
        if isinstance(expression, dict):
            return {key: self.evaluate(value, env) for key, value in expression.items()}
        if not isinstance(expression, list):
            return expression
        head, args = expression[0], expression[1:]
        special = getattr(self, f"_op_{head}", None)
        if special is not None:
            return special(args, env)
        operation = getattr(self._adapter, f"do_{head}")
        return operation(self._target.get(), *[self.evaluate(arg, env) for arg in args])

    @contextmanager
    def _targeting(self, strategy: Any) -> Iterator[None]:
        token = self._target.set(strategy)
        try:
            yield
        finally:
            self._target.reset(token)

    # ------------------------------------ special forms get their arguments unevaluated

    def _op_fn(self, args: list[Expression], env: Environment) -> Function:
        return Function(args[0], args[1:], env, self)

    def _op_list(self, args: list[Expression], env: Environment) -> list[Any]:
        return [self.evaluate(arg, env) for arg in args]

    def _op_tuple(self, args: list[Expression], env: Environment) -> tuple[Any, ...]:
        return tuple(self.evaluate(arg, env) for arg in args)

    def _op_namedtuple(self, args: list[Expression], env: Environment) -> Any:
        key = (args[0], tuple(args[1]))
        with self._mutex:  # all replicas need the same class
            if key not in self._named_tuples:
                self._named_tuples[key] = namedtuple(args[0], args[1])
        return self._named_tuples[key](*[self.evaluate(arg, env) for arg in args[2:]])

    def _op_arr(self, args: list[Expression], env: Environment) -> Any:
        return self._adapter.array(args[0], args[1])

    def _op_f(self, args: list[Expression], env: Environment) -> Any:
        return self._adapter.array(args[0], "float32")

    def _op_i(self, args: list[Expression], env: Environment) -> Any:
        return self._adapter.array(args[0], "int32")

    def _op_seq(self, args: list[Expression], env: Environment) -> Any:
        return self.block(args, Environment(env))

    def _op_if(self, args: list[Expression], env: Environment) -> Any:
        if self.evaluate(args[0], env):
            return self.evaluate(args[1], env)
        return self.evaluate(args[2], env) if len(args) > 2 else None

    def _op_repeat(self, args: list[Expression], env: Environment) -> Any:
        result = None
        for _ in range(args[0]):
            result = self.evaluate(args[1], env)
        return result

    def _op_pick(self, args: list[Expression], env: Environment) -> Any:
        return self.evaluate(args[self._adapter.replica_id_int()], env)

    def _op_pick_worker(self, args: list[Expression], env: Environment) -> Any:
        return self.evaluate(args[self._adapter.do_worker(self._target.get())], env)

    def _op_try(self, args: list[Expression], env: Environment) -> Any:
        try:
            return self.evaluate(args[0], env)
        except Exception as error:  # noqa: BLE001  # that is what the form is for
            return Caught(self._adapter.error_names(error))

    def _op_raise(self, args: list[Expression], env: Environment) -> Any:
        raise self._adapter.make_error(args[0])

    def _op_log(self, args: list[Expression], env: Environment) -> None:
        self._log.append(self._adapter.to_py(self.evaluate(args[0], env)))

    def _op_getlog(self, args: list[Expression], env: Environment) -> list[Any]:
        return list(self._log)

    def _op_scope(self, args: list[Expression], env: Environment) -> Any:
        with self.evaluate(args[0], env).scope():
            return self.block(args[1:], Environment(env))

    def _op_using(self, args: list[Expression], env: Environment) -> Any:
        with self._targeting(self.evaluate(args[0], env)):
            return self.evaluate(args[1], env)

    def _op_strategy(self, args: list[Expression], env: Environment) -> Any:
        return self._adapter.make_strategy(args[0], args[1])

    def _op_same(self, args: list[Expression], env: Environment) -> bool:
        return self.evaluate(args[0], env) is self.evaluate(args[1], env)

    def _op_len(self, args: list[Expression], env: Environment) -> int:
        return len(self.evaluate(args[0], env))

    def _op_item(self, args: list[Expression], env: Environment) -> Any:
        return self.evaluate(args[0], env)[self.evaluate(args[1], env)]

    def _op_slice(self, args: list[Expression], env: Environment) -> slice:
        return slice(*[self.evaluate(arg, env) for arg in args])

    def _op_ellipsis(self, args: list[Expression], env: Environment) -> Any:
        return Ellipsis

    def _op_newaxis(self, args: list[Expression], env: Environment) -> None:
        return None

    # ------------------------------------------------------------------- encoding

    def encode(self, value: Any) -> Encoded:
        """The value as the cases record it."""
        if isinstance(value, Caught):
            return {"error": value.names}
        # By exact type: NumPy's numbers are arrays without axes, and one of them is a float too.
        if value is None or type(value) in (bool, str, int):
            return value
        if type(value) is float:
            return _number(value)
        if isinstance(value, dict):
            return {"dict": {str(key): self.encode(item) for key, item in value.items()}}
        if isinstance(value, list):
            return {"list": [self.encode(item) for item in value]}
        if isinstance(value, tuple):
            if hasattr(value, "_fields"):
                fields = dict(zip(value._fields, map(self.encode, value), strict=True))
                return {"namedtuple": type(value).__name__, "fields": fields}
            return {"tuple": [self.encode(item) for item in value]}
        return self._encode_parts(*self._adapter.classify(value))

    def _encode_parts(self, kind: str, parts: Any) -> Encoded:
        if kind == "array":
            dtype, shape, data = parts
            encoded = {"a": _nested(data), "dtype": dtype}
            return {**encoded, "shape": list(shape)} if 0 in shape else encoded
        if kind == "var" and len(parts) == 1:  # one with a single component reads as its array
            return self.encode(parts[0])
        if kind in ("per_replica", "mirrored", "var"):
            return {kind: [self.encode(part) for part in parts]}
        if kind == "slices":
            return {
                "slices": dict(
                    zip(("values", "indices", "dense_shape"), map(self.encode, parts), strict=True)
                )
            }
        return {"opaque": parts}


def same(expected: Encoded, got: Encoded, tol: dict[str, float] | None = None) -> bool:
    """Whether a result matches an expectation.

    Args:
        expected: an error in it names one class or several, each of which will do.
        got: an error in it lists all classes that it is.
        tol: ``rtol`` and ``atol`` for numbers.
    """
    if isinstance(expected, dict) and "error" in expected:
        wanted = [*_names(expected["error"]), *expected.get("also", [])]
        return (
            isinstance(got, dict) and "error" in got and any(name in wanted for name in _names(got["error"]))
        )
    if isinstance(expected, (bool, str, type(None))) or isinstance(got, (bool, str, type(None))):
        return bool(expected == got) and type(expected) is type(got)
    if isinstance(expected, (int, float)) and isinstance(got, (int, float)):
        rtol, atol = (tol or {}).get("rtol", 1e-6), (tol or {}).get("atol", 1e-7)
        return abs(expected - got) <= atol + rtol * abs(expected)
    if isinstance(expected, list) and isinstance(got, list):
        return len(expected) == len(got) and all(same(e, g, tol) for e, g in zip(expected, got, strict=True))
    if isinstance(expected, dict) and isinstance(got, dict):
        return set(expected) == set(got) and all(same(expected[key], got[key], tol) for key in expected)
    return False


def _names(error: str | list[str]) -> list[str]:
    return [error] if isinstance(error, str) else error


def _number(value: float) -> float | str:
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return value


def _nested(data: Any) -> Any:
    if isinstance(data, list):
        return [_nested(item) for item in data]
    return _number(data) if isinstance(data, float) else data
