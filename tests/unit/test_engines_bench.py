"""`thinkfold bench engines`: what is asked, what counts, how servers come and go, and one run against our own."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from thinkfold.cli import bench, peers
from thinkfold.cli.load import Ask, Client, OutOfTime, Reply, Run
from thinkfold.cli.peers import Peer, Place
from thinkfold.errors import ParameterError, ThinkfoldError
from thinkfold.pebble import pebble_path, problems

engines = bench.load(Path(__file__).parents[2] / "benchmarks" / "engines.py")
SIZES = engines.Sizes(agents=5, maths=3, chains=2, short=3, long=2, suite="medium", scale=0.1, max_len=4096)
PLACE = Place(pebble_path(), Path("p.gguf"), "cpu", "float32", 4096, 8, 20_000, 8192)


@pytest.fixture(scope="module")
def texts() -> Any:
    return engines.Texts(pebble_path(), seed=0)


async def asked(session: Any, reply: str = "yes ") -> list[Ask]:
    asks, found = session(), []
    try:
        found.append(await anext(asks))
        while True:
            found.append(await asks.asend(reply))
    except StopAsyncIteration:
        return found


def test_every_workload_fits_and_knows_what_was_said_before(texts: Any) -> None:
    for name, make in engines.WORKLOADS.items():
        sessions = make(texts, SIZES)
        for session in sessions:
            for ask in asyncio.run(asked(session)):
                assert ask.tokens == texts.count(ask.prompt) and ask.known < ask.tokens, name
                assert ask.tokens + ask.max_tokens < SIZES.max_len, name
                assert ask.forced == (ask.judge is None), name
    first, *others = [asyncio.run(asked(session))[0] for session in engines.agents(texts, SIZES)]
    assert first.known == 0 and all(engines.SYSTEM <= ask.known < first.tokens for ask in others)


def test_a_chain_sends_all_that_was_said(texts: Any) -> None:
    steps = asyncio.run(asked(engines.chains(texts, SIZES)[0], reply="I looked."))
    assert len(steps) == 3 and steps[0].known == 0
    for before, after in itertools.pairwise(steps):
        assert after.prompt.startswith(before.prompt) or "I looked." in after.prompt
        assert after.known >= before.tokens - 8  # the template may write the last turn in another way


def test_long_outputs_are_other_texts_than_short_ones_and_than_the_warm_up(texts: Any) -> None:
    prompts = [
        asyncio.run(asked(session))[0].prompt
        for name in ("short_1k", "long_32k")
        for session in engines.WORKLOADS[name](texts, SIZES)
    ]
    prompts += [asyncio.run(asked(s))[0].prompt for s in engines.thinkers(texts, 2, 16, 4096, first=engines.WARM)]
    assert len(set(prompts)) == len(prompts)


def reply(seconds: float, first: float, tokens: int, cached: int | None = None, **ask: Any) -> Reply:
    return Reply(Ask("p", 100, 50, **ask), seconds, first, "\\boxed{7}", tokens, cached)


def test_numbers_of_a_run() -> None:
    replies = [reply(2.0, 1.0, 11, 60, known=80), reply(6.0, 5.0, 11, 20, known=0), reply(3.0, 0.5, 11, 0, known=80)]
    found = engines.metrics(Run(replies, 4.0, 0.5), slo_ttft=2.0, slo_tpot=0.2, kv_share=1e6)
    assert (found["n"], found["requests_per_s"], found["output_tokens_per_s"]) == (3, 0.75, 8.25)
    assert (found["p50_s"], found["ttft_s"], found["kv_use_peak"]) == (3.0, 1.0, 0.5)
    assert found["kv_session_bytes"] == 5e5
    assert found["goodput"] == 0.25  # the second began late, the third is slow
    assert found["prefix_hit_rate"] == pytest.approx(80 / 300)
    assert found["prefill_reuse"] == 0.5
    assert "accuracy" not in found


def test_what_an_engine_does_not_tell_is_not_in_its_row() -> None:
    judge = "\\boxed{7}".__eq__
    found = engines.metrics(Run([reply(2.0, 1.0, 11, judge=judge), reply(2.0, 1.0, 11, 3)], 4.0, None), 2.0, 0.2, 1e6)
    assert not {"kv_use_peak", "kv_session_bytes", "prefix_hit_rate", "prefill_reuse"} & set(found)
    assert found["accuracy"] == 1.0


def test_maths_is_judged_by_its_checker(texts: Any) -> None:
    problem = next(iter(problems("medium", 1, engines.OFFSET)))
    judge = asyncio.run(asked(engines.maths(texts, SIZES)[0]))[0].judge
    assert judge(f"So it is \\boxed{{{problem.answer}}}.") and not judge("It is \\boxed{nothing}.")


def test_every_engine_is_given_the_same_room() -> None:
    tables = {name: make() for name, make in peers.engines(PLACE, [2]).items()}
    flags = {name: peer.flags for name, peer in tables.items()}
    assert flags["thinkfold"]["kv-cache-bytes"] == 20_000 * 8192
    assert flags["thinkfold-eager"] == {**flags["thinkfold"], "fold-policy": "eager"}
    assert flags["thinkfold-stop"] == {**flags["thinkfold"], "early-stop": "balanced"}
    assert flags["thinkfold-vote"] == flags["thinkfold"] and tables["thinkfold-vote"].asks["vote"] == {"n": 8}
    assert flags["vllm"]["num-gpu-blocks-override"] * flags["vllm"]["block-size"] == 20_000
    assert flags["sglang"]["max-total-tokens"] == 20_000
    assert flags["transformers"]["cb-num-blocks"] * flags["transformers"]["cb-block-size"] == 20_000
    assert peers.llama_server(PLACE).flags["ctx-size"] == 4 * 4096
    assert peers.llama_server(PLACE).flags["cache-type-v"] == "f32" and peers.llama_cpp(PLACE, [2]).flags["type_k"] == 0
    words = tables["vllm"].arguments(1234)
    assert words[words.index("--port") :][:2] == ["--port", "1234"] and "None" not in words and "True" not in words


def test_engines_that_are_not_there_say_why() -> None:
    with pytest.raises(ThinkfoldError, match="no_such_engine is not installed"):
        peers.version_of(Peer("no_such_engine", ["-m", "no_such_engine"], {}), sys.executable)
    with pytest.raises(ThinkfoldError, match="--gguf"):
        peers.engines(Place(Path(), None, "cpu", "float32", 1, 1, 1, 1), [])["llama.cpp"]()
    with pytest.raises(ThinkfoldError, match="engine=path/to/python"):
        peers.interpreters(["vllm=/no/such/python"])


def test_a_server_that_ends_leaves_the_end_of_its_log(tmp_path: Path) -> None:
    peer = Peer("json", ["-c", "import sys; print('loading'); sys.exit('no room for KV')"], {})
    with (
        pytest.raises(ThinkfoldError, match=r"exit code 1: .*no room for KV"),
        peers.served(peer, sys.executable, tmp_path / "log", 30),
    ):
        pass


def test_a_server_that_never_answers_is_stopped_with_its_children(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)', 'peers-test'])"
    )
    peer = Peer("json", ["-c", script], {})
    with pytest.raises(ThinkfoldError, match="did not answer"), peers.served(peer, sys.executable, tmp_path / "log", 1):
        pass
    assert not [p for p in psutil.process_iter(["cmdline"]) if "peers-test" in (p.info["cmdline"] or ())]


def test_gauges_are_read_by_name() -> None:
    text = '# TYPE a:use gauge\na:use{engine="0"} 0.25\na:use{engine="1"} 0.5\nb 3\n'
    assert peers.gauge(text, "a:use") == 0.5
    assert peers.gauge(text, "c") is None


def test_a_pool_must_hold_one_sequence() -> None:
    with pytest.raises(ParameterError, match="pool_tokens"):
        engines.main(["--pool-tokens", "100", "--no-record"])


def test_outputs_too_long_for_the_model_are_a_reason(texts: Any) -> None:
    whole = replace(SIZES, scale=1.0)
    with pytest.raises(ThinkfoldError, match=r"a sequence holds 4096 \(--scale"):
        engines.WORKLOADS["long_32k"](texts, whole)


def test_our_own_server_does_the_work_and_an_absent_one_gets_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--engine", "thinkfold", "--engine", "llama.cpp", "--workload", "agents", "--workload", "chains"]
    words += ["--agents", "3", "--chains", "1", "--scale", "0.1", "--clients", "2", "--slots", "4", "--json"]
    assert engines.main([*words, "--max-len", "4096", "--pool-tokens", "8192", "--no-record"]) == 0
    found = {row["case"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    agents, chains = found["thinkfold/agents"]["metrics"], found["thinkfold/chains"]["metrics"]
    assert (agents["n"], agents["output_tokens_mean"]) == (3, 32)
    assert (chains["n"], chains["output_tokens_mean"]) == (3, engines.ACTION)
    assert chains["prefill_reuse"] > 0.5 and 0 < agents["kv_use_peak"] < 1
    assert found["llama.cpp/agents"]["metrics"] == {} and "--gguf" in found["llama.cpp/agents"]["versions"]["reason"]


@contextmanager
def answering(events: list[dict[str, Any]]) -> Iterator[str]:
    """A server that answers every request with these events."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()
            if not asked.get("stream"):
                self.wfile.write(json.dumps(events[0]).encode())
                return
            for event in events:
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def send(url: str, ask: Ask, streams: bool = True) -> Run:
    async def run() -> Run:
        client = Client(url, Peer("json", [], {}, streams=streams), lambda text: len(text.split()))
        try:
            return await client.run([partial(engines._once, ask)], 2)
        finally:
            await client.close()

    return asyncio.run(run())


WORDS = [{"choices": [{"text": "", "reasoning": "one two "}]}, {"choices": [{"text": "three"}]}]
USAGE = {"choices": [], "usage": {"completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 9}}}


def test_a_reply_is_put_together_and_counted() -> None:
    with answering(WORDS) as url:
        (told,) = send(url, Ask("p", 1, 3, forced=True)).replies
    assert (told.text, told.tokens, told.cached) == ("one two three", 3, None)
    cut = {"choices": [{"text": " four", "finish_reason": "length"}]}
    with answering([*WORDS, cut]) as url:  # text alone may be written in another number of tokens
        assert send(url, Ask("p", 1, 9)).replies[0].tokens == 9
    with answering([*WORDS, USAGE]) as url:
        (told,) = send(url, Ask("p", 1, 9)).replies
    assert (told.tokens, told.cached) == (4, 9) and 0 < told.first_s <= told.seconds


def test_who_does_not_stream_tells_no_first_text() -> None:
    whole = {"choices": [{"text": "one two", "finish_reason": "stop"}], "usage": {"completion_tokens": 4}}
    with answering([whole]) as url:
        run = send(url, Ask("p", 1, 9), streams=False)
    assert (run.replies[0].text, run.replies[0].tokens) == ("one two", 4)
    assert "ttft_s" not in engines.metrics(run, 2.0, 0.2, 1e6)


@pytest.mark.parametrize(
    ("events", "why"), [([*WORDS, USAGE], "made 4 tokens where 3"), ([{"error": "no memory"}], "no memory")]
)
def test_unequal_work_and_failures_get_no_number(events: list[dict[str, Any]], why: str) -> None:
    with answering(events) as url, pytest.raises(ThinkfoldError, match=why):
        send(url, Ask("p", 1, 3, forced=True))


def test_work_that_takes_too_long_is_given_up() -> None:
    async def run() -> None:
        async def never_answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()  # until the client has gone
            writer.close()

        server = await asyncio.start_server(never_answers, "127.0.0.1", 0)
        client = Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", Peer("json", [], {}), len)
        with pytest.raises(OutOfTime, match=r"took longer than 0\.5 s"):
            await client.run([partial(engines._once, Ask("p", 1, 3))], 1, limit=0.5)
        await client.close()
        server.close()

    asyncio.run(run())


def test_what_is_left_when_time_has_run_out_is_asked_of_a_new_server(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    @contextmanager
    def served(*_: Any) -> Iterator[str]:
        started.append([])
        yield "url"

    async def ask_all(url: str, peer: Peer, names: list[str], *_: Any) -> list[tuple[str, Any]]:
        started[-1] += names
        return [(names[0], "took longer than 1 s")] if len(started) == 1 else [(name, {"n": 1}) for name in names]

    monkeypatch.setattr(engines.peers, "served", served)
    monkeypatch.setattr(engines, "ask_all", ask_all)
    args = engines.parse(["--workload", "agents", "--workload", "maths", "--workload", "chains"])
    _, found = engines.measure("json", lambda: Peer("httpx", ["-c", ""], {}), args, None, None)
    assert started == [["agents", "maths", "chains"], ["maths", "chains"]]
    assert found == [("agents", "took longer than 1 s"), ("maths", {"n": 1}), ("chains", {"n": 1})]


def test_a_server_that_is_gone_is_an_error() -> None:
    with answering([]) as url:
        pass
    with pytest.raises(ThinkfoldError, match="a request failed"):
        send(url, Ask("p", 1, 3))
