"""The protocol of `thinkfold bench fold --model smollm2`, on a model of random weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from thinkfold.cli import bench
from thinkfold.cli.capture import IMPLEMENTATION, output_gradients
from thinkfold.cli.prose import docstrings
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


def make_arm(name: str, entries: int, **changes: Any) -> Any:
    return replace(fold.Arm(name, selectors.create(name), entries, 0, fold.UNIFORM, LAYOUT.stretch), **changes)


def made(read: Any, arm: Any) -> Any:
    return fold.summaries_of(read[1], arm, uniform_budget(2, 3, arm.entries))


def test_the_full_cache_gives_the_models_own_logits(model: Any, read: Any, ids: torch.Tensor) -> None:
    ours = judged(model, read, None)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        theirs = model(ids[None], use_cache=False).logits[0, LAYOUT.memory : -1].log_softmax(-1)
    model.set_attn_implementation(IMPLEMENTATION)
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", sorted(set(selectors.names()) - {"drop"}))
def test_a_summary_that_keeps_everything_costs_nothing(model: Any, read: Any, name: str) -> None:
    for stretch in (LAYOUT.stretch, LAYOUT.whole):
        summaries = made(read, make_arm(name, stretch, stretch=stretch))
        torch.testing.assert_close(judged(model, read, summaries), judged(model, read, None), atol=2e-3, rtol=1e-3)


def test_dropping_equals_a_run_in_which_the_stretches_are_masked(model: Any, read: Any, ids: torch.Tensor) -> None:
    tape, text = read
    dropped = judged(model, read, made(read, make_arm("drop", 0)))
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
    torch.testing.assert_close(other.segments[LAYOUT.stretch][0].queries, read[1].segments[LAYOUT.stretch][0].queries)
    torch.testing.assert_close(
        other.segments[LAYOUT.stretch][0].context_lse, read[1].segments[LAYOUT.stretch][0].context_lse
    )
    assert not torch.allclose(other.segments[LAYOUT.stretch][1].queries, read[1].segments[LAYOUT.stretch][1].queries)


def test_gradients_by_outputs_are_those_of_a_run_over_the_whole_text(model: Any, read: Any, ids: torch.Tensor) -> None:
    tape, text = read
    found = output_gradients(model, tape, text.record, ids.tolist(), LAYOUT.judged)
    seen: list[torch.Tensor] = []

    def watch(module: Any, inputs: tuple[torch.Tensor]) -> None:
        inputs[0].retain_grad()
        seen.append(inputs[0])

    hooks = [layer.self_attn.o_proj.register_forward_pre_hook(watch) for layer in model.model.layers]
    model.set_attn_implementation("eager")
    first = LAYOUT.memory
    model(
        ids[None], use_cache=False, labels=ids[None].clone().index_fill_(1, torch.arange(first + 1), -100)
    ).loss.backward()
    model.set_attn_implementation(IMPLEMENTATION)
    for hook in hooks:
        hook.remove()
    model.zero_grad()
    grads = torch.stack([outputs.grad[0, first:] for outputs in seen if outputs.grad is not None])
    wanted = (grads * (LAYOUT.judged - 1)).unflatten(-1, (3, 2, 8)).square().sum(-1).mean(1)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-3)


def bench_of(model: Any, read: Any, kept: Any) -> Any:
    return fold.Bench(model, read[0], LAYOUT, kept, lambda name: read[1], lambda line: None)


def test_tables_hold_the_same_bytes_as_uniform_budgets(model: Any, read: Any) -> None:
    arms = fold.all_arms((2,), ["conclusion_attention"], LAYOUT, 8)
    tables = bench_of(model, read, fold.Kept(None)).calibrate(["a"], [arm for arm in arms if not arm.conclusion])
    entries = {"model": 16, "fp8": int(16 * 2 / 1.25), "int4": int(16 * 2 / 0.671875)}
    assert entries["int4"] > LAYOUT.stretch, "fewer bits than the ratio needs: all are kept"
    for store, wanted in entries.items():
        table, _ = tables["error", LAYOUT.stretch, min(wanted, LAYOUT.stretch), 0]
        assert int(table.sum()) == min(wanted, LAYOUT.stretch) * 6 // fold.HEAD_BLOCK * fold.HEAD_BLOCK, store


def test_every_selector_is_an_arm_at_every_ratio() -> None:
    arms = fold.all_arms((4, 8, 64), selectors.names(), fold.Layout(), 64)
    cases = {arm.case: arm for arm in arms}
    assert len(cases) == len(arms) and arms[0].case == "smollm2/drop"
    kept = set(selectors.names()) - {"drop"}
    assert {f"smollm2/{ratio}x/{name}" for ratio in (4, 8, 64) for name in (*kept, "default", "fp8", "int4")} <= set(
        cases
    )
    sizes = {
        case: (cases[f"smollm2/{case}"].stretch, cases[f"smollm2/{case}"].entries) for case in ("8x/snap", "64x/snap")
    }
    assert sizes == {"8x/snap": (512, 64), "64x/snap": (4096, 64)}
    assert [cases[f"smollm2/8x/{name}"].entries for name in ("fp8", "int4")] == [124, 190]


@pytest.mark.parametrize(("store", "levels", "bound"), [("fp8", None, 0.2), ("int4", 16, 0.6)])
def test_fewer_bits_round_and_what_is_absent_stays_so(store: str, levels: int | None, bound: float) -> None:
    draw = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 1, 2, 48, 64, generator=draw)
    bias = torch.zeros(1, 2, 48)
    bias[0, 1, 32:] = -torch.inf
    keys[0, 1, 32:] = values[0, 1, 32:] = 0.0
    back = fold.stored(fold.Entries(keys, values, bias), store)
    assert torch.equal(back.bias, bias)
    for exact, rounded in ((keys, back.keys), (values, back.values)):
        assert 0 < (exact - rounded).abs().max() < bound
        assert not rounded[0, 1, 32:].any()
    if levels:
        assert max(len(channel.unique()) for channel in back.keys[0, 0, :16].T) <= levels
        assert max(len(entry.unique()) for entry in back.values[0, 0]) <= levels
    alone = fold.stored(fold.Entries(keys[:, 1:, :32], values[:, 1:, :32], bias[:, 1:, :32]), store)
    torch.testing.assert_close(alone.keys[0, 0], back.keys[0, 1, :32])


def test_a_run_goes_on_where_another_has_ended(model: Any, read: Any, tmp_path: Path) -> None:
    arms = [make_arm("drop", 0, case="smollm2/drop"), make_arm("streaming", 8), make_arm("snap", 8)]
    file = tmp_path / "found.jsonl"
    with torch.no_grad():
        bench_of(model, read, fold.Kept(file)).measure("a", arms[:2], {})
        first = file.read_text()
        again = bench_of(model, read, fold.Kept(file))
        for name in ("a", "b"):
            again.measure(name, arms, {})
    lines = file.read_text().removeprefix(first).splitlines()
    assert [json.loads(line)[1:3] for line in lines] == [["a", "snap"], *(["b", arm.case] for arm in arms)]
    with torch.no_grad():
        again.text = None
        again.measure("a", arms, {})
    assert ("a", "snap") not in fold.Kept(file, "another setting")
    row = fold.metrics(again.found(["a", "b"], arms[1]), again.found(["a", "b"], arms[0]))
    assert row.keys() == {"n", "dnll", "kl", "share_of_drop"}
    assert row["n"] == 2 and row["kl"] > 0
    assert fold.metrics(*[again.found(["b"], arms[0])] * 2)["share_of_drop"] == 1.0


def test_docstrings_come_in_order() -> None:
    inner = '    """Two."""\n    def f(self):\n        """Three."""\n'
    source = f'"""One."""\nclass A:\n{inner}async def g():\n    """Four."""\n'
    assert docstrings(source) == "One.\n\nTwo.\n\nThree.\n\nFour."
