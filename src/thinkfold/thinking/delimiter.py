"""A user's regular expression that ends segments: RE2, so that no pattern takes more than linear time.

Matching runs in a worker thread. Its result for a token is asked for DELIMITER_LAG tokens later, so that nobody waits
for it, and every segment is found at the same token whatever the worker's speed.
"""

from __future__ import annotations

import codecs
import copy
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, lru_cache
from typing import Any

import re2

from thinkfold.errors import ParameterError

LOOKBACK = 256  # characters before a token that a match in it may reach back
MAX_PATTERN = 256  # characters
MAX_MEMORY = 1 << 20  # bytes of a compiled pattern, which bounds the time of a match, too
BATCH = 8  # tokens that travel to the worker together


@lru_cache(maxsize=256)
def compile_delimiter(pattern: str, field: str) -> Any:
    """The pattern, compiled so that group 1 is its last match. Raises ParameterError naming `field`.

    `^` and `$` match at lines. Look-around and back references do not exist in RE2.
    """
    if not 0 < len(pattern) <= MAX_PATTERN:
        raise ParameterError(field, f"must have 1 to {MAX_PATTERN} characters, got {len(pattern)}")
    options = re2.Options()
    options.max_mem = MAX_MEMORY
    options.log_errors = False
    try:
        if re2.compile(pattern, options).fullmatch("") is not None:
            raise ParameterError(field, "must not match the empty text")
        return re2.compile(rf"(?s:\A.+)((?m:{pattern}))", options)
    except re2.error as error:
        (reason,) = error.args
        text = reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
        raise ParameterError(field, f"is no RE2 pattern: {text}") from None


class DelimiterSearch:
    """Says of each token of one branch's thinking, in order, whether the pattern's last match ends in it.

    The last match is the one that begins latest within LOOKBACK characters before the token's end.
    """

    def __init__(self, pattern: Any) -> None:
        self._pattern = pattern
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._before = "\n"  # a line begins where thinking does
        self._fresh: list[str] = []
        self._sent: deque[Future[list[bool]]] = deque()
        self._found: deque[bool] = deque()

    def __deepcopy__(self, memo: dict[int, Any]) -> DelimiterSearch:
        """A search that goes on from here; waits for the worker."""
        while self._sent:
            self._found.extend(self._sent.popleft().result())
        child = copy.copy(self)
        child._decoder = copy.deepcopy(self._decoder, memo)
        child._fresh, child._sent, child._found = list(self._fresh), deque(), deque(self._found)
        return child

    def push(self, data: bytes) -> None:
        """The next token's bytes."""
        self._fresh.append(self._decoder.decode(data))
        if len(self._fresh) == BATCH:
            self._send()

    def pop(self) -> bool:
        """Whether a match ends in the oldest token not asked for yet; waits for the worker where it must."""
        if not self._found:
            if not self._sent:
                self._send()
            self._found.extend(self._sent.popleft().result())
        return self._found.popleft()

    def _send(self) -> None:
        texts, self._fresh = self._fresh, []
        self._sent.append(_worker().submit(_matches, self._pattern, self._before, texts))
        self._before = (self._before + "".join(texts))[-LOOKBACK - 1 :]


def _matches(pattern: Any, before: str, texts: Sequence[str]) -> list[bool]:
    """For each text whether the last match in what is known by then ends in it."""
    found = []
    for text in texts:
        known = before + text
        match = pattern.search(known) if text else None
        found.append(match is not None and match.end(1) > max(len(before), match.start(1)))
        before = known[-LOOKBACK - 1 :]
    return found


@cache
def _worker() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="thinkfold-delimiter")
