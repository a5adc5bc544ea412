"""Search over a scripted engine's parts: the tree's record, budgets, misses, memory, and who leaves in the middle."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from decision_script import ASKED, POLICY, Looks, last_call

from thinkfold.engine.decisions import Decisions
from thinkfold.engine.messages import EngineStats
from thinkfold.errors import ConflictError, EngineDeadError, NotFoundError, ParameterError, UnsupportedError
from thinkfold.types import (
    CompletionOutput,
    ControlParams,
    Costs,
    FinishReason,
    Grammar,
    Handle,
    Judged,
    Phase,
    RequestOutput,
    SamplingParams,
    SearchParams,
    SearchState,
    Service,
    ThinkingEndReason,
    ThinkingParams,
    TokenStats,
)

STEP, ANSWER = 20, 5  # tokens


class Forest:
    """An engine on which every part appends its choice's digit to the thinking, in STEP tokens.

    `worth(text)` is the confidence, and the probability, of its tokens; where `ends(text)` says so the model answers.
    """

    def __init__(self, worth: Callable[[str], float], ends: Callable[[str], bool] = lambda text: False) -> None:
        self.worth, self.ends = worth, ends
        self.numbers = itertools.count()
        self.handles: dict[str, str] = {}
        self.peak = 0
        self.live: set[str] = set()
        self.parts: list[tuple[str, int | None]] = []
        self.closed: list[str] = []
        self.cancelled: set[str] = set()
        self.paused: set[str] = set()
        self.pauses: list[str] = []
        self.held = 0

    def generate(self, prompt, sampling, thinking=None, fold=None, *, request_id, until, **_):
        assert (until.at, until.min_tokens, until.max_tokens) == ("paragraph", 10, STEP)
        return self._part("", sampling.n, request_id, sampling.seed, None)

    async def extend(
        self, handle, until=None, *, n=1, temperature=None, seed=None, end_thinking=None, request_id, namespace=()
    ):
        if handle not in self.handles:
            raise NotFoundError(f"there is no handle {handle!r}")
        if end_thinking is not None:
            self.closed.append(request_id)
            assert end_thinking is ThinkingEndReason.SEARCH and n == 1
        async for output in self._part(self.handles[handle], n, request_id, seed, end_thinking):
            yield output

    async def _part(self, text, n, name, seed, close):
        self.parts.append((name, seed))
        self.live.add(name)
        costs = Costs(prompt_tokens=3, computed_prompt_tokens=0 if text else 3)
        before = len(text) * STEP
        try:
            for turn in range(1, (ANSWER if close else STEP) + 1):
                await asyncio.sleep(0)
                while name in self.paused and name not in self.cancelled:
                    await asyncio.sleep(0)
                last = turn == (ANSWER if close else STEP) or name in self.cancelled
                costs.thinking_tokens += 0 if close else n
                costs.answer_tokens += n if close else 0
                whole = last and name not in self.cancelled
                news = [self._news(text, choice, before + turn, close, turn, whole) for choice in range(n)]
                if last and not whole:
                    news = [replace(one, finish_reason=FinishReason.ABORT) for one in news]
                yield RequestOutput(name, news, POLICY, replace(costs), finished=last)
                if last:
                    return
        finally:
            self.live.discard(name)

    def _news(self, text, choice, tokens, close, turn, last):
        path = text if close else f"{text}{choice}"
        p = self.worth(path)
        stats = [TokenStats(math.log(max(p, 1e-9)), 0.0, p, 0.0)]
        thinking = len(path) * STEP if close else tokens
        news = CompletionOutput(
            choice, stats=stats, phase=Phase.THINKING, num_output_tokens=tokens, num_thinking_tokens=thinking
        )
        if not close and turn == 1:
            news.reasoning = str(choice)
        if last and (close or self.ends(path)):
            news.phase, news.text, news.finish_reason = Phase.ANSWER, f"\\boxed{{{path}}}", FinishReason.STOP
        elif last:
            handle = f"h-{next(self.numbers)}"
            self.handles[handle] = path
            self.peak = max(self.peak, len(self.handles))
            news.finish_reason = FinishReason.BOUNDARY
            news.handle = Handle(handle, tokens, "", 300.0)
        return news

    async def cancel(self, request_id, choice=None, *, keep_partial=True):
        if request_id not in self.live:
            raise NotFoundError(request_id)
        self.cancelled.add(request_id)

    async def drop(self, handle, namespace=()):
        if handle not in self.handles:
            raise NotFoundError(handle)
        del self.handles[handle]

    async def pause(self, request_id, choice=None):
        if request_id not in self.live or request_id in self.paused:
            raise ConflictError(request_id)
        self.paused.add(request_id)
        self.pauses.append(request_id)

    async def resume(self, request_id, choice=None):
        self.paused.remove(request_id)

    def stats(self):
        return EngineStats(pages_total=100, pages_by_class={"thinking": self.held})

    async def end_thinking(self, request_id, choice=None, *, reason=ThinkingEndReason.CONTROL):
        raise AssertionError("a search closes with its parts")


def near(goal: str) -> Callable[[str], float]:
    """The share of leading digits that a text has right."""
    return lambda text: max(0.01, sum(a == b for a, b in zip(text, goal, strict=False)) / len(goal))


def params(**more: Any) -> SearchParams:
    return SearchParams(**{"width": 2, "branch": 4, "depth": 6, "min_step_tokens": 10, "max_step_tokens": STEP, **more})


def run(engine: Forest, how: SearchParams, question: Any = ASKED, shared: Decisions | None = None) -> Any:
    return (shared or Decisions(engine, Looks(), last_call())).run(question, how)  # type: ignore[arg-type]


async def search(engine: Forest, how: SearchParams, question: Any = ASKED) -> list[RequestOutput]:
    outputs = [output async for output in run(engine, how, question)]
    assert engine.handles == {} and engine.live == set(), "nothing is left behind"
    return outputs


def state(output: RequestOutput) -> SearchState:
    assert isinstance(output.outcome, SearchState)
    return output.outcome


async def test_a_beam_and_the_record_of_its_tree():
    engine = Forest(near("3120"), lambda text: len(text) == 4)
    *states, last = await search(engine, params())
    assert last.finished and last.request_id == "q" and last.outputs[0].text == "\\boxed{3120}"
    assert last.outputs[0].reasoning == "3120" and last.outputs[0].index == 0 and last.outputs[0].handle is None
    found = state(last)
    assert (found.kind, found.width, found.branch, found.score, found.rule) == ("beam", 2, 4, "confidence", "ended")
    assert found.answer == "3120" and found.best == 1.0 and found.expanded == 7 and found.deepest == 4
    assert found.tokens == sum(node.tokens for node in found.nodes) == 28 * STEP
    assert found.kept_tokens == 4 * STEP and found.discarded_tokens == found.tokens - found.kept_tokens
    assert found.node is not None
    path, node = [], found.nodes[found.node]
    while node.parent is not None:
        path.append(node.fate)
        node = found.nodes[node.parent]
    assert path == ["chosen", "expanded", "expanded", "expanded"] and node.id == 0
    fates = {fate: sum(n.fate == fate for n in found.nodes) for fate in ("dropped", "answered", "expanded")}
    assert fates["expanded"] == 7 and fates["answered"] == 1 and fates["dropped"] == 29 - 7 - 2
    assert last.costs.prompt_tokens == 3 and last.costs.thinking_tokens == found.tokens
    told = [state(each) for each in states]
    assert [each.deepest for each in told] == [1, 2, 3, 4][: len(told)] and len(told) >= 3
    assert all(each.rule is None and each.nodes == () for each in told)
    assert engine.peak <= 2 + 2 * 4


async def test_case_34_the_same_seed_walks_the_same_way_and_parts_draw_apart():
    first, second = (Forest(near("31")) for _ in range(2))
    for engine in (first, second):
        await search(engine, params(depth=2))
    assert sorted(first.parts) == sorted(second.parts)
    seeds = [seed for name, seed in first.parts if name.startswith("q-n")]
    assert len(set(seeds)) == len(seeds) == 3


async def test_open_states_write_their_answers_at_the_last_depth():
    engine = Forest(near("333333"))
    last = (await search(engine, params(depth=2)))[-1]
    found = state(last)
    assert last.outputs[0].text == "\\boxed{33}" and found.rule == "depth" and len(engine.closed) == 2
    assert found.tokens == 12 * STEP + 2 * ANSWER and found.kept_tokens == 2 * STEP + ANSWER
    assert last.costs.answer_tokens == 2 * ANSWER


async def test_a_tree_goes_back_to_a_better_thought():
    worth = {"0": 0.8, "1": 0.7, "00": 0.1, "01": 0.2, "10": 0.75, "11": 0.9, "110": 0.95}
    engine = Forest(lambda text: worth.get(text, 0.05))
    found = state((await search(engine, params(kind="tree", width=1, branch=2, depth=3)))[-1])
    assert [name for name, _ in engine.parts[:4]] == ["q-n", "q-n0", "q-n1", "q-n1.1"]
    assert found.answer == "110" and found.rule == "best"


@pytest.mark.parametrize("kind", ["beam", "tree"])
@pytest.mark.parametrize("most", [144, 200, 400, 1000])
@pytest.mark.parametrize("score", ["confidence", "probe"])
async def test_no_more_is_generated_than_allowed(kind, most, score):
    how = params(kind=kind, max_tokens=most + (4 * 48 if score == "probe" else 0), score=score, depth=200)
    found = state((await search(Forest(near("3" * 200)), how))[-1])
    assert found.tokens <= (how.max_tokens or 0) and found.expanded >= 1 and found.answer
    assert found.rule in ("max_tokens", "rounds")


async def test_a_verifier_reads_thinking_and_its_misses_are_told():
    read: list[Judged] = []

    def judge(question: str, judged: Sequence[Judged]) -> list[float]:
        assert question == "What is it?"
        read.extend(judged)
        return [float("nan") if one.thinking == "0" else near("21")(one.thinking) for one in judged]

    found = state((await search(Forest(near("00")), params(verifier=judge, depth=2)))[-1])
    assert found.answer == "21" and (found.score, found.verifier) == ("verifier", "judge")
    assert found.misses == 1 and [n.error for n in found.nodes if n.error] == ["nan is no finite number"]
    assert read[0] == Judged("", "0")


async def test_probes_ask_what_the_answer_would_be_and_are_counted():
    engine = Forest(near("21"))
    last = (await search(engine, params(score="probe", depth=2)))[-1]
    found = state(last)
    assert found.answer == "21" and found.best == pytest.approx(1.0)
    assert found.probe_tokens == 12 * ANSWER and found.tokens == 12 * STEP + 12 * ANSWER + 2 * ANSWER
    assert sum(name.startswith("q-p") for name, _ in engine.parts) == 12
    assert last.costs.thinking_tokens + last.costs.answer_tokens == found.tokens


async def test_case_45_who_leaves_in_the_middle_leaves_nothing():
    for turns in (1, 3, STEP - 1, STEP, STEP + 5, 2 * STEP, 3 * STEP + 7):
        engine = Forest(near("33333"))
        outputs = run(engine, params())
        reading = asyncio.create_task(anext(outputs))
        for _ in range(4 * turns):
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await outputs.aclose()
        assert engine.handles == {} and engine.live == set()
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


async def test_states_that_are_driven_out_are_lost_and_others_go_on():
    engine = Forest(near("3120"), lambda text: len(text) == 4)
    found = None
    async for output in run(engine, params()):
        if found is None:
            del engine.handles[next(handle for handle, text in engine.handles.items() if text == "3")]
        found = state(output)
    assert found is not None
    assert found.lost == 1 and found.answer is not None and found.answer != "3120" and engine.handles == {}


async def test_a_search_whose_states_are_all_driven_out_says_so():
    engine = Forest(near("33"))

    async def forget() -> None:
        async for _ in run(engine, params()):
            engine.handles.clear()

    with pytest.raises(ConflictError, match="driven out"):
        await forget()
    assert engine.live == set()


async def test_the_least_promising_part_pauses_while_memory_is_short():
    engine = Forest(near("33"))
    plain = state((await search(Forest(near("33")), params(depth=3)))[-1])
    engine.held = 99
    found = state((await search(engine, params(depth=3)))[-1])
    assert engine.pauses and engine.paused == set(), "paused ones go on when the others have ended"
    assert "q-n3" not in engine.pauses, "the best one runs"
    assert (found.answer, found.tokens) == (plain.answer, plain.tokens)


async def test_searches_wait_for_handles_instead_of_driving_out_each_other():
    engine, how = Forest(near("3120"), lambda text: len(text) == 4), params()
    shared = Decisions(engine, Looks(), last_call(), max_handles=2 * how.most_held)  # type: ignore[arg-type]

    async def one(name: str) -> SearchState:
        outputs = [output async for output in run(engine, how, replace(ASKED, request_id=name), shared)]
        return state(outputs[-1])

    found = await asyncio.gather(*(one(f"q{number}") for number in range(5)))
    assert {each.answer for each in found} == {"3120"} and engine.peak <= 2 * how.most_held and engine.handles == {}
    few = Decisions(engine, Looks(), last_call(), max_handles=how.most_held - 1)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match=r"search\.width: may hold 12 states, and the engine keeps 11 handles"):
        run(engine, how, ASKED, few)


async def test_an_engine_that_dies_is_told():
    engine = Forest(near("33"))

    async def dead(*_: Any, **__: Any) -> Any:
        raise EngineDeadError("gone")
        yield

    engine.extend = dead  # type: ignore[method-assign]
    with pytest.raises(EngineDeadError):
        await search(engine, params())


@pytest.mark.parametrize(
    ("question", "field"),
    [
        (replace(ASKED, sampling=SamplingParams(temperature=0.0)), "temperature"),
        (replace(ASKED, sampling=SamplingParams(n=2)), "n"),
        (replace(ASKED, sampling=SamplingParams(grammar=Grammar('{"type": "regex", "pattern": "a"}'))), "search"),
        (replace(ASKED, thinking=ThinkingParams(enabled=False)), "search"),
        (replace(ASKED, thinking=ThinkingParams(thinking_token_budget=0)), "search"),
        (replace(ASKED, control=ControlParams("balanced")), "search"),
        (replace(ASKED, service=Service(deadline_ms=100)), "search"),
    ],
)
def test_what_makes_no_search_is_refused(question, field):
    with pytest.raises((ParameterError, UnsupportedError)) as refused:
        run(Forest(near("1")), params(), question)
    assert refused.value.field == field
