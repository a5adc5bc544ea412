"""Token ids to text, one at a time, whole characters only. Knows nothing about thinking."""

from __future__ import annotations

import codecs

from thinkfold.text.vocabulary import Vocabulary


class Detokenizer:
    """Incremental UTF-8 decoding of one branch's tokens.

    The joined text equals decoding all bytes at once with `errors="replace"`; bytes of an
    unfinished character (3 at most) wait for the next token.
    """

    __slots__ = ("_decoder", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def pending(self) -> bool:
        """True inside an unfinished character."""
        return bool(self._decoder.getstate()[0])

    def push(self, token_id: int) -> str:
        """The text that this token completes; special tokens print nothing."""
        if token_id in self._vocabulary.special_ids:
            return ""
        return self._decoder.decode(self._vocabulary.token_bytes(token_id))

    def flush(self) -> str:
        """What stands for an unfinished character: U+FFFD, or nothing. Usable afterwards."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
