"""gloo's side of the benchmarks between processes, through ``torch.distributed``: a program for ``rank.py``."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Call = Callable[[], object]


def about() -> dict[str, Any]:
    """Join the group, over the loopback device; the ranks find one another by a file."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=(Path(os.environ["BENCHMARK_FOLDER"]) / "store").as_uri(),
        rank=int(os.environ["BENCHMARK_RANK"]),
        world_size=int(os.environ["BENCHMARK_RANKS"]),
        timeout=timedelta(seconds=60),
    )
    return {"torch": torch.__version__, "backend": dist.get_backend()}


def all_reduce(num_bytes: int) -> tuple[Call, Any]:
    """``all_reduce``, which is in place."""
    tensor = torch.zeros(max(1, num_bytes // 4))
    return lambda: dist.all_reduce(tensor), tensor.numpy()


def barrier() -> tuple[Call, int]:
    """``barrier``."""
    return dist.barrier, 0


def close() -> None:
    """Leave the group."""
    dist.destroy_process_group()


CASES = {"all_reduce": all_reduce, "barrier": barrier}
