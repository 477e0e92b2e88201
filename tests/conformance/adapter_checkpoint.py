"""The operations of the theme ``checkpoint``."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import strategies as ours
from collectives.calls import Call
from collectives.link import Link


class CheckpointOperations:
    """Saves to and restores from files in a folder that goes away with the adapter."""

    def _path(self) -> str:
        if not hasattr(self, "_folder"):
            self._folder = tempfile.TemporaryDirectory(prefix="checkpoints")
            self._num_saved = 0
        self._num_saved += 1
        own = os.path.join(self._folder.name, str(self._num_saved))
        # Several workers save together, to one place: the chief's.
        link = self.link_of_case()
        return (
            own
            if link is None
            else str(link.gather_objects(Call("path"), [own] * link.counts[link.process])[0])
        )

    def link_of_case(self) -> Link | None:
        """To the other workers that evaluate the case."""
        raise NotImplementedError

    def close_checkpoints(self) -> None:
        if hasattr(self, "_folder"):
            self._folder.cleanup()

    def do_save(self, _: ours.Strategy, objects: Mapping[str, Any]) -> str:
        return ours.Checkpoint(**objects).save(self._path())

    def do_ckpt_value(self, _: ours.Strategy, path: str, name: str) -> Any:
        return ours.load_checkpoint(path)[name]

    def do_restore(self, _: ours.Strategy, path: str, objects: Mapping[str, Any]) -> None:
        ours.Checkpoint(**objects).read(path)

    def do_restore_scoped(self, strategy: ours.Strategy, path: str, objects: Mapping[str, Any]) -> None:
        with strategy.scope():
            ours.Checkpoint(**objects).read(path)

    def do_ckpt_deferred(self, _: ours.Strategy, path: str, name: str, make: Callable[[], Any]) -> Any:
        checkpoint = ours.Checkpoint()
        checkpoint.read(path)
        variable = make()
        setattr(checkpoint, name, variable)
        return variable
