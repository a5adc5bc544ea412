"""What a family's markers do, as tables for the parsers. Knows no family and no tokenizer."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Generic, NamedTuple, TypeVar

from thinkfold.text.stop_strings import Automaton
from thinkfold.types import Phase

Symbol = TypeVar("Symbol", bound=Hashable)


class Piece(NamedTuple):
    """Printable text of one phase, markers removed."""

    phase: Phase
    text: str


class Action(Enum):
    """What a complete marker does."""

    OPEN = auto()  # thinking begins
    CLOSE = auto()  # thinking ends, the marker is dropped
    YIELD = auto()  # thinking ends, the marker is the answer's first text
    SWALLOW = auto()  # nothing changes, the marker is dropped


class Table(Generic[Symbol]):
    """The patterns that count in one state of a parser."""

    __slots__ = ("actions", "automaton", "lengths")

    def __init__(self, *groups: tuple[Action, Sequence[Sequence[Symbol]]]) -> None:
        pairs = [(action, pattern) for action, patterns in groups for pattern in patterns]
        self.automaton: Automaton[Symbol] = Automaton([pattern for _, pattern in pairs])
        self.actions = tuple(action for action, _ in pairs)
        self.lengths = tuple(len(pattern) for _, pattern in pairs)


@dataclass(frozen=True, slots=True)
class MarkerSet(Generic[Symbol]):
    """Markers of one kind: token id sequences or strings.

    `implicit_ends` end thinking and belong to the answer (a tool call). `openers` may follow
    an end and are dropped; `closers` are dropped anywhere in the answer.
    """

    starts: tuple[Sequence[Symbol], ...] = ()
    ends: tuple[Sequence[Symbol], ...] = ()
    implicit_ends: tuple[Sequence[Symbol], ...] = ()
    openers: tuple[Sequence[Symbol], ...] = ()
    closers: tuple[Sequence[Symbol], ...] = ()


class ParserTables(Generic[Symbol]):
    """`head` holds only until the phase has printed something, `body` afterwards."""

    __slots__ = ("body", "head")

    def __init__(self, head: dict[Phase, Table[Symbol]], body: dict[Phase, Table[Symbol]]) -> None:
        self.head = head
        self.body = body

    def at(self, phase: Phase, head: bool) -> Table[Symbol]:
        return (self.head if head else self.body)[phase]


def token_tables(markers: MarkerSet[int]) -> ParserTables[int]:
    """Marker tokens act wherever they stand: a second end is dropped, a start re-opens."""
    thinking = _thinking_table(markers, with_starts=True)
    answer = Table((Action.OPEN, markers.starts), (Action.SWALLOW, (*markers.ends, *markers.openers, *markers.closers)))
    tables = {Phase.THINKING: thinking, Phase.ANSWER: answer}
    return ParserTables(tables, tables)


def text_tables(markers: MarkerSet[str]) -> ParserTables[str]:
    """Markers in ordinary text act at the head of a phase; in mid-answer they are text."""
    head = {
        Phase.THINKING: _thinking_table(markers, with_starts=True),
        Phase.ANSWER: Table(
            (Action.OPEN, markers.starts), (Action.SWALLOW, (*markers.ends, *markers.openers, *markers.closers))
        ),
    }
    body = {
        Phase.THINKING: _thinking_table(markers, with_starts=False),
        Phase.ANSWER: Table((Action.SWALLOW, markers.closers)),
    }
    return ParserTables(head, body)


def _thinking_table(markers: MarkerSet[Symbol], *, with_starts: bool) -> Table[Symbol]:
    starts = markers.starts if with_starts else ()
    return Table((Action.CLOSE, markers.ends), (Action.YIELD, markers.implicit_ends), (Action.SWALLOW, starts))
