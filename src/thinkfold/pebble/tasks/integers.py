"""The exact check shared by families whose answer is one integer."""

import re

INTEGER = re.compile(r"-?[0-9]{1,40}")


def same_integer(given: str, expected: str) -> float:
    """1.0 when both texts are the same integer; spaces and thousands commas are ignored."""
    text = given.replace(" ", "").replace(",", "")
    if not INTEGER.fullmatch(text):
        return 0.0
    return float(int(text) == int(expected))
