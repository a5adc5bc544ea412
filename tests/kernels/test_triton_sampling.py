"""The sampler's kernels: interpreted and on a GPU against float64, and compiled for a GPU that is not there."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from alone import run_alone
from draw_cases import QWEN_VOCAB, check_draws, check_seen, distribution, knobs_of, logits_of, settings

from thinkfold.runner import filters, observed, rng
from thinkfold.types import SamplingParams

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LARGE = SamplingParams(temperature=0.6, top_p=0.95)


def shapes() -> Iterator[tuple[str, int, SamplingParams]]:
    """Kind of row, vocabulary, parameters: few, the interpreter takes tens of milliseconds a pass."""
    for number, params in enumerate(settings()):
        kind, vocab = [("plain", 7), ("ties", 65), ("equal", 64), ("masked", 100), ("outlier", 33)][number % 5]
        yield kind, vocab, params
    yield "plain", 1, LARGE
    yield "equal", 9000, SamplingParams(top_k=8500)
    yield "ties", 9000, SamplingParams(temperature=0.8, top_p=0.5)


def test_interpreted_kernels_draw_what_float64_says() -> None:
    pytest.importorskip("triton")
    assert run_alone(__file__, "interpret", "1").split() == ["draws", "large", "greedy", "statistics", "broken"]


@pytest.mark.parametrize("vocab", [1, 33, 4097])
@pytest.mark.parametrize("kind", ["plain", "ties", "equal", "masked", "outlier"])
def test_the_twin_draws_what_float64_says(kind: str, vocab: int) -> None:
    for params in settings():
        check_draws(filters.draw, logits_of(kind, vocab), params, grid(13))
    if kind != "masked":
        rows = logits_of(kind, vocab)[None]
        check_seen(observed.observe(rows, min(20, vocab)), rows, min(20, vocab), 2e-5)


def test_the_twin_draws_from_a_large_vocabulary() -> None:
    logits = logits_of("plain", QWEN_VOCAB)
    check_draws(filters.draw, logits, LARGE, grid(3))
    check_seen(observed.observe(logits[None], 20), logits[None], 20, 2e-5)


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler runs on Linux")
def test_kernels_compile_for_a_gpu_that_is_not_there() -> None:
    pytest.importorskip("triton")
    assert run_alone(__file__, "compile", "0").split() == ["_draw", "_look", "_count", "_tell"]


class TestOnGPU:
    pytestmark = ON_GPU

    @pytest.mark.parametrize("vocab", [2, 33, 4097, QWEN_VOCAB])  # Triton's compiler fails on a vocabulary of one
    @pytest.mark.parametrize("kind", ["plain", "ties", "equal", "masked", "outlier"])
    def test_draws(self, kind: str, vocab: int) -> None:
        from thinkfold.runner import triton_draw, triton_observe

        for params in settings():
            check_draws(triton_draw.draw, logits_of(kind, vocab), params, grid(97), "cuda")
        if kind != "masked":
            rows = logits_of(kind, vocab)[None].cuda()
            check_seen(triton_observe.observe(rows, min(20, vocab)), rows, min(20, vocab), 1e-4)

    def test_logits_may_be_of_half_precision(self) -> None:
        from thinkfold.runner import triton_draw, triton_observe

        half = torch.stack([logits_of("plain", QWEN_VOCAB, seed) for seed in range(5)]).cuda().bfloat16()
        knobs = knobs_of(LARGE, QWEN_VOCAB, grid(5)).cuda()
        assert torch.equal(triton_draw.draw(half, knobs, []), triton_draw.draw(half.float(), knobs, []))
        seen = [triton_observe.observe(rows, 20) for rows in (half, half.float())]
        assert all(map(torch.equal, *seen))

    def test_many_draws_follow_the_distribution(self) -> None:
        from thinkfold.runner import triton_draw

        count, logits = 50_000, logits_of("plain", QWEN_VOCAB) * 2
        for params in (LARGE, SamplingParams(temperature=0.5), SamplingParams(temperature=0.9, top_k=50)):
            u = np.array([rng.uniform(5, 0, i) for i in range(count)])
            ids = [
                triton_draw.draw(logits.cuda().expand(len(part), -1), knobs_of(params, QWEN_VOCAB, part).cuda(), [])
                for part in np.array_split(u, 50)
            ]
            expected = count * distribution(logits, params)
            seen = np.bincount(torch.cat(ids).cpu().numpy(), minlength=QWEN_VOCAB)
            cells = expected >= 5
            rest = [seen[~cells].sum(), expected[~cells].sum()]
            statistic = ((seen[cells] - expected[cells]) ** 2 / expected[cells]).sum()
            statistic += (rest[0] - rest[1]) ** 2 / max(rest[1], 5.0)
            freedom = int(cells.sum())
            assert statistic < freedom + 5 * (2 * freedom) ** 0.5, params

    def test_neighbours_change_nothing(self) -> None:
        from thinkfold.runner import triton_draw, triton_observe

        rows = torch.stack([logits_of("plain", QWEN_VOCAB, seed) for seed in range(9)]).cuda()
        knobs = knobs_of(LARGE, QWEN_VOCAB, grid(9)).cuda()
        together, seen = triton_draw.draw(rows, knobs, []), triton_observe.observe(rows, 20)
        for i in range(9):
            one = slice(i, i + 1)
            assert torch.equal(triton_draw.draw(rows[one], knobs[:, one], []), together[one])
            assert all(torch.equal(a, b[one]) for a, b in zip(triton_observe.observe(rows[one], 20), seen, strict=True))


def grid(count: int) -> np.ndarray:
    return (np.arange(count) + 0.5) / count


def interpret() -> None:
    from thinkfold.runner import triton_draw, triton_observe

    for number, (kind, vocab, params) in enumerate(shapes()):
        check_draws(triton_draw.draw, logits_of(kind, vocab, number), params, grid(5 if vocab < 1000 else 1))
    print("draws", flush=True)
    check_draws(triton_draw.draw, logits_of("plain", QWEN_VOCAB), LARGE, np.array([0.3]))
    print("large", flush=True)
    rows = torch.stack([logits_of(kind, 700) for kind in ("plain", "ties", "equal")])
    knobs = knobs_of(SamplingParams(temperature=0.0), 700, grid(3))
    assert torch.equal(triton_draw.draw(rows, knobs, []), rows.argmax(-1))
    print("greedy", flush=True)
    check_seen(triton_observe.observe(rows * 5, 20), rows * 5, 20, 2e-5)
    large = logits_of("plain", QWEN_VOCAB)[None]
    check_seen(triton_observe.observe(large, 20), large, 20, 2e-5)
    half = rows.bfloat16()
    for mine, same in zip(triton_observe.observe(half, 20), triton_observe.observe(half.float(), 20), strict=True):
        assert torch.equal(mine, same)
    print("statistics", flush=True)
    poisoned = logits_of("plain", 50).repeat(4, 1)
    for i, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        poisoned[i, 11] = value
    assert triton_observe.observe(poisoned, 20).finite.tolist() == [False, False, False, True]
    ids = triton_draw.draw(poisoned, knobs_of(LARGE, 50, grid(4)), [])
    assert int(ids.min()) >= 0 and int(ids.max()) < 50
    print("broken", flush=True)


def compile_all() -> None:
    from test_triton_paged import compile_kernel

    from thinkfold.runner.triton_draw import _draw
    from thinkfold.runner.triton_observe import _count, _look, _tell

    compile_kernel(_draw, "*fp32 *fp64 *i64", "vocab num_rows", {"LANES": 8192})
    sizes = {"LANES": 8192, "TILES": 32, "CROWD": 32}
    compile_kernel(_look, "*fp32 *fp32 *fp32", "vocab", sizes)
    compile_kernel(_count, "*fp32 *fp32 *fp32 *fp32", "vocab num_top", sizes)
    compile_kernel(_tell, "*fp32 *fp32 *fp32 *fp32", "vocab num_rows tiles num_top", sizes)


if __name__ == "__main__":
    compile_all() if sys.argv[1] == "compile" else interpret()
