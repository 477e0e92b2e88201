"""How ranks talk: devices, arrays and the collectives between them."""

from collectives.arrays import Array as Array
from collectives.arrays import asarray as asarray
from collectives.buckets import Buckets as Buckets
from collectives.buckets import group_by_size as group_by_size
from collectives.checked import CheckedCommunicator as CheckedCommunicator
from collectives.clusters import ClusterTask as ClusterTask
from collectives.communication_options import CommunicationImplementation as CommunicationImplementation
from collectives.communication_options import CommunicationOptions as CommunicationOptions
from collectives.communication_options import HierarchicalCopyAllReduce as HierarchicalCopyAllReduce
from collectives.communication_options import NcclAllReduce as NcclAllReduce
from collectives.communication_options import ReductionToOneDevice as ReductionToOneDevice
from collectives.communicator import Communicator as Communicator
from collectives.devices import Device as Device
from collectives.errors import CollectiveAbortedError as CollectiveAbortedError
from collectives.errors import CollectiveError as CollectiveError
from collectives.errors import CollectiveMismatchError as CollectiveMismatchError
from collectives.errors import CollectiveTimeoutError as CollectiveTimeoutError
from collectives.errors import PeerFailedError as PeerFailedError
from collectives.flight_recorder import FlightRecorder as FlightRecorder
from collectives.in_process import InProcessCommunicator as InProcessCommunicator
from collectives.indexed_slices import IndexedSlices as IndexedSlices
from collectives.indexed_slices import to_dense as to_dense
from collectives.non_blocking import NonBlocking as NonBlocking
from collectives.process_groups import process_group as process_group
from collectives.reduce_op import ReduceOp as ReduceOp
from collectives.traced import TracedCommunicator as TracedCommunicator
