"""Layer shapes from configurations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc.common.errors import InvalidArgument
from hpc.layer import model


def test_named_models() -> None:
    assert model.names() == ["hy3", "longcat-flash-lite", "qwen3-30b-a3b"]
    hy3 = model.load("hy3")
    assert (hy3.q_heads, hy3.kv_heads, hy3.experts, hy3.top_k, hy3.inter) == (64, 8, 192, 8, 1536)
    assert (hy3.scoring, hy3.bias, hy3.renormalize, hy3.routed_scaling) == ("sigmoid", True, True, 2.826)
    assert hy3.qk_norm and hy3.rope_theta == 11158840.0 and hy3.shared_inter == 1536 and not hy3.block_scales
    qwen = model.load("qwen3-30b-a3b")
    assert (qwen.q_heads, qwen.kv_heads, qwen.experts, qwen.inter) == (32, 4, 128, 768)
    assert (qwen.scoring, qwen.bias, qwen.renormalize, qwen.routed_scaling) == ("softmax", False, True, 1.0)
    assert qwen.qk_norm and qwen.block_scales and not qwen.shared_inter
    longcat = model.load("longcat-flash-lite")
    assert not longcat.has_attention and (longcat.experts, longcat.zero_experts, longcat.top_k) == (
        256,
        128,
        12,
    )
    assert (longcat.bias, longcat.renormalize, longcat.routed_scaling) == (True, False, 6.0)


def test_one_rank_of_eight() -> None:
    """What a rank of TP8 computes of Hy3."""
    rank = model.load("hy3", 8)
    assert (rank.q_heads, rank.kv_heads, rank.inter, rank.shared_inter) == (8, 1, 192, 192)
    assert model.load("hy3", 16).kv_heads == 1, "KV heads are repeated where there are fewer than ranks"


@pytest.mark.parametrize(("name", "tp"), [("hy3", 7), ("qwen3-30b-a3b", 4), ("nothing", 1)])
def test_what_cannot_be_is_refused(name: str, tp: int) -> None:
    """768 / 4 = 192 is no whole number of blocks."""
    with pytest.raises(InvalidArgument):
        model.load(name, tp)


def test_config_file_and_folder(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen3_moe", "hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2,
        "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "norm_topk_prob": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    for given in (tmp_path, tmp_path / "config.json"):
        shape = model.load(str(given))
        assert shape.head_dim == 128 and shape.rope_theta == 10000.0 and not shape.block_scales
        assert shape.name == tmp_path.name


@pytest.mark.parametrize("content", ["[]", "not json", '{"hidden_size": 8, "num_attention_heads": 1}'])
def test_other_files_are_refused(content: str, tmp_path: Path) -> None:
    """Also a dense model: it has no experts."""
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(InvalidArgument):
        model.load(str(tmp_path))


def test_small_layers_keep_the_rules() -> None:
    for name in model.names():
        shape = model.load(name)
        small = shape.small()
        assert small.top_k == shape.top_k < small.experts and small.head_dim == shape.head_dim
        assert small.scoring == shape.scoring and small.block_scales == shape.block_scales
        assert not shape.has_attention or small.q_heads // small.kv_heads == shape.q_heads // shape.kv_heads
        assert bool(small.zero_experts) == bool(shape.zero_experts)
