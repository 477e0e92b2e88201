"""Saves objects by name and restores them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, final, overload

from collectives.arrays import Array
from strategies.checkpoints.collecting import ABOUT, collect, collect_own
from strategies.checkpoints.file_reading import ArrayFile
from strategies.checkpoints.file_writing import write_bytes, write_file
from strategies.checkpoints.object_tree import Group, ObjectTree
from strategies.checkpoints.opening import open_file, open_together
from strategies.checkpoints.pending_save import PendingSave, Snapshot
from strategies.checkpoints.restoration import Restoration
from strategies.checkpoints.restore_status import NothingRestored, RestoreStatus
from strategies.checkpoints.states import decode
from strategies.checkpoints.together import TO_WRITE, Together
from variables.replica_context import Owner, ReplicaContext, ReplicaContextError, current

T = TypeVar("T")


@final
class Checkpoint(Group):
    """Objects by name, which are saved together and restored together.

    Takes variables of every kind, optimizers, iterators of datasets, NumPy's and Python's random generators, writable
    arrays, numbers and strings, other checkpoints, lists and dicts of all these, and anything with `Stateful`'s
    methods. They become attributes: ``checkpoint.step += 1``. An attribute that is set after a
    `restore` takes its value from the restored file, if that has one for it.

    A file holds logical values: one of equal copies, the sum or mean of own ones, all rows of a sharded variable. It
    restores into any strategy, number of replicas and sharding. Of an optimizer it holds the count of updates, the
    learning rate unless that is a function, and the slots of those variables that are in the checkpoint too.

    Once a process has joined a job of several, by making a strategy of several processes, every checkpoint is one of all
    of them, whichever objects it holds: all make it with the same names, and all call `save` and `restore` with the same
    path. Only the chief writes. What goes wrong in one process is raised in all of them, and they can go on together. Of
    plain values and optimizers' numbers the chief's are saved; of random generators, iterators and other states each
    process's own, where they differ. Only `to_bytes`, `from_bytes` and `load_checkpoint` can serve one process alone.

    Args:
        objects: by name.

    Raises:
        TypeError: an object of a kind that can't be saved.
        ValueError: a name that can't be one.
    """

    def __init__(self, **objects: Any) -> None:
        # By way of __dict__, as setting an attribute attaches an object.
        self.__dict__["_objects"] = {}
        self.__dict__["_state"] = _State()
        for name, value in objects.items():
            setattr(self, name, value)

    _objects: dict[str, Any]
    _state: _State

    @property
    def objects(self) -> dict[str, Any]:
        return self._objects

    @overload
    def save(
        self,
        path: str | os.PathLike[str],
        *,
        blocking: Literal[True] = True,
        about: Mapping[str, Any] | None = None,
        then: Callable[[], object] | None = None,
    ) -> str: ...

    @overload
    def save(
        self,
        path: str | os.PathLike[str],
        *,
        blocking: bool,
        about: Mapping[str, Any] | None = None,
        then: Callable[[], object] | None = None,
    ) -> str | PendingSave: ...

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        blocking: bool = True,
        about: Mapping[str, Any] | None = None,
        then: Callable[[], object] | None = None,
    ) -> str | PendingSave:
        """Write a file that holds the objects' values: complete, checksummed and on the disk, or not at all.

        What stood at the path is replaced at the last moment. Call it between steps, when no other thread changes
        the objects. In a job it ends in all processes when the chief has written the file, or could not.

        Args:
            path: of the file; folders that are missing are made. In a job only the chief needs to see it.
            blocking: False returns once the values have been copied in memory; a thread writes them. The copy's memory is kept for
                the next time; the first time, the system has to find it. A save that is still under way is waited for first.
            about: numbers and strings about this checkpoint, for `about_checkpoint`.
            then: called once the file is on the disk, in the thread that has written it; in a job by the chief.

        Returns:
            The path, or, if not blocking, a handle to wait with.

        Raises:
            OSError: it can't be written; what stood at the path still does.
            TypeError: an object, or a part of a state, of a kind that can't be saved.
            ValueError: an ON_READ variable with aggregation NONE, which has no value across replicas; an optimizer without its
                variables.
            ReplicaContextError: called in a step.
            CollectiveTimeoutError: in a job, some process did not call it.
            Exception: what went wrong with the save before, if that was not waited for.
        """

        def after() -> None:
            if then is not None:
                then()

        return self._with_all(
            lambda together: self._save(together, path, about, after, None, blocking=blocking)
        )

    def _save(
        self,
        together: Together,
        path: str | os.PathLike[str],
        about: Mapping[str, Any] | None,
        after: Callable[[], Any],
        hear: Callable[[Any], object] | None,
        *,
        blocking: bool,
    ) -> str | PendingSave:
        """As `save`; what ``after`` returns to the chief, of JSON's types, ``hear`` is called with in every process."""
        _require_across("save")
        if together.is_waiting:
            raise RuntimeError(
                "save: this process waits to be taken into the job, and has nothing of its own to save; need "
                "strategy.share_state(...) before"
            )
        name, target, writes = os.fspath(path), Path(os.path.abspath(path)), together.is_chief
        tree, error = self._settled_tree()
        content = collect(tree, together, {"path": name, "blocking": blocking}, about, error)
        arrays = list(content.arrays.values())
        failure: MemoryError | None = None
        if not blocking:
            try:
                arrays = self._state.snapshot.take(arrays) if writes else []
            except MemoryError as wrong:
                failure = wrong

        def write() -> None:
            result: Any = None
            wrong: BaseException | None = failure
            if writes and wrong is None:
                try:
                    write_file(target, arrays, content.states)
                    result = after()
                except BaseException as wrong_here:  # noqa: BLE001  # raised in all processes
                    wrong = wrong_here
            told = together.agree(f"save {name}", result, wrong, timeout=TO_WRITE, key=f"save {name}")
            if hear is not None:
                hear(told[0])

        if blocking:
            write()
            return name
        self._state.saving = PendingSave(name, write)
        return self._state.saving

    def _outlast_save(self) -> None:
        """Wait until a save that is under way has ended, well or not."""
        if self._state.saving is not None:
            self._state.saving.outlast()

    def to_bytes(self, *, for_newcomer: bool = False) -> Array:
        """The bytes of the file that `save` would write, for another process or for later; nothing touches the disk.

        Args:
            for_newcomer: give what a process that joins the job is to begin with instead, so that what is summed over
                replicas stays what it was: of a sum nothing, of other ON_READ variables this process's own value. That
                needs no other process; otherwise all of them must call it, as `save`.

        Returns:
            Shape ``(n,)``, dtype uint8; it shares no memory with the objects.

        Raises:
            As `save`, OSError aside.
        """
        _require_across("to_bytes")
        content = collect_own(ObjectTree.of(self._objects), for_newcomer=for_newcomer)
        return write_bytes(list(content.arrays.values()), content.states)

    def from_bytes(self, content: Any) -> RestoreStatus:
        """As `restore`, from what `to_bytes` gave or from the bytes of a file; not a collective.

        Args:
            content: an object with the buffer protocol; it is copied.
        """
        _require_across("from_bytes")
        self._state.settle()
        file = ArrayFile.of_bytes(content)
        file.verify()
        return self._restore_file(file, ObjectTree.of(self._objects), Together(None), is_partial=False)

    def wait(self) -> None:
        """Wait for a save that is under way, if any.

        Raises:
            Exception: what went wrong with it, if that has not been raised before.
        """
        self._state.settle()

    def restore(self, path: str | os.PathLike[str] | None) -> RestoreStatus:
        """Give the objects the values that a file has for them.

        All values are checked before the first object changes. Values that no object has a name for are kept for those
        that are attached later, as attributes; slots of optimizers are made for them.

        Args:
            path: that `save` returned. None, which a manager's ``latest_checkpoint`` is at the first start, changes
                nothing. In a job it is what the chief sees there; to processes that see nothing or something else the
                chief sends its file, which they keep in memory.

        Returns:
            What was left over; it warns of that, unless told not to.

        Raises:
            FileNotFoundError: there is no file.
            CheckpointMismatchError: values don't fit; nothing was restored.
            CheckpointError: the file is damaged or none of ours; nothing was restored.
            ValueError: an object refuses its state; nothing was restored.
            ReplicaContextError: called in a step.
            CollectiveTimeoutError: in a job, some process did not call it.
        """
        return self._restore(path, is_partial=False)

    def read(self, path: str | os.PathLike[str] | None) -> RestoreStatus:
        """As `restore`, without a warning of what is left over."""
        return self._restore(path, is_partial=True)

    def _restore(self, path: str | os.PathLike[str] | None, *, is_partial: bool) -> RestoreStatus:
        _require_across("restore")
        name = None if path is None else os.fspath(path)

        def restore(together: Together) -> RestoreStatus:
            if together.is_waiting:
                # What the others hand over is newer than any file, and reading sums over replicas needs them.
                return RestoreStatus(
                    NothingRestored([], source="the job that is waited for"), is_partial=True
                )
            tree, error = self._settled_tree()
            together.agree_on("restore", {"path": name}, error)
            names = sorted({*tree.arrays, *tree.states})
            together.require_same_names("restore", names)
            if name is None:
                return RestoreStatus(NothingRestored(names), is_partial=True)
            file = open_together(Path(name), together)
            return self._restore_file(file, tree, together, is_partial=is_partial)

        return self._with_all(restore)

    def _restore_file(
        self, file: ArrayFile, tree: ObjectTree, together: Together, *, is_partial: bool
    ) -> RestoreStatus:
        restoration = Restoration(file, Together.now().process)
        restoration.apply(tree, lambda error: together.agree("restore", None, error))
        for name, count in restoration.states_by_process.items():
            if count != together.num_processes and name in tree.states and not together.is_alone:
                together.say(
                    "restore: %s has a state for each of %d processes, and there are %d now: each takes its own, if it has one",
                    name,
                    count,
                    together.num_processes,
                )
        self._state.pending = [(restoration, "")]
        _hand_down(restoration, tree)
        return RestoreStatus(restoration, is_partial=is_partial)

    def _settled_tree(self) -> tuple[ObjectTree, Exception | None]:
        """The tree of the objects; or an empty one and what is wrong with them, or with the save before."""
        try:
            self._state.settle()
            return ObjectTree.of(self._objects), None
        except Exception as error:  # noqa: BLE001  # raised in all processes
            return ObjectTree(), error

    def _with_all(self, work: Callable[[Together], T]) -> T:
        """Do what all processes do together; in an elastic job again, if one is lost meanwhile."""
        together = Together.now()
        if together.is_elastic:
            owner = _owner_of(self._objects)
            if owner is not None:
                return owner.across(lambda: work(together))
            from strategies.recovery import again  # noqa: PLC0415  # loaded by jobs that need it

            return again(lambda: work(together))
        return work(together)

    # -------------------------------------------------------------- attributes

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith(("_", "$")) or hasattr(type(self), name):
            raise ValueError(
                f"checkpoint: got {name!r} as the name of an object; need another, this one is taken"
            )
        before = dict(self._objects)
        self._objects[name] = value
        try:
            tree = ObjectTree.of(self._objects, only=name)
            for restoration, prefix in self._state.pending_now():
                tree = ObjectTree.of(self._objects, prefix, name)
                restoration.apply(tree)
                _hand_down(restoration, tree)
        except BaseException:
            self._objects.clear()
            self._objects.update(before)
            raise

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("_objects", ()):
            return self._objects[name]
        raise AttributeError(f"checkpoint: has no object {name!r}; need one of those given to it")

    def __delattr__(self, name: str) -> None:
        if name not in self._objects:
            raise AttributeError(f"checkpoint: has no object {name!r}; need one of those given to it")
        del self._objects[name]

    def __repr__(self) -> str:
        return f"Checkpoint({', '.join(self._objects)})"


def load_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """All values of a file, by name: arrays, and the states of what is no array; not a collective.

    A state that differed between the processes of the job that saved it is a list of all of theirs.

    Args:
        path: that `Checkpoint.save` returned.

    Raises:
        FileNotFoundError: there is no file.
        CheckpointError: it is damaged or none of ours.
    """
    file = open_file(Path(path))
    states = {name: decode(state, file.read) for name, state in file.states.items() if name != ABOUT}
    return {**{name: file.read(name) for name in file.arrays}, **states}


def about_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What ``save(..., about=...)`` was told; empty if it was not. Only the head of the file is read.

    Raises:
        As `load_checkpoint`.
    """
    file = ArrayFile.open(Path(path))
    about = decode(file.states.get(ABOUT, {}), file.read)
    assert isinstance(about, dict)
    return about


@final
class _State:
    """What a checkpoint remembers beside its objects."""

    def __init__(self) -> None:
        self.pending: list[tuple[Restoration, str]] = []
        self.saving: PendingSave | None = None
        self.snapshot = Snapshot()

    def pending_now(self) -> list[tuple[Restoration, str]]:
        """The restorations that still have values for objects to come, and the prefix of their names."""
        self.pending = [entry for entry in self.pending if entry[0].unused]
        return self.pending

    def settle(self) -> None:
        """Wait for the save that is under way; raise what went wrong with it."""
        saving, self.saving = self.saving, None
        if saving is not None:
            saving.settle()


def _hand_down(restoration: Restoration, tree: ObjectTree) -> None:
    """Objects may be attached to nested checkpoints too."""
    for name, group in tree.groups.items():
        if isinstance(group, Checkpoint):
            group._state.pending = [(restoration, f"{name}/")]


def _owner_of(objects: Mapping[str, Any]) -> Owner | None:
    """A strategy whose processes are those of the job, if some variable is of one."""
    try:
        variables = ObjectTree.of(objects).variables.values()
    except (TypeError, ValueError):
        return None  # which is raised in all processes, by what is done with the objects then
    return next((v.owner for v in variables if v.owner is not None and v.owner.link is not None), None)


def _require_across(method: str) -> None:
    if isinstance(current.get(), ReplicaContext):
        raise ReplicaContextError(
            f"{method}: called in a step, where each replica would do it; call it outside of the function passed to "
            "strategy.run"
        )
