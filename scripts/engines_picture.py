"""Draws docs/images/engines.svg from the newest rows of `thinkfold bench engines`, and prints their table.

Time, memory and right answers of each engine, and of thinkfold's ways to spend them, on the same problems of `hard`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

from thinkfold.pebble import pebble_path

matplotlib.use("svg")
ROOT = Path(__file__).parents[1]
ROWS, OUT = ROOT / "benchmarks" / "results" / "engines.jsonl", ROOT / "docs" / "images" / "engines.svg"
SUITE = "hard"  # where answers are right and wrong
NAMES = {
    "thinkfold": "thinkfold",
    "thinkfold-eager": "thinkfold, eager folds",
    "thinkfold-stop": "thinkfold, balanced stops",
    "thinkfold-vote": "thinkfold, vote of up to 8",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "llama.cpp": "llama.cpp",
    "transformers": "transformers",
}
OURS, OTHERS, INK = "#1d4ed8", "#b45309", "#374151"
Row = dict[str, Any]
COLUMNS = {"p50_s": ".2f", "p99_s": ".2f", "ttft_s": ".2f", "output_tokens_per_s": ".0f", "kv_session_bytes": ".2f"}
COLUMNS |= {"prefill_reuse": ".3f", "accuracy": ".3f"}


class Panel(NamedTuple):
    """One number of a row, divided by `unit`, between two others where it is not certain."""

    metric: str
    title: str
    unit: float
    shown: str
    bounds: tuple[str, str] | None = None


PANELS = (
    Panel("p50_s", "seconds an answer (median)", 1.0, "{:.1f}"),
    Panel("kv_session_bytes", "MB of KV a session, at most", 1e6, "{:.1f}"),
    Panel("accuracy", "right answers, %", 0.01, "{:.0f}", ("ci95_low", "ci95_high")),
)


def newest(rows: Path) -> dict[tuple[str, str, str], Row]:
    """The newest row of each model, workload and engine; of Pebble's maths only those of `SUITE`."""
    found: dict[tuple[str, str, str], Row] = {}
    for row in map(json.loads, rows.read_text(encoding="utf-8").splitlines()):
        engine, _, workload = row["case"].partition("/")
        versions = row["versions"]
        if workload != "maths" or versions.get("suite") == SUITE:
            found[versions["model"], workload, engine] = row
    return found


def table(found: Mapping[tuple[str, str, str], Row]) -> str:
    """All of them in Markdown, KV in MB."""
    lines = ["| model | | " + " | ".join(COLUMNS) + " |", "| --- | --- |" + " --- |" * len(COLUMNS)]
    for (model, workload, engine), row in sorted(found.items()):
        numbers = dict(row["metrics"])
        if "kv_session_bytes" in numbers:
            numbers["kv_session_bytes"] /= 1e6
        cells = [format(numbers[name], how) if name in numbers else "" for name, how in COLUMNS.items()]
        cells = cells if numbers else [row["versions"]["reason"], *cells[1:]]
        lines.append(f"| {model} | `{engine}/{workload}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(found: Mapping[str, Mapping[str, float]], out: Path) -> None:
    """A line for each engine, a panel for each number; what an engine does not tell is said so."""
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": 10, "svg.hashsalt": "thinkfold", "text.color": INK, "axes.edgecolor": INK})
    figure, panels = pyplot.subplots(
        1, len(PANELS), sharey=True, figsize=(9.6, 1.0 + 0.36 * len(found)), layout="constrained"
    )
    for axes, panel in zip(panels, PANELS, strict=True):
        _fill(axes, panel, found)
    panels[0].set_yticks(range(len(found)), [NAMES[engine] for engine in found])
    panels[0].invert_yaxis()
    out.parent.mkdir(exist_ok=True)
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)


def _fill(axes: Any, panel: Panel, found: Mapping[str, Mapping[str, float]]) -> None:
    ends = [0.0]
    for line, (engine, numbers) in enumerate(found.items()):
        colour = OURS if engine.startswith("thinkfold") else OTHERS
        end, text = 0.0, "not told"
        if panel.metric in numbers:
            value = numbers[panel.metric] / panel.unit
            end, text = value, panel.shown.format(value)
            axes.hlines(line, 0.0, value, color=colour, linewidth=1.0, alpha=0.35)
            axes.scatter(value, line, color=colour, s=30, zorder=3)
            if panel.bounds is not None:
                low, end = (numbers[name] / panel.unit for name in panel.bounds)
                axes.hlines(line, low, end, color=colour, linewidth=2.2)
        axes.annotate(text, (end, line), xytext=(7, 0), textcoords="offset points", color=colour, va="center")
        ends.append(end)
    axes.set(title=panel.title, xlim=(0.0, 1.25 * max(ends) or 1.0))
    axes.title.set_fontsize(10)
    axes.margins(y=0.08)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> int:
    """Draw, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    found = newest(args.rows)
    print(table(found))
    drawn = {engine: found.get((pebble_path().name, "maths", engine), {}).get("metrics") for engine in NAMES}
    drawn = {engine: metrics for engine, metrics in drawn.items() if metrics}
    if not drawn:
        raise SystemExit(f"{args.rows.name} has no numbers of maths on {SUITE}")
    draw(drawn, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
