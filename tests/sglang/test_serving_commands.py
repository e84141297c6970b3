"""benchmarks/serving: its models, and the processes that a command line starts. Nothing runs here."""

from __future__ import annotations

import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
OWN = ("hpc-plugin", "hpc-plugins")


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield lambda name: importlib.import_module(f"serving.{name}")
    for name in [name for name in sys.modules if name.split(".")[0] == "serving"]:
        del sys.modules[name]


@pytest.fixture
def started(serving: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, str]]]:
    """(command, environment) of every process that would have been started."""
    found: list[tuple[list[str], dict[str, str]]] = []

    def popen(command: list[str], *, env: dict[str, str], **_: Any) -> Any:
        found.append((command, env))
        return types.SimpleNamespace(poll=lambda: 1, wait=lambda: 1, returncode=1)

    for name in ("load", "process"):
        fake = types.SimpleNamespace(**{**vars(serving(name).subprocess), "Popen": popen})
        monkeypatch.setattr(serving(name), "subprocess", fake)
    return found


def parse(serving: Any, words: str, folder: Path) -> Any:
    files = ["--output", str(folder / "out.jsonl"), "--logs", str(folder / "logs"), "--no-compile"]
    return serving("__main__").parser().parse_args([*words.split(), *files])


def value(command: list[str], option: str) -> str:
    return command[command.index(option) + 1]


def check_plugin(command: list[str], env: dict[str, str], name: str) -> None:
    """What a process of the plugin's sets needs: the backend, its pages, the plugins by name and on the path."""
    assert value(command, "--attention-backend") == "hpc" and value(command, "--page-size") == "64"
    assert value(command, "--kv-cache-dtype") == "fp8_e4m3"
    plugins = env["SGLANG_PLUGINS"].split(",")
    assert {"hpc", "hpc_bench_weights"} <= set(plugins)
    assert ("hpc_moe" in plugins) == ("--moe-runner-backend" in command) == (name == "hpc-plugins")
    path = env["PYTHONPATH"].split(":")
    assert str(ROOT / "src") in path
    declared = "".join(file.read_text() for file in Path(path[0]).glob("*.dist-info/entry_points.txt"))
    for point in ("hpc = hpc.integrations.sglang:register", "hpc_moe = hpc.integrations.sglang_moe:register"):
        assert point in declared


@pytest.mark.parametrize("name", OWN)
def test_command_line_of_a_server_with_the_plugin(
    name: str, serving: Any, started: list[tuple[list[str], dict[str, str]]], tmp_path: Path
) -> None:
    words = f"server --model qwen3_30b_a3b_fp8 --layers 8 --fp8 --sets {name} --requests 8 --clients 16"
    options = parse(serving, words, tmp_path)
    assert serving("run").server(options) == 1  # it ended at once
    ((command, env),) = started
    assert command[1:3] == ["-m", "sglang.launch_server"]
    check_plugin(command, env, name)
    config = json.loads((Path(value(command, "--model-path")) / "config.json").read_text())
    assert config["num_hidden_layers"] == 8 and config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert value(command, "--max-running-requests") == value(command, "--cuda-graph-max-bs-decode") == "16"
    assert value(command, "--chunked-prefill-size") == "2048" and "--disable-prefill-cuda-graph" in command
    assert int(value(command, "--max-total-tokens")) >= 16 * int(value(command, "--context-length"))


def test_command_lines_of_servers_with_drafts(
    serving: Any, started: list[tuple[list[str], dict[str, str]]], tmp_path: Path
) -> None:
    words = "--model qwen3_8b --layers 8 --sets default hpc-plugin --control triton --draft-layers 3 --draft-steps 4"
    options = parse(serving, f"drafts {words} --fp8 --requests 4", tmp_path)
    assert serving("drafts").drafts(options) == 1  # they ended at once
    found = [command for command, _ in started]
    kinds = [value(c, "--speculative-algorithm") if "--speculative-algorithm" in c else "" for c in found]
    assert kinds == ["", "", "STANDALONE", "NGRAM", "STANDALONE", "NGRAM"]
    for command, env in started[1:4]:
        check_plugin(command, env, "hpc-plugin")
    for command in (found[2], found[4]):
        draft = json.loads(
            (Path(value(command, "--speculative-draft-model-path")) / "config.json").read_text()
        )
        model = json.loads((Path(value(command, "--model-path")) / "config.json").read_text())
        assert draft == {**model, "num_hidden_layers": 3} and model["num_hidden_layers"] == 8
        assert value(command, "--speculative-num-steps") == "4"
        assert value(command, "--speculative-num-draft-tokens") == "5"
        assert value(command, "--speculative-eagle-topk") == "1"
        assert value(command, "--speculative-draft-attention-backend") == "fa3"
    assert value(found[3], "--speculative-num-draft-tokens") == "2"
    options = parse(serving, "server --model qwen3_8b --sets hpc-plugin --drafts ngram standalone", tmp_path)
    started.clear()
    assert serving("run").server(options) == 1
    assert ["NGRAM" in command for command, _ in started] == [True, False]
    jobs = serving("compile").jobs("qwen3_8b", False, [1], [5, 2])
    rows = [case.num_new_tokens for kind, case in jobs if kind == "decode" and case.dynamic]
    assert rows == [1, 2, 5]


def test_engine_with_a_server_of_the_plugin(
    serving: Any,
    started: list[tuple[list[str], dict[str, str]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server gets the plugin, SGLang's own sets beside it do not see this package, and kernels are compiled."""
    run, compiled = serving("run"), []
    monkeypatch.setattr(run, "compile_model", lambda *arguments: compiled.append(arguments) or 0.0)
    words = "engine bench --model qwen3_30b_a3b_fp8 --layers 8 --fp8 --sets default --server hpc-plugins --clients 16"
    options = parse(serving, words, tmp_path)
    options.no_compile = False
    session = run.Session(options, options.sets)
    run.Serving(options, session.records, options.server)
    (worker, own), (command, env) = started
    assert command[1:3] == ["-m", "sglang.launch_server"]
    check_plugin(command, env, "hpc-plugins")
    arguments = json.loads(worker[-1])
    assert "--attention-backend" not in arguments and str(ROOT / "src") not in own["PYTHONPATH"].split(":")
    run.compile_beside(options, ["default"], [1]).join()  # nothing of this package
    assert len(compiled) == 1 and {1, 8, 15} <= set(compiled[0][2])


@pytest.mark.parametrize("name", ["default", *OWN, "triton"])
def test_a_dense_model(
    name: str, serving: Any, started: list[tuple[list[str], dict[str, str]]], tmp_path: Path
) -> None:
    options = parse(serving, f"engine check --model qwen3_8b --layers 8 --fp8 --sets {name}", tmp_path)
    serving("run").Session(options, options.sets)
    ((command, env),) = started
    arguments = json.loads(command[-1])
    config = json.loads((Path(value(arguments, "--model-path")) / "config.json").read_text())
    assert config["num_hidden_layers"] == 8 and config["architectures"] == ["Qwen3ForCausalLM"]
    if name in OWN:
        check_plugin(arguments, env, name)


def test_every_model_has_kernels_to_compile(serving: Any) -> None:
    """A dense model only those of attention; the prologue is HunYuan V3's."""
    sets, compiling = serving("sets"), serving("compile")
    assert "qwen3_8b" in sets.model_names()
    for model in sets.model_names():
        kinds = {kind for kind, _ in compiling.jobs(model, True, [1])}
        config = sets.model_config(model)
        assert ("moe" in kinds) == (model != "qwen3_8b")
        assert ("rope" in kinds) == (config["model_type"] == "hy_v3")
        assert ({"decode", "prefill"} <= kinds) == ("kv_lora_rank" not in config)


def test_shape_of_the_dense_model(serving: Any) -> None:
    """Qwen3-8B: 8.2 billion parameters, BF16, embedding and head of their own."""
    config: dict[str, Any] = serving("sets").model_config("qwen3_8b")
    hidden, dim, heads, kv = (
        config[name] for name in ("hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads")
    )
    attention = hidden * dim * (2 * heads + 2 * kv)
    layer = attention + 3 * hidden * config["intermediate_size"]
    whole = config["num_hidden_layers"] * layer + 2 * config["vocab_size"] * hidden
    assert round(whole / 1e9, 1) == 8.2 and not config["tie_word_embeddings"]
    assert "quantization_config" not in config and config["torch_dtype"] == "bfloat16"
