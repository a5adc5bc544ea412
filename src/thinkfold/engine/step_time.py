"""How long a step takes, learned while the engine runs. Plain Python, a few operations a step."""

from __future__ import annotations

from collections.abc import Sequence

MEMORY = 0.98  # of an observation's weight is left after the next one
RIDGE = 1e-6
ENOUGH = 4  # observations before anything is predicted
SURPRISE = 4.0  # times the usual time is the most that one step teaches: the first step of a shape compiles


class StepTime:
    """Seconds of a step as a + b * tokens + c * entries read: least squares, in which old steps fade.

    The recursive form of Ljung (System Identification, 1999), kept as normal equations of three unknowns.
    """

    def __init__(self) -> None:
        self._square = [[0.0] * 3 for _ in range(3)]
        self._right = [0.0] * 3
        self._count = 0
        self._mean = 0.0  # seconds of a recent step, whatever was in it

    def observe(self, tokens: int, entries: int, seconds: float) -> None:
        """A step of `tokens` rows over `entries` stored KV entries took `seconds`."""
        if self._count >= ENOUGH:
            seconds = min(seconds, SURPRISE * max(self._mean, self.predict(tokens, entries)))
        self._count += 1
        self._mean += (seconds - self._mean) * max(1.0 / self._count, 0.1)
        row = _features(tokens, entries)
        for i in range(3):
            self._right[i] = MEMORY * self._right[i] + row[i] * seconds
            for j in range(3):
                self._square[i][j] = MEMORY * self._square[i][j] + row[i] * row[j]

    def predict(self, tokens: int, entries: int) -> float:
        """Seconds of such a step; 0 while too little is known."""
        if self._count < ENOUGH:
            return 0.0
        weights = _solve(self._square, self._right)
        return max(0.0, sum(w * x for w, x in zip(weights, _features(tokens, entries), strict=True)))


def _features(tokens: int, entries: int) -> tuple[float, float, float]:
    """Of one size, so that the ridge means the same for each."""
    return 1.0, tokens / 100, entries / 100_000


def _solve(square: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """Weights by Gauss-Jordan elimination with pivots; a ridge keeps what never varied out of the way."""
    rows = [[value + RIDGE * (i == j) for j, value in enumerate(line)] + [right[i]] for i, line in enumerate(square)]
    for i in range(3):
        pivot = max(range(i, 3), key=lambda k: abs(rows[k][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        rows[i] = [value / rows[i][i] for value in rows[i]]
        for k in range(3):
            if k != i:
                factor = rows[k][i]
                rows[k] = [a - factor * b for a, b in zip(rows[k], rows[i], strict=True)]
    return [line[3] for line in rows]
