"""The verifier hook: callables and endpoints, and everything that makes a score a miss."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from thinkfold.config import EngineConfig
from thinkfold.control.verifier import Verifier, Verifiers
from thinkfold.errors import ParameterError
from thinkfold.types import Judged

X = [Judged("x")]


async def test_a_callable_and_what_is_no_score() -> None:
    given: list[Any] = [0.25, [0.1, 0.9], 2.0, "no", float("nan"), float("inf"), True, []]
    verifier = Verifier(lambda question, judged: given)
    found = await verifier.score("q", X * 8, 5)
    assert [one.score for one in found] == [0.25, 0.9, None, None, None, None, None, None]
    errors = [one.error for one in found]
    assert errors[:3] == [None, None, "2 is outside [0, 1]"] and errors[4] == "nan is no finite number"
    (short,) = {one.error for one in await verifier.score("q", X * 7, 5)}
    assert short is not None and "8 scores for 7" in short


async def test_a_failing_one_says_why() -> None:
    def broken(question: str, judged: Sequence[Judged]) -> list[float]:
        raise RuntimeError("no weights")

    verifier = Verifier(broken)
    assert verifier.name == "broken"
    assert (await verifier.score("", X, 5))[0] == (None, "RuntimeError: no weights")


async def test_a_slow_one_misses_and_keeps_its_place_until_it_is_back() -> None:
    gate, calls = threading.Event(), 0

    def slow(question: str, judged: Sequence[Judged]) -> list[float]:
        nonlocal calls
        calls += 1
        gate.wait(10)
        return [1.0] * len(judged)

    verifier = Verifier(slow, most=2)
    late = await asyncio.gather(*(verifier.score("", X, 0.05) for _ in range(5)))
    assert {one.error for (one,) in late} == {"no score within 0.05 s"}
    assert calls == 2, "no more than two at once, also when nobody waits for them"
    gate.set()
    assert (await verifier.score("", X, 10))[0].score == 1.0 and calls == 3


class Judge(BaseHTTPRequestHandler):
    bodies: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        scores = [[0.2, 0.5] for _ in body["items"]]
        replies = {
            "/judge": (200, json.dumps({"scores": scores})),
            "/nan": (200, '{"scores": [NaN]}'),
            "/text": (200, "fine"),
            "/none": (200, "[1]"),
            "/long": (200, "x" * (1 << 21)),
            "/broken": (500, json.dumps({"scores": scores})),
            "/moved": (302, ""),
        }
        code, text = replies[self.path]
        self.send_response(code)
        if code == 302:
            self.send_header("Location", "/judge")
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        del format, args


@pytest.fixture
def judge() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


async def test_an_endpoint(judge: str) -> None:
    verifier = Verifiers().find("f", f"{judge}/judge")
    found = await verifier.score("why", [Judged("a", "hm"), Judged("b")], 10)
    assert [one.score for one in found] == [0.5, 0.5]
    assert Judge.bodies[-1] == {"question": "why", "items": [{"answer": "a", "thinking": "hm"}, {"answer": "b"}]}


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/broken", "it answered 500"),
        ("/moved", "it answered 302"),
        ("/nan", "nan is no finite number"),
        ("/text", "JSONDecodeError"),
        ("/none", "no list of scores"),
        ("/long", "longer than"),
    ],
)
async def test_what_an_endpoint_may_do_wrong(judge: str, path: str, why: str) -> None:
    (found,) = await Verifiers().find("f", f"{judge}{path}").score("why", X, 10)
    assert found.score is None and found.error is not None and why in found.error


async def test_an_endpoint_that_never_answers_or_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        (found,) = await Verifiers().find("f", url).score("why", X, 0.1)
    assert found == (None, "no score within 0.1 s")
    (gone,) = await Verifiers().find("f", url).score("why", X, 10)
    assert gone.error == "it cannot be reached (URLError)"


def test_named_ones_are_shared_and_others_refused() -> None:
    config = EngineConfig(verifiers=("judge=http://127.0.0.1:1/a?b=c", "other=https://x"))
    assert config.verifier_urls["judge"] == "http://127.0.0.1:1/a?b=c"
    known = Verifiers(config.verifier_urls)
    assert known.find("f", "judge") is known.find("f", "judge") and known.find("f", "judge").name == "judge"
    with pytest.raises(ParameterError, match="f: there is no 'nobody'; this engine knows: judge, other"):
        known.find("f", "nobody")


@pytest.mark.parametrize("given", [("judge",), ("judge=ftp://x",), ("=http://x",), ("a=http://x", "a=http://y")])
def test_what_names_no_verifier(given: tuple[str, ...]) -> None:
    with pytest.raises(ParameterError) as refused:
        EngineConfig(verifiers=given)
    assert refused.value.field == "verifiers"
