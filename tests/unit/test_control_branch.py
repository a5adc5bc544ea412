"""One branch under its budget, end tokens and limits, driven as the engine does."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest
from branch_script import BARE, Kit, Run, run, seen

from thinkfold.control.branch import Verdict
from thinkfold.types import CompletionOutput, FinishReason, Phase, PromptState, ThinkingEndReason

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
END = ThinkingEndReason


@pytest.fixture(scope="module")
def kit() -> Kit:
    return Kit([b"\xf0\x9f", b"\x99\x82", "ab", "cd", "ef", "gh", ".\n\n", "мы", "思"])


def test_case_7_eos_inside_thinking_is_repaired_once(kit):
    output = run(kit, "w·EOS·A·EOS")
    assert seen(output) == ("w", "A", STOP)
    assert output.token_ids == kit.ids("w·</think>·\n·\n·A·EOS")
    assert output.thinking_end_reason is END.EOS
    assert (output.num_thinking_tokens, output.num_injected_tokens) == (1, 3)


def test_case_7_eos_is_barred_for_one_step(kit):
    control = kit.control()
    control.accept(kit.ids("w")[0])
    assert not control.ban_eos(0)
    verdict = control.accept(kit.eos)
    close = kit.family.force_ids
    assert verdict == Verdict(close[0], close[1:], None)
    assert control.ban_eos(0) and not control.ban_eos(1)
    control.accept(kit.ids("A")[0])
    assert not control.ban_eos(0)
    assert seen(run(kit, "w·EOS·EOS·EOS")) == ("w", "x", STOP)


def test_case_7_second_eos_and_rule_off(kit):
    twice = run(kit, "w·EOS·<think>·v·EOS")
    assert seen(twice) == ("wv", "", STOP)
    assert twice.thinking_end_reason is END.UNCLOSED
    off = run(kit, "w·EOS", eos_in_thinking="stop")
    assert seen(off) == ("w", "", STOP)
    assert (off.num_thinking_tokens, off.num_output_tokens) == (1, 2)
    assert off.thinking_end_reason is END.UNCLOSED


def test_case_7_a_length_cut_is_never_the_answer(kit):
    output = run(kit, kit.loop(), max_tokens=4)
    assert seen(output) == ("aaaa", "", LENGTH)
    assert output.thinking_end_reason is END.UNCLOSED
    repaired = run(kit, "w·EOS", max_tokens=2)
    assert repaired.token_ids == kit.ids("w·</think>")
    assert seen(repaired) == ("w", "", LENGTH)


def test_eos_as_the_last_allowed_token_is_a_stop(kit):
    assert seen(run(kit, "w·</think>·A·EOS", max_tokens=4)) == ("w", "A", STOP)


def test_case_9_late_close_token_and_spelled_tag(kit):
    script = ["w", "</think>", *"draft", "</think>", *"a </think> b", "EOS"]
    output = run(kit, script)
    assert seen(output) == ("w", "drafta </think> b", STOP)
    assert output.num_thinking_tokens == 1


def test_case_11_branches_share_nothing(kit):
    scripts = ["a·</think>·A·EOS", "b·b·b·</think>·B·EOS", "c·" * 9 + "c"]
    alone = [run(kit, script, max_tokens=8) for script in scripts]
    assert [seen(o)[:2] for o in alone] == [("a", "A"), ("bbb", "B"), ("cccccccc", "")]
    for order in permutations(range(3)):
        runs = [Run(kit.control(branch=i, max_tokens=8), kit.script(scripts[i])) for i in range(3)]
        live = list(order)
        for _ in range(20):
            live = [i for i in live if runs[i].step()]
        assert not live
        for i, single in enumerate(alone):
            assert runs[i].output.token_ids == single.token_ids
            assert seen(runs[i].output) == seen(single)


OPTIONS = [
    {},
    {"temperature": 0.0},
    {"temperature": 1.0, "top_k": 5},
    {"presence_penalty": 1.0, "repetition_penalty": 1.5},
    {"min_tokens": 50},
    {"ignore_eos": True},
    {"stop": ("B", "a"), "min_tokens": 50},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_case_15_exactly_the_budget(kit, options):
    options = {"max_tokens": 60, **options}
    close = kit.ids("</think>")[0]
    if options.get("repetition_penalty"):
        options["logit_bias"] = {close: -100.0}
    output = run(kit, kit.loop(), budget=5, **options)
    assert output.token_ids[:6] == [*kit.ids("a·a·a·a·a"), close]
    assert output.reasoning == "aaaaa"
    assert output.num_thinking_tokens == 5
    assert output.thinking_end_reason is END.BUDGET
    assert output.token_ids.count(close) == 1


@pytest.mark.parametrize("budget", [0, 1, 3, 4, 5])
def test_case_16_any_collect_width(kit, budget):
    outputs = [Run(kit.control(budget=budget), kit.loop(), width=width).finish() for width in (1, 2, 4, 7)]
    assert all(output == outputs[0] for output in outputs)
    assert seen(outputs[0]) == ("a" * budget, "BC", STOP)


def test_case_17_budget_is_per_response(kit):
    loop = kit.loop()
    think = kit.ids("<think>")[0]
    reopened = lambda history, sampled, ban: think if sampled == 4 else loop(history, sampled, ban)  # noqa: E731
    output = run(kit, reopened, budget=4, max_tokens=40)
    assert seen(output) == ("aaaa", "BC", STOP)
    assert output.num_thinking_tokens == 4
    assert output.token_ids == kit.ids("a·a·a·a·</think>·\n·\n·<think>·</think>·\n·\n·B·C·EOS")
    blocks = run(kit, "a·a·a·</think>·<think>·a·A·EOS", budget=4)
    assert seen(blocks) == ("aaaa", "A", STOP)
    assert blocks.thinking_end_reason is END.BUDGET


@pytest.mark.parametrize("depth", [0, 1])
def test_case_17_no_model_can_think_on(kit, depth):
    think, a = kit.ids("<think>·a")
    stubborn = lambda history, sampled, ban: think if history and history[-1] != think else a  # noqa: E731
    output = Run(kit.control(BARE, budget=3, max_tokens=40), stubborn, depth=depth).finish()
    assert output.num_thinking_tokens <= 3
    assert output.finish_reason is LENGTH


@pytest.mark.parametrize("budget", [0, 1, 3, 4, 5])
def test_case_18_around_the_natural_close(kit, budget):
    prompt = kit.family.prompt_state(kit.tokenizer.encode("<|im_start|>assistant\n<think>\n"))
    natural = kit.ids("a·a·a·a·</think>·A·EOS")
    tokens = lambda history, sampled, ban: (  # noqa: E731
        natural[len(history)] if kit.ids("</think>")[0] not in history else kit.ids("A·EOS")[history[-1] == natural[5]]
    )
    output = run(kit, tokens, prompt, budget=budget)
    assert seen(output) == ("a" * min(budget, 4), "A", STOP)
    assert output.token_ids.count(natural[4]) == 1
    assert output.token_ids[min(budget, 4)] == natural[4]
    assert output.thinking_end_reason is (END.NATURAL if budget > 4 else END.BUDGET)


def test_case_18_prefilled_thinking_counts_and_old_turns_do_not(kit):
    history = "<think>old</think>x<|im_end|>" * 2
    encode = lambda text: kit.family.prompt_state(kit.tokenizer.encode(history + "<|im_start|>assistant\n" + text))  # noqa: E731
    assert encode("<think>\n").prefilled_thinking == 0
    output = run(kit, kit.loop(), encode("<think>\n" + "p" * 10), budget=5)
    assert output.token_ids[0] == kit.ids("</think>")[0]
    assert seen(output) == ("", "BC", STOP)
    assert output.num_thinking_tokens == 0
    assert run(kit, kit.loop(), encode("<think>\n" + "p" * 3), budget=5).reasoning == "aa"


def test_case_19_self_opened_block(kit):
    loop = kit.loop(opened=False)
    think = kit.ids("<think>")[0]
    output = run(kit, lambda h, n, ban: loop(h, n, ban) if h else think, BARE, budget=5)
    assert seen(output) == ("aaaaa", "BC", STOP)


def test_case_19_marker_as_plain_entry_and_spelled_in_tokens():
    plain = Kit(["<think>", "</think>"], added=())
    assert plain.family.tokens.ends == ((plain.ids("</think>")[0],),)
    assert seen(run(plain, "a·" * 5 + "A·EOS", budget=5)) == ("aaaaa", "A", STOP)
    spelled = Kit(["</", "think", ">\n", "."], added=())
    assert spelled.family.texts.ends == ("</think>",)
    natural = run(spelled, ["w", ".", "</", "think", ">\n", "\n", "A", "EOS"])
    assert seen(natural) == ("w.", "A", STOP)
    assert natural.num_thinking_tokens == 2
    forced = run(spelled, "a·" * 5 + "A·EOS", budget=5)
    assert seen(forced) == ("aaaaa", "A", STOP)
    assert (forced.num_thinking_tokens, forced.thinking_end_reason) == (5, END.BUDGET)


def test_a_close_cut_by_max_tokens_prints_nothing():
    spelled = Kit(added=())
    output = run(spelled, "a·\n·A", budget=2, max_tokens=5)
    assert output.token_ids == spelled.ids(["a", "\n", *"</t"])
    assert (*seen(output), output.num_thinking_tokens) == ("a", "", LENGTH, 2)
    assert output.thinking_end_reason is END.UNCLOSED


def test_case_21_the_cut_waits_for_the_end_of_a_character(kit):
    output = run(kit, ["a", b"\xf0\x9f", b"\x99\x82", "A", "EOS"], budget=2)
    assert seen(output) == ("a🙂", "A", STOP)
    assert output.num_thinking_tokens == 3
    slow = run(kit, ["a", *[bytes([b]) for b in b"\xf0\x9f\x99\x82"], "A", "EOS"], budget=2)
    assert (slow.reasoning, slow.num_thinking_tokens) == ("a🙂", 5)
    broken = run(kit, ["a", *[b"\xf0"] * 9], budget=2, max_tokens=9)
    assert broken.num_thinking_tokens == 5
    assert seen(run(kit, ["мы", "思", "мы", "A", "EOS"], budget=3)) == ("мы思мы", "A", STOP)


def test_case_21_closing_words_are_thinking_and_counted(kit):
    words = tuple(kit.ids([" ", *"ok", "\n"]))
    output = run(kit, kit.loop(), budget=8, closing_ids=words)
    assert seen(output) == ("aaaa ok", "BC", STOP)
    assert (output.num_thinking_tokens, output.num_injected_tokens) == (8, 7)
    short = run(kit, kit.loop(), budget=3, closing_ids=words)
    assert seen(short) == ("aaa", "BC", STOP)
    prefilled = run(kit, kit.loop(), PromptState(Phase.THINKING, 6, 0), budget=8, closing_ids=words)
    assert seen(prefilled) == ("", "BC", STOP)
    natural = run(kit, "a·</think>·A·EOS", budget=8, closing_ids=words)
    assert seen(natural) == ("a", "A", STOP)


def test_case_21_closing_words_follow_a_whole_character(kit):
    words = tuple(kit.ids("o·k"))
    output = run(kit, ["a", b"\xf0\x9f", b"\x99\x82", "A", "EOS"], budget=4, closing_ids=words)
    assert seen(output) == ("a🙂ok", "A", STOP)
    assert output.num_thinking_tokens == 5


def test_an_end_marker_that_is_an_end_token_is_a_marker():
    kit = Kit()
    kit.vocabulary = replace(kit.vocabulary, eos_ids=kit.vocabulary.eos_ids | set(kit.ids("</think>")))
    output = run(kit, "w·</think>·A·EOS")
    assert seen(output) == ("w", "A", STOP)
    assert (output.thinking_end_reason, output.num_injected_tokens) == (END.NATURAL, 0)


@pytest.mark.parametrize(("mark", "closes"), [(".", True), ("\n", True), ("?", True), (",", False)])
def test_grace_ends_at_a_sentence(kit, mark, closes):
    thought = ["a"] * 36 + [mark] + ["a"] * 3
    output = run(kit, [*thought[:37], "A", "EOS"] if closes else [*thought, "A", "EOS"], budget=40)
    assert output.num_thinking_tokens == (37 if closes else 40)
    assert output.text == "A"
    early = run(kit, ["a"] * 34 + [mark] + ["a"] * 5 + ["A", "EOS"], budget=40)
    assert early.num_thinking_tokens == 40


def test_a_decimal_point_is_no_sentence_end(kit):
    assert run(kit, [*["a"] * 36, "3", ".", "1", "4", "A", "EOS"], budget=40).reasoning.endswith("3.14")


def test_case_23_counts_follow_the_branch(kit):
    runs = [
        Run(kit.control(budget=b, max_tokens=30, branch=i % 2), kit.loop())
        for i, b in enumerate((7, 7, 20, 20, None, None))
    ]
    for step in range(60):
        for index, one in enumerate(runs):
            if step == 9 and index == 3 and one.control.finish_reason is None:
                one.control.finish(FinishReason.ABORT)
            elif one.control.finish_reason is None:
                one.step()
        if step == 12:
            runs.append(Run(kit.control(budget=7), kit.loop()))
    assert [r.control.num_thinking_tokens for r in runs] == [7, 7, 20, 9, 30, 30, 7]


def test_case_32_counts(kit):
    output = run(kit, "a·a·a·a·a·</think>·A·B·EOS")
    assert (output.num_thinking_tokens, output.num_output_tokens) == (5, 9)
    cut = run(kit, "a·a·a·a·a·a", budget=3, max_tokens=4)
    assert (cut.num_thinking_tokens, cut.num_output_tokens, cut.finish_reason) == (3, 4, LENGTH)
    assert cut.thinking_end_reason is END.BUDGET
    aborted = Run(kit.control(), kit.loop())
    for _ in range(3):
        aborted.step()
    aborted.control.finish(FinishReason.ABORT)
    last = aborted.control.take()
    assert (last.num_thinking_tokens, last.num_output_tokens, last.finish_reason) == (3, 3, FinishReason.ABORT)
    assert last.thinking_end_reason is END.UNCLOSED


def test_case_47_in_both_phases_and_at_the_marker(kit):
    smile = [b"\xf0\x9f", b"\x99\x82"]
    assert seen(run(kit, [*smile, "</think>", *smile, "EOS"])) == ("🙂", "🙂", STOP)
    assert seen(run(kit, ["w", b"\xf0\x9f", "</think>", "A", "EOS"])) == ("w\ufffd", "A", STOP)
    assert seen(run(kit, ["A", *smile, b"\xf0\x9f"], BARE, max_tokens=4)) == ("", "A🙂\ufffd", LENGTH)
    assert seen(run(kit, [*smile, b"\xf0\x9f"], max_tokens=3)) == ("🙂\ufffd", "", LENGTH)


def test_finish_at_any_moment_is_final(kit):
    script = kit.ids(["<think>", "a", b"\xf0\x9f", b"\x99\x82", "\n", "</think>", "\n", "A", "EOS"])
    for stop_at in range(len(script) + 1):
        control = kit.control(BARE, stop=("Ab",))
        for token in script[:stop_at]:
            control.accept(token)
        control.finish(FinishReason.ABORT)
        reason = STOP if stop_at == len(script) else FinishReason.ABORT
        first = control.take()
        assert first.finish_reason is reason
        assert first.token_ids == script[:stop_at]
        control.finish(FinishReason.ERROR)
        assert control.accept(script[0]) == Verdict(script[0], (), reason)
        assert control.injection() == ()
        assert not control.must_wait(1)
        assert control.take() is None


def test_must_wait_only_where_the_budget_may_bind(kit):
    control = kit.control(budget=50)
    assert next(n for n in range(60) if control.must_wait(n)) == 45
    assert not kit.control(budget=None).must_wait(10**6)
    assert not kit.control(BARE, budget=0).must_wait(5)
    assert not kit.control(budget=0).must_wait(0)


def test_waiting_discards_nothing(kit):
    waiting = Run(kit.control(budget=5), kit.loop(), depth=1)
    waiting.finish()
    assert waiting.discarded == 1  # the token launched behind EOS


def test_take_gives_deltas(kit):
    control = kit.control()
    assert control.take() is None
    control.accept(kit.ids("a")[0])
    first = control.take()
    assert (first.reasoning, first.token_ids, first.phase, first.finish_reason) == (
        "a",
        kit.ids("a"),
        Phase.THINKING,
        None,
    )
    assert control.take() is None
    for token in kit.ids("</think>·A·EOS"):
        control.accept(token)
    first.merge(control.take())
    assert seen(first) == ("a", "A", STOP)
    assert (first.num_output_tokens, first.thinking_end_reason) == (4, END.NATURAL)
    assert isinstance(first, CompletionOutput)


def test_budget_left(kit):
    control = kit.control(PromptState(Phase.THINKING, 2, 0), budget=5)
    assert control.budget_left == 3
    control.accept(kit.ids("a")[0])
    assert control.budget_left == 2
    assert kit.control().budget_left is None


def test_silent_tokens(kit):
    control = kit.control()
    silent = []
    for token in kit.ids("a·<|segment|>·</think>·A·</think>·EOS"):
        control.accept(token)
        silent.append(control.last_token_is_silent)
    assert silent == [False, True, True, False, True, True]
