"""What the commands do: workers and servers loaded side by side, then asked in turn."""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from serving import check, load, sets, stages
from serving.compile import compile_model
from serving.process import Gone, Worker
from serving.records import Records


class Session:
    """The workers of one model, and where results go."""

    def __init__(self, options: argparse.Namespace, names: list[str]) -> None:
        self.options, self.records = options, Records(options.output)
        self.folder = Path(tempfile.mkdtemp(prefix="hpc-serving-run-"))
        self.logs = options.logs or self.folder
        self.shared = {
            "model": options.model,
            "layers": options.layers,
            "kv": "fp8" if options.fp8 else "bf16",
        }
        self.deadline = time.monotonic() + options.load_limit
        self.workers: dict[str, Worker] = {}
        served = [options.server] if options.server else []
        batches = [*options.batch, len(check.LENS), *(running(options) if served else [])]
        compile_beside(options, [*names, *served], batches)
        model = sets.model_folder(options.model, options.layers)
        longest = max(options.input_len, options.long, max(check.LENS) if "check" in options.what else 0)
        batch = max(options.batch) if {"bench", "profile"} & set(options.what) else len(check.LENS)
        for name in names:
            arguments = sets.arguments(
                model, name, fp8=options.fp8, context=longest + options.steps + 128,
                tokens=max(options.room, batch * (options.input_len + options.steps + 128), 16384),
                most=max(batch, len(check.LENS)), batches=[*options.batch, len(check.LENS)], memory=options.memory,
            )  # fmt: skip
            if "ngram_vocab_size_ratio" in sets.model_config(options.model):
                # its buffer of n-grams is as long as a chunk of the scheduler, which is not there to cut
                chunk = max(8192, batch * options.input_len, sum(check.CHUNKED_LENS))
                arguments += ["--chunked-prefill-size", str(chunk)]
            self.workers[name] = Worker(name, arguments, self.logs / f"{options.model}-{name}.log")

    def wait(self) -> None:
        """Until every worker has its model; those that fail are dropped and recorded."""
        for name, worker in list(self.workers.items()):
            found = self.guard(name, "load", lambda worker=worker: worker.loaded(self.deadline))
            if found is not None:
                self.records.write("engine", set=name, **self.shared, **found)

    def guard(self, name: str, what: str, act: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """The answer, or None after recording why there is none. A worker that is gone is dropped."""
        try:
            return act()
        except Gone as error:
            self.records.write("failure", set=name, what=what, error=str(error), **self.shared)
            if what == "load" or "in time" in str(error) or "ended" in str(error):
                self.workers.pop(name, None)
            return None

    def ask(self, name: str, do: str, **values: Any) -> dict[str, Any] | None:
        worker = self.workers.get(name)
        limit = self.options.limit
        return self.guard(name, do, lambda: worker.ask(do, limit, **values)) if worker else None

    def close(self) -> None:
        for worker in self.workers.values():
            worker.stop()


def compile_beside(options: argparse.Namespace, names: list[str], batches: Sequence[int]) -> threading.Thread:
    """Compile what sets `names` need while models load: then the cache has the kernels when they are first called."""

    def act() -> None:
        if not options.no_compile and any(sets.SETS[name].own for name in names):
            rows = [sets.draft_rows(kind, options.draft_steps) for kind in getattr(options, "drafts", ())]
            seconds = compile_model(options.model, options.fp8, batches, _complain, rows)
            print(f"kernels compiled in {seconds:.1f} s", flush=True)

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def running(options: argparse.Namespace) -> Sequence[int]:
    """Some of the batches that a server has under its clients."""
    return range(1, options.clients + 1, 7)


def _complain(text: str) -> None:
    if ":" in text:
        print(text, flush=True)


def agreement(session: Session) -> None:
    """Every set against the first: decode graphs, eager steps, prompts in two passes; and a set against itself."""
    names: list[str] = [*session.options.sets, *session.options.control]
    reference, others = names[0], names[1:]

    def tokens(name: str, tag: str, lens: Sequence[int] = check.LENS, **values: Any) -> Path | None:
        path = session.folder / f"{name}-{tag}.pt"
        steps = session.options.steps
        found = session.ask(name, "tokens", lens=list(lens), steps=steps, save=str(path), **values)
        return path if found else None

    def compare(name: str, mode: str, want: Path, lens: Sequence[int], **values: Any) -> Path | None:
        free = tokens(name, f"{mode}-free", lens, **values)
        forced = tokens(name, f"{mode}-forced", lens, forced=str(want), **values)
        if free and forced:
            found = check.compare(want, free, forced)
            session.records.write(
                "check", set=name, reference=reference, mode=mode, **session.shared, **found
            )
        return free

    whole = tokens(reference, "whole")
    chunked = tokens(reference, "chunked", check.CHUNKED_LENS)
    for name in others:
        if whole is None or name not in session.workers:
            continue
        free = compare(name, "graph", whole, check.LENS)
        again = tokens(name, "again")
        if free and again:
            found = check.identical(free, again)
            session.records.write(
                "check", set=name, reference=name, mode="repeated", **session.shared, identical=found
            )
        compare(name, "eager", whole, check.LENS, eager=True)
        if chunked is not None:
            compare(name, "chunked", chunked, check.CHUNKED_LENS, cut=check.CUT)


def bench(session: Session) -> None:
    """Rounds over the sets in turn, so that all meet the same clocks; medians of all rounds but the first."""
    options = session.options
    cases = [(f"{batch}x{options.input_len}", [options.input_len] * batch) for batch in options.batch]
    if options.mixed:
        cases += [
            (f"{batch} mixed", mixed(batch, options.input_len)) for batch in options.batch if batch >= 8
        ]
    if options.long:
        most = max(options.batch) * options.input_len
        cases += [
            (f"{n}x{options.long}", [options.long] * n) for n in options.batch if n * options.long <= most
        ]
    for case, lens in cases:
        found: dict[str, list[dict[str, Any]]] = {}
        for round_number in range(options.rounds + 1):
            for name in [name for name in options.sets if name in session.workers]:
                answer = session.ask(name, "bench", lens=lens, steps=options.steps)
                if answer is not None and round_number:
                    found.setdefault(name, []).append(answer)
        for name, answers in found.items():
            times = {
                key: round(statistics.median(answer[key] for answer in answers), 4)
                for key in ("ttft_ms", "step_ms", "step_waited_ms")
            }
            session.records.write(
                "bench", set=name, case=case, batch=len(lens), lens=sorted(lens), steps=options.steps,
                rounds=len(answers), **session.shared, **times, step_all_ms=[a["step_ms"] for a in answers],
                finite=all(a["finite"] for a in answers),
            )  # fmt: skip


def mixed(batch: int, longest: int) -> list[int]:
    """KV lengths of a running batch of the conversation trace."""
    from hpc.bench import traces

    return traces.draw_batch(traces.load("conversation"), batch, seed=0, max_len=longest)


def profile(session: Session) -> None:
    """GPU time by kernel and by stage."""
    options = session.options
    for batch in options.profile_batch or options.batch:
        for name in options.sets:
            found = session.ask(name, "profile", lens=[options.input_len] * batch)
            if found is None:
                continue
            decode = stages.by_stage(found["decode"])
            session.records.write(
                "profile", set=name, case=f"{batch}x{options.input_len}", batch=batch, **session.shared,
                decode_us=round(sum(decode.values()), 1), stages=decode,
                prefill_us=round(sum(row[1] for row in found["prefill"]), 1),
                prefill_stages=stages.by_stage(found["prefill"]), decode=found["decode"][:40],
                prefill=found["prefill"][:40],
            )  # fmt: skip


def engines(options: argparse.Namespace) -> int:
    """`check`, `bench`, `profile` of one model in one go: models are loaded once. With `--server` a server loads beside
    them, stands idle while they are timed, and is asked at the end."""
    session = Session(options, [*options.sets, *options.control])
    serving = Serving(options, session.records, options.server) if options.server else None
    bad = 0
    try:
        session.wait()
        for what in options.what:
            if serving is not None and what != "check":
                serving.wait()  # its loading would disturb the times
            {"check": agreement, "bench": bench, "profile": profile}[what](session)
        bad = len({*options.sets, *options.control}) - len(session.workers)
    finally:
        session.close()
        if serving is not None:
            try:
                bad += not serving.measure()
            finally:
                serving.stop()
    return 1 if bad else 0


class Serving:
    """A server of one set of backends, and its clients."""

    def __init__(
        self, options: argparse.Namespace, records: Records, name: str, drafts: str | None = None
    ) -> None:
        self.options, self.records, self.name, self.drafts = options, records, name, drafts
        self.shared: dict[str, Any] = {
            "model": options.model,
            "layers": options.layers,
            "kv": "fp8" if options.fp8 else "bf16",
        }
        if drafts:
            self.shared["drafts"] = drafts
        longest = (options.longest_prompt, options.longest_answer)
        self.prompts = load.draw(options.requests, *longest)
        self.others = load.draw(
            options.clients, *longest, seed=1
        )  # as long, and not in the prefix cache later
        whole = options.longest_prompt + options.longest_answer + 128
        arguments = sets.arguments(
            sets.model_folder(options.model, options.layers), name, fp8=options.fp8, context=whole,
            tokens=options.clients * whole, most=options.clients, batches=options.server_batch, memory=options.memory,
        )  # fmt: skip
        if drafts:
            arguments += sets.draft_arguments(
                drafts, options.model, options.draft_layers, options.draft_steps, options.draft_backend
            )
        whose = f"{options.model}-{name}{f'-{drafts}' if drafts else ''}-server.log"
        log = (options.logs or Path(tempfile.mkdtemp())) / whose
        more = ["--chunked-prefill-size", str(options.chunk), "--mm-feature-transport", "cpu"]
        self.start = time.monotonic()
        self.server = load.Server(name, [*arguments, *more], log)
        self.ready: bool | None = None

    def wait(self) -> bool:
        """Until it answers; a failure is recorded once."""
        if self.ready is None:
            wrong = self.server.wait(self.start + self.options.load_limit)
            if wrong:
                self.records.write("failure", set=self.name, what="server", error=wrong, **self.shared)
            self.ready, self.seconds = not wrong, round(time.monotonic() - self.start, 1)
        return self.ready

    def measure(self) -> bool:
        """All requests, after others that warm the server up. Whether none failed."""
        options = self.options
        if not self.wait():
            return False
        ask = (self.server.port, options.clients, options.server_limit)
        first, _ = load.run(ask[0], self.others, *ask[1:])
        answers, seconds = load.run(ask[0], self.prompts, *ask[1:])
        found = load.summary(answers, seconds, options.clients)
        found["warm_errors"] = sum(bool(answer.error) for answer in first)
        self.records.write(
            "load", set=self.name, ready_s=self.seconds, chunk=options.chunk, **self.shared, **found
        )
        if found["errors"]:
            print(self.server.last_words(), flush=True)
        return not found["errors"] and not found["warm_errors"]

    def stop(self) -> None:
        self.server.stop()


def server(options: argparse.Namespace) -> int:
    """A server for each set in turn, and with each kind of drafts that is asked for instead."""
    records = Records(options.output)
    failed = 0
    compiling = compile_beside(options, options.sets, running(options))
    for name, drafts in itertools.product(options.sets, options.drafts or [None]):
        serving = Serving(options, records, name, drafts)
        try:
            serving.wait()
            compiling.join()
            failed += not serving.measure()
        finally:
            serving.stop()
    return 1 if failed else 0


def compile_only(options: argparse.Namespace) -> int:
    """Fill Triton's cache."""
    seconds = compile_model(options.model, options.fp8, options.batch, print)
    print(f"kernels compiled in {seconds:.1f} s", flush=True)
    return 0
