"""What may be asked of early stopping: a preset, the simple knobs, or both."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Literal

from thinkfold.errors import ParameterError
from thinkfold.types.checks import choice, integer, number

MAX_PROBE_WINDOW = 32


class Preset(StrEnum):
    """A named set of numbers for all rules that stop thinking early."""

    EXACT = "exact"  # nothing that could change the answer
    CONSERVATIVE = "conservative"
    BALANCED = "balanced"
    AGGRESSIVE = "aggressive"


@dataclass(frozen=True, slots=True)
class EarlyStop:
    """The simple knobs; each alone is enough to stop, None is off. Raises ParameterError.

    `entropy`: the smoothed entropy of the answer's first token, peeked at, is below so many nats.
    `confidence`: the model's own `<confidence>` tag, or where it writes none the geometric mean
    probability of a probe's answer, is above this. `consistency` (k, n): k of the last n probe
    answers are equivalent, the last one among them.
    """

    entropy: float | None = None
    confidence: float | None = None
    consistency: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.entropy is not None:
            number("early_stop.entropy", self.entropy, 0.0, 20.0, open_low=True)
        if self.confidence is not None:
            number("early_stop.confidence", self.confidence, 0.0, 1.0)
        if self.consistency is not None:
            self._check_consistency(self.consistency)
        if (self.entropy, self.confidence, self.consistency) == (None, None, None):
            raise ParameterError("early_stop", "needs one of entropy, confidence, consistency")

    @staticmethod
    def _check_consistency(given: Any) -> None:
        if not isinstance(given, tuple) or len(given) != 2:
            raise ParameterError("early_stop.consistency", f"must be a pair of integers, got {given!r:.60}")
        integer("early_stop.consistency", given[1], 2, MAX_PROBE_WINDOW)
        integer("early_stop.consistency", given[0], 2, given[1])
        if 2 * given[0] <= given[1]:
            raise ParameterError("early_stop.consistency", f"must be a majority, got {given[0]}/{given[1]}")

    @property
    def needs_probes(self) -> bool:
        """Whether a probe has to be taken to decide."""
        return self.confidence is not None or self.consistency is not None


@dataclass(frozen=True, slots=True)
class ControlParams:
    """What a user may ask of early stopping; empty asks for nothing. Raises ParameterError.

    With `shadow` the rules run and say when they would have stopped, but nothing is stopped.
    `task` declares what makes early answers unreadable: then only loops are stopped.
    """

    preset: Preset | str | None = None
    early_stop: EarlyStop | None = None
    shadow: bool = False
    task: Literal["tools", "code"] | None = None

    def __post_init__(self) -> None:
        choice("control.preset", self.preset, tuple(Preset))
        choice("control.task", self.task, ("tools", "code"))
        if not isinstance(self.shadow, bool):
            raise ParameterError("control.shadow", f"must be true or false, got {self.shadow!r:.60}")
        if self.shadow and self.preset is None and self.early_stop is None:
            raise ParameterError("control.shadow", "there is nothing to watch: give a preset or early_stop")

    @property
    def asks(self) -> bool:
        """Whether any rule may stop thinking early or be watched."""
        return self.early_stop is not None or self.preset not in (None, Preset.EXACT)

    def over(self, default: ControlParams | None) -> ControlParams:
        """These rules where a preset or knobs are given, else those of `default`; a declared `task` stays."""
        if default is None or self.preset is not None or self.early_stop is not None:
            return self
        return replace(default, task=self.task or default.task)


def parse_control(given: Mapping[str, Any]) -> ControlParams:
    """ControlParams from JSON: `preset`, `early_stop` (also called `early_stop_threshold`), `shadow`, `task`.

    Null is not given. Raises ParameterError that names the field.
    """
    _known("control", given, ("preset", "early_stop", "early_stop_threshold", "shadow", "task"))
    knobs, alias = given.get("early_stop"), given.get("early_stop_threshold")
    if knobs is not None and alias is not None and knobs != alias:
        raise ParameterError("early_stop_threshold", "disagrees with early_stop")
    asked = alias if knobs is None else knobs
    shadow = given.get("shadow")
    return ControlParams(
        preset=given.get("preset"),
        early_stop=None if asked is None else parse_early_stop(asked),
        shadow=False if shadow is None else shadow,
        task=given.get("task"),
    )


def parse_early_stop(given: Any) -> EarlyStop:
    """The knobs from JSON, where `consistency` is written `"3/4"`. Raises ParameterError."""
    if not isinstance(given, Mapping):
        raise ParameterError(
            "early_stop", f"must be an object such as {{'entropy': 0.1, 'consistency': '3/4'}}, got {given!r:.60}"
        )
    _known("early_stop", given, ("entropy", "confidence", "consistency"))
    consistency = given.get("consistency")
    return EarlyStop(
        entropy=given.get("entropy"),
        confidence=given.get("confidence"),
        consistency=None if consistency is None else _pair(consistency),
    )


def _pair(given: Any) -> tuple[int, int]:
    match = re.fullmatch(r"\s*(\d{1,3})\s*/\s*(\d{1,3})\s*", given) if isinstance(given, str) else None
    if match is None:
        raise ParameterError("early_stop.consistency", f"must be written k/n such as '3/4', got {given!r:.60}")
    return int(match[1]), int(match[2])


def _known(field: str, given: Mapping[str, Any], names: tuple[str, ...]) -> None:
    unknown = next((name for name in given if name not in names), None)
    if unknown is not None:
        raise ParameterError(f"{field}.{unknown!s:.60}", f"there is no such field, there are {', '.join(names)}")
