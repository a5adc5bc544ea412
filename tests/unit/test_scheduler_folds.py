"""Folding in the scheduler: what is drawn is a function of what is visible, so a wrong fold changes the tokens."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from fakes import FreeRun, TokenFunction, make_request, run_scheduler

from thinkfold.fold.planner import FoldPlanner
from thinkfold.kv.manager import KVManager
from thinkfold.scheduler.branch import Branch, BranchStatus
from thinkfold.scheduler.scheduler import Scheduler
from thinkfold.types import AtAnswer, FoldMode, FoldPolicy, FoldProfile, Phase

PAGE, HEADS = 4, 2
NUMBERS = FoldProfile(max_segment_tokens=24, min_segment_tokens=8, fold_delay=6, keep_raw_tokens=8, entries=4)
SEGMENT = 14


class Thinker(FreeRun):
    """Thinks in segments of SEGMENT tokens, then answers for `answer` tokens."""

    answer = 0

    @property
    def thinking(self) -> int:
        return self.length - self.answer

    @property
    def segment_ends(self):
        thought = min(self.outputs, self.thinking)
        ends = list(range(SEGMENT, thought + 1, SEGMENT))
        return [*ends, thought] if self.outputs >= self.thinking and thought not in ends else ends

    @segment_ends.setter
    def segment_ends(self, value):
        assert value == []

    @property
    def answer_start(self):
        return self.thinking if self.outputs >= self.thinking and self.answer else None

    @answer_start.setter
    def answer_start(self, value):
        assert value is None


class Reader(TokenFunction):
    """Draws a hash of the raw entries that the row can see; counts the work it is given."""

    def __init__(self, fold_error: float = 0.0) -> None:
        super().__init__(lambda sample: 0)
        self.fold_error = fold_error
        self.did: Counter[str] = Counter()

    def launch(self, plan):
        for name in ("prepares", "commits", "dropped", "swap_out", "swap_in", "queries_out", "queries_in"):
            self.did[name] += len(getattr(plan.memory, name))
        return super().launch(plan)

    def check(self, row, sample, context):
        assert len(context) <= sample.position

    def draw(self, sample, context):
        return hash((tuple(context), sample.position)) % 1000 + 7


def thinker(number, length, *, answer=0, prompt=range(5), policy=FoldMode.EAGER, **fold):
    request = make_request(str(number), [1000 * number + t for t in prompt], max_tokens=length, phase=Phase.THINKING)
    steering = Thinker(length, phase=Phase.THINKING)
    steering.answer = answer
    policy = FoldPolicy(policy, **{"entries": NUMBERS.entries, **fold})
    planner = FoldPlanner(policy, PAGE, len(prompt), numbers=NUMBERS)
    return Branch(request, 0, number, steering, list(request.prompt_token_ids), folding=planner)


def make(num_pages=400, *, host_pages=0, seqs=8, budget=64, page_blocks=0):
    """With `page_blocks` summaries are kept in fewer bits."""
    kv = KVManager(
        num_pages,
        PAGE,
        enable_prefix_caching=True,
        num_heads=HEADS,
        page_blocks=page_blocks,
        reserve_pages=2,
        host_pages=host_pages,
    )
    counts = lambda entries, tokens: [min(entries, tokens)] * HEADS  # noqa: E731
    return Scheduler(kv, max_num_seqs=seqs, max_num_batched_tokens=budget, fold_counts=counts)


def run(scheduler, branches, *, depth=0, runner=None, limit=4000):
    runner = runner or Reader()
    for branch in branches:
        scheduler.add([branch])
    run_scheduler(scheduler, runner, branches, depth=depth, limit=limit)
    assert scheduler.kv.host_usage() == 0
    used = sum(n for c, n in scheduler.kv.usage().items() if c != "cached")
    assert used == 0, "pages are left behind"
    return {b.order: b.output_ids for b in branches}, runner


def alone(number, length, **kwargs):
    outputs, _ = run(make(), [thinker(number, length, **kwargs)])
    return outputs[number]


LENGTHS = [60, 100, 33, 80, 90]


def test_an_eager_branch_comes_back_into_the_room_that_its_folds_leave():
    first, back = thinker(0, 30), thinker(1, 100)
    raw = thinker(2, 100, policy=FoldMode.PRESSURE)
    for each in (back, raw):  # as after a preemption
        each.steering.outputs, each.token_ids = 90, each.token_ids + [7] * 90
    scheduler = make(22)
    for each in (first, back, raw):
        scheduler.add([each])
    scheduler.plan()
    assert scheduler.running == [first, back] and list(scheduler.waiting) == [raw]


@pytest.mark.parametrize("depth", [0, 1])
def test_an_eager_branch_folds_alike_alone_and_in_company(depth):
    branches = [thinker(i, n) for i, n in enumerate(LENGTHS)]
    scheduler = make()
    outputs, runner = run(scheduler, branches, depth=depth)
    assert outputs == {i: alone(i, n) for i, n in enumerate(LENGTHS)}
    assert runner.did["commits"] == scheduler.folds.totals["folds"] > 10
    unfolded, _ = run(make(), [thinker(1, 100, policy=FoldMode.OFF)])
    assert unfolded[1] != outputs[1], "folding is seen in the tokens"


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("pages", [20, 26, 40])
@pytest.mark.parametrize("host_pages", [0, 12, 200])
def test_eager_tokens_do_not_depend_on_preemption_or_swaps(depth, pages, host_pages):
    branches = [thinker(i, n) for i, n in enumerate(LENGTHS)]
    scheduler = make(pages, host_pages=host_pages, seqs=5)
    outputs, runner = run(scheduler, branches, depth=depth)
    assert outputs == {i: alone(i, n) for i, n in enumerate(LENGTHS)}
    assert runner.did["queries_out"] == runner.did["queries_in"]
    if pages == 20:
        assert scheduler.num_preemptions > 0
        assert (scheduler.pressure["swap"] > 0) == (host_pages > 0)


@pytest.mark.parametrize("depth", [0, 1])
def test_pressure_folds_instead_of_preempting(depth):
    raw = make(56, seqs=5)
    run(raw, [thinker(i, n, policy=FoldMode.OFF) for i, n in enumerate(LENGTHS)], depth=depth)
    assert raw.num_preemptions > 0
    folded = make(56, seqs=5)
    run(folded, [thinker(i, n, policy=FoldMode.PRESSURE) for i, n in enumerate(LENGTHS)], depth=depth)
    assert folded.num_preemptions == 0
    assert folded.pressure["fold"] == folded.folds.totals["folds"] > 0
    told = [(branch.order, fold.start) for branch, fold in folded.folds.done]
    assert len(told) == len(set(told)) == folded.folds.totals["folds"], "each fold is told once, in whatever order"


QUANTISED = 3 * HEADS  # blocks of a page


@pytest.mark.parametrize("depth", [0, 1])
def test_pressure_quantises_before_it_folds(depth):
    """Each span is quantised first and folded later, if at all; folded at once only where even that finds no room."""
    folded, counts = {}, {}
    for pages in (56, 36):
        scheduler = make(pages, seqs=5, page_blocks=QUANTISED)
        branches = [thinker(i, n, policy=FoldMode.PRESSURE) for i, n in enumerate(LENGTHS)]
        _, runner = run(scheduler, branches, depth=depth)
        totals, told = scheduler.folds.totals, {}
        for branch, fold in scheduler.folds.done:
            assert not fold.refused
            told.setdefault((branch.order, fold.start), []).append(fold)
        kinds = [[fold.quantised for fold in news] for news in told.values()]
        assert all(kind in ([True], [True, False], [False]) for kind in kinds)
        assert kinds.count([False]) <= (2 if pages == 36 else 0)
        for fold in itertools.chain.from_iterable(told.values()):
            assert fold.entries == (fold.end - fold.start if fold.quantised else NUMBERS.entries)
        assert runner.did["commits"] == totals["quantised"] + totals["folds"]
        folded[pages], counts[pages] = totals["folds"], dict(scheduler.pressure)
        assert scheduler.pressure["quantise"] >= totals["quantised"] > 0
        assert scheduler.pressure["fold"] >= totals["folds"]
    assert folded[56] == 0 < folded[36] and "preempt" not in counts[56]


def test_a_quantised_span_that_the_gate_would_not_fold_stays_so_and_is_not_asked_again():
    class Strict(Reader):
        def launch(self, plan):
            result = super().launch(plan)
            bad = {p.fold_id for p in plan.memory.prepares if not p.whole}
            result.fold_errors = [(i, 0.5 if i in bad else 0.01) for i, _ in result.fold_errors]
            return result

    scheduler = make(36, seqs=5, page_blocks=QUANTISED)
    branches = [thinker(i, n, policy=FoldMode.PRESSURE, gate=0.2) for i, n in enumerate(LENGTHS)]
    run(scheduler, branches, runner=Strict())
    totals = scheduler.folds.totals
    assert totals["quantised"] > 0 and totals["folds"] == scheduler.pressure["fold_forced"] and totals["refused"] > 0
    told = [(branch.order, fold.start, fold.refused) for branch, fold in scheduler.folds.done]
    assert len(told) == len(set(told))


def test_where_there_is_no_room_to_quantise_a_span_is_folded_at_once():
    scheduler = make(14, seqs=1, page_blocks=QUANTISED)
    scheduler.folds._kv.has_room = lambda counts: False
    branch = thinker(0, 80, policy=FoldMode.PRESSURE)
    run(scheduler, [branch])
    assert scheduler.folds.totals["folds"] > 0 == scheduler.folds.totals["quantised"]


@pytest.mark.parametrize("depth", [0, 1])
def test_an_eager_branch_folds_raw_spans_whatever_their_storage(depth):
    scheduler = make(page_blocks=QUANTISED)
    outputs, _ = run(scheduler, [thinker(i, n) for i, n in enumerate(LENGTHS)], depth=depth)
    assert outputs == {i: alone(i, n) for i, n in enumerate(LENGTHS)}
    assert scheduler.folds.totals["quantised"] == 0 < scheduler.folds.totals["folds"]


def test_folds_out_of_order_are_each_told():
    scheduler, runner, branch = make(), Reader(), thinker(0, 100, policy=FoldMode.PRESSURE)
    scheduler.add([branch])
    for _ in range(90):
        if branch.steering.outputs > 60 and not scheduler.folds.pressing:
            scheduler.folds.press([branch], {})
        plan = scheduler.plan()
        result = runner.launch(plan)
        for fold_id, error in result.fold_errors:
            scheduler.folds.judge(fold_id, error)
        for (owner, _), token in zip(scheduler.collect(plan.step), result.token_ids, strict=True):
            owner.token_ids.append(token)
            owner.steering.outputs += 1
    starts = [fold.start for _, fold in scheduler.folds.done]
    assert starts != sorted(starts), "the largest gain comes first"
    assert len(starts) == len(set(starts)) == scheduler.folds.totals["folds"] > 2


def test_pressure_with_ample_memory_folds_nothing():
    scheduler = make()
    outputs, _ = run(scheduler, [thinker(0, 100, policy=FoldMode.PRESSURE)])
    assert outputs[0] == alone(0, 100, policy=FoldMode.OFF)
    assert not scheduler.folds.totals


def test_the_gate_keeps_a_bad_fold_raw_and_says_so():
    scheduler = make()
    outputs, runner = run(scheduler, [thinker(0, 100, gate=0.2)], runner=Reader(fold_error=0.5))
    assert outputs[0] == alone(0, 100, policy=FoldMode.OFF)
    assert runner.did["commits"] == 0 and scheduler.folds.totals["refused"] == runner.did["dropped"] > 3
    assert all(fold.refused and fold.error == 0.5 for _, fold in scheduler.folds.done)


def test_a_lone_branch_folds_what_was_refused_before_it_gives_up():
    scheduler = make(18)
    branch = thinker(0, 100, policy=FoldMode.PRESSURE, gate=0.2)
    run(scheduler, [branch], runner=Reader(fold_error=0.5))
    assert len(branch.output_ids) == 100 and scheduler.pressure["fold_forced"] > 0
    assert {fold.refused for _, fold in scheduler.folds.done} == {True, False}, "a fold after a refusal is told, too"


def test_a_lone_branch_that_cannot_go_on_ends_with_an_error():
    scheduler, runner = make(14), Reader()
    branch = thinker(0, 100, policy=FoldMode.OFF)
    scheduler.add([branch])
    for _ in range(200):
        plan = scheduler.plan()
        if plan is None:
            break
        result = runner.launch(plan)
        for (owner, _), token in zip(scheduler.collect(plan.step), result.token_ids, strict=True):
            owner.token_ids.append(token)
            owner.steering.outputs += 1
    assert scheduler.ended[0] is branch and "14 pages" in str(branch.error)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("at_answer", list(AtAnswer))
@pytest.mark.parametrize("policy", [FoldMode.OFF, FoldMode.EAGER])
def test_raw_thinking_leaves_when_the_answer_starts(depth, at_answer, policy):
    scheduler = make(host_pages=100)
    branch = thinker(0, 100, answer=30, policy=policy, at_answer=at_answer)
    outputs, runner = run(scheduler, [branch], depth=depth)
    assert outputs[0] == alone_with_host(branch, at_answer, policy)
    context = len(runner.contexts[-1])
    spans = 70 // PAGE * PAGE  # thinking that ended in whole pages, more or less
    if policy is FoldMode.OFF and at_answer is AtAnswer.KEEP:
        assert context == 104
    else:
        assert context <= 104 - spans + 2 * SEGMENT + 2 * PAGE
    assert (runner.did["swap_out"] > 0) == (at_answer is AtAnswer.SWAP and policy is FoldMode.OFF)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("at_answer", [AtAnswer.RECYCLE, AtAnswer.SWAP])
def test_under_pressure_thinking_stays_at_the_answer_while_memory_is_ample(depth, at_answer):
    scheduler = make(host_pages=100)
    branch = thinker(0, 100, answer=30, policy=FoldMode.PRESSURE, at_answer=at_answer)
    outputs, runner = run(scheduler, [branch], depth=depth)
    assert outputs[0] == alone(0, 100, answer=30, policy=FoldMode.OFF)
    assert not (scheduler.folds.totals or runner.did["swap_out"])


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("host_pages", [6, 100])
def test_short_memory_swaps_the_thinking_of_answers_before_anybody_is_folded_or_forced_out(depth, host_pages):
    """With too small a host their thinking is folded instead."""
    scheduler = make(44, host_pages=host_pages)
    branches = [
        thinker(i, 100, answer=60, policy=FoldMode.PRESSURE, at_answer=AtAnswer.SWAP, prefer="queue") for i in range(2)
    ]
    _, runner = run(scheduler, branches, depth=depth)
    if host_pages == 100:
        assert scheduler.pressure["offload"] == scheduler.folds.totals["offloads"] == 2
        assert runner.did["swap_out"] == sum(b.swapped_pages for b in branches) > 10
        assert scheduler.folds.totals["folds"] == 0
    else:
        assert scheduler.folds.totals["folds"] > 0
    assert scheduler.num_preemptions == 0


def alone_with_host(branch, at_answer, policy):
    twin = thinker(branch.order, 100, answer=30, policy=policy, at_answer=at_answer)
    outputs, _ = run(make(host_pages=100), [twin])
    return outputs[branch.order]


@pytest.mark.parametrize("page_blocks", [0, QUANTISED])
@pytest.mark.parametrize("depth", [0, 1])
def test_aborts_at_any_moment_return_everything(depth, page_blocks):
    rng = random.Random(depth)
    for trial in range(60):
        scheduler, runner = make(30, host_pages=rng.choice([0, 20]), page_blocks=page_blocks), Reader()
        branches = [thinker(i, n, policy=rng.choice(list(FoldMode))) for i, n in enumerate(LENGTHS)]
        for branch in branches:
            scheduler.add([branch])
        pending = []
        for _ in range(rng.randrange(5, 150)):
            plan = scheduler.plan()
            if plan is not None:
                pending.append((plan, runner.launch(plan)))
            if pending and (plan is None or len(pending) > depth):
                step, result = pending.pop(0)
                for fold_id, error in result.fold_errors:
                    scheduler.folds.judge(fold_id, error)
                for (owner, wanted), token in zip(scheduler.collect(step.step), result.token_ids, strict=True):
                    if wanted:
                        owner.token_ids.append(token)
                        owner.steering.outputs += 1
                        if owner.steering.outputs >= owner.steering.length:
                            scheduler.finish(owner)
            scheduler.check_integrity()
        for branch in branches:
            if branch.status is not BranchStatus.FINISHED:
                scheduler.finish(branch)
        for step, _ in pending:
            scheduler.collect(step.step)
        scheduler.check_integrity()
        assert sum(n for c, n in scheduler.kv.usage().items() if c != "cached") == 0, trial
        assert scheduler.kv.host_usage() == 0, trial
