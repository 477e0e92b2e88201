"""Finds operations in a case and puts others in their places, without evaluating it.

A case that contradicts a decision of ours is turned into one that says the same in operations on which TensorFlow and we
agree; its result is then what ours must be for the original.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias, final

from tests.conformance.interp import Case, Expression

Names: TypeAlias = dict[str, Expression]
"""The expressions that names are bound to at some place."""

_LITERAL = ("arr", "f", "i", "raise", "strategy", "ellipsis", "newaxis", "optimizer")
_PARAMS = {"run": 2, "merge_call": 2, "update": 3}
"""Where the list of arguments stands of the operations that call a function."""


class View(Enum):
    """What the code at some place sees."""

    ACROSS = "all replicas"
    REPLICA = "one replica"
    UPDATE = "one component of a variable"


@final
@dataclass(frozen=True)
class Operation:
    """An operation of a case.

    Attributes:
        name: its first element.
        args: its other elements, not evaluated.
        view: where it stands.
        names: bound there.
        case: that it is part of.
    """

    name: str
    args: list[Expression]
    view: View
    names: Names
    case: Case

    @property
    def num_replicas(self) -> int:
        return int(self.case["replicas"])

    @property
    def has_copies(self) -> bool:
        """Whether the case's strategy keeps a copy of a variable for each replica."""
        kind = str(self.case.get("strategy", "mirrored"))
        return kind.startswith("mirrored") or kind == "multi_worker"

    @property
    def is_mirrored(self) -> bool:
        """Whether it keeps several of them."""
        return self.has_copies and self.num_replicas > 1

    def argument(self, index: int) -> Expression:
        """What an argument stands for; None if it is left out."""
        return resolved(self.args[index], self.names) if index < len(self.args) else None

    def variable(self) -> tuple[str, str] | None:
        """The synchronization and aggregation of the variable that is the first argument."""
        made = self.argument(0)
        if not is_call(made, "var"):
            return None
        options = made[2] if len(made) > 2 else {}
        if options.get("where") == "here":
            return None
        sync = options.get("sync", "AUTO")
        return "ON_WRITE" if sync == "AUTO" else sync, options.get("agg", "NONE")


Rule: TypeAlias = Callable[[Operation], Expression | None]
"""What to put in an operation's place, or None to leave it."""


def rewritten(case: Case, rule: Rule) -> Case | None:
    """The case with the rule applied wherever it says something; None if it never does."""
    walker = _Walker(case, rule)
    steps = walker.block(case["steps"], View.ACROSS, {})
    return {**case, "steps": steps} if walker.fired else None


def operations(case: Case) -> Iterable[Operation]:
    """All operations of a case, inner ones first."""
    found: list[Operation] = []
    rewritten(case, lambda operation: found.append(operation))
    return found


def is_call(expression: Expression, *names: str) -> bool:
    """Whether an expression is one of these operations."""
    return isinstance(expression, list) and bool(expression) and expression[0] in names


def resolved(expression: Expression, names: Mapping[str, Expression]) -> Expression:
    """What a name is bound to; any other expression itself."""
    seen = set()
    while isinstance(expression, str) and expression.startswith("$") and expression not in seen:
        seen.add(expression)
        expression = names.get(expression[1:])
    return expression


@final
@dataclass
class _Walker:
    case: Case
    rule: Rule
    fired: bool = field(default=False, init=False)

    def block(self, statements: list[Expression], view: View, names: Names) -> list[Expression]:
        names = dict(names)
        result = []
        for statement in statements:
            if is_call(statement, "let"):
                _, name, bound = statement
                names[name] = bound
                # A function is looked at where it is called: only there it has a view.
                kept = bound if is_call(bound, "fn") else self.expression(bound, view, names)
                result.append(["let", name, kept])
            else:
                result.append(self.expression(statement, view, names))
        return result

    def expression(self, expression: Expression, view: View, names: Names) -> Expression:
        if isinstance(expression, dict):
            return {key: self.expression(value, view, names) for key, value in expression.items()}
        if not isinstance(expression, list) or not expression or not isinstance(expression[0], str):
            return expression
        name, args = expression[0], expression[1:]
        if name in _LITERAL:
            return expression
        operation = Operation(name, self._arguments(name, args, view, names), view, names, self.case)
        new = self.rule(operation)
        if new is None:
            return [operation.name, *operation.args]
        self.fired = True
        return new

    def _arguments(self, name: str, args: list[Expression], view: View, names: Names) -> list[Expression]:
        if name == "fn":
            return [args[0], *self.block(args[1:], view, names)]
        if name == "namedtuple":
            return [*args[:2], *(self.expression(arg, view, names) for arg in args[2:])]
        if name in ("seq", "scope"):
            first = 0 if name == "seq" else 1
            return [*args[:first], *self.block(args[first:], view, names)]
        if name in _PARAMS:
            return self._call_arguments(name, args, view, names)
        return [self.expression(arg, view, names) for arg in args]

    def _call_arguments(
        self, name: str, args: list[Expression], view: View, names: Names
    ) -> list[Expression]:
        where = _PARAMS[name] - 1
        before = [self.expression(arg, view, names) for arg in args[: where - 1]]
        after = [self.expression(arg, view, names) for arg in args[where:]]
        function = resolved(args[where - 1], names)
        if not is_call(function, "fn"):
            return [*before, args[where - 1], *after]
        inner = {"run": View.REPLICA, "merge_call": View.ACROSS, "update": View.UPDATE}[name]
        given = args[where][1:] if where < len(args) and is_call(args[where], "list") else []
        bound = {"run": given, "merge_call": ["$S", *given], "update": [*args[:1], *given]}[name]
        local = {**names, **dict(zip(function[1], [resolved(arg, names) for arg in bound], strict=False))}
        if where + 1 < len(args) and isinstance(args[where + 1], dict):
            local.update(args[where + 1])
        return [*before, ["fn", function[1], *self.block(function[2:], inner, local)], *after]
