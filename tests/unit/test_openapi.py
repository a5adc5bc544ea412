"""`/openapi.json` holds every route and who may call it; replies with calls of tools are as it says."""

from __future__ import annotations

from typing import Any

import pytest
from server_shapes import named_events
from server_stand_in import ScriptedEngine, events, serving
from test_server_access import ADMIN, TABLE, bearer, guarded
from test_server_tools import PARIS, WEATHER, engine_of

from thinkfold.server.access.gate import Access
from thinkfold.server.app import build_app

HELLO = [{"role": "user", "content": "q"}]
FUNCTION = {"name": "weather", "parameters": WEATHER}
ASK: dict[str, tuple[dict[str, Any], str]] = {  # a body, and the schema of its reply
    "/v1/chat/completions": (
        {"messages": HELLO, "tools": [{"type": "function", "function": FUNCTION}], "n": 2, "logprobs": True},
        "ChatCompletion",
    ),
    "/v1/responses": ({"input": "q", "tools": [{"type": "function", **FUNCTION}]}, "ResponseBody"),
    "/v1/messages": (
        {
            "messages": HELLO,
            "max_tokens": 90,
            "thinking": {"type": "adaptive"},
            "tools": [{"name": "weather", "input_schema": WEATHER}],
        },
        "Message",
    ),
}


def routes_of(app: Any) -> set[tuple[str, str]]:
    """Method and path of every route that the app has registered."""
    found: set[tuple[str, str]] = set()
    unseen = list(app.routes)
    while unseen:
        route = unseen.pop()
        unseen += route.original_router.routes if hasattr(route, "original_router") else []
        found |= {(method, route.path) for method in getattr(route, "methods", None) or ()}
    return found


async def test_every_route_is_in_the_document() -> None:
    async with serving(ScriptedEngine()) as client:
        document = (await client.get("/openapi.json")).json()
    told = {(method.upper(), path) for path, item in document["paths"].items() for method in item}
    assert told == {(method, path.replace(":path", "")) for method, path in routes_of(build_app(ScriptedEngine()))}
    operations = [operation for item in document["paths"].values() for operation in item.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations)
    assert all(operation["summary"] for operation in operations)


async def test_the_document_says_who_may_call_and_needs_a_key_itself() -> None:
    async with guarded(Access(TABLE)) as client:
        assert (await client.get("/openapi.json")).status_code == 401
        document = (await client.get("/openapi.json", headers=bearer(ADMIN))).json()
        refused = await client.delete("/admin/tenants/t", headers=bearer(ADMIN))
    assert document["security"] == [{"bearer": []}, {"key": []}]
    paths = document["paths"]
    assert paths["/health"]["get"]["security"] == paths["/"]["get"]["security"] == []
    assert "401" not in paths["/health"]["get"]["responses"]
    models, keys = paths["/v1/models"]["get"], paths["/admin/keys"]["get"]
    assert "security" not in models and {"401", "503"} <= models["responses"].keys()
    assert str(refused.status_code) in paths["/admin/tenants/{tenant}"]["delete"]["responses"]
    assert {"401", "403"} <= keys["responses"].keys() and "403" not in models["responses"]


@pytest.mark.parametrize("path", ASK)
async def test_replies_with_calls_are_as_documented(path: str) -> None:
    jsonschema_rs = pytest.importorskip("jsonschema_rs", reason="schemathesis is not installed (group dev)")
    body, whole = ASK[path]
    engine = engine_of(["<think>", "w", "</think>", "A", *PARIS])
    async with serving(engine) as client:
        document = (await client.get("/openapi.json")).json()
        reply = await client.post(path, json=body)
        stream = await client.post(path, json={**body, "stream": True, "thinkfold": {"events": True}})
    for schema in document["components"]["schemas"].values():
        schema["additionalProperties"] = schema.get("additionalProperties", False) if "properties" in schema else True
    told = document["paths"][path]["post"]["responses"]["200"]["content"]
    data = told["text/event-stream"]["itemSchema"]["properties"]["data"]
    item = data.get("anyOf", [data])[0]["contentSchema"]

    def check(schema: dict[str, Any], value: Any) -> None:
        jsonschema_rs.validator_for({**schema, "components": document["components"]}).validate(value)

    check({"$ref": f"#/components/schemas/{whole}"}, reply.json())
    assert "weather" in reply.text and "weather" in stream.text
    for event in events(stream) if "chat" in path else named_events(stream):
        check(item, event)
    with pytest.raises(jsonschema_rs.ValidationError):
        check({"$ref": f"#/components/schemas/{whole}"}, {**reply.json(), "new": 1})
