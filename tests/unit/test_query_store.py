"""Which queries are kept: a rule of the logical position, however a branch got there."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from thinkfold.runner.query_store import LATE, LATE_STRIDE, LINES, PAST, QueryStore
from thinkfold.scheduler.output import BatchRow

LAYERS, HEADS, DIM = 2, 3, 4
CPU = torch.device("cpu")


def store(slots: int = 4) -> QueryStore:
    return QueryStore(slots, LAYERS, HEADS, DIM, torch.float32, CPU)


def run(kept: QueryStore, rows: Iterable[tuple[int, int, int]], first: int = 0, salt: int = 0) -> None:
    """One step of rows (slot, position, tokens); a query is a function of its position and `salt`."""
    batch = [BatchRow(s, [0] * n, False, p, p, [], keep_queries=True, queries_from=first) for s, p, n in rows]
    tokens, lines = kept.place(batch)
    positions = [p for row in batch for p in range(row.position, row.position + row.num_tokens)]
    if tokens:
        queries, lse = kept.sinks(len(tokens))
        for i, token in enumerate(tokens):
            queries[:, i], lse[:, i] = content(positions[token], salt)
        kept.keep(torch.tensor(lines), queries, lse)
    kept.check_integrity()


def content(position: int, salt: int = 0) -> tuple[Tensor, Tensor]:
    rows = torch.randn((LAYERS, HEADS, DIM + 1), generator=torch.Generator().manual_seed(position + 10**6 * salt))
    return rows[..., :DIM], rows[..., DIM]


def held(kept: QueryStore, slot: int, now: int | None = None) -> dict[int, tuple[Tensor, Tensor]]:
    positions = kept.positions(slot, now)
    queries, lse = kept.read(slot, positions) if positions else (torch.zeros(1, 0), torch.zeros(1, 0))
    return {p: (queries[:, i], lse[:, i]) for i, p in enumerate(positions)}


def same(left: dict[int, tuple[Tensor, Tensor]], right: dict[int, tuple[Tensor, Tensor]]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(a, b) for p in left for a, b in zip(left[p], right[p], strict=True)
    )


def one_by_one(end: int, first: int = 0, slot: int = 0) -> QueryStore:
    kept = store()
    for position in range(end):
        run(kept, [(slot, position, 1)], first)
    return kept


@pytest.mark.parametrize("first", [0, 7, 130])
def test_a_late_ring_and_a_thinned_past(first: int) -> None:
    kept, seen = store(), set()
    for position in range(700):
        run(kept, [(0, position, 1)], first)
        now = position + 1
        found = kept.positions(0, now)
        newest = [p for p in range(now) if p >= first and p % LATE_STRIDE == 0][-LATE:]
        assert set(newest) <= set(found) and all(p >= first for p in found)
        past = sorted(set(found) - set(newest))
        assert len(found) <= LATE + PAST <= LINES
        seen.add(len(past))
        if now - first >= 2 * LATE * LATE_STRIDE:
            gaps = {b - a for a, b in pairwise(past)}
            assert past[0] == first and len(gaps) == 1, "the past is evenly spread from its start on"
    assert max(seen) >= PAST // 2


@pytest.mark.parametrize("seed", range(4))
def test_chunks_and_neighbours_change_nothing(seed: int) -> None:
    """Alone, recomputed in chunks, in a batch: the same positions with the same content."""
    rng = random.Random(seed)
    end, first = rng.randrange(300, 900), rng.choice([0, 5, 64])
    plain = one_by_one(end, first)
    kept, done = store(), 0
    while done < end:
        n = min(rng.choice([1, 1, 3, 50, 400]), end - done)
        run(kept, [(2, rng.randrange(500), rng.randrange(1, 5)), (1, done, n)], first)
        done += n
    assert same(held(plain, 0), held(kept, 1))
    assert len(held(plain, 0)) > PAST


@pytest.mark.parametrize("now", [127, 128, 129, 256, 257, 512])
def test_a_token_that_is_discarded_leaves_no_trace(now: int) -> None:
    """One step ahead of the device: position `now` was computed with a wrong token, then again."""
    plain, ahead = one_by_one(now), one_by_one(now)
    run(ahead, [(0, now, 1)], salt=1)
    assert same(held(plain, 0, now), held(ahead, 0, now)), "what it would drive out is still there"
    for kept in (plain, ahead):
        run(kept, [(0, now, 1)])
    assert same(held(plain, 0), held(ahead, 0))


def test_a_fork_goes_its_own_way() -> None:
    kept = one_by_one(300)
    kept.fork(0, 3)
    assert same(held(kept, 0), held(kept, 3))
    for position in range(300, 340):
        run(kept, [(3, position, 1)], salt=1)
    assert same(held(kept, 0), held(one_by_one(300), 0))
    mixed = held(kept, 3)
    assert all(torch.equal(q, content(p, int(p >= 300))[0]) for p, (q, _) in mixed.items())


def test_a_saved_branch_comes_back_into_another_slot() -> None:
    kept = one_by_one(300)
    kept.save(0, 77)
    assert not kept.positions(0, None)
    run(kept, [(0, 0, 200)], salt=1)  # somebody else has the slot now
    kept.restore(77, 2)
    assert same(held(kept, 2), held(one_by_one(300), 0))
    for position in range(300, 420):
        run(kept, [(2, position, 1)])
    assert same(held(kept, 2), held(one_by_one(420), 0))
    kept.save(2, 78)
    kept.discard(78)
    kept.restore(78, 1)
    assert not kept.positions(1, None) and not kept.positions(2, None)
    kept.check_integrity()


def test_rows_that_do_not_ask_take_no_memory() -> None:
    kept = store()
    assert kept.place([BatchRow(0, [0] * 50, False, 0, 0, [])]) == ([], [])
    assert kept._queries is None
    assert kept.nbytes == LAYERS * (4 * LINES + 1) * HEADS * (DIM + 1) * 4
