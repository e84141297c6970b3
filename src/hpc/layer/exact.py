"""Float64 results of a step: stage by stage from the stage's own inputs, and the whole layer without any rounding."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hpc.attention.decode.reference import decode_reference
from hpc.layer.step import ACT_SCALE, X_SCALE, Step
from hpc.moe.reference import expand_blocks, moe_reference
from hpc.rope.reference import project, token_positions


def queries_and_rows(step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """Normed, rotated queries [requests, q heads, dim], and keys beside values [requests, 2 KV heads, dim]."""
    q, k, v = _projected(step, step.qkv)
    return q, torch.cat((k, v), 1)


def _projected(step: Step, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape, weights = step.shape, step.weights
    _, position, _ = token_positions(step.cache.seq_lens, step.q_index, len(step.lens))
    return project(
        qkv, weights.cos_sin, position, shape.kv_heads, shape.head_dim, shape.head_dim,
        q_norm_weight=weights.q_norm, k_norm_weight=weights.k_norm, qk_norm_policy=2 if shape.qk_norm else 0,
        eps=shape.eps,
    )  # fmt: skip


def stored_rows(step: Step) -> torch.Tensor:
    """What the prologue left in the caches for the new tokens, dequantised: as `queries_and_rows`."""
    last = step.cache.seq_lens.long() - 1
    page = step.cache.block_ids.gather(1, (last // step.cache.page_size)[:, None])[:, 0].long()
    parts = [
        cache.view(torch.uint8)[page, last % step.cache.page_size].view(cache.dtype)
        for cache in (step.cache.kcache, step.cache.vcache)
    ]
    return torch.cat(parts, 1).double() * step.kv_scale.double()


def attention(step: Step) -> torch.Tensor:
    """Decode attention of the stored codes."""
    cache = step.cache
    out, _ = decode_reference(
        step.q, cache.kcache, cache.vcache, cache.block_ids, cache.seq_lens, num_new_tokens=1, new_kv_included=True,
        qscale=step.q_scale, kscale=step.kv_scale, vscale=step.kv_scale, quant_type=1,
    )  # fmt: skip
    return out


def routing(step: Step) -> tuple[torch.Tensor, float]:
    """(weights of the experts that the step chose [requests, top_k], regret).

    Regret is what the choice loses: the k-th best of a token's scores less the worst chosen one, at most over all
    tokens. 0 where the choice is a right one; rounding may take one of two equals. Zero experts were chosen where an id
    is -1; which one is not told, so they count as the best of them.
    """
    shape, weights = step.shape, step.weights
    logits = step.y.double() @ weights.router_fp32.double().T
    scores = logits.sigmoid() if shape.scoring == "sigmoid" else logits.softmax(-1)
    choice = scores if weights.router_bias is None else scores + weights.router_bias.double()
    best = choice.topk(shape.top_k, -1)
    ids, zero = step.topk_ids.long(), step.topk_ids < 0
    picked = scores.gather(1, ids.clamp_min(0)).masked_fill(zero, 0)
    total = picked.sum(-1, keepdim=True)
    found = picked / total if shape.renormalize else picked
    worst = choice.gather(1, ids.clamp_min(0)).masked_fill(zero, torch.inf).amin(-1)
    regret = (best.values[:, -1] - worst).clamp_min(0).max()
    wrong_zeros = (best.indices >= shape.experts).sum(-1) != zero.sum(-1)
    return found * shape.routed_scaling, float("inf") if bool(wrong_zeros.any()) else float(regret)


def experts(step: Step) -> torch.Tensor:
    """The MoE with the roundings that its definition has."""
    weights, blocks = step.weights, step.shape.block_scales
    return moe_reference(
        step.y8, weights.w13, weights.w2, step.topk_ids, step.topk_weights, x_scale=step.x_scale if blocks else None,
        w13_scale=weights.w13_scale, w2_scale=weights.w2_scale, act_scale=None if blocks else step.act_scale,
        shared_output=step.shared,
    )  # fmt: skip


def whole_layer(step: Step) -> torch.Tensor:
    """The layer in float64, nothing rounded but weights and old cache rows, for the experts that were chosen."""
    shape, weights = step.shape, step.weights
    x = step.x.double()

    def norm(t: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(t, (t.shape[-1],), eps=shape.eps)

    h = x
    if shape.has_attention:
        h = x + _attention(step, norm(x) @ weights.qkv.double().T).flatten(1) @ weights.o.double().T
    y = norm(h)
    topk, _ = routing(step)
    out = torch.zeros_like(h)
    for token, row in enumerate(step.topk_ids.tolist()):
        for slot, expert in enumerate(row):
            if expert >= 0:
                out[token] += topk[token, slot] * _expert(step, expert, y[token])
    if weights.shared13 is not None and weights.shared2 is not None:
        gate, up = (y @ weights.shared13.double().T).chunk(2, -1)
        out += (F.silu(gate) * up) @ weights.shared2.double().T
    if step.zero_weight is not None:
        out += step.zero_weight.double()[:, None] * y
    return h + out


def _attention(step: Step, qkv: torch.Tensor) -> torch.Tensor:
    """Attention of exact queries and new rows over the old rows' codes; one request at a time."""
    shape, cache = step.shape, step.cache
    q, k, v = _projected(step, qkv)
    out = torch.zeros_like(q)
    group = shape.q_heads // shape.kv_heads
    for request, length in enumerate(step.lens):
        token = torch.arange(length, device=step.device)
        page = cache.block_ids[request, token // cache.page_size].long()
        keys, values = (
            part.view(torch.uint8)[page, token % cache.page_size].view(part.dtype).double()
            * step.kv_scale.double()
            for part in (cache.kcache, cache.vcache)
        )
        keys[-1], values[-1] = k[request], v[request]
        keys, values = (t.repeat_interleave(group, 1) for t in (keys, values))
        weight = (torch.einsum("hd,khd->hk", q[request], keys) * shape.head_dim**-0.5).softmax(-1)
        out[request] = torch.einsum("hk,khd->hd", weight, values)
    return out


def _expert(step: Step, expert: int, y: torch.Tensor) -> torch.Tensor:
    """One expert's output for one token, weights dequantised."""
    weights = step.weights
    w13, w2 = weights.w13[expert].double(), weights.w2[expert].double()
    if step.shape.block_scales:
        w13 = w13 * expand_blocks(weights.w13_scale[expert].double(), *w13.shape)
        w2 = w2 * expand_blocks(weights.w2_scale[expert].double(), *w2.shape)
    else:  # the scales of the inputs are folded into those of the weights
        w13 = w13 * (weights.w13_scale[expert].double() / X_SCALE)
        w2 = w2 * (weights.w2_scale[expert].double() / ACT_SCALE)
    gate, up = (w13 @ y).chunk(2)
    return w2 @ (F.silu(gate) * up)
