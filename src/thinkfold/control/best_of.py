"""Best of N with a verifier, as a state machine like `control.voting`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from thinkfold.control.ballot import tally
from thinkfold.control.equality import Equality
from thinkfold.control.extract import extract
from thinkfold.control.verifier import with_median
from thinkfold.control.voting import CancelTraces, StartTraces, TraceFailed, next_wave
from thinkfold.types import BestOfParams

GOOD_SCORE = 0.95  # two answers of one class with this end the search for a better one
KILL_BELOW = 0.3  # under the best score, after KILL_STEPS steps
KILL_STEPS = 3


@dataclass(frozen=True, slots=True)
class Candidate:
    """One finished sample: `score` None is a miss."""

    number: int
    reply: str
    tokens: int
    score: float | None = None


@dataclass(frozen=True, slots=True)
class CandidateFinished:
    """A trace wrote its answer with so many output tokens."""

    trace: int
    reply: str
    tokens: int


@dataclass(frozen=True, slots=True)
class CandidateScored:
    """The verifier came back for a finished trace; None is a miss."""

    trace: int
    score: float | None


@dataclass(frozen=True, slots=True)
class StepScored:
    """The verifier scored a live trace behind its `steps`-th step."""

    trace: int
    steps: int
    score: float | None


BestOfObservation = CandidateFinished | CandidateScored | StepScored | TraceFailed


@dataclass(frozen=True, slots=True)
class ScoreTrace:
    """Ask the verifier about a finished trace."""

    trace: int


@dataclass(frozen=True, slots=True)
class BestOfResult:
    """The chosen trace, None if all failed. `scores` by trace, misses filled by the median."""

    trace: int | None
    answer: str | None
    rule: str  # `good`; `all` where every sample was looked at, `unscored` where none of them has a score
    scores: dict[int, float]
    misses: int


@dataclass(frozen=True, slots=True)
class Choose:
    """The last action."""

    result: BestOfResult


BestOfAction = StartTraces | CancelTraces | ScoreTrace | Choose


@dataclass(slots=True)
class BestOf:
    """Call `start` once, then `observe`. Traces are numbered from 0 in order of start."""

    params: BestOfParams
    equality: Equality = field(default_factory=Equality)
    result: BestOfResult | None = field(default=None, init=False)
    _live: set[int] = field(default_factory=set, init=False)
    _started: int = field(default=0, init=False)
    _waiting: set[int] = field(default_factory=set, init=False)  # finished, not scored
    _done: dict[int, Candidate] = field(default_factory=dict, init=False)
    cancelled: int = field(default=0, init=False)

    @property
    def started(self) -> int:
        return self._started

    @property
    def live(self) -> list[int]:
        """Traces that run."""
        return sorted(self._live)

    @property
    def candidates(self) -> list[Candidate]:
        """Finished traces, by number; one that waits for its score has none yet."""
        return [self._done[trace] for trace in sorted(self._done)]

    def start(self) -> list[BestOfAction]:
        """The first wave."""
        return [self._start_wave()]

    def observe(self, seen: BestOfObservation) -> list[BestOfAction]:
        """What to do now; nothing follows Choose."""
        if self.result is not None:
            return []
        match seen:
            case CandidateFinished() if seen.trace in self._live:
                self._live.discard(seen.trace)
                self._waiting.add(seen.trace)
                self._done[seen.trace] = Candidate(seen.trace, seen.reply, seen.tokens)
                return [ScoreTrace(seen.trace)]
            case CandidateScored() if seen.trace in self._waiting:
                self._waiting.discard(seen.trace)
                found = self._done[seen.trace]
                self._done[seen.trace] = Candidate(found.number, found.reply, found.tokens, seen.score)
            case TraceFailed() if seen.trace in self._live:
                self._live.discard(seen.trace)
            case StepScored() if seen.trace in self._live and self._is_behind(seen):
                self._live.discard(seen.trace)
                self.cancelled += 1
                return [CancelTraces((seen.trace,), "unsure"), *self._advance()]
            case _:
                return []
        return self._advance()

    def _advance(self) -> list[BestOfAction]:
        if self._good_enough():
            return self._choose("good")
        if self._live or self._waiting:
            return []
        return [self._start_wave()] if self._started < self.params.n else self._choose("all")

    def _start_wave(self) -> StartTraces:
        count = next_wave(self._started, self.params.n)
        self._live |= set(range(self._started, self._started + count))
        self._started += count
        return StartTraces(count)

    def _is_behind(self, seen: StepScored) -> bool:
        best = max((c.score for c in self._done.values() if c.score is not None), default=None)
        if best is None or seen.score is None or seen.steps < KILL_STEPS:
            return False
        return seen.score < best - KILL_BELOW

    def _good_enough(self) -> bool:
        good = [c for c in self._done.values() if c.score is not None and c.score >= GOOD_SCORE]
        classes = self.equality.partition([extract(candidate.reply).answer for candidate in good]).classes
        return any(len(found.members) >= 2 for found in classes)

    def _choose(self, rule: str) -> list[BestOfAction]:
        rest = tuple(self.live)
        self._live.clear()
        self.cancelled += len(rest)
        scored = [candidate for candidate in self.candidates if candidate.number not in self._waiting]
        if scored and all(candidate.score is None for candidate in scored):
            rule = "unscored"
        best = choose(scored, self.equality)
        filled = with_median([candidate.score for candidate in scored])
        self.result = BestOfResult(
            trace=None if best is None else best.number,
            answer=None if best is None else extract(best.reply).answer,
            rule=rule,
            scores={candidate.number: score for candidate, score in zip(scored, filled, strict=True)},
            misses=sum(candidate.score is None for candidate in scored),
        )
        return [*([CancelTraces(rest, "decided")] if rest else []), Choose(self.result)]


def choose(candidates: Sequence[Candidate], equality: Equality) -> Candidate | None:
    """The best candidate: the class of equal answers with the largest sum of scores, its best member.

    Where most have no short answer, the best score alone. Misses count as the median; ties go to
    fewer tokens, then to the earlier one. Without any score the largest class wins.
    """
    if not candidates:
        return None
    scores = with_median([candidate.score for candidate in candidates])
    if all(candidate.score is None for candidate in candidates):
        scores = [1.0] * len(candidates)
    answers = [extract(candidate.reply).answer for candidate in candidates]

    def rank(index: int) -> tuple[float, int, int]:
        return scores[index], -candidates[index].tokens, -index

    found = tally(answers, scores, equality)
    if not found.classes or 2 * found.abstained > len(candidates):
        return candidates[max(range(len(candidates)), key=rank)]
    best = max(found.classes, key=lambda one: (one.weight, *max((-candidates[i].tokens, -i) for i in one.members)))
    return candidates[max(best.members, key=rank)]
