"""Holds one branch's answer to a grammar. Asleep while the branch thinks."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from thinkfold.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    import xgrammar


class AnswerGrammar:
    """What the next answer token may be.

    Before the answer's first token the model may still begin to think (`start_ids`) and, once,
    write the newlines that it is used to there (`newline_ids`); neither is part of the answer.
    """

    def __init__(
        self,
        matcher: xgrammar.GrammarMatcher,
        vocab_size: int,
        *,
        newline_ids: Iterable[int] = (),
        start_ids: Iterable[int] = (),
    ) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._newline_ids = frozenset(newline_ids)
        self._head = self._newline_ids | frozenset(start_ids)  # what may come before the answer
        self._start_ids = frozenset(start_ids)
        self._begun = False
        self._own: bytearray | None = None  # mask of the next token, before the head is added

    def __deepcopy__(self, memo: dict[int, Any]) -> AnswerGrammar:
        """A grammar that goes on from here."""
        child = copy.copy(self)
        child._matcher = self._matcher.fork()
        return child

    def allowed(self) -> bytes:
        """Bit i of the little-endian bytes: token i may come next; whole 64-bit words.

        Raises RuntimeError where the grammar has no way on.
        """
        mask = bytearray(self._mask())
        for token_id in self._head:
            mask[token_id >> 3] |= 1 << (token_id & 7)
        if not any(mask):
            raise RuntimeError("the grammar allows no token here")
        return bytes(mask)

    def accept(self, token_id: int) -> None:
        """The branch goes on with `token_id`. Raises RuntimeError if the grammar does not allow it."""
        own = self._mask()
        if token_id in self._head and not own[token_id >> 3] >> (token_id & 7) & 1:
            self._head -= self._newline_ids if token_id in self._newline_ids else self._start_ids
            return
        self._head, self._begun = frozenset(), True
        if not self._matcher.accept_token(token_id):
            raise RuntimeError(f"the grammar does not allow token {token_id}")
        self._own = None

    def thinking_ended(self) -> None:
        """The answer begins now: no second thinking, newlines again."""
        if not self._begun:
            self._head = self._newline_ids

    def _mask(self) -> bytearray:
        if self._own is None:
            words = np.zeros(-(-self._vocab_size // 64) * 2, dtype=np.int32)
            self._matcher.fill_next_token_bitmask(words[None, : -(-self._vocab_size // 32)])
            self._own = bytearray(words.tobytes())
        return self._own


def newline_ids(vocabulary: Vocabulary) -> frozenset[int]:
    """Tokens that are nothing but newlines."""
    return frozenset(i for i, data in enumerate(vocabulary.tokens) if data and not data.strip(b"\n"))
