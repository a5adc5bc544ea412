"""Folds and swaps on a GPU: the same oracle as on the CPU, through pinned host memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fold_branch import Places, expected, feed, fold, worst
from test_runner_folds import branch, build, reference_model, swap

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("selector", ["drop", "conclusion_attention"])
def test_case_43_holds_on_a_gpu(tmp_path: Path, selector: str) -> None:
    runner = build(tmp_path, device="cuda", dtype="float32", swap_space_bytes=1 << 21)
    one, pages = branch(runner), 4
    results = feed(one, 90)
    done, error = fold(one, 1, pages, selector, 0 if selector == "drop" else pages * 8)
    results |= done
    swap(one, Places(runner, 8, 4, host=True), slot=5)
    results |= feed(one, 40, lambda: 1)
    if selector != "drop":
        one.masked.clear()
    assert worst(results, expected(reference_model(tmp_path), one)) <= 1e-3
    assert (error > 0.01) == (selector == "drop")


@pytest.mark.parametrize("storage", ["model", "int4"])
@pytest.mark.parametrize("dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("selector", ["conclusion_attention", "kmeans"])
def test_a_fold_on_a_gpu_is_that_on_a_cpu(tmp_path: Path, selector: str, dtype: str, storage: str) -> None:
    outcomes: list[tuple[float, float]] = []
    for device in ("cpu", "cuda"):
        options = {"kv_cache_dtype": dtype, "fold_storage": storage, "swap_space_bytes": 1 << 21}
        runner = build(tmp_path, device=device, dtype="float32", **options)
        one = branch(runner)
        feed(one, 140)
        _, error = fold(one, 1, 8, selector, 12)
        if storage == "int4":
            swap(one, Places(runner, 8, 4, host=True), slot=5)
        results = feed(one, 20)
        outcomes.append((error, results[max(results)].stats[-1].logprob))
    (cpu_error, cpu_logprob), (gpu_error, gpu_logprob) = outcomes
    assert gpu_error == pytest.approx(cpu_error, abs=2e-2)
    assert gpu_logprob == pytest.approx(cpu_logprob, abs=5e-2)
