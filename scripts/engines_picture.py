"""Draws docs/images/engines.svg: time, memory and quality of each engine, from rows of `thinkfold bench engines`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
ROOT = Path(__file__).parents[1]
ROWS, OUT = ROOT / "benchmarks" / "results" / "engines.jsonl", ROOT / "docs" / "images" / "engines.svg"
OURS, OTHERS, INK = "#1d4ed8", "#b45309", "#374151"
WORKLOAD = "maths"  # the one whose answers are judged


def newest(rows: Path) -> dict[str, dict[str, Any]]:
    """The newest row with numbers of each engine's `WORKLOAD`, by engine."""
    found: dict[str, dict[str, Any]] = {}
    for line in rows.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        engine, _, workload = row["case"].partition("/")
        if workload == WORKLOAD and row["metrics"]:
            found[engine] = row
    if not found:
        raise SystemExit(f"{rows.name} has no numbers of {WORKLOAD}")
    return found


def draw(found: dict[str, dict[str, Any]], out: Path) -> None:
    """Time to the right, quality upwards, the peak of KV memory as the area; a ring where the engine tells none."""
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": 10, "svg.hashsalt": "thinkfold", "text.color": INK, "axes.edgecolor": INK})
    figure, axes = pyplot.subplots(figsize=(7.6, 3.8), layout="constrained")
    for engine, row in found.items():
        numbers, colour = row["metrics"], OURS if engine.startswith("thinkfold") else OTHERS
        place, use = (numbers["p50_s"], 100 * numbers["accuracy"]), numbers.get("kv_use_peak")
        label = f"{engine}\nKV not told" if use is None else f"{engine}\n{use:.0%} of the KV pool"
        axes.scatter(
            *place, s=40 + 2000 * (use or 0), color="none" if use is None else colour, edgecolor=colour, alpha=0.6
        )
        axes.annotate(label, place, xytext=(0, 22), textcoords="offset points", color=colour, ha="center", fontsize=9)
    axes.set(xlabel="seconds an answer (median)", ylabel="right answers, %")
    axes.set_xlim(left=0)
    axes.margins(x=0.18, y=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    out.parent.mkdir(exist_ok=True)
    figure.savefig(out, metadata={"Date": None})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    draw(newest(args.rows), args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
