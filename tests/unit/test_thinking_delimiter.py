"""A user's regular expression ends segments: the same ones at any speed of its worker, never in the step's thread."""

from __future__ import annotations

import random
import re
import threading
import time
from concurrent.futures import Future

import pytest
from scripted import ids, language

from thinkfold.errors import ParameterError
from thinkfold.fold.planner import COMMIT_LAG, FoldPlanner
from thinkfold.thinking import delimiter
from thinkfold.thinking.delimiter import LOOKBACK, DelimiterSearch, compile_delimiter
from thinkfold.thinking.segments import SegmentFinder
from thinkfold.thinking.tracker import Tracker
from thinkfold.types import DELIMITER_LAG, FoldMode, FoldPolicy, FoldProfile, Phase, PromptState

NONE: frozenset[int] = frozenset()


def found(pattern: str, tokens: list[str]) -> list[int]:
    """Tokens in which a match ends."""
    search = DelimiterSearch(compile_delimiter(pattern, "p"))
    for token in tokens:
        search.push(token.encode())
    return [i for i in range(len(tokens)) if search.pop()]


def test_a_match_counts_for_the_token_in_which_it_ends() -> None:
    tokens = ["So", " it", " is", " 5", ".", "\n", "Wa", "it", ",", " no", ". Wait"]
    assert found(r"^Wait\b", tokens) == [7]
    assert found("Wait", tokens) == [7, 10]
    assert found(r"is \d", tokens) == [3]
    assert found("nothing", tokens) == []


@pytest.mark.parametrize("seed", range(8))
def test_batches_change_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a search over the whole text after each token."""
    rng = random.Random(seed)
    tokens = ["".join(rng.choice("ab\n ") for _ in range(rng.randint(0, 3))) for _ in range(120)]
    want, text = [], "\n"
    for index, token in enumerate(tokens):
        text += token
        last = None
        for start in range(1, len(text) + 1):
            match = re.compile(r"^a+b|b\n", re.MULTILINE).match(text, start)
            last = match if match is not None else last
        if token and last is not None and last.end() > len(text) - len(token):
            want.append(index)
    for batch in (1, 8, 50):
        monkeypatch.setattr(delimiter, "BATCH", batch)
        assert found(r"^a+b|b\n", tokens) == want
    assert len(want) > 5


def test_a_character_in_several_tokens_and_what_lies_far_behind() -> None:
    search = DelimiterSearch(compile_delimiter("é.x", "p"))
    parts = [b"\xc3", b"\xa9", b"-", b"x"]
    for part in parts:
        search.push(part)
    assert [search.pop() for _ in parts] == [False, False, False, True]
    assert found("a[^c]*c", ["a", "b" * LOOKBACK, "c"]) == []
    assert found("a[^c]*c", ["a", "b" * (LOOKBACK - 2), "c"]) == [2]


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("", "1 to 256"),
        ("x" * 257, "1 to 256"),
        ("(", "no RE2 pattern"),
        ("(?=a)", "no RE2 pattern"),
        (r"(a)\1", "no RE2 pattern"),
        ("((a{100}){100}){100}", "no RE2 pattern"),
        ("x*", "empty text"),
        ("a)|(b", "no RE2 pattern"),
    ],
)
def test_patterns_that_cannot_be_honoured_are_refused_by_name(pattern: str, why: str) -> None:
    with pytest.raises(ParameterError, match=why) as caught:
        compile_delimiter(pattern, "fold.delimiter_regex")
    assert caught.value.field == "fold.delimiter_regex"


def test_a_pattern_that_ruins_backtracking_engines_is_quick() -> None:
    start = time.process_time()
    assert found("(a|aa)+$x", ["a" * 40] * 200) == []
    assert time.process_time() - start < 2.0


def test_matching_never_runs_in_the_step_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[str] = set()
    matches = delimiter._matches

    def spied(*args):
        threads.add(threading.current_thread().name)
        return matches(*args)

    monkeypatch.setattr(delimiter, "_matches", spied)
    assert found("b", ["a", "b"] * 20) == list(range(1, 40, 2))
    assert len(threads) == 1 and next(iter(threads)).startswith("thinkfold-delimiter")


def cut(texts: list[str], pattern: str | None, *, low: int = 3, high: int = 40) -> list[tuple[int, int]]:
    """Segments, and that each is known at its own token or exactly DELIMITER_LAG tokens later."""
    search = None if pattern is None else DelimiterSearch(compile_delimiter(pattern, "p"))
    finder, segments = SegmentFinder(NONE, low, high, search), []
    finder.open(0)
    for index, text in enumerate(texts):
        finder.push(index, 0, text.encode(), holding=False)
        new = finder.take()
        assert all(index + 1 == segment.end + DELIMITER_LAG * (pattern is not None) for segment in new)
        segments += new
    finder.close(len(texts))
    return [(s.start, s.end) for s in segments + finder.take()]


def test_segments_end_at_matches_beside_blank_lines_and_the_longest() -> None:
    texts = ["w "] * 10 + ["Wait"] + ["w "] * 5 + ["\n\n"] + ["w "] * 100
    plain, regex = cut(texts, None), cut(texts, "Wait")
    assert plain == [(0, 17), (17, 57), (57, 97), (97, 117)]
    assert regex == [(0, 11), (11, 17), (17, 57), (57, 97), (97, 117)]
    assert cut(texts, "never") == plain
    assert cut(texts, "w ", low=20) == [(i, min(i + 20, 117)) for i in range(0, 117, 20)]


def test_segments_do_not_depend_on_the_workers_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late:
        """A worker that does nothing before its result is asked for."""

        def submit(self, function, *args):
            future: Future[list[bool]] = Future()
            future.result = lambda timeout=None: function(*args)  # type: ignore[method-assign]
            return future

    rng = random.Random(0)
    texts = [rng.choice(["w ", "\n", "Hm", ", "]) for _ in range(400)]
    before = cut(texts, "^Hm")
    monkeypatch.setattr(delimiter, "_worker", Late)
    assert cut(texts, "^Hm") == before and len(before) > 15


def test_the_tracker_finds_them_in_thinking_only_and_to_the_end() -> None:
    _, _, family = language()
    text = "I see. Wait no. Wait yes. "
    for tail, ends in (("</think>Wait for it", 3), ("", 2)):
        tracker = Tracker(
            family,
            PromptState(Phase.THINKING, 0, 0),
            search=DelimiterSearch(compile_delimiter("Wait", "p")),
        )
        for token in ids(text + tail):
            tracker.push(token)
        tracker.flush()
        segments = tracker.take_segments()
        assert len(segments) == ends
        assert segments[0].end == len(ids("I see. Wait"))


def test_no_span_is_due_before_its_end_is_known() -> None:
    for regex, delay in ((None, 64), ("Wait", 64)):
        planner = FoldPlanner(FoldPolicy(FoldMode.EAGER, "pebble", delimiter_regex=regex), 16, 5)
        assert planner.numbers.fold_delay == delay
    planner = FoldPlanner(planner.policy, 16, 5, numbers=FoldProfile(64, 16, 4, 8, 4))
    planner.observe([59], None)
    assert planner.spans[0].due == 64 + DELIMITER_LAG + COMMIT_LAG
