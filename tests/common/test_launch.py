"""The short way to Triton's compiled launcher hands over what Triton's own wrappers do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpc.common import launch
from hpc.common.launch import Kernel, TmaTensor

triton = pytest.importorskip("triton")

META = {"swizzle": 3, "elem_size": 1, "elem_type": 0, "block_size": [1, 64, 1, 128], "fp4_padded": False}
GRID, STREAM, FUNCTION, METADATA = (4, 1, 1), 77, 123, (4, 1, 1000)
SHAPE, STRIDES = [9, 64, 1, 128], [8192, 128, 128, 1]


def fake_launcher(monkeypatch: pytest.MonkeyPatch, descriptors: int) -> tuple[Any, list[Any], list[int]]:
    """Triton's launcher object around a compiled part that records; (launcher, arguments seen, addresses encoded)."""
    from triton.backends.nvidia import driver

    seen: list[Any] = []
    encoded: list[int] = []

    def compiled(*args: Any) -> None:
        seen.append(args)

    def fill(address: int, *rest: Any) -> str:
        encoded.append(address)
        return f"map of {address}"

    utils = SimpleNamespace(fill_tma_descriptor=fill, fill_tma_descriptor_tiled=fill, launch=compiled)
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(utils=utils))
    signature = {0: "*fp8e4nv", **{1 + i: "tensordesc<fp8e4nv[1, 64, 1, 128]>" for i in range(descriptors)}}
    signature |= {1 + descriptors: "i32"}
    launcher = driver.CudaLauncher.__new__(driver.CudaLauncher)
    metas = [META] * descriptors
    launcher.launch = driver.wrap_handle_tensordesc(compiled, signature, metas or None)
    for name in ("global_scratch_size", "profile_scratch_size"):
        setattr(launcher, name, 0)
    for name in ("global_scratch_align", "profile_scratch_align", "num_ctas"):
        setattr(launcher, name, 1)
    launcher.launch_cooperative_grid, launcher.launch_pdl = False, True
    return launcher, seen, encoded


def kernel_of(launcher: Any) -> Kernel:
    kernel = Kernel(None, "some_op")
    kernel._keep(launcher, FUNCTION, METADATA)
    return kernel


@pytest.mark.skipif(not triton.__version__.startswith("3.6"), reason="other launchers keep Triton's wrappers")
@pytest.mark.parametrize("descriptors", [0, 2])
def test_the_compiled_launcher_sees_what_triton_would_pass(
    monkeypatch: pytest.MonkeyPatch, descriptors: int
) -> None:
    launcher, seen, encoded = fake_launcher(monkeypatch, descriptors)
    bases = [torch.zeros(9 * 8192, dtype=torch.uint8) for _ in range(descriptors)]
    described = [TmaTensor(base, SHAPE, STRIDES) for base in bases]
    launcher(*GRID, STREAM, FUNCTION, METADATA, None, None, None, 1000, *described, 5)
    kernel = kernel_of(launcher)
    assert kernel.compiled and kernel._run is not launcher
    for _ in range(3):
        parts = [kernel.descriptor(i, b.data_ptr(), b, SHAPE, STRIDES) for i, b in enumerate(bases)]
        kernel(GRID, STREAM, (1000, *[value for part in parts for value in part], 5))
    assert len(seen) == 4 and all(args == seen[0] for args in seen)
    assert len(encoded) == 2 * descriptors, "once by Triton, once by us, then kept"


def test_descriptors_are_kept_by_argument_and_address_and_without_the_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launcher, _, encoded = fake_launcher(monkeypatch, 2)
    kernel = kernel_of(launcher)
    if kernel._run is launcher:
        pytest.skip("this Triton keeps its wrappers")
    base = torch.zeros(9 * 8192, dtype=torch.uint8)
    for number in (0, 1, 0, 1):
        values = kernel.descriptor(number, base.data_ptr(), base, SHAPE, STRIDES)
        assert not any(isinstance(value, torch.Tensor) for value in values)
    kernel.descriptor(0, base.data_ptr() + 16, base, SHAPE, STRIDES)
    assert len(encoded) == 3
    monkeypatch.setattr(launch, "_MAX_DESCRIPTORS", 3)
    kernel.descriptor(0, base.data_ptr() + 32, base, SHAPE, STRIDES)
    assert len(kernel._descriptors) == 1, "bounded"


def test_a_launcher_of_another_make_is_called_as_it_is() -> None:
    seen: list[Any] = []

    class Other:
        def __call__(self, *args: Any) -> None:
            seen.append(args)

    kernel = kernel_of(Other())
    base = torch.zeros(64)
    (described,) = kernel.descriptor(0, base.data_ptr(), base, [64], [1])
    assert isinstance(described, TmaTensor) and described.base is base and not kernel._descriptors
    kernel(GRID, STREAM, (1000, described, 5))
    assert seen == [(*GRID, STREAM, FUNCTION, METADATA, None, None, None, 1000, described, 5)]
