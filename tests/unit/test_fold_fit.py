"""Mass and value fits: against plain float64 solutions, and what they must never do."""

from __future__ import annotations

import math

import pytest
import torch
from test_fold_compaction import SCALE, TOKENS, make_segments, random

from thinkfold.fold import fit
from thinkfold.fold.compaction import choose, importance, segment_share
from thinkfold.fold.segments import Entries, Summary, attend, raw_entries, take

LOW, HIGH = fit.MASS_BOX


def naive_mass(shares: torch.Tensor, target: torch.Tensor, start: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The same objective by projected gradient descent, one head, in w / w0."""
    first = start.exp()
    columns = shares * weights[:, None] * first
    penalty = fit.RIDGE * (columns**2).sum(0).mean()
    hessian = columns.T @ columns + penalty * torch.eye(len(first), dtype=torch.float64)
    step = 1.0 / torch.linalg.eigvalsh(hessian)[-1]
    scaled = torch.ones_like(first)
    for _ in range(20_000):
        slope = hessian @ scaled - columns.T @ (target * weights) - penalty
        scaled = (scaled - step * slope).maximum(LOW / first).minimum(HIGH / first)
    return (scaled * first).log()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_mass_equals_a_naive_bounded_least_squares(dtype: torch.dtype) -> None:
    shares, target = random(30, 5, seed=20).exp() / 20, random(30, seed=21).abs()
    start, weights = random(5, seed=22), random(30, seed=23).abs() + 0.1
    wanted = naive_mass(shares, target, start, weights)
    found = fit.fit_mass(*(t.to(dtype) for t in (shares, target, start, weights)))
    torch.testing.assert_close(found.double(), wanted, atol=0.05, rtol=0.01)


def test_mass_recovers_what_made_the_target() -> None:
    shares, true = random(2, 60, 4, seed=24).exp() / 20, torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64)
    target = shares @ true.exp()
    found = fit.fit_mass(shares, target, true.expand(2, 4) + 0.3, torch.ones(2, 60, dtype=torch.float64), ridge=1e-9)
    torch.testing.assert_close(found, true.expand(2, 4), atol=0.02, rtol=0.0)


def test_mass_stays_in_its_box_and_absent_entries_stay_absent() -> None:
    shares = torch.tensor([[1.0, 1e-3, 0.5], [1.0, 2e-3, 0.5]])
    start = torch.tensor([0.0, 0.0, -torch.inf])
    far = fit.fit_mass(shares, torch.full((2,), 1e9), start, torch.ones(2))
    none = fit.fit_mass(shares, torch.zeros(2), start, torch.ones(2), ridge=0.0)
    assert far[0] == pytest.approx(9.0) and none[0] == pytest.approx(-7.0)
    assert torch.isneginf(far[2]) and torch.isneginf(none[2])
    assert far[:2].isfinite().all() and none[:2].isfinite().all()


def test_values_of_hundreds_of_entries_are_fitted_by_two_threads() -> None:
    """MKL's LU with more threads than one fails at such a batch; the product is positive definite anyway."""
    torch.set_num_threads(2)
    shares, missing = random(1, 8, 2, 123, 240, seed=40).softmax(-1).float(), random(1, 8, 2, 123, 64, seed=41).float()
    values, weights = random(1, 8, 2, 240, 64, seed=42).float(), random(1, 8, 2, 123, seed=43).abs().float() + 0.1
    found = fit.refit_values(shares, missing, values, weights)
    wanted = fit.refit_values(*(t[0, 0, 0].double() for t in (shares, missing, values, weights)))
    torch.testing.assert_close(found[0, 0, 0].double(), wanted, atol=2e-3, rtol=0.0)


def test_values_of_entries_that_are_all_alike_are_fitted() -> None:
    """Hundreds of columns of one rank but for rounding: in float32 their squares are not positive definite."""
    shares = random(100, 1, seed=44).exp().expand(100, 240) * (1.0 + 1e-4 * random(100, 240, seed=45))
    missing, values = random(100, 8, seed=46), random(240, 8, seed=47)
    found = fit.refit_values(shares.float(), missing.float(), values.float(), torch.ones(100), ridge=1e-6)
    assert found.isfinite().all()


def test_values_equal_a_naive_ridge_solution() -> None:
    shares, missing = random(30, 5, seed=25).softmax(-1), random(30, 3, seed=26)
    values, weights = random(5, 3, seed=27), random(30, seed=28).abs()
    gram = sum(weights[i] * torch.outer(shares[i], shares[i]) for i in range(30))
    right = sum(weights[i] * torch.outer(shares[i], missing[i]) for i in range(30))
    wanted = values + torch.linalg.inv(gram + fit.RIDGE * gram.trace() / 5 * torch.eye(5, dtype=torch.float64)) @ right
    torch.testing.assert_close(fit.refit_values(shares, missing, values, weights), wanted)


def test_values_stay_with_nothing_missing_and_without_mass() -> None:
    values = random(5, 3, seed=27)
    weights = torch.ones(30, dtype=torch.float64)
    nothing = torch.zeros(30, 3, dtype=torch.float64)
    torch.testing.assert_close(fit.refit_values(random(30, 5, seed=25).softmax(-1), nothing, values, weights), values)
    kept = fit.refit_values(torch.zeros(30, 5, dtype=torch.float64), random(30, 3, seed=26), values, weights)
    torch.testing.assert_close(kept, values)


def test_stretches_share_out_every_token_once() -> None:
    budget = torch.tensor([[0, 1, 7], [40, 39, 16]])
    membership = fit.stretches(TOKENS, budget)
    assert membership.shape == (2, 3, 40, TOKENS)
    assert torch.equal(membership.sum(-2), (budget > 0).float().unsqueeze(-1).expand(2, 3, TOKENS))
    sizes = membership.sum(-1)
    assert torch.equal((sizes > 0).sum(-1), budget)
    assert int(sizes[0, 2, :7].max() - sizes[0, 2, :7].min()) <= 1


def test_pooling_is_a_weighted_mean() -> None:
    rows, weights = random(6, 2, seed=29), random(3, 6, seed=30).abs()
    weights[2] = 0.0
    wanted = torch.stack([(w.unsqueeze(-1) * rows).sum(0) / w.sum() for w in weights[:2]])
    torch.testing.assert_close(fit.pool(rows, weights)[:2], wanted)
    assert not fit.pool(rows, weights)[2].any()


@pytest.mark.parametrize("exact", [0, 6])
def test_fitting_brings_mass_and_output_nearer_to_the_raw_segment(exact: int) -> None:
    segments = make_segments(rows=96)
    indices = choose(importance(segments), torch.full((2, 3), exact))
    membership = fit.stretches(TOKENS, torch.full((2, 3), 5)).double()
    keys, values = fit.pool(segments.keys, membership), fit.pool(segments.values, membership)
    start = fit.log_counts(membership).expand(keys.shape[:-1])
    share = segment_share(segments)
    guess = Summary(indices, fit.Pooled(keys, values, start))
    wanted, lse = attend(segments.queries, raw_entries(segments.keys, segments.values), SCALE)

    def errors(summary: Summary) -> tuple[float, float]:
        out, mass = attend(segments.queries, summary.entries(segments.keys, segments.values), SCALE)
        weight = share.square()
        return float(((out - wanted).square().sum(-1) * weight).sum()), float(
            (mass.exp() / lse.exp() - 1).square().sum()
        )

    mass_only = Summary(indices, fit.fit_pooled(segments, indices, share, keys, values, start, refit=False))
    both = Summary(indices, fit.fit_pooled(segments, indices, share, keys, values, start, refit=True))
    assert errors(mass_only)[1] < 0.9 * errors(guess)[1]
    assert errors(both)[0] < 0.9 * errors(mass_only)[0]
    assert torch.equal(mass_only.pooled.values, values)


def test_exact_entries_are_never_fitted() -> None:
    segments = make_segments(torch.float32)
    indices = choose(importance(segments), torch.full((2, 3), 6))
    membership = fit.stretches(TOKENS, torch.full((2, 3), 5))
    keys, values = fit.pool(segments.keys, membership), fit.pool(segments.values, membership)
    start = fit.log_counts(membership).expand(keys.shape[:-1])
    pooled = fit.fit_pooled(segments, indices, segment_share(segments), keys, values, start, refit=True)
    entries: Entries = Summary(indices, pooled).entries(segments.keys, segments.values)
    assert torch.equal(entries.values[..., :6, :], take(segments.values, indices))
    assert torch.equal(entries.keys[..., :6, :], take(segments.keys, indices))
    assert not entries.bias[..., :6].any()
    spread = segments.values.amax(-2, keepdim=True) - segments.values.amin(-2, keepdim=True)
    middle = (segments.values.amax(-2, keepdim=True) + segments.values.amin(-2, keepdim=True)) / 2
    assert ((pooled.values - middle).abs() <= spread * (1 + 1e-6)).all()


def test_the_box_holds_the_mean_mass_of_64_times() -> None:
    assert math.log(4096 / 64) < math.log(HIGH) == pytest.approx(9.0)
