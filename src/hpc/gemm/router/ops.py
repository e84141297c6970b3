"""The same functions as `torch.ops.hpc.*`, for tracing. Eager calls bypass the dispatcher.

An op never returns an alias of an input: `gemm_bf16xfp32` returns a fresh tensor, its `out` overload writes the given
output and returns nothing; `router_topk` returns (weights, ids, zero weight), the last one empty without zero experts.
"""

from __future__ import annotations

from typing import Any

import torch

_GEMM = (
    "Tensor x, Tensor w_high, Tensor w_low, float scale, bool use_fp32_output=False, bool use_splitk=True, "
    "Tensor? split_flag=None, *, Tensor? w_third=None"
)
_LIBRARY = torch.library.Library("hpc", "FRAGMENT")
_LIBRARY.define(f"gemm_bf16xfp32({_GEMM}) -> Tensor")
_LIBRARY.define(f"gemm_bf16xfp32.out({_GEMM}, Tensor(a!) output) -> ()")
_LIBRARY.define(
    "router_topk(Tensor x, Tensor w_high, Tensor w_low, Tensor? w_third, float scale, int top_k, str scoring, "
    "Tensor? bias, int num_groups, int top_groups, bool renormalize, float routed_scaling, int num_zero_experts) "
    "-> (Tensor, Tensor, Tensor)"
)


def _parts(*parts: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    return tuple(part for part in parts if part is not None)


def _gemm(
    x: torch.Tensor, w_high: torch.Tensor, w_low: torch.Tensor, scale: float, use_fp32_output: bool = False,
    use_splitk: bool = True, split_flag: torch.Tensor | None = None, *, w_third: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    from hpc.gemm.router import entry

    return entry.gemm("gemm_bf16xfp32", x, _parts(w_high, w_low, w_third), scale, use_fp32_output, use_splitk,
                      split_flag, output, None)  # fmt: skip


def _gemm_out(*args: Any, **kwargs: Any) -> None:
    _gemm(*args, **kwargs)


def _gemm_fake(
    x: torch.Tensor, w_high: torch.Tensor, w_low: torch.Tensor, scale: float, use_fp32_output: bool = False,
    use_splitk: bool = True, split_flag: torch.Tensor | None = None, *, w_third: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    dtype = torch.float32 if use_fp32_output else torch.bfloat16
    return torch.empty((x.shape[0], w_high.shape[0]), dtype=dtype, device=x.device)


def _topk(
    x: torch.Tensor, w_high: torch.Tensor, w_low: torch.Tensor, w_third: torch.Tensor | None, scale: float, top_k: int,
    scoring: str, bias: torch.Tensor | None, num_groups: int, top_groups: int, renormalize: bool,
    routed_scaling: float, num_zero_experts: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    from hpc.gemm.router import entry

    result = entry.topk("router_topk", x, _parts(w_high, w_low, w_third), scale, top_k, scoring, bias, num_groups,
                        top_groups, renormalize, routed_scaling, num_zero_experts, None)  # fmt: skip
    zero = result[2] if num_zero_experts else torch.empty(0, dtype=torch.float32, device=x.device)
    return result[0], result[1], zero


def _topk_fake(
    x: torch.Tensor, w_high: torch.Tensor, w_low: torch.Tensor, w_third: torch.Tensor | None, scale: float, top_k: int,
    scoring: str, bias: torch.Tensor | None, num_groups: int, top_groups: int, renormalize: bool,
    routed_scaling: float, num_zero_experts: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    tokens = x.shape[0]
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=x.device)
    zero = torch.empty(tokens if num_zero_experts else 0, dtype=torch.float32, device=x.device)
    return weights, torch.empty((tokens, top_k), dtype=torch.int32, device=x.device), zero


for _name, _run, _fake in (
    ("gemm_bf16xfp32", _gemm, _gemm_fake),
    ("gemm_bf16xfp32.out", _gemm_out, lambda *args, **kwargs: None),
    ("router_topk", _topk, _topk_fake),
):
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hpc::{_name}", _fake, lib=_LIBRARY)


def traced_gemm(
    x: torch.Tensor, parts: tuple[torch.Tensor | None, ...], scale: float, use_fp32_output: bool, use_splitk: bool,
    split_flag: torch.Tensor | None, output: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """`gemm_bf16xfp32` as a node of the traced graph."""
    high, low, third = parts
    args = (x, high, low, scale, use_fp32_output, use_splitk, split_flag)
    if output is None:
        out: torch.Tensor = torch.ops.hpc.gemm_bf16xfp32.default(*args, w_third=third)
        return out
    torch.ops.hpc.gemm_bf16xfp32.out(*args, w_third=third, output=output)
    return output
