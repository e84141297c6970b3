"""Compile the prologue for sm_90a, execute its PTX on the CPU, and compare every output with the reference bit by bit.

Run in a process of its own, without TRITON_INTERPRET: `python run_rope.py [name ...]`. Prints a JSON object a case:
{"name", "triton", "instructions", "wrong": {output: number of bytes that differ}}.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from ptx_machine import U64, Block, Instruction, Program, Warp, f32, s16, s32, split_operands, to_bits

sys.path.insert(0, str(Path(__file__).parents[1] / "rope"))

LENS, NEW = (70, 5, 0, 33, 64), (3, 5, 2, 0, 1)  # the third is a padded request, the fourth brings nothing
SMALL: dict[str, Any] = {"lens": LENS, "new": NEW, "q_heads": 4, "kv_heads": 2, "spare_rows": 2}
ONE, TWO = {}, {"unroll": 2}
WARP = {"heads": 4, "num_warps": 1, "tokens": 3, "steps": 2}  # the SM90 kernel
ALL = {**WARP, "heads": 8, "steps": 1}
# Name -> (fields of a `RopeCase`, what its plan is beside the choice).
CASES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "fp8 decode, norm then rotate": ({**SMALL, "dtype": "fp8"}, ONE),
    "fp8 prefill, two tiles": ({**SMALL, "dtype": "fp8", "is_prefill": True}, TWO),
    "fp8 fixed scale, rotate then norm, kept": (
        {**SMALL, "dtype": "fp8", "quant_policy": 2, "norm_policy": 1, "keep_k": True, "keep_v": True}, ONE,
    ),
    "bf16 HND, norm then rotate": ({**SMALL, "layout": "HND"}, ONE),
    "bf16 interleaved, half rotated, no norm": ({**SMALL, "neox": False, "rotary_dim": 64, "norm_policy": 0}, ONE),
    "fp8 interleaved, half rotated, norm": ({**SMALL, "dtype": "fp8", "neox": False, "rotary_dim": 64}, ONE),
    "fp8 d80, 12 rotated, 5 query heads": (
        {**SMALL, "dtype": "fp8", "q_heads": 5, "kv_heads": 1, "head_dim": 80, "rotary_dim": 24, "bf16_table": True},
        TWO,
    ),
    "bf16 d256, v dim 64": ({**SMALL, "head_dim": 256, "v_dim": 64, "norm_policy": 1}, ONE),
    "fp8 warp, prefill": ({**SMALL, "q_heads": 12, "dtype": "fp8", "is_prefill": True}, WARP),
    "fp8 warp, decode, one KV head": ({**SMALL, "q_heads": 8, "kv_heads": 1, "dtype": "fp8"}, ALL),
    "bf16 warp HND, rotate then norm": ({**SMALL, "layout": "HND", "norm_policy": 1, "is_prefill": True}, WARP),
    "fp8 warp d64, fixed scale, kept, no norm": (
        {**SMALL, "q_heads": 8, "head_dim": 64, "dtype": "fp8", "quant_policy": 2, "norm_policy": 0, "keep_k": True,
         "keep_v": True, "bf16_table": True}, ALL,
    ),
    "bf16 warp d256, kept": ({**SMALL, "head_dim": 256, "keep_k": True, "keep_v": True}, WARP),
}  # fmt: skip


QUERY = "queries alone"


class PrologueBlock(Block):
    """The machine with float64, e4m3 and what else this kernel uses; counts instructions."""

    executed = 0

    def _step(self, warp: Warp) -> str | None:
        PrologueBlock.executed += 1
        return super()._step(warp)

    def _compute(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        if instruction.kinds[-1] != "f64":
            super()._compute(warp, instruction, mask)
            return
        target, *operands = instruction.operands
        x, y = (self.value(warp, o).view(np.float64) for o in operands)
        with np.errstate(all="ignore"):
            result = {"add": x + y, "mul": x * y}[instruction.name]
        self.put(warp, target, result.view(U64), mask)

    def _sqrt(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        assert instruction.kinds == ("rn", "f32"), instruction.text
        target, source = instruction.operands
        with np.errstate(all="ignore"):
            self.put(warp, target, to_bits(np.sqrt(f32(self.value(warp, source))), "f32"), mask)

    def _rcp(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        self._approximate(warp, instruction, mask, lambda x: 1 / x)

    def _rsqrt(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        self._approximate(warp, instruction, mask, lambda x: 1 / np.sqrt(x))

    def _approximate(
        self, warp: Warp, instruction: Instruction, mask: Any, exact: Callable[[Any], Any]
    ) -> None:
        """A value that is off by a unit in the last place, one way or the other."""
        target, source = instruction.operands
        bits = self.value(warp, source)
        with np.errstate(all="ignore"):
            found = to_bits(exact(f32(bits)), "f32")
        near = found + (bits % U64(3)) - U64(1)
        in_range = (found & U64(0x7FFFFFFF)) - U64(0x800000) < U64(0x7F000000)
        self.put(warp, target, np.where(in_range, near, found), mask)

    def _abs(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        target, source = instruction.operands
        self.put(warp, target, self.value(warp, source) & U64(0x7FFFFFFF), mask)

    def _stmatrix(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        """m8n8 matrices of 16-bit elements: a lane holds two neighbours of a row (of a column, with trans)."""
        place, source = instruction.operands
        places = self.address(warp, place)
        for i, name in enumerate(split_operands(source.strip("{}"))):
            halves = (
                np.ascontiguousarray(self.value(warp, name).astype(np.uint32)).view(np.uint16).reshape(8, 8)
            )
            rows = halves.T if "trans" in instruction.kinds else halves
            for row, at in zip(rows, places[8 * i : 8 * i + 8], strict=True):
                self.shared[at : at + 16] = np.ascontiguousarray(row).view(np.uint8)

    def _prmt(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        target, *sources, selector = instruction.operands
        low, high = (self.value(warp, o) for o in sources)
        together, chosen = low | (high << U64(32)), int(selector.rstrip("U"), 16)
        assert not chosen & 0x8888, instruction.text
        found = np.zeros(32, U64)
        for i in range(4):
            byte = (together >> U64(8 * ((chosen >> 4 * i) & 7))) & U64(0xFF)
            found |= byte << U64(8 * i)
        self.put(warp, target, found, mask)

    def _cvt(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        import torch

        from hpc.rope import reference

        target, *operands = instruction.operands
        kinds = instruction.kinds
        bits = [self.value(warp, o) for o in operands]
        with np.errstate(all="ignore"):
            if "e4m3x2" in kinds or "bf16x2" in kinds:
                assert kinds[0] == "rn" and ("e4m3x2" not in kinds or "satfinite" in kinds), instruction.text
                high, low = (torch.from_numpy(f32(b).copy()) for b in bits)
                if "e4m3x2" in kinds:
                    parts = [reference.to_fp8(x).view(torch.uint8).numpy().astype(U64) for x in (high, low)]
                    found = parts[0] << U64(8) | parts[1]
                else:
                    parts = [x.bfloat16().view(torch.uint16).numpy().astype(U64) for x in (high, low)]
                    found = parts[0] << U64(16) | parts[1]
            elif kinds == ("s16", "s8"):
                found = to_bits(s16(bits[0] << U64(8)) >> 8, "s16")
            elif kinds == ("f64", "f32"):
                found = f32(bits[0]).astype(np.float64).view(U64)
            elif kinds == ("rn", "f32", "f64"):
                found = to_bits(bits[0].view(np.float64).astype(np.float32), "f32")
            elif kinds == ("rn", "f32", "s32"):
                found = to_bits(s32(bits[0]).astype(np.float32), "f32")
            elif kinds in (("rn", "f32", "s64"), ("rn", "f32", "u64")):
                found = to_bits(bits[0].view(np.int64).astype(np.float32), "f32")
            elif kinds == ("rzi", "s32", "f32"):
                found = to_bits(np.trunc(f32(bits[0])), "s32")
            else:
                super()._cvt(warp, instruction, mask)
                return
        self.put(warp, target, found, mask)


def main(names: Sequence[str]) -> None:
    for name in names:
        print(json.dumps(run_query() if name == QUERY else run_case(name)), flush=True)


def run_case(name: str) -> dict[str, Any]:
    """One call: its PTX executed, its outputs against those of the public function on the CPU."""
    import triton
    from rope_support import expected, outputs, poison, raw

    from hpc.rope import cases, entry, launch, plan, validate, warm
    from hpc.rope.case_lists import RopeCase
    from hpc.testing import fill_nan

    fields, changes = CASES[name]
    params = RopeCase(**fields)
    inputs = cases.make_tensors(params, "cpu", seed=len(name))
    inputs.qkv[1, 5], inputs.qkv[2, : params.head_dim] = float("nan"), 0  # a head with a NaN, a head of zeros
    want = expected(inputs)
    given = poison(inputs)
    x = warm.arguments(given)
    q_heads = validate.call(x)
    made = entry.allocate(x, q_heads)
    for tensor in made:
        if tensor is not None:
            fill_nan(tensor)
    chosen = plan.choose(plan.Key(params.tokens, q_heads, params.kv_heads, params.head_dim, params.value_dim))
    facts = launch.facts_of(x, q_heads, replace(chosen, **changes), made[0])
    facts = replace(facts, sm90=True, soft=False, aligned=True, k_in_memory=x.fp8, v_in_memory=x.fp8)
    call = launch.Call(facts, entry.sizes_of(x))
    upper = validate.FP8_MAX if params.upper_max is None else params.upper_max
    tensors, numbers = entry.pointers(x, made, facts), (params.eps, upper, 1.0, 1.0)
    ptx = compiled(lambda: call.launch(0, tensors, numbers))
    read = [x.qkv, x.cos_sin, x.seq_lens, x.q_index, x.block_ids]

    strides = [stride for stride in facts.strides if stride != 1]  # Triton compiles a 1 into the kernel
    before = [raw(tensor).clone() for tensor in read]
    beside = execute(ptx, call.grid[0], tensors, (*call.sizes, *numbers, call.after[0], *strides))
    have = outputs(given, made if x.fp8 else made[0])
    wrong = {key: differing(have[key], want[key]) for key in want if want[key] is not None}
    wrong["inputs"] = sum(int((raw(t) != old).sum()) for t, old in zip(read, before, strict=True))
    wrong["beside"] = beside
    assert {key for key in want if want[key] is None} == {key for key in have if have[key] is None}
    return {
        "name": name,
        "triton": triton.__version__,
        "instructions": PrologueBlock.executed,
        "wrong": wrong,
    }


def run_query() -> dict[str, Any]:
    """Queries alone, laid out for prefill: rows of no request, a request without tokens, queries without a place."""
    import torch
    import triton

    import hpc
    from hpc.rope import entry, launch
    from hpc.testing import poisoned

    q = torch.randn(140, 5, 64, generator=torch.Generator().manual_seed(1)).mul_(3).bfloat16()
    q[3, 1], q[4, 2, 7] = 0, float("nan")
    index = torch.tensor([1, 134, 134, 138], dtype=torch.int32)
    out, scale = poisoned(q.shape, torch.float8_e4m3fn), poisoned((3, 5, 128), torch.float32)
    tensors, grid, numbers, constants, warps = entry.query_arguments(q, out, scale, index, 128, 448.0)
    constants = (*constants, True, False, False)
    kernel = launch.query_kernel_of(0, True, True, constants, warps)
    ptx = compiled(lambda: kernel((grid, 1, 1), 0, (*map(launch.as_bytes, tensors), *numbers, *constants)))
    beside = execute(ptx, grid, tensors, (*numbers, *constants[:4]))
    want = hpc.quantize_query_fp8(q, index, 128)
    wrong = {"out_q": differing(out, want[0]), "q_scale": differing(scale, want[1]), "beside": beside}
    return {
        "name": QUERY,
        "triton": triton.__version__,
        "instructions": PrologueBlock.executed,
        "wrong": wrong,
    }


def execute(ptx: str, blocks: int, tensors: Sequence[Any], scalars: Sequence[float]) -> int:
    """Run a kernel on the tensors' storages, in place; how many bytes beside them changed."""
    memory, places = np.full(1 << 24, 0xA5, np.uint8), {}
    end = 256
    for tensor in tensors:
        whole = tensor.untyped_storage()
        if whole.data_ptr() not in places:
            memory[end : end + whole.nbytes()] = storage_bytes(tensor)
            places[whole.data_ptr()] = end
            end += -(-whole.nbytes() // 256) * 256 + 256
    assert end < len(memory)
    addresses = [
        places[t.untyped_storage().data_ptr()] + t.storage_offset() * t.element_size() for t in tensors
    ]
    parameters = dict(enumerate((*addresses, *scalars)))
    program, beside = Program(ptx), np.ones(len(memory), bool)
    PrologueBlock.executed = 0
    for block in range(blocks):
        PrologueBlock(program, parameters, memory, (block, 0, 0), (blocks, 1, 1), {}).run()
    for tensor in tensors:
        at, size = places[tensor.untyped_storage().data_ptr()], tensor.untyped_storage().nbytes()
        storage_bytes(tensor)[:] = memory[at : at + size]
        beside[at : at + size] = False
    return int((memory[beside] != 0xA5).sum())


def differing(have: Any, want: Any) -> int:
    """Values with other bits; NaN equals NaN but in e4m3, of which one is written."""
    import torch
    from rope_support import raw

    unlike = (raw(have) != raw(want)).view(want.numel(), -1).any(1)
    if want.dtype != torch.float8_e4m3fn:
        unlike &= ~(have.flatten().isnan() & want.flatten().isnan())
    return int(unlike.sum())


def storage_bytes(tensor: Any) -> Any:
    """The bytes of a tensor's storage, as numpy sees them."""
    import torch

    flat = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return flat.numpy()


def compiled(launch: Callable[[], None]) -> str:
    """PTX of a launch, compiled for a GPU that is not there."""
    import triton

    from hpc.common.offline import compiling_for

    texts: list[str] = []

    def listener(*, src: Any, metadata_group: dict[str, str], **_: Any) -> None:
        texts.extend(Path(path).read_text() for file, path in metadata_group.items() if file.endswith(".ptx"))

    with compiling_for("sm90"), mock.patch.object(triton.knobs.compilation, "listener", listener):
        launch()
    (text,) = texts
    return text


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)  # before Triton is imported
    main(sys.argv[1:] or [*CASES, QUERY])
