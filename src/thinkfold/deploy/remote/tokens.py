"""A remote server's text, names and ids of tokens as token ids of the local tokenizer, with their statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from thinkfold.deploy.remote.rows import Row, read_rows
from thinkfold.engine.language import Language
from thinkfold.errors import RemoteError, UnsupportedError
from thinkfold.types import Phase, TokenLogprobs, TokenStats


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token that the server drew; without log-probs there are no statistics."""

    token_id: int
    stats: TokenStats | None = None
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """The news in one event: tokens, and `finish` where it was the last one.

    `thinking_end` is why thinking ended, where the server says so.
    """

    tokens: list[Drawn]
    finish: str | None = None
    cached_tokens: int | None = None
    thinking_end: str | None = None


class TokenReader:
    """Reads events of completions."""

    def __init__(self, language: Language) -> None:
        self._tokenizer: PreTrainedTokenizerBase = language.tokenizer
        self._vocabulary = vocabulary = language.vocabulary
        self._by_text: dict[str, int] = {}
        for token_id in range(vocabulary.size - 1, -1, -1):  # of equal texts the first id stands
            self._by_text[vocabulary.text((token_id,))] = token_id
        self._by_text = {text: i for text, i in self._by_text.items() if text and "\ufffd" not in text}
        family = language.family
        tokens = None if family is None else family.tokens
        self.start_ids: tuple[int, ...] = tuple(tokens.starts[0]) if tokens and tokens.starts else ()
        self.end_ids: tuple[int, ...] = tuple(tokens.ends[0]) if tokens and tokens.ends else ()
        end = None if family is None else family.end_token_id
        self._end = None if end is None else vocabulary.text((end,))

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def text(self, token_ids: Sequence[int]) -> str:
        """The text that a server reads as these tokens."""
        return self._vocabulary.text(token_ids)

    def check_prompt(self, token_ids: Sequence[int]) -> None:
        """Raise UnsupportedError for control tokens that somebody has typed: as text they would be real ones there."""
        added = self._vocabulary.added_ids
        read = self.encode(self.text(token_ids))
        if [i for i in read if i in added] != [i for i in token_ids if i in added]:
            raise UnsupportedError("prompt", "holds the text of a control token, and the remote engine takes text only")

    def part(self, phase: Phase) -> PartReader:
        """For the events of one stream that begins in `phase`."""
        return PartReader(self, phase)

    def tokens(self, text: str, ids: Sequence[int] | None, logprobs: Any) -> list[Drawn]:
        """The tokens of a stretch of text, by ids where they are told."""
        rows = read_rows(logprobs)
        ids = self._ids(text, rows) if ids is None else ids
        if not all(0 <= i < self._vocabulary.size for i in ids):
            raise ValueError("a token id is outside the vocabulary")
        if not rows:
            return [Drawn(i) for i in ids]
        stats = [row.statistics(self._end) for row in rows]
        if len(rows) != len(ids):  # the text of a few tokens stands for as many others
            return [Drawn(i, stats[min(at, len(stats) - 1)]) for at, i in enumerate(ids)]
        return [self._drawn(*each) for each in zip(ids, stats, rows, strict=True)]

    def _ids(self, text: str, rows: Sequence[Row]) -> list[int]:
        """The tokens' own ids, or names where these make up the text, else as the tokenizer cuts it."""
        ids = [self._id_of(row.name, row.token_id) for row in rows]
        known = [i for i in ids if i is not None]
        told = all(row.token_id is not None for row in rows)
        if rows and len(known) == len(rows) and (told or "".join(row.name for row in rows) == text):
            return known
        return self.encode(text)

    def _id_of(self, name: str, token_id: int | None) -> int | None:
        return self._by_text.get(name) if token_id is None else token_id

    def _drawn(self, token_id: int, stats: TokenStats, row: Row) -> Drawn:
        top = [(self._id_of(name, i), p) for name, i, p in row.top]
        known = tuple((i, p) for i, p in top if i is not None)
        return Drawn(token_id, stats, TokenLogprobs(token_id, row.logprob, known))


class PartReader:
    """Reads one stream. A server that tells thinking apart has left the markers out: they are put back."""

    def __init__(self, reader: TokenReader, phase: Phase) -> None:
        self._reader = reader
        self._open = phase is Phase.THINKING
        self._apart = False  # inside thinking that is told apart

    def read(self, event: Any) -> Piece:
        """One event, or a whole completion. Raises RemoteError for what is none."""
        try:
            choices = event.get("choices") or []
            usage = event.get("usage") or {}
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            if not choices:  # an event of usage alone
                return Piece([], None, cached)
            choice = choices[0]
            ended = choice.get("thinking_end_reason")
            return Piece(self._choice(choice), choice.get("finish_reason"), cached, ended)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise RemoteError(f"the remote engine's event cannot be read ({error!r:.100}): {event!r:.200}") from error

    def _choice(self, choice: Any) -> list[Drawn]:
        text = choice.get("text") or ""
        thought = choice.get("reasoning") or choice.get("reasoning_content") or ""
        ids, logprobs = choice.get("token_ids"), choice.get("logprobs")
        if ids is not None or not (thought or self._apart):
            return self._reader.tokens(text, ids, logprobs)
        drawn = [Drawn(i) for i in self._reader.start_ids] if thought and not self._open else []
        drawn += self._reader.tokens(thought, None, None if text else logprobs)
        self._apart = self._open = True
        if text:
            self._apart = self._open = False
            drawn += [Drawn(i) for i in self._reader.end_ids]
            drawn += self._reader.tokens(text, None, None if thought else logprobs)
        return drawn
