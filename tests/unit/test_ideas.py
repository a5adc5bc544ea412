"""docs/ideas.md: every idea has a state, and one that is here a command or a page that shows it, no list of options."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "ideas.md").read_text()
ROWS = [re.split(r"(?<!\\)\|", line)[1:-1] for line in PAGE.splitlines() if line.startswith("| ")]
IDEAS = [[cell.strip() for cell in row] for row in ROWS if row[1].strip() not in ("state", "---")]


def test_there_are_ideas() -> None:
    assert len(IDEAS) > 80 and all(len(row) == 4 for row in IDEAS)


@pytest.mark.parametrize("row", IDEAS, ids=lambda row: row[0][:40])
def test_an_idea_is_shown(row: list[str]) -> None:
    _, state, reason, shown = row
    assert state in ("here", "here, otherwise", "planned", "not")
    assert reason or state in ("here", "planned"), "where we differ there is a reason"
    assert "--help" not in shown
    if state.startswith("here"):
        assert re.search(r"`(thinkfold|pytest|make) [^`]+`|\]\(", shown), shown
