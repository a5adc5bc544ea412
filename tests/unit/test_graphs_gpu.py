"""Captured steps on a GPU against eager ones, with folds of every kind between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fold_branch import Branch, feed, fold
from test_graphs import FILTERED, GREEDY, KINDS, prompt, row, run
from test_runner_folds import branch, build

from thinkfold.runner.model_runner import ModelRunner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def pair(tmp_path: Path, **changes: Any) -> tuple[ModelRunner, ModelRunner]:
    options: dict[str, Any] = {"device": "cuda", "dtype": "float32"} | changes
    return build(tmp_path, **options), build(tmp_path, **options, enforce_eager=True)


@pytest.mark.parametrize("storage", ["model", "int4"])
@pytest.mark.parametrize("dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("selector", ["drop", "conclusion_attention", "kmeans"])
def test_folded_branches_equal_eager_ones(tmp_path: Path, selector: str, dtype: str, storage: str) -> None:
    told = []
    for runner in pair(tmp_path, kv_cache_dtype=dtype, fold_storage=storage):
        one: Branch = branch(runner)
        made = runner.graphs.captures if runner.graphs is not None else 0
        results = feed(one, 90, lambda: 30)
        for first, pages in ((1, 4), (2, 3)):
            done, _ = fold(one, first, pages, selector, 0 if selector == "drop" else 12)
            results |= done | feed(one, 20, lambda: 1)
        if runner.graphs is not None:
            runner.graphs.check_integrity()
            assert runner.graphs.captures == made and runner.graphs.replays == len(results)
        told.append([results[n].stats[-1].logprob for n in sorted(results)])
    fewer_bits = dtype == "fp8_e4m3" or storage == "int4"  # there a last bit may become a whole level
    assert told[0] == pytest.approx(told[1], abs=5e-2 if fewer_bits else 1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_draws_equal_eager_ones(tmp_path: Path, kind: str) -> None:
    captured, eager = pair(tmp_path)
    params = KINDS[kind]
    for step in range(-1, 10):
        rows = [
            row(i, prompt(9, i) if step < 0 else [], 0 if step < 0 else 9 + step, [4 * i + j for j in range(4)], p)
            for i, p in enumerate(params)
        ]
        for each in rows if step < 0 else []:
            each.samples[0].history = ([], [])
        assert run(captured, *rows).token_ids == run(eager, *rows).token_ids


def test_a_step_does_not_wait_for_the_device(tmp_path: Path) -> None:
    captured, _ = pair(tmp_path)
    pages = [[4 * i + j for j in range(4)] for i in range(3)]
    params = [GREEDY, FILTERED, GREEDY]
    run(captured, *(row(i, prompt(9, i), 0, pages[i], params[i]) for i in range(3)))
    from thinkfold.scheduler.output import StepPlan

    torch.cuda.set_sync_debug_mode("error")
    try:
        plans = [StepPlan(s, [row(i, [], 9 + s, pages[i], params[i]) for i in range(3)]) for s in range(5)]
        pending = [captured.launch(plan) for plan in plans]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(token >= 0 for step in pending for token in captured.collect(step).token_ids)


def test_an_auto_sized_pool_leaves_room_for_graphs(tmp_path: Path) -> None:
    runner = build(tmp_path, device="cuda", dtype="float32", kv_cache_bytes=None, gpu_memory_utilization=0.3)
    assert runner.graphs is not None and runner.graphs.captures > 0
    free, total = torch.cuda.mem_get_info()
    assert total - free < 0.35 * total
