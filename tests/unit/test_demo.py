"""The demo's screen: the same picture however the stream is cut, one number a segment."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import demo
from screen import Screen

THINKING = "Try 2 * 3 = 6.\nThat is too small.\n\nTry 4 * 6 = 24." + " And so on" * 20 + "\n\n\nFound it.\n"


def picture(pieces: list[str]) -> tuple[str, int]:
    out = io.StringIO()
    screen = Screen(out)
    for piece in pieces:
        screen.thinking(piece)
    screen.end_thinking()
    return out.getvalue(), screen.segments


def test_segments_are_numbered_and_long_lines_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    text, segments = picture([THINKING])
    lines = text.splitlines()
    assert segments == 3
    assert [line[:4].strip() for line in lines if line[:4].strip()] == ["1", "2", "3"]
    assert max(map(len, lines)) <= 72
    assert "".join(line[7:] for line in lines).replace(" ", "") == THINKING.replace("\n", "").replace(" ", "")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50])
def test_the_cut_of_the_stream_does_not_show(size: int) -> None:
    pieces = [THINKING[i : i + size] for i in range(0, len(THINKING), size)]
    assert picture(pieces) == picture([THINKING])


def test_a_server_that_ends_early_is_reported() -> None:
    class Ended:
        returncode = 2

        def poll(self) -> int:
            return 2

    with pytest.raises(demo.DemoError, match="ended with code 2"):
        demo.wait_until_ready(Ended(), "http://127.0.0.1:9")
