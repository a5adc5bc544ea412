"""One model family's thinking markers, resolved to token ids or text, and prompt tails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from thinkfold.text.vocabulary import Vocabulary
from thinkfold.thinking.markers import MarkerSet, ParserTables, text_tables, token_tables
from thinkfold.types import Phase, PromptState


@dataclass(frozen=True, slots=True)
class Family:
    """How one loaded model marks its thinking.

    Markers that hold a vocabulary entry of their own are `tokens`, the others `texts`.
    `force_ids` is what the engine injects to end thinking, the answer's opener included;
    empty means that the end cannot be forced. `turn_ids` begin a turn in a rendered prompt.
    `delimiter_ids` end a segment.
    """

    name: str
    vocabulary: Vocabulary = field(repr=False, compare=False)
    tokens: MarkerSet[int]
    texts: MarkerSet[str]
    force_ids: tuple[int, ...] = ()
    delimiter_ids: frozenset[int] = frozenset()
    turn_ids: frozenset[int] = frozenset()
    token_tables: ParserTables[int] = field(init=False, repr=False, compare=False)
    text_tables: ParserTables[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_tables", token_tables(self.tokens))
        object.__setattr__(self, "text_tables", text_tables(self.texts))

    @property
    def end_token_id(self) -> int | None:
        """First token of the end marker, for margin statistics; None if it is ordinary text."""
        return self.tokens.ends[0][0] if self.tokens.ends else None

    def prompt_state(self, prompt_ids: Sequence[int]) -> PromptState:
        """Start state from the tail of a rendered prompt: what follows its last turn token.

        Earlier turns are never looked at. Cost is linear in the tail.
        """
        begin = len(prompt_ids)
        while begin and prompt_ids[begin - 1] not in self.turn_ids:
            begin -= 1
        tail = tuple(prompt_ids[begin:])
        starts, ends = self._find_markers(tail)
        if not starts and not ends:
            return PromptState(Phase.ANSWER, 0, len(prompt_ids))
        visible = begin + min(span.start for span in (*starts, *ends))
        last_start = max((span.end for span in starts), default=-1)
        if last_start <= max((span.end for span in ends), default=-1):
            return PromptState(Phase.ANSWER, 0, visible)
        return PromptState(Phase.THINKING, len(tail) - self._skip_newlines(tail, last_start), visible)

    def _skip_newlines(self, tail: Sequence[int], index: int) -> int:
        """The template writes newlines after its marker; they are no thinking."""
        while index < len(tail) and not self.vocabulary.token_bytes(tail[index]).strip(b"\n"):
            index += 1
        return index

    def _find_markers(self, tail: tuple[int, ...]) -> tuple[list[_Span], list[_Span]]:
        text = _TailText(self.vocabulary, tail)
        starts, ends = [], []
        for spans, ids, texts in (
            (starts, self.tokens.starts, self.texts.starts),
            (ends, (*self.tokens.ends, *self.tokens.implicit_ends), (*self.texts.ends, *self.texts.implicit_ends)),
        ):
            for marker in ids:
                spans += _find_ids(tail, tuple(marker))
            for marker in texts:
                spans += text.find("".join(marker))
        return starts, ends


@dataclass(frozen=True, slots=True)
class _Span:
    start: int
    end: int


def _find_ids(tail: tuple[int, ...], marker: tuple[int, ...]) -> list[_Span]:
    length = len(marker)
    return [_Span(i, i + length) for i in range(len(tail) - length + 1) if tail[i : i + length] == marker]


class _TailText:
    """The bytes of a prompt's tail, with the token that holds each byte."""

    def __init__(self, vocabulary: Vocabulary, tail: Sequence[int]) -> None:
        pieces = [vocabulary.token_bytes(i) for i in tail]
        self._bytes = b"".join(pieces)
        self._owner = [index for index, piece in enumerate(pieces) for _ in piece]

    def find(self, marker: str) -> list[_Span]:
        """Token spans that hold the marker, first and last token included."""
        needle, spans = marker.encode(), []
        at = self._bytes.find(needle)
        while at >= 0:
            end = at + len(needle)
            spans.append(_Span(self._owner[at], self._owner[end - 1] + 1))
            at = self._bytes.find(needle, end)
        return spans
