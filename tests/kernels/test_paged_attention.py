"""The paged attention op against a naive fp64 oracle, on odd shapes and poisoned memory."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from thinkfold.attention import gather_plan
from thinkfold.attention.ops import paged_attention

LAYERS, LAYER = 3, 1


class Case(NamedTuple):
    kv_heads: int
    group: int
    head_dim: int
    page_size: int
    rows: list[tuple[int, int]]  # (new tokens, stored entries with them)
    window: int = 0
    padding: int = 0


MIXED = [(1, 40), (5, 77), (1, 600), (1, 1), (3, 3), (0, 9), (1, 64), (33, 530)]
CASES = [
    Case(2, 3, 64, 16, MIXED, padding=3),
    Case(1, 1, 37, 8, MIXED, window=20),
    Case(2, 16, 64, 64, MIXED),
    Case(4, 2, 96, 16, MIXED, window=1),
    Case(1, 5, 256, 32, MIXED),
    Case(2, 7, 128, 32, [(1, 1100), (300, 1000)], window=600),
    Case(1, 2, 128, 64, [(300, 700), (1, 1025)]),
    Case(3, 1, 8, 8, [(1, 8), (8, 8), (1, 9), (9, 9)], window=8, padding=1),
    Case(2, 4, 64, 16, [(1, n) for n in (1, 2, 15, 16, 17, 63, 64, 65, 191, 192, 193, 383, 384, 385, 511, 512, 513)]),
    Case(2, 2, 32, 16, [(257, 257), (64, 128), (2, 600)], window=64),
]


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    kv: Tensor
    cu_seqlens_q: Tensor
    kv_lens: Tensor
    page_table: Tensor
    slot_mapping: Tensor


def make(case: Case, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Random inputs; every entry that no row may see is NaN."""
    gen = torch.Generator().manual_seed(seed)
    size, rows = case.page_size, case.rows
    used = [-(-kv_len // size) for _, kv_len in rows]
    num_pages = sum(used) + 3
    kv = torch.randn(num_pages, LAYERS, case.kv_heads, 2, size, case.head_dim, generator=gen).to(dtype)
    free = torch.randperm(num_pages, generator=gen).tolist()
    table = torch.zeros(len(rows), max(used) + 1, dtype=torch.int32)
    slots: list[int] = []
    for line, (n, kv_len), num in zip(table, rows, used, strict=True):
        pages = [free.pop() for _ in range(num)]
        line[:num] = torch.tensor(pages)
        slots += [pages[e // size] * size + e % size for e in range(kv_len - n, kv_len)]
        kv[pages[-1], :, :, :, kv_len - (num - 1) * size :] = torch.nan
    kv[free] = torch.nan
    slots += [-1] * case.padding
    total = len(slots)
    cu = torch.tensor([0] + [n for n, _ in rows]).cumsum(0).int()
    q = torch.randn(total, case.kv_heads * case.group, case.head_dim, generator=gen).to(dtype)
    k, v = (torch.randn(total, case.kv_heads, case.head_dim, generator=gen).to(dtype) for _ in range(2))
    return Inputs(q, k, v, kv, cu, torch.tensor([n for _, n in rows]).int(), table, torch.tensor(slots))


def without_summaries(x: Inputs) -> tuple[Tensor, ...]:
    """summary_rows, summary_table, summary_lens, bias and kv_scales of a batch that has none."""
    num_heads = x.kv.shape[2]
    table = torch.zeros(LAYERS, 0, num_heads, 0, dtype=torch.int32)
    lens = torch.zeros(LAYERS, 0, num_heads, dtype=torch.int32)
    return torch.full((len(x.kv_lens),), -1), table, lens, torch.zeros(0), torch.zeros(0).half()


def call(case: Case, x: Inputs) -> tuple[Tensor, Tensor]:
    none, sink = torch.zeros(0, dtype=torch.int64), x.q.new_zeros(LAYERS, 0, *x.q.shape[1:])
    tables = (x.cu_seqlens_q, x.kv_lens, x.page_table, x.slot_mapping, *without_summaries(x))
    scale, lse_sink = case.head_dim**-0.5, torch.zeros(sink.shape[:3])
    return paged_attention(x.q, x.k, x.v, x.kv, LAYER, *tables, scale, case.window, none, sink, lse_sink)


def oracle(case: Case, x: Inputs) -> tuple[Tensor, Tensor]:
    """One query and one head at a time, in fp64, from the KV tensor after the write."""
    out = torch.zeros(x.q.shape, dtype=torch.float64)
    lse = torch.full(x.q.shape[:2], -torch.inf, dtype=torch.float64)
    for row, (n, kv_len) in enumerate(case.rows):
        for i in range(n):
            token = int(x.cu_seqlens_q[row]) + i
            end = kv_len - n + i + 1
            entries = torch.arange(max(0, end - case.window) if case.window else 0, end)
            pages = x.page_table[row, entries // case.page_size].long()
            stored = x.kv[pages, LAYER, :, :, entries % case.page_size].double()  # [E, Hkv, 2, D]
            for head in range(x.q.shape[1]):
                keys, values = stored[:, head // case.group].unbind(1)
                scores = keys @ x.q[token, head].double() * case.head_dim**-0.5
                lse[token, head] = torch.logsumexp(scores, 0)
                out[token, head] = torch.softmax(scores, 0) @ values
    return out, lse


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.bfloat16, 2e-2)])
def test_matches_the_oracle(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    x = make(case, dtype)
    out, lse = call(case, x)
    expected, expected_lse = oracle(case, x)
    assert out.dtype == dtype and lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, atol=tolerance, rtol=tolerance)


def test_fp64_accumulates_in_fp64() -> None:
    case = CASES[0]
    x = make(case, torch.float64)
    torch.testing.assert_close(call(case, x)[0], oracle(case, x)[0], atol=1e-13, rtol=1e-13)


def test_writes_only_its_slots() -> None:
    case = CASES[0]
    x = make(case, torch.float32)
    before = x.kv.clone()
    call(case, x)
    for token, slot in enumerate(x.slot_mapping.tolist()):
        if slot >= 0:
            page, offset = divmod(slot, case.page_size)
            assert torch.equal(x.kv[page, LAYER, :, 0, offset], x.k[token])
            assert torch.equal(x.kv[page, LAYER, :, 1, offset], x.v[token])
            before[page, LAYER, :, :, offset] = x.kv[page, LAYER, :, :, offset]
    assert torch.equal(before.nan_to_num(7.0), x.kv.nan_to_num(7.0))


def test_poison_of_another_row_stays_there() -> None:
    case = Case(2, 2, 32, 16, [(1, 20), (4, 30), (1, 50)])
    clean, poisoned = make(case, torch.float32), make(case, torch.float32)
    poisoned.kv[poisoned.page_table[1, 0].long()] = torch.nan
    expected, (out, _) = call(case, clean)[0], call(case, poisoned)
    assert torch.equal(out[0], expected[0]) and torch.equal(out[5], expected[5])
    assert out[1:5].isnan().all()


def test_query_sink_holds_the_chosen_queries() -> None:
    case = CASES[0]
    x = make(case, torch.float32)
    rows = torch.tensor([4, 0, 7, -1])
    sink = torch.full((LAYERS, 4, *x.q.shape[1:]), 5.0)
    lse_sink = torch.full((LAYERS, 4, x.q.shape[1]), 5.0)
    tables = (x.cu_seqlens_q, x.kv_lens, x.page_table, x.slot_mapping, *without_summaries(x))
    _, lse = paged_attention(x.q, x.k, x.v, x.kv, LAYER, *tables, 0.1, 0, rows, sink, lse_sink)
    assert torch.equal(sink[LAYER, :3], x.q[rows[:3]]) and torch.equal(lse_sink[LAYER, :3], lse[rows[:3]])
    assert (sink[LAYER, 3] == 5.0).all() and (lse_sink[LAYER, 3] == 5.0).all()
    assert (lse_sink[[0, 2]] == 5.0).all()
    assert (sink[[0, 2]] == 5.0).all()


def test_changed_lengths_in_the_same_table_are_seen() -> None:
    case = Case(1, 2, 16, 8, [(1, 20), (1, 30)])
    x = make(case, torch.float32)
    call(case, x)
    x.kv_lens[1] -= 3
    shorter = case._replace(rows=[(1, 20), (1, 27)])
    torch.testing.assert_close(call(shorter, x)[0].double(), oracle(shorter, x)[0], atol=3e-6, rtol=3e-6)


def test_a_decode_step_after_another_has_the_bits_of_a_first_one() -> None:
    """Plans are carried from step to step: over page borders, and when a neighbour's table changes."""
    steps = [Case(2, 3, 16, 8, [(1, 20 + s), (1, 61 + s), (1, 700 + s)]) for s in range(20)]
    x = make(steps[-1], torch.float32)
    x.kv.nan_to_num_(0.5)
    for number, case in enumerate(steps):
        entries = [kv_len - 1 for _, kv_len in case.rows]
        slots = [int(x.page_table[i, e // 8]) * 8 + e % 8 for i, e in enumerate(entries)]
        if number == 15:
            x.page_table[1, 0], x.page_table[2, 0] = x.page_table[2, 0].clone(), x.page_table[1, 0].clone()
        y = x._replace(
            kv_lens=torch.tensor([n for _, n in case.rows]).int(),
            page_table=x.page_table.clone(),
            slot_mapping=torch.tensor(slots),
        )
        fresh = y._replace(kv=x.kv.clone())
        assert all(torch.equal(a, b) for a, b in zip(call(case, y), call(case, fresh), strict=True)), number


def two_steps() -> tuple[list[Case], list[Inputs]]:
    """A decode step of three rows and the next one, over the same memory."""
    cases = [Case(2, 3, 16, 8, [(1, 20 + s), (1, 40 + s), (1, 300 + s)]) for s in range(2)]
    last = make(cases[1], torch.float32)
    last.kv.nan_to_num_(0.5)
    slots = [
        int(line[(n - 2) // 8]) * 8 + (n - 2) % 8 for line, (_, n) in zip(last.page_table, cases[1].rows, strict=True)
    ]
    return cases, [last._replace(kv_lens=last.kv_lens - 1, slot_mapping=torch.tensor(slots)), last]


@pytest.mark.parametrize("room", [1 << 21, 0])
def test_a_decode_step_reads_new_entries_alone_where_there_is_room_to_keep_the_others(
    monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    monkeypatch.setattr(gather_plan, "KEPT_BYTES", room)
    cases, inputs = two_steps()
    call(cases[0], inputs[0])
    clean = inputs[1]._replace(kv=inputs[1].kv.clone())
    inputs[1].kv.numpy()[:] = torch.nan  # a change that torch does not count
    out, expected = call(cases[1], inputs[1])[0], call(cases[1], clean)[0]
    assert torch.equal(out, expected) if room else out.isnan().all()


def test_what_others_write_between_two_steps_is_seen() -> None:
    """A fork, a fold or a swap may put something else into the same pages."""
    cases, inputs = two_steps()
    call(cases[0], inputs[0])
    inputs[1].kv.mul_(-2)
    fresh = inputs[1]._replace(kv=inputs[1].kv.clone())
    assert all(torch.equal(a, b) for a, b in zip(call(cases[1], inputs[1]), call(cases[1], fresh), strict=True))


@pytest.mark.parametrize("window", [0, 100])
def test_bits_do_not_depend_on_neighbours_or_chunks(window: int) -> None:
    """Design rule 10: a query alone, in a chunk and in a busy batch has the same bits."""
    length = 1100
    whole = Case(2, 3, 64, 16, [(length, length)], window)
    x = make(whole, torch.float32)
    expected, expected_lse = call(whole, x)
    for i in (0, 3, 190, 255, 256, 300, 383, 400, 511, 512, 800, 1099):
        for n in {1, min(3, i + 1), min(70, i + 1)}:
            low, high = i + 1 - n, i + 1
            case = Case(2, 3, 64, 16, [(1, 33), (n, high), (1, 700), (9, 9)], window)
            y = make(case, torch.float32, seed=i)
            # the first pages of the whole run stand behind this batch's own pages
            kv = torch.cat([y.kv, x.kv])
            table = torch.zeros(4, x.page_table.shape[1], dtype=torch.int32)
            table[:, : y.page_table.shape[1]] = y.page_table
            table[1] = x.page_table[0] + len(y.kv)
            slots, q, k, v = y.slot_mapping.clone(), y.q.clone(), y.k.clone(), y.v.clone()
            slots[1 : 1 + n] = x.slot_mapping[low:high] + len(y.kv) * 16
            q[1 : 1 + n], k[1 : 1 + n], v[1 : 1 + n] = x.q[low:high], x.k[low:high], x.v[low:high]
            out, lse = call(case, Inputs(q, k, v, kv, y.cu_seqlens_q, y.kv_lens, table, slots))
            assert torch.equal(out[n], expected[i]), (i, n)
            assert torch.equal(lse[n], expected_lse[i]), (i, n)
