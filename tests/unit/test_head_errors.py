"""What a fold does to heads' outputs, against plain attention, and the budget that costs least."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch
from test_fold_compaction import random

from thinkfold.cli.error_budget import STEP, sizes
from thinkfold.errors import ParameterError
from thinkfold.fold.compaction import importance, ranked, uniform_budget
from thinkfold.fold.fit import remainder
from thinkfold.fold.head_errors import both_ways, head_errors, least_error, least_error_of_both
from thinkfold.fold.record import Record
from thinkfold.fold.segments import Entries, Summary, attend, join, raw_entries

LAYERS, HEADS, GROUP, TOKENS, DIM = 2, 3, 2, 30, 4


@pytest.fixture
def record() -> Record:
    queries = 2.0 * random(LAYERS, HEADS, GROUP, TOKENS, DIM, seed=50)
    keys, values = random(LAYERS, HEADS, TOKENS, DIM, seed=51), random(LAYERS, HEADS, TOKENS, DIM, seed=52)
    return Record(queries, keys, values, DIM**-0.5)


def test_errors_are_those_of_attention_without_what_went(record: Record) -> None:
    start, end, positions, kept = 4, 16, torch.tensor([20, 27, 29]), [0, 3, 12]
    late, past = torch.arange(16, 20), torch.arange(4)
    segments = record.segment(start, end, 20, late, past, (2,), torch.tensor([1.0, 0.1], dtype=torch.float64))
    order = ranked(importance(segments), conclusion=2)[0]
    found = head_errors(segments, order, record.future(positions), kept, [None] * 3)
    for layer, head, lane in product(range(LAYERS), range(HEADS), range(GROUP)):
        for column, count in enumerate(kept):
            wanted = 0.0
            gone = {start + int(token) for token in order[layer, head, count:]}
            for position in positions.tolist():
                query = record.queries[layer, head, lane, position]
                sees = list(range(position + 1))
                full, folded = (
                    (query @ record.keys[layer, head, some].T * record.scale).softmax(-1)
                    @ record.values[layer, head, some]
                    for some in (sees, [token for token in sees if token not in gone])
                )
                wanted += (folded - full).square().sum().item() / len(positions)
            assert found[layer, head, lane, column].item() == pytest.approx(wanted, abs=1e-9)
    assert found[..., -1].abs().max() < 1e-12, "what keeps everything is not wrong"


def test_errors_beside_a_pooled_entry_are_those_of_attention_over_the_summary(record: Record) -> None:
    start, end, position, kept = 4, 16, torch.tensor([27]), [0, 1, 5]
    late, past = torch.arange(16, 20), torch.arange(4)
    segments = record.segment(start, end, 20, late, past, (2,), torch.tensor([1.0, 0.1], dtype=torch.float64))
    order = ranked(importance(segments))[0]
    exact, pooled = both_ways(segments, order, record.future(position), kept)
    torch.testing.assert_close(exact[..., 0], pooled[..., 0])
    for column, count in enumerate(kept[1:], 1):
        indices = order[None, ..., : count - 1].sort(-1).values
        summary = Summary(indices, remainder(segments, indices, uniform_budget(LAYERS, HEADS, 1)))
        entries = summary.entries(segments.keys, segments.values)
        seen = [token for token in range(28) if not start <= token < end]
        for layer, head in product(range(LAYERS), range(HEADS)):
            queries = record.queries[layer, head, :, 27]
            own = Entries(*(part[0, layer, head] for part in (entries.keys, entries.values, entries.bias)))
            parts = [record.keys[layer, head], record.values[layer, head]]
            rest, full = (raw_entries(*(part[some] for part in parts)) for some in (seen, list(range(28))))
            folded, _ = join([attend(queries, rest, record.scale), attend(queries, own, record.scale)])
            wanted = (folded - attend(queries, full, record.scale)[0]).square().sum(-1)
            torch.testing.assert_close(pooled[layer, head, :, column], wanted)


def test_a_pooled_entry_is_taken_where_it_is_clearly_better() -> None:
    exact = torch.tensor([[[9.0, 4.0, 0.0], [9.0, 8.0, 7.0], [1.0, 0.9, 0.8]]])
    pooled = torch.tensor([[[9.0, 3.9, 1.0], [9.0, 1.0, 1.0], [1.0, 0.95, 0.9]]])
    given, mass = least_error_of_both(torch.stack((exact, pooled)), [0, 1, 2], 1)
    assert given.tolist() == [[2, 1, 0]] and mass.tolist() == [[0, 1, 0]]


def test_the_order_begins_with_the_conclusion_and_is_the_one_of_choices(record: Record) -> None:
    scores = random(1, LAYERS, HEADS, 12, seed=53).abs()
    order = ranked(scores, conclusion=3)
    assert (order[..., :3].sort(-1).values == torch.tensor([9, 10, 11])).all()
    assert (order.sort(-1).values == torch.arange(12)).all()
    assert (scores.gather(-1, order[..., 3:]).diff() <= 0).all()


def test_the_budget_with_the_least_error_is_found() -> None:
    """Against all budgets, for convex errors in equal steps."""
    kept = [2, 4, 6, 8]
    errors = torch.tensor([[[9.0, 5.0, 4.0, 3.5], [20.0, 4.0, 1.0, 0.0], [1.0, 0.5, 0.3, 0.2]]])
    for entries in range(2, 9):
        found = tuple(least_error(errors, kept, entries)[0].tolist())
        costs = {
            budget: sum(errors[0, head, kept.index(n)].item() for head, n in enumerate(budget))
            for budget in product(kept, repeat=3)
            if sum(budget) <= entries * 3
        }
        assert costs[found] == pytest.approx(min(costs.values()))


def test_steps_of_several_sizes_are_taken_in_parts() -> None:
    assert least_error(torch.tensor([[[9.0, 1.0, 0.0], [9.0, 8.0, 0.0]]]), [0, 4, 6], 2).tolist() == [[4, 0]]
    assert least_error(torch.tensor([[[9.0, 1.0, 0.0], [9.0, 8.0, 0.0]]]), [0, 4, 6], 4).tolist() == [[4, 4]]
    assert int(least_error(torch.rand(2, 3, 3), [2, 6, 8], 5).sum()) == 30


def test_a_head_that_gains_only_by_much_gets_much_or_nothing() -> None:
    errors = torch.tensor([[[8.0, 8.0, 8.0, 0.0], [3.0, 1.0, 0.5, 0.4]]])
    assert least_error(errors, [0, 1, 2, 3], 2).tolist() == [[3, 1]]
    assert least_error(errors / torch.tensor([[[8.0], [1.0]]]), [0, 1, 2, 3], 1).tolist() == [[0, 2]]


@pytest.mark.parametrize("entries", [1, 11])
def test_impossible_budgets_are_refused(entries: int) -> None:
    with pytest.raises(ParameterError, match=r"entries.*\[2, 10\]"):
        least_error(torch.ones(1, 2, 2), [2, 10], entries)


@pytest.mark.parametrize(("tokens", "conclusion"), [(512, 0), (1024, 16), (80, 10), (16, 0)])
def test_a_head_may_keep_the_conclusion_up_to_everything_in_whole_steps(tokens: int, conclusion: int) -> None:
    found = sizes(tokens, conclusion)
    assert found[0] == -(-conclusion // STEP) * STEP and found[-1] == tokens
    assert all(a < b and (b - a) % STEP == 0 for a, b in pairwise(found))
