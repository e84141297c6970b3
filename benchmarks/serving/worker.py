"""One process with one set of backends: SGLang's model runner behind commands, one JSON object a line.

Started by `process.Worker`. Commands come on standard input, answers go to the descriptor that was standard output;
whatever SGLang prints goes to standard error. The runner is that of `sglang.benchmark.one_batch`, SGLang's own path
below its scheduler: scheduling a batch, CUDA graphs, sampling.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class NGrams:
    """What SGLang's scheduler does for a model that embeds n-grams (LongCat), and `one_batch` does not.

    Such a model looks the previous tokens up in a table of all requests. The scheduler writes prompts there and hands
    the table to the batch before each pass; sampling then appends the chosen token.
    """

    def __init__(self, manager: Any) -> None:
        self.manager = manager

    @classmethod
    def of(cls, model_runner: Any, steps: Any) -> NGrams | None:
        """None for other models; otherwise every batch of `steps` is prepared before its pass."""
        manager = getattr(model_runner, "ngram_embedding_manager", None)
        if manager is None or not manager.enabled:
            return None
        whole = steps.ForwardBatch.init_new

        def init_new(batch: Any, *rest: Any, **more: Any) -> Any:
            return whole(manager.prepare_for_forward(batch, chunked_req=None), *rest, **more)

        steps.ForwardBatch = types.SimpleNamespace(init_new=init_new)
        return cls(manager)

    def choose(self, batch: Any, ids: Any) -> None:
        """Continue with `ids`, also where the sampler chose others."""
        self.manager.table[batch.req_pool_indices, batch.seq_lens] = ids.to(self.manager.table.dtype)


class Engine:
    """A loaded model. `lens` are lengths of prompts; prompts depend on the seed alone."""

    def __init__(self, arguments: list[str]) -> None:
        from sglang.srt.plugins import load_plugins

        load_plugins()
        import sglang.benchmark.one_batch as steps
        import torch
        from sglang.srt.server_args import PortArgs, prepare_server_args

        self.steps, self.torch = steps, torch
        self.server_args = prepare_server_args(arguments)
        for prepare in (
            steps._set_envs_and_config, steps.initialize_moe_config, steps.initialize_fp8_gemm_config,
            steps.initialize_fp4_gemm_config,
        ):  # fmt: skip
            prepare(self.server_args)
        steps.configure_logger(self.server_args, prefix="")
        steps.get_tokenizer = lambda *_, **__: None
        self.runner, _ = steps.load_model(self.server_args, PortArgs.init_new(self.server_args), 0, 0)
        self.model_runner = self.runner.torch_runner
        self.grams = NGrams.of(self.model_runner, steps)

    def facts(self) -> dict[str, Any]:
        """What runs here."""
        from importlib import metadata, util

        args, runner = self.server_args, self.model_runner
        found = util.find_spec("hpc")
        return {
            "sglang": metadata.version("sglang"), "torch": self.torch.__version__,
            "triton": metadata.version("triton"), "hpc": bool(found), "attention": args.attention_backend,
            "backend": type(runner.attn_backend).__name__, "experts": args.moe_runner_backend,
            "page": args.page_size, "cache": str(runner.kv_cache_dtype),
            "graphs": runner.decode_cuda_graph_runner is not None,
            "gib": round(self.torch.cuda.memory_allocated() / 2**30, 1),
        }  # fmt: skip

    def requests(self, lens: list[int], seed: int) -> list[Any]:
        import numpy as np

        draw = np.random.default_rng(seed)
        prompts = [draw.integers(300, 30000, size=length).tolist() for length in lens]
        return self.steps.prepare_synthetic_inputs_for_latency_test(len(lens), 0, prompts)

    def clear(self) -> None:
        self.runner.clear()
        self.runner.synchronize()

    @contextmanager
    def eager(self, asked: bool) -> Iterator[None]:
        """Without decode graphs, as `--disable-cuda-graph`: `hpc_ops` then has no task map either."""
        runner, backend = self.model_runner, self.model_runner.attn_backend
        graphs, task_map = runner.decode_cuda_graph_runner, getattr(backend, "_decode_task_map", None)
        try:
            if asked:
                runner.decode_cuda_graph_runner = None
                if task_map is not None:
                    backend._decode_task_map = None
            yield
        finally:
            runner.decode_cuda_graph_runner = graphs
            if task_map is not None:
                backend._decode_task_map = task_map

    def prefill(self, requests: list[Any], cut: int = 0) -> tuple[Any, Any, Any]:
        """(ids, logits, batch) of the prompts, `cut` tokens of each in a pass before if it has more."""
        if not cut or any(len(request.origin_input_ids) <= cut for request in requests):
            return self.runner.extend(requests)
        for request in requests:
            request.set_extend_range(0, cut)
        self.runner.extend(requests)
        table = self.model_runner.req_to_token_pool.req_to_token
        for request in requests:
            request.prefix_indices = table[request.req_pool_idx, :cut].to(request.prefix_indices.dtype)
            request.set_extend_range(cut, len(request.full_untruncated_fill_ids))
        return self.runner.extend(requests)

    # --- commands ---------------------------------------------------------------------------------

    def bench(self, lens: list[int], steps: int, seed: int = 0) -> dict[str, Any]:
        """Milliseconds to the first tokens of the whole batch, a step with the host waiting for each, and a step of a
        run without waiting."""
        self.clear()
        requests = self.requests(lens, seed)
        self.runner.synchronize()
        start = time.perf_counter()
        ids, logits, batch = self.runner.extend(requests)
        self.runner.synchronize()
        first = time.perf_counter() - start
        waited = []
        for _ in range(steps // 2):
            start = time.perf_counter()
            ids, logits = self.runner.decode(ids, batch)
            self.runner.synchronize()
            waited.append(time.perf_counter() - start)
        rest = steps - steps // 2
        start = time.perf_counter()
        for _ in range(rest):
            ids, logits = self.runner.decode(ids, batch)
        self.runner.synchronize()
        step = (time.perf_counter() - start) / rest
        self.runner.cleanup(batch)
        finite = bool(self.torch.isfinite(logits).all())
        milli = [round(1e3 * value, 4) for value in (first, sorted(waited)[len(waited) // 2], step)]
        return {"ttft_ms": milli[0], "step_waited_ms": milli[1], "step_ms": milli[2], "finite": finite}

    def tokens(
        self, lens: list[int], steps: int, save: str, forced: str = "", eager: bool = False, cut: int = 0,
        kept: int = 8, seed: int = 0,
    ) -> dict[str, Any]:  # fmt: skip
        """Greedy tokens and the first logits, into a file. `forced`: such a file, whose tokens are fed instead."""
        torch = self.torch
        self.clear()
        feed = torch.load(forced)["tokens"] if forced else None
        with self.eager(eager):
            ids, logits, batch = self.prefill(self.requests(lens, seed), cut)
            chosen, first = [logits.argmax(-1).cpu()], [logits.float().cpu()]
            for step in range(steps - 1):
                given = logits.argmax(-1) if feed is None else feed[:, step].to(logits.device)
                if self.grams is not None:
                    self.grams.choose(batch, given)
                ids, logits = self.runner.decode(given.to(ids.dtype), batch)
                chosen.append(logits.argmax(-1).cpu())
                if len(first) < kept:
                    first.append(logits.float().cpu())
            self.runner.cleanup(batch)
        torch.save({"tokens": torch.stack(chosen, 1), "logits": torch.stack(first, 1)}, save)
        return {"finite": bool(torch.isfinite(torch.stack(first)).all())}

    def profile(self, lens: list[int], steps: int = 8, seed: int = 0) -> dict[str, Any]:
        """Kernels of the prefill and of a decode step: [name, microseconds, launches] each, longest first."""
        from torch.profiler import ProfilerActivity
        from torch.profiler import profile as record

        from serving.stages import alone

        def kernels(recorded: Any, count: int) -> list[list[Any]]:
            runs = [
                (event.name, event.time_range.start, event.time_range.end)
                for event in recorded.events() if event.device_type == self.torch.autograd.DeviceType.CUDA
            ]  # fmt: skip
            rows = [
                [name[:160], round(t / count, 3), round(n / count, 2)] for name, (t, n) in alone(runs).items()
            ]
            return sorted(rows, key=lambda row: -row[1])

        self.clear()
        requests = self.requests(lens, seed)
        with record(activities=[ProfilerActivity.CUDA]) as recorded:
            ids, _, batch = self.runner.extend(requests)
            self.runner.synchronize()
        found = {"prefill": kernels(recorded, 1)}
        for _ in range(2):
            ids, _ = self.runner.decode(ids, batch)
        self.runner.synchronize()
        with record(activities=[ProfilerActivity.CUDA]) as recorded:
            for _ in range(steps):
                ids, _ = self.runner.decode(ids, batch)
            self.runner.synchronize()
        found["decode"] = kernels(recorded, steps)
        self.runner.cleanup(batch)
        return found


def main() -> None:
    """Load, answer with the facts, then one answer a command until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(**values: Any) -> None:
        answers.write(json.dumps(values) + "\n")

    try:
        start = time.perf_counter()
        engine = Engine(json.loads(sys.argv[1]))
        answer(ok=True, seconds=round(time.perf_counter() - start, 1), **engine.facts())
    except BaseException as error:
        traceback.print_exc()
        answer(ok=False, error=f"{type(error).__name__}: {error}"[:2000])
        os._exit(1)
    for line in sys.stdin:
        asked = json.loads(line)
        start = time.perf_counter()
        try:
            found = getattr(engine, asked.pop("do"))(**asked)
            answer(ok=True, seconds=round(time.perf_counter() - start, 2), **found)
        except BaseException as error:
            traceback.print_exc()
            answer(ok=False, error=f"{type(error).__name__}: {error}"[:2000])
    os._exit(0)  # SGLang's threads and process groups need no farewell


if __name__ == "__main__":
    main()
