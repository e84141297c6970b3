"""Sets of backends, and the SGLang arguments that all of them share."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

MODELS = Path(__file__).parent / "models"
PAGE = 64

_ATTENTION = ("--attention-backend", "hpc_ops", "--page-size", str(PAGE))
_EXPERTS = ("--moe-runner-backend", "hpc_ops")


@dataclass(frozen=True)
class BackendSet:
    """`own`: whether this package is on the path of the process. SGLang picks the router's product up by that alone."""

    arguments: tuple[str, ...]
    own: bool
    plugins: str = "hpc,hpc_bench_weights"


SETS: dict[str, BackendSet] = {
    "default": BackendSet((), False),
    "default-pages": BackendSet(("--page-size", str(PAGE)), False),
    "triton": BackendSet(("--attention-backend", "triton", "--moe-runner-backend", "triton"), False),
    "hpc": BackendSet((*_ATTENTION, *_EXPERTS), True),
    "hpc-fused": BackendSet((*_ATTENTION, *_EXPERTS), True, "hpc,hpc_moe,hpc_bench_weights"),
    "hpc-attention": BackendSet(_ATTENTION, True),
    "hpc-experts": BackendSet(_EXPERTS, True),
    "hpc-plugin": BackendSet(("--attention-backend", "hpc", "--page-size", str(PAGE)), True),
    "hpc-plugins": BackendSet(
        ("--attention-backend", "hpc", "--page-size", str(PAGE), *_EXPERTS), True, "hpc,hpc_moe,hpc_bench_weights"
    ),
}  # fmt: skip
"""Names for the command line. "hpc" is what the README tells to type; the plugins are this package's own."""


DRAFTS = ("standalone", "ngram")
"""Speculative decoding that needs no trained draft model."""


def draft_rows(kind: str, steps: int) -> int:
    """Tokens of a request in one verification: the last accepted one and its drafts."""
    return 2 if kind == "ngram" else steps + 1


def draft_arguments(kind: str, model: str, layers: int, steps: int, backend: str) -> list[str]:
    """SGLang's arguments for a kind of drafts.

    Args:
        kind: "standalone", a model of its own, or "ngram", continuations that were seen before. The latter is a tree
            for more than one draft.
        model: the served model; the draft model is its first `layers`. Weights depend on names alone, so both have
            the same embedding and head, and the drafts are often right.
        layers: of the draft model.
        steps: drafts a verification, of "standalone".
        backend: attention of the draft model, one of SGLang's own.
    """
    rows = ["--speculative-num-draft-tokens", str(draft_rows(kind, steps))]
    if kind == "ngram":
        breadth = ["--speculative-ngram-max-bfs-breadth", "1", "--speculative-ngram-capacity", "1000000"]
        return ["--speculative-algorithm", "NGRAM", *rows, *breadth]
    return [
        "--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", str(model_folder(model, layers)),
        "--speculative-num-steps", str(steps), "--speculative-eagle-topk", "1", *rows,
        "--speculative-draft-attention-backend", backend,
    ]  # fmt: skip


def model_names() -> list[str]:
    """Models that come as files."""
    return sorted(path.stem for path in MODELS.glob("*.json"))


def model_config(name: str) -> dict[str, object]:
    """A model's config.json: one of `models/`, or any path to such a file."""
    path = MODELS / f"{name}.json"
    return json.loads((path if path.is_file() else Path(name)).read_text(encoding="utf-8"))


def model_folder(name: str, layers: int | None = None) -> Path:
    """A fresh folder with the model's config.json, cut to its first `layers` if asked; weights are drawn, not read."""
    config = model_config(name)
    if layers is not None:
        config["num_layers" if "num_layers" in config else "num_hidden_layers"] = layers
    folder = Path(tempfile.mkdtemp(prefix="hpc-serving-")) / Path(name).stem
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return folder


def arguments(
    folder: Path, name: str, *, fp8: bool, context: int, tokens: int, most: int, batches: list[int] | None,
    memory: float,
) -> list[str]:  # fmt: skip
    """Arguments of `sglang serve` for a set of backends.

    Args:
        folder: from `model_folder`.
        name: of the set.
        fp8: e4m3 KV cache.
        context: longest request, prompt and answer.
        tokens: room in the KV cache.
        most: requests at a time.
        batches: sizes of the decode graphs; None leaves them to SGLang, [] runs without graphs.
        memory: fraction of the GPU's memory that SGLang may plan with.
    """
    graphs = ["--cuda-graph-max-bs-decode", str(most)]
    if batches:
        graphs += ["--cuda-graph-bs-decode", *map(str, sorted(set(batches)))]
    elif batches is not None:
        graphs = ["--disable-cuda-graph"]
    return [
        "--model-path", str(folder), "--load-format", "dummy", "--skip-tokenizer-init", "--dtype", "bfloat16",
        "--kv-cache-dtype", "fp8_e4m3" if fp8 else "bfloat16", "--context-length", str(context),
        "--max-total-tokens", str(-(-tokens // 4096) * 4096), "--max-running-requests", str(most),
        "--mem-fraction-static", str(memory), "--random-seed", "0", *graphs, "--disable-prefill-cuda-graph",
        "--disable-flashinfer-autotune", "--sampling-backend", "pytorch", "--grammar-backend", "none",
        "--log-level", "warning", *SETS[name].arguments,
    ]  # fmt: skip
