"""The attention backend `hpc`: registered and driven through stand-ins that have the interface of SGLang's classes."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from sglang_standins import (
    AttentionBackend,
    ForwardMode,
    KVPool,
    KVWriteLoc,
    RadixAttention,
    batch_of,
    check,
    draw,
    expected,
    runner,
)
from sglang_support import FP8, Pool, need, to_fp8

import hpc
from hpc.common.errors import InvalidArgument

PREFILL = ("attention_with_kvcache_prefill_bf16", "attention_with_kvcache_prefill_fp8", "quantize_query_fp8")


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """The four modules that the plugin imports, with 0.5.17's and 0.5.23's names in them."""
    from hpc.integrations import sglang as plugin

    backends: dict[str, Any] = {}
    choices = ["fa3", "hpc_ops"]

    def register_attention_backend(name: str) -> Any:
        return lambda create: backends.setdefault(name, create)

    content = {
        "sglang.srt.layers.attention.attention_registry": {
            "ATTENTION_BACKENDS": backends, "register_attention_backend": register_attention_backend,
        },
        "sglang.srt.server_args": {
            "ATTENTION_BACKEND_CHOICES": choices, "add_attention_backend_choices": choices.extend,
        },
        "sglang.srt.layers.attention.base_attn_backend": {"AttentionBackend": AttentionBackend},
        "sglang.srt.mem_cache.memory_pool": {"KVWriteLoc": KVWriteLoc},
    }  # fmt: skip
    for name, values in content.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            module = types.ModuleType(".".join(parts[:end]))
            module.__path__ = []
            monkeypatch.setitem(sys.modules, module.__name__, sys.modules.get(module.__name__, module))
        for key, value in values.items():
            monkeypatch.setattr(sys.modules[name], key, value, raising=False)
    plugin.backend_class.cache_clear()
    yield types.SimpleNamespace(backends=backends, choices=choices, plugin=plugin)
    plugin.backend_class.cache_clear()


# --- registration -------------------------------------------------------------------------------------


def test_import_needs_no_sglang(clean_environ: dict[str, str]) -> None:
    code = "import sys, hpc.integrations.sglang; assert 'sglang' not in sys.modules and 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], env=clean_environ, check=True, timeout=300)


def test_register_adds_name_and_choice_once(sglang: types.SimpleNamespace) -> None:
    for _ in range(2):
        sglang.plugin.register()
    assert sglang.choices == ["fa3", "hpc_ops", "hpc"]
    assert list(sglang.backends) == ["hpc"]
    pool = Pool((5,), 1, torch.bfloat16, torch.device("cpu"))
    backend = sglang.backends["hpc"](runner(pool, [RadixAttention((4, 1), 64)]))
    assert isinstance(backend, AttentionBackend) and not backend.needs_cpu_seq_lens
    assert backend.get_cuda_graph_seq_len_fill_value() == 1


def test_what_sglang_reads_from_the_running_backend(sglang: types.SimpleNamespace) -> None:
    """`forward_context` hands out both pools to models, wrappers copy them and the types; an idle step forgets."""
    pool = Pool((5,), 1, torch.bfloat16, torch.device("cpu"))
    model_runner = runner(pool, [RadixAttention((4, 1), 64)])
    backend = sglang.plugin.create(model_runner)
    assert backend.token_to_kv_pool is model_runner.token_to_kv_pool
    assert backend.req_to_token_pool is model_runner.req_to_token_pool
    assert backend.req_to_token is model_runner.req_to_token_pool.req_to_token
    assert backend.page_size == pool.page and backend.max_context_len == pool.req_to_token.shape[1]
    assert backend.kv_cache_dtype == backend.data_type == torch.bfloat16
    assert backend.forward_metadata is None


def test_entry_point_is_declared(root) -> None:  # type: ignore[no-untyped-def]
    text = (root / "pyproject.toml").read_text()
    group = '[project.entry-points."sglang.srt.plugins"]'
    names = {"hpc": "sglang:register", "hpc_moe": "sglang_moe:register"}
    lines = "\n".join([group, *(f'{name} = "hpc.integrations.{value}"' for name, value in names.items())])
    assert lines in text


REFUSED = {
    "mla": ({"use_mla_backend": True}, "latent attention"),
    "encoder_decoder": ({"model_config": types.SimpleNamespace(is_encoder_decoder=True)}, "encoder-decoder"),
    "page_size": ({"page_size": 48}, "--page-size 64"),
    "float16": ({"dtype": torch.float16}, "--dtype bfloat16"),
    "kv_dtype": ({"kv_cache_dtype": torch.float8_e5m2}, "fp8_e4m3"),
    "draft_model": ({"is_draft_worker": True}, "--speculative-draft-attention-backend"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_refused_when_the_server_starts(
    case: tuple[dict[str, Any], str], sglang: types.SimpleNamespace
) -> None:
    changes, remedy = case
    pool = Pool((5,), 1, torch.bfloat16, torch.device("cpu"))
    with pytest.raises(InvalidArgument, match=remedy):
        sglang.plugin.create(runner(pool, [RadixAttention((4, 1), 64)], **changes))


LAYERS = {
    "cross": ({"is_cross_attention": True}, {}),
    "encoder": ({"attn_type": "encoder_only"}, {}),
    "temperature": ({"xai_temperature_len": 8}, {}),
    "other_cap": ({"logit_cap": 30.0, "logit_capping_method": "sigmoid"}, {}),
    "score_mod": ({}, {"score_mod": len}),
}


@pytest.mark.parametrize("case", LAYERS.values(), ids=LAYERS)
def test_refused_at_a_layer(
    case: tuple[dict[str, Any], dict[str, Any]], sglang: types.SimpleNamespace
) -> None:
    changes, kwargs = case
    pool = Pool((5,), 1, torch.bfloat16, torch.device("cpu"))
    layer = RadixAttention((4, 1), 128, **changes)
    backend = sglang.plugin.create(runner(pool, [layer]))
    batch = batch_of(pool, ForwardMode.DECODE, [1])
    backend.init_forward_metadata(batch)
    with pytest.raises(InvalidArgument, match="another backend"):
        backend.forward(*draw(1, layer, pool.device), layer, batch, **kwargs)


@pytest.mark.parametrize("spec", [{"topk": 4, "tree_topk": 4}, {"topk": 1, "tree_topk": -1}, {}], ids=str)
def test_trees_of_drafts_are_refused(spec: dict[str, int], sglang: types.SimpleNamespace) -> None:
    pool = Pool((9,), 1, torch.bfloat16, torch.device("cpu"))
    backend = sglang.plugin.create(runner(pool, [RadixAttention((4, 1), 128)]))
    info = types.SimpleNamespace(draft_token_num=4, **spec)
    with pytest.raises(InvalidArgument, match="topk 1"):
        backend.init_forward_metadata(batch_of(pool, ForwardMode.TARGET_VERIFY, [4], spec_info=info))


TREES = {
    "topk": {
        "speculative_algorithm": "EAGLE3",
        "speculative_eagle_topk": 4,
        "speculative_num_draft_tokens": 8,
    },
    "ngram": {
        "speculative_algorithm": "NGRAM",
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 12,
    },
    "too_many": {
        "speculative_algorithm": "EAGLE",
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 17,
    },
}
CHAINS = {
    "none": {
        "speculative_algorithm": None,
        "speculative_eagle_topk": None,
        "speculative_num_draft_tokens": None,
    },
    "topk_1": {
        "speculative_algorithm": "STANDALONE",
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
    },
    "ngram_2": {
        "speculative_algorithm": "NGRAM",
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 2,
    },
}


@pytest.mark.parametrize("name", [*TREES, *CHAINS])
def test_options_of_drafts_when_the_server_starts(name: str, sglang: types.SimpleNamespace) -> None:
    """Trees are refused before the model is captured; chains, among them a single draft of an n-gram, are not."""
    pool = Pool((9,), 1, torch.bfloat16, torch.device("cpu"))
    options = types.SimpleNamespace(**{**TREES, **CHAINS}[name])
    model_runner = runner(pool, [RadixAttention((4, 1), 128)], server_args=options)
    if name in CHAINS:
        sglang.plugin.create(model_runner)
        return
    with pytest.raises(InvalidArgument, match="--speculative-num-draft-tokens"):
        sglang.plugin.create(model_runner)


# --- steps --------------------------------------------------------------------------------------------

SHAPES = {
    "qwen3": ((8, 2), 128, 64),
    "group_12": ((12, 1), 64, 16),
    "head_dim_256": ((4, 4), 256, 1),
    "head_dim_80": ((6, 2), 80, 256),
}


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_decode(
    shape: tuple[tuple[int, int], int, int], fp8: bool, sglang: types.SimpleNamespace, device: torch.device
) -> None:
    """An eager step: the pool stores the new rows, then each request sees all its tokens."""
    heads, dim, page = shape
    need("quantize_query_fp8")
    pool = Pool((300, 1, 65), heads[1], FP8 if fp8 else torch.bfloat16, device, head_dim=dim, page=page)
    pool.fill(fresh=[1] * 3)
    layer = RadixAttention(heads, dim)
    if fp8:  # SGLang's parameters are 0-d
        layer.k_scale, layer.v_scale = torch.tensor(0.5, device=device), torch.tensor(0.25, device=device)
    backend = sglang.plugin.create(runner(pool, [layer]))
    batch = batch_of(pool, ForwardMode.DECODE, [1] * 3)
    backend.init_forward_metadata(batch)
    assert backend.step.task_maps, "eager steps are scheduled too"
    q, k, v = draw(3, layer, device)
    out = backend.forward(q, k, v, layer, batch)
    stored = (
        pool.k_buffer.view(torch.uint8)[batch.out_cache_loc] if fp8 else pool.k_buffer[batch.out_cache_loc]
    )
    assert torch.equal(stored, to_fp8(k.float() / 0.5).view(torch.uint8) if fp8 else k)
    check(out, expected(pool, q, [1] * 3, layer), fp8)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize(("rows", "width"), [(2, 1), (5, 1), (2, -1)])
def test_verification_of_drafts(
    rows: int, width: int, fp8: bool, sglang: types.SimpleNamespace, device: torch.device
) -> None:
    """Each draft token sees the ones before it; SGLang's lengths do not count them. A tree of two tokens is a chain."""
    need("quantize_query_fp8")
    pool = Pool((200, 70, rows), 2, FP8 if fp8 else torch.bfloat16, device)
    fresh = [rows] * 3
    pool.fill(fresh=fresh)
    layer = RadixAttention((8, 2), 128)
    backend = sglang.plugin.create(runner(pool, [layer]))
    spec = types.SimpleNamespace(tree_topk=width, draft_token_num=rows)
    batch = batch_of(pool, ForwardMode.TARGET_VERIFY, fresh, spec_info=spec)
    backend.init_forward_metadata(batch)
    backend.update_verify_buffers_to_fill_after_draft(spec, None)
    q, k, v = draw(3 * rows, layer, device)
    check(backend.forward(q, k, v, layer, batch), expected(pool, q, fresh, layer), fp8)


FEATURES = {
    "window": {"sliding_window_size": 31},
    "scaling": {"scaling": 0.2},
    "cap": {"logit_cap": 5.0},
    "sinks": {},
}


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.MIXED], ids=lambda mode: mode.name)
@pytest.mark.parametrize("feature", FEATURES)
def test_layer_options_reach_the_operators(
    feature: str, mode: ForwardMode, sglang: types.SimpleNamespace, device: torch.device
) -> None:
    """Window, scale, soft cap and sinks, each against float64; the window is SGLang's count of earlier tokens."""
    fresh = [1, 1] if mode is ForwardMode.DECODE else [40, 1]
    if mode is not ForwardMode.DECODE:
        need(*PREFILL)
    pool = Pool((200, 70), 1, torch.bfloat16, device)
    pool.fill(fresh=fresh)
    layer = RadixAttention((4, 1), 128, **FEATURES[feature])
    backend = sglang.plugin.create(runner(pool, [layer]))
    batch = batch_of(pool, mode, fresh)
    backend.init_forward_metadata(batch)
    q, k, v = draw(sum(fresh), layer, device)
    kwargs, want = {}, None
    if feature == "sinks":
        sinks = torch.tensor([1.0, 3.0, -2.0, 6.0], device=device)
        kwargs["sinks"] = sinks.to(torch.bfloat16)
    out = backend.forward(q, k, v, layer, batch, **kwargs)
    if feature in ("cap", "sinks"):
        want = with_changed_logits(pool, q, fresh, layer, kwargs.get("sinks"))
    check(out, expected(pool, q, fresh, layer) if want is None else want, False)


def with_changed_logits(
    pool: Pool, q: torch.Tensor, fresh: Sequence[int], layer: RadixAttention, sinks: torch.Tensor | None
) -> torch.Tensor:
    """One KV head: c * tanh(s / c), and a sink as one more logit without a value."""
    out, at = [], 0
    for request, count in enumerate(fresh):
        slots = pool.slots(request).to(pool.device)
        k, v = pool.k_buffer[slots][:, 0].double(), pool.v_buffer[slots][:, 0].double()
        queries = q[at : at + count].view(count, layer.tp_q_head_num, -1).double()
        at += count
        logits = torch.einsum("qhd,kd->hqk", queries, k) * layer.scaling
        if layer.logit_cap > 0:
            logits = layer.logit_cap * torch.tanh(logits / layer.logit_cap)
        late = torch.arange(len(k))[None] > torch.arange(len(k) - count, len(k))[:, None]
        logits = logits.masked_fill(late.to(logits.device), -torch.inf)
        if sinks is not None:
            extra = sinks.double()[:, None, None].expand(-1, count, 1)
            logits = torch.cat((logits, extra), -1)
        weights = logits.softmax(-1)[..., : len(k)]
        out.append(torch.einsum("hqk,kd->qhd", weights, v).flatten(1))
    return torch.cat(out)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_extend(
    shape: tuple[tuple[int, int], int, int], fp8: bool, sglang: types.SimpleNamespace, device: torch.device
) -> None:
    """A whole prompt, a chunk behind a prefix, and a decoding request in one mixed batch."""
    need(*PREFILL)
    heads, dim, page = shape
    fresh = [60, 70, 1]
    pool = Pool((60, 200, 90), heads[1], FP8 if fp8 else torch.bfloat16, device, head_dim=dim, page=page)
    pool.fill(fresh=fresh)
    layer = RadixAttention(heads, dim)
    backend = sglang.plugin.create(runner(pool, [layer]))
    batch = batch_of(pool, ForwardMode.MIXED, fresh)
    backend.init_forward_metadata(batch)
    q, k, v = draw(sum(fresh), layer, device)
    check(backend.forward(q, k, v, layer, batch), expected(pool, q, fresh, layer), fp8)


def seen_tables(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Page tables that the prefill operators get from now on."""
    found: list[torch.Tensor] = []
    for name, place in (("bf16", 4), ("fp8", 7)):
        function = f"attention_with_kvcache_prefill_{name}"
        whole = getattr(hpc, function)

        def watched(*args: Any, whole: Any = whole, place: int = place, **kwargs: Any) -> Any:
            found.append(args[place])
            return whole(*args, **kwargs)

        monkeypatch.setattr(hpc, function, watched)
    return found


# lengths that SGLang's batch brings along on the host, and whether they say how long the longest request is
HOST: dict[str, tuple[dict[str, Any], ForwardMode, bool]] = {
    "lengths": ({"extend_prefix_lens_cpu": None}, ForwardMode.MIXED, True),
    "prefixes": ({"seq_lens_cpu": None}, ForwardMode.EXTEND, True),
    "the_larger": ({"seq_lens_cpu": torch.tensor([60, 1, 90])}, ForwardMode.EXTEND, True),
    "prefixes_mixed": ({"seq_lens_cpu": None}, ForwardMode.MIXED, False),
    "too_few": ({"seq_lens_cpu": torch.tensor([200]), "extend_prefix_lens_cpu": None}, ForwardMode.EXTEND, False),
    "none": ({"seq_lens_cpu": None, "extend_prefix_lens_cpu": None}, ForwardMode.EXTEND, False),
}  # fmt: skip


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("case", HOST.values(), ids=HOST)
def test_prefill_tables_end_with_the_longest_request(
    case: tuple[dict[str, Any], ForwardMode, bool], fp8: bool, sglang: types.SimpleNamespace, device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A view of the pages of 200 tokens where the host knows the lengths; the result has the same bits."""
    need(*PREFILL)
    known, mode, narrow = case
    fresh = [60, 70, 1]
    layer, outs, tables = RadixAttention((8, 2), 128), [], seen_tables(monkeypatch)
    for changes in ({"seq_lens_cpu": None, "extend_prefix_lens_cpu": None}, known):
        pool = Pool((60, 200, 90), 2, FP8 if fp8 else torch.bfloat16, device)
        pool.fill(fresh=fresh)
        backend = sglang.plugin.create(runner(pool, [layer]))
        batch = batch_of(pool, mode, fresh, **changes)
        backend.init_forward_metadata(batch)
        outs.append(backend.forward(*draw(sum(fresh), layer, device), layer, batch))
    assert torch.equal(*outs)
    whole, table = tables
    assert whole.shape == (3, 8) and table.shape == (3, 4 if narrow else 8)
    assert table.stride() == whole.stride() and torch.equal(table, whole[:, : table.shape[1]])
    check(outs[1], expected(pool, draw(sum(fresh), layer, device)[0], fresh, layer), fp8)


def test_decoding_and_graphs_keep_whole_tables(sglang: types.SimpleNamespace, device: torch.device) -> None:
    """Their schedules are made for the longest context, and a captured table serves later lengths."""
    pool = Pool((60, 70), 1, torch.bfloat16, device)
    backend = sglang.plugin.create(runner(pool, [RadixAttention((4, 1), 128)]))
    backend.init_cuda_graph_state(max_bs=2, max_num_tokens=6)
    for mode, rows in ((ForwardMode.DECODE, 1), (ForwardMode.TARGET_VERIFY, 3)):
        batch = batch_of(pool, mode, [rows] * 2, seq_lens_cpu=torch.tensor([60, 70]))
        backend.init_forward_metadata(batch)
        assert backend.step.table.shape == (2, 8)
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        backend.init_forward_metadata_in_graph(batch)
        assert backend.step.table.shape == (2, 8)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_narrow_tables_of_a_window_pool(
    fp8: bool, sglang: types.SimpleNamespace, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    need(*PREFILL)
    fresh, dtype = [40, 1], FP8 if fp8 else torch.bfloat16
    full, window = (Pool((100, 70), 1, dtype, device, seed=seed) for seed in (1, 2))
    for pool in (full, window):
        pool.fill(fresh=fresh)
    layers = [RadixAttention((4, 1), 128), RadixAttention((4, 1), 128, layer_id=1, sliding_window_size=20)]
    backend = sglang.plugin.create(runner(full, layers, KVPool(full, window)))
    batch, tables = batch_of(full, ForwardMode.MIXED, fresh), seen_tables(monkeypatch)
    backend.init_forward_metadata(batch)
    for layer, pool in zip(layers, (full, window), strict=True):
        q, k, v = draw(sum(fresh), layer, device, seed=5 + layer.layer_id)
        check(backend.forward(q, k, v, layer, batch), expected(pool, q, fresh, layer), fp8)
    assert [table.shape for table in tables] == [(2, 2)] * 2


@pytest.mark.parametrize("left", ["rows", "none"])
@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.MIXED], ids=lambda mode: mode.name)
def test_rows_that_the_model_has_stored(
    mode: ForwardMode, left: str, sglang: types.SimpleNamespace, device: torch.device
) -> None:
    """A model whose rotary kernel writes the pool asks for no second store, or passes no rows at all."""
    fresh = [1, 1] if mode is ForwardMode.DECODE else [40, 1]
    if mode is not ForwardMode.DECODE:
        need(*PREFILL)
    pool = Pool((200, 70), 2, torch.bfloat16, device)
    pool.fill(fresh=fresh)
    layer = RadixAttention((8, 2), 128)
    backend = sglang.plugin.create(runner(pool, [layer]))
    batch = batch_of(pool, mode, fresh)
    backend.init_forward_metadata(batch)
    q, k, v = draw(sum(fresh), layer, device)
    backend.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc), k, v, None, None)
    bits = pool.k_buffer.view(torch.int16)  # unused slots hold NaN
    before = bits.clone()
    rows = (k + 1, v + 1) if left == "rows" else (None, None)
    out = backend.forward(q, *rows, layer, batch, save_kv_cache=False)
    assert torch.equal(bits, before)
    check(out, expected(pool, q, fresh, layer), False)


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY], ids=lambda mode: mode.name)
def test_graph_buffers_are_refilled(
    mode: ForwardMode, sglang: types.SimpleNamespace, device: torch.device
) -> None:
    """Capture, then two replays with other lengths and pages: the recorded half alone has to refresh everything.

    Captured batches of 2 and 4 share buffers and schedule; the last row or two are padding.
    """
    rows = 1 if mode is ForwardMode.DECODE else 3
    layer = RadixAttention((8, 2), 128)
    first = Pool((100, 60, 20), 2, torch.bfloat16, device)
    backend = sglang.plugin.create(runner(first, [layer]))
    backend.init_cuda_graph_state(max_bs=4, max_num_tokens=4 * rows)
    addresses = set()
    for seed, (lens, size) in enumerate(
        (((100, 60, 20), 4), ((400, 9), 2), ((64, 65, 3, 511), 4), ((77,), 2))
    ):
        pool = Pool(lens, 2, torch.bfloat16, device, seed=seed)
        fresh = [rows] * len(lens)
        pool.fill(fresh=fresh)
        backend.token_to_kv_pool = KVPool(pool)
        backend.tables.req_to_token = pool.req_to_token.to(device)
        batch = batch_of(pool, mode, fresh, pad_to=size)
        backend.init_forward_metadata_out_graph(batch, in_capture=seed < 2)
        backend.init_forward_metadata_in_graph(batch)
        addresses.add((size, backend.step.table.data_ptr(), backend.step.seq_lens.data_ptr()))
        q, k, v = draw(size * rows, layer, device, seed)
        out = backend.forward(q, k, v, layer, batch)
        live = len(lens) * rows
        check(out[:live], expected(pool, q[:live], fresh, layer), False)
    assert len(addresses) == 2, "one address a captured batch size"


def test_windows_in_a_pool_of_their_own(sglang: types.SimpleNamespace, device: torch.device) -> None:
    """SGLang's hybrid pool: even layers see everything, odd layers a window, from slots of their own numbering."""
    full = Pool((200, 70), 1, torch.bfloat16, device, seed=1)
    window = Pool((200, 70), 1, torch.bfloat16, device, seed=2)
    for pool in (full, window):
        pool.fill(fresh=[1, 1])
    layers = [RadixAttention((4, 1), 128), RadixAttention((4, 1), 128, layer_id=1, sliding_window_size=20)]
    backend = sglang.plugin.create(runner(full, layers, KVPool(full, window)))
    backend.init_cuda_graph_state(max_bs=2, max_num_tokens=2)
    batch = batch_of(full, ForwardMode.DECODE, [1, 1])
    for graph in (False, True):
        if graph:
            backend.init_forward_metadata_out_graph(batch, in_capture=True)
            backend.init_forward_metadata_in_graph(batch)
        else:
            backend.init_forward_metadata(batch)
        assert set(backend.step.task_maps) == {(None, 1), (21, 1)}
        for layer, pool in zip(layers, (full, window), strict=True):
            q, k, v = draw(2, layer, device, seed=5 + layer.layer_id + graph)
            out = backend.forward(q, k, v, layer, batch)
            check(out, expected(pool, q, [1, 1], layer), False)


def test_shared_kv_layers_store_nothing(sglang: types.SimpleNamespace, device: torch.device) -> None:
    """k and v None, or save_kv_cache False: attention over what is there."""
    pool = Pool((50,), 1, torch.bfloat16, device)
    pool.fill()
    layer = RadixAttention((4, 1), 128)
    backend = sglang.plugin.create(runner(pool, [layer]))
    batch = batch_of(pool, ForwardMode.DECODE, [1])
    backend.init_forward_metadata(batch)
    q, k, v = draw(1, layer, device)
    want = expected(pool, q, [1], layer)
    check(backend.forward(q, None, None, layer, batch), want, False)
    check(backend.forward(q, k, v, layer, batch, save_kv_cache=False), want, False)


def test_idle_rank(sglang: types.SimpleNamespace, device: torch.device) -> None:
    """A data-parallel rank without requests: metadata for none of them, and an empty result."""
    pool = Pool((9,), 1, torch.bfloat16, device)
    layer = RadixAttention((4, 1), 128)
    backend = sglang.plugin.create(runner(pool, [layer]))
    empty = torch.zeros(0, dtype=torch.int64, device=device)
    batch = types.SimpleNamespace(
        forward_mode=ForwardMode.IDLE, batch_size=0, seq_lens=empty, req_pool_indices=empty, out_cache_loc=empty,
        spec_info=None,
    )  # fmt: skip
    backend.init_forward_metadata(batch)
    q = torch.empty(0, 4 * 128, dtype=torch.bfloat16, device=device)
    assert backend.forward(q, None, None, layer, batch).shape == (0, 4 * 128)
