"""The reference says what the code says."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import reference

PAGES = reference.pages()


@pytest.mark.parametrize("name", PAGES)
def test_pages_are_up_to_date(name: str) -> None:
    written = (reference.OUT / name).read_text()
    assert written == PAGES[name], f"docs/reference/{name} is old: run `make reference`"


def test_nothing_else_lies_there() -> None:
    assert {path.name for path in reference.OUT.iterdir()} == set(PAGES)


def test_every_route_says_what_it_is() -> None:
    silent = re.findall(r"^\| `(?:GET|POST|DELETE)` \| `([^`]+)` \|  \|$", PAGES["api.md"], re.MULTILINE)
    assert not silent, "give the route's function a docstring"


def test_every_setting_has_a_meaning() -> None:
    bare = re.findall(r"^\| `(\w+)` \|.*\| \.? ?\|$", PAGES["config.md"], re.MULTILINE)
    assert not bare


@pytest.mark.parametrize("name", PAGES)
def test_anchors_lead_to_headings(name: str) -> None:
    headings = re.findall(r"^#+ (.+)$", PAGES[name], re.MULTILINE)
    anchors = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
    assert len(set(anchors)) == len(anchors)
    assert set(re.findall(r"\]\(#([^)]+)\)", PAGES[name])) <= set(anchors)
