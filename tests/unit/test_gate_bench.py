"""The protocol of `thinkfold bench gate`, on a Qwen3 of random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_qwen3 import tiny_qwen3

from thinkfold.cli import bench
from thinkfold.cli.capture import IMPLEMENTATION, use_tape
from thinkfold.fold.budgets import FoldBudgets
from thinkfold.fold.spans import Span

gate = bench.load(Path(__file__).parents[2] / "benchmarks" / "gate.py")
TOKENS, NOW, HORIZON = 240, 200, 30
SPAN = Span(32, 144, NOW)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_qwen3(vocab_size=64, intermediate_size=48, head_dim=8, initializer_range=0.5)


@pytest.fixture(scope="module")
def reader(model: Any) -> Any:
    return gate.fold.Reader(model, use_tape(model), FoldBudgets(2, 2), "pebble")


@pytest.fixture(scope="module")
def text(reader: Any) -> Any:
    ids = torch.randint(0, 64, (TOKENS,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return gate.read_text(reader, ids, 20, [(SPAN, NOW, [])])


@torch.no_grad()
def judged(reader: Any, text: Any, *arms: tuple[str, int]) -> list[Any]:
    return list(gate.judge(reader, text, [gate.fold.Arm(name, True, size) for name, size in arms], HORIZON))


def test_the_cost_of_dropping_is_that_of_masking_from_the_fold_on(model: Any, reader: Any, text: Any) -> None:
    (found,) = judged(reader, text, ("drop", 0))
    masks = torch.full((2, TOKENS, TOKENS), -torch.inf).triu(1)
    masks[1, NOW:, SPAN.start : SPAN.end] = -torch.inf
    model.set_attn_implementation("eager")
    with torch.no_grad():
        both = [model(text.ids[None], attention_mask=m[None, None], use_cache=False).logits[0] for m in masks]
    model.set_attn_implementation(IMPLEMENTATION)
    full, dropped = (logits[NOW : NOW + HORIZON].log_softmax(-1) for logits in both)
    wrote = text.ids[NOW + 1 : NOW + HORIZON + 1, None]
    assert found.kl == pytest.approx((full.exp() * (full - dropped)).sum(-1).mean().item(), rel=1e-3)
    assert found.dnll == pytest.approx((full - dropped).gather(1, wrote).mean().item(), rel=1e-3)
    assert found.kl > 0.001 and 0 < found.estimate <= 1


def test_a_fold_that_keeps_everything_costs_nothing_and_leaves_the_text_as_it_was(reader: Any, text: Any) -> None:
    before = judged(reader, text, ("drop", 0))
    kept = judged(reader, text, ("conclusion_attention", SPAN.tokens))[0]
    assert abs(kept.kl) < 1e-5 and kept.estimate < 1e-4 and kept.arm == f"conclusion_attention/{SPAN.tokens}"
    assert judged(reader, text, ("drop", 0)) == before
    assert bool(text.memory.raw.all()) and not text.memory.summaries


def test_ranks_share_among_equals_and_correlations_are_spearmans() -> None:
    assert gate.ranks([3.0, 1.0, 3.0, 2.0]) == [3.5, 1.0, 3.5, 2.0]
    assert gate.spearman([1, 2, 3, 4], [1, 30, 20, 400]) == pytest.approx(0.8)
    assert gate.spearman([1, 2, 3], [9, 5, 1]) == pytest.approx(-1.0)
    assert gate.spearman([1, 2, 3], [7, 7, 7]) == 0.0


def test_rows_name_all_folds_and_their_correlations() -> None:
    folds = [gate.Judged("a/1", e, k, -k) for e, k in ((0.1, 1.0), (0.2, 3.0), (0.3, 2.0))]
    numbers = gate.metrics(folds)
    assert (numbers["n"], numbers["kl"]) == (3, pytest.approx(2.0))
    assert numbers["gate_spearman"] == pytest.approx(0.5) == -numbers["gate_spearman_dnll"]


def test_costs_below_rounding_are_none_and_share_a_rank() -> None:
    costs = ((0.1, 3e-9), (0.2, -2e-8), (0.3, 1e-9), (0.4, 0.5))
    numbers = gate.metrics([gate.Judged("a/1", estimate, cost, cost) for estimate, cost in costs])
    tied = gate.spearman([1, 2, 3, 4], [0, 0, 0, 1])
    assert numbers["costly"] == 1
    assert numbers["gate_spearman"] == numbers["gate_spearman_dnll"] == pytest.approx(tied)


@pytest.mark.parametrize("arm", ["nothing/3", "drop", "drop/x"])
def test_an_arm_that_is_none_is_refused_by_name(arm: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gate.parse(["--arm", arm])
    assert f"got {arm!r}" in capsys.readouterr().err
