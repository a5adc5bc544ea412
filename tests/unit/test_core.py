"""The step loop with real control and a scripted device: equality of depths, failures, costs."""

import pytest
from scripted import BARE_PROMPT, CLOSE, EOS, OPEN_PROMPT, PAGE, ids, loop, make_engine, script

from thinkfold.types import FinishReason, Phase, ThinkingEndReason, ThinkingParams

DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def tokens(engine, request_id="r", index=0):
    return engine.one(request_id, index).token_ids


@DEPTHS
def test_thinking_and_answer_reach_the_output(depth):
    engine = make_engine(depth=depth)
    engine.add(token_of=script(f"w w{CLOSE}\n\nA{EOS}"))
    engine.run()
    out = engine.one()
    assert (out.reasoning, out.text) == ("w w", "A")
    assert out.finish_reason is FinishReason.STOP
    assert out.thinking_end_reason is ThinkingEndReason.NATURAL
    assert engine.finals == {"r": 1}


@DEPTHS
@pytest.mark.parametrize("budget", [0, 1, 3, 4, 5])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("prompt", [OPEN_PROMPT, BARE_PROMPT + "<think>\n"])
def test_case_15_the_budget_is_exact(depth, budget, n, prompt):
    engine = make_engine(depth=depth)
    engine.add(prompt, token_of=loop(), budget=budget, n=n)
    engine.run()
    for index in range(n):
        out = engine.one(index=index)
        assert out.num_thinking_tokens == budget
        assert out.token_ids[: budget + 1] == ids("a") * budget + ids(CLOSE)
        assert out.reasoning == "a" * budget
        assert out.text == "B C"
        assert out.thinking_end_reason is ThinkingEndReason.BUDGET
    assert engine.outputs["r"].costs.computed_prompt_tokens <= 1.3 * len(ids(prompt)) + n


@DEPTHS
def test_case_17_a_spent_budget_closes_a_reopened_block_at_once(depth):
    engine = make_engine(depth=depth)
    engine.add(token_of=script("aaa" + CLOSE + "d<think>" + "b" * 50), budget=4, max_tokens=40)
    engine.run()
    out = engine.one()
    assert out.num_thinking_tokens <= 4
    assert out.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)


@DEPTHS
def test_case_7_eos_inside_thinking_is_replaced_once_and_its_kv_is_written_again(depth):
    engine = make_engine(depth=depth)
    engine.add(token_of=script(f"w{EOS}12345{EOS}"))
    engine.run()
    out = engine.one()
    assert (out.reasoning, out.thinking_end_reason) == ("w", ThinkingEndReason.EOS)
    assert out.text == "345"  # the close and its two newlines took the places of EOS, 1 and 2
    assert ids(EOS)[0] not in out.token_ids[:-1]
    prompt = len(ids(OPEN_PROMPT))
    before_last = [c for c in engine.runner.contexts if len(c) == prompt + len(out.token_ids) - 1][-1]
    assert before_last[prompt:] == out.token_ids[:-1]  # the model saw the close, not EOS


@DEPTHS
def test_case_23_budgets_survive_neighbours_aborts_and_preemption(depth):
    engine = make_engine(depth=depth, num_pages=22, max_num_seqs=8)
    engine.add(request_id="seven", token_of=loop(), budget=7, n=2, max_tokens=40)
    engine.add(request_id="twenty", token_of=loop(), budget=20, n=2, max_tokens=40)
    engine.add(request_id="none", token_of=loop(), budget=-1, n=2, max_tokens=40)
    engine.add(request_id="gone", token_of=loop(), budget=30, max_tokens=40)
    for _ in range(6):
        engine.step()
    engine.core.abort("gone")
    engine.add(request_id="late", token_of=loop(), budget=9, max_tokens=40)
    engine.run()
    assert engine.core.stats().preemptions > 0
    assert engine.one("gone").finish_reason is FinishReason.ABORT
    for name, length in (("seven", 7), ("twenty", 20), ("none", 40), ("late", 9)):
        for out in engine.outputs[name].outputs:
            assert out.num_thinking_tokens == length, name
    assert engine.core.stats().pages_by_class["thinking"] == 0


@pytest.mark.parametrize("num_pages", [60, 400])
def test_both_depths_give_equal_tokens(num_pages):
    """Budgets, EOS repair, stop strings, n > 1 and preemption, one step ahead or not."""
    results = []
    for depth in (0, 1):
        engine = make_engine(depth=depth, num_pages=num_pages)
        engine.add(request_id="budget", token_of=loop(), budget=11, n=3, max_tokens=60)
        engine.add(BARE_PROMPT, request_id="stop", token_of=loop(), stop=("C",), max_tokens=60, budget=5)
        engine.add(request_id="length", token_of=loop(), max_tokens=17)
        engine.run()
        results.append({(r, o.index): (o.token_ids, o.text) for r, out in engine.outputs.items() for o in out.outputs})
    assert results[0] == results[1]


@DEPTHS
def test_a_stop_string_sleeps_while_thinking(depth):
    engine = make_engine(depth=depth)
    engine.add(token_of=script(f"x=y{CLOSE}\n\nn=7{EOS}"), stop=("=",))
    engine.run()
    out = engine.one()
    assert (out.reasoning, out.text, out.stop_reason) == ("x=y", "n", "=")


@DEPTHS
def test_rows_without_finite_logits_fail_alone(depth):
    engine = make_engine(depth=depth)
    engine.add(request_id="good", token_of=loop(), budget=6, seed=1)
    engine.add(request_id="bad", token_of=loop(), budget=6, seed=2)
    engine.runner.nan_at = {(2, len(ids(OPEN_PROMPT)) + 3)}
    engine.run()
    assert engine.one("bad").finish_reason is FinishReason.ERROR
    assert "not finite" in engine.outputs["bad"].error
    assert engine.one("good").text == "B C"
    assert engine.finals == {"good": 1, "bad": 1}


@DEPTHS
def test_a_control_that_raises_fails_its_request_only(depth):
    engine = make_engine(depth=depth)
    engine.add(request_id="good", token_of=loop(), budget=6)
    engine.add(request_id="bad", token_of=loop(), budget=6)
    engine.step()
    broken = engine.core._requests["bad"].controls[0]
    broken.accept = lambda token: 1 / 0
    engine.run()
    assert "ZeroDivisionError" in engine.outputs["bad"].error
    assert engine.one("good").text == "B C"
    assert engine.core.stats().pages_by_class["thinking"] == 0


@DEPTHS
@pytest.mark.parametrize("method", ["accept", "finish", "take", "injection", "must_wait"])
def test_whatever_a_control_raises_ends_its_request_once_with_all_its_choices(depth, method):
    engine = make_engine(depth=depth)
    engine.add(request_id="good", token_of=loop(), budget=6)
    engine.add(request_id="bad", token_of=loop(), budget=6, n=3)
    engine.step()
    setattr(engine.core._requests["bad"].controls[1], method, lambda *_: 1 / 0)
    if method == "finish":
        engine.core.abort("bad")
    engine.run()
    assert engine.finals == {"good": 1, "bad": 1}
    assert "ZeroDivisionError" in engine.outputs["bad"].error
    assert all(out.finish_reason is not None for out in engine.outputs["bad"].outputs)
    assert len(engine.outputs["bad"].outputs) == 3
    assert engine.one("good").text == "B C"
    assert sum(engine.core.stats().requests_by_reason.values()) == 4
    assert engine.core.stats().pages_by_class["thinking"] == 0


def test_a_core_with_nothing_to_run_says_so_instead_of_turning_for_ever():
    engine = make_engine()
    engine.add(token_of=loop())
    engine.core._scheduler.plan = lambda: None
    with pytest.raises(RuntimeError, match="1 requests are left and none can run"):
        engine.step()


def test_a_request_that_cannot_be_prepared_gets_its_final_output():
    engine = make_engine()
    engine.core._make_control = lambda request, branch: 1 / 0
    engine.add(request_id="bad", token_of=loop())
    engine.run()
    engine.step()
    assert engine.outputs["bad"].finished
    assert "ZeroDivisionError" in engine.outputs["bad"].error


@DEPTHS
def test_abort_at_every_moment_returns_all_pages(depth):
    for moment in range(14):
        engine = make_engine(depth=depth, budget=8)
        engine.add(BARE_PROMPT, token_of=loop(), budget=5, n=2)
        for _ in range(moment):
            engine.step()
        engine.core.abort("r")
        engine.core.abort("r")
        engine.core.abort("unknown")
        engine.run()
        engine.step()
        assert engine.finals == {"r": 1}
        usage = engine.core.stats().pages_by_class
        assert {usage[c] for c in ("prompt", "thinking", "answer")} == {0}


@DEPTHS
def test_costs_add_up(depth):
    engine = make_engine(depth=depth)
    engine.add(token_of=loop(), budget=10, n=2)
    engine.run()
    costs = engine.outputs["r"].costs
    assert costs.thinking_tokens == 20
    assert costs.thinking_tokens + costs.answer_tokens == sum(o.num_output_tokens for o in engine.outputs["r"].outputs)
    assert costs.kv_peak_entries >= 2 * 10
    assert min(costs.prefill_s, costs.thinking_s, costs.answer_s, costs.kv_byte_seconds) > 0
    stats = engine.core.stats()
    assert stats.discarded_tokens == costs.discarded_tokens == 2 * depth  # launched before EOS was seen
    assert stats.thinking_by_reason == {"budget": 2}
    assert stats.requests_by_reason == {"stop": 2}


def test_pages_that_forks_share_are_charged_once_even_when_the_trunk_has_ended():
    engine = make_engine(num_pages=2000)
    prompt = ids(BARE_PROMPT) * 8
    endings = {0: 2, 1: 20, 2: 30}
    engine.add(prompt, n=3, seed=0, forced_tokens=tuple(ids("a") * 40), max_tokens=40, budget=-1)
    core = engine.core
    running = core._requests["r"]
    for turn in range(32):
        engine.step()
        for index, end in endings.items():
            if turn == end:
                core.end(running, running.branches[index], FinishReason.ABORT)
        before = running.meter.costs.kv_byte_seconds
        held = {page for b in running.branches for page in b.table.pages}
        running.meter.tick([b for b in running.branches if b.table.pages], 1.0)
        assert running.meter.costs.kv_byte_seconds - before == len(held) * 100
    assert running.meter.costs.kv_peak_entries <= len(prompt) + 3 * 40


@DEPTHS
def test_eight_choices_share_one_prefill_and_every_full_page_of_the_prompt(depth):
    prompt = ids(BARE_PROMPT) * 8 + ids(OPEN_PROMPT)
    computed, peak, own = {}, {}, 0
    for n in (1, 8):
        engine = make_engine(depth=depth, num_pages=2000)
        engine.add(prompt, token_of=loop(), budget=24, n=n, temperature=1.0)
        running, peak[n] = engine.core._requests["r"], 0
        for _ in range(100):
            peak[n] = max(peak[n], len({page for b in running.branches for page in b.table.pages}))
            engine.step()
        assert not engine.core.has_work
        computed[n] = engine.outputs["r"].costs.computed_prompt_tokens
        own = -(-engine.one().num_output_tokens // PAGE)
    assert computed[1] >= len(prompt) and computed[8] <= 1.3 * computed[1]
    assert peak[1] < peak[8] <= len(prompt) // PAGE + 8 * own + 8


@DEPTHS
def test_case_32_counts_agree_with_the_script(depth):
    engine = make_engine(depth=depth)
    engine.add(token_of=script(f"aaaaa{CLOSE}A B{EOS}"), logprobs=0)
    engine.run()
    out = engine.one()
    thinking = len(ids("aaaaa"))
    assert out.num_thinking_tokens == thinking
    assert out.num_output_tokens == len(out.token_ids) == thinking + 1 + len(ids("A B")) + 1
    phases = [entry.phase for entry in out.logprobs]
    assert phases == [Phase.THINKING] * thinking + [None] + [Phase.ANSWER] * len(ids("A B")) + [None]


@DEPTHS
def test_the_last_token_before_a_forced_end_keeps_its_logprob(depth):
    engine = make_engine(depth=depth)
    engine.add(token_of=loop(), budget=3, logprobs=0)
    engine.run()
    phases = [entry.phase for entry in engine.one().logprobs]
    assert phases.count(Phase.THINKING) == 3


def test_thinking_switched_off_gives_an_answer_only():
    engine = make_engine()
    engine.add(
        BARE_PROMPT + "<think>\n\n</think>\n\n", token_of=script(f"A{EOS}"), thinking=ThinkingParams(enabled=False)
    )
    engine.run()
    out = engine.one()
    assert (out.reasoning, out.text, out.num_thinking_tokens) == ("", "A", 0)
    assert out.thinking_end_reason is None


def test_a_device_error_is_raised_to_the_loop():
    engine = make_engine()
    engine.runner.fail_at = 2
    engine.add(token_of=loop())
    with pytest.raises(RuntimeError, match="device-side assert"):
        engine.run()
