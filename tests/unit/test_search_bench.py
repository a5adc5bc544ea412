"""`thinkfold bench search`: what its rows say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from thinkfold.cli import bench
from thinkfold.types import SearchState

SCRIPT: Any = bench.load(Path(__file__).parents[2] / "benchmarks" / "search.py")


def state(**more: Any) -> SearchState:
    return SearchState("beam", 2, 3, 40, "probe", None, "paragraph", 48, 96, 800, **more)


def test_a_search_is_compared_problem_by_problem_with_the_vote() -> None:
    first = state(tokens=600, kept_tokens=150, probe_tokens=60, deepest=4, rule="max_tokens")
    second = state(tokens=200, kept_tokens=150, deepest=2, rule="ended")
    found = [
        SCRIPT.Found(True, True, 800, {"beam": (False, first)}),
        SCRIPT.Found(False, True, 800, {"beam": (True, second)}),
    ]
    row = SCRIPT.metrics(found, "beam")
    assert (row["n"], row["b"], row["c"], row["accuracy"], row["accuracy_ref"]) == (2, 1, 1, 0.5, 0.5)
    assert (row["tokens_ratio"], row["tokens_ref_mean"], row["any_ref"]) == (0.5, 800, 1.0)
    assert (row["kept_share"], row["probe_share"]) == (pytest.approx(300 / 800), pytest.approx(60 / 800))
    assert (row["deepest_mean"], row["stopped_by_tokens"]) == (3, 0.5)
