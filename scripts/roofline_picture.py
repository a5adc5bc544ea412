"""Draws docs/images/roofline.svg: attention kernels and decode steps of the 7B shape under what an H200 can do.

From the newest rows of `thinkfold bench kernels` and `bench decode`. Operations and bytes are those that the work needs
at least: a step's weights and KV once, two operations a weight and token, four a query, channel and entry. The slope is
the copy bandwidth of the rows' own runs, the ceiling the data sheet's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

from thinkfold.runner.shapes import SHAPES

matplotlib.use("svg")
ROOT = Path(__file__).parents[1]
RESULTS, OUT = ROOT / "benchmarks" / "results", ROOT / "docs" / "images" / "roofline.svg"
CEILING = 989.0  # bf16 TFLOP/s, dense
BITS = {"bf16": 16.0, "fp8": 8.0 + 16 / 128, "int4": 16 / 3}  # of a number with its scales, pages of 16
COLOURS = {"bf16": "#1d4ed8", "fp8": "#b45309", "int4": "#047857", "step": "#374151"}
INK = "#374151"


class Point(NamedTuple):
    """What a row came to: operations a byte, and TFLOP/s."""

    kind: str
    name: str
    intensity: float
    rate: float


def newest(bench: str, prefix: str, parts: int) -> dict[str, dict[str, Any]]:
    """Metrics of the newest row of each case of so many parts that begins so."""
    rows = map(json.loads, (RESULTS / f"{bench}.jsonl").read_text(encoding="utf-8").splitlines())
    return {
        row["case"]: row["metrics"]
        for row in rows
        if row["case"].startswith(prefix) and row["case"].count("/") == parts - 1
    }


def sizes(name: str) -> tuple[int, int]:
    """Rows and entries of `16x32k`."""
    batch, _, thousands = name.partition("x")
    return int(batch), 1024 * int(thousands.removesuffix("k"))


def sizes_of(shape: Mapping[str, Any]) -> tuple[int, int, int]:
    """Query heads, KV heads and channels of one."""
    heads = shape["num_attention_heads"]
    return heads, shape["num_key_value_heads"], shape["hidden_size"] // heads


def kernels(shape: Mapping[str, Any]) -> Iterator[Point]:
    heads, kv_heads, dim = sizes_of(shape)
    for case, metrics in newest("kernels", "decode/", 4).items():
        _, name, kind, page = case.split("/")
        if page != "page16":
            continue
        batch, entries = sizes(name)
        operations = 4 * heads * dim * batch * entries
        size = 2 * kv_heads * dim * batch * entries * BITS[kind] / 8
        yield Point(kind, name, operations / size, operations / metrics["time_ms"] / 1e9)


def steps(shape: Mapping[str, Any]) -> Iterator[Point]:
    heads, kv_heads, dim = sizes_of(shape)
    layers, hidden = shape["num_hidden_layers"], shape["hidden_size"]
    layer = hidden * (heads + 2 * kv_heads) * dim + heads * dim * hidden + 3 * hidden * shape["intermediate_size"]
    weights = layers * layer + hidden * shape["vocab_size"]
    for case, metrics in newest("decode", "7b/", 2).items():
        batch, entries = sizes(case.partition("/")[2])
        operations = 2 * weights * batch + 4 * heads * dim * layers * batch * entries
        size = metrics["floor_ms"] * metrics["copy_tb_per_s"] * 1e9
        yield Point("step", case.partition("/")[2], operations / size, operations / metrics["step_ms"] / 1e9)


def draw(points: list[Point], copy: float, out: Path) -> None:
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": 10, "svg.hashsalt": "thinkfold", "text.color": INK, "axes.edgecolor": INK})
    figure, axes = pyplot.subplots(figsize=(7.6, 4.2), layout="constrained")
    reach = [1.3, CEILING / copy, 400.0]
    axes.plot(reach, [min(CEILING, copy * x) for x in reach], color=INK, linewidth=1.2)
    axes.annotate(f"copy, {copy:.2f} TB/s", (40, 40 * copy), xytext=(-92, 2), textcoords="offset points")
    axes.annotate(f"{CEILING:.0f} TFLOP/s", (400, CEILING), xytext=(-72, 5), textcoords="offset points")
    labels = {
        "bf16": "attention, bf16",
        "fp8": "attention, fp8",
        "int4": "attention, int4 summaries",
        "step": "engine step",
    }
    for kind, label in labels.items():
        own = [point for point in points if point.kind == kind]
        axes.scatter(
            [p.intensity for p in own], [p.rate for p in own], color=COLOURS[kind], s=22, label=label, zorder=3
        )
        for point in own if kind == "step" else [p for p in own if p.name == "1x32k"]:
            place = (-14, -14) if point.name == "16x16k" else (6, -4)
            axes.annotate(
                point.name, point[2:], xytext=place, textcoords="offset points", color=COLOURS[kind], fontsize=8
            )
    axes.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="TFLOP/s")
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    out.parent.mkdir(exist_ok=True)
    figure.savefig(out, metadata={"Date": None})


def main() -> int:
    """Draw all rows."""
    shape = SHAPES["7b"]
    points = [*kernels(shape), *steps(shape)]
    copies = [metrics["copy_tb_per_s"] for metrics in newest("kernels", "decode/", 4).values()]
    draw(points, max(copies), OUT)
    print(f"{OUT.name}: {len(points)} points")
    return 0


if __name__ == "__main__":
    sys.exit(main())
