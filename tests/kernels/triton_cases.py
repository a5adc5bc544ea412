"""Inputs for the Triton body with everything unused poisoned, and its comparison with the reference in fp64."""

from __future__ import annotations

from typing import NamedTuple

import torch
from op_inputs import Inputs
from torch import Tensor

from thinkfold.attention import int4
from thinkfold.attention.fp8 import FP8, dequantise, quantise
from thinkfold.attention.ops import paged_attention

LAYERS, LAYER, LINES, PAD = 2, 1, 3, 2


class Row(NamedTuple):
    """New tokens, stored entries with them, and the summary entries of its line in each head."""

    new: int
    kv_len: int
    lens: tuple[int, ...] = ()


class Case(NamedTuple):
    """`sinks` are token rows; `beta` fills the plane, `fp8` is the storage, `int4` that of summaries (whole blocks)."""

    kv_heads: int
    group: int
    head_dim: int
    page_size: int
    rows: tuple[Row, ...]
    window: int = 0
    beta: bool = False
    fp8: bool = False
    sinks: tuple[int, ...] = ()
    int4: bool = False

    @property
    def backend(self) -> str:
        return "triton_int4" if self.int4 else "triton"


def make(case: Case, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Random inputs; `PAD` tokens of padding; all that no row may see is NaN, and of fp8 its scale is."""
    gen = torch.Generator().manual_seed(seed)
    size, heads = case.page_size, case.kv_heads
    used = [-(-row.kv_len // size) for row in case.rows]
    folded = [row for row in case.rows if row.lens]
    blocks_of = [[-(-n // size) for n in row.lens] for row in folded]
    lent = -(-sum(map(sum, blocks_of)) // (LAYERS * heads))
    num_pages = sum(used) + lent + 2
    kv = torch.randn(num_pages, LAYERS, heads, 2, size, case.head_dim, generator=gen)
    beta = torch.randn(num_pages, LAYERS, heads, size, generator=gen)
    stored = torch.zeros(num_pages, LAYERS, heads, size, dtype=torch.bool)
    free = torch.randperm(num_pages, generator=gen).tolist()
    blocks = [page * LAYERS * heads + i for page in (free.pop() for _ in range(lent)) for i in range(LAYERS * heads)]
    width = max((max(counts) for counts in blocks_of), default=0) + 1
    table = torch.zeros(LAYERS, LINES if folded else 0, heads, width, dtype=torch.int32)
    lens = torch.zeros(table.shape[:3], dtype=torch.int32)
    for line, (row, counts) in enumerate(zip(folded, blocks_of, strict=True)):
        lens[LAYER, line] = torch.tensor(row.lens)
        for head, count in enumerate(counts):
            for number in range(count):
                table[LAYER, line, head, number] = block = blocks.pop()
                stored.view(-1, size)[block, : row.lens[head] - number * size] = True
    if case.beta:
        hidden = stored & (torch.rand(stored.shape, generator=gen) < 0.2)
        beta[hidden] = -torch.inf
        kv[hidden.unsqueeze(3).expand(kv.shape[:-1])] = torch.nan
    page_table = torch.zeros(len(case.rows), max(used) + 1, dtype=torch.int32)
    slots: list[int] = []
    for places, row, num in zip(page_table, case.rows, used, strict=True):
        pages = [free.pop() for _ in range(num)]
        places[:num] = torch.tensor(pages)
        entries = [(pages[e // size], e % size) for e in range(row.kv_len)]
        for page, place in entries:
            stored[page, :, :, place] = True
        slots += [page * size + place for page, place in entries[row.kv_len - row.new :]]
    slots += [-1] * PAD
    cu = torch.tensor([0] + [row.new for row in case.rows]).cumsum(0).int()
    lines = torch.tensor([folded.index(row) if row.lens else -1 for row in case.rows])
    q = torch.randn(len(slots), heads * case.group, case.head_dim, generator=gen).to(dtype)
    k, v = (torch.randn(len(slots), heads, case.head_dim, generator=gen).to(dtype) for _ in range(2))
    k, v = torch.stack((k, v), dim=1).unbind(1)  # parts of wider rows, as a joined product gives them
    unused = ~stored.unsqueeze(3).expand(kv.shape[:-1])
    scales = torch.zeros(0).half()
    if case.fp8:
        kv, scales = quantise(kv)
        scales[unused] = torch.nan
    else:
        kv[unused] = torch.nan
        kv = kv.to(dtype)
    beta[~stored] = torch.nan
    plane = beta if case.beta and not case.int4 else torch.zeros(0)
    if case.int4:
        _fill_int4(case, kv, table, lens, gen)
    kv_lens = torch.tensor([row.kv_len for row in case.rows]).int()
    raw = (q, k, v, kv, cu, kv_lens, page_table, torch.tensor(slots))
    return Inputs(*raw, lines, table, lens, plane, scales)


def _fill_int4(case: Case, kv: Tensor, table: Tensor, lens: Tensor, gen: torch.Generator) -> None:
    """Give `table` int4 blocks in the place of head blocks, out of the same pages, all else of which is NaN."""
    assert not (lens % case.page_size).any(), "int4 blocks are full"
    blocks, used = int4.blocks_of(kv), _used(lens, case.page_size, table)
    pages = (table[LAYER][used] // (LAYERS * case.kv_heads)).unique().tolist()
    kv.view(torch.uint8)[pages] = 0xFF
    places = [page * blocks.shape[1] + i for page in pages for i in range(blocks.shape[1])]
    for at in used.nonzero().tolist():
        table[(LAYER, *at)] = block = places.pop(int(torch.randint(len(places), (1,), generator=gen)))
        keys, values = torch.randn(2, 1, case.page_size, case.head_dim, generator=gen)
        bias = torch.randn(1, case.page_size, generator=gen) * case.beta
        if case.beta:
            bias[torch.rand(bias.shape, generator=gen) < 0.2] = -torch.inf
        blocks[divmod(block, blocks.shape[1])] = int4.pack(keys, values, bias)[0]


def _used(lens: Tensor, size: int, table: Tensor) -> Tensor:
    """Which places of the tested layer's table hold a block, `[N, Hkv, S]`."""
    return torch.arange(table.shape[3]) * size < lens[LAYER].unsqueeze(-1)


def widened(case: Case, x: Inputs) -> Inputs:
    """The same in fp64 with summaries in raw form: read back into head blocks of further pages, and β in a plane."""
    blocks, size, dim = int4.blocks_of(x.kv), case.page_size, case.head_dim
    used = _used(x.summary_lens, size, x.summary_table)
    numbers = x.summary_table[LAYER][used].long()
    found = blocks[numbers // blocks.shape[1], numbers % blocks.shape[1]]
    keys, values, bias = int4.unpack(found, int4.Layout(size, dim), torch.float64)
    pages = -(-len(numbers) // (LAYERS * case.kv_heads))
    more = torch.full((pages, *x.kv.shape[1:]), torch.nan, dtype=torch.float64)
    more.view(-1, 2, size, dim)[: len(numbers)] = torch.stack((keys, values), 1)
    plane = torch.full((len(x.kv) + pages, LAYERS, case.kv_heads, size), torch.nan)
    plane[len(x.kv) :].view(-1, size)[: len(numbers)] = bias
    table = x.summary_table.clone()
    table[LAYER][used] = torch.arange(len(numbers)).int() + len(x.kv) * LAYERS * case.kv_heads
    raw, k, v = x.kv, x.k, x.v
    if case.fp8:
        raw = dequantise(x.kv, x.kv_scales, torch.float64)
        k, v = (dequantise(*quantise(rows), torch.float64) for rows in (k, v))
    summaries = {"summary_table": table, "bias": plane, "kv_scales": torch.zeros(0).half()}
    return x._replace(q=x.q.double(), k=k.double(), v=v.double(), kv=torch.cat((raw.double(), more)), **summaries)


def run(case: Case, x: Inputs, backend: str) -> list[Tensor]:
    """Out, LSE, sunk queries and their LSE, KV memory and scales after one call on the device of `x`."""
    x = x._replace(kv=x.kv.clone(), kv_scales=x.kv_scales.clone())
    rows = torch.tensor(case.sinks, dtype=torch.int64, device=x.q.device)
    query_sink = x.q.new_zeros(LAYERS, len(rows), *x.q.shape[1:])
    lse_sink = torch.zeros(query_sink.shape[:3], device=x.q.device)
    more = (case.head_dim**-0.5, case.window, rows, query_sink, lse_sink)
    out, lse = paged_attention(*x[:4], LAYER, *x[4:], *more, backend=backend)
    return [t.cpu() for t in (out, lse, query_sink, lse_sink, x.kv, x.kv_scales)]


def check(case: Case, dtype: torch.dtype, device: str, tolerance: float, seed: int = 0) -> None:
    """The Triton body gives what the reference gives in fp64; what is stored is equal bit by bit."""
    x = make(case, dtype, seed)
    wide = x._replace(q=x.q.double(), k=x.k.double(), v=x.v.double(), kv=x.kv if case.fp8 else x.kv.double())
    if case.int4:
        wide = widened(case, x)
    got = run(case, Inputs(*(t.to(device) for t in x)), case.backend)
    expected = run(case, wide, "reference")
    if not any(row.lens for row in case.rows):  # then none need be named
        bare = run(case, Inputs(*(t.to(device) for t in x._replace(summary_rows=x.summary_rows[:0]))), case.backend)
        for mine, same in zip(bare, got, strict=True):
            torch.testing.assert_close(mine.float(), same.float(), atol=tolerance, rtol=tolerance, equal_nan=True)
    assert got[0].dtype == dtype and got[1].dtype == torch.float32
    for mine, true in zip(got[:4], expected[:4], strict=True):
        torch.testing.assert_close(mine.double(), true.double(), atol=tolerance, rtol=tolerance)
    if case.int4:
        stays = run(case, x, "reference_int4")[4].view(torch.uint8)
        assert torch.equal(got[4].view(torch.uint8), stays)
    elif case.fp8:
        assert torch.equal(got[4].view(torch.uint8), expected[4].view(torch.uint8))
        assert got[4].dtype == FP8 and torch.equal(got[5].view(torch.int16), expected[5].view(torch.int16))
    else:
        torch.testing.assert_close(got[4].double(), expected[4], atol=0, rtol=0, equal_nan=True)
