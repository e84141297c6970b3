"""Compile the fused MoE's kernels for few tokens and run whole calls on the CPU's PTX machine; a JSON object a case.

Run in a process of its own, without TRITON_INTERPRET: `python run_moe_few.py [name ...]`, names of `CASES`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from typing import Any

WORKERS = 2

# Name -> (tokens, experts, hidden, inter, top-k, block scales, warps up and down, depths, output columns, routing).
CASES: dict[str, tuple[int, int, int, int, int, bool, tuple[int, int, int, int, int], str]] = {
    "tensor one token": (1, 6, 512, 192, 4, False, (4, 4, 32, 8, 2), "uniform"),
    "tensor": (5, 6, 576, 64, 3, False, (4, 2, 16, 8, 2), "invalid"),
    "tensor 24 rows of an expert": (12, 3, 128, 80, 2, False, (4, 4, 16, 8, 3), "one"),
    "tensor repeated, 16 warps": (9, 40, 192, 320, 4, False, (8, 4, 32, 16, 1), "repeated"),
    "tensor nobody": (2, 4, 128, 64, 2, False, (4, 4, 32, 8, 2), "none"),
    "tensor rank 1 of 2": (30, 12, 128, 48, 8, False, (4, 4, 32, 8, 2), "half"),
    "block": (5, 6, 576, 192, 3, True, (4, 2, 32, 8, 2), "invalid"),
    "block I = 80": (3, 6, 192, 80, 3, True, (4, 4, 16, 8, 2), "uniform"),
    "block long, parts along I": (3, 3, 256, 640, 2, True, (4, 4, 32, 16, 1), "uniform"),
}


def main(names: list[str]) -> None:
    with multiprocessing.get_context("spawn").Pool(WORKERS, maxtasksperchild=1) as pool:
        for result in pool.imap_unordered(run_case, names, chunksize=1):
            print(json.dumps(result), flush=True)


def run_case(name: str) -> dict[str, Any]:
    """The layer with a factor and a shared output against float64, everything that is written poisoned before."""
    import torch
    import triton
    from ptx_moe import launch
    from run_moe import Memory, compiled

    from hpc.moe import cases, plan
    from hpc.moe.case_lists import MoeCase

    torch.set_num_threads(1)
    tokens, experts, hidden, inter, top_k, block, sizes, routing = CASES[name]
    ranks = 2 if "rank" in name else 1
    params = MoeCase(tokens, experts, hidden, inter, top_k, block=block, shared=True, factor=1.5, routing=routing,
                     ranks=ranks, rank=ranks - 1)  # fmt: skip
    inputs = cases.make_inputs(params, "cpu", len(name))
    inputs.topk_scale[0, 0] = 0.0
    texts = compiled(params, plan.Plan("few", 8, 16, True, few=plan.Few(*sizes)))
    memory, pairs = Memory(), top_k * tokens
    zero = torch.zeros(1)
    put = {field: memory.put(zero if tensor is None else tensor) for field, tensor in vars(inputs).items()
           if isinstance(tensor, torch.Tensor) or tensor is None}  # fmt: skip
    codes = memory.put(torch.full((pairs, inter), 0x7F, dtype=torch.uint8))
    values = memory.put(torch.full((pairs, inter), torch.nan))
    scales = memory.put(torch.full((pairs, -(-inter // 128)), torch.nan))
    lists = [memory.put(torch.full((256,), 1 << 30, dtype=torch.int32)) for _ in range(5)]
    y = memory.put(torch.full((pairs, hidden), torch.nan, dtype=torch.bfloat16))
    out = torch.full((tokens, hidden), torch.nan, dtype=torch.bfloat16)
    at = memory.put(out)
    (rows, cols), (rows2, cols2) = (
        tuple(s.shape[1:]) if block else (1, 1) for s in (inputs.w13_scale, inputs.w2_scale)
    )
    ids = (pairs, experts, experts * params.rank)
    up = (put["x"], put["x_scale"], put["w13"], put["w13_scale"], put["act_scale"], put["topk_ids"], put["topk_scale"],
          values if block else codes, *ids, -(-hidden // 128), rows, cols)  # fmt: skip
    launch(texts["_moe_few_up_kernel"], (inter // 8, pairs, 1), dict(enumerate(up)), memory.bytes, {})
    if block:
        quantise = (values, codes, scales, pairs)
        grid = (-(-pairs // 4), -(-inter // 128), 1)
        launch(texts["_moe_few_quantise_kernel"], grid, dict(enumerate(quantise)), memory.bytes, {})
    down = (codes, scales, put["w2"], put["w2_scale"], put["topk_ids"], put["topk_scale"], put["shared_output"], at,
            *lists, y, *ids, rows2, cols2, tokens, hidden, params.factor)  # fmt: skip
    launch(texts["_moe_few_down_kernel"], (hidden // sizes[2], 1, 1), dict(enumerate(down)), memory.bytes, {})
    got, want = memory.get(at, out).double(), cases.reference(inputs)
    return {
        "name": name,
        "triton": triton.__version__,
        "nan": int(got.isnan().sum()),
        "rms": float((got - want).norm() / want.norm()),
        "max": float((got - want).abs().max() / want.abs().max()),
    }


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)  # before a worker imports Triton
    main(sys.argv[1:] or list(CASES))
