"""Attention over raw entries and summaries against a naive fp64 oracle, with everything unused poisoned."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest
import torch
from op_inputs import Inputs
from torch import Tensor

from thinkfold.attention.ops import paged_attention

LAYERS, LAYER, LINES = 2, 1, 4


class Row(NamedTuple):
    """`lens` are the entries of the row's line in each head (of the layer that is tested)."""

    new: int
    kv_len: int
    lens: tuple[int, ...] = ()


class Case(NamedTuple):
    kv_heads: int
    group: int
    head_dim: int
    page_size: int
    rows: list[Row]
    beta: bool = False


CASES = [
    Case(2, 1, 16, 8, [Row(1, 30, (5, 0)), Row(1, 1, (0, 8)), Row(1, 41)], beta=True),
    Case(
        2, 3, 64, 16, [Row(1, 200, (40, 33)), Row(5, 77, (1, 16)), Row(1, 600), Row(3, 3, (17, 0)), Row(0, 9, (3, 3))]
    ),
    Case(1, 4, 32, 32, [Row(33, 530, (130,)), Row(1, 9, (64,))], beta=True),
    Case(3, 2, 37, 64, [Row(1, 500, (600, 0, 1)), Row(300, 300, (0, 0, 5)), Row(1, 64)]),
    Case(2, 2, 64, 16, [Row(1, 191, (513, 512)), Row(4, 700, (190, 64)), Row(1, 129, (63, 65))], beta=True),
]


def make(case: Case, dtype: torch.dtype = torch.float32, seed: int = 0) -> Inputs:
    """Random inputs; summary blocks come from any place of their pages; all that no row may see is NaN."""
    gen = torch.Generator().manual_seed(seed)
    size, heads, rows = case.page_size, case.kv_heads, case.rows
    lens = torch.zeros(LAYERS, LINES, heads, dtype=torch.int32)
    rows_of_lines = torch.full((len(rows),), -1)
    for index, row in enumerate(rows):
        if row.lens:
            rows_of_lines[index] = line = LINES - 1 - index % LINES
            lens[LAYER, line] = torch.tensor(row.lens)
            lens[1 - LAYER, line, 0] = 7 + index  # the other layer has summaries of its own
    used = [-(-row.kv_len // size) for row in rows]
    needed = int((-(-lens // size)).sum())
    raw_pages, summary_pages = sum(used) + 2, -(-needed // (LAYERS * heads)) + 1
    kv = torch.full((raw_pages + summary_pages, LAYERS, heads, 2, size, case.head_dim), torch.nan)
    bias = torch.full((*kv.shape[:3], size), torch.nan)
    free = torch.randperm(raw_pages + summary_pages, generator=gen).tolist()
    lent = [free.pop() for _ in range(summary_pages)]
    flat, flat_bias = kv.view(-1, 2, size, case.head_dim), bias.view(-1, size)
    blocks = [page * LAYERS * heads + i for page in lent for i in range(LAYERS * heads)]
    blocks = [blocks[i] for i in torch.randperm(len(blocks), generator=gen).tolist()]
    table = torch.zeros(LAYERS, LINES, heads, int((-(-lens // size)).max()) + 1, dtype=torch.int32)
    for place in itertools.product(range(LAYERS), range(LINES), range(heads)):
        for number, start in enumerate(range(0, int(lens[place]), size)):
            n, block = min(size, int(lens[place]) - start), blocks.pop()
            table[(*place, number)] = block
            flat[block, :, :n] = torch.randn(2, n, case.head_dim, generator=gen)
            flat_bias[block, :n] = torch.randn(n, generator=gen)
            hidden = torch.rand(n, generator=gen) < 0.2
            flat_bias[block, :n][hidden] = -torch.inf
            if case.beta:
                flat[block, :, :n][:, hidden] = torch.nan
    page_table = torch.zeros(len(rows), max(used) + 1, dtype=torch.int32)
    slots: list[int] = []
    for line, row, num in zip(page_table, rows, used, strict=True):
        pages = [free.pop() for _ in range(num)]
        line[:num] = torch.tensor(pages)
        for entry in range(row.kv_len):
            kv[pages[entry // size], :, :, :, entry % size] = torch.randn(
                LAYERS, heads, 2, case.head_dim, generator=gen
            )
        slots += [pages[e // size] * size + e % size for e in range(row.kv_len - row.new, row.kv_len)]
    total = len(slots)
    q = torch.randn(total, heads * case.group, case.head_dim, generator=gen).to(dtype)
    k, v = (torch.randn(total, heads, case.head_dim, generator=gen).to(dtype) for _ in range(2))
    cu = torch.tensor([0] + [row.new for row in rows]).cumsum(0).int()
    kv_lens = torch.tensor([row.kv_len for row in rows]).int()
    plane = bias if case.beta else torch.zeros(0)
    raw = (q, k, v, kv.to(dtype), cu, kv_lens, page_table, torch.tensor(slots))
    return Inputs(*raw, rows_of_lines, table, lens, plane, torch.zeros(0).half())


def call(x: Inputs, window: int = 0) -> tuple[Tensor, Tensor]:
    none = torch.zeros(0, dtype=torch.int64)
    sinks = (none, x.q.new_zeros(LAYERS, 0, *x.q.shape[1:]), torch.zeros(LAYERS, 0, x.q.shape[1]))
    return paged_attention(*x[:4], LAYER, *x[4:], x.q.shape[2] ** -0.5, window, *sinks)


def oracle(case: Case, x: Inputs) -> tuple[Tensor, Tensor]:
    """One query and one head at a time, in fp64, from memory after the write."""
    out = torch.zeros(x.q.shape, dtype=torch.float64)
    lse = torch.full(x.q.shape[:2], -torch.inf, dtype=torch.float64)
    size = case.page_size
    flat = x.kv.view(-1, 2, size, case.head_dim)
    for index, row in enumerate(case.rows):
        line = int(x.summary_rows[index])
        for i, head in itertools.product(range(row.new), range(x.q.shape[1])):
            token, kv_head = int(x.cu_seqlens_q[index]) + i, head // case.group
            entries = torch.arange(row.kv_len - row.new + i + 1)
            pages = x.page_table[index, entries // size].long()
            keys, values = x.kv[pages, LAYER, kv_head, :, entries % size].double().unbind(1)
            beta = torch.zeros(len(keys), dtype=torch.float64)
            if line >= 0:
                entries = torch.arange(int(x.summary_lens[LAYER, line, kv_head]))
                blocks = x.summary_table[LAYER, line, kv_head, entries // size].long()
                found = flat[blocks, :, entries % size].double()
                added = torch.zeros(len(entries), dtype=torch.float64)
                if case.beta:
                    added = x.bias.view(-1, size)[blocks, entries % size].double()
                seen = added > -torch.inf
                keys, values = torch.cat([keys, found[seen, 0]]), torch.cat([values, found[seen, 1]])
                beta = torch.cat([beta, added[seen]])
            scores = keys @ x.q[token, head].double() * case.head_dim**-0.5 + beta
            lse[token, head] = torch.logsumexp(scores, 0)
            out[token, head] = torch.softmax(scores, 0) @ values
    return out, lse


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 3e-6), (torch.bfloat16, 3e-2), (torch.float16, 4e-3), (torch.float64, 1e-6)],
)
def test_matches_the_oracle(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    x = make(case, dtype)
    out, lse = call(x)
    expected, expected_lse = oracle(case, x)
    assert out.dtype == dtype and lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_summaries_behind_a_window_are_not_read(case: Case) -> None:
    x = make(case)
    plain = x._replace(summary_rows=torch.full_like(x.summary_rows, -1), kv=x.kv.clone())
    assert all(torch.equal(a, b) for a, b in zip(call(x, window=9), call(plain, window=9), strict=True))


def test_rows_without_summaries_have_the_bits_they_have_without_summaries_near_them() -> None:
    case = CASES[1]
    x = make(case)
    plain = x._replace(summary_rows=torch.full_like(x.summary_rows, -1), kv=x.kv.clone())
    lonely = torch.arange(6, 7)  # the one token of row 2, which has no line
    for got, expected in zip(call(x), call(plain), strict=True):
        assert torch.equal(got[lonely], expected[lonely])
        assert not torch.equal(got[:1], expected[:1])


def test_a_line_without_entries_changes_no_bit() -> None:
    case = CASES[1]
    x = make(case)
    plain = x._replace(summary_rows=torch.full_like(x.summary_rows, -1), kv=x.kv.clone())
    x.summary_lens.zero_()
    assert all(torch.equal(a, b) for a, b in zip(call(x), call(plain), strict=True))


@pytest.mark.parametrize("page_size", [8, 16, 64])
def test_a_summary_of_all_entries_of_a_span_is_the_span(page_size: int) -> None:
    """Exactness: dropping a span of raw pages and keeping all of it as a summary changes nothing."""
    pages, dropped = 640 // page_size, slice(128 // page_size, 384 // page_size)
    full = Case(2, 3, 64, page_size, [Row(1, 637)])
    x = make(full)
    expected, expected_lse = call(x)
    span = x.page_table[0, :pages][dropped].long()
    kept = torch.cat([x.page_table[0, : dropped.start], x.page_table[0, dropped.stop :]])[None]
    heads = torch.arange(2)[None, :, None]
    layers = torch.arange(LAYERS)[:, None, None]
    table = ((span * LAYERS + layers) * 2 + heads)[:, None].expand(-1, LINES, -1, -1).int().contiguous()
    folded = x._replace(
        kv_lens=x.kv_lens - 256,
        page_table=kept.contiguous(),
        summary_rows=torch.tensor([1]),
        summary_table=table,
        summary_lens=torch.full((LAYERS, LINES, 2), 256, dtype=torch.int32),
    )
    out, lse = call(folded)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)


def part(x: Inputs, index: int, low: int, high: int) -> Inputs:
    """Only tokens `[low, high)` of row `index`, as the step that computes them sees them."""
    start, end = x.cu_seqlens_q[index : index + 2].tolist()
    tokens = slice(start + low, start + high)
    return x._replace(
        q=x.q[tokens],
        k=x.k[tokens],
        v=x.v[tokens],
        kv=x.kv.clone(),
        cu_seqlens_q=torch.tensor([0, high - low]).int(),
        kv_lens=x.kv_lens[index : index + 1] - (end - start - high),
        page_table=x.page_table[index : index + 1].clone(),
        slot_mapping=x.slot_mapping[tokens],
        summary_rows=x.summary_rows[index : index + 1],
    )


@pytest.mark.parametrize("lens", [(40, 0), (512, 130), (190, 191), (321, 449)])
@pytest.mark.parametrize("beta", [False, True])
def test_bits_do_not_depend_on_neighbours_or_chunks(lens: tuple[int, int], beta: bool) -> None:
    rows = [Row(1, 33), Row(300, 600, lens), Row(1, 700, (5, 600)), Row(9, 9, (64, 0))]
    x = make(Case(2, 3, 64, 16, rows, beta))
    x.kv[x.page_table[1, :38].long()] = x.kv[x.page_table[1, :38].long()].nan_to_num(0.0)
    expected, expected_lse = call(x)  # writes all new entries, which the shorter steps then find
    for i in (0, 1, 17, 83, 84, 100, 211, 212, 255, 256, 299):
        for n in {1, min(3, i + 1), min(70, i + 1)}:
            out, lse = call(part(x, 1, i + 1 - n, i + 1))
            assert torch.equal(out[-1], expected[1 + i]), (i, n)
            assert torch.equal(lse[-1], expected_lse[1 + i]), (i, n)
    out, lse = call(part(x, 2, 0, 1))
    assert torch.equal(out[0], expected[301]) and torch.equal(lse[0], expected_lse[301])


def test_poison_in_one_line_stays_there() -> None:
    case = Case(2, 2, 32, 16, [Row(1, 40, (20, 3)), Row(1, 50, (9, 30)), Row(1, 60)])
    x = make(case)
    expected, _ = call(x)
    x.kv.view(-1, 2, 16, 32)[x.summary_table[LAYER, LINES - 1, 0, 0].long()] = torch.nan
    out, _ = call(x)
    assert torch.equal(out[1:], expected[1:]) and torch.equal(out[0, 2:], expected[0, 2:])
    assert out[0, :2].isnan().all()


def test_sinks_hold_queries_and_lse_over_raw_and_summary() -> None:
    case = CASES[1]
    x = make(case)
    rows = torch.tensor([5, 0, 6])
    query_sink, lse_sink = torch.full((LAYERS, 3, *x.q.shape[1:]), 5.0), torch.full((LAYERS, 3, x.q.shape[1]), 5.0)
    paged_attention(*x[:4], LAYER, *x[4:], case.head_dim**-0.5, 0, rows, query_sink, lse_sink)
    assert torch.equal(query_sink[LAYER], x.q[rows])
    torch.testing.assert_close(lse_sink[LAYER].double(), oracle(case, x)[1][rows], atol=3e-6, rtol=3e-6)
    assert (query_sink[1 - LAYER] == 5.0).all() and (lse_sink[1 - LAYER] == 5.0).all()


@pytest.mark.parametrize("inference", [False, True])
def test_tables_changed_in_place_are_seen(inference: bool) -> None:
    """A plan of summaries is kept from step to step and must not outlive a fold, a fork or a release."""
    case = Case(2, 2, 16, 8, [Row(1, 40, (20, 3)), Row(1, 50, (9, 30))])
    with torch.inference_mode(inference):
        x = make(case)
        call(x)
        x.summary_lens[LAYER, LINES - 1, 0] = 12
        shorter = case._replace(rows=[Row(1, 40, (12, 3)), case.rows[1]])
        torch.testing.assert_close(call(x)[0].double(), oracle(shorter, x)[0], atol=3e-6, rtol=3e-6)
        x.summary_table[LAYER, LINES - 1, 0, 0] = x.summary_table[LAYER, LINES - 2, 1, 0]
        torch.testing.assert_close(call(x)[0].double(), oracle(shorter, x)[0], atol=3e-6, rtol=3e-6)
        x.summary_lens[:, LINES - 1] = 0
        plain = x._replace(summary_rows=torch.tensor([-1, LINES - 2]))
        assert torch.equal(call(x)[0], call(plain)[0])


def test_a_decode_step_after_another_has_the_bits_of_a_first_one() -> None:
    rows = [Row(1, 120, (20, 70)), Row(1, 90), Row(1, 130, (0, 3))]
    x = make(Case(2, 3, 16, 8, rows))
    for number in range(20):
        entries = [row.kv_len - 20 + number for row in rows]
        y = x._replace(
            kv_lens=torch.tensor(entries).int() + 1,
            page_table=x.page_table.clone(),
            slot_mapping=torch.tensor([int(x.page_table[i, e // 8]) * 8 + e % 8 for i, e in enumerate(entries)]),
        )
        if number == 13:
            x.summary_lens[LAYER, LINES - 1, 1] = 33
        fresh = y._replace(kv=x.kv.clone(), summary_table=x.summary_table.clone())
        assert all(torch.equal(a, b) for a, b in zip(call(y), call(fresh), strict=True)), number
