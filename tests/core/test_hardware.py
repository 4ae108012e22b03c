import os

import pytest
import torch

from recurl.core import devices as hardware
from recurl.core.devices import check_device, check_memory, core_count, total_memory
from recurl.core.errors import ArgumentError


@pytest.mark.parametrize("device", ["meta", "cpu:3", "hpu", "nowhere", "", "cpu:-1", "xla", "cuda:99", "vulkan"])
def test_devices_that_do_not_compute(device):
    with pytest.raises(ArgumentError, match=f"--device {device} can't be used, try --device cpu: ") as caught:
        check_device(device)
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
def test_devices_that_compute(device):
    check_device(device)


def test_memory():
    has = total_memory("cpu")
    assert 2**28 < has < 2**50
    torch.empty(has // 2, dtype=torch.uint8)
    check_memory("cpu", {"everything": has}, lambda: "")
    with pytest.raises(ArgumentError, match=r"GiB for everything\), and cpu has [\d,]+ GiB: lower --size"):
        check_memory("cpu", {"everything": has, "crumbs": 1}, lambda: "lower --size")
    with pytest.raises(ArgumentError, match=r"At least 9e\+30 GiB of memory"):
        check_memory("cpu", {"everything": 10**40}, lambda: "lower --size")


@pytest.mark.parametrize(("quota", "expected"), [("150000 100000", 1), ("50000 100000", 1), ("max 100000", None)])
def test_cores_are_those_of_the_container(tmp_path, monkeypatch, quota, expected):
    monkeypatch.setattr(hardware, "_CPU_QUOTA", tmp_path / "cpu.max")
    assert core_count() == len(os.sched_getaffinity(0))
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert core_count() == (expected or len(os.sched_getaffinity(0)))
