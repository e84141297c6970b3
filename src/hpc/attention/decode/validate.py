"""Checks of a decode call. Metadata only; a signature that passed once is not checked again."""

from __future__ import annotations

import torch

from hpc.attention.decode import choose, plan
from hpc.attention.decode.launch import Layout
from hpc.common import arch, checks
from hpc.common.errors import InvalidDtype, fail
from hpc.common.quant import QuantType

FP8 = torch.float8_e4m3fn
MAX_GROUP, MAX_NEW_TOKENS, MAX_HEAD_DIM, MAX_PAGE = 64, 16, 256, 256


def quant_type(function: str, value: QuantType | int) -> int:
    """0 or 1, or an exception that lists both."""
    number = value.value if isinstance(value, QuantType) else value
    checks.one_of(function, "quant_type", number, (0, 1), "Only these two have kernels.")
    return int(number)


def call(
    function: str,
    q: torch.Tensor,
    kcache: torch.Tensor,
    vcache: torch.Tensor,
    block_ids: torch.Tensor,
    seq_lens: torch.Tensor,
    scales: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    quant: int,
    mtp: int,
    new_kv_included: bool,
    splitk: bool,
    task_map: torch.Tensor | None,
    split_flag: torch.Tensor | None,
    output: torch.Tensor | None,
    window: int | None,
    logit_cap: float | None,
    sinks: torch.Tensor | None,
    return_lse: bool,
    batch_invariant: bool,
) -> tuple[choose.Key, Layout]:
    """Check every argument; the key that decides the plan, and the strides."""
    _tensors(function, q, kcache, vcache, block_ids, seq_lens, quant)
    batch = seq_lens.shape[0]
    mtp = checks.int_range(
        function, "mtp", mtp, 0, MAX_NEW_TOKENS - 1, "mtp counts draft tokens beyond the first."
    )
    rows, q_heads, head_dim = q.shape
    num_pages, page_size, kv_heads, v_dim = vcache.shape
    if rows != batch * (mtp + 1):
        expected = f"{batch * (mtp + 1)} rows, num_seq_kvcache.size(0) * (mtp + 1)"
        fail(
            function,
            "q",
            expected=expected,
            got=f"{rows} rows",
            remedy="Pass mtp = query tokens a request - 1.",
        )
    _heads(function, q_heads, kv_heads, head_dim, v_dim, page_size, num_pages, batch)
    qscale, kscale = _scales(function, q, vcache, scales, quant)
    _options(
        function, q, seq_lens, kv_heads, task_map, split_flag, output, window, logit_cap, sinks, splitk, v_dim
    )
    if batch_invariant and task_map is not None:
        fail(
            function, "batch_invariant", expected="False with a task map", got=True,
            remedy="A balanced schedule depends on the batch; pass task_map=None for batch-invariant bits.",
        )  # fmt: skip
    aligned = all(
        t.data_ptr() % 16 == 0 and all(s * t.element_size() % 16 == 0 for s in t.stride()[:3])
        for t in (kcache, vcache)
    )
    key = choose.Key(
        sm90=q.is_cuda and arch.is_hopper(q.device), sms=arch.sm_count(q.device), batch=batch, q_heads=q_heads,
        kv_heads=kv_heads, head_dim=head_dim, v_dim=v_dim, page_size=page_size, max_pages=block_ids.shape[1],
        num_new_tokens=mtp + 1, quant_type=quant, window=window is not None, logit_cap=logit_cap is not None,
        sinks=sinks is not None, return_lse=return_lse, dynamic=task_map is not None,
        new_kv_included=bool(new_kv_included), splitk=bool(splitk), batch_invariant=bool(batch_invariant), tma=aligned,
    )  # fmt: skip
    out_strides = (q_heads * v_dim, v_dim) if output is None else output.stride()[:2]
    layout = Layout(
        q.stride()[:2], kcache.stride()[:3], vcache.stride()[:3], out_strides, block_ids.stride(0), qscale, kscale,
        0 if quant != 0 or scales[1] is None else scales[1].shape[-1] * scales[1].element_size() // 4, num_pages,
    )  # fmt: skip
    return key, layout


def _tensors(function: str, q: torch.Tensor, kcache: torch.Tensor, vcache: torch.Tensor, block_ids: torch.Tensor,
             seq_lens: torch.Tensor, quant: int) -> None:  # fmt: skip
    stored = FP8 if quant >= 0 else torch.bfloat16
    other = "attention_decode_bf16" if quant >= 0 else "attention_decode_fp8"
    for name, tensor in (("q", q), ("kcache", kcache), ("vcache", vcache)):
        checks.dtype(
            function, name, tensor, stored, f"Bytes are never reinterpreted; see hpc.{other} for the other."
        )
    for name, tensor in (("block_ids", block_ids), ("num_seq_kvcache", seq_lens)):
        checks.dtype(function, name, tensor, torch.int32, "Convert with .to(torch.int32).")
    checks.ndim(function, "q", q, 3, "Pass q as [batch * (mtp + 1), num_q_heads, head_dim].")
    checks.ndim(
        function, "kcache", kcache, 4, "Pass caches as [num_pages, page_size, num_kv_heads, head_dim]."
    )
    checks.ndim(
        function, "vcache", vcache, 4, "Pass caches as [num_pages, page_size, num_kv_heads, head_dim]."
    )
    checks.ndim(function, "num_seq_kvcache", seq_lens, 1, "Pass one length a request.")
    checks.shape(
        function, "kcache", kcache, (*vcache.shape[:3], q.shape[2]), "K and V share pages and heads."
    )
    checks.shape(
        function, "block_ids", block_ids, (seq_lens.shape[0], "max_pages"), "Pass one row a request."
    )
    checks.contiguous(function, "num_seq_kvcache", seq_lens)
    for name, tensor in (
        ("kcache", kcache),
        ("vcache", vcache),
        ("block_ids", block_ids),
        ("num_seq_kvcache", seq_lens),
    ):
        checks.same_device(function, name, tensor, q.device)
    for name, tensor in (("q", q), ("kcache", kcache), ("vcache", vcache), ("block_ids", block_ids)):
        checks.inner_contiguous(function, name, tensor)
    if q.is_cuda:
        arch.require_gpu(function, q.device)
    if quant >= 0 and (q.stride(0) % 2 or q.stride(1) % 2):
        fail(function, "q", expected="even strides", got=q.stride(), remedy="Call .contiguous() on it.")


def _heads(function: str, q_heads: int, kv_heads: int, head_dim: int, v_dim: int, page_size: int, num_pages: int,
           batch: int) -> None:  # fmt: skip
    if kv_heads < 1 or q_heads % kv_heads or not 1 <= q_heads // kv_heads <= MAX_GROUP:
        fail(
            function, "q", expected=f"num_q_heads = group * num_kv_heads with a group of 1 to {MAX_GROUP}",
            got=f"{q_heads} query heads over {kv_heads} KV heads", remedy="Pad or repeat heads to a whole group.",
        )  # fmt: skip
    for name, dim in (("q", head_dim), ("vcache", v_dim)):
        if not 8 <= dim <= MAX_HEAD_DIM or dim % 8:
            expected = f"a head dim of 8 to {MAX_HEAD_DIM}, a multiple of 8"
            fail(function, name, expected=expected, got=dim, remedy="Pad the heads with zeros.")
    if page_size < 1 or page_size > MAX_PAGE or page_size & (page_size - 1):
        expected = f"a page size that is a power of two up to {MAX_PAGE}"
        fail(
            function,
            "kcache",
            expected=expected,
            got=page_size,
            remedy="View the cache with another page size.",
        )
    if batch and num_pages == 0:
        fail(function, "kcache", expected="at least one page", got=0, remedy="Allocate the cache first.")


def _scales(function: str, q: torch.Tensor, vcache: torch.Tensor,
            scales: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
            quant: int) -> tuple[tuple[int, int], tuple[int, int, int]]:  # fmt: skip
    """Strides of qscale and kscale."""
    if quant < 0:
        return (0, 0), (0, 0, 0)
    qscale, kscale, vscale = scales
    pages, page_size, kv_heads, _ = vcache.shape
    for name, tensor in (("qscale", qscale), ("kscale", kscale), ("vscale", vscale)):
        checks.is_tensor(
            function, name, tensor, "Scales are tensors on the device, e.g. torch.ones(1, device='cuda')."
        )
        checks.same_device(function, name, tensor, q.device)  # type: ignore[arg-type]
    assert qscale is not None and kscale is not None and vscale is not None
    checks.dtype(function, "qscale", qscale, torch.float32)
    checks.shape(function, "qscale", qscale, (q.shape[0], q.shape[1]), "One scale a row and query head.")
    checks.inner_contiguous(function, "qscale", qscale)
    checks.dtype(function, "vscale", vscale, torch.float32)
    checks.contiguous(function, "vscale", vscale)
    if quant == 1:
        checks.dtype(function, "kscale", kscale, torch.float32)
        for name, tensor in (("kscale", kscale), ("vscale", vscale)):
            if tensor.numel() != 1:
                got = f"shape {list(tensor.shape)}"
                fail(
                    function,
                    name,
                    expected="one element (quant_type 1)",
                    got=got,
                    remedy="Use quant_type 0 for more.",
                )
        return (qscale.stride(0), 1), (0, 0, 0)
    checks.shape(function, "vscale", vscale, (kv_heads,), "quant_type 0 has one value scale a KV head.")
    checks.dtype(function, "kscale", kscale, (torch.float32, FP8, torch.uint8))
    checks.ndim(function, "kscale", kscale, 4, "Pass kscale as [num_pages, rows, num_kv_heads, scales].")
    checks.inner_contiguous(function, "kscale", kscale)
    size = kscale.element_size()
    in_row = kscale.shape[3] * size // 4
    whole = kscale.shape[3] * size % 4 == 0 and all(s * size % 4 == 0 for s in kscale.stride()[:3])
    if (
        kscale.shape[0] != pages
        or kscale.shape[2] != kv_heads
        or not whole
        or kscale.shape[1] * in_row < page_size
    ):
        expected = (
            f"fp32 [{pages}, rows, {kv_heads}, scales] (or its bytes) with rows * scales >= {page_size}"
        )
        fail(
            function,
            "kscale",
            expected=expected,
            got=list(kscale.shape),
            remedy="One scale a token and KV head.",
        )
    first, second, third = (s * size // 4 for s in kscale.stride()[:3])
    return (qscale.stride(0), 1), (first, second, third)


def _options(function: str, q: torch.Tensor, seq_lens: torch.Tensor, kv_heads: int, task_map: torch.Tensor | None,
             split_flag: torch.Tensor | None, output: torch.Tensor | None, window: int | None,
             logit_cap: float | None, sinks: torch.Tensor | None, splitk: bool, v_dim: int) -> None:  # fmt: skip
    if task_map is not None:
        workspace(function, task_map, q.device, kv_heads)
        if not splitk:
            remedy = "Pass task_map=None for one chunk a request."
            fail(function, "splitk", expected="True with a task map", got=False, remedy=remedy)
    if split_flag is not None:
        checks.dtype(function, "split_flag", split_flag, torch.int32)
        checks.same_device(function, "split_flag", split_flag, q.device)
        checks.shape(
            function,
            "split_flag",
            split_flag,
            (seq_lens.shape[0], kv_heads),
            "It is neither read nor written.",
        )
    if output is not None:
        checks.dtype(function, "output", output, torch.bfloat16)
        checks.same_device(function, "output", output, q.device)
        checks.shape(function, "output", output, (q.shape[0], q.shape[1], v_dim))
        checks.inner_contiguous(function, "output", output)
    if window is not None:
        checks.int_range(function, "window", window, 1, 2**30, "Pass None for no window.")
    if logit_cap is not None and not (isinstance(logit_cap, (int, float)) and logit_cap > 0):
        fail(
            function, "logit_cap", expected="a positive number", got=logit_cap, remedy="Pass None for no cap."
        )
    if sinks is not None:
        checks.dtype(function, "sinks", sinks, torch.float32, "Convert with .float().")
        checks.same_device(function, "sinks", sinks, q.device)
        checks.shape(function, "sinks", sinks, (q.shape[1],), "One logit a query head.")
        checks.contiguous(function, "sinks", sinks)


def workspace(function: str, task_map: torch.Tensor, device: torch.device, kv_heads: int) -> None:
    """A task map of enough bytes on `device`."""
    checks.dtype(function, "task_map", task_map, (torch.int8, torch.int32))
    checks.contiguous(function, "task_map", task_map)
    checks.same_device(function, "task_map", task_map, device)
    needed = 4 * plan.workspace_words(arch.sm_count(device), kv_heads)
    given = task_map.numel() * task_map.element_size()
    if given < needed:
        fail(
            function, "task_map", expected=f"at least {needed} bytes for {kv_heads} KV heads", got=f"{given} bytes",
            remedy="Allocate it with hpc.get_attention_decode_task_workspace for this number of heads.",
        )  # fmt: skip
    if task_map.data_ptr() % 16:
        fail(
            function, "task_map", expected="a 16-byte aligned tensor", got="an odd address", kind=InvalidDtype
        )
