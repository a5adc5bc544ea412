"""Log-probs as servers send them, and what they tell of the row that a token was drawn from. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thinkfold.types import TokenStats

CONFIDENCE_TOKENS = 20


@dataclass(frozen=True, slots=True)
class Row:
    """One drawn token by name, with its id where the server tells it; `top` has the likeliest first, it included."""

    name: str
    token_id: int | None
    logprob: float
    top: tuple[tuple[str, int | None, float], ...]

    def statistics(self, end: str | None) -> TokenStats:
        """`end` is the end marker's name. Entropy counts all that is not in `top` as one token: a lower bound.

        An end marker that is not among them is infinitely far away.
        """
        top = [p for _, _, p in self.top]
        rest = max(0.0, 1.0 - math.fsum(map(math.exp, top)))
        entropy = -math.fsum(math.exp(p) * p for p in top if p > -math.inf)
        entropy -= rest * math.log(rest) if rest > 0.0 else 0.0
        best = top[:CONFIDENCE_TOKENS]
        found = next((p for name, _, p in self.top if name == end), -math.inf)
        margin = math.nan if end is None else top[0] - found
        return TokenStats(self.logprob, max(0.0, entropy), -math.fsum(best) / len(best), margin)


def read_rows(logprobs: Any) -> list[Row]:
    """From the lists of OpenAI's completions, or from the one of its chats, which llama.cpp sends for both.

    Raises KeyError, TypeError, ValueError, AttributeError for what is neither.
    """
    if not logprobs:
        return []
    if "content" in logprobs:
        return [_row(each, each.get("top_logprobs") or ()) for each in logprobs["content"] or ()]
    names, own = logprobs.get("tokens") or [], logprobs.get("token_logprobs") or []
    tops: Sequence[Any] = logprobs.get("top_logprobs") or [{}] * len(names)
    rows = zip(names, own, tops, strict=True)
    return [_row({"token": name, "logprob": p}, _listed(top or {})) for name, p, top in rows]


def _listed(top: Mapping[str, float]) -> list[dict[str, Any]]:
    return [{"token": name, "logprob": p} for name, p in top.items()]


def _row(drawn: Mapping[str, Any], top: Sequence[Mapping[str, Any]]) -> Row:
    def entry(each: Mapping[str, Any]) -> tuple[str, int | None, float]:
        return str(each["token"]), each.get("id"), 0.0 if each["logprob"] is None else float(each["logprob"])

    name, token_id, logprob = entry(drawn)
    found = [entry(each) for each in top]
    if (name, token_id) not in [(other, i) for other, i, _ in found]:
        found.append((name, token_id, logprob))
    return Row(name, token_id, logprob, tuple(sorted(found, key=lambda each: -each[2])))
