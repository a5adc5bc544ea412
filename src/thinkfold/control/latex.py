"""LaTeX and Unicode spellings of one answer made one. Linear in the text, knows no meaning."""

from __future__ import annotations

import re

_WRAPPERS = (("\\boxed{", "}"), ("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_STYLES = r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|operatorname|bm|boldsymbol)\s*\{([^{}]*)\}"
_STYLED = re.compile(_STYLES)
_SPACES = re.compile(r"\\[;:!]|\\(?:quad|qquad|displaystyle|left|right|limits)(?![a-zA-Z])")
_GROUPED = re.compile(r"(?<=\d)(?:\{,\}|\\,|\\!,|,\\!|[\u2009\u202f\u00a0]|\\ )(?=\d{3}(?!\d))")
_BARE_ROOT = re.compile(r"\\sqrt\s*(\d|[a-zA-Z](?![a-zA-Z]))")
_ROOT_CALL = re.compile(r"(?<![\\a-zA-Z])sqrt\(([^()]*)\)")
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_SUPERSCRIPT_RUN = re.compile("[⁻⁺]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_SIGNS = str.maketrans(
    {
        "−": "-",
        "–": "-",
        "×": "\\times ",
        "·": "\\cdot ",
        "÷": "\\div ",
        "π": "\\pi ",
        "∞": "\\infty ",
        "≤": "\\leq ",
        "≥": "\\geq ",
        "½": "\\frac{1}{2}",
        "¼": "\\frac{1}{4}",
        "¾": "\\frac{3}{4}",
        "°": "^\\circ",
        "\u00a0": " ",
        "\u2009": " ",
        "\u202f": " ",
        "’": "'",
        "“": '"',
        "”": '"',
    }
)


def plain(answer: str) -> str:
    """The answer without delimiters, style commands and spacing; fractions and roots in one spelling.

    `\\dfrac`, `\\tfrac` and `\\cfrac` become `\\frac`; digits grouped by `{,}` or thin spaces are joined;
    words in `\\text{…}` stand for themselves, with blanks around them.
    """
    text = _unwrapped(answer.strip())
    text = _GROUPED.sub("", text)
    text = re.sub(r"\\[dtc]frac(?![a-zA-Z])", r"\\frac", text)
    text = _STYLED.sub(lambda found: f" {found.group(1)} ", text)
    text = _SPACES.sub("", text)
    text = re.sub(r"\\,|\\ |~", " ", text)
    text = _SUPERSCRIPT_RUN.sub(lambda found: "^{" + found.group().translate(_SUPERSCRIPTS) + "}", text)
    text = text.translate(_SIGNS)
    text = re.sub(r"\\(?:le|ge)(?![a-zA-Z])", lambda found: found.group() + "q", text)
    text = _BARE_ROOT.sub(r"\\sqrt{\1}", _ROOT_CALL.sub(r"\\sqrt{\1}", text))
    text = " ".join(text.split())
    return text[:-1].rstrip() if text.endswith(".") else text


def split_list(text: str) -> list[str]:
    """Parts between the commas, semicolons and `and`s outside all brackets; one part if there are none."""
    parts: list[str] = []
    depth, start = 0, 0
    for found in re.finditer(r"[()\[\]{}]|[,;]|\band\b", text):
        sign = found.group()
        if sign in "([{":
            depth += 1
        elif sign in ")]}":
            depth -= 1
        elif depth == 0:
            parts.append(text[start : found.start()].strip())
            start = found.end()
    parts.append(text[start:].strip())
    return [part for part in parts if part] if len(parts) > 2 else parts


def _unwrapped(text: str) -> str:
    """Without the delimiters that enclose the whole of it."""
    while True:
        inner = next((t for pair in _WRAPPERS if (t := _inside(text, *pair)) is not None), None)
        if inner is None:
            return text.removeprefix("**").removesuffix("**").strip()
        text = inner.strip()


def _inside(text: str, opening: str, closing: str) -> str | None:
    if not (text.startswith(opening) and text.endswith(closing) and len(text) >= len(opening) + len(closing)):
        return None
    inner = text[len(opening) : len(text) - len(closing)]
    return None if opening in inner or (closing != "}" and closing in inner) else inner
