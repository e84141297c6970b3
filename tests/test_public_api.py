"""The public surface: what importing does, which names there are, their signatures and docstrings."""

from __future__ import annotations

import ast
import enum
import inspect
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import hpc

REQUIRED = inspect.Parameter.empty
ANY = object()  # a default that the test does not judge

# Parameters by the contract with SGLang, in order: name -> default.
DECODE_HEAD = {
    "q": REQUIRED,
    "kcache": REQUIRED,
    "vcache": REQUIRED,
    "block_ids": REQUIRED,
    "num_seq_kvcache": REQUIRED,
}
DECODE_TAIL = {"splitk": True, "task_map": None, "split_flag": None, "output": None}
PREFILL_TAIL = dict.fromkeys(("cu_seqlens_q", "block_ids", "seqlens_kvcache", "max_seqlens_q"), REQUIRED)
MOE_ROUTING = dict.fromkeys(("topk_ids", "topk_scale", "rank_ep", "num_expert_total"), REQUIRED)
MOE_TENSOR = {
    **dict.fromkeys(("x", "gate_up_weight", "down_weight", "gate_up_scale", "down_scale"), REQUIRED),
    "act_and_mul_scale": REQUIRED, **MOE_ROUTING, "use_bf16_mul": True, "shared_output": None,
}  # fmt: skip
MOE_BLOCK = {
    **dict.fromkeys(("x", "x_scale", "gate_up_weight", "gate_up_weight_scale", "down_weight"), REQUIRED),
    "down_weight_scale": REQUIRED, **MOE_ROUTING, "shared_output": None,
}  # fmt: skip
ROPE_HEAD = dict.fromkeys(
    (
        "key_cache",
        "value_cache",
        "qkv",
        "cos_sin",
        "num_seqlen_per_req",
        "q_index",
        "kvcache_indices",
        "is_prefill",
    ),
    REQUIRED,
)
ROPE_TAIL = {
    **dict.fromkeys(("q_norm_weight", "k_norm_weight", "out_q", "out_k", "out_v")), "qk_norm_policy": 0,
}  # fmt: skip
CONTRACT: dict[str, dict[str, object]] = {
    "attention_decode_bf16": {**DECODE_HEAD, "mtp": 0, "new_kv_included": False, **DECODE_TAIL},
    "attention_decode_fp8": {
        **DECODE_HEAD,
        "qscale": REQUIRED,
        "kscale": REQUIRED,
        "vscale": REQUIRED,
        "mtp": 0,
        "new_kv_included": False,
        "quant_type": ANY,
        **DECODE_TAIL,
    },
    "get_attention_decode_task_workspace": {
        "max_num_batch": REQUIRED,
        "max_seqlen": REQUIRED,
        "num_head_kv": REQUIRED,
        "min_process_len": 512,
    },
    "assign_attention_decode_task": {
        "num_seq_kvcache": REQUIRED,
        "task_map": REQUIRED,
        "num_head_kv": REQUIRED,
        "mtp": REQUIRED,
        "new_kv_included": REQUIRED,
        "min_process_len": 512,
    },
    "print_attention_decode_task": {"task_map": REQUIRED},
    "rope_norm_store_kv": {**ROPE_HEAD, **ROPE_TAIL},
    "rope_norm_store_kv_fp8": {
        **ROPE_HEAD,
        **dict.fromkeys(("k_scale", "v_scale", "quant_policy"), REQUIRED),
        "max_seqlens": 0,
        "upper_max": None,
        "q_scale_inv": None,
        **ROPE_TAIL,
    },
    "quantize_query_fp8": {
        "q": REQUIRED,
        "q_index": None,
        "max_seqlens": 0,
        "upper_max": None,
        "out_q": None,
    },
    "attention_prefill_bf16": {
        **dict.fromkeys(("q", "k", "v", "seqlens_q", "cu_seqlens_q", "max_seqlens_q"), REQUIRED),
        "output": None,
    },
    "attention_with_kvcache_prefill_bf16": {
        **dict.fromkeys(("q", "kcache", "vcache"), REQUIRED),
        **PREFILL_TAIL,
        "output": None,
    },
    "attention_with_kvcache_prefill_fp8": {
        **dict.fromkeys(("q", "kcache", "vcache", "qscale", "kscale", "vscale"), REQUIRED),
        **PREFILL_TAIL,
        "quant_type": ANY,
        "output": None,
    },
    "warmup": {"ops": None, "device": None, "progress": None},
    "fuse_moe": {**MOE_TENSOR, "output": None},
    "fuse_moe_pertensor_fp8": MOE_TENSOR,
    "fuse_moe_blockwise": {**MOE_BLOCK, "output": None},
    "fuse_moe_blockwise_fp8": MOE_BLOCK,
    "count_and_gather": dict.fromkeys(
        ("x", "topk_ids", "num_expert", "rank_ep", "intermediate_size", "num_seq_per_group_avg"), REQUIRED
    ),
    "reduce": {"x": REQUIRED, "topk_pos": REQUIRED, "topk_scale": REQUIRED, "shared_output": None},
}

# Ours, keyword-only.
DECODE_EXTRA = {"softmax_scale": None, "window": None, "logit_cap": None, "sinks": None, "return_lse": False}

FUNCTIONS = sorted([*CONTRACT, "get_attention_decode_scratch_size"])


def run_python(code: str, environ: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- importing --------------------------------------------------------------------------------------


def test_import_is_free_of_side_effects(clean_environ: dict[str, str]) -> None:
    """No torch, no Triton, no CUDA context; versions can be read."""
    code = (
        "import sys, hpc\n"
        "assert 'triton' not in sys.modules and 'torch' not in sys.modules\n"
        "print(hpc.__version__)\n"
        "dir(hpc)\n"
        "assert 'triton' not in sys.modules\n"
        "import torch\n"
        "hpc.attention, hpc.QuantType\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    assert run_python(code, clean_environ).strip() == hpc.__version__


def test_public_names_load_without_a_context(clean_environ: dict[str, str]) -> None:
    """Loading every public function neither imports Triton nor touches a GPU."""
    code = (
        "import sys, hpc\n"
        "for name in hpc.__all__: getattr(hpc, name)\n"
        "import torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert 'triton' not in sys.modules, 'loading public names imported triton'\n"
    )
    run_python(code, clean_environ)


def test_import_with_no_visible_gpu(clean_environ: dict[str, str]) -> None:
    code = "import hpc; hpc.attention_decode_bf16; print(hpc.__version__, hpc.__built_json__)"
    assert hpc.__version__ in run_python(code, {**clean_environ, "CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.parametrize(("distribution", "version"), [("torch", "2.7.1"), ("triton", "3.2.0")])
def test_unsupported_version_gives_a_plain_message(
    distribution: str, version: str, clean_environ: dict[str, str]
) -> None:
    """`import hpc` works and shows its version; the first operator names what is needed and found."""
    code = (
        "from importlib import metadata\n"
        "real = metadata.version\n"
        f"metadata.version = lambda name: {version!r} if name == {distribution!r} else real(name)\n"
        "import hpc\n"
        "print(hpc.__version__)\n"
        "try:\n"
        "    hpc.attention_decode_bf16\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    said = run_python(code, clean_environ)
    assert hpc.__version__ in said
    assert f"found {distribution} {version}" in said
    assert f"pip install '{distribution}>=" in said


# --- names ------------------------------------------------------------------------------------------


def test_all_names_resolve_and_are_listed() -> None:
    for name in hpc.__all__:
        assert getattr(hpc, name) is not None
        assert name in dir(hpc)
    assert len(set(hpc.__all__)) == len(hpc.__all__)


def test_table_all_and_type_checking_imports_agree() -> None:
    """One table decides at run time; the names that type checkers see must be the same."""
    for module in (hpc, hpc.attention, hpc.moe, hpc.rope):
        table = set(module._PUBLIC)
        assert {name for name in module.__all__ if not name.startswith("__")} == table
        tree = ast.parse(Path(inspect.getfile(module)).read_text())
        guarded = next(node for node in tree.body if isinstance(node, ast.If))
        imported = {
            alias.name for node in guarded.body if isinstance(node, ast.ImportFrom) for alias in node.names
        }
        assert imported == table


def test_attention_stays_a_module_with_the_same_functions() -> None:
    assert isinstance(hpc.attention, ModuleType)
    for name in hpc.attention.__all__:
        assert getattr(hpc.attention, name) is getattr(hpc, name)


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'attention_decode_fp4'"):
        _ = hpc.attention_decode_fp4
    assert not hasattr(hpc.attention, "attention_decode_fp4")


@pytest.mark.parametrize("name", ["fuse_ihc_pre", "fuse_ihc_post", "fuse_ihc_post_pre", "fuse_ihc_head"])
def test_names_that_switch_engine_paths_are_absent(name: str) -> None:
    """SGLang changes its path as soon as these exist, so a stub would break it."""
    assert not hasattr(hpc, name)


def test_quant_type() -> None:
    assert issubclass(hpc.QuantType, enum.Enum)
    assert {member.name: member.value for member in hpc.QuantType} == {
        "QPERTOKEN_PERHEAD_KPERTOKEN_PERHEAD_VPERHEAD": 0,
        "QPERTOKEN_PERHEAD_KPERTENSOR_VPERTENSOR": 1,
        "QPERTENSOR_KPERTENSOR_VPERTENSOR": 2,
        "QPERTOKEN_PERHEAD_KPERTOKEN_PERHEAD_VPERHEAD_QKHADAMARD": 3,
    }


def test_version_strings() -> None:
    assert isinstance(hpc.__version__, str)
    assert hpc.__version__[0].isdigit()
    facts = json.loads(hpc.__built_json__)
    assert facts["version"] == hpc.__version__
    assert {"git-hash", "nvcc", "_C", "torch", "triton"} <= set(facts)


# --- signatures and docstrings ----------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(CONTRACT))
def test_signature_follows_the_contract(name: str) -> None:
    function = getattr(hpc, name)
    assert inspect.isfunction(function), "engines read signatures of plain functions"
    parameters = list(inspect.signature(function).parameters.values())
    contract = CONTRACT[name]
    head, extra = parameters[: len(contract)], parameters[len(contract) :]
    assert [p.name for p in head] == list(contract)
    for parameter in head:
        assert parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        if contract[parameter.name] is not ANY:
            assert parameter.default == contract[parameter.name] or (
                parameter.default is contract[parameter.name]
            ), parameter.name
    for parameter in extra:
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY, f"{parameter.name} must be keyword-only"
        assert parameter.default is not REQUIRED, f"{parameter.name} needs a default"


@pytest.mark.parametrize("name", ["attention_decode_bf16", "attention_decode_fp8"])
def test_decode_keyword_only_arguments(name: str) -> None:
    parameters = inspect.signature(getattr(hpc, name)).parameters
    for argument, default in DECODE_EXTRA.items():
        assert parameters[argument].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[argument].default == default


def test_default_quant_type_is_what_sglang_passes() -> None:
    default = inspect.signature(hpc.attention_decode_fp8).parameters["quant_type"].default
    assert getattr(default, "value", default) == 1


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstring_is_complete(name: str) -> None:
    """Every argument is named; shapes, errors and the source of the method are stated."""
    function = getattr(hpc, name)
    text = inspect.getdoc(function)
    assert text, "no docstring"
    for section in ("Args:", "Raises:", "Source:"):
        assert section in text, f"{name}: docstring lacks {section}"
    documented = text[text.index("Args:") :]
    missing = [p for p in inspect.signature(function).parameters if p not in documented]
    assert not missing, f"{name}: Args does not name {missing}"
    if "attention" in name and "size" not in name:
        assert "[" in text, f"{name}: docstring states no shape"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_everything_is_annotated(name: str) -> None:
    signature = inspect.signature(getattr(hpc, name))
    bare = [p.name for p in signature.parameters.values() if p.annotation is REQUIRED]
    assert not bare
    assert signature.return_annotation is not REQUIRED
