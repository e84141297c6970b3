"""Checks of a prefill call. Metadata only; a signature that passed once is not checked again."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch

from hpc.attention.prefill import plan
from hpc.common import arch, attention_checks, checks
from hpc.common.errors import fail
from hpc.common.quant import QuantType

FP8 = torch.float8_e4m3fn
MAX_GROUP, MAX_HEAD_DIM, MAX_PAGE = 64, 256, 256
Scales = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def quant_type(function: str, value: QuantType | int) -> int:
    """0 or 1, or an exception that lists both."""
    number = value.value if isinstance(value, QuantType) else value
    checks.one_of(function, "quant_type", number, (0, 1), "Only these two have kernels.")
    return int(number)


@dataclass(frozen=True)
class Arguments:
    """One prefill call. Ragged: `block_ids` is None and `seq_lens` the query lengths. BF16: no scales, quant -1.

    Annotated as they should be: nothing is checked yet.
    """

    function: str
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens: torch.Tensor
    block_ids: torch.Tensor | None
    seq_lens: torch.Tensor
    max_seqlens_q: int | torch.Tensor
    scales: Scales = (None, None, None)
    quant: int = -1
    output: torch.Tensor | None = None
    softmax_scale: float | None = None
    window: int | None = None
    logit_cap: float | None = None
    sinks: torch.Tensor | None = None
    causal: bool = True
    return_lse: bool = False
    plan: plan.Plan | None = None

    @property
    def paged(self) -> bool:
        return self.block_ids is not None

    @property
    def names(self) -> tuple[str, str, str]:
        """What the public function calls keys, values and lengths."""
        return ("kcache", "vcache", "seqlens_kvcache") if self.paged else ("k", "v", "seqlens_q")

    def values(self) -> tuple[Any, ...]:
        """All fields in their order."""
        return tuple(getattr(self, name) for name in self.__dataclass_fields__)


@dataclass(frozen=True)
class Layout:
    """Strides of the tensors of a call, in elements, and what else does not change with rows and requests."""

    q: tuple[int, ...]
    k: tuple[int, ...]  # page, token, head; ragged: 0, token, head
    v: tuple[int, ...]
    out: tuple[int, ...]
    kscale: tuple[int, int, int]
    kscale_row: int  # fp32 scales in a row of a quant type 0 buffer
    num_pages: int


def plain_numbers(args: Arguments) -> tuple[Any, ...]:
    """The fields with Python's own ints and floats, or an exception for a value that is none or not allowed."""
    cap = _number(args, "logit_cap")
    if cap is not None and cap <= 0:
        remedy = "Pass None for no cap."
        fail(args.function, "logit_cap", expected="a positive number", got=args.logit_cap, remedy=remedy)
    window = args.window
    if window is not None:
        window = checks.int_range(args.function, "window", window, 1, 2**30, "Pass None for no window.")
    return replace(args, window=window, logit_cap=cap, softmax_scale=_number(args, "softmax_scale")).values()


def _number(args: Arguments, name: str) -> float | None:
    value = getattr(args, name)
    if value is None:
        return None
    if not isinstance(value, Real) or isinstance(value, bool) or not math.isfinite(value):
        expected = "a positive number that is finite" if name == "logit_cap" else "a finite number"
        got = f"a {type(value).__name__}" if isinstance(value, torch.Tensor) else repr(value)
        remedy = "Pass a Python float, or None for the default."
        fail(args.function, name, expected=expected, got=got, remedy=remedy)
    return float(value)


def call(args: Arguments) -> tuple[plan.Key, Layout]:
    """Check every argument; the key that decides the plan, and the strides."""
    function, q, k, v = args.function, args.q, args.k, args.v
    plain_numbers(args)
    _options(args)
    _tensors(args)
    _, q_heads, head_dim = q.shape
    kv_heads, v_dim = v.shape[-2:]
    page_size = v.shape[1] if args.paged else 0
    _sizes(args, q_heads, kv_heads, head_dim, v_dim)
    if args.paged and args.seq_lens.shape[0] and v.shape[0] == 0:
        fail(function, "kcache", expected="at least one page", got=0, remedy="Allocate the cache first.")
    kscale = _scales(args)
    attention_checks.output_and_sinks(function, q, args.output, args.sinks, v_dim)
    tensors = (q, k, v) if args.output is None else (q, k, v, args.output)
    aligned = all(
        t.data_ptr() % 16 == 0 and all(stride * t.element_size() % 16 == 0 for stride in t.stride()[:-1])
        for t in tensors
    )
    key = plan.Key(
        sm90=q.is_cuda and arch.is_hopper(q.device), sms=arch.sm_count(q.device), q_heads=q_heads, kv_heads=kv_heads,
        head_dim=head_dim, v_dim=v_dim, page_size=page_size, quant_type=args.quant, causal=bool(args.causal),
        window=args.window is not None, logit_cap=args.logit_cap is not None, sinks=args.sinks is not None,
        return_lse=bool(args.return_lse), tma=aligned,
        positive_scale=args.softmax_scale is None or args.softmax_scale > 0,
    )  # fmt: skip
    k_strides, v_strides = ((*((0,) if not args.paged else ()), *t.stride()[:-1]) for t in (k, v))
    out = (q_heads * v_dim, v_dim) if args.output is None else args.output.stride()[:2]
    stored = args.scales[1]
    in_row = 0 if args.quant != 0 or stored is None else stored.shape[-1] * stored.element_size() // 4
    layout = Layout(
        q.stride()[:2], k_strides, v_strides, out, kscale, in_row, v.shape[0] if args.paged else 0
    )
    return key, layout


def _options(args: Arguments) -> None:
    for name in ("causal", "return_lse"):
        if isinstance(getattr(args, name), torch.Tensor):
            remedy = "Reading a tensor would wait for the GPU."
            fail(args.function, name, expected="True or False", got="a tensor", remedy=remedy)
    if isinstance(args.max_seqlens_q, torch.Tensor):
        if args.max_seqlens_q.numel() != 1:
            got = f"shape {list(args.max_seqlens_q.shape)}"
            fail(args.function, "max_seqlens_q", expected="an int or one element", got=got)
    else:
        remedy = "Pass the longest number of new tokens of a request, or more."
        checks.int_range(args.function, "max_seqlens_q", args.max_seqlens_q, 0, None, remedy)
    if args.plan is not None and not isinstance(args.plan, plan.Plan):
        got, remedy = type(args.plan).__name__, "Pass plan=None for the analytic choice."
        fail(args.function, "plan", expected="a Plan of hpc.attention.prefill.plan", got=got, remedy=remedy)


def _tensors(args: Arguments) -> None:
    function, q, k, v, ids, lens = args.function, args.q, args.k, args.v, args.block_ids, args.seq_lens
    k_name, v_name, lens_name = args.names
    stored = FP8 if args.quant >= 0 else torch.bfloat16
    other = "attention_with_kvcache_prefill_" + ("bf16" if args.quant >= 0 else "fp8")
    for name, tensor in (("q", q), (k_name, k), (v_name, v)):
        remedy = f"Bytes are never reinterpreted; see hpc.{other} for the other."
        checks.dtype(function, name, tensor, stored, remedy)
    for name, tensor in (("cu_seqlens_q", args.cu_seqlens), (lens_name, lens)):
        checks.dtype(function, name, tensor, torch.int32, "Convert with .to(torch.int32).")
        checks.ndim(function, name, tensor, 1, "Pass one number a request.")
        checks.contiguous(function, name, tensor)
        checks.same_device(function, name, tensor, q.device)
    checks.ndim(function, "q", q, 3, "Pass q as [total tokens, num_q_heads, head_dim].")
    batch = lens.shape[0]
    checks.shape(function, "cu_seqlens_q", args.cu_seqlens, (batch + 1,), "One more than there are requests.")
    shape = (
        "[num_pages, page_size, num_kv_heads, head_dim]" if args.paged else "[total, num_kv_heads, head_dim]"
    )
    for name, tensor in ((k_name, k), (v_name, v)):
        checks.ndim(function, name, tensor, 4 if args.paged else 3, f"Pass {name} as {shape}.")
        checks.same_device(function, name, tensor, q.device)
    checks.shape(
        function, k_name, k, (*v.shape[:-1], q.shape[2]), "K and V share all but the head dim, K has q's."
    )
    if ids is not None:
        checks.dtype(function, "block_ids", ids, torch.int32, "Convert with .to(torch.int32).")
        checks.shape(function, "block_ids", ids, (batch, "max_pages"), "Pass one row a request.")
        checks.same_device(function, "block_ids", ids, q.device)
        checks.inner_contiguous(function, "block_ids", ids)
    elif k.shape[0] != q.shape[0]:
        expected, remedy = f"{q.shape[0]} rows, as many as q", "Keys are those of the query tokens."
        fail(function, k_name, expected=expected, got=f"{k.shape[0]} rows", remedy=remedy)
    for name, tensor in (("q", q), (k_name, k), (v_name, v)):
        checks.inner_contiguous(function, name, tensor)
    if q.is_cuda:
        arch.require_gpu(function, q.device)


def _sizes(args: Arguments, q_heads: int, kv_heads: int, head_dim: int, v_dim: int) -> None:
    function, (k_name, v_name, _) = args.function, args.names
    if kv_heads < 1 or q_heads % kv_heads or not 1 <= q_heads // kv_heads <= MAX_GROUP:
        fail(
            function, "q", expected=f"num_q_heads = group * num_kv_heads with a group of 1 to {MAX_GROUP}",
            got=f"{q_heads} query heads over {kv_heads} KV heads", remedy="Pad or repeat heads to a whole group.",
        )  # fmt: skip
    for name, dim in (("q", head_dim), (v_name, v_dim)):
        if not 8 <= dim <= MAX_HEAD_DIM or dim % 8:
            expected = f"a head dim of 8 to {MAX_HEAD_DIM}, a multiple of 8"
            fail(function, name, expected=expected, got=dim, remedy="Pad the heads with zeros.")
    if args.paged:
        page_size = args.v.shape[1]
        if page_size < 1 or page_size > MAX_PAGE or page_size & (page_size - 1):
            expected = f"a page size that is a power of two up to {MAX_PAGE}"
            remedy = "View the cache with another page size."
            fail(function, k_name, expected=expected, got=page_size, remedy=remedy)


def _scales(args: Arguments) -> tuple[int, int, int]:
    """Strides of kscale in fp32 units."""
    if args.quant < 0:
        return 0, 0, 0
    function, (qscale, kscale, vscale) = args.function, args.scales
    pages, page_size, kv_heads, _ = args.v.shape
    remedy = "Scales are float32 tensors on the device, e.g. torch.ones(1, device='cuda')."
    for name, tensor in (("qscale", qscale), ("kscale", kscale), ("vscale", vscale)):
        checks.is_tensor(function, name, tensor, remedy)
        checks.same_device(function, name, tensor, args.q.device)  # type: ignore[arg-type]
    assert qscale is not None and kscale is not None and vscale is not None
    checks.dtype(function, "qscale", qscale, torch.float32)
    wanted = (args.seq_lens.shape[0], args.q.shape[1], "padded tokens")
    checks.shape(function, "qscale", qscale, wanted, "One scale a request, query head and new token.")
    checks.inner_contiguous(function, "qscale", qscale)
    longest = args.max_seqlens_q
    if isinstance(longest, int) and qscale.shape[0] and qscale.shape[2] < min(longest, args.q.shape[0]):
        expected = f"at least {min(longest, args.q.shape[0])} scales a head"
        fail(
            function,
            "qscale",
            expected=expected,
            got=qscale.shape[2],
            remedy="Its last dim holds max_seqlens_q.",
        )
    checks.dtype(function, "vscale", vscale, torch.float32)
    checks.contiguous(function, "vscale", vscale)
    if args.quant == 1:
        checks.dtype(function, "kscale", kscale, torch.float32)
        for name, tensor in (("kscale", kscale), ("vscale", vscale)):
            if tensor.numel() != 1:
                got = f"shape {list(tensor.shape)}"
                remedy = "Use quant_type 0 for more."
                fail(function, name, expected="one element (quant_type 1)", got=got, remedy=remedy)
        return 0, 0, 0
    checks.shape(function, "vscale", vscale, (kv_heads,), "quant_type 0 has one value scale a KV head.")
    checks.dtype(function, "kscale", kscale, (torch.float32, FP8, torch.uint8))
    checks.ndim(function, "kscale", kscale, 4, "Pass kscale as [num_pages, rows, num_kv_heads, scales].")
    checks.inner_contiguous(function, "kscale", kscale)
    size = kscale.element_size()
    in_row = kscale.shape[3] * size // 4
    whole = kscale.shape[3] * size % 4 == 0 and all(s * size % 4 == 0 for s in kscale.stride()[:3])
    fits = kscale.shape[0] == pages and kscale.shape[2] == kv_heads and kscale.shape[1] * in_row >= page_size
    if not (whole and fits and kscale.data_ptr() % 4 == 0):
        expected = (
            f"fp32 [{pages}, rows, {kv_heads}, scales] (or its bytes) with rows * scales >= {page_size}"
        )
        remedy = "One scale a token and KV head."
        fail(function, "kscale", expected=expected, got=list(kscale.shape), remedy=remedy)
    first, second, third = (s * size // 4 for s in kscale.stride()[:3])
    return first, second, third
