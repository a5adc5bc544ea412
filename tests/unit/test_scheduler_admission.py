"""What admission expects of lengths and of the memory of a batch."""

from __future__ import annotations

import itertools
import math
import random
from math import inf

import pytest
from fakes import FreeRun, make_request

from thinkfold.fold.estimate import FoldShape
from thinkfold.fold.planner import FoldPlanner
from thinkfold.kv.pages import PageClass
from thinkfold.scheduler.admission import Admission, Life, _exceeds, entries_to_come
from thinkfold.scheduler.branch import Branch, BranchStatus
from thinkfold.scheduler.forecast import LengthForecast
from thinkfold.types import FoldMode, FoldPolicy, FoldProfile, Phase, ThinkingPolicy

PAGE = 16
NUMBERS = FoldProfile(max_segment_tokens=512, min_segment_tokens=128, fold_delay=64, keep_raw_tokens=128, entries=32)


def forecast(*ends, running=()):
    made = LengthForecast()
    for end in ends[:-1]:
        made.end(end, [])
    made.end(ends[-1], running)
    return made


def test_the_curve_is_kaplan_and_meiers():
    # ends 10, 20, 30, 40 and one running at 25: S = 4/5, 3/5, then 2 at risk: 3/10, 0
    made = forecast(10, 20, 30, 40, running=[25])
    tail = lambda share: (share * 4 + 1) / 5  # noqa: E731
    for tokens, share in ((9, 1.0), (10, 0.8), (15, 0.8), (20, 0.6), (29, 0.6), (30, 0.3), (40, 0.0)):
        assert made.survival(tokens, 0) == pytest.approx(tail(share)), tokens
    assert made.survival(30, 20) == pytest.approx(tail(0.3) / tail(0.6))
    assert [made.quantile(q) for q in (0.1, 0.2, 0.4, 0.7, 0.9)] == [10, 10, 20, 30, 40]
    assert made.quantile(0.5, 20) == 30  # of those that reach 20, half are gone at 30


def test_nobody_is_expected_far_beyond_the_longest_and_less_so_the_more_have_ended():
    few, many = forecast(10), forecast(*[10] * 39)
    assert few.last(0) == 50 and many.last(0) == pytest.approx(12)
    assert few.survival(49, 0) == 0.5 and few.survival(50, 0) == 0.0
    assert few.last(100) == 500, "one that has come further is its own measure"


def test_censoring_raises_the_estimate():
    ends = list(range(100, 200, 10))
    alone, beside = forecast(*ends), forecast(*ends, running=[150] * 10)
    assert all(beside.survival(t, 0) >= alone.survival(t, 0) for t in range(0, 300, 5))
    assert beside.survival(160, 0) > alone.survival(160, 0)
    assert beside.quantile(0.5) > alone.quantile(0.5)
    cut = LengthForecast()
    for end in ends:
        cut.end(end, [], cut=True)
    assert not cut.known and cut.survival(10_000, 0) == 1.0 and cut.last(0) == inf


def test_only_the_last_ends_are_remembered():
    made = forecast(*[5000] * 10, *[100] * 600)
    assert made.survival(200, 0) == 0.0


def branch(number, output=0, *, policy=None, budget=1000, max_tokens=4000, prompt=100, phase=Phase.THINKING):
    thinking = ThinkingPolicy(True, budget, "default")
    request = make_request(str(number), range(prompt), max_tokens=max_tokens, thinking=thinking, phase=phase)
    steering = FreeRun(10_000, outputs=output, phase=phase)
    planner = FoldPlanner(policy, PAGE, prompt, numbers=NUMBERS) if policy else None
    made = Branch(request, 0, number, steering, [0] * (prompt + output), folding=planner)
    if output:
        made.slot, made.status = number, BranchStatus.RUNNING
        made.table.kv_len = made.num_computed_tokens = prompt + output
    return made


def usage(*branches):
    held = sum(-(-b.table.kv_len // PAGE) for b in branches)
    return {**dict.fromkeys(PageClass, 0), PageClass.THINKING: held}


def most_admitted(admission, **kwargs):
    """Branches that start one after the other until one is refused."""
    running = []
    for number in range(1, 200):
        candidate = branch(number, **kwargs)
        if not admission.admits(candidate, running, usage(*running)):
            break
        running.append(branch(number, 1, **kwargs))
    return len(running)


def test_a_cold_start_counts_on_the_budget():
    assert most_admitted(Admission(4 * 1100 + 200, PAGE), budget=1000) == 4
    assert most_admitted(Admission(4 * 1100 + 200, PAGE), budget=2000) == 2
    assert most_admitted(Admission(4 * 1100 + 200, PAGE), budget=None, max_tokens=4400) == 1


def test_a_model_that_opens_its_thinking_itself_is_counted_as_a_thinker():
    admission, running = Admission(4 * 1100 + 200, PAGE), [branch(n, 1) for n in range(1, 4)]
    admission._answers[""].end(10, [])
    silent = branch(9, phase=Phase.ANSWER)
    assert admission.admits(silent, running, usage(*running))
    assert not admission.admits(branch(10, phase=Phase.ANSWER), [*running, branch(9, 1, phase=Phase.ANSWER)], usage())
    talking = branch(9, 8, phase=Phase.ANSWER)  # it has not opened any: it answers
    assert admission.admits(branch(11, phase=Phase.ANSWER), [*running, talking], usage())


def test_what_running_branches_have_yet_to_compute_is_counted():
    admission = Admission(4 * 1100 + 200, PAGE)
    running = [branch(n, 1, prompt=600, max_tokens=500, budget=500) for n in range(1, 5)]
    for each in running:  # their prompts have only begun, or they come back after a preemption
        each.table.kv_len = each.num_computed_tokens = 16
    assert admission.admits(branch(9, prompt=600, max_tokens=500, budget=500), running[:3], usage(*running[:3]))
    assert not admission.admits(branch(9, prompt=600, max_tokens=500, budget=500), running, usage(*running))


def test_what_an_eager_branch_folds_on_its_way_back_needs_no_pages():
    eager = branch(1, 8000, policy=FoldPolicy(FoldMode.EAGER, entries=32))
    assert 100 + 8000 * 32 / 512 < entries_to_come(eager) < 100 + 8000 * 32 / 128 + 1000
    assert entries_to_come(branch(1, 8000, policy=FoldPolicy(FoldMode.PRESSURE, entries=32))) == 8100
    assert entries_to_come(branch(1, 8000)) == 8100
    assert entries_to_come(branch(1, 40, policy=FoldPolicy(FoldMode.EAGER, entries=32))) == 140


def test_the_first_branch_always_starts():
    assert Admission(16, PAGE).admits(branch(1, budget=100_000), [], usage())


def test_what_has_ended_replaces_the_budget():
    admission = Admission(4 * 1100 + 200, PAGE)
    for _ in range(60):
        done = branch(0, 310)
        done.steering.answer_start, done.steering.phase = 300, Phase.ANSWER
        admission.learn(done, [])
    assert most_admitted(admission, budget=1000) == 10  # of 100 + 300 tokens and a page each


def test_running_ones_that_go_on_for_longer_hold_newcomers_back():
    admission = Admission(6000, PAGE)
    for _ in range(60):
        done = branch(0, 310)
        done.steering.answer_start, done.steering.phase = 300, Phase.ANSWER
        admission.learn(done, [])
    young = [branch(n, 50) for n in range(1, 10)]
    old = [branch(n, 500) for n in range(1, 10)]
    assert admission.admits(branch(20), young, usage(*young))
    assert not admission.admits(branch(21), old, usage(*old))


def life(entries, thought, *, numbers=None, answering=False, answered=0, limit=5000, budget=inf, fixed=100):
    return Life(entries, fixed, thought, answered, answering, limit, budget, (10,), numbers)


def test_raw_entries_grow_by_one_a_token():
    assert life(700, 600).entries_in(50, FoldShape(256)) == (750, 0.0)


def test_folded_entries_are_the_prompt_the_tail_and_the_summaries():
    shape, folding = FoldShape(256), life(100 + 4000, 4000, numbers=NUMBERS)
    mean, variance = folding.entries_in(0, shape)
    tail = 128 + 0.6 * 256
    assert mean == pytest.approx(100 + tail + (4000 - tail) * 32 / 256)
    assert variance > 0
    later, _ = folding.entries_in(256, shape)
    assert later - mean == pytest.approx(32), "one more segment is one more summary"
    young, none = life(150, 50, numbers=NUMBERS).entries_in(10, shape)
    assert (young, none) == (160, 0.0), "what is young is raw"
    answering = life(100 + 4000, 4000, numbers=NUMBERS, answering=True)
    assert answering.entries_in(30, shape)[0] == pytest.approx(mean + 30), "an answer is not folded"


def test_refused_folds_raise_the_peak():
    folding = life(100 + 4000, 4000, numbers=NUMBERS)
    means = [folding.entries_in(0, FoldShape(256, refused))[0] for refused in (0.0, 0.5, 1.0)]
    assert means[0] < means[1] < means[2] == pytest.approx(4100)


def test_folding_admits_several_times_as_many_unless_the_queue_is_preferred():
    capacity = 3 * 16_000
    raw = most_admitted(Admission(capacity, PAGE), budget=16_000, max_tokens=16_500)
    made = {}
    for mode in (FoldMode.PRESSURE, FoldMode.EAGER):
        for prefer in ("fold", "queue"):
            policy = FoldPolicy(mode, entries=32, prefer=prefer)
            admission = Admission(capacity, PAGE)
            made[mode, prefer] = most_admitted(admission, budget=16_000, max_tokens=16_500, policy=policy)
    assert raw == 2
    assert made[FoldMode.PRESSURE, "queue"] == made[FoldMode.EAGER, "queue"] == raw
    assert made[FoldMode.PRESSURE, "fold"] == made[FoldMode.EAGER, "fold"] >= 5 * raw


def test_siblings_of_one_request_are_counted_with_it():
    admission, running = Admission(4 * 1100 + 200, PAGE), [branch(1, 1)]
    trunk = branch(2)
    assert admission.admits(trunk, running, usage(*running))
    trunk.children = [branch(n) for n in range(3, 7)]
    for child in trunk.children:
        child.status = BranchStatus.BEHIND_TRUNK
    assert not admission.admits(trunk, running, usage(*running))


def test_a_shared_prefix_is_counted_once():
    running = [branch(n, 1, prompt=1600, budget=100) for n in range(1, 6)]
    admission = Admission(1600 + 1700 + 6 * 150, PAGE)
    apart, together = usage(*running), {**usage(), PageClass.PROMPT: 100, PageClass.THINKING: 5}
    assert not admission.admits(branch(9, prompt=1600, budget=100), running, apart)
    assert admission.admits(branch(10, prompt=1600, budget=100), running, together)


def test_a_refused_branch_is_looked_at_again_when_the_batch_has_changed_or_time_has_passed():
    admission, waiting, running = Admission(2000, PAGE), branch(2), [branch(1, 10)]
    assert not admission.admits(waiting, running, usage(*running))
    older = [branch(1, 900)]  # it ends in 100 tokens at most
    answers = [admission.admits(waiting, older, usage(*older)) for _ in range(100)]
    assert (answers[0], answers[-1]) == (False, True)
    assert not admission.admits(waiting, running, usage(*running))
    assert admission.admits(branch(3), older, usage(*older)), "another one need not wait"
    assert not admission.admits(waiting, running, usage(*running))
    done = branch(0, 60)
    done.steering.answer_start, done.steering.phase = 50, Phase.ANSWER
    admission.learn(done, running)
    assert admission.admits(waiting, older, usage(*older)), "an end is news"


def test_spans_seen_take_the_place_of_the_profiles_middle():
    admission, policy = Admission(10_000, PAGE), FoldPolicy(FoldMode.EAGER, entries=32)
    done = branch(0, 4000, policy=policy)
    done.folding.observe(list(range(160, 3200, 160)), None)
    for span in list(done.folding.spans[:-2]):
        done.folding.remove(span)
    done.folding.give_up(done.folding.spans[0])
    admission.learn(done, [])
    shape = admission._shape([branch(1, 10, policy=policy)])
    assert 160 <= shape.span < 200
    assert shape.refused == pytest.approx(1 / 18, rel=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_few_raw_branches_are_reckoned_with_exactly(seed):
    rng = random.Random(seed)
    terms = sorted(((rng.random(), rng.uniform(1, 30)) for _ in range(7)), key=lambda term: -term[1])
    for room in (-1.0, 0.0, 20.0, 60.0, 1000.0):
        want = 0.0
        for there in itertools.product((False, True), repeat=7):
            if sum(entries for (_, entries), is_there in zip(terms, there, strict=True) if is_there) > room:
                want += math.prod(p if is_there else 1 - p for (p, _), is_there in zip(terms, there, strict=True))
        assert _exceeds(terms, room) == pytest.approx(want)


def test_more_risk_admits_more():
    known = LengthForecast()
    for tokens in range(1000, 9000, 80):
        known.end(tokens, ())
    admitted = {}
    for risk in (0.001, 0.02, 0.1, 0.5):
        admission = Admission(24_000, PAGE, risk)
        admission._thinking[""] = known
        running = [branch(1, 100, budget=16_000, max_tokens=16_500)]
        while len(running) < 30:
            if not admission.admits(branch(99, budget=16_000, max_tokens=16_500), running, usage(*running)):
                break
            running.append(branch(1 + len(running), 1, budget=16_000, max_tokens=16_500))
        admitted[risk] = len(running)
    assert list(admitted.values()) == sorted(admitted.values()) and admitted[0.5] > admitted[0.001]


def test_a_tier_without_answers_borrows_the_longest_of_the_others():
    admission = Admission(24_000, PAGE)
    assert admission.answer_tokens("a", 0.9) is None
    for tier, tokens in (("a", 100), ("b", 300)):
        for _ in range(20):
            admission._answers[tier].end(tokens, ())
    assert [admission.answer_tokens(tier, 0.9) for tier in ("a", "b", "c")] == [100, 300, 300]
