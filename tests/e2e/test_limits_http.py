"""Deadlines and costs end thinking in every API and in Python; the reply says what held."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from conftest import Served

QUESTION = [{"role": "user", "content": "What is 7 + 5?"}]
APIS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 60}),
    ("/v1/completions", {"prompt": "<|im_start|>assistant\n<think>\n", "max_tokens": 60}),
    ("/v1/responses", {"input": QUESTION, "max_output_tokens": 60}),
    (
        "/v1/messages",
        {"messages": QUESTION, "max_tokens": 60, "thinking": {"type": "enabled", "budget_tokens": 50}},
    ),
]


@pytest.mark.parametrize(("name", "value", "reason"), [("deadline_ms", 1, "deadline"), ("max_cost", 1e-9, "cost")])
@pytest.mark.parametrize(("path", "body"), APIS, ids=[path for path, _ in APIS])
def test_a_limit_that_is_reached_ends_thinking(
    path: str, body: dict[str, Any], name: str, value: float, reason: str, pebble: Served
) -> None:
    """The least limit there is has passed before the first token, so no clock decides the test."""
    reply = httpx.post(f"{pebble.url}{path}", json={**body, "thinkfold": {name: value}}, timeout=60)
    assert reply.status_code == 200, reply.text
    told = reply.json()
    ending = told["choices"][0] if "choices" in told else told
    assert ending["thinking_end_reason"] == reason
    assert told["thinkfold"]["policy"][name] == value
    assert told["usage"]["thinkfold"]["tokens"]["thinking"] <= 1
    assert told["usage"]["thinkfold"]["tokens"]["answer"] > 0


@pytest.mark.parametrize(("path", "body"), APIS, ids=[path for path, _ in APIS])
def test_wrong_limits_name_their_field(path: str, body: dict[str, Any], pebble: Served) -> None:
    for name in ("deadline_ms", "max_cost"):
        reply = httpx.post(f"{pebble.url}{path}", json={**body, "thinkfold": {name: -1}}, timeout=60)
        assert reply.status_code == 400 and f"thinkfold.{name}" in reply.text, reply.text
