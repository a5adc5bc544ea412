"""Where a decision over several samples stands, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from thinkfold.types.messages import by_position


@by_position
@dataclass(frozen=True, slots=True)
class AnswerClass:
    """Equal answers: the one that stands for them, how many gave it, with what weight, and what made them one."""

    answer: str
    count: int
    weight: float
    rung: str


@by_position
@dataclass(frozen=True, slots=True)
class VoteState:
    """A vote. `rule` says what settled it; None while it runs.

    `share` is the leader's part of the weight, `probability` that of being the most likely answer by
    counts. `by_reply`: whole replies were compared, as most had no short answer. `sample` is shown.
    """

    field: ClassVar[str] = "vote"

    n: int
    started: int
    running: int
    finished: int
    cancelled: int
    abstained: int
    classes: tuple[AnswerClass, ...] = ()
    share: float = 0.0
    probability: float = 0.0
    answer: str | None = None
    rule: str | None = None
    sample: int | None = None
    by_reply: bool = False


@by_position
@dataclass(frozen=True, slots=True)
class SampleScore:
    """What a verifier gave a finished sample: `score`, or the `error` for which the others' median stands in."""

    sample: int
    answer: str | None
    score: float | None = None
    error: str | None = None


@by_position
@dataclass(frozen=True, slots=True)
class BestOfState:
    """Best of `n` by a verifier. `rule` says what settled it; None while it runs.

    `scores` are of the finished samples that were asked about, by sample; `misses` of them have none. `sample` is
    shown, `answer` is its short answer.
    """

    field: ClassVar[str] = "best_of"

    n: int
    verifier: str
    reads: str
    timeout_s: float
    started: int = 0
    running: int = 0
    finished: int = 0
    cancelled: int = 0
    scores: tuple[SampleScore, ...] = ()
    misses: int = 0
    answer: str | None = None
    rule: str | None = None
    sample: int | None = None


@by_position
@dataclass(frozen=True, slots=True)
class SearchNode:
    """One state of a search's tree; `tokens` are those of its own step, `parent` None is the prompt's.

    `fate`: `open` (not gone on from), `expanded`, `ended` (thinking was over), `dropped`, `equal` (another one had the
    same text), `lost` (driven out of memory), `answered` or `chosen`. `error` says why a median stands for its score.
    """

    id: int
    parent: int | None
    depth: int
    tokens: int
    score: float
    fate: str
    error: str | None = None


@by_position
@dataclass(frozen=True, slots=True)
class SearchState:
    """A search, with all that it goes by. `rule` says what ended it; None while it runs, and `nodes` are empty then.

    `tokens` are all that were generated: `kept_tokens` on the path of the reply, the others are `discarded_tokens`,
    among them `probe_tokens` of scores. `misses` are states without a score of their own, `node` is shown.
    """

    field: ClassVar[str] = "search"

    kind: str
    width: int
    branch: int
    depth: int
    score: str
    verifier: str | None
    step: str
    min_step_tokens: int
    max_step_tokens: int
    max_tokens: int | None
    expanded: int = 0
    deepest: int = 0
    open: int = 0
    ended: int = 0
    lost: int = 0
    misses: int = 0
    tokens: int = 0
    probe_tokens: int = 0
    kept_tokens: int = 0
    discarded_tokens: int = 0
    best: float | None = None
    answer: str | None = None
    rule: str | None = None
    node: int | None = None
    nodes: tuple[SearchNode, ...] = ()


Outcome = VoteState | BestOfState | SearchState
