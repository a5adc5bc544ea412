"""The picture of accuracy over peak entries, from rows as `thinkfold bench accuracy` writes them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import accuracy_picture

FULL = {"accuracy": 0.9, "ci95_low": 0.88, "ci95_high": 0.92}


def write(folder: Path, *rows: tuple[str, dict[str, float]]) -> Path:
    file = folder / "accuracy.jsonl"
    file.write_text("\n".join(json.dumps({"case": case, "metrics": metrics}) for case, metrics in rows))
    return file


def test_the_newest_row_of_the_suites_arms_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folded = FULL | {"kv_peak_ratio": 0.3}
    rows = write(
        tmp_path,
        ("long/off", FULL),
        ("long/eager", folded | {"accuracy": 0.7}),
        ("long/eager", folded),
        ("long/off#2", FULL),
        ("hard/eager/snap", folded),
    )
    found = accuracy_picture.newest(rows, "long")
    assert found == {"off": FULL, "eager": folded}
    monkeypatch.setitem(accuracy_picture.matplotlib.rcParams, "svg.fonttype", "none")
    accuracy_picture.draw(found, tmp_path / "accuracy.svg")
    texts = "|".join(ElementTree.parse(tmp_path / "accuracy.svg").getroot().itertext())
    assert "full KV" in texts and "thinkfold's own" in texts and "snap" not in texts


def test_without_full_kv_there_is_nothing_to_compare_with(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no full KV of long"):
        accuracy_picture.newest(write(tmp_path, ("long/eager", FULL)), "long")
