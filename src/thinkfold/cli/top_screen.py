"""What `thinkfold top` draws: the page's engine view, in characters."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

from rich.columns import Columns
from rich.table import Table
from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.containers import Horizontal, VerticalScroll
from textual.widgets import Footer, Sparkline, Static

from thinkfold.cli.engine_client import Reading
from thinkfold.errors import ThinkfoldError

COLOURS = {
    "prompt": "#5c9ae6",
    "thinking": "#e8a33d",
    "summary": "#cd7fcd",
    "answer": "#3fb68b",
    "cached": "#76829a",
    "pinned": "#c09a70",
    "free": "#3a4252",
    "host": "#46b8cc",
}
RUNGS = {
    "pin": "pinned prefixes given up",
    "probe": "probes dropped",
    "swap_parked": "paused requests moved to the host",
    "offload": "thinking of answers moved to the host",
    "quantise": "segments kept in 4 bits",
    "fold": "segments folded",
    "forget_parked": "paused requests to be computed again",
    "swap": "running requests swapped",
    "preempt": "running requests preempted",
    "fold_forced": "folded against the gate",
    "quota": "tiers held to their quota",
}
HISTORY = 120
_MAP_ROWS = 6


class TopApp(App[None]):
    """Draws `first`, and then what `read` gives every `interval` seconds."""

    CSS = """
    Static, Sparkline { margin: 0 1; }
    #map { height: auto; margin: 1 1 0 1; }
    .title { color: $text-muted; margin: 1 1 0 1; }
    #rate { height: 3; }
    Horizontal { height: auto; }
    #numbers { width: 1fr; margin: 1 1 0 1; }
    #ladder { width: 1.3fr; margin: 1 1 0 1; }
    """
    TITLE = "thinkfold top"
    BINDINGS: ClassVar = [
        ("q", "quit", "Quit"),
        ("r", "refresh_now", "Look now"),
        ("d", "toggle_dark", "Light or dark"),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, read: Callable[[], dict[str, Any]], first: dict[str, Any], url: str, interval: float) -> None:
        super().__init__()
        self._read = read
        self._reading = Reading(first)
        self._url = url
        self._interval = interval
        self._rates: deque[float] = deque([0.0] * HISTORY, HISTORY)

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(id="head")
            yield Static(id="map")
            yield Static(id="legend")
            yield Static("tokens a second", classes="title", id="rate-title")
            yield Sparkline(list(self._rates), id="rate")
            with Horizontal():
                yield Static(id="numbers")
                yield Static(id="ladder")
        yield Footer()

    def on_mount(self) -> None:
        self._draw()
        self.set_interval(self._interval, self.look)

    def on_resize(self) -> None:
        self._draw()

    def action_refresh_now(self) -> None:
        self.look()

    def action_toggle_dark(self) -> None:
        self.theme = "textual-light" if self.theme == "textual-dark" else "textual-dark"

    @work(thread=True, exclusive=True)
    def look(self) -> None:
        """Ask the server, beside the screen; a server that does not answer is said so and asked again."""
        try:
            engine = self._read()
        except ThinkfoldError as error:
            self.call_from_thread(self._say, Text(str(error), style="bold red"))
            return
        self.call_from_thread(self._take, engine)

    def _take(self, engine: dict[str, Any]) -> None:
        self._reading = self._reading.following(engine)
        self._rates.append(self._reading.tokens_per_s or 0.0)
        self._draw()

    def _say(self, text: Text) -> None:
        self.query_one("#head", Static).update(text)

    def _draw(self) -> None:
        reading = self._reading
        engine = reading.engine
        state = ("● ready", "green") if engine["ready"] else (f"● {engine['reason']}", "bold red")
        self._say(Text.assemble(("thinkfold ", "bold"), engine["model"], "  ", state, "  ", (self._url, "dim")))
        self.query_one("#map", Static).update(kv_map(engine["pages"], max(20, self.size.width - 4), _MAP_ROWS))
        self.query_one("#legend", Static).update(legend(engine["pages"]))
        self.query_one("#rate", Sparkline).data = list(self._rates)
        rate = "–" if reading.tokens_per_s is None else f"{reading.tokens_per_s:,.1f}"
        self.query_one("#rate-title", Static).update(f"tokens a second: {rate}")
        self.query_one("#numbers", Static).update(numbers(reading))
        self.query_one("#ladder", Static).update(ladder(engine["pressure"]))


def kv_map(pages: dict[str, Any], width: int, rows: int) -> Text:
    """Blocks in the colours of their classes, sorted; a class that is there at all has at least one."""
    cells, total = width * rows, max(1, pages["total"])
    drawn: list[str] = []
    for name in COLOURS:
        size = pages["by_class"].get(name, 0)
        if name not in ("free", "host") and size:
            drawn += [name] * max(1, round(cells * size / total))
    drawn = (drawn + ["free"] * cells)[:cells]
    lines = [drawn[i : i + width] for i in range(0, cells, width)]
    return Text("\n").join(Text.assemble(*(("■", COLOURS[name]) for name in line)) for line in lines)


def legend(pages: dict[str, Any]) -> Columns:
    """Pages of every class in numbers, as many in a line as fit."""
    host = pages["host"]
    sizes = {**dict.fromkeys(COLOURS, 0), **pages["by_class"], "free": pages["free"]}
    parts: list[Text] = []
    for name, colour in COLOURS.items():
        size = f"{sizes[name]:,}" if name != "host" else f"{host['used']:,} of {host['total']:,}"
        parts.append(Text.assemble(("■ ", colour), f"{name} {size}", no_wrap=True))
    return Columns(parts, padding=(0, 3, 0, 0))


def numbers(reading: Reading) -> Table:
    """Requests, memory, prefix hits and folds of now."""
    engine, pages, folds = reading.engine, reading.engine["pages"], reading.engine["folds"]
    table = _table("now")
    table.add_row("running", f"{engine['running']:,}")
    table.add_row("waiting", f"{engine['waiting']:,}")
    table.add_row("KV held", f"{pages['held'] / max(1, pages['total']):.1%} of {pages['total']:,} pages")
    table.add_row("prefix hits", "–" if reading.hit_rate is None else f"{reading.hit_rate:.0%}")
    table.add_row("folds", f"{folds['done']:,} ({folds['tokens']:,} tokens), {folds['refused']:,} refused")
    table.add_row("KV so far", f"{engine['totals']['kv_byte_seconds'] / 1e9:,.1f} GB·s")
    return table


def ladder(pressure: dict[str, int]) -> Table:
    """How often each rung was taken, cheapest first; rungs of a newer server by their own names."""
    table = _table("pressure ladder")
    for key, words in {**RUNGS, **{key: key for key in pressure if key not in RUNGS}}.items():
        taken = pressure.get(key, 0)
        table.add_row(Text(words, style="" if taken else "dim"), Text(f"{taken:,}", style="bold" if taken else "dim"))
    return table


def _table(title: str) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="dim", box=None, show_header=False, padding=(0, 2, 0, 0)
    )
    table.add_column()
    table.add_column(justify="right")
    return table
