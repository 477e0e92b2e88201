"""What a user may say about how datasets reach the replicas, and what a dataset function is told."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import final

from collectives.reduce_op import parse_member


@final
class AutoShardPolicy(Enum):
    """Which part of a dataset each worker sees. With one worker all policies mean the same."""

    AUTO = "auto"
    """DATA, as our datasets have no files."""
    DATA = "data"
    """Every worker takes its own replicas' shares of each global batch: together they see all of it once."""
    FILE = "file"
    """Every worker reads its own files; an error, as a dataset here does not know files."""
    OFF = "off"
    """Every worker sees all of the data, cut into shares of the same sizes."""

    @classmethod
    def parse(cls, policy: AutoShardPolicy | str) -> AutoShardPolicy:
        """The member, or the member of that name in any case.

        Raises:
            ValueError: no such policy.
        """
        return parse_member(cls, policy, "auto_shard_policy")


@final
class InputReplicationMode(Enum):
    """How often `distribute_from_function` calls its function."""

    PER_WORKER = "per_worker"
    """Once; the elements go to the worker's replicas in turn."""
    PER_REPLICA = "per_replica"
    """Once for each replica, which then has a pipeline of its own."""

    @classmethod
    def parse(cls, mode: InputReplicationMode | str) -> InputReplicationMode:
        """The member, or the member of that name in any case.

        Raises:
            ValueError: no such mode.
        """
        return parse_member(cls, mode, "experimental_replication_mode")


@final
class OnUneven(Enum):
    """What happens at the first step for which some replicas have data left, and some have none."""

    CONTINUE = "continue"
    """Those without get empty arrays, until nobody has data left: no data is lost."""
    STOP = "stop"
    """The data ends there, for all."""
    ERROR = "error"
    """A ValueError, on all."""

    @classmethod
    def parse(cls, choice: OnUneven | str) -> OnUneven:
        """The member, or the member of that name in any case.

        Raises:
            ValueError: no such choice.
        """
        return parse_member(cls, choice, "on_uneven")


@final
@dataclass(frozen=True)
class InputOptions:
    """Options of `distribute_dataset` and `distribute_datasets_from_function`, spelled as tf.distribute's.

    Attributes:
        experimental_fetch_to_device: whether shares are moved to their replica's device; otherwise they stay
            on the host.
        experimental_replication_mode: a member of `InputReplicationMode` or its name.
        experimental_place_dataset_on_device: accepted for the sake of ported code; pipelines run on the host.
        experimental_per_replica_buffer_size: accepted likewise; `Dataset.prefetch` is what reads ahead.
        on_uneven: a member of `OnUneven` or its name.

    Raises:
        ValueError: no such mode or choice, or a buffer size below 1.
    """

    experimental_fetch_to_device: bool = True
    experimental_replication_mode: InputReplicationMode | str = InputReplicationMode.PER_WORKER
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int = 1
    on_uneven: OnUneven | str = OnUneven.CONTINUE

    def __post_init__(self) -> None:
        OnUneven.parse(self.on_uneven)
        InputReplicationMode.parse(self.experimental_replication_mode)
        if self.experimental_per_replica_buffer_size < 1:
            raise ValueError(
                "InputOptions.experimental_per_replica_buffer_size: "
                f"got {self.experimental_per_replica_buffer_size}; need at least 1"
            )

    @property
    def replication_mode(self) -> InputReplicationMode:
        """`experimental_replication_mode` as a member."""
        return InputReplicationMode.parse(self.experimental_replication_mode)

    @property
    def uneven(self) -> OnUneven:
        """`on_uneven` as a member."""
        return OnUneven.parse(self.on_uneven)


@final
@dataclass(frozen=True)
class InputContext:
    """Which pipeline a dataset function is asked for.

    Attributes:
        num_input_pipelines: how often the function is called, over all workers.
        input_pipeline_id: which of these calls this is, in ``range(num_input_pipelines)``; what to pass to
            `Dataset.shard` as ``index``.
        num_replicas_in_sync: replicas of all workers.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """The rows of one replica's batch, where every replica has the same number.

        Raises:
            ValueError: ``global_batch_size`` is not a multiple of the number of replicas.
        """
        size, rest = divmod(global_batch_size, self.num_replicas_in_sync)
        if rest:
            raise ValueError(
                f"get_per_replica_batch_size: got a global batch of {global_batch_size} for "
                f"{self.num_replicas_in_sync} replicas; need a multiple of {self.num_replicas_in_sync} "
                f"— take {size * self.num_replicas_in_sync or self.num_replicas_in_sync}, or let "
                "distribute_dataset split uneven batches"
            )
        return size
