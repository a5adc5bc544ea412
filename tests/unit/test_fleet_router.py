"""Where requests go: prefixes, conversations, sessions, spill-over, and how well it holds conversations together."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from thinkfold.config import EngineConfig
from thinkfold.deploy.fleet.config import Fleet, Pool, Replicas
from thinkfold.deploy.fleet.demand import Demand
from thinkfold.deploy.fleet.prefixes import BLOCK, KnownPrefixes
from thinkfold.deploy.fleet.recent import Recent
from thinkfold.deploy.fleet.router import ROUTERS, AffinityRouter, Ask, Place, RandomRouter
from thinkfold.engine.commands import Extend
from thinkfold.engine.samples import question_of
from thinkfold.errors import ParameterError
from thinkfold.server.tiers import ServedTier
from thinkfold.types import (
    CompletionOutput,
    Costs,
    EngineRequest,
    FinishReason,
    Phase,
    PromptState,
    RequestOutput,
    SamplingParams,
    ThinkingPolicy,
    Tier,
)

EVEN = [Place("a", 1000), Place("b", 1000)]
SYSTEM = list(range(10 * BLOCK))


def ask(ids, question="", *, namespace=(), session="", entries=100):
    return Ask(ids, namespace, question or f"q{random.getrandbits(60)}", session, entries)


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(1000, 2000), k=count)


def test_the_most_recent_stay():
    recent: Recent[str, int] = Recent(2)
    for name in "abc":
        recent.put(name, ord(name))
    assert recent.get("a") is None
    assert recent.get("b") == 98
    recent.put("d", 1)
    assert recent.get("c") is None and recent.get("b") == 98
    recent.drop_where(lambda key, _: key == "b")
    assert len(recent) == 1


def test_a_prompt_that_begins_with_an_earlier_one_goes_on_with_its_conversation():
    known = KnownPrefixes()
    first = [*SYSTEM, *tokens(1, 40)]
    known.record(known.path((), first), "a")
    known.record(known.path((), [*SYSTEM, *tokens(2, 40)]), "b")
    assert known.find(known.path((), [*first, *tokens(3, 99)])).before == "a"
    stranger = known.find(known.path((), [*SYSTEM, *tokens(4, 40)]))
    assert stranger.before is None
    assert stranger.tokens == {"a": len(SYSTEM), "b": len(SYSTEM)}
    assert known.find(known.path(("tenant=x",), first)).tokens == {}


def test_what_is_kept_of_prompts_is_bounded_salted_and_goes_with_its_replica():
    known, other = KnownPrefixes(most=8), KnownPrefixes(most=8)
    for each in (known, other):
        each.record(each.path((), SYSTEM), "a")
    assert len(known) == 8
    assert set(known.path((), SYSTEM)).isdisjoint(other.path((), SYSTEM))
    assert known.find(known.path((), SYSTEM)).tokens == {"a": 8 * BLOCK}, "the ends of long prompts are forgotten first"
    known.forget_reader("a")
    assert len(known) == 0


def test_what_binds_most_comes_first():
    router = AffinityRouter()
    talk = tokens(1, 64)
    assert router.place(ask(talk), [Place("a", 1000), Place("b", 900)]).why == "free"
    there = [Place("a", 500), Place("b", 1000)]
    assert router.place(ask([*talk, *tokens(2, 64)]), there) == router.place(ask(talk), there)
    assert router.place(ask([*talk, *tokens(3, 64)]), there).why == "conversation"
    first = router.place(ask(tokens(4, 64), session="s"), there)
    assert (first.name, first.why) == ("b", "free")
    again = router.place(ask([*talk, *tokens(5, 9)], "vote", session="s"), there)
    assert (again.name, again.why) == ("b", "session")
    assert router.place(ask(tokens(6, 9), "vote"), [Place("a", 9999), Place("b", -9999)]).why == "sibling"
    router.forget_session((), "s")
    assert router.place(ask(tokens(7, 64), session="s"), [Place("a", 2), Place("b", 1)]).name == "a"


def test_whoever_does_not_fit_spills_over_and_what_is_known_counts_as_free():
    router = AffinityRouter()
    talk = tokens(1, 160)
    assert router.place(ask(talk), [Place("a", 10)]).name == "a"
    turn = [*talk, *tokens(2, 40)]
    assert router.place(ask(turn, entries=250), [Place("a", 100), Place("b", 120)]).why == "conversation"
    spilled = router.place(ask([*turn, *tokens(3, 40)], entries=400), [Place("a", 0), Place("b", 1000)])
    assert (spilled.name, spilled.why) == ("b", "spill")
    shared = AffinityRouter()
    shared.place(ask([*SYSTEM, *tokens(4, 20)]), [Place("a", 1)])
    assert shared.place(ask([*SYSTEM, *tokens(5, 20)]), [Place("a", 900), Place("b", 1000)]).name == "a"
    assert shared.place(ask([*SYSTEM, *tokens(6, 20)]), [Place("a", 800), Place("b", 1000)]).name == "b"


def test_a_conversation_whose_replica_has_gone_goes_anywhere():
    router = AffinityRouter()
    talk = tokens(1, 64)
    home = router.place(ask(talk), EVEN).name
    router.forget_replica(home)
    left = [place for place in EVEN if place.name != home]
    assert router.place(ask([*talk, *tokens(2, 64)]), left).why == "free"
    assert router.follow((), [*talk, *tokens(2, 64)]) == left[0].name
    assert router.follow((), tokens(9, 64)) is None


def conversations(router, *, seed: int) -> float:
    """Share of later turns that go where the turn before went: 60 conversations of 2 to 8 turns, four at a time."""
    rng, hits, later = random.Random(seed), 0, 0
    system = tokens(0, 200)
    active: list[tuple[list[int], str, int]] = []
    running: list[str] = []
    for number in range(60):
        active.append(([*system, *tokens(1000 + number, rng.randint(20, 200))], "", rng.randint(2, 8)))
        while len(active) > (3 if number < 59 else 0):
            prompt, home, turns = active.pop(rng.randrange(len(active)))
            places = [Place(name, 4000 - 700 * running.count(name)) for name in ("a", "b", "c")]
            placed = router.place(ask(prompt, entries=len(prompt) + 300), places)
            running = [*running[-5:], placed.name]
            later += home != ""
            hits += home == placed.name
            if turns > 1:
                more = tokens(rng.getrandbits(40), rng.randint(40, 300))
                active.append(([*prompt, *more], placed.name, turns - 1))
    return hits / later


def test_conversations_stay_together_where_random_routing_tears_them_apart():
    shares = {name: conversations(make(), seed=7) for name, make in ROUTERS.items()}
    assert shares["affinity"] >= 0.9
    assert shares["random"] < 0.5


def test_random_routing_keeps_questions_and_sessions_together():
    router = RandomRouter(seed=1)
    names = {router.place(ask(SYSTEM, "vote"), EVEN).name for _ in range(20)}
    sessions = {router.place(ask(SYSTEM, session="s"), EVEN).name for _ in range(20)}
    assert len(names) == len(sessions) == 1
    assert {router.place(ask(SYSTEM), EVEN).name for _ in range(20)} == {"a", "b"}
    router.forget_replica("a")
    router.forget_session((), "s")
    assert router.follow((), SYSTEM) is None


@pytest.mark.parametrize(
    ("name", "question"),
    [("c-1-s0", "c-1"), ("c-1-s12", "c-1"), ("c-1-n", "c-1"), ("c-1-n0.2", "c-1"), ("c-1-p0", "c-1"), ("c-1", "c-1")],
)
def test_the_question_of_a_request(name, question):
    assert question_of(name) == question


POLICY = ThinkingPolicy(True, None, "default")


def request_of(prompt=100, n=1, max_tokens=1000) -> EngineRequest:
    sampling = SamplingParams(n=n, max_tokens=max_tokens, seed=0)
    return EngineRequest("r", tuple(range(prompt)), PromptState(Phase.THINKING, 0, prompt), sampling, POLICY)


def ended(tokens: int, peak: int, reason=FinishReason.STOP) -> RequestOutput:
    news = CompletionOutput(0, num_output_tokens=tokens, finish_reason=reason)
    return RequestOutput("r", [news], POLICY, Costs(kv_peak_entries=peak), finished=True)


def test_the_predicted_peak_is_learned():
    demand = Demand()
    assert demand.entries(demand.need(request_of(n=2))) == 2100, "all that it may write, while nothing is known"
    some = replace(request_of(), thinking=ThinkingPolicy(True, 300, "default", answer_reserve=100))
    assert demand.entries(demand.need(some)) == 500, "what it may think, and an answer"
    for _ in range(40):
        need = demand.need(request_of())
        demand.progress(need, ended(400, 300))
        demand.learn(need, ended(400, 300), [])
    need = demand.need(request_of())
    assert 300 <= demand.entries(need) <= 304, "400 tokens, half of them folded at the peak"
    demand.progress(need, ended(500, 0))
    assert demand.entries(need) > 500, "it has outlived all that are known"
    assert demand.entries(demand.need(Extend(call=0, request_id="e", handle="h", namespace=()))) <= 202


def test_who_was_cut_off_teaches_nothing():
    demand = Demand()
    for reason in (FinishReason.ABORT, FinishReason.ERROR):
        need = demand.need(request_of())
        demand.progress(need, ended(10, 110))
        demand.learn(need, ended(10, 110, reason), [])
    assert demand.entries(demand.need(request_of())) == 1100


def pool(name: str, **engine) -> Pool:
    return Pool(ServedTier(Tier(name, budget=9)), EngineConfig(**engine))


def test_a_fleet_says_what_is_wrong_with_it():
    with pytest.raises(ParameterError, match="none of one"):
        Fleet({"one": pool("one")}, "two")
    with pytest.raises(ParameterError, match=r"pools\.two\.engine\.fold_policy"):
        Fleet({"one": pool("one"), "two": pool("two", fold_policy="eager")}, "one")
    with pytest.raises(ParameterError, match=r"replicas\.max"):
        Replicas(3, 2)
    with pytest.raises(ParameterError, match="name"):
        Fleet({"one": pool("one")}, "one", name="a/b")
    assert list(Fleet({"one": pool("one", max_num_seqs=4), "two": pool("two")}, "one").tiers().tiers) == ["one", "two"]
