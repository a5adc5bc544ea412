"""Tool calls in an answer's text: found however the text is cut, and given back where they are none."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinkfold.text.tool_calls import FORMATS, CallArguments, CallBegun, Content, ToolCallParser, find_format

HERMES = FORMATS[0]


def call(name, arguments):
    before, after = HERMES.frame(name)
    return before + json.dumps(arguments) + after


def read(*pieces):
    """(content, [(name, arguments text)]) of an answer in pieces."""
    parser = ToolCallParser(HERMES)
    events = [event for piece in pieces for event in parser.push(piece)] + parser.flush()
    content, calls = "", []
    for event in events:
        if isinstance(event, Content):
            content += event.text
        elif isinstance(event, CallBegun):
            assert event.index == len(calls)
            calls.append([event.name, ""])
        else:
            assert isinstance(event, CallArguments) and event.index == len(calls) - 1 and event.text
            calls[-1][1] += event.text
    assert parser.calls == len(calls)
    return content, [tuple(each) for each in calls]


ARGUMENTS = {"city": 'a "b" {}[] \\ </tool_call> <think>', "deep": {"x": [1, {"y": "}"}]}}
CASES = {
    call("f", {}): ("", [("f", "{}")]),
    "Hello.\n\n" + call("f", ARGUMENTS): ("Hello.", [("f", json.dumps(ARGUMENTS))]),
    call("f", {"a": 1}) + "\n" + call("g", {}) + "\n": ("", [("f", '{"a": 1}'), ("g", "{}")]),
    call("f", {}) + "\nDone.": ("Done.", [("f", "{}")]),
    '<tool_call>{"name":"f","parameters":{"a":1}}</tool_call>': ("", [("f", '{"a":1}')]),
    '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>': ("", [("f", '{"a": 1}')]),
    '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>': ("", [("f", '{"a": 1}')]),
    '<tool_call>{"name": "f"}</tool_call>': ("", [("f", "{}")]),
    '<tool_call>{"name": "f"}': ("", [("f", "{}")]),
    '<tool_call>{"name": "f", "arguments": {"a": 1': ("", [("f", '{"a": 1')]),
    "<tool_call>not json</tool_call> x": ("<tool_call>not json</tool_call> x", []),
    "<tool_call>[1]</tool_call>": ("<tool_call>[1]</tool_call>", []),
    "a <tool_ca": ("a <tool_ca", []),
    "1 < 2 and <tool> x\n": ("1 < 2 and <tool> x", []),
    "": ("", []),
}


@pytest.mark.parametrize("text", CASES)
def test_whole_and_character_by_character(text):
    assert read(text) == CASES[text]
    assert read(*text) == CASES[text]


@pytest.mark.parametrize("text", list(CASES)[:6])
def test_every_split_in_two(text):
    assert {read(text[:i], text[i:]) == CASES[text] for i in range(len(text) + 1)} == {True}


def test_arguments_flow_before_the_call_ends():
    parser = ToolCallParser(HERMES)
    assert parser.push('<tool_call>\n{"name": "f", "arguments": {"a') == [CallBegun(0, "f"), CallArguments(0, '{"a')]
    assert parser.push('": 1}') == [CallArguments(0, '": 1}')]
    assert parser.push("}\n</tool_call>") == []


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.sampled_from([*'<>/{}[]"\\\n ax:,', "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {']),
        max_size=30,
    )
)
def test_no_text_breaks_it_and_cuts_do_not_matter(pieces):
    assert read(*pieces) == read("".join(pieces))


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("<tool_call>{{ arguments }}", "hermes"),
        ("<tool_call><function=x>{{ arguments }}", None),
        ("<tool_call><arg_key>{{ arguments }}", None),
        ("nothing", None),
    ],
)
def test_formats_by_template(template, found):
    format_ = find_format(template)
    assert (format_.name if format_ else None) == found
