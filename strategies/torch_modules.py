"""PyTorch modules whose parameters are a strategy's variables.

Each replica has a module of its own, whose parameters share memory with the replica's copy of the variables, and
whose gradients lie where the optimizer looks for them. So PyTorch computes, in place, on what this library reduces and
updates, and nothing is packed or copied on the way. PyTorch is imported when a module is given.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, final

import numpy as np

from collectives.arrays import Array, array_like, asarray, is_cupy
from collectives.devices import Device
from collectives.indexed_slices import IndexedSlices
from strategies.current_strategy import get_strategy
from strategies.optimizers.optimizer import Optimizer
from variables.array_behaviour import ArrayBehaviour
from variables.local_variable import LocalVariable
from variables.replica_context import ReplicaContext, ReplicaContextError, current
from variables.variable import Variable


@final
class ReplicatedModule:
    """A PyTorch module, replicated as the current strategy replicates variables.

    Make it in ``strategy.scope()``; in a step call it and its `module` as in plain PyTorch::

        def step(images, labels):
            model.zero_grad()
            logits = model(images)
            losses = F.cross_entropy(logits, asarray(labels, like=logits), reduction="none")
            loss = compute_average_loss(losses)
            loss.backward()
            optimizer.apply_gradients(model.gradients())
            return loss.detach()

    **Parameters** become variables with equal copies; those with ``requires_grad`` are trainable. Only what writes in
    place keeps the memory shared: load weights with `load_state_dict`, not with ``assign=True``, and convert the module
    (``to``, ``half``) before it is given here.

    **Buffers**, such as the running statistics of batch normalization, become ON_READ variables: each replica updates its
    own from its share of the batch; read across replicas, floats are averaged and others are replica 0's. A step
    evaluates with its replica's own, until ``model.load_state_dict(model.state_dict())`` gives all the mean. Under a
    strategy with one copy of each variable for several replicas the variable is replica 0's buffer. Buffers that are not
    persistent stay the replica's own.

    **Gradients** add up until `zero_grad`, as always in PyTorch. A parameter that the loss does not depend on has a
    gradient of zero, by which momentum still moves it. Those of embeddings with ``sparse=True`` are `IndexedSlices`.

    **Threads.** Several replicas share PyTorch's threads out among them: each computes with cores / replicas, also after
    the step, in the thread that called ``strategy.run``. PyTorch has one CPU generator of random numbers for all
    threads, so with several replicas dropout is not the same from run to run.

    Args:
        module: a module, which is copied for each replica, or a function that makes one, called once for each replica; the
            values of the first one count.
        optimizer: in whose memory the gradients lie; None leaves them in PyTorch's, from where they are copied.
        num_threads: that PyTorch computes with in each replica; None shares them out as told above.

    Raises:
        ReplicaContextError: made in a step.
        TypeError: neither a module nor a function that makes one; parameters that are not dense numbers.
        ValueError: the modules that the function makes differ in their parameters.
    """

    def __init__(
        self,
        module: Any,
        optimizer: Optimizer | None = None,
        *,
        num_threads: int | None = None,
    ) -> None:
        torch = import_module("torch")
        if isinstance(current.get(), ReplicaContext):
            raise ReplicaContextError(
                "ReplicatedModule: made in a step; it makes variables for all replicas — make it in strategy.scope()"
            )
        if num_threads is not None and num_threads < 1:
            raise ValueError(f"ReplicatedModule: got num_threads={num_threads}; need at least 1")
        devices = get_strategy().devices
        modules = _modules(torch, module, devices)
        first = modules[0]
        self._torch = torch
        self._num_threads = num_threads
        self._optimizer = optimizer
        parameters = {
            name: Variable(parameter, name=name, trainable=parameter.requires_grad)
            for name, parameter in first.named_parameters()
        }
        kept = set(first.state_dict())
        buffers = {
            name: Variable(
                buffer,
                name=name,
                synchronization="ON_READ",
                aggregation="MEAN" if buffer.is_floating_point() else "ONLY_FIRST_REPLICA",
            )
            for name, buffer in first.named_buffers()
            if name in kept
        }
        self._trainable = tuple(variable for variable in parameters.values() if variable.trainable)
        self._buffers = tuple(buffers.values())
        self._replicas = [
            _share(replica, number, parameters, buffers) for number, replica in enumerate(modules)
        ]
        # A parameter that is used in two places has two names in the state of a module, and one variable.
        of_tensor = {id(first.get_parameter(name)): variable for name, variable in parameters.items()}
        self._variables = buffers | {
            name: of_tensor[id(tensor)] for name, tensor in first.named_parameters(remove_duplicate=False)
        }

    # ------------------------------------------------------------------- in a step

    @property
    def module(self) -> Any:
        """This replica's module, an ``nn.Module``.

        Raises:
            ReplicaContextError: across replicas, each of which has its own.
        """
        return self._own("module").module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What this replica's module returns; NumPy arrays and variables among the arguments become tensors, uncopied."""
        own = self._own("__call__")
        tensors = [self._tensor(argument, own) for argument in args]
        return own.module(*tensors, **{name: self._tensor(value, own) for name, value in kwargs.items()})

    def zero_grad(self) -> None:
        """Forget this replica's gradients: what ``backward`` adds from here on starts from zero."""
        own = self._own("zero_grad")
        for parameter in own.parameters:
            parameter.zero()

    def gradients(self) -> list[tuple[Any, Variable]]:
        """This replica's gradients, for `Optimizer.apply_gradients`.

        Returns:
            A pair of a gradient and its variable for each trainable parameter, in the order of the module's parameters.
            With an optimizer, a gradient is the optimizer's own memory; None where ``backward`` has left none.

        Raises:
            RuntimeError: a parameter or buffer has been given other memory, so that it is a variable no more.
            ReplicaContextError: across replicas.
        """
        own = self._own("gradients")
        own.require_shared()
        return [(parameter.gradient(), parameter.variable) for parameter in own.parameters]

    # ------------------------------------------------------------- across replicas

    @property
    def trainable_variables(self) -> tuple[Variable, ...]:
        """The variables of the parameters that are trained, in the module's order."""
        return self._trainable

    @property
    def buffers(self) -> tuple[Variable, ...]:
        """The variables of the persistent buffers, in the module's order."""
        return self._buffers

    @property
    def variables(self) -> Mapping[str, Variable]:
        """All variables by the names that the module's state has for them: for a checkpoint."""
        return dict(self._variables)

    def train(self, mode: bool = True) -> ReplicatedModule:
        """Switch to training: in a step this replica's module, else all. Returns this object."""
        context = current.get()
        if isinstance(context, ReplicaContext):
            self._own("train").module.train(mode)
        else:
            for replica in self._replicas:
                replica.module.train(mode)
        return self

    def eval(self) -> ReplicatedModule:
        """Switch to evaluation, as `train`."""
        return self.train(False)

    def state_dict(self) -> dict[str, Any]:
        """The state of one plain module: new tensors by name, with buffers brought together over the replicas.

        In a step it is the replica's own. A module of the same kind loads it: ``Net().load_state_dict(model.state_dict())``.
        """
        state = dict(self._replicas[0].module.state_dict())
        for name, variable in self._variables.items():
            if name in state:
                state[name] = array_like(variable.read_value(), state[name])
        return state

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Give all replicas the parameters and buffers of a module's state.

        Args:
            state: as from `state_dict`, of this object or of a plain module.
            strict: whether every name must be there, and no other.

        Raises:
            RuntimeError: names or shapes that don't fit.
            ReplicaContextError: in a step.
        """
        if isinstance(current.get(), ReplicaContext):
            raise ReplicaContextError(
                "load_state_dict: called in a step; it changes all replicas — call it outside strategy.run"
            )
        for replica in self._replicas:
            replica.module.load_state_dict(state, strict=strict)

    # ---------------------------------------------------------------------- inside

    def _own(self, method: str) -> _Replica:
        context = current.get()
        if isinstance(context, ReplicaContext):
            own = self._replicas[context.local_replica_id]
        elif len(self._replicas) == 1 and context is None:
            own = self._replicas[0]
        else:
            raise ReplicaContextError(
                f"ReplicatedModule.{method}: called across replicas, each of which has its own module; call it in the "
                "function passed to strategy.run — state_dict() gives the values of all"
            )
        thread = threading.get_ident()
        if own.thread != thread:
            own.thread = thread
            self._begin(own)
        return own

    def _begin(self, own: _Replica) -> None:
        """What a replica needs before its first call, and again if it has got a new thread."""
        torch = self._torch
        if self._num_threads is not None or len(self._replicas) > 1:
            share = max(1, _num_cores() // len(self._replicas))
            # It is a setting of the calling thread, as OpenMP starts threads for each of its own.
            torch.set_num_threads(self._num_threads or min(torch.get_num_threads(), share))
        if self._optimizer is not None:
            for parameter in own.parameters:
                if parameter.place is None and not parameter.is_sparse:
                    parameter.lay(self._optimizer.gradient(parameter.variable))

    def _tensor(self, argument: Any, own: _Replica) -> Any:
        if isinstance(argument, (np.ndarray, ArrayBehaviour)) or is_cupy(argument):
            return asarray(argument, like=own.example)
        return argument


@final
@dataclass
class _Parameter:
    """One trainable parameter of one replica."""

    tensor: Any
    variable: Variable
    is_sparse: bool
    """Whether its gradient holds rows only."""
    place: Array | None = None
    """Where the optimizer wants the gradient, if it has said so, ..."""
    view: Any = None
    """... and the tensor that lies there."""

    def lay(self, place: Array) -> None:
        """Let gradients be written there from now on, and start from zero."""
        self.place = place
        self.view = array_like(place, self.tensor)
        self.zero()

    def zero(self) -> None:
        """Forget the gradient."""
        if self.view is not None:
            self.view.zero_()
        # Also where the module's own zero_grad has taken it away.
        self.tensor.grad = self.view

    def gradient(self) -> Any:
        """The gradient as an optimizer takes it."""
        gradient = self.tensor.grad
        if gradient is self.view or gradient is None:
            return None if gradient is None else self.place
        if gradient.is_sparse:
            rows, values = gradient._indices()[0], gradient._values()
            return IndexedSlices(asarray(values), asarray(rows), self.variable.shape)
        return asarray(gradient)


@final
@dataclass
class _Replica:
    """One replica's module and what of it is shared."""

    module: Any
    parameters: list[_Parameter]
    shared: list[tuple[str, dict[str, Any], str]]
    """Parameters and buffers: the whole name, the table of the submodule that holds it, and the name in there."""
    example: Any
    """A tensor on the replica's device."""
    addresses: list[int] = field(init=False)
    """Where they lay when they were shared."""
    thread: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.addresses = [table[key].data_ptr() for _, table, key in self.shared]

    def require_shared(self) -> None:
        """Refuse to go on where training would change what nobody reads any more.

        Raises:
            RuntimeError: a parameter or buffer has been given other memory.
        """
        try:
            addresses = [table[key].data_ptr() for _, table, key in self.shared]
        except (AttributeError, KeyError):  # it has been taken away
            addresses = []
        if addresses == self.addresses:
            return
        for (name, table, key), address in zip(self.shared, self.addresses, strict=True):
            tensor = table.get(key)
            if tensor is None or tensor.data_ptr() != address:
                raise RuntimeError(
                    f"ReplicatedModule: {name} no longer lies in the memory of its variable, so updates would not reach it; it "
                    "must stay there — write in place, load with load_state_dict, and convert the module (to, half) before "
                    "it is given to ReplicatedModule"
                )


def _num_cores() -> int:
    """That this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    return os.cpu_count() or 1 if affinity is None else len(affinity(0))


def _modules(torch: Any, module: Any, devices: tuple[Device, ...]) -> list[Any]:
    """A module for each device, all with the same parameters."""
    if isinstance(module, torch.nn.Module):
        modules = [module, *(copy.deepcopy(module) for _ in devices[1:])]
    elif callable(module):
        modules = [module() for _ in devices]
    else:
        modules = [module]
    for made in modules:
        if not isinstance(made, torch.nn.Module):
            raise TypeError(
                f"ReplicatedModule: got {type(made).__name__}; need a torch.nn.Module, or a function that makes one"
            )
    kinds = [{name: tuple(p.shape) for name, p in made.named_parameters()} for made in modules]
    for number, kind in enumerate(kinds):
        if kind != kinds[0]:
            differing = sorted(set(kind.items()) ^ set(kinds[0].items()))[0][0]
            raise ValueError(
                f"ReplicatedModule: the module made for replica {number} differs from the first one in {differing}; need the "
                "same parameters in every one — a function that makes one module, the same each time"
            )
    return [
        made if device.kind == "cpu" else made.to(f"cuda:{device.index}")
        for made, device in zip(modules, devices, strict=True)
    ]


def _share(
    module: Any, number: int, parameters: Mapping[str, Variable], buffers: Mapping[str, Variable]
) -> _Replica:
    """Let a replica's module live in the replica's copies of the variables."""
    torch = import_module("torch")
    embeddings = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    sparse = {id(part.weight) for part in module.modules() if isinstance(part, embeddings) and part.sparse}
    trained, shared = [], []
    example = torch.empty(0)
    for name, variable in parameters.items():
        tensor = module.get_parameter(name)
        tensor.data = array_like(_memory(variable, number), tensor)
        example = tensor.data
        holder, _, key = name.rpartition(".")
        shared.append((name, module.get_submodule(holder)._parameters, key))
        if variable.trainable:
            trained.append(_Parameter(tensor, variable, id(tensor) in sparse))
    for name, variable in buffers.items():
        # Where all replicas have one copy they would overwrite one another's statistics.
        if number == 0 or len(variable.components) > 1:
            tensor = module.get_buffer(name)
            tensor.data = array_like(_memory(variable, number), tensor)
            holder, _, key = name.rpartition(".")
            shared.append((name, module.get_submodule(holder)._buffers, key))
    return _Replica(module, trained, shared, example)


def _memory(variable: Variable, number: int) -> Array:
    components = variable.components
    component = components[min(number, len(components) - 1)]
    assert isinstance(component, LocalVariable)
    return component.memory
