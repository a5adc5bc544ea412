"""Finds the thinking family of a loaded tokenizer. Knows nothing about requests."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from thinkfold.errors import ParameterError, UnsupportedError
from thinkfold.text.vocabulary import Vocabulary
from thinkfold.thinking.family import Family
from thinkfold.thinking.markers import MarkerSet
from thinkfold.thinking.specs import SPECS, FamilySpec
from thinkfold.thinking.tracker import Tracker
from thinkfold.types import Phase, PromptState

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Family", "resolve_family"]


def resolve_family(
    tokenizer: PreTrainedTokenizerBase,
    vocabulary: Vocabulary,
    model_type: str,
    *,
    start: str | None = None,
    end: str | None = None,
    force: str | None = None,
) -> Family | None:
    """The family by the chat template's own words, or None: the model does not think.

    A vocabulary that holds markers is no evidence. `start` and `end` replace the table,
    `force` replaces the sequence that ends thinking. Raises ParameterError for half a pair,
    UnsupportedError if `force` does not end thinking or holds words that would be thinking.
    """
    template = _template(tokenizer)
    spec = _own_spec(start, end) or _find_spec(template, model_type)
    if spec is None:
        if force is not None:
            raise ParameterError("think_force", "this model does not think: give think_start and think_end, too")
        return None
    family = _resolve(tokenizer, vocabulary, spec)
    wanted = force if force is not None else spec.force + _force_tail(template, spec)
    family = replace(family, force_ids=_force_ids(tokenizer, vocabulary, spec, wanted))
    if _ends_thinking(family):
        return family
    if force is not None:
        raise UnsupportedError("think_force", f"{force!r} must be an end marker and no thinking (see closing_words)")
    return replace(family, force_ids=())


def _template(tokenizer: PreTrainedTokenizerBase) -> str:
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default") or next(iter(template.values()), "")
    return template or ""


def _own_spec(start: str | None, end: str | None) -> FamilySpec | None:
    if start is None and end is None:
        return None
    for name, marker, other in (("think_start", start, "think_end"), ("think_end", end, "think_start")):
        if not marker:
            raise ParameterError(name, f"must be a non-empty string, it goes with {other}")
    assert start is not None and end is not None
    return FamilySpec("custom", (start,), (end,), end, force_tail="")


def _find_spec(template: str, model_type: str) -> FamilySpec | None:
    for spec in SPECS:
        mentioned = any(marker in template for marker in (*spec.starts, *spec.ends, *spec.signs))
        right_type = not spec.model_types or model_type.startswith(spec.model_types)
        if mentioned and right_type and all(text in template for text in spec.evidence):
            return spec
    return None


def _force_tail(template: str, spec: FamilySpec) -> str:
    """The longest run of newlines that the template writes after the end marker, where the forced end stops there."""
    if not spec.force.endswith(spec.ends[0]):
        return spec.force_tail
    runs = re.findall(re.escape(spec.ends[0]) + r"((?:\\n)+)", template)
    return max(runs, key=len).replace("\\n", "\n") if runs else spec.force_tail


def _force_ids(
    tokenizer: PreTrainedTokenizerBase, vocabulary: Vocabulary, spec: FamilySpec, wanted: str
) -> tuple[int, ...]:
    """Tokens of the forced text; an end marker with an entry of its own is that entry."""
    for marker in spec.ends:
        token_id = _single_id(tokenizer, vocabulary, marker)
        if token_id is not None and wanted.startswith(marker):
            return (token_id, *tokenizer.encode(wanted[len(marker) :], add_special_tokens=False))
    return tuple(tokenizer.encode(wanted, add_special_tokens=False))


def _resolve(tokenizer: PreTrainedTokenizerBase, vocabulary: Vocabulary, spec: FamilySpec) -> Family:
    ids: dict[str, list[tuple[int, ...]]] = {}
    texts: dict[str, list[str]] = {}
    groups = {
        "starts": spec.starts,
        "ends": spec.ends,
        "implicit_ends": spec.implicit_ends,
        "openers": spec.openers,
        "closers": spec.closers,
    }
    for group, markers in groups.items():
        for marker in markers:
            sequence = _marker_ids(tokenizer, vocabulary, marker)
            if sequence is None:
                texts.setdefault(group, []).append(marker)
            else:
                ids.setdefault(group, []).append(sequence)
    tokens = MarkerSet(**{group: tuple(found) for group, found in ids.items()})
    delimiters = _present_ids(tokenizer, vocabulary, spec.delimiters)
    turns = _present_ids(tokenizer, vocabulary, spec.turns)
    return Family(
        name=spec.name,
        vocabulary=vocabulary,
        tokens=tokens,
        texts=MarkerSet(**{group: tuple(found) for group, found in texts.items()}),
        delimiter_ids=delimiters,
        turn_ids=turns or _turn_ids(vocabulary, delimiters, (*tokens.starts, *tokens.ends, *tokens.implicit_ends)),
    )


def _single_id(tokenizer: PreTrainedTokenizerBase, vocabulary: Vocabulary, text: str) -> int | None:
    """The one vocabulary entry that is exactly this text."""
    token_id = tokenizer.convert_tokens_to_ids(text)
    if isinstance(token_id, int) and vocabulary.token_bytes(token_id) == text.encode():
        return token_id
    return None


def _present_ids(tokenizer: PreTrainedTokenizerBase, vocabulary: Vocabulary, texts: Iterable[str]) -> frozenset[int]:
    found = (_single_id(tokenizer, vocabulary, text) for text in texts)
    return frozenset(token_id for token_id in found if token_id is not None)


def _marker_ids(tokenizer: PreTrainedTokenizerBase, vocabulary: Vocabulary, marker: str) -> tuple[int, ...] | None:
    """Ids of a marker that cannot be spelled otherwise; None for ordinary text.

    One entry of its own, or a sequence that an added token pins down.
    """
    single = _single_id(tokenizer, vocabulary, marker)
    if single is not None:
        return (single,)
    ids = tuple(tokenizer.encode(marker, add_special_tokens=False))
    return ids if any(token_id in vocabulary.added_ids for token_id in ids) else None


def _turn_ids(vocabulary: Vocabulary, delimiters: frozenset[int], markers: Iterable[Iterable[int]]) -> frozenset[int]:
    """Tokens that part turns: special ones and those written <|like this|>, markers excepted."""
    barred = {i for i in vocabulary.added_ids if vocabulary.token_bytes(i).startswith((b"<|", "<｜".encode()))}
    return (vocabulary.special_ids | vocabulary.eos_ids | barred) - delimiters - {i for ids in markers for i in ids}


def _ends_thinking(family: Family) -> bool:
    """Whether the forced sequence ends thinking and prints nothing."""
    tracker = Tracker(family, PromptState(Phase.THINKING, 0, 0))
    pieces = [piece for token_id in family.force_ids for piece in tracker.push(token_id)]
    return tracker.phase is Phase.ANSWER and not "".join(piece.text for piece in pieces + tracker.flush()).strip()
