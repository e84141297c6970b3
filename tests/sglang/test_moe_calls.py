"""The two MoE calls of `fused_experts_none_to_hpc_ops`, with what SGLang does before and after them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from sglang_support import FP8, VERSIONS, call, rms, to_fp8

BLOCK = 128
# Requantised activations that fall on the other side of a rounding step than in float64: rare, worth 1e-3 together.
RMS = 6e-3


@dataclass
class Layer:
    """One rank's experts as `Fp8MoEMethod` leaves them."""

    w13: torch.Tensor
    w2: torch.Tensor
    w13_scale: torch.Tensor
    w2_scale: torch.Tensor
    rank: int
    num_experts: int
    w13_input_scale: torch.Tensor | None = None
    w2_input_scale: torch.Tensor | None = None


def weights(e: int, h: int, i: int, device: torch.device, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    w13 = torch.randn(e, 2 * i, h, generator=generator) * 60
    w2 = torch.randn(e, h, i, generator=generator) * 60
    return to_fp8(w13.to(device)), to_fp8(w2.to(device))


def per_tensor_layer(e: int, h: int, i: int, device: torch.device, rank: int = 0, total: int = 0) -> Layer:
    """Static scales: `[E]` a weight, 0-d an input (the loader reduces it over experts)."""
    generator = torch.Generator().manual_seed(e + rank)
    w13, w2 = weights(e, h, i, device, rank)
    scale13 = (torch.rand(e, generator=generator) + 0.5).to(device) / 60 * h**-0.5
    scale2 = (torch.rand(e, generator=generator) + 0.5).to(device) / 60 * i**-0.5
    inputs = (torch.tensor(0.011, device=device), torch.tensor(0.0083, device=device))
    return Layer(w13, w2, scale13, scale2, rank, total or e, *inputs)


def block_layer(e: int, h: int, i: int, device: torch.device, rank: int = 0, total: int = 0) -> Layer:
    """128 x 128 block scales; the inner number of blocks padded to a multiple of 4 with zeros."""
    generator = torch.Generator().manual_seed(e + rank)
    w13, w2 = weights(e, h, i, device, rank + 7)

    def scales(rows: int, cols: int) -> torch.Tensor:
        plain = (torch.rand(e, rows // BLOCK, cols // BLOCK, generator=generator) + 0.5) / 60 * cols**-0.5
        width = -(-plain.shape[-1] // 4) * 4
        padded = plain.new_zeros((*plain.shape[:-1], width))
        padded[..., : plain.shape[-1]].copy_(plain)
        return padded.to(device)

    return Layer(w13, w2, scales(2 * i, h), scales(h, i), rank, total or e)


def routing(
    t: int, k: int, total: int, device: torch.device, padded: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Top-k weights and ids as they reach the runner: ids int64 -> int32, padded rows -1."""
    generator = torch.Generator().manual_seed(t)
    ids = torch.rand(t, total, generator=generator).argsort(-1)[:, :k]
    if padded:
        ids[t - padded :] = -1
    topk = torch.rand(t, k, generator=generator)
    return topk.to(device), ids.to(device)


def quantise_groups(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Per token and 128 columns, row-major scales: what SGLang's own kernel gives."""
    groups = x.float().unflatten(-1, (-1, BLOCK))
    scale = groups.abs().amax(-1).clamp_min(1e-10) / 448.0
    return to_fp8((groups / scale[..., None]).flatten(-2)), scale.contiguous()


def run(
    version: str, layer: Layer, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor,
    routed_scaling_factor: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """The body of SGLang's runner. 0.5.17 takes the rank from the layer, 0.5.23 from the runner's configuration."""
    rank = {"0.5.17": layer.rank, "0.5.23": int(layer.rank)}[version]
    topk_ids, topk_weights = topk_ids.to(torch.int32), topk_weights.to(torch.float32)
    if layer.w13_input_scale is None or layer.w2_input_scale is None:
        x_q, x_scale = quantise_groups(x)
        output = call(
            "fuse_moe_blockwise", x_q, x_scale, layer.w13, layer.w13_scale, layer.w2, layer.w2_scale, topk_ids,
            topk_weights, rank, layer.num_experts,
        )  # fmt: skip
    else:
        x_q = to_fp8(x.float() / layer.w13_input_scale)
        alphas = (layer.w13_scale * layer.w13_input_scale, layer.w2_scale * layer.w2_input_scale)
        output = call(
            "fuse_moe", x_q, layer.w13, layer.w2, *alphas, 1.0 / layer.w2_input_scale.reshape(1), topk_ids,
            topk_weights, rank, layer.num_experts,
        )  # fmt: skip
    if routed_scaling_factor is not None:
        output *= routed_scaling_factor
    return output


def bf16(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).double()


def expected(
    layer: Layer, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
) -> torch.Tensor:
    """Token by token and expert by expert in float64, rounded where the contract rounds."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    local, inter = layer.w13.shape[0], layer.w2.shape[2]
    blocks = layer.w13_input_scale is None
    x_q, x_scale = quantise_groups(x) if blocks else (to_fp8(x.float() / layer.w13_input_scale), None)
    for t in range(x.shape[0]):
        row = x_q[t].double()
        if blocks:
            row = row * x_scale[t].double().repeat_interleave(BLOCK)
        for k in range(topk_ids.shape[1]):
            e = int(topk_ids[t, k]) - layer.rank * local
            if not 0 <= e < local or float(topk_weights[t, k]) == 0:
                continue
            w13, w2 = layer.w13[e].double(), layer.w2[e].double()
            if blocks:
                w13 = w13 * blown_up(layer.w13_scale[e], w13)
                w2 = w2 * blown_up(layer.w2_scale[e], w2)
                h = bf16(w13 @ row)
                a = torch.nn.functional.silu(h[:inter]) * h[inter:]
                codes, scale = quantise_groups(a[None].float())
                a = codes[0].double() * scale[0].double().repeat_interleave(BLOCK)
                y = bf16(w2 @ a)
            else:
                h = bf16((w13 @ row) * (layer.w13_scale[e] * layer.w13_input_scale).double())
                a = bf16(bf16(torch.nn.functional.silu(h[:inter])) * h[inter:])
                a = to_fp8(a.float() * (1.0 / layer.w2_input_scale)).double()
                y = bf16((w2 @ a) * (layer.w2_scale[e] * layer.w2_input_scale).double())
            out[t] += topk_weights[t, k].double() * y
    return out


def blown_up(scale: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    rows = scale.double().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return rows[: like.shape[0], : like.shape[1]]


def hidden(t: int, h: int, device: torch.device) -> torch.Tensor:
    return torch.randn(t, h, generator=torch.Generator().manual_seed(100 + t)).to(device, torch.bfloat16)


LAYERS = {"per_tensor": per_tensor_layer, "block": block_layer}
# I = 192 is Hy3 on one of 8 ranks, and not a multiple of 128: per-tensor scales only, as in SGLang. H of 2 or 3 blocks
# leaves pad columns in the block scales.
INTER = {"per_tensor": 192, "block": 128}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", LAYERS)
def test_tokens_with_padded_rows(kind: str, version: str, device: torch.device) -> None:
    """Seven rows, the last two padding of a captured graph: ids -1 and whatever weights."""
    layer = LAYERS[kind](8, 256, INTER[kind], device)
    topk, ids = routing(7, 4, 8, device, padded=2)
    x = hidden(7, 256, device)
    given = [t.clone() for t in (x, topk, ids)]
    out = run(version, layer, x, topk, ids)
    assert out.dtype == torch.bfloat16 and out.shape == x.shape and out.is_contiguous()
    assert rms(out, expected(layer, x, topk, ids)) < RMS
    assert not out[5:].any(), "a padded row is zero"
    assert all(torch.equal(a, b) for a, b in zip(given, (x, topk, ids), strict=True))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", LAYERS)
def test_expert_parallel_ranks_add_up(kind: str, version: str, device: torch.device) -> None:
    """Ids stay global; each rank serves its own, and the ranks' outputs sum to the whole layer."""
    topk, ids = routing(9, 3, 8, device)
    x = hidden(9, 384, device)
    total = torch.zeros(9, 384, dtype=torch.float64, device=device)
    for rank in (0, 1):
        layer = LAYERS[kind](4, 384, INTER[kind], device, rank=rank, total=8)
        out = run(version, layer, x, topk, ids)
        want = expected(layer, x, topk, ids)
        assert rms(out, want) < RMS
        total += want
    assert float(total.abs().sum(-1).min()) > 0, "every token has an expert on some rank"


@pytest.mark.parametrize("kind", LAYERS)
def test_no_local_expert(kind: str, device: torch.device) -> None:
    layer = LAYERS[kind](2, 256, INTER[kind], device, rank=3, total=8)
    topk, ids = routing(5, 2, 4, device)
    assert not run("0.5.17", layer, hidden(5, 256, device), topk, ids).any()


@pytest.mark.parametrize("kind", LAYERS)
def test_no_tokens(kind: str, device: torch.device) -> None:
    """A data-parallel rank without tokens still calls the layer."""
    layer = LAYERS[kind](4, 256, INTER[kind], device)
    out = run("0.5.23", layer, hidden(0, 256, device), *routing(0, 2, 4, device), routed_scaling_factor=2.0)
    assert out.shape == (0, 256) and out.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", LAYERS)
def test_zero_experts_make_expert_0_hot(kind: str, device: torch.device) -> None:
    """LongCat's zero experts arrive as id 0 with weight 0: many, repeated in a row, and without effect."""
    layer = LAYERS[kind](8, 256, INTER[kind], device)
    topk, ids = routing(24, 6, 8, device)
    none = torch.rand(24, 6, generator=torch.Generator().manual_seed(5)).to(device) < 0.5
    topk, ids = topk.masked_fill(none, 0.0), ids.masked_fill(none, 0)
    x = hidden(24, 256, device)
    assert rms(run("0.5.17", layer, x, topk, ids), expected(layer, x, topk, ids)) < RMS


@pytest.mark.parametrize("kind", LAYERS)
def test_output_may_be_scaled_in_place(kind: str, device: torch.device) -> None:
    """`output *= routed_scaling_factor` must not reach another call's result or any buffer that is kept."""
    layer = LAYERS[kind](8, 256, INTER[kind], device)
    topk, ids = routing(6, 4, 8, device)
    x = hidden(6, 256, device)
    plain = run("0.5.17", layer, x, topk, ids)
    kept = plain.clone()
    scaled = run("0.5.17", layer, x, topk, ids, routed_scaling_factor=2.826)
    assert torch.equal(plain, kept), "the second call wrote into the first one's output"
    assert torch.equal(run("0.5.17", layer, x, topk, ids), kept), "equal inputs give equal bits"
    assert rms(scaled, expected(layer, x, topk, ids) * 2.826) < RMS


def test_pad_columns_of_block_scales_have_no_meaning(device: torch.device) -> None:
    """SGLang pads with zeros; garbage there must give the same bits."""
    layer = block_layer(4, 384, 128, device)
    topk, ids = routing(5, 2, 4, device)
    x = hidden(5, 384, device)
    clean = run("0.5.17", layer, x, topk, ids)
    layer.w13_scale[..., 3:] = float("nan")
    layer.w2_scale[..., 1:] = float("nan")
    assert torch.equal(run("0.5.17", layer, x, topk, ids), clean)


def test_hot_expert_alone(device: torch.device) -> None:
    """All tokens on one expert of one rank."""
    layer = per_tensor_layer(4, 256, 192, device)
    ids = torch.full((40, 2), 2, device=device)
    ids[:, 1] = -1
    topk = torch.rand(40, 2, generator=torch.Generator().manual_seed(8)).to(device)
    x = hidden(40, 256, device)
    assert layer.w13.dtype == FP8
    assert rms(run("0.5.23", layer, x, topk, ids), expected(layer, x, topk, ids)) < RMS
