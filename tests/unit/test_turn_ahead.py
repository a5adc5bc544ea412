"""The next turn's prompt, computed in idle steps: what it finds, what it costs, and that nobody waits for it."""

from functools import cache

import pytest
from scripted import CLOSE, EOS, PAGE, language, loop, make_engine, script

from thinkfold.engine.commands import ListPins, Prefill, Unpin
from thinkfold.errors import CapacityError, NotFoundError, UnsupportedError
from thinkfold.text.prompts import PromptRenderer


@cache
def prompts():
    return PromptRenderer(language()[0], normalize=True)


def prefill(engine, name, tokens, *, idle=True, ttl_s=None, owner="", namespace=()):
    engine.core.orders.give(
        Prefill(
            call=len(name),
            request_id=name,
            token_ids=tuple(tokens),
            namespace=namespace,
            owner=owner,
            idle=idle,
            ttl_s=ttl_s,
        )
    )


def answer(engine):
    (one,) = engine.core.orders.take()
    if one.error is not None:
        raise one.error
    return one.value


def pages(engine, *classes):
    counts = engine.core.stats().pages_by_class
    return sum(counts[c] for c in classes)


def common_prefix(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize("depth", [0, 1])
def test_case_35_every_turn_finds_the_answer_of_the_last_one_too(depth):
    engine = make_engine(depth=depth, num_pages=3000)
    chat, before, kept_before = [], [], 0
    for turn in range(20):
        chat.append({"role": "user", "content": f"question {turn}"})
        prompt = prompts().encode_chat(chat)
        name = f"turn{turn}"
        engine.runner.scripts.clear()
        engine.add(prompt, request_id=name, token_of=script(f"<think>\n{'w ' * 32}{CLOSE}\n\n{'A ' * 8}{EOS}"))
        engine.run()
        out = engine.outputs[name]
        assert len(before) == common_prefix(before, prompt), "the next turn was foreseen to its last token"
        assert out.costs.cached_tokens == len(before) // PAGE * PAGE
        chat.append({"role": "assistant", "content": out.outputs[0].text})
        seen, before = len(before), prompts().encode_history(chat)
        computed = engine.core.stats().ahead_tokens
        prefill(engine, name, before)
        engine.run()
        assert answer(engine).dropped is None
        assert engine.core.stats().ahead_tokens - computed <= len(before) - len(prompt) + 2 * PAGE
        kept = pages(engine, "cached", "pinned")
        assert (kept - kept_before) * PAGE < len(before) - seen + PAGE
        kept_before = kept
    assert out.costs.cached_tokens > 500
    assert pages(engine, "pinned") == len(before) // PAGE, "the pins of one chat are one pin"


def test_nothing_is_computed_ahead_in_a_step_with_other_rows_and_nobody_waits():
    engine = make_engine(max_num_seqs=2)
    engine.add(token_of=loop("a"), max_tokens=40)
    engine.step()
    prefill(engine, "ahead", range(1000, 1100))
    rows = []
    launch = engine.runner.launch
    engine.runner.launch = lambda plan: (rows.append([r.token_ids[:1] for r in plan.rows]), launch(plan))[1]
    while "r" not in engine.finals or not engine.finals["r"]:
        engine.step()
    assert all(len(row) == 1 and row != [[1000]] for row in rows)
    engine.run()
    assert answer(engine).pages == 25
    assert engine.core.stats().ahead_tokens == 100
    assert engine.outputs["r"].costs.prompt_tokens < 20, "no request pays for it"


def test_work_that_comes_meanwhile_goes_first_and_what_was_computed_is_not_lost():
    engine = make_engine(depth=1, budget=16)
    prefill(engine, "ahead", range(1000, 1100))
    engine.step()
    engine.step()
    engine.add(token_of=script(f"<think>\nw{CLOSE}\n\nA{EOS}"))
    engine.step()
    engine.run()
    assert answer(engine).computed_tokens == 100
    assert pages(engine, "prompt", "thinking", "answer") == 0
    engine.add(list(range(1000, 1101)), request_id="turn", token_of=loop("a"), max_tokens=2)
    engine.run()
    assert engine.outputs["turn"].costs.cached_tokens == 100


def test_a_prefix_is_found_in_its_namespace_only():
    engine = make_engine()
    prefill(engine, "a", range(1000, 1020), namespace=("tenant=a",), owner="a")
    engine.run()
    assert answer(engine).pages == 5
    engine.add(list(range(1000, 1021)), token_of=loop("a"), max_tokens=2)
    engine.run()
    assert engine.outputs["r"].costs.cached_tokens == 0


def test_pinned_pages_give_way_to_requests_and_the_rung_is_counted():
    engine = make_engine(num_pages=40)
    prefill(engine, "ahead", range(1000, 1040))
    engine.run()
    assert pages(engine, "pinned") == 10
    engine.add(list(range(100)), token_of=loop("a"), max_tokens=55)
    engine.run()
    assert engine.outputs["r"].outputs[0].finish_reason == "length"
    stats = engine.core.stats()
    assert (stats.pressure["pin"], stats.preemptions, stats.pages_by_class["pinned"]) == (1, 0, 0)


def test_no_pin_is_given_up_for_a_turn_that_may_never_come():
    engine = make_engine(num_pages=40)
    for number in range(4):
        prefill(engine, "x" * (number + 1), range(1000 * number + 1000, 1000 * number + 1040), owner=str(number))
        engine.run()
    assert pages(engine, "pinned") == 40
    engine.core.orders.take()
    prefill(engine, "ahead", range(7000, 7040), owner="new")
    engine.run()
    result = answer(engine)
    assert (result.pages, result.dropped) == (0, "no memory was free")
    prefill(engine, "asked for", range(7000, 7040), owner="new", idle=False)
    engine.run()
    assert answer(engine).pages == 10


def test_an_asked_for_prefix_is_computed_beside_running_requests():
    engine = make_engine()
    engine.add(token_of=loop("a"), max_tokens=150)
    engine.step()
    prefill(engine, "system", range(1000, 1100), idle=False)
    for _ in range(5):
        engine.step()
    assert not engine.finals["r"]
    assert answer(engine).computed_tokens == 100
    assert engine.core.stats().warm_tokens == 100
    engine.run()


def test_pins_are_listed_expire_and_are_let_go_by_their_owner_only():
    engine = make_engine()
    prefill(engine, "system", range(1000, 1042), owner="a", idle=False)
    prefill(engine, "turn", range(2000, 2042), owner="a", ttl_s=1000.0)
    engine.run()
    engine.core.orders.take()

    def listed(owner):
        engine.core.orders.give(ListPins(call=0, request_id="", owner=owner))
        return [(p.name, p.tokens, p.ahead) for p in answer(engine)]

    assert listed("a") == [("system", 40, False), ("turn", 40, True)]
    assert listed("b") == []
    engine.core.orders.give(Unpin(call=0, request_id="system", owner="b"))
    with pytest.raises(NotFoundError):
        answer(engine)
    engine.core.orders.give(Unpin(call=0, request_id="system", owner="a"))
    answer(engine)
    for _ in range(4000):  # the clock goes on a quarter of a second a look
        engine.core.prefixes.expire()
    assert listed("a") == []
    assert pages(engine, "pinned") == 0
    assert pages(engine, "cached") == 20


def test_a_prefix_that_waits_for_an_idle_step_too_long_is_given_up():
    engine = make_engine()
    engine.add(token_of=loop("a"), max_tokens=100)
    prefill(engine, "turn", range(2000, 2042), ttl_s=2.0)
    for _ in range(20):
        engine.step()
        engine.core.prefixes.expire()
    assert answer(engine).dropped == "no step was idle in time"
    engine.run()


def test_what_can_never_be_pinned_is_refused_by_name():
    engine = make_engine(num_pages=40)
    prefill(engine, "system", range(1000, 1044), idle=False)
    with pytest.raises(CapacityError, match=r"11 pages.*10"):
        answer(engine)
    prefill(engine, "turn", range(1000, 1044))
    engine.run()
    assert answer(engine).pages == 10, "of a long chat its beginning"
    without = make_engine(caching=False)
    prefill(without, "system", range(1000, 1044))
    with pytest.raises(UnsupportedError, match="enable_prefix_caching"):
        answer(without)


def test_a_long_queue_forgets_its_oldest():
    engine = make_engine()
    engine.add(token_of=loop("a"), max_tokens=30)
    for number in range(70):
        prefill(engine, "t" * number, [number] * 8)
    engine.step()
    dropped = [a.value.dropped for a in engine.core.orders.take()]
    assert dropped == ["newer ones wait"] * 6
    engine.run()
    assert len(engine.core.orders.take()) == 64
