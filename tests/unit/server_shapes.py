"""One conversation in the words of three APIs, and one way to read their replies."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import httpx
from server_stand_in import events, join


@dataclass(frozen=True, slots=True)
class Told:
    """What a reply says, whatever its shape."""

    reasoning: str
    content: str
    ending: str  # in the API's own word
    thinking_end_reason: str | None
    tokens: tuple[int, int, int]  # prompt, output, thinking


class Shape(Protocol):
    path: str
    ENDINGS: ClassVar[dict[str, str]]  # finish_reason -> the API's word

    def body(self, messages: Any, **more: Any) -> dict[str, Any]:
        """A request that thinks if the model does."""
        ...

    def read(self, response: httpx.Response) -> Told: ...


class Chat:
    path = "/v1/chat/completions"
    ENDINGS: ClassVar[dict[str, str]] = {"stop": "stop", "length": "length"}

    def body(self, messages: Any, **more: Any) -> dict[str, Any]:
        options = {"stream_options": {"include_usage": True}} if more.get("stream") else {}
        return {"model": "tiny", "messages": messages, **options, **more}

    def read(self, response: httpx.Response) -> Told:
        if response.headers["content-type"].startswith("application/json"):
            body = response.json()
            choice, usage = body["choices"][0], body["usage"]
            reasoning, content = choice["message"]["reasoning"] or "", choice["message"]["content"]
            ending = choice["finish_reason"]
            why = choice["thinking_end_reason"]
        else:
            chunks = events(response)
            joined, usage = join(chunks)[0], chunks[-1]["usage"]
            (ending,) = joined.finish_reasons
            reasoning, content, why = joined.reasoning, joined.content, joined.thinking_end_reason
        thinking = usage["completion_tokens_details"]["reasoning_tokens"]
        return Told(reasoning, content, ending, why, (usage["prompt_tokens"], usage["completion_tokens"], thinking))


class Responses:
    path = "/v1/responses"
    ENDINGS: ClassVar[dict[str, str]] = {"stop": "completed", "length": "incomplete"}

    def body(self, messages: Any, **more: Any) -> dict[str, Any]:
        if "max_tokens" in more:
            more["max_output_tokens"] = more.pop("max_tokens")
        return {"model": "tiny", "input": messages, **more}

    def read(self, response: httpx.Response) -> Told:
        whole = response.headers["content-type"].startswith("application/json")
        body = response.json() if whole else fold_response(named_events(response))
        usage = body["usage"]
        thinking = usage["output_tokens_details"]["reasoning_tokens"]
        return Told(
            "".join(i["content"][0]["text"] for i in body["output"] if i["type"] == "reasoning"),
            "".join(i["content"][0]["text"] for i in body["output"] if i["type"] == "message"),
            body["status"],
            body["thinking_end_reason"],
            (usage["input_tokens"], usage["output_tokens"], thinking),
        )


class Messages:
    path = "/v1/messages"
    ENDINGS: ClassVar[dict[str, str]] = {"stop": "end_turn", "length": "max_tokens"}

    def body(self, messages: Any, **more: Any) -> dict[str, Any]:
        system = {}
        if isinstance(messages, list) and messages and messages[0].get("role") == "system":
            system, messages = {"system": messages[0]["content"]}, messages[1:]
        return {
            "model": "tiny",
            "max_tokens": 100,
            "messages": messages,
            "thinking": {"type": "adaptive"},
            **system,
            **more,
        }

    def read(self, response: httpx.Response) -> Told:
        whole = response.headers["content-type"].startswith("application/json")
        body = response.json() if whole else fold_message(named_events(response))
        usage = body["usage"]
        return Told(
            "".join(b["thinking"] for b in body["content"] if b["type"] == "thinking"),
            "".join(b["text"] for b in body["content"] if b["type"] == "text"),
            body["stop_reason"],
            body["thinking_end_reason"],
            (
                usage["input_tokens"] + usage["cache_read_input_tokens"],
                usage["output_tokens"],
                usage["output_tokens_details"]["thinking_tokens"],
            ),
        )


SHAPES: tuple[Shape, ...] = (Chat(), Responses(), Messages())


def named_events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream; each is named as its data's type says."""
    events = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n", 1)
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def fold_message(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream tells, after checking the order of its events."""
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"
    assert [e["type"] for e in events].count("message_delta") == 1 and events[-2]["type"] == "message_delta"
    message = events[0]["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    open_index = None
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert open_index is None and event["index"] == len(message["content"])
            open_index = event["index"]
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta" and event["delta"]["type"] == "input_json_delta":
            assert message["content"][open_index]["type"] == "tool_use"
        elif event["type"] == "content_block_delta":
            assert event["index"] == open_index
            kind = event["delta"].pop("type")
            (key, text), block = event["delta"].popitem(), message["content"][open_index]
            assert kind == f"{key}_delta" and key in block
            assert not block.get("signature"), "nothing follows a signature"
            block[key] += text
        elif event["type"] == "content_block_stop":
            assert event["index"] == open_index
            open_index = None
        else:
            assert event["type"] == "ping"
    assert open_index is None
    last = events[-2]
    return {
        **message,
        **last["delta"],
        "usage": last["usage"],
        "thinkfold": last["thinkfold"],
        "thinking_end_reason": last["thinking_end_reason"],
    }


def fold_response(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The response of the last event, after checking that the others tell the same, in order and numbered."""
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    assert [e["type"] for e in events[:2]] == ["response.created", "response.in_progress"]
    final = events[-1]["response"]
    name = "completed" if final["status"] == "completed" else "incomplete"
    assert events[-1]["type"] == f"response.{name}" and {e["response"]["id"] for e in events[:2]} == {final["id"]}
    rest = [e for e in events[2:-1] if e["type"].startswith("response.")]
    for index, item in enumerate(final["output"]):
        mine = [e for e in rest if e["output_index"] == index]
        assert rest[: len(mine)] == mine, "items do not overlap"
        rest = rest[len(mine) :]
        kinds = [e["type"].removeprefix("response.") for e in mine]
        if item["type"] == "function_call":
            word, text, begun, skip = "function_call_arguments", item["arguments"], {"arguments": ""}, 1
            assert mine[-2]["name"] == item["name"] and mine[-2]["arguments"] == text
        else:
            part = item["content"][0]
            word, text, begun, skip = part["type"], part["text"], {"content": []}, 2
            assert kinds[1] == "content_part.added" and kinds[-2] == "content_part.done"
            assert mine[-3]["text"] == text and mine[-2]["part"] == part
        assert kinds[0] == "output_item.added" and kinds[-1] == "output_item.done" and mine[-1]["item"] == item
        assert kinds[-1 - skip] == f"{word}.done"
        assert set(kinds[skip : -1 - skip]) <= {f"{word}.delta"}
        assert "".join(e["delta"] for e in mine[skip : -1 - skip]) == text
        assert mine[0]["item"] == {**item, **begun, "status": "in_progress", **sealed_away(item)}
        assert {e.get("item_id", item["id"]) for e in mine} == {item["id"]}
    assert rest == []
    return final


def sealed_away(item: dict[str, Any]) -> dict[str, Any]:
    return {"encrypted_content": None} if item["type"] == "reasoning" else {}
