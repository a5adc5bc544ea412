"""The state of one branch's grammar: what may stand before an answer, and where there is no way on."""

import numpy as np
import pytest

from thinkfold.control.grammar import AnswerGrammar

NEWLINE, THINK, LETTER, END = 1, 2, 70, 129
VOCABULARY = 130


class Matcher:
    """Allows LETTER until it was accepted, then END, then nothing."""

    def __init__(self):
        self.accepted = []

    def fill_next_token_bitmask(self, words):
        wanted = (LETTER, END)[len(self.accepted)] if len(self.accepted) < 2 else None
        bits = np.zeros(words.size * 32, dtype=np.uint8)
        if wanted is not None:
            bits[wanted] = 1
        words[0] = np.packbits(bits, bitorder="little").view(np.int32)

    def accept_token(self, token_id):
        expected = token_id == (LETTER, END)[len(self.accepted)]
        self.accepted += [token_id] * expected
        return expected


@pytest.fixture
def grammar():
    return AnswerGrammar(Matcher(), VOCABULARY, newline_ids={NEWLINE}, start_ids={THINK})


def tokens(grammar):
    mask = grammar.allowed()
    assert len(mask) % 8 == 0 and len(mask) * 8 >= VOCABULARY
    return {i for i in range(len(mask) * 8) if mask[i >> 3] >> (i & 7) & 1}


def test_thinking_and_newlines_may_come_first_once(grammar):
    assert tokens(grammar) == {NEWLINE, THINK, LETTER}
    grammar.accept(THINK)
    grammar.thinking_ended()
    assert tokens(grammar) == {NEWLINE, LETTER}
    grammar.accept(NEWLINE)
    assert tokens(grammar) == {LETTER}
    grammar.accept(LETTER)
    assert tokens(grammar) == {END}
    grammar.thinking_ended()
    assert tokens(grammar) == {END}, "nothing comes between the parts of an answer"


def test_no_way_on_and_a_wrong_token_are_errors(grammar):
    with pytest.raises(RuntimeError, match="does not allow token 3"):
        grammar.accept(3)
    grammar.accept(LETTER)
    grammar.accept(END)
    with pytest.raises(RuntimeError, match="allows no token"):
        grammar.allowed()
