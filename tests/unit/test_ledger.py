"""Deadlines and prices end thinking in time, by a clock that a script moves; step times are learned."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scripted import CLOSE, EOS, loop, make_engine, script

from thinkfold.engine.step_time import StepTime
from thinkfold.errors import ParameterError
from thinkfold.types import Prices, Service, ThinkingEndReason

TICK = 0.25  # seconds of every look at the scripted clock


def run(service: Service, *, token_of=None, n=1, depth=0, **sampling):
    engine = make_engine(depth=depth)
    engine.add(token_of=token_of or loop(), budget=-1, n=n, service=service, max_tokens=400, **sampling)
    engine.run()
    return engine


@pytest.mark.parametrize("depth", [0, 1])
def test_a_deadline_ends_thinking_with_time_left_for_the_answer(depth):
    """A step is two looks at the clock, half a second; 256 tokens are kept for an answer whose length nobody knows."""
    free = run(Service(), depth=depth).one()
    out = run(Service(deadline_ms=160_000), depth=depth).one()
    assert free.thinking_end_reason is ThinkingEndReason.UNCLOSED
    assert out.thinking_end_reason is ThinkingEndReason.DEADLINE and out.text == "B C"
    assert 0 < out.num_thinking_tokens < free.num_thinking_tokens
    longer = run(Service(deadline_ms=180_000), depth=depth).one()
    assert longer.num_thinking_tokens > out.num_thinking_tokens


def test_a_deadline_that_is_kept_anyway_changes_nothing():
    thinking = script(f"w w w{CLOSE}\n\nA{EOS}")
    free, bounded = run(Service(), token_of=thinking), run(Service(deadline_ms=10**8), token_of=thinking)
    assert free.one().token_ids == bounded.one().token_ids
    assert bounded.one().thinking_end_reason is ThinkingEndReason.NATURAL


def test_a_deadline_that_has_passed_closes_thinking_at_once():
    out = run(Service(deadline_ms=1)).one()
    assert (out.num_thinking_tokens, out.text) == (0, "B C")
    assert out.thinking_end_reason is ThinkingEndReason.DEADLINE


@pytest.mark.parametrize("n", [1, 2])
def test_device_seconds_are_a_limit(n):
    limit = 80.0
    engine = run(Service(max_cost=limit), n=n, temperature=1.0)
    for index in range(n):
        out = engine.one(index=index)
        assert out.thinking_end_reason is ThinkingEndReason.COST and out.text == "B C"
    costs = engine.outputs["r"].costs
    assert 0 < costs.device_s <= limit
    assert costs.device_s <= costs.prefill_s + costs.thinking_s + costs.answer_s + TICK * 8


def test_an_operators_prices_are_a_limit():
    """A price a token and none for time: thinking gets what the prompt and 256 answer tokens leave."""
    prices = Prices(gpu_second=0.0, prompt=1e6, thinking=1e6, answer=2e6)
    engine = run(Service(max_cost=600.0, prices=prices))
    out, costs = engine.one(), engine.outputs["r"].costs
    assert out.thinking_end_reason is ThinkingEndReason.COST
    prompt = costs.prompt_tokens
    assert abs(out.num_thinking_tokens - (600 - prompt - 2 * 256)) <= 3
    assert prices.cost(costs) < 600.0


def test_a_step_is_split_among_those_that_run():
    engine = make_engine()
    for name, seed in (("a", 1), ("b", 2)):
        engine.runner.by_seed[seed] = name
        engine.add(request_id=name, token_of=script(f"w w w{CLOSE}\n\nA{EOS}"), budget=-1, seed=seed)
    engine.run()
    a, b = engine.outputs["a"].costs, engine.outputs["b"].costs
    assert a.device_s == pytest.approx(b.device_s, rel=0.2)
    assert a.device_s < 0.7 * (a.prefill_s + a.thinking_s + a.answer_s)


def test_step_times_are_learned_and_follow_what_changes():
    learned = StepTime()
    assert learned.predict(8, 1000) == 0.0
    truth = lambda tokens, entries: 0.005 + 1e-5 * tokens + 2e-8 * entries  # noqa: E731
    for i in range(300):
        tokens, entries = 1 + i % 32, 1000 * (i % 70)
        learned.observe(tokens, entries, truth(tokens, entries))
    assert learned.predict(64, 100_000) == pytest.approx(truth(64, 100_000), rel=0.02)
    for i in range(2000):
        learned.observe(1 + i % 32, 1000 * (i % 70), 2 * truth(1 + i % 32, 1000 * (i % 70)))
    assert learned.predict(16, 50_000) == pytest.approx(2 * truth(16, 50_000), rel=0.05)


def test_equal_steps_are_enough_to_predict_them_and_a_slow_one_is_no_rule():
    learned = StepTime()
    for _ in range(20):
        learned.observe(4, 400, 0.01)
    learned.observe(4, 400, 30.0)
    assert learned.predict(4, 400) < 0.03


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"deadline_ms": 0}, "deadline_ms"),
        ({"deadline_ms": 1.5}, "deadline_ms"),
        ({"max_cost": 0}, "max_cost"),
        ({"max_cost": float("nan")}, "max_cost"),
        ({"session_budget": -1}, "session"),
    ],
)
def test_wrong_limits_are_named(wrong, field):
    with pytest.raises(ParameterError, match=f"^{field}: "):
        Service(**wrong)


def test_prices_that_charge_nothing_are_no_prices():
    with pytest.raises(ParameterError, match=r"^prices: "):
        Prices(gpu_second=0.0)
    assert replace(Prices(), thinking=1.0).thinking == 1.0
