"""Reads `/v1/thinkfold/engine` of a running server, and what two readings say of the time between them."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from thinkfold.errors import ParameterError, ThinkfoldError

PATH = "/v1/thinkfold/engine"
API_KEY = "THINKFOLD_API_KEY"  # in the environment
_TIMEOUT_S = 5.0


def key_headers() -> dict[str, str]:
    """What shows a server the key of the environment; nothing where there is none."""
    key = os.environ.get(API_KEY)
    return {"Authorization": f"Bearer {key}"} if key else {}


class EngineClient:
    """`url` is the server's address, with or without `/v1`. Raises ParameterError for one that is not HTTP."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ParameterError("url", f"must be like http://127.0.0.1:8000, got {url!r:.100}")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = key_headers()

    def read(self) -> dict[str, Any]:
        """The engine of this moment. Raises ThinkfoldError with the server's own words."""
        request = urllib.request.Request(self.url + PATH, headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:
                shown = json.load(reply)
        except urllib.error.HTTPError as error:
            raise ThinkfoldError(_words(error)) from None
        except (OSError, ValueError) as error:
            raise ThinkfoldError(f"{self.url} does not answer: {getattr(error, 'reason', error)}") from None
        if not isinstance(shown, dict) or shown.get("object") != "thinkfold.engine":
            raise ThinkfoldError(f"{self.url} is no thinkfold server")
        return shown


def _words(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {error.code}"


@dataclass(frozen=True, slots=True)
class Reading:
    """One answer of the server, and tokens a second since the one before (None for the first)."""

    engine: dict[str, Any]
    tokens_per_s: float | None = None

    def following(self, engine: dict[str, Any]) -> Reading:
        """The reading after this one. A server that has restarted begins anew."""
        seconds = engine["clock_s"] - self.engine["clock_s"]
        tokens = engine["totals"]["generated_tokens"] - self.engine["totals"]["generated_tokens"]
        return Reading(engine, tokens / seconds if seconds > 0 and tokens >= 0 else None)

    @property
    def hit_rate(self) -> float | None:
        """Found share of the prompt tokens looked up in the prefix cache."""
        prefix = self.engine["prefix"]
        return prefix["hit_tokens"] / prefix["queried_tokens"] if prefix["queried_tokens"] else None
