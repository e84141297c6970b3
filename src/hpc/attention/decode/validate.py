"""Checks of a decode call. Metadata only; a signature that passed once is not checked again."""

from __future__ import annotations

import torch

from hpc.attention.decode import choose, plan
from hpc.attention.decode.arguments import Arguments, plain_numbers
from hpc.attention.decode.launch import Layout
from hpc.common import arch, attention_checks, checks
from hpc.common.errors import UnsupportedDevice, fail

FP8 = torch.float8_e4m3fn
MAX_GROUP, MAX_HEAD_DIM, MAX_PAGE = 64, 256, 256


def call(args: Arguments) -> tuple[choose.Key, Layout]:
    """Check every argument; the key that decides the plan, and the strides."""
    function, q, kcache, vcache = args.function, args.q, args.kcache, args.vcache
    plain_numbers(args)
    _options(args)
    _tensors(args)
    batch, s = args.seq_lens.shape[0], args.mtp + 1
    rows, q_heads, head_dim = q.shape
    num_pages, page_size, kv_heads, v_dim = vcache.shape
    if rows != batch * s:
        expected, remedy = (
            f"{batch * s} rows, num_seq_kvcache.size(0) * (mtp + 1)",
            "Pass mtp = query tokens a request - 1.",
        )
        fail(function, "q", expected=expected, got=f"{rows} rows", remedy=remedy)
    sizes(function, q_heads, kv_heads, head_dim, v_dim, page_size)
    if batch and num_pages == 0:
        fail(function, "kcache", expected="at least one page", got=0, remedy="Allocate the cache first.")
    qscale, kscale = _scales(function, q, vcache, args.scales, args.quant)
    _schedule(args, kv_heads)
    attention_checks.output_and_sinks(function, q, args.output, args.sinks, v_dim)
    k_strides, v_strides = _strides(kcache), _strides(vcache)
    aligned = all(
        tensor.data_ptr() % 16 == 0 and all(s > 0 and s * tensor.element_size() % 16 == 0 for s in strides)
        for tensor, strides in ((kcache, k_strides), (vcache, v_strides))
    )
    key = choose.Key(
        sm90=q.is_cuda and arch.is_hopper(q.device), sms=arch.sm_count(q.device), batch=batch, q_heads=q_heads,
        kv_heads=kv_heads, head_dim=head_dim, v_dim=v_dim, page_size=page_size, max_pages=args.block_ids.shape[1],
        num_new_tokens=s, quant_type=args.quant, window=args.window is not None, logit_cap=args.logit_cap is not None,
        sinks=args.sinks is not None, return_lse=bool(args.return_lse), dynamic=args.task_map is not None,
        new_kv_included=bool(args.new_kv_included), splitk=bool(args.splitk),
        batch_invariant=bool(args.batch_invariant), tma=aligned,
        gpu=arch.device_name(q.device) if q.is_cuda else "",
    )  # fmt: skip
    output, stored = args.output, args.scales[1]
    layout = Layout(
        q.stride()[:2], k_strides, v_strides,
        (q_heads * v_dim, v_dim) if output is None else output.stride()[:2], args.block_ids.stride(0), qscale, kscale,
        0 if args.quant != 0 or stored is None else stored.shape[-1] * stored.element_size() // 4, num_pages,
    )  # fmt: skip
    return key, layout


def _strides(cache: torch.Tensor) -> tuple[int, ...]:
    """Strides of pages, tokens and heads; of a dimension of one, whose stride says nothing, that of a packed row."""
    return tuple(
        s if n > 1 else cache.shape[3] for s, n in zip(cache.stride()[:3], cache.shape, strict=False)
    )


def flag(function: str, name: str, value: object) -> None:
    """A truth value that can be read without waiting for a GPU."""
    if isinstance(value, torch.Tensor):
        remedy = "Reading a tensor would wait for the GPU."
        fail(function, name, expected="True or False", got="a tensor", remedy=remedy)


def device(function: str, name: str, tensor: torch.Tensor) -> None:
    """A GPU that the kernels support, or a CPU."""
    if tensor.is_cuda:
        arch.require_gpu(function, tensor.device)
    elif tensor.device.type != "cpu":
        remedy = "Elsewhere there are neither kernels nor a reference."
        fail(
            function,
            name,
            expected="a CUDA or CPU tensor",
            got=tensor.device,
            remedy=remedy,
            kind=UnsupportedDevice,
        )


def available(function: str, where: torch.device | str) -> torch.device:
    """A named device, with its index if it is a GPU."""
    found = torch.device(where)
    if found.type != "cuda":
        return found
    if not arch.gpu_available():
        remedy = "Pass device='cpu' to try the library without one."
        fail(function, "device", expected="a device of this machine", got=f"{found}, and torch sees no GPU",
             remedy=remedy, kind=UnsupportedDevice)  # fmt: skip
    return torch.device("cuda", arch.device_index(found))


def _options(args: Arguments) -> None:
    for name in ("new_kv_included", "splitk", "return_lse", "batch_invariant"):
        flag(args.function, name, getattr(args, name))
    if args.plan is not None and not isinstance(args.plan, choose.Plan):
        got, remedy = type(args.plan).__name__, "Pass plan=None for the analytic choice."
        fail(args.function, "plan", expected="a Plan of hpc.attention.decode.choose", got=got, remedy=remedy)


def _tensors(args: Arguments) -> None:
    function, quant, q, kcache, vcache = args.function, args.quant, args.q, args.kcache, args.vcache
    block_ids, seq_lens = args.block_ids, args.seq_lens
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
    device(function, "q", q)
    if quant >= 0 and (q.stride(0) % 2 or q.stride(1) % 2):
        fail(function, "q", expected="even strides", got=q.stride(), remedy="Call .contiguous() on it.")


def sizes(function: str, q_heads: int, kv_heads: int, head_dim: int, v_dim: int, page_size: int,
          names: tuple[str, str, str, str] = ("q", "q", "vcache", "kcache")) -> None:  # fmt: skip
    """Head counts, head dims and page sizes that have kernels; `names` are the arguments that an error blames."""
    heads, key_dim, value_dim, page = names
    if kv_heads < 1 or q_heads % kv_heads or not 1 <= q_heads // kv_heads <= MAX_GROUP:
        fail(
            function, heads, expected=f"num_q_heads = group * num_kv_heads with a group of 1 to {MAX_GROUP}",
            got=f"{q_heads} query heads over {kv_heads} KV heads", remedy="Pad or repeat heads to a whole group.",
        )  # fmt: skip
    for name, dim in ((key_dim, head_dim), (value_dim, v_dim)):
        if not 8 <= dim <= MAX_HEAD_DIM or dim % 8:
            expected = f"a head dim of 8 to {MAX_HEAD_DIM}, a multiple of 8"
            fail(function, name, expected=expected, got=dim, remedy="Pad the heads with zeros.")
    if page_size < 1 or page_size > MAX_PAGE or page_size & (page_size - 1):
        expected = f"a page size that is a power of two up to {MAX_PAGE}"
        remedy = "View the cache with another page size."
        fail(function, page, expected=expected, got=page_size, remedy=remedy)


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
    if kscale.data_ptr() % 4:
        remedy = "Align the buffer of the scales."
        fail(
            function,
            "kscale",
            expected="4-byte aligned scales",
            got=f"address {kscale.data_ptr():#x}",
            remedy=remedy,
        )
    first, second, third = (s * size // 4 for s in kscale.stride()[:3])
    return (qscale.stride(0), 1), (first, second, third)


def _schedule(args: Arguments, kv_heads: int) -> None:
    function, split_flag = args.function, args.split_flag
    if args.task_map is not None:
        workspace(function, args.task_map, args.q.device, kv_heads)
        if not args.splitk:
            remedy = "Pass task_map=None for one chunk a request."
            fail(function, "splitk", expected="True with a task map", got=False, remedy=remedy)
        if args.batch_invariant:
            remedy = "A balanced schedule depends on the batch; pass task_map=None for batch-invariant bits."
            fail(function, "batch_invariant", expected="False with a task map", got=True, remedy=remedy)
    if split_flag is not None:
        checks.dtype(function, "split_flag", split_flag, torch.int32)
        checks.same_device(function, "split_flag", split_flag, args.q.device)
        wanted = (args.seq_lens.shape[0], kv_heads)
        checks.shape(function, "split_flag", split_flag, wanted, "It is neither read nor written.")


def workspace(function: str, task_map: torch.Tensor, where: torch.device, kv_heads: int) -> None:
    """A task map of enough bytes on the device `where`."""
    checks.dtype(function, "task_map", task_map, (torch.int8, torch.int32))
    checks.ndim(function, "task_map", task_map, 1, "Pass the workspace as it was allocated.")
    checks.contiguous(function, "task_map", task_map)
    checks.same_device(function, "task_map", task_map, where)
    needed = 4 * plan.workspace_words(arch.sm_count(where), kv_heads)
    given = task_map.numel() * task_map.element_size()
    if given < needed:
        fail(
            function, "task_map", expected=f"at least {needed} bytes for {kv_heads} KV heads", got=f"{given} bytes",
            remedy="Allocate it with hpc.get_attention_decode_task_workspace for this number of heads.",
        )  # fmt: skip
    if task_map.data_ptr() % 16:
        got, remedy = (
            f"an address {task_map.data_ptr() % 16} bytes past one",
            "Do not slice its first bytes off.",
        )
        fail(function, "task_map", expected="a 16-byte aligned tensor", got=got, remedy=remedy)


def filled_map(function: str, task_map: torch.Tensor) -> None:
    """A task map whose header, if it was filled, speaks of a schedule that it holds. Reads the header."""
    checks.dtype(function, "task_map", task_map, (torch.int8, torch.int32))
    checks.ndim(function, "task_map", task_map, 1, "Pass the workspace as it was allocated.")
    checks.contiguous(function, "task_map", task_map)
    given = task_map.numel() * task_map.element_size()
    remedy = "Pass a workspace of hpc.get_attention_decode_task_workspace."
    if given < 4 * plan.HEADER_WORDS or given % 4 or task_map.data_ptr() % 4:
        expected = f"at least {4 * plan.HEADER_WORDS} bytes of whole, aligned int32 words"
        fail(function, "task_map", expected=expected, got=f"{given} bytes", remedy=remedy)
    words = task_map.view(torch.int32)[: plan.HEADER_WORDS].tolist()
    if words[7] != plan.LAYOUT_VERSION:
        return  # not filled yet
    kv_heads, sms = words[2], arch.sm_count(task_map.device)
    if kv_heads < 1 or words[1] != plan.num_bins(sms, kv_heads, plan.NUM_VARIANTS - 1) * kv_heads:
        expected = f"a schedule for {sms} multiprocessors"
        fail(function, "task_map", expected=expected, got=f"a header of {words[:8]}", remedy=remedy)
    workspace(function, task_map, task_map.device, kv_heads)
