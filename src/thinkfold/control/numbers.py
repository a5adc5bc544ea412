"""Exact numbers written in LaTeX or plain arithmetic: a small calculator over fractions.

Nothing is evaluated as code, and every size is checked before anything is computed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from math import factorial

MAX_CHARS = 400
MAX_DEPTH = 24
MAX_BITS = 16_384  # of a numerator or denominator
MAX_FACTORIAL = 500
MIN_MATCHING_DIGITS = 6  # of a decimal that may stand for another exact value

_DECIMAL = re.compile(r"([-+]?)(\d*)\.(\d+)(?:[eE]([-+]?\d{1,4}))?")
_LITERAL = re.compile(r"(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{1,4}(?![\d.]))?")


@dataclass(frozen=True, slots=True)
class Number:
    """An exact value. A decimal such as `0.333333` also knows its own digits, which other forms do not have."""

    value: Fraction
    places: int | None = None  # the last digit stands for 10 ** -places
    digits: int = 0  # significant ones

    @property
    def is_decimal(self) -> bool:
        """True for a literal with a decimal point, which may be rounded."""
        return self.places is not None

    def stands_for(self, exact: Fraction) -> bool:
        """True if this decimal is `exact`, rounded or cut to the decimal's own six or more digits."""
        if self.places is None or self.digits < MIN_MATCHING_DIGITS:
            return False
        scale = Fraction(10) ** self.places
        shown, wanted = self.value * scale, exact * scale
        return shown in (round(wanted), int(wanted))


def read_number(text: str) -> Number | None:
    """The value of an arithmetic expression, None for anything else or anything too large.

    Knows literals, `\\frac`, mixed numbers, `+ - * / ^ ** !`, `\\times`, `\\cdot`, `\\div`, brackets and braces.
    """
    text = text.strip()
    if not text or len(text) > MAX_CHARS:
        return None
    try:
        calculator = _Calculator(text)
        value = calculator.whole()
    except (_NoNumber, ZeroDivisionError):
        return None
    match = _DECIMAL.fullmatch(text.replace(" ", ""))
    if match is None:
        return Number(value)
    _, before, behind, exponent = match.groups()
    digits = len((before + behind).lstrip("0"))
    return Number(value, len(behind) - int(exponent or 0), digits)


class _NoNumber(Exception):
    """The text is no number that is read here."""


class _Calculator:
    """Recursive descent over one text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def whole(self) -> Fraction:
        value = self._sum()
        if self._peek():
            raise _NoNumber
        return value

    def _peek(self) -> str:
        """The rest without leading blanks' first character, "" at the end."""
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1
        return self._text[self._at : self._at + 1]

    def _take(self, *words: str) -> str:
        """The first of `words` that comes next, which is then read; "" if none does."""
        self._peek()
        for word in words:
            if self._text.startswith(word, self._at):
                self._at += len(word)
                return word
        return ""

    def _sum(self) -> Fraction:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _NoNumber
        value = self._product()
        while sign := self._take("+", "-"):
            other = self._product()
            value = _bounded(value + other if sign == "+" else value - other)
        self._depth -= 1
        return value

    def _product(self) -> Fraction:
        value = self._signed()
        while True:
            if self._text.startswith("**", self._at):
                raise _NoNumber  # `_power` has taken every one that has a base
            if self._take("*", "\\times", "\\cdot"):
                value = _bounded(value * self._signed())
            elif self._take("/", "\\div"):
                value = _bounded(value / self._signed())
            else:
                return value

    def _signed(self) -> Fraction:
        negative = False
        while sign := self._take("-", "+"):
            negative ^= sign == "-"
        value = self._power()
        return -value if negative else value

    def _power(self) -> Fraction:
        base = self._factorial()
        if not self._take("**", "^"):
            return base
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _NoNumber
        exponent = self._braced() if self._peek() == "{" else self._signed()
        self._depth -= 1
        return _raised(base, exponent)

    def _factorial(self) -> Fraction:
        value = self._atom()
        while self._take("!"):
            if value.denominator != 1 or not 0 <= value <= MAX_FACTORIAL:
                raise _NoNumber
            value = Fraction(factorial(int(value)))
        return value

    def _atom(self) -> Fraction:
        for opening, closing in (("(", ")"), ("{", "}"), ("[", "]")):
            if self._take(opening):
                return self._inside(closing)
        if self._take("\\frac"):
            return _bounded(self._argument() / self._argument())
        value = self._literal()
        if value.denominator == 1 and self._peek() == "\\" and self._take("\\frac"):  # a mixed number
            value += _bounded(self._argument() / self._argument())
        return value

    def _literal(self) -> Fraction:
        self._peek()
        match = _LITERAL.match(self._text, self._at)
        if match is None:
            raise _NoNumber
        self._at = match.end()
        return _bounded(Fraction(match.group().rstrip(".")))

    def _argument(self) -> Fraction:
        """What stands behind `\\frac`: a group in braces, or one digit."""
        if self._peek() == "{":
            return self._braced()
        if self._take("\\frac"):
            return _bounded(self._argument() / self._argument())
        digit = self._peek()
        if not (digit.isascii() and digit.isdigit()):
            raise _NoNumber
        self._at += 1
        return Fraction(int(digit))

    def _braced(self) -> Fraction:
        self._take("{")
        return self._inside("}")

    def _inside(self, closing: str) -> Fraction:
        value = self._sum()
        if not self._take(closing):
            raise _NoNumber
        return value


def _raised(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > MAX_BITS:
        raise _NoNumber
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits * abs(int(exponent)) > MAX_BITS:
        raise _NoNumber
    return base ** int(exponent)


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise _NoNumber
    return value
