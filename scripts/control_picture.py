"""Draws docs/images/votes.svg and stops.svg: accuracy over tokens, from rows of `thinkfold bench control`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("svg")
ROOT = Path(__file__).parents[1]
ROWS, IMAGES = ROOT / "benchmarks" / "results" / "control.jsonl", ROOT / "docs" / "images"
PLAIN, OURS, OTHERS, INK = "#6b7280", "#1d4ed8", "#b45309", "#374151"
Label = tuple[str, str, tuple[int, int]]  # what a point is called, its colour, and where the name stands beside it


class Picture(NamedTuple):
    """The newest rows `replay/kind/NAME/suite`; `line` joins the named points."""

    kind: str
    suite: str
    labels: Mapping[str, Label]
    line: tuple[str, ...]
    xlabel: str
    xlim: tuple[float, float]


PICTURES = {
    "votes": Picture(
        "vote",
        "hard/report",
        {
            "full": ("16 samples", PLAIN, (-34, -17)),
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
        },
        ("maj@4", "maj@8", "full"),
        "tokens, as a share of 16 samples' tokens",
        (0.15, 1.08),
    ),
    "stops": Picture(
        "stop",
        "long/report",
        {
            "full": ("no control", PLAIN, (-10, 9)),
            "oracle": ("oracle", PLAIN, (-36, 9)),
            "conservative": ("conservative", OURS, (-24, -16)),
            "balanced": ("balanced", OURS, (-12, 9)),
            "aggressive": ("aggressive", OURS, (-58, -16)),
            "entropy_0.1": ("entropy 0.1 alone", OTHERS, (-36, -16)),
            "confidence_0.95": ("confidence 0.95 alone", OTHERS, (8, -5)),
            "consistency_3_4": ("consistency 3/4 alone", OTHERS, (9, -4)),
        },
        ("oracle", "full"),
        "thinking tokens with looks, as a share of no control's",
        (0.66, 1.06),
    ),
}


def points(rows: Path, picture: Picture) -> dict[str, tuple[float, float]]:
    """Share of the reference's tokens and accuracy, by name; the reference is `full`."""
    found: dict[str, tuple[float, float]] = {}
    for line in rows.read_text(encoding="utf-8").splitlines():
        row: dict[str, Any] = json.loads(line)
        kind, _, rest = row["case"].removeprefix("replay/").partition("/")
        name, _, where = rest.partition("/")
        metrics = row["metrics"]
        if kind != picture.kind or where != picture.suite or name not in picture.labels:
            continue
        found[name] = metrics["tokens_ratio"], metrics["accuracy"]
        found["full"] = 1.0, metrics["accuracy_ref"]
        if "oracle_tokens_ratio" in metrics:
            found["oracle"] = metrics["oracle_tokens_ratio"], metrics["accuracy_ref"]
    if not found:
        raise SystemExit(f"{rows.name} has no {picture.kind} on {picture.suite}")
    return found


def draw(found: dict[str, tuple[float, float]], picture: Picture, out: Path) -> None:
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": 10, "svg.hashsalt": "thinkfold", "text.color": INK, "axes.edgecolor": INK})
    figure, axes = pyplot.subplots(figsize=(7.6, 3.8), layout="constrained")
    line = [found[name] for name in picture.line if name in found]
    axes.plot(*zip(*line, strict=True), color=PLAIN, linewidth=1.0, linestyle="--", zorder=0)
    for name, (label, colour, place) in picture.labels.items():
        if name in found:
            axes.scatter(*found[name], color=colour, s=26)
            axes.annotate(label, found[name], xytext=place, textcoords="offset points", color=colour)
    axes.set(xlabel=picture.xlabel, ylabel="accuracy", xlim=picture.xlim)
    axes.margins(y=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    out.parent.mkdir(exist_ok=True)
    figure.savefig(out, metadata={"Date": None})


def main() -> int:
    """Draw all pictures."""
    for name, picture in PICTURES.items():
        found = points(ROWS, picture)
        draw(found, picture, IMAGES / f"{name}.svg")
        print(f"{name}.svg: {len(found)} points")
    return 0


if __name__ == "__main__":
    sys.exit(main())
