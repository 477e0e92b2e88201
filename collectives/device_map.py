"""Which GPU each process of a job has, before NCCL is told of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence


def check_device_map(devices: Sequence[tuple[str, Hashable]]) -> None:
    """Refuse two processes on one GPU, before NCCL does with words that don't say so.

    Args:
        devices: host and identity (the UUID) of each process's GPU, by rank.

    Raises:
        ValueError: a GPU is used twice.
    """
    shared = [device for device, count in Counter(devices).items() if count > 1]
    if not shared:
        return
    lines = []
    for host, gpu in shared:
        ranks = [str(rank) for rank, device in enumerate(devices) if device == (host, gpu)]
        lines.append(f"ranks {', '.join(ranks[:-1])} and {ranks[-1]} share {gpu} on {host}")
    raise ValueError(
        f"devices: {'; '.join(lines)}; need a GPU of its own for each rank — choose it by the rank's number on its host (local "
        "rank), or start fewer ranks; for tests, NCCL 2.30 and later shares one if NCCL_MULTI_RANK_GPU_ENABLE=1"
    )
