"""The prologue as tests, `hpc check`, `hpc bench` and `hpc warmup` see it: inputs, error limits, work, rivals."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

import hpc
from hpc.bench.providers import Provider
from hpc.bench.rivals import rope as rival
from hpc.common.operator import Case, Floor, Progress, Tolerance
from hpc.rope import case_lists, reference
from hpc.rope.case_lists import RopeCase
from hpc.testing import PagedCache, make_paged_cache

K_SCALE, V_SCALE, Q_SCALE_INV = 0.037, 0.019, 17.0  # far from 1: a scale left out or exchanged shows

# Queries: what rounding the exact result leaves. bf16: 1.7e-3 RMS, half a unit in the last place at most. e4m3 codes,
# in units of their scale: 2.6e-2 RMS, 16 of the largest at most: of 448 with a scale a head, of little over 256 in the
# worst case with a fixed one. The tests compare bits besides.
TOLERANCES = {"bf16": Tolerance(rms=2.0e-3, max=4e-3), "fp8": Tolerance(rms=2.9e-2, max=3.7e-2)}
FIXED_SCALE = Tolerance(rms=2.9e-2, max=6.3e-2)


def tolerance(params: RopeCase) -> Tolerance:
    fixed = params.dtype == "fp8" and params.quant_policy != 1
    return FIXED_SCALE if fixed else TOLERANCES[params.dtype]


@dataclass(frozen=True)
class RopeInputs:
    """All tensors of one call."""

    params: RopeCase
    cache: PagedCache
    qkv: torch.Tensor
    cos_sin: torch.Tensor
    seq_lens: torch.Tensor
    q_index: torch.Tensor
    q_weight: torch.Tensor | None = None
    k_weight: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    q_scale_inv: torch.Tensor | None = None
    out_k: torch.Tensor | None = None
    out_v: torch.Tensor | None = None


def rotary_table(max_pos: int, dim: int, device: torch.device | str, base: float = 1e4) -> torch.Tensor:
    """float32 ``[max_pos, dim]``: cosines, then sines, of position * base^(-2i/dim)."""
    rate = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = torch.outer(torch.arange(max_pos, dtype=torch.float64), rate)
    return torch.cat((angle.cos(), angle.sin()), 1).float().to(device)


def make_tensors(params: RopeCase, device: torch.device | str, seed: int) -> RopeInputs:
    """Random projections over four binary orders of magnitude from head to head; caches full of NaN behind random rows,
    dead page ids garbage."""
    stored = torch.float8_e4m3fn if params.dtype == "fp8" else torch.bfloat16
    cache = make_paged_cache(
        params.lens, params.kv_heads, params.head_dim, params.page_size, stored, params.layout, device, seed,
        v_head_dim=params.value_dim,
    )  # fmt: skip
    generator = torch.Generator(device=device).manual_seed(seed + 1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    heads = params.q_heads + params.kv_heads
    width = heads * params.head_dim + params.kv_heads * params.value_dim
    loud = torch.exp2(normal(params.tokens, 1))
    qkv = (normal(params.tokens, width) * loud).bfloat16()
    longest = max(params.lens, default=0)
    table = rotary_table(params.max_pos or longest + 1, params.rotated, device)
    index = torch.tensor([0, *params.new], device=device).cumsum(0).int()

    def out(wanted: bool, dim: int) -> torch.Tensor | None:
        shape = (params.tokens, params.kv_heads, dim)
        return torch.zeros(shape, dtype=stored, device=device) if wanted else None

    inputs = RopeInputs(
        params, cache, qkv, table.bfloat16() if params.bf16_table else table, cache.seq_lens, index,
        out_k=out(params.keep_k, params.head_dim), out_v=out(params.keep_v, params.value_dim),
    )  # fmt: skip
    if params.norm_policy:
        weights = (normal(params.head_dim) * 0.2 + 1 for _ in range(2))
        inputs = replace(inputs, q_weight=next(weights), k_weight=next(weights))
    if params.dtype == "fp8":
        scales = (torch.full((1,), value, device=device) for value in (K_SCALE, V_SCALE))
        inputs = replace(inputs, k_scale=next(scales), v_scale=next(scales))
        if params.quant_policy == 2:
            inputs = replace(inputs, q_scale_inv=torch.full((1,), Q_SCALE_INV, device=device))
    return inputs


def prologue(inputs: RopeInputs, **more: Any) -> Any:
    """The public function of the case's dtype."""
    p, cache = inputs.params, inputs.cache
    tensors = (cache.kcache, cache.vcache, inputs.qkv, inputs.cos_sin, inputs.seq_lens, inputs.q_index,
               cache.block_ids, p.is_prefill)  # fmt: skip
    common: dict[str, Any] = {
        "q_norm_weight": inputs.q_weight, "k_norm_weight": inputs.k_weight, "out_k": inputs.out_k,
        "out_v": inputs.out_v, "qk_norm_policy": p.norm_policy, "eps": p.eps, "is_neox_style": p.neox, **more,
    }  # fmt: skip
    if p.dtype == "bf16":
        return hpc.rope_norm_store_kv(*tensors, **common)
    return hpc.rope_norm_store_kv_fp8(
        *tensors, inputs.k_scale, inputs.v_scale, p.quant_policy, max(p.new, default=0), p.upper_max,
        inputs.q_scale_inv, **common,
    )  # fmt: skip


def exact(inputs: RopeInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v in float64; padded rows zero. q is in units of its scale where it is quantised."""
    p = inputs.params
    request, position, _ = reference.token_positions(inputs.seq_lens, inputs.q_index, p.tokens)
    parts = reference.project(
        inputs.qkv, inputs.cos_sin, position, p.kv_heads, p.head_dim, p.value_dim, q_norm_weight=inputs.q_weight,
        k_norm_weight=inputs.k_weight, qk_norm_policy=p.norm_policy, eps=p.eps, is_neox_style=p.neox,
    )  # fmt: skip
    q, k, v = (part.masked_fill((request < 0)[:, None, None], 0) for part in parts)
    if p.dtype == "fp8":
        upper = reference.FP8_MAX if p.upper_max is None else p.upper_max
        if p.quant_policy == 1:
            q = q * (upper / q.abs().amax(-1, keepdim=True).clamp_min(reference.SMALLEST_AMAX))
        else:
            q = (q * Q_SCALE_INV).clamp(-448, 448)
    return q, k, v


def copied(inputs: RopeInputs, device: torch.device | str | None = None) -> RopeInputs:
    """The same call on copies of all that it writes (of all tensors, if they move to `device`)."""

    def copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        same = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device or tensor.device
        )
        return same.copy_(tensor)

    caches = {"kcache": copy(inputs.cache.kcache), "vcache": copy(inputs.cache.vcache)}
    cache: PagedCache = replace(inputs.cache, **caches)  # type: ignore[arg-type]
    moved = {"out_k": copy(inputs.out_k), "out_v": copy(inputs.out_v)}
    if device is not None:
        cache = replace(cache, block_ids=cache.block_ids.to(device), seq_lens=cache.seq_lens.to(device))
        for name in (
            "qkv",
            "cos_sin",
            "seq_lens",
            "q_index",
            "q_weight",
            "k_weight",
            "k_scale",
            "v_scale",
            "q_scale_inv",
        ):
            moved[name] = copy(getattr(inputs, name))
    return replace(inputs, cache=cache, **moved)  # type: ignore[arg-type]


class RopeOperator:
    """See `hpc.common.operator.Operator`. What is compared is the queries; the tests compare every output."""

    name = "rope.prologue"
    functions = ("rope_norm_store_kv", "rope_norm_store_kv_fp8", "quantize_query_fp8")

    def cases(self, tag: str) -> list[Case]:
        """Cases that carry `tag`: "interpret", "gpu", "target", "bench" (targets and more) or "demo"."""
        known = {
            "gpu": case_lists.gpu_cases,
            "interpret": case_lists.interpret_cases,
            "demo": case_lists.interpret_cases,
        }
        return [case for case in known.get(tag, case_lists.bench_cases)() if tag in case.tags]

    def make_inputs(self, case: Case, device: torch.device | str, seed: int) -> RopeInputs:
        return make_tensors(case.params, device, seed)

    def rotate(self, inputs: RopeInputs, seed: int) -> RopeInputs:
        """The same call on fresh caches and a fresh projection beside the index that the layers of a model share."""
        del seed
        return replace(copied(inputs), qkv=inputs.qkv.clone())

    def call(self, inputs: RopeInputs) -> torch.Tensor:
        """Queries; raises where a cache differs from the reference in a bit."""
        expected = copied(inputs, "cpu")
        prologue(expected)
        result = prologue(inputs)
        for name in ("kcache", "vcache"):
            have, want = (getattr(i.cache, name).cpu().view(torch.uint8) for i in (inputs, expected))
            if not torch.equal(have, want):
                raise AssertionError(
                    f"{name} differs from the reference in {int((have != want).sum())} bytes"
                )
        return queries(result)

    def reference(self, inputs: RopeInputs) -> torch.Tensor:
        return exact(inputs)[0]

    def tolerance(self, case: Case) -> Tolerance:
        return tolerance(case.params)

    def floor(self, case: Case) -> Floor:
        """Bytes read (projection, table, index) and written (queries, keys, values, scales, cleared rows) once. Eight
        operations a value; the kind decides nothing."""
        p: RopeCase = case.params
        element = 1 if p.dtype == "fp8" else 2
        kv_row = p.kv_heads * (p.head_dim + p.value_dim)
        width = p.q_heads * p.head_dim + kv_row
        tails = sum(-length % p.page_size for length in p.lens)
        scales = 4 * p.tokens * p.q_heads if p.dtype == "fp8" and p.quant_policy == 1 else 0
        table = p.rotated * (2 if p.bf16_table else 4) * sum(p.new)
        moved = p.tokens * width * (2 + element) + tails * kv_row * element + scales + table
        return Floor(bytes=max(1, moved), flops=8.0 * p.tokens * width, kind="bf16")

    def providers(self) -> dict[str, Provider]:
        own = Provider("hpc", lambda inputs: lambda: queries(prologue(inputs)))
        return {p.name: p for p in (own, rival.provider(neutral))}

    def warmup(self, device: torch.device | str, progress: Progress | None) -> int:
        """Compile what calls of the usual models reach: see `hpc.rope.warm`."""
        warm = importlib.import_module("hpc.rope.warm")
        count: int = warm.warmup(device, progress)
        return count


def queries(result: Any) -> torch.Tensor:
    """The first output."""
    out: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return out


def neutral(inputs: RopeInputs) -> rival.RopeInputs:
    """The call as the rival takes it: positions and slots made beforehand, as engines make them once a step."""
    p = inputs.params
    request, position, _ = reference.token_positions(inputs.seq_lens, inputs.q_index, p.tokens)
    page = inputs.cache.block_ids.long()[request.clamp_min(0), position.clamp_min(0) // p.page_size]
    return rival.RopeInputs(
        inputs.qkv, inputs.cache.kcache, inputs.cache.vcache, inputs.cos_sin, position, page, position % p.page_size,
        inputs.q_weight, inputs.k_weight, inputs.k_scale, inputs.v_scale, p.norm_policy, p.eps, p.neox,
        p.quant_policy if p.dtype == "fp8" else 0, bool((request < 0).any()) or p.keep_k or p.keep_v,
    )  # fmt: skip


Call = Callable[[], torch.Tensor]
OPERATOR = RopeOperator()
