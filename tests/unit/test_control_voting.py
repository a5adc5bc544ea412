"""Votes: stopping rules by the numbers, and the state machine on scripted traces."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinkfold.control.ballot import tally
from thinkfold.control.equality import Equality
from thinkfold.control.trace_confidence import TraceConfidence, percentile, window_for
from thinkfold.control.vote_stops import (
    Leaning,
    beta_probability,
    dirichlet_probability,
    is_safe_in_flight,
    leader_probability,
    settled_by,
    staying_probability,
)
from thinkfold.control.voting import (
    CancelTraces,
    Decide,
    EndTraceThinking,
    StartTraces,
    Ticked,
    TraceFailed,
    TraceFinished,
    VoteAction,
    VoteResult,
    Voting,
    WindowFilled,
)
from thinkfold.errors import ParameterError
from thinkfold.types import BestOfParams, SearchParams, VoteParams, parse_best_of, parse_search, parse_vote


def boxed(answer: str | None) -> str:
    return "I cannot tell.\nNot at all." if answer is None else f"So it is \\boxed{{{answer}}}."


def finish(voting: Voting, trace: int, answer: str | None, **fields: float) -> list[VoteAction]:
    return voting.observe(TraceFinished(trace, boxed(answer), **fields))


def result_of(actions: list[VoteAction]) -> VoteResult:
    assert isinstance(actions[-1], Decide)
    return actions[-1].result


def test_least_leading_votes_of_the_beta_rule() -> None:
    least = [next(a for a in range(1, 40) if beta_probability(a, b) >= 0.95) for b in range(7)]
    assert least == [4, 6, 8, 9, 11, 12, 14]


@pytest.mark.parametrize(("a", "b"), [(4, 0), (6, 1), (9, 3), (5, 5), (40, 20)])
def test_the_dirichlet_of_two_classes_is_the_beta(a: int, b: int) -> None:
    assert dirichlet_probability([a, b]) == pytest.approx(beta_probability(a, b), abs=1e-6)


def test_the_dirichlet_of_equal_classes_is_even() -> None:
    assert dirichlet_probability([5, 5, 5, 5]) == pytest.approx(0.25, abs=1e-6)


def test_the_dirichlet_agrees_with_drawing() -> None:
    draw = random.Random(1)
    votes = [8, 4, 3]
    wins = 0
    for _ in range(20_000):
        sample = [draw.gammavariate(v + 1, 1.0) for v in votes]
        wins += sample[0] == max(sample)
    assert dirichlet_probability(votes) == pytest.approx(wins / 20_000, abs=0.01)


def test_which_probability_is_used() -> None:
    assert leader_probability([6, 1])[1] == "beta"
    assert leader_probability([6, 2, 2])[1] == "dirichlet"
    assert leader_probability([10, 1, 1])[1] == "beta"


def test_in_flight_margin() -> None:
    # 4 finished for class 0; four running for it, unchanged for five ticks: risk 4 * .08 * 2 = .64 < 8
    assert is_safe_in_flight({0: 4.0}, [Leaning(0, 5)] * 4, 0)
    # one finished and one fresh voter: 2 > .5 * 2, but against a rival with one vote 1 > 1 fails
    assert is_safe_in_flight({0: 1.0}, [Leaning(0, 1)], 0)
    assert not is_safe_in_flight({0: 1.0, 1: 1.0}, [Leaning(0, 1)], 0)
    # a flip makes a change more likely: 2 > .6 * 2, 1 > 1.2 fails
    assert not is_safe_in_flight({0: 2.0, 1: 1.0}, [Leaning(None, 1, True), Leaning(None, 1, True)], 0)
    # voters of the challenger may leave it, which speaks for the leader
    assert is_safe_in_flight({0: 3.0}, [Leaning(1, 1), Leaning(1, 1)], 0)


def test_a_wave_stops_when_the_winner_is_likely() -> None:
    voting = Voting(VoteParams(n=16))
    assert voting.start() == [StartTraces(4)]
    assert finish(voting, 0, "7") == [] and finish(voting, 1, "7") == [] and finish(voting, 2, "8") == []
    assert finish(voting, 3, "7.0") == [StartTraces(4)]  # 3 to 1 is not enough
    found = result_of(finish(voting, 4, "14/2"))
    assert (found.rule, found.answer, found.trace) == ("likely", "7", 0)
    assert [c.count for c in found.classes] == [4, 1] and found.share == pytest.approx(4 / 5)
    assert (found.started, found.finished, found.cancelled) == (8, 5, 3)
    assert voting.observe(TraceFinished(7, boxed("9"))) == []


def test_waves_grow() -> None:
    voting = Voting(VoteParams(n=32))
    actions = voting.start()
    for trace in range(27):
        actions += finish(voting, trace, str(trace % 4))
    assert actions == [StartTraces(count) for count in (4, 4, 4, 6, 9, 5)]


@pytest.mark.parametrize(
    ("votes", "remaining"), [([5, 2], 9), ([6, 4, 2], 4), ([2, 2], 6), ([1, 0], 3), ([3, 2, 2], 0)]
)
def test_the_probability_that_a_leader_stays_agrees_with_drawing(votes: list[int], remaining: int) -> None:
    rng = random.Random(7)
    wins = 0.0
    for _ in range(20_000):
        urn = [*[*votes, 0][:2], sum(votes[2:])]
        for _ in range(remaining):  # Pólya's urn, one ball of each colour beside the votes
            urn[rng.choices(range(3), [balls + 1 for balls in urn])[0]] += 1
        wins += 1.0 if urn[0] > urn[1] else 0.5 * (urn[0] == urn[1])
    assert staying_probability(votes, remaining) == pytest.approx(wins / 20_000, abs=0.015)


def test_counts_settle_by_the_mode_or_by_what_is_to_come() -> None:
    assert settled_by([4], 12) == "beta" and settled_by([4, 1], 11) == "likely" and settled_by([4, 1], None) is None
    assert settled_by([3, 1], 12) is None and settled_by([5, 4, 3], 4) is None and settled_by([7, 4, 2], 3) == "likely"


def test_four_equal_votes_are_enough() -> None:
    voting = Voting(VoteParams(n=16))
    voting.start()
    actions = [finish(voting, trace, "7") for trace in range(4)]
    assert result_of(actions[-1]).rule == "beta" and not any(actions[:-1])


def test_a_vote_over_four_is_lossless_after_three() -> None:
    voting = Voting(VoteParams())
    voting.start()
    assert finish(voting, 2, "7") == [] and finish(voting, 0, "7") == []
    actions = finish(voting, 1, "7")
    assert actions[0] == CancelTraces((3,), "decided")
    assert result_of(actions).rule == "lossless" and result_of(actions).trace == 0


def test_lossless_waits_for_what_may_still_join() -> None:
    voting = Voting(VoteParams(n=4, stop="exact"))
    voting.start()
    for trace, answer in enumerate(["0.333333", "0.333333", "0.333333"]):
        assert finish(voting, trace, answer) == []  # a decimal may still turn out to be 1/3
    assert result_of(finish(voting, 3, "1/3")).share == 1.0


def test_all_starts_everything_at_once() -> None:
    assert Voting(VoteParams(n=16, mode="all")).start() == [StartTraces(16)]


def test_weighted_share_settles() -> None:
    voting = Voting(VoteParams(n=8, mode="all", weights="confidence"))
    voting.start()
    finish(voting, 0, "7", bottom=30.0)
    finish(voting, 1, "7", bottom=30.0)
    finish(voting, 2, "8", bottom=1.0)
    found = result_of(finish(voting, 3, "7", bottom=30.0))
    assert found.rule == "share" and found.share == pytest.approx(90 / 91)


def test_the_weight_decides_the_leader_not_the_count() -> None:
    voting = Voting(VoteParams(n=3, mode="all", weights="confidence"))
    voting.start()
    finish(voting, 0, "7", bottom=1.0)
    finish(voting, 1, "7", bottom=1.0)
    found = result_of(finish(voting, 2, "8", bottom=5.0))
    assert found.answer == "8" and found.rule == "all"


def test_short_takes_the_first_if_they_agree() -> None:
    voting = Voting(VoteParams(n=8, mode="short"))
    assert voting.start() == [StartTraces(8)]
    finish(voting, 5, "7")
    finish(voting, 1, "7")
    found = result_of(finish(voting, 6, "7"))
    assert (found.rule, found.trace, found.cancelled) == ("short", 1, 5)


def test_short_falls_back_to_the_rules_of_waves() -> None:
    voting = Voting(VoteParams(n=16, mode="short"))
    voting.start()
    for trace, answer in enumerate(["7", "8", "7", "7"]):
        assert finish(voting, trace, answer) == []
    assert result_of(finish(voting, 4, "7")).rule == "likely"


def test_settled_in_flight_with_finished_votes() -> None:
    voting = Voting(VoteParams(n=8, mode="all"))
    voting.start()
    finish(voting, 0, "7")
    probes = dict.fromkeys(range(1, 8), "7")
    assert voting.observe(Ticked(probes)) == []  # never at the first tick
    found = result_of(voting.observe(Ticked(probes)))
    assert (found.rule, found.answer, found.cancelled) == ("in_flight", "7", 7)


def test_settled_in_flight_before_anything_finished_lets_one_write() -> None:
    voting = Voting(VoteParams(n=4))
    voting.start()
    voting.observe(Ticked({0: "8", 1: "7", 2: "7", 3: "7"}))
    actions = voting.observe(Ticked({0: "7", 1: "7", 2: "7", 3: "7"}))
    assert actions == [CancelTraces((0, 2, 3), "decided"), EndTraceThinking(1)]
    assert voting.observe(Ticked({1: "9"})) == []
    found = result_of(finish(voting, 1, "7"))
    assert (found.rule, found.trace, found.finished, found.cancelled) == ("in_flight", 1, 1, 3)


def test_a_majority_that_stays_while_its_voters_change_settles_after_its_warmup() -> None:
    voting = Voting(VoteParams(n=8, mode="all"))
    voting.start()
    for tick in range(1, 8):
        others = {(3 * tick + i) % 8 for i in range(3)}  # no trace is off twice in a row
        actions = voting.observe(Ticked({t: f"{100 * tick + t}" if t in others else "7" for t in range(8)}))
        assert bool(actions) is (tick == 7)
    writer = actions[-1]
    assert isinstance(writer, EndTraceThinking)
    assert result_of(finish(voting, writer.trace, "7")).rule == "settled"


def test_a_tie_is_not_safe_in_flight() -> None:
    assert not is_safe_in_flight({0: 3.0}, [Leaning(1, 2)] * 3, 0)


def test_pruning_keeps_three() -> None:
    voting = Voting(VoteParams(n=4))
    voting.start()
    for tick in range(1, 5):
        actions = voting.observe(Ticked(dict.fromkeys((0, 1), f"{1 + tick % 2}") | {2: "92", 3: "93"}))
    assert actions == [CancelTraces((3,), "pruned")]


def test_pruned_traces_are_cancelled() -> None:
    voting = Voting(VoteParams(n=8, mode="all"))
    voting.start()
    cancelled: tuple[int, ...] = ()
    for tick in range(1, 5):
        answers = dict.fromkeys(range(5), f"{1 + tick % 2}") | {t: f"{90 + t}" for t in (5, 6, 7)}
        for action in voting.observe(Ticked(answers)):
            assert isinstance(action, CancelTraces) and tick == 4 and action.why == "pruned"
            cancelled = action.traces
    assert cancelled == (5, 6, 7) and voting.live == [0, 1, 2, 3, 4]


def test_unsure_traces_are_killed_once_four_have_finished() -> None:
    voting = Voting(VoteParams(n=8, mode="all", weights="confidence"))
    voting.start()
    for trace, answer in enumerate(["1", "2", "3"]):
        finish(voting, trace, answer, bottom=9.0, lowest=10.0 + trace)
    assert voting.observe(WindowFilled(7, 1.0)) == []
    finish(voting, 3, "4", bottom=9.0, lowest=13.0)
    assert voting.observe(WindowFilled(7, 10.3)) == []
    assert voting.observe(WindowFilled(7, 10.2)) == [CancelTraces((7,), "unsure")]
    assert voting.observe(WindowFilled(7, 1.0)) == []


def test_exact_kills_nothing_and_uses_no_probes() -> None:
    voting = Voting(VoteParams(n=8, mode="all", stop="exact"))
    voting.start()
    assert not voting.wants_ticks
    for trace in range(4):
        assert finish(voting, trace, "7", lowest=10.0) == []
    assert voting.observe(WindowFilled(7, 0.0)) == [] and voting.observe(Ticked({4: "7"})) == []
    assert result_of(finish(voting, 4, "7")).rule == "lossless"


def test_guard_rails_leave_probes_out() -> None:
    assert Voting(VoteParams(), in_flight=False).wants_ticks is False


def test_abstentions_do_not_vote() -> None:
    voting = Voting(VoteParams(n=4))
    voting.start()
    for trace, answer in enumerate([None, "7", "8"]):
        assert finish(voting, trace, answer) == []
    found = result_of(finish(voting, 3, "8"))
    assert (found.answer, found.abstained, found.by_reply) == ("8", 1, False)
    assert [c.count for c in found.classes] == [2, 1]


def test_case_70_thinking_does_not_vote() -> None:
    voting = Voting(VoteParams(n=2))
    voting.start()
    voting.observe(TraceFinished(0, "maybe the answer is 3? </think>The answer is 5."))
    assert result_of(voting.observe(TraceFinished(1, "The answer is 5."))).answer == "5"


def test_mostly_unreadable_answers_are_compared_as_replies() -> None:
    long = "The red house stands at the end of the street.\nIt has been there since the beginning."
    voting = Voting(VoteParams(n=4))
    voting.start()
    voting.observe(TraceFinished(0, long))
    voting.observe(TraceFinished(1, "Nobody has ever seen such a thing.\nIt does not exist."))
    voting.observe(TraceFinished(2, long.replace("beginning", "beginnings")))
    found = result_of(voting.observe(TraceFinished(3, "7")))
    assert found.by_reply and found.classes[0].count == 2 and found.trace in (0, 2)


def test_failed_traces_and_none_left() -> None:
    voting = Voting(VoteParams(n=2))
    voting.start()
    assert voting.observe(TraceFailed(0)) == []
    found = result_of(finish(voting, 1, "7"))
    assert (found.answer, found.finished, found.started) == ("7", 1, 2)
    empty = Voting(VoteParams(n=2))
    empty.start()
    empty.observe(Ticked({0: "5", 1: None}))
    empty.observe(TraceFailed(0))
    found = result_of(empty.observe(TraceFailed(1)))
    assert (found.rule, found.answer, found.trace) == ("last_probes", "5", 0)


def test_only_the_surest_vote_where_asked() -> None:
    voting = Voting(VoteParams(n=32, mode="all", weights="confidence", top_share=0.1))
    voting.start()
    actions: list[VoteAction] = []
    for trace in range(32):
        sure = trace % 10 == 9
        actions = finish(voting, trace, "8" if sure else str(100 + trace), bottom=9.0 + sure, lowest=1.0)
    found = result_of(actions)
    assert found.answer == "8" and sum(c.count for c in found.classes) == 3


VOTES = ["1", "2", "3", "1.0", "1 cm", "1 m", "1/3", "0.333333", "0.3333333", "A", "it is so", "it is so!", None, "x+1"]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(VOTES), min_size=2, max_size=9), st.randoms(use_true_random=False), st.booleans())
def test_exact_votes_are_those_of_the_full_run(answers: list[str | None], order: random.Random, waves: bool) -> None:
    equality = Equality()
    n = len(answers)
    voting = Voting(VoteParams(n=n, mode="waves" if waves else "all", stop="exact"), equality)
    actions = voting.start()
    while not isinstance(actions[-1] if actions else None, Decide):
        actions = _next(voting, answers, order)
    found = result_of(actions)
    full = tally(answers, [1.0] * n, equality)
    if 2 * full.abstained > n:
        assert found.by_reply and found.finished == n
    elif full.classes:
        assert found.answer is not None and not found.by_reply
        assert full.class_of(found.trace or 0) == 0


def _next(voting: Voting, answers: list[str | None], order: random.Random) -> list[VoteAction]:
    trace = order.choice(voting.live)
    return finish(voting, trace, answers[trace])


def test_group_confidence_by_hand() -> None:
    trace = TraceConfidence(window=4)
    for value in (8, 8, 8):
        trace.push(value)
    assert trace.full_window is None and trace.lowest == trace.bottom == 8
    for value in (4, 0, 4, 8, math.nan):
        trace.push(value)
    assert trace.full_window == pytest.approx((0 + 4 + 8 + 40 / 7) / 4)
    assert trace.lowest == pytest.approx(4.0)  # 8 4 0 4 or 4 0 4 8
    assert trace.bottom == pytest.approx(4.0)


@given(st.lists(st.floats(0, 50), min_size=1, max_size=80), st.integers(1, 10))
def test_group_confidence_against_a_plain_loop(values: list[float], window: int) -> None:
    trace = TraceConfidence(window)
    for value in values:
        trace.push(value)
    groups = [sum(values[i : i + window]) / window for i in range(len(values) - window + 1)]
    groups = groups or [sum(values) / len(values)]
    assert trace.lowest == pytest.approx(min(groups), abs=1e-6)
    lowest = sorted(groups)[: max(1, len(groups) // 10)]
    assert trace.bottom == pytest.approx(sum(lowest) / len(lowest), abs=1e-6)


def test_windows_and_percentiles() -> None:
    assert [window_for(lengths) for lengths in ([], [800], [8000, 8008], [10**6])] == [2048, 256, 1000, 2048]
    assert percentile([10.0, 11.0, 12.0, 13.0], 0.10) == pytest.approx(10.3)
    assert percentile([5.0], 0.9) == 5.0
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


@pytest.mark.parametrize(
    ("parse", "given", "field"),
    [
        (parse_vote, {"n": 1}, "vote.n"),
        (parse_vote, {"size": 4}, "vote.size"),
        (parse_vote, 4, "vote"),
        (parse_vote, {"mode": "fast"}, "vote.mode"),
        (parse_vote, {"m": 2}, "vote.m"),
        (parse_vote, {"n": 4, "mode": "short", "m": 5}, "vote.m"),
        (parse_vote, {"stop": "exact", "weights": "confidence"}, "vote.stop"),
        (parse_vote, {"n": 64, "top_share": 0.1}, "vote.top_share"),
        (parse_vote, {"n": 16, "top_share": 0.1, "weights": "confidence"}, "vote.top_share"),
        (parse_best_of, {"n": 4}, "best_of.verifier"),
        (parse_best_of, {"n": 1, "verifier": "judge"}, "best_of.n"),
        (parse_best_of, {"verifier": "judge", "timeout_s": 0}, "best_of.timeout_s"),
        (parse_best_of, {"verifier": "judge", "reads": "mind"}, "best_of.reads"),
        (parse_best_of, {"verifier": "http://10.0.0.1/judge"}, "best_of.verifier"),
        (parse_best_of, {"verifier": {"url": "http://10.0.0.1/judge"}}, "best_of.verifier"),
        (parse_search, {"kind": "mcts"}, "search.kind"),
        (parse_search, {"branch": 1}, "search.branch"),
        (parse_search, {"step": "word"}, "search.step"),
        (parse_search, {"score": "verifier"}, "search.score"),
        (parse_search, {"score": "probe", "verifier": "judge"}, "search.score"),
        (parse_search, {"verifier": "https://10.0.0.1"}, "search.verifier"),
        (parse_search, {"timeout_s": 0}, "search.timeout_s"),
        (parse_search, {"max_tokens": 4 * 512 + 63}, "search.max_tokens"),
        (parse_search, {"score": "probe", "max_tokens": 4 * 560 + 63}, "search.max_tokens"),
        (parse_search, {"width": 0}, "search.width"),
        (parse_search, {"width": 64, "branch": 16}, "search.width"),
        (parse_search, {"min_step_tokens": 600}, "search.min_step_tokens"),
    ],
)
def test_what_cannot_be_asked(parse: object, given: object, field: str) -> None:
    with pytest.raises(ParameterError) as caught:
        parse(given)  # pyright: ignore[reportCallIssue]
    assert caught.value.field == field


def test_what_can_be_asked() -> None:
    assert parse_vote(True) == VoteParams(n=4) and parse_vote(None) is parse_vote(False) is None
    assert parse_vote({"n": 8, "mode": "short", "m": None}) == VoteParams(8, "short")
    assert VoteParams(8, "short").first == 3 and VoteParams(2, "short").first == 2
    assert parse_best_of({"verifier": "judge"}) == BestOfParams("judge", 8, 5.0, "answer")
    assert SearchParams().sizes == (4, 4, 40) and SearchParams("tree").sizes == (2, 3, 3)
    assert SearchParams(verifier="judge").scored_by == "verifier" and SearchParams().scored_by == "confidence"
    assert parse_search({"max_tokens": 4 * 512 + 64}) == SearchParams(max_tokens=2112)
    assert [SearchParams(max_tokens=n).reserve for n in (3000, 20_000, 10**6)] == [300, 2000, 4096]
    assert parse_search({}) == SearchParams() and parse_search(None) is None and parse_best_of(None) is None
