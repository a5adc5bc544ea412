"""Markers in text: every cut of a stream gives the same pieces."""

from __future__ import annotations

import pytest

from thinkfold.thinking.markers import MarkerSet, Piece
from thinkfold.thinking.text_parser import ThinkTextParser
from thinkfold.types import Phase


def split(chunks: list[str], *, starts_open: bool, markers: MarkerSet[str] | None = None) -> tuple[str, str]:
    parser = (
        ThinkTextParser(starts_open=starts_open)
        if markers is None
        else ThinkTextParser(markers, starts_open=starts_open)
    )
    pieces: list[Piece] = []
    for chunk in chunks:
        pieces += parser.push(chunk)
        assert parser.held_length <= 26
    pieces += parser.flush()
    assert all(piece.text for piece in pieces)
    return tuple("".join(p.text for p in pieces if p.phase is phase) for phase in (Phase.THINKING, Phase.ANSWER))


def every_cut(text: str) -> list[list[str]]:
    cuts = [[text[:i], text[i:]] for i in range(len(text) + 1)]
    return cuts + [[text[i : i + size] for i in range(0, len(text), size)] for size in range(1, 11)]


@pytest.mark.parametrize(
    ("text", "starts_open", "reasoning", "answer"),
    [
        ("w</think>A", True, "w", "A"),
        ("w</th", True, "w</th", ""),
        ("w<</think>A", True, "w<", "A"),
        ("w</think", True, "w</think", ""),
        ("\nw\n\nv\n</think>\n\nA\n", True, "w\n\nv", "A\n"),
        ("w\n\n", True, "w\n\n", ""),
        ("<think>\nw</think>A", False, "w", "A"),
        ("\n<think>w</think>\n\n A", False, "w", " A"),
        ("<think>w</think></think>\nA", False, "w", "A"),
        ("say <think> and </think> aloud", False, "", "say <think> and </think> aloud"),
        ("w</think>the tag </think> ends", True, "w", "the tag </think> ends"),
        ("w</think>\n<think>v</think>A", True, "wv", "A"),
        ("<think>again</think>A", True, "again", "A"),
        ("  <thin", False, "", "  <thin"),
        ("\n \n", False, "", "\n \n"),
        ("", True, "", ""),
        ("</think>\nA", False, "", "A"),
    ],
)
def test_case_1_any_cut_gives_the_same(text, starts_open, reasoning, answer):
    for chunks in every_cut(text):
        assert split(chunks, starts_open=starts_open) == (reasoning, answer), chunks


@pytest.mark.parametrize(
    ("chunks", "starts_open"),
    [(["<think>w</think>A"], False), (["<think>w", "</think>A"], False), (["w</think>A"], True)],
)
def test_case_2_grouped_deltas(chunks, starts_open):
    assert split(chunks, starts_open=starts_open) == ("w", "A")


def test_case_1_holds_back_only_a_possible_marker():
    parser = ThinkTextParser(starts_open=True)
    assert parser.push("w<") == [Piece(Phase.THINKING, "w")]
    assert parser.push("/x") == [Piece(Phase.THINKING, "</x")]
    assert parser.push("</think>A<") == [Piece(Phase.ANSWER, "A<")]


def test_markers_of_words_with_openers_closers_and_implicit_ends():
    markers = MarkerSet(
        starts=("Here is my thought process:",),
        ends=("Here is my response:",),
        implicit_ends=("<tool_call>",),
        openers=("<response>",),
        closers=("</response>",),
    )
    text = "Here is my thought process:\nw\nHere is my response:\n<response>A</response>"
    call = "Here is my thought process: w<tool_call>{}"
    for chunks in every_cut(text):
        assert split(chunks, starts_open=False, markers=markers) == ("w", "A")
    for chunks in every_cut(call):
        assert split(chunks, starts_open=False, markers=markers) == (" w", "<tool_call>{}")
