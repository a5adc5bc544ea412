"""Rules on live responses: what is observed, what is ordered, and what is left alone."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import pytest
from scripted import language

from thinkfold.control.embedding import unit
from thinkfold.control.presets import PRESETS
from thinkfold.control.probing import Observer
from thinkfold.control.rule import AtBoundary, BoundaryKind, Wrote
from thinkfold.engine.steering import Steering, Steersman
from thinkfold.errors import ConflictError, UnsupportedError
from thinkfold.types import (
    Boundary,
    CompletionOutput,
    Costs,
    FinishReason,
    Phase,
    ProbeResult,
    RequestOutput,
    ThinkingEndReason,
    ThinkingPolicy,
    TokenStats,
    parse_control,
)

NO_MARGIN = TokenStats(0.0, 0.0, 0.0, math.nan)


class Asked:
    """An engine that gives one answer to all probes and remembers its orders."""

    def __init__(self, answer: str = "42}", *, dropped: str | None = None, refuses: bool = False) -> None:
        tokens = language()[0].encode(answer, add_special_tokens=False)
        stats = [TokenStats(-0.01, 0.05, 1.0, 0.0)] * len(tokens)
        self.result = ProbeResult(tokens, answer, stats, computed_tokens=30, dropped=dropped)
        self.refuses = refuses
        self.looks: list[tuple[str, int | None]] = []
        self.ends: list[tuple[int | None, ThinkingEndReason]] = []

    async def peek(self, request_id, token_ids=(), choice=None):
        self.looks.append(("peek", choice))
        return self.result

    async def probe(self, request_id, token_ids, n, stop=(), choice=None):
        assert token_ids[0] == language()[2].force_ids[0], "a probe closes thinking on its fork"
        self.looks.append(("probe", choice))
        return self.result

    async def end_thinking(self, request_id, choice=None, *, reason=ThinkingEndReason.CONTROL):
        if self.refuses:
            raise ConflictError("nobody thinks")
        self.ends.append((choice, reason))


def news(told: int, *, new: int, places=(), index=0, **more) -> CompletionOutput:
    """`new` tokens of thinking up to `told`, with boundaries of kinds at places."""
    defaults = {"phase": Phase.THINKING, "num_output_tokens": told, "num_thinking_tokens": told}
    stats = [NO_MARGIN] * new
    found = [Boundary(kind, at) for kind, at in places]
    return CompletionOutput(index, token_ids=[7] * new, stats=stats, boundaries=found, **{**defaults, **more})


def output(*found: CompletionOutput, finished: bool = False) -> RequestOutput:
    return RequestOutput("r", list(found), ThinkingPolicy(True, None, "default"), Costs(), finished)


async def steer(
    engine: Asked,
    control: dict,
    *,
    paragraphs: int = 8,
    grammar: bool = False,
    ending: str = "",
    on: Steersman | None = None,
) -> Steersman:
    """A response with a paragraph every 160 tokens, steered to its end."""
    steersman = on or Steersman(engine, language()[2], (5,), "pebble")
    steering = steersman.begin("r", parse_control(control), grammar=grammar)
    assert steering is not None
    for number in range(1, paragraphs + 1):
        end = 160 * number
        steering.observe(output(news(end, new=160, places=[("paragraph", end - 2)])))
        await until(lambda: settled(steering))  # looks come back while the response is written
    last = CompletionOutput(0, text=ending, finish_reason=FinishReason.STOP, num_thinking_tokens=160 * paragraphs)
    steering.observe(output(last, finished=True))
    steering.close()
    await until(lambda: not steersman._tasks)
    assert not steersman._tasks, "nothing of it is left running"
    return steersman


async def until(there: Callable[[], bool]) -> None:
    """Let others work, however slow the machine is; a test that waits in vain ends, too."""
    for _ in range(10_000):
        if there():
            return
        await asyncio.sleep(0.001)


def settled(steering: Steering) -> bool:
    """Whether all that was observed is thought about, and no look is under way."""
    return not steering._looks and (steering._worker.done() or not steering._inbox._unfinished_tasks)


def test_a_boundary_waits_for_the_row_behind_it_and_the_strongest_counts():
    observer = Observer()
    rows = [TokenStats(0.0, 0.0, 0.0, float(margin)) for margin in range(3)]
    places = [Boundary("sentence", 3), Boundary("paragraph", 3), Boundary("transition", 1)]
    first = CompletionOutput(
        0, "ab", token_ids=[1, 2, 3], stats=rows, boundaries=places, phase=Phase.THINKING,
        num_output_tokens=3, num_thinking_tokens=3,
    )  # fmt: skip
    assert observer.read(first) == [AtBoundary(1, BoundaryKind.TRANSITION, 1.0, "ab")]
    later = CompletionOutput(
        0, "c", token_ids=[4], stats=[TokenStats(0.0, 0.0, 0.0, 9.0)], phase=Phase.THINKING,
        num_output_tokens=4, num_thinking_tokens=4,
    )  # fmt: skip
    assert observer.read(later) == [AtBoundary(3, BoundaryKind.PARAGRAPH, 9.0, "c")]


def test_margins_around_injected_tokens_are_unknown_and_nothing_is_seen_of_an_answer():
    observer = Observer()
    injected = CompletionOutput(
        0, token_ids=[1, 2], stats=[TokenStats(0.0, 0.0, 0.0, 5.0)], boundaries=[Boundary("sentence", 1)],
        phase=Phase.THINKING, num_output_tokens=2, num_thinking_tokens=2,
    )  # fmt: skip
    (seen,) = observer.read(injected)
    assert isinstance(seen, AtBoundary) and math.isnan(seen.margin)
    answer = CompletionOutput(
        0, token_ids=[3], stats=[NO_MARGIN], boundaries=[Boundary("sentence", 2)], num_output_tokens=3
    )
    assert observer.read(answer) == []


def test_written_tokens_come_in_order_without_gaps():
    observer = Observer()
    seen = [one for told in (20, 40, 60, 80) for one in observer.read(news(told, new=20))]
    assert seen == [Wrote(40, (7,) * 40), Wrote(80, (7,) * 40)]


async def test_probes_that_agree_end_thinking_and_the_reason_names_the_rule():
    engine = Asked()
    steersman = await steer(engine, {"early_stop": {"consistency": "2/2"}})
    assert engine.ends == [(0, ThinkingEndReason.CONSISTENCY)]
    assert engine.looks == [("probe", 0)] * 2, "no look after the end"
    assert steersman.decisions == {("consistency", "stopped"): 1}


class Alike:
    """An embedder to which all texts are near each other, as near as `cosine` says."""

    def embed(self, texts):
        return [unit((1.0, 0.0) if index % 2 else (0.8, 0.6)) for index, _ in enumerate(texts)]


@pytest.mark.parametrize(("min_cosine", "classes"), [(0.75, 1), (0.9, 2)])
def test_the_operators_embedder_compares_prose(min_cosine, classes):
    steersman = Steersman(Asked(), language()[2], (), "pebble", embedder=Alike(), min_cosine=min_cosine)
    found = steersman.equality().partition(["it is the red one there", "a house of that colour"])
    assert len(found.classes) == classes


async def test_peeks_end_thinking():
    engine = Asked()
    await steer(engine, {"early_stop": {"entropy": 0.1}})
    assert engine.ends == [(0, ThinkingEndReason.ENTROPY)] and set(engine.looks) == {("peek", 0)}


async def test_dropped_looks_decide_nothing_and_are_asked_again():
    engine = Asked(dropped="the batch is full")
    steersman = await steer(engine, {"early_stop": {"consistency": "2/2"}})
    assert len(engine.looks) > 2 and not engine.ends and not steersman.decisions


async def test_a_stop_that_comes_too_late_is_counted_as_such():
    steersman = await steer(Asked(refuses=True), {"early_stop": {"consistency": "2/2"}})
    assert steersman.decisions == {("consistency", "late"): 1}


@pytest.mark.parametrize(("more", "grammar"), [({"task": "tools"}, False), ({"task": "code"}, False), ({}, True)])
async def test_guard_rails_leave_looks_out(more, grammar):
    engine = Asked()
    await steer(engine, {"preset": "aggressive", **more}, grammar=grammar, paragraphs=3)
    assert not engine.looks and [reason for _, reason in engine.ends] in ([], [ThinkingEndReason.LOOP])


@pytest.mark.parametrize(("ending", "outcome"), [("It is \\boxed{42}.", "agreed"), ("It is \\boxed{41}.", "disagreed")])
async def test_shadow_mode_stops_nothing_and_compares_with_the_answer(ending, outcome):
    engine = Asked()
    steersman = await steer(engine, {"early_stop": {"consistency": "2/2"}, "shadow": True}, ending=ending)
    assert not engine.ends
    assert steersman.decisions == {("consistency", outcome): 1}


async def test_a_rule_that_disagreed_too_often_is_off():
    """Eleven live traces in shadow mode with another answer are more than 2 % of 500: the next one is not stopped."""
    engine = Asked()
    steersman = Steersman(engine, language()[2], (5,), "pebble")
    for number in range(11):
        assert steersman.board.off == (), number
        wish = {"early_stop": {"consistency": "2/2"}, "shadow": True}
        await steer(engine, wish, paragraphs=5, ending="\\boxed{41}", on=steersman)
    assert steersman.board.off == (("consistency", ""),)
    assert steersman.decisions == {("consistency", "disagreed"): 11}
    steering = steersman.begin("r", parse_control({"early_stop": {"consistency": "2/2"}}), grammar=False)
    assert steering is not None
    for number in range(1, 6):
        steering.observe(output(news(160 * number, new=160, places=[("paragraph", 160 * number - 2)])))
        await until(lambda: settled(steering))
    steering.close()
    assert not engine.ends


async def test_nothing_is_steered_unless_asked_for_and_models_that_cannot_be_ended_are_refused():
    steersman = Steersman(Asked(), language()[2], (), "pebble")
    assert steersman.begin("r", None, grammar=False) is None
    assert steersman.begin("r", parse_control({"preset": "exact"}), grammar=False) is None
    with pytest.raises(UnsupportedError, match="control"):
        Steersman(Asked(), None, (), "plain").begin("r", parse_control({"preset": "balanced"}), grammar=False)


def test_every_rule_is_a_reason_why_thinking_ends():
    names = {rule.name for rules in PRESETS.values() for rule in rules.rules} | {"confidence", "entropy"}
    assert names <= set(ThinkingEndReason)
