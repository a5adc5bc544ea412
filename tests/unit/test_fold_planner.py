"""Spans of closed thinking, and the positions at which something is due for them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from thinkfold.errors import PositionError
from thinkfold.fold.planner import ANSWER_LAG, COMMIT_LAG, FoldPlanner
from thinkfold.fold.spans import SpanBook, SpanState
from thinkfold.types import AtAnswer, FoldMode, FoldPolicy, FoldProfile

PAGE, PROMPT = 4, 6
NUMBERS = FoldProfile(max_segment_tokens=24, min_segment_tokens=8, fold_delay=6, keep_raw_tokens=8, entries=4)


def planner(policy=FoldMode.EAGER, at_answer=AtAnswer.KEEP, numbers=NUMBERS, window=0):
    return FoldPlanner(FoldPolicy(policy, entries=4, at_answer=at_answer), PAGE, PROMPT, window, numbers)


def pages(span):
    """What a fold wins, if its summary takes no page."""
    return span.tokens // PAGE


def pressed(made, position, *, force=False, worth=pages):
    found = made.under_pressure(position, worth, force=force)
    return found and found[2]


def spans(made):
    return [(s.start, s.end) for s in made.spans]


def test_spans_are_whole_pages_behind_the_prompt_and_residues_join_the_next():
    made = planner()
    made.observe([11, 25], None)  # segments end at positions 17 and 31
    assert spans(made) == [(8, 16), (16, 28)]
    made.observe([11, 25, 29], None)  # 35: the residue 28..31 and the new tokens to 32
    assert spans(made)[-1] == (28, 32)
    assert all(start % PAGE == end % PAGE == 0 for start, end in spans(made))


def test_a_segment_that_fills_no_page_makes_no_span():
    made = planner()
    made.observe([1], None)  # position 7: the prompt's last page is not full before 8
    assert spans(made) == []
    made.observe([1, 5], None)
    assert spans(made) == []  # 11 lies inside the page 8..11
    made.observe([1, 5, 6], None)
    assert spans(made) == [(8, 12)]


def test_a_span_is_due_after_the_delay_and_the_raw_tail():
    made = planner()
    made.observe([11, 14], None)  # 17: 17 + 6 = 23 against 16 + 8 = 24; 20: 26 against 20 + 8 = 28
    assert [s.due for s in made.spans] == [24, 28]
    assert made.to_prepare(23) is None
    span = made.to_prepare(24)
    assert span is made.spans[0]
    assert made.next_event(20) == 24 and made.next_event(24) == 28


def test_a_prepared_span_is_committed_at_a_position_that_hangs_on_nothing_else():
    made = planner()
    made.observe([11], None)
    span = made.spans[0]
    made.prepare(span, 30)  # late, since the branch was computed again in one long row
    assert span.commit_at == 24 + COMMIT_LAG
    assert made.to_commit(24 + COMMIT_LAG - 1) is None
    assert made.to_commit(24 + COMMIT_LAG) is span
    assert made.next_event(24) == 24 + COMMIT_LAG
    made.remove(span)
    assert (made.spans, made.folded, made.folded_tokens) == ([], [(8, 16)], 8)


def test_pages_of_a_span_are_counted_in_the_table_of_now():
    made = planner()
    made.observe([11, 25, 40], None)
    first, second, third = made.spans
    assert [made.first_page(s) for s in (first, second, third)] == [2, 4, 7]
    made.remove(second)
    assert (made.first_page(first), made.first_page(third)) == (2, 4)
    made.remove(first)
    assert made.first_page(third) == 2


def test_a_refused_span_stays_raw_and_is_offered_again_by_force_only():
    made = planner(FoldMode.PRESSURE)
    made.observe([11], None)
    span = made.spans[0]
    assert pressed(made, 23) is None  # the last tokens stay raw
    assert pressed(made, 24) is span
    made.prepare(span, 24, pressed=True)
    assert span.commit_at == 24 and pressed(made, 30) is None
    made.give_up(span)
    assert span.state is SpanState.REFUSED
    assert pressed(made, 30) is None and pressed(made, 30, force=True) is span
    assert made.refused == (1, 8)


def test_under_pressure_the_span_that_wins_most_goes_first_and_young_ones_last():
    made = planner(FoldMode.PRESSURE, numbers=replace(NUMBERS, fold_delay=30))
    made.observe([11, 25, 40], None)  # spans of 2, 3 and 4 pages, due at 47, 61 and 76
    first, second, third = made.spans
    assert made.under_pressure(30, pages) == (False, 2, first), "the second lies in the last tokens"
    assert made.under_pressure(60, pages) == (True, 2, first), "the first has been due"
    assert made.under_pressure(61, pages) == (True, 3, second)
    made.prepare(second, 61, pressed=True)
    assert pressed(made, 61) is first
    made.prepare(first, 61, pressed=True)
    assert made.under_pressure(61, pages) == (False, 4, third)
    assert pressed(made, 61, worth=lambda span: 0) is None


def test_a_span_that_wins_nothing_is_not_asked_for_again():
    made, asked = planner(FoldMode.PRESSURE), []
    made.observe([11, 25, 40], None)
    for position in range(60, 200):
        assert pressed(made, position, worth=lambda span: asked.append(span) or 0) is None
    assert len(asked) == 3


@pytest.mark.parametrize("policy", list(FoldMode))
def test_a_step_costs_the_same_behind_a_thousand_raw_spans(policy, monkeypatch):
    """Nothing but an end, an event or a fold may look through all spans."""
    made = planner(policy, AtAnswer.SWAP)
    ends = list(range(8, 8 * 4000, 8))
    made.observe(ends, None)
    while policy is FoldMode.EAGER and (span := made.to_prepare(10**6)) is not None:
        made.prepare(span, 10**6)
        made.give_up(span)
    position, worth = 8 * 4000 + 100, lambda span: 0
    made.under_pressure(position, worth)
    looks = 0

    class Counted(list):
        def __getitem__(self, index):
            nonlocal looks
            looks += 1
            return super().__getitem__(index)

        def __iter__(self):
            raise AssertionError("all spans are looked through")

    book = made._book
    for name in ("closed", "refused", "folded"):
        setattr(book, name, Counted(getattr(book, name)))
    monkeypatch.setattr(SpanBook, "all", lambda self: pytest.fail("all spans are looked through"))
    for step in range(100):
        made.observe(ends, None)
        assert made.to_commit(position + step) is None and made.to_prepare(position + step) is None
        assert made.next_event(position + step) is None
        assert made.under_pressure(position + step, worth) is None
        assert made.to_offload(position + step) is None
        assert made.folded_tokens == 0 and made.refused[0] in (0, len(book.refused))
    assert looks <= 100 * 60


@pytest.mark.parametrize("mode", [FoldMode.OFF, FoldMode.EAGER])
def test_who_does_not_fold_under_pressure(mode):
    made = planner(mode)
    made.observe([11, 25], None)
    assert pressed(made, 100) is None
    assert bool(pressed(made, 100, force=True)) == (mode is FoldMode.EAGER)


def test_only_eager_folds_by_itself():
    for mode in (FoldMode.OFF, FoldMode.PRESSURE):
        made = planner(mode)
        made.observe([11, 25], None)
        assert made.to_prepare(100) is None and made.next_event(0) is None


def test_at_the_answer_recycle_hurries_all_but_the_last_segment():
    made = planner(at_answer=AtAnswer.RECYCLE)
    made.observe([11, 25, 40], 40)  # segments end at 17, 31 and 46, where the answer begins
    start = 46 + ANSWER_LAG
    assert [s.due for s in made.spans] == [24, 37, 52]
    assert start == 48
    made = planner(at_answer=AtAnswer.RECYCLE)
    made.observe([11, 35, 40], 40)  # 41 would be due at 48 or 47; the last segment waits for ever
    assert [s.due for s in made.spans] == [24, 48, 52]
    assert made.to_prepare(200) is made.spans[0]
    made.remove(made.spans[0])
    made.remove(made.spans[0])
    assert made.answering and made.to_prepare(200) is None, "the last segment of thinking stays raw"


def test_without_folding_recycle_waits_for_the_answer():
    made = planner(FoldMode.OFF, AtAnswer.RECYCLE)
    made.observe([11, 25, 40], None)
    assert made.to_prepare(1000) is None
    made.observe([11, 25, 40], 40)
    start = 46 + ANSWER_LAG
    assert made.to_prepare(start - 1) is None
    assert made.to_prepare(start) is made.spans[0]


def test_swap_at_the_answer_takes_one_run_of_pages_once_nothing_is_being_judged():
    made = planner(at_answer=AtAnswer.SWAP)
    made.observe([11, 25, 40], None)
    assert made.to_offload(1000) is None
    made.observe([11, 25, 40], 40)
    start = 46 + ANSWER_LAG
    assert made.to_offload(start - 1) is None
    assert made.to_offload(start) == (2, 7)
    made.prepare(made.spans[0], start)
    assert made.to_offload(start) is None
    made.remove(made.spans[0])
    assert made.to_offload(start) == (2, 5)
    made.not_offloaded(start)
    assert [s.state for s in made.spans] == [SpanState.REFUSED, SpanState.CLOSED]
    assert made.to_offload(start) == (2, 5), "the host may have room later"


def test_under_pressure_thinking_is_swapped_at_the_answer_only_when_memory_is_short():
    made = planner(FoldMode.PRESSURE, AtAnswer.SWAP)
    made.observe([11, 25, 40], 40)
    start = 46 + ANSWER_LAG
    assert made.to_offload(start) is None
    assert made.to_offload(start - 1, short=True) is None
    assert made.to_offload(start, short=True) == (2, 7)
    assert pressed(made, start) is not None, "or it is folded, should the host have no room"
    made.offloaded(start)
    assert made.folded == [(8, 16), (16, 28)] and made.to_offload(start, short=True) is None
    with pytest.raises(PositionError):
        made.cut(start - 1)  # thinking would miss what left
    assert made.cut(start) == []
    assert pressed(made, start) is None, "the last segment of thinking stays"


def test_positions_whose_state_is_gone_are_refused_with_the_nearest_good_ones():
    made = planner()
    made.observe([11, 25], None)
    assert all(made.cut(position) == [] for position in range(40))
    made.remove(made.spans[0], [3, 3])
    made.remove(made.spans[0], [7, 5])
    found = {p: made.cut(p) for p in (0, 8, 16, 28, 40)}
    assert found == {0: [], 8: [], 16: [3, 3], 28: [7, 5], 40: [7, 5]}, "16 is the border behind a folded span"
    for position, nearest in ((9, (8, 16)), (15, (8, 16)), (17, (16, 28)), (27, (16, 28))):
        with pytest.raises(PositionError) as caught:
            made.cut(position)
        assert caught.value.nearest == tuple(n - PROMPT for n in nearest), "in output tokens"


def test_a_border_is_no_good_if_what_follows_was_folded_first():
    made = planner()
    made.observe([11, 25], None)
    first, second = made.spans
    made.remove(second, [3])
    assert made.cut(16) == made.cut(12) == []
    made.remove(first, [6])
    with pytest.raises(PositionError):
        made.cut(16)  # the summary of the first lies behind that of the second
    assert (made.cut(8), made.cut(28)) == ([], [6])


def test_a_restart_forgets_what_was_folded_and_reads_all_ends_again():
    made = planner()
    made.observe([11, 25], 30)
    before = spans(made)
    made.remove(made.spans[0])
    made.restart()
    assert (made.spans, made.folded, made.answering) == ([], [], False)
    made.observe([11, 25], 30)
    assert spans(made) == before and made.answering


def test_a_withdrawn_span_is_offered_again():
    made = planner(FoldMode.PRESSURE, numbers=replace(NUMBERS, fold_delay=30))
    made.observe([11, 25, 40], None)
    first, second, _ = before = made.spans
    assert pressed(made, 61) is second
    for span in (second, first):
        made.prepare(span, 61, pressed=True)
        pressed(made, 61)  # what is prepared leaves the heap
    made.withdraw(second)
    made.withdraw(first)
    assert made.spans == before and not first.pressed
    assert pressed(made, 61) is second


@pytest.mark.parametrize("policy", [FoldMode.EAGER, FoldMode.PRESSURE, FoldMode.OFF])
@pytest.mark.parametrize("at_answer", list(AtAnswer))
def test_a_span_leaves_only_behind_every_window(policy, at_answer):
    """A layer that sees the last 30 tokens would else see others in the place of those that left."""
    window = 30
    made = planner(policy, at_answer, window=window)
    made.observe([11, 25, 40], 40)
    ends, left = {s.start: s.end for s in made.spans}, {}
    for position in range(46, 160):
        while (span := made.to_prepare(position)) is not None:
            made.prepare(span, position)
            made.remove(span)
        if (span := pressed(made, position)) is not None:
            made.remove(span)
        if made.to_offload(position, short=True) is not None:
            made.offloaded(position)
        for start, _ in made.folded:
            left.setdefault(start, position)
    assert all(position >= ends[start] + window for start, position in left.items())
    assert bool(left) == (policy is not FoldMode.OFF or at_answer is not AtAnswer.KEEP)


def quantised(made, span, position, lengths):
    made.prepare(span, position, pressed=True, to_whole=True)
    span.error = 0.01
    made.remove(span, lengths)


def test_a_quantised_span_has_left_the_raw_table_and_may_be_folded_once():
    made = planner(FoldMode.PRESSURE)
    made.observe([11, 25, 40], None)
    first, second, third = made.spans
    for number, span in enumerate((second, first, third), 1):
        quantised(made, span, 80, [12 * number] * 2)
    assert made.quantised == made.folded == [(8, 16), (16, 28), (28, 44)] and made.spans == []
    assert pressed(made, 80) is None, "nothing raw is left"
    assert made.under_pressure(80, pages, whole=True) == (True, 4, third)
    assert made.entries_before(second) == [] and made.entries_before(third) == [24, 24]
    made.prepare(first, 80, pressed=True)
    first.error = 0.1
    made.remove(first, [28, 30])
    assert made.quantised == [(16, 28), (28, 44)] and made.folded_tokens == 36
    assert made.entries_before(third) == [16, 18], "what stands behind it has moved up"
    made.prepare(third, 80, pressed=True)
    third.error = 0.9
    made.give_up(third)
    assert made.quantised == [(16, 28), (28, 44)], "a refused fold leaves it as it was"
    assert made.under_pressure(80, pages, whole=True)[2] is second
    assert made.under_pressure(80, pages, whole=True, force=True)[2] is third
    made.prepare(second, 80, pressed=True)
    made.withdraw(second)
    assert second.state is SpanState.QUANTISED and made.under_pressure(80, pages, whole=True)[2] is second
    made.hold(20)
    assert made.under_pressure(80, pages, whole=True) is None, "a handle keeps what begins before it"


def test_a_fork_knows_what_is_quantised_and_where_it_stands():
    made = planner(FoldMode.PRESSURE)
    made.observe([11, 25, 40], None)
    first, second, _ = made.spans
    quantised(made, first, 80, [8, 8])
    quantised(made, second, 80, [20, 20])
    made.prepare(second, 80, pressed=True)  # being judged, it is quantised still
    child = made.fork(70, [11, 25, 40], None)
    assert child.quantised == [(8, 16), (16, 28)] and child.folded == made.folded
    copy = child.under_pressure(80, pages, whole=True)[2]
    assert (copy.start, copy.ends) == (second.start, second.ends) and child.entries_before(copy) == [8, 8]
    assert child.cut(28) == [20, 20] and child.cut(16) == [8, 8]
    early = made.fork(16, [11], None)
    assert early.quantised == [(8, 16)]


def test_what_thinking_begins_with_stays_raw() -> None:
    policy = FoldPolicy(FoldMode.EAGER, "pebble", entries=32)
    made = FoldPlanner(policy, 16, num_prompt_tokens=20)
    assert policy.numbers.keep_first_tokens == 192
    made.observe([150], None)  # ends at 170, before position 212
    assert made.spans == []
    made.observe([150, 330, 480], None)
    assert [(span.start, span.end, span.ends) for span in made.spans] == [(224, 336, (126,)), (336, 496, (14, 164))]
    made.restart()
    made.observe([150, 330], None)
    assert [span.start for span in made.spans] == [224]
