"""The driver in benchmarks/serving on a stand-in for SGLang: workers, agreement, a server with clients, failures."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
DRIVER = ROOT / "benchmarks" / "serving"

ONE_BATCH = """
import importlib.util, types
import torch
def _set_envs_and_config(args): pass
initialize_moe_config = initialize_fp8_gemm_config = initialize_fp4_gemm_config = _set_envs_and_config
def configure_logger(args, prefix): print("noise on standard output")
def prepare_synthetic_inputs_for_latency_test(batch, length, prompts):
    return [types.SimpleNamespace(origin_input_ids=p, full_untruncated_fill_ids=p, extend_range=(0, len(p)),
        prefix_indices=torch.empty(0, dtype=torch.int64), req_pool_idx=0,
        set_extend_range=lambda a, b: None) for p in prompts]
class Runner:
    def __init__(self, args):
        own = "hpc_ops" in args.words
        assert not own or importlib.util.find_spec("hpc")
        self.torch_runner = types.SimpleNamespace(attn_backend=types.SimpleNamespace(_decode_task_map=1),
            decode_cuda_graph_runner=1, kv_cache_dtype="fp8",
            req_to_token_pool=types.SimpleNamespace(req_to_token=torch.zeros(4, 4096, dtype=torch.int64)))
        self.shift = 1e-3 if own else 0.0
    def clear(self): pass
    synchronize = clear
    def cleanup(self, batch): pass
    def logits(self, ids):
        if int(ids[0]) == 13: raise RuntimeError("an unlucky token")
        x = torch.arange(50.0)[None] * 0.7 + ids[:, None].float()
        return torch.sin(x) + self.shift * torch.cos(3 * x)
    def extend(self, requests):
        ids = torch.tensor([request.origin_input_ids[-1] % 11 for request in requests])
        return ids, self.logits(ids), requests
    def decode(self, ids, batch): return ids, self.logits(ids % 11)
def load_model(args, port, gpu, rank):
    if "broken" in args.words: raise ValueError("cannot load")
    return Runner(args), None
"""
SERVER_ARGS = """
import types
class PortArgs:
    init_new = staticmethod(lambda args: None)
def prepare_server_args(words):
    return types.SimpleNamespace(words=words, attention_backend="a", moe_runner_backend="m", page_size=64)
"""
LAUNCH = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_): pass
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        wanted = asked["sampling_params"]["max_new_tokens"]
        if asked.get("return_logprob"):  # 5 is the first choice, but for every fourth token
            start = asked["logprob_start_len"]
            given = [[None if n == start else -0.5 - 0.25 * (n % 4 == 0), token, None]
                     for n, token in enumerate(asked["input_ids"])][start:]
            top = [None, *([[-0.5, 5, None], [-0.75, 6, None]] for _ in given[1:])]
            self.send_response(200); self.end_headers()
            meta = {"input_token_logprobs": given, "input_top_logprobs": top}
            self.wfile.write(json.dumps({"output_ids": [5], "meta_info": meta}).encode())
            return
        if len(asked["input_ids"]) == 7: wanted += 1
        self.send_response(200); self.end_headers()
        drafts = "--speculative-algorithm" in sys.argv
        for n in range(1, wanted + 1):
            meta = {"completion_tokens": n, "cached_tokens": 1, "finish_reason": None}
            if drafts: meta["spec_verify_ct"] = n // 2
            self.wfile.write(b"data: " + json.dumps({"output_ids": [5] * n, "meta_info": meta}).encode() + b"\\n\\n")
        self.wfile.write(b"data: [DONE]\\n\\n")
ThreadingHTTPServer.request_queue_size = 256  # as many clients connect at once
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    files = {
        "__init__": "", "srt/__init__": "", "benchmark/__init__": "", "benchmark/one_batch": ONE_BATCH,
        "srt/server_args": SERVER_ARGS, "srt/plugins/__init__": "def load_plugins(): pass", "launch_server": LAUNCH,
    }  # fmt: skip
    for name, text in files.items():
        path = tmp_path / "site" / "sglang" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    info = tmp_path / "site" / "sglang-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.0\n")
    return tmp_path


def drive(site: Path, words: str) -> tuple[int, list[dict[str, Any]]]:
    out = site / "out.jsonl"
    files = ["--output", str(out), "--logs", str(site / "logs")]
    command = [sys.executable, str(DRIVER), *words.split(), "--no-compile", *files]
    variables = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{site / 'site'}"}
    code = subprocess.run(command, env=variables, timeout=200, check=False).returncode
    return code, [json.loads(line) for line in out.read_text().splitlines()]


def of_kind(lines: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [line for line in lines if line.get("kind") == kind]


def test_engine_checks_and_times_sets_in_turn(site: Path) -> None:
    code, lines = drive(site, "engine check bench --batch 1 4 --steps 8 --rounds 2 --input-len 32")
    assert code == 0 and "env" in lines[0]
    assert [line["set"] for line in of_kind(lines, "engine")] == ["default", "hpc"]
    checks = {line["mode"]: line for line in of_kind(lines, "check")}
    assert set(checks) == {"graph", "eager", "chunked", "repeated"}
    assert checks["repeated"]["identical"] and checks["graph"]["cosine"] > 0.999
    assert checks["graph"]["requests"] == 8 and checks["graph"]["steps"] == 8
    bench = of_kind(lines, "bench")
    assert [(line["set"], line["batch"]) for line in bench] == [
        ("default", 1), ("hpc", 1), ("default", 4), ("hpc", 4)
    ]  # fmt: skip
    assert all(line["rounds"] == 2 and line["step_ms"] > 0 for line in bench)


def test_ngrams_of_fed_tokens(serving_path: None) -> None:
    """Batches come prepared as SGLang's scheduler does it, and the table follows the tokens that are fed."""
    worker = importlib.import_module("serving.worker")
    table = torch.zeros(3, 8, dtype=torch.int32)
    manager = types.SimpleNamespace(
        enabled=True, table=table, prepare_for_forward=lambda batch, chunked_req: ("prepared", batch)
    )
    steps = types.SimpleNamespace(ForwardBatch=types.SimpleNamespace(init_new=lambda *values, **_: values))
    grams = worker.NGrams.of(types.SimpleNamespace(ngram_embedding_manager=manager), steps)
    assert steps.ForwardBatch.init_new("batch", "runner", more=1) == (("prepared", "batch"), "runner")
    batch = types.SimpleNamespace(req_pool_indices=torch.tensor([2, 1]), seq_lens=torch.tensor([5, 3]))
    grams.choose(batch, torch.tensor([70, 80]))
    assert table[2, 5] == 70 and table[1, 3] == 80 and int(table.count_nonzero()) == 2
    manager.enabled = False
    assert worker.NGrams.of(types.SimpleNamespace(ngram_embedding_manager=manager), steps) is None
    assert worker.NGrams.of(types.SimpleNamespace(), steps) is None


def test_overlapping_kernels_are_counted_once(serving_path: None) -> None:
    stages = importlib.import_module("serving.stages")
    runs = [("late", 8.0, 20.0), ("first", 0.0, 10.0), ("within", 2.0, 4.0), ("late", 25.0, 26.0)]
    assert stages.alone(runs) == {"first": (10.0, 1), "within": (0.0, 1), "late": (11.0, 2)}


@pytest.fixture
def serving_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


@pytest.mark.slow
def test_a_set_that_does_not_load_is_recorded_and_left_out(site: Path) -> None:
    path = site / "site" / "sglang" / "benchmark" / "one_batch.py"
    path.write_text(path.read_text().replace('"broken" in', '"hpc_ops" in'))
    code, lines = drive(site, "engine bench --batch 1 --steps 8 --rounds 1")
    assert code == 1
    (failure,) = of_kind(lines, "failure")
    assert failure["set"] == "hpc" and "cannot load" in failure["error"]
    assert [line["set"] for line in of_kind(lines, "bench")] == ["default"]


def test_server_counts_tokens_and_errors(site: Path) -> None:
    code, lines = drive(site, "server --sets hpc --requests 40 --clients 8 --longest-prompt 6")
    (load,) = of_kind(lines, "load")
    assert code == 0 and load["errors"] == 0 and load["tokens"] == load["tokens_wanted"] > 40
    code, lines = drive(site, "server --sets hpc --requests 40 --clients 8 --longest-prompt 7")
    load = of_kind(lines, "load")[-1]
    assert code == 1 and load["errors"] == 40 and "wanted" in load["first_errors"][0]


def test_drafts_are_judged_and_loaded(site: Path) -> None:
    words = "drafts --model qwen3_8b --layers 4 --sets default hpc-plugin --drafts standalone"
    code, lines = drive(site, f"{words} --requests 12 --clients 4 --longest-prompt 6 --longest-answer 9")
    assert code == 0
    found = of_kind(lines, "drafts")
    assert [(line["set"], line["drafts"], line["round"]) for line in found] == [
        ("default", None, 0), ("hpc-plugin", None, 0), ("hpc-plugin", "standalone", 0), ("hpc-plugin", "standalone", 1)
    ]  # fmt: skip
    assert all(line["errors"] == 0 and not line["missed"] and line["identical"] == 1.0 for line in found)
    assert all(line["same_prefix"] == line["longest_prefix"] > 1 for line in found)
    assert all(0.6 < line["chosen"] < 0.9 and line["flipped_margin"] == 0.25 for line in found)
    assert all(line["judged"] == line["tokens"] and line["median_margin"] == 0.25 for line in found)
    assert ["accepted" in line for line in found] == [False, False, True, True]
    (load,) = of_kind(lines, "load")
    assert load["drafts"] == "standalone" and load["errors"] == 0 and 1.5 < load["accepted"] < 2.5


def test_a_server_that_does_not_start_is_left_out(site: Path) -> None:
    path = site / "site" / "sglang" / "launch_server.py"
    path.write_text(
        path.read_text().replace("import json, sys", "import json, sys\nassert 'NGRAM' not in sys.argv")
    )
    few = "--requests 4 --clients 2 --longest-prompt 6 --longest-answer 4"
    code, lines = drive(site, f"drafts --model qwen3_8b --sets hpc-plugin --drafts ngram {few}")
    (failure,) = of_kind(lines, "failure")
    assert code == 1 and failure["drafts"] == "ngram" and not of_kind(lines, "load")
    assert [line["drafts"] for line in of_kind(lines, "drafts")] == [None]


@pytest.mark.slow
def test_a_server_loads_beside_the_workers_and_is_asked_last(site: Path) -> None:
    few = "--batch 1 --steps 8 --rounds 1 --requests 10 --clients 4 --longest-prompt 6"
    code, lines = drive(site, f"engine bench --server hpc {few}")
    assert code == 0
    assert [line["kind"] for line in lines[1:]] == ["engine", "engine", "bench", "bench", "load"]
