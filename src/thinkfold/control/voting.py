"""A vote over samples of one question, as a state machine: observations in, actions out.

Who runs it starts samples (*traces*), reports what they do and carries out the actions. It
knows no tokens, clocks or device; all traces of one vote are numbered from 0 in order of start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from thinkfold.control.ballot import Tally, VoteClass, joined, question, tally
from thinkfold.control.equality import Equality
from thinkfold.control.extract import extract
from thinkfold.control.trace_confidence import percentile
from thinkfold.control.vote_stops import MIN_SHARE, Leaning, is_safe_in_flight, leader_probability, settled_by
from thinkfold.types import VoteParams
from thinkfold.types.vote import MIN_FILTERED

FIRST_WAVE = 4
TICK_TOKENS = 1_024  # of thinking, between two rounds of probes
WIDE_VOTE, WIDE_TICK_TOKENS = 64, 2_048  # from so many samples on
MIN_FINISHED = 4  # before a vote is settled by probability, and before traces are killed
KILL_SHARE = 0.10  # of lowest groups of finished traces: a running window below it ends its trace
SETTLED_WARMUP, SETTLED_TICKS, SETTLED_SHARE = 4, 3, 0.6
PRUNE_WARMUP, PRUNE_TICKS, PRUNE_SHARE, MIN_LIVE = 4, 2, 0.5, 3


@dataclass(frozen=True, slots=True)
class TraceFinished:
    """A trace wrote its answer. `reply` is the visible answer; `bottom` and `lowest` are of TraceConfidence."""

    trace: int
    reply: str
    bottom: float | None = None
    lowest: float | None = None


@dataclass(frozen=True, slots=True)
class TraceFailed:
    """A trace ended without an answer."""

    trace: int


@dataclass(frozen=True, slots=True)
class Ticked:
    """All live traces were probed: what each would answer now, None for nothing."""

    answers: Mapping[int, str | None]


@dataclass(frozen=True, slots=True)
class WindowFilled:
    """The mean confidence of a live trace's current full window."""

    trace: int
    confidence: float


@dataclass(frozen=True, slots=True)
class Compared:
    """The reply to CompareAnswers; empty where there was none."""

    reply: str


VoteObservation = TraceFinished | TraceFailed | Ticked | WindowFilled | Compared


@dataclass(frozen=True, slots=True)
class StartTraces:
    """Start so many more samples."""

    count: int


@dataclass(frozen=True, slots=True)
class CancelTraces:
    """End these samples at once; their tokens are discarded. `why` is `decided`, `pruned` or `unsure`."""

    traces: tuple[int, ...]
    why: str


@dataclass(frozen=True, slots=True)
class EndTraceThinking:
    """The vote is settled in flight: let this sample write the answer now, and report it finished."""

    trace: int


@dataclass(frozen=True, slots=True)
class CompareAnswers:
    """Nothing runs any more: ask a model this, once, and report it as Compared."""

    prompt: str


@dataclass(frozen=True, slots=True)
class VoteResult:
    """The outcome. `answer` is None if no sample had one; `trace` is the sample whose text to show.

    `rule` says what settled it, `share` is the leader's part of the weight, `probability` that of being
    the mode by counts. `by_reply` says that whole replies were compared, as most had no short answer.
    """

    answer: str | None
    trace: int | None
    rule: str
    classes: tuple[VoteClass, ...]  # members and representatives are traces
    share: float
    probability: float
    started: int
    finished: int
    cancelled: int
    abstained: int
    by_reply: bool = False


@dataclass(frozen=True, slots=True)
class Decide:
    """The last action."""

    result: VoteResult


VoteAction = StartTraces | CancelTraces | EndTraceThinking | CompareAnswers | Decide


@dataclass(slots=True)
class _Trace:
    live: bool = True
    reply: str | None = None  # of a finished one
    answer: str | None = None
    weight: float = 1.0
    lowest: float | None = None
    probes: list[str | None] = field(default_factory=list)


def next_wave(started: int, n: int) -> int:
    """How many of up to `n` samples start next: four, or half as many as have started if that is more."""
    return min(n - started, max(FIRST_WAVE, started // 2))


class Voting:
    """One vote. Call `start` once, then `observe`. With `in_flight` false no probes are used (guard rails)."""

    def __init__(self, params: VoteParams, equality: Equality | None = None, *, in_flight: bool = True) -> None:
        self._params = params
        self._equality = equality or Equality()
        self._exact = params.stop == "exact"
        self.wants_ticks = in_flight and not self._exact
        self._traces: list[_Trace] = []
        self._ticks = 0
        self._leaders: list[str | None] = []  # the leading answer at each tick
        self._writer: int | None = None  # the trace that writes the answer of a vote settled in flight
        self._settled_by = ""
        self._before_call: tuple[Tally, str, bool] | None = None  # what was counted, its rule, whether whole replies
        self._cancelled = 0
        self.result: VoteResult | None = None

    @property
    def tick_tokens(self) -> int:
        """Thinking tokens of the slowest trace between two rounds of probes."""
        return WIDE_TICK_TOKENS if self._params.n >= WIDE_VOTE else TICK_TOKENS

    @property
    def live(self) -> list[int]:
        """Traces that run."""
        return [number for number, trace in enumerate(self._traces) if trace.live]

    @property
    def started(self) -> int:
        return len(self._traces)

    @property
    def cancelled(self) -> int:
        return self._cancelled

    def start(self) -> list[VoteAction]:
        """The first wave."""
        return [self._start_wave()]

    def observe(self, seen: VoteObservation) -> list[VoteAction]:
        """What to do now. News of traces that have ended is ignored; nothing follows Decide."""
        if self.result is not None:
            return []
        match seen:
            case TraceFinished() if self._traces[seen.trace].live:
                self._finish(seen)
            case TraceFailed() if self._traces[seen.trace].live:
                self._traces[seen.trace].live = False
            case Ticked() if self.wants_ticks:
                return self._tick(seen)
            case WindowFilled():
                return self._kill_unsure(seen)
            case Compared() if self._before_call is not None:
                found, rule, by_reply = self._before_call
                return [self._result(joined(found, seen.reply), rule, by_reply=by_reply)]
            case _:
                return []
        return self._advance()

    def tally(self) -> Tally:
        """The count of finished traces; members are traces."""
        return self._count([trace.answer for trace in self._traces], only_finished=True)

    def _finish(self, seen: TraceFinished) -> None:
        trace = self._traces[seen.trace]
        trace.live = False
        trace.reply, trace.answer, trace.lowest = seen.reply, extract(seen.reply).answer, seen.lowest
        if self._params.weights == "confidence" and seen.bottom is not None and seen.bottom > 0:
            trace.weight = seen.bottom

    def _advance(self) -> list[VoteAction]:
        """After a finish: settle, go on, or start the next wave."""
        found = self.tally()
        if self._writer is not None:
            return [] if self._traces[self._writer].live else self._decide(found, self._settled_by)
        if rule := self._settled(found):
            return self._decide(found, rule)
        if self.live:
            return []
        return [self._start_wave()] if len(self._traces) < self._params.n else self._decide(found, "all")

    def _start_wave(self) -> StartTraces:
        started, n = len(self._traces), self._params.n
        count = next_wave(started, n) if self._params.mode == "waves" else n - started
        self._traces += [_Trace() for _ in range(count)]
        return StartTraces(count)

    def _settled(self, found: Tally) -> str | None:
        """The first rule by which finished votes decide."""
        finished = sum(trace.reply is not None for trace in self._traces)
        remaining = self._params.n - len(self._traces) + len(self.live)
        may_abstain = 2 * (found.abstained + remaining) > finished + remaining  # replies may be compared instead
        if self._params.weights == "none" and not may_abstain and found.lossless(remaining):
            return "lossless"
        if self._exact or not found.classes:
            return None
        if self._params.mode == "short" and finished == self._params.first == found.classes[0].count:
            return "short"
        if finished < MIN_FINISHED:
            return None
        weighted = self._params.weights != "none"
        if found.classes[0].count == found.counts[0]:
            rule = settled_by(found.counts, None if weighted else remaining)
            if rule is not None:
                return rule
        return "share" if weighted and found.share >= MIN_SHARE else None

    def _tick(self, seen: Ticked) -> list[VoteAction]:
        """A round of probes: settle in flight, or prune who disagrees."""
        if self._writer is not None:
            return []
        self._ticks += 1
        for number in self.live:
            self._traces[number].probes.append(seen.answers.get(number))
        voices = [trace.probes[-1] if trace.live and trace.probes else trace.answer for trace in self._traces]
        found = self._count(voices)
        self._leaders.append(found.classes[0].answer if found.classes else None)
        if not found.classes or not self.live:
            return []
        leader = found.classes[0]
        if self._ticks > 1 and (rule := self._settled_in_flight(found)):
            return self._write(leader, rule)
        return self._prune(found)

    def _settled_in_flight(self, found: Tally) -> str | None:
        finished: dict[int, float] = {}
        for number, trace in enumerate(self._traces):
            place = found.class_of(number)
            if trace.reply is not None and place is not None:
                finished[place] = finished.get(place, 0.0) + trace.weight
        running = [self._leaning(number, found) for number in self.live]
        if is_safe_in_flight(finished, running, 0):
            return "in_flight"
        recent = self._leaders[-SETTLED_TICKS - 1 :]
        unchanged = len(recent) > SETTLED_TICKS and all(
            a is not None and b is not None and self._equality.same(a, b) for a, b in pairwise(recent)
        )
        if self._ticks >= SETTLED_WARMUP + SETTLED_TICKS and unchanged and found.share >= SETTLED_SHARE:
            return "settled"
        return None

    def _streak(self, number: int) -> int:
        """For how many ticks a live trace has given the same answer."""
        probes = self._traces[number].probes
        streak = 1
        while streak < len(probes) and self._agree(probes[-1], probes[-1 - streak]):
            streak += 1
        return streak

    def _leaning(self, number: int, found: Tally) -> Leaning:
        trace, streak = self._traces[number], self._streak(number)
        last = trace.probes[-3:]
        flipped = len(last) == 3 and not (self._agree(last[0], last[1]) or self._agree(last[1], last[2]))
        return Leaning(found.class_of(number), streak, flipped, trace.weight)

    def _write(self, leader: VoteClass, rule: str) -> list[VoteAction]:
        """Decide, or let the live trace of the leading class with the longest streak write the answer."""
        if any(self._traces[number].reply is not None for number in leader.members):
            return self._decide(self.tally(), rule, leader.answer)
        self._writer = max(leader.members, key=lambda number: (self._streak(number), -number))
        self._settled_by = rule
        others = tuple(number for number in self.live if number != self._writer)
        return [*self._cancel(others, "decided"), EndTraceThinking(self._writer)]

    def _prune(self, found: Tally) -> list[VoteAction]:
        """Cancel live traces that were off the majority for two ticks in a row."""
        if self._ticks < PRUNE_WARMUP or found.share < PRUNE_SHARE:
            return []
        leaders = self._leaders[-PRUNE_TICKS:]
        off = [
            number
            for number in self.live
            if len(recent := self._traces[number].probes[-PRUNE_TICKS:]) == PRUNE_TICKS
            and not any(self._agree(mine, lead) for mine, lead in zip(recent, leaders, strict=True))
        ]
        spared = max(0, MIN_LIVE - (len(self.live) - len(off)))
        return self._cancel(tuple(off[spared:]), "pruned")

    def _kill_unsure(self, seen: WindowFilled) -> list[VoteAction]:
        """Cancel a trace whose window is less sure than the worst tenth of finished traces ever were."""
        lows = [trace.lowest for trace in self._traces if trace.lowest is not None]
        if self._exact or self._writer is not None or len(lows) < MIN_FINISHED or not self._traces[seen.trace].live:
            return []
        if seen.confidence >= percentile(lows, KILL_SHARE):
            return []
        return [*self._cancel((seen.trace,), "unsure"), *self._advance()]

    def _cancel(self, traces: tuple[int, ...], why: str) -> list[VoteAction]:
        for number in traces:
            self._traces[number].live = False
        self._cancelled += len(traces)
        return [CancelTraces(traces, why)] if traces else []

    def _decide(self, found: Tally, rule: str, answer: str | None = None) -> list[VoteAction]:
        """Cancel what runs and name the winner: the leader, or the class of `answer`. A call may come first."""
        actions = self._cancel(tuple(self.live), "decided")
        finished = sum(trace.reply is not None for trace in self._traces)
        if not found.classes and not finished:
            found, rule = self._count([t.probes[-1] if t.probes else None for t in self._traces]), "last_probes"
        by_reply = bool(finished) and 2 * found.abstained > finished
        if by_reply:
            found = self._count([trace.reply for trace in self._traces], only_finished=True)
        if answer is None and self._may_turn(found) and (prompt := question(found)):
            self._before_call = found, rule, by_reply
            return [*actions, CompareAnswers(prompt)]
        return [*actions, self._result(found, rule, answer, by_reply=by_reply)]

    def _may_turn(self, found: Tally) -> bool:
        """Whether a call is asked for, and could change the winner."""
        return self._params.equality == "call" and not (self._params.weights == "none" and found.lossless(0))

    def _result(self, found: Tally, rule: str, answer: str | None = None, *, by_reply: bool) -> Decide:
        classes = found.classes
        winner = classes[0] if classes else None
        if answer is not None and not by_reply:
            winner = next((one for one in classes if self._equality.same(one.answer, answer)), winner)
        self.result = VoteResult(
            answer=winner.answer if winner else None,
            trace=winner.representative if winner else next(iter(self._with_reply()), None),
            rule=rule,
            classes=classes,
            share=found.share if winner is None or not classes else winner.weight / sum(c.weight for c in classes),
            probability=leader_probability(found.counts)[0],
            started=len(self._traces),
            finished=len(self._with_reply()),
            cancelled=self._cancelled,
            abstained=found.abstained,
            by_reply=by_reply,
        )
        return Decide(self.result)

    def _count(self, answers: Sequence[str | None], *, only_finished: bool = False) -> Tally:
        voters = self._voters() if only_finished else set(range(len(answers)))
        counted = [answer if number in voters else None for number, answer in enumerate(answers)]
        weights = [trace.weight for trace in self._traces]
        found = tally(counted, weights, self._equality)
        silent = sum(counted[number] is None for number in voters)
        return Tally(found.classes, silent)

    def _voters(self) -> set[int]:
        """Finished traces; of many only the surest, if that is asked for."""
        finished = self._with_reply()
        share = self._params.top_share
        if share is None or len(finished) < MIN_FILTERED:
            return set(finished)
        surest = sorted(finished, key=lambda number: (-self._traces[number].weight, number))
        return set(surest[: max(1, round(share * len(finished)))])

    def _with_reply(self) -> list[int]:
        return [number for number, trace in enumerate(self._traces) if trace.reply is not None]

    def _agree(self, a: str | None, b: str | None) -> bool:
        return a is not None and b is not None and self._equality.same(a, b)
