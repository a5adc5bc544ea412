"""How long thinking or an answer lasts, learned from what has ended and what still runs. No torch."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from math import inf

REMEMBERED = 512
BEYOND = 8.0  # after n ends nobody is expected to last longer than 1 + BEYOND / (n + 1) times the longest seen


class LengthForecast:
    """Kaplan–Meier estimate of lengths in tokens (Kaplan and Meier, 1958).

    Running requests count as censored: short ones end first, so ended ones alone would promise too little.
    One more request than was seen is taken to outlast them all, or few ends would promise too much.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[int, bool]] = deque(maxlen=REMEMBERED)  # length, and whether it was cut there
        self._times: list[int] = []
        self._survival: list[float] = []
        self._longest = 0

    @property
    def known(self) -> bool:
        """Whether anything has ended by itself."""
        return bool(self._times)

    def end(self, tokens: int, running: Iterable[int], *, cut: bool = False) -> None:
        """One has ended after `tokens`, by itself or `cut` there; `running` are the tokens so far of all others."""
        self._seen.append((tokens, cut))
        events = sorted([*self._seen, *((t, True) for t in running)])
        at_risk, survival = len(events), 1.0
        self._times, self._survival = [], []
        for time, censored in events:
            if not censored:
                survival *= 1.0 - 1.0 / at_risk
                self._times.append(time)
                self._survival.append(survival)
            at_risk -= 1
        self._longest = events[-1][0]

    def survival(self, tokens: float, beyond: int) -> float:
        """Share of those that have reached `beyond` tokens which go on after `tokens`; 1 where nothing is known."""
        if tokens <= beyond or not self._times:
            return 1.0
        return 0.0 if tokens >= self.last(beyond) else self._tail(tokens) / self._tail(beyond)

    def last(self, beyond: int) -> float:
        """Tokens that nobody who has reached `beyond` is expected to exceed; infinite where nothing is known."""
        ends = len(self._times)
        return (1.0 + BEYOND / (ends + 1)) * max(self._longest, beyond) if ends else inf

    def quantile(self, share: float, beyond: int = 0) -> int | None:
        """Tokens that `share` of those which reach `beyond` do not exceed; None where nothing is known."""
        known = bisect_right(self._times, beyond)
        reached = self._survival[known - 1] if known else 1.0
        limit = reached * (1.0 - share) + 1e-12
        return next((self._times[i] for i in range(known, len(self._times)) if self._survival[i] <= limit), None)

    def _tail(self, tokens: float) -> float:
        """The curve at `tokens`, with the one that outlasts all."""
        known, ends = bisect_right(self._times, tokens), len(self._times)
        return ((self._survival[known - 1] if known else 1.0) * ends + 1.0) / (ends + 1)
