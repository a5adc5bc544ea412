"""The page of the three costs shows what its script reckons."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import cost_picture
from cost_picture import Card, reckon

PAGE = Path(__file__).parents[2] / "docs" / "three-costs.md"


def test_table_and_picture_are_up_to_date() -> None:
    assert cost_picture.table() in PAGE.read_text()
    assert cost_picture.OUT.read_text() == cost_picture.svg(), "run scripts/cost_picture.py"
    ElementTree.fromstring(cost_picture.svg())


def test_the_worked_example() -> None:
    raw, folded = reckon(Card(), 32_000, folds=False), reckon(Card(), 32_000, folds=True)
    assert (raw.entries, raw.batch, round(raw.seconds / 60), round(raw.hourly)) == (18_000, 4, 12, 20)
    assert round(Card().pool / Card().entry, -1) == 75_120
    assert raw.batch * raw.entries * Card().entry / 1e9 == pytest.approx(9.6, abs=0.05)
    assert raw.seconds / 32_000 == pytest.approx(22.4e-3, abs=5e-5)
    assert raw.entries * Card().entry / 1e9 == pytest.approx(2.4, abs=0.05)
    assert (round(folded.entries, -1), folded.batch, round(folded.hourly)) == (4_340, 17, 85)


def test_raw_kv_grows_with_the_square_of_thinking() -> None:
    longer = [reckon(Card(prompt=0), n, folds=False) for n in (16_000, 32_000)]
    entries = [costs.kv / costs.seconds * length for costs, length in zip(longer, (16_000, 32_000), strict=True)]
    assert entries[1] / entries[0] == pytest.approx(4.0)
