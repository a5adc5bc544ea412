"""The protocol of `thinkfold bench fold --model smollm2`, on a model of random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from thinkfold.cli import bench
from thinkfold.cli.capture import IMPLEMENTATION
from thinkfold.fold import selectors
from thinkfold.fold.compaction import uniform_budget

fold = bench.load(Path(__file__).parents[2] / "benchmarks" / "fold_heads.py")
LAYOUT = fold.Layout(sinks=2, stretch=32, folds=3, recent=24, judged=16, delay=16, late=8, past=6)


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(0, 64, (LAYOUT.total,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def read(model: Any, ids: torch.Tensor) -> Any:
    with torch.no_grad():
        tape = fold.use_tape(model)
        return tape, fold.read_text(model, tape, ids, LAYOUT, seed=0)


@torch.no_grad()
def judged(model: Any, read: Any, summaries: Any) -> torch.Tensor:
    tape, text = read
    return fold.judge(model, tape, text, fold.memory_of(text, summaries, LAYOUT), LAYOUT)


def test_the_full_cache_gives_the_models_own_logits(model: Any, read: Any, ids: torch.Tensor) -> None:
    ours = judged(model, read, None)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        theirs = model(ids[None], use_cache=False).logits[0, LAYOUT.memory : -1].log_softmax(-1)
    model.set_attn_implementation(IMPLEMENTATION)
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", sorted(set(selectors.names()) - {"drop"}))
def test_a_summary_that_keeps_everything_costs_nothing(model: Any, read: Any, name: str) -> None:
    budget = uniform_budget(2, 3, LAYOUT.stretch)
    summaries = [selectors.create(name).select(segments, budget) for segments in read[1].segments]
    torch.testing.assert_close(judged(model, read, summaries), judged(model, read, None), atol=2e-3, rtol=1e-3)


def test_dropping_equals_a_run_in_which_the_stretches_are_masked(model: Any, read: Any, ids: torch.Tensor) -> None:
    tape, text = read
    budget = uniform_budget(2, 3, 0)
    dropped = judged(model, read, [selectors.create("drop").select(segments, budget) for segments in text.segments])
    kept = [i for i in range(LAYOUT.memory) if i < LAYOUT.sinks or i >= LAYOUT.memory - LAYOUT.recent]
    tape.memory = [fold.raw_entries(k[:, kept], v[:, kept]) for k, v in zip(text.keys, text.values, strict=True)]
    positions = torch.arange(LAYOUT.memory, LAYOUT.total)[None]
    with torch.no_grad():
        masked = model(ids[None, LAYOUT.memory :], position_ids=positions, use_cache=False).logits[0, :-1]
    torch.testing.assert_close(dropped, masked.log_softmax(-1))
    assert (dropped - judged(model, read, None)).abs().max() > 0.01


def test_no_query_has_seen_what_comes_after_the_fold(model: Any, read: Any, ids: torch.Tensor) -> None:
    changed = ids.clone()
    first_fold = LAYOUT.sinks + LAYOUT.stretch + LAYOUT.delay
    changed[first_fold:] = 0
    with torch.no_grad():
        other = fold.read_text(model, read[0], changed, LAYOUT, seed=0)
    torch.testing.assert_close(other.segments[0].queries, read[1].segments[0].queries)
    torch.testing.assert_close(other.segments[0].context_lse, read[1].segments[0].context_lse)
    assert not torch.allclose(other.segments[1].queries, read[1].segments[1].queries)


def test_tables_hold_the_same_bytes_as_uniform_budgets(read: Any) -> None:
    arms = fold.all_arms((2,), ["conclusion_attention", "drop"], LAYOUT.stretch)
    tables = fold.calibrate(iter([read[1]]), [arm for arm in arms if not arm.conclusion], LAYOUT)
    assert {key: int(table.sum()) for key, table in tables.items()} == {(16, 0): 16 * 6}


def test_every_selector_is_an_arm_at_every_ratio() -> None:
    cases = {arm.case for arm in fold.all_arms((4, 8), selectors.names(), 512)}
    assert {f"smollm2/{ratio}x/{name}" for ratio in (4, 8) for name in selectors.names()} <= cases


def test_measured_rows_have_their_metrics(model: Any, read: Any) -> None:
    tape, text = read
    arms = fold.all_arms((4,), ["drop", "streaming"], LAYOUT.stretch)
    with torch.no_grad():
        found = fold.measure(model, tape, iter([text, text]), arms, {}, LAYOUT, lambda line: None)
    row = fold.metrics(found["smollm2/4x/streaming"], found["drop"])
    assert row.keys() == {"n", "dnll", "kl", "share_of_drop"}
    assert row["n"] == 2 and row["kl"] > 0
    assert fold.metrics(found["smollm2/4x/drop"], found["drop"])["share_of_drop"] == 1.0


def test_docstrings_come_in_order() -> None:
    inner = '    """Two."""\n    def f(self):\n        """Three."""\n'
    source = f'"""One."""\nclass A:\n{inner}async def g():\n    """Four."""\n'
    assert fold.docstrings(source) == "One.\n\nTwo.\n\nThree.\n\nFour."
