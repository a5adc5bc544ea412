"""Draws docs/images/accuracy.svg: right answers over peak entries, from rows of `thinkfold bench accuracy`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
ROOT = Path(__file__).parents[1]
ROWS, OUT = ROOT / "benchmarks" / "results" / "accuracy.jsonl", ROOT / "docs" / "images" / "accuracy.svg"
FULL, OURS, OTHERS, INK = "#6b7280", "#1d4ed8", "#b45309", "#374151"
LABELS = {  # colour, and where the name stands beside its point
    "off": (FULL, (-26, -17)),
    "eager": (OURS, (9, -4)),
    "eager/rkv": (OTHERS, (12, 14)),
    "eager/snap": (OTHERS, (12, 2)),
    "eager/streaming": (OTHERS, (12, -10)),
    "eager/attention_matching": (OTHERS, (12, -22)),
}


def newest(rows: Path, suite: str) -> dict[str, dict[str, float]]:
    """Metrics of each arm of `suite`, those of its last row."""
    found: dict[str, dict[str, float]] = {}
    for line in rows.read_text(encoding="utf-8").splitlines():
        row: dict[str, Any] = json.loads(line)
        where, _, arm = row["case"].partition("/")
        if where == suite and arm in LABELS:
            found[arm] = row["metrics"]
    if "off" not in found:
        raise SystemExit(f"{rows.name} has no full KV of {suite}")
    return found


def draw(found: dict[str, dict[str, float]], out: Path) -> None:
    """Accuracy with its 95 % interval over the mean peak, as a share of full KV's."""
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": 10, "svg.hashsalt": "thinkfold", "text.color": INK, "axes.edgecolor": INK})
    figure, axes = pyplot.subplots(figsize=(7.6, 3.6), layout="constrained")
    for arm, metrics in found.items():
        colour, place = LABELS[arm]
        at = metrics.get("kv_peak_ratio", 1.0), metrics["accuracy"]
        low, high = metrics["accuracy"] - metrics["ci95_low"], metrics["ci95_high"] - metrics["accuracy"]
        axes.errorbar(*at, yerr=[[low], [high]], color=colour, marker="o", markersize=5, linewidth=1.0)
        name = {"off": "full KV", "eager": "thinkfold's own"}.get(arm, arm.removeprefix("eager/"))
        axes.annotate(name, at, xytext=place, textcoords="offset points", color=colour)
    axes.set(xlabel="peak entries, as a share of full KV's", ylabel="right answers", xlim=(0, 1.06), ylim=(0.4, 1.0))
    axes.spines[["top", "right"]].set_visible(False)
    out.parent.mkdir(exist_ok=True)
    figure.savefig(out, metadata={"Date": None})


def main() -> int:
    """Draw the picture of `long`."""
    found = newest(ROWS, "long")
    draw(found, OUT)
    print(f"{OUT.name}: {len(found)} arms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
