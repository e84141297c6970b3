"""Speculative decoding in servers: the same prompts without and with drafts, judged by a server without any."""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import threading
from typing import Any

from serving import load
from serving.records import Records
from serving.run import Serving, compile_beside, running

ROUNDS = 2  # in the second one n-grams know the answers of the first


def drafts(options: argparse.Namespace) -> int:
    """The first set without drafts judges the others, which run without and with each kind; then all are loaded."""
    records = Records(options.output)
    compiling = compile_beside(options, options.sets, running(options))
    first, others = options.sets[0], options.sets[1:]
    todo: list[tuple[str, str | None]] = [(first, None)]
    todo += [(name, kind) for name in others or [first] for kind in (None, *options.drafts)]
    todo += [(name, kind) for name in options.control for kind in options.drafts]
    servers: list[Serving] = []
    try:
        servers += [Serving(options, records, name, kind) for name, kind in dict.fromkeys(todo)]
        compiling.join()
        ready = [server for server in servers if server.wait()]
        bad = len(servers) - len(ready)
        if servers[0] in ready:
            bad += compare(options, records, ready)
        for server in ready:
            if server.drafts:
                # not in its prefix cache, unlike those above
                server.prompts = load.draw(*_asked(options), seed=2)
                bad += not server.measure()
    finally:
        together([threading.Thread(target=server.stop) for server in servers])
    return 1 if bad else 0


def _asked(options: argparse.Namespace) -> tuple[int, int, int]:
    return options.requests, options.longest_prompt, options.longest_answer


def together(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def compare(options: argparse.Namespace, records: Records, servers: list[Serving]) -> int:
    """A line for each server and round; how many had errors."""
    bad = 0
    want: list[load.Answer] = []
    prompts = servers[0].prompts
    for server in servers:
        for number in range(ROUNDS if server.drafts else 1):
            port, clients, limit = server.server.port, options.clients, options.server_limit
            answers, seconds = load.run(port, prompts, clients, limit)
            want = want or answers
            found = load.summary(answers, seconds, clients)
            scores, missed = judge(servers[0].server.port, prompts, answers, clients, limit)
            records.write(
                "drafts", set=server.name, reference=servers[0].name, round=number,
                **{"drafts": None, **server.shared}, **found, **agreement(want, answers), **scores, missed=missed[:3],
            )  # fmt: skip
            bad += bool(found["errors"] or missed)
            if found["errors"]:
                print(server.server.last_words(), flush=True)
    return bad


def agreement(want: list[load.Answer], answers: list[load.Answer]) -> dict[str, Any]:
    """Answers that are the same, and tokens until they differ. After that they are answers to other texts."""
    pairs = [
        (a.ids, b.ids)
        for a, b in zip(want, answers, strict=True)
        if a.ids and b.ids and not a.error + b.error
    ]
    if not pairs:
        return {}
    prefix = [
        next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a)) for a, b in pairs
    ]
    return {
        "identical": round(sum(a == b for a, b in pairs) / len(pairs), 4),
        "same_prefix": round(statistics.fmean(prefix), 2),
        "longest_prefix": round(statistics.fmean(len(a) for a, _ in pairs), 2),
    }


def judge(
    port: int, prompts: list[load.Prompt], answers: list[load.Answer], clients: int, limit: float
) -> tuple[dict[str, Any], list[str]]:
    """Each token of the answers given those before it, by the server at `port` in one pass over prompt and answer.

    Returns:
        chosen: share of the tokens that this server would have chosen.
        flipped_margin: largest difference of the logarithms of the probabilities of its choice and of another token.
        median_margin: of its first two choices, for comparison. A token at a large margin is an error.
    """
    good = [(p, a) for p, a in zip(prompts, answers, strict=True) if a.ids and not a.error]

    def act(number: int) -> list[tuple[bool, float, float]] | str:
        try:
            return score(port, *good[number], limit)
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, IndexError) as error:
            return f"{type(error).__name__}: {error}"[:300]

    found, _ = load.spread(len(good), act, clients, limit)
    rows = [row for rows in found if isinstance(rows, list) for row in rows]
    missed = ["no answer in time" if rows is None else rows for rows in found if not isinstance(rows, list)]
    if not rows:
        return {}, missed
    return {
        "judged": len(rows), "chosen": round(sum(same for same, _, _ in rows) / len(rows), 5),
        "flipped_margin": round(max((gap for same, gap, _ in rows if not same), default=0.0), 4),
        "median_margin": round(statistics.median(margin for _, _, margin in rows), 4),
    }, missed  # fmt: skip


def score(
    port: int, prompt: load.Prompt, answer: load.Answer, limit: float
) -> list[tuple[bool, float, float]]:
    """(whether the token is the first choice, how far behind it is, how far the second is), token by token."""
    body = {
        "input_ids": prompt.ids + answer.ids, "return_logprob": True, "logprob_start_len": len(prompt.ids) - 1,
        "top_logprobs_num": 2,
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True},
    }  # fmt: skip
    reply = load.post(port, body, limit)
    text = reply.read()
    if reply.status != 200:
        raise ValueError(f"status {reply.status}: {text[:200]!r}")
    meta = json.loads(text)["meta_info"]
    count = len(answer.ids)
    own, top = meta["input_token_logprobs"][-count:], meta["input_top_logprobs"][-count:]
    if [token for _, token, *_ in own] != answer.ids:
        raise ValueError(f"logarithms of {len(own)} other tokens than the answer's")
    # Of two tokens with the same logit either may be first.
    return [
        (logprob >= best[0][0], best[0][0] - logprob, best[0][0] - best[1][0])
        for (logprob, *_), best in zip(own, top, strict=True)
    ]
