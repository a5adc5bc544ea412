"""One estimate of what folds leave: of the pool's bound for one request, and of admission."""

from __future__ import annotations

from math import inf

import pytest

from thinkfold.engine.capacity import most_output_tokens
from thinkfold.engine.messages import ModelInfo
from thinkfold.fold.estimate import FoldShape
from thinkfold.scheduler.admission import Life
from thinkfold.types import FOLD_PROFILES, FoldMode, FoldPolicy

NUMBERS = FOLD_PROFILES["default"]


def model(capacity: int, length: int = 131_072) -> ModelInfo:
    return ModelInfo("m", "qwen3", length, 100, capacity // 16, 16, 1, capacity, "qwen3", True, True)


def test_what_is_young_is_raw_and_what_is_old_leaves_a_summary() -> None:
    most = FoldShape.most(NUMBERS)
    tail = 192 + 256 + 1024
    assert most.entries(NUMBERS, tail) == tail
    assert most.entries(NUMBERS, tail + 640) == pytest.approx(tail + 64)
    assert FoldShape(640, refused=1.0).entries(NUMBERS, 9000) == 9000


def test_the_worst_moment_holds_more_than_an_average_one() -> None:
    middle = FoldShape(640)
    assert FoldShape.most(NUMBERS).entries(NUMBERS, 8000) > middle.entries(NUMBERS, 8000)


@pytest.mark.parametrize("thought", [100, 1500, 30_000])
def test_admission_and_the_pools_bound_agree(thought: int) -> None:
    shape = FoldShape.most(NUMBERS)
    life = Life(1e9, 200, thought, 0, False, 10**9, inf, (10,), NUMBERS)
    assert life.entries_in(0, shape)[0] == 200 + shape.entries(NUMBERS, thought)
    policy = FoldPolicy(FoldMode.EAGER, entries=NUMBERS.entries)
    capacity = int(200 + shape.entries(NUMBERS, thought))
    assert most_output_tokens(200, policy, model(capacity)) == pytest.approx(thought, abs=12)
