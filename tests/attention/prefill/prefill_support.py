"""Small helpers of the prefill tests: the interpreted kernels, one call from a few numbers, and comparison."""

from __future__ import annotations

import math
from typing import Any

import torch

from hpc.attention.prefill import cases, plan
from hpc.attention.prefill.case_lists import PrefillCase
from hpc.attention.prefill.cases import PrefillInputs
from hpc.attention.prefill.plan import Plan
from hpc.testing import assert_close, poisoned

DEVICE = "cuda"
INT_MIN = torch.iinfo(torch.int32).min


def make(
    lens: Any, heads: tuple[int, int] = (8, 1), seed: int = 1, device: Any = None, **rest: Any
) -> PrefillInputs:
    """Inputs of one call."""
    return cases.make_tensors(PrefillCase(tuple(lens), *heads, **rest), device or DEVICE, seed)


def check(inputs: PrefillInputs, chosen: Plan | None = None, **more: Any) -> torch.Tensor:
    """Output into NaN and lse, both against float64; returns the output."""
    params = inputs.params
    given = poisoned((*inputs.q.shape[:2], params.value_dim), torch.bfloat16, inputs.q.device)
    out, lse = cases.attend(inputs, return_lse=True, output=given, plan=chosen, **more)
    assert out is given
    compare(inputs, out, lse, chosen)
    return out


def compare(
    inputs: PrefillInputs, out: torch.Tensor, lse: torch.Tensor | None, chosen: Plan | None = None
) -> None:
    expected, expected_lse = cases.reference(inputs)
    if chosen is None and inputs.q.is_cuda:
        sm90 = torch.cuda.get_device_capability()[0] == 9
        chosen = plan.choose(cases.key_of(inputs.params, sm90))
    assert_close(out, expected, cases.tolerance(inputs.params, chosen), str(inputs.params))
    assert (out[expected_lse == -math.inf] == 0).all(), "a row without a key is zero"
    if lse is not None:
        # Sums of exponentials in fp32: what differs is their order and the approximation of exp2 and log2.
        limit = 1e-4 + 1e-4 * expected_lse.abs()
        if chosen is not None and chosen.backend == "sm90" and inputs.qscale is not None:
            limit = limit + score_error(inputs)
        wrong = (lse != expected_lse) & ~((lse - expected_lse).abs() <= limit)  # -inf equals itself
        assert not wrong.any(), f"lse: {wrong.sum()} off, {(lse - expected_lse)[wrong]} {expected_lse[wrong]}"


def score_error(inputs: PrefillInputs) -> torch.Tensor:
    """Error of a row's scores on the e4m3 tensor cores, [rows, heads].

    They align the addends of a sum to the largest one and keep 13 bits below it: with products up to 32 that is up to
    2^-8 for each of 128 of them, 0.013 in all if they are independent (a third of 2^-8 each, times sqrt(128)). Four
    times that, in units of the score.
    """
    p = inputs.params
    scales = [inputs.qscale[b, :, :n].T for b, (n, _) in enumerate(p.lens)]  # type: ignore[index]
    scales.append(torch.zeros((p.extra_rows, p.q_heads), device=inputs.q.device))
    return torch.cat(scales) * inputs.kscale * (p.head_dim**-0.5 * 0.05)


def table(
    inputs: PrefillInputs,
    tile_tokens: int,
    block_n: int,
    spare: int = 0,
    block_t: int = 32,
    block_b: int = 64,
) -> torch.Tensor:
    """The tile table by the interpreted schedule kernel, poisoned beforehand."""
    from hpc.attention.prefill.schedule import _prefill_schedule_kernel

    p = inputs.params
    tokens, batch = inputs.q.shape[0], len(p.lens)
    tiles = plan.bound(tokens, batch, tile_tokens) + spare
    words = torch.full((plan.HEADER_WORDS + tiles * plan.ENTRY_WORDS,), INT_MIN, dtype=torch.int32)
    capacity = 0 if inputs.block_ids is None else inputs.block_ids.shape[1] * p.page_size
    _prefill_schedule_kernel[(-(-tiles // block_t),)](
        inputs.cu_seqlens, inputs.seq_lens, words, batch, tokens, tiles, capacity,
        plan.heaviest(p.window, tile_tokens, block_n),
        TILE_TOKENS=tile_tokens, BLOCK_N=block_n, PAGED=p.page_size > 0, CAUSAL=p.causal, WINDOW=p.window is not None,
        BLOCK_T=block_t, BLOCK_B=block_b, PDL=False,
    )  # fmt: skip
    return words


def entries(words: torch.Tensor) -> list[tuple[int, ...]]:
    """The entries of a table as tuples."""
    count = int(words[0])
    rows = words[plan.HEADER_WORDS :].view(-1, plan.ENTRY_WORDS)[:count, :6]
    return [tuple(row) for row in rows.tolist()]


def interpret(
    inputs: PrefillInputs,
    block_m: int = 16,
    block_n: int = 32,
    output: torch.Tensor | None = None,
    splits: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All kernels on the CPU: (output, lse)."""
    from hpc.attention.prefill.kernels import _prefill_attention_kernel

    p = inputs.params
    q, k, v = inputs.q, inputs.k, inputs.v
    if p.dtype == "fp8":
        q, k, v = (t.view(torch.uint8) for t in (q, k, v))
    pack = plan.pack_of(p.group, block_m)
    words = table(inputs, block_m // pack, block_n)
    out = torch.full((*q.shape[:2], p.value_dim), math.nan).bfloat16() if output is None else output
    lse = torch.full(q.shape[:2], math.nan)
    unused = torch.zeros(1)
    ids = words if inputs.block_ids is None else inputs.block_ids
    qscale, kscale, vscale, sinks = (
        unused if t is None else t for t in (inputs.qscale, inputs.kscale, inputs.vscale, inputs.sinks)
    )
    kscale = kscale.view(torch.float32)
    ks = kscale.stride()[:3] if kscale.dim() == 4 else (0, 0, 0)
    qs = (*qscale.stride()[:2], qscale.shape[2]) if qscale.dim() == 3 else (0, 0, 0)
    k_strides, v_strides = ((*(() if p.page_size else (0,)), *t.stride()[:-1]) for t in (k, v))
    to, to_lse, to_strides = out, lse, out.stride()[:2]
    if splits > 1:
        to = torch.full((q.shape[0] * splits, p.q_heads, p.value_dim), math.nan)
        to_lse, to_strides = torch.full(to.shape[:2], math.nan), to.stride()[:2]
    items = plan.bound(q.shape[0], len(p.lens), block_m // pack) * (p.q_heads // pack)
    _prefill_attention_kernel[(items * splits,)](
        q, k, v, to, to_lse, words, ids, qscale, kscale, vscale, sinks,
        k.shape[0], p.head_dim**-0.5, p.logit_cap or 1.0, p.window or 0, ids.stride(0), *q.stride()[:2],
        *k_strides, *v_strides, *to_strides, *qs, *ks,
        HQ=p.q_heads, HKV=p.kv_heads, D=p.head_dim, DV=p.value_dim, PAGE=p.page_size, PACK=pack, BLOCK_M=block_m,
        BLOCK_N=block_n, BLOCK_D=_power(p.head_dim), BLOCK_DV=_power(p.value_dim),
        QUANT_TYPE=p.quant_type if p.dtype == "fp8" else -1, SCALES_PER_ROW=kscale.shape[-1], CAUSAL=p.causal,
        WINDOW=p.window is not None, CAP=p.logit_cap is not None, SINKS=p.sinks and splits == 1, LSE=True, WIDE=False,
        STAGES=1, SPLITS=splits, PDL=False, INTERPRET=True,
    )  # fmt: skip
    if splits > 1:
        combine(to, to_lse, out, lse, sinks if p.sinks else None)
    return out, lse


def combine(
    part_o: torch.Tensor,
    part_lse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sinks: torch.Tensor | None,
) -> None:
    """The joining of parts on the CPU."""
    from hpc.attention.prefill.combine import _prefill_combine_kernel

    tokens, heads, dim = out.shape
    splits = len(part_o) // tokens
    _prefill_combine_kernel[(-(-tokens * heads // 4),)](
        out, lse, part_o, part_lse, lse if sinks is None else sinks, tokens * heads, splits, *out.stride()[:2],
        HQ=heads, DV=dim, BLOCK_R=4, BLOCK_S=8, BLOCK_DV=_power(dim), SINKS=sinks is not None, PDL=False,
        INTERPRET=True,
    )  # fmt: skip


def _power(n: int) -> int:
    return 1 << max(4, (n - 1).bit_length())
