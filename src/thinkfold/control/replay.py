"""What rules would have done on recorded traces: one trace under early stopping, many under a vote. Pure.

A recorded look stands for the first one that is asked for at or before its place; a stop takes
effect where the next recorded probe tells the answer that the model would have given.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from thinkfold.control.early_stop import EarlyStopping
from thinkfold.control.facts import read_probe
from thinkfold.control.rule import Action, AtBoundary, BoundaryKind, EndThinking, Peek, Peeked, Probe, Probed, Wrote
from thinkfold.control.voting import (
    CancelTraces,
    Decide,
    EndTraceThinking,
    StartTraces,
    Ticked,
    TraceFinished,
    VoteAction,
    VoteResult,
    Voting,
    WindowFilled,
)
from thinkfold.types import VoteParams


@dataclass(frozen=True, slots=True)
class Place:
    """A boundary and what is known there. `entropy`, `probe` and the rest are None where nobody looked.

    `at` counts thinking tokens; `correct` says whether the probe's answer solves the problem.
    """

    at: int
    kind: str
    margin: float
    entropy: float | None = None
    peek_tokens: int = 0
    probe: str | None = None
    mean_logprob: float = 0.0
    probe_tokens: int = 0
    correct: bool = False


@dataclass(frozen=True, slots=True)
class Record:
    """One sample of one problem, with its boundaries in order. `stop_tokens` is what a forced end costs."""

    index: int
    task: str
    thinking_tokens: int
    output_tokens: int
    reply: str
    correct: bool
    token_ids: list[int] = field(default_factory=list)  # of thinking
    places: list[Place] = field(default_factory=list)
    stop_tokens: int = 0
    bottom: float | None = None
    lowest: float | None = None
    windows: list[tuple[int, float]] = field(default_factory=list)  # output tokens, mean confidence of the full window

    @property
    def probed(self) -> list[Place]:
        """Places with a probe."""
        return [place for place in self.places if place.probe is not None]


@dataclass(frozen=True, slots=True)
class Replayed:
    """One trace under rules. `tokens` of thinking, looks and a forced end together."""

    tokens: int
    look_tokens: int
    correct: bool
    rule: str | None = None


def replay(record: Record, rules: EarlyStopping) -> Replayed:
    """Drive the rules over a trace. A stop with no recorded probe behind it is none: the model was about to end."""
    waiting: list[Action] = []
    written = looks = 0
    end: EndThinking | None = None
    for place in record.places:
        if written < place.at <= len(record.token_ids):
            waiting += rules.observe(Wrote(place.at, tuple(record.token_ids[written : place.at])))
            written = place.at
        waiting += rules.observe(AtBoundary(place.at, BoundaryKind(place.kind), place.margin))
        tokens, end = _look(place, rules, waiting)
        looks += tokens
        if end is not None and place.probe is not None:
            used = place.at + looks + record.stop_tokens
            return Replayed(used, looks, place.correct, end.rule)
    return Replayed(record.thinking_tokens + looks, looks, record.correct)


def oracle(record: Record) -> int:
    """Thinking tokens after which every probe gives the right answer, the first place of these.

    All of the thinking where the trace itself ends wrong.
    """
    first = record.thinking_tokens
    if record.correct:
        for place in reversed(record.probed):
            if not place.correct:
                break
            first = place.at
    return first


def _look(place: Place, rules: EarlyStopping, waiting: list[Action]) -> tuple[int, EndThinking | None]:
    """Answer the looks that wait, as far as this place was looked at; what they cost, and a stop."""
    tokens = 0
    while True:
        end = next((action for action in waiting if isinstance(action, EndThinking)), None)
        if end is not None:
            return tokens, end
        if place.entropy is not None and Peek() in waiting:
            waiting.remove(Peek())
            tokens += place.peek_tokens
            waiting += rules.observe(Peeked(place.at, place.entropy, place.peek_tokens))
            continue
        probe = next((action for action in waiting if isinstance(action, Probe)), None)
        if probe is None or place.probe is None:
            return tokens, None
        waiting.remove(probe)
        tokens += place.probe_tokens
        waiting += rules.observe(Probed(place.at, place.probe, place.mean_logprob, place.probe_tokens))


@dataclass(frozen=True, slots=True)
class VoteReplayed:
    """One vote. `tokens` of all traces with their looks; `critical_path` of the longest chain of work."""

    result: VoteResult
    correct: bool
    tokens: int
    look_tokens: int
    critical_path: int


class _Clock:
    """All live traces write one token a step."""

    def __init__(self, records: Sequence[Record], voting: Voting, tick_tokens: int) -> None:
        self.records, self.voting, self.tick = records, voting, tick_tokens
        self.now = self.look_tokens = self.looks_in_a_row = 0
        self.began: dict[int, int] = {}
        self.spent: dict[int, int] = {}  # of traces that have ended
        self.short: dict[int, tuple[int, str]] = {}  # a trace told to answer: end of it, reply
        self.windows_seen: dict[int, int] = {}
        self.decided: VoteResult | None = None

    def run(self) -> VoteResult:
        self.carry_out(self.voting.start())
        next_tick = self.tick
        while self.decided is None:
            first = min(self.voting.live, key=lambda number: (self.end_of(number), number))
            window = min(self.voting.live, key=lambda number: (self.next_window(number), number))
            horizon = min(self.end_of(first), next_tick if self.voting.wants_ticks else math.inf)
            if self.next_window(window) < horizon:
                self.now = int(self.next_window(window))
                seen = self.windows_seen[window] = self.windows_seen.get(window, 0) + 1
                self.carry_out(self.voting.observe(WindowFilled(window, self.records[window].windows[seen - 1][1])))
            elif self.voting.wants_ticks and next_tick < self.end_of(first):
                self.now = next_tick
                next_tick += self.tick
                self.carry_out(self.voting.observe(Ticked(dict(self.probe_all()))))
            else:
                self.now = max(self.now, self.end_of(first))
                self.spent[first] = self.now - self.began[first]
                record = self.records[first]
                reply = self.short[first][1] if first in self.short else record.reply
                self.carry_out(self.voting.observe(TraceFinished(first, reply, record.bottom, record.lowest)))
        return self.decided

    def next_window(self, number: int) -> float:
        """When a trace reports its window next; never while it writes the answer of a settled vote."""
        windows, seen = self.records[number].windows, self.windows_seen.get(number, 0)
        return math.inf if number in self.short or seen >= len(windows) else self.began[number] + windows[seen][0]

    def end_of(self, number: int) -> int:
        return (
            self.short[number][0] if number in self.short else self.began[number] + self.records[number].output_tokens
        )

    def probe_all(self) -> Iterator[tuple[int, str | None]]:
        """What each live trace would answer; one that writes its answer already is not asked."""
        asked = 0
        for number in self.voting.live:
            place = self.last_place(number)
            if place is not None and place.probe is not None:
                self.look_tokens += place.probe_tokens
                asked = max(asked, place.probe_tokens)
                yield number, read_probe(place.probe)
        self.looks_in_a_row += asked

    def last_place(self, number: int) -> Place | None:
        progress = self.now - self.began[number]
        return next((place for place in reversed(self.records[number].probed) if place.at <= progress), None)

    def carry_out(self, actions: Sequence[VoteAction]) -> None:
        for action in actions:
            match action:
                case StartTraces():
                    first = len(self.began)
                    self.began |= dict.fromkeys(range(first, first + action.count), self.now)
                case CancelTraces():
                    self.spent |= {number: self.now - self.began[number] for number in action.traces}
                case EndTraceThinking():
                    place, record = self.last_place(action.trace), self.records[action.trace]
                    assert place is not None and place.probe is not None  # it leads by its probe
                    answer = max(0, record.output_tokens - record.thinking_tokens) + record.stop_tokens
                    reply = f"\\boxed{{{read_probe(place.probe)}}}"
                    self.short[action.trace] = (min(self.now + answer, self.end_of(action.trace)), reply)
                case Decide():
                    self.decided = action.result


def replay_vote(records: Sequence[Record], params: VoteParams, tick_tokens: int | None = None) -> VoteReplayed:
    """A vote over the samples of one problem, on a clock where every live trace writes a token a step.

    Raises ValueError for fewer samples than votes. Without recorded probes there are no in-flight rules.
    """
    if len(records) < params.n:
        raise ValueError(f"{len(records)} samples are recorded, the vote takes up to {params.n}")
    voting = Voting(params, in_flight=all(record.probed for record in records[: params.n]))
    clock = _Clock(records, voting, tick_tokens or voting.tick_tokens)
    result = clock.run()
    correct = False
    if result.trace is not None:
        chosen = records[result.trace]
        place = clock.last_place(result.trace)
        spoke_early = result.trace in clock.short or result.rule == "last_probes"
        correct = place is not None and place.correct if spoke_early else chosen.correct
    return VoteReplayed(
        result,
        correct,
        tokens=sum(clock.spent.values()) + clock.look_tokens,
        look_tokens=clock.look_tokens,
        critical_path=clock.now + clock.looks_in_a_row,
    )
