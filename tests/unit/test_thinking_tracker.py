"""Phases, segments and counts from tokens; bounded work and memory."""

from __future__ import annotations

import random

import pytest
from branch_script import BARE, OPEN, Kit, run, seen

from thinkfold.thinking.tracker import Tracker
from thinkfold.types import FinishReason, Phase, Segment

STOP = FinishReason.STOP


@pytest.fixture(scope="module")
def kit() -> Kit:
    return Kit([".\n\n", "\n\n", "w\n"])


def segments(kit: Kit, script: list[str], prompt=OPEN, **limits) -> list[tuple[int, int]]:
    tracker = Tracker(kit.family, prompt, **limits)
    for token in kit.ids(script):
        tracker.push(token)
    found = tracker.take_segments()
    assert [s.id for s in found] == list(range(len(found)))
    return [(s.start, s.end) for s in found]


def test_newlines_at_markers_are_not_printed(kit):
    output = run(kit, ["\n", "w\n", "\n\n", "v", "\n", "\n", "</think>", "\n\n", "\n", "A", "\n", "EOS"])
    assert seen(output) == ("w\n\n\nv", "A\n", STOP)
    assert output.num_thinking_tokens == 6
    assert seen(run(kit, ["\n", "<think>", "\n", "w", "</think>", "\n", "A", "EOS"], BARE)) == ("w", "A", STOP)


def test_open_thinking_keeps_its_last_newlines(kit):
    assert run(kit, ["w", "\n"], max_tokens=2).reasoning == "w\n"


def test_segment_ends(kit):
    script = ["a", ".\n\n", "b", "\n", "\n", "c", "<|segment|>", "d", "</think>", "A", "\n\n"]
    assert segments(kit, script) == [(0, 2), (2, 5), (5, 7), (7, 8)]
    assert segments(kit, script, min_segment_tokens=3) == [(0, 5), (5, 8)]
    assert segments(kit, ["a"] * 7, max_segment_tokens=3) == [(0, 3), (3, 6)]
    assert segments(kit, ["<think>", "\n\n", "a", "</think>", "<think>", "b", "</think>"], BARE) == [(1, 3), (5, 6)]
    assert segments(kit, ["</think>"]) == []


def test_segments_reach_the_output(kit):
    output = run(kit, ["a", ".\n\n", "b", "b", "A", "EOS"], budget=4)
    assert output.segments == [Segment(0, 0, 2), Segment(1, 2, 4)]


def test_a_spelled_marker_is_in_no_segment():
    kit = Kit(added=())
    assert segments(kit, [*"ab", *"</think>", "A"], max_segment_tokens=4) == [(0, 2)]
    assert segments(kit, [*"abcd", *"</thi", *"x"], max_segment_tokens=4) == [(0, 4), (4, 10)]


def test_implicit_end_is_the_answers_first_text():
    kit = Kit(model_type="qwen3_5")
    output = run(kit, ["w", "\n", "<tool_call>", "{", "}", "EOS"])
    assert seen(output) == ("w", "<tool_call>{}", STOP)
    assert output.num_thinking_tokens == 2


def test_a_repeated_start_token_is_dropped(kit):
    assert seen(run(kit, ["<think>", "\n", "w", "<think>", "v", "</think>", "A", "EOS"])) == ("wv", "A", STOP)


def test_granite_words():
    kit = Kit(added=(), template="Here is my thought process: Here is my response:", model_type="granite")
    natural = [*"Here is my thought process:\nw.\n\nHere is my response:\nA", "EOS"]
    output = run(kit, natural, BARE)
    assert seen(output) == ("w.", "A", STOP)
    assert output.num_thinking_tokens == 3  # the newline behind the start marker is the model's own token
    forced = run(kit, [*"Here is my thought process:", "w", "w", "A", "EOS"], BARE, budget=2)
    assert (seen(forced), forced.num_thinking_tokens) == (("ww", "A", STOP), 2)


def test_granite_3_3_response_tags():
    kit = Kit(added=(), template="<think></think><response></response>", model_type="granite")
    assert seen(run(kit, [*"<think>w</think>\n<response>A</response>", "EOS"], BARE)) == ("w", "A", STOP)


def test_a_begun_token_marker_is_completed_by_the_close():
    kit = Kit(added=("<|close|>", "<|sep|>"), start="<|open|>", end="<|close|>k<|sep|>", force="<|close|>k<|sep|>\n")
    output = run(kit, ["a", "b", "<|close|>", "A", "EOS"], budget=3)
    assert output.token_ids == kit.ids(["a", "b", "<|close|>", "k", "<|sep|>", "\n", "A", "EOS"])
    assert seen(output) == ("ab", "A", STOP)
    assert output.num_thinking_tokens == 2
    other = run(kit, ["a", "<|close|>", "k", "k", "<|close|>", "k", "<|sep|>", "A", "EOS"])
    assert seen(other) == ("a<|close|>kk", "A", STOP)
    assert other.num_thinking_tokens == 4


@pytest.mark.parametrize("count", [500, 5000])
@pytest.mark.parametrize("added", [("<think>", "</think>"), ()])
def test_case_12_work_and_memory_stay_bounded(count, added):
    """Characters given to the parsers grow with the tokens, what they hold does not."""
    kit = Kit(["<", "</", "\n\n", "word"], added=added)
    control = kit.control(BARE, stop=("never this",), budget=10**6, max_tokens=10**6)
    rng = random.Random(2)
    tokens = kit.ids(rng.choices(["<", "</", "\n\n", "word", " ", "t", "n"], k=count))
    steps = 0
    automaton = kit.family.text_tables.at(Phase.THINKING, False).automaton
    original = automaton.step

    class Counting:
        depth, match, starts = automaton.depth, automaton.match, automaton.starts

        def step(self, state: int, symbol: str) -> int:
            nonlocal steps
            steps += 1
            return original(state, symbol)

    table = kit.family.text_tables.body[Phase.THINKING]
    table.automaton = Counting()
    for token in kit.ids(["<think>"] if added else list("<think>")) + tokens:
        control.accept(token)
        tracker = control._tracker
        assert len(tracker._held) <= 1
        assert len(tracker._token_starts) <= 9
        assert tracker._parser.held_length <= 8
        control.take()
        assert not control._outbox.token_ids
    table.automaton = automaton
    assert steps <= 4 * count + 20
    control.finish(FinishReason.ABORT)
    assert control.num_output_tokens == count + (1 if added else 7)


def test_random_cuts_agree_with_the_whole_text(kit):
    """Any tokenisation of the same bytes prints the same, at a text family."""
    rng = random.Random(4)
    text = "<think>\nüber 🙂 </thin k>\n\nso</think>\n\nA 🙂 </think> <think>"
    data = text.encode()
    for _ in range(30):
        cuts = sorted(rng.sample(range(1, len(data)), 12))
        chunks = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        one = Kit(chunks, added=())
        if one.family.tokens.starts or one.family.tokens.ends:
            continue  # a whole marker became a vocabulary entry: another kind
        tracker = Tracker(one.family, BARE)
        pieces = [p for token in one.ids(chunks) for p in tracker.push(token)] + tracker.flush()
        text_of = lambda phase, all_pieces=pieces: "".join(p.text for p in all_pieces if p.phase is phase)  # noqa: E731
        assert text_of(Phase.THINKING) == "über 🙂 </thin k>\n\nso"
        assert text_of(Phase.ANSWER) == "A 🙂 </think> <think>"


def test_newlines_after_a_stray_close_go_with_it(kit):
    assert seen(run(kit, ["</think>", "\n", "A", "EOS"], BARE)) == ("", "A", STOP)


def test_newlines_after_prefilled_words_stay(kit):
    prompt = kit.family.prompt_state(kit.tokenizer.encode("<think>p", add_special_tokens=False))
    assert seen(run(kit, ["\n", "w", "</think>", "A", "EOS"], prompt)) == ("\nw", "A", STOP)


def test_sentence_ends_belong_to_their_block(kit):
    tracker = Tracker(kit.family, OPEN)
    at_end = []
    for token in kit.ids(["w", ".", "</think>", "<think>", "v", "\n"]):
        tracker.push(token)
        at_end.append(tracker.at_boundary)
    assert at_end == [False, True, False, False, False, True]
