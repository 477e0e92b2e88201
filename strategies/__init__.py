"""Who runs what where: one class for each way to spread training over devices."""

import os.path as _path
from importlib import import_module as _import_module
from types import ModuleType as _Module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

# Our packages have common names, and a script's own folder is searched before site-packages.
for _name in ("collectives", "variables"):
    _file = str(_import_module(_name).__file__)
    if _path.dirname(_path.dirname(_path.abspath(_file))) != _path.dirname(
        _path.dirname(_path.abspath(__file__))
    ):
        raise ImportError(f"{_file} hides our package {_name!r}: rename it, or run python -P")

# All public names, also those of the packages below, so that one import will do.
from collectives import Array as Array
from collectives import Buckets as Buckets
from collectives import CheckedCommunicator as CheckedCommunicator
from collectives import ClusterTask as ClusterTask
from collectives import CollectiveAbortedError as CollectiveAbortedError
from collectives import CollectiveError as CollectiveError
from collectives import CollectiveMismatchError as CollectiveMismatchError
from collectives import CollectiveTimeoutError as CollectiveTimeoutError
from collectives import CommunicationImplementation as CommunicationImplementation
from collectives import CommunicationOptions as CommunicationOptions
from collectives import Communicator as Communicator
from collectives import Device as Device
from collectives import FlightRecorder as FlightRecorder
from collectives import HierarchicalCopyAllReduce as HierarchicalCopyAllReduce
from collectives import IndexedSlices as IndexedSlices
from collectives import InProcessCommunicator as InProcessCommunicator
from collectives import NcclAllReduce as NcclAllReduce
from collectives import NonBlocking as NonBlocking
from collectives import PeerFailedError as PeerFailedError
from collectives import ReduceOp as ReduceOp
from collectives import ReductionToOneDevice as ReductionToOneDevice
from collectives import TracedCommunicator as TracedCommunicator
from collectives import asarray as asarray
from collectives import group_by_size as group_by_size
from collectives import process_group as process_group
from collectives import to_dense as to_dense
from strategies.central_storage_strategy import CentralStorageStrategy as CentralStorageStrategy
from strategies.current_strategy import all_gather as all_gather
from strategies.current_strategy import all_reduce as all_reduce
from strategies.current_strategy import get_replica_context as get_replica_context
from strategies.current_strategy import get_strategy as get_strategy
from strategies.current_strategy import has_strategy as has_strategy
from strategies.current_strategy import in_cross_replica_context as in_cross_replica_context
from strategies.current_strategy import merge_call as merge_call
from strategies.datasets import INFINITE_CARDINALITY as INFINITE_CARDINALITY
from strategies.datasets import UNKNOWN_CARDINALITY as UNKNOWN_CARDINALITY
from strategies.datasets import AutoShardPolicy as AutoShardPolicy
from strategies.datasets import Dataset as Dataset
from strategies.datasets import DatasetIterator as DatasetIterator
from strategies.datasets import DistributedDataset as DistributedDataset
from strategies.datasets import DistributedDatasetFromFunction as DistributedDatasetFromFunction
from strategies.datasets import InputContext as InputContext
from strategies.datasets import InputOptions as InputOptions
from strategies.datasets import InputReplicationMode as InputReplicationMode
from strategies.datasets import OnUneven as OnUneven
from strategies.datasets import OutOfRangeError as OutOfRangeError
from strategies.datasets import from_arrays as from_arrays
from strategies.datasets import from_generator as from_generator
from strategies.datasets import split_sizes as split_sizes
from strategies.losses import compute_average_loss as compute_average_loss
from strategies.losses import scale_regularization_loss as scale_regularization_loss
from strategies.membership_change import MembershipChange as MembershipChange
from strategies.mirrored_strategy import MirroredStrategy as MirroredStrategy
from strategies.multi_worker_mirrored_strategy import (
    MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)
from strategies.one_device_strategy import OneDeviceStrategy as OneDeviceStrategy
from strategies.optimizers import LAMB as LAMB
from strategies.optimizers import SGD as SGD
from strategies.optimizers import Adagrad as Adagrad
from strategies.optimizers import Adam as Adam
from strategies.optimizers import AdamW as AdamW
from strategies.optimizers import ExponentialMovingAverage as ExponentialMovingAverage
from strategies.optimizers import GradientAccumulator as GradientAccumulator
from strategies.optimizers import GradientAggregation as GradientAggregation
from strategies.optimizers import LossScaleOptimizer as LossScaleOptimizer
from strategies.optimizers import Optimizer as Optimizer
from strategies.optimizers import RMSprop as RMSprop
from strategies.optimizers import Schedule as Schedule
from strategies.optimizers import UpdateRule as UpdateRule
from strategies.optimizers import clip_by_global_norm as clip_by_global_norm
from strategies.optimizers import global_norm as global_norm
from strategies.optimizers import schedules as schedules
from strategies.strategy import RunOptions as RunOptions
from strategies.strategy import Strategy as Strategy
from strategies.strategy import ValueContext as ValueContext
from variables import CentralVariable as CentralVariable
from variables import FixedShardsPartitioner as FixedShardsPartitioner
from variables import LocalVariable as LocalVariable
from variables import MaxSizePartitioner as MaxSizePartitioner
from variables import MinSizePartitioner as MinSizePartitioner
from variables import Mirrored as Mirrored
from variables import MirroredVariable as MirroredVariable
from variables import Partitioner as Partitioner
from variables import PerReplica as PerReplica
from variables import ReplicaContext as ReplicaContext
from variables import ReplicaContextError as ReplicaContextError
from variables import ShardedVariable as ShardedVariable
from variables import SyncOnReadVariable as SyncOnReadVariable
from variables import Variable as Variable
from variables import VariableAggregation as VariableAggregation
from variables import VariableSynchronization as VariableSynchronization
from variables import assert_replicas_equal as assert_replicas_equal
from variables import current_replica as current_replica
from variables import embedding_lookup as embedding_lookup

# What many programs never use is loaded when first asked for, so that importing this package stays quick.
if _TYPE_CHECKING:
    from strategies import metrics as metrics
    from strategies.checkpoints import Checkpoint as Checkpoint
    from strategies.checkpoints import CheckpointError as CheckpointError
    from strategies.checkpoints import CheckpointManager as CheckpointManager
    from strategies.checkpoints import CheckpointMismatchError as CheckpointMismatchError
    from strategies.checkpoints import PartialRestoreWarning as PartialRestoreWarning
    from strategies.checkpoints import PendingSave as PendingSave
    from strategies.checkpoints import RestoreStatus as RestoreStatus
    from strategies.checkpoints import Stateful as Stateful
    from strategies.checkpoints import about_checkpoint as about_checkpoint
    from strategies.checkpoints import latest_checkpoint as latest_checkpoint
    from strategies.checkpoints import load_checkpoint as load_checkpoint
    from strategies.checkpoints import run_with_restarts as run_with_restarts
    from strategies.logging import ScalarLogger as ScalarLogger
    from strategies.normalization import SyncBatchNorm as SyncBatchNorm
    from strategies.normalization import sync_moments as sync_moments
    from strategies.printing import print as print
    from strategies.progress import Progress as Progress
    from strategies.randomness import ReplicaGenerators as ReplicaGenerators
    from strategies.torch_modules import ReplicatedModule as ReplicatedModule
    from strategies.tracing import Trace as Trace
    from strategies.tracing import span as span

_LATER = {
    "strategies.checkpoints": "Checkpoint CheckpointError CheckpointManager CheckpointMismatchError PartialRestoreWarning PendingSave RestoreStatus Stateful about_checkpoint latest_checkpoint load_checkpoint run_with_restarts",
    "strategies.logging": "ScalarLogger",
    "strategies.normalization": "SyncBatchNorm sync_moments",
    "strategies.printing": "print",
    "strategies.progress": "Progress",
    "strategies.randomness": "ReplicaGenerators",
    "strategies.torch_modules": "ReplicatedModule",
    "strategies.tracing": "Trace span",
}
_MODULES = {name: module for module, names in _LATER.items() for name in names.split()}


def __getattr__(name: str) -> _Any:
    if name in ("metrics", "logging"):
        return _import_module(f"strategies.{name}")
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(_import_module(module), name)
    return value


# For ``from strategies import *``, which should not put another print into its place.
__all__ = sorted(  # a list all the same
    {
        *(name for name, value in globals().items() if name[0] != "_" and not isinstance(value, _Module)),
        *_MODULES,
        "metrics",
    }
    - {"print"}
)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
