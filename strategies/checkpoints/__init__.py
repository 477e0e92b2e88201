"""Checkpoints: the values of objects in one file, written whole or not at all, and put back."""

from strategies.checkpoints.checkpoint import Checkpoint as Checkpoint
from strategies.checkpoints.checkpoint import about_checkpoint as about_checkpoint
from strategies.checkpoints.checkpoint import load_checkpoint as load_checkpoint
from strategies.checkpoints.checkpoint_manager import CheckpointManager as CheckpointManager
from strategies.checkpoints.checkpoint_manager import latest_checkpoint as latest_checkpoint
from strategies.checkpoints.errors import CheckpointError as CheckpointError
from strategies.checkpoints.errors import CheckpointMismatchError as CheckpointMismatchError
from strategies.checkpoints.errors import PartialRestoreWarning as PartialRestoreWarning
from strategies.checkpoints.pending_save import PendingSave as PendingSave
from strategies.checkpoints.restarts import run_with_restarts as run_with_restarts
from strategies.checkpoints.restore_status import RestoreStatus as RestoreStatus
from strategies.checkpoints.states import Stateful as Stateful
