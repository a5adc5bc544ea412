"""Finds phases, segments and sentence ends in one branch's tokens, O(1) a token.

Knows nothing about budgets, stop strings or why a response ends.
"""

from __future__ import annotations

from thinkfold.text.detokenizer import Detokenizer
from thinkfold.text.vocabulary import Vocabulary
from thinkfold.thinking.delimiter import DelimiterSearch
from thinkfold.thinking.family import Family
from thinkfold.thinking.markers import Action, Piece
from thinkfold.thinking.segments import SegmentFinder, SentenceEnds
from thinkfold.thinking.text_parser import ThinkTextParser
from thinkfold.types import Phase, PromptState, Segment


class Tracker:
    """Incremental parser of one branch of a thinking model.

    `push` takes output tokens in order and returns printable pieces. Tokens and text are held
    only while they could still become a marker. A token of a finished start or end marker is
    not a thinking token; newlines that the model writes around markers are.
    """

    def __init__(
        self,
        family: Family,
        prompt: PromptState,
        *,
        min_segment_tokens: int = 1,
        max_segment_tokens: int = 1024,
        search: DelimiterSearch | None = None,
    ) -> None:
        starts_open = prompt.phase is Phase.THINKING
        self._family = family
        self._detokenizer = Detokenizer(family.vocabulary)
        self._parser = ThinkTextParser(
            family.text_tables, starts_open=starts_open, strip_head=starts_open and not prompt.prefilled_thinking
        )
        self._segments = SegmentFinder(family.delimiter_ids, min_segment_tokens, max_segment_tokens, search)
        self._sentences = SentenceEnds()
        self._held: list[int] = []
        self._state = 0
        self._token_starts: list[int] = []  # character positions of tokens inside the parser's held text
        self._at_marker = False
        self.num_tokens = 0
        self.num_thinking_tokens = 0
        if starts_open:
            self._segments.open(0)

    @property
    def phase(self) -> Phase:
        """The phase of the next token, as far as the tokens so far tell."""
        return self._parser.phase

    @property
    def pending(self) -> bool:
        """True inside an unfinished UTF-8 character."""
        return self._detokenizer.pending

    @property
    def at_boundary(self) -> bool:
        """True if the last token is thinking and ends a sentence or a line."""
        return self._sentences.at_end and not self._held and self.phase is Phase.THINKING

    @property
    def held_ids(self) -> tuple[int, ...]:
        """Tokens that may become a marker."""
        return tuple(self._held)

    @property
    def at_marker(self) -> bool:
        """True if the last token completed a marker of tokens."""
        return self._at_marker

    @property
    def stripping(self) -> bool:
        """True if the last token was a newline behind a marker, which is not printed."""
        return self._parser.stripping and not self._held

    def expects(self, token_id: int) -> bool:
        """True if the token begins or continues a marker of tokens."""
        automaton = self._family.token_tables.at(self.phase, False).automaton
        return automaton.depth[automaton.step(self._state, token_id)] > 0

    def push(self, token_id: int, *, silent: bool = False) -> list[Piece]:
        """Read one output token; `silent` counts it without text (an end token)."""
        index = self.num_tokens
        self.num_tokens += 1
        parser = self._parser
        before = parser.phase
        thinking = before is Phase.THINKING
        self.num_thinking_tokens += thinking
        table = self._family.token_tables.at(before, False)
        self._state = table.automaton.step(self._state, token_id)
        found = table.automaton.match[self._state]
        self._at_marker = found >= 0
        if found >= 0:
            pieces = self._marker(table.actions[found], table.lengths[found], token_id)
        else:
            self._held.append(token_id)
            pieces = self._release(table.automaton.depth[self._state], silent=silent)
        if thinking and parser.phase is before:
            holding = bool(self._held or parser.held_length)
            self._segments.push(index, token_id, self._family.vocabulary.token_bytes(token_id), holding=holding)
        return pieces

    def end(self) -> None:
        """Count a last token that is neither thinking nor text."""
        self.num_tokens += 1

    def drop_held(self) -> None:
        """Forget a begun marker: a forced end was cut. Its tokens are no thinking."""
        first_held = self._parser.position - self._parser.held_length
        begun = len(self._held) + sum(start >= first_held for start in self._token_starts)
        if self.phase is Phase.THINKING:
            self.num_thinking_tokens -= begun
        self._held, self._token_starts, self._state = [], [], 0
        self._parser.drop_held()

    def flush(self) -> list[Piece]:
        """Release everything held: the response has ended."""
        pieces = self._release(0)
        self._segments.drain()
        self._state = 0
        pieces += self._parser.push(self._detokenizer.flush())
        return pieces + self._parser.flush()

    def take_segments(self) -> list[Segment]:
        """Segments finished since the last call."""
        return self._segments.take()

    def _release(self, keep: int, *, silent: bool = False) -> list[Piece]:
        """Print the held tokens but the last `keep`."""
        pieces: list[Piece] = []
        free = len(self._held) - keep
        for position, token_id in enumerate(self._held[:free]):
            mute = silent and position == len(self._held) - 1
            pieces += self._text("" if mute else self._detokenizer.push(token_id))
        del self._held[:free]
        return pieces

    def _text(self, text: str) -> list[Piece]:
        """Give one token's text to the parser and follow the phase changes it finds."""
        parser, before = self._parser, self._parser.phase
        self._token_starts.append(parser.position)
        pieces = parser.push(text)
        if before is Phase.THINKING:
            self._sentences.push(text)
        if parser.phase is not before:
            marker_tokens = sum(start >= parser.marker_start for start in self._token_starts)
            self._changed(marker_tokens)
        if parser.held_length:
            first_held = parser.position - parser.held_length
            self._token_starts = [start for start in self._token_starts if start >= first_held]
        else:
            self._token_starts.clear()
        return pieces

    def _marker(self, action: Action, length: int, token_id: int) -> list[Piece]:
        """A marker of `length` tokens is complete with this token."""
        self._held.append(token_id)
        self._state = 0
        pieces = self._release(length)
        marker, self._held = self._held, []
        if action is Action.SWALLOW:
            self._parser.swallow()
            return pieces
        pieces += self._parser.push(self._detokenizer.flush())
        pieces += self._parser.switch(
            Phase.THINKING if action is Action.OPEN else Phase.ANSWER, strip=action is not Action.YIELD
        )
        self._changed(length)
        if action is Action.YIELD:
            for held in marker:
                pieces += self._parser.push(self._detokenizer.push(held))
        return pieces

    def _changed(self, marker_tokens: int) -> None:
        """The phase has just changed; the last `marker_tokens` tokens were the marker."""
        self._token_starts.clear()
        self._state = 0
        if self.phase is Phase.THINKING:
            self._segments.open(self.num_tokens)
            self._sentences = SentenceEnds()
        else:
            self.num_thinking_tokens -= marker_tokens
            self._segments.close(self.num_tokens - marker_tokens)


class PlainTracker:
    """The same for a model without thinking: everything is answer."""

    phase = Phase.ANSWER
    num_thinking_tokens = 0
    at_boundary = False
    at_marker = False
    stripping = False
    held_ids: tuple[int, ...] = ()

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._detokenizer = Detokenizer(vocabulary)
        self.num_tokens = 0

    @property
    def pending(self) -> bool:
        return self._detokenizer.pending

    def expects(self, token_id: int) -> bool:
        return False

    def push(self, token_id: int, *, silent: bool = False) -> list[Piece]:
        self.num_tokens += 1
        text = "" if silent else self._detokenizer.push(token_id)
        return [Piece(Phase.ANSWER, text)] if text else []

    def end(self) -> None:
        self.num_tokens += 1

    def drop_held(self) -> None:
        return None

    def flush(self) -> list[Piece]:
        text = self._detokenizer.flush()
        return [Piece(Phase.ANSWER, text)] if text else []

    def take_segments(self) -> list[Segment]:
        return []
