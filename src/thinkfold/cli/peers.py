"""Inference engines as OpenAI servers on this machine: how each is started, and what it tells about its memory."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from thinkfold.errors import ThinkfoldError

HOST = "127.0.0.1"
NAME = "bench"  # what every engine calls the model
VOTES = 8  # samples of a vote, at most
GGML_TYPES = {"float32": ("f32", 0), "float16": ("f16", 1), "bfloat16": ("bf16", 30)}  # llama.cpp's names of dtypes


@dataclass(frozen=True, slots=True)
class Place:
    """What every engine is given alike: weights, room and machine.

    `pool_tokens` of KV in the model's own dtype, `slots` sequences at once, `max_len` tokens in each.
    """

    model: Path
    gguf: Path | None
    device: str
    dtype: str
    max_len: int
    slots: int
    pool_tokens: int
    token_bytes: float  # of KV, in the model's own dtype

    def pages(self, size: int) -> int:
        return -(-self.pool_tokens // size)


@dataclass(frozen=True, slots=True)
class Peer:
    """One engine: the module that it needs, the arguments that start it, and the names of its gauges.

    `words` are what follows the interpreter. `kv_use` names a gauge of the share of KV memory in use, None where the
    engine has none; `asks` are fields of every request, `forced` those that make it run to `max_tokens`.
    """

    module: str
    words: Sequence[str]
    flags: Mapping[str, Any]
    kv_use: str | None = None
    asks: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0.0})
    forced: Mapping[str, Any] = field(default_factory=lambda: {"ignore_eos": True})
    environment: Mapping[str, str] = field(default_factory=dict)
    model_name: str = NAME
    streams: bool = True

    def arguments(self, port: int) -> list[str]:
        """The whole command behind the interpreter. A flag of True stands alone, one of None is left out."""
        given = {"host": HOST, "port": port, **self.flags}
        words = list(self.words)
        for name, value in given.items():
            if value is not None:
                words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        return words


def thinkfold(place: Place, **flags: Any) -> Peer:
    """`thinkfold serve`; `flags` are more of its own."""
    own = {
        "served-model-name": NAME,
        "device": place.device,
        "dtype": place.dtype,
        "max-model-len": place.max_len,
        "max-num-seqs": place.slots,
        "max-waiting": 100_000,
        "kv-cache-bytes": int(place.pages(16) * 16 * place.token_bytes),
        "default-thinking-budget": -1,
        **flags,
    }
    return Peer("thinkfold", ["-m", "thinkfold", "serve", str(place.model)], own, "thinkfold_kv_use")


def thinkfold_vote(place: Place) -> Peer:
    """`thinkfold serve`, asked for the answer that most of several samples have."""
    return replace(thinkfold(place), asks={"vote": {"n": VOTES}, "temperature": 0.7, "seed": 0})


def vllm(place: Place) -> Peer:
    """vLLM's server, with the same number of KV tokens in blocks of its own."""
    on_cpu, block = place.device == "cpu", 32 if place.device == "cpu" else 16
    flags = {
        "served-model-name": NAME,
        "dtype": place.dtype,
        "max-model-len": place.max_len,
        "max-num-seqs": place.slots,
        "block-size": block,
        "num-gpu-blocks-override": place.pages(block),
        "enable-prompt-tokens-details": True,
        "enforce-eager": on_cpu or None,
    }
    space = {"VLLM_CPU_KVCACHE_SPACE": str(ceil(place.pages(block) * block * place.token_bytes / 2**30))}
    return Peer(
        "vllm",
        ["-m", "vllm.entrypoints.openai.api_server", "--model", str(place.model)],
        flags,
        "vllm:kv_cache_usage_perc",
        environment=space if on_cpu else {},
    )


def sglang(place: Place) -> Peer:
    """SGLang's server."""
    flags = {
        "model-path": place.model,
        "served-model-name": NAME,
        "device": place.device,
        "dtype": place.dtype,
        "context-length": place.max_len,
        "max-running-requests": place.slots,
        "max-total-tokens": place.pool_tokens,
        "enable-metrics": True,
        "enable-cache-report": True,
    }
    return Peer("sglang", ["-m", "sglang.launch_server"], flags, "sglang:token_usage")


def transformers(place: Place) -> Peer:
    """`transformers serve` with continuous batching; its model's name is its folder."""
    flags = {
        "continuous-batching": True,
        "device": place.device,
        "dtype": place.dtype,
        "cb-block-size": 32,
        "cb-num-blocks": place.pages(32),
    }
    words = ["-m", "transformers.cli.transformers", "serve", str(place.model)]
    ended = {"generation_config": json.dumps({"eos_token_id": -1, "pad_token_id": 0, "do_sample": False})}
    return Peer("transformers", words, flags, forced=ended, model_name=str(place.model))


def llama_cpp(place: Place, eos: Sequence[int]) -> Peer:
    """llama.cpp through its Python server, which answers one request at a time.

    Streaming, it writes all text of a reply anew for each token (0.5 s a token at 1,024 tokens), so it does not stream.
    """
    if place.gguf is None:
        raise ThinkfoldError("needs the model as a GGUF file (--gguf)")
    flags = {"model": place.gguf, "model_alias": NAME, "n_ctx": place.max_len, "interrupt_requests": False}
    flags |= {"n_threads": len(os.sched_getaffinity(0)), "n_gpu_layers": 0 if place.device == "cpu" else -1}
    flags |= dict.fromkeys(("type_k", "type_v"), GGML_TYPES[place.dtype][1])
    never = {"logit_bias": {str(token): -100 for token in eos}}
    patient = {"OMP_WAIT_POLICY": "passive"}  # threads that spin keep the server's and the client's from running
    return Peer("llama_cpp", ["-m", "llama_cpp.server"], flags, forced=never, environment=patient, streams=False)


def llama_server(place: Place) -> Peer:
    """llama.cpp's own server, a program; its context is shared out to the slots."""
    if place.gguf is None:
        raise ThinkfoldError("needs the model as a GGUF file (--gguf)")
    slots = max(1, min(place.slots, place.pool_tokens // place.max_len))
    flags = {"model": place.gguf, "alias": NAME, "ctx-size": slots * place.max_len, "parallel": slots}
    flags |= {"n-gpu-layers": 0 if place.device == "cpu" else 999}
    flags |= dict.fromkeys(("cache-type-k", "cache-type-v"), GGML_TYPES[place.dtype][0])
    return Peer("llama-server", [], flags)


def engines(place: Place, eos: Sequence[int]) -> dict[str, Any]:
    """A function for each engine that makes its `Peer`, or raises ThinkfoldError with what is missing."""
    return {
        "thinkfold": lambda: thinkfold(place),
        "thinkfold-eager": lambda: thinkfold(place, **{"fold-policy": "eager"}),
        "thinkfold-stop": lambda: thinkfold(place, **{"early-stop": "balanced"}),
        "thinkfold-vote": lambda: thinkfold_vote(place),
        "vllm": lambda: vllm(place),
        "sglang": lambda: sglang(place),
        "transformers": lambda: transformers(place),
        "llama.cpp": lambda: llama_server(place) if shutil.which("llama-server") else llama_cpp(place, eos),
    }


def version_of(peer: Peer, python: str) -> str:
    """The engine's version in that interpreter. Raises ThinkfoldError where it is not installed."""
    if not peer.words:
        told = subprocess.run([peer.module, "--version"], capture_output=True, text=True)
        return (told.stdout + told.stderr).strip().splitlines()[0]
    ask = f"import importlib.util as u, importlib.metadata as m; assert u.find_spec({peer.module!r}); "
    ask += f"print(m.version(m.packages_distributions().get({peer.module!r}, [{peer.module!r}])[0]))"
    told = subprocess.run([python, "-c", ask], capture_output=True, text=True)
    if told.returncode:
        raise ThinkfoldError(f"{peer.module} is not installed for {Path(python).name}")
    return told.stdout.strip()


def free_port() -> int:
    """A port of this machine that nobody uses now."""
    with socket.create_server((HOST, 0)) as free:
        return free.getsockname()[1]


@contextmanager
def served(peer: Peer, python: str, log: Path, patience: float) -> Iterator[str]:
    """Start the engine and yield its address once it lists its model; it is stopped with all its processes.

    Raises ThinkfoldError, with the end of its log, if it ends or does not answer within `patience` seconds.
    """
    port = free_port()
    command = [python if peer.words else peer.module, *peer.arguments(port)]
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env={**os.environ, **peer.environment}, start_new_session=True
        )
    try:
        url = f"http://{HOST}:{port}"
        _wait(process, url, log, patience)
        yield url
    finally:
        _stop(process)


def gauge(text: str, name: str) -> float | None:
    """The largest sample of that name in a Prometheus text."""
    found = [s.value for family in text_string_to_metric_families(text) for s in family.samples if s.name == name]
    return max(found, default=None)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path, patience: float) -> None:
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ThinkfoldError(f"ended with exit code {process.returncode}: {_last(log)}")
        try:
            if httpx.get(f"{url}/v1/models", timeout=5).status_code == 200 and _ready(url):
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise ThinkfoldError(f"did not answer within {patience:.0f} s: {_last(log)}")


def _ready(url: str) -> bool:
    """`/ready` where there is one: ours lists its model while it still loads."""
    return httpx.get(f"{url}/ready", timeout=5).status_code in (200, 404)


def _last(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-3:])[-600:]


def _stop(process: subprocess.Popen[bytes]) -> None:
    for number, seconds in ((signal.SIGTERM, 20), (signal.SIGKILL, 20)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def interpreters(words: Sequence[str]) -> dict[str, str]:
    """`engine=path/to/python` as a table. Raises ThinkfoldError."""
    found = {}
    for word in words:
        name, sign, path = word.partition("=")
        if not sign or not shutil.which(path):
            raise ThinkfoldError(f"--python must be engine=path/to/python, got {word!r}")
        found[name] = path
    return found
