"""The simulator against the engine's own core on the same closed loop: equal work takes as many steps."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

import pytest
from scripted import CLOSE, EOS, OPEN_PROMPT, PAGE, Engine, ScriptRunner, ids, language

from thinkfold.control.parts import PartControl
from thinkfold.engine.core import EngineCore
from thinkfold.kv.manager import KVManager
from thinkfold.scheduler.admission import Admission
from thinkfold.scheduler.scheduler import Scheduler
from thinkfold.scheduler.simulation import Simulation, Window, Work
from thinkfold.scheduler.watch import Watch
from thinkfold.types import FOLD_PROFILES, FoldMode, FoldPolicy, FoldProfile

HEADS, CLIENTS, BUDGET, MAX_TOKENS = 8, 12, 400, 420
WINDOW = Window(ramp=10, completions=30)
PAGES = 3 * 160 // PAGE


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
    monkeypatch.setitem(FOLD_PROFILES, "fine", FoldProfile(32, 8, 4, 8, 4))


def make_scheduler():
    kv = KVManager(PAGES, PAGE, enable_prefix_caching=False, num_heads=HEADS, reserve_pages=1)
    return Scheduler(
        kv,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        fold_counts=lambda entries, tokens: [min(entries, tokens)] * HEADS,
        admission=Admission(kv.capacity * PAGE, PAGE),
    )


def thinker(length):
    """Thinks `length` tokens in paragraphs of 18, says four and ends."""
    (a,), blank, (close,), (eos,) = ids("a")[-1:], ids("\n\n"), ids(CLOSE), ids(EOS)
    paragraph = [a] * (18 - len(blank)) + blank

    def token_of(sample, context, prompt_len):
        index = sample.position - prompt_len
        if index < length - 1:
            return paragraph[index % 18]
        return close if index == length - 1 else eos if index >= length + 3 else a

    return token_of


class ByPosition(ScriptRunner):
    """What is drawn hangs on the position alone, so contexts may be folded."""

    def check(self, row, sample, context):
        pass


def by_engine(policy):
    """Steps of the window on a core, and the work that was asked for, in its order."""
    _, vocabulary, family = language()
    scheduler, runner, ticks = make_scheduler(), ByPosition(), itertools.count()
    numbers = FOLD_PROFILES[policy.profile]

    def make_control(request, branch):
        lengths = {"min_segment_tokens": numbers.min_segment_tokens, "max_segment_tokens": numbers.max_segment_tokens}
        return PartControl(request, branch, vocabulary, family, **lengths)

    core = EngineCore(runner, scheduler, make_control, page_bytes=100, clock=lambda: next(ticks) * 0.25)
    engine, draw, asked = Engine(core, runner, {}, {}), Random(0), itertools.count()
    add = core.add
    core.add = lambda request: add(replace(request, fold=policy))
    watch, first = None, 0
    while sum(engine.finals.values()) < WINDOW.ramp + WINDOW.completions:
        while len(engine.core._requests) < CLIENTS:
            number = next(asked)
            runner.by_seed[number] = str(number)
            length = int(draw.triangular(80, 230, 110))
            engine.add(
                OPEN_PROMPT,
                request_id=str(number),
                token_of=thinker(length),
                budget=BUDGET,
                seed=number,
                max_tokens=MAX_TOKENS,
            )
        if watch is None and sum(engine.finals.values()) >= WINDOW.ramp:
            watch, first = Watch(scheduler), core.stats().steps
        engine.step()
        if watch is not None:
            watch.tick(1.0)
    assert watch is not None
    work = []
    for name in sorted(engine.outputs, key=int):
        output = engine.outputs[name]
        ends = tuple(segment.end for segment in output.outputs[0].segments)
        thinking = output.costs.thinking_tokens
        work.append(Work(len(ids(OPEN_PROMPT)), thinking, max(1, output.costs.answer_tokens), ends))
    return core.stats().steps - first, watch, work


@pytest.mark.parametrize("mode", list(FoldMode))
def test_it_predicts_the_steps_of_the_engine(mode):
    policy = FoldPolicy(mode, profile="fine", entries=4)
    steps, watch, work = by_engine(policy)
    budget, most = BUDGET, MAX_TOKENS
    outcome = Simulation(
        make_scheduler(), work, fold=policy, budget=budget, max_tokens=most, clients=CLIENTS, window=WINDOW
    ).run()
    assert outcome.steps == pytest.approx(steps, rel=0.05)
    assert outcome.running_mean == pytest.approx(watch.running_mean, rel=0.1)
    assert outcome.folds == pytest.approx(watch.folds, rel=0.1)
    assert (watch.folds > 60) == (mode is not FoldMode.OFF)
