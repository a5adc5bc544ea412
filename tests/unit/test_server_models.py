"""`/v1/models` says what the engine does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import PropertyMock, patch

import pytest
from server_stand_in import ScriptedEngine, serving
from tiny_tokenizer import PLAIN_TEMPLATE

from thinkfold.config import EngineConfig


async def card(engine: ScriptedEngine, **changed: Any) -> dict[str, Any]:
    model = replace(engine.model, **changed)
    with patch.object(ScriptedEngine, "model", PropertyMock(return_value=model)):
        async with serving(engine) as client:
            listed = (await client.get("/v1/models")).json()
            assert (await client.get("/v1/models/tiny")).json() == listed["data"][0]
    assert (listed["first_id"], listed["has_more"], len(listed["data"])) == ("tiny", False, 1)
    return listed["data"][0]


async def test_a_model_that_thinks_shows_its_markers_lengths_and_folding() -> None:
    shown = await card(ScriptedEngine(), kv_capacity=1000)
    assert (shown["max_model_len"], shown["max_input_tokens"], shown["max_tokens"]) == (4096, 1000, 4096)
    ours = shown["thinkfold"]
    assert ours["thinking"]["markers"] == {"start": "<think>", "end": "</think>"}
    assert ours["thinking"]["can_be_off"] is True and ours["budget_enforced"] is True
    assert ours["thinking"]["efforts"]["low"] == 4096 and ours["thinking"]["efforts"]["max"] is None
    assert ours["fold"]["available"] and ours["fold"]["policy"] == "pressure"
    assert "conclusion_attention" in ours["fold"]["selectors"] and "eager" in ours["fold"]["policies"]


@pytest.mark.parametrize("space", [0, 1 << 20])
async def test_swap_is_shown_where_there_is_host_memory(space: int) -> None:
    engine = ScriptedEngine(config=EngineConfig(served_model_name="tiny", swap_space_bytes=space))
    assert (await card(engine))["thinkfold"]["fold"]["swap"] is (space > 0)


async def test_a_budget_that_cannot_be_enforced_leaves_efforts_without_limit() -> None:
    thinking = (await card(ScriptedEngine(template=PLAIN_TEMPLATE), budget_enforced=False))["thinkfold"]["thinking"]
    assert thinking["efforts"] == {"xhigh": None, "max": None} and thinking["can_be_off"] is False
    switched = (await card(ScriptedEngine(), budget_enforced=False))["thinkfold"]["thinking"]
    assert switched["efforts"] == {"none": 0, "xhigh": None, "max": None} and switched["can_be_off"] is True


async def test_a_model_that_does_not_think_has_neither() -> None:
    ours = (await card(ScriptedEngine(), thinks=False, family=None, budget_enforced=False))["thinkfold"]
    assert ours["thinking"] is None and ours["fold"] == {"available": False}
