"""The Triton body on a GPU against the reference in fp64."""

from __future__ import annotations

import pytest
import torch
from triton_cases import LAYER, LAYERS, Case, Inputs, Row, check, make, run

from thinkfold.attention.ops import paged_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MIXED = (Row(1, 40), Row(5, 77), Row(1, 600), Row(1, 1), Row(3, 3), Row(0, 9), Row(1, 64), Row(33, 530))
FOLDED = (Row(1, 200, (40, 33)), Row(5, 77, (1, 16)), Row(1, 600), Row(1, 900, (700, 0)))
DECODE = tuple(Row(1, n) for n in (1, 2, 15, 16, 17, 63, 64, 65, 255, 256, 257, 513, 3000))
CASES = [
    Case(2, 3, 64, 16, MIXED, sinks=(4, -1, 0, 7)),
    Case(1, 1, 37, 8, MIXED, window=20),
    Case(2, 16, 64, 64, MIXED),
    Case(4, 2, 96, 16, MIXED, window=1),
    Case(1, 5, 256, 32, MIXED),
    Case(4, 7, 128, 16, DECODE, sinks=(12,)),
    Case(2, 7, 128, 32, (Row(1, 1100), Row(300, 1000)), window=600),
    Case(2, 3, 64, 16, FOLDED, sinks=(5, 6)),
    Case(2, 8, 128, 8, FOLDED, beta=True, sinks=(0,)),
    Case(3, 1, 8, 8, (Row(1, 8), Row(8, 8), Row(1, 9), Row(9, 9)), window=8),
    Case(4, 7, 128, 16, (Row(1, 33_000, (600, 0, 16, 40)), Row(1, 9)), sinks=(0,)),
]
INT4 = [
    Case(2, 3, 64, 16, (Row(1, 200, (48, 32)), Row(5, 77, (0, 16)), Row(1, 600), Row(1, 900, (720, 0))), sinks=(5, 6)),
    Case(2, 8, 128, 8, (Row(1, 200, (40, 32)), Row(5, 77, (0, 16)), Row(1, 900, (704, 8))), beta=True, sinks=(0,)),
    Case(4, 7, 128, 16, tuple(Row(1, 70 + n, (n, 2 * n, 0, 16)) for n in (16, 2048, 512)), beta=True),
    Case(1, 5, 256, 32, (Row(33, 90, (320,)),)),
    Case(2, 2, 74, 64, (Row(1, 70, (640, 64)), Row(3, 9))),
]
# bfloat16 and float16 round the weights before they meet the values, and the result.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_reference(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype, "cuda", TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", [CASES[0], CASES[5], CASES[8], Case(2, 3, 64, 16, DECODE)], ids=str)
def test_matches_the_reference_over_fp8(case: Case, dtype: torch.dtype) -> None:
    check(case._replace(fp8=True), dtype, "cuda", max(TOLERANCE[dtype], 2e-2 * (dtype == torch.float16)))


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", INT4, ids=str)
def test_matches_the_reference_over_summaries_in_four_bits(case: Case, dtype: torch.dtype, fp8: bool) -> None:
    check(
        case._replace(int4=True, fp8=fp8), dtype, "cuda", max(TOLERANCE[dtype], 2e-2 * (fp8 and dtype == torch.float16))
    )


def test_a_nan_stays_in_its_row() -> None:
    case = Case(2, 2, 32, 16, (Row(1, 20), Row(4, 30), Row(1, 50)))
    x = make(case, torch.float32)
    clean = run(case, on_gpu(x), "triton")[0]
    x.kv[x.page_table[1, 0].long()] = torch.nan
    poisoned = run(case, on_gpu(x), "triton")[0]
    assert torch.equal(poisoned[[0, 5]], clean[[0, 5]])
    assert poisoned[1:5].isnan().all()


def test_memory_beyond_two_to_the_31_elements() -> None:
    """The last page of a large memory is as good as the first."""
    case = Case(2, 2, 64, 16, (Row(1, 16),))
    x = make(case, torch.bfloat16)
    small = run(case, on_gpu(x), "triton")[0]
    pages = (1 << 32) // x.kv[0].numel() + 1
    kv = torch.zeros(pages, *x.kv.shape[1:], dtype=torch.bfloat16, device="cuda")
    kv[-1] = x.kv[x.page_table[0, 0].long()].cuda()
    slots = torch.where(x.slot_mapping >= 0, x.slot_mapping % 16 + (pages - 1) * 16, -1)
    far = on_gpu(x._replace(page_table=torch.full_like(x.page_table, pages - 1), slot_mapping=slots, kv=x.kv[:0]))
    sinks = (slots.new_zeros(0).cuda(), far.q.new_zeros(LAYERS, 0, 4, 64), torch.zeros(LAYERS, 0, 4, device="cuda"))
    far = far._replace(kv=kv)
    out, _ = paged_attention(*far[:4], LAYER, *far[4:], 64**-0.5, 0, *sinks, backend="triton")
    assert torch.equal(out.cpu(), small)


def test_steps_wait_for_nothing_and_make_no_kernel_again() -> None:
    """A growing step neither waits for the device nor compiles; a graph of it sees new lengths in the same tensors."""
    from thinkfold.attention.triton_splits import attend_splits

    case = Case(2, 3, 64, 16, tuple(Row(1, n, (9, 20) if n == 90 else ()) for n in (40, 77, 600, 90)))
    inputs = [on_gpu(make(grown(case, more), torch.bfloat16)) for more in (0, 1, 16, 300, 1300)]
    sinks = (torch.zeros(0, dtype=torch.int64, device="cuda"), inputs[0].q[:0].expand(LAYERS, 0, 6, 64))
    rest = (64**-0.5, 0, sinks[0], sinks[1].contiguous(), torch.zeros(LAYERS, 0, 6, device="cuda"))

    def step(x: Inputs) -> torch.Tensor:
        return paged_attention(*x[:4], LAYER, *x[4:], *rest, backend="triton")[0]

    step(inputs[0])
    kernels = attend_splits.device_caches[torch.cuda.current_device()][0]
    before = len(kernels)
    torch.cuda.set_sync_debug_mode("error")
    try:
        eager = [step(x) for x in inputs]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(kernels) == before
    x = inputs[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(x)
    x.kv_lens.sub_(7)
    graph.replay()
    replayed = out.clone()
    assert torch.equal(replayed, step(x)) and not torch.equal(replayed, eager[0])


def grown(case: Case, more: int) -> Case:
    return case._replace(rows=tuple(row._replace(kv_len=row.kv_len + more) for row in case.rows))


def on_gpu(x: Inputs) -> Inputs:
    return Inputs(*(t.cuda() for t in x))
