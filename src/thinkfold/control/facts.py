"""What is known of one thinking branch: margins, peeks, probe answers and their costs. Pure."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from thinkfold.control.equality import Equality
from thinkfold.control.rule import Action, AtBoundary, Observation, Peek, Peeked, Probe, Probed, Wrote

ALPHA = 0.2  # of the running mean and variance of peeked entropies (EAT, arXiv 2509.26522)
HEDGES = ("wait", "hold", "but", "okay", "no", "hmm")
KEPT_TOKENS = 1024
_TAIL = 64  # characters kept so that a tag may straddle two boundaries

_HEDGE = re.compile(rf"\b(?:{'|'.join(HEDGES)})\b", re.IGNORECASE)
_TAG = re.compile(r"<confidence>\s*([0-9]{1,3}(?:\.[0-9]+)?)\s*(%?)\s*</confidence>", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """One probe: its answer (None if there was none or it hedges) and its geometric mean probability."""

    thinking_tokens: int
    answer: str | None
    confidence: float


@dataclass(slots=True)
class Facts:
    """Filled by `record`; rules only read it."""

    equality: Equality = field(default_factory=Equality)
    thinking_tokens: int = 0
    margin: float = math.nan
    stated_confidence: float | None = None  # of the last `<confidence>` tag
    num_peeks: int = 0
    last_peek: int = 0  # thinking tokens where one was asked for
    first_entropy: float = math.nan
    entropy: float = math.nan  # running mean
    variance: float = math.inf
    probes: list[ProbeAnswer] = field(default_factory=list)
    last_probe: int = 0
    probe_tokens: int = 0
    peek_tokens: int = 0
    recent: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT_TOKENS))
    _tail: str = ""
    _classes: list[int | None] | None = None

    def record(self, seen: Observation) -> None:
        """Take in one observation."""
        self.thinking_tokens = max(self.thinking_tokens, seen.thinking_tokens)
        match seen:
            case AtBoundary():
                self.margin = seen.margin
                self._read_tag(seen.text)
            case Wrote():
                self.recent.extend(seen.token_ids)
            case Peeked():
                self._add_peek(seen)
            case Probed():
                self.probe_tokens += seen.tokens
                found = ProbeAnswer(seen.thinking_tokens, read_probe(seen.text), math.exp(min(0.0, seen.mean_logprob)))
                self.probes.append(found)
                self._classes = None

    def note(self, action: Action) -> None:
        """Remember where a look was asked for; it may be dropped and never come back."""
        if isinstance(action, Peek):
            self.last_peek = self.thinking_tokens
        elif isinstance(action, Probe):
            self.last_probe = self.thinking_tokens

    def agreeing(self, window: int) -> int:
        """How many of the last `window` probes give the answer of the last one; 0 if that gives none."""
        recent = self.classes()[-window:]
        return sum(c == recent[-1] for c in recent) if recent and recent[-1] is not None else 0

    def flips(self) -> int:
        """How often a probe's answer differs from the one before; giving none is a difference, too."""
        classes = self.classes()
        return sum(a != b or a is None for a, b in pairwise(classes))

    def classes(self) -> Sequence[int | None]:
        """Class of each probe's answer among all of them, None for no answer."""
        if self._classes is None:
            partition = self.equality.partition([probe.answer for probe in self.probes])
            self._classes = [partition.class_of(index) for index in range(len(self.probes))]
        return self._classes

    def _add_peek(self, seen: Peeked) -> None:
        self.num_peeks += 1
        self.peek_tokens += seen.tokens
        if self.num_peeks == 1:
            self.first_entropy = self.entropy = seen.entropy
            return
        self.entropy += ALPHA * (seen.entropy - self.entropy)
        spread = (seen.entropy - self.entropy) ** 2
        before = spread if math.isinf(self.variance) else self.variance
        self.variance = ALPHA * spread + (1 - ALPHA) * before

    def _read_tag(self, text: str) -> None:
        text = self._tail + text
        for value, percent in _TAG.findall(text):
            stated = float(value) / (100 if percent or float(value) > 1 else 1)
            if stated <= 1:
                self.stated_confidence = stated
        self._tail = text[-_TAIL:]


def read_probe(text: str) -> str | None:
    """The answer of a probe: up to the first brace that nothing opened, else the first line; None if it hedges.

    Hedge words count as whole words (`no` is not in `know`) and only beside others: a plain "No" is an answer.
    """
    depth, end = 0, len(text)
    for match in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth < 0:
            end = match.start()
            break
    answer = text[:end].strip()
    answer = answer.partition("\n")[0].strip() if depth >= 0 else answer
    hedged = _HEDGE.search(answer) and answer.strip(" .!*").casefold() not in HEDGES
    return answer if answer and not hedged else None
