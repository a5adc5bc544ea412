"""Summaries in 4 bits through ModelRunner: as one in raw form that holds the rounded numbers, wherever it lies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fold_branch import Branch, Places, feed, fold, step
from test_runner_folds import branch, build, last, swap

from thinkfold.attention import int4
from thinkfold.kv.summary import SummaryGrowth
from thinkfold.scheduler.output import FoldCommit, FoldPrepare, MemoryWork, StepResult


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def round_summary(one: Branch, lengths: list[int]) -> None:
    """Give what a summary in raw form holds behind `lengths` the numbers that it would have in 4 bits."""
    storage, size = one.runner._memory.storage, one.places.page_size
    for blocks, before, after in zip(one.summary.blocks, lengths, one.summary.lengths, strict=True):
        ids = (torch.tensor(blocks).unsqueeze(-1) * size + torch.arange(size)).flatten()[before:after]
        stored = storage.read(ids)
        keys, values = int4.rounded(stored.keys, stored.values, size)
        bias = storage.bias.view(-1)[ids].half().float() if storage.bias.numel() else None
        storage.write(ids, storage.encode(keys, values), bias)


def gap(mine: dict[int, StepResult], other: dict[int, StepResult]) -> float:
    """The largest difference of the likely tokens' log-probs."""
    largest, common = 0.0, mine.keys() & other.keys()
    assert len(common) > 10
    for computed in common:
        found, wanted = mine[computed].logprobs[-1], other[computed].logprobs[-1]
        assert found is not None and wanted is not None
        known = dict(wanted.top)
        largest = max(largest, *(abs(value - known[token]) for token, value in found.top[:10]))
    return largest


@pytest.mark.parametrize("page_size", [8, 16, 32])
@pytest.mark.parametrize("selector", ["conclusion_attention", "segment_mean"])
def test_a_fold_in_four_bits_is_one_of_the_rounded_numbers(folder: Path, page_size: int, selector: str) -> None:
    """Two folds, β and a ragged table: logits of all that follows, against raw form with the numbers put in by hand."""
    packed = build(folder, ragged=True, page_size=page_size, fold_storage="int4")
    budgets = packed.budgets
    counts = budgets.counts(page_size, 6 * page_size, page_size)
    assert sum(counts) == budgets.page_blocks * page_size > 8 * page_size, "the bytes of one page"
    plain = build(folder, ragged=True, page_size=page_size)
    plain._memory.budgets = plain._memory._folder._budgets = budgets  # as many entries
    results, errors = [], []
    for runner in (packed, plain):
        one = branch(runner, places=runner is packed)
        one.places.page_blocks = budgets.page_blocks if runner is packed else 4
        seen = feed(one, 8 * page_size + 3)
        told = []
        for first, pages in ((1, 5), (2, 2)):
            before = list(one.summary.lengths) or [0] * 4
            prepared = one.prepare(first, pages, selector, page_size)
            done = feed(one, 5, memory=MemoryWork(prepares=[prepared]))
            told += [error for _, error in done[min(done)].fold_errors]
            seen |= done
            step(runner, [], MemoryWork(commits=[one.commit(prepared, first)]))
            if runner is plain:
                round_summary(one, before)
            seen |= feed(one, 2 * page_size + 1)
        assert all(length % page_size == 0 for length in one.summary.lengths) and any(one.summary.lengths)
        results.append(seen | feed(one, 16, lambda: 1))
        errors.append(told)
    assert gap(*results) <= 1e-4
    assert errors[0] != errors[1] and all(0.0 < error <= 1.0 for error in errors[0]), "rounding is part of the estimate"


def test_everything_in_four_bits_is_close_to_everything(folder: Path) -> None:
    """The error of the estimate is that of rounding alone, and small."""
    runner, plain = build(folder, fold_storage="int4"), build(folder)
    one, other = branch(runner), branch(plain)
    feed(one, 120)
    done, error = fold(one, 1, 8, "conclusion_attention", 64)
    results, expected = done | feed(one, 40, lambda: 1), feed(other, 168, lambda: 1)
    assert one.summary.lengths == [64] * 4 and 0.0 < error < 0.1
    assert 0.0 < gap(results, expected) < 0.5


def kept_whole(one: Branch, first: int, pages: int) -> dict[int, StepResult]:
    """Quantise a span; in raw form keep all of it and round it by hand."""
    size, before = one.places.page_size, list(one.summary.lengths) or [0] * 4
    prepared = replace(one.prepare(first, pages, "snap", pages * size), whole=one.runner.budgets.page_blocks > 0)
    done = feed(one, 5, memory=MemoryWork(prepares=[prepared]))
    step(one.runner, [], MemoryWork(commits=[one.commit(prepared, first)]))
    assert one.summary.lengths == [n + pages * size for n in before]
    if not one.runner.budgets.page_blocks:
        round_summary(one, before)
    return done


def test_a_quantised_span_is_folded_where_it_stands(folder: Path) -> None:
    """The middle one of three: what is read back is judged and chosen from, the others stay as they are."""
    size, at, length = 8, 3, 4
    packed, plain = build(folder, fold_storage="int4"), build(folder)
    counts = packed.budgets.counts(4, length * size, size)
    assert set(counts) == {2 * size}
    indices, results = torch.zeros(0), []
    for runner in (packed, plain):
        one = branch(runner, places=runner is packed)
        one.places.page_blocks = packed.budgets.page_blocks if runner is packed else 4
        seen = feed(one, 12 * size)
        for first, pages in ((1, at), (1, length), (2, 2)):
            seen |= kept_whole(one, first, pages)
        old = [held[at : at + length] for held in one.summary.blocks]
        new = [[one.places.block() for _ in range(2)] for _ in old]
        one.summary.blocks = [b[:at] + n + b[at + length :] for b, n in zip(one.summary.blocks, new, strict=True)]
        one.summary.lengths = [len(held) * size for held in one.summary.blocks]
        table = (one.summary.blocks, one.summary.lengths)
        if runner is packed:
            prepare = FoldPrepare(77, 0, [], 8 * size, (length * size,), "conclusion_attention", 4, blocks=old)
            done = step(runner, [one.row(1)], MemoryWork(prepares=[prepare]))
            assert 0.0 < done.fold_errors[0][1] < 1.0
            indices = runner._memory._folder._prepared[77].summary.indices[0].flatten(0, 1)
            growth = SummaryGrowth(counts, [at * size] * 4, new)
            done = step(runner, [one.row(1)], MemoryWork(commits=[FoldCommit(77, 0, [], growth, table)]))
            assert not done.fold_faults
        else:
            step(runner, [one.row(1)])
            storage, places = runner._memory.storage, torch.arange(size)
            for held, fresh, chosen in zip(old, new, indices, strict=True):
                ids = (torch.tensor(held).unsqueeze(-1) * size + places).flatten()[chosen]
                stored = storage.read(ids)
                rounded = int4.rounded(stored.keys, stored.values, size)
                targets = (torch.tensor(fresh).unsqueeze(-1) * size + places).flatten()
                storage.write(targets, storage.encode(*rounded))
            step(runner, [one.row(1)], MemoryWork(adopted=[(0, *table)]))
        results.append(seen | feed(one, 24, lambda: 1))
    assert gap(*results) <= 1e-4


@pytest.mark.parametrize("dtype", ["model", "fp8_e4m3"])
@pytest.mark.parametrize("selector", ["conclusion_attention", "kmeans"])
def test_a_swapped_branch_comes_back_the_same(folder: Path, selector: str, dtype: str) -> None:
    """Blocks through the host, where a page's last bytes belong to none, into others and another slot."""
    outcomes = []
    for swapped in (False, True):
        runner = build(folder, kv_cache_dtype=dtype, swap_space_bytes=1 << 21, fold_storage="int4")
        one, host = branch(runner), Places(runner, 8, 4, host=True)
        feed(one, 140)
        fold(one, 1, 8, selector, 8)
        if swapped:
            swap(one, host, slot=5)
        before = last(feed(one, 20))
        _, error = fold(one, 3, 4, selector, 8)
        outcomes.append((before, error, last(feed(one, 30, lambda: 1))))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("dtype", ["model", "fp8_e4m3"])
def test_bits_are_equal_alone_and_busy(folder: Path, dtype: str) -> None:
    outcomes: list[Any] = []
    for busy in (False, True):
        runner = build(folder, ragged=True, kv_cache_dtype=dtype, fold_storage="int4")
        one, other = branch(runner, 3 * busy, places=busy), branch(runner, 1, seed=9, places=busy)
        other.places = one.places
        if busy:
            feed(other, 90)
            fold(other, 1, 6, "conclusion_attention", 8)
        neighbours = (lambda other=other: [other.row(3)]) if busy else list
        feed(one, 150, lambda busy=busy: 30 if busy else 11, neighbours)
        prepared = one.prepare(2, 9, "conclusion_attention", 8)
        done = feed(one, 4, lambda: 1, neighbours, MemoryWork(prepares=[prepared]))
        seen: list[Any] = [error for _, error in done[min(done)].fold_errors]
        commit = one.commit(prepared, 2)
        seen.append(last(feed(one, 1, lambda: 1, neighbours, MemoryWork(commits=[commit]))))
        outcomes.append([*seen, last(feed(one, 61, lambda: 5, neighbours))])
    assert outcomes[0] == outcomes[1]
