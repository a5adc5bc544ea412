"""The page while several samples decide, where a conversation's earlier text has changed, and what axe says of it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from importlib import resources
from typing import Any

import pytest
from playwright.sync_api import Browser
from server_stand_in import EOS, ScriptedEngine
from test_page_views import on_a_socket

from tests.browser import browsing, needs_browser, watched
from thinkfold.engine.samples import Question
from thinkfold.types import AnswerClass, CompletionOutput, Costs, RequestOutput, ThinkingPolicy, VoteState

pytestmark = needs_browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as browser:
        yield browser


class Voting(ScriptedEngine):
    """Tells a vote in three states, the last of which waits for `settled`, then its winner."""

    settled: threading.Event

    async def decide(self, question: Question, how: Any) -> AsyncIterator[RequestOutput]:
        base = VoteState(how.n, 4, 4, 0, 0, 0)
        seven, other = AnswerClass("7", 1, 1.0, "canonical"), AnswerClass("<b>8</b>", 1, 1.0, "canonical")
        states = [
            base,
            replace(base, running=2, finished=2, classes=(seven, other)),
            replace(base, running=0, finished=3, cancelled=1, classes=(replace(seven, count=2, weight=2.0), other)),
        ]
        policy = ThinkingPolicy(True, None, "default")
        for state in states:
            yield RequestOutput(question.request_id, [CompletionOutput(0)], policy, Costs(), outcome=state)
        await asyncio.to_thread(self.settled.wait, 20)
        async for output in self.generate(question.prompt, question.sampling, question.thinking):
            output.outcome = replace(states[-1], answer="7", rule="beta", sample=0)
            output.costs = Costs(thinking_tokens=9, queue_s=1.0, thinking_s=2.0, answer_s=1.0, device_s=3.0)
            yield output


def test_votes_form_while_they_come(browser: Browser) -> None:
    engine = Voting([["<think>", "w", "</think>", "7", EOS]])
    engine.settled = threading.Event()
    with on_a_socket(engine) as url, watched(browser, url) as page:
        assert page.locator("#vote-card").is_hidden()
        page.check("input[name=vote][value='8']", force=True)
        page.fill("#question", "q")
        with page.expect_request("**/v1/chat/completions") as asked:
            page.click("#go")
        body = json.loads(asked.value.post_data or "")
        assert body["vote"] == {"n": 8} and body["temperature"] > 0
        page.locator("#votes li", has_text="2 votes").wait_for()
        assert page.locator("#votes li > span").all_inner_texts() == ["7", "<b>8</b>"]
        widths = page.locator("#votes i i").evaluate_all("bars => bars.map((bar) => bar.style.width)")
        assert [round(float(width.removesuffix("%"))) for width in widths] == [67, 33]
        assert page.inner_text("#vote-note") == "3 of 8 samples finished, 1 cancelled"
        assert page.locator("#pause").is_disabled() and page.locator("#answer-now").is_disabled()
        assert page.inner_text("#thinking-sum") == "The winner's is shown when the vote is decided."
        page.locator("#progress", has_text="voting · 0 samples running").wait_for()
        engine.settled.set()
        page.locator("#go:enabled").wait_for()
        assert page.inner_text("#vote-note").endswith("settled: the leader is sure enough")
        assert page.inner_text("#cost-time").replace("\n", " ").startswith("time 4.0 s queue 1.0 s"), (
            "device_s is part of it"
        )
        assert page.inner_text("#thinking-sum").startswith("2 tokens thought"), "the pane shows one sample"
        assert page.locator("#votes .won span").all_inner_texts() == ["7"] and page.inner_text("#answer") == "7"


def test_a_drift_is_shown_with_its_message_and_character(browser: Browser) -> None:
    system = "You are a careful helper. " * 8 + "It is 10:31."
    turns: list[dict[str, str]] = [{"role": "system", "content": system}, {"role": "user", "content": "q"}]
    later = [{**turns[0], "content": system.replace("31", "45")}, *turns[1:], {"role": "assistant", "content": "A"}]
    with on_a_socket(ScriptedEngine([["A", EOS]])) as url, watched(browser, url) as page:
        assert page.locator("#drift-card").is_hidden()
        for messages in (turns, [*later, {"role": "user", "content": "p"}]):
            reply = page.request.post(f"{url}v1/chat/completions", data={"messages": messages})
            assert reply.ok
        page.locator("#drift li").wait_for()
        lost = reply.json()["thinkfold"]["drift"]["tokens_lost"]
        shown = f"message 0 (system) changed at character {system.index('31')}: {lost} tokens computed again"
        assert page.inner_text("#drift li") == shown


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_axe_finds_nothing_serious(browser: Browser, width: int, dark: bool) -> None:
    pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed (group dev)")
    axe = resources.files("axe_playwright_python").joinpath("axe.min.js").read_text()
    engine = Voting([["<think>", "a\n", "b\n", "</think>", r"\boxed{7}", EOS]])
    engine.settled = threading.Event()
    engine.settled.set()
    with on_a_socket(engine) as url, watched(browser, url, width=width, dark=dark) as page:
        page.check("input[name=vote][value='4']", force=True)
        page.fill("#question", "q")
        page.click("#go")
        page.locator("#go:enabled").wait_for()
        assert page.locator("#votes .won").is_visible() and page.locator("#answer math").count() == 1
        found = page.evaluate(axe + "; axe.run(document).then((told) => [told.passes.length, told.violations])")
    passes, violations = found
    assert passes > 20 and [each["id"] for each in violations if each["impact"] in ("serious", "critical")] == []
