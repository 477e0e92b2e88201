"""Who speaks for all: one process, and in a step one replica of it."""

from __future__ import annotations

from typing import Any

from collectives.this_process import process_number
from variables.replica_context import ReplicaContext, current


def speaks_for_all() -> bool:
    """Whether the calling code is what prints and logs: replica 0 in a step, else the chief process."""
    context: Any = current.get()
    if context is None:
        return process_number() == 0
    if isinstance(context, ReplicaContext):
        return context.replica_id_in_sync_group == 0
    return bool(getattr(context.strategy, "is_chief", True))


def rank() -> int:
    """The number of the calling replica in a step, of the calling process elsewhere."""
    context = current.get()
    return context.replica_id_in_sync_group if isinstance(context, ReplicaContext) else process_number()
