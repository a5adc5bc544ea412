"""Summaries in 4 bits: what a block holds and reads back; attention over blocks against their entries in raw form."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from triton_cases import LAYER, Case, Row, make, run, widened

from thinkfold.attention import int4
from thinkfold.attention.fp8 import FP8
from thinkfold.errors import ParameterError

SHAPES = [(8, 8), (16, 64), (16, 74), (32, 130), (64, 256)]  # page_size, head_dim
CASES = [
    Case(2, 3, 64, 16, (Row(1, 200, (48, 32)), Row(5, 77, (0, 16)), Row(1, 600), Row(0, 9, (16, 16)), Row(3, 3))),
    Case(2, 1, 12, 8, (Row(1, 30, (8, 0)), Row(1, 8), Row(1, 9, (8, 24))), beta=True, sinks=(1,)),
    Case(1, 4, 32, 32, (Row(33, 530, (160,)), Row(1, 9, (64,)), Row(1, 1, (32,))), beta=True),
    Case(3, 2, 130, 64, (Row(1, 500, (640, 0, 64)), Row(300, 300, (0, 0, 64)), Row(1, 64))),
    Case(2, 2, 64, 16, (Row(1, 191, (512, 528)), Row(4, 700, (192, 64)), Row(1, 129, (64, 80))), fp8=True),
    Case(1, 2, 16, 8, (Row(1, 70, (24,)), Row(9, 13)), window=5),
]


def oracle(rows: Tensor, dim: int) -> Tensor:
    """Rows in fp64, each group along `dim` rounded to 16 levels between its least and largest number."""
    wide = rows.double()
    least, high = wide.amin(dim, keepdim=True), wide.amax(dim, keepdim=True)
    step = (high - least) / 15
    return least + ((wide - least) / step.clamp(min=1e-30)).round() * step


@pytest.mark.parametrize(("size", "dim"), SHAPES)
def test_blocks_read_back_as_rounded_in_double_precision(size: int, dim: int) -> None:
    draw = torch.Generator().manual_seed(size)
    keys, values = torch.randn(2, 5, size, dim, generator=draw, dtype=torch.float64)
    keys[..., 3] = 900.0 + keys[..., 3]  # a channel far off, as keys have them
    bias = torch.randn(5, size, generator=draw)
    bias[0, 1] = -torch.inf
    layout = int4.Layout.of(size, dim)
    blocks = int4.pack(keys, values, bias)
    assert blocks.shape == (5, layout.block_bytes) and blocks.dtype == torch.uint8
    back = int4.unpack(blocks, layout, torch.float64)
    rounded = oracle(values.unflatten(-1, (layout.groups, -1)), -1).flatten(-2)
    # fp16 scales move a level by a little, most where a channel lies far off, and what is halfway to another level
    for got, exact, wanted, near in ((back[0], keys, oracle(keys, 1), 0.5), (back[1], values, rounded, 0.02)):
        assert ((got - wanted).abs() < near).double().mean() > 0.97
        assert (got - exact).abs().max() < 0.7
        far = torch.arange(dim) != 3
        assert ((got - wanted).abs()[..., far] < 0.02).double().mean() > 0.97
    torch.testing.assert_close(back[2], bias, atol=2e-3, rtol=2e-3)


def test_entries_of_other_blocks_and_heads_do_not_mix() -> None:
    keys, values = torch.randn(2, 3, 16, 64, generator=torch.Generator().manual_seed(0))
    whole = int4.pack(keys, values, torch.zeros(3, 16))
    for i in range(3):
        assert torch.equal(int4.pack(keys[i : i + 1], values[i : i + 1], torch.zeros(1, 16))[0], whole[i])
    k, v = int4.rounded(keys, values, 16)
    assert torch.equal(int4.rounded(k, v, 16)[0], k), "what is rounded stays where it is"


def test_numbers_that_four_bits_cannot_hold_are_not_finite() -> None:
    layout = int4.Layout.of(8, 8)
    for bad in (torch.nan, torch.inf, -torch.inf, 1e6):
        keys = torch.randn(1, 8, 8)
        keys[0, 2, 5] = bad
        back, values, _ = int4.unpack(int4.pack(keys, keys, torch.zeros(1, 8)), layout, torch.float32)
        assert not back[0, :, 5].isfinite().all() and back[0, :, :5].isfinite().all()
        assert not values[0, 2].isfinite().all() and values[0, 3:].isfinite().all()


@pytest.mark.parametrize(("size", "dim", "share"), [(16, 64, 2.9), (16, 128, 3.0), (32, 64, 3.2), (8, 64, 2.4)])
def test_a_page_holds_about_three_times_the_entries(size: int, dim: int, share: float) -> None:
    kv = torch.zeros(3, 28, 4, 2, size, dim, dtype=torch.bfloat16)
    blocks = int4.blocks_of(kv)
    assert blocks.shape[0] == 3 and blocks.shape[1] / (28 * 4) >= share
    assert blocks.shape[2] == int4.Layout.of(size, dim).block_bytes and blocks.shape[2] % 16 == 0
    blocks[1] = 255
    assert (kv[[0, 2]] == 0).all() and int4.blocks_of(kv.view(torch.uint8).view(FP8)).data_ptr() == kv.data_ptr()


def test_an_odd_head_dim_is_refused_by_name() -> None:
    with pytest.raises(ParameterError, match="fold_storage: int4 needs an even head_dim, the model has 37"):
        int4.Layout.of(16, 37)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.bfloat16, 3e-2), (torch.float64, 1e-6)])
def test_attention_is_that_over_the_same_entries_in_raw_form(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    case = case._replace(int4=True)
    x = make(case, dtype)
    before = x.kv.view(torch.uint8).clone()
    got, expected = run(case, x, "reference_int4"), run(case, widened(case, x), "reference")
    assert torch.equal(x.kv.view(torch.uint8), before) and got[0].dtype == dtype
    for mine, true in zip(got[:4], expected[:4], strict=True):
        torch.testing.assert_close(mine.double(), true.double(), atol=tolerance, rtol=tolerance)
    lonely = [sum(r.new for r in case.rows[:i]) for i, row in enumerate(case.rows) if row.new and not row.lens]
    plain = run(case, x._replace(summary_rows=torch.full_like(x.summary_rows, -1)), "reference")
    assert torch.equal(got[0][lonely], plain[0][lonely]), "rows without a summary keep their bits"
    assert case.window or not torch.equal(got[0][:1], plain[0][:1])
    assert x.summary_lens[LAYER].any()
