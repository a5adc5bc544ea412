"""What may be asked of a search over steps of thinking."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from thinkfold.errors import ParameterError
from thinkfold.types.checks import choice, fields_of, integer, number
from thinkfold.types.sampling import MAX_N
from thinkfold.types.verdict import DEFAULT_SECONDS, MAX_SECONDS, Scorer, check_name

MIN_RESERVE, MAX_RESERVE = 64, 4096  # of max_tokens for answers, a tenth in between


@dataclass(frozen=True, slots=True)
class SearchParams:
    """Search over steps of thinking. Raises ParameterError.

    `beam` keeps `width` of all states after each of `depth` steps, each with `branch` continuations. `tree` (tree of
    thoughts) goes on from the best `width` open states anywhere. A step ends with a `step` behind
    `min_step_tokens` tokens, after `max_step_tokens` at the latest. A state's score is its last step's mean token
    `confidence`, a `probe` (the probability of the answer that it would give now) or a `verifier`'s word about its
    thinking. `max_tokens` bounds all that is generated, dropped states and probes included; None is no bound.
    """

    field: ClassVar[str] = "search"
    counted: ClassVar[str] = "width"  # with `branch`, the field that bounds `samples`

    kind: Literal["beam", "tree"] = "beam"
    width: int | None = None
    branch: int | None = None
    depth: int | None = None
    score: Literal["confidence", "probe", "verifier"] | None = None
    verifier: str | Scorer | None = None
    timeout_s: float = DEFAULT_SECONDS
    step: Literal["paragraph", "segment"] = "paragraph"
    min_step_tokens: int = 256
    max_step_tokens: int = 512
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        choice("search.kind", self.kind, ("beam", "tree"))
        choice("search.step", self.step, ("paragraph", "segment"))
        choice("search.score", self.score, ("confidence", "probe", "verifier"))
        for name, high in (("width", 64), ("branch", 16), ("depth", 256)):
            if getattr(self, name) is not None:
                integer(f"search.{name}", getattr(self, name), 1, high)
        integer("search.max_step_tokens", self.max_step_tokens, 1, 65_536)
        integer("search.min_step_tokens", self.min_step_tokens, 0, self.max_step_tokens)
        number("search.timeout_s", self.timeout_s, 0.0, MAX_SECONDS, open_low=True)
        if self.verifier is not None and not callable(self.verifier) and not isinstance(self.verifier, str):
            raise ParameterError("search.verifier", f"must be a name, a URL or a callable, got {self.verifier!r:.60}")
        if (self.verifier is None) != (self.scored_by != "verifier"):
            raise ParameterError("search.score", "verifier and a verifier's name go together")
        if self.samples > MAX_N:
            raise ParameterError("search.width", f"width × branch must be at most {MAX_N}")
        if self.sizes[1] == 1:
            raise ParameterError("search.branch", "must be 2 or more: one continuation leaves nothing to choose")
        if self.max_tokens is not None:
            least = self.sizes[1] * (self.max_step_tokens + self.score_tokens) + MIN_RESERVE
            integer("search.max_tokens", self.max_tokens, least)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Width, branch and depth, with the kind's own numbers where none is given."""
        width, branch, depth = (4, 4, 40) if self.kind == "beam" else (2, 3, 3)
        return self.width or width, self.branch or branch, self.depth or depth

    @property
    def samples(self) -> int:
        """Branches that run at once, at most."""
        return self.sizes[0] * self.sizes[1]

    @property
    def most_held(self) -> int:
        """States that are kept at once, at most: those to go on from, their children, ended ones, probes."""
        width, probes = self.sizes[0], self.samples if self.scored_by == "probe" else 0
        return probes + (self.samples + 2 * width if self.kind == "beam" else 3 * self.samples + width)

    @property
    def scored_by(self) -> Literal["confidence", "probe", "verifier"]:
        return self.score or ("confidence" if self.verifier is None else "verifier")

    @property
    def score_tokens(self) -> int:
        """Tokens that the score of a state may cost."""
        return PROBE_TOKENS if self.scored_by == "probe" else 0

    @property
    def reserve(self) -> int:
        """Tokens of `max_tokens` that are kept for an answer."""
        return min(MAX_RESERVE, max(MIN_RESERVE, (self.max_tokens or 0) // 10))


PROBE_TOKENS = 48  # closing words, end marker and the answer that would follow


def parse_search(given: Any) -> SearchParams | None:
    """Null is none, an object holds SearchParams' fields; its verifier is a name. Raises ParameterError."""
    if given is None:
        return None
    known = fields_of("search", given, SearchParams)
    if "verifier" in known:
        check_name("search.verifier", known["verifier"])
    return SearchParams(**known)
