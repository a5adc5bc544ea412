"""Folding as clients see it: the wish in a body, each fold as it happens, and what became of segments."""

from __future__ import annotations

import json
import logging
import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from thinkfold.errors import ParameterError
from thinkfold.server.agents.fields import SessionFields, StepCacheFields
from thinkfold.server.body import StrictModel
from thinkfold.server.errors import renamed
from thinkfold.server.replies import FoldNews, SegmentPlace, SegmentState
from thinkfold.types import Fold, FoldParams, Segment

EVENT = "thinkfold.fold"
SEGMENT_EVENT = "thinkfold.segment"
FIELD_NAMES = {  # the engine's name of a field -> the client's
    name: f"thinkfold.{name}" for name in ("fold", "control", "tier", "session", "deadline_ms", "max_cost")
}

Kind = Literal["folded", "quantised", "raw"]

logger = logging.getLogger(__name__)


class FoldFields(StrictModel):
    """What a request asks of folding, checked by FoldParams; null takes the server's choice."""

    policy: str | None = None
    profile: str | None = None
    selector: str | None = None
    entries: int | None = None
    gate: float | None = None
    at_answer: str | None = None
    prefer: str | None = None
    delimiter_token: str | None = None
    delimiter_regex: str | None = None


class ThinkfoldFields(StrictModel):
    """Our own object in a body. `events` asks a stream for one event a segment and a fold.

    Thinking ends in time for an answer within `deadline_ms` and `max_cost`.
    """

    fold: FoldFields | None = None
    control: dict[str, Any] | None = None
    vote: bool | dict[str, Any] | None = None
    events: bool | None = None
    tier: str | None = None
    session: SessionFields | None = None
    step_cache: StepCacheFields | None = None
    deadline_ms: int | None = None
    max_cost: float | None = None

    def fold_params(self) -> FoldParams | None:
        """The wish in the engine's terms. Raises ParameterError."""
        if self.fold is None:
            return None
        try:
            return FoldParams(**dict(self.fold))
        except ParameterError as error:
            raise renamed(error, FIELD_NAMES) from None


def fold_data(choice: int, fold: Fold, segments: Sequence[Segment]) -> FoldNews:
    """A fold as JSON. `segment` is the one it ends in (None if it is not known); an unknown error is None."""
    owner = segment_of(fold, segments)
    return {
        "choice": choice,
        "id": fold.id,
        "segment": None if owner is None else owner.id,
        "start": fold.start,
        "end": fold.end,
        "entries": fold.entries,
        "pages_freed": fold.pages_freed,
        "error": None if math.isnan(fold.error) else fold.error,
        "refused": fold.refused,
        "quantised": fold.quantised,
    }


def segment_data(choice: int, segment: Segment) -> SegmentPlace:
    """A finished segment as JSON."""
    return {"choice": choice, "id": segment.id, "start": segment.start, "end": segment.end}


def log_fold(request_id: str, data: FoldNews) -> None:
    """One line for the operator: a JSON object."""
    logger.info(json.dumps({"event": EVENT, "request": request_id, **data}))


def segment_of(fold: Fold, segments: Sequence[Segment]) -> Segment | None:
    """The segment in which a fold ends; `segments` are in order."""
    index = bisect_left(segments, fold.end, key=lambda segment: segment.start) - 1
    return segments[index] if index >= 0 else None


def segment_states(choice: int, segments: Sequence[Segment], folds: Sequence[Fold]) -> list[SegmentState]:
    """What became of each finished segment.

    `folded`: most of its tokens are in summaries. `quantised`: they are all kept, in fewer bits. `raw`: the gate
    refused to fold it. `closed`: it is raw because nobody has folded it (yet). A span ends with a full page, so a few
    tokens of a folded segment stay raw or go with the next one.
    """
    kinds: dict[Kind, list[Fold]] = {
        "folded": [fold for fold in folds if not (fold.refused or fold.quantised)],
        "quantised": [fold for fold in folds if fold.quantised and not fold.refused],
        "raw": [fold for fold in folds if fold.refused],
    }
    for known in kinds.values():
        known.sort(key=lambda fold: fold.end)
    return [{"choice": choice, "id": s.id, "start": s.start, "end": s.end, "state": _state(s, kinds)} for s in segments]


def _state(segment: Segment, kinds: Mapping[Kind, Sequence[Fold]]) -> Kind | Literal["closed"]:
    """The first kind of folds that cover half of it."""
    half = (segment.end - segment.start) / 2
    for kind, folds in kinds.items():
        if _covered(segment, folds) >= half:
            return kind
    return "closed"


def _covered(segment: Segment, folds: Sequence[Fold]) -> int:
    """Tokens of the segment inside `folds`, which are sorted by their ends."""
    total = 0
    index = bisect_right(folds, segment.start, key=lambda fold: fold.end)
    while index < len(folds) and folds[index].start < segment.end:
        total += min(folds[index].end, segment.end) - max(folds[index].start, segment.start)
        index += 1
    return total
