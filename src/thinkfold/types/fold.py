"""What may be asked of folding, the effective policy, and what became of a span."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from thinkfold.errors import ParameterError
from thinkfold.types.checks import choice, integer, number
from thinkfold.types.messages import by_position


class FoldMode(StrEnum):
    """When closed segments of thinking are folded."""

    OFF = "off"
    PRESSURE = "pressure"  # only when memory is short: with ample memory the output equals `off`
    EAGER = "eager"  # as soon as a segment is old enough


class AtAnswer(StrEnum):
    """What becomes of raw thinking KV when the answer starts."""

    KEEP = "keep"
    RECYCLE = "recycle"  # fold closed segments that are still raw; the last segment stays
    SWAP = "swap"  # raw thinking goes to host memory and is not read by the answer


@dataclass(frozen=True, slots=True)
class FoldProfile:
    """A named set of numbers: how thinking is cut and how much of it stays, in tokens.

    A segment is folded `fold_delay` tokens after its end to `entries` entries a KV head (on
    average over layers and heads); the last `keep_raw_tokens` stay raw. Segments shorter than
    `min_segment_tokens` join the next, longer ones than `max_segment_tokens` are cut. The first
    `keep_first_tokens` of thinking stay raw for good: there a model may say what it has to do.
    """

    max_segment_tokens: int = 1024
    min_segment_tokens: int = 256
    fold_delay: int = 256
    keep_raw_tokens: int = 256
    entries: int = 64
    keep_first_tokens: int = 0

    def behind(self, window: int) -> FoldProfile:
        """For a model some of whose layers see the last `window` tokens only: those stay raw, 0 is none."""
        return replace(self, keep_raw_tokens=max(self.keep_raw_tokens, window))


FIRST = 192  # without them Pebble loses 17 points of accuracy on long answers, with them none: docs/folding.md
FOLD_PROFILES: Mapping[str, FoldProfile] = {
    "default": FoldProfile(keep_first_tokens=FIRST),
    "fine": FoldProfile(512, 128, 128, 128, 32, FIRST),
    "coarse": FoldProfile(4096, 512, 512, 512, 64, FIRST),
    "pebble": FoldProfile(512, 128, 64, 128, 32, FIRST),
}
MAX_SEGMENT_TOKENS = 4096
DELIMITER_LAG = 32  # tokens after which a match of `delimiter_regex` is known


@dataclass(frozen=True, slots=True)
class FoldParams:
    """What a user may ask of folding; None takes the server's choice. Raises ParameterError.

    `gate` is the largest estimated error (a share of the attention output, 0 to 1) with which a
    fold is still committed; 0 refuses every fold, 1 commits all. `prefer` decides what
    admission counts on: the folded peak (`fold`) or the raw one (`queue`). `delimiter_token`, one
    token as text, and `delimiter_regex`, in RE2's syntax, end segments beside the family's own.
    """

    policy: FoldMode | str | None = None
    profile: str | None = None
    selector: str | None = None
    entries: int | None = None
    gate: float | None = None
    at_answer: AtAnswer | str | None = None
    prefer: Literal["fold", "queue"] | None = None
    delimiter_token: str | None = None
    delimiter_regex: str | None = None

    def __post_init__(self) -> None:
        choice("fold.policy", self.policy, tuple(FoldMode))
        choice("fold.profile", self.profile, tuple(FOLD_PROFILES))
        choice("fold.at_answer", self.at_answer, tuple(AtAnswer))
        choice("fold.prefer", self.prefer, ("fold", "queue"))
        for name in ("selector", "delimiter_token", "delimiter_regex"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ParameterError(f"fold.{name}", f"must be a text, got {value!r:.60}")
        if self.entries is not None:
            integer("fold.entries", self.entries, 0, MAX_SEGMENT_TOKENS)
        if self.gate is not None:
            number("fold.gate", self.gate, 0.0, 1.0)


@by_position
@dataclass(frozen=True, slots=True)
class FoldPolicy:
    """The effective fold policy of one request, as echoed to the user; every number resolved."""

    policy: FoldMode = FoldMode.OFF
    profile: str = "default"
    selector: str = "conclusion_attention"
    entries: int = 64
    gate: float = 1.0
    at_answer: AtAnswer = AtAnswer.KEEP
    prefer: Literal["fold", "queue"] = "fold"
    delimiter_token: str | None = None
    delimiter_regex: str | None = None

    @property
    def numbers(self) -> FoldProfile:
        """The profile with this policy's own number of entries."""
        return replace(FOLD_PROFILES[self.profile], entries=self.entries)
