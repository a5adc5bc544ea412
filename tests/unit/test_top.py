"""`thinkfold top` on a terminal that is none: what it draws, and what it does when the server is away."""

from __future__ import annotations

import copy
import http.server
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from textual.widgets import Static

from thinkfold.cli.engine_client import API_KEY, EngineClient, Reading
from thinkfold.cli.main import main
from thinkfold.cli.top_screen import COLOURS, RUNGS, TopApp, kv_map
from thinkfold.errors import ParameterError, ThinkfoldError

ENGINE: dict[str, Any] = {
    "object": "thinkfold.engine",
    "model": "pebble",
    "ready": True,
    "reason": "",
    "clock_s": 10.0,
    "running": 3,
    "waiting": 2,
    "pages": {
        "total": 200,
        "held": 130,
        "free": 40,
        "by_class": {"prompt": 20, "thinking": 80, "summary": 20, "answer": 10, "cached": 30},
        "host": {"total": 64, "used": 8},
        "page_size": 16,
        "page_bytes": 132096,
    },
    "prefix": {"queried_tokens": 400, "hit_tokens": 100},
    "folds": {"done": 29, "refused": 1, "tokens": 4100},
    "pressure": {"fold": 12, "swap": 1, "newer_rung": 4},
    "preemptions": 1,
    "totals": {"steps": 900, "generated_tokens": 1000, "kv_byte_seconds": 2.5e9},
}


def later(seconds: float, tokens: int, **more: Any) -> dict[str, Any]:
    engine = copy.deepcopy(ENGINE) | more
    engine["clock_s"] += seconds
    engine["totals"]["generated_tokens"] += tokens
    return engine


def shown(app: TopApp, name: str) -> str:
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(app.query_one(name, Static).content)
    return capture.get()


async def test_the_engine_is_drawn_and_drawn_again() -> None:
    answers: list[dict[str, Any] | str] = [
        later(2, 90),
        "the server is away",
        later(4, 190, running=7, ready=False, reason="draining"),
    ]

    def read() -> dict[str, Any]:
        answer = answers.pop(0)
        if isinstance(answer, str):
            raise ThinkfoldError(answer)
        return answer

    app = TopApp(read, ENGINE, "http://here", 3600)
    async with app.run_test(size=(100, 32)) as pilot:
        assert "pebble" in shown(app, "#head") and "ready" in shown(app, "#head")
        legend = shown(app, "#legend")
        assert "thinking 80" in legend and "summary 20" in legend and "host 8 of 64" in " ".join(legend.split())
        numbers = " ".join(shown(app, "#numbers").split())
        assert "running 3" in numbers and "KV held 65.0% of 200 pages" in numbers and "prefix hits 25%" in numbers
        assert "29 (4,100 tokens), 1 refused" in numbers
        rungs = " ".join(shown(app, "#ladder").split())
        assert "segments folded 12" in rungs and "newer_rung 4" in rungs and "running requests preempted 0" in rungs
        assert "–" in shown(app, "#rate-title")
        for words, where in (("45.0", "#rate-title"), ("the server is away", "#head"), ("draining", "#head")):
            await pilot.press("r")
            await app.workers.wait_for_complete()
            await pilot.pause()
            assert words in shown(app, where)
        assert "running 7" in " ".join(shown(app, "#numbers").split()) and "50.0" in shown(app, "#rate-title")
        theme = app.theme
        await pilot.press("d")
        assert app.theme != theme
        await pilot.press("q")
    assert not answers


def test_every_rung_has_its_words_here_and_on_the_page() -> None:
    source = Path(__file__).parents[2] / "src" / "thinkfold"
    taken = re.findall(r'taken\["(\w+)"\]', "".join(path.read_text() for path in (source / "scheduler").glob("*.py")))
    assert set(RUNGS) == {*taken, "pin", "quantise", "fold"}, "those three are taken under a name of another place"
    script = (source / "server" / "ui" / "engine.js").read_text()
    page = script.partition("const RUNGS = [")[2].partition("];")[0]
    assert re.findall(r'\["(\w+)", "([^"]+)"\]', page) == list(RUNGS.items())


def test_the_map_shows_every_class_that_is_there() -> None:
    pages = copy.deepcopy(ENGINE["pages"])
    text = kv_map(pages, 50, 4)
    colours = [str(span.style) for span in text.spans]
    assert text.plain.count("■") == 200 and len(text.plain.splitlines()) == 4
    assert colours.count(COLOURS["thinking"]) == 80 and colours.count(COLOURS["free"]) == 40
    pages |= {"total": 100_000, "by_class": {"answer": 1}}
    assert [str(span.style) for span in kv_map(pages, 50, 4).spans].count(COLOURS["answer"]) == 1


def test_a_server_that_restarts_begins_anew() -> None:
    reading = Reading(ENGINE).following(later(2, 100))
    assert reading.tokens_per_s == 50.0
    assert reading.following(ENGINE).tokens_per_s is None
    assert Reading(later(0, 0, prefix={"queried_tokens": 0, "hit_tokens": 0})).hit_rate is None


class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        allowed = self.headers.get("Authorization") == "Bearer right"
        status, body = (200, ENGINE) if allowed else (401, {"error": {"message": "a valid API key is needed"}})
        if self.path != "/v1/thinkfold/engine":
            status, body = 200, {"object": "list"}
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def address() -> Iterator[str]:
    server = http.server.HTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join(5)
    server.server_close()


def test_the_client_reads_or_says_why_not(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in (None, "wrong"):
        monkeypatch.delenv("THINKFOLD_API_KEY", raising=False) if key is None else monkeypatch.setenv(API_KEY, key)
        with pytest.raises(ThinkfoldError, match="a valid API key is needed"):
            EngineClient(address).read()
    monkeypatch.setenv("THINKFOLD_API_KEY", "right")
    assert EngineClient(f"{address}/v1/").read() == ENGINE
    with pytest.raises(ThinkfoldError, match="is no thinkfold server"):
        EngineClient(f"{address}/x").read()
    with pytest.raises(ThinkfoldError, match="does not answer"):
        EngineClient("http://127.0.0.1:1").read()
    with pytest.raises(ParameterError, match="url: must be like"):
        EngineClient("127.0.0.1:8000")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["http://127.0.0.1:1"], "does not answer"),
        (["ftp://x"], "url: must be like"),
        (["--interval", "0"], "interval: must be in"),
    ],
)
def test_errors_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("thinkfold top: ") and message in error and error.count("\n") == 1
