"""Blocks of code that promise not to bring replicas' gradients together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_IS_PROMISED = ContextVar("xpdistribute_no_sync", default=False)


@contextmanager
def no_sync() -> Iterator[None]:
    """A block, in a step or around one, in which whatever would bring gradients together raises a RuntimeError."""
    token = _IS_PROMISED.set(True)
    try:
        yield
    finally:
        _IS_PROMISED.reset(token)


def require_sync(where: str) -> None:
    """Refuse to go on where gradients would be brought together against the promise.

    Raises:
        RuntimeError: called in `no_sync`.
    """
    if _IS_PROMISED.get():
        raise RuntimeError(
            f"{where}: called in no_sync(), but it brings the replicas' gradients together; call it after that block"
        )
