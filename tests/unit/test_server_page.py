"""The page at `/` and what it reads: its files are fixed, closed in by a policy, and open; data is not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from server_stand_in import ScriptedEngine, serving
from test_server_access import RIGHT, TABLE, bearer, guarded

from thinkfold.control import voting
from thinkfold.server.access.gate import Access
from thinkfold.server.state import ServerOptions
from thinkfold.server.ui import routes
from thinkfold.types import ThinkingEndReason

FOLDER = Path(routes.__file__).parent
SCRIPTS = sorted(FOLDER.glob("*.js"))
HTML = (FOLDER / "index.html").read_text()


async def test_every_file_comes_with_the_policy() -> None:
    async with serving(ScriptedEngine()) as client:
        for path in routes.PATHS:
            reply = await client.get(path)
            assert reply.status_code == 200 and reply.content
            policy = reply.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "script-src 'self';" in policy and "unsafe" not in policy
            assert reply.headers["x-content-type-options"] == "nosniff"
            again = await client.get(path, headers={"If-None-Match": reply.headers["etag"]})
            assert again.status_code == 304 and not again.content
        for path in (
            "/ui/",
            "/ui/index.html",
            "/ui/routes.py",
            "/ui/../routes.py",
            "/ui/%2e%2e/app.py",
            "/ui/nothing.js",
        ):
            assert (await client.get(path)).status_code == 404
        assert (await client.get("/")).headers["content-type"].startswith("text/html")
        assert (await client.get("/ui/main.js")).headers["content-type"].startswith("text/javascript")


async def test_files_need_no_key_and_data_does() -> None:
    async with guarded(Access(TABLE)) as client:
        for path in routes.PATHS:
            assert (await client.get(path)).status_code == 200
            assert (await client.post(path)).status_code == 401
        assert (await client.get("/v1/thinkfold/engine")).status_code == 401
        assert (await client.get("/v1/thinkfold/engine", headers=bearer(RIGHT))).status_code == 200


async def test_a_server_without_the_page() -> None:
    async with guarded(Access(TABLE), options=ServerOptions(page=False)) as client:
        for path in routes.PATHS:
            assert (await client.get(path)).status_code == 401
            assert (await client.get(path, headers=bearer(RIGHT))).status_code == 404


async def test_the_engine_of_this_moment() -> None:
    async with serving(ScriptedEngine()) as client:
        first, second = [(await client.get("/v1/thinkfold/engine")).json() for _ in range(2)]
    assert second["clock_s"] > first["clock_s"]
    assert (first["model"], first["ready"], first["reason"]) == ("tiny", True, "")
    assert first["pages"] == {
        "total": 64,
        "held": 5,
        "free": 43,
        "by_class": {"thinking": 3, "summary": 2, "cached": 16},
        "host": {"total": 0, "used": 0},
        "page_size": 16,
        "page_bytes": 1024,
    }
    assert first["pressure"] == {"cached": 7, "fold": 5}
    assert first["folds"] == {"done": 5, "refused": 1, "tokens": 80, "quantised": 0}
    assert first["totals"]["generated_tokens"] == 0


async def test_a_loading_or_draining_engine_says_so() -> None:
    access = Access(draining=True)
    async with guarded(access) as client:
        shown = (await client.get("/v1/thinkfold/engine")).json()
        assert (shown["ready"], shown["reason"]) == (False, "draining")

    async def fails() -> ScriptedEngine:
        raise OSError("no weights")

    async with serving(start=fails) as client:
        assert (await client.get("/v1/thinkfold/engine")).status_code == 503
        assert (await client.get("/")).status_code == 200


def test_the_page_names_only_files_that_are_there() -> None:
    named = set(re.findall(r'(?:href|src)="(ui/[^"]+)"', HTML))
    named |= {f"ui/{name}" for path in SCRIPTS for name in re.findall(r'from "\./([^"]+)"', path.read_text())}
    assert {f"/{name}" for name in named} == set(routes.PATHS) - {"/"}


def test_nothing_is_inline_and_nothing_comes_from_elsewhere() -> None:
    assert not re.findall(r"\son\w+=|\sstyle=|<style|<script(?![^>]*src=)|javascript:", HTML)
    for path in [*SCRIPTS, FOLDER / "index.html", FOLDER / "page.css"]:
        others = set(re.findall(r"https?://[^\s\"']+", path.read_text()))
        assert others <= {"http://www.w3.org/1998/Math/MathML", "http://www.w3.org/2000/svg"}, path.name


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_text_never_becomes_code_or_markup(path: Path) -> None:
    source = path.read_text()
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\b|new Function|srcdoc|setHTML"
    assert not re.findall(forbidden, source)
    assert len(source.splitlines()) <= 400


def test_every_end_and_what_settles_a_vote_have_words() -> None:
    words = {name: set(re.findall(r"(\w+): \"", table(name))) for name in ("RULES", "ENDS")}
    settles = {"lossless", "short", "beta", "dirichlet", "likely", "in_flight", "settled", "all", "last_probes"}
    source = "".join(path.read_text() for path in Path(voting.__file__).parent.glob("vot*.py"))
    assert words["RULES"] == settles and all(f'"{rule}"' in source for rule in settles)
    early = {"margin", "entropy", "consistency", "confidence", "hopeless", "loop"}
    assert words["ENDS"] == set(ThinkingEndReason) - early, "a rule of early stopping is called by its name"


def table(name: str) -> str:
    """The object `name` of one of the page's files."""
    texts = (path.read_text().partition(f"const {name} = {{")[2] for path in SCRIPTS)
    (found,) = [text.partition("};")[0] for text in texts if text]
    return found
