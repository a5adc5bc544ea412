"""Where a part of a response ends, what a handle is, and boundaries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from thinkfold.errors import ParameterError
from thinkfold.types.checks import choice, integer


@dataclass(frozen=True, slots=True)
class Until:
    """Extend to the next boundary behind `min_tokens` new tokens, `max_tokens` at most. Raises ParameterError."""

    at: Literal["segment", "paragraph", "sentence"] | None = None
    min_tokens: int = 0
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        choice("until.at", self.at, ("segment", "paragraph", "sentence"))
        integer("until.min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            integer("until.max_tokens", self.max_tokens, 1)
            if self.min_tokens > self.max_tokens:
                raise ParameterError("until.min_tokens", f"must be at most until.max_tokens ({self.max_tokens})")
        if self.at is None and self.max_tokens is None:
            raise ParameterError("until", "needs at or max_tokens")


@dataclass(frozen=True, slots=True)
class Handle:
    """A kept state of one branch, from which others can start. `position` counts output tokens.

    `state_hash` covers tokens, folds and parameters: equal hashes go on equally. While the handle lives,
    `holds_folding_before` says in output tokens what is not folded in branches that share it (None:
    they never fold). It ends `ttl_s` seconds after its last use.
    """

    id: str
    position: int
    state_hash: str
    ttl_s: float
    holds_folding_before: int | None = None
