"""A fleet: where requests go, what becomes of them when replicas come and go, and whom orders reach. Scripted cores."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest
from fleet_stand_in import CONFIG, fleet_of, running, until
from scripted import OPEN_PROMPT, ids

from thinkfold.engine.commands import Prefill
from thinkfold.errors import ConflictError, EngineDeadError, NotFoundError, QueueFullError, ReplicaLostError
from thinkfold.types import FinishReason, SamplingParams, Service, ThinkingParams, Tier, Until

PROMPT = ids(OPEN_PROMPT)
GREEDY = SamplingParams(temperature=0.0, max_tokens=60)
BUDGET = ThinkingParams(thinking_token_budget=9)
LONG = ThinkingParams(thinking_token_budget=40)
TWO = {"a": "one", "b": "one"}


def prompt_about(words: str) -> list[int]:
    return ids(OPEN_PROMPT.replace("\nq<", f"\n{words}<"))


async def follow(engine, name, thinking=BUDGET, prompt=PROMPT, **more):
    """All outputs of a request."""
    return [o async for o in engine.generate(prompt, GREEDY, thinking, request_id=name, **more)]


def reasoning(outputs):
    return "".join(news.reasoning for output in outputs for news in output.outputs)


def answer(outputs):
    return "".join(news.text for output in outputs for news in output.outputs)


async def test_requests_run_on_all_replicas_and_their_statistics_are_one():
    async with running(fleet_of("one"), TWO) as (engine, cores):
        found = await asyncio.gather(*(follow(engine, f"r{i}", prompt=prompt_about(f"number {i}")) for i in range(4)))
        assert [(reasoning(each), answer(each)) for each in found] == [("a" * 9, "B C")] * 4
        assert len(cores["a"].heard) == len(cores["b"].heard) == 2
        assert engine.model.num_pages == engine.stats().pages_total == 800
        await until(lambda: engine.stats().requests_by_reason == {"stop": 4})
        assert engine.stats().generated_tokens == sum(core.stats.generated_tokens for core in cores.all.values())


async def test_a_request_of_which_nothing_was_told_begins_again_elsewhere():
    async with running(fleet_of("one"), TWO) as (engine, cores):
        for core in cores.all.values():
            core.gate.clear()
        request = asyncio.create_task(follow(engine, "r"))
        await until(lambda: cores["a"].heard or cores["b"].heard)
        first = cores.of("r")
        for core in cores.all.values():
            if core is not first:
                core.gate.set()
        first.break_link()
        outputs = await request
        assert cores.of("r").heard == ["r"]
        assert {name for name, core in cores.all.items() if "r" in core.heard} == {"a", "b"}
        assert (reasoning(outputs), answer(outputs)) == ("a" * 9, "B C")
        assert [output.finished for output in outputs].count(True) == 1
        assert engine.fleet.pools["one"].counts == {"replicas_lost": 1, "failed": 0, "restarted": 1}


async def test_a_request_that_has_told_something_ends_with_an_error_and_what_was_told_stays():
    async with running(fleet_of("one"), TWO) as (engine, cores):
        for core in cores.all.values():
            core.shut_after = 8
        stream = engine.generate(PROMPT, GREEDY, LONG, request_id="r")
        async with aclosing(stream):
            told = [await anext(stream)]
            core = cores.of("r")
            core.break_link()
            told += [output async for output in stream]
        assert reasoning(told) == "a" * len(reasoning(told)) != ""
        last = told[-1]
        assert last.finished and isinstance(last.failure, ReplicaLostError) and core.name in str(last.error)
        assert last.outputs[-1].finish_reason is FinishReason.ERROR
        assert last.outputs[-1].num_thinking_tokens == len(reasoning(told))
        assert engine.fleet.pools["one"].counts["failed"] == 1
        for core in cores.all.values():
            core.shut_after = None
        assert reasoning(await follow(engine, "next")) == "a" * 9


async def test_news_of_a_replica_that_has_gone_count_for_nothing():
    async with running(fleet_of("one"), TWO) as (engine, cores):
        for core in cores.all.values():
            core.gate.clear()
        request = asyncio.create_task(follow(engine, "r"))
        await until(lambda: cores["a"].heard or cores["b"].heard)
        first = cores.of("r")
        engine.fleet.lose(first.name, "no sign of life")  # it lives on, and will tell all that it does
        for core in cores.all.values():
            core.gate.set()
        assert reasoning(await request) == "a" * 9
        await until(lambda: all(core.stats.requests_by_reason == {"stop": 1} for core in cores.all.values()))


async def test_without_a_replica_requests_wait_for_one_and_can_be_given_up():
    async with running(fleet_of("one", engine=replace(CONFIG, max_waiting=3)), {"a": "one"}) as (engine, cores):
        cores["a"].break_link()
        assert engine.health().alive and engine.health().reason == "no replica of one is ready"
        waits = asyncio.create_task(follow(engine, "waits"))
        gone, cancelled = (asyncio.create_task(follow(engine, name)) for name in ("gone", "cancelled"))
        await until(lambda: len(engine.fleet.pools["one"].held) == 3)
        assert engine.stats().waiting == 3
        with pytest.raises(ConflictError, match="waits for a replica"):
            await engine.pause("waits")
        with pytest.raises(QueueFullError):
            await follow(engine, "one too many")
        gone.cancel()
        await engine.cancel("cancelled")
        assert (await cancelled)[-1].outputs[0].finish_reason is FinishReason.ABORT
        await until(lambda: len(engine.fleet.pools["one"].held) == 1)
        cores.start("b", "one")
        assert reasoning(await waits) == "a" * 9
        assert engine.health().ready
        assert cores["b"].heard == ["waits"]


async def test_a_draining_replica_ends_what_it_has_begun_and_the_rest_moves():
    async with running(fleet_of("one"), {"a": "one"}) as (engine, cores):
        cores["a"].shut_after = 8
        begun = engine.generate(PROMPT, GREEDY, LONG, request_id="begun")
        outputs = [await anext(begun)]
        await until(lambda: cores["a"].waits)
        moves = asyncio.create_task(follow(engine, "moves", prompt=prompt_about("something else")))
        await until(lambda: "moves" in cores["a"].heard)
        cores.start("b", "one")
        await until(lambda: len(engine.fleet.pools["one"].replicas) == 2)
        engine.fleet.drain("a")
        assert reasoning(await moves) == "a" * 9
        assert cores["b"].heard == ["moves"]
        assert reasoning(await follow(engine, "new")) == "a" * 9
        assert cores["b"].heard == ["moves", "new"]
        cores["a"].gate.set()
        outputs += [output async for output in begun]
        assert (reasoning(outputs), answer(outputs)) == ("a" * 40, "B C")
        assert engine.fleet.pools["one"].counts == {"moved": 1}


async def test_orders_and_handles_reach_the_replica_that_runs_the_request():
    async with running(fleet_of("one"), TWO) as (engine, cores):
        short = Until(max_tokens=5)
        parts = await asyncio.gather(*(follow(engine, n, prompt=prompt_about(n), until=short) for n in ("x", "y")))
        handles = [outputs[-1].outputs[0].handle for outputs in parts]
        assert cores.of("x") is not cores.of("y")
        for name, handle in zip(("x", "y"), handles, strict=True):
            core = cores.of(name)
            core.gate.clear()
            stream = engine.extend(handle.id, request_id=f"{name}-more")
            first = asyncio.create_task(anext(stream))
            await until(lambda core=core: any(getattr(c, "handle", "") for c in core.commands))
            core.gate.set()
            outputs = [await first, *[output async for output in stream]]
            assert answer(outputs) == "B C"
        cores.of("x").break_link()
        with pytest.raises(NotFoundError, match="no handle"):
            await anext(engine.extend(handles[0].id))
        await engine.drop(handles[1].id)
        with pytest.raises(NotFoundError):
            await engine.drop(handles[1].id)
        with pytest.raises(NotFoundError, match="no running response"):
            await engine.pause("x")


async def test_live_control_of_a_running_request():
    async with running(fleet_of("one"), TWO) as (engine, cores):
        for core in cores.all.values():
            core.shut_after = 8
        stream = engine.generate(PROMPT, GREEDY, LONG, request_id="r")
        outputs = [await anext(stream)]
        await until(lambda: cores.of("r").waits)
        ending = asyncio.create_task(engine.end_thinking("r"))
        await until(lambda: len(cores.of("r").commands) == 2)
        cores.of("r").gate.set()
        await ending
        outputs += [output async for output in stream]
        assert 0 < len(reasoning(outputs)) < 40 and answer(outputs) == "B C"
        other = next(core for core in cores.all.values() if core is not cores.of("r"))
        assert other.commands == []


async def test_an_order_whose_replica_goes_gets_an_error():
    async with running(fleet_of("one"), {"a": "one"}) as (engine, cores):
        cores["a"].shut_after = 8
        stream = engine.generate(PROMPT, GREEDY, LONG, request_id="r")
        await anext(stream)
        await until(lambda: cores["a"].waits)
        pause = asyncio.create_task(engine.pause("r"))
        await until(lambda: len(cores["a"].commands) == 2)
        cores["a"].break_link()
        with pytest.raises(ReplicaLostError):
            await pause
        assert [o async for o in stream][-1].finished


async def test_samples_of_one_question_run_on_one_replica():
    async with running(fleet_of("one"), TWO) as (engine, cores):
        names = [f"{question}-s{i}" for i in (0, 4, 12) for question in ("q", "p", "o", "n")]
        for wave in (names[:4], names[4:8], names[8:]):
            await asyncio.gather(*(follow(engine, name, prompt=prompt_about(name[0])) for name in wave))
        homes = {question: {cores.of(n).name for n in names if n[0] == question} for question in "qpon"}
        assert all(len(home) == 1 for home in homes.values())
        assert set.union(*homes.values()) == {"a", "b"}
        assert engine.fleet.pools["one"].routed["sibling"] == 8


async def test_each_tier_has_its_pool_and_its_queue():
    async with running(fleet_of("one", "two"), {"a": "one", "b": "two"}) as (engine, cores):
        two = Service(Tier("two"))
        await follow(engine, "x")
        await follow(engine, "y", service=two)
        assert (cores["a"].heard, cores["b"].heard) == (["x"], ["y"])
        cores["b"].gate.clear()
        full = [asyncio.create_task(follow(engine, f"w{i}", service=two)) for i in range(4)]
        await until(lambda: len(cores["b"].heard) == 5)
        with pytest.raises(QueueFullError) as caught:
            await follow(engine, "z", service=two)
        assert caught.value.retry_after == 3.0
        assert reasoning(await follow(engine, "free")) == "a" * 9
        cores["b"].gate.set()
        assert all(reasoning(outputs) == "a" * 9 for outputs in await asyncio.gather(*full))


async def test_pins_are_everywhere_also_where_a_replica_comes_later():
    async with running(fleet_of("one"), TWO) as (engine, cores):
        await engine.prefill("p", PROMPT * 3, owner="me")
        assert [(pin.name, pin.tokens) for pin in await engine.pinned("me")] == [("p", 40)]
        late = cores.start("c", "one")
        await until(lambda: any(isinstance(command, Prefill) for command in late.commands))
        await until(lambda: late.stats.pages_by_class.get("pinned", 0) == 10)
        gone = await engine.forget("me")
        assert gone["prefixes"] == 3
        assert await engine.pinned("me") == []
        with pytest.raises(NotFoundError):
            await engine.unpin("p", "me")


async def test_the_next_turn_is_computed_where_the_conversation_is():
    async with running(fleet_of("one"), TWO) as (engine, cores):
        talks = {name: prompt_about(f"{name} asks " * 30) for name in ("xavier", "yvonne")}
        await asyncio.gather(*(follow(engine, name, prompt=talk) for name, talk in talks.items()))
        assert cores.of("xavier") is not cores.of("yvonne")
        for name, talk in talks.items():
            await engine.prefill(f"ahead-{name}", [*talk, *ids("and so on " * 30)], idle=True, ttl_s=60)
            ahead = [command.request_id for command in cores.of(name).commands if isinstance(command, Prefill)]
            assert ahead == [f"ahead-{name}"]
        with pytest.raises(ConflictError, match="no replica knows"):
            await engine.prefill("ahead", prompt_about("somebody else's " * 9), idle=True)


async def test_stopping_ends_what_runs_and_the_engine_says_so():
    async with running(fleet_of("one"), TWO) as (engine, cores):
        for core in cores.all.values():
            core.gate.clear()
        request = asyncio.create_task(follow(engine, "r"))
        await until(lambda: cores["a"].heard or cores["b"].heard)
        await engine.stop()
        with pytest.raises(EngineDeadError, match="stopped"):
            await request
        assert not engine.health().alive
