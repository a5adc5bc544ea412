"""The gate's estimate against the true error of attention over the whole context, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from thinkfold.fold import selectors
from thinkfold.fold.compaction import uniform_budget
from thinkfold.fold.gate import estimate
from thinkfold.fold.segments import Pooled, Segments, Summary, attend, join, raw_entries

FOLDS, LAYERS, HEADS, TOKENS, DIM, GROUP, LATE = 2, 3, 2, 40, 8, 2, 6
SCALE = DIM**-0.5
SHAPE = (FOLDS, LAYERS, HEADS)


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_segments(shift: float = 0.0) -> Segments:
    """Segments whose rows see 10 more tokens; `shift` is added to the logits of those."""
    keys, values, queries = (
        random(*SHAPE, n, DIM, seed=seed) for n, seed in ((TOKENS, 0), (TOKENS, 1), (LATE * GROUP, 2))
    )
    own = (2.0 * queries @ keys.mT * SCALE).logsumexp(-1)
    rest = (2.0 * queries @ random(*SHAPE, 10, DIM, seed=3).mT * SCALE).logsumexp(-1) + shift
    return Segments(keys, values, 2.0 * queries, own.logaddexp(rest), late=LATE, group=GROUP, scale=SCALE)


def choose(name: str, segments: Segments, entries: int) -> Summary:
    return selectors.create(name).select(segments, uniform_budget(LAYERS, HEADS, entries))


def test_it_is_the_true_error_where_the_rest_is_as_supposed() -> None:
    segments = make_segments()
    wide = torch.cat((segments.values, torch.zeros_like(segments.values)), dim=-1)
    padded = torch.cat((segments.keys, torch.zeros_like(segments.keys)), dim=-1)
    queries = torch.cat((segments.queries, torch.zeros_like(segments.queries)), dim=-1)
    raw = attend(queries, raw_entries(padded, wide), SCALE)
    rest = torch.zeros_like(raw[0])  # in the other half of the dimensions, and as long as o_B is on average
    rest[..., DIM] = raw[0].square().sum(-1).mean(-1, keepdim=True).sqrt()
    rest_lse = segments.context_lse + (-(raw[1] - segments.context_lse).exp()).log1p()
    held_out = replace(segments, keys=padded, values=wide, queries=queries)
    for name in ("drop", "streaming", "conclusion_attention", "kmeans"):
        summary = choose(name, held_out, 10)
        full, _ = join([raw, (rest, rest_lse)])
        folded, _ = join([attend(queries, summary.entries(padded, wide), SCALE), (rest, rest_lse)])
        true = ((folded - full).square().sum((2, 3, 4)) / full.square().sum((2, 3, 4))).sqrt().clamp(max=1).mean(-1)
        torch.testing.assert_close(estimate(held_out, summary), true)


@pytest.mark.parametrize("shift", [-60.0, 0.0, 60.0])
def test_a_summary_that_keeps_all_has_no_error(shift: float) -> None:
    segments = make_segments(shift)
    assert estimate(segments, choose("conclusion_attention", segments, TOKENS)).abs().max() < 1e-7


def test_the_error_of_dropping_grows_with_the_share() -> None:
    errors = [float(estimate(s, choose("drop", s, 0))[0]) for s in map(make_segments, (60.0, 3.0, 1.0, 0.0, -60.0))]
    assert errors == sorted(errors)
    assert errors[0] < 1e-20 and errors[-1] == 1.0


def test_more_entries_have_a_smaller_error() -> None:
    segments = make_segments()
    errors = torch.stack([estimate(segments, choose("conclusion_attention", segments, n)) for n in (0, 20, 28, 36, 40)])
    assert torch.equal(errors, errors.sort(dim=0, descending=True).values)
    assert (errors[0] <= 1).all() and (errors[-1] < 1e-7).all()


def test_rows_that_are_not_late_do_not_count() -> None:
    segments = make_segments()
    more = replace(
        segments,
        queries=torch.cat((segments.queries, 9.0 * random(*SHAPE, 4, DIM, seed=9)), dim=-2),
        context_lse=torch.cat((segments.context_lse, torch.full((*SHAPE, 4), 99.0, dtype=torch.float64)), dim=-1),
    )
    summary = choose("streaming", segments, 12)
    assert torch.equal(estimate(more, summary), estimate(segments, summary))


def test_folds_do_not_know_each_other() -> None:
    segments, summary = make_segments(), choose("streaming", make_segments(), 12)
    alone = Segments(
        *(t[1:] for t in (segments.keys, segments.values, segments.queries, segments.context_lse)), LATE, GROUP, SCALE
    )
    torch.testing.assert_close(estimate(alone, Summary(summary.indices[1:])), estimate(segments, summary)[1:])


def test_too_much_mass_is_an_error_too() -> None:
    segments = make_segments()
    everything = choose("streaming", segments, TOKENS)
    heavy = Pooled(segments.keys, segments.values, torch.full((*SHAPE, TOKENS), 3.0, dtype=torch.float64))
    assert (estimate(segments, Summary(everything.indices[..., :0], heavy)) > 0.2).all()


def test_single_precision_is_near_double() -> None:
    double = make_segments()
    single = Segments(
        *(t.float() for t in (double.keys, double.values, double.queries, double.context_lse)), LATE, GROUP, SCALE
    )
    summary = choose("streaming", double, 12)
    torch.testing.assert_close(estimate(single, summary).double(), estimate(double, summary), atol=1e-5, rtol=1e-4)
