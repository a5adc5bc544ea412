"""Programs, bodies and files that pages show run, or are read, as they are written."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import Served

from thinkfold.server.access.keys import load_keys
from thinkfold.server.chat import ChatRequest
from thinkfold.server.prefixes import PrefixRequest
from thinkfold.server.replies import FoldNews, SegmentPlace
from thinkfold.types import Prices
from thinkfold.types.limits import Clamp

DOCS = Path(__file__).parents[2] / "docs"
README = "../README.md"
ADDRESS = "http://127.0.0.1:8000"
SUM = re.compile(r"\d+ \* \d+ \+ \d+ \* \d+")  # Pebble thinks about one for some 660 tokens


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


def run(program: str, page: str) -> str:
    """What it prints, asked for an easier sum."""
    out, names = io.StringIO(), dict[str, Any]()
    with contextlib.redirect_stdout(out):
        exec(compile(SUM.sub("3 * 4", program), page, "exec"), names)
    return out.getvalue().strip()


TOLD = {  # what a program of docs/control.md prints; samples are drawn, so numbers may differ
    "Equality": r"\[\('\\\\frac\{1\}\{2\}', 2, 'number'\), \('3', 1, 'canonical'\)\]",
    "parse_control": r"(natural|consistency) \d+",
    "VoteParams": r"(?s).+ \w+ \[\('.+', \d+\).*\]",
    "BestOfParams": r"\w+ \[\(0, .+, 0\.\d+\).*\]",
    "SearchParams": r"(?s).+ \w+ \d+ \d+",
}


@pytest.mark.parametrize("word", TOLD)
def test_the_programs_of_control_run(word: str) -> None:
    (program,) = [block for block in blocks("control.md", "python") if re.search(rf"\b{word}\b", block)]
    told = run(program, "control.md")
    assert re.fullmatch(TOLD[word], told), told


def test_every_program_of_control_is_among_them() -> None:
    assert len(blocks("control.md", "python")) == len(TOLD)


@pytest.mark.parametrize("number", [0, 1], ids=["server", "LLM"])
def test_the_programs_of_the_readme_run(number: int, pebble: Served) -> None:
    programs = blocks(README, "python")
    assert len(programs) == 2 and ADDRESS in programs[0]
    assert "boxed{12}" in run(programs[number].replace(ADDRESS, pebble.url), "README.md")


def test_curl_commands_are_answered(pebble: Served) -> None:
    pages = [README, *(str(path.relative_to(DOCS)) for path in DOCS.glob("**/*.md"))]
    text = "\n".join(block for page in pages for block in blocks(page, "sh")).replace("\\\n", " ")
    commands = [shlex.split(line) for line in text.splitlines() if line.startswith("curl ")]
    assert commands
    for words in commands:
        url = next(word for word in words if word.startswith(ADDRESS)).replace(ADDRESS, pebble.url)
        name, value = words[words.index("-H") + 1].split(": ")
        reply = httpx.post(
            url, content=SUM.sub("3 * 4", words[words.index("-d") + 1]), headers={name: value}, timeout=120
        )
        assert reply.json()["choices"][0]["message"]["reasoning"]


def test_bodies_and_files_are_read() -> None:
    lines = [line for page in ("api.md", "control.md") for block in blocks(page, "json") for line in block.splitlines()]
    read = []
    for fields in map(json.loads, lines):
        if "early_stop" in fields or "thinkfold" in fields:
            body = ChatRequest.model_validate_json(json.dumps({"messages": [], **fields}))
            assert (control := body.control_params()) is not None and control.asks
            read.append("control")
        elif "granted" in fields:
            read.append(Clamp(**fields).by)
        elif "name" in fields:
            PrefixRequest.model_validate_json(json.dumps(fields)).check()
            read.append("prefix")
        else:  # what a verifier is asked and answers: tests of it speak the same
            assert fields.keys() in ({"question", "items"}, {"scores"})
            read.append("verifier")
    assert sorted(read) == ["control"] * 3 + ["max_tokens", "prefix"] + ["verifier"] * 2


def test_events_have_the_fields_that_are_shown() -> None:
    (block,) = [block for block in blocks("api.md", "") if block.startswith("event: ")]
    shown = [
        json.loads(line.removeprefix("data: ").replace(" …,", "")) for line in re.findall(r"^data: .*", block, re.M)
    ]
    fields = [(kind, set(event["thinkfold"][kind])) for event, kind in zip(shown, ("segment", "fold"), strict=True)]
    assert fields == [("segment", set(SegmentPlace.__annotations__)), ("fold", set(FoldNews.__annotations__))]


def test_the_files_of_operations_are_read(tmp_path: Path) -> None:
    keys, prices = blocks("operations.md", "toml")
    file = tmp_path / "keys.toml"
    file.write_text(
        keys.replace("<64 hexadecimal digits>", "0" * 64, 1).replace("<64 hexadecimal digits>", "1" * 64, 1)
    )
    table = load_keys(str(file), {})
    assert table is not None and [(key.name, key.owner, key.admin) for key in table.keys] == [
        ("ann", "search-team", False),
        ("operator", "operator", True),
    ]
    assert Prices(**tomllib.loads(prices)["prices"]).thinking == 1.0
