"""thinkfold on Ray Serve with Pebble: the APIs, live control, affinity, a lost replica, and scaling."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field

import openai
import pytest
from ray_cluster import Cluster

from thinkfold.pebble.suites import problem_at

pytestmark = [
    pytest.mark.skipif(os.environ.get("THINKFOLD_TEST_RAY") != "1", reason="starts a cluster: make test-ray"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
]

SUM = [{"role": "user", "content": "What is 3 + 4?"}]


def question(index: int, suite: str = "medium") -> list[dict[str, str]]:
    return [{"role": "user", "content": problem_at(suite, index).question}]


@dataclass(slots=True)
class Told:
    """What a stream has told. `error` is how it ended if not well."""

    text: str = ""
    finish: str | None = None
    error: Exception | None = None
    id: str = ""
    chunks: int = 0
    begun: asyncio.Event = field(default_factory=asyncio.Event)


async def tell(client: openai.AsyncOpenAI, told: Told, messages, **more) -> Told:
    """Follow a stream to its end, however it ends."""
    body = {"model": "pebble", "stream": True, "temperature": 0.7, **more}
    try:
        async for chunk in await client.chat.completions.create(messages=messages, **body):
            told.id = chunk.id
            for choice in chunk.choices:
                new = (getattr(choice.delta, "reasoning", None) or "") + (choice.delta.content or "")
                told.text += new
                told.chunks += bool(new)
                told.finish = choice.finish_reason or told.finish
                if told.chunks >= 2:
                    told.begun.set()
    except openai.APIError as error:
        told.error = error
    told.begun.set()
    return told


async def test_every_api_answers_through_the_door(served: Cluster):
    client = served.client()
    async with served.http() as http:
        models = (await http.get("/v1/models")).json()["data"]
        assert [model["id"] for model in models] == ["pebble"]
        chat = await client.chat.completions.create(model="pebble", messages=SUM, temperature=0)
        assert chat.choices[0].message.content and chat.choices[0].finish_reason == "stop"
        streamed = await tell(client, Told(), SUM, temperature=0)
        assert streamed.text == chat.choices[0].message.reasoning + chat.choices[0].message.content
        done = await client.completions.create(model="pebble", prompt="1 2 3", max_tokens=4, temperature=0)
        assert done.usage.completion_tokens == 4
        body = {"model": "pebble", "max_tokens": 100, "messages": SUM}
        message = (await http.post("/v1/messages", json=body)).json()
        assert message["stop_reason"] == "end_turn"
        first = await client.responses.create(model="pebble", input=SUM, temperature=0)
        second = await client.responses.create(model="pebble", input="And plus 1?", previous_response_id=first.id)
        assert second.status == "completed"
        refused = await http.post("/v1/chat/completions", json={"messages": SUM, "thinkfold": {"tier": "none"}})
        assert refused.status_code == 400 and "deep" in refused.json()["error"]["message"]


async def test_a_tier_has_its_own_pool(served: Cluster):
    before = await served.metric("thinkfold_pool_routed_total", pool="deep")
    more = {"extra_body": {"thinkfold": {"tier": "deep"}}}
    chat = await served.client().chat.completions.create(model="pebble", messages=SUM, temperature=0, **more)
    budget = chat.model_extra["thinkfold"]["policy"]["thinking"]["budget"]
    assert budget == 2048
    assert await served.metric("thinkfold_pool_routed_total", pool="deep") == before + 1


async def test_live_control_and_handles_reach_the_replica_of_each(served: Cluster):
    client = served.client()
    streams = [Told() for _ in range(4)]
    tasks = [
        asyncio.create_task(tell(client, told, question(4 * i, "long"), seed=i, max_tokens=3000))
        for i, told in enumerate(streams)
    ]
    await asyncio.gather(*(told.begun.wait() for told in streams))
    async with served.http() as http:

        async def order(told: Told, action: str):
            return await http.post(f"/v1/thinkfold/responses/{told.id}/control", json={"action": action})

        assert [(await order(told, "pause")).status_code for told in streams] == [200] * 4
        assert await served.metric("thinkfold_running") == 0.0
        forks = [(await order(told, "fork")).json()["handle"]["id"] for told in streams]
        assert [(await order(told, "resume")).status_code for told in streams] == [200] * 4
        assert [(await order(told, "end_thinking")).status_code for told in streams] == [200] * 4
        for told in await asyncio.gather(*tasks):
            assert told.error is None and told.finish in ("stop", "length")
        for handle in forks:
            part = await http.post("/v1/thinkfold/partial", json={"handle": handle, "until": {"max_tokens": 4}})
            assert part.status_code == 200 and part.json()["choices"][0]["handle"]
        gone = await http.post("/v1/thinkfold/responses/chatcmpl-none/control", json={"action": "pause"})
        assert gone.status_code == 404


async def test_whoever_goes_away_is_not_worked_for(served: Cluster):
    told = Told()
    task = asyncio.create_task(tell(served.client(), told, question(0, "long"), max_tokens=3000))
    await told.begun.wait()
    assert await served.metric("thinkfold_running") == 1.0
    task.cancel()
    for _ in range(400):
        if await served.metric("thinkfold_running") == 0.0:
            break
        await asyncio.sleep(0.05)
    assert await served.metric("thinkfold_requests_total", finish_reason="abort") >= 1


async def test_a_vote_runs_on_one_replica(served: Cluster):
    before = await served.metric("thinkfold_pool_routed_total", pool="quick", why="sibling")
    vote = {"thinkfold": {"vote": {"n": 6, "mode": "waves", "stop": "exact"}}}
    body = {"messages": question(0), "temperature": 0.7, "seed": 1, "max_tokens": 100, **vote}
    async with served.http() as http:
        reply = await http.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
    assert await served.metric("thinkfold_pool_routed_total", pool="quick", why="sibling") > before


async def test_conversations_stay_with_their_replica(served: Cluster):
    """Twelve conversations of four turns with one system prompt, all at once."""
    client = served.client()
    before = {why: await served.metric("thinkfold_pool_routed_total", why=why) for why in ("conversation", "free")}
    system = {"role": "system", "content": "You are careful. You answer in a few words, and in full numbers. " * 3}

    async def talk(number: int) -> None:
        messages = [system]
        for turn in range(4):
            messages += question(10 * number + turn)
            reply = await client.chat.completions.create(
                model="pebble", messages=messages, max_tokens=60, temperature=0
            )
            messages.append({"role": "assistant", "content": reply.choices[0].message.content or "-"})

    await asyncio.gather(*(talk(number) for number in range(12)))
    routed = {why: await served.metric("thinkfold_pool_routed_total", why=why) - before[why] for why in before}
    assert routed["conversation"] >= 0.9 * 36
    assert sum(routed.values()) >= 46


async def test_a_lost_replica_under_load_loses_nobody_silently_and_doubles_nothing(served: Cluster):
    client = served.client()
    count, more = 12, {"max_tokens": 400}
    ask = [{"messages": question(i), "seed": i, **more} for i in range(count)]
    alone = await asyncio.gather(*(tell(client, Told(), **each) for each in ask))
    assert all(told.error is None for told in alone)
    failed = await served.metric("thinkfold_pool_events_total", pool="quick", event="failed")
    streams = [Told() for _ in range(count)]
    tasks = [asyncio.create_task(tell(client, told, **each)) for each, told in zip(ask, streams, strict=True)]
    await streams[0].begun.wait()
    served.kill(served.cores("quick")[0])
    found = await asyncio.gather(*tasks)
    for told, whole in zip(found, alone, strict=True):
        assert told.finish is not None or told.error is not None, "lost without a word"
        if told.error is None:
            assert (told.text, told.finish) == (whole.text, whole.finish)
        else:
            assert whole.text.startswith(told.text), "what was sent stays, and nothing came twice"
            assert "has gone" in str(told.error)
    errors = sum(told.error is not None for told in found)
    assert errors < count
    assert await served.metric("thinkfold_pool_events_total", pool="quick", event="failed") == failed + errors
    await served.until_open("quick", lambda replicas: replicas == 2)


async def test_a_new_ingress_finds_the_cores_as_they_are(served: Cluster):
    cores = served.cores("quick")
    told = Told()
    cut_off = asyncio.create_task(tell(served.client(), told, question(0, "long"), max_tokens=3000))
    await told.begun.wait()
    served.kill_ingress()
    await cut_off
    assert told.error is not None, "its connection broke"
    await served.until_ready()
    await served.until_open("quick", lambda replicas: replicas == 2)
    assert served.cores("quick") == cores
    chat = await served.client().chat.completions.create(model="pebble", messages=SUM, temperature=0)
    assert chat.choices[0].finish_reason == "stop"
    for _ in range(400):  # what ran for the last one is aborted once its silence is noticed
        if await served.metric("thinkfold_running") == 0.0:
            break
        await asyncio.sleep(0.1)
    assert await served.metric("thinkfold_running") == 0.0


async def test_a_pool_grows_with_its_predicted_kv_and_shrinks_without_a_loss(served: Cluster):
    client = served.client()
    tier = {"extra_body": {"thinkfold": {"tier": "deep"}}}
    await served.until_open("deep", lambda replicas: replicas == 1)
    streams = [Told() for _ in range(8)]
    tasks = [
        asyncio.create_task(tell(client, told, question(4 * i, "long"), seed=i, max_tokens=600, **tier))
        for i, told in enumerate(streams)
    ]
    await served.until_open("deep", lambda replicas: replicas == 3)
    late = [asyncio.create_task(tell(client, Told(), question(i), seed=i, **tier)) for i in range(20, 23)]
    while await served.open_replicas("deep") > 1:  # somebody always runs while it shrinks
        late.append(asyncio.create_task(tell(client, Told(), question(len(late)), seed=1, max_tokens=200, **tier)))
        await late[-1]
        assert len(late) < 400
    for told in await asyncio.gather(*tasks, *late):
        assert told.error is None and told.finish in ("stop", "length")
    assert await served.metric("thinkfold_pool_events_total", pool="deep", event="failed") == 0


async def test_an_upgrade_loses_nobody(served: Cluster):
    client, cores = served.client(), served.cores("quick")
    streams = [Told() for _ in range(4)]
    tasks = [
        asyncio.create_task(tell(client, told, question(4 * i, "long"), seed=i, max_tokens=800))
        for i, told in enumerate(streams)
    ]
    await asyncio.gather(*(told.begun.wait() for told in streams))
    upgrade = asyncio.create_task(asyncio.to_thread(served.upgrade, max_num_seqs=7))
    later: list[Told] = []
    while not upgrade.done() or set(cores) & set(served.cores("quick")):
        later.append(await tell(client, Told(), question(len(later)), seed=1, max_tokens=50))
        assert len(later) < 1000
    await upgrade
    for told in [*await asyncio.gather(*tasks), *later]:
        assert told.error is None and told.finish in ("stop", "length")
