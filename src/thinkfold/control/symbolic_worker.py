"""The process that decides whether two formulas are equal: `python -m thinkfold.control.symbolic_worker`.

One JSON object a line in, one out. Who started it kills it when it is late; the alarm is for orphans.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from functools import lru_cache
from typing import Any

import sympy
from math_verify import LatexExtractionConfig, parse, verify

MAX_MEMORY = 1 << 30  # bytes of address space
ORPHAN_SECONDS = 30
DIGITS = 40  # of a constant's value
SIGNATURE_DIGITS = 15
NEGLIGIBLE = sympy.Float("1e-25")
STRICT = {"float_rounding": 30, "numeric_precision": 50, "strict": True, "timeout_seconds": None}


@lru_cache(maxsize=1024)
def read(latex: str) -> Any:
    """The sympy object of a formula with exact numbers, None if it is none. LaTeX only: no Python is parsed."""
    found = parse(f"${latex}$", extraction_config=[LatexExtractionConfig()], parsing_timeout=None)  # pyright: ignore
    if not found or isinstance(found[0], str):
        return None
    value: Any = found[0].doit()
    return value.xreplace({float_: sympy.Rational(str(float_)) for float_ in value.atoms(sympy.Float)})


def signature(value: Any) -> str:
    """Equal values have equal signatures. That of an expression is its value at a fixed point."""
    if not isinstance(value, sympy.Expr):
        if isinstance(value, sympy.MatrixBase):
            return f"matrix {value.shape}"
        return "relation" if isinstance(value, sympy.core.relational.Relational) else "set"
    if isinstance(value, sympy.Rational):
        return f"number {sympy.Float(value, SIGNATURE_DIGITS)}"
    point: Any = {symbol: _coordinate(str(symbol)) for symbol in value.free_symbols}
    number = value.subs(point).evalf(30)
    if not number.is_number or number.has(sympy.nan, sympy.zoo):
        return "expression"
    return "number " + " ".join(str(_rounded(part)) for part in number.as_real_imag() if part != 0)


def constant(value: Any) -> str | None:
    """A real constant's first digits, None for anything else; whole and broken numbers need none."""
    if not isinstance(value, sympy.Expr) or value.free_symbols or isinstance(value, sympy.Rational):
        return None
    number = value.evalf(DIGITS)
    return str(number) if number.is_Float else None


def same(a: Any, b: Any) -> bool:
    """True if the equality is proven in both directions, without tolerance."""
    if isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr):
        return _vanishes(a - b) and _vanishes(b - a)
    return bool(verify(a, b, **STRICT)) and bool(verify(b, a, **STRICT))


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The reply to one request: `read` gives `signature` and `constant`, `same` a truth value."""
    if "read" in request:
        value = read(request["read"])
        return {} if value is None else {"signature": signature(value), "constant": constant(value)}
    a, b = (read(text) for text in request["same"])
    return {"same": a is not None and b is not None and same(a, b)}


def main() -> None:
    """Answer lines until the input ends. What cannot be computed is answered by {}."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        signal.alarm(ORPHAN_SECONDS)  # nobody handles it: it ends the process
        try:
            reply = answer(json.loads(line))
        except Exception:  # sympy raises anything on odd input; an unproven equality is none
            reply = {}
        signal.alarm(0)
        print(json.dumps(reply), flush=True)


def _coordinate(name: str) -> sympy.Expr:
    """A point in (1, 2) that depends on the symbol's name only."""
    mixed = 0
    for character in name:
        mixed = (mixed * 131 + ord(character)) % 9973
    return 1 + sympy.Rational(2 * mixed + 1, 19949)


def _rounded(part: sympy.Expr) -> sympy.Expr:
    return sympy.Integer(0) if abs(part) < NEGLIGIBLE else sympy.Float(part, SIGNATURE_DIGITS)


def _vanishes(difference: sympy.Expr) -> bool:
    simple = sympy.simplify(difference)
    return simple == 0 or simple.equals(0) is True


if __name__ == "__main__":
    main()
