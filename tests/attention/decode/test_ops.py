"""The registered ops: schema, fakes and mutation marks agree with what they do; tracing meets no graph break."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import hpc
from hpc.attention.decode import cases
from hpc.attention.decode.case_lists import DecodeCase

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def positional(dtype: str, device: str) -> tuple[cases.DecodeInputs, tuple[Any, ...]]:
    inputs = cases.make_tensors(DecodeCase((70, 5), 8, 1, dtype=dtype), device, 0)
    cache = inputs.cache
    args: tuple[Any, ...] = (inputs.q, cache.kcache, cache.vcache, cache.block_ids, inputs.seq_lens)
    return inputs, args if dtype == "bf16" else (*args, inputs.qscale, inputs.kscale, inputs.vscale)


# Without a gradient there is nothing to check of autograd; the GPU's outputs are compared by the other tests.
UTILS = {
    "bf16": ("test_schema", "test_faketensor"),
    "fp8": ("test_faketensor",),
}  # torch compares no e4m3 inputs


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("lse", [False, True])
def test_opcheck(device: str, dtype: str, lse: bool) -> None:
    """FR-71, FR-78."""
    hpc.attention_decode_bf16  # noqa: B018 (registers the ops)
    _, args = positional(dtype, device)
    op = getattr(torch.ops.hpc, f"attention_decode_{dtype}")
    kwargs = {"new_kv_included": True, "return_lse": lse}
    torch.library.opcheck(op.default, args, kwargs, test_utils=UTILS[dtype])
    output = torch.empty_like(args[0], dtype=torch.bfloat16)
    torch.library.opcheck(op.out, args, {**kwargs, "output": output}, test_utils=UTILS[dtype])


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck_of_assign(device: str) -> None:
    hpc.attention_decode_bf16  # noqa: B018
    task_map = hpc.get_attention_decode_task_workspace(2, 128, 1, device=device)
    lens = torch.tensor([70, 5], dtype=torch.int32, device=device)
    op = torch.ops.hpc.assign_attention_decode_task.default
    torch.library.opcheck(op, (lens, 1, 1, True, 512, task_map), test_utils=UTILS["bf16"])


def test_fakes_take_the_required_arguments_alone() -> None:
    """FR-78."""
    _, args = positional("fp8", "cpu")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(a) for a in args]
        out, lse = torch.ops.hpc.attention_decode_fp8(*fake)
        assert out.shape == (2, 8, 128) and out.dtype == torch.bfloat16 and lse.numel() == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("given", [False, True])
def test_compiles_without_a_graph_break(device: str, given: bool) -> None:
    inputs, args = positional("bf16", device)
    task_map = hpc.get_attention_decode_task_workspace(2, 128, 1, device=device)
    output = torch.zeros(2, 8, 128, dtype=torch.bfloat16, device=device) if given else None

    def step(q: torch.Tensor) -> Any:
        filled = hpc.assign_attention_decode_task(inputs.seq_lens, task_map, 1, 1, True)
        return hpc.attention_decode_bf16(
            q, *args[1:], new_kv_included=True, task_map=filled, output=output, return_lse=True
        )

    eager = [t.clone() for t in step(args[0])]
    traced = torch.compile(step, fullgraph=True, backend="aot_eager")(args[0])
    assert all(torch.equal(a, b) for a, b in zip(eager, traced, strict=True))
