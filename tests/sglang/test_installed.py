"""Where SGLang is installed: its own backends on this package, and this package's plugin in its plugin loader.

Without a GPU the operators compute their reference, SGLang's Triton kernels run in Triton's interpreter, and what it
asks of the device (capability, its own quantisation kernels) is answered by the tests.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_standins import KVPool, RadixAttention, batch_of, check, draw, expected, runner
from sglang_support import CALL_SITES, FP8, HEAD_DIM, VERSIONS, CallSite, Pool, attend_pool, need, rms, to_fp8

import hpc

pytestmark = pytest.mark.sglang
QUERY_OPS = ("rope_norm_store_kv_fp8", "quantize_query_fp8")
PREFILL_OPS = ("attention_with_kvcache_prefill_bf16", "attention_with_kvcache_prefill_fp8")


def version() -> str:
    found = importlib.metadata.version("sglang")
    if found not in VERSIONS:
        pytest.skip(f"SGLang {found} is not one of {', '.join(VERSIONS)}")
    return found


def source(site: CallSite) -> Path:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / site.files[VERSIONS.index(version())]


@pytest.mark.parametrize("site", CALL_SITES, ids=lambda site: site.function)
def test_table_says_what_sglang_calls(site: CallSite) -> None:
    """Every `hpc.<function>(...)` in SGLang's source has the arguments of the table that the other tests go by."""
    found = []
    for node in ast.walk(ast.parse(source(site).read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == f"hpc.{site.function}":
            names = [keyword.arg for keyword in node.keywords]
            found.append((len(node.args), tuple(n for n in names if n), None in names))
    assert found == [(site.positional, site.keywords, site.splat)]


def test_table_is_complete() -> None:
    """No other function of this package is called in those files."""
    known = {site.function for site in CALL_SITES}
    for path in {source(site) for site in CALL_SITES}:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("hpc."):
                assert ast.unparse(node.func).removeprefix("hpc.") in known


# --- hpc_ops attention --------------------------------------------------------------------------------


@pytest.fixture
def backend_module(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Any:
    module = importlib.import_module("sglang.srt.layers.attention.hpc_ops_backend")
    if device.type == "cpu":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    if hasattr(module, "get_parallel"):
        monkeypatch.setattr(module, "get_parallel", lambda: types.SimpleNamespace(tp_size=1))
    return module


def hpc_ops(module: Any, pool: Pool, layer: RadixAttention) -> Any:
    """SGLang's backend on a runner with the attributes that it reads."""
    config = types.SimpleNamespace(
        num_attention_heads=layer.tp_q_head_num, get_num_kv_heads=lambda _: layer.tp_k_head_num, head_dim=HEAD_DIM,
        context_len=pool.context_len, is_encoder_decoder=False,
    )  # fmt: skip
    return module.HPCOpsAttnBackend(
        runner(
            pool, [layer], model_config=config, device=pool.device, ps=types.SimpleNamespace(tp_size=1),
            spec_algorithm=types.SimpleNamespace(is_speculative=lambda: False),
        )
    )  # fmt: skip


def forward_mode() -> Any:
    return importlib.import_module("sglang.srt.model_executor.forward_batch_info").ForwardMode


def test_sglang_sees_the_package(backend_module: Any) -> None:
    assert backend_module.has_hpc_ops() and backend_module._bf16_decode_supports_task_map()


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph_halves"])
def test_hpc_ops_decode(graph: bool, backend_module: Any, device: torch.device) -> None:
    """SGLang's own page-table kernels and schedule calls, then its decode call; with graphs, two padded rows."""
    layer = RadixAttention((8, 2), HEAD_DIM)
    pool = Pool((200, 65), 2, torch.bfloat16, device)
    pool.fill(fresh=[1, 1])
    backend = hpc_ops(backend_module, pool, layer)
    batch = batch_of(pool, forward_mode().DECODE, [1, 1], pad_to=4 if graph else 0)
    if graph:
        backend.init_cuda_graph_state(4, 4)
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        backend.init_forward_metadata_in_graph(batch)
        assert backend.forward_metadata.hpc_task_map is not None
    else:
        backend.init_forward_metadata(batch)
    q, k, v = draw(batch.batch_size, layer, device)
    out = backend.forward(q, k, v, layer, batch)
    check(out[:2], expected(pool, q[:2], [1, 1], layer), False)


def test_hpc_ops_extend(backend_module: Any, device: torch.device) -> None:
    need(*PREFILL_OPS)
    layer = RadixAttention((8, 2), HEAD_DIM)
    pool, fresh = Pool((60, 200, 90), 2, torch.bfloat16, device), [60, 70, 1]
    pool.fill(fresh=fresh)
    backend = hpc_ops(backend_module, pool, layer)
    batch = batch_of(pool, forward_mode().MIXED, fresh)
    backend.init_forward_metadata(batch)
    q, k, v = draw(sum(fresh), layer, device)
    check(backend.forward(q, k, v, layer, batch), expected(pool, q, fresh, layer), False)


@pytest.mark.parametrize("mode", ["DECODE", "EXTEND"])
def test_hpc_ops_fp8_through_the_prologue(mode: str, backend_module: Any, device: torch.device) -> None:
    """`fused_qk_rope_store_kv_fp8` as HunYuan V3 calls it, then attention on the scales that it leaves behind."""
    need(*QUERY_OPS, *(PREFILL_OPS if mode == "EXTEND" else ()))
    fresh = [1, 1] if mode == "DECODE" else [65, 40]
    layer = RadixAttention((8, 1), HEAD_DIM)
    layer.k_scale, layer.v_scale = (torch.tensor(value, device=device) for value in (0.02, 0.03))
    pool = Pool((200, 65), 1, FP8, device)
    pool.fill(fresh=fresh, std=30.0)
    backend = hpc_ops(backend_module, pool, layer)
    batch = batch_of(pool, getattr(forward_mode(), mode), fresh)
    backend.init_forward_metadata(batch)
    generator = torch.Generator().manual_seed(4)
    qkv = torch.randn(sum(fresh), 10 * HEAD_DIM, generator=generator).to(device, torch.bfloat16)
    angles = torch.outer(torch.arange(512.0), 10000.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))
    q = backend.fused_qk_rope_store_kv_fp8(
        layer=layer, forward_batch=batch, qkv=qkv, cos_sin_cache=torch.cat((angles.cos(), angles.sin()), -1).to(device),
        q_norm_weight=torch.ones(HEAD_DIM, device=device), k_norm_weight=torch.ones(HEAD_DIM, device=device),
        qk_norm_policy=2,
    )  # fmt: skip
    scale = backend.forward_metadata.hpc_q_scale
    by_token = scale if mode == "DECODE" else torch.cat([scale[b, :, :n].T for b, n in enumerate(fresh)])
    out = backend.forward(q.view(-1, 8 * HEAD_DIM), None, None, layer, batch, save_kv_cache=False)
    real = q.float() * by_token[..., None]
    assert out.dtype == torch.bfloat16
    # the prefill kernel of SM90 rounds probabilities to e4m3; everything else keeps 16 bits
    rounded = mode == "EXTEND" and device.type == "cuda"
    assert rms(out, attend_pool(pool, real, fresh, 0.02, 0.03).flatten(1)) < (3.2e-2 if rounded else 6e-3)


# --- hpc_ops MoE and router ---------------------------------------------------------------------------


def moe_call(kind: str, device: torch.device) -> tuple[tuple[Any, Any, Any], torch.Tensor]:
    """(dispatch output, payload that `Fp8MoEMethod` makes, configuration) of rank 1 of 2, and float64's answer."""
    import test_moe_calls as moe

    module = importlib.import_module("sglang.srt.layers.moe.moe_runner.hpc_ops")
    layer = moe.LAYERS[kind](4, 256, moe.INTER[kind], device, rank=1, total=8)
    common = {"w13_weight": layer.w13, "w2_weight": layer.w2, "global_num_experts": 8}
    if version() == "0.5.17":
        common["moe_ep_rank"] = 1
    if kind == "block":
        pad = module.pad_hpc_ops_block_scale
        scales = (layer.w13_scale[..., :2], layer.w2_scale[..., :1])
        info = module.HpcOpsMoeQuantInfo(
            **common, block_quant=True, w13_weight_scale_inv=pad(scales[0]), w2_weight_scale_inv=pad(scales[1]),
            block_shape=[128, 128],
        )  # fmt: skip
    else:
        info = module.HpcOpsMoeQuantInfo(
            **common, block_quant=False, gate_up_alphas=layer.w13_scale * layer.w13_input_scale,
            down_alphas=layer.w2_scale * layer.w2_input_scale, w13_input_scale=layer.w13_input_scale,
            w2_input_scale=layer.w2_input_scale,
        )  # fmt: skip
    config = types.SimpleNamespace(
        activation="silu", is_gated=True, num_fused_shared_experts=0, apply_router_weight_on_input=False,
        no_combine=False, gemm1_alpha=None, gemm1_clamp_limit=None, swiglu_limit=None, routed_scaling_factor=2.5,
        moe_ep_rank=1,
    )  # fmt: skip
    topk, ids = moe.routing(7, 4, 8, device, padded=2)
    x = moe.hidden(7, 256, device)
    dispatch = types.SimpleNamespace(hidden_states=x, topk_output=(topk, ids, None))
    return (dispatch, info, config), moe.expected(layer, x, topk, ids) * 2.5


@pytest.mark.parametrize("kind", ["per_tensor", "block"])
def test_hpc_ops_moe_runner(kind: str, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """`fused_experts_none_to_hpc_ops`, routed scaling included."""
    import test_moe_calls as moe

    need("fuse_moe", "fuse_moe_blockwise")
    module = importlib.import_module("sglang.srt.layers.moe.moe_runner.hpc_ops")
    kernels = importlib.import_module("sglang.kernels.ops.quantization.fp8_kernel")
    if device.type == "cpu":
        monkeypatch.setattr(kernels, "sglang_per_token_group_quant_fp8", lambda x, _: moe.quantise_groups(x))
        quant = lambda x, scale: (to_fp8(x.float() / scale), scale)  # noqa: E731
        monkeypatch.setattr(kernels, "scaled_fp8_quant", quant, raising=False)
    arguments, want = moe_call(kind, device)
    out = module.fused_experts_none_to_hpc_ops(*arguments).hidden_states
    assert rms(out, want) < moe.RMS


@pytest.mark.parametrize("kind", ["per_tensor", "block"])
def test_moe_plugin_through_the_runners_pool(
    kind: str, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """`hpc_moe`: nothing unless named; then the pool hands out one call that quantises and scales inside."""
    import test_moe_calls as moe

    from hpc.integrations import sglang_moe

    need("fuse_moe", "fuse_moe_blockwise")
    module = importlib.import_module("sglang.srt.layers.moe.moe_runner.hpc_ops")
    base = importlib.import_module("sglang.srt.layers.moe.moe_runner.base")
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry
    monkeypatch.setattr(hooks, "_hooks", type(hooks._hooks)(list))
    monkeypatch.setattr(hooks, "_patched", set())
    monkeypatch.setattr(base.FusedOpPool, "get_fused_func", base.FusedOpPool.__dict__["get_fused_func"])
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    for names, want in (
        ("", module.fused_experts_none_to_hpc_ops),
        ("hpc, hpc_moe", sglang_moe.fused_experts),
    ):
        if names:
            monkeypatch.setenv("SGLANG_PLUGINS", names)
        sglang_moe.register()
        hooks.apply_hooks()
        assert base.FusedOpPool.get_fused_func("none", "hpc_ops") is want
    assert base.FusedOpPool.get_fused_func("none", "no_such_runner") is None
    arguments, expected_output = moe_call(kind, device)
    out = sglang_moe.fused_experts(*arguments).hidden_states
    assert out.dtype == torch.bfloat16 and rms(out, expected_output) < moe.RMS
    arguments[2].swiglu_limit = 7.0
    with pytest.raises(ValueError, match="swiglu_limit"):
        sglang_moe.fused_experts(*arguments)


def test_triton_experts_without_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """`hpc bench` calls SGLang's Triton experts by themselves: options and group that they read are there."""
    from hpc.bench.rivals import moe

    parallel = importlib.import_module("sglang.srt.distributed.parallel_state")
    monkeypatch.setattr(parallel, "_TP", None)
    context = importlib.import_module("sglang.srt.runtime_context").get_context()
    for name in ("_server_args", "_config_bags"):
        if hasattr(context, name):
            monkeypatch.setattr(context, name, None)
    for _ in range(2):
        moe.without_a_server()
    fused = importlib.import_module(moe.SGLANG)
    if version() == "0.5.17":
        group = parallel.get_tp_group()
        assert group.world_size == 1
        with fused.use_symmetric_memory(group, disabled=not fused.is_allocation_symmetric()):
            pass
    monkeypatch.setattr(
        importlib.import_module(f"{moe.SGLANG}_triton_config"), "get_device_name", lambda: "NVIDIA H200"
    )
    shapes = ((8, 512, 256), (8, 256, 256))
    config, *_ = fused.try_get_optimal_moe_config(*shapes, 2, "fp8_w8a8", 4, return_down_config=True)
    assert config["BLOCK_SIZE_M"] > 0


def test_deepgemm_runner_takes_what_the_bench_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """`hpc bench` runs SGLang's DeepGEMM runner: its own objects, and rows that a routing leaves open at the end."""
    from hpc.bench.rivals import moe
    from hpc.moe import cases

    if version() != "0.5.17":
        pytest.skip("the rival is SGLang 0.5.17's")
    library = types.ModuleType("deep_gemm")
    library.get_pdl, library.set_pdl = lambda: False, lambda value: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deep_gemm", library)
    runner = importlib.import_module(f"{moe.SGLANG_MOE}.moe_runner.deep_gemm")
    base = importlib.import_module(f"{moe.SGLANG_MOE}.moe_runner.base")
    given: list[Any] = []

    def pre_permute(*arguments: Any) -> None:
        given.extend(arguments)
        raise InterruptedError

    key = ("standard", "deep_gemm")
    assert base.PermuteMethodPool.get_pre_permute(*key) is runner.pre_permute_standard_to_deep_gemm
    assert base.PermuteMethodPool.get_post_permute(*key[::-1]) is runner.post_permute_deep_gemm_to_standard
    monkeypatch.setitem(base.PermuteMethodPool._pre_permute_methods, key, pre_permute)
    inputs = cases.make_inputs(cases.MoeCase(40, 6, 256, 128, top_k=3, block=True), "cpu", seed=1)
    call = moe.sglang_deepgemm(cases.rival_inputs(inputs))
    with pytest.raises(InterruptedError):
        call()
    dispatched, weights, config, state = given
    assert isinstance(weights, runner.DeepGemmMoeQuantInfo) and not weights.use_mxfp8 and state == {}
    assert not runner._should_use_masked_standard_layout(config) and not config.inplace
    assert dispatched.topk_output.topk_ids is inputs.topk_ids
    assert runner._get_compact_all_tokens(120, 6) == 6 * 128
    compiling = importlib.import_module(f"{moe.SGLANG_DEEPGEMM}.compile_utils")
    assert not compiling._DO_COMPILE_ALL


def test_router_gemm(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """`linear_bf16_fp32` with LongCat's threshold: its split, its cache on the weight, its call."""
    need("gemm_bf16xfp32")
    path = CALL_SITES[-1].files[VERSIONS.index(version())].removesuffix(".py").replace("/", ".")
    module = importlib.import_module(f"sglang.{path}")
    monkeypatch.setattr(module, "_hpc_gemm_enabled", True)
    if device.type == "cpu":
        monkeypatch.setattr(module, "_can_use_hpc_gemm_bf16xfp32", lambda x, y, min_m: x.shape[0] >= min_m)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(128, 1536, generator=generator).to(device, torch.bfloat16)
    weight = (torch.randn(384, 1536, generator=generator) * 0.02).to(device)
    for _ in range(2):
        out = module.linear_bf16_fp32(x, weight, hpc_kernel_min_m=128)
        assert out.dtype == torch.float32 and rms(out, x.double() @ weight.double().T) < 2e-5


# --- the plugin ---------------------------------------------------------------------------------------


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """SGLang's loader has run with this package's entry point found as an installed one."""
    info = tmp_path / "hpc-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hpc-under-test\nVersion: 0\n")
    text = "[sglang.srt.plugins]\nhpc_under_test = hpc.integrations.sglang:register\n"
    (info / "entry_points.txt").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins = importlib.import_module("sglang.srt.plugins")
    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    plugins.load_plugins()
    return plugins


def test_loader_makes_the_backend_known(loaded: Any) -> None:
    """`--attention-backend hpc` parses, and the registry makes it."""
    arguments = importlib.import_module("sglang.srt.server_args")
    parser = argparse.ArgumentParser()
    arguments.ServerArgs.add_cli_args(parser)
    parsed = parser.parse_args(["--model-path", "model", "--attention-backend", "hpc", "--page-size", "64"])
    assert parsed.attention_backend == "hpc"
    registry = importlib.import_module("sglang.srt.layers.attention.attention_registry")
    assert registry.ATTENTION_BACKENDS["hpc"].__module__ == "hpc.integrations.sglang"


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("mode", ["DECODE", "TARGET_VERIFY", "MIXED"])
def test_plugin_under_sglangs_base_class(mode: str, fp8: bool, loaded: Any, device: torch.device) -> None:
    """SGLang's `AttentionBackend.forward`, `ForwardMode` and `KVWriteLoc`; heads that hpc_ops refuses."""
    need("quantize_query_fp8", *(PREFILL_OPS if mode == "MIXED" else ()))
    fresh = {"DECODE": [1, 1], "TARGET_VERIFY": [4, 4], "MIXED": [70, 1]}[mode]
    registry = importlib.import_module("sglang.srt.layers.attention.attention_registry")
    base = importlib.import_module("sglang.srt.layers.attention.base_attn_backend")
    pool = Pool((200, 65), 1, FP8 if fp8 else torch.bfloat16, device, head_dim=64, page=16)
    pool.fill(fresh=fresh)
    layer = RadixAttention((12, 1), 64)
    backend = registry.ATTENTION_BACKENDS["hpc"](runner(pool, [layer], KVPool(pool)))
    assert isinstance(backend, base.AttentionBackend)
    batch = batch_of(pool, getattr(forward_mode(), mode), fresh)
    backend.init_forward_metadata(batch)
    q, k, v = draw(sum(fresh), layer, device)
    check(backend.forward(q, k, v, layer, batch), expected(pool, q, fresh, layer), fp8)
    assert hpc.__version__


def test_pools_through_the_forward_context(loaded: Any, device: torch.device) -> None:
    """Models take the pools from the backend of the running pass, to store K and V in their rotary kernel."""
    context = importlib.import_module("sglang.srt.model_executor.forward_context")
    registry = importlib.import_module("sglang.srt.layers.attention.attention_registry")
    pool = Pool((200, 65), 1, torch.bfloat16, device)
    model_runner = runner(pool, [RadixAttention((4, 1), HEAD_DIM)])
    backend = registry.ATTENTION_BACKENDS["hpc"](model_runner)
    with context.forward_context(context.ForwardContext(attn_backend=backend)):
        assert context.get_token_to_kv_pool() is model_runner.token_to_kv_pool
        assert context.get_req_to_token_pool() is model_runner.req_to_token_pool


class Served:
    """Two requests served over several steps from SGLang's own pools and request table, with all K and V remembered."""

    PAGE, CONTEXT, WINDOW = 16, 256, 30

    def __init__(self, hybrid: bool, fp8: bool, device: torch.device) -> None:
        memory = importlib.import_module("sglang.srt.mem_cache.memory_pool")
        radix = importlib.import_module("sglang.srt.layers.radix_attention")
        self.device, self.fp8 = device, fp8
        window = self.WINDOW - 1  # SGLang counts earlier tokens
        self.layers = [
            radix.RadixAttention(6, 64, 0.1, 2, 0),
            radix.RadixAttention(6, 64, 0.1, 2, 1, sliding_window_size=window, logit_cap=20.0),
        ]
        common = {
            "page_size": self.PAGE,
            "dtype": FP8 if fp8 else torch.bfloat16,
            "head_num": 2,
            "head_dim": 64,
        }
        common |= {"device": str(device)}
        if hybrid:
            pools = importlib.import_module("sglang.srt.mem_cache.swa_memory_pool")
            self.pool = pools.SWAKVPool(
                size=1024, size_swa=1024, swa_attention_layer_ids=[1], full_attention_layer_ids=[0], **common
            )
            mapping = torch.full((1024 + self.PAGE + 1,), -1, dtype=torch.int64)
            order = torch.randperm(64, generator=torch.Generator().manual_seed(1)) + 1
            slots = torch.arange(1024).view(64, self.PAGE) + self.PAGE
            mapping[slots] = order[:, None] * self.PAGE + torch.arange(self.PAGE)
            self.pool.register_mapping(mapping.to(device))
        else:
            self.pool = memory.MHATokenToKVPool(size=1024, layer_num=2, enable_memory_saver=False, **common)
        self.requests = memory.ReqToTokenPool(
            size=4, max_context_len=self.CONTEXT, device=str(device), enable_memory_saver=False
        )
        self.rows = torch.tensor([3, 1], device=device)
        pages = torch.randperm(60, generator=torch.Generator().manual_seed(2)) + 1
        for index, row in enumerate(self.rows.tolist()):
            mine = pages[index * 16 : index * 16 + 16, None] * self.PAGE + torch.arange(self.PAGE)
            self.requests.req_to_token[row] = mine.flatten().to(torch.int32).to(device)
        self.lens = [0, 0]
        self.past: dict[tuple[int, int], list[torch.Tensor]] = {}
        self.backend = self.make_backend()

    def make_backend(self) -> Any:
        registry = importlib.import_module("sglang.srt.layers.attention.attention_registry")
        return registry.ATTENTION_BACKENDS["hpc"](
            types.SimpleNamespace(
                use_mla_backend=False, model_config=types.SimpleNamespace(is_encoder_decoder=False),
                token_to_kv_pool=self.pool, page_size=self.PAGE, dtype=torch.bfloat16,
                kv_cache_dtype=FP8 if self.fp8 else torch.bfloat16, is_draft_worker=False,
                req_to_token_pool=self.requests, model=torch.nn.ModuleList(self.layers),
            )
        )  # fmt: skip

    def step(self, mode: Any, fresh: list[int], graph: bool = False, algorithm: str = "STANDALONE") -> None:
        """One step of `fresh[b]` tokens a request; both layers against attention over what was remembered."""
        before = list(self.lens)
        self.lens = [length + new for length, new in zip(self.lens, fresh, strict=True)]
        table = self.requests.req_to_token
        slots = [table[row, a:b] for row, a, b in zip(self.rows.tolist(), before, self.lens, strict=True)]
        verify = mode.is_target_verify()
        batch = types.SimpleNamespace(
            forward_mode=mode, batch_size=2, seq_lens=torch.tensor(before if verify else self.lens, device=self.device),
            req_pool_indices=self.rows, out_cache_loc=torch.cat(slots).long(),
            extend_seq_lens=torch.tensor(fresh, device=self.device), extend_seq_lens_cpu=fresh,
            spec_info=verify_input(algorithm, fresh[0]) if verify else None,
        )  # fmt: skip
        if graph:
            self.backend.init_forward_metadata_out_graph(batch, in_capture=True)
            self.backend.init_forward_metadata_in_graph(batch)
        else:
            self.backend.init_forward_metadata(batch)
        for layer in self.layers:
            q, k, v = draw(sum(fresh), layer, self.device, seed=sum(self.lens) + layer.layer_id)
            stored = [to_fp8(t).float() if self.fp8 else t.float() for t in (k, v)]
            out = self.backend.forward(q, k, v, layer, batch)
            self.compare(layer, q, out, stored, fresh)

    def compare(self, layer: Any, q: torch.Tensor, out: torch.Tensor, stored: Any, fresh: list[int]) -> None:
        window = self.WINDOW if layer.layer_id else None
        at = 0
        for request, count in enumerate(fresh):
            rows = slice(at, at + count)
            known = self.past.setdefault((layer.layer_id, request), [stored[0][:0], stored[1][:0]])
            known[:] = [torch.cat((old, new[rows])) for old, new in zip(known, stored, strict=True)]
            queries = q[rows].view(count, layer.tp_q_head_num, -1)
            want = capped_attention(queries, *known, layer.scaling, window, layer.logit_cap)
            check(out[rows], want.flatten(1), self.fp8)
            at += count


def verify_input(algorithm: str, rows: int) -> Any:
    """SGLang's description of a verification: a chain, or n-grams of one draft, which it calls an irregular tree."""
    if algorithm == "NGRAM":
        ngram = importlib.import_module("sglang.srt.speculative.ngram_info")
        found = ngram.NgramVerifyInput(
            custom_mask=torch.ones(rows * rows, dtype=torch.bool), draft_token_num=rows
        )
        assert found.tree_topk != 1
        return found
    verify = importlib.import_module("sglang.srt.speculative.eagle_info").EagleVerifyInput
    values = {
        field.name: None for field in dataclasses.fields(verify) if field.default is dataclasses.MISSING
    }
    return verify(**{**values, "spec_steps": rows - 1, "topk": 1, "draft_token_num": rows})


def capped_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None, cap: float
) -> torch.Tensor:
    """Causal attention of the last len(q) tokens in float64, with SGLang's soft cap."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    logits = torch.einsum("qhd,khd->hqk", q, k) * scale
    logits = cap * torch.tanh(logits / cap) if cap > 0 else logits
    position = torch.arange(len(k) - len(q), len(k), device=q.device)[:, None]
    key = torch.arange(len(k), device=q.device)[None]
    seen = (key <= position) if window is None else (key <= position) & (key > position - window)
    return torch.einsum("hqk,khd->qhd", logits.masked_fill(~seen, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("hybrid", [False, True], ids=["one_pool", "window_pool"])
def test_plugin_serves_from_sglangs_pools(hybrid: bool, fp8: bool, loaded: Any, device: torch.device) -> None:
    """Prompt in two chunks, a mixed step, decoding, and verification of drafts, eager and by the halves around a graph.

    SGLang's `RadixAttention`, `MHATokenToKVPool` or `SWAKVPool`, and `ReqToTokenPool`; a windowed layer with soft cap.
    """
    need("quantize_query_fp8", *PREFILL_OPS)
    mode = forward_mode()
    served = Served(hybrid, fp8, device)
    served.backend.init_cuda_graph_state(4, 16)
    served.step(mode.EXTEND, [37, 70])
    served.step(mode.EXTEND, [21, 40])
    served.step(mode.MIXED, [18, 1])
    for graph in (False, True):
        served.step(mode.DECODE, [1, 1], graph)
        served.step(mode.TARGET_VERIFY, [3, 3], graph)
        served.step(mode.TARGET_VERIFY, [2, 2], graph, "NGRAM")
    served.step(mode.DECODE, [1, 1], graph=True)


def test_window_pool_without_a_mapping_is_refused(loaded: Any, device: torch.device) -> None:
    from hpc.common.errors import InvalidArgument

    served = Served(True, False, device)
    served.pool.full_to_swa_index_mapping = None
    with pytest.raises(InvalidArgument, match="window pool"):
        served.make_backend()
