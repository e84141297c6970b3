"""The demo's interpreted run: `TRITON_INTERPRET=1 python -m hpc.attention.decode.demo_interpret '<batch as JSON>'`.

Runs the Triton kernels themselves - schedule, attention, merge - on a CPU and prints one JSON line a result.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch

from hpc.attention.decode import cases, demo, kernels, merge, plan, schedule
from hpc.testing import poisoned

STATIC_SPLITS, STATIC_MIN_TILES = 4, 4
BLOCK_ROWS = 16
MIN_PROCESS_LEN = 512


def main(text: str) -> Iterator[demo.Result]:
    """Decode the batch in both types by both paths."""
    fields: dict[str, Any] = json.loads(text)
    batch = demo.Batch(**{**fields, "lens": tuple(fields["lens"])})
    for dtype in demo.DTYPES:
        inputs = cases.make_tensors(batch.params(dtype), "cpu", batch.seed)
        expected, _ = cases.reference(inputs)
        task_map = assign(inputs)
        for path, mapping in zip(demo.INTERPRETED_PATHS, (task_map, None), strict=True):
            output = poisoned(expected.shape, torch.bfloat16)
            attend(inputs, mapping, output)
            yield demo.judge(inputs, f"interpreted kernels, {path}", output, expected)


def assign(inputs: cases.DecodeInputs) -> torch.Tensor:
    """Task map of the batch for `INTERPRETED_SMS`, by the schedule kernel; must equal the planner's words."""
    sms, heads, lens = demo.INTERPRETED_SMS, inputs.params.kv_heads, inputs.params.lens
    task_map = torch.zeros(plan.workspace_words(sms, heads), dtype=torch.int32)
    bins = [plan.num_bins(sms, heads, v) for v in range(plan.NUM_VARIANTS)]
    floors = [plan.floor_tiles(v, MIN_PROCESS_LEN) for v in range(plan.NUM_VARIANTS)]
    counters = plan.counter_words(sms, heads)
    schedule._assign_kernel[(plan.NUM_VARIANTS + 1 + -(-counters // schedule.CLEAR),)](
        inputs.seq_lens, task_map, len(lens), 0, 1, 0, _signature(inputs), heads, *bins, *floors,
        task_map.numel() * 4, counters, WINDOW=False, CUTS=1 << max(bins).bit_length(), REQS=16,
    )  # fmt: skip
    planned = plan.build_task_map(
        lens, sms=sms, num_kv_heads=heads, num_new_tokens=1, sig=_signature(inputs),
        min_process_len=MIN_PROCESS_LEN, max_num_batch=len(lens),
    )  # fmt: skip
    end = plan.variant_offset(sms, heads, plan.NUM_VARIANTS)
    if task_map[plan.HEADER_WORDS : end].tolist() != planned[plan.HEADER_WORDS : end]:
        raise RuntimeError("the schedule kernel and the planner disagree")
    return task_map


def attend(inputs: cases.DecodeInputs, task_map: torch.Tensor | None, output: torch.Tensor) -> None:
    """Attention and merge kernels, launched as on a GPU, on CPU tensors; without a task map the static split."""
    params, cache = inputs.params, inputs.cache
    batch, dim, heads, group = len(params.lens), params.head_dim, params.kv_heads, params.group
    static, fp8, sig = task_map is None, params.dtype == "fp8", _signature(inputs)
    n_bins = batch * STATIC_SPLITS if static else plan.num_bins(demo.INTERPRETED_SMS, heads, 0)
    slots = n_bins if static else 2 * n_bins
    scratch = poisoned((slots * heads * group * (2 + dim),), torch.float32)
    num_ml = slots * heads * group * 2
    ml, part = scratch[:num_ml], scratch[num_ml:]
    # A pointer that a call does not use may be any tensor.
    bins = ml if task_map is None else task_map[plan.HEADER_WORDS :]
    q, k, v = (t.view(torch.uint8) if fp8 else t for t in (inputs.q, cache.kcache, cache.vcache))
    qscale, kscale, vscale = (ml if t is None else t for t in (inputs.qscale, inputs.kscale, inputs.vscale))
    row_blocks = -(-group // BLOCK_ROWS)
    shared: dict[str, Any] = {
        "HQ": params.q_heads, "HKV": heads, "S": 1, "DV": dim, "STATIC": static, "PDL": False, "INTERPRET": True,
    }  # fmt: skip
    kernels._decode_attention_kernel[(n_bins, heads, row_blocks)](
        q, k, v, output, ml, part, ml, cache.block_ids, cache.seq_lens, bins, qscale, kscale, vscale, ml,
        batch, k.shape[0], cache.block_ids.shape[1], sig, dim**-0.5, 0.0, 0,
        cache.block_ids.stride(0), q.stride(0), q.stride(1), params.q_heads,
        *k.stride()[:3], *v.stride()[:3], 0, 0, 0, output.stride(0), output.stride(1),
        D=dim, PAGE=params.page_size, BLOCK_R=BLOCK_ROWS, BLOCK_D=dim, BLOCK_DV=dim, QUANT_TYPE=1 if fp8 else -1,
        SCALES_PER_ROW=1, NEW_KV_INCLUDED=True, HAS_WINDOW=False, HAS_CAP=False, HAS_SINKS=False, RETURN_LSE=False,
        NUM_SPLITS=STATIC_SPLITS, MIN_CHUNK=STATIC_MIN_TILES, WIDE=False, STAGES=1, **shared,
    )  # fmt: skip
    merge._merge_kernel[(batch if static else plan.num_merges(batch, n_bins), heads * row_blocks, 1)](
        ml, output, ml, cache.seq_lens, bins, vscale, ml,
        n_bins * plan.ENTRY_WORDS, num_ml, 0, cache.block_ids.shape[1] * params.page_size, sig, 0, STATIC_SPLITS,
        STATIC_MIN_TILES, row_blocks, output.stride(0), output.stride(1),
        CHUNKS=8, ROWS=BLOCK_ROWS, DB=dim, VSCALE=1 if fp8 else 0, WINDOW=False, SINKS=False, LSE=False, **shared,
    )  # fmt: skip


def _signature(inputs: cases.DecodeInputs) -> int:
    return plan.signature(inputs.params.kv_heads, 1, len(inputs.params.lens), None, True)


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") != "1":
        sys.exit("set TRITON_INTERPRET=1: this module runs the kernels in Triton's interpreter")
    for found in main(sys.argv[1]):
        print(json.dumps(vars(found)), flush=True)
