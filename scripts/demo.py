"""`make demo`: start a server on the embedded model, ask it one question, show how it thinks, stop the server.

Uses nothing of the engine: a process, a socket and the OpenAI client, as any user would.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

from openai import OpenAI
from screen import Screen

from thinkfold.pebble import Problem, score
from thinkfold.pebble.suites import problem_at

READY_SECONDS = 120
ANSWER_SECONDS = 300
SUITE = "long"
QUESTION = 3
POOL_ENTRIES = 1280  # a whole number of pages
ENTRY_BYTES = 8 * 2 * (2 * 64 + 1) * 4  # of Pebble in fp32: 8 layers, 2 KV heads of 64, K, V and a mass bias


class DemoError(Exception):
    """The demo could not go on; the message is for the user."""


@dataclass
class Reply:
    """What came back; times as `time.monotonic` tells them, `seconds` for the whole."""

    started: float
    text: str = ""
    usage: Any = None
    finish_reason: str | None = None
    first: float | None = None
    seconds: float = 0.0


@contextmanager
def running_server() -> Iterator[str]:
    """A `thinkfold serve` process on a free port of this machine; yields its address when it is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "thinkfold", "serve", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--device", "cpu", "--kv-cache-bytes", str(POOL_ENTRIES * ENTRY_BYTES)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            wait_until_ready(process, f"http://127.0.0.1:{port}")
            yield f"http://127.0.0.1:{port}"
        except BaseException:
            show_log(log)
            raise
        finally:
            stop(process)


def wait_until_ready(process: subprocess.Popen, address: str) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise DemoError(f"the server ended with code {process.returncode} before it was ready")
        try:
            with urllib.request.urlopen(f"{address}/ready", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise DemoError(f"the server was not ready after {READY_SECONDS} seconds")


def stop(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(timeout=15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def show_log(log: TextIO) -> None:
    log.seek(0)
    for line in log.read().splitlines()[-20:]:
        print(f"  server: {line}", file=sys.stderr)


def ask(address: str, problem: Problem, fold: str, screen: Screen | None = None) -> Reply:
    """Stream one answer under a fold policy, to the screen if there is one."""
    client = OpenAI(base_url=f"{address}/v1", api_key="none", timeout=60, max_retries=0)
    model = client.models.list().data[0].id
    reply = Reply(started=time.monotonic())
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": problem.question}],
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"thinkfold": {"fold": {"policy": fold}, "events": True}},
    )
    for chunk in stream:
        if time.monotonic() - reply.started > ANSWER_SECONDS:
            raise DemoError(f"no end of the answer after {ANSWER_SECONDS} seconds")
        reply.usage = chunk.usage or reply.usage
        event = (chunk.model_extra or {}).get("thinkfold", {}).get("fold")
        if event and screen:
            screen.fold(event)
        for choice in chunk.choices:
            reply.finish_reason = choice.finish_reason or reply.finish_reason
            show(choice.delta, reply, screen)
    reply.seconds = time.monotonic() - reply.started
    if reply.usage is None or reply.first is None:
        raise DemoError("the server sent no answer")
    return reply


def show(delta: Any, reply: Reply, screen: Screen | None) -> None:
    reasoning = getattr(delta, "reasoning", None) or ""
    content = delta.content or ""
    if (reasoning or content) and reply.first is None:
        reply.first = time.monotonic()
    if screen and reasoning:
        if not screen.segments:
            screen.title("Thinking")
        screen.thinking(reasoning)
    if screen and content:
        if not reply.text:
            screen.end_thinking()
            screen.title("Answer")
            content = content.lstrip()
        screen.answer(content)
    reply.text += content


def compare(replies: dict[str, Reply], problem: Problem, screen: Screen) -> None:
    """The three costs of the same question under each policy, side by side."""
    columns = {name: column(reply, problem) for name, reply in replies.items()}
    screen.title(f"{'':26}" + "".join(f"{'fold=' + name:>22}" for name in columns))
    for label in next(iter(columns.values())):
        screen.line(f"  {label:24}" + "".join(f"{values[label]:>22}" for values in columns.values()))


def column(reply: Reply, problem: Problem) -> dict[str, str]:
    costs = reply.usage.model_extra["thinkfold"]
    tokens, kv = costs["tokens"], costs["kv"]
    if reply.finish_reason == "length":
        verdict = "cut: the pool is full"
    else:
        verdict = "correct" if score(problem, reply.text) >= 1.0 else f"wrong ({problem.answer})"
    return {
        "answer": verdict,
        "tokens: prompt": f"{tokens['prompt']}",
        "tokens: thinking": f"{tokens['thinking']}",
        "tokens: answer": f"{tokens['answer']}",
        "folds": f"{costs['folds']}",
        "KV: entries at most": f"{kv['peak_entries']}",
        "KV: MB·s held": f"{kv['byte_seconds'] / 1e6:.0f}",
        "time: seconds": f"{reply.seconds:.1f}",
        "tokens a second": f"{reply.usage.completion_tokens / reply.seconds:.0f}",
    }


def main() -> int:
    """Run the demo; 0 when a whole answer came, right or wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--suite", default=SUITE, help="one of Pebble's suites")
    parser.add_argument("--question", type=int, default=QUESTION, help="number of the question in the suite")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is stopped on the way out
    started = time.monotonic()
    screen = Screen(sys.stdout)
    problem = problem_at(args.suite, args.question)
    try:
        screen.line("Starting `thinkfold serve` with the embedded model …")
        with running_server() as address:
            screen.line(f"Ready on {address} after {time.monotonic() - started:.1f} s; asking with the OpenAI client.")
            screen.line(
                f"Its KV pool holds {POOL_ENTRIES} entries, fewer than this question needs: thinking will be folded."
            )
            screen.title("Question")
            for line in problem.question.splitlines():
                screen.line(textwrap.fill(line, 92))
            replies = {"pressure": ask(address, problem, "pressure", screen)}
            screen.line(f"\n\nFirst token after {(replies['pressure'].first or 0.0) - started:.1f} s.")
            screen.line("The same question without folding …")
            replies["off"] = ask(address, problem, "off")
            compare(replies, problem, screen)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        print(f"\ndemo: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
