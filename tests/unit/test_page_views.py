"""The page in headless Chromium around a scripted engine: hostile text, folds, maths, keys, long thinking."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn
from playwright.sync_api import Browser, Page
from server_stand_in import EOS, ScriptedEngine
from test_server_access import RIGHT, TABLE

from tests.browser import browsing, needs_browser, watched
from thinkfold.server.access.gate import Access
from thinkfold.server.app import build_app
from thinkfold.types import Fold, Segment

pytestmark = needs_browser

HOSTILE = (
    "<script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "</details></section><h1>not mine</h1>",
    "<svg/onload=alert(1)> &lt;b&gt; &amp;",
    "‮evil‬ \u0000 \ufeff 👩‍👩‍👧 e\u0301 ﷽ \u2028 𝔘",
)
MATHS = (r"\boxed{<img src=x onerror=alert(1)>}", r" \(\text{<script>alert(2)</script>}\)", r" \unknown{<b>}")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as browser:
        yield browser


@contextmanager
def on_a_socket(engine: ScriptedEngine, access: Access | None = None) -> Iterator[str]:
    """The address of an app around `engine`."""
    sock = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(build_app(engine, access=access), log_level="warning", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join(30)
        sock.close()


@pytest.fixture(scope="module")
def plain() -> Iterator[str]:
    with on_a_socket(ScriptedEngine([["<think>", "w", "</think>", "A", EOS]])) as url:
        yield url


@pytest.fixture
def page(browser: Browser, plain: str) -> Iterator[Page]:
    with watched(browser, plain) as page:
        yield page


@pytest.fixture(scope="module")
def modules(browser: Browser, plain: str) -> Iterator[Page]:
    """A page whose modules are tried on their own."""
    with watched(browser, plain) as page:
        yield page


def think(page: Page) -> None:
    page.fill("#question", "q")
    page.click("#go")
    page.locator("#go:enabled").wait_for()


def test_case_64_hostile_text_stays_text(browser: Browser) -> None:
    script = ["<think>", *HOSTILE, "</think>", *HOSTILE, *MATHS, EOS]
    with on_a_socket(ScriptedEngine([script])) as url, watched(browser, url) as page:
        think(page)
        thought = page.evaluate("document.querySelector('#thinking .text').textContent")
        assert thought == "".join(HOSTILE)
        answered = page.evaluate("document.querySelector('#answer').textContent")
        assert answered.startswith("".join(HOSTILE).split("\u0000")[0])
        for tag in ("script", "img", "svg", "h1", "b", "a", "iframe"):
            assert page.locator(f"#thinking {tag}, #answer {tag}").count() == 0, tag
        assert page.locator("#answer math").count() == 2
        assert "<script>alert(2)</script>" in page.inner_text("#answer")
        assert "owned" not in page.title()


def test_case_64_a_stream_that_ends_inside_thinking_closes_the_pane(browser: Browser) -> None:
    with on_a_socket(ScriptedEngine([["<think>", "w", EOS]])) as url, watched(browser, url) as page:
        think(page)
        assert page.inner_text("#ending").startswith("the response ended while thinking")
        assert page.evaluate("document.querySelector('#thinking .text').textContent") == "w"
        assert page.inner_text("#answer") == "" and page.locator("#answer-now").is_disabled()
        with page.expect_request("**/v1/chat/completions") as asked:
            page.click("#go")
        assert json.loads(asked.value.post_data or "")["messages"] == [{"role": "user", "content": "q"}]
        page.locator("#go:enabled").wait_for()


def test_the_policy_forbids_markup_by_itself(browser: Browser, plain: str) -> None:
    page = browser.new_page()
    page.goto(plain)
    attempt = "() => { try { document.body.innerHTML = '<b>x</b>'; return 'set'; } catch { return 'refused'; } }"
    assert page.evaluate(attempt) == "refused"
    page.close()


def test_segments_fold_where_their_tokens_are(browser: Browser) -> None:
    words = [f"word{i}\n" for i in range(40)]
    told = {
        11: [Segment(0, 1, 11)],
        21: [Segment(1, 11, 21)],
        25: [Fold(0, 1, 11, 2.0, 7, 0.041)],
        31: [Segment(2, 21, 31)],
        35: [Fold(1, 11, 21, 3.0, 1, 0.6, refused=True)],
    }
    with (
        on_a_socket(ScriptedEngine([["<think>", *words, "</think>", "A", EOS]], told=told)) as url,
        watched(browser, url) as page,
    ):
        page.check("input[value=eager]", force=True)
        think(page)
        texts = page.evaluate("[...document.querySelectorAll('#thinking .text')].map((one) => one.textContent)")
        assert [text.split() for text in texts] == [[w.strip() for w in words[i : i + 10]] for i in (0, 10, 20, 30)]
        states = page.evaluate("[...document.querySelectorAll('.segment')].map((one) => [one.dataset.state, one.open])")
        assert states == [["folded", False], ["refused", True], ["closed", True], ["closed", True]]
        chips = page.locator(".chip").all_inner_texts()
        assert chips[0] == "10 → 2 entries · 7 pages freed · error 4.1 %" and chips[1] == "kept raw: error 60 %"
        assert "1 fold: 10 tokens of thinking are summaries now, 1 refused" in page.inner_text("#fold-note")
        page.locator(".segment summary").first.focus()
        page.keyboard.press("Enter")
        assert page.locator(".segment").first.get_attribute("open") is not None, "a folded segment can be read again"


@pytest.mark.parametrize(
    ("policy", "words"), [("pressure", "because memory is free: 7.8 % of 64 pages"), ("off", "all thinking stays raw")]
)
def test_why_nothing_is_folded(browser: Browser, policy: str, words: str) -> None:
    engine = ScriptedEngine([["<think>", "a ", "b ", "c ", "</think>", "A", EOS]], told={3: [Segment(0, 0, 3)]})
    with on_a_socket(engine) as url, watched(browser, url) as page:
        page.locator("#state[data-good=true]").wait_for()
        page.check(f"input[value={policy}]", force=True)
        think(page)
        assert words in page.inner_text("#fold-note")
        assert engine.calls[0].fold is not None and engine.calls[0].fold.policy == policy


def test_the_slider_sets_effort_or_budget(browser: Browser) -> None:
    engine = ScriptedEngine()
    with on_a_socket(engine) as url, watched(browser, url, refusals=True) as page:
        page.locator("#depth-text", has_text="16,384").wait_for()
        page.focus("#depth")
        page.keyboard.press("ArrowLeft")
        assert "4,096" in page.inner_text("#depth-text")
        think(page)
        page.focus("#depth")
        page.keyboard.press("End")
        page.fill("#budget", "77")
        think(page)
        assert [(c.thinking.reasoning_effort, c.thinking.thinking_token_budget) for c in engine.calls] == [
            ("low", None),
            (None, 77),
        ]
        page.fill("#budget", "-5")
        page.evaluate("document.querySelector('#ask').noValidate = true")
        think(page)
        assert "thinking_token_budget" in page.inner_text("#trouble")


def test_costs_are_shown(page: Page) -> None:
    think(page)
    assert page.inner_text("#answer") == "A"
    assert page.locator("#cost-tokens dt").all_inner_texts()[:2] == ["tokens", "prompt"]
    assert "folded tokens\n48" in page.inner_text("#cost-memory") and "queue" in page.inner_text("#cost-time")


def test_a_key_is_asked_for_and_kept_in_the_tab(browser: Browser) -> None:
    with on_a_socket(ScriptedEngine(), Access(TABLE)) as url:
        page = browser.new_page()
        page.goto(url)
        page.locator("#key").wait_for()
        assert page.inner_text("#state") == "locked"
        for secret, words in (("wrong-key", "not known"), (RIGHT, "")):
            page.fill("#key-value", secret)
            page.keyboard.press("Enter")
            if words:
                page.locator("#key-note", has_text=words).wait_for()
        page.locator("#key").wait_for(state="hidden")
        page.locator("#state[data-good=true]").wait_for()
        think(page)
        assert page.inner_text("#answer") == "wA"
        assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
        page.close()


def test_the_engine_view(page: Page) -> None:
    page.locator("#legend li").first.wait_for()
    shown = dict(line.split("\n") for line in page.locator("#legend li").all_inner_texts())
    assert shown == {
        "prompt": "0",
        "thinking": "3",
        "summary": "2",
        "answer": "0",
        "cached": "16",
        "pinned": "0",
        "free": "43",
        "host": "none",
    }
    cells = {
        name: page.locator(f"#map [data-class={name}]").count() for name in ("thinking", "summary", "cached", "free")
    }
    assert cells == {"thinking": 18, "summary": 12, "cached": 96, "free": 258}
    assert "thinking 3" in (page.get_attribute("#map", "aria-label") or "")
    assert "segments folded\n5" in page.inner_text("#ladder") and "cached\n7" in page.inner_text("#ladder")
    assert "7.8 %" in page.inner_text("#tiles")


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_and_has_both_colour_schemes(browser: Browser, plain: str, width: int, dark: bool) -> None:
    with watched(browser, plain, width=width, dark=dark) as page:
        think(page)
        assert page.evaluate("document.documentElement.scrollWidth") == width
        ground = "getComputedStyle(document.body).backgroundColor"
        before = page.evaluate(ground)
        assert (before == "rgb(16, 19, 26)") is dark
        assert page.inner_text("#theme") == ("Light" if dark else "Dark")
        page.emulate_media(color_scheme="light" if dark else "dark")
        page.locator("#theme", has_text="Dark" if dark else "Light").wait_for()  # it follows the system until a click
        page.emulate_media(color_scheme="dark" if dark else "light")
        page.locator("#theme", has_text="Light" if dark else "Dark").wait_for()
        page.click("#theme")
        assert page.evaluate(ground) != before


def test_all_can_be_reached_by_keyboard(page: Page) -> None:
    reached = []
    for _ in range(18):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate(
                "document.activeElement.id || document.activeElement.textContent.trim() || document.activeElement.name"
            )
        )
    assert {"Skip to the question", "theme", "question", "depth", "fold", "go", "thinking"} <= set(reached)


LONG = """async () => {
  const { ThinkingView } = await import('/ui/segments.js');
  const root = document.querySelector('#thinking');
  const view = new ThinkingView(root, 512);
  const touched = new Set();
  const watcher = new MutationObserver((records) => records.forEach((one) => touched.add(one.target)));
  let last = 0, most = 0;
  for (let token = 1; token <= 60000; token += 1) {
    view.text(token % 20 ? 'thought ' : 'thought\\n', token);
    if (token % 400 === 0) view.segment({ id: token / 400, start: token - 400, end: token });
    const span = { start: token - 2000, end: token - 1600, entries: 32, pages_freed: 23 };
    if (token % 2000 === 0) view.fold({ ...span, error: 0.1, refused: false });
    if (token === 59000) watcher.observe(root, { characterData: true, subtree: true });
    if (token % 500 === 0) {
      const before = performance.now();
      await new Promise(requestAnimationFrame);
      most = Math.max(most, performance.now() - before);
    }
  }
  view.close();
  await new Promise(requestAnimationFrame);
  return {
    words: [...root.querySelectorAll('.text')].map((one) => one.textContent).join('').match(/thought/g).length,
    segments: view.segments.length,
    open: root.querySelectorAll('[open]').length,
    elements: root.querySelectorAll('*').length,
    touched: [...touched].filter((node) => node.parentNode?.className === 'text').length,
    bottom: root.scrollHeight - root.scrollTop - root.clientHeight,
    folded: view.folded,
    most,
  };
}"""


def test_60k_tokens_of_thinking_write_only_the_open_segment(page: Page) -> None:
    found: dict[str, Any] = page.evaluate(LONG)
    assert found["words"] == 60_000 and found["segments"] == 150, json.dumps(found)
    assert found["open"] <= 4 and found["elements"] < 1500 and found["folded"] == 12_000
    assert found["touched"] <= 5 and found["bottom"] < 2


def test_a_stretch_without_segments_is_cut_all_the_same(modules: Page) -> None:
    sizes = modules.evaluate("""async () => {
      const { ThinkingView } = await import('/ui/segments.js');
      const view = new ThinkingView(document.querySelector('#thinking'), 512);
      for (let token = 1; token <= 20000; token += 1) {
        view.text('\U0001d518', token);
        if (token % 1000 === 0) await new Promise(requestAnimationFrame);
      }
      view.close();
      return view.segments.map((one) => [one.text.length, one.end - one.start, one.text.isWellFormed()]);
    }""")
    assert len(sizes) == 2 and sum(size for size, _, _ in sizes) == 40_000
    assert sum(tokens for _, tokens, _ in sizes) == 20_000 and all(whole for _, _, whole in sizes)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (r"It is \boxed{42}.", ["It is ", r"\boxed{42}", "."]),
        (r"\(x^2\) and \[\frac{1}{2}\]", ["x^2", " and ", r"\frac{1}{2}"]),
        ("$x$ costs $5 and $6", ["x", " costs $5 and $6"]),
        ("$$a_1$$ $ a $", ["a_1", " $ a $"]),
        (r"open \boxed{1 and \(2", [r"open \boxed{1 and \(2"]),
        ("no maths $", ["no maths $"]),
    ],
)
def test_where_maths_is(modules: Page, text: str, shown: list[str]) -> None:
    found = modules.evaluate("async (text) => (await import('/ui/maths.js')).parts(text)", text)
    assert [part if isinstance(part, str) else part["source"] for part in found] == shown


@pytest.mark.parametrize(
    ("source", "shape"),
    [
        (r"\frac{1}{x^2}", "(mrow (mfrac (mrow (mn 1)) (mrow (msup (mi x) (mn 2)))))"),
        (r"\dfrac12", "(mrow (mfrac (mn 1) (mn 2)))"),
        (r"\boxed{7}", "(mrow (mrow (mrow (mn 7))))"),
        (r"a_{1}^{2}", "(mrow (msubsup (mi a) (mrow (mn 1)) (mrow (mn 2))))"),
        (r"f'(x)", "(mrow (msup (mi f) (mo ′)) (mo () (mi x) (mo )))"),
        (r"\sqrt[3]{8}\cdot\pi", "(mrow (mroot (mrow (mn 8)) (mn 3)) (mo ⋅) (mi π))"),
        (r"\left(\tfrac{a}{b}\right)", "(mrow (mo () (mfrac (mrow (mi a)) (mrow (mi b))) (mo )))"),
        (r"1{,}000 - 2", "(mrow (mn 1) (mrow (mo ,)) (mn 000) (mo −) (mn 2))"),
        (r"\text{if } x\%", "(mrow (mtext if ) (mi x) (mo %))"),
        (r"\href{a:}{x}", r"(mrow (mtext \href) (mrow (mi a) (mo :)) (mrow (mi x)))"),
        (r"\constructor", r"(mrow (mtext \constructor))"),
        (r"\frac{1}", None),
        ("a}", None),
        ("{" * 60 + "}" * 60, None),
        ("x" * 5000, None),
    ],
)  # fmt: skip
def test_maths_become_mathml(modules: Page, source: str, shape: str | None) -> None:
    found = modules.evaluate(
        """async (source) => {
          const inside = (node) => [node.localName, ...[...node.childNodes].map(shape)].join(' ');
          const shape = (node) => (node.nodeType === 3 ? node.data : `(${inside(node)})`);
          const math = (await import('/ui/maths.js')).formula(source, false);
          return math && shape(math.firstChild);
        }""",
        source,
    )
    assert found == shape


def test_events_are_the_same_however_a_stream_is_cut(modules: Page) -> None:
    wanted = [
        {"name": "", "data": {"a": "👩‍👩‍👧 \n\n é\u2028"}},
        {"name": "thinkfold.fold", "data": {"fold": [1, None]}},
    ]
    lines = [json.dumps(each["data"], ensure_ascii=False) for each in wanted]
    text = (
        f": keep-alive\n\ndata: {lines[0]}\n\nevent: thinkfold.fold\ndata: {lines[1]}\n\ndata: [DONE]\n\ndata: no\n\n"
    )
    found = modules.evaluate(
        """async (text) => {
          const { events } = await import('/ui/api.js');
          const bytes = new TextEncoder().encode(text);
          const read = async (size) => {
            const body = new ReadableStream({
              start(to) {
                for (let at = 0; at < bytes.length; at += size) to.enqueue(bytes.slice(at, at + size));
                to.close();
              },
            });
            const told = [];
            for await (const each of events(new Response(body))) told.push(each);
            return told;
          };
          return Promise.all(Array.from({ length: bytes.length }, (_, i) => read(i + 1)));
        }""",
        text,
    )
    assert len(found) == len(text.encode()) and all(told == wanted for told in found)
