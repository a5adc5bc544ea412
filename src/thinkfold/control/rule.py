"""The border between rules that stop thinking and who runs them: observations in, actions out.

The engine reports each observation once, in order of position, for one branch while it
thinks; it carries out the actions and reports peeks and probes back when they are done. A
dropped probe is simply never reported. Nothing here knows tokens' meaning or the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from thinkfold.control.facts import Facts


class BoundaryKind(StrEnum):
    """Where the text of thinking may be cut, by what ends there."""

    SENTENCE = "sentence"
    PARAGRAPH = "paragraph"
    TRANSITION = "transition"  # before a word such as `Wait`
    SEGMENT = "segment"


@dataclass(frozen=True, slots=True)
class AtBoundary:
    """Thinking reached a boundary. Sent for the strongest boundary only, from sentence to segment.

    `margin` is `TokenStats.margin` of the row behind the last token: log p(top 1) - log p(end
    marker), NaN where the marker is no single token. `text` is the thinking since the last one.
    """

    thinking_tokens: int
    kind: BoundaryKind
    margin: float = math.nan
    text: str = ""


@dataclass(frozen=True, slots=True)
class Wrote:
    """Some tokens of thinking were written; sent every few dozen tokens, in order and without gaps."""

    thinking_tokens: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Peeked:
    """A peek came back: entropy of the answer's next token, in nats. `tokens` is what it cost."""

    thinking_tokens: int  # where it was taken
    entropy: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Probed:
    """A probe came back: what the model would answer. `text` begins behind the probe's forced suffix.

    `mean_logprob` is over the decoded tokens of the answer, `tokens` counts forced and decoded ones.
    """

    thinking_tokens: int  # where it was taken
    text: str
    mean_logprob: float
    tokens: int


Observation = AtBoundary | Wrote | Peeked | Probed


@dataclass(frozen=True, slots=True)
class Peek:
    """Look at the answer's first row from here: end marker and `Final answer: ` on a fork."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask for the answer from here, greedily, at most `max_tokens` tokens."""

    max_tokens: int


@dataclass(frozen=True, slots=True)
class EndThinking:
    """Close thinking now and let the model write its answer. `why` is for people."""

    rule: str
    why: str


Action = Peek | Probe | EndThinking


class Rule(Protocol):
    """One way to see that thinking may end, or when to look.

    Called once for each observation, after `facts` has taken it in. A rule keeps no state that
    `facts` does not have, so that it may be switched off at any time.
    """

    @property
    def name(self) -> str: ...

    def decide(self, seen: Observation, facts: Facts) -> Action | None:
        """What to do, None for nothing."""
        ...
