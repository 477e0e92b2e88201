"""Datasets of global batches: pipelines on one machine, and their split over replicas."""

from strategies.datasets.dataset import Dataset as Dataset
from strategies.datasets.dataset import from_arrays as from_arrays
from strategies.datasets.dataset import from_generator as from_generator
from strategies.datasets.dataset_iterator import DatasetIterator as DatasetIterator
from strategies.datasets.dataset_iterator import OutOfRangeError as OutOfRangeError
from strategies.datasets.distributed_dataset import DistributedDataset as DistributedDataset
from strategies.datasets.distributed_dataset_from_function import (
    DistributedDatasetFromFunction as DistributedDatasetFromFunction,
)
from strategies.datasets.distributed_dataset_from_function import (
    distribute_from_function as distribute_from_function,
)
from strategies.datasets.input_options import AutoShardPolicy as AutoShardPolicy
from strategies.datasets.input_options import InputContext as InputContext
from strategies.datasets.input_options import InputOptions as InputOptions
from strategies.datasets.input_options import InputReplicationMode as InputReplicationMode
from strategies.datasets.input_options import OnUneven as OnUneven
from strategies.datasets.splitting import split_sizes as split_sizes
from strategies.datasets.stage import INFINITE_CARDINALITY as INFINITE_CARDINALITY
from strategies.datasets.stage import UNKNOWN_CARDINALITY as UNKNOWN_CARDINALITY
