"""Prompts that arrive together and begin alike are computed once. No torch."""

from dataclasses import replace

import pytest
from fakes import TokenFunction, run_scheduler
from test_scheduler import PAGE, make, make_branches, token_of

from thinkfold.scheduler.branch import BranchStatus
from thinkfold.scheduler.twins import LEAST, common

SHARED = list(range(100, 100 + LEAST + 32))


def run(scheduler, branches, *, depth=1, limit=200):
    for branch in branches:
        scheduler.add([branch])
    run_scheduler(scheduler, TokenFunction(token_of), branches, depth=depth, limit=limit)


def separate(count, *, tail=6, **kwargs):
    """As many requests with one long beginning and an end of their own."""
    prompts = [SHARED + [1000 + 50 * i + k for k in range(tail)] for i in range(count)]
    return [make_branches(i, p, 5, order=i, seed=i, **kwargs)[0] for i, p in enumerate(prompts)]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("budget", [16, 500])
def test_the_shared_beginning_is_computed_once(depth, budget):
    scheduler, branches = make(num_pages=400, budget=budget), separate(6)
    run(scheduler, branches, depth=depth)
    assert sum(b.computed_prompt_tokens for b in branches) == len(SHARED) + 6 * 6
    assert [b.cached_tokens for b in branches] == [0] + 5 * [len(SHARED)]
    alone = separate(6)
    run(make(num_pages=400, budget=budget, caching=False), alone, depth=depth)
    assert [b.output_ids for b in branches] == [b.output_ids for b in alone]
    assert sum(b.computed_prompt_tokens for b in alone) == 6 * (len(SHARED) + 6)


def test_others_do_not_wait():
    scheduler = make(num_pages=400, budget=1000)
    first, other = make_branches(0, SHARED, 5)[0], make_branches(1, range(500, 660), 5, order=1)[0]
    mine = make_branches(2, SHARED, 5, order=2)[0]
    mine.request = replace(mine.request, namespace=("another",))
    short = make_branches(4, SHARED[: LEAST - PAGE], 5, order=4)[0]
    little = make_branches(3, SHARED[: 2 * PAGE] + list(range(3000, 3150)), 5, order=3)[0]
    for branch in (first, other, mine, little, short):
        scheduler.add([branch])
    assert len(scheduler.plan().rows) == 5


def test_who_waits_starts_at_once_when_the_first_one_is_gone():
    scheduler, (first, second) = make(num_pages=400, budget=500), separate(2)
    for branch in (first, second):
        scheduler.add([branch])
    plan = scheduler.plan()
    assert [row.num_tokens for row in plan.rows] == [LEAST + 38] and second.status is BranchStatus.WAITING
    scheduler.finish(first)
    assert [row.num_tokens for row in scheduler.plan().rows] == [LEAST + 38]
    assert second.status is BranchStatus.RUNNING


def test_who_waits_for_memory_is_not_waited_for():
    """The first finds no page for its next chunk: the second would wait for ever if it waited for that."""
    scheduler = make(num_pages=60, budget=16)
    held = make_branches(9, range(900, 912), 30, order=0)[0]
    branches = [held, *(make_branches(i, [*SHARED, i], 3, order=i + 1)[0] for i in range(2))]
    run(scheduler, branches, limit=400)
    assert all(b.status is BranchStatus.FINISHED for b in branches)
    assert scheduler.kv.num_available == 60


@pytest.mark.parametrize(
    ("a", "b", "limit", "length"),
    [
        ([1, 2, 3], [1, 2, 4], 9, 2),
        ([1, 2, 3], [1, 2, 3, 4], 9, 3),
        ([1, 2, 3], [1, 2, 3], 2, 2),
        ([], [1], 9, 0),
        ([2], [1], 9, 0),
        ([5] * 1000 + [1], [5] * 1000 + [2], 2000, 1000),
    ],
)
def test_what_two_prompts_have_in_common(a, b, limit, length):
    assert common(a, b, limit) == length
