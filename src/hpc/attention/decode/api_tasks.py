"""Public functions around the task map of paged decode attention, and the size of its scratch."""

from __future__ import annotations

import torch

from hpc.attention.decode import arguments, assign, choose, ops, validate
from hpc.attention.decode.launch import scratch
from hpc.common import arch, checks
from hpc.common.errors import fail
from hpc.common.quant import QuantType

MAX_KV_HEADS = 65535  # of one rank: a dimension of the launch grids


def get_attention_decode_task_workspace(
    max_num_batch: int,
    max_seqlen: int,
    num_head_kv: int,
    min_process_len: int = 512,
    *,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Allocate a task map, once, outside graphs; every step, layer and captured batch size may share it.

    Args:
        max_num_batch: recorded in the header; any batch fits, since the size depends on the GPU and the heads alone.
        max_seqlen: accepted for compatibility; any length fits.
        num_head_kv: KV heads of one rank.
        min_process_len: tokens; accepted for compatibility, `assign_attention_decode_task` takes the floor.
        device: default: the current CUDA device, or the CPU without one.

    Returns:
        int8 [bytes], zeroed; int32 words 0-5 are tile budget of a bin + 1, CTAs, KV heads, max_num_batch, bytes of the
        schedule, chunks of a request at most. The rest is private.

    Raises:
        InvalidArgument: a size out of range. UnsupportedDevice: a GPU that is not there.

    Source: persistent near-equal bins, as in Stream-K (Osama et al., 2023).
    """
    name = "get_attention_decode_task_workspace"
    checks.int_range(name, "max_num_batch", max_num_batch, 1, 2**31 - 1)
    checks.int_range(name, "max_seqlen", max_seqlen, 1)
    checks.int_range(name, "num_head_kv", num_head_kv, 1, MAX_KV_HEADS)
    checks.int_range(name, "min_process_len", min_process_len, 0)
    default = "cuda" if arch.gpu_available() else "cpu"
    where = validate.available(name, default if device is None else device)
    return assign.allocate(max_num_batch, num_head_kv, where)


def assign_attention_decode_task(
    num_seq_kvcache: torch.Tensor,
    task_map: torch.Tensor,
    num_head_kv: int,
    mtp: int,
    new_kv_included: bool,
    min_process_len: int = 512,
    *,
    window: int | None = None,
) -> torch.Tensor:
    """Fill the task map from the live lengths: once a step, reused by all layers. One launch, no synchronisation.

    Args:
        num_seq_kvcache: int32 [B] on the map's device; a CPU tensor runs the Python planner and copies its result.
            Lengths are those of the attention call; larger ones than its page table holds cost balance, not safety.
        task_map: int8 or int32 [words], a workspace of `get_attention_decode_task_workspace` for num_head_kv heads (or
            fewer).
        num_head_kv: KV heads of the attention calls.
        mtp: query tokens a request, 1 to 16. Note: the attention functions' mtp is one less.
        new_kv_included: as in the attention calls.
        min_process_len: smallest chunk in tokens that is worth a CTA; the measured floor applies where it is lower.
        window: as in the attention calls.

    Returns:
        int8 or int32 [words]: task_map itself.

    Raises:
        InvalidArgument, InvalidDtype, UnsupportedDevice: before any launch, naming argument, expected and got.

    Source: persistent near-equal bins, as in Stream-K (Osama et al., 2023).
    """
    if torch.compiler.is_compiling():
        return ops.traced_assign(
            num_seq_kvcache, task_map, num_head_kv, mtp, new_kv_included, min_process_len, window
        )
    name = "assign_attention_decode_task"
    checks.dtype(name, "num_seq_kvcache", num_seq_kvcache, torch.int32, "Convert with .to(torch.int32).")
    checks.ndim(name, "num_seq_kvcache", num_seq_kvcache, 1, "Pass one length a request.")
    checks.contiguous(name, "num_seq_kvcache", num_seq_kvcache)
    checks.int_range(name, "num_head_kv", num_head_kv, 1, MAX_KV_HEADS)
    remedy = "Here mtp is the number of query tokens a request, 1 for plain decode."
    checks.int_range(name, "mtp", mtp, 1, arguments.MAX_NEW_TOKENS, remedy)
    checks.int_range(name, "min_process_len", min_process_len, 0)
    if window is not None:
        checks.int_range(name, "window", window, 1, 2**30, "Pass None for no window.")
    validate.flag(name, "new_kv_included", new_kv_included)
    validate.device(name, "num_seq_kvcache", num_seq_kvcache)
    checks.is_tensor(name, "task_map", task_map)
    host = num_seq_kvcache.device.type == "cpu"
    validate.workspace(name, task_map, task_map.device if host else num_seq_kvcache.device, num_head_kv)
    fill = assign.on_host if host else assign.on_device
    fill(num_seq_kvcache, task_map, num_head_kv, mtp, bool(new_kv_included), min_process_len, window)
    return task_map


def print_attention_decode_task(task_map: torch.Tensor) -> None:
    """Print the schedule in a task map; copies it to the host, so for debugging only.

    Args:
        task_map: int8 or int32 [words], filled by `assign_attention_decode_task`.

    Raises:
        InvalidArgument, InvalidDtype: not a task map, or one whose header does not fit its size.

    Source: `hpc schedule` draws the same schedule as a picture.
    """
    validate.filled_map("print_attention_decode_task", task_map)
    print(assign.describe(task_map))


def get_attention_decode_scratch_size(
    num_batch: int,
    num_head_q: int,
    num_head_kv: int,
    head_dim: int = 128,
    v_head_dim: int | None = None,
    mtp: int = 0,
    *,
    page_size: int = 64,
    quant_type: QuantType | int | None = QuantType.QPERTOKEN_PERHEAD_KPERTENSOR_VPERTENSOR,
    dynamic: bool = True,
    batch_invariant: bool = False,
    device: torch.device | str | None = None,
) -> int:
    """Exact bytes of scratch that one decode call allocates (from torch's caching allocator, on its stream).

    With a task map: 2 slots a bin, whatever the batch and lengths: slots * num_head_kv * rows * (v_head_dim + 2) fp32,
    rows = (mtp + 1) * num_head_q / num_head_kv.

    Args:
        num_batch, num_head_q, num_head_kv, head_dim, v_head_dim: sizes of the call, as its tensors
            q [num_batch * (mtp + 1), num_head_q, head_dim] have them; v_head_dim defaults to head_dim.
        mtp: draft tokens beyond the first.
        page_size: tokens of a page.
        quant_type: None for BF16 caches.
        dynamic: whether a task map is passed.
        batch_invariant: as in the call.
        device: default: the current CUDA device, or a 132-SM GPU without one.

    Returns:
        Bytes.

    Raises:
        InvalidArgument: sizes that no call can have.

    Source: the partials of Flash-Decoding (2023), bounded by the number of bins.
    """
    name = "get_attention_decode_scratch_size"
    v_dim = head_dim if v_head_dim is None else v_head_dim
    for argument, value in (
        ("num_batch", num_batch), ("num_head_q", num_head_q), ("num_head_kv", num_head_kv), ("head_dim", head_dim),
        ("v_head_dim", v_dim), ("page_size", page_size),
    ):  # fmt: skip
        checks.int_range(name, argument, value, 1)
    checks.int_range(name, "mtp", mtp, 0, arguments.MAX_NEW_TOKENS - 1)
    blamed = ("num_head_q", "head_dim", "v_head_dim", "page_size")
    validate.sizes(name, num_head_q, num_head_kv, head_dim, v_dim, page_size, blamed)
    if dynamic and batch_invariant:
        fail(
            name, "batch_invariant", expected="False with a task map", got=True, remedy="Pass dynamic=False."
        )
    default = "cuda" if arch.gpu_available() else "cpu"
    where = validate.available(name, default if device is None else device)
    hopper = arch.is_hopper(where) or not arch.is_cuda(where)
    key = choose.Key(
        sm90=hopper, sms=arch.sm_count(where), batch=num_batch, q_heads=num_head_q, kv_heads=num_head_kv,
        head_dim=head_dim, v_dim=v_dim, page_size=page_size, max_pages=1, num_new_tokens=mtp + 1,
        quant_type=-1 if quant_type is None else arguments.quant_type(name, quant_type), dynamic=dynamic,
        batch_invariant=batch_invariant, gpu=arch.device_name(where) if arch.is_cuda(where) else "",
    )  # fmt: skip
    return 4 * scratch(key, choose.choose(key))[2]
