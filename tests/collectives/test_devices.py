"""Names of devices, and putting arrays on them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from collectives import Device
from collectives.devices import parse_devices, visible_gpus


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("cpu:0", Device("cpu", 0)),
        ("cpu", Device("cpu", 0)),
        ("CPU:3", Device("cpu", 3)),
        (" gpu:1 ", Device("gpu", 1)),
        ("/device:CPU:2", Device("cpu", 2)),
        ("/cpu:1", Device("cpu", 1)),
        ("/job:worker/replica:0/task:1/device:GPU:7", Device("gpu", 7)),
    ],
)
def test_a_device_has_tensorflows_names_too(name: str, device: Device) -> None:
    assert Device.parse(name) == device
    assert Device.parse(device) is device


@pytest.mark.parametrize("name", ["", "tpu:0", "cpu:", "cpu:x", "cpu:-1", "0", "cpu 0"])
def test_what_is_no_device_is_refused_with_an_example(name: str) -> None:
    with pytest.raises(ValueError, match=f"Device: got {name!r}; need a name such as 'cpu:0' or 'gpu:1'"):
        Device.parse(name)


def test_a_device_is_not_a_number() -> None:
    wrong: Any = 0
    with pytest.raises(TypeError, match="Device: got 0; need a name"):
        Device.parse(wrong)


def test_devices_are_values() -> None:
    assert str(Device("cpu", 2)) == "cpu:2"
    assert len({Device("cpu"), Device("cpu", 0), Device("gpu", 0)}) == 2


def test_a_cpu_computes_with_numpy_and_leaves_arrays_where_they_are() -> None:
    device, array = Device("cpu", 5), np.arange(3)
    assert device.xp is np
    assert device.place(array) is array
    assert device.place([1, 2]).tolist() == [1, 2]


def test_a_gpu_without_cupy_says_what_to_install() -> None:
    if visible_gpus():
        assert Device("gpu").xp.__name__ == "cupy"
        return
    with pytest.raises(
        ModuleNotFoundError,
        match=r"gpu:0: needs CuPy, which is not installed; pip install 'xpdistribute\[cuda12\]'",
    ):
        _ = Device("gpu").xp


# -------------------------------------------------------------------------------------- several of them


def test_several_devices_keep_their_order() -> None:
    assert parse_devices(["cpu:1", Device("cpu", 0)], "x") == (Device("cpu", 1), Device("cpu", 0))


def test_no_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="MirroredStrategy: got no devices; need at least one"):
        parse_devices([], "MirroredStrategy")


def test_one_device_for_two_replicas_is_refused_however_it_is_spelled() -> None:
    with pytest.raises(ValueError, match=r"got cpu:0 more than once; each replica needs a device of its own"):
        parse_devices(["cpu:0", "cpu:1", "/device:CPU:0"], "MirroredStrategy")


@pytest.mark.parametrize("names", ["cpu:0", Device("cpu"), None, 2])
def test_a_single_name_is_no_list_of_devices(names: Any) -> None:
    with pytest.raises(TypeError, match="need a list of names — write devices="):
        parse_devices(names, "MirroredStrategy")
