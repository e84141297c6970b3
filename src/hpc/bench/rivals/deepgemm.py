"""DeepGEMM's two grouped FP8 products of a MoE: a yardstick for pipelines that are built on them.

Rows are gathered, quantised and padded to whole tiles an expert beforehand, and the activations between the products
are ready; so only the products are timed, and this library's weighted sum, which makes the result one to check.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from hpc.bench.providers import BOUND, CannotRun, Provider
from hpc.common import arch
from hpc.common.operator import Tolerance

if TYPE_CHECKING:
    from hpc.bench.rivals.moe import MoeRivalInputs

BLOCK = 128
NOTE = f"{BOUND}products and weighted sum; index, gather, quantisation, activation and padding are not timed"


def provider(adapt: Callable[[Any], MoeRivalInputs], tolerance: Tolerance) -> Provider:
    """For an operator whose inputs `adapt` turns into `MoeRivalInputs`."""

    def prepare(inputs: Any) -> Callable[[], torch.Tensor]:
        return products(adapt(inputs), importlib.import_module("deep_gemm"))

    return Provider("deepgemm products", prepare, available, tolerance, NOTE)


def available() -> str | None:
    """Why it cannot run here, or None."""
    if importlib.util.find_spec("deep_gemm") is None:
        return "not installed: pip install sgl-deep-gemm"
    return None if arch.gpu_available() else "needs a GPU"


def lay_out(topk_ids: torch.Tensor, experts: int, tile: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows by expert, each expert's padded to whole tiles: (row of each pair [T, K], expert of each row or -1)."""
    flat = topk_ids.flatten().long()
    counts = torch.bincount(flat, minlength=experts)
    padded = (counts + tile - 1) // tile * tile
    starts, first_of = padded.cumsum(0) - padded, counts.cumsum(0) - counts
    order = flat.argsort(stable=True)
    sorted_ids = flat[order]
    place = torch.arange(flat.numel(), device=flat.device) - first_of[sorted_ids] + starts[sorted_ids]
    position = torch.empty_like(flat)
    position[order] = place
    owner = torch.full((max(tile, int(padded.sum())),), -1, dtype=torch.int32, device=flat.device)
    owner[place] = sorted_ids.int()
    return position.view(topk_ids.shape).int(), owner


def products(inputs: MoeRivalInputs, deep_gemm: Any) -> Callable[[], torch.Tensor]:
    """Lay everything out, and return the call of the two products and the sum."""
    # resolved at call time: operators list the rivals, and this needs the operator
    moe = importlib.import_module("hpc.moe.reference")
    reduce = importlib.import_module("hpc").reduce
    check(inputs)
    position, owner = lay_out(inputs.topk_ids, inputs.w13.shape[0], BLOCK)
    rows, top_k = len(owner), inputs.topk_ids.shape[1]
    codes, scales = moe.quantise_input(inputs.x, None)
    token = torch.arange(position.numel(), device=position.device) // top_k
    x, x_scale = _rows(codes, position, token, rows), _rows(scales, position, token, rows)
    align = deep_gemm.get_mn_major_tma_aligned_tensor

    def product(
        a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, d: torch.Tensor
    ) -> None:
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous((a, a_scale), (w, w_scale), d, owner)

    gate_up = x.new_empty((rows, inputs.w13.shape[1]), dtype=torch.bfloat16)
    first = (x, align(x_scale), inputs.w13, inputs.w13_scale, gate_up)
    product(*first)
    gate, up = gate_up.double().masked_fill((owner < 0)[:, None], 0).chunk(2, -1)
    a, a_scale = moe.requantise(moe.activation(gate, up, False), None)
    a_scale = a_scale[:, ::BLOCK].float().contiguous()
    y = x.new_empty((rows, inputs.w2.shape[1]), dtype=torch.bfloat16)
    second = (a.to(torch.float8_e4m3fn), align(a_scale), inputs.w2, inputs.w2_scale, y)

    def call() -> torch.Tensor:
        product(*first)
        product(*second)
        return reduce(y, position, inputs.topk_weights)  # type: ignore[no-any-return]

    return call


def check(inputs: MoeRivalInputs) -> None:
    """Raise CannotRun for what DeepGEMM's products do not take."""
    if inputs.obstacle is not None:
        raise CannotRun(inputs.obstacle)
    if inputs.block_shape is None:
        raise CannotRun("DeepGEMM takes block scales only")
    sizes = (inputs.w13.shape[2], inputs.w13.shape[1], inputs.w2.shape[2])
    if any(size % BLOCK for size in sizes):
        raise CannotRun(f"needs multiples of {BLOCK}, has H, 2 I, I = {', '.join(map(str, sizes))}")


def _rows(values: torch.Tensor, position: torch.Tensor, token: torch.Tensor, rows: int) -> torch.Tensor:
    """Rows of tokens at their places, zeros in padding."""
    raw = values.view(torch.uint8) if values.element_size() == 1 else values
    out = raw.new_zeros((rows, values.shape[1]))
    out[position.flatten().long()] = raw[token]
    return out.view(values.dtype)
