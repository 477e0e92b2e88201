"""Where arrays live and replicas compute.

A `Device` carries its array namespace, NumPy or CuPy, so that code which makes arrays never asks what
kind of device it has. ``cpu:k`` are logical: any number of them share the host's cores and memory.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any, final

from collectives.arrays import Array, as_array

_NAME = re.compile(r"(?:.*/)?(?:device:)?(?P<kind>[a-z_]+)(?::(?P<index>\d+))?", re.IGNORECASE)
_NAMESPACES = {"cpu": "numpy", "gpu": "cupy"}


@final
@dataclass(frozen=True)
class Device:
    """One device of this process.

    Args:
        kind: ``"cpu"`` or ``"gpu"``.
        index: its number among those of its kind.
    """

    kind: str
    index: int = 0

    @classmethod
    def parse(cls, name: str | Device) -> Device:
        """The device of that name: ``"cpu:0"``, ``"gpu:1"``, ``"CPU:0"``, TensorFlow's ``"/device:CPU:0"``.

        Raises:
            ValueError: no such kind of device.
            TypeError: not a name.
        """
        if isinstance(name, Device):
            return name
        if not isinstance(name, str):
            raise TypeError(f"Device: got {name!r}; need a name such as 'cpu:0' or 'gpu:1'")
        match = _NAME.fullmatch(name.strip())
        if match is None or match["kind"].lower() not in _NAMESPACES:
            raise ValueError(f"Device: got {name!r}; need a name such as 'cpu:0' or 'gpu:1'")
        return cls(match["kind"].lower(), int(match["index"] or 0))

    @cached_property
    def xp(self) -> Any:
        """The array namespace of this device: the module ``numpy`` or ``cupy``.

        Raises:
            ModuleNotFoundError: a GPU, and CuPy is not installed.
        """
        try:
            return import_module(_NAMESPACES[self.kind])
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"{self}: needs CuPy, which is not installed; "
                "pip install 'xpdistribute[cuda12]' (or [cuda13]) — or use 'cpu:0', 'cpu:1', ..."
            ) from error

    def place(self, value: Any) -> Array:
        """The value as an array on this device; itself where it is there already."""
        if self.kind == "cpu":
            array = as_array(value, str(self))
            # A CuPy array has no implicit way to the host.
            return array.get() if hasattr(array, "get") else array
        xp = self.xp
        with xp.cuda.Device(self.index):
            return xp.asarray(value)  # type: ignore[no-any-return]

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}"


def parse_devices(names: Sequence[str | Device], where: str) -> tuple[Device, ...]:
    """The devices of these names, in order.

    Raises:
        ValueError: none, unknown or repeated ones.
        TypeError: not a sequence of names.
    """
    if isinstance(names, (str, Device)) or not isinstance(names, Sequence):
        raise TypeError(
            f"{where}: got devices={names!r}; need a list of names — write devices=['cpu:0', 'cpu:1']"
        )
    devices = tuple(Device.parse(name) for name in names)
    if not devices:
        raise ValueError(f"{where}: got no devices; need at least one — write devices=['cpu:0', 'cpu:1']")
    repeated = sorted({str(device) for device in devices if devices.count(device) > 1})
    if repeated:
        raise ValueError(
            f"{where}: got {', '.join(repeated)} more than once; each replica needs a device of its own — "
            "number logical CPUs as cpu:0, cpu:1, ..."
        )
    return devices


def visible_gpus() -> tuple[Device, ...]:
    """The GPUs that this process may use; none where CuPy or a driver is missing."""
    try:
        cupy = import_module("cupy")
    except ModuleNotFoundError:
        return ()
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:  # CuPy without a driver
        return ()
    return tuple(Device("gpu", index) for index in range(count))
