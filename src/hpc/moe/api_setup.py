"""What an engine asks before it serves: whether weights can be, padding, size of the scratch."""

from __future__ import annotations

import torch

from hpc.common import arch, checks
from hpc.common.errors import fail
from hpc.moe import choose, plan, scratch, validate


def check_moe_weights(
    gate_up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    gate_up_scale: torch.Tensor | None = None,
    down_scale: torch.Tensor | None = None,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> None:
    """Refuse at load what a call of the fused MoE with these weights would refuse later, with the same message.

    Which function they are for is seen by them: BF16 weights without scales `fuse_moe_bf16`, e4m3 weights with scales
    of three dimensions `fuse_moe_blockwise`, others `fuse_moe`. Reads no data.

    Args:
        gate_up_weight: float8_e4m3fn or BF16 [E, 2 I, H].
        down_weight: of the same dtype, [E, H, I].
        gate_up_scale, down_scale: float32, as in the function; None for BF16.
        gate_up_bias, down_bias: as in `fuse_moe`.

    Raises:
        InvalidArgument, InvalidDtype, UnsupportedDevice: naming argument, expected and got, and what can be done.

    Source: own.
    """
    name = "check_moe_weights"
    checks.is_tensor(name, "gate_up_weight", gate_up_weight)
    checks.ndim(name, "gate_up_weight", gate_up_weight, 3)
    wide = gate_up_weight.dtype == torch.bfloat16
    kind = "bf16" if wide else "block" if getattr(gate_up_scale, "ndim", 1) == 3 else "tensor"
    for argument, scale in (("gate_up_scale", gate_up_scale), ("down_scale", down_scale)):
        if wide and scale is not None:
            fail(name, argument, expected="None for BF16 weights", got="a tensor")

    def none(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=gate_up_weight.device)

    hidden = gate_up_weight.shape[2]
    x = none(0, hidden, dtype=torch.bfloat16 if wide else validate.FP8)
    x_scale = none(0, plan.ceil_div(hidden, 128)) if kind == "block" else None
    args = validate.Arguments(
        x, gate_up_weight, down_weight, gate_up_scale, down_scale, none(0, 1, dtype=torch.int32), none(0, 1), x_scale,
        None, None, None, None, gate_up_bias, down_bias, kind,
    )  # fmt: skip
    validate.call(name, args, 0, 0, True)


def pad_moe_biases(
    gate_up_bias: torch.Tensor,
    down_bias: torch.Tensor,
    *,
    inter_multiple: int = 64,
    hidden_multiple: int = 64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Biases for the weights that `pad_moe_weights` gives, by zeros.

    Args:
        gate_up_bias: BF16 or float32 [E, 2 I], gate before up.
        down_bias: BF16 or float32 [E, H].
        inter_multiple, hidden_multiple: as in `pad_moe_weights`.

    Returns:
        (gate_up_bias [E, 2 I'], down_bias [E, H']) of the given dtypes; the given ones where nothing is to be done.

    Raises:
        InvalidArgument, InvalidDtype: naming argument, expected and got.

    Source: own.
    """
    name = "pad_moe_biases"
    for argument, bias in (("gate_up_bias", gate_up_bias), ("down_bias", down_bias)):
        checks.dtype(name, argument, bias, (torch.bfloat16, torch.float32))
        checks.ndim(name, argument, bias, 2)
    experts, columns = gate_up_bias.shape
    if columns % 2:
        fail(name, "gate_up_bias", expected="2 I columns", got=f"{columns} columns")
    checks.shape(name, "down_bias", down_bias, (experts, "H"))
    more_inter = -columns // 2 % checks.int_range(name, "inter_multiple", inter_multiple, 1)
    more_hidden = -down_bias.shape[1] % checks.int_range(name, "hidden_multiple", hidden_multiple, 1)
    if more_inter:
        halves = gate_up_bias.reshape(experts, 2, columns // 2)
        gate_up_bias = torch.nn.functional.pad(halves, (0, more_inter)).flatten(1)
    if more_hidden:
        down_bias = torch.nn.functional.pad(down_bias, (0, more_hidden))
    return gate_up_bias, down_bias


def pad_moe_weights(
    gate_up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    *,
    inter_multiple: int = 64,
    hidden_multiple: int = 64,
    block_scales: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of the fused MoE with I and H rounded up by zeros, for sizes that its functions refuse.

    The result of the layer is that of the given weights: padded gate and up rows give activations of zero, padded
    columns multiply zeros. When H grows, x must be padded with zeros too, and the first H columns of the output count.

    Args:
        gate_up_weight: [E, 2 I, H] of any dtype, gate rows first.
        down_weight: [E, H, I] of the same dtype.
        inter_multiple: I becomes a multiple of it.
        hidden_multiple: H becomes a multiple of it.
        block_scales: whether the weights have 128x128 block scales. Then I cannot grow: the blocks of the up rows
            would no longer be those of the scales.

    Returns:
        (gate_up_weight [E, 2 I', H'], down_weight [E, H', I']), contiguous; the given ones where nothing is to be done.

    Raises:
        InvalidArgument, InvalidDtype: naming argument, expected and got.

    Source: own.
    """
    name = "pad_moe_weights"
    for argument, weight in (("gate_up_weight", gate_up_weight), ("down_weight", down_weight)):
        checks.is_tensor(name, argument, weight)
        checks.ndim(name, argument, weight, 3)
    experts, rows, hidden = gate_up_weight.shape
    if rows % 2:
        fail(name, "gate_up_weight", expected="2 I rows", got=f"{rows} rows")
    inter = rows // 2
    checks.shape(name, "down_weight", down_weight, (experts, hidden, inter), "It is [E, H, I].")
    checks.dtype(name, "down_weight", down_weight, gate_up_weight.dtype)
    inter_multiple = checks.int_range(name, "inter_multiple", inter_multiple, 1)
    hidden_multiple = checks.int_range(name, "hidden_multiple", hidden_multiple, 1)
    more_inter, more_hidden = -inter % inter_multiple, -hidden % hidden_multiple
    if block_scales and more_inter:
        fail(
            name, "inter_multiple", expected=f"a divisor of I = {inter} with block scales", got=inter_multiple,
            remedy="Split experts over ranks instead of their columns, or use a multiple of 16 that divides I.",
        )  # fmt: skip
    if not more_inter and not more_hidden:
        return gate_up_weight, down_weight
    halves = _padded(gate_up_weight.reshape(experts, 2, inter, hidden), more_inter, more_hidden)
    return halves.flatten(1, 2), _padded(down_weight, more_hidden, more_inter)


def _padded(weight: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """Zeros behind the last two dimensions; float8 has no padding of its own, its bytes do, and 0 is 0x00."""
    raw = weight.view(torch.uint8) if weight.element_size() == 1 else weight
    return torch.nn.functional.pad(raw, (0, cols, 0, rows)).view(weight.dtype)


def get_fuse_moe_scratch_size(
    num_tokens: int,
    top_k: int,
    hidden_size: int,
    intermediate_size: int,
    num_experts: int,
    num_expert_total: int = 0,
    *,
    block_scales: bool = False,
    bf16_input: bool = False,
    bf16_weights: bool = False,
    no_combine: bool = False,
    device: torch.device | str | int = "cuda",
) -> int:
    """Bytes that one call of the fused MoE allocates beside its output, freed when it returns.

    It follows the tokens of a call up to about 512 MiB; longer calls run in passes over their tokens. It is not
    multiplied by ranks or layers.

    Args:
        num_tokens, top_k, hidden_size: T, K and H of the call.
        intermediate_size: I of this rank.
        num_experts: E of this rank.
        num_expert_total: as the call is given it.
        block_scales: whether the call is one of `fuse_moe_blockwise`.
        bf16_input: whether x is BF16 and quantised inside.
        bf16_weights: whether the call is one of `fuse_moe_bf16`.
        no_combine: as the call is given it.
        device: where it runs; off a GPU the size is that on a reference GPU.

    Returns:
        Bytes. Zero for no tokens.

    Shape: takes no tensors.

    Raises:
        InvalidArgument: a size out of range.

    Source: own.
    """
    name = "get_fuse_moe_scratch_size"
    tokens = checks.int_range(name, "num_tokens", num_tokens, 0)
    top_k = checks.int_range(name, "top_k", top_k, 1, plan.MAX_TOP_K)
    hidden = checks.int_range(name, "hidden_size", hidden_size, 1)
    inter = checks.int_range(name, "intermediate_size", intermediate_size, 1)
    experts = checks.int_range(name, "num_experts", num_experts, 1, plan.MAX_EXPERTS)
    total = checks.int_range(name, "num_expert_total", num_expert_total, 0)
    for argument, size, multiple in (
        ("hidden_size", hidden, validate.HIDDEN_MULTIPLE),
        ("intermediate_size", inter, validate.INTER_MULTIPLE),
    ):
        if size % multiple:
            fail(name, argument, expected=f"a multiple of {multiple}", got=size, remedy=validate.PAD_REMEDY)
    if tokens == 0:
        return 0
    there = arch.is_cuda(device) and arch.gpu_available()
    capability = arch.capability(device) if there else (9, 0)
    key = plan.Key(
        num_tokens=scratch.chunk_tokens(tokens, top_k, hidden, inter), top_k=top_k, num_experts=experts,
        experts_total=total or experts, hidden=hidden, inter=inter, block_scales=block_scales, bf16_mul=True,
        sms=arch.sm_count(device) if there else arch.REFERENCE_SM_COUNT, sm90=capability[0] == 9,
        hardware_fp8=capability >= (8, 9), bf16_input=bf16_input or bf16_weights, bf16_weights=bf16_weights,
        combined=not no_combine, gpu=arch.device_name(device) if there else "",
    )  # fmt: skip
    return scratch.layout(key, choose.choose(key)).size
