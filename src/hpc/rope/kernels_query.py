# mypy: ignore-errors
"""The Triton kernel that quantises queries alone; it runs on any GPU and, interpreted, on a CPU."""

import triton
import triton.language as tl

from hpc.common.triton_helpers import pdl_wait, to_e4m3_bytes
from hpc.rope.kernels import _clear_scales, _find
from hpc.rope.kernels_head import _amax, _dynamic_scale, _fp32

_SCALARS = ["num_tokens", "num_req", "scale_cols", "num_q"]
_NARROW = ["q_scale_ptr", "q_index_ptr"]  # their alignment decides nothing


@triton.jit(do_not_specialize=_SCALARS, do_not_specialize_on_alignment=_NARROW)
def _quantize_query_kernel(
    q_ptr, out_q_ptr, q_scale_ptr, q_index_ptr, num_tokens, num_req, requests_per_token, scale_cols, num_q, upper,
    stride_qt, stride_qh, stride_ot, stride_oh,
    HQ: tl.constexpr, D: tl.constexpr, D_P: tl.constexpr, TB: tl.constexpr, HB: tl.constexpr,
    BY_REQUEST: tl.constexpr, CLEARERS: tl.constexpr, PDL: tl.constexpr, SOFT: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """scale = max(1e-6, max|q|) / upper a token and head, code = e4m3(q * (1/scale)).

    Grid: num_q programs of TB tokens x HB heads; by request, num_req * CLEARERS more that zero the scales without a
    token. By request, scales go to [num_req, HQ, scale_cols] and rows of no request are zero.
    """
    pid = tl.program_id(0)
    pdl_wait(PDL)
    if pid < num_q:
        blocks: tl.constexpr = (HQ + HB - 1) // HB
        token = (pid // blocks) * TB + tl.arange(0, TB)
        head = (pid % blocks) * HB + tl.arange(0, HB)
        inside = (token < num_tokens)[:, None] & (head < HQ)[None, :]
        row, column = token[:, None].to(tl.int64), head[None, :].to(tl.int64)
        i = tl.arange(0, D_P)[None, None, :]
        mask = inside[:, :, None] & (i < D)
        q = tl.load((q_ptr + row * stride_qt + column * stride_qh)[:, :, None] + i, mask=mask, other=0.0)
        q = _fp32(q)
        scale, inverse = _dynamic_scale(_amax(q, INTERPRET), upper)
        if BY_REQUEST:
            request, start, _, owned = _find(token, q_index_ptr, q_index_ptr, num_req, requests_per_token)
            place = (token - start)[:, None]
            room = place < scale_cols
            ptrs = q_scale_ptr + (request[:, None].to(tl.int64) * HQ + column) * scale_cols + place
            tl.store(ptrs, scale, mask=inside & owned[:, None] & room)
            inverse = tl.where(room, inverse, float("nan"))  # a scale without a place must not go unseen
            q = tl.where(owned[:, None, None], q * inverse[:, :, None], 0.0)
        else:
            tl.store(q_scale_ptr + row * HQ + column, scale, mask=inside)
            q = q * inverse[:, :, None]
        out = (out_q_ptr + row * stride_ot + column * stride_oh)[:, :, None] + i
        tl.store(out, to_e4m3_bytes(q, SOFT), mask=mask)
    elif BY_REQUEST:
        rest = pid - num_q
        _clear_scales(rest // CLEARERS, rest % CLEARERS, CLEARERS, q_scale_ptr, q_index_ptr, scale_cols, HQ)


_quantize_query_unaligned_kernel = triton.jit(
    _quantize_query_kernel.fn,
    do_not_specialize=_SCALARS,
    do_not_specialize_on_alignment=[*_NARROW, "q_ptr", "out_q_ptr"],
)
