"""Draws docs/images/three_costs.svg and prints the table of docs/three-costs.md: what thinking costs, reckoned."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from thinkfold.fold.estimate import FoldShape, middle
from thinkfold.types import FOLD_PROFILES

OUT = Path(__file__).parents[1] / "docs" / "images" / "three_costs.svg"
PROFILE = FOLD_PROFILES["default"]
LENGTHS = (4_000, 8_000, 16_000, 32_000, 64_000)
RAW, FOLDED, INK, GRID = "#b45309", "#1d4ed8", "#374151", "#e5e7eb"
WIDTH, HEIGHT, MARGIN, GAP = 780, 320, 56, 70


@dataclass(frozen=True, slots=True)
class Card:
    """A model on a card: bytes of weights, of the KV pool and of one entry, and bytes read a second."""

    weights: float = 65.5e9
    pool: float = 10e9
    entry: float = 64 * 8 * (2 * 128 + 2 * 2)  # layers × KV heads × (K and V in fp8, two scales)
    bandwidth: float = 3.35e12
    prompt: int = 2_000


@dataclass(frozen=True, slots=True)
class Costs:
    """Of one answer among as many as the pool holds: mean entries, the batch, seconds, KV byte-seconds, answers/h."""

    entries: float
    batch: int
    seconds: float
    kv: float
    hourly: float


def reckon(card: Card, thinking: int, *, folds: bool) -> Costs:
    """The three costs, with a step as fast as memory can be read and ages spread evenly. Queue and prefill are 0."""
    entries = card.prompt + mean_thinking(thinking, folds=folds)
    batch = max(1, int(card.pool / card.entry / entries))
    step = (card.weights + batch * entries * card.entry) / card.bandwidth
    seconds = thinking * step
    return Costs(entries, batch, seconds, entries * card.entry * seconds, batch * 3600 / seconds)


def mean_thinking(thinking: int, *, folds: bool) -> float:
    """Entries of thinking held on average while `thinking` tokens are written."""
    if not folds:
        return thinking / 2
    shape = FoldShape(middle(PROFILE))
    points = range(0, thinking + 1, max(1, thinking // 1000))
    return sum(shape.entries(PROFILE, t) for t in points) / len(points)


def table() -> str:
    """Markdown rows of LENGTHS, raw / folded."""
    rows = [
        "| thinking tokens | mean entries | batch | one answer takes | KV of one answer | answers an hour |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for thinking in LENGTHS:
        raw, folded = (reckon(Card(), thinking, folds=folds) for folds in (False, True))
        cells = (
            f"{thinking:,}",
            f"{raw.entries:,.0f} / {folded.entries:,.0f}",
            f"{raw.batch} / {folded.batch}",
            f"{raw.seconds / 60:.1f} / {folded.seconds / 60:.1f} min",
            f"{raw.kv / 1e9:,.0f} / {folded.kv / 1e9:,.0f} GB·s",
            f"{raw.hourly:,.0f} / {folded.hourly:,.0f}",
        )
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


# --- the picture ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of logarithmic axes; `x` and `y` give places in the picture."""

    left: float
    title: str
    low: float
    high: float

    @property
    def width(self) -> float:
        return (WIDTH - 2 * MARGIN - GAP) / 2

    def x(self, tokens: float) -> float:
        return self.left + self.width * _share(tokens, LENGTHS[0], LENGTHS[-1])

    def y(self, value: float) -> float:
        return HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * _share(value, self.low, self.high)


def svg() -> str:
    """The whole picture."""
    kv = Panel(MARGIN, "KV held by one answer, GB·s", 10, 10_000)
    hourly = Panel(MARGIN + kv.width + GAP, "answers an hour on one card", 1, 10_000)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12" fill="{INK}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        *_panel(kv, lambda costs: costs.kv / 1e9),
        *_panel(hourly, lambda costs: costs.hourly),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _panel(panel: Panel, value: Callable[[Costs], float]) -> list[str]:
    parts = [f'<text x="{panel.left:.1f}" y="{MARGIN - 20}" font-weight="bold">{panel.title}</text>']
    for power in range(round(math.log10(panel.low)), round(math.log10(panel.high)) + 1):
        y = panel.y(10**power)
        parts.append(_line([(panel.left, y), (panel.left + panel.width, y)], GRID, 1))
        parts.append(f'<text x="{panel.left - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{10**power:,}</text>')
    for tokens in LENGTHS:
        place = f'x="{panel.x(tokens):.1f}" y="{HEIGHT - MARGIN + 18}"'
        parts.append(f'<text {place} text-anchor="middle">{tokens // 1000}k</text>')
    middle_x = panel.left + panel.width / 2
    parts.append(f'<text x="{middle_x:.1f}" y="{HEIGHT - 14}" text-anchor="middle">thinking tokens</text>')
    for name, color, folds in (("raw", RAW, False), ("folded", FOLDED, True)):
        points = [(t, value(reckon(Card(), t, folds=folds))) for t in range(LENGTHS[0], LENGTHS[-1] + 1, 1000)]
        parts.append(_line([(panel.x(t), panel.y(v)) for t, v in points], color, 2))
        tokens, at = points[len(points) // 2]
        anchor = "end" if points[-1][1] > at else "start"  # above the line, whichever way it goes
        place = f'x="{panel.x(tokens):.1f}" y="{panel.y(at) - 8:.1f}" text-anchor="{anchor}"'
        parts.append(f'<text {place} fill="{color}">{name}</text>')
    return parts


def _line(points: Sequence[tuple[float, float]], color: str, width: int) -> str:
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{places}" fill="none" stroke="{color}" stroke-width="{width}"/>'


def _share(value: float, low: float, high: float) -> float:
    return math.log(value / low) / math.log(high / low)


def main() -> int:
    """Draw, and print the table."""
    OUT.write_text(svg())
    print(table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
