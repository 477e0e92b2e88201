"""What is replicated: values and variables that live on several devices."""

from variables.central_variable import CentralVariable as CentralVariable
from variables.local_variable import LocalVariable as LocalVariable
from variables.mirrored_variable import MirroredVariable as MirroredVariable
from variables.partitioners import FixedShardsPartitioner as FixedShardsPartitioner
from variables.partitioners import MaxSizePartitioner as MaxSizePartitioner
from variables.partitioners import MinSizePartitioner as MinSizePartitioner
from variables.partitioners import Partitioner as Partitioner
from variables.replica_context import ReplicaContext as ReplicaContext
from variables.replica_context import ReplicaContextError as ReplicaContextError
from variables.replica_context import current_replica as current_replica
from variables.replica_equality import assert_replicas_equal as assert_replicas_equal
from variables.sharded_variable import ShardedVariable as ShardedVariable
from variables.sharded_variable import embedding_lookup as embedding_lookup
from variables.sync_on_read_variable import SyncOnReadVariable as SyncOnReadVariable
from variables.synchronization import VariableAggregation as VariableAggregation
from variables.synchronization import VariableSynchronization as VariableSynchronization
from variables.values import Mirrored as Mirrored
from variables.values import PerReplica as PerReplica
from variables.variable import Variable as Variable
