"""Headless Chromium for tests; they are skipped, and say so, where none is installed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
PATH = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
needs_browser = pytest.mark.skipif(PATH is None, reason="needs Chromium (Debian: apt-get install chromium)")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]


@contextmanager
def browsing() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=PATH, args=FLAGS)
        yield browser
        browser.close()


@contextmanager
def watched(
    browser: Browser, url: str, *, width: int = 1280, dark: bool = False, refusals: bool = False
) -> Iterator[Page]:
    """The page at `url`, ready; an error or, unless `refusals` are meant, a refused resource fails the test."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light")
    page.set_default_timeout(300_000)
    troubles: list[str] = []
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("console", lambda message: troubles.append(message.text) if message.type == "error" else None)
    page.on("dialog", lambda dialog: troubles.append(f"dialog {dialog.message}"))
    page.goto(url)
    page.locator("#state[data-good]").wait_for()
    yield page
    page.close()
    assert not [each for each in troubles if not (refusals and "Failed to load resource" in each)]
