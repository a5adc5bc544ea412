"""What may be asked of votes and best of N, and which decisions there are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from thinkfold.errors import ParameterError
from thinkfold.types.checks import choice, fields_of, integer, number
from thinkfold.types.sampling import MAX_N
from thinkfold.types.search import SearchParams
from thinkfold.types.verdict import DEFAULT_SECONDS, MAX_SECONDS, Scorer, check_name

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
    confidence. `top_share` lets only the surest traces vote, once 32 have finished. `equality` is `rungs`
    or `call`: at the end the model itself is asked, once, which of the answers that are still apart mean
    the same.
    """

    field: ClassVar[str] = "vote"
    counted: ClassVar[str] = "n"  # the field that bounds `samples`

    n: int = DEFAULT_VOTES
    mode: VoteMode = "waves"
    stop: Literal["exact", "balanced"] = "balanced"
    weights: Literal["none", "confidence"] = "none"
    m: int | None = None
    top_share: float | None = None
    equality: Literal["rungs", "call"] = "rungs"

    def __post_init__(self) -> None:
        integer("vote.n", self.n, 2, MAX_N)
        choice("vote.mode", self.mode, ("waves", "all", "short"))
        choice("vote.stop", self.stop, ("exact", "balanced"))
        choice("vote.weights", self.weights, ("none", "confidence"))
        choice("vote.equality", self.equality, ("rungs", "call"))
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
    def samples(self) -> int:
        """Samples at most."""
        return self.n

    @property
    def first(self) -> int:
        """How many of mode `short` must have finished and agree."""
        return min(3, self.n) if self.m is None else self.m


@dataclass(frozen=True, slots=True)
class BestOfParams:
    """The best of `n` samples by a verifier. Raises ParameterError.

    `verifier` is the name of one that the engine knows (`EngineConfig.verifiers`), an http(s) URL or a callable. It
    reads answers, or also their `thinking`, or as well unfinished thinking at its paragraphs (`steps`). A score that
    is not there after `timeout_s` seconds counts as the median of the others.
    """

    field: ClassVar[str] = "best_of"
    counted: ClassVar[str] = "n"

    verifier: str | Scorer
    n: int = DEFAULT_CANDIDATES
    timeout_s: float = DEFAULT_SECONDS
    reads: Literal["answer", "thinking", "steps"] = "answer"

    def __post_init__(self) -> None:
        if not callable(self.verifier) and (not isinstance(self.verifier, str) or not self.verifier):
            raise ParameterError("best_of.verifier", f"must be a name, a URL or a callable, got {self.verifier!r:.60}")
        integer("best_of.n", self.n, 1, MAX_N)
        if self.n == 1:
            raise ParameterError("best_of.n", "a verifier over one sample costs time and chooses nothing: 2 or more")
        number("best_of.timeout_s", self.timeout_s, 0.0, MAX_SECONDS, open_low=True)
        choice("best_of.reads", self.reads, ("answer", "thinking", "steps"))

    @property
    def samples(self) -> int:
        """Samples at most."""
        return self.n


Decision = VoteParams | BestOfParams | SearchParams


def one_decision(*asked: Decision | None) -> Decision | None:
    """The one that is asked for, None without any. Raises ParameterError for two."""
    given = [how for how in asked if how is not None]
    if len(given) > 1:
        raise ParameterError(given[1].field, f"goes without {given[0].field}: give one of them")
    return given[0] if given else None


def parse_vote(given: Any) -> VoteParams | None:
    """`true` is a vote over 4, `false` and null none, an object holds VoteParams' fields. Raises ParameterError."""
    if given is None or given is False:
        return None
    return VoteParams() if given is True else VoteParams(**fields_of("vote", given, VoteParams))


def parse_best_of(given: Any) -> BestOfParams | None:
    """Null is none, an object holds BestOfParams' fields; its verifier is a name. Raises ParameterError."""
    if given is None:
        return None
    known = fields_of("best_of", given, BestOfParams)
    if "verifier" not in known:
        raise ParameterError("best_of.verifier", "is missing")
    check_name("best_of.verifier", known["verifier"])
    return BestOfParams(**known)
