"""The tutorial runs as it is written, on the trained model, and prints what it shows."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"
STEP = re.compile(r"^```python\n(.*?)^```$(?:\s+^```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)


def shape(text: str) -> str:
    """Numbers may differ between processors, words and the answer may not."""
    return re.sub(r"\d+(?![\d}])", "#", text)


def test_the_tutorial() -> None:
    steps = STEP.findall(PAGE.read_text())
    assert len(steps) == 7 and sum(bool(shown) for _, shown in steps) == 5
    names: dict[str, Any] = {}
    try:
        for code, shown in steps:
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(code, str(PAGE), "exec"), names)
            if shown:
                assert shape(out.getvalue()) == shape(shown)
    finally:
        names["llm"].close()
