"""Decode attention as tests, `hpc check`, `hpc bench` and `hpc warmup` see it: inputs, error limits, work, rivals."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

import hpc
from hpc.attention.decode import case_lists, choose
from hpc.attention.decode.case_lists import DecodeCase
from hpc.attention.decode.reference import decode_reference
from hpc.bench.providers import Provider
from hpc.bench.rivals import decode as rivals
from hpc.common import arch
from hpc.common.operator import Case, Floor, Progress, Tolerance
from hpc.testing import PagedCache, make_paged_cache

K_SCALE, V_SCALE = 0.037, 3.1  # far from 1 and from each other: a scale left out or exchanged shows

# What rounding to bf16 leaves of an exact result is 1.7e-3 RMS, half a unit in the last place at most: 2e-3 of the
# largest value. fp16 probabilities (FP8) add 1.4e-4 RMS; bf16 ones 1.1e-3 (together 2.0e-3), at most another 2e-3.
# 8-bit probabilities would give 2.5e-2.
TOLERANCES = {"fp8": Tolerance(rms=2.0e-3, max=4e-3), "bf16": Tolerance(rms=2.5e-3, max=6e-3)}
# One value scale a head maps the few e4m3 values of short requests to few outputs: rounding does not average out.
TOLERANCES["fp8 per token"] = Tolerance(rms=2.5e-3, max=4e-3)


# The kernel for many rows takes e4m3 scores from tensor cores that keep some 14 bits of a sum: scores come out up to
# 1.1e-3 off, and with them the lse and, of rows with few keys, the probabilities.
TOLERANCES["fp8 many rows"] = Tolerance(rms=2.0e-3, max=8e-3)


def many_rows_kernel(params: DecodeCase) -> bool:
    """Whether the kernel for many rows is the choice for an FP8 case on this machine."""
    small = max(params.head_dim, params.value_dim) <= 128 and params.page_size in choose.TMA_PAGE_SIZES
    many = params.group * params.num_new_tokens >= choose.ROWS_FROM
    taken = params.dtype == "fp8" and params.quant_type == 1 and small and many
    return taken and arch.gpu_available() and arch.is_hopper("cuda")


def tolerance(params: DecodeCase, many_rows: bool | None = None) -> Tolerance:
    """Error limit of a case. `many_rows`: whether the kernel for many rows runs; None: as it is chosen."""
    if params.dtype == "fp8" and params.quant_type == 0:
        return TOLERANCES["fp8 per token"]
    if params.dtype == "fp8" and (many_rows_kernel(params) if many_rows is None else many_rows):
        return TOLERANCES["fp8 many rows"]
    return TOLERANCES[params.dtype]


def lse_tolerance(params: DecodeCase, many_rows: bool | None = None) -> float:
    """Absolute limit for the lse: twice what the H200 showed in the tests with e4m3 scores of the tensor cores."""
    many = many_rows_kernel(params) if many_rows is None else many_rows
    return 2e-3 if many and params.dtype == "fp8" else 1e-4


@dataclass(frozen=True)
class DecodeInputs:
    """All tensors of one call; `task_map` is filled, and None for the static path."""

    params: DecodeCase
    q: torch.Tensor
    cache: PagedCache
    seq_lens: (
        torch.Tensor
    )  # as the public functions take them: without the new tokens if new_kv_included is False
    qscale: torch.Tensor | None = None
    kscale: torch.Tensor | None = None
    vscale: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    task_map: torch.Tensor | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Optional arguments that both the public functions and the reference take."""
        chosen = {"window": self.params.window, "logit_cap": self.params.logit_cap, "sinks": self.sinks}
        return {name: value for name, value in chosen.items() if value is not None}


def make_tensors(params: DecodeCase, device: torch.device | str, seed: int) -> DecodeInputs:
    """Random queries, keys and values of unit variance; every dead row of the cache NaN, dead page ids garbage.
    Without a task map."""
    fp8, lens, s = params.dtype == "fp8", params.total_lens, params.num_new_tokens
    cache = make_paged_cache(
        lens, params.kv_heads, params.head_dim, params.page_size, torch.float8_e4m3fn if fp8 else torch.bfloat16,
        params.layout, device, seed, v_head_dim=params.value_dim, token_scales=fp8 and params.quant_type == 0,
    )  # fmt: skip
    generator = torch.Generator(device=device).manual_seed(seed + 1)

    def rand(*shape: int, normal: bool = False) -> torch.Tensor:
        draw = torch.randn if normal else torch.rand
        return draw(shape, generator=generator, device=device)

    rows = len(lens) * s
    q = rand(rows, params.q_heads, params.head_dim, normal=True).to(cache.kcache.dtype)
    inputs = DecodeInputs(
        params, q, cache, cache.seq_lens if params.new_kv_included else cache.seq_lens - s,
        sinks=rand(params.q_heads, normal=True) if params.sinks else None,
    )  # fmt: skip
    if fp8:
        # query scales over a factor of 40, so that some heads weigh keys evenly and others pick a few
        spread = 40.0 ** rand(rows, params.q_heads)
        if params.quant_type == 0:
            vscale = rand(params.kv_heads) + 0.5
            inputs = replace(inputs, qscale=spread * 0.05, kscale=cache.kscale, vscale=vscale)
        else:
            kscale, vscale = (torch.full((1,), value, device=device) for value in (K_SCALE, V_SCALE))
            inputs = replace(inputs, qscale=spread, kscale=kscale, vscale=vscale)
    return inputs


def make_task_map(inputs: DecodeInputs) -> torch.Tensor:
    """A fresh workspace, filled for these lengths."""
    params = inputs.params
    workspace = hpc.get_attention_decode_task_workspace(
        len(params.lens), max(max(params.total_lens), 1), params.kv_heads, device=inputs.q.device
    )
    return assign(inputs, workspace)


def assign(inputs: DecodeInputs, workspace: torch.Tensor) -> torch.Tensor:
    """Fill the workspace through the public function."""
    params = inputs.params
    window = {} if params.window is None else {"window": params.window}
    return hpc.assign_attention_decode_task(
        inputs.seq_lens, workspace, params.kv_heads, params.num_new_tokens, params.new_kv_included, **window
    )


def attend(inputs: DecodeInputs, task_map: torch.Tensor | None, **more: Any) -> Any:
    """The public function of the case's dtype, with a task map or, with None, by the static split."""
    params, cache = inputs.params, inputs.cache
    common = {
        "mtp": params.num_new_tokens - 1, "new_kv_included": params.new_kv_included, "task_map": task_map,
        **inputs.options, **more,
    }  # fmt: skip
    tensors = (inputs.q, cache.kcache, cache.vcache, cache.block_ids, inputs.seq_lens)
    if params.dtype == "bf16":
        return hpc.attention_decode_bf16(*tensors, **common)
    assert inputs.qscale is not None and inputs.kscale is not None and inputs.vscale is not None
    scales = (inputs.qscale, inputs.kscale, inputs.vscale)
    return hpc.attention_decode_fp8(*tensors, *scales, quant_type=hpc.QuantType(params.quant_type), **common)


def reference(inputs: DecodeInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, lse) in float64 from the inputs as stored."""
    params, cache = inputs.params, inputs.cache
    return decode_reference(
        inputs.q, cache.kcache, cache.vcache, cache.block_ids, inputs.seq_lens,
        num_new_tokens=params.num_new_tokens, new_kv_included=params.new_kv_included,
        qscale=inputs.qscale, kscale=inputs.kscale, vscale=inputs.vscale,
        quant_type=params.quant_type if params.dtype == "fp8" else None, **inputs.options,
    )  # fmt: skip


def visible_keys(params: DecodeCase) -> tuple[int, int]:
    """(keys that some query of their request sees, sum over query tokens of the keys each sees), per KV head."""
    s, live, pairs = params.num_new_tokens, 0, 0
    for length in params.total_lens:
        first = 0 if params.window is None else max(0, length - s + 1 - params.window)
        live += length - first
        for end in range(max(0, length - s) + 1, length + 1):
            pairs += end if params.window is None else min(end, params.window)
    return live, pairs


class DecodeOperator:
    """See `hpc.common.operator.Operator`."""

    name = "attention.decode"
    functions = (
        "attention_decode_bf16",
        "attention_decode_fp8",
        "get_attention_decode_task_workspace",
        "assign_attention_decode_task",
        "print_attention_decode_task",
        "get_attention_decode_scratch_size",
    )

    def cases(self, tag: str) -> list[Case]:
        """Cases that carry `tag`: "interpret", "gpu", "target", "bench" (targets and more) or "demo"."""
        if tag == "gpu":
            return list(case_lists.gpu_cases())
        if tag in ("interpret", "demo"):
            known = case_lists.interpret_cases()
        else:
            known = case_lists.target_cases() + case_lists.bench_cases()
        return [case for case in known if tag in case.tags]

    def make_inputs(self, case: Case, device: torch.device | str, seed: int) -> DecodeInputs:
        inputs = make_tensors(case.params, device, seed)
        return replace(inputs, task_map=make_task_map(inputs)) if case.params.dynamic else inputs

    def rotate(self, inputs: DecodeInputs, seed: int) -> DecodeInputs:
        """The same call on a copy of the caches: cold keys and values beside the warm lengths, table and queries that
        the layers of a model share. `seed` is not used, the values are the same."""
        del seed
        cache = inputs.cache
        per_token = None if cache.kscale is None else _copy(cache.kscale)
        copied = replace(cache, kcache=_copy(cache.kcache), vcache=_copy(cache.vcache), kscale=per_token)
        return replace(inputs, cache=copied, kscale=inputs.kscale if per_token is None else per_token)

    def call(self, inputs: DecodeInputs) -> torch.Tensor:
        """Schedule and attention where the case is dynamic, else attention alone."""
        if inputs.task_map is not None:
            assign(inputs, inputs.task_map)
        return attend(inputs, inputs.task_map)

    def reference(self, inputs: DecodeInputs) -> torch.Tensor:
        return reference(inputs)[0]

    def tolerance(self, case: Case) -> Tolerance:
        return tolerance(case.params)

    def floor(self, case: Case) -> Floor:
        """Each live key and value read once, queries read, results written; two products per visible pair."""
        params: DecodeCase = case.params
        element = 1 if params.dtype == "fp8" else 2
        live, pairs = visible_keys(params)
        row_values = params.head_dim * element + params.value_dim * 2
        rows = len(params.lens) * params.num_new_tokens * params.q_heads
        width = params.head_dim + params.value_dim
        return Floor(
            bytes=live * params.kv_heads * width * element + rows * row_values,
            flops=2.0 * pairs * params.q_heads * width,
            kind=params.dtype,
        )

    def providers(self) -> dict[str, Provider]:
        """ "hpc" is the dynamic schedule with its map made beforehand, as every layer but the first finds it."""
        own = [
            Provider("hpc", _dynamic, note="task map made beforehand"),
            Provider("hpc/assign+decode", _assigned, note="task map made in the timed call"),
            Provider("hpc/static", lambda inputs: lambda: attend(inputs, None), note="no task map"),
        ]
        others = [importlib.import_module(f"hpc.bench.rivals.{name}") for name in ("fa3", "flashinfer")]
        return {p.name: p for p in (*own, *(other.provider(neutral) for other in others))}

    def warmup(self, device: torch.device | str, progress: Progress | None) -> int:
        """Compile what calls of the usual models reach: see `hpc.attention.decode.warm`."""
        warm = importlib.import_module("hpc.attention.decode.warm")
        count: int = warm.warmup(device, progress)
        return count


def _dynamic(inputs: DecodeInputs) -> Callable[[], torch.Tensor]:
    task_map = make_task_map(inputs) if inputs.task_map is None else inputs.task_map
    return lambda: attend(inputs, task_map)


def _assigned(inputs: DecodeInputs) -> Callable[[], torch.Tensor]:
    task_map = make_task_map(inputs)

    def call() -> torch.Tensor:
        return attend(inputs, assign(inputs, task_map))

    return call


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides (`clone` would close the gaps of a slice)."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)


def neutral(inputs: DecodeInputs) -> rivals.DecodeInputs:
    """The call as other libraries' adapters take it."""
    params, cache = inputs.params, inputs.cache
    return rivals.DecodeInputs(
        inputs.q, cache.kcache, cache.vcache, cache.block_ids, params.total_lens, params.num_new_tokens,
        params.head_dim**-0.5, inputs.qscale, inputs.kscale, inputs.vscale, params.window, params.logit_cap,
        inputs.sinks, params.dtype == "fp8" and params.quant_type == 0,
    )  # fmt: skip


OPERATOR = DecodeOperator()
