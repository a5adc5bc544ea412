"""Where a decision over several samples stands, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from thinkfold.types.messages import by_position


@by_position
@dataclass(frozen=True, slots=True)
class AnswerClass:
    """Equal answers: the one that stands for them, how many gave it, and with what weight."""

    answer: str
    count: int
    weight: float


@by_position
@dataclass(frozen=True, slots=True)
class VoteState:
    """A vote. `rule` says what settled it; None while it runs.

    `share` is the leader's part of the weight, `probability` that of being the most likely answer by
    counts. `by_reply`: whole replies were compared, as most had no short answer. `sample` is shown.
    """

    kind: ClassVar[str] = "vote"

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


Outcome = VoteState
