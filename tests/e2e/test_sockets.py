"""Clients that vanish, full queues, and the `thinkfold serve` process, over real sockets."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlparse

import httpx
import openai
import pytest
from conftest import Served

import thinkfold
from tests.small_pebble import small_pebble
from thinkfold.cli.main import main
from thinkfold.cli.serve import listen

LONG: dict[str, Any] = {
    "model": "pebble",
    "messages": [{"role": "user", "content": "go"}],
    "temperature": 1.0,
    "ignore_eos": True,
    "max_tokens": 1900,
}
PAUSE = threading.Event()
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(thinkfold.__file__).parents[1]), "OMP_NUM_THREADS": "1"}


def test_small_replies_do_not_wait_for_acknowledgements():
    """asyncio sets no TCP_NODELAY for sockets that it has not made: connections inherit it."""
    with (
        listen("127.0.0.1", 0) as sock,
        socket.create_connection(sock.getsockname()),
        sock.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def eventually(condition: Callable[[], bool]) -> bool:
    """Poll for at most ten seconds."""
    return any(condition() or PAUSE.wait(0.02) for _ in range(500))


def idle(served: Served) -> bool:
    stats = served.stats()
    return (stats.running, stats.waiting, stats.kv_pages.held) == (0, 0, 0)


def busy(served: Served, requests: int) -> Callable[[], bool]:
    return lambda: served.stats().running + served.stats().waiting >= requests


def open_request(
    served: Served, body: dict[str, Any], path: str = "/v1/chat/completions", *, cut: bool = False
) -> socket.socket:
    """A socket on which the request was written, or its first half if `cut`, and nothing read."""
    where = urlparse(served.url)
    raw = json.dumps(body).encode()
    sock = socket.create_connection((where.hostname, where.port), timeout=30)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
    sock.sendall(head.encode() + (raw[: len(raw) // 2] if cut else raw))
    return sock


def reset(sock: socket.socket) -> None:
    """Close with a reset, as a killed client does."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def open_stream(served: Served) -> socket.socket:
    """A stream that was accepted, after at most 100 refusals for a queue that is not empty yet."""
    for _ in range(100):
        sock = open_request(served, {**LONG, "stream": True})
        if sock.recv(12) == b"HTTP/1.1 200":
            return sock
        sock.close()
        PAUSE.wait(0.05)
    raise AssertionError("the queue never emptied")


@contextmanager
def serve_process(*flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`thinkfold serve` with random weights once it is ready, and its URL (with /v1)."""
    model = [small_pebble(), "--served-model-name", "pebble", "--load-format", "dummy"]
    command = [sys.executable, "-m", "thinkfold", "serve", *model, "--port", "0", *flags]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job inherits an ignored one
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "http://127.0.0.1:" in line, process.stderr.read() if process.stderr else ""
        yield process, line.split()[-1]
    finally:
        process.kill()


def refused(url: str) -> bool:
    """Whether nobody listens there."""
    where = urlparse(url)
    with socket.socket() as sock:
        return sock.connect_ex((where.hostname, where.port)) != 0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 4])
def test_case_45_a_vanished_client_returns_its_pages(served: Served, stream: bool, n: int) -> None:
    assert eventually(lambda: idle(served))
    for _ in range(3):
        sock = open_request(served, {**LONG, "stream": stream, "n": n})
        if stream:
            assert sock.recv(64).startswith(b"HTTP/1.1 200")
        assert eventually(busy(served, 1))
        reset(sock)
        assert eventually(lambda: idle(served)), served.stats()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": LONG["messages"], "max_tokens": 1900, "thinking": {"type": "adaptive"}}),
        ("/v1/responses", {"input": "go", "max_output_tokens": 1900}),
    ],
)
def test_case_45_in_other_shapes(served: Served, path: str, body: dict[str, Any], stream: bool) -> None:
    assert eventually(lambda: idle(served))
    sock = open_request(served, {**body, "stream": stream}, path)
    if stream:
        assert sock.recv(64).startswith(b"HTTP/1.1 200")
    assert eventually(busy(served, 1))
    reset(sock)
    assert eventually(lambda: idle(served)), served.stats()


def test_case_45_gone_at_once_and_while_queued(narrow: Served) -> None:
    for _ in range(5):
        reset(open_request(narrow, LONG))
    first = open_stream(narrow)
    queued = open_request(narrow, {**LONG, "stream": True})
    assert eventually(busy(narrow, 2))
    reset(queued)
    assert eventually(lambda: narrow.stats().waiting == 0 and narrow.stats().running == 1)
    reset(first)
    assert eventually(lambda: idle(narrow))


def test_case_45_64_clients_dropped_at_once(served: Served) -> None:
    """Half of them stream; more than may run together; the next request is served."""
    assert eventually(lambda: idle(served))
    socks = [open_request(served, {**LONG, "stream": bool(i % 2)}) for i in range(64)]
    assert eventually(lambda: served.stats().running > 0)
    for sock in socks:
        reset(sock)
    assert eventually(lambda: idle(served)), served.stats()
    with served.client() as client:
        assert client.chat.completions.create(model="pebble", messages=LONG["messages"], max_tokens=2).choices


def test_case_45_200_clients_dropped_at_random_moments(served: Served) -> None:
    """Amid the request, unread, after a few bytes, behind others: no page and no task of the server is left."""
    assert eventually(lambda: idle(served))
    tasks, random, held = served.tasks(), Random(0), list[socket.socket]()
    for i in range(200):
        body = {**LONG, "stream": random.random() < 0.7, "n": random.choice((1, 1, 2))}
        held.append(open_request(served, body, cut=random.random() < 0.1))
        if random.random() < 0.3:
            eventually(busy(served, random.randrange(4)))
        if body["stream"] and random.random() < 0.3:
            held[-1].settimeout(0.05)
            with suppress(TimeoutError):
                held[-1].recv(random.randrange(1, 4000))
        while len(held) > random.randrange(40) or (i == 199 and held):
            reset(held.pop(random.randrange(len(held))))
    assert eventually(lambda: idle(served)), served.stats()
    assert eventually(lambda: served.tasks() <= tasks), (served.tasks(), tasks)


def test_case_45_closing_the_openai_stream(served: Served) -> None:
    with served.client() as client:
        stream = client.chat.completions.create(
            **{k: v for k, v in LONG.items() if k != "ignore_eos"}, stream=True, extra_body={"ignore_eos": True}
        )
        assert next(iter(stream)).choices
        stream.close()
    assert eventually(lambda: idle(served))


def test_a_full_queue_is_429(narrow: Served) -> None:
    assert eventually(lambda: idle(narrow))
    held = [open_stream(narrow), open_request(narrow, {**LONG, "stream": True})]
    assert eventually(busy(narrow, 2))
    with narrow.client() as client, pytest.raises(openai.RateLimitError) as caught:
        client.chat.completions.create(model="pebble", messages=LONG["messages"], max_tokens=1)
    assert int(caught.value.response.headers["retry-after"]) >= 1
    for sock in held:
        reset(sock)
    assert eventually(lambda: idle(narrow))


def test_a_slow_reader_gets_everything(served: Served) -> None:
    sock = open_request(served, {**LONG, "stream": True, "seed": 1, "max_tokens": 300})
    assert eventually(lambda: served.stats().running == 0 and served.stats().steps > 0)
    with sock.makefile("rb") as lines:
        text = b""
        while b"[DONE]" not in text:
            text += lines.readline()
    sock.close()
    assert text.count(b'"finish_reason":"length"') == 1


def test_case_58_health_answers_beside_a_huge_message(served: Served) -> None:
    body = {"model": "pebble", "messages": [{"role": "user", "content": "x" * 20_000_000}]}
    status: list[int] = []
    sender = threading.Thread(
        target=lambda: status.append(httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=60).status_code)
    )
    sender.start()
    with httpx.Client(base_url=served.url, timeout=60) as client:
        while sender.is_alive():
            assert client.get("/health").status_code == 200
    assert status == [400]


def test_case_59_health_and_readiness_hold_through_long_prefills(served: Served) -> None:
    computed = served.stats().computed_prompt_tokens
    bodies = [{"prompt": [10 + i, *(100 + k % 900 for k in range(1700))], "max_tokens": 1} for i in range(6)]

    def send(body: dict[str, Any]) -> int:
        return httpx.post(f"{served.url}/v1/completions", json=body, timeout=60).status_code

    with ThreadPoolExecutor(len(bodies)) as pool, httpx.Client(base_url=served.url, timeout=60) as client:
        replies = [pool.submit(send, body) for body in bodies]
        while not all(reply.done() for reply in replies):
            assert (client.get("/health").status_code, client.get("/ready").status_code) == (200, 200)
        assert [reply.result() for reply in replies] == [200] * len(bodies)
    assert eventually(lambda: served.stats().computed_prompt_tokens - computed > 6 * 1600)


def test_metrics_count_what_was_served(served: Served) -> None:
    with served.client() as client:
        client.chat.completions.create(model="pebble", messages=LONG["messages"], max_tokens=3)
    text = httpx.get(f"{served.url}/metrics").text
    values = {line.split()[0]: float(line.split()[1]) for line in text.splitlines() if not line.startswith("#")}
    assert values["thinkfold_answer_tokens_total"] >= 3
    assert values["thinkfold_time_to_first_token_seconds_count"] >= 1
    assert values["thinkfold_pages_total"] > 0 and values["thinkfold_ready"] == 1


def test_requests_that_outlive_the_grace_get_a_last_message() -> None:
    with serve_process("--drain-s", "0.1") as (process, url):
        body = {**LONG, "max_tokens": 16_000}
        waiting: list[httpx.Response] = []
        whole = threading.Thread(
            target=lambda: waiting.append(httpx.post(f"{url}/chat/completions", json=body, timeout=60))
        )
        with httpx.stream("POST", f"{url}/chat/completions", json={**body, "stream": True}, timeout=60) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            whole.start()
            assert eventually(lambda: "thinkfold_running 2" in httpx.get(f"{url[:-3]}/metrics").text)
            process.send_signal(signal.SIGTERM)
            events = [line for line in lines if line]
        whole.join(60)
        _, errors = process.communicate(timeout=30)
    assert '"code":"engine_dead"' in events[-2] and events[-1] == "data: [DONE]"
    assert waiting[0].status_code == 503 and waiting[0].json()["error"]["code"] == "engine_dead"
    assert process.returncode == 0 and "Traceback" not in errors


def test_a_second_ctrl_c_waits_for_nobody() -> None:
    with serve_process("--drain-s", "3600") as (process, url):
        body = {**LONG, "max_tokens": 16_000, "stream": True}
        with httpx.stream("POST", f"{url}/chat/completions", json=body, timeout=60) as stream:
            assert next(stream.iter_lines()).startswith("data: ")
            process.send_signal(signal.SIGINT)
            assert eventually(lambda: refused(url))
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors


def test_thinkfold_serve_from_start_to_signal(capsys: pytest.CaptureFixture[str]) -> None:
    with serve_process("--max-model-len", "512", "--kv-cache-bytes", "16777216") as (process, url):
        assert httpx.get(url.removesuffix("/v1") + "/ready").status_code == 200
        assert main(["ask", "hello", "--url", url, "--max-tokens", "4", "--depth", "none"]) == 0
        told = capsys.readouterr().out
        assert "answer tokens" in told and "\x1b" not in told
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 0 and "Traceback" not in errors
