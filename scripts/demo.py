"""`make demo`: start a server on the embedded model, ask it one question, show how it thinks, stop the server.

Uses nothing of the engine: a process, a socket and the OpenAI client, as any user would.
"""

from __future__ import annotations

import argparse
import os
import shutil
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
from typing import Any, TextIO

from openai import OpenAI

from thinkfold.pebble import Problem, score
from thinkfold.pebble.suites import problem_at

READY_SECONDS = 120
ANSWER_SECONDS = 300
MAX_TOKENS = 6_000
SUITE = "medium"
QUESTION = 3


class DemoError(Exception):
    """The demo could not go on; the message is for the user."""


class Screen:
    """Writes thinking dimmed and indented behind a bar, segment by segment, and the answer plainly."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        colour = out.isatty() and "NO_COLOR" not in os.environ
        self._dim, self._bold, self._off = ("\x1b[2m", "\x1b[1m", "\x1b[0m") if colour else ("", "", "")
        self._width = min(100, shutil.get_terminal_size((100, 24)).columns) - 8
        self._column = 0
        self._line_is_empty = True  # of the model's line; a wrapped line has a column of 0 too
        self._blank = False
        self.segments = 0

    def line(self, text: str = "") -> None:
        print(text, file=self._out, flush=True)

    def title(self, text: str) -> None:
        self.line(f"\n{self._bold}{text}{self._off}")

    def thinking(self, delta: str) -> None:
        """Show a piece of thinking; an empty line of the model's starts a new segment."""
        for char in delta:
            if char == "\n":
                self._blank = self._blank or self._line_is_empty
                self._line_is_empty = True
                self.end_thinking()
            else:
                self._put(char)
        self._out.flush()

    def answer(self, delta: str) -> None:
        self._out.write(delta)
        self._out.flush()

    def end_thinking(self) -> None:
        """End the line on the screen, if one is open."""
        if self._column:
            self._out.write(f"{self._off}\n")
            self._column = 0

    def _put(self, char: str) -> None:
        if self._column == 0:
            if char == " ":
                return
            starts_segment = self._blank or self.segments == 0
            if starts_segment:
                self.segments += 1
                if self.segments > 1:
                    self._out.write(f"{self._dim}     │{self._off}\n")
            self._out.write(f"{self._dim}{self.segments if starts_segment else '':>4} │ ")
            self._blank = False
        self._out.write(char)
        self._column += 1
        self._line_is_empty = False
        if self._column >= self._width and char == " ":
            self.end_thinking()


@contextmanager
def running_server() -> Iterator[str]:
    """A `thinkfold serve` process on a free port of this machine; yields its address when it is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "thinkfold", "serve", "--host", "127.0.0.1", "--port", str(port)]
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


def ask(address: str, problem: Problem, screen: Screen) -> dict[str, Any]:
    """Stream one answer to the screen; returns its text, usage and times in seconds."""
    client = OpenAI(base_url=f"{address}/v1", api_key="none", timeout=60, max_retries=0)
    model = client.models.list().data[0].id
    started = time.monotonic()
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": problem.question}],
        temperature=0,
        max_tokens=MAX_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
    )
    seen: dict[str, Any] = {"text": "", "usage": None, "costs": None, "first": None}
    for chunk in stream:
        if time.monotonic() - started > ANSWER_SECONDS:
            raise DemoError(f"no end of the answer after {ANSWER_SECONDS} seconds")
        seen["usage"] = chunk.usage or seen["usage"]
        seen["costs"] = (chunk.model_extra or {}).get("thinkfold", {}).get("costs", seen["costs"])
        for choice in chunk.choices:
            show(choice.delta, seen, screen, started)
    seen["seconds"] = time.monotonic() - started
    screen.line()
    return seen


def show(delta: Any, seen: dict[str, Any], screen: Screen, started: float) -> None:
    reasoning = getattr(delta, "reasoning", None) or ""
    content = delta.content or ""
    if (reasoning or content) and seen["first"] is None:
        seen["first"] = time.monotonic() - started
    if reasoning and not screen.segments:
        screen.title("Thinking")
    screen.thinking(reasoning)
    if content:
        if not seen["text"]:
            screen.end_thinking()
            screen.title("Answer")
            content = content.lstrip()
        seen["text"] += content
        screen.answer(content)


def summary(seen: dict[str, Any], problem: Problem, screen: Screen, to_first: float) -> None:
    usage = seen["usage"]
    if usage is None or seen["costs"] is None or seen["first"] is None:
        raise DemoError("the server sent no answer")
    thinking = usage.completion_tokens_details.reasoning_tokens
    verdict = "correct" if score(problem, seen["text"]) >= 1.0 else f"wrong, expected {problem.answer}"
    rate = usage.completion_tokens / seen["seconds"]
    screen.title(f"The answer is {verdict}.")
    screen.line(
        f"  tokens   {usage.prompt_tokens} prompt, {thinking} thinking in {screen.segments} segments, "
        f"{usage.completion_tokens - thinking} answer"
    )
    screen.line(
        f"  time     {to_first:.1f} s from start to first token, {seen['seconds']:.1f} s for the response, "
        f"{rate:.0f} tokens/s"
    )
    costs = seen["costs"]
    screen.line(
        f"  KV       {costs['kv_peak_entries']} entries at most, {costs['kv_byte_seconds'] / 1e6:.1f} MB·s held"
    )


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
            screen.title("Question")
            for line in problem.question.splitlines():
                screen.line(textwrap.fill(line, 92))
            asked = time.monotonic()
            seen = ask(address, problem, screen)
            summary(seen, problem, screen, asked - started + (seen["first"] or 0.0))
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        print(f"\ndemo: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
