"""Digit by digit arithmetic as the traces write it: lowest digit first, steps of constant length."""

from random import Random

from training.traces.trace import unlearned

WIDTH = 10  # additions are padded to this many digits


def low_first(number: int, width: int) -> str:
    """Digits of a number, lowest first, padded with zeros."""
    return str(number).zfill(width)[::-1]


def slipped(rng: Random, value: int, limit: int) -> int:
    """Another value below `limit`, as a slip would produce it."""
    return (value + rng.choice((-10, -2, -1, 1, 2, 10))) % limit


def addition(x: int, y: int, slip: Random | None = None) -> tuple[str, int]:
    """Digit steps of x + y and the value reached (`slip` plants a slip in one step)."""
    a, b = low_first(x, WIDTH), low_first(y, WIDTH)
    at = slip.randrange(len(str(max(x, y)))) if slip else -1
    carry, digits, parts = 0, "", [f"{a}+{b}:"]
    for i in range(WIDTH):
        step = int(a[i]) + int(b[i]) + carry
        if slip and i == at:
            step = slipped(slip, step, 20)
            parts.append(f"{a[i]}+{b[i]}+{carry}={unlearned(f'{step:02d}')};")
        else:
            parts.append(f"{a[i]}+{b[i]}+{carry}={step:02d};")
        carry = step // 10
        digits += str(step % 10)
    return f"{''.join(parts)}={digits}", int(digits[::-1])


def subtraction(x: int, y: int) -> str:
    """Digit steps of x - y for x >= y; each step adds ten first and says whether it was borrowed."""
    a, b = low_first(x, WIDTH), low_first(y, WIDTH)
    borrow, digits, parts = 0, "", [f"{a}-{b}:"]
    for i in range(WIDTH):
        step = 10 + int(a[i]) - int(b[i]) - borrow
        parts.append(f"{a[i]}-{b[i]}-{borrow}={step:02d};")
        borrow = 1 - step // 10
        digits += str(step % 10)
    return f"{''.join(parts)}={digits}"


def residue(number: int | str) -> tuple[str, int]:
    """Casting out nines: each digit with the running residue, and the last residue."""
    parts, rest = [], 0
    for digit in str(number):
        rest = (rest + int(digit)) % 9
        parts.append(f"{digit}:{rest}")
    return "".join(parts), rest
