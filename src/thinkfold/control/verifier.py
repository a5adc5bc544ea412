"""The verifier hook: a local callable or an HTTP endpoint that scores answers, with a time limit.

A callable takes the prompt and a batch of texts and returns one score a text in [0, 1], or a
list of scores of its steps, of which the last counts. The endpoint takes
`{"prompt": …, "texts": […]}` and returns `{"scores": […]}` of the same shape.
"""

from __future__ import annotations

import asyncio
import json
import logging
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

from thinkfold.errors import ParameterError

Scores = Sequence[float | Sequence[float]]
Scorer = Callable[[str, Sequence[str]], Scores]

MAX_THREADS = 8

logger = logging.getLogger(__name__)
_registered: dict[str, Scorer] = {}


def register_verifier(name: str, scorer: Scorer) -> None:
    """Make a callable known to requests under a name. Raises ParameterError for a name that looks like a URL."""
    if not name or "://" in name:
        raise ParameterError("verifier", f"must be a plain name, got {name!r:.60}")
    _registered[name] = scorer


class Verifier:
    """Scores in threads of its own, so that a slow scorer holds up nothing else. `close` when done."""

    def __init__(self, scorer: Scorer, seconds: float = 5.0) -> None:
        self._scorer = scorer
        self._seconds = seconds
        self._threads = ThreadPoolExecutor(MAX_THREADS, "verifier")
        self.misses = 0

    async def score(self, prompt: str, texts: Sequence[str]) -> list[float | None]:
        """A score a text; None for each where the scorer is late, fails or returns what is no score."""
        work = asyncio.get_running_loop().run_in_executor(self._threads, self._scorer, prompt, list(texts))
        try:
            found = await asyncio.wait_for(work, self._seconds)
            scores: list[float | None] = [_last(value) for value in found]
            if len(scores) != len(texts):
                raise ValueError(f"{len(scores)} scores for {len(texts)} texts")
        except TimeoutError:
            logger.warning("the verifier took more than %g s", self._seconds)
            scores = [None] * len(texts)
        except Exception as error:  # a user's callable may raise anything; that is a miss
            logger.warning("the verifier failed: %s: %s", type(error).__name__, error)
            scores = [None] * len(texts)
        self.misses += scores.count(None)
        return scores

    def close(self) -> None:
        """Take no more work. Threads that hang are left behind."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def open_verifier(source: str, seconds: float = 5.0) -> Verifier:
    """A verifier by URL or registered name. Raises ParameterError."""
    if source.startswith(("http://", "https://")):
        return Verifier(_Endpoint(source, seconds), seconds)
    if source not in _registered:
        known = ", ".join(sorted(_registered)) or "none"
        raise ParameterError("verifier", f"there is no {source!r:.60}; registered: {known}; or give an http(s) URL")
    return Verifier(_registered[source], seconds)


def with_median(scores: Sequence[float | None]) -> list[float]:
    """Misses count as the median of the others, all of them as 0."""
    known = [score for score in scores if score is not None]
    middle = median(known) if known else 0.0
    return [middle if score is None else score for score in scores]


class _Endpoint:
    """A scorer behind HTTP."""

    def __init__(self, url: str, seconds: float) -> None:
        self._url, self._seconds = url, seconds

    def __call__(self, prompt: str, texts: Sequence[str]) -> Scores:
        body = json.dumps({"prompt": prompt, "texts": list(texts)}).encode()
        request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=self._seconds) as reply:
            return json.load(reply)["scores"]


def _last(value: Any) -> float | None:
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = value[-1] if value else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value <= 1 else None
