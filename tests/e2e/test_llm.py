"""The synchronous shell: order, text and token prompts, one conversation or many."""

import gc
import weakref

import pytest

from tests.small_pebble import small_pebble
from thinkfold import LLM, FoldParams, SamplingParams, ThinkingParams
from thinkfold.errors import EngineDeadError, NotFoundError, ParameterError
from thinkfold.runner import loader
from thinkfold.types import Service, SessionParams, ThinkingEndReason

THINKING = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<think>So"}]
SHORT = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    with LLM(small_pebble(), load_format="dummy", kv_cache_bytes=32 << 20, fold_profile="pebble") as llm:
        yield llm


def test_prompts_may_be_text_or_ids_one_or_many(llm):
    one = llm.generate("Hello", SHORT)
    many = llm.generate(["Hello", "x"], SHORT)
    ids = llm.engine.prompts.encode_text("Hello")
    assert one[0].outputs[0].token_ids == many[0].outputs[0].token_ids
    assert llm.generate(ids, SHORT)[0].outputs[0].token_ids == one[0].outputs[0].token_ids
    assert len(many) == 2


def test_chat_takes_one_conversation_or_many(llm):
    message = {"role": "user", "content": "hi"}
    one = llm.chat([message], SHORT)
    two = llm.chat([[message], [message]], SHORT)
    assert [o.outputs[0].token_ids for o in two] == [one[0].outputs[0].token_ids] * 2


def test_the_effort_reaches_a_template_that_takes_it(llm, monkeypatch):
    asked = []
    encode = llm.engine.prompts.encode_chat
    monkeypatch.setattr(
        llm.engine.prompts, "encode_chat", lambda chat, **more: asked.append(more) or encode(chat, **more)
    )
    llm.chat([{"role": "user", "content": "hi"}], SHORT, ThinkingParams(reasoning_effort="low"))
    assert asked[0]["reasoning_effort"] == "low"


def test_thinking_off_reaches_the_template(llm):
    off = llm.chat([{"role": "user", "content": "hi"}], SHORT, ThinkingParams(enabled=False))
    none = llm.chat([{"role": "user", "content": "hi"}], SHORT, ThinkingParams(reasoning_effort="none"))
    assert off[0].costs.prompt_tokens == none[0].costs.prompt_tokens
    assert off[0].costs.prompt_tokens > llm.chat([{"role": "user", "content": "hi"}], SHORT)[0].costs.prompt_tokens
    assert not off[0].policy.enabled


def test_calls_of_a_session_share_its_budget(llm):
    sampling, session = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True), SessionParams("job", 20)
    outputs = llm.chat([THINKING, THINKING], sampling, session=session)
    assert [output.outputs[0].num_thinking_tokens for output in outputs] == [19, 19], "20 in all, one in the prompt"
    assert all(output.outputs[0].thinking_end_reason is ThinkingEndReason.BUDGET for output in outputs)
    assert outputs[0].limits.clamped[0].by == "session"
    state = llm.session("job")
    assert (state.total_budget, state.spent, state.remaining, state.calls) == (20, 38, 0, 1)
    with pytest.raises(ParameterError, match=r"^session\.total_budget: session 'job' has 20"):
        llm.chat(THINKING, sampling, session=SessionParams("job", 30))
    with pytest.raises(NotFoundError):
        llm.session("other")


def test_time_and_money_end_thinking(llm):
    for service, reason in (
        (Service(deadline_ms=1), ThinkingEndReason.DEADLINE),
        (Service(max_cost=1e-9), ThinkingEndReason.COST),
    ):
        output = llm.chat(THINKING, SHORT, service=service)[0]
        assert output.outputs[0].thinking_end_reason is reason
        assert (output.limits.deadline_ms, output.limits.max_cost) == (service.deadline_ms, service.max_cost)


def test_bad_input_is_refused_and_the_next_call_works(llm):
    with pytest.raises(ParameterError, match="messages"):
        llm.chat([{"role": "nobody", "content": "hi"}], SHORT)
    with pytest.raises(ParameterError, match="prompt"):
        llm.generate([[]], SHORT)
    assert llm.generate("Hello", SHORT)[0].finished


def test_the_requests_profile_cuts_its_thinking(llm):
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<think>So"}]
    letter = llm.engine.prompts.encode_text("a")[-1]

    def cuts(fold, tokens=560):
        forced = SamplingParams(max_tokens=tokens, forced_tokens=(letter,) * tokens, ignore_eos=True)
        output = llm.chat(chat, forced, ThinkingParams(thinking_token_budget=-1), fold)[0]
        return output.fold.profile, [(s.start, s.end) for s in output.outputs[0].segments]

    assert cuts(FoldParams(profile="fine")) == ("fine", [(0, 512)])  # the last one is still open
    assert cuts(FoldParams(profile="default", policy="off")) == ("default", [])
    assert cuts(None, tokens=8)[0] == "pebble"


def test_what_folding_cannot_do_is_refused(llm):
    with pytest.raises(ParameterError, match=r"fold\.entries: must be less than the 128 tokens"):
        llm.chat([{"role": "user", "content": "hi"}], SHORT, fold=FoldParams(entries=128))


def test_more_choices_than_the_queue_holds_are_sent_bit_by_bit_and_closing_twice_is_allowed():
    with LLM(small_pebble(), load_format="dummy", kv_cache_bytes=32 << 20, max_num_seqs=2, max_waiting=4) as small:
        outputs = small.generate(["a"] * 6, SamplingParams(n=3, max_tokens=2, ignore_eos=True))
        assert [len(o.outputs) for o in outputs] == [3] * 6
        with pytest.raises(ParameterError):
            small.generate([[5], [10**9]], SamplingParams(max_tokens=10_000, ignore_eos=True))
        assert small.generate("a", SHORT)[0].finished  # the other one of the failed call was ended
    small.close()
    with pytest.raises(EngineDeadError, match="closed"):
        small.generate("a", SHORT)


def test_a_closed_engine_keeps_no_weights(monkeypatch):
    made, load = [], loader.load

    def watched(config):
        loaded = load(config)
        made.append(weakref.ref(loaded.model))
        return loaded

    monkeypatch.setattr(loader, "load", watched)
    with LLM(small_pebble(), load_format="dummy", kv_cache_bytes=32 << 20) as small:
        small.generate("a", SHORT)
    del small
    gc.collect()
    assert [model() for model in made] == [None]


def test_settings_have_other_names_and_unknown_ones_are_refused():
    with pytest.raises(ParameterError, match="page_size: must be one of"):
        LLM("pebble", block_size=7)
    with pytest.raises(TypeError, match="page_sizes"):
        LLM("pebble", page_sizes=16)
