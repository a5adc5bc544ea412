"""Tiers share the engine: turns by weight with ageing, and KV quotas that are never exceeded. No torch."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from fakes import FreeRun, TokenFunction, make_request

from thinkfold.errors import ParameterError
from thinkfold.kv.manager import KVManager
from thinkfold.scheduler import tiers
from thinkfold.scheduler.admission import Admission
from thinkfold.scheduler.branch import Branch, BranchStatus
from thinkfold.scheduler.scheduler import Scheduler
from thinkfold.types import Service, Tier

PAGE = 4


class Race:
    """A scheduler whose branches run to their ends; looks at quotas after every plan."""

    def __init__(self, *, num_pages=400, max_num_seqs=4, budget=64, host_pages=0, admission=False, depth=0):
        self.kv = KVManager(num_pages, PAGE, enable_prefix_caching=True, host_pages=host_pages)
        predicted = Admission(num_pages * PAGE, PAGE) if admission else None
        self.scheduler = Scheduler(
            self.kv, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, admission=predicted
        )
        self.runner = TokenFunction(lambda sample: 1000 + (sample.seed * 7 + sample.position * 13) % 97)
        self.depth, self.pending, self.count, self.steps = depth, [], 0, 0
        self.tiers: dict[str, Tier] = {}
        self.ended: list[Branch] = []

    def add(self, tier: Tier, prompt: int = 4, length: int = 20, n: int = 1) -> list[Branch]:
        self.tiers[tier.name] = tier
        ids = tuple(range(self.count * 50, self.count * 50 + prompt))
        request = make_request(f"r{self.count}", ids, max_tokens=length, seed=self.count, n=n)
        request = replace(request, service=Service(tier))
        made = [Branch(request, i, self.count * 100 + i, FreeRun(length), list(ids)) for i in range(n)]
        self.count += 1
        self.scheduler.add(made)
        return made

    def step(self) -> bool:
        plan = self.scheduler.plan()
        self.steps += 1
        for name, tier in self.tiers.items():
            quota = tier.quota(self.kv.num_pages)
            assert quota is None or self.scheduler.tiers.held(name) <= quota, f"{name} exceeds its quota"
        if plan is not None:
            self.pending.append((plan, self.runner.launch(plan)))
        if not self.pending:
            return False
        if plan is None or len(self.pending) > self.depth:
            done, result = self.pending.pop(0)
            for (branch, wanted), token in zip(self.scheduler.collect(done.step), result.token_ids, strict=True):
                if wanted:
                    branch.token_ids.append(token)
                    branch.steering.outputs += 1
                    if branch.steering.outputs == branch.steering.length:
                        self.scheduler.finish(branch)
                        self.ended.append(branch)
        self.scheduler.check_integrity()
        return True

    def run(self, limit=20_000) -> None:
        for _ in range(limit):
            if not self.step():
                return
        raise AssertionError("not finished")

    def tokens(self, tier: str, branches: list[Branch]) -> int:
        return sum(len(b.output_ids) for b in branches if b.request.tier.name == tier)


def flood(race: Race, tier: Tier, count: int, **kwargs) -> list[Branch]:
    return [branch for _ in range(count) for branch in race.add(tier, **kwargs)]


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_work_is_shared_by_weight(weight):
    race = Race()
    branches = flood(race, Tier("a", weight=weight), 100) + flood(race, Tier("b"), 100)
    for _ in range(400):
        race.step()
    a, b = race.tokens("a", branches), race.tokens("b", branches)
    assert a / b == pytest.approx(weight, rel=0.2)


def test_a_heavy_tier_cannot_starve_a_light_one(monkeypatch):
    """The heavy tier came first, never rests and has a million times the weight: the light one still starts in time."""
    monkeypatch.setattr(tiers, "PATIENCE", 64)
    race = Race(max_num_seqs=2, num_pages=40)
    heavy = Tier("heavy", weight=1000.0)
    flood(race, heavy, 10)
    (first,) = race.add(Tier("light", weight=0.001))
    (second,) = race.add(Tier("light", weight=0.001))
    for branch in (first, second):
        waited = 0
        while branch.highest_computed == 0:
            race.step()
            waited += 1
            if waited % 8 == 0:
                race.add(heavy)
            assert waited <= 64 + 30, "ageing, and then one branch that runs to its end"
    race.run()
    assert first.status is second.status is BranchStatus.FINISHED


def test_an_idle_tier_saves_nothing_up():
    race = Race()
    worked = flood(race, Tier("a"), 60)
    for _ in range(200):
        race.step()
    more = flood(race, Tier("a"), 60) + flood(race, Tier("b"), 60)
    before = race.tokens("a", worked)
    for _ in range(200):
        race.step()
    a, b = race.tokens("a", worked + more) - before, race.tokens("b", more)
    assert a == pytest.approx(b, rel=0.25)


def test_without_tiers_first_come_is_first_served():
    race = Race(max_num_seqs=1)
    branches = flood(race, Tier(), 5)
    race.run()
    assert race.ended == branches


def test_turns_do_not_depend_on_anything_but_the_calls():
    orders = []
    for _ in range(2):
        race = Race(max_num_seqs=3, num_pages=40)
        for i in range(60):
            race.add(Tier("abc"[i % 3], weight=1.0 + i % 3), length=5 + i % 7)
        race.run()
        orders.append([b.order for b in race.ended])
    assert orders[0] == orders[1]


@pytest.mark.parametrize("host_pages", [0, 200])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("admission", [False, True])
def test_a_quota_is_never_exceeded_and_loses_nothing(host_pages, depth, admission):
    race = Race(num_pages=100, max_num_seqs=12, host_pages=host_pages, depth=depth, admission=admission)
    quick, deep = Tier("quick", kv_quota=0.2), Tier("deep", weight=2.0, kv_quota=0.5)
    rng = random.Random(7)
    branches: list[Branch] = []
    for i in range(40):
        tier = quick if i % 2 else deep
        longest = 70 if tier is quick else 180
        branches += race.add(
            tier, prompt=rng.randrange(1, 9), length=rng.randrange(5, longest), n=rng.choice((1, 1, 2))
        )
    race.run()
    assert len(race.ended) == len(branches)
    for branch in branches:
        seed, start = branch.request.sampling.seed, branch.num_prompt_tokens
        assert len(branch.output_ids) == branch.steering.length
        assert branch.output_ids == [
            1000 + (seed * 7 + p * 13) % 97 for p in range(start, start + branch.steering.length)
        ]
    race.kv.clear_cache()
    assert race.kv.num_available == 100
    assert admission or race.scheduler.pressure["quota"] > 0


def test_a_tier_at_its_quota_holds_nobody_else_up():
    race = Race(num_pages=100, max_num_seqs=8)
    small, big = Tier("small", kv_quota=0.1), Tier("big")
    stuck = flood(race, small, 10, length=36)
    (other,) = race.add(big, length=10)
    for _ in range(12):
        race.step()
    assert other.status is BranchStatus.FINISHED and any(b.status is BranchStatus.WAITING for b in stuck)
    race.run()
    assert all(b.status is BranchStatus.FINISHED for b in stuck)


def test_a_paused_branch_gives_its_tiers_quota_back_when_it_is_needed():
    race = Race(num_pages=100)
    tier = Tier("t", kv_quota=0.1)
    (paused,) = race.add(tier, length=36)
    for _ in range(20):
        race.step()
    race.scheduler.pause(paused)
    (later,) = race.add(tier, length=36)
    race.run()
    assert later.status is BranchStatus.FINISHED and race.scheduler.pressure["forget_parked"] == 1
    race.scheduler.resume(paused)
    race.run()
    assert len(paused.output_ids) == 36


@pytest.mark.parametrize("wrong", [{"weight": 0.0}, {"kv_quota": 0.0}, {"kv_quota": 1.5}, {"budget": -1}])
def test_a_wrong_tier_is_named(wrong):
    with pytest.raises(ParameterError, match=f"^{next(iter(wrong))}: "):
        Tier("t", **wrong)
