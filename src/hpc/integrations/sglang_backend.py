"""The attention backend `hpc` for SGLang, without an import of SGLang: see `hpc.integrations.sglang`."""

from __future__ import annotations

import importlib
from typing import Any, NoReturn

import torch

import hpc
from hpc.common.errors import fail
from hpc.integrations.sglang_metadata import (
    MAX_QUERY_ROWS,
    PageTables,
    Schedules,
    Step,
    attention_layers,
    longest_on_host,
    window_of,
)

FP8 = torch.float8_e4m3fn


class HpcAttention:
    """Decode, verification and prefill attention on this library; mixed into SGLang's `AttentionBackend`.

    A step begins with `init_forward_metadata` (eager) or with the out-of-graph and in-graph halves around a captured
    graph; then every layer calls `forward`, which SGLang's base class divides into `forward_decode` and
    `forward_extend`. New K and V are stored by SGLang's pool. With FP8 KV the queries of a layer are quantised with a
    scale per token and head, in one more launch.
    """

    # Page tables and schedules are made on the device from seq_lens.
    needs_cpu_seq_lens: bool = False

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        self._publish(model_runner)
        self.page_size = _check_page_size(model_runner.page_size)
        self.fp8 = _check_types(model_runner)
        if getattr(model_runner, "is_draft_worker", False):
            _refuse(
                "draft model", "another backend", "hpc", "Pass --speculative-draft-attention-backend fa3."
            )
        _check_drafts(getattr(model_runner, "server_args", None))
        mapping = getattr(self.token_to_kv_pool, "full_to_swa_index_mapping", None)
        if mapping is None and hasattr(self.token_to_kv_pool, "swa_kv_pool"):
            _refuse("KV pool", "a window pool whose slots are mapped", "one without a mapping", "")
        self.tables = PageTables(self.req_to_token, self.page_size, mapping)
        self.device = self.tables.starts.device
        layers = attention_layers(model_runner.model)
        self.schedules = Schedules(
            {(window_of(layer), layer.tp_k_head_num) for layer in layers},
            model_runner.req_to_token_pool.size,
            self.tables.max_pages * self.page_size,
        )
        self.unit_scale = torch.ones(1, dtype=torch.float32, device=self.device)
        self.graph_steps: dict[tuple[int, int], Step] = {}
        self.graph_buffers: Step | None = None
        self.step: Step | None = None

    def _publish(self, model_runner: Any) -> None:
        """What SGLang reads from the backend of the running forward pass, wherever that is.

        Models and the eager runner take both pools from here (`forward_context`), wrappers of backends (two batches at
        a time, linear attention) copy them and the types, and an idle step resets `forward_metadata`.
        """
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.req_to_token = self.req_to_token_pool.req_to_token
        self.max_context_len = int(self.req_to_token.shape[1])
        self.kv_cache_dtype = self.data_type = model_runner.kv_cache_dtype
        self.forward_metadata: Any = None

    # --- once a step ----------------------------------------------------------------------------------

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Eager path of all modes: fresh tensors. In prefill the tables end with the longest request."""
        rows = _query_rows(forward_batch)
        batch = forward_batch.batch_size
        table, window_table = self.tables.empty(batch, None if rows else longest_on_host(forward_batch))
        seq_lens = torch.empty(batch, dtype=torch.int32, device=self.device)
        step = Step(seq_lens, table, window_table, query_rows=rows)
        if rows == 0:
            step.longest = max(int(count) for count in forward_batch.extend_seq_lens_cpu)
            counts = forward_batch.extend_seq_lens.cumsum(0, dtype=torch.int32)
            step.cu_seqlens_q = torch.nn.functional.pad(counts, (1, 0))
        self._fill(step, forward_batch)
        self.step = step

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Static buffers for the largest captured batch; smaller ones take their first rows."""
        table, window_table = self.tables.empty(max_bs)
        slots = None
        if window_table is not None:
            slots = torch.zeros(max_num_tokens, dtype=torch.int64, device=self.device)
        lens = torch.zeros(max_bs, dtype=torch.int32, device=self.device)
        self.graph_buffers, self.graph_steps = Step(lens, table, window_table, slots), {}

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Choose the buffers of this batch size and number of rows; nothing here depends on the lengths."""
        rows = _query_rows(forward_batch)
        if rows == 0:
            _refuse("CUDA graph", "decoding or verification", forward_batch.forward_mode, "")
        batch = forward_batch.batch_size
        if (batch, rows) not in self.graph_steps:
            whole = self.graph_buffers
            assert whole is not None, "init_cuda_graph_state comes first"
            window_table = None if whole.window_table is None else whole.window_table[:batch]
            slots = None if whole.window_slots is None else whole.window_slots[: batch * rows]
            self.graph_steps[batch, rows] = Step(
                whole.seq_lens[:batch], whole.table[:batch], window_table, slots, query_rows=rows
            )
        self.step = self.graph_steps[batch, rows]

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Refill the buffers from the live lengths; part of the graph, so it happens again at every replay."""
        step = self.graph_steps[forward_batch.batch_size, _query_rows(forward_batch)]
        self._fill(step, forward_batch)
        self.step = step

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length of padded requests; they read and write page 0, which SGLang keeps for them."""
        return 1

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """Nothing: SGLang plans a verification while drafts are made, and nothing here depends on which they are."""

    def _fill(self, step: Step, forward_batch: Any) -> None:
        batch = step.seq_lens.shape[0]
        # In verification SGLang's lengths leave out the draft tokens; otherwise they count what is new.
        more = step.query_rows if forward_batch.forward_mode.is_target_verify() else 0
        step.seq_lens.copy_(forward_batch.seq_lens[:batch] + more)
        self.tables.fill(step, forward_batch.req_pool_indices[:batch])
        if step.window_table is not None and forward_batch.out_cache_loc is not None:
            slots = self.token_to_kv_pool.translate_loc_from_full_to_swa(forward_batch.out_cache_loc)
            if step.window_slots is None:
                step.window_slots = slots
            else:
                step.window_slots[: slots.shape[0]].copy_(slots)
        if step.query_rows:
            self.schedules.assign(step)

    # --- once a layer ---------------------------------------------------------------------------------

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """[tokens, query heads * v_head_dim], BF16; q [tokens, query heads * head_dim], one or more rows a request."""
        step, options = self._begin(k, v, layer, forward_batch, save_kv_cache, kwargs)
        queries = q.reshape(-1, layer.tp_q_head_num, layer.head_dim)
        keys, values, table = self._paged(layer, step)
        task_map = step.task_maps.get((options["window"], layer.tp_k_head_num))
        mtp = step.query_rows - 1
        if self.fp8:
            codes, q_scale = hpc.quantize_query_fp8(queries)
            out = hpc.attention_decode_fp8(
                codes, keys, values, table, step.seq_lens, q_scale, *self._kv_scales(layer), mtp=mtp,
                new_kv_included=True, task_map=task_map, **options,
            )  # fmt: skip
        else:
            out = hpc.attention_decode_bf16(
                queries,
                keys,
                values,
                table,
                step.seq_lens,
                mtp=mtp,
                new_kv_included=True,
                task_map=task_map,
                **options,
            )
        assert isinstance(out, torch.Tensor)
        return out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """As `forward_decode` for prompts, chunks, prefix hits and mixed batches; verification goes there."""
        if self.step is not None and self.step.query_rows:
            return self.forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        step, options = self._begin(k, v, layer, forward_batch, save_kv_cache, kwargs)
        queries = q.reshape(-1, layer.tp_q_head_num, layer.head_dim)
        keys, values, table = self._paged(layer, step)
        assert step.cu_seqlens_q is not None
        rest = (step.cu_seqlens_q, table, step.seq_lens, step.longest)
        if self.fp8:
            codes, q_scale = hpc.quantize_query_fp8(queries, step.cu_seqlens_q, step.longest)
            k_scale, v_scale = self._kv_scales(layer)
            out = hpc.attention_with_kvcache_prefill_fp8(
                codes, keys, values, q_scale, k_scale, v_scale, *rest, **options
            )
        else:
            out = hpc.attention_with_kvcache_prefill_bf16(queries, keys, values, *rest, **options)
        assert isinstance(out, torch.Tensor)
        return out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)

    def _begin(
        self, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool, kwargs: dict[str, Any]
    ) -> tuple[Step, dict[str, Any]]:
        """Check the layer, store its new rows, and say how it attends.

        A BF16 pool without a window's is written by the model's rotary kernel (SGLang's `enable_fused_set_kv_buffer`):
        then `save_kv_cache` is false, or K and V are None.
        """
        assert self.step is not None, "init_forward_metadata comes first"
        options = _options(layer, kwargs)
        if save_kv_cache and k is not None:
            memory = importlib.import_module("sglang.srt.mem_cache.memory_pool")
            where = memory.KVWriteLoc(forward_batch.out_cache_loc, self.step.window_slots)
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, v, layer.k_scale, layer.v_scale)
        return self.step, options

    def _paged(self, layer: Any, step: Step) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(keys, values [pages, page_size, KV heads, dim], page table) of the pool that holds the layer."""
        keys, values = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        keys = keys.view(-1, self.page_size, layer.tp_k_head_num, layer.head_dim)
        values = values.view(-1, self.page_size, layer.tp_v_head_num, layer.v_head_dim)
        if step.window_table is not None and self.token_to_kv_pool.layers_mapping[layer.layer_id][1]:
            return keys, values, step.window_table
        return keys, values, step.table

    def _kv_scales(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(  # type: ignore[return-value]
            self.unit_scale if scale is None else scale.reshape(1).to(torch.float32)
            for scale in (layer.k_scale, layer.v_scale)
        )


def _query_rows(forward_batch: Any) -> int:
    """Query rows a request in decoding and verification, 0 in prefill; refuses what the masks here cannot say."""
    mode = forward_batch.forward_mode
    if mode.is_decode_or_idle():
        return 1
    if mode.is_target_verify():
        spec = forward_batch.spec_info
        if getattr(spec, "ragged_verify_layout", None) is not None:
            _refuse("speculative decoding", "the same number of draft tokens for all requests", "ragged", "")
        rows = int(spec.draft_token_num)
        _check_chain(getattr(spec, "tree_topk", getattr(spec, "topk", None)), rows)
        return rows
    if mode.is_dllm_extend() or not mode.is_extend():
        _refuse("forward mode", "decode, verification or causal extend", mode, "")
    return 0


def _check_chain(width: int | None, rows: int) -> None:
    """Refuse trees: the rows of a request see all rows before them. `width`: branches a level, -1 an irregular tree.

    The last accepted token and one draft are a chain whatever the width. SGLang's n-grams are padded to their number
    with branches at the root, so that more of them are a tree even at breadth 1.
    """
    if width != 1 and rows > 2:
        _refuse(
            "speculative decoding", "a chain of draft tokens", f"{rows} tokens in a tree of width {width}",
            "Pass --speculative-eagle-topk 1; with NGRAM --speculative-num-draft-tokens 2.",
        )  # fmt: skip
    if not 1 <= rows <= MAX_QUERY_ROWS:
        _refuse("draft tokens", f"1 to {MAX_QUERY_ROWS}", rows, "Pass --speculative-num-draft-tokens.")


def _check_drafts(server_args: Any) -> None:
    """When the server starts, what its options say about drafts; each verification is checked again."""
    algorithm = getattr(server_args, "speculative_algorithm", None)
    rows = getattr(server_args, "speculative_num_draft_tokens", None)
    if algorithm is not None and rows is not None:
        irregular = str(algorithm).upper() == "NGRAM"
        _check_chain(
            -1 if irregular else getattr(server_args, "speculative_eagle_topk", None) or 1, int(rows)
        )


def _options(layer: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of the operators for a layer."""
    kind = getattr(layer.attn_type, "value", layer.attn_type)
    if layer.is_cross_attention or kind != "decoder":
        _refuse("layer", "causal self-attention", kind, "Use another backend for this model.")
    if (
        getattr(layer, "xai_temperature_len", -1) > 0
        or getattr(layer, "logit_capping_method", "tanh") != "tanh"
    ):
        _refuse(
            "layer",
            "tanh soft cap at most",
            "another change of the logits",
            "Use another backend for this model.",
        )
    sinks = kwargs.pop("sinks", None)
    strange = sorted(name for name, value in kwargs.items() if value is not None and value is not False)
    if strange:
        _refuse("forward", "sinks at most", ", ".join(strange), "Use another backend for this model.")
    return {
        "softmax_scale": layer.scaling,
        "window": window_of(layer),
        "logit_cap": layer.logit_cap if layer.logit_cap and layer.logit_cap > 0 else None,
        "sinks": None if sinks is None else sinks.to(torch.float32),
    }


def _check_page_size(page_size: int) -> int:
    if not (1 <= page_size <= 256 and page_size & (page_size - 1) == 0):
        _refuse("page_size", "a power of two up to 256", page_size, "Pass --page-size 64.")
    return page_size


def _check_types(model_runner: Any) -> bool:
    """Whether KV is FP8."""
    if getattr(model_runner, "dtype", torch.bfloat16) != torch.bfloat16:
        _refuse("dtype", "bfloat16", model_runner.dtype, "Pass --dtype bfloat16.")
    if model_runner.kv_cache_dtype not in (torch.bfloat16, FP8):
        _refuse("kv_cache_dtype", "bfloat16 or float8_e4m3fn", model_runner.kv_cache_dtype,
                "Pass --kv-cache-dtype bfloat16 or fp8_e4m3.")  # fmt: skip
    return bool(model_runner.kv_cache_dtype == FP8)


def _refuse(argument: str, expected: str, got: object, remedy: str) -> NoReturn:
    fail("integrations.sglang", argument, expected=expected, got=got, remedy=remedy)
