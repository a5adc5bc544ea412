"""When thinking is closed from outside: its budget is spent, or somebody asked for it. Knows counts, no texts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from thinkfold.control.budget import grace_tokens
from thinkfold.types import ThinkingEndReason

MAX_CHARACTER_WAIT = 3  # tokens that may still be missing to a UTF-8 character


@dataclass(frozen=True, slots=True)
class Forced:
    """Output tokens `[start, end)` that were not drawn. `closing`: they end thinking, for the reason `cause`."""

    start: int
    end: int
    cause: ThinkingEndReason
    closing: bool

    def upto(self, end: int) -> Forced:
        return replace(self, end=min(self.end, end))


class Closing:
    """Budget and closing words of one branch. `used` is always its count of thinking tokens so far."""

    def __init__(self, budget: int | None, words: tuple[int, ...]) -> None:
        """`words` are tokens that come before the end marker, once; they are part of the budget."""
        self._words = words
        self._asked: tuple[int, ThinkingEndReason] | None = None  # close when so many tokens are used
        self._waited = False
        self.set_budget(budget)

    def set_budget(self, budget: int | None) -> None:
        """A budget has room for closing words, or there are none. None is no limit."""
        self._budget = budget
        if budget is None:
            self._limit = self._grace_start = inf
            return
        if budget < len(self._words):
            self._words = ()
        self._limit = budget - len(self._words)
        self._grace_start = self._limit - grace_tokens(budget)

    @property
    def is_asked(self) -> bool:
        """Whether somebody asked for the end."""
        return self._asked is not None

    def ask(self, used: int, reason: ThinkingEndReason) -> None:
        """Close now, and close what is opened again."""
        self._asked = used, reason

    def left(self, used: int) -> int | None:
        """Tokens that the budget still allows; None without a limit."""
        return None if self._budget is None else max(0, self._budget - used)

    def may_bind(self, used: int) -> bool:
        """Whether thinking may be closed after `used` tokens."""
        return self._asked is not None or used >= self._grace_start

    def due(self, used: int, *, at_boundary: bool, pending: bool) -> tuple[tuple[int, ...], ThinkingEndReason] | None:
        """The closing words and the reason if thinking is to be closed now.

        Within the grace at the end of a sentence or line, else when the limit is reached; an unfinished
        character is waited for.
        """
        limit, cause = self._asked or (self._limit, ThinkingEndReason.BUDGET)
        if self._limit < limit:
            limit, cause = self._limit, ThinkingEndReason.BUDGET
        if used < limit:
            if used < self._grace_start or not at_boundary:
                return None
        elif pending and used - limit < MAX_CHARACTER_WAIT:
            self._waited = True
            return None
        fits = self._waited or self._budget is None or used + len(self._words) <= self._budget
        words = self._words if fits else ()
        self.spoken()
        return words, cause

    def spoken(self) -> None:
        """The closing words have been said, or never will be."""
        self._words = ()
        self.set_budget(self._budget)
