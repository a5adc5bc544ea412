"""Folding through ModelRunner: exact against transformers with masked spans, and the same bits wherever it happens."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fold_branch import Branch, Places, expected, feed, fold, step, worst
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from thinkfold.config import EngineConfig
from thinkfold.errors import ParameterError
from thinkfold.fold.budgets import BUDGETS_FILE
from thinkfold.fold.compaction import rotate
from thinkfold.runner import loader
from thinkfold.runner.attention_facts import attention_facts
from thinkfold.runner.model_runner import ModelRunner
from thinkfold.scheduler.output import BatchRow, MemoryWork, SampleRow, StepPlan, StepResult
from thinkfold.types import SamplingParams

TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
RAGGED = {"conclusion": 4, "weights": [[0.2, 1.9], [1.4, 0.5]]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def build(folder: Path, family: str = "qwen3", *, ragged: bool = False, **changes: Any) -> ModelRunner:
    path = folder / f"{family}{'-ragged' * ragged}"
    if not path.exists():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **TINY)).save_pretrained(path)
        if ragged:
            (path / BUDGETS_FILE).write_text(json.dumps(RAGGED))
    options: dict[str, Any] = {"device": "cpu", "kv_cache_bytes": 1 << 23, "page_size": 8, "max_num_seqs": 8}
    options |= {"max_num_batched_tokens": 64, **changes}
    return ModelRunner(EngineConfig(model=str(path), **options), end_marker_id=5)


def reference_model(folder: Path, family: str = "qwen3") -> nn.Module:
    path = folder / family
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def branch(runner: ModelRunner, slot: int = 0, *, seed: int = 0, length: int = 700, places: int = 0) -> Branch:
    rng = random.Random(seed)
    page_size = runner._config.page_size
    return Branch(runner, Places(runner, page_size, places), slot, [rng.randrange(97) for _ in range(length)])


def last(results: dict[int, StepResult]) -> tuple[Any, Any]:
    result = results[max(results)]
    return result.stats[-1], result.logprobs[-1]


@pytest.mark.parametrize("page_size", [8, 16, 32])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_case_43_dropped_spans_equal_a_full_forward_that_masks_them(folder: Path, family: str, page_size: int) -> None:
    """Positions go on as if nothing was dropped; spans of any alignment, several in one branch."""
    runner = build(folder, family, page_size=page_size)
    one, rng = branch(runner), random.Random(page_size)
    results = feed(one, 2 * page_size + 3, lambda: rng.choice([1, 7, 20]))
    for pages in (1, 3, 2):
        results |= feed(one, (pages + 1) * page_size + 5, lambda: rng.choice([1, 7, 20]))
        done, error = fold(one, 1, pages, "drop", 0)
        results |= done
        assert 0.0 < error <= 1.0
    results |= feed(one, 32, lambda: 1)
    assert len(one.masked) == 3 and one.kv_len == one.computed - 6 * page_size
    assert worst(results, expected(reference_model(folder, family), one)) <= 1e-4


@pytest.mark.parametrize("page_size", [8, 16, 32])
@pytest.mark.parametrize("selector", ["conclusion_attention", "snap", "streaming"])
def test_a_summary_that_keeps_everything_changes_nothing(folder: Path, page_size: int, selector: str) -> None:
    runner = build(folder, page_size=page_size)
    one = branch(runner)
    results = feed(one, 5 * page_size + 3)
    errors = []
    for pages in (1, 3):
        done, error = fold(one, 1, pages, selector, pages * page_size)
        errors.append(error)
        results |= done | feed(one, page_size + 1)
    results |= feed(one, 16, lambda: 1)
    assert one.summary.lengths == [4 * page_size] * 4
    one.masked.clear()
    assert worst(results, expected(reference_model(folder), one)) <= 1e-4
    assert max(errors) < 1e-4


def test_ragged_budgets_come_from_the_table_beside_the_model(folder: Path) -> None:
    runner = build(folder, ragged=True)
    assert runner.budgets.calibrated and runner.budgets.counts(16, 64, 8) == [8, 24, 16, 16]
    plain = branch(runner, 1)
    base = feed(plain, 148, lambda: 1)
    errors = {}
    for selector in ("conclusion_attention", "drop"):
        one = branch(runner, places=len(errors))
        feed(one, 100)
        results, errors[selector] = fold(one, 2, 8, selector, 16)
        results |= feed(one, 40, lambda: 1)
        assert last(results) != last(base), "a fold that loses something shows"
        one.slot = 3
        runner.launch(StepPlan(0, [], MemoryWork(summaries=[(0, [], [])])))
    assert 0.0 < errors["conclusion_attention"] < errors["drop"] <= 1.0
    assert not build(folder).budgets.calibrated
    assert build(folder, ragged=True, load_format="dummy").budgets.calibrated


@pytest.mark.parametrize("dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("selector", ["conclusion_attention", "kmeans", "segment_mean", "rkv"])
def test_what_is_stored_is_what_was_chosen(folder: Path, selector: str, dtype: str) -> None:
    """Two folds of unequal sizes, β plane and scales: entry by entry through tables and head blocks."""
    runner = build(folder, ragged=selector != "kmeans", kv_cache_dtype=dtype)
    one, memory = branch(runner), runner._memory
    feed(one, 130)
    told: list[list[list[torch.Tensor]]] = [[[], [], []] for _ in range(4)]
    for first, pages, entries in ((1, 8, 13), (2, 4, 6)):
        prepared = one.prepare(first, pages, selector, entries)
        feed(one, 2, memory=MemoryWork(prepares=[prepared]))
        span = memory.storage.read_span(torch.tensor(prepared.pages))
        waiting = memory._folder._prepared[prepared.fold_id]
        found = waiting.summary.entries(*(part[None] for part in span))
        width = found.bias.shape[-1]
        for head, (parts, count) in enumerate(zip(told, waiting.counts, strict=True)):
            bias = found.bias[0].flatten(0, 1)[head]
            kept = bias.isfinite().nonzero()[:, 0][:count] if selector != "kmeans" else torch.arange(width)
            kept = kept[bias[kept].isfinite()]
            assert len(kept) == count
            for part, rows in zip(parts, (found.keys, found.values, found.bias), strict=True):
                part.append(rows[0].flatten(0, 1)[head][kept])
        feed(one, 2, memory=MemoryWork(commits=[one.commit(prepared, first)]))
    for head, (keys, values, bias) in enumerate(told):
        blocks = torch.tensor(one.summary.blocks[head], dtype=torch.long)
        length = one.summary.lengths[head]
        ids = (blocks[:, None] * 8 + torch.arange(8)).flatten()[:length]
        stored = memory.storage.read(ids)
        pairs = ((stored.keys, 0, keys), (stored.values, 1, values))
        for raw, which, want in pairs:
            wanted = torch.cat(want)
            if stored.scales is None:
                assert torch.equal(raw, wanted)
            else:
                got = raw.view(torch.float8_e4m3fn).float() * stored.scales[which].float()[:, None]
                assert ((got - wanted).abs() <= 2.0**-4 * wanted.abs().amax(-1, keepdim=True)).all()
                if selector in ("conclusion_attention", "rkv"):
                    assert torch.equal(got, wanted), "an exact entry is copied, not quantised again"
        if memory.storage.bias.numel():
            assert torch.equal(memory.storage.bias.view(-1)[ids], torch.cat(bias))
    assert (memory.storage.bias.numel() > 0) == (selector in ("kmeans", "segment_mean"))


@pytest.mark.parametrize("dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("selector", ["conclusion_attention", "segment_mean"])
def test_bits_are_equal_alone_and_busy(folder: Path, selector: str, dtype: str) -> None:
    """Other chunks, neighbours with folds of their own, other pages, another slot: same errors, same numbers."""
    outcomes = []
    for busy in (False, True):
        runner = build(folder, ragged=True, kv_cache_dtype=dtype)
        rng = random.Random(5)
        one = branch(runner, 3 * busy, places=busy)
        other = branch(runner, 1, seed=9, places=busy)
        other.places = one.places

        def neighbours(other: Branch = other, busy: bool = busy, rng: random.Random = rng) -> list[BatchRow]:
            return [other.row(rng.choice([1, 3]))] if busy else []

        def chunks(busy: bool = busy, rng: random.Random = rng) -> int:
            return rng.choice([1, 2, 30]) if busy else 11

        if busy:
            feed(other, 90)
            fold(other, 1, 6, selector, 16)
        feed(one, 150, chunks, neighbours)
        seen: list[Any] = []
        for first, pages in ((2, 9), (3, 3)):
            prepared = one.prepare(first, pages, selector, 16)
            done = feed(one, 4, lambda: 1, neighbours, MemoryWork(prepares=[prepared]))
            seen += done[min(done)].fold_errors[0][1:]
            commit = one.commit(prepared, first)
            seen.append(last(feed(one, 1, lambda: 1, neighbours, MemoryWork(commits=[commit]))))
            seen.append(last(feed(one, 61, chunks, neighbours)))
        outcomes.append(seen)
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("selector", ["conclusion_attention", "kmeans"])
def test_a_swapped_branch_comes_back_the_same(folder: Path, selector: str, dtype: str) -> None:
    """Pages, head blocks, planes and kept queries through the host into another slot."""
    outcomes = []
    for swapped in (False, True):
        runner = build(folder, kv_cache_dtype=dtype, swap_space_bytes=1 << 21)
        one, host = branch(runner), Places(runner, 8, 4, host=True)
        feed(one, 140)
        fold(one, 1, 8, selector, 12)
        if swapped:
            swap(one, host, slot=5)
        before = last(feed(one, 20))
        _, error = fold(one, 3, 4, selector, 12)
        outcomes.append((before, error, last(feed(one, 30, lambda: 1))))
    assert outcomes[0] == outcomes[1]


def swap(one: Branch, host: Places, slot: int) -> None:
    """Out, somebody else in all the places, and back into others."""
    runner, blocks = one.runner, one.summary.blocks
    pages = [(page, host.page()) for page in one.pages]
    moved = [[(block, host.block()) for block in head] for head in blocks]
    out = MemoryWork(swap_out=pages, blocks_out=[p for head in moved for p in head], queries_out=[(one.slot, 42)])
    assert step(runner, [], out).token_ids == []
    memory = runner._memory.storage
    for plane in (memory.tensor, memory.scales, memory.bias):
        plane.view(torch.uint8).fill_(0x7E)
    intruder = BatchRow(one.slot, [3] * 60, False, 0, 0, list(range(8)), keep_queries=True)
    step(runner, [intruder], MemoryWork(summaries=[(one.slot, [], [])]))
    one.slot = slot
    one.pages = [one.places.page() for _ in one.pages]
    one.summary.blocks = [[one.places.block() for _ in head] for head in blocks]
    back = [(h, new) for (_, h), new in zip(pages, one.pages, strict=True)]
    blocks_in = [
        (h, new)
        for old, head in zip(moved, one.summary.blocks, strict=True)
        for (_, h), new in zip(old, head, strict=True)
    ]
    summaries = [(slot, one.summary.blocks, one.summary.lengths)]
    step(runner, [], MemoryWork(swap_in=back, blocks_in=blocks_in, queries_in=[(42, slot)], summaries=summaries))


def test_a_fork_shares_summaries_until_it_folds(folder: Path) -> None:
    """The child reads the same head blocks; its own fold copies a shared last block that is partly filled."""
    runner = build(folder)
    one = branch(runner)
    feed(one, 163)
    fold(one, 1, 8, "conclusion_attention", 13)
    size = 8
    child = Branch(runner, one.places, 6, one.ids, one.computed, one.kv_len, masked=list(one.masked))
    full = one.kv_len // size
    child.pages = [*one.pages[:full], one.places.page()]
    child.offsets = list(one.offsets)
    child.summary.blocks = [list(head) for head in one.summary.blocks]
    child.summary.lengths = list(one.summary.lengths)
    child.shared = {block for head in one.summary.blocks for block in head}
    copies = [(one.pages[full], child.pages[full])] if one.kv_len % size else []
    assert copies
    memory = MemoryWork(copies=copies, forks=[(0, 6)], summaries=[(6, child.summary.blocks, child.summary.lengths)])
    step(runner, [], memory)
    blocks = runner._memory.storage.tensor.view(-1, 2, 8, 16)
    lent = torch.tensor(sorted(child.shared))
    before = blocks[lent].clone()
    prepared = child.prepare(2, 3, "conclusion_attention", 7)
    error = step(runner, [child.row(1), one.row(1)], MemoryWork(prepares=[prepared])).fold_errors[0][1]
    commit = child.commit(prepared, 2)
    assert len(commit.growth.copies) == 4
    child_results = feed(child, 9, lambda: 1, memory=MemoryWork(commits=[commit]))
    assert torch.equal(blocks[lent], before), "the parent's entries stay as they were"
    alone = branch(build(folder))
    feed(alone, 163)
    fold(alone, 1, 8, "conclusion_attention", 13)
    prepared = alone.prepare(2, 3, "conclusion_attention", 7)
    done = feed(alone, 1, memory=MemoryWork(prepares=[prepared]))
    assert done[alone.computed].fold_errors[0][1] == error
    commit = alone.commit(prepared, 2)
    assert last(feed(alone, 9, lambda: 1, memory=MemoryWork(commits=[commit]))) == last(child_results)


def test_a_fold_without_late_queries_uses_the_spans_own(folder: Path) -> None:
    runner = build(folder)
    one = branch(runner)
    feed(one, 64)
    _, error = fold(one, 2, 6, "conclusion_attention", 16)
    assert 0.0 < error < 1.0


def test_a_fold_works_where_no_query_was_kept(folder: Path) -> None:
    """One may be forced for want of memory, whoever kept what."""
    runner = build(folder)
    one = branch(runner)
    row = one.row(48)
    row.keep_queries = False
    step(runner, [row])
    for selector, entries, high in (("drop", 0, 1.0), ("conclusion_attention", 16, 0.999)):
        prepared = one.prepare(1, 4, selector, entries)
        ((_, error),) = step(runner, [], MemoryWork(prepares=[prepared])).fold_errors
        assert 0.0 < error <= high
    step(runner, [one.row(1)], MemoryWork(commits=[one.commit(prepared, 1)]))
    assert one.summary.lengths == [16] * 4


def test_a_dropped_fold_is_forgotten_and_wrong_blocks_are_refused(folder: Path) -> None:
    runner = build(folder)
    one = branch(runner)
    before = feed(one, 80)
    prepared = one.prepare(1, 4, "conclusion_attention", 8)
    again = one.prepare(1, 4, "snap", 8)
    errors = step(runner, [], MemoryWork(prepares=[prepared, again])).fold_errors
    assert [fold_id for fold_id, _ in errors] == [prepared.fold_id, again.fold_id]
    step(runner, [], MemoryWork(dropped=[prepared.fold_id, 12345]))
    commit = one.commit(again, 1)
    gone = replace(commit, fold_id=prepared.fold_id)
    ((fold_id, why),) = step(runner, [], MemoryWork(commits=[gone])).fold_faults
    assert fold_id == prepared.fold_id and "KeyError" in why
    commit.growth.counts[2] -= 1
    ((fold_id, why),) = step(runner, [], MemoryWork(commits=[commit])).fold_faults
    assert fold_id == again.fold_id and "are prepared" in why
    assert before


def test_an_unknown_selector_is_refused_by_name(folder: Path) -> None:
    runner = build(folder)
    one = branch(runner)
    feed(one, 64)
    work = MemoryWork(prepares=[one.prepare(1, 4, "best", 8), one.prepare(1, 4, "drop", 8)])
    result = step(runner, [one.row(1)], work)
    ((fold_id, why),) = result.fold_faults
    assert fold_id == work.prepares[0].fold_id and "selector" in why
    assert [i for i, _ in result.fold_errors] == [work.prepares[1].fold_id] and len(result.token_ids) == 1


def test_errors_come_home_with_the_tokens_of_their_step(folder: Path) -> None:
    runner = build(folder)
    one = branch(runner)
    feed(one, 100)
    work = MemoryWork(prepares=[one.prepare(1, 4, "drop", 0), one.prepare(5, 3, "conclusion_attention", 24)])
    result = step(runner, [one.row(1)], work)
    assert len(result.token_ids) == 1 and result.logprobs[0] is not None and len(result.logprobs[0].top) == 20
    (_, dropped), (_, kept) = result.fold_errors
    assert dropped > 0.0 and kept < 1e-5


def test_fp8_stays_close_to_the_models_dtype_and_is_deterministic(folder: Path) -> None:
    plain, fp8, again = (
        feed(branch(build(folder, kv_cache_dtype=dtype)), 300, lambda: 50)
        for dtype in ("model", "fp8_e4m3", "fp8_e4m3")
    )
    assert fp8 == again and fp8 != plain
    gaps = []
    for computed, result in plain.items():
        top = dict(fp8[computed].logprobs[0].top)  # type: ignore[union-attr]
        gaps += [abs(value - top[token]) for token, value in result.logprobs[0].top[:5] if token in top]  # type: ignore[union-attr]
    assert len(gaps) > 15 and max(gaps) < 0.3


def test_host_pages_and_pool_follow_the_bytes(folder: Path) -> None:
    runner = build(folder, swap_space_bytes=100_000)
    assert runner.host_pages == 100_000 // runner.page_bytes and build(folder).host_pages == 0
    fp8 = build(folder, kv_cache_dtype="fp8_e4m3")
    assert fp8.page_bytes == 2 * 2 * 2 * 8 * (16 + 2)
    with pytest.raises(ParameterError, match="swap_space_bytes"):
        build(folder, swap_space_bytes=10)


@pytest.mark.parametrize(
    ("family", "changes", "plain", "windows"),
    [
        ("qwen3", {}, True, [False, False]),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}, True, [False] * 2),
        ("mistral", {"sliding_window": 12}, True, [True, True]),
        ("cohere", {}, False, [False, False]),
        ("smollm3", {"no_rope_layers": [1, 0]}, False, [False, False]),
    ],
)
def test_what_a_fold_knows_of_a_model(
    tmp_path: Path, family: str, changes: dict[str, Any], plain: bool, windows: list[bool]
) -> None:
    AutoConfig.for_model(family, **{**TINY, **changes}).save_pretrained(tmp_path)
    loaded = loader.load(EngineConfig(model=str(tmp_path), device="cpu", load_format="dummy"))
    facts = attention_facts(loaded)
    assert (facts.inv_freq is not None) == plain
    assert facts.windowed.tolist() == windows and facts.scale == pytest.approx(0.25)


def test_a_row_may_sample_while_others_fold(folder: Path) -> None:
    """A plan without rows draws nothing; slots without summaries read none."""
    runner = build(folder)
    result = step(runner, [])
    assert (result.token_ids, result.fold_errors) == ([], [])
    sample = SampleRow(2, SamplingParams(temperature=0.0), 0, 0, 3)
    assert len(step(runner, [BatchRow(2, [4, 5, 6], False, 0, 0, [1], [sample])]).token_ids) == 1


def test_spans_behind_every_window_are_folded_for_nothing(tmp_path: Path) -> None:
    """Layers that forget what lies behind their window lose nothing, and the gate knows it."""
    path = tmp_path / "mistral"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("mistral", **{**TINY, "sliding_window": 12})).save_pretrained(
        path
    )
    runner = build(tmp_path, "mistral")
    one = branch(runner)
    results = feed(one, 70)
    for selector, entries in (("drop", 0), ("conclusion_attention", 8)):
        done, error = fold(one, 1, 3, selector, entries)
        results |= done | feed(one, 20)
        assert error == 0.0
    one.masked.clear()
    own = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        reference = own(torch.tensor([one.ids[: one.computed]])).logits[0].log_softmax(-1)
    assert worst(results, reference) <= 1e-4


@pytest.mark.parametrize("rope", [{}, {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}])
def test_queries_of_the_past_are_turned_as_the_model_would(tmp_path: Path, rope: dict[str, Any]) -> None:
    """In the first layer a query depends on its token and position alone."""
    path = tmp_path / "llama"
    torch.manual_seed(0)
    changes = {"rope_parameters": rope} if rope else {}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **{**TINY, **changes})).save_pretrained(path)
    runner = build(tmp_path, "llama")
    one = branch(runner)
    one.ids = [7] * 500
    feed(one, 500, lambda: 50)
    store, frequencies = runner._memory.queries, attention_facts(runner._loaded).inv_freq
    positions = store.positions(0, None)
    queries, _ = store.read(0, positions)
    newest = torch.tensor(positions[-1])
    assert frequencies is not None and len(positions) > 40
    turned = rotate(queries[0].transpose(0, 1), newest - torch.tensor(positions), frequencies)
    assert torch.allclose(turned, queries[0, -1:].transpose(0, 1).expand_as(turned), atol=1e-4)
    assert not torch.allclose(queries[0, 0], queries[0, -1], atol=1e-2)
