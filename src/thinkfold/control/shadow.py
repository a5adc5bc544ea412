"""Shadow mode: what a rule would have done, whether it would have been right, and when that is too seldom."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

MAX_DISAGREEMENT = 0.02
WINDOW = 500  # traces


@dataclass(frozen=True, slots=True)
class WouldStop:
    """A rule would have ended thinking here. `answer` is what a probe said there, once `answered`."""

    rule: str
    why: str
    thinking_tokens: int
    answered: bool = False
    answer: str | None = None

    def with_answer(self, answer: str | None) -> WouldStop:
        """The same stop with its probe's answer, None for one that gave none."""
        return replace(self, answered=True, answer=answer)


@dataclass(frozen=True, slots=True)
class ShadowVerdict:
    """How a stop would have turned out: thinking tokens saved, and the same answer or another."""

    stop: WouldStop
    saved_tokens: int
    agreed: bool


@dataclass(slots=True)
class Scoreboard:
    """Verdicts of each (rule, model, task) over its last traces.

    A rule is off as soon as it disagrees in more than 2 % of a window of 500 traces, which may be
    certain before all of them are seen. It stays off until `forget`.
    """

    max_disagreement: float = MAX_DISAGREEMENT
    window: int = WINDOW
    _seen: dict[tuple[str, str, str], deque[bool]] = field(default_factory=dict)
    _off: set[tuple[str, str, str]] = field(default_factory=set)

    def record(self, rule: str, model: str, task: str, agreed: bool) -> bool:
        """Count one verdict. True if it has just switched the rule off."""
        key = rule, model, task
        verdicts = self._seen.setdefault(key, deque(maxlen=self.window))
        verdicts.append(agreed)
        if key in self._off or verdicts.count(False) <= self.max_disagreement * self.window:
            return False
        self._off.add(key)
        return True

    def switched_off(self, model: str, task: str) -> frozenset[str]:
        """Names of the rules that are off."""
        return frozenset(rule for rule, *place in self._off if place == [model, task])

    @property
    def off(self) -> tuple[tuple[str, str], ...]:
        """(rule, task) of all that are off."""
        return tuple(sorted({(rule, task) for rule, _, task in self._off}))

    def forget(self, rule: str, model: str, task: str) -> None:
        """Begin anew with a rule."""
        self._seen.pop((rule, model, task), None)
        self._off.discard((rule, model, task))
