"""The file of `thinkfold deploy`, what a core tells about itself, and how many replicas that asks for."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest
from scripted import OPEN_PROMPT, ids, loop, make_engine

from thinkfold.cli.fleet_settings import check_together, load_deployment, parse_deployment
from thinkfold.cli.main import main
from thinkfold.config import EngineConfig
from thinkfold.deploy.fleet.config import Replicas
from thinkfold.deploy.fleet.engine import front_config
from thinkfold.deploy.fleet.stats import counters_of, merged
from thinkfold.deploy.ray_serve.below import BelowPrefix
from thinkfold.deploy.ray_serve.core_host import SILENT_S, CoreHost, Draining
from thinkfold.deploy.ray_serve.scaling import KVPeakPolicy
from thinkfold.engine.commands import Hash, Pause
from thinkfold.engine.messages import Dead, EngineStats, ModelInfo, News, Ready
from thinkfold.errors import EngineDeadError, ParameterError
from thinkfold.types import EngineRequest, FoldMode, PromptState, SamplingParams, ThinkingPolicy

FILE = """
name: acme
port: 8123
default: quick
server: {max_sessions: 9, api_keys_file: keys.toml}
engine: {max_num_seqs: 8, block_size: 8}
pools:
  quick: {budget: 512, replicas: 2, cpus: 0.5}
  deep:
    budget: 32768
    fold: {policy: eager}
    slo: {ttft_ms: 900}
    engine: {max_num_seqs: 2, kv_cache_bytes: 1048576}
    replicas: {min: 1, max: 4, target: 0.7}
    gpus: 1
    drain_s: 30
"""


def test_a_file_becomes_a_fleet(tmp_path, capsys):
    path = tmp_path / "fleet.yaml"
    path.write_text(FILE)
    found = load_deployment(str(path))
    fleet, deep = found.fleet, found.fleet.pools["deep"]
    assert (fleet.name, fleet.port, fleet.default, found.serve.max_sessions) == ("acme", 8123, "quick", 9)
    assert fleet.pools["quick"].engine == EngineConfig(max_num_seqs=8, page_size=8)
    assert deep.engine == EngineConfig(max_num_seqs=2, page_size=8, kv_cache_bytes=1048576)
    assert deep.replicas == Replicas(1, 4, 0.7) and (deep.gpus, deep.drain_s) == (1.0, 30.0)
    assert deep.tier.fold.policy == FoldMode.EAGER and deep.tier.slo.ttft_ms == 900
    assert front_config(fleet).max_num_seqs == 2 * 8 + 4 * 2
    assert main(["deploy", str(path), "--check"]) == 0
    assert "deep: 1 to 4 replicas of pebble, 1 CPUs and 1 GPUs each" in capsys.readouterr().out


POOL = {"budget": 1}


@pytest.mark.parametrize(
    ("written", "field"),
    [
        ([], "config"),
        ({"pools": {"a": POOL}, "speed": 1}, "config.speed"),
        ({}, "pools"),
        ({"pools": {"a": {}}}, "pools.a.budget"),
        ({"pools": {"a": {**POOL, "replicas": 0}}}, "pools.a.replicas.min"),
        ({"pools": {"a": {**POOL, "replicas": {"most": 3}}}}, "pools.a.replicas.most"),
        ({"pools": {"a": {**POOL, "replicas": "many"}}}, "pools.a.replicas"),
        ({"pools": {"a": {**POOL, "gpus": -1}}}, "pools.a.gpus"),
        ({"pools": {"a": {**POOL, "cpus": "two"}}}, "pools.a.cpus"),
        ({"pools": {"a": {**POOL, "gpus": 1, "engine": {"tensor_parallel_size": 2}}}}, "pools.a.gpus"),
        ({"pools": {"a": {**POOL, "engine": {"modell": "x"}}}}, "pools.a.engine.modell"),
        ({"pools": {"a": {**POOL, "engine": {"max_num_seqs": "x"}}}}, "pools.a.engine.max_num_seqs"),
        ({"pools": {"a": {**POOL, "engine": {"model": "x"}}, "b": POOL}, "default": "a"}, "pools.b.engine.model"),
        ({"pools": {"a": POOL, "b": POOL}}, "default"),
        ({"pools": {"a": POOL}, "default": "b"}, "tiers.default"),
        ({"pools": {"a": POOL}, "server": {"port": 1}}, "server.port"),
        ({"pools": {"a": POOL}, "server": {"log_requests": "costs"}}, "server.log_requests"),
        ({"pools": {"a": POOL}, "port": "x"}, "port"),
        ({"pools": {"a": POOL}, "routing": "best"}, "routing"),
        ({"pools": {"a": POOL}, "prefix": "/x/"}, "prefix"),
    ],
)
def test_a_wrong_file_is_refused_by_the_field(written, field):
    with pytest.raises(ParameterError) as caught:
        parse_deployment(written)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("more", "field"), [({}, "name"), ({"name": "b"}, "prefix"), ({"name": "b", "prefix": "/b", "port": 1}, "port")]
)
def test_applications_behind_one_address(more, field):
    one, two = (parse_deployment({"pools": {"a": POOL}, **each}) for each in ({}, more))
    with pytest.raises(ParameterError) as caught:
        check_together([one, two])
    assert caught.value.field == field
    check_together([one, parse_deployment({"pools": {"a": POOL}, "name": "b", "prefix": "/b"})])


async def test_an_app_below_a_prefix_sees_its_own_paths():
    seen = []

    async def app(scope, receive, send):
        seen.append((scope["path"], scope["root_path"]))

    for path, root in (("/b/v1/models", "/b"), ("/b", "/b"), ("/v1/models", "")):
        await BelowPrefix(app)({"type": "http", "path": path, "root_path": root}, None, None)
    assert seen == [("/v1/models", ""), ("/", ""), ("/v1/models", "")]


def test_no_yaml(tmp_path):
    path = tmp_path / "fleet.yaml"
    path.write_text("a: [")
    with pytest.raises(ParameterError, match="not valid YAML"):
        load_deployment(str(path))


@pytest.mark.parametrize(
    ("peaks", "wanted"), [((0, 0), 1), ((700,), 1), ((701,), 2), ((700, 700), 2), ((2000, 90), 3), ((), 5)]
)
def test_replicas_follow_the_predicted_peak(peaks, wanted):
    capacities = {i: 1000.0 for i, _ in enumerate(peaks)}
    metrics = {"kv_peak": dict(enumerate(peaks)), "kv_capacity": capacities}
    context = SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=5)
    assert KVPeakPolicy(target=0.7)(context) == (wanted, {})


def test_statistics_of_many_are_one():
    one = EngineStats(running=1, steps=5, pages_by_class={"raw": 2}, pressure={"swap": 1}, kv_quantisation_error=0.1)
    two = EngineStats(running=2, steps=7, pages_by_class={"raw": 1, "cached": 0}, kv_quantisation_error=0.3)
    total = merged([one, two])
    assert (total.running, total.steps, total.kv_quantisation_error) == (3, 12, 0.3)
    assert total.pages_by_class == {"raw": 3, "cached": 0} and total.pressure == {"swap": 1}
    gone = counters_of(total)
    assert (gone.running, gone.steps, gone.pages_by_class) == (0, 12, {})
    assert merged([]) == EngineStats()


def build(config):
    engine = make_engine(max_num_seqs=config.max_num_seqs)
    engine.runner.scripts["any"] = (loop(), len(ids(OPEN_PROMPT)))
    return engine.core, ModelInfo("pebble", "qwen3", 1600, 1536, 400, 4, 100, 1600, "qwen3", True, True)


def request_of(name: str, budget=9) -> EngineRequest:
    prompt = ids(OPEN_PROMPT)
    return EngineRequest(
        name,
        tuple(prompt),
        PromptState("thinking", 0, 0),
        SamplingParams(max_tokens=60, seed=1, temperature=0.0),
        ThinkingPolicy(True, budget, "default", answer_reserve=4),
    )


async def read(stream, wanted):
    """All that is told until something is as wanted."""
    told = []
    async for batch in stream:
        told += batch
        if any(wanted(each) for each in told):
            return told
    return told


def ends(name: str):
    return lambda each: isinstance(each, News) and any(o.finished and o.request_id == name for o in each.outputs)


async def test_a_host_tells_its_reader_everything_and_drains():
    host = CoreHost(EngineConfig(own_process=False), build)
    await host.loaded()
    with pytest.raises(EngineDeadError, match="silent"):
        await host.send("somebody else", [request_of("x")], time.monotonic())
    stream = host.events("me")
    assert isinstance((await anext(stream))[0], Ready)
    await host.send("me", [request_of("r")], time.monotonic())
    assert await host.load() == {"kv_peak": len(ids(OPEN_PROMPT)) + 13, "kv_capacity": 1600}
    await read(stream, ends("r"))
    assert (await host.load())["kv_peak"] == 0
    await host.health()
    await host.send("me", [request_of("last", budget=40)], time.monotonic())
    drained = asyncio.create_task(host.drain(30))
    told = await read(stream, lambda each: isinstance(each, Dead))
    await drained
    kinds = [type(each) for each in told]
    assert Draining in kinds and kinds[-1] is Dead
    assert any(ends("last")(each) for each in told)
    with pytest.raises(EngineDeadError):
        await host.health()


async def test_two_readers_hear_of_their_own_requests_and_orders_only():
    host = CoreHost(EngineConfig(own_process=False), build)
    await host.loaded()
    streams = {name: host.events(name) for name in ("old", "new")}
    for stream in streams.values():
        await anext(stream)
    for name in streams:
        await host.send(name, [request_of(f"{name}-r"), Hash(call=0, request_id=f"{name}-r")], time.monotonic())
    told = {name: await read(stream, ends(f"{name}-r")) for name, stream in streams.items()}
    for name, events in told.items():
        news = [event for event in events if isinstance(event, News)]
        assert {output.request_id for each in news for output in each.outputs} == {f"{name}-r"}
        assert [answer.call for each in news for answer in each.answers] == [0]
    await asyncio.gather(host.drain(0), *(read(stream, lambda each: False) for stream in streams.values()))


async def test_nobody_works_for_a_reader_that_has_gone():
    now = [0.0]
    host = CoreHost(EngineConfig(own_process=False, watchdog_s=1e6), build, clock=lambda: now[0])
    await host.loaded()
    gone, here = host.events("gone"), host.events("here")
    await anext(gone)
    await anext(here)
    await host.send("gone", [request_of("r", budget=50), Pause(call=0, request_id="r")], 0.0)
    await read(gone, lambda each: isinstance(each, News) and bool(each.answers))
    now[0] = SILENT_S + 1.0
    await host.send("here", [], now[0])
    await host.health()
    await read(gone, lambda each: False)  # it ends
    with pytest.raises(EngineDeadError, match="silent"):
        await host.send("gone", [], now[0])
    for _ in range(3000):
        if (await host.load())["kv_peak"] == 0:
            break
        await asyncio.sleep(0.01)
    assert (await host.load())["kv_peak"] == 0, "its request was aborted"
    await host.send("here", [request_of("mine")], now[0])
    assert any(ends("mine")(each) for each in await read(here, ends("mine")))
    drained = asyncio.create_task(host.drain(0))
    assert isinstance((await read(here, lambda each: isinstance(each, Dead)))[-1], Dead)
    await drained


async def test_a_host_without_a_model_says_why():
    def broken(config):
        raise ParameterError("model", "there is none")

    host = CoreHost(EngineConfig(own_process=False), broken)
    with pytest.raises(ParameterError, match="there is none"):
        await host.loaded()
    assert await host.load() == {"kv_peak": 0, "kv_capacity": 0}
