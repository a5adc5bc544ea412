"""Handles, what goes on from them, and going back: with real control and a scripted device."""

import pytest
from scripted import CLOSE, EOS, ids, language, make_engine, script
from test_core_orders import DEPTHS, NO_LIMIT, WORDS, ask, started

from thinkfold.engine.commands import Drop, Extend, Fork, Hash, Inject, Pause, Probe, Resume, Rollback
from thinkfold.errors import NotFoundError, ParameterError
from thinkfold.types import FinishReason, Until


def extend(engine, handle, name, until=None, **more):
    """Go on from a handle to the end; the request's merged output."""
    ask(engine, Extend, name, handle=handle.id, namespace=(), until=until, **more)
    for _ in range(300):
        if engine.finals.get(name):
            return engine.outputs[name]
        engine.step()
    raise AssertionError("it never ended")


def held(engine):
    return engine.core.stats().kv_pages.held


@DEPTHS
def test_a_fork_goes_on_as_the_branch_does_and_changes_nothing_in_it(depth):
    plain = started(depth, 9).run().one()
    engine = started(depth, 9)
    handle = ask(engine, Fork)
    assert handle.position == engine.one().num_output_tokens and handle.holds_folding_before is None
    engine.run()
    assert engine.one().token_ids == plain.token_ids
    assert held(engine) > 0, "the handle holds its state"
    output = extend(engine, handle, "child")
    (child,) = output.outputs
    assert child.token_ids == plain.token_ids[handle.position :]
    assert (child.finish_reason, child.num_output_tokens) == (FinishReason.STOP, plain.num_output_tokens)
    assert child.reasoning + child.text == (plain.reasoning + plain.text)[-len(child.reasoning + child.text) :]
    assert output.costs.thinking_tokens + output.costs.answer_tokens == len(child.token_ids), "its own tokens only"
    assert output.costs.computed_prompt_tokens == 0
    ask(engine, Drop, handle.id, namespace=())
    assert held(engine) == 0 and engine.core.stats().handles == 0
    with pytest.raises(NotFoundError):
        ask(engine, Extend, "late", handle=handle.id, namespace=())


@DEPTHS
@pytest.mark.parametrize("at", [0, 1, 7])
def test_a_fork_at_an_earlier_position(depth, at):
    plain = started(depth, 9).run().one()
    engine = started(depth, 12)
    handle = ask(engine, Fork, at=at)
    assert handle.position == at
    child = extend(engine, handle, "child").outputs[0]
    assert child.token_ids == plain.token_ids[at:]
    engine.run()
    assert engine.one().token_ids == plain.token_ids
    for wrong in (-1, 10_000):
        with pytest.raises(NotFoundError if not engine.core.has_requests else ParameterError):
            ask(engine, Fork, at=wrong)


@DEPTHS
def test_many_go_on_from_one_handle_and_share_its_pages(depth):
    engine = started(depth, 20)
    handle = ask(engine, Fork)
    engine.run()
    before = held(engine)
    ask(engine, Extend, "many", handle=handle.id, namespace=(), n=4)
    engine.step()
    engine.step()
    assert held(engine) <= before + 8, "only last pages are copied"
    engine.run()
    outs = engine.outputs["many"].outputs
    assert [o.index for o in outs] == [0, 1, 2, 3] and len({tuple(o.token_ids) for o in outs}) == 1


@DEPTHS
@pytest.mark.parametrize(
    ("until", "text"),
    [
        (Until(max_tokens=3), None),
        (Until("sentence"), "One two three."),
        (Until("paragraph"), "One two three. Four five.\n\n"),
        (Until("sentence", min_tokens=8), "One two three. Four five."),
    ],
)
def test_a_part_ends_at_its_boundary_and_the_next_one_goes_on(depth, until, text):
    whole = "One two three. Four five.\n\nWait, six.\n\n" + CLOSE + "A" + EOS
    plain = make_engine(depth=depth)
    plain.add(token_of=script(whole), thinking=NO_LIMIT)
    plain.run()
    engine = make_engine(depth=depth)
    engine.add(token_of=script(whole), thinking=NO_LIMIT)
    root = ask(engine, Fork, at=0)
    engine.run()
    tokens, reasoning, answer, handle = [], "", "", root
    for part in range(60):
        (out,) = extend(engine, handle, f"part{part}", until).outputs
        tokens, reasoning, answer = tokens + out.token_ids, reasoning + out.reasoning, answer + out.text
        if part == 0 and text is not None:
            assert language()[0].decode(out.token_ids).rstrip() == text.rstrip()
        elif part == 0:
            assert len(out.token_ids) == 3
        if out.finish_reason is not FinishReason.BOUNDARY:
            break
        handle = out.handle
        assert handle.position == len(tokens)
    assert tokens == plain.one().token_ids
    assert (reasoning, answer) == (plain.one().reasoning, plain.one().text), "held text comes with the next part"
    assert engine.core.stats().handles == part + 1


@pytest.mark.parametrize(("num_pages", "part"), [(10, 7), (14, 15), (20, 27)])
def test_a_part_that_is_swapped_out_with_its_last_token_in_flight_still_has_its_handle(num_pages, part):
    engine = make_engine(depth=1, num_pages=num_pages, host_pages=64, caching=False)
    for seed, text in ((1, "x " * 60), (0, WORDS)):
        name = str(seed)
        engine.runner.by_seed[seed] = name
        until = Until(max_tokens=part) if seed == 0 else None
        engine.add(request_id=name, seed=seed, until=until, token_of=script(text + CLOSE + EOS), thinking=NO_LIMIT)
    engine.run()
    first = engine.one("0")
    assert engine.core.stats().pressure["swap"] and first.finish_reason is FinishReason.BOUNDARY
    second = extend(engine, first.handle, "second", Until(max_tokens=3)).outputs[0]
    assert first.token_ids + second.token_ids == ids(WORDS)[: part + 3]
    assert engine.core.scheduler.kv.host_usage() == 0


@DEPTHS
def test_boundaries_are_told(depth):
    engine = make_engine(depth=depth)
    text = "One two. Three 3.5 four\n\nWait, five! But wait, six. Waiting.\n\n"
    engine.add(token_of=script(text + CLOSE + "A" + EOS), thinking=NO_LIMIT)
    engine.run()
    out = engine.one()
    found = {kind: [] for kind in ("sentence", "paragraph", "transition", "segment")}
    for boundary in out.boundaries:
        found[boundary.kind].append(boundary.index)

    def before(index):
        return language()[0].decode(out.token_ids[:index])

    assert [before(i).rstrip()[-4:] for i in found["sentence"]] == ["two.", "ive!", "six.", "ing."]
    assert [before(i).rstrip()[-4:] for i in found["paragraph"]] == ["four", "ing."]
    assert [text[len(before(i)) :].strip()[:8] for i in found["transition"]] == ["Wait, fi", "But wait"]
    assert found["segment"] == [segment.end for segment in out.segments]


@DEPTHS
@pytest.mark.parametrize("at", [0, 3, 11])
def test_rollback_starts_again_and_draws_the_same(depth, at):
    plain = started(depth, 12).run().one()
    engine = started(depth, 12)
    told = engine.one().num_output_tokens
    assert ask(engine, Rollback, at=at) == at
    engine.run()
    out = engine.one()
    assert out.restart is not None
    assert (out.token_ids, out.reasoning, out.text) == (plain.token_ids, plain.reasoning, plain.text)
    assert len(out.stats) == len(plain.stats)
    assert engine.outputs["r"].costs.discarded_tokens >= told - at
    assert held(engine) == 0


@DEPTHS
def test_rollback_keeps_what_was_forced(depth):
    engine = started(depth, 6)
    at = ask(engine, Inject, token_ids=tuple(ids(" Hm, really?")))
    for _ in range(4):
        engine.step()
    ask(engine, Pause)
    ask(engine, Rollback, at=at)
    engine.step()
    out = engine.one()
    assert out.num_output_tokens == at and out.reasoning.endswith(" Hm, really?")
    assert out.num_injected_tokens == len(ids(" Hm, really?"))
    ask(engine, Resume)
    assert engine.run().one().finish_reason is FinishReason.STOP


@DEPTHS
def test_a_state_has_one_name(depth):
    one, two = started(depth, 9), started(depth, 9)
    handle = ask(one, Fork, at=5)
    assert ask(one, Fork, at=5).state_hash == handle.state_hash != ask(one, Fork, at=6).state_hash
    assert ask(two, Fork, at=5).state_hash == handle.state_hash
    assert ask(one, Hash) == ask(one, Fork).state_hash
    other = started(depth, 9, temperature=0.5)
    assert ask(other, Fork, at=5).state_hash != handle.state_hash


def test_handles_end_by_number_and_by_time():
    engine = started(0, 9)
    handles = [ask(engine, Fork, at=at) for at in (1, 2, 3)]
    engine.core.handles._most = 2
    ask(engine, Fork, at=4)
    with pytest.raises(NotFoundError):
        ask(engine, Drop, handles[0].id, namespace=())
    with pytest.raises(NotFoundError):
        ask(engine, Drop, handles[2].id, namespace=("salt=other",))
    engine.core.handles._ttl_s = -1.0
    ask(engine, Fork, at=5)
    engine.core.handles.expire()
    assert engine.core.stats().handles == 1
    engine.run()
    assert engine.finals == {"r": 1}


@DEPTHS
@pytest.mark.parametrize("host_pages", [0, 64])
def test_a_handle_gives_way_and_comes_back(depth, host_pages):
    plain = started(depth, 5).run().one().token_ids
    engine = started(depth, 30, num_pages=20, host_pages=host_pages)
    handle = ask(engine, Fork)
    engine.run()
    engine.add(request_id="other", token_of=script("x " * 60 + CLOSE + EOS), thinking=NO_LIMIT, seed=1)
    engine.runner.by_seed[1] = "other"
    engine.run()
    stats = engine.core.stats()
    assert stats.pressure["swap_parked" if host_pages else "forget_parked"] == 1
    assert stats.swaps == bool(host_pages), "what was parked counts, too"
    assert extend(engine, handle, "child").outputs[0].token_ids == plain[handle.position :]


@DEPTHS
def test_probes_of_a_branch_that_goes_back_are_dropped(depth):
    engine = started(depth, 9)
    engine.core.orders.give(Probe(call=1, request_id="r", token_ids=(), n=40, max_len=4096))
    engine.step()
    engine.core.orders.give(Rollback(call=2, request_id="r", at=2))
    answers = {answer.call: answer for answer in engine.core.orders.take()}
    assert answers[1].value.dropped and answers[2].value == 2
