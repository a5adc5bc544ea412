"""The page in headless Chromium against Pebble: thinking streams, folds, is paused and cut short."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conftest import Served
from playwright.sync_api import Browser, Page

from tests.browser import browsing, needs_browser, watched

pytestmark = needs_browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, pebble: Served) -> Iterator[Page]:
    with watched(browser, f"{pebble.url}/") as page:
        page.locator("#state[data-good=true]").wait_for()
        yield page


def test_thinking_is_paused_resumed_and_cut_short(page: Page, pebble: Served) -> None:
    page.fill("#question", "What is 86 * 185 + 69 * 98 + 34 * 996 + 98 * 760?")
    page.click("#go")
    page.locator("#answer-now:enabled").wait_for()
    page.click("#pause")
    page.locator("#pause", has_text="Resume").wait_for()
    steps = pebble.stats().steps
    assert page.inner_text("#progress").startswith(("paused", "thinking"))
    page.wait_for_timeout(300)
    assert pebble.stats().steps <= steps + 1, "nothing is thought while it is paused"
    page.click("#pause")
    page.locator("#pause", has_text="Pause").wait_for()
    page.click("#answer-now")
    page.locator("#go:enabled").wait_for()
    assert page.inner_text("#ending").startswith("thinking was ended by order")
    assert page.locator("#answer p").count() >= 1 and page.inner_text("#trouble") == ""
    costs = page.inner_text("#playground .costs")
    assert ("paused" in costs and "KV × time" in costs and "MB·s" in costs) or "kB·s" in costs


def test_segments_fold_as_they_are_written(page: Page, pebble: Served) -> None:
    page.check("input[value=eager]", force=True)
    page.fill("#question", "What is 27 * 34 + 118 * 9 + 12 * 11?")
    page.click("#go")
    page.locator(".segment[data-state=folded]").first.wait_for()
    page.click("#stop")
    page.locator("#go:enabled").wait_for()
    assert "entries · " in page.locator(".segment[data-state=folded] .chip").last.inner_text()
    assert "in summaries" in page.inner_text("#thinking-sum") and "folds" in page.inner_text("#cost-memory")
    first = page.evaluate("document.querySelector('.segment .text').textContent")
    assert len(first) > 100, "a segment holds its text while it is folded"
    page.locator("#legend li", has_text="cached").wait_for()
    assert pebble.stats().folds >= 1
