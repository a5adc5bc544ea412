"""The verifier hook: a local callable or an HTTP endpoint that scores answers, with a time limit.

A callable takes the question and a batch of `Judged` and returns one score each in [0, 1], or a
list of scores of its steps, of which the last counts. The endpoint takes
`{"question": …, "items": [{"answer": …, "thinking": …}]}` and returns `{"scores": […]}` alike;
`thinking` stands there only if it was asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import math
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from statistics import median
from typing import Any

from thinkfold.errors import ParameterError
from thinkfold.types import Judged, Score, Scorer, Verdict

MAX_CALLS = 8  # of one verifier at once; more wait, within their time limit
MAX_REPLY_BYTES = 1 << 20
SCHEMES = ("http://", "https://")

logger = logging.getLogger(__name__)


class Verifier:
    """Asks a scorer in threads, so that a slow one holds up nothing else. `name` is how results call it."""

    def __init__(self, scorer: Scorer | Endpoint, name: str = "", most: int = MAX_CALLS) -> None:
        self.name = name or getattr(scorer, "__name__", type(scorer).__name__)
        self._scorer = scorer
        self._places = asyncio.Semaphore(most)

    async def score(self, question: str, judged: Sequence[Judged], seconds: float) -> list[Verdict]:
        """A verdict each; misses where the scorer is late, fails or returns what is no score."""
        try:
            async with asyncio.timeout(seconds):
                found = await self._call(question, judged, seconds)
            verdicts = [_verdict(value) for value in found]
            if len(verdicts) != len(judged):
                raise ValueError(f"{len(verdicts)} scores for {len(judged)} answers")
        except TimeoutError:
            verdicts = [Verdict(None, f"no score within {seconds:g} s")] * len(judged)
        except Exception as error:  # a user's callable may raise anything; that is a miss
            verdicts = [Verdict(None, _said(error))] * len(judged)
        for why in dict.fromkeys(verdict.error for verdict in verdicts if verdict.error):
            logger.warning("verifier %s: %s", self.name, why)
        return verdicts

    async def _call(self, question: str, judged: Sequence[Judged], seconds: float) -> Sequence[Score]:
        """The scorer's word. A scorer that hangs keeps its place until it comes back, and never the process."""
        await self._places.acquire()
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Sequence[Score]] = loop.create_future()

        def back(tell: Callable[[Any], None], value: Any) -> None:
            self._places.release()
            if not answered.done():
                tell(value)

        def work() -> None:
            try:
                told = answered.set_result, _ask(self._scorer, question, judged, seconds)
            except Exception as error:
                told = answered.set_exception, error
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
                loop.call_soon_threadsafe(back, *told)

        threading.Thread(target=work, name="thinkfold-verifier", daemon=True).start()
        return await answered


class Verifiers:
    """Verifiers that an operator has named, with their addresses; each is shared by all who ask for it."""

    def __init__(self, urls: Mapping[str, str] | None = None) -> None:
        self._known = {name: Verifier(Endpoint(url), name) for name, url in (urls or {}).items()}

    def find(self, field: str, source: str | Scorer) -> Verifier:
        """A verifier by name, URL or as a callable. Raises ParameterError that names `field`."""
        if not isinstance(source, str):
            return Verifier(source)
        if source.startswith(SCHEMES):
            return Verifier(Endpoint(source), source)
        if source not in self._known:
            known = ", ".join(sorted(self._known)) or "none"
            raise ParameterError(field, f"there is no {source!r:.60}; this engine knows: {known}")
        return self._known[source]


class Endpoint:
    """A scorer behind HTTP. Redirects are not followed."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._opener = urllib.request.build_opener(_NoRedirects)

    def scores(self, question: str, judged: Sequence[Judged], seconds: float) -> Sequence[Score]:
        """Its word, or an error after about so many seconds."""
        until = time.monotonic() + seconds
        items = [{"answer": j.answer} | ({"thinking": j.thinking} if j.thinking else {}) for j in judged]
        body = json.dumps({"question": question, "items": items}).encode()
        request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"})
        data = b""
        with self._opener.open(request, timeout=seconds) as reply:
            while more := reply.read1(65_536):
                data += more
                if len(data) > MAX_REPLY_BYTES or time.monotonic() > until:
                    raise ValueError(f"the reply is longer than {MAX_REPLY_BYTES} bytes or too slow")
        found = json.loads(data)
        scores = found.get("scores") if isinstance(found, dict) else None
        if not isinstance(scores, list):
            raise ValueError("the reply has no list of scores")
        return scores


def with_median(scores: Sequence[float | None]) -> list[float]:
    """Misses count as the median of the others, all of them as 0."""
    known = [score for score in scores if score is not None]
    middle = median(known) if known else 0.0
    return [middle if score is None else score for score in scores]


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None:
        """None leaves the redirect as the error that it is."""


def _ask(scorer: Scorer | Endpoint, question: str, judged: Sequence[Judged], seconds: float) -> Sequence[Score]:
    if isinstance(scorer, Endpoint):
        return scorer.scores(question, judged, seconds)
    return scorer(question, list(judged))


def _said(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"it answered {error.code}"
    if isinstance(error, OSError | http.client.HTTPException):
        return f"it cannot be reached ({type(error).__name__})"
    return f"{type(error).__name__}: {error!s:.200}"


def _verdict(value: Any) -> Verdict:
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = value[-1] if value else None
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        return Verdict(None, f"{value!r:.60} is no finite number")
    score = float(value)
    return Verdict(score) if 0 <= score <= 1 else Verdict(None, f"{score:g} is outside [0, 1]")
