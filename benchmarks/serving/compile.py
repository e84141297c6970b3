"""Compile this package's kernels for a model before its first process needs them, on all cores.

Each SGLang process would compile them one after the other while it loads. What `hpc warmup` compiles serves many
models; here only what one model reaches, at the given batch sizes and prompt lengths, and Triton's launchers as well.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from typing import Any

from serving.sets import model_config

TARGET = "sm90"
PREFILL_TOKENS = tuple(1 << n for n in range(7, 14))  # one for each tile and size of the experts' index


def jobs(model: str, fp8: bool, batches: Iterable[int], rows: Iterable[int] = ()) -> list[tuple[str, Any]]:
    """(operator, case) of every call of the model; `rows`: tokens of a request in one verification of drafts."""
    from hpc.attention.decode.case_lists import DecodeCase
    from hpc.attention.prefill import case_lists
    from hpc.attention.prefill.case_lists import PrefillCase
    from hpc.moe.case_lists import MoeCase
    from hpc.rope.case_lists import RopeCase

    config: dict[str, Any] = model_config(model)
    found: list[tuple[str, Any]] = []
    if "kv_lora_rank" not in config:
        heads = (config["num_attention_heads"], config["num_key_value_heads"])
        kind = "fp8" if fp8 else "bf16"
        found += [
            ("decode", DecodeCase((65,), *heads, dtype=kind, num_new_tokens=count, dynamic=dynamic))
            for count in sorted({1, *rows})
            for dynamic in (True, False)
        ]
        found.append(("prefill", PrefillCase(case_lists.prompts(65), *heads, dtype=kind)))
        if fp8 and config["model_type"] == "hy_v3":  # the only models whose prologue SGLang takes from here
            policy = 2 if config.get("qk_norm") else 0
            found += [
                ("rope", (RopeCase((65,), (1,), *heads, dtype="fp8", is_prefill=prefill, norm_policy=policy), tokens))
                for prefill, tokens in ((False, 1), (True, 1), (True, 1 << 20))
            ]  # fmt: skip
    experts = config.get("num_experts") or config.get("n_routed_experts")
    if not experts:
        return found
    inter = config.get("moe_intermediate_size") or config["expert_ffn_hidden_size"]
    top_k = config.get("num_experts_per_tok") or config["moe_topk"]
    block = "weight_block_size" in config["quantization_config"]
    found += [
        ("moe", MoeCase(tokens, experts, config["hidden_size"], inter, top_k, block=block))
        for tokens in sorted({*batches, *PREFILL_TOKENS})
    ]  # fmt: skip
    return found


def _start() -> None:
    """A fresh interpreter that compiles for the target and builds the launchers that the real driver would."""
    import torch

    os.environ.pop("TRITON_INTERPRET", None)
    torch.set_num_threads(1)
    from triton.backends.nvidia.driver import CudaLauncher

    from hpc.common import offline

    class Launcher(CudaLauncher):  # type: ignore[misc]
        def __init__(self, *arguments: Any) -> None:
            with suppress(Exception):  # no driver's library here: the launcher is left to the first launch
                super().__init__(*arguments)

        def __call__(self, *_: Any) -> None: ...

    offline.NullDriver.launcher_cls = Launcher  # type: ignore[assignment]


def _compile(job: tuple[str, Any]) -> str:
    kind, case = job
    start = time.perf_counter()
    if kind == "rope":
        _compile_prologue(case, TARGET)
    else:
        module = "hpc.moe" if kind == "moe" else f"hpc.attention.{kind}"
        importlib.import_module(f"{module}.warm").compile_shape(case, TARGET)
    return f"{kind} {time.perf_counter() - start:.1f} s"


def _compile_prologue(job: tuple[Any, int], target: str) -> None:
    from hpc.rope import plan, warm

    case, tokens = job
    chosen = plan.choose(plan.Key(tokens, case.q_heads, case.kv_heads, 128, 128))
    warm.compile_shape(case, target, chosen)


def compile_model(
    model: str, fp8: bool, batches: Iterable[int], say: Callable[[str], None] = lambda text: None,
    rows: Iterable[int] = (),
) -> float:  # fmt: skip
    """Compile in parallel; seconds that it took. A kernel that fails is reported and left to the first call."""
    start = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    todo = jobs(model, fp8, batches, rows)
    with ProcessPoolExecutor(min(len(todo), os.cpu_count() or 1), context, _start) as pool:
        running = {pool.submit(_compile, job): job for job in todo}
        for done in as_completed(running):
            error = done.exception()
            say(f"compile {running[done][0]}: {error!r}" if error else f"compile {done.result()}")
    return time.perf_counter() - start
