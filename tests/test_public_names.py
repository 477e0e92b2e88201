"""The public API changes on purpose only: adding a name means adding it here."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest

import collectives
import strategies
import variables

COLLECTIVES = """
Array Buckets CheckedCommunicator ClusterTask CollectiveAbortedError CollectiveError CollectiveMismatchError CollectiveTimeoutError
CommunicationImplementation CommunicationOptions Communicator Device HierarchicalCopyAllReduce InProcessCommunicator IndexedSlices PeerFailedError
FlightRecorder NcclAllReduce NonBlocking ReduceOp ReductionToOneDevice TracedCommunicator asarray group_by_size process_group to_dense
"""
VARIABLES = """
FixedShardsPartitioner MaxSizePartitioner MinSizePartitioner Partitioner ShardedVariable embedding_lookup
CentralVariable LocalVariable Mirrored MirroredVariable PerReplica ReplicaContext ReplicaContextError SyncOnReadVariable
Variable VariableAggregation VariableSynchronization assert_replicas_equal current_replica
"""
STRATEGIES = """
Checkpoint CheckpointError CheckpointManager CheckpointMismatchError PartialRestoreWarning PendingSave RestoreStatus Stateful
about_checkpoint latest_checkpoint load_checkpoint run_with_restarts
AutoShardPolicy CentralStorageStrategy Dataset DatasetIterator DistributedDataset DistributedDatasetFromFunction
Adagrad AdamW ExponentialMovingAverage GradientAccumulator LAMB LossScaleOptimizer RMSprop Schedule clip_by_global_norm global_norm
GradientAggregation INFINITE_CARDINALITY InputContext InputOptions InputReplicationMode MirroredStrategy MembershipChange MultiWorkerMirroredStrategy OneDeviceStrategy
OnUneven Optimizer OutOfRangeError ReplicatedModule RunOptions SGD Adam Strategy UNKNOWN_CARDINALITY UpdateRule ValueContext
all_gather all_reduce compute_average_loss from_arrays from_generator get_replica_context get_strategy has_strategy
Progress ScalarLogger Trace in_cross_replica_context merge_call print span split_sizes
ReplicaGenerators SyncBatchNorm scale_regularization_loss sync_moments
"""


def _names(module: ModuleType) -> set[str]:
    return {
        name
        for name in dir(module)
        if not name.startswith("_") and not isinstance(getattr(module, name), ModuleType)
    }


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (collectives, COLLECTIVES),
        (variables, VARIABLES),
        (strategies, STRATEGIES + VARIABLES + COLLECTIVES),
    ],
    ids=["collectives", "variables", "strategies"],
)
def test_a_package_has_exactly_the_names_written_here(module: ModuleType, names: str) -> None:
    assert _names(module) == set(names.split())


def test_importing_strategies_loads_nothing_that_is_optional_or_only_shown() -> None:
    code = "import strategies, sys; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout.split()
    optional = {
        "cupy",
        "mpi4py",
        "torch",
        "jax",
        "tensorflow",
        "matplotlib",
        "rich",
        "sklearn",
        "ml_dtypes",
        "safetensors",
    }
    assert optional.isdisjoint(loaded)


def test_a_users_module_that_hides_a_package_of_ours_is_named(tmp_path: object) -> None:
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import strategies"
    with open(f"{tmp_path}/variables.py", "w") as file:
        file.write("x = 1\n")
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    assert "variables.py hides our package 'variables': rename it, or run python -P" in done.stderr
