"""A budget table for folds by what they do to a model's attention outputs, weighed by the loss's gradients."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from thinkfold.cli.capture import output_gradients, read, use_tape
from thinkfold.errors import ParameterError
from thinkfold.fold.compaction import importance, ranked
from thinkfold.fold.head_errors import both_ways, least_error_of_both
from thinkfold.fold.record import Record
from thinkfold.fold.segments import Segments
from thinkfold.fold.spans import Span
from thinkfold.runner.fold_queries import AHEAD

if TYPE_CHECKING:
    from thinkfold.cli.calibrate import Sample

QUERIES = 64  # positions after a span, and as many of its past, that judge it
LATER = 96  # positions behind those, whose outputs are compared
JUDGED = 256  # last tokens of a text whose loss is asked for gradients
STEP = 16  # entries


def error_budget(
    model: Any, inv_freq: Tensor, samples: Sequence[Sample], entries: int, conclusion: int
) -> tuple[list[list[float]], int, list[list[int]]]:
    """What heads get `[layers][kv_heads]` beside their conclusion, how many spans were measured, and pooled entries.

    Of each span, alone, it is measured how far each head's output moves for queries that come later, as a function of
    the tokens that it keeps; squares are weighed by mean squared gradients of the loss by that output. Raises
    ParameterError if no text goes on behind a span.
    """
    tape, kept = use_tape(model), sizes(max(span.tokens for sample in samples for span in sample.spans), conclusion)
    errors, slopes, folds = torch.zeros(()), torch.zeros(()), 0
    for sample in tqdm(samples, unit="text", file=sys.stderr):
        record = read(model, tape, sample.ids)
        slopes = slopes + output_gradients(model, tape, record, sample.ids, min(JUDGED, len(sample.ids) // 2)).cpu()
        for span in sample.spans:
            later = later_positions(span.due, len(sample.ids))
            if len(later):
                segments = cut(record, span, inv_freq)
                order = ranked(importance(segments), conclusion, span.ends)[0]
                errors = errors + both_ways(segments, order, record.future(later), kept).cpu()
                folds += 1
    if not folds:
        raise ParameterError("max_tokens", "no text goes on behind what would be folded of it")
    weighed = (errors * slopes.unsqueeze(-1)).sum(3)
    given, pooled = least_error_of_both(weighed, kept, max(entries, kept[0]))
    return (given - kept[0]).tolist(), folds, pooled.tolist() if pooled.any() else []


def sizes(tokens: int, conclusion: int) -> list[int]:
    """Entries that a head may keep of `tokens`: the conclusion in whole steps, then ever longer steps."""
    found, most = [-(-conclusion // STEP) * STEP], tokens // STEP * STEP
    while found[-1] < most:
        found.append(min(most, found[-1] + max(1, found[-1] // (4 * STEP)) * STEP))
    return found


def later_positions(begin: int, end: int) -> Tensor:
    """`LATER` positions or fewer in `[begin, end)`."""
    return torch.linspace(begin, end - 1, min(LATER, max(0, end - begin))).long()


def cut(record: Record, span: Span, inv_freq: Tensor) -> Segments:
    """A span as its fold knows it when it is due."""
    now = min(span.due, record.keys.shape[2])
    late = torch.linspace(span.end, now - 1, min(QUERIES, now - span.end)).long()
    past = torch.linspace(0, span.end - 1, QUERIES).long()
    return replace(record.segment(span.start, span.end, now, late, past, AHEAD, inv_freq), ends=span.ends)
