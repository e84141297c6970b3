"""Plans of decode attention for `hpc tune`: which calls to measure, and which plans beside the analytic one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from hpc.attention.decode import case_lists, cases, choose, validate, warm
from hpc.attention.decode.arguments import Arguments
from hpc.attention.decode.cases import DecodeInputs
from hpc.common.operator import Case

# (warps along the tokens, warps along the rows, CTAs an SM) of the SM90 kernel
SHAPES = ((8, 1, 1), (4, 2, 1), (2, 4, 1), (4, 1, 1), (2, 2, 1), (4, 1, 2), (2, 2, 2), (1, 4, 2))
STAGES = range(2, 9)
SPLITS = (0.5, 1.0, 2.0)  # of the analytic number of chunks, static path


class DecodeTuning:
    """See `hpc.bench.tune.Tuning`."""

    folder = choose.CONFIGS

    def cases(self) -> list[Case]:
        """All timed cases by both paths: the distributions of one batch size share a point."""
        timed = case_lists.target_cases() + case_lists.bench_cases()
        static = [
            Case(f"{case.name} static", case.tags, replace(case.params, dynamic=False)) for case in timed
        ]
        return [*timed, *static]

    def key(self, inputs: DecodeInputs) -> choose.Key:
        """The key of the public call on these inputs."""
        params, cache = inputs.params, inputs.cache
        args = Arguments(
            "tune", inputs.q, cache.kcache, cache.vcache, cache.block_ids, inputs.seq_lens,
            (inputs.qscale, inputs.kscale, inputs.vscale), params.quant_type if params.dtype == "fp8" else -1,
            params.num_new_tokens - 1, params.new_kv_included, task_map=inputs.task_map, **inputs.options,
        )  # fmt: skip
        return validate.call(args)[0]

    def point(self, key: choose.Key) -> tuple[dict[str, int | bool | str], int]:
        return choose.point(key)

    def analytic(self, key: choose.Key) -> choose.Plan:
        return choose.analytic(key)

    def candidates(self, key: choose.Key) -> Iterator[choose.Plan]:
        """Every shape of a CTA with every depth of the pipeline; on the static path other numbers of chunks too."""
        base = choose.analytic(key)
        splits = (
            {base.num_splits} if key.dynamic else {max(1, int(base.num_splits * part)) for part in SPLITS}
        )
        for count in sorted(splits):
            if base.backend == "portable":
                for rows in (16, 32, 64):
                    yield replace(base, block_rows=rows, num_splits=count)
                continue
            for stages in STAGES:
                yield replace(choose.rows_plan(key), stages=stages, num_splits=count)
            tokens = choose.tokens_plan(key)
            for warps_tok, warps_row, ctas in SHAPES:
                registers = choose.registers(warps_tok * warps_row, ctas)
                for stages in STAGES:
                    yield replace(
                        tokens, ctas_per_sm=ctas, warps_tok=warps_tok, warps_row=warps_row, stages=stages,
                        max_registers=registers, num_splits=count,
                    )  # fmt: skip

    def is_legal(self, plan: choose.Plan, key: choose.Key) -> str | None:
        return choose.is_legal(plan, key)

    def prepare(self, inputs: DecodeInputs, plan: choose.Plan) -> Callable[[], torch.Tensor]:
        """The attention call with its task map made beforehand, as every layer but the first finds it."""
        task_map: Any = inputs.task_map

        def call() -> torch.Tensor:
            result: torch.Tensor = cases.attend(inputs, task_map, plan=plan)
            return result

        return call

    def compile(self, case: Case, plan: choose.Plan, target: str) -> None:
        """Of the case with two short requests: no kernel is compiled for lengths."""
        warm.compile_shape(replace(case.params, lens=(65, 65)), target, plan)


TUNING = DecodeTuning()
