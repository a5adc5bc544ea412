"""Folds of what several branches share: written once, taken by each at its own position."""

import pytest
from fakes import run_scheduler
from test_scheduler_folds import Reader, make, thinker

from thinkfold.scheduler.branch import Branch
from thinkfold.scheduler.folding import FoldDesk
from thinkfold.scheduler.forks import share
from thinkfold.types import FoldMode

SHARED, LENGTH, BRANCHES = 60, 110, 4


class Sampler(Reader):
    """Each branch draws its own tokens, as at a temperature above 0."""

    def draw(self, sample, context):
        return (super().draw(sample, context) + 31 * sample.branch) % 1000 + 7


def trunk_of(scheduler, runner):
    """A branch that has thought SHARED tokens, all raw, and is parked."""
    trunk = thinker(0, LENGTH)
    trunk.folding.hold(10**6)
    scheduler.add([trunk])
    while len(trunk.output_ids) < SHARED:
        plan = scheduler.plan()
        (token,) = runner.launch(plan).token_ids
        ((branch, wanted),) = scheduler.collect(plan.step)
        assert wanted and branch is trunk
        trunk.token_ids.append(token)
        trunk.steering.outputs += 1
    scheduler.pause(trunk)
    return trunk


def fork(scheduler, trunk, index):
    source = thinker(0, LENGTH)
    source.steering.outputs = SHARED
    child = Branch(trunk.request, index, 1 + index, source.steering, list(trunk.token_ids))
    share(scheduler.kv, trunk, child, len(trunk.token_ids), redo=True)
    child.folding = trunk.folding.fork(len(trunk.token_ids), source.steering.segment_ends, None)
    child.folding.hold(0)
    return child


def go(indices, *, depth=0):
    """Tokens by branch, the most pages that summaries filled, the scheduler and the runner."""
    scheduler, runner = make(seqs=8), Sampler()
    trunk = trunk_of(scheduler, runner)
    children = [fork(scheduler, trunk, index) for index in indices]
    scheduler.finish(trunk)
    scheduler.waiting.extend(children)
    held, plan = [], scheduler.plan

    def watched():
        held.append(scheduler.kv.usage()["summary"])
        return plan()

    scheduler.plan = watched
    run_scheduler(scheduler, runner, children, depth=depth, limit=2000)
    assert sum(n for c, n in scheduler.kv.usage().items() if c != "cached") == 0, "pages are left behind"
    return {b.index: b.output_ids for b in children}, max(held), scheduler, runner


@pytest.mark.parametrize("depth", [0, 1])
def test_a_fold_of_a_shared_trunk_is_written_once_and_tokens_are_those_of_branches_alone(depth, monkeypatch):
    outputs, held, scheduler, runner = go(range(BRANCHES), depth=depth)
    assert len(set(map(tuple, outputs.values()))) == BRANCHES
    for index in range(BRANCHES):
        alone, _, other, _ = go([index])
        assert outputs[index] == alone[index]
        assert other.folds.totals["folds_shared"] == 0
    trunks = SHARED // 14
    totals = scheduler.folds.totals
    assert totals["folds_shared"] == trunks * (BRANCHES - 1)
    assert totals["folds"] == other.folds.totals["folds"] * BRANCHES
    assert runner.did["commits"] == totals["folds"] - totals["folds_shared"]
    monkeypatch.setattr(FoldDesk, "_known", lambda *_: None)
    unshared, apart, _, _ = go(range(BRANCHES), depth=depth)
    assert unshared == outputs
    assert held <= apart - trunks * (BRANCHES - 1), "the trunk's summary is there once"


def test_the_first_branch_may_end_before_the_others_have_taken_its_fold():
    scheduler, runner = make(seqs=1), Sampler()
    trunk = trunk_of(scheduler, runner)
    children = [fork(scheduler, trunk, index) for index in range(2)]
    scheduler.finish(trunk)
    scheduler.waiting.extend(children)
    run_scheduler(scheduler, runner, children, depth=0, limit=2000)
    assert scheduler.folds.totals["folds_shared"] == 0, "nobody was left to take it from"
    for child in children:
        assert child.output_ids == go([child.index])[0][child.index]


def test_branches_of_different_pasts_share_nothing():
    scheduler, runner = make(), Sampler()
    branches = [thinker(number, LENGTH, policy=FoldMode.EAGER) for number in range(3)]
    for branch in branches:
        scheduler.add([branch])
    run_scheduler(scheduler, runner, branches, depth=0, limit=2000)
    assert scheduler.folds.totals["folds"] > 6
    assert scheduler.folds.totals["folds_shared"] == 0
