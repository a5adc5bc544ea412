"""Which answers are the same: one equivalence relation over all answers of a vote.

The classes depend on the set of answers only, never on their order. They are found rung by
rung; each rung joins whole classes, so that the result stays symmetric and transitive:
canonical string, exact number, choice or list → symbolic → decimals of another exact value →
units → embedding, or edit ratio without an embedder. What is left apart a vote may put to a
model in one call (`ballot.py`).
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from itertools import combinations

from thinkfold.control.canonical import Form, Kind, form_of
from thinkfold.control.embedding import Embedder, EmbeddingError, Vector, cosine
from thinkfold.control.likeness import cluster, edit_ratio, may_join, medoid
from thinkfold.control.symbolic import Patience, Reading, Symbolic

MIN_COSINE = 0.90
MIN_EDIT_RATIO = 0.90
MAX_SYMBOLIC_TIMEOUTS = 2  # of one partition; behind them formulas are compared as text

logger = logging.getLogger(__name__)


class Rung(StrEnum):
    """What made the members of a class one, from the surest on."""

    CANONICAL = "canonical"
    NUMBER = "number"
    CHOICE = "choice"
    LIST = "list"
    SYMBOLIC = "symbolic"
    DECIMAL = "decimal"
    UNIT = "unit"
    EMBEDDING = "embedding"
    EDIT = "edit"
    CALL = "call"


ORDER = {rung: number for number, rung in enumerate(Rung)}


@dataclass(frozen=True, slots=True)
class AnswerClass:
    """Answers that are the same: indices into what was given; `rung` is the least sure one that was needed.

    `is_sure` says that no further answer can take members from the class or join it to another
    one that is sure.
    """

    members: tuple[int, ...]
    representative: int
    answer: str
    rung: Rung
    is_sure: bool


@dataclass(frozen=True, slots=True)
class Partition:
    """Classes in the order of their first members. Answers that are None are in no class."""

    classes: tuple[AnswerClass, ...]

    def class_of(self, index: int) -> int | None:
        """Number of the class that holds an answer; None for one that abstained."""
        return next((number for number, found in enumerate(self.classes) if index in found.members), None)


@dataclass(slots=True)
class _Group:
    """A class under way: its distinct keys, each with the indices that have it."""

    keys: list[str]
    rung: Rung
    medoid: str | None = None

    def join(self, other: _Group, rung: Rung) -> None:
        self.keys = sorted(self.keys + other.keys)
        self.rung = max(self.rung, other.rung, rung, key=ORDER.__getitem__)


@dataclass(slots=True)
class Equality:
    """The relation with its helpers, each optional.

    May be used from any thread; it blocks for at most the time limits of its helpers.
    """

    symbolic: Symbolic | None = None
    embedder: Embedder | None = None
    min_cosine: float = MIN_COSINE
    min_edit_ratio: float = MIN_EDIT_RATIO
    _forms: dict[str, Form] = field(default_factory=dict)
    _vectors: dict[str, Vector] = field(default_factory=dict)
    _embedder_failed: bool = False

    def same(self, a: str, b: str) -> bool:
        """Whether two answers are the same when there are no others."""
        return len(self.partition([a, b]).classes) == 1

    def partition(self, answers: Sequence[str | None]) -> Partition:
        """The classes of these answers. A helper that fails leaves classes apart."""
        forms = {answer: self._form(answer) for answer in answers if answer is not None}
        by_key = {form.key: form for form in sorted(forms.values(), key=lambda form: form.text)}
        spellings: dict[str, set[str]] = defaultdict(set)
        for answer, form in forms.items():
            spellings[form.key].add(answer)
        groups = [_Group([key], _first_rung(by_key[key], spellings[key])) for key in sorted(by_key)]
        constants = self._join_formulas(groups, by_key)
        _join_decimals(groups, by_key, constants)
        _join_units(groups, by_key)
        self._join_texts(groups, by_key)
        return _finished(groups, answers, forms)

    def _form(self, answer: str) -> Form:
        if answer not in self._forms:
            if len(self._forms) > 4096:
                self._forms.clear()
            self._forms[answer] = form_of(answer)
        return self._forms[answer]

    def _join_formulas(self, groups: list[_Group], forms: dict[str, Form]) -> dict[str, Fraction]:
        """Join what the symbolic checker proves equal; returns the values of irrational constants by key."""
        if self.symbolic is None or not any(form.kind in (Kind.MATH, Kind.LIST) for form in forms.values()):
            return {}
        patience = Patience(MAX_SYMBOLIC_TIMEOUTS)
        buckets: dict[tuple[str, str], list[str]] = defaultdict(list)
        constants: dict[str, Fraction] = {}
        for key, form in sorted(forms.items()):
            if form.math is None:
                continue
            reading: Reading | None = self.symbolic.read(form.math, patience)
            if reading is None:
                continue
            buckets[form.brackets, reading.signature].append(key)
            if reading.constant is not None:
                constants[key] = reading.constant
        for keys in buckets.values():
            for a, b in combinations(keys, 2):
                one, other = _holder(groups, a), _holder(groups, b)
                if one is other:
                    continue
                if self.symbolic.same(forms[a].math or "", forms[b].math or "", patience):
                    _join(groups, one, other, Rung.SYMBOLIC)
        return constants

    def _join_texts(self, groups: list[_Group], forms: dict[str, Form]) -> None:
        """Join prose that is alike."""
        prose = [group for group in groups if _is_prose(group, forms)]
        if len(prose) < 2:
            return
        texts = [forms[group.keys[0]].text for group in prose]
        likeness, rung, threshold = edit_ratio, Rung.EDIT, self.min_edit_ratio
        if self._embed(texts):
            vectors, rung, threshold = self._vectors, Rung.EMBEDDING, self.min_cosine

            def likeness(a: str, b: str) -> float:
                return cosine(vectors[a], vectors[b])

        def alike(i: int, j: int) -> float:
            a, b = (texts[n].casefold() if rung is Rung.EDIT else texts[n] for n in (i, j))
            return likeness(a, b) if may_join(texts[i], texts[j]) else -1.0

        for members in cluster(len(texts), alike, threshold):
            first = prose[members[0]]
            first.medoid = prose[medoid(sorted(members), alike)].keys[0]
            for member in members[1:]:
                _join(groups, first, prose[member], rung)

    def _embed(self, texts: Sequence[str]) -> bool:
        """Whether there is a vector for each text; each is asked for once, and an embedder that failed not again."""
        if self.embedder is None or self._embedder_failed:
            return False
        new = [text for text in texts if text not in self._vectors]
        try:
            self._vectors.update(zip(new, self.embedder.embed(new) if new else [], strict=True))
        except EmbeddingError as error:
            logger.warning("answers are compared by their letters: %s", error)
            self._embedder_failed = True
        return not self._embedder_failed


def _is_prose(group: _Group, forms: dict[str, Form]) -> bool:
    return all(forms[key].kind is Kind.TEXT for key in group.keys)


def _first_rung(form: Form, spellings: Iterable[str]) -> Rung:
    """How the answers of one key are the same: the spelling is, or what it stands for."""
    if len({" ".join(answer.split()) for answer in spellings}) == 1:
        return Rung.CANONICAL
    return {Kind.NUMBER: Rung.NUMBER, Kind.CHOICE: Rung.CHOICE, Kind.LIST: Rung.LIST}.get(form.kind, Rung.CANONICAL)


def _join_decimals(groups: list[_Group], forms: dict[str, Form], constants: dict[str, Fraction]) -> None:
    """A class of decimals only joins the one exact class that it is rounded or cut from, if there is one only."""
    exact: list[tuple[str, Fraction, _Group]] = []
    decimals: list[_Group] = []
    for group in groups:
        members = [forms[key] for key in group.keys]
        if all(form.number is not None and form.number.is_decimal for form in members):
            decimals.append(group)
            continue
        exact += [(form.unit, form.number.value, group) for form in members if form.number is not None]
        exact += [("", constants[key], group) for key in group.keys if key in constants]
    for group in decimals:
        form = forms[group.keys[0]]
        number = form.number
        assert number is not None
        meant = {id(g): g for unit, value, g in exact if unit == form.unit and number.stands_for(value)}
        if len(meant) == 1:
            _join(groups, next(iter(meant.values())), group, Rung.DECIMAL)


def _join_units(groups: list[_Group], forms: dict[str, Form]) -> None:
    """A bare number joins the class that has it with a unit, if there is one such unit only."""
    with_unit: dict[Fraction, dict[int, _Group]] = defaultdict(dict)
    bare: list[tuple[Fraction, _Group]] = []
    for group in groups:
        for key in group.keys:
            form = forms[key]
            if form.number is None:
                continue
            if form.unit:
                with_unit[form.number.value][id(group)] = group
            else:
                bare.append((form.number.value, group))
    for value, group in bare:
        found = with_unit.get(value, {})
        if len(found) == 1 and (target := next(iter(found.values()))) is not group and group in groups:
            _join(groups, target, group, Rung.UNIT)


def _holder(groups: list[_Group], key: str) -> _Group:
    return next(group for group in groups if key in group.keys)


def _join(groups: list[_Group], one: _Group, other: _Group, rung: Rung) -> None:
    one.join(other, rung)
    groups[:] = [group for group in groups if group is not other]


def _finished(groups: list[_Group], answers: Sequence[str | None], forms: dict[str, Form]) -> Partition:
    by_key: dict[str, list[int]] = defaultdict(list)
    for index, answer in enumerate(answers):
        if answer is not None:
            by_key[forms[answer].key].append(index)
    classes = []
    for group in groups:
        members = sorted(index for key in group.keys for index in by_key[key])
        chosen = by_key[group.medoid][0] if group.medoid is not None else members[0]
        is_sure = all(forms[answers[index] or ""].is_sure for index in members)
        classes.append(AnswerClass(tuple(members), chosen, answers[chosen] or "", group.rung, is_sure))
    return Partition(tuple(sorted(classes, key=lambda found: found.members[0])))
