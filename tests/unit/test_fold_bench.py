"""The protocol of `thinkfold bench fold` on a suite, on a Qwen3 of random weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_qwen3 import tiny_qwen3

from thinkfold.cli import bench
from thinkfold.cli.capture import IMPLEMENTATION, use_tape
from thinkfold.cli.traces import Trace
from thinkfold.fold.budgets import FoldBudgets
from thinkfold.types import FOLD_PROFILES

fold = bench.load(Path(__file__).parents[2] / "benchmarks" / "fold.py")
PROMPT, OUTPUT = 20, 300
ENDS = [130, 262]


@pytest.fixture(scope="module", autouse=True)
def short_answers() -> Iterator[None]:
    """Nothing at the beginning stays raw, so that 300 tokens fold."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FOLD_PROFILES, "pebble", replace(FOLD_PROFILES["pebble"], keep_first_tokens=0))
        yield


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_qwen3(vocab_size=64, intermediate_size=48, head_dim=8, initializer_range=0.5)


@pytest.fixture(scope="module")
def trace() -> Trace:
    draw = torch.Generator().manual_seed(1)
    return Trace(*(torch.randint(0, 64, (n,), generator=draw).tolist() for n in (PROMPT, OUTPUT)))


@pytest.fixture(scope="module")
def reader(model: Any) -> Any:
    return fold.Reader(model, use_tape(model), FoldBudgets(2, 2, (1.0, 0.0, 2.0, 1.0)), "pebble")


@torch.no_grad()
def read(reader: Any, trace: Trace, arm: Any, answer_start: int | None = None) -> Any:
    return reader.read(trace, ENDS, answer_start, arm)


def own_logprobs(model: Any, trace: Trace, mask: torch.Tensor | None = None) -> torch.Tensor:
    """The model's own, with an additive mask where one is given."""
    ids = torch.tensor([trace.prompt + trace.output])[:, :-1]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, use_cache=False).logits[0, PROMPT - 1 :]
    model.set_attn_implementation(IMPLEMENTATION)
    return logits.log_softmax(-1)


def test_full_kv_gives_the_models_own_logits(model: Any, reader: Any, trace: Trace) -> None:
    full = read(reader, trace, None)
    torch.testing.assert_close(full.logprobs, own_logprobs(model, trace), atol=2e-4, rtol=1e-4)
    assert (full.peak, full.errors) == (OUTPUT - 1, [])


def test_a_fold_that_keeps_everything_costs_nothing(reader: Any, trace: Trace) -> None:
    kept = read(reader, trace, fold.Arm("conclusion_attention", True, 512))
    assert len(kept.errors) == 1 and kept.errors[0] < 1e-5
    full = read(reader, trace, None)
    torch.testing.assert_close(kept.logprobs, full.logprobs, atol=2e-4, rtol=1e-4)
    assert kept.peak == full.peak


@pytest.mark.parametrize(("late", "at"), [(True, 20 + 130 + 128 - 6 + 4), (False, 20 + 130 + 4)])
def test_dropping_equals_masking_the_span_from_its_commit_on(
    model: Any, reader: Any, trace: Trace, late: bool, at: int
) -> None:
    """The span is the pages [32, 144); raw 128 behind it or at once, then 4 positions until the commit."""
    dropped = read(reader, trace, fold.Arm("drop", late, 0))
    count = PROMPT + OUTPUT - 1
    mask = torch.full((count, count), -torch.inf).triu(1)
    mask[at:, 32:144] = -torch.inf
    if not late:
        mask[PROMPT + 262 + 4 :, 144:272] = -torch.inf
    wanted = own_logprobs(model, trace, mask[None, None])
    torch.testing.assert_close(dropped.logprobs, wanted, atol=2e-4, rtol=1e-4)
    assert (dropped.logprobs - read(reader, trace, None).logprobs).abs().max() > 0.01


def test_entries_are_counted_as_they_are_held(reader: Any, trace: Trace) -> None:
    folded = read(reader, trace, fold.Arm("streaming", True, 32))
    last = OUTPUT - 1
    commit = 130 + 128 - 6 + 4
    assert folded.peak == max(commit, last - 112 + 32)
    held = [n if n <= commit else n - 112 + 32 for n in range(1, last + 1)]
    assert folded.mean == pytest.approx(sum(held) / last)


def test_the_gate_refuses_what_is_too_wrong(reader: Any, trace: Trace) -> None:
    refused = read(reader, trace, fold.Arm("drop", True, 0, gate=0.0))
    assert len(refused.errors) == 1 and refused.errors[0] > 0
    torch.testing.assert_close(refused.logprobs, read(reader, trace, None).logprobs, atol=2e-4, rtol=1e-4)


def test_no_query_has_seen_what_comes_after_the_judging(reader: Any, trace: Trace) -> None:
    arm = fold.Arm("conclusion_attention", True, 32)
    before = read(reader, trace, arm)
    changed = Trace(trace.prompt, trace.output[:260] + [0] * 40)
    assert read(reader, changed, arm).errors == before.errors


def test_an_answer_folds_only_what_lies_behind_its_last_segment(reader: Any, trace: Trace) -> None:
    arm = fold.Arm("drop", False, 0)
    assert len(read(reader, trace, arm).errors) == 2
    assert len(read(reader, trace, arm, answer_start=262).errors) == 1


def test_metrics_of_a_reading_against_itself_are_zero(reader: Any, trace: Trace) -> None:
    full = read(reader, trace, None)
    found = fold.compare(full, full, trace.output)
    assert found["dnll"] == found["changed_share"] == 0.0 and abs(found["kl"]) < 1e-6
    assert found["kv_mean_ratio"] == found["kv_peak_ratio"] == 1.0


def test_cases_are_named_as_the_rows_are() -> None:
    cases = [arm.case for arm in fold.all_arms(["drop", "ema"], [8, 16], ["late", "now"], 0.1)]
    assert cases[:4] == ["drop/late/0/nogate", "drop/late/0/gate", "drop/now/0/nogate", "drop/now/0/gate"]
    assert cases[4:6] == ["ema/late/8/nogate", "ema/late/8/gate"]
    assert len(cases) == len(set(cases)) == 4 + 8


def test_four_bits_keep_more_in_the_same_memory(reader: Any, trace: Trace) -> None:
    """All of a segment costs little and takes a third; a fold has as many entries as fill the bytes it is asked for."""
    full = read(reader, trace, None)
    whole, plain, four = (
        read(reader, trace, arm)
        for arm in (
            fold.Arm(fold.WHOLE, True, 0, int4=True),
            fold.Arm("streaming", True, 16),
            fold.Arm("streaming", True, 16, int4=True),
        )
    )
    assert 0.0 < whole.errors[0] < four.errors[0] < plain.errors[0]
    assert 0.0 < (whole.logprobs - full.logprobs).abs().mean() < (four.logprobs - full.logprobs).abs().mean()
    assert four.mean <= plain.mean < whole.mean < full.mean
    cases = [arm.case for arm in fold.all_arms(["drop", "ema"], [8], ["late"], None, int4=True)]
    assert cases == ["drop/late/0/nogate", "ema/late/8/nogate", "ema/late/8/nogate/int4", "all/late/0/nogate/int4"]
