"""A request that has ended is one line of JSON where that is asked for; its texts are in it only if they are, too."""

from __future__ import annotations

import importlib
import json
import logging
import re
from pathlib import Path
from typing import Any, Literal

import pytest
from server_stand_in import EOS, ScriptedEngine, chat, serving

from thinkfold.cli.serve import TOLD
from thinkfold.server.reply import Reply
from thinkfold.server.request_log import EVENT, log_request
from thinkfold.server.serving import Serving
from thinkfold.server.state import ServerOptions
from thinkfold.types import CompletionOutput, Costs, RequestOutput, Service, ThinkingPolicy, Tier

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
SECRET = "Rosebud"
SCRIPT = ("<think>", SECRET, "</think>", "A", EOS)
ASKED = [{"role": "user", "content": f"{SECRET}?"}]


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    found = [json.loads(r.getMessage()) for r in caplog.records if r.name == "thinkfold.server.request_log"]
    return [line for line in found if line["event"] == EVENT]


async def told(
    caplog: pytest.LogCaptureFixture, level: Literal["none", "costs", "text"], *, fail: bool = False, **body: Any
) -> list[dict[str, Any]]:
    engine = ScriptedEngine(scripts=[SCRIPT])
    engine.fail_after = 2 if fail else None
    with caplog.at_level(logging.INFO, "thinkfold"):
        async with serving(engine, ServerOptions(log_requests=level)) as client:
            await chat(client, messages=ASKED, **body)
    return lines(caplog)


@pytest.mark.parametrize("stream", [False, True])
async def test_costs_without_texts(caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    (line,) = await told(caplog, "costs", stream=stream, n=2)
    assert line["request"].startswith("chatcmpl-") and line["state"] == "complete"
    assert [each["finish_reason"] for each in line["choices"]] == ["stop"] * 2
    assert {each["thinking_end_reason"] for each in line["choices"]} == {"natural"}
    assert line["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    assert line["usage"]["thinkfold"]["kv"]["byte_seconds"] == 0.0
    assert SECRET not in caplog.text


async def test_the_page_shows_its_fields(caplog: pytest.LogCaptureFixture) -> None:
    shown = re.findall(r"^(\{.*thinkfold\.request.*)$", PAGE.read_text(), re.MULTILINE)
    (line,) = await told(caplog, "costs")
    (page,) = (json.loads(each.replace("{…}", "{}")) for each in shown)
    assert page.keys() == line.keys() and page["choices"][0].keys() == line["choices"][0].keys()


@pytest.mark.parametrize("stream", [False, True])
async def test_texts_where_they_are_asked_for(caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    (line,) = await told(caplog, "text", stream=stream)
    assert f"{SECRET}?" in line["prompts"][0]
    assert line["texts"] == [{"reasoning": SECRET, "text": "A"}]


async def test_nothing_by_default_and_nothing_for_what_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    assert await told(caplog, "none") == []
    assert await told(caplog, "text", temperature="hot") == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_is_told(caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    (line,) = await told(caplog, "costs", stream=stream, fail=True)
    assert line["state"] == "failed" and line["choices"][0]["finish_reason"] == "error"


def test_who_went_before_the_end_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    reply = Reply(1, 1, keep_text=False, serving=Serving("ann", Service(Tier("deep"))))
    output = RequestOutput("r", [CompletionOutput(0)], ThinkingPolicy(True, None, "default"), Costs(thinking_tokens=7))
    assert not reply.begun and list(reply.add(0, output)) and reply.begun
    with caplog.at_level(logging.INFO, "thinkfold"):
        log_request("r", reply, None)
    (line,) = lines(caplog)
    assert (line["state"], line["tenant"], line["tier"]) == ("gone", "ann", "deep")
    assert line["usage"]["thinkfold"]["tokens"]["thinking"] == 7


def test_serve_shows_all_lines_that_its_page_promises() -> None:
    assert set(TOLD) >= {f"thinkfold.{name}" for name in ("server.folds", "server.drift", "engine.steering")}
    assert "thinkfold.server.request_log" in TOLD
    assert not [name for name in TOLD if not hasattr(importlib.import_module(name), "logger")]
