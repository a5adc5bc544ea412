"""Best of N, beam search and tree of thoughts, on scripted engines."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from thinkfold.control.best_of import (
    BestOf,
    BestOfAction,
    BestOfResult,
    Candidate,
    CandidateFinished,
    CandidateScored,
    Choose,
    ScoreTrace,
    StepScored,
    choose,
)
from thinkfold.control.equality import Equality
from thinkfold.control.search import Search, State
from thinkfold.control.verifier import with_median
from thinkfold.control.voting import CancelTraces, StartTraces, TraceFailed
from thinkfold.types import BestOfParams, SearchParams, Verdict


def candidate(number: int, answer: str, score: float | None, tokens: int = 10) -> Candidate:
    return Candidate(number, f"\\boxed{{{answer}}}", tokens, score)


def chosen(*candidates: Candidate) -> int:
    found = choose(candidates, Equality())
    assert found is not None
    return found.number


def test_the_class_with_the_largest_sum_wins() -> None:
    assert chosen(candidate(0, "7", 0.9), candidate(1, "8", 0.5), candidate(2, "16/2", 0.6)) == 2
    assert chosen(candidate(0, "7", 0.9), candidate(1, "8", 0.4), candidate(2, "8", 0.3)) == 0


def test_ties_go_to_fewer_tokens() -> None:
    assert chosen(candidate(0, "7", 0.5, 20), candidate(1, "8", 0.5, 10)) == 1
    assert chosen(candidate(0, "7", 0.5, 20), candidate(1, "7", 0.5, 10)) == 1


def test_a_miss_counts_as_the_median() -> None:
    assert with_median([0.2, None, 0.9, 0.4]) == [0.2, 0.4, 0.9, 0.4] and with_median([None]) == [0.0]
    # the two of class 8 are worth .4 + .4 > .7; without the median they would be .4
    assert chosen(candidate(0, "7", 0.7), candidate(1, "8", 0.4), candidate(2, "8", None), candidate(3, "9", 0.1)) == 1


def test_without_any_score_the_largest_class_wins() -> None:
    assert chosen(candidate(0, "7", None), candidate(1, "8", None), candidate(2, "8", None)) == 1


def test_open_answers_go_by_the_best_score() -> None:
    long = "One line.\nAnother."
    assert chosen(Candidate(0, long, 5, 0.3), Candidate(1, long, 5, 0.8), candidate(2, "7", 0.7)) == 1
    assert choose([], Equality()) is None


def feed(best: BestOf, trace: int, answer: str, score: float | None) -> list[BestOfAction]:
    assert best.observe(CandidateFinished(trace, f"\\boxed{{{answer}}}", 10)) == [ScoreTrace(trace)]
    return best.observe(CandidateScored(trace, score))


def result_of(actions: list[BestOfAction]) -> BestOfResult:
    assert isinstance(actions[-1], Choose)
    return actions[-1].result


def test_best_of_runs_in_waves_to_the_end() -> None:
    best = BestOf(BestOfParams("judge", n=8))
    assert best.start() == [StartTraces(4)]
    for trace in range(3):
        assert feed(best, trace, str(trace), 0.1 * trace) == []
    assert feed(best, 3, "3", 0.3) == [StartTraces(4)]
    assert best.observe(TraceFailed(4)) == []
    for trace in (5, 6):
        assert feed(best, trace, str(trace), None) == []
    found = result_of(feed(best, 7, "7", 0.25))
    assert (found.rule, found.trace, found.answer, found.misses) == ("all", 3, "3", 2)
    assert found.scores[5] == pytest.approx(0.2) and 4 not in found.scores
    assert best.observe(CandidateScored(7, 0.9)) == []


def test_two_good_answers_of_one_class_are_enough() -> None:
    best = BestOf(BestOfParams("judge", n=16))
    best.start()
    assert feed(best, 0, "7", 0.96) == [] and feed(best, 1, "8", 0.97) == []
    actions = feed(best, 2, "7.0", 0.95)
    assert actions[0] == CancelTraces((3,), "decided")
    assert result_of(actions).rule == "good" and result_of(actions).trace == 0


def test_a_trace_far_behind_is_killed_at_a_step() -> None:
    best = BestOf(BestOfParams("judge", n=4))
    best.start()
    assert best.observe(StepScored(3, 5, 0.0)) == []  # nothing to compare with
    feed(best, 0, "7", 0.8)
    assert best.observe(StepScored(3, 2, 0.1)) == [] and best.observe(StepScored(3, 3, 0.51)) == []
    assert best.observe(StepScored(3, 3, None)) == []
    assert best.observe(StepScored(3, 3, 0.49)) == [CancelTraces((3,), "unsure")]
    assert best.observe(CandidateFinished(3, "7", 1)) == []


def test_without_any_score_the_rule_says_so() -> None:
    best = BestOf(BestOfParams("judge", n=2))
    best.start()
    assert feed(best, 0, "7", None) == []
    found = result_of(feed(best, 1, "7", None))
    assert (found.rule, found.misses, found.trace, best.cancelled) == ("unscored", 2, 0, 0)


def test_all_failed() -> None:
    best = BestOf(BestOfParams("judge", n=2))
    best.start()
    best.observe(TraceFailed(0))
    assert result_of(best.observe(TraceFailed(1))).trace is None


class Tree:
    """A scripted engine: digits are steps, a text is worth `worth(text)`, and ends where `ends` says so."""

    def __init__(self, worth: Any, ends: Any = lambda text: False, *, verifier: bool = True) -> None:
        self.worth, self.ends, self.verifier = worth, ends, verifier
        self.keys = itertools.count()
        self.live: dict[str, str] = {}
        self.peak = 0
        self.extended: list[str] = []
        self.fail_at: str | None = None
        self.probe_tokens = 0

    def _state(self, text: str) -> State:
        key = str(next(self.keys))
        self.live[key] = text
        self.peak = max(self.peak, len(self.live))
        return State(key, text, 300, self.ends(text), self.worth(text))

    async def root(self) -> State:
        return self._state("")

    async def extend(self, state: State, count: int, min_tokens: int, max_tokens: int) -> list[State]:
        assert state.key in self.live and not state.ended and min_tokens <= 300 <= max_tokens
        if state.text == self.fail_at:
            raise RuntimeError("out of pages")
        self.extended.append(state.text)
        await asyncio.sleep(0)
        return [self._state(state.text + str(digit)) for digit in range(count)]

    async def score(self, states: Sequence[State]) -> list[Verdict] | None:
        return [Verdict(self.worth(state.text)) for state in states] if self.verifier else None

    async def finish(self, state: State, max_tokens: int | None) -> tuple[str, int]:
        assert state.key in self.live
        return f"\\boxed{{{state.text}}}", 20

    async def drop(self, state: State) -> None:
        del self.live[state.key]  # a KeyError if it is dropped twice


def near(goal: str) -> Any:
    """A text's worth: the share of leading digits that it has right."""
    return lambda text: sum(a == b for a, b in zip(text, goal, strict=False)) / len(goal)


@pytest.mark.parametrize("verifier", [True, False])
async def test_beam_finds_the_path_and_drops_everything(verifier: bool) -> None:
    tree = Tree(near("3120"), lambda text: len(text) == 4, verifier=verifier)
    found = await Search(SearchParams(width=2, branch=4, depth=10), tree).run()
    assert found.reply == "\\boxed{3120}" and found.score == 1.0
    assert tree.live == {} and tree.peak <= 2 + 2 * 4
    assert found.path_tokens == 4 * 300 + 20
    assert found.tokens > found.path_tokens and found.expanded == len(tree.extended)


async def test_beam_keeps_the_best_width() -> None:
    tree = Tree(near("33"))
    await Search(SearchParams(width=2, branch=4, depth=2), tree).run()
    assert tree.extended == ["", "3", "0"]  # equal ones by text


async def test_beam_at_its_last_depth_answers_from_there() -> None:
    tree = Tree(near("111111"))
    found = await Search(SearchParams(width=1, branch=2, depth=3), tree).run()
    assert found.reply == "\\boxed{111}" and len(found.candidates) == 1


async def test_ended_states_leave_the_beam() -> None:
    tree = Tree(lambda text: 0.9 if text == "0" else 0.5, lambda text: text == "0")
    found = await Search(SearchParams(width=2, branch=2, depth=4), tree).run()
    assert tree.extended == ["", "1", "10", "100"]  # room for one beside the ended state
    assert found.reply == "\\boxed{0}" and len(found.candidates) == 2


async def test_more_ended_states_than_the_beam_is_wide() -> None:
    tree = Tree(lambda text: int(text or 0) / 10, lambda text: len(text) == 1)
    found = await Search(SearchParams(width=2, branch=4, depth=4), tree).run()
    assert found.reply == "\\boxed{3}" and len(found.candidates) == 2 and tree.live == {}


async def test_equal_texts_are_dropped() -> None:
    tree = Tree(lambda text: 0.5)

    async def same(state: State, count: int, min_tokens: int, max_tokens: int) -> list[State]:
        tree.extended.append(state.text)
        return [tree._state(state.text + "0") for _ in range(count)]

    tree.extend = same
    found = await Search(SearchParams(width=4, branch=4, depth=3), tree).run()
    assert tree.extended == ["", "0", "00"] and len(found.candidates) == 1 and tree.live == {}


async def test_a_tree_goes_back_to_a_better_thought() -> None:
    worth = {"0": 0.8, "1": 0.7, "00": 0.1, "01": 0.2, "10": 0.75, "11": 0.9, "110": 0.95}
    tree = Tree(lambda text: worth.get(text, 0.0))
    found = await Search(SearchParams("tree", width=1, branch=2, depth=3), tree).run()
    assert tree.extended == ["", "0", "1", "11"]
    assert found.reply == "\\boxed{110}" and tree.live == {}


async def test_a_tree_stops_when_nothing_open_is_better_than_a_leaf() -> None:
    tree = Tree(lambda text: 0.9 if text.startswith("0") else 0.1)
    found = await Search(SearchParams("tree"), tree).run()
    assert found.score == 0.9 and all(c.reply.startswith("\\boxed{0") for c in found.candidates)
    assert tree.live == {} and len(tree.extended) <= 2 * 15


async def test_states_are_dropped_after_an_error() -> None:
    tree = Tree(near("3333"))
    tree.fail_at = "3"
    with pytest.raises(RuntimeError, match="out of pages"):
        await Search(SearchParams(width=2, branch=4), tree).run()
    assert tree.live == {}
