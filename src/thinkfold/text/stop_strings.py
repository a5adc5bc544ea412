"""Finds the first of several patterns in a stream, holding back only what may become one.

The automaton is that of Aho and Corasick (1975) and works on characters as on token ids.
It knows nothing about what a match means.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

Symbol = TypeVar("Symbol", bound=Hashable)


class Automaton(Generic[Symbol]):
    """Immutable after building. State 0 is the start; a step costs O(1) amortised.

    `depth[state]` is the length of the longest suffix read that begins a pattern;
    `match[state]` is the index of the longest pattern that ends here, or -1. `starts` are the
    symbols with which a pattern begins.
    """

    __slots__ = ("_fail", "_next", "depth", "match", "patterns", "starts")

    def __init__(self, patterns: Iterable[Sequence[Symbol]]) -> None:
        self.patterns = tuple(patterns)
        self._next: list[dict[Symbol, int]] = [{}]
        self._fail = [0]
        self.depth = [0]
        self.match = [-1]
        for index, pattern in enumerate(self.patterns):
            self._insert(index, pattern)
        self._link()
        self.starts = frozenset(self._next[0])

    def _insert(self, index: int, pattern: Sequence[Symbol]) -> None:
        state = 0
        for symbol in pattern:
            if symbol not in self._next[state]:
                self._next[state][symbol] = len(self._next)
                self._next.append({})
                self._fail.append(0)
                self.depth.append(self.depth[state] + 1)
                self.match.append(-1)
            state = self._next[state][symbol]
        if state and self.match[state] < 0:
            self.match[state] = index

    def _link(self) -> None:
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for symbol, child in self._next[state].items():
                self._fail[child] = self.step(self._fail[state], symbol)
                if self.match[child] < 0:
                    self.match[child] = self.match[self._fail[child]]
                queue.append(child)

    def step(self, state: int, symbol: Symbol) -> int:
        """The state after reading one more symbol."""
        while state and symbol not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(symbol, 0)


class StopStrings:
    """Matches stop strings over the text of one branch.

    The match that is complete first wins; of those complete at the same character, the
    longest. The result does not depend on how the text is cut into pushes.
    """

    __slots__ = ("_automaton", "_held", "_state", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._automaton: Automaton[str] = Automaton(self._stops)
        self._state = 0
        self._held = ""

    @property
    def held(self) -> str:
        """Text held back: a true prefix of a stop string."""
        return self._held

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that is safe to print, the stop string found or None).

        On a match the safe text ends where the stop string begins and the rest is dropped.
        """
        if not self._stops:
            return text, None
        automaton, state = self._automaton, self._state
        for position, char in enumerate(text):
            state = automaton.step(state, char)
            if automaton.match[state] >= 0:
                found = self._stops[automaton.match[state]]
                seen = self._held + text[: position + 1]
                self._state, self._held = 0, ""
                return seen[: len(seen) - len(found)], found
        seen = self._held + text
        safe = len(seen) - automaton.depth[state]
        self._state, self._held = state, seen[safe:]
        return seen[:safe], None

    def flush(self) -> str:
        """Release what is held: no stop string can be completed any more."""
        text, self._held, self._state = self._held, "", 0
        return text
