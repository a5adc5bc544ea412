"""Where a response could be cut or asked: ends of sentences and paragraphs, words that turn. O(1) a token.

It reads tokens as text and knows no markers and no segments.
"""

from __future__ import annotations

import re

from thinkfold.text.detokenizer import Detokenizer
from thinkfold.text.vocabulary import Vocabulary
from thinkfold.thinking.segments import SentenceEnds
from thinkfold.types import Boundary

TRANSITION = re.compile(r"(but )?(wait|alternatively|hmm+|hold on|actually)(?![a-z])")
LONGEST = 20  # characters within which such a word is found


class BoundaryFinder:
    """Reads a branch's output tokens in order."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._detokenizer = Detokenizer(vocabulary)
        self._sentences = SentenceEnds()
        self._index = 0
        self._after_newline = False
        self._has_text = False  # since the last paragraph's end
        self._fresh = True  # the next word begins a sentence or a line
        self._word_index = 0  # the token with which that word begins
        self._word = ""

    def push(self, token_id: int) -> list[Boundary]:
        """What the next token completes; the index counts the output tokens before the boundary."""
        text = self._detokenizer.push(token_id)
        self._index += 1
        if not text:
            return []
        found = self._turn(text)
        was_end = self._sentences.at_end
        self._sentences.push(text)
        blank_line = "\n\n" in text or (self._after_newline and text.startswith("\n"))
        self._has_text = self._has_text or bool(text.strip("\n"))
        self._after_newline = text.endswith("\n")
        if blank_line and self._has_text:
            found.append(Boundary("paragraph", self._index))
            self._has_text = False
        if self._sentences.at_end and not was_end and text.strip():
            found.append(Boundary("sentence", self._index))
        if self._sentences.at_end:
            self._fresh, self._word = True, ""
        return found

    def _turn(self, text: str) -> list[Boundary]:
        """A transition word is known by the character behind it; the boundary is before its first token."""
        if self._fresh:
            if not text.strip():
                return []
            self._fresh, self._word, self._word_index = False, "", self._index - 1
        elif not self._word:
            return []
        self._word = (self._word + text.lower()).lstrip()
        match = TRANSITION.match(self._word)
        if match and match.end() < len(self._word):
            self._word = ""
            return [Boundary("transition", self._word_index)]
        if len(self._word) > LONGEST:
            self._word = ""
        return []
