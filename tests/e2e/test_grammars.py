"""Answers held to a grammar by the real engine, whose random weights would write anything."""

import asyncio
import json
import re
import sys

import pytest

from tests.small_pebble import small_pebble
from thinkfold import LLM, AsyncEngine, EngineConfig, Grammar, SamplingParams, ThinkingParams
from thinkfold.errors import ParameterError, UnsupportedError
from thinkfold.text.tool_calls import FORMATS, CallBegun, ToolCallParser
from thinkfold.types import Phase, schema_format

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "people": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["city", "people"],
}
QUESTION = {"role": "user", "content": "hi"}
OPEN = [QUESTION, {"role": "assistant", "content": "<think>So"}]
BUDGET = ThinkingParams(thinking_token_budget=12)
DUMMY = {"model": small_pebble(), "load_format": "dummy", "seed": 0, "kv_cache_bytes": 32 << 20, "own_process": False}
OFF = ThinkingParams(enabled=False)


@pytest.fixture(scope="module")
def llm():
    with LLM(**DUMMY) as llm:
        yield llm


def params(grammar, **more):
    return SamplingParams(**{"temperature": 1.0, "seed": 5, "max_tokens": 300, "grammar": grammar, **more})


def check_city(text):
    value = json.loads(text)
    assert list(value) == ["city", "people"] and 1 <= value["people"] <= 99 and len(value["city"]) <= 8


def test_every_choice_matches_a_schema_and_ends(llm):
    (output,) = llm.chat([QUESTION], params(Grammar.json_schema(CITY), n=4), OFF)
    texts = [choice.text for choice in output.outputs]
    assert len(set(texts)) == 4
    for choice in output.outputs:
        check_city(choice.text)
        assert choice.finish_reason == "stop"


def test_a_grammar_sleeps_until_the_budget_has_ended_thinking(llm):
    free = llm.chat(OPEN, params(None, max_tokens=20), BUDGET)[0].outputs[0]
    held = llm.chat(OPEN, params(Grammar.json_schema(CITY)), BUDGET)[0].outputs[0]
    assert held.reasoning == free.reasoning and held.thinking_end_reason == "budget"
    check_city(held.text)


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (Grammar.regex("(yes|no) [0-9]{3}"), r"(yes|no) \d{3}"),
        (Grammar.ebnf('root ::= "a" root | "b"'), "a*b"),
    ],
)
def test_regular_expressions_and_grammars(llm, grammar, pattern):
    choice = llm.chat([QUESTION], params(grammar), OFF)[0].outputs[0]
    assert re.fullmatch(pattern, choice.text) and choice.finish_reason == "stop"


async def test_a_bound_request_is_the_same_alone_and_in_a_busy_batch():
    engine = await AsyncEngine.start(EngineConfig(**DUMMY))
    prompt = engine.prompts.encode_chat(OPEN)

    async def tokens(sampling):
        outputs = [output async for output in engine.generate(prompt, sampling, BUDGET)]
        return [token for output in outputs for token in output.outputs[0].token_ids]

    requests = [params(Grammar.regex("[a-z]{40}!")), *(params(None, seed=seed, max_tokens=40) for seed in range(3))]
    busy = await asyncio.gather(*map(tokens, requests))
    assert busy == [await tokens(each) for each in requests]
    await engine.stop()


@pytest.mark.parametrize("depth", [0, 1])
def test_the_models_own_start_and_end_of_thinking(depth):
    with LLM(**DUMMY, pipeline_depth=depth) as llm:
        grammar = Grammar.regex("[a-z]{9}!")
        start, end = (llm.engine.prompts.encode_text(text)[-1] for text in ("<think>", "</think>"))
        closed = llm.chat(OPEN, params(grammar, logit_bias={end: 100}), BUDGET)[0].outputs[0]
        assert closed.thinking_end_reason == "natural" and closed.num_thinking_tokens == 0
        opened = llm.chat([QUESTION], params(grammar, logit_bias={start: 100}), BUDGET)[0].outputs[0]
        assert opened.thinking_end_reason == "budget" and opened.num_thinking_tokens == 12
        assert all(re.fullmatch("[a-z]{9}!", choice.text) for choice in (closed, opened))


def test_a_bound_request_survives_preemption_and_both_depths():
    texts = []
    with LLM(**DUMMY) as llm:
        size = llm.engine.model.page_bytes
    for pages, depth in ((8, 0), (400, 0), (400, 1)):
        config = {**DUMMY, "pipeline_depth": depth, "admission": "greedy", "max_model_len": 120, "fold_policy": "off"}
        with LLM(**{**config, "kv_cache_bytes": pages * size}) as llm:
            outputs = llm.chat(OPEN, params(Grammar.regex("[a-z]{40}!"), n=4, max_tokens=80), BUDGET)
            texts.append([choice.text for choice in outputs[0].outputs])
            if pages == 8:
                assert outputs[0].costs.preemptions
    assert texts[0] == texts[1] == texts[2]
    assert all(re.fullmatch("[a-z]{40}!", text) for text in texts[0]) and len(set(texts[0])) == 4


def test_a_required_call_is_one_that_can_be_read(llm):
    hermes = FORMATS[0]
    begin, end = hermes.frame("weather")
    tag = {"type": "tag", "begin": begin, "content": schema_format(CITY), "end": end}
    only = {"type": "tags_with_separator", "tags": [tag], "separator": "\n", "at_least_one": True}
    grammar = Grammar.of({**only, "stop_after_first": True})
    choice = llm.chat(OPEN, params(grammar, max_tokens=400), BUDGET)[0].outputs[0]
    parser = ToolCallParser(hermes)
    begun, *arguments = [*parser.push(choice.text), *parser.flush()]
    assert isinstance(begun, CallBegun) and begun.name == "weather" and choice.finish_reason == "stop"
    check_city("".join(piece.text for piece in arguments))


def test_logprobs_stand_beside_what_is_printed(llm):
    newline, end = (llm.engine.prompts.encode_text(text)[-1] for text in ("\n", "</think>"))
    free = (
        newline,
        *llm.engine.prompts.encode_text("So it is"),
        end,
        newline,
        *llm.engine.prompts.encode_text("Yes, it is"),
    )
    opened = [QUESTION, {"role": "assistant", "content": "<think>"}]
    choice = llm.chat(opened, SamplingParams(logprobs=0, forced_tokens=free, max_tokens=len(free)))[0].outputs[0]
    for phase, text in ((Phase.THINKING, choice.reasoning), (Phase.ANSWER, choice.text)):
        shown = [llm.engine.prompts.token_bytes(item.token_id) for item in choice.logprobs if item.phase is phase]
        assert b"".join(shown).decode() == text and text


def test_a_forced_token_that_breaks_the_grammar_fails_that_request(llm):
    wrong = llm.engine.prompts.encode_text("x")[-1]
    (output,) = llm.chat([QUESTION], params(Grammar.json_schema(CITY), forced_tokens=(wrong,)), OFF)
    assert output.error is not None and "does not allow token" in output.error
    check_city(llm.chat([QUESTION], params(Grammar.json_schema(CITY)), OFF)[0].outputs[0].text)


def test_max_tokens_cuts_what_never_ends(llm):
    (output,) = llm.chat([QUESTION], params(Grammar.ebnf('root ::= "a" root'), max_tokens=5), OFF)
    assert output.outputs[0].finish_reason == "length" and set(output.outputs[0].text) == {"a"}


@pytest.mark.parametrize(
    ("grammar", "kind", "words"),
    [
        (Grammar.json_schema({"type": "strin"}, "f"), ParameterError, "f: Unsupported type"),
        (Grammar.json_schema({"type": "array", "uniqueItems": True}, "f"), UnsupportedError, "f.uniqueItems"),
        (Grammar.regex("(a", "f"), ParameterError, "f: Regex parsing error"),
        (Grammar.ebnf("root ::= x", "f"), ParameterError, "f: EBNF parser error"),
        (Grammar("{", "f"), ParameterError, "f: is not valid JSON"),
        (Grammar('{"type": "banana"}', "f"), ParameterError, "f: "),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_name(llm, grammar, kind, words):
    with pytest.raises(kind, match=re.escape(words)):
        llm.chat([QUESTION], params(grammar), OFF)


def test_without_the_package_grammars_are_refused_by_name(llm, monkeypatch):
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(UnsupportedError, match="json_object: needs the package xgrammar"):
        llm.chat([QUESTION], params(Grammar.json_object()), OFF)


@pytest.mark.parametrize("more", [{"min_tokens": 3}, {"ignore_eos": True}])
def test_the_end_is_the_grammars(more):
    with pytest.raises(ParameterError, match=next(iter(more))):
        params(Grammar.json_object(), **more)
