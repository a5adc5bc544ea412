"""The command line: flags from the configuration, one-line errors, and `ask` against a scripted reply."""

from __future__ import annotations

import argparse
import asyncio
import gc
import io
import json
import math
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from server_stand_in import EOS, ScriptedEngine
from tiny_tokenizer import EFFORT_TEMPLATE, OPEN_TEMPLATE

import thinkfold
from thinkfold.cli import ask, serve
from thinkfold.cli.engine_flags import add_engine_flags, engine_config
from thinkfold.cli.main import INTERRUPTED, USAGE_ERROR, build_parser, main
from thinkfold.cli.settings import resolve
from thinkfold.config import EngineConfig
from thinkfold.errors import RequestFailedError
from thinkfold.server.keyring import Keyring
from thinkfold.server.reply import three_costs
from thinkfold.types import Clamp, Costs, Fold, FoldParams, FoldProfile, SamplingParams, Segment, ThinkingParams

_ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(thinkfold.__file__).parents[1])}


def parsed(*argv: str) -> EngineConfig:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="pebble")
    add_engine_flags(parser)
    return engine_config(parser.parse_args(argv))


def test_no_flag_gives_the_default_configuration() -> None:
    assert parsed() == EngineConfig()


def test_every_field_has_a_flag_of_its_type() -> None:
    config = parsed(
        "some/model", "--block-size", "32", "--pipeline-depth", "0", "--no-enable-prefix-caching", "--own-process",
        "--gpu-memory-utilization", "0.5", "--served-model-name", "x", "--load-format", "dummy", "--seed", "3",
    )  # fmt: skip
    assert (config.model, config.page_size, config.pipeline_depth, config.seed) == ("some/model", 32, 0, 3)
    assert (config.enable_prefix_caching, config.own_process, config.gpu_memory_utilization) == (False, True, 0.5)
    assert (config.served_model_name, config.load_format) == ("x", "dummy")
    folding = parsed("--fold-policy", "eager", "--fold-profile", "coarse", "--fold-gate", "0.5", "--fold-entries", "9")
    assert (folding.fold_policy, folding.fold_gate) == ("eager", 0.5)
    assert folding.fold_numbers == ("coarse", FoldProfile(4096, 512, 512, 512, 9, 192))


def test_serve_hands_on_its_secret_and_the_bounds_of_its_store(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * 32)
    flags = ["serve", "--secret-file", str(secret), "--response-store-bytes", "7", "--response-ttl-s", "2.5"]
    options = serve.server_options(resolve(build_parser().parse_args(flags), {}).serve)
    assert (options.response_store_bytes, options.response_ttl_s) == (7, 2.5)
    assert options.keyring.is_signed(Keyring(b"s" * 32).sign("w", []), "w", [])
    other = serve.server_options(resolve(build_parser().parse_args(["serve"]), {}).serve)
    assert not other.keyring.is_signed(Keyring(b"s" * 32).sign("w", []), "w", [])


def test_help_names_every_field_and_loads_no_torch() -> None:
    code = (
        "import sys; from thinkfold.cli.main import build_parser\n"
        "build_parser()\n"
        "sys.exit('torch was imported' if 'torch' in sys.modules else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=_ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    text = parser.format_help()
    assert all("--" + f.name.replace("_", "-") in text for f in fields(EngineConfig) if f.name != "model")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["serve", "--page-size", "7", "--port", "0"], "page_size: must be one of"),
        (["serve", "--host", "203.0.113.1", "--port", "0"], "thinkfold serve:"),
        (["serve", "--seed", "3", "--port", "0"], "seed: needs load_format dummy"),
        (["serve", "--response-store-bytes", "-1", "--port", "0"], "response_store_bytes: must be at least 0, got -1"),
        (["serve", "--response-ttl-s", "0", "--port", "0"], "response_ttl_s: must be in (0, 1e+09], got 0.0"),
        (["serve", "--secret-file", "nowhere", "--port", "0"], "secret_file: cannot be read: No such file"),
        (["serve", "--secret-file", os.devnull, "--port", "0"], "secret_file: must hold at least 32 bytes, got 0"),
        (["serve", "--port", "65536"], "port: must be in [0, 65535], got 65536"),
        (["serve", "--port", "-1"], "port: must be in [0, 65535], got -1"),
        (["ask", "q", "--url", "http://127.0.0.1:1"], "cannot reach http://127.0.0.1:1"),
        (["ask", "q", "--url", "ftp://x"], "url: must start with"),
        (["ask", "q", "--url", "http://[::1"], "cannot talk to http://[::1"),
        (["ask", "q", "--url", "http://127.0.0.1:abc"], "cannot talk to http://127.0.0.1:abc"),
        (["serve", "--fold-entries", "999", "--port", "0"], "fold_entries: must be at least 0"),
        (["ask", "q", "--fold-gate", "2"], "fold.gate: must be in [0, 1], got 2"),
        (["ask", "q", "--no-thinking", "--depth", "high"], "depth: disagrees"),
    ],
)
def test_errors_are_one_line_and_exit_2(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == USAGE_ERROR
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.count("\n") == 1 and not captured.out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "thinkfold: the following arguments are required"),
        (["dance"], "invalid choice: 'dance'"),
        (["ask"], "thinkfold ask: the following arguments are required: question"),
        (["ask", "q", "--depth", "abyss"], "thinkfold ask: argument --depth: invalid choice: 'abyss'"),
        (["serve", "--port", "abc"], "thinkfold serve: argument --port: invalid int value: 'abc'"),
        (["serve", "--bogus"], "unrecognized arguments: --bogus"),
    ],
)
def test_usage_errors_are_one_line_and_exit_2(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    captured = capsys.readouterr()
    assert caught.value.code == USAGE_ERROR and words in captured.err
    assert captured.err.count("\n") == 1 and not captured.out


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(ask, "run", interrupted)
    assert main(["ask", "q"]) == INTERRUPTED


CHUNK = b'data: {"choices": [{"index": 0, "delta": {"content": "x", "reasoning": null}}]}\n'


def test_a_connection_that_is_reset_has_broken_off() -> None:
    def lines() -> Iterator[bytes]:
        yield CHUNK
        raise ConnectionResetError(104, "Connection reset by peer")

    pieces = ask._read_events(lines())
    assert next(pieces).text == "x"
    with pytest.raises(RequestFailedError, match="broke off before its end"):
        next(pieces)


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n" + CHUNK, "broke off before its end"),
        (b"HTTP/1.1 200 OK\r\n\r\nhello", "broke off before its end"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "broke off"),
        (b"garbage\r\n\r\n", "cannot talk to"),
        (b'HTTP/1.1 200 OK\r\n\r\ndata: {"a"\n\n', "cannot talk to"),
    ],
)
def test_ask_says_what_a_broken_server_did(reply: bytes, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            peer, _ = server.accept()
            with peer:
                peer.recv(65536)
                peer.sendall(reply)
                peer.shutdown(socket.SHUT_WR)
                while peer.recv(65536):  # a close with something unread would reset the connection
                    pass

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        assert main(["ask", "q", "--url", f"http://127.0.0.1:{server.getsockname()[1]}"]) == USAGE_ERROR
        thread.join(10)
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.count("\n") == 1


CLAMPED = [
    {"field": "thinking_token_budget", "asked": 12000, "granted": 7372, "by": "max_tokens"},
    {"field": "max_tokens", "asked": None, "granted": 900, "by": "kv_pool"},
]


def test_ask_asks_a_server_for_folds_and_shows_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("THINKFOLD_API_KEY", "right")
    fold = {"choice": 0, "id": 0, "segment": 3, "start": 10, "end": 58, "entries": 16.0, "pages_freed": 2,
            "error": None, "refused": False}  # fmt: skip
    usage, policy = {"thinkfold": three_costs(Costs(folds=1, folded_tokens=48))}, {"clamped": CLAMPED}
    stream = [
        f"event: thinkfold.fold\ndata: {json.dumps({'choices': [], 'thinkfold': {'fold': fold}})}\n\n".encode(),
        CHUNK,
        b'data: {"choices": [{"index": 0, "delta": {}, "thinking_end_reason": "budget"}]}\n\n',
        f"data: {json.dumps({'choices': [], 'usage': usage, 'thinkfold': {'policy': policy}})}\n\n".encode(),
        b"data: [DONE]\n\n",
    ]
    bodies: list[bytes] = []
    keys: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            peer, _ = server.accept()
            with peer, peer.makefile("rb") as reader:
                length = 0
                while (line := reader.readline().strip()) != b"":
                    length = int(line.split()[1]) if line.lower().startswith(b"content-length:") else length
                    keys.extend([line.split()[2]] if line.lower().startswith(b"authorization: bearer") else [])
                bodies.append(reader.read(length))
                peer.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + b"".join(stream))

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert main(["ask", "q", "--url", url, "--fold", "eager", "--fold-entries", "8"]) == 0
        thread.join(10)
    assert json.loads(bodies[0])["thinkfold"] == {"fold": {"policy": "eager", "entries": 8}, "events": True}
    assert keys == [b"right"]
    out = capsys.readouterr().out
    assert "[thinking_token_budget: 7372 instead of 12000, lowered by max_tokens]" in out
    assert "[max_tokens: 900 instead of no limit, lowered by kv_pool]" in out
    assert "[fold: segment 3, 48 tokens → 16 entries, 2 pages freed]\nx" in out
    assert "0 thinking (ended: budget, 48 folded)" in out


def test_ask_accepts_a_server_without_our_costs() -> None:
    pieces = list(ask._read_events([CHUNK, b"data: [DONE]\n"]))
    assert [(p.reasoning, p.text, p.costs) for p in pieces] == [("", "x", None)]


def test_a_closed_standard_input_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["ask", "-"]) == USAGE_ERROR
    assert "standard input is closed" in capsys.readouterr().err


def test_output_never_fails_for_its_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    monkeypatch.setattr(ask, "run", lambda args: print("1.0 MB·s", flush=True) or 0)
    assert main(["ask", "q"]) == 0
    assert raw.getvalue() == b"1.0 MB\\xb7s\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("out", "ansi"), [(io.StringIO(), False), (Terminal(), True)])
async def test_ask_shows_thinking_answer_and_costs(out: io.StringIO, ansi: bool) -> None:
    told = {1: [Segment(0, 0, 64), Fold(0, 0, 48, 16.0, 2, 0.125), Fold(1, 48, 64, 0.0, 0, math.nan, refused=True)]}
    engine = ScriptedEngine((("w", "</think>", "A", EOS),), template=OPEN_TEMPLATE, told=told)
    printer = ask._Printer(out)
    async for piece in ask._pieces(engine, "q", SamplingParams(), ThinkingParams(), FoldParams(policy="eager")):
        printer.show(piece)
    text = out.getvalue()
    assert engine.calls[0].fold == FoldParams(policy="eager")
    assert ("\x1b[" in text) == ansi
    assert text.index("w") < text.index("A") < text.index("thinking (ended: natural, ")
    folded = "[fold: segment 0, 48 tokens → 16 entries, 2 pages freed, estimated error 0.125]"
    refused = "[fold refused: segment 0, 16 tokens stay as they are]"
    assert text.index("w") < text.index(f"\n{ask.DIM if ansi else ''}{folded}") < text.index(refused) < text.index("A")
    assert "thinking (ended: natural, 48 folded)" in text
    assert text.count("\n") >= 3 and text.endswith("s\n" if not ansi else "s\x1b[0m\n")


async def test_ask_tells_the_template_its_depth_and_what_had_to_give_way() -> None:
    engine = ScriptedEngine(template=EFFORT_TEMPLATE, clamped=(Clamp("max_tokens", 9999, 500, "model_length"),))
    out = io.StringIO()
    async for piece in ask._pieces(engine, "q", SamplingParams(), ThinkingParams(reasoning_effort="low"), FoldParams()):
        ask._Printer(out).show(piece)
    assert "Reasoning: low" in engine.calls[0].prompt
    assert "[max_tokens: 500 instead of 9999, lowered by model_length]" in out.getvalue()


def test_a_loaded_server_leaves_its_modules_out_of_collections() -> None:
    engine = SimpleNamespace(
        config=SimpleNamespace(served_model_name="x"), health=lambda: SimpleNamespace(alive=False, reason="gone")
    )

    async def loaded() -> Any:
        return engine

    gc.unfreeze()
    try:
        told = serve._watch(SimpleNamespace(loaded=loaded), SimpleNamespace(started=True, should_exit=False), "url")
        assert asyncio.run(told) == serve.ENGINE_DIED
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_the_line_of_costs_counts_no_second_twice() -> None:
    costs = three_costs(Costs(thinking_tokens=9, queue_s=1.0, thinking_s=2.0, device_s=2.5))
    assert ask._cost_line(ask.Piece(costs=costs)).endswith(" of KV, 3.0 s")
