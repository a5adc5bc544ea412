"""Steps for runners whose steps are captured, and what stands in for a CUDA graph."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from thinkfold.scheduler.output import BatchRow, SampleRow
from thinkfold.types import SamplingParams

VOCAB = 97
GREEDY = SamplingParams(temperature=0.0)


class Repeats:
    """Runs a body again where a GPU would replay it."""

    def __init__(self) -> None:
        self.resets = 0

    def __call__(self, body: Callable[[], None]) -> Callable[[], None]:
        body()
        return body

    def used_bytes(self) -> int:
        return 0

    def reset(self) -> None:
        self.resets += 1


def row(
    slot: int, ids: list[int], start: int, pages: list[int], params: SamplingParams = GREEDY, **sample: Any
) -> BatchRow:
    """Tokens of one branch, and a draw; without ids the one drawn last."""
    late = not ids
    drawn = SampleRow(slot, params, 7, 0, start + max(1, len(ids)), **sample)
    return BatchRow(slot, ids, late, start, start, pages, [drawn])


def prompt(n: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(n)]
