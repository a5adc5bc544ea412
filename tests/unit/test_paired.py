"""The paired comparison of two arms: counts, ratios, and an interval that holds what it promises."""

from __future__ import annotations

import math

import pytest

from thinkfold.cli.evaluation import Result, Sample
from thinkfold.cli.paired import compare, tango
from thinkfold.errors import ParameterError


def result(index: int, correct: bool, *, thinking: int = 10, peak: int = 100) -> Result:
    sample = Sample("1", correct, 20, thinking, "stop", None)
    return Result(index, "t", "q", "1", [sample], correct, peak, 0, None)


def test_discordant_pairs_and_ratios() -> None:
    reference = [result(i, i < 3, thinking=10, peak=100) for i in range(5)]
    other = [result(i, i in (0, 3), thinking=8 + i, peak=25 * (1 + i % 2)) for i in range(5)]
    paired = compare(reference, other)
    assert (paired["b"], paired["c"]) == (2, 1)
    assert paired["accuracy_ref"] == 0.6
    assert paired["diff_points"] == pytest.approx(-20.0)
    assert paired["kv_peak_ratio"] == pytest.approx((3 * 0.25 + 2 * 0.5) / 5)
    assert paired["thinking_tokens_ratio"] == 1.0
    assert paired["diff_ci95_low"] < -20.0 < paired["diff_ci95_high"]


def test_a_failed_question_counts_as_wrong_and_an_empty_peak_does_not_divide() -> None:
    failed = Result(0, "t", "q", "1", [], False, 0, 0, "no")
    paired = compare([failed], [result(0, True)])
    assert (paired["b"], paired["c"], paired["kv_peak_ratio"], paired["thinking_tokens_ratio"]) == (0, 1, 1.0, 1.0)


def test_arms_of_different_questions_are_refused() -> None:
    with pytest.raises(ParameterError, match="same questions"):
        compare([result(0, True)], [result(1, True)])


def test_no_discordant_pair_has_tangos_closed_form() -> None:
    z2 = 1.959964**2
    for n in (1, 50, 1500):
        low, high = tango(0, 0, n)
        assert -low == pytest.approx(high) == pytest.approx(z2 / (n + z2), abs=1e-6)


@pytest.mark.parametrize(("b", "c", "n"), [(12, 2, 50), (5, 5, 100), (3, 0, 3), (30, 10, 1500), (1, 0, 1)])
def test_the_interval_holds_the_difference_and_mirrors(b: int, c: int, n: int) -> None:
    low, high = tango(b, c, n)
    assert -1.0 <= low <= (c - b) / n <= high <= 1.0
    assert tango(c, b, n) == (pytest.approx(-high), pytest.approx(-low))


def test_bounds_are_where_the_score_with_the_most_likely_shares_is_critical() -> None:
    """The statistic from a plain search for the restricted maximum of the likelihood."""

    def score(b: int, c: int, n: int, d: float) -> float:
        low, high = max(0.0, -d), (1 - d) / 2

        def likelihood(q: float) -> float:
            shares = (q + d, q, 1 - 2 * q - d)
            counts = (c, b, n - b - c)
            return sum(k * math.log(s) if s > 0 else -math.inf for k, s in zip(counts, shares, strict=True) if k)

        grid = [low + (high - low) * i / 20_000 for i in range(1, 20_000)]
        q = max(grid, key=likelihood)
        return (c - b - n * d) / math.sqrt(n * (2 * q + d * (1 - d)))

    for b, c, n in ((12, 2, 50), (5, 9, 60)):
        low, high = tango(b, c, n)
        assert score(b, c, n, low) == pytest.approx(1.96, abs=0.01)
        assert score(b, c, n, high) == pytest.approx(-1.96, abs=0.01)


def test_nothing_measured_says_nothing() -> None:
    assert tango(0, 0, 0) == (-1.0, 1.0)
