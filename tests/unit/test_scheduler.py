"""The scheduler alone: continuous batching, chunking, forks, preemption. No torch."""

import random

import pytest
from fakes import FreeRun, TokenFunction, make_request, run_scheduler

from thinkfold.kv.manager import KVManager
from thinkfold.scheduler.branch import Branch, BranchStatus
from thinkfold.scheduler.scheduler import Scheduler

PAGE = 4


def make(num_pages=32, max_num_seqs=8, budget=16, caching=True):
    kv = KVManager(num_pages, PAGE, enable_prefix_caching=caching)
    return Scheduler(kv, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)


def make_branches(number, prompt, length, n=1, order=0, **kwargs):
    request = make_request(f"r{number}", prompt, n=n, **kwargs)
    return [Branch(request, i, order * 100 + i, FreeRun(length), list(prompt)) for i in range(n)]


def token_of(sample):
    """Depends on what a draw may depend on: seed, branch and position."""
    return 1000 + (sample.seed * 7 + sample.branch * 31 + sample.position * 13) % 97


@pytest.mark.parametrize("depth", [0, 1])
def test_every_branch_sees_its_own_tokens_at_their_places(depth):
    scheduler, runner = make(num_pages=200), TokenFunction(token_of)
    branches = []
    for i in range(6):
        branches += make_branches(i, range(i * 50, i * 50 + 3 + 5 * i), 9, order=i, seed=i)
        scheduler.add(branches[-1:])
    run_scheduler(scheduler, runner, branches, depth=depth, limit=200)
    for branch in branches:
        expected = [
            1000 + (branch.request.sampling.seed * 7 + position * 13) % 97
            for position in range(branch.num_prompt_tokens, branch.num_prompt_tokens + 9)
        ]
        assert branch.output_ids == expected
        assert branch.status is BranchStatus.FINISHED
        assert branch.token_ids[:-1] in runner.contexts  # the last token is never computed
    assert scheduler.kv.num_available == 200


def test_prefill_is_chunked_to_the_token_budget():
    scheduler = make(num_pages=64, budget=10)
    scheduler.add(make_branches(0, range(25), 1))
    sizes = []
    while (plan := scheduler.plan()) is not None:
        sizes.append(plan.num_tokens)
        scheduler.collect(plan.step)
        if plan.rows[0].samples:
            break
    assert sizes == [10, 10, 5]


def test_decodes_and_a_prefill_share_one_step():
    scheduler, runner = make(num_pages=64, budget=10), TokenFunction(token_of)
    (first,) = make_branches(0, range(3), 5)
    scheduler.add([first])
    result = runner.launch(scheduler.plan())
    scheduler.collect(0)
    first.token_ids.append(result.token_ids[0])
    scheduler.add(make_branches(1, range(50, 80), 5, order=1))
    plan = scheduler.plan()
    assert [row.num_tokens for row in plan.rows] == [1, 9]


@pytest.mark.parametrize("depth", [0, 1])
def test_n_samples_compute_the_prompt_once(depth):
    scheduler, runner = make(num_pages=200), TokenFunction(token_of)
    branches = make_branches(0, range(37), 6, n=8)
    scheduler.add(branches)
    run_scheduler(scheduler, runner, branches, depth=depth, limit=100)
    computed = sum(b.computed_prompt_tokens for b in branches)
    assert computed <= 1.3 * 37
    assert computed == 37
    assert len({tuple(b.output_ids) for b in branches}) == 8
    assert scheduler.kv.num_available == 200


def test_n_samples_hold_their_own_pages_and_one_trunk():
    scheduler, held = make(num_pages=400), []

    class Watching(TokenFunction):
        def launch(self, plan):
            held.append(400 - scheduler.kv.num_available)
            return super().launch(plan)

    branches = make_branches(0, range(37), 50, n=8)
    scheduler.add(branches)
    run_scheduler(scheduler, Watching(token_of), branches, depth=0, limit=200)
    trunk, own = -(-37 // PAGE), -(-50 // PAGE)
    assert trunk + 8 * (own - 1) <= max(held) <= trunk + 8 * own + 8


def test_children_without_a_slot_wait_and_then_run():
    scheduler, runner = make(num_pages=200, max_num_seqs=2), TokenFunction(token_of)
    branches = make_branches(0, range(10), 5, n=5)
    scheduler.add(branches)
    run_scheduler(scheduler, runner, branches, depth=0, limit=100)
    assert all(len(b.output_ids) == 5 for b in branches)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("caching", [True, False])
def test_case_40_preemption_loses_and_doubles_nothing(depth, n, caching):
    """Six requests of 100 tokens in a pool for two and a half of them."""
    lonely = {}
    for i in range(6):
        scheduler, runner = make(num_pages=400), TokenFunction(token_of)
        branches = make_branches(i, range(i, i + 12), 100, n=n, seed=i)
        scheduler.add(branches)
        run_scheduler(scheduler, runner, branches, depth=depth, limit=2000)
        lonely[i] = [b.output_ids for b in branches]
    pages = int(2.5 * (112 / PAGE))
    scheduler, runner = make(num_pages=pages, caching=caching), TokenFunction(token_of)
    groups = [make_branches(i, range(i, i + 12), 100, n=n, order=i, seed=i) for i in range(6)]
    for group in groups:
        scheduler.add(group)
    everyone = [b for group in groups for b in group]
    run_scheduler(scheduler, runner, everyone, depth=depth, limit=10_000)
    assert [[b.output_ids for b in group] for group in groups] == list(lonely.values())
    assert scheduler.num_preemptions > 0
    assert max(b.preemptions for b in everyone) <= 8
    assert scheduler.kv.num_available == pages


def test_the_first_arrived_branch_always_advances():
    scheduler, runner = make(num_pages=8), TokenFunction(token_of)
    branches = [make_branches(i, range(5), 20, order=i)[0] for i in range(4)]
    for branch in branches:
        scheduler.add([branch])
    before = 0
    while branches[0].status is not BranchStatus.FINISHED:
        plan = scheduler.plan()
        result = runner.launch(plan)
        for (branch, wanted), token in zip(scheduler.collect(plan.step), result.token_ids, strict=True):
            if wanted:
                branch.token_ids.append(token)
                branch.steering.outputs += 1
                if branch.steering.outputs >= branch.steering.length:
                    scheduler.finish(branch)
        progress = len(branches[0].token_ids)
        assert progress > before
        before = progress


def test_a_failing_control_ends_its_own_branch_only():
    class Broken(FreeRun):
        def must_wait(self, inflight):
            raise RuntimeError("broken")

    scheduler, runner = make(), TokenFunction(token_of)
    good, bad = make_branches(0, range(4), 5)[0], make_branches(1, range(9, 13), 5, order=1)[0]
    bad.steering = Broken(5)
    scheduler.add([bad])
    scheduler.add([good])
    runner.launch(scheduler.plan()) if scheduler.plan() else None
    assert scheduler.ended == [bad]
    assert isinstance(bad.error, RuntimeError)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("seed", range(6))
def test_random_traffic_with_aborts_ends_with_an_empty_pool(depth, seed):
    rng = random.Random(seed)
    pages = 40
    scheduler, runner = make(num_pages=pages, max_num_seqs=5, budget=13), TokenFunction(token_of)
    alive: list[Branch] = []
    finished: list[Branch] = []
    pending = []
    for turn in range(3000):
        if turn < 1200 and rng.random() < 0.08:
            prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 40))]
            group = make_branches(turn, prompt, rng.randrange(1, 60), n=rng.choice((1, 1, 2, 4)), order=turn, seed=turn)
            scheduler.add(group)
            alive += group
        if alive and rng.random() < 0.02:
            gone = rng.choice(alive).request
            for branch in [b for b in alive if b.request is gone]:
                scheduler.finish(branch)
                alive.remove(branch)
        plan = scheduler.plan()
        if plan is not None:
            pending.append((plan, runner.launch(plan)))
        if pending and (plan is None or len(pending) > depth):
            plan, result = pending.pop(0)
            for (branch, wanted), token in zip(scheduler.collect(plan.step), result.token_ids, strict=True):
                if wanted:
                    branch.token_ids.append(token)
                    branch.steering.outputs += 1
                    if branch.steering.outputs == branch.steering.length:
                        scheduler.finish(branch)
                        alive.remove(branch)
                        finished.append(branch)
        scheduler.check_integrity()
        if turn >= 1200 and not alive and not pending:
            break
    assert not alive
    assert len(finished) > 50
    for branch in finished:
        start = branch.num_prompt_tokens
        seed_part = branch.request.sampling.seed * 7 + branch.index * 31
        expected = [1000 + (seed_part + p * 13) % 97 for p in range(start, start + branch.steering.length)]
        assert branch.output_ids == expected
    scheduler.kv.clear_cache()
    assert scheduler.kv.num_available == pages
