"""Whether formulas are equal, asked of processes of their own with a time limit and size checks.

A process starts when no other one is free, and is killed when it takes too long. Any thread may ask; a slow
question holds up no other one while a second process is free.
"""

from __future__ import annotations

import json
import logging
import re
import select
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

MAX_CHARS = 200
MAX_NESTING = 12
MAX_EXPONENT = 999
CACHE_SIZE = 4096
START_SECONDS = 60.0
WORKERS = 2

_LONG_NUMBER = re.compile(r"\d{31}")
_LARGE_FACTORIAL = re.compile(r"\d{4}\s*!|[)}\]!]\s*!")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reading:
    """A formula: equal formulas have equal signatures; `constant` is its real value, cut after 40 digits."""

    signature: str
    constant: Fraction | None


@dataclass(slots=True)
class Patience:
    """How many of its own questions an asker lets run out of time; behind them its questions count as unproven."""

    left: int


class Symbolic:
    """Asks the workers. A question without an answer in time counts as unproven."""

    def __init__(self, seconds: float = 1.0, workers: int = WORKERS) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()  # of the answers that are known
        self._known: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._workers = [_Worker() for _ in range(workers)]
        self._idle = list(self._workers)
        self._freed = threading.Condition()
        self._broken = False

    def read(self, latex: str, patience: Patience | None = None) -> Reading | None:
        """None where the formula is too large, is none, or takes too long."""
        if not is_small(latex):
            return None
        reply = self._ask({"read": latex}, patience)
        if "signature" not in reply:
            return None
        value = reply["constant"]
        return Reading(reply["signature"], None if value is None else Fraction(value))

    def same(self, a: str, b: str, patience: Patience | None = None) -> bool:
        """True if a worker proves the equality; the order of the two does not matter."""
        if not (is_small(a) and is_small(b)):
            return False
        return bool(self._ask({"same": sorted((a, b))}, patience).get("same"))

    def stop(self) -> None:
        """End the processes, each after the question that it is at. A later question starts another."""
        stopped = [self._take() for _ in self._workers]
        for worker in stopped:
            worker.kill()
            self._give_back(worker)

    def __enter__(self) -> Symbolic:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _ask(self, question: dict[str, Any], patience: Patience | None) -> dict[str, Any]:
        line = json.dumps(question)
        with self._lock:
            if line in self._known:
                self._known.move_to_end(line)
                return self._known[line]
        if self._broken or (patience is not None and patience.left <= 0):
            return {}
        reply = self._exchange(line, patience)
        with self._lock:
            self._known[line] = reply
            if len(self._known) > CACHE_SIZE:
                self._known.popitem(last=False)
        return reply

    def _exchange(self, line: str, patience: Patience | None) -> dict[str, Any]:
        worker = self._take()
        try:
            if not worker.start():
                self._broken = True
                return {}
            return worker.ask(line, self._seconds)
        except TimeoutError:
            if patience is not None:
                patience.left -= 1
            logger.info("a symbolic comparison took more than %g s", self._seconds)
        except (OSError, ValueError) as error:  # it ended, by its memory limit for one
            logger.warning("a symbolic checker has ended: %s", error)
        finally:
            self._give_back(worker)
        return {}

    def _take(self) -> _Worker:
        """A worker that nobody asks, one that runs if there is one."""
        with self._freed:
            while not self._idle:
                self._freed.wait()
            worker = next((each for each in self._idle if each.running), self._idle[0])
            self._idle.remove(worker)
            return worker

    def _give_back(self, worker: _Worker) -> None:
        with self._freed:
            self._idle.append(worker)
            self._freed.notify()


class _Worker:
    """One process. Whoever has taken it is alone with it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> bool:
        """Whether it is ready for a question; False if it cannot start (for want of its packages, say)."""
        if self.running:
            return True
        self.kill()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "thinkfold.control.symbolic_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        try:
            self._receive(START_SECONDS)
        except (TimeoutError, OSError, ValueError) as error:
            logger.warning("formulas are compared as text, the symbolic checker cannot start: %s", error)
            self.kill()
            return False
        return True

    def ask(self, line: str, seconds: float) -> dict[str, Any]:
        """The answer to one line. Raises TimeoutError, OSError or ValueError and is killed then."""
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
            return self._receive(seconds)
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    def _receive(self, seconds: float) -> dict[str, Any]:
        """One line of JSON. Raises TimeoutError, OSError at the end of the stream, ValueError for no JSON."""
        assert self._process is not None and self._process.stdout is not None
        stdout = self._process.stdout
        deadline = time.monotonic() + seconds
        data = b""
        while not data.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([stdout], [], [], left)[0]:
                raise TimeoutError
            piece = stdout.read(65_536)
            if not piece:
                raise OSError("end of its output")
            data += piece
        return json.loads(data)


def is_small(latex: str) -> bool:
    """True if a formula may be parsed: short, flat, without power towers, huge numbers or large factorials."""
    if len(latex) > MAX_CHARS or _LONG_NUMBER.search(latex) or _LARGE_FACTORIAL.search(latex):
        return False
    depth = deepest = 0
    for sign in latex:
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(sign, 0)
        deepest = max(deepest, depth)
    return deepest <= MAX_NESTING and all(_is_tame(power) for power in _exponents(latex.replace("**", "^")))


def _exponents(latex: str) -> list[str]:
    """What stands behind each `^`: a group in braces or brackets, else all up to the next blank or sign."""
    found = []
    for match in re.finditer(r"\^\s*", latex):
        at = match.end()
        if latex[at : at + 1] in "({":
            end = _group_end(latex, at)
            chain = re.match(r"\s*\^.*", latex[end:], re.DOTALL)
            found.append(latex[at:end] + (chain.group() if chain else ""))
        else:
            found.append(re.compile(r"-?[^\s+*/=,()-]*").match(latex, at).group())  # pyright: ignore[reportOptionalMemberAccess]
    return found


def _group_end(latex: str, at: int) -> int:
    depth = 0
    for end in range(at, len(latex)):
        depth += {"(": 1, "{": 1, ")": -1, "}": -1}.get(latex[end], 0)
        if depth == 0:
            return end + 1
    return len(latex)


def _is_tame(exponent: str) -> bool:
    if re.search(r"[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", exponent)):
        return True  # of a variable: nothing is computed
    return "^" not in exponent and all(int(digits) <= MAX_EXPONENT for digits in re.findall(r"\d+", exponent))
