"""Device facts: nothing assumes device 0, nothing fails without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpc.common import arch
from hpc.common.errors import UnsupportedDevice

GPUS = {
    0: SimpleNamespace(name="NVIDIA T4", major=7, minor=5, multi_processor_count=40),
    1: SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132),
    2: SimpleNamespace(name="NVIDIA L40S", major=8, minor=9, multi_processor_count=142),
    3: SimpleNamespace(name="NVIDIA B200", major=10, minor=0, multi_processor_count=148),
}


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Four different GPUs, the second one current."""
    asked: list[int] = []

    def properties(index: int) -> Any:
        asked.append(index)
        return GPUS[index]

    arch._properties.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    yield asked
    arch._properties.cache_clear()


def test_no_index_means_the_current_device(gpus: list[int]) -> None:
    assert arch.sm_count("cuda") == 132
    assert arch.sm_count("cuda:0") == 40
    assert arch.sm_count(torch.device("cuda", 2)) == 142
    assert arch.device_name(3) == "NVIDIA B200"


def test_facts_are_asked_once_for_each_device(gpus: list[int]) -> None:
    for _ in range(3):
        arch.capability("cuda:1")
        arch.sm_count("cuda:3")
    assert gpus == [1, 3]


def test_hopper(gpus: list[int]) -> None:
    assert [arch.is_hopper(index) for index in GPUS] == [False, True, False, False]
    assert not arch.is_hopper("cpu")


@pytest.mark.parametrize("index", [1, 2, 3])
def test_require_gpu_accepts(gpus: list[int], index: int) -> None:
    arch.require_gpu("attention_decode_fp8", f"cuda:{index}")


def test_require_gpu_names_needed_and_found(gpus: list[int]) -> None:
    with pytest.raises(UnsupportedDevice, match=r"8\.0 or newer; found NVIDIA T4 with 7\.5"):
        arch.require_gpu("attention_decode_fp8", "cuda:0")
    with pytest.raises(UnsupportedDevice, match="found device 'cpu'"):
        arch.require_gpu("attention_decode_fp8", "cpu")


def test_facts_of_a_cpu() -> None:
    assert arch.sm_count("cpu") == arch.REFERENCE_SM_COUNT == 132
    assert arch.capability(torch.device("cpu")) == (0, 0)
    assert arch.device_name("cpu") == "cpu"


def test_broken_driver_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> bool:
        raise RuntimeError("CUDA driver initialization failed")

    monkeypatch.setattr(torch.cuda, "is_available", fails)
    assert not arch.gpu_available()
