"""KV as float8_e4m3fn with a scale a token and head: what is stored, read back and refused to saturate."""

from __future__ import annotations

import pytest
import torch
from op_inputs import Inputs
from torch import Tensor

from thinkfold.attention.fp8 import FP8, dequantise, quantise
from thinkfold.attention.ops import paged_attention

LAYERS, LAYER, SIZE = 2, 1, 8
LARGEST, SMALLEST_NORMAL, SMALLEST = 448.0, 2.0**-6, 2.0**-9


def stored(rows: Tensor) -> Tensor:
    return dequantise(*quantise(rows), rows.dtype)


def make(dtype: torch.dtype, head_dim: int = 16, new: int = 3, lens: tuple[int, int] = (11, 4)) -> Inputs:
    """Pages 0-2 and 3-5 are raw, 6-7 lent to summaries, 8 nobody's; unused codes and scales are NaN."""
    gen = torch.Generator().manual_seed(1)
    kv = torch.full((9, LAYERS, 2, 2, SIZE, head_dim), torch.nan)
    kv[[0, 1, 3, 4]] = torch.randn(4, LAYERS, 2, 2, SIZE, head_dim, generator=gen)
    kv[[1, 4], :, :, :, 5:] = torch.nan
    for page, count in ((6, min(8, lens[0])), (7, lens[0] - 8)):
        kv[page, 0, 0, :, : max(0, count)] = torch.randn(2, max(0, count), head_dim, generator=gen)
    kv[6, 1, 1, :, : lens[1]] = torch.randn(2, lens[1], head_dim, generator=gen)
    codes, scales = quantise(kv)
    table = torch.zeros(LAYERS, 1, 2, 2, dtype=torch.int32)
    table[LAYER, 0] = torch.tensor([[6 * 4, 7 * 4], [6 * 4 + 3, 0]])
    lengths = torch.zeros(LAYERS, 1, 2, dtype=torch.int32)
    lengths[LAYER, 0] = torch.tensor(lens)
    slots = torch.tensor([page * SIZE + 5 + i for page in (1, 4) for i in range(new)])
    q = torch.randn(2 * new, 6, head_dim, generator=gen).to(dtype)
    k, v = (torch.randn(2 * new, 2, head_dim, generator=gen).to(dtype) for _ in range(2))
    cu = torch.tensor([0, new, 2 * new]).int()
    tables = (cu, torch.tensor([13 + new] * 2).int(), torch.tensor([[0, 1], [3, 4]]).int(), slots)
    return Inputs(q, k, v, codes, *tables, torch.tensor([-1, 0]), table, lengths, torch.zeros(0), scales)


def call(x: Inputs) -> tuple[Tensor, Tensor]:
    sinks = (torch.zeros(0, dtype=torch.int64), x.q.new_zeros(LAYERS, 0, *x.q.shape[1:]), torch.zeros(LAYERS, 0, 6))
    return paged_attention(*x[:4], LAYER, *x[4:], x.q.shape[2] ** -0.5, 0, *sinks)


@pytest.mark.parametrize("head_dim", [16, 37, 128])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.bfloat16, 3e-2), (torch.float16, 3e-3)])
def test_equals_attention_over_what_is_stored(dtype: torch.dtype, tolerance: float, head_dim: int) -> None:
    """The op over fp8 is the op over the dequantised tensor: raw, summary and what it wrote itself."""
    x = make(dtype, head_dim)
    out, lse = call(x)
    plain = x._replace(
        q=x.q.float(),
        k=stored(x.k).float(),
        v=stored(x.v).float(),
        kv=dequantise(x.kv, x.kv_scales, torch.float32),
        kv_scales=torch.zeros(0).half(),
    )
    expected, expected_lse = call(plain)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse, expected_lse, atol=tolerance, rtol=tolerance)


def test_writes_codes_and_scales_of_its_slots_alone() -> None:
    x = make(torch.float32)
    codes, scales = x.kv.view(torch.uint8).clone(), x.kv_scales.clone()
    call(x)
    for token, slot in enumerate(x.slot_mapping.tolist()):
        page, offset = divmod(slot, SIZE)
        for which, rows in enumerate((x.k, x.v)):
            place = (page, LAYER, slice(None), which, offset)
            wanted, scale = quantise(rows[token])
            assert torch.equal(x.kv.view(torch.uint8)[place], wanted.view(torch.uint8))
            assert torch.equal(x.kv_scales[place], scale)
            codes[place], scales[place] = wanted.view(torch.uint8), scale
    assert torch.equal(x.kv.view(torch.uint8), codes)
    assert torch.equal(x.kv_scales.nan_to_num(7.0), scales.nan_to_num(7.0))


def test_bits_do_not_depend_on_how_a_row_is_cut() -> None:
    x = make(torch.float32)
    expected, _ = call(x)
    for i in range(3):
        tokens = [i, 3 + i]
        single = Inputs(
            *(t[tokens] for t in x[:3]),
            x.kv,
            torch.tensor([0, 1, 2]).int(),
            x.kv_lens - 2 + i,
            x.page_table.clone(),
            x.slot_mapping[tokens],
            *x[8:],
        )
        assert torch.equal(call(single)[0], expected[tokens])


@pytest.mark.parametrize("size", [1e-6, 1e-3, 1.0, 1e3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_case_44_every_normal_value_comes_back_within_a_sixteenth(size: float, dtype: torch.dtype) -> None:
    """One key channel of 10^3 times the others, tiny and large rows: no saturation, no scale of 0."""
    rows = torch.randn(300, 128, generator=torch.Generator().manual_seed(0))
    rows[:, 5] *= 1000
    rows = (rows * size).to(dtype)
    codes, scales = quantise(rows)
    assert (scales > 0).all() and scales.isfinite().all()
    assert (codes.float().abs() <= LARGEST).all()
    back = dequantise(codes, scales, torch.float32)
    wide, unit = rows.float(), scales.float()[:, None]
    normal = wide.abs() >= SMALLEST_NORMAL * unit
    assert normal[:, 5].float().mean() > 0.99
    assert ((back - wide).abs()[normal] <= wide.abs()[normal] / 16).all()
    assert ((back - wide).abs()[~normal] <= (SMALLEST / 2 * unit).expand_as(wide)[~normal] * 1.001).all()


def test_case_44_no_two_tokens_share_a_scale_they_do_not_need() -> None:
    rows = torch.tensor([[1e-3, 2e-3], [448.0, 1.0], [0.0, 0.0], [1e3, 1.0]])
    scales = quantise(rows)[1].float()
    torch.testing.assert_close(scales[[0, 1, 3]], torch.tensor([2e-3, 448.0, 1e3]) / 448, rtol=2e-2, atol=0)
    assert torch.equal(stored(rows)[2], torch.zeros(2))


def test_case_44_a_key_outlier_keeps_the_output_close_to_that_of_exact_memory() -> None:
    x = make(torch.float32, head_dim=64)
    x.k[..., 7] *= 1000
    x.q[..., 7] *= 1e-3
    exact = x._replace(kv=dequantise(x.kv, x.kv_scales, torch.float32), kv_scales=torch.zeros(0).half(), q=x.q.clone())
    out, expected = call(x)[0], call(exact)[0]
    assert (out - expected).norm() / expected.norm() < 0.06


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e9])
def test_a_row_that_no_scale_can_hold_reads_back_as_nan(value: float) -> None:
    """Never a silent saturation: NaN logits fail the row of the batch, and only that one."""
    x = make(torch.float32)
    clean, _ = call(x)
    x.k[0, 0, 3] = value
    out, _ = call(x)
    assert out[0, :3].isnan().all()
    assert torch.equal(out[3:], clean[3:]) and torch.equal(out[:3, 3:], clean[:3, 3:])


def test_the_largest_row_that_fits_does() -> None:
    rows = torch.tensor([[65504.0 * LARGEST, 1.0]])
    assert torch.equal(stored(rows)[0, :1], rows[0, :1])


def test_codes_are_the_nearest_ones() -> None:
    values = torch.arange(-448, 448.25, 0.5)
    rows = torch.stack([torch.full_like(values, LARGEST), values], dim=1)
    codes, scales = quantise(rows)
    assert (scales == 1).all() and torch.equal(codes[:, 1].float(), values.to(FP8).float())
