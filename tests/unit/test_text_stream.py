"""Whole characters and stop strings in a stream."""

from __future__ import annotations

import random

import pytest
from branch_script import Kit

from thinkfold.text.detokenizer import Detokenizer
from thinkfold.text.stop_strings import Automaton, StopStrings


def pieces(data: bytes) -> list[str]:
    kit = Kit()
    detokenizer = Detokenizer(kit.vocabulary)
    out = [detokenizer.push(i) for i in kit.ids([bytes([b]) for b in data])]
    return [*out, detokenizer.flush()]


@pytest.mark.parametrize(
    "data",
    [
        b"\xf0\x9f\x99\x82",
        "思考する".encode(),
        "\U0001f3f3\ufe0f\u200d\U0001f308".encode(),
        "e\u0301".encode(),
        b"\xff\xfea",
        b"\xf0\x9f",
        b"\xf0\x9fA\xe6\x80",
        b"\xc0\x80\xed\xa0\x80",
        b"",
    ],
)
def test_case_47_single_bytes_decode_exactly(data):
    out = pieces(data)
    assert "".join(out) == data.decode("utf-8", "replace")
    for piece in out:
        piece.encode("utf-8")


def test_case_47_random_bytes():
    rng = random.Random(1)
    for _ in range(200):
        data = bytes(rng.choice((0x41, 0x80, 0xBF, 0xC3, 0xE6, 0xF0, 0x9F, 0xFF)) for _ in range(12))
        assert "".join(pieces(data)) == data.decode("utf-8", "replace")


def test_case_47_pending_inside_a_character_only():
    kit = Kit([b"\xf0\x9f", b"\x99\x82"])
    detokenizer = Detokenizer(kit.vocabulary)
    first, second, special = kit.ids([b"\xf0\x9f", b"\x99\x82", "<|segment|>"])
    assert (detokenizer.push(first), detokenizer.pending) == ("", True)
    assert (detokenizer.push(special), detokenizer.pending) == ("", True)
    assert (detokenizer.push(second), detokenizer.pending) == ("🙂", False)
    assert detokenizer.push(first) + detokenizer.flush() == "\ufffd"
    assert detokenizer.push(second) == "\ufffd\ufffd"  # nothing of the flushed character is left


def feed(stops: list[str], chunks: list[str]) -> tuple[str, str | None]:
    matcher, out = StopStrings(stops), ""
    for chunk in chunks:
        safe, matched = matcher.push(chunk)
        out += safe
        if matched:
            return out, matched
        assert any(stop.startswith(matcher.held) and stop != matcher.held for stop in stops) or not matcher.held
    return out + matcher.flush(), None


@pytest.mark.parametrize(
    ("stops", "text", "matched"),
    [
        (["bcde"], "a", "bcde"),
        (["h"], "abcdefg", "h"),
        (["ghX"], "abcdefgh", None),
        (["b", "bcdefX"], "a", "b"),
        (["bcdefX", "de"], "abc", "de"),
        (["cd", "bcd"], "a", "bcd"),
        (["abcdefgh"], "", "abcdefgh"),
        (["cdcd", "efg"], "abcd", "efg"),
        ([], "abcdefgh", None),
    ],
)
def test_case_28_any_cut_gives_the_same(stops, text, matched):
    whole = "abcdefgh"
    for size in range(1, 9):
        assert feed(stops, [whole[i : i + size] for i in range(0, 8, size)]) == (text, matched)


def test_case_28_against_a_search_over_the_whole_text():
    rng = random.Random(3)
    for _ in range(500):
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 4))) for _ in range(rng.randint(1, 4))]
        text = "".join(rng.choices("abc", k=12))
        ends = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
        want = (text[: min(ends)[0] + min(ends)[1]], min(ends)[2]) if ends else (text, None)
        assert feed(stops, list(text)) == want


def test_only_a_true_prefix_is_held():
    matcher = StopStrings(["stop!"])
    assert matcher.push("a st") == ("a ", None)
    assert matcher.push("ay") == ("stay", None)
    assert matcher.held == ""


def test_case_12_a_step_follows_few_links():
    """Amortised: failure links followed never exceed the symbols read."""
    automaton = Automaton(["a" * 50 + "b", "a" * 20 + "c"])
    state = falls = 0
    for char in "a" * 2000 + "x" + "ab" * 500:
        before = automaton.depth[state]
        state = automaton.step(state, char)
        falls += max(0, before + 1 - automaton.depth[state])
    assert falls <= 3001
