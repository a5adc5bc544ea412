"""Whether formulas are equal, asked of a process of its own with a time limit and size checks.

The process starts with the first question and is killed when it takes too long. Any thread may ask.
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

_LONG_NUMBER = re.compile(r"\d{31}")
_LARGE_FACTORIAL = re.compile(r"\d{4}\s*!|[)}\]!]\s*!")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reading:
    """A formula: equal formulas have equal signatures; `constant` is its real value, cut after 40 digits."""

    signature: str
    constant: Fraction | None


class Symbolic:
    """Asks the worker. A question without an answer in time counts as unproven."""

    def __init__(self, seconds: float = 1.0) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._known: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._broken = False
        self.timeouts = 0

    def read(self, latex: str) -> Reading | None:
        """None where the formula is too large, is none, or takes too long."""
        if not is_small(latex):
            return None
        reply = self._ask({"read": latex})
        if "signature" not in reply:
            return None
        value = reply["constant"]
        return Reading(reply["signature"], None if value is None else Fraction(value))

    def same(self, a: str, b: str) -> bool:
        """True if the worker proves the equality; the order of the two does not matter."""
        if not (is_small(a) and is_small(b)):
            return False
        return bool(self._ask({"same": sorted((a, b))}).get("same"))

    def stop(self) -> None:
        """End the process. A later question starts another."""
        with self._lock:
            self._kill()

    def __enter__(self) -> Symbolic:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        line = json.dumps(question)
        with self._lock:
            if line in self._known:
                self._known.move_to_end(line)
                return self._known[line]
            reply = self._exchange(line)
            self._known[line] = reply
            if len(self._known) > CACHE_SIZE:
                self._known.popitem(last=False)
            return reply

    def _exchange(self, line: str) -> dict[str, Any]:
        if self._broken:
            return {}
        try:
            process = self._running()
            assert process.stdin is not None
            process.stdin.write(line.encode() + b"\n")
            process.stdin.flush()
            return self._receive(process, self._seconds)
        except TimeoutError:
            self.timeouts += 1
            logger.info("a symbolic comparison took more than %g s", self._seconds)
        except (OSError, ValueError) as error:  # it ended (by its memory limit, or for want of its packages)
            logger.warning("the symbolic checker has ended: %s", error)
        self._kill()
        return {}

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "thinkfold.control.symbolic_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
            )
            self._broken = True  # until it says that it is ready
            self._receive(self._process, START_SECONDS)
            self._broken = False
        return self._process

    def _receive(self, process: subprocess.Popen[bytes], seconds: float) -> dict[str, Any]:
        """One line of JSON. Raises TimeoutError, OSError at the end of the stream, ValueError for no JSON."""
        assert process.stdout is not None
        deadline = time.monotonic() + seconds
        data = b""
        while not data.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                raise TimeoutError
            piece = process.stdout.read(65_536)
            if not piece:
                raise OSError("end of its output")
            data += piece
        return json.loads(data)

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


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
