"""Prefill attention as tests, `hpc check`, `hpc bench` and `hpc warmup` see it: inputs, error limits, work, rivals."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import Any

import torch

from hpc.attention.prefill import api, case_lists, plan
from hpc.attention.prefill.case_lists import PrefillCase
from hpc.attention.prefill.reference import prefill_reference
from hpc.bench.providers import CannotRun, Provider
from hpc.bench.rivals import prefill as rivals
from hpc.common import arch
from hpc.common.operator import Case, Floor, Progress, Tolerance
from hpc.testing import PagedCache, make_paged_cache

K_SCALE, V_SCALE = 0.037, 3.1  # far from 1 and from each other: a scale left out or exchanged shows

# What rounding to bf16 leaves of an exact result is 1.7e-3 RMS, half a unit in the last place at most: 2e-3 of the
# largest value. fp16 probabilities (FP8) add 1.4e-4 RMS; bf16 ones 1.1e-3 (together 2.0e-3), at most another 2e-3.
TOLERANCES = {"fp8": Tolerance(rms=2.0e-3, max=4e-3), "bf16": Tolerance(rms=2.5e-3, max=6e-3)}
# One value scale a head maps the few e4m3 values of short requests to few outputs: rounding does not average out.
TOLERANCES["fp8 per token"] = Tolerance(rms=2.5e-3, max=4e-3)
# e4m3 probabilities (the SM90 kernel): three bits of mantissa, 2.6e-2 RMS of each before they average out.
TOLERANCES["fp8 sm90"] = Tolerance(rms=3.2e-2, max=8e-2)


@dataclass(frozen=True)
class PrefillInputs:
    """All tensors of one call. Ragged keys have no `block_ids`."""

    params: PrefillCase
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens: torch.Tensor
    seq_lens: torch.Tensor
    block_ids: torch.Tensor | None = None
    qscale: torch.Tensor | None = None
    kscale: torch.Tensor | None = None
    vscale: torch.Tensor | None = None
    sinks: torch.Tensor | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Optional arguments that both the public functions and the reference take."""
        p = self.params
        chosen = {
            "window": p.window,
            "logit_cap": p.logit_cap,
            "sinks": self.sinks,
            "causal": p.causal or None,
        }
        given = {name: value for name, value in chosen.items() if value is not None}
        return given if p.causal else {**given, "causal": False}


def make_tensors(params: PrefillCase, device: torch.device | str, seed: int) -> PrefillInputs:
    """Random queries, keys and values of unit variance; every dead row of the cache NaN, dead page ids garbage, and
    rows of q behind the last request NaN."""
    fp8 = params.dtype == "fp8"
    stored = torch.float8_e4m3fn if fp8 else torch.bfloat16
    generator = torch.Generator(device=device).manual_seed(seed + 1)

    def rand(*shape: int, normal: bool = False) -> torch.Tensor:
        draw = torch.randn if normal else torch.rand
        return draw(shape, generator=generator, device=device)

    q = rand(params.rows, params.q_heads, params.head_dim, normal=True)
    q[params.rows - params.extra_rows :] = float("nan")
    ends = [0]
    for n, _ in params.lens:
        ends.append(ends[-1] + n)
    cu = torch.tensor(ends, dtype=torch.int32, device=device)
    sinks = rand(params.q_heads, normal=True) if params.sinks else None
    q = q.to(stored)
    if params.page_size == 0:
        k, v = (rand(params.rows, params.kv_heads, d, normal=True).to(stored)
                for d in (params.head_dim, params.value_dim))  # fmt: skip
        k[ends[-1] :], v[ends[-1] :] = float("nan"), float("nan")
        return PrefillInputs(params, q, k, v, cu, cu.diff(), sinks=sinks)
    cache = make_paged_cache(
        [keys for _, keys in params.lens], params.kv_heads, params.head_dim, params.page_size, stored, params.layout,
        device, seed, v_head_dim=params.value_dim, token_scales=fp8 and params.quant_type == 0,
    )  # fmt: skip
    inputs = PrefillInputs(
        params, q, cache.kcache, cache.vcache, cu, cache.seq_lens, cache.block_ids, sinks=sinks
    )
    return _scaled(inputs, cache, rand) if fp8 else inputs


def _scaled(inputs: PrefillInputs, cache: PagedCache, rand: Any) -> PrefillInputs:
    """With FP8 scales. Query scales span a factor of 40, so that some heads weigh keys evenly and others pick a few;
    those of tokens that do not exist are NaN."""
    params = inputs.params
    longest = max(n for n, _ in params.lens)
    padded = -(-max(longest, 1) // 128) * 128
    qscale = 40.0 ** rand(len(params.lens), params.q_heads, padded)
    for b, (n, _) in enumerate(params.lens):
        qscale[b, :, n:] = float("nan")
    if params.quant_type == 0:
        return replace(inputs, qscale=qscale * 0.05, kscale=cache.kscale, vscale=rand(params.kv_heads) + 0.5)
    kscale, vscale = (torch.full((1,), value, device=inputs.q.device) for value in (K_SCALE, V_SCALE))
    return replace(inputs, qscale=qscale, kscale=kscale, vscale=vscale)


def attend(inputs: PrefillInputs, **more: Any) -> Any:
    """The public function of the case."""
    params = inputs.params
    given: dict[str, Any] = {
        "q": inputs.q, "cu_seqlens_q": inputs.cu_seqlens, **inputs.options, **more,
        "max_seqlens_q": max((n for n, _ in params.lens), default=0),
    }  # fmt: skip
    if params.page_size == 0:
        return api.attention_prefill_bf16(k=inputs.k, v=inputs.v, seqlens_q=inputs.seq_lens, **given)
    given |= {"kcache": inputs.k, "vcache": inputs.v, "block_ids": inputs.block_ids}
    given |= {"seqlens_kvcache": inputs.seq_lens}
    if params.dtype == "bf16":
        return api.attention_with_kvcache_prefill_bf16(**given)
    given |= {"qscale": inputs.qscale, "kscale": inputs.kscale, "vscale": inputs.vscale}
    return api.attention_with_kvcache_prefill_fp8(**given, quant_type=params.quant_type)


def reference(inputs: PrefillInputs, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, lse) from the inputs as stored."""
    params = inputs.params
    paged: dict[str, Any] = (
        {} if params.page_size == 0 else {"block_ids": inputs.block_ids, "seq_lens": inputs.seq_lens}
    )
    return prefill_reference(
        inputs.q, inputs.k, inputs.v, inputs.cu_seqlens, **paged, qscale=inputs.qscale, kscale=inputs.kscale,
        vscale=inputs.vscale, quant_type=params.quant_type if params.dtype == "fp8" else None, dtype=dtype,
        **inputs.options,
    )  # fmt: skip


def key_of(params: PrefillCase, sm90: bool, sms: int = 132) -> plan.Key:
    """The key of a case with its own aligned tensors."""
    return plan.Key(
        sm90, sms, params.q_heads, params.kv_heads, params.head_dim, params.value_dim, params.page_size,
        params.quant_type if params.dtype == "fp8" else -1, params.causal, params.window is not None,
        params.logit_cap is not None, params.sinks,
    )  # fmt: skip


def tolerance(params: PrefillCase, chosen: plan.Plan | None = None) -> Tolerance:
    """Error limit of a case under a plan; of the portable kernel's 16-bit probabilities without one."""
    if params.dtype == "fp8" and chosen is not None and chosen.backend == "sm90":
        return TOLERANCES["fp8 sm90"]
    return TOLERANCES["fp8 per token" if params.dtype == "fp8" and params.quant_type == 0 else params.dtype]


def visible_pairs(params: PrefillCase) -> int:
    """Pairs of a query token and a key that it sees."""
    pairs = 0
    for n, keys in params.lens:
        if params.page_size == 0:
            keys = n
        if params.window is None and params.causal and keys >= n:
            pairs += n * (keys - n) + n * (n + 1) // 2
            continue
        for i in range(n):
            end = min(max(keys - n + i + 1, 0), keys) if params.causal else keys
            begin = 0 if params.window is None else max(0, keys - n + i + 1 - params.window)
            pairs += max(0, end - begin)
    return pairs


class PrefillOperator:
    """See `hpc.common.operator.Operator`."""

    name = "attention.prefill"
    functions = (
        "attention_with_kvcache_prefill_bf16",
        "attention_with_kvcache_prefill_fp8",
        "attention_prefill_bf16",
    )

    def cases(self, tag: str) -> list[Case]:
        """Cases that carry `tag`: "interpret", "gpu", "target", "bench" (all measured ones) or "demo"."""
        if tag == "gpu":
            return list(case_lists.gpu_cases())
        if tag in ("interpret", "demo"):
            known = case_lists.interpret_cases()
        else:
            known = case_lists.target_cases() + case_lists.bench_cases() + case_lists.split_cases()
        return [case for case in known if tag in case.tags]

    def make_inputs(self, case: Case, device: torch.device | str, seed: int) -> PrefillInputs:
        return make_tensors(case.params, device, seed)

    def rotate(self, inputs: PrefillInputs, seed: int) -> PrefillInputs:
        """The same call on copies of keys and values: cold ones, as each layer of a model finds them. `seed` is not
        used, the values are the same."""
        del seed
        kscale = None if inputs.kscale is None else _copy(inputs.kscale)
        return replace(inputs, q=inputs.q.clone(), k=_copy(inputs.k), v=_copy(inputs.v), kscale=kscale)

    def call(self, inputs: PrefillInputs) -> torch.Tensor:
        result: torch.Tensor = attend(inputs)
        return result

    def reference(self, inputs: PrefillInputs) -> torch.Tensor:
        return reference(inputs)[0]

    def tolerance(self, case: Case) -> Tolerance:
        """Of the plan that an SM90 device would run: elsewhere the error is smaller."""
        return tolerance(case.params, plan.choose(key_of(case.params, sm90=True)))

    def floor(self, case: Case) -> Floor:
        """Each live key and value read once, queries read, results written; two products per visible pair."""
        params: PrefillCase = case.params
        element = 1 if params.dtype == "fp8" else 2
        width = params.head_dim + params.value_dim
        live = sum(n if params.page_size == 0 else keys for n, keys in params.lens)
        rows = params.rows * params.q_heads
        return Floor(
            bytes=live * params.kv_heads * width * element
            + rows * (params.head_dim * element + params.value_dim * 2),
            flops=2.0 * visible_pairs(params) * params.q_heads * width,
            kind=params.dtype,
        )

    def providers(self) -> dict[str, Provider]:
        own = [
            Provider("hpc", lambda inputs: lambda: attend(inputs)),
            Provider("hpc/portable", _portable, note="the kernel of any GPU", tolerance=_portable_tolerance),
            Provider(
                "hpc/sm90", _sm90, note="the Gluon kernel, whatever `choose` takes", tolerance=_sm90_tolerance
            ),
            Provider(
                "hpc/no overlap",
                _no_overlap,
                note="BF16: a tile ends before the next one starts",
                tolerance=_sm90_tolerance,
            ),
            Provider("hpc/whole", _whole, note="no keys cut into parts", tolerance=_chosen_tolerance),
        ]
        return {p.name: p for p in (*own, *rivals.providers())}

    def warmup(self, device: torch.device | str, progress: Progress | None) -> int:
        """Compile what calls of the usual models reach: see `hpc.attention.prefill.warm`."""
        warm = importlib.import_module("hpc.attention.prefill.warm")
        count: int = warm.warmup(device, progress)
        return count


def _portable(inputs: PrefillInputs) -> Any:
    chosen = plan.portable(key_of(inputs.params, sm90=True))
    return lambda: attend(inputs, plan=chosen)


def _key(inputs: PrefillInputs) -> plan.Key:
    return key_of(inputs.params, sm90=arch.is_hopper(inputs.q.device))


def _whole(inputs: PrefillInputs) -> Any:
    chosen = replace(plan.choose(_key(inputs)), splits=1)
    return lambda: attend(inputs, plan=chosen)


def _chosen_tolerance(inputs: PrefillInputs) -> Tolerance:
    return tolerance(inputs.params, plan.choose(_key(inputs)))


def _portable_tolerance(inputs: PrefillInputs) -> Tolerance:
    return tolerance(inputs.params)


def _sm90(inputs: PrefillInputs, **fields: Any) -> Any:
    key = _key(inputs)
    chosen = replace(plan.sm90(key), **fields)
    why = plan.is_legal(chosen, key)
    if why is not None:
        raise CannotRun(why)
    return lambda: attend(inputs, plan=chosen)


def _no_overlap(inputs: PrefillInputs) -> Any:
    if inputs.params.dtype == "fp8":
        raise CannotRun("FP8 always overlaps")
    return _sm90(inputs, overlap=False)


def _sm90_tolerance(inputs: PrefillInputs) -> Tolerance:
    return tolerance(inputs.params, plan.sm90(key_of(inputs.params, sm90=True)))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides (`clone` would close the gaps of a slice)."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)


OPERATOR = PrefillOperator()
