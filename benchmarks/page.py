"""Does the page paint at once, and does it stay smooth with long thinking?

Headless Chromium on this machine, the server of `thinkfold serve` on a scripted engine in a process of its own.
`paint`: from asking for the page to its first text, each time in a browser that has nothing cached. `thinking`: tokens
come faster than anybody thinks, then the pane is scrolled over all of it; told are the times between two frames.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from playwright.sync_api import Browser, Page, sync_playwright

from thinkfold.cli import bench
from thinkfold.errors import ThinkfoldError

overhead = bench.load(Path(__file__).with_name("overhead.py"))

NAMES = ("chromium", "chromium-browser", "google-chrome")
RATE = 2000.0  # tokens a second
FLAGS = ["--no-sandbox", "--disable-gpu"]
PATIENCE_MS = 300_000
# Keeps the gaps between frames, in milliseconds, until `window.gaps` is taken.
WATCH = """() => {
  window.gaps = [];
  let last = performance.now();
  const frame = (now) => { window.gaps.push(now - last); last = now; requestAnimationFrame(frame); };
  requestAnimationFrame(frame);
}"""
SCROLL = """async (steps) => {
  const pane = document.querySelector('#thinking');
  for (const segment of pane.querySelectorAll('details')) segment.open = true;
  window.gaps = [];
  for (let step = 0; step <= steps; step += 1) {
    pane.scrollTop = (pane.scrollHeight * step) / steps;
    await new Promise(requestAnimationFrame);
  }
  return window.gaps;
}"""
PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"


@contextmanager
def browsing() -> Iterator[Browser]:
    """A browser. Raises ThinkfoldError without one."""
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        raise ThinkfoldError("needs Chromium (Debian: apt-get install chromium)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


def paint(browser: Browser, url: str, loads: int) -> dict[str, float]:
    """Seconds until the first text of the page."""
    times = []
    for _ in range(loads):
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(url)
        page.wait_for_function("() => performance.getEntriesByName('first-contentful-paint').length")
        times.append(page.evaluate(PAINT) / 1e3)
        page.close()
    return {"first_paint_s": median(times), "first_paint_max_s": max(times), "loads": loads}


def thinking(browser: Browser, url: str, tokens: int, steps: int) -> dict[str, float]:
    """Gaps between frames, in seconds, while thinking streams in and while all of it is scrolled over."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(PATIENCE_MS)
    page.goto(url)
    page.evaluate(WATCH)
    page.fill("#question", "q")
    page.click("#go")
    page.wait_for_function(
        "(tokens) => parseInt(document.querySelector('#thinking-sum').textContent.replaceAll(',', '')) >= tokens",
        arg=tokens,
    )
    while_streaming = page.evaluate("window.gaps")
    page.click("#stop")
    page.locator("#go:enabled").wait_for()
    found = _gaps("stream", while_streaming) | _gaps("scroll", page.evaluate(SCROLL, steps)) | _size(page)
    page.close()
    return found


def _gaps(name: str, gaps: Sequence[float]) -> dict[str, float]:
    ordered = sorted(gap / 1e3 for gap in gaps)
    shares = {"p50": 0.5, "p99": 0.99}
    return {f"{name}_{word}_s": overhead.share(ordered, part) for word, part in shares.items()} | {
        f"{name}_max_s": ordered[-1]
    }


def _size(page: Page) -> dict[str, float]:
    return {"characters": page.evaluate("document.querySelector('#thinking').textContent.length")}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and keep the rows."""
    parser = argparse.ArgumentParser(prog="thinkfold bench page", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--loads", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=60_000)
    parser.add_argument("--steps", type=int, default=300, help="steps of scrolling")
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    parser.add_argument("--no-record", action="store_true", help="do not append rows to benchmarks/results")
    args = parser.parse_args(argv)
    for name in ("loads", "tokens", "steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}: must be at least 1")
    served = argparse.Namespace(rate=RATE, coalesce_ms=40.0)
    with browsing() as browser, overhead.server_process(served) as (_, port):
        url = f"http://127.0.0.1:{port}/"
        cases: dict[str, Callable[[], dict[str, float]]] = {
            "paint": lambda: paint(browser, url, args.loads),
            f"thinking/{args.tokens}": lambda: thinking(browser, url, args.tokens, args.steps),
        }
        overhead.report("page", cases, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
