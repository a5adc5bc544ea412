"""How alike two texts are without a model, what forbids joining them, and clustering by likeness. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

MAX_CHARS = 2_000

_NUMBERS = re.compile(r"\d+(?:[.,]\d+)*")
_NEGATIONS = re.compile(r"\b(?:not?|never|none|neither|nor|cannot|without|false|incorrect|impossible|\w+n't)\b")


def edit_ratio(a: str, b: str) -> float:
    """Twice the longest common subsequence over both lengths, 0 to 1; symmetric.

    Bit-parallel (Hyyrö, Australasian Workshop on Combinatorial Algorithms, 2004).
    """
    a, b = a[:MAX_CHARS], b[:MAX_CHARS]
    if not a or not b:
        return float(a == b)
    positions: dict[str, int] = {}
    for index, sign in enumerate(a):
        positions[sign] = positions.get(sign, 0) | 1 << index
    mask = (1 << len(a)) - 1
    row = mask
    for sign in b:
        met = row & positions.get(sign, 0)
        row = ((row + met) | (row - met)) & mask
    return 2 * (len(a) - row.bit_count()) / (len(a) + len(b))


def may_join(a: str, b: str) -> bool:
    """False where two texts hold different numbers or negate differently: likeness says nothing then."""
    return _marks(a) == _marks(b)


def cluster(size: int, likeness: Callable[[int, int], float], threshold: float) -> list[list[int]]:
    """Complete-link clusters: every pair of a cluster is at least `threshold` alike.

    The pair of clusters whose least alike members are most alike is joined first; between equals,
    the earlier ones: give items in an order that does not depend on who came first.
    """
    groups = [[index] for index in range(size)]
    links = {(i, j): likeness(i, j) for i in range(size) for j in range(i + 1, size)}

    def link(one: Sequence[int], other: Sequence[int]) -> float:
        return min(links[min(i, j), max(i, j)] for i in one for j in other)

    while len(groups) > 1:
        pairs = [(i, j) for i in range(len(groups)) for j in range(i + 1, len(groups))]
        best = max(pairs, key=lambda pair: link(groups[pair[0]], groups[pair[1]]))
        if link(groups[best[0]], groups[best[1]]) < threshold:
            break
        groups[best[0]] += groups.pop(best[1])
    return groups


def medoid(members: Sequence[int], likeness: Callable[[int, int], float]) -> int:
    """The member that is most like all others; the first of equals."""
    return max(members, key=lambda i: sum(likeness(i, j) for j in members if j != i))


def _marks(text: str) -> tuple[list[str], int]:
    low = text.casefold()
    return sorted(_NUMBERS.findall(low)), len(_NEGATIONS.findall(low))
