"""What may be asked of votes, best-of-N and search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from thinkfold.errors import ParameterError
from thinkfold.types.checks import choice, integer, number
from thinkfold.types.sampling import MAX_N

DEFAULT_VOTES = 4
DEFAULT_CANDIDATES = 8
MIN_FILTERED = 32  # finished traces, below which none is filtered out

VoteMode = Literal["waves", "all", "short"]


@dataclass(frozen=True, slots=True)
class VoteParams:
    """A vote over at most `n` samples of one question. Raises ParameterError.

    `waves` starts a few samples at a time and stops when the answer is settled, `all` starts every
    sample at once under the same stops, `short` starts all and takes the first `m` if they agree.
    `stop` is `exact` (only when no later vote could change the winner: always unweighted, nothing is
    killed) or `balanced`. `weights` is what a vote counts: 1, or its trace's bottom-10 % group
    confidence. `top_share` lets only the surest traces vote, once 32 have finished.
    """

    field: ClassVar[str] = "vote"

    n: int = DEFAULT_VOTES
    mode: VoteMode = "waves"
    stop: Literal["exact", "balanced"] = "balanced"
    weights: Literal["none", "confidence"] = "none"
    m: int | None = None
    top_share: float | None = None

    def __post_init__(self) -> None:
        integer("vote.n", self.n, 2, MAX_N)
        choice("vote.mode", self.mode, ("waves", "all", "short"))
        choice("vote.stop", self.stop, ("exact", "balanced"))
        choice("vote.weights", self.weights, ("none", "confidence"))
        if self.m is not None:
            integer("vote.m", self.m, 2, self.n)
            if self.mode != "short":
                raise ParameterError("vote.m", "belongs to mode short")
        if self.stop == "exact" and (self.mode == "short" or self.weights != "none" or self.top_share is not None):
            raise ParameterError("vote.stop", "exact goes with modes waves and all, without weights and top_share")
        if self.top_share is not None:
            number("vote.top_share", self.top_share, 0.0, 1.0, open_low=True)
            if self.weights == "none":
                raise ParameterError("vote.top_share", "needs weights: confidence")
            if self.n < MIN_FILTERED:
                raise ParameterError("vote.top_share", f"needs n of at least {MIN_FILTERED}, got {self.n}")

    @property
    def first(self) -> int:
        """How many of mode `short` must have finished and agree."""
        return min(3, self.n) if self.m is None else self.m


@dataclass(frozen=True, slots=True)
class BestOfParams:
    """The best of `n` samples by a verifier. Raises ParameterError.

    `verifier` is an http(s) URL, or the name under which a callable was registered. A score that is
    not there after `timeout_s` seconds counts as the median of the others.
    """

    verifier: str
    n: int = DEFAULT_CANDIDATES
    timeout_s: float = 5.0

    def __post_init__(self) -> None:
        if not isinstance(self.verifier, str) or not self.verifier:
            raise ParameterError("best_of.verifier", f"must be a URL or a name, got {self.verifier!r:.60}")
        integer("best_of.n", self.n, 1, MAX_N)
        if self.n == 1:
            raise ParameterError("best_of.n", "a verifier over one sample costs time and chooses nothing: 2 or more")
        number("best_of.timeout_s", self.timeout_s, 0.0, 600.0, open_low=True)


@dataclass(frozen=True, slots=True)
class SearchParams:
    """Search over steps of thinking. Raises ParameterError.

    `beam` keeps `width` of all states after each depth, each with `branch` continuations. `tree`
    (tree of thoughts) does so depth by depth up to `depth` with fewer, larger thoughts. A step is a
    paragraph group of at least `min_step_tokens` and at most `max_step_tokens` tokens.
    """

    method: Literal["beam", "tree"] = "beam"
    width: int | None = None
    branch: int | None = None
    depth: int | None = None
    min_step_tokens: int = 256
    max_step_tokens: int = 512
    verifier: str | None = None

    def __post_init__(self) -> None:
        choice("search.method", self.method, ("beam", "tree"))
        for name, high in (("width", 64), ("branch", 16), ("depth", 256)):
            if getattr(self, name) is not None:
                integer(f"search.{name}", getattr(self, name), 1, high)
        integer("search.max_step_tokens", self.max_step_tokens, 1, 65_536)
        integer("search.min_step_tokens", self.min_step_tokens, 0, self.max_step_tokens)
        if self.verifier is not None and (not isinstance(self.verifier, str) or not self.verifier):
            raise ParameterError("search.verifier", f"must be a URL or a name, got {self.verifier!r:.60}")
        if self.sizes[0] * self.sizes[1] > MAX_N:
            raise ParameterError("search.width", f"width × branch must be at most {MAX_N}")

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Width, branch and depth, with the method's own numbers where none is given."""
        width, branch, depth = (4, 4, 40) if self.method == "beam" else (2, 3, 3)
        return self.width or width, self.branch or branch, self.depth or depth


def parse_vote(given: Any) -> VoteParams | None:
    """`true` is a vote over 4, `false` and null none, an object holds VoteParams' fields. Raises ParameterError."""
    if given is None or given is False:
        return None
    return VoteParams() if given is True else VoteParams(**_fields("vote", given, VoteParams))


def parse_best_of(given: Any) -> BestOfParams | None:
    """Null is none, an object holds BestOfParams' fields. Raises ParameterError."""
    if given is None:
        return None
    known = _fields("best_of", given, BestOfParams)
    if "verifier" not in known:
        raise ParameterError("best_of.verifier", "is missing")
    return BestOfParams(**known)


def parse_search(given: Any) -> SearchParams | None:
    """Null is none, an object holds SearchParams' fields. Raises ParameterError."""
    return None if given is None else SearchParams(**_fields("search", given, SearchParams))


def _fields(field: str, given: Any, kind: type[Any]) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise ParameterError(field, f"must be an object, got {given!r:.60}")
    names = [entry.name for entry in fields(kind)]
    unknown = next((name for name in given if name not in names), None)
    if unknown is not None:
        raise ParameterError(f"{field}.{unknown!s:.60}", f"there is no such field, there are {', '.join(names)}")
    return {name: value for name, value in given.items() if value is not None}
