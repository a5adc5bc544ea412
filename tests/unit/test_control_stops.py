"""Stop strings, stop ids and min_tokens of one branch."""

from __future__ import annotations

import pytest
from branch_script import BARE, OPEN, Kit, run, seen

from thinkfold.types import FinishReason, ThinkingEndReason

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.fixture(scope="module")
def kit() -> Kit:
    return Kit(["ab", "cd", "ef", "gh", "\n\n"])


def test_case_26_stops_sleep_in_thinking(kit):
    script = "x·=·y·</think>·n·=·7·EOS"
    by_text = run(kit, script, stop=("=",))
    assert seen(by_text) == ("x=y", "n", STOP)
    assert by_text.stop_reason == "="
    equals = kit.ids("=")[0]
    by_id = run(kit, script, stop_token_ids=(equals,))
    assert seen(by_id) == ("x=y", "n", STOP)
    assert by_id.stop_reason == equals
    assert by_id.token_ids == by_text.token_ids == kit.ids("x·=·y·</think>·n·=")
    blank = run(kit, ["x", "\n\n", "y", "\n\n", "</think>", "\n\n", "n", "\n\n", "m"], stop=("\n\n",))
    assert seen(blank) == ("x\n\ny", "n", STOP)


def test_case_26_opt_in(kit):
    script = "x·=·y·</think>·n·EOS"
    for options in ({"stop": ("=",)}, {"stop_token_ids": tuple(kit.ids("="))}):
        output = run(kit, script, stop_in_thinking=True, **options)
        assert seen(output) == ("x", "", STOP)
        assert output.thinking_end_reason is ThinkingEndReason.UNCLOSED


def test_case_26_other_ends_do_not_sleep(kit):
    assert seen(run(kit, "x·=·y", stop=("=",), max_tokens=3)) == ("x=y", "", LENGTH)
    assert seen(run(kit, "x·=·y·z·EOS", stop=("=",), budget=2)) == ("x=", "yz", STOP)
    assert seen(run(kit, "x·=·EOS", stop=("=",), eos_in_thinking="stop")) == ("x=", "", STOP)


def test_case_26_thinking_off(kit):
    assert seen(run(kit, "x·=·y·EOS", BARE, stop=("=",), enabled=False, budget=0)) == ("", "x", STOP)
    plain = Kit(template=None)
    assert seen(run(plain, "x·=·y·EOS", BARE, stop=("=",))) == ("", "x", STOP)


@pytest.mark.parametrize(
    ("stops", "text", "reason"),
    [(("bcde",), "a", "bcde"), (("h",), "abcdefg", "h"), (("ghX",), "abcdefgh", None), (("b", "bcdefX"), "a", "b")],
)
@pytest.mark.parametrize("opened", [True, False])
def test_case_28_stop_over_several_tokens(kit, stops, text, reason, opened):
    script = ("w·</think>·" if opened else "") + "ab·cd·ef·gh·EOS"
    output = run(kit, script, OPEN if opened else BARE, stop=stops)
    assert seen(output) == ("w" if opened else "", text, STOP)
    assert output.stop_reason == reason


def test_case_28_held_text_is_released_at_every_end(kit):
    assert seen(run(kit, "ab·cd", BARE, stop=("cdX",), max_tokens=2)) == ("", "abcd", LENGTH)
    control = kit.control(BARE, stop=("cdX",))
    for token in kit.ids("ab·cd"):
        control.accept(token)
    assert control.take().text == "ab"
    control.finish(FinishReason.ABORT)
    assert control.take().text == "cd"


def test_case_28_no_match_over_a_think_block(kit):
    output = run(kit, "ab·<think>·w·</think>·cd·EOS", BARE, stop=("bc",))
    assert seen(output) == ("w", "abcd", STOP)
    assert output.stop_reason is None
    inside = run(kit, "x·a·</think>·b·EOS", stop=("ab",), stop_in_thinking=True)
    assert seen(inside) == ("xa", "b", STOP)


def test_case_28_held_thinking_is_released_when_it_ends(kit):
    control = kit.control(stop=("ab",), stop_in_thinking=True)
    for token in kit.ids("x·a·</think>"):
        control.accept(token)
    assert control.take().reasoning == "xa"


def test_min_tokens_mutes_every_stop(kit):
    script = "ab·cd·ef·gh·EOS"
    assert seen(run(kit, script, BARE, stop=("cd",), min_tokens=2)) == ("", "abcdefgh", STOP)
    assert seen(run(kit, script, BARE, stop=("f",), min_tokens=2)) == ("", "abcde", STOP)
    stop_id = tuple(kit.ids("cd"))
    assert seen(run(kit, script, BARE, stop_token_ids=stop_id, min_tokens=2)) == ("", "abcdefgh", STOP)
    control = kit.control(BARE, min_tokens=3)
    assert [control.ban_eos(inflight) for inflight in range(4)] == [True, True, True, False]
    assert seen(run(kit, "ab·EOS·cd·EOS", BARE, min_tokens=3)) == ("", "abxcd", STOP)


def test_ignore_eos_prints_nothing_for_it(kit):
    output = run(kit, "ab·EOS·cd·EOS", BARE, ignore_eos=True, max_tokens=4)
    assert seen(output) == ("", "abcd", LENGTH)
    thinking = run(kit, "ab·EOS·EOS·EOS·cd·EOS", ignore_eos=True, budget=4, max_tokens=9)
    assert thinking.num_thinking_tokens == 4


def test_stop_string_at_the_length_limit_is_a_stop(kit):
    output = run(kit, "ab·cd", BARE, stop=("cd",), max_tokens=2)
    assert (*seen(output), output.stop_reason) == ("", "ab", STOP, "cd")
