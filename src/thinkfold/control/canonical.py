"""The form of one answer: what kind it is and one spelling for all equal ones of that kind. Pure.

Two answers of equal `key` are equal; what else is equal is for `control.equality` to find.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from thinkfold.control.latex import plain, split_list
from thinkfold.control.numbers import MIN_MATCHING_DIGITS, Number, read_number

MAX_CHARS = 4_000  # longer answers are compared as they stand
MAX_LIST_DEPTH = 2
GLUED = "mm cm km kg mg ml min hr mph km/h m/s ft in lb oz Hz kHz kJ kW kWh"  # units that need no blank before them
SHORT = "m g s h l L N J W V A K C F"
FUNCTIONS = (
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp sqrt frac pi infty binom cdot times div "
    "pm mp leq geq neq lt gt cup cap in ne le ge theta alpha beta gamma delta lambda mu sigma omega phi rho tau "
    "emptyset varnothing begin end pmatrix bmatrix matrix lfloor rfloor lceil rceil circ mathbb abs"
)
GLUED_UNITS, SHORT_UNITS = frozenset(GLUED.split()), frozenset(SHORT.split())
FORMULA_WORDS = frozenset(FUNCTIONS.split())

_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_PERCENT = re.compile(r"(.*[^\s\\])\s*(?:\\?%|\bper ?cents?)", re.DOTALL)
_CURRENCY = re.compile(r"([-+]?)\s*(\\?\$|€|£|¥)\s*(?=[\d.])")
_UNIT = re.compile(r"(.*[\d})!])(\s*)(\^\{?\\circ\}?\s*[CF]?|[A-Za-zµΩ$€£]+(?:[ /][A-Za-z]+)?(?:\^\{?-?\d\}?)?)")
_CHOICE = re.compile(r"(?:(?:option|choice|answer)\s+)?(?:\(\s*([A-Ja-j])\s*\)|([A-J])[.):]?)", re.IGNORECASE)
_ASSIGNMENT = re.compile(r"\\?[A-Za-z](?:_\{?\w\}?)?\s*=\s*([^=]+)")
_WORD = re.compile(r"[A-Za-z]{2,}")
_BRACKETS = {"(": ")", "[": "]"}


class Kind(StrEnum):
    """What an answer is."""

    NUMBER = "number"
    CHOICE = "choice"
    LIST = "list"
    MATH = "math"
    TEXT = "text"


@dataclass(frozen=True, slots=True)
class Form:
    """An answer in one spelling.

    `math` is LaTeX for a symbolic check, None where there is nothing to check; `brackets` those of a list.
    """

    kind: Kind
    key: str
    text: str
    number: Number | None = None
    unit: str = ""
    math: str | None = None
    brackets: str = ""

    @property
    def is_sure(self) -> bool:
        """Whether equality with any other answer is decided by the key, whatever else is answered."""
        if self.kind is Kind.NUMBER and self.number is not None:
            return not self.unit and self.number.digits < MIN_MATCHING_DIGITS
        return self.kind is Kind.CHOICE


def form_of(answer: str) -> Form:
    """The form of an answer of any length; never raises."""
    if len(answer) > MAX_CHARS:
        text = " ".join(answer.split())
        return Form(Kind.TEXT, f"text:{text}", text)
    return _form(plain(answer), 0)


def _form(text: str, depth: int) -> Form:
    if match := _CHOICE.fullmatch(text):
        letter = next(group for group in match.groups() if group)
        if match.group(1) or letter.isupper():
            return Form(Kind.CHOICE, f"choice:{letter.upper()}", text)
    return _number(text) or _list(text, depth) or _assigned(text, depth) or _other(text)


def _number(text: str) -> Form | None:
    """A number, a percentage (a hundredth of what is written) or a number with a unit."""
    if match := _PERCENT.fullmatch(text):
        number = read_number(_ungrouped(match.group(1)))
        if number is None:
            return None
        places = None if number.places is None else number.places + 2
        return _number_form(Number(number.value / 100, places, number.digits), "", text)
    unit = ""
    if match := _CURRENCY.match(text):
        unit = match.group(2).lstrip("\\")
        text = match.group(1) + text[match.end() :]
    number = read_number(_ungrouped(text))
    if number is None and not unit and (match := _UNIT.fullmatch(text)):
        text, gap, unit = match.groups()
        if not gap and not unit.startswith("^") and unit not in GLUED_UNITS:
            return None
        if len(unit) == 1 and unit not in SHORT_UNITS:
            return None
        number = read_number(_ungrouped(text))
    return None if number is None else _number_form(number, _unit_name(unit), text)


def _number_form(number: Number, unit: str, text: str) -> Form:
    exact = str(number.value)
    return Form(Kind.NUMBER, f"number:{exact}|{unit}", text, number, unit, None if unit else exact)


def _list(text: str, depth: int) -> Form | None:
    """Numbers and short formulas in a row: in any order without brackets and in braces, else in theirs."""
    if depth >= MAX_LIST_DEPTH:
        return None
    opening, inner, closing = "{", text, "}"
    if text.startswith("\\{") and text.endswith("\\}"):
        inner = text[2:-2]
    elif text[:1] in _BRACKETS and text[-1:] in ")]":
        opening, inner, closing = text[0], text[1:-1], text[-1]
    parts = split_list(inner)
    if len(parts) < 2 and not text.startswith("\\{"):
        return None
    forms = [_form(part, depth + 1) for part in parts]
    if any(form.kind in (Kind.TEXT, Kind.CHOICE) for form in forms):
        return None
    keys = [form.key for form in forms]
    math = None
    if all(form.math for form in forms):
        left, right = ("\\{", "\\}") if opening == "{" else (opening, closing)
        math = left + ", ".join(form.math or "" for form in forms) + right
    if opening == "{":
        keys = sorted(set(keys))
    brackets = opening + closing
    return Form(Kind.LIST, f"list{brackets}:{';'.join(keys)}", text, math=math, brackets=brackets)


def _assigned(text: str, depth: int) -> Form | None:
    """`x = 5` is 5."""
    match = _ASSIGNMENT.fullmatch(text)
    if match is None or depth:
        return None
    form = _form(match.group(1).strip(), depth)
    return form if form.kind in (Kind.NUMBER, Kind.LIST) else None


def _other(text: str) -> Form:
    """A formula where every word in it is a known function and it holds something to compute; else prose."""
    words = set(_WORD.findall(text))
    formula = words <= FORMULA_WORDS and ":" not in text and any(sign in text for sign in "\\^_+-*/=<>|0123456789")
    if formula:
        tight = text.replace(" ", "")
        return Form(Kind.MATH, f"math:{tight}", text, math=text)
    if "\\" in text or not words:
        return Form(Kind.TEXT, f"text:{text}", text)
    return Form(Kind.TEXT, "text:" + text.casefold().strip(" .!\"'"), text)


def _ungrouped(text: str) -> str:
    text = text.strip()
    return text.replace(",", "") if _THOUSANDS.fullmatch(text) else text


def _unit_name(unit: str) -> str:
    """One name for a unit: currencies as signs, `^\\circ` as degrees, plurals as singulars."""
    unit = re.sub(r"[{}\s]", lambda found: " " if found.group().isspace() else "", unit).strip()
    if unit.startswith("^\\circ"):
        return "degree" + unit.removeprefix("^\\circ").strip()
    if len(unit) <= 3:
        return unit
    words = [word[:-1] if word.endswith("s") and not word.endswith("ss") else word for word in unit.lower().split()]
    name = " ".join(words)
    return {"dollar": "$", "euro": "€", "pound": "£", "cent": "cent"}.get(name, name)
