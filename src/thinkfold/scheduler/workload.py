"""Made-up requests for simulated schedulers: how long they think, and where their segments end. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from thinkfold.scheduler.simulation import Work
from thinkfold.types import FoldProfile


@dataclass(frozen=True, slots=True)
class Load:
    """What requests look like, in units of `unit` tokens; thinking and segments lie between (low, likely, high)."""

    prompt: int
    thinking: tuple[int, int, int]
    answer: int
    segment: tuple[int, int]
    page_size: int
    numbers: FoldProfile
    budget: int
    unit: int = 1

    @property
    def mean(self) -> int:
        return self.prompt + sum(self.thinking) // 3 + self.answer

    def work(self, seed: int, rate: float | None = None) -> Iterator[Work]:
        """Endless requests, which arrive at random (Poisson), `rate` a second; None: all at once."""
        rng, arrival = Random(seed), 0.0
        low, likely, high = self.thinking
        while True:
            if rate is not None:
                arrival += rng.expovariate(rate)
            thinking = int(rng.triangular(low, high, likely))
            yield Work(self.prompt, thinking, self.answer, self._ends(rng, thinking), arrival)

    def _ends(self, rng: Random, thinking: int) -> tuple[int, ...]:
        ends, end = [], rng.randint(*self.segment)
        while end < thinking:
            ends.append(end)
            end += rng.randint(*self.segment)
        return (*ends, thinking)


# 32,000 tokens of thinking on average, a unit, page and step for 64 of them, so that a run takes minutes.
THINKERS_32K = Load(31, (125, 375, 1000), 8, (8, 16), 1, FoldProfile(16, 4, 4, 4, 1), 1024, unit=64)
