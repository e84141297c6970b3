"""The full grid on a GPU, through the public functions, against the reference on the CPU, bit for bit."""

from __future__ import annotations

import pytest
import torch
from rope_support import assert_same, expected, make, outputs, poison, same_bits

import hpc
from hpc.rope import case_lists, cases, plan, reference
from hpc.testing import assert_close, guarded

pytestmark = pytest.mark.gpu

GRID = {case.name: case.params for case in case_lists.gpu_cases()}
TINY = {case.name: case.params for case in case_lists.interpret_cases()}


@pytest.mark.parametrize("name", GRID | TINY)
def test_equals_the_reference_bit_for_bit(name: str) -> None:
    """Queries between guards; caches, kept keys and values, scales and flags over NaN."""
    params = (GRID | TINY)[name]
    inputs = cases.make_tensors(params, "cuda", seed=1)
    out_q = guarded((params.tokens, params.q_heads, params.head_dim), inputs.cache.kcache.dtype, "cuda")
    given = poison(inputs)
    torch.empty(1 << 22, device="cuda").fill_(float("nan"))  # fresh outputs come from this block
    have = outputs(given, cases.prologue(given, out_q=out_q.tensor))
    assert have["out_q"] is out_q.tensor
    out_q.check_guards(name)
    assert_same(have, expected(inputs), name)
    if params.tokens:
        codes = cases.queries(cases.prologue(cases.copied(inputs)))
        assert_close(codes, cases.exact(inputs)[0], cases.tolerance(params), name)


@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
@pytest.mark.parametrize("norm_policy", [0, 1, 2])
def test_many_tokens(dtype: str, norm_policy: int) -> None:
    """Enough programs for every multiprocessor, several requests a tile, twice the same bits."""
    lens = (3000, 1111, 1, 700, 64)
    inputs = make(lens, lens, (64, 8), "cuda", dtype=dtype, norm_policy=norm_policy, is_prefill=True)
    first = outputs(one := poison(inputs), cases.prologue(one))
    assert_same(first, expected(inputs), "first")
    assert_same(outputs(two := poison(inputs), cases.prologue(two)), first, "second")


@pytest.mark.parametrize("heads", [(8, 1), (24, 2), (64, 8)], ids=str)
@pytest.mark.parametrize("policy", [0, 1, 2])
@pytest.mark.parametrize("form", ["bf16", "fp8 prefill", "fp8 decode", "fp8 fixed"])
def test_plans_of_the_sm90_kernel(heads: tuple[int, int], policy: int, form: str) -> None:
    """Any split into programs gives the bits of the reference; padded requests, a spare row, NaN, infinities, zeros."""
    lens, new = (300, 70, 5, 0, 64, 17, 4097), (129, 33, 5, 2, 1, 0, 700)
    for dim in (128, 64, 256):
        rows = 512 // dim
        rest = {"dtype": form[:4].strip(), "quant_policy": 2 if "fixed" in form else 1, "head_dim": dim,
                "is_prefill": "decode" not in form, "norm_policy": policy, "layout": "HND" if dim == 64 else "NHD",
                "keep_k": dim == 256, "keep_v": dim == 256, "spare_rows": 3}  # fmt: skip
        inputs = make(lens, new, heads, "cuda", **rest)
        inputs.qkv[1, 5], inputs.qkv[2, :dim] = float("nan"), 0
        inputs.qkv[3, 7], inputs.qkv[4, 3 * dim + 1] = float("inf"), float("-inf")
        want = expected(inputs)
        for part, tokens, steps, registers in (
            (rows, 1, 1, 80),
            (heads[0], 3, 1, 128),
            (heads[0] // 2, 7, 3, 64),
        ):
            if heads[0] % part or part % rows:
                continue
            chosen = plan.Plan(part, 1, tokens=tokens, steps=steps, registers=registers)
            given = poison(inputs)
            assert_same(outputs(given, cases.prologue(given, plan=chosen)), want, f"{dim} {chosen}")


def test_every_bf16_value_in_every_conversion() -> None:
    """All 65536 bit patterns as values and, by a fixed scale of one, as queries: codes as on the CPU, NaN as 0x7F."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).view(256, 256)
    qkv = torch.cat((every, every, every), 1).contiguous()
    table = torch.cat((torch.ones(256, 128), torch.zeros(256, 128)), 1)
    index, lens = torch.tensor([0, 256]), torch.tensor([256])

    def run(device: str) -> list[torch.Tensor]:
        caches = [torch.zeros(1, 256, 1, 256, device=device).to(torch.float8_e4m3fn) for _ in range(2)]
        ids = torch.zeros(1, 1, dtype=torch.int32, device=device)
        out, none, _ = hpc.rope_norm_store_kv_fp8(
            *caches, qkv.to(device), table.to(device), lens.int().to(device), index.int().to(device), ids, True, 1.0,
            None, 2, q_scale_inv=torch.ones(1, device=device),
        )  # fmt: skip
        assert none is None
        return [out, *caches]

    for have, want in zip(run("cuda"), run("cpu"), strict=True):
        assert same_bits(have, want)


@pytest.mark.parametrize("by_request", [False, True])
@pytest.mark.parametrize(("heads", "dim"), [(8, 128), (64, 128), (5, 80), (28, 64), (3, 256)])
def test_queries_alone(heads: int, dim: int, by_request: bool) -> None:
    q = torch.randn(300, heads, dim, device="cuda").mul_(10).bfloat16()
    q[3] = 0
    index = torch.tensor([0, 100, 100, 290], dtype=torch.int32, device="cuda") if by_request else None
    torch.empty(1 << 22, device="cuda").fill_(float("nan"))
    out, scale = hpc.quantize_query_fp8(q, index, 190 if by_request else 0)
    want = hpc.quantize_query_fp8(q.cpu(), None if index is None else index.cpu(), 190 if by_request else 0)
    assert same_bits(out, want[0]) and same_bits(scale, want[1])
    turned = q.transpose(0, 1).contiguous().transpose(0, 1)
    again = hpc.quantize_query_fp8(turned, index, 190 if by_request else 0, out_q=torch.empty_like(out))
    assert same_bits(again[0], out) and same_bits(again[1], scale)


def test_row_17_offsets_beyond_32_bits() -> None:
    """A projection and a cache of more than 2^31 elements; the last tokens lie behind both limits."""
    rows, heads = 215_000, (64, 8)
    inputs = make((8, 6), (8, 6), heads, "cuda", is_prefill=True)
    width = inputs.qkv.shape[1]
    qkv = torch.empty((rows, width), dtype=torch.bfloat16, device="cuda")
    qkv[rows - 14 :] = inputs.qkv
    assert qkv.numel() > 2**31
    pages = 2**31 // (64 * 8 * 128) + 8
    caches = [torch.empty((pages, 64, 8, 128), dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    ids = torch.tensor([[pages - 1], [pages - 2]], dtype=torch.int32, device="cuda")
    index = torch.tensor([rows - 14, rows - 6, rows], dtype=torch.int32, device="cuda")
    out = hpc.rope_norm_store_kv(
        *caches, qkv, inputs.cos_sin, inputs.seq_lens, index, ids, True, inputs.q_weight, inputs.k_weight,
        qk_norm_policy=2,
    )  # fmt: skip
    want = cases.prologue(inputs)
    assert torch.equal(out[rows - 14 :], want) and not out[: rows - 14].any()
    for cache, small in zip(caches, (inputs.cache.kcache, inputs.cache.vcache), strict=True):
        for b, length in enumerate((8, 6)):
            page = small[int(inputs.cache.block_ids[b, 0])]
            assert torch.equal(cache[pages - 1 - b], page) and not page[length:].any()


@pytest.mark.parametrize("shift", [1, 4])
def test_tensors_off_16_bytes(shift: int) -> None:
    """Views that begin anywhere: slower, not wrong; and the aligned call afterwards is not mixed up with it."""
    inputs = make((70, 9), (5, 9), (8, 2), "cuda", dtype="fp8", is_prefill=True)
    want = expected(inputs)
    buffer = torch.empty(inputs.qkv.numel() + shift, dtype=torch.bfloat16, device="cuda")
    moved = buffer[shift:].view(inputs.qkv.shape).copy_(inputs.qkv)
    for qkv in (moved, inputs.qkv, moved):
        given = poison(inputs)
        object.__setattr__(given, "qkv", qkv)
        assert_same(outputs(given, cases.prologue(given)), want, f"shift {shift}")


def test_accuracy_of_keys_and_values() -> None:
    """Stored keys and values against float64, both formats."""
    for dtype in ("bf16", "fp8"):
        inputs = make(
            (130, 64, 7), (130, 20, 7), (8, 2), "cuda", dtype=dtype, is_prefill=True, keep_k=True, keep_v=True
        )
        cases.prologue(inputs)
        _, k, v = cases.exact(inputs)
        for have, want, scale in ((inputs.out_k, k, cases.K_SCALE), (inputs.out_v, v, cases.V_SCALE)):
            assert have is not None
            wanted = (want / scale).clamp(-448, 448) if dtype == "fp8" else want
            assert_close(have, wanted, cases.TOLERANCES[dtype], dtype)
    assert reference.FP8_MAX == 448
