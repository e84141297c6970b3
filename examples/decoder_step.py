"""Decode steps of a small MoE model with every operator of the hot path, in a CUDA graph where there is a GPU.

    python examples/decoder_step.py            three steps, two layers, random weights
    python examples/decoder_step.py --steps 9

Each layer: norm, QKV, the attention prologue (QK-norm, rotary embedding, FP8, paged KV store), decode attention, output
projection, norm, router, fused MoE. The schedule of attention is made once a step, inside the graph. Without a GPU the
operators compute their references, so the program runs anywhere.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

import hpc

FP8 = torch.float8_e4m3fn
HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 256, 8, 1, 128
EXPERTS, TOP_K, INTER = 8, 2, 128
PAGE, PAGES = 64, 4  # tokens of a page, pages of a request


@dataclass
class Layer:
    """Weights, and the layer's KV cache."""

    qkv: torch.Tensor
    out: torch.Tensor
    qk_norm: torch.Tensor
    router: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    kcache: torch.Tensor
    vcache: torch.Tensor


class Model:
    """Static buffers of a batch, and the calls of a step on them."""

    def __init__(self, lens: list[int], num_layers: int, device: torch.device) -> None:
        batch = len(lens)
        generator = torch.Generator(device).manual_seed(0)

        def rand(*shape: int, scale: float = 0.05) -> torch.Tensor:
            return torch.randn(shape, device=device, generator=generator) * scale

        def cache() -> torch.Tensor:
            return torch.zeros(batch * PAGES, PAGE, KV_HEADS, HEAD_DIM, device=device).to(FP8)

        width = (HEADS + 2 * KV_HEADS) * HEAD_DIM

        def layer() -> Layer:
            return Layer(
                rand(width, HIDDEN).bfloat16(), rand(HIDDEN, HEADS * HEAD_DIM).bfloat16(),
                torch.ones(HEAD_DIM, device=device), rand(EXPERTS, HIDDEN),
                rand(EXPERTS, 2 * INTER, HIDDEN, scale=1.0).to(FP8), rand(EXPERTS, HIDDEN, INTER, scale=1.0).to(FP8),
                cache(), cache(),
            )  # fmt: skip

        self.layers = [layer() for _ in range(num_layers)]
        angle = torch.outer(
            torch.arange(PAGE * PAGES * 1.0), 1e4 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        )
        self.cos_sin = torch.cat((angle.cos(), angle.sin()), 1).to(device)
        self.hidden = rand(batch, HIDDEN, scale=1.0).bfloat16()
        self.lens = torch.tensor(lens, dtype=torch.int32, device=device)  # this step's token included
        self.q_index = torch.arange(batch + 1, dtype=torch.int32, device=device)  # one new token a request
        self.pages = torch.arange(batch * PAGES, dtype=torch.int32, device=device).view(batch, PAGES)
        self.kv_scale = torch.full((1,), 0.05, device=device)
        self.expert_scale = torch.full(
            (EXPERTS,), 0.05 * 0.02, device=device
        )  # of weights times of their input
        self.input_scale, self.act_scale = 0.02, torch.full((1,), 20.0, device=device)
        self.task_map = hpc.get_attention_decode_task_workspace(batch, PAGE * PAGES, KV_HEADS, device=device)

    def step(self) -> torch.Tensor:
        """Hidden states after all layers. Launches only: it can be captured."""
        hpc.assign_attention_decode_task(self.lens, self.task_map, KV_HEADS, mtp=1, new_kv_included=True)
        x = self.hidden
        for layer in self.layers:
            x = x + self.attention(layer, norm(x))
            x = x + self.experts(layer, norm(x))
        return x

    def attention(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        """Prologue and decode attention over the layer's FP8 cache."""
        q, q_scale, _ = hpc.rope_norm_store_kv_fp8(
            layer.kcache, layer.vcache, x @ layer.qkv.T, self.cos_sin, self.lens, self.q_index, self.pages,
            is_prefill=False, k_scale=self.kv_scale, v_scale=self.kv_scale, quant_policy=1,
            q_norm_weight=layer.qk_norm, k_norm_weight=layer.qk_norm, qk_norm_policy=2,
        )  # fmt: skip
        out = hpc.attention_decode_fp8(
            q, layer.kcache, layer.vcache, self.pages, self.lens, q_scale, self.kv_scale, self.kv_scale,
            new_kv_included=True, task_map=self.task_map,
        )  # fmt: skip
        return out.flatten(1) @ layer.out.T

    def experts(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        """Router and fused MoE."""
        weights, ids = hpc.router_topk(x, layer.router, TOP_K, scoring="sigmoid", renormalize=True)
        return hpc.fuse_moe(
            (x / self.input_scale).clamp(-448, 448).to(FP8), layer.w13, layer.w2, self.expert_scale, self.expert_scale,
            self.act_scale, ids, weights, rank_ep=0, num_expert_total=EXPERTS,
        )  # fmt: skip


def norm(x: torch.Tensor) -> torch.Tensor:
    """RMS norm with weight 1."""
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), eps=1e-6)


def main() -> None:
    """Run the steps and print the norm of the hidden states after each."""
    parser = argparse.ArgumentParser(description="Decode steps of a small random MoE model.")
    parser.add_argument("--steps", type=int, default=3)
    steps = parser.parse_args().steps
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Model([200, 65, 7, 1], num_layers=2, device=device)
    result = model.step()  # compiles
    graph = torch.cuda.CUDAGraph() if device.type == "cuda" else None
    if graph is not None:
        with torch.cuda.graph(graph):
            result = model.step()
    for number in range(steps):
        if graph is not None:
            graph.replay()
        else:
            result = model.step()
        print(
            f"step {number}: lengths {model.lens.tolist()}, norm of the hidden states {result.float().norm():.4f}"
        )
        model.lens.add_(1)  # a replay reads them anew
    assert torch.isfinite(result).all()


if __name__ == "__main__":
    main()
