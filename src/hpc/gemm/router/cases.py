"""The router product as tests, `hpc check`, `hpc bench` and `hpc warmup` see it: inputs, error limits, work, rivals."""

from __future__ import annotations

import importlib
import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch

import hpc
from hpc.bench.providers import Provider
from hpc.bench.rivals import router as rivals
from hpc.common.operator import Case, Floor, Progress, Tolerance
from hpc.gemm.router.reference import gemm_reference, split_reference
from hpc.gemm.router.weight import DEFAULT_SCALE

# (n, k) with measured plans, and the token counts they are measured at.
SHAPES = ((192, 4096), (768, 6144), (384, 3072), (256, 7168), (256, 4096), (128, 2048), (128, 6144))
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
# Shapes that no plan is measured for: odd, tiny, beyond every tile.
ODD_SHAPES = (
    (1, 1),
    (1, 64),
    (7, 24),
    (64, 100),
    (100, 100),
    (192, 4100),
    (65, 72),
    (160, 208),
    (896, 7168),
    (513, 640),
)

# Rounding the rest of a weight to BF16 leaves 2^-18 of it (2e-6 RMS); sums of 7168 products in the matrix unit's fp32
# add up to 8e-6. TF32 has 3e-4, one BF16 product 2e-3. Three parts and sums of 256 leave what FP32 cuBLAS has.
TOLERANCES = {2: Tolerance(rms=1.5e-5, max=2.5e-5), 3: Tolerance(rms=1.0e-6, max=2.0e-6)}
# Half a unit in the last place of BF16 is 1.7e-3 RMS.
BF16_OUTPUT = Tolerance(rms=2.2e-3, max=4.0e-3)


@dataclass(frozen=True)
class RouterCase:
    """One product. `pad` elements lie between rows of all operands; weights are normal with deviation 0.02."""

    m: int
    n: int
    k: int
    terms: int = 2
    fp32_output: bool = True
    pad: int = 0


@dataclass(frozen=True)
class GemmInputs:
    """All tensors of one call; `parts` are those of `weight`."""

    params: RouterCase
    x: torch.Tensor
    weight: torch.Tensor
    parts: tuple[torch.Tensor, ...]


def padded(tensor: torch.Tensor, pad: int) -> torch.Tensor:
    """The same values with `pad` NaN between rows."""
    if pad == 0:
        return tensor
    rows, width = tensor.shape
    buffer = torch.full((rows, width + pad), float("nan"), dtype=tensor.dtype, device=tensor.device)
    buffer[:, :width] = tensor
    return buffer[:, :width]


def make_inputs(params: RouterCase, device: torch.device | str, seed: int) -> GemmInputs:
    """Unit normal tokens, weights of deviation 0.02."""
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(params.m, params.k, generator=generator, device=device).to(torch.bfloat16)
    weight = torch.randn(params.n, params.k, generator=generator, device=device) * 0.02
    parts = split_reference(weight, DEFAULT_SCALE, params.terms)
    return GemmInputs(
        params, padded(x, params.pad), weight, tuple(padded(part, params.pad) for part in parts)
    )


def multiply(inputs: GemmInputs, **more: Any) -> torch.Tensor:
    """The public function."""
    high, low, *third = inputs.parts
    third_part: dict[str, Any] = {"w_third": third[0]} if third else {}
    return hpc.gemm_bf16xfp32(
        inputs.x, high, low, DEFAULT_SCALE, use_fp32_output=inputs.params.fp32_output, **third_part, **more
    )


def grid() -> list[RouterCase]:
    """Correctness: measured shapes and odd ones, token counts around every tile, both outputs, two and three parts."""
    cases = [
        RouterCase(m, n, k)
        for (n, k), m in itertools.product(SHAPES, (1, 2, 3, 7, 16, 33, 64, 200, 1030, 4096))
    ]
    cases += [RouterCase(m, n, k) for (n, k), m in itertools.product(ODD_SHAPES, (1, 2, 5, 17, 64, 300))]
    cases += [
        RouterCase(m, n, k, fp32_output=False)
        for (n, k), m in itertools.product(SHAPES[:3], (1, 8, 64, 500, 2048))
    ]
    cases += [
        RouterCase(m, n, k, terms=3) for (n, k), m in itertools.product(SHAPES[:4], (1, 2, 9, 64, 300, 2048))
    ]
    cases += [RouterCase(m, 100, 100, terms=3) for m in (1, 40)]
    cases += [
        RouterCase(m, 192, 4096, pad=pad) for m, pad in itertools.product((1, 16, 64, 300, 2000), (8, 3))
    ]
    cases += [RouterCase(131072 + 77, 64, 64), RouterCase(200_000, 192, 128, fp32_output=False)]
    return cases


INTERPRET = (
    RouterCase(1, 5, 40), RouterCase(2, 16, 64), RouterCase(3, 7, 24), RouterCase(17, 20, 70), RouterCase(5, 33, 130),
    RouterCase(2, 4, 64, terms=3), RouterCase(18, 9, 80, terms=3), RouterCase(1, 60, 32, fp32_output=False),
    RouterCase(20, 6, 72, fp32_output=False, pad=3),
)  # fmt: skip


def name_of(params: RouterCase) -> str:
    """For example `192x4096 M=64`, with what differs from the usual call."""
    extras = [f"{params.terms} terms"] * (params.terms != 2) + ["bf16 out"] * (not params.fp32_output)
    extras += [f"pad {params.pad}"] * (params.pad > 0)
    return " ".join([f"{params.n}x{params.k} M={params.m}", *extras])


def _cases(params: list[RouterCase] | tuple[RouterCase, ...], *tags: str) -> list[Case]:
    return [Case(name_of(p), frozenset(tags), p) for p in dict.fromkeys(params)]


class RouterOperator:
    """See `hpc.common.operator.Operator`."""

    name = "gemm.router"
    functions = ("gemm_bf16xfp32", "get_gemm_bf16xfp32_workspace", "split_router_weight")

    def cases(self, tag: str) -> list[Case]:
        """ "bench" and "target" are the same rows: every measured shape at every measured token count."""
        if tag == "gpu":
            return _cases(grid(), "gpu")
        if tag in ("interpret", "demo"):
            return _cases(INTERPRET, "interpret", "demo")
        return _cases(
            [RouterCase(m, n, k) for (n, k), m in itertools.product(SHAPES, TOKENS)], "bench", "target"
        )

    def make_inputs(self, case: Case, device: torch.device | str, seed: int) -> GemmInputs:
        return make_inputs(case.params, device, seed)

    def rotate(self, inputs: GemmInputs, seed: int) -> GemmInputs:
        """The same tokens, warm as the preceding norm leaves them, with cold weights."""
        del seed
        parts = tuple(part.clone() for part in inputs.parts)
        return replace(inputs, weight=inputs.weight.clone(), parts=parts)

    def call(self, inputs: GemmInputs) -> torch.Tensor:
        return multiply(inputs)

    def reference(self, inputs: GemmInputs) -> torch.Tensor:
        """By the FP32 weight, so that what the split loses counts."""
        return gemm_reference(inputs.x, (inputs.weight,), 1.0)

    def tolerance(self, case: Case) -> Tolerance:
        params: RouterCase = case.params
        return TOLERANCES[params.terms] if params.fp32_output else BF16_OUTPUT

    def floor(self, case: Case) -> Floor:
        """Cold weights read once; as many products as parts. Tokens are warm."""
        params: RouterCase = case.params
        size = params.n * params.k
        return Floor(bytes=2 * params.terms * size, flops=2.0 * params.terms * params.m * size, kind="bf16")

    def providers(self) -> dict[str, Provider]:
        """Two parts and three; cuBLAS in FP32 and TF32, and one BF16 product as a yardstick."""
        own = [
            Provider("hpc", lambda inputs: lambda: multiply(inputs)),
            Provider(
                "hpc/3 terms",
                _three_terms,
                tolerance=TOLERANCES[3],
                note="three BF16 parts: FP32-exact weights",
            ),
        ]
        return {provider.name: provider for provider in (*own, *rivals.providers(neutral))}

    def warmup(self, device: torch.device | str, progress: Progress | None) -> int:
        """Compile what the measured shapes reach: see `hpc.gemm.router.warm`."""
        warm = importlib.import_module("hpc.gemm.router.warm")
        count: int = warm.warmup(device, progress)
        return count


def _three_terms(inputs: GemmInputs) -> Any:
    three = replace(inputs, parts=split_reference(inputs.weight, DEFAULT_SCALE, 3))
    return lambda: multiply(three)


def neutral(inputs: GemmInputs) -> rivals.RouterInputs:
    """The call as other libraries take it."""
    return rivals.RouterInputs(inputs.x, inputs.weight, inputs.weight.to(torch.bfloat16))


OPERATOR = RouterOperator()
