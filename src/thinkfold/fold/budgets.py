"""How many entries each head gets in a fold: a model's calibrated table, or the same number for all. No torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

from thinkfold.errors import ParameterError

BUDGETS_FILE = "fold_budgets.json"  # beside the model
FIELD = "fold_budgets"  # what errors name
OWN = "conclusion_attention"  # the selector that these tables are counted for


@dataclass(frozen=True, slots=True)
class FoldBudgets:
    """The budget table of one model; a head is numbered `layer * kv_heads + kv_head`.

    `weights` say how the entries of a fold are shared out, one number a head, mean 1; empty without a table.
    `conclusion` entries go to every head before that, unless they would take more than half of the budget from heads
    that may need all of it. `mass` says how many of a head's entries are pooled ones that stand for all it lost; empty
    means none. `page_blocks`, if not 0, are the blocks of `page_size` entries that a page holds where summaries are
    kept in fewer bits: then a fold keeps as many entries as fill the bytes of those it was asked for.
    """

    num_layers: int
    num_kv_heads: int
    weights: tuple[float, ...] = ()
    conclusion: int = 0
    mass: tuple[int, ...] = ()
    page_blocks: int = 0

    @classmethod
    def load(cls, path: Path | None, num_layers: int, num_kv_heads: int) -> FoldBudgets:
        """The table in a file as `write` makes it; None gives every head the same.

        Raises ParameterError for a file that cannot be read, is no table, or is that of a model of another shape.
        """
        if path is None:
            return cls(num_layers, num_kv_heads)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ParameterError(FIELD, f"cannot read {path.name}: {error}") from error
        weights, conclusion, mass = _table(found, path.name)
        if (len(weights), {len(layer) for layer in weights}) != (num_layers, {num_kv_heads}):
            shape = f"{len(weights)} layers of {' or '.join(str(len(layer)) for layer in weights[:1])} KV heads"
            raise ParameterError(FIELD, f"{path.name} is for {shape}, the model has {num_layers} of {num_kv_heads}")
        return cls(num_layers, num_kv_heads, _flat(weights), conclusion, _flat(mass))

    def repeated(self, times: int) -> FoldBudgets:
        """The table of a model whose KV heads are held `times` each, one behind the other."""
        weights, mass = ([number for number in table for _ in range(times)] for table in (self.weights, self.mass))
        return replace(self, num_kv_heads=self.num_kv_heads * times, weights=tuple(weights), mass=tuple(mass))

    @property
    def calibrated(self) -> bool:
        """False where every head gets the same for want of a table."""
        return bool(self.weights)

    def options(self, selector: str) -> dict[str, Any]:
        """What the table tells a selector beside the numbers of entries, as options of its class."""
        return {"mass": self.mass} if selector == OWN and self.mass else {}

    def counts(self, entries: int, tokens: int, page_size: int) -> list[int]:
        """Entries of each head in a fold of `tokens` tokens to the memory of `entries` a head, never more than that.

        By the table in whole blocks of `page_size` entries, and in no head more of them than `tokens` fill; without one
        as nearly the same in every head as those blocks allow, and exactly `min(entries, tokens)` in head blocks.
        """
        heads = self.num_layers * self.num_kv_heads
        if not self.calibrated and not self.page_blocks:
            return [min(entries, tokens)] * heads
        cap = tokens // page_size
        blocks = min(entries * (self.page_blocks or heads) // page_size, cap * heads)
        first = min(-(-self.conclusion // page_size), cap)
        if blocks < 2 * first * heads:
            first = 0
        shared = apportion(self.weights or [1.0] * heads, blocks - first * heads, cap - first)
        return [(first + given) * page_size for given in shared]


def apportion(weights: Sequence[float], blocks: int, cap: int) -> list[int]:
    """`blocks` whole blocks in proportion to `weights`, at most `cap` to each, by largest remainder.

    What the full ones cannot take goes to the others in proportion. `blocks` must fit.
    """
    wanted, left, open_heads = [0.0] * len(weights), float(blocks), list(range(len(weights)))
    while open_heads:
        total = sum(weights[i] for i in open_heads)
        for i in open_heads:
            wanted[i] = left * weights[i] / total if total else left / len(open_heads)
        full = [i for i in open_heads if wanted[i] >= cap]
        if not full:
            break
        for i in full:
            wanted[i] = float(cap)
        left -= cap * len(full)
        open_heads = [i for i in open_heads if wanted[i] < cap]
    given = [int(w + 1e-9) for w in wanted]
    rest = blocks - sum(given)
    for i in sorted(open_heads, key=lambda i: (given[i] - wanted[i], i))[:rest]:
        given[i] += 1
    return given


def blend(needs: Sequence[Sequence[float]], others: Sequence[Sequence[float]], share: float) -> list[list[float]]:
    """Two tables `[layers][kv_heads]` as one of mean 1: `needs`, and `share` of it by `others`.

    Each is scaled to mean 1 before that, so that their units do not matter; where one of them is all zeros, the other
    stands alone. What `needs` calls nothing keeps a little, in proportion to `others`, and comes first when a head
    that needs much is full.
    """
    parts = [(1.0 - share, needs), (share, others)]
    alive = [(weight, table, _mean(table)) for weight, table in parts if _mean(table) > 0]
    total = sum(weight for weight, _, _ in alive)
    return [
        [sum(weight / total * table[layer][head] / mean for weight, table, mean in alive) for head in range(len(row))]
        for layer, row in enumerate(needs)
    ]


def write(
    path: Path,
    weights: Sequence[Sequence[float]],
    conclusion: int,
    mass: Sequence[Sequence[int]],
    origin: dict[str, Any],
) -> None:
    """Write a table `[layers][kv_heads]`, scaled to mean 1, and `mass` of the same shape or empty.

    `origin` says of which model and from what it was counted. Raises ParameterError for numbers that are no table.
    """
    scale = sum(map(len, weights)) / (sum(map(sum, weights)) or 1.0)
    layers = [[round(w * scale, 3) for w in layer] for layer in weights]
    _table({"conclusion": conclusion, "weights": layers, "mass": mass}, path.name)
    head = json.dumps({**origin, "conclusion": conclusion}, indent=1)[:-2]
    tables = {"mass": mass, "weights": layers} if mass else {"weights": layers}
    body = [f' "{name}": [\n  ' + ",\n  ".join(map(json.dumps, table)) + "\n ]" for name, table in tables.items()]
    path.write_text(",\n".join([head, *body]) + "\n}\n", encoding="utf-8")


def _mean(table: Sequence[Sequence[float]]) -> float:
    return sum(map(sum, table)) / sum(map(len, table))


def _flat(table: Sequence[Sequence[float]]) -> tuple[Any, ...]:
    return tuple(number for layer in table for number in layer)


def _table(found: Any, name: str) -> tuple[list[list[float]], int, list[list[int]]]:
    """Weights, conclusion and mass of what a file holds; mass may be absent."""
    found = found if isinstance(found, dict) else {}
    weights, conclusion, mass = found.get("weights"), found.get("conclusion"), found.get("mass", [])
    if not _layers(weights):
        raise ParameterError(FIELD, f"{name} holds no weights by layer and KV head")
    numbers = _flat(weights)
    if not all(type(w) in (int, float) and isfinite(w) and w >= 0 for w in numbers) or not sum(numbers):
        raise ParameterError(FIELD, f"{name}: weights must be finite, not negative and not all 0")
    if type(conclusion) is not int or conclusion < 0:
        raise ParameterError(FIELD, f"{name}: conclusion must be a number of entries, got {conclusion!r}")
    same = mass == [] or (_layers(mass) and list(map(len, mass)) == list(map(len, weights)))
    if not same or not all(type(m) is int and m >= 0 for m in _flat(mass)):
        raise ParameterError(FIELD, f"{name}: mass must hold one number of entries for each weight")
    return weights, conclusion, mass


def _layers(table: Any) -> bool:
    return isinstance(table, list) and bool(table) and all(isinstance(layer, list) and layer for layer in table)
