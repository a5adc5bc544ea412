"""Draws docs/images/votes.svg: accuracy of votes over their tokens, from rows of `thinkfold bench control`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
ROOT = Path(__file__).parents[1]
ROWS, OUT = ROOT / "benchmarks" / "results" / "control.jsonl", ROOT / "docs" / "images" / "votes.svg"
PLAIN, OURS, OTHERS, INK = "#6b7280", "#1d4ed8", "#b45309", "#374151"
PLACES = {  # what a row's case is called, and where its name stands beside the point
    "maj@4": ("4 samples", PLAIN, (8, -4)),
    "maj@8": ("8 samples", PLAIN, (10, -5)),
    "waves_16": ("waves", OURS, (-10, -16)),
    "waves_weighted_16": ("waves, weighted", OURS, (-40, 8)),
    "exact_16": ("exact", OURS, (8, -5)),
    "all_16": ("all at once", OURS, (-24, 9)),
    "short_8": ("short, 3 of 8", OURS, (-70, 8)),
    "one_by_one_16": ("one by one", OTHERS, (6, -15)),
    "deepconf_high_16": ("DeepConf 90 %", OTHERS, (8, -2)),
    "deepconf_low_16": ("DeepConf 10 %", OTHERS, (8, 2)),
}


def points(rows: Path, suite: str) -> dict[str, tuple[float, float]]:
    """Share of the reference's tokens and accuracy, by case; the newest row of each counts. The reference is `full`."""
    found: dict[str, tuple[float, float]] = {}
    for line in rows.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        kind, _, rest = row["case"].removeprefix("replay/").partition("/")
        name, _, where = rest.partition("/")
        metrics = row["metrics"]
        if kind == "vote" and where == suite and name in PLACES:
            found[name] = metrics["tokens_ratio"], metrics["accuracy"]
            found["full"] = 1.0, metrics["accuracy_ref"]
    if "full" not in found:
        raise SystemExit(f"{rows.name} has no votes on {suite}")
    return found


def draw(found: dict[str, tuple[float, float]], out: Path) -> None:
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": 10, "svg.hashsalt": "thinkfold", "text.color": INK, "axes.edgecolor": INK})
    figure, axes = pyplot.subplots(figsize=(7.6, 3.8), layout="constrained")
    plain = [found[name] for name in ("maj@4", "maj@8", "full") if name in found]
    axes.plot(*zip(*plain, strict=True), color=PLAIN, linewidth=1.0, linestyle="--", zorder=0)
    for name, (label, colour, place) in {**PLACES, "full": ("16 samples", PLAIN, (-34, -17))}.items():
        if name in found:
            axes.scatter(*found[name], color=colour, s=26)
            axes.annotate(label, found[name], xytext=place, textcoords="offset points", color=colour)
    axes.set(xlabel="tokens, as a share of 16 samples' tokens", ylabel="accuracy", xlim=(0.15, 1.08))
    axes.margins(y=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    out.parent.mkdir(exist_ok=True)
    figure.savefig(out, metadata={"Date": None})


def main() -> int:
    """Draw the newest rows of one suite."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", default="hard/report", help="as the rows' cases end")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    found = points(ROWS, args.suite)
    draw(found, args.out)
    print(f"{args.out.name}: {len(found)} points")
    return 0


if __name__ == "__main__":
    sys.exit(main())
