"""Command line: `python benchmarks/serving engine ...`, `... server ...`, `... drafts ...`, `... compile ...`."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:1] = [
    str(ROOT / "benchmarks"),
    str(ROOT / "src"),
]  # in place of this folder, whose names are too common

from serving import sets  # noqa: E402


def parser() -> argparse.ArgumentParser:
    """All options."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--model", default="hy3_tp8", help=f"{', '.join(sets.model_names())}, or a config.json"
    )
    common.add_argument("--layers", type=int, help="only the first layers")
    common.add_argument("--sets", nargs="+", default=["default", "hpc"], choices=sets.SETS, metavar="SET",
                        help=f"{', '.join(sets.SETS)}; `check` compares with the first")  # fmt: skip
    common.add_argument("--fp8", action="store_true", help="e4m3 KV cache")
    common.add_argument("--memory", type=float, default=0.8, help="fraction of the GPU's memory for SGLang")
    common.add_argument("--room", type=int, default=0, help="tokens in the KV cache; default: what is needed")
    common.add_argument("--load-limit", type=float, default=300, help="seconds until models must be loaded")
    common.add_argument(
        "--no-compile", action="store_true", help="do not compile this package's kernels beforehand"
    )
    common.add_argument(
        "--output", type=Path, help="result file; default: results/<GPU>.jsonl beside the driver"
    )
    common.add_argument("--logs", type=Path, help="folder for what SGLang prints")
    common.add_argument("--clients", type=int, default=64, help="HTTP requests at a time")
    common.add_argument("--requests", type=int, default=192, help="HTTP requests, of the conversation trace")
    common.add_argument("--longest-prompt", type=int, default=4096)
    common.add_argument("--longest-answer", type=int, default=128)
    common.add_argument("--chunk", type=int, default=2048, help="--chunked-prefill-size of the server")
    common.add_argument(
        "--server-batch", type=int, nargs="*", help="sizes of its decode graphs; none: no graphs"
    )
    common.add_argument("--server-limit", type=float, default=90, help="seconds for all HTTP requests")
    whole = argparse.ArgumentParser(prog="python benchmarks/serving", description=__doc__)
    commands = whole.add_subparsers(dest="command", required=True)

    compiling = commands.add_parser(
        "compile", parents=[common], help="compile this package's kernels for a model"
    )
    compiling.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64])
    engine = commands.add_parser("engine", parents=[common], help="SGLang's model runner, without its server")
    engine.add_argument("what", nargs="+", choices=["check", "bench", "profile"])
    engine.add_argument("--control", nargs="+", default=[], choices=sets.SETS, metavar="SET",
                        help="only checked: how far sets of SGLang's own are from the first")  # fmt: skip
    engine.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64])
    engine.add_argument("--input-len", type=int, default=1024)
    engine.add_argument(
        "--mixed", action="store_true", help="also batches of lengths of the trace, cut to --input-len"
    )
    engine.add_argument(
        "--long",
        type=int,
        default=0,
        help="also prompts of so many tokens, as far as a batch has no more tokens than the largest one otherwise",
    )
    engine.add_argument("--profile-batch", type=int, nargs="+", help="default: --batch")
    engine.add_argument("--steps", type=int, default=32, help="tokens a request")
    engine.add_argument("--rounds", type=int, default=3)
    engine.add_argument("--limit", type=float, default=60, help="seconds for one command of a worker")
    engine.add_argument("--server", choices=sets.SETS, metavar="SET",
                        help="also a server of this set, loaded beside the models and asked at the end")  # fmt: skip
    drafting = argparse.ArgumentParser(add_help=False)
    drafting.add_argument("--draft-layers", type=int, default=2, help="of the draft model of `standalone`")
    drafting.add_argument("--draft-steps", type=int, default=3, help="drafts a verification of `standalone`")
    drafting.add_argument("--draft-backend", default="fa3", help="attention backend of the draft model")
    kinds = {"nargs": "+", "choices": sets.DRAFTS, "metavar": "KIND"}
    serving = commands.add_parser(
        "server", parents=[common, drafting], help="`sglang.launch_server` and HTTP clients"
    )
    serving.add_argument("--drafts", default=[], help=f"with drafts: {', '.join(sets.DRAFTS)}", **kinds)
    comparing = commands.add_parser(
        "drafts", parents=[common, drafting], help="servers with and without drafts, asked the same"
    )
    comparing.add_argument(
        "--drafts", default=list(sets.DRAFTS), help=f"{', '.join(sets.DRAFTS)}; default: all", **kinds
    )
    comparing.add_argument("--control", nargs="+", default=[], choices=sets.SETS, metavar="SET",
                           help="sets of SGLang's own, also with drafts")  # fmt: skip
    return whole


def main() -> int:
    """Entry point; returns the exit code."""
    options = parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that workers and servers are ended
    from serving import drafts, run

    commands = {
        "engine": run.engines,
        "server": run.server,
        "drafts": drafts.drafts,
        "compile": run.compile_only,
    }
    return commands[options.command](options)


if __name__ == "__main__":
    sys.exit(main())
