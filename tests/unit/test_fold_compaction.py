"""Scores, choices, budgets and rotation, against plain float64 versions written token by token."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
import torch

from thinkfold.errors import ParameterError
from thinkfold.fold import compaction
from thinkfold.fold.segments import Entries, Segments, Summary, attend, join, raw_entries, take

FOLDS, LAYERS, HEADS, TOKENS, DIM, GROUP = 2, 2, 3, 40, 8, 2
SCALE = DIM**-0.5


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_segments(dtype: torch.dtype = torch.float64, tokens: int = TOKENS, rows: int = 24) -> Segments:
    """Segments with a raw rest of 10 tokens in every row's context."""
    shape = (FOLDS, LAYERS, HEADS)
    keys, values = random(*shape, tokens, DIM, seed=0), random(*shape, tokens, DIM, seed=1)
    queries = 2.0 * random(*shape, rows, DIM, seed=2)
    context = torch.cat((keys, random(*shape, 10, DIM, seed=3)), dim=-2)
    lse = (queries @ context.transpose(-1, -2) * SCALE).logsumexp(-1)
    keys, values, queries, lse = (t.to(dtype) for t in (keys, values, queries, lse))
    return Segments(keys, values, queries, lse, late=rows // 4, group=GROUP, scale=SCALE)


def naive_shares(queries: torch.Tensor, keys: torch.Tensor) -> list[list[float]]:
    rows = []
    for query in queries.tolist():
        weights = [math.exp(sum(a * b for a, b in zip(query, key, strict=True)) * SCALE) for key in keys.tolist()]
        rows.append([w / sum(weights) for w in weights])
    return rows


def test_scores_equal_naive_ones() -> None:
    segments = make_segments()
    single = make_segments(torch.float32)
    for fold, layer, head in ((0, 0, 0), (1, 1, 2)):
        at = (fold, layer, head)
        shares = naive_shares(segments.queries[at], segments.keys[at])
        drawn = [math.sqrt(sum(row[j] ** 2 for row in shares) / len(shares)) for j in range(TOKENS)]
        norms = [math.sqrt(sum(x * x for x in value)) for value in segments.values[at].tolist()]
        wanted = torch.tensor([d * n for d, n in zip(drawn, norms, strict=True)], dtype=torch.float64)
        torch.testing.assert_close(compaction.importance(segments)[at], wanted)
        torch.testing.assert_close(compaction.importance(single)[at].double(), wanted, rtol=1e-4, atol=1e-6)


def test_share_is_the_part_of_the_softmax_on_the_segment() -> None:
    segments = make_segments()
    keys = torch.cat((segments.keys, random(FOLDS, LAYERS, HEADS, 10, DIM, seed=3)), dim=-2)
    shares = (segments.queries @ keys.transpose(-1, -2) * SCALE).softmax(-1)
    torch.testing.assert_close(compaction.segment_share(segments), shares[..., :TOKENS].sum(-1))


def test_a_row_of_unknown_context_has_the_mean_share_of_the_late_ones() -> None:
    segments = make_segments()
    late = segments.late * GROUP
    share = compaction.segment_share(replace(segments, context_lse=segments.context_lse[..., :late]))
    torch.testing.assert_close(share[..., :late], compaction.segment_share(segments)[..., :late])
    torch.testing.assert_close(
        share[..., late:], share[..., :late].mean(-1, keepdim=True).expand(*share.shape[:-1], 12)
    )


@pytest.mark.parametrize("conclusion", [0, 4, 16])
def test_choice_equals_a_naive_one_on_ragged_budgets(conclusion: int) -> None:
    scores = random(FOLDS, LAYERS, HEADS, TOKENS, seed=5)
    budget = torch.tensor([[0, 3, 40], [16, 7, 1]])
    chosen = compaction.choose(scores, budget, conclusion)
    for fold, layer, head in product(range(FOLDS), range(LAYERS), range(HEADS)):
        kept, count = chosen[fold, layer, head], int(budget[layer, head])
        row = scores[fold, layer, head].tolist()
        first = list(range(TOKENS - 1, TOKENS - 1 - conclusion, -1))[:count]
        rest = sorted((j for j in range(TOKENS) if j not in first), key=lambda j: -row[j])[: count - len(first)]
        assert kept.tolist() == sorted(first + rest) + [-1] * (40 - count)


def test_among_equals_the_newest_wins() -> None:
    chosen = compaction.choose(torch.zeros(1, 1, 1, 9), torch.tensor([[3]]))
    assert chosen.flatten().tolist() == [6, 7, 8]


def test_global_choice_takes_the_best_of_all_layers_and_heads() -> None:
    scores, share = random(FOLDS, LAYERS, HEADS, TOKENS, seed=6).abs(), random(FOLDS, LAYERS, HEADS, 5, seed=7).abs()
    counts = compaction.global_counts(scores, share, entries=8, conclusion=4)
    assert counts.sum((1, 2)).tolist() == [8 * LAYERS * HEADS] * FOLDS
    assert int(counts.min()) >= 4
    weighted = (scores * share.mean(-1, keepdim=True))[1]
    free = weighted[..., : TOKENS - 4].flatten().sort(descending=True).values
    bar = free[(8 - 4) * LAYERS * HEADS - 1]
    assert torch.equal(counts[1], 4 + (weighted[..., : TOKENS - 4] >= bar).sum(-1))


def test_a_head_that_draws_no_attention_gets_its_conclusion_only() -> None:
    share = torch.ones(FOLDS, LAYERS, HEADS, 5)
    share[:, 1, 2] = 0.0
    counts = compaction.global_counts(torch.ones(FOLDS, LAYERS, HEADS, TOKENS), share, entries=8, conclusion=4)
    assert counts[:, 1, 2].tolist() == [4] * FOLDS


@pytest.mark.parametrize("entries", [3, 41])
def test_a_budget_that_cannot_be_is_refused(entries: int) -> None:
    scores = torch.ones(FOLDS, LAYERS, HEADS, TOKENS)
    with pytest.raises(ParameterError, match="entries"):
        compaction.global_counts(scores, scores, entries, conclusion=4)


@pytest.mark.parametrize("multiple", [1, 4, 16])
@pytest.mark.parametrize("entries", [16, 24, 32])
def test_a_table_is_whole_blocks_and_spends_the_budget(entries: int, multiple: int) -> None:
    scores, share = random(5, LAYERS, HEADS, 64, seed=8).exp(), random(5, LAYERS, HEADS, 4, seed=9).exp()
    counts = compaction.global_counts(scores, share, entries)
    table = compaction.budget_table(counts, entries, 64, multiple)
    assert int(table.sum()) == entries * LAYERS * HEADS // multiple * multiple
    assert not (table % multiple).any() and int(table.min()) >= 0 and int(table.max()) <= 64
    mean = counts.double().mean(0)
    assert (table - mean).abs().max() <= multiple * (1 + 1e-9)


def test_a_table_that_keeps_everything_is_full_and_an_impossible_one_is_refused() -> None:
    counts = torch.full((3, LAYERS, HEADS), 64)
    assert compaction.budget_table(counts, 64, 64, 16).eq(64).all()
    for entries, tokens in ((70, 64), (1, 64), (16, 8)):
        with pytest.raises(ParameterError, match="blocks of 16"):
            compaction.budget_table(counts, entries, tokens, 16)


def test_a_table_keeps_room_for_the_conclusion() -> None:
    scores, share = random(5, LAYERS, HEADS, 64, seed=8).exp(), random(5, LAYERS, HEADS, 4, seed=9).exp().pow(4)
    counts = compaction.global_counts(scores, share, 32, compaction.CONCLUSION)
    assert int(compaction.budget_table(counts, 32, 64, 16).min()) >= compaction.CONCLUSION


@pytest.mark.parametrize("dim", [8, 12])
def test_rotation_equals_rope_at_the_later_position(dim: int) -> None:
    inv_freq = 1.0 / 100.0 ** (torch.arange(4, dtype=torch.float64) / 4)
    raw, position, shift = random(3, 5, dim, seed=10), torch.arange(5), torch.tensor([0, 7, 512, 1536, -3])

    def rope(at: torch.Tensor) -> torch.Tensor:
        pairs = torch.complex(raw[..., :4], raw[..., 4:8]) * torch.exp(1j * at.double().unsqueeze(-1) * inv_freq)
        return torch.cat((pairs.real, pairs.imag, raw[..., 8:]), dim=-1)

    torch.testing.assert_close(compaction.rotate(rope(position), shift, inv_freq), rope(position + shift))


def test_rotation_agrees_with_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    embedding = LlamaRotaryEmbedding(LlamaConfig(hidden_size=64, num_attention_heads=2))
    raw, position = random(1, 2, 6, 32, seed=11).float(), torch.arange(6)[None]
    here, _ = apply_rotary_pos_emb(raw, raw, *embedding(raw, position))
    there, _ = apply_rotary_pos_emb(raw, raw, *embedding(raw, position + 1536))
    turned = compaction.rotate(here, torch.full((6,), 1536), embedding.inv_freq)
    torch.testing.assert_close(turned, there, atol=1e-3, rtol=1e-3)


def test_raw_and_summary_joined_equal_attention_over_their_union() -> None:
    segments = make_segments()
    rest = raw_entries(random(FOLDS, LAYERS, HEADS, 10, DIM, seed=3), random(FOLDS, LAYERS, HEADS, 10, DIM, seed=4))
    kept = Summary(compaction.choose(compaction.importance(segments), torch.tensor([[0, 3, 40], [16, 7, 1]])))
    entries = kept.entries(segments.keys, segments.values)
    parts = [attend(segments.queries, part, SCALE) for part in (entries, rest)]
    both = Entries(
        torch.cat((entries.keys, rest.keys), -2),
        torch.cat((entries.values, rest.values), -2),
        torch.cat((entries.bias, rest.bias), -1),
    )
    for joined, whole in zip(join(parts), attend(segments.queries, both, SCALE), strict=True):
        torch.testing.assert_close(joined, whole)


def test_nothing_to_attend_to_vanishes_in_a_join() -> None:
    queries = random(2, 3, DIM, seed=12)
    nothing = raw_entries(torch.zeros(2, 0, DIM, dtype=torch.float64), torch.zeros(2, 0, DIM, dtype=torch.float64))
    some = raw_entries(random(2, 5, DIM, seed=13), random(2, 5, DIM, seed=14))
    out, lse = attend(queries, nothing, SCALE)
    assert not out.any() and torch.isneginf(lse).all()
    alone = attend(queries, some, SCALE)
    for joined, whole in zip(join([(out, lse), alone]), alone, strict=True):
        torch.testing.assert_close(joined, whole)
    assert torch.isneginf(join([(out, lse), (out, lse)])[1]).all()


def test_taking_absent_rows_gives_zeros() -> None:
    rows = torch.arange(6.0).view(3, 2) + 1
    assert take(rows, torch.tensor([2, -1])).tolist() == [[5.0, 6.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("keys", {"keys": torch.zeros(2, 3, 4, 5)}),
        ("values", {"values": torch.zeros(1, 1, 1, 3, 2)}),
        ("queries", {"queries": torch.zeros(1, 1, 1, 6, 3)}),
        ("context_lse", {"context_lse": torch.zeros(1, 1, 1, 3)}),
        ("context_lse", {"context_lse": torch.zeros(1, 1, 1, 7)}),
        ("group", {"group": 4}),
        ("late", {"late": 4}),
        ("late", {"late": 0}),
    ],
)
def test_shapes_that_do_not_fit_are_refused_by_name(field: str, change: dict[str, object]) -> None:
    good = {
        "keys": torch.zeros(1, 1, 1, 4, 2),
        "values": torch.zeros(1, 1, 1, 4, 2),
        "queries": torch.zeros(1, 1, 1, 6, 2),
        "context_lse": torch.zeros(1, 1, 1, 6),
        "late": 2,
        "group": 2,
        "scale": 1.0,
    }
    Segments(**good)
    with pytest.raises(ParameterError, match=f"^{field}:"):
        Segments(**(good | change))
