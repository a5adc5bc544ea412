"""Orders to a running request, with real control and a scripted device: what they do, and that nothing else changes."""

import pytest
from scripted import CLOSE, EOS, OPEN_PROMPT, ids, loop, make_engine, script

from thinkfold.engine.commands import Cancel, EndThinking, Forget, Fork, Inject, Pause, Probe, Resume, SetBudget
from thinkfold.errors import ConflictError, NotFoundError, ParameterError
from thinkfold.types import FinishReason, Service, ThinkingEndReason, ThinkingParams, Tier

DEPTHS = pytest.mark.parametrize("depth", [0, 1])
WORDS = "one two three four five six seven eight nine ten " * 3
NO_LIMIT = ThinkingParams(thinking_token_budget=-1)


def ask(engine, kind, request_id="r", **more):
    """Give an order and return what it came to; raises what it raises."""
    engine.core.orders.give(kind(call=7, request_id=request_id, **more))
    for _ in range(10):
        for answer in engine.core.orders.take():
            if answer.error is not None:
                raise answer.error
            return answer.value
        engine.step()
    raise AssertionError("no answer")


def started(depth, tokens, *, n=1, token_of=None, **options):
    """An engine whose request has told `tokens` output tokens."""
    engine = make_engine(depth=depth, **{k: options.pop(k) for k in ("num_pages", "host_pages") if k in options})
    engine.add(token_of=token_of or script(WORDS + CLOSE + "A" + EOS), n=n, thinking=NO_LIMIT, **options)
    for _ in range(100):
        if engine.outputs and all(engine.one(index=i).num_output_tokens >= tokens for i in range(n)):
            return engine
        engine.step()
    raise AssertionError("it never began")


@DEPTHS
def test_a_paused_request_holds_its_pages_and_loses_nothing(depth):
    plain = started(depth, 5).run().one().token_ids
    engine = started(depth, 5)
    held = engine.core.stats().kv_pages.held
    ask(engine, Pause)
    engine.step()
    told = engine.one().num_output_tokens
    assert not engine.core.has_work and engine.core.has_requests, "an engine of paused requests does not spin"
    launched = engine.runner.launched
    for _ in range(3):
        engine.step()
    assert engine.runner.launched == launched and engine.one().num_output_tokens == told
    assert engine.core.stats().kv_pages.held == held > 0
    with pytest.raises(ConflictError, match="paused"):
        ask(engine, Pause)
    ask(engine, Resume)
    engine.run()
    assert engine.one().token_ids == plain
    costs = engine.outputs["r"].costs
    assert costs.recomputed_tokens <= 1 and costs.preemptions == 0


@DEPTHS
@pytest.mark.parametrize("before", [0, 1, 5])
def test_pause_at_any_moment_with_all_choices(depth, before):
    engine = make_engine(depth=depth, budget=4)  # the prompt takes several steps
    engine.add(token_of=script(WORDS + CLOSE + EOS), n=3, thinking=NO_LIMIT)
    for _ in range(before):
        engine.step()
    ask(engine, Pause)
    for _ in range(5):
        if engine.core.has_work:
            engine.step()
    assert not engine.core.has_work
    ask(engine, Resume)
    engine.run()
    assert all(engine.one(index=i).token_ids[:-2] == ids(WORDS) for i in range(3))
    assert engine.finals == {"r": 1}


@DEPTHS
def test_one_choice_pauses_and_the_others_end(depth):
    engine = started(depth, 3, n=3)
    ask(engine, Pause, choice=1)
    for _ in range(100):
        if engine.core.has_work:
            engine.step()
    assert [engine.one(index=i).finish_reason for i in range(3)] == [FinishReason.STOP, None, FinishReason.STOP]
    ask(engine, Resume, choice=1)
    engine.run()
    assert engine.one(index=1).token_ids == engine.one(index=0).token_ids


@DEPTHS
@pytest.mark.parametrize("host_pages", [0, 64])
def test_a_paused_request_gives_way_before_a_running_one(depth, host_pages):
    plain = started(depth, 5).run().one().token_ids
    engine = started(depth, 12, num_pages=20, host_pages=host_pages)
    ask(engine, Pause)
    engine.add(request_id="other", token_of=script("x " * 60 + CLOSE + EOS), thinking=NO_LIMIT, seed=1)
    engine.runner.by_seed[1] = "other"
    for _ in range(300):
        if not engine.core.has_work:
            break
        engine.step()
    assert engine.finals["other"] == 1 and engine.one("other").finish_reason is FinishReason.STOP
    stats = engine.core.stats()
    assert stats.pressure["swap_parked" if host_pages else "forget_parked"] == 1 and stats.preemptions == 0
    ask(engine, Resume)
    engine.run()
    assert engine.one().token_ids == plain
    moved = sum(output.costs.swapped_bytes for output in engine.outputs.values())
    assert engine.core.stats().swapped_bytes == moved and (moved > 0) == bool(host_pages)


@DEPTHS
def test_a_forgotten_session_leaves_no_kv_on_device_or_host(depth):
    engine = started(depth, 12, num_pages=24, host_pages=64, service=Service(session="s"))
    ask(engine, Fork)
    ask(engine, Pause)
    for seed, (name, session) in enumerate((("other", "t"), ("nobody", "")), 1):
        engine.add(
            request_id=name, token_of=script("x " * 60 + CLOSE + EOS), seed=seed, service=Service(session=session)
        )
        engine.runner.by_seed[seed] = name
    for _ in range(300):
        if engine.core.scheduler.kv.host_usage():
            break
        engine.step()
    assert engine.core.scheduler.kv.host_usage() > 0, "the paused request lies on the host"
    gone = ask(engine, Forget, owner="", labels=(), session="s")
    assert (gone["calls"], gone["handles"]) == (1, 1)
    assert engine.core.scheduler.kv.host_usage() == 0 and len(engine.core.handles) == 0
    engine.run()
    assert engine.one().finish_reason is FinishReason.ABORT and engine.finals == {"r": 1, "other": 1, "nobody": 1}
    assert engine.one("other").finish_reason is engine.one("nobody").finish_reason is FinishReason.STOP
    assert engine.core.stats().kv_pages.held == 0


@DEPTHS
@pytest.mark.parametrize("keep", [True, False])
def test_cancel_tells_a_true_end(depth, keep):
    engine = started(depth, 6)
    ask(engine, Cancel, keep_partial=keep)
    engine.run()
    out, costs = engine.one(), engine.outputs["r"].costs
    assert (out.finish_reason, out.thinking_end_reason) == (FinishReason.ABORT, ThinkingEndReason.UNCLOSED)
    assert engine.finals == {"r": 1}
    assert out.discarded is not keep and bool(out.token_ids) is keep and bool(out.reasoning) is keep
    assert (costs.thinking_tokens > 0) is keep
    assert costs.discarded_tokens == (depth if keep else out.num_output_tokens + depth)
    with pytest.raises(NotFoundError):
        ask(engine, Cancel)


@DEPTHS
def test_cancel_of_one_choice_leaves_its_siblings(depth):
    engine = started(depth, 4, n=2)
    ask(engine, Cancel, choice=0)
    engine.run()
    assert engine.one(index=0).finish_reason is FinishReason.ABORT
    assert engine.one(index=1).finish_reason is FinishReason.STOP
    with pytest.raises(NotFoundError):
        ask(engine, Pause, choice=0)


@DEPTHS
def test_thinking_ends_now_and_the_answer_follows(depth):
    engine = started(depth, 6, token_of=loop())
    told = engine.one().num_output_tokens
    ask(engine, EndThinking)
    engine.run()
    out = engine.one()
    assert told <= out.num_thinking_tokens <= told + 1  # a token that was launched may still count
    assert out.reasoning == "a" * out.num_thinking_tokens and out.text == "B C"
    assert out.thinking_end_reason is ThinkingEndReason.CONTROL and out.finish_reason is FinishReason.STOP
    assert out.token_ids[out.num_thinking_tokens] == ids(CLOSE)[0]


@DEPTHS
def test_who_does_not_think_cannot_end_thinking(depth):
    engine = started(depth, 10, token_of=script("w" + CLOSE + "A B C D E F G H I J" + EOS))
    with pytest.raises(ConflictError, match="not thinking"):
        ask(engine, EndThinking)


@DEPTHS
@pytest.mark.parametrize("budget", [0, 3, 9, 20])
def test_a_new_budget_holds_from_now_on(depth, budget):
    engine = started(depth, 6, token_of=loop())
    told = engine.one().num_output_tokens
    assert ask(engine, SetBudget, budget=budget) == budget
    engine.run()
    out = engine.one()
    assert max(budget, told) <= out.num_thinking_tokens <= max(budget, told + 1)
    assert (out.thinking_end_reason, out.text) == (ThinkingEndReason.BUDGET, "B C")
    assert (engine.outputs["r"].policy.budget, engine.outputs["r"].policy.source) == (budget, "control")


@DEPTHS
def test_a_budget_can_be_lifted(depth):
    engine = make_engine(depth=depth)
    engine.add(token_of=script("a" * 30 + CLOSE + "B" + EOS), budget=10)
    for _ in range(4):
        engine.step()
    assert ask(engine, SetBudget, budget=-1) is None
    engine.run()
    assert engine.one().thinking_end_reason is ThinkingEndReason.NATURAL
    assert engine.outputs["r"].policy.budget is None


def test_a_budget_needs_thinking_and_a_number():
    engine = started(0, 2)
    with pytest.raises(ParameterError, match="budget"):
        ask(engine, SetBudget, budget=-2)
    off = make_engine()
    off.add(token_of=script("abc " * 9 + EOS), thinking=ThinkingParams(enabled=False))
    off.step()
    with pytest.raises(ConflictError, match="off"):
        ask(off, SetBudget, budget=10)


@pytest.mark.parametrize(
    ("service", "most"),
    [(Service(session_budget=12), 12), (Service(Tier("t", 20)), 20), (Service(Tier("t", 20), session_budget=12), 12)],
)
def test_a_new_budget_stays_within_tier_and_session(service, most):
    engine = make_engine()
    engine.add(token_of=loop(), budget=10, service=service)
    engine.step()
    assert [ask(engine, SetBudget, budget=budget) for budget in (-1, 50, 5)] == [most, most, 5]


@DEPTHS
def test_injected_tokens_follow_what_was_told(depth):
    engine = started(depth, 6)
    told = list(engine.one().token_ids)
    words = ids(" Wait, really?")
    assert ask(engine, Inject, token_ids=tuple(words)) == len(told) + len(words)
    engine.run()
    out = engine.one()
    assert out.token_ids[: len(told) + len(words)] == told + words
    assert " Wait, really?" in out.reasoning
    assert out.num_injected_tokens == len(words) == engine.outputs["r"].costs.injected_tokens
    prompt = len(ids(OPEN_PROMPT))
    seen = [c[prompt:] for c in engine.runner.contexts if len(c) == prompt + len(told) + len(words)]
    assert seen[-1] == told + words, "the model draws behind what was injected"


@DEPTHS
def test_an_injection_before_the_first_token(depth):
    engine = make_engine(depth=depth, budget=4)
    engine.add(token_of=script(WORDS + EOS), n=2, thinking=NO_LIMIT)
    ask(engine, Inject, token_ids=tuple(ids("First")), choice=0)
    engine.run()
    assert engine.one(index=0).reasoning.startswith("First")
    assert not engine.one(index=1).reasoning.startswith("First")


@DEPTHS
def test_an_injected_marker_ends_thinking(depth):
    engine = started(depth, 4, token_of=loop())
    ask(engine, Inject, token_ids=tuple(ids(CLOSE)))
    engine.run()
    out = engine.one()
    assert (out.thinking_end_reason, out.text) == (ThinkingEndReason.CONTROL, "B C")


@DEPTHS
def test_what_cannot_be_injected_is_refused(depth):
    engine = started(depth, 4, max_tokens=20)
    with pytest.raises(ParameterError, match="end token"):
        ask(engine, Inject, token_ids=tuple(ids(EOS)))
    with pytest.raises(ConflictError, match="max_tokens has"):
        ask(engine, Inject, token_ids=tuple(ids("a " * 40)))
    ask(engine, SetBudget, budget=8)
    with pytest.raises(ConflictError, match="thinking budget has"):
        ask(engine, Inject, token_ids=tuple(ids("a b c d e f g")))
    many = started(depth, 2, n=2)
    with pytest.raises(ConflictError, match="name one"):
        ask(many, Inject, token_ids=(5,))


@DEPTHS
def test_an_injection_waits_for_a_whole_character(depth):
    text = "ab\N{SNOWMAN}cd"
    parts = ids(text)
    engine = make_engine(depth=depth)
    engine.add(token_of=script(text + WORDS + EOS), thinking=NO_LIMIT)
    position = next(i for i in range(1, len(parts)) if engine_text(parts[:i]).endswith("\N{REPLACEMENT CHARACTER}"))
    while not engine.outputs or engine.one().num_output_tokens < position:
        engine.step()
    at = ask(engine, Inject, token_ids=tuple(ids("!!")))
    engine.run()
    assert "\N{REPLACEMENT CHARACTER}" not in engine.one().reasoning
    assert at > position + len(ids("!!"))


def engine_text(tokens):
    from scripted import language

    return language()[0].decode(tokens)


def test_unknown_requests_are_told_apart():
    engine = make_engine()
    for kind, more in [(Pause, {}), (Resume, {}), (Cancel, {}), (EndThinking, {}), (SetBudget, {"budget": 3})]:
        with pytest.raises(NotFoundError, match="nobody"):
            ask(engine, kind, "nobody", **more)
    running = started(0, 2)
    with pytest.raises(ConflictError, match="not paused"):
        ask(running, Resume)


def probe(engine, text="", n=3, **more):
    return ask(engine, Probe, token_ids=tuple(ids(text)), n=n, max_len=4096, **more)


@DEPTHS
def test_case_25_a_probe_leaves_nothing_behind(depth):
    plain = started(depth, 5).run()
    engine = started(depth, 5)
    held = dict(engine.core.stats().pages_by_class)
    told = list(engine.one().token_ids)
    found = probe(engine, " Final answer:", n=4)
    assert found.dropped is None and found.finish_reason is FinishReason.LENGTH and len(found.token_ids) == 4
    assert len(found.stats) == 4 and found.text == engine_text(found.token_ids) and found.after == len(told)
    question = ids(" Final answer:")
    prompt = len(ids(OPEN_PROMPT))
    asked = [c[prompt:] for c in engine.runner.contexts if c[prompt + len(told) :][: len(question)] == question]
    assert [len(c) for c in asked][:1] == [len(told) + len(question)], "it stands on what was told, and on the question"
    engine.run()
    out, costs = engine.one(), engine.outputs["r"].costs
    assert out.token_ids == plain.one().token_ids and out.reasoning == plain.one().reasoning
    assert (
        costs.probe_tokens
        == found.computed_tokens
        == len(question) + 3 + (depth == 0)
        == engine.core.stats().probe_tokens
    )
    assert costs.thinking_tokens == plain.outputs["r"].costs.thinking_tokens
    assert held and engine.core.stats().kv_pages.held == 0


@DEPTHS
def test_a_peek_is_one_row_without_a_question(depth):
    engine = started(depth, 5, token_of=script(WORDS + CLOSE + EOS))
    told = engine.one().num_output_tokens
    found = probe(engine, n=1, logprobs=20)
    engine.run()
    assert found.token_ids == [engine.one().token_ids[told]], "the model's own next token"
    assert found.computed_tokens == 1


@DEPTHS
def test_a_probe_ends_at_its_stops(depth):
    engine = started(depth, 4, token_of=script("a b c d e} f" + CLOSE + EOS))
    found = probe(engine, n=20, stop=("}",))
    assert found.text.endswith("e") and (found.stop_reason, found.finish_reason) == ("}", FinishReason.STOP)
    ends = started(depth, 2, token_of=script("a b c" + EOS))
    assert probe(ends, n=20).token_ids[-1] == ids(EOS)[0]


@DEPTHS
def test_a_probe_gives_way(depth):
    full = make_engine(depth=depth, max_num_seqs=1)
    full.add(token_of=script(WORDS + CLOSE + EOS), thinking=NO_LIMIT)
    for _ in range(4):
        full.step()
    assert probe(full).dropped == "no place in the batch was free"
    tight = started(depth, 40, num_pages=20)
    assert "memory" in probe(tight, "x " * 30).dropped
    plain = started(depth, 40, num_pages=20).run()
    assert tight.run().one().token_ids == plain.one().token_ids
    assert tight.core.stats().preemptions == 0


@DEPTHS
def test_who_waits_gets_the_place_of_a_probe(depth):
    engine = make_engine(depth=depth, max_num_seqs=2)
    engine.add(token_of=script(WORDS + CLOSE + EOS), thinking=NO_LIMIT)
    for _ in range(4):
        engine.step()
    engine.core.orders.give(Probe(call=1, request_id="r", token_ids=(), n=50, max_len=4096))
    engine.step()
    engine.add(request_id="other", token_of=script("x y" + CLOSE + EOS), thinking=NO_LIMIT, seed=1)
    engine.runner.by_seed[1] = "other"
    engine.step()
    (answer,) = engine.core.orders.take()
    assert answer.value.dropped == "its place in the batch was needed"
    engine.run()
    assert engine.finals == {"r": 1, "other": 1}


@DEPTHS
def test_probes_end_with_their_response_and_need_a_state(depth):
    engine = started(depth, 50)
    engine.core.orders.give(Probe(call=1, request_id="r", token_ids=(), n=90, max_len=4096))
    engine.run()
    (answer,) = engine.core.orders.take()
    assert answer.value.dropped == "the response has ended" and len(answer.value.token_ids) > 2
    fresh = make_engine(depth=depth)
    fresh.add(token_of=script("a" + EOS))
    with pytest.raises(ConflictError, match="no state"):
        probe(fresh)
    with pytest.raises(ConflictError, match="longer than the model"):
        ask(started(depth, 2), Probe, token_ids=(), n=9, max_len=20)
