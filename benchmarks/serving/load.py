"""A real SGLang server under concurrent HTTP requests of real lengths: errors, tokens, latencies."""

from __future__ import annotations

import http.client
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from serving.environment import die_with_parent, environment

T = TypeVar("T")
SHARED_PREFIX = 192  # tokens that every fourth prompt has in common: no multiple of 128, three pages


@dataclass(frozen=True)
class Prompt:
    """What a client asks for."""

    ids: list[int]
    wanted: int


@dataclass
class Answer:
    """What came back. `error` is empty for an answer with the right number of tokens."""

    wanted: int
    prompt: int
    tokens: int = 0
    cached: int = 0
    verified: int = 0  # times that the model looked at drafts
    error: str = ""
    first_ms: float = 0.0
    total_ms: float = 0.0
    ids: list[int] = field(default_factory=list)


def draw(count: int, longest_prompt: int, longest_answer: int, seed: int = 0) -> list[Prompt]:
    """Requests of the conversation trace in its order, cut to fit; every fourth begins with the same tokens."""
    from hpc.bench import traces

    generator = random.Random(seed)
    shared = [generator.randrange(300, 30000) for _ in range(SHARED_PREFIX)]
    prompts = []
    for number, request in enumerate(traces.load("conversation")[:count]):
        length = max(1, min(request.prompt, longest_prompt))
        ids = [generator.randrange(300, 30000) for _ in range(length)]
        if number % 4 == 0:
            ids[:SHARED_PREFIX] = shared[:length]
        prompts.append(Prompt(ids, max(1, min(request.generated, longest_answer))))
    return prompts


class Server:
    """`python -m sglang.launch_server` with a set of backends."""

    def __init__(self, name: str, arguments: list[str], log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sglang.launch_server", "--host", "127.0.0.1", "--port", str(self.port), *arguments],
            stdout=log.open("w"), stderr=subprocess.STDOUT, env=environment(name), start_new_session=True,
            preexec_fn=die_with_parent,
        )  # fmt: skip

    def wait(self, deadline: float) -> str:
        """Until it answers a generated token; "" or what went wrong."""
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                return f"the server ended with {self._process.returncode}; {self.last_words()}"
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
                connection.request("GET", "/health_generate")
                if connection.getresponse().status == 200:
                    return ""
            except OSError:
                pass
            time.sleep(0.5)
        return f"the server was not ready in time; {self.last_words()}"

    def last_words(self, lines: int = 15) -> str:
        text = self.log.read_text(errors="replace").splitlines()[-lines:]
        return f"end of {self.log}:\n" + "\n".join(text)

    def stop(self) -> None:
        """End the server and its processes."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, 15)
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, 9)
        self._process.wait()


def post(port: int, body: dict[str, Any], timeout: float) -> http.client.HTTPResponse:
    """The reply to a request of `/generate`; it holds the connection until it is read."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    headers = {"Content-Type": "application/json", "Connection": "close"}
    connection.request("POST", "/generate", json.dumps(body), headers)
    return connection.getresponse()


def ask(port: int, prompt: Prompt, timeout: float) -> Answer:
    """One streamed request."""
    answer = Answer(prompt.wanted, len(prompt.ids))
    body = {
        "input_ids": prompt.ids, "stream": True,
        "sampling_params": {"temperature": 0.0, "max_new_tokens": prompt.wanted, "ignore_eos": True},
    }  # fmt: skip
    start = time.perf_counter()
    try:
        reply = post(port, body, timeout)
        if reply.status != 200:
            answer.error = f"status {reply.status}: {reply.read(300)!r}"
            return answer
        _read_stream(reply, answer, start)
        reply.close()
    except (OSError, http.client.HTTPException, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.total_ms = 1e3 * (time.perf_counter() - start)
    if not answer.error and not answer.tokens == len(answer.ids) == prompt.wanted:
        answer.error = f"{answer.tokens} tokens, {len(answer.ids)} ids, wanted {prompt.wanted}"
    return answer


def _read_stream(reply: http.client.HTTPResponse, answer: Answer, start: float) -> None:
    """Server-sent events; each holds the whole answer so far."""
    for line in reply:
        if not line.startswith(b"data: "):
            continue
        if line[6:].strip() == b"[DONE]":
            return
        event: dict[str, Any] = json.loads(line[6:])
        if "error" in event:
            answer.error = str(event["error"])[:300]
            return
        if not answer.first_ms:
            answer.first_ms = 1e3 * (time.perf_counter() - start)
        answer.ids = event["output_ids"]
        meta = event["meta_info"]
        answer.tokens, answer.cached = meta["completion_tokens"], meta.get("cached_tokens", 0)
        answer.verified = meta.get("spec_verify_ct", 0)
        reason = meta.get("finish_reason")
        if reason and reason.get("type") != "length":
            answer.error = f"finished by {reason}"


def run(port: int, prompts: list[Prompt], clients: int, timeout: float) -> tuple[list[Answer], float]:
    """(answers, seconds) of all prompts, from `clients` at a time."""
    found, seconds = spread(
        len(prompts), lambda number: ask(port, prompts[number], timeout), clients, timeout
    )
    late = [
        Answer(prompt.wanted, len(prompt.ids), error="no answer in time") if answer is None else answer
        for prompt, answer in zip(prompts, found, strict=True)
    ]
    return late, seconds


def spread(count: int, act: Callable[[int], T], clients: int, timeout: float) -> tuple[list[T | None], float]:
    """(results, seconds): threads take the numbers in order, each the next when its last is done; None: too late."""
    answers: list[T | None] = [None] * count
    numbers = iter(range(count))
    lock = threading.Lock()

    def client() -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            answers[number] = act(number)

    threads = [threading.Thread(target=client, daemon=True) for _ in range(min(clients, count))]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, start + timeout - time.perf_counter()))
    return list(answers), time.perf_counter() - start


def summary(answers: list[Answer], seconds: float, clients: int) -> dict[str, Any]:
    """Counts and latencies for the result file."""
    good = sorted((a for a in answers if not a.error), key=lambda a: a.first_ms)
    steps = sorted((a.total_ms - a.first_ms) / (a.tokens - 1) for a in good if a.tokens > 1)
    errors = [a.error for a in answers if a.error]
    verified = accepted(answers)

    def at(values: list[float], share: float) -> float | None:
        return round(values[min(len(values) - 1, int(share * len(values)))], 3) if values else None

    firsts = [a.first_ms for a in good]
    return {
        "requests": len(answers), "clients": clients, "errors": len(errors), "first_errors": errors[:3],
        "tokens": sum(a.tokens for a in answers), "tokens_wanted": sum(a.wanted for a in answers),
        "prompt_tokens": sum(a.prompt for a in answers), "cached_tokens": sum(a.cached for a in answers),
        "seconds": round(seconds, 2), "tokens_per_s": round(sum(a.tokens for a in answers) / seconds, 1),
        "ttft_ms": at(firsts, 0.5), "ttft_p90_ms": at(firsts, 0.9), "tpot_ms": at(steps, 0.5),
        "tpot_p90_ms": at(steps, 0.9), **({} if verified is None else {"accepted": verified}),
    }  # fmt: skip


def accepted(answers: list[Answer]) -> float | None:
    """Tokens a verification of drafts, the model's own among them: 1 if no draft is right. None without drafts.

    The first token of an answer is the prompt's.
    """
    good = [answer for answer in answers if answer.verified and not answer.error]
    return round(sum(a.tokens - 1 for a in good) / sum(a.verified for a in good), 3) if good else None
