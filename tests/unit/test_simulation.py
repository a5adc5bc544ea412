"""The simulator: the real scheduler under more work than its pool can carry. Nothing is lost, nobody starves."""

from __future__ import annotations

import dataclasses
from random import Random

import pytest
from fakes import TokenFunction, make_request, run_scheduler

from thinkfold.kv.manager import KVManager
from thinkfold.scheduler.admission import Admission
from thinkfold.scheduler.branch import Branch
from thinkfold.scheduler.scheduler import Scheduler
from thinkfold.scheduler.simulation import Simulation, StepTime, Window, Work, percentile
from thinkfold.scheduler.watch import Watch
from thinkfold.types import AtAnswer, FoldMode, FoldPolicy, FoldProfile

PAGE, HEADS = 4, 2
NUMBERS = FoldProfile(max_segment_tokens=32, min_segment_tokens=8, fold_delay=4, keep_raw_tokens=8, entries=4)
MEAN = 150


def make_work(count, *, gap=0.0, seed=0):
    rng = Random(seed)
    for i in range(count):
        thinking = int(rng.triangular(80, 230, 110))
        ends, end = [], rng.randint(10, 25)
        while end < thinking:
            ends.append(end)
            end += rng.randint(10, 25)
        yield Work(8, thinking, 4, (*ends, thinking), i * gap)


def make(*, pages=3 * MEAN // PAGE, predicted=True, slots=24, host_pages=0, batched=256, counts=None):
    kv = KVManager(pages, PAGE, enable_prefix_caching=False, num_heads=HEADS, reserve_pages=1, host_pages=host_pages)
    return Scheduler(
        kv,
        max_num_seqs=slots,
        max_num_batched_tokens=batched,
        fold_counts=counts or (lambda entries, tokens: [min(entries, tokens)] * HEADS),
        admission=Admission(kv.capacity * PAGE, PAGE) if predicted else None,
    )


def simulate(mode, work, scheduler=None, **kwargs):
    fold = FoldPolicy(mode, entries=4, **{k: kwargs.pop(k) for k in ("prefer", "at_answer", "gate") if k in kwargs})
    scheduler = scheduler or make()
    return Simulation(scheduler, work, fold=fold, numbers=NUMBERS, budget=400, max_tokens=410, **kwargs).run()


def three_times_too_much():
    """Seconds between arrivals, so that three times what raw KV of the pool can serve arrives."""
    return (MEAN - 8) * StepTime().seconds(3, 3 * MEAN) / 3 / 3


@pytest.mark.parametrize("mode", [FoldMode.PRESSURE, FoldMode.EAGER])
def test_three_times_overload_of_500_long_thinkers_loses_nothing(mode):
    gap = three_times_too_much()
    outcome = simulate(mode, make_work(500, gap=gap))
    assert (outcome.completed, outcome.failed, outcome.pages_left) == (500, 0, 0)
    assert outcome.forced_preemptions <= 5 and outcome.folds > 500  # while it still learns how long they think
    work = list(make_work(500))
    assert outcome.output_tokens == sum(w.thinking + w.answer for w in work), "no token is drawn twice"
    assert 0 <= outcome.wait_p50_s <= outcome.wait_p99_s <= outcome.wait_max_s
    assert outcome.wait_p99_s < 20 * 3 * gap * 3, f"p99 of the waits is {outcome.wait_p99_s:.2f} s"


def test_without_folds_the_same_load_waits_but_is_served_in_order_and_to_its_end():
    outcome = simulate(FoldMode.OFF, make_work(200, gap=three_times_too_much()))
    assert (outcome.completed, outcome.failed, outcome.pages_left) == (200, 0, 0)
    arrived = 200 * three_times_too_much()
    assert outcome.wait_max_s < outcome.seconds - 0.9 * arrived < 9 * arrived


def test_a_run_is_a_function_of_its_work():
    runs = [simulate(FoldMode.PRESSURE, make_work(40), clients=30) for _ in range(2)]
    assert runs[0] == runs[1]
    assert simulate(FoldMode.PRESSURE, make_work(40, seed=1), clients=30) != runs[0]


def test_folding_carries_four_times_the_sessions_and_forces_nobody_out():
    window = Window(ramp=40, completions=100)
    mode = {m: simulate(m, make_work(400), clients=30, window=window) for m in FoldMode}
    assert all(outcome.completed == 100 and outcome.pages_left == 0 for outcome in mode.values())
    assert mode[FoldMode.OFF].forced_preemptions <= 5
    for folding in (FoldMode.PRESSURE, FoldMode.EAGER):
        assert mode[folding].forced_preemptions == 0
        assert mode[folding].running_mean >= 3 * mode[FoldMode.OFF].running_mean
        assert mode[folding].output_tokens_per_s >= 2 * mode[FoldMode.OFF].output_tokens_per_s


def test_prediction_preempts_far_less_than_greed():
    window = Window(ramp=40, completions=100)
    outcomes = [
        simulate(FoldMode.OFF, make_work(400), make(predicted=predicted), clients=30, window=window)
        for predicted in (True, False)
    ]
    assert 10 * outcomes[0].forced_preemptions < outcomes[1].forced_preemptions


@pytest.mark.parametrize("mode", list(FoldMode))
@pytest.mark.parametrize("at_answer", list(AtAnswer))
@pytest.mark.parametrize("depth", [0, 1])
def test_every_policy_ends_with_an_empty_pool(mode, at_answer, depth):
    scheduler = make(host_pages=200, predicted=depth == 0)
    outcome = simulate(mode, make_work(30), scheduler, clients=20, depth=depth, at_answer=at_answer)
    assert (outcome.completed, outcome.failed, outcome.pages_left) == (30, 0, 0)


def test_refused_folds_hold_newcomers_back_instead_of_preempting():
    window = Window(ramp=40, completions=60)
    kwargs = {"clients": 30, "window": window, "gate": 0.2, "fold_error": 0.5}
    refused = simulate(FoldMode.EAGER, make_work(200), **kwargs)
    assert refused.folds == 0 and refused.completed == 60
    assert refused.running_mean < 5
    assert refused.forced_preemptions <= 10


def test_a_request_that_never_fits_fails_alone():
    work = [Work(8, 100, 4), Work(8, 900, 4), Work(8, 100, 4)]
    scheduler = make(predicted=False)
    outcome = Simulation(scheduler, work, clients=3).run()
    assert (outcome.completed, outcome.failed, outcome.pages_left) == (2, 1, 0)


def test_a_window_counts_between_its_ends_only():
    whole = simulate(FoldMode.EAGER, make_work(60), clients=20)
    part = simulate(FoldMode.EAGER, make_work(60), clients=20, window=Window(ramp=20, completions=20))
    assert (whole.completed, part.completed) == (60, 20)
    assert part.steps < whole.steps and part.output_tokens < whole.output_tokens
    assert part.pages_left == 0, "what still ran was ended"


def test_idle_time_is_skipped_and_waits_start_at_arrival():
    work = [Work(8, 50, 4, arrival=0.0), Work(8, 50, 4, arrival=1000.0)]
    outcome = Simulation(make(), work).run()
    assert (outcome.completed, outcome.wait_max_s) == (2, 0.0)
    assert outcome.steps < 200


def test_small_step_budgets_serve_all_running_branches_in_turn():
    scheduler = make(pages=400, predicted=False, batched=4)
    outcome = Simulation(scheduler, [Work(8, 0, 60) for _ in range(12)], clients=12).run()
    assert outcome.completed == 12
    scheduler = make(pages=400, predicted=False, batched=3)
    request = make_request("six", range(3), max_tokens=99, n=6)
    scheduler.add([Branch(request, i, i, _Endless(), [0] * 3) for i in range(6)])
    served = [0] * 6
    for _ in range(60):
        plan = scheduler.plan()
        assert plan is not None
        for branch, _ in scheduler.collect(plan.step):
            branch.token_ids.append(0)
            served[branch.order] += 1
    assert max(served) - min(served) <= 1, f"some wait for others to end: {served}"


class _Endless:
    """Steering of a branch that never ends."""

    phase = finish_reason = answer_start = None
    segment_ends = ()

    def injection(self):
        return ()

    def must_wait(self, inflight):
        return False

    def allowed(self):
        return None

    def ban_eos(self, inflight):
        return False


def test_pressure_makes_room_for_a_long_prompt_instead_of_letting_it_wait():
    """Running branches may fill the pool with raw pages; a newcomer that fits once they fold waits for no end."""
    work = [Work(8, 300, 4, tuple(range(20, 301, 20))), Work(160, 20, 4)]
    scheduler = make(pages=110, predicted=False, slots=2)
    late = [work[0], dataclasses.replace(work[1], arrival=280 * StepTime().seconds(1, 150))]
    outcome = simulate(FoldMode.PRESSURE, late, scheduler)
    assert outcome.completed == 2 and outcome.folds > 0
    assert outcome.wait_max_s < 15 * StepTime().step, "it waited for the first to end"


def test_the_watch_counts_raw_thinking_under_answers_as_waste():
    kept = simulate(FoldMode.OFF, [Work(8, 100, 100)], clients=1)
    assert 0.3 < kept.kv_waste_share < 0.5
    work = [Work(8, 100, 100, (25, 50, 75, 100))]
    recycled = simulate(FoldMode.EAGER, work, clients=1, at_answer=AtAnswer.RECYCLE)
    assert recycled.kv_waste_share < kept.kv_waste_share / 2


@pytest.mark.parametrize("size", [4, 16])
def test_the_watch_counts_room_that_no_entry_takes(size):
    scheduler = Scheduler(KVManager(40, size, enable_prefix_caching=False), max_num_seqs=2, max_num_batched_tokens=64)
    watch, seen, plan = Watch(scheduler), [], scheduler.plan
    request = make_request("one", range(6), max_tokens=30)
    branch = Branch(request, 0, 0, _Counted(30), list(range(6)))
    scheduler.add([branch])

    def watched():
        watch.tick(1.0)
        seen.append(branch.table.kv_len)
        return plan()

    scheduler.plan = watched
    runner = TokenFunction(lambda sample: 7)
    runner.page_size = size
    run_scheduler(scheduler, runner, [branch], depth=0, limit=500)
    held = [-(-entries // size) for entries in seen]
    assert max(seen) >= 30
    assert watch.pages_mean == pytest.approx(sum(held) / len(held))
    assert watch.kv_unused_share == pytest.approx(1 - sum(seen) / (size * sum(held)))


def test_safe_sessions_are_fewer_than_what_ran_when_one_was_forced_out():
    scheduler = make(predicted=False)
    watch = Watch(scheduler)
    runner = TokenFunction(lambda sample: 7)
    runner.page_size = PAGE
    branches = []
    for i in range(6):
        request = make_request(str(i), range(i * 100, i * 100 + 8), max_tokens=200)
        branches.append(Branch(request, 0, i, _Counted(200), list(request.prompt_token_ids)))
        scheduler.add([branches[-1]])
    plan = scheduler.plan
    scheduler.plan = lambda: (watch.tick(1.0), plan())[1]
    run_scheduler(scheduler, runner, branches, depth=0, limit=5000)
    assert watch.forced["preempt"] == scheduler.num_preemptions > 0
    assert 1 <= watch.safe_sessions < 6
    assert 1.0 <= watch.running_mean <= 6.0


class _Counted(_Endless):
    """Steering of a branch that ends after `length` tokens."""

    def __init__(self, length):
        self.length, self.outputs = length, 0

    def must_wait(self, inflight):
        return self.outputs + inflight >= self.length


def test_percentiles_are_values_that_were_seen():
    values = [float(n) for n in range(1, 101)]
    assert [percentile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1.0, 50.0, 99.0, 100.0]
    assert percentile([], 0.5) == 0.0 and percentile([3.0], 0.99) == 3.0


def test_a_simulation_that_does_not_end_says_so():
    with pytest.raises(RuntimeError, match="after 5 steps"):
        Simulation(make(), [Work(8, 50, 4)], clients=1).run(max_steps=5)


def test_units_of_many_tokens_change_the_clock_and_nothing_else():
    plain, scaled = StepTime(1.0, 0.1, 0.01), StepTime(1.0, 0.1, 0.01).scaled(64)
    assert scaled.seconds(3, 5.0) == pytest.approx(64 * plain.seconds(3, 64 * 5.0))


def test_units_keep_time_and_throughput():
    """The same requests token by token, and in units of 8 tokens with pages of 8."""
    fine = [Work(16, 160, 16) for _ in range(12)]
    coarse = [Work(2, 20, 2) for _ in range(12)]

    def run(work, page, unit):
        kv = KVManager(4 * 192 // 8, page, enable_prefix_caching=False)
        scheduler = Scheduler(kv, max_num_seqs=8, max_num_batched_tokens=4096)
        return Simulation(scheduler, work, clients=12, step_time=StepTime().scaled(unit)).run()

    one, eight = run(fine, 8, 1), run(coarse, 1, 8)
    assert one.completed == eight.completed == 12
    assert eight.seconds == pytest.approx(one.seconds, rel=0.1)
