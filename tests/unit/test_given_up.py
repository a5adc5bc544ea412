"""What a caller starts and then gives up leaves nothing behind; gauges tell the truth when nothing runs."""

import asyncio
import threading
from contextlib import suppress

import pytest
from scripted import CLOSE, EOS, script
from test_async_engine import CONFIG, GREEDY, NO_LIMIT, PROMPT, Gate, until
from test_core_orders import NO_LIMIT as FREE
from test_core_orders import ask, started

from thinkfold.engine.async_engine import AsyncEngine
from thinkfold.engine.commands import Extend, Fork
from thinkfold.errors import NotFoundError
from thinkfold.types import SamplingParams, Until

PART = Until(max_tokens=3)
LONG = SamplingParams(temperature=0.0, max_tokens=1000)


@pytest.fixture
async def gate():
    return Gate()


@pytest.fixture
async def engine(gate):
    engine = await AsyncEngine.start(CONFIG, build=gate.build)
    yield engine
    gate.open.set()
    await engine.stop()


async def root(engine):
    """A handle to go on from."""
    outputs = [output async for output in engine.generate(PROMPT, GREEDY, NO_LIMIT, until=PART)]
    return outputs[-1].outputs[0].handle


async def give_up(*tasks):
    for task in tasks:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def assert_nothing_left(engine, *handles):
    """Nothing runs, and with the known handles all memory is gone."""
    await until(lambda: not engine._readers and engine.stats().running == engine.stats().waiting == 0)
    await until(lambda: engine.stats().handles == len(handles))
    for handle in handles:
        await engine.drop(handle.id)
    await until(lambda: engine.stats().kv_pages.held == 0)
    assert not engine._calls


@pytest.mark.parametrize("part", [PART, None])
async def test_an_extend_given_up_before_its_answer(engine, gate, part):
    handle = await root(engine)
    other = asyncio.create_task(anext(engine.generate(PROMPT, LONG, NO_LIMIT)))
    gate.open.clear()
    await asyncio.sleep(0.02)
    extending = asyncio.create_task(anext(engine.extend(handle.id, part, n=1)))
    await asyncio.sleep(0.02)
    await give_up(extending, other)
    gate.open.set()
    await assert_nothing_left(engine, handle)


async def test_an_extend_that_is_refused_after_its_caller_gave_up(engine, gate):
    other = asyncio.create_task(anext(engine.generate(PROMPT, LONG, NO_LIMIT)))
    gate.open.clear()
    await asyncio.sleep(0.02)
    extending = asyncio.create_task(anext(engine.extend("h-unknown", PART, request_id="again")))
    await asyncio.sleep(0.02)
    await give_up(extending, other)
    gate.open.set()
    await assert_nothing_left(engine)
    with pytest.raises(NotFoundError):
        await anext(engine.extend("h-unknown", PART, request_id="again"))


@pytest.mark.parametrize("read", [False, True])
async def test_a_part_that_ended_before_its_caller_gave_up(engine, gate, read):
    """The core is done and has told it; the caller has read nothing of it, or only the beginning."""
    handle = await root(engine)
    outputs = engine.extend(handle.id, Until(max_tokens=20))
    core = gate.engine.core
    if read:  # all news at once would be the end too, and whoever reads that has the handle
        gate.permits = threading.Semaphore(3)
    reading = asyncio.create_task(anext(outputs))
    if read:
        assert not (await reading).finished
        gate.permits.release(1000)
    else:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    ended = threading.Event()
    for _ in range(2000):  # this thread's loop stands still, so nothing is heard meanwhile
        if len(core.handles) == 2:
            break
        ended.wait(0.005)
    assert len(core.handles) == 2
    await give_up(reading)
    await outputs.aclose()
    await assert_nothing_left(engine, handle)


async def test_a_fork_given_up_before_its_answer(engine, gate):
    outputs = engine.generate(PROMPT, LONG, NO_LIMIT, request_id="main")
    await anext(outputs)
    gate.open.clear()
    forking = asyncio.create_task(engine.fork("main"))
    await asyncio.sleep(0.02)
    await give_up(forking)
    gate.open.set()
    await outputs.aclose()
    await assert_nothing_left(engine)


def test_an_extend_that_waits_for_memory_can_be_given_up():
    engine = started(0, 30, num_pages=20, host_pages=64)
    handle = ask(engine, Fork)
    engine.run()
    engine.add(request_id="other", token_of=script("x " * 60 + CLOSE + EOS), thinking=FREE, seed=1)
    engine.runner.by_seed[1] = "other"
    while not engine.core.stats().pressure.get("swap_parked"):
        engine.step()
    engine.core.orders.give(Extend(call=5, request_id="child", handle=handle.id, namespace=()))
    engine.step()
    assert not engine.core.orders.take(), "its handle's memory has to come back first"
    engine.core.abort("child")
    (answer,) = engine.core.orders.take()
    assert answer.call == 5 and isinstance(answer.error, NotFoundError)
    assert "child" not in engine.run().finals


async def test_what_expires_while_nothing_runs_is_told(engine, gate):
    handle = await root(engine)
    pinned = await engine.prefill("p", PROMPT * 2, ttl_s=0.05)
    await until(lambda: engine.stats().pages_by_class["pinned"] == 0)
    assert pinned.pages > 0 and engine.stats().handles == 1
    gate.engine.core.handles._kept[handle.id].expires = 0.0
    await until(lambda: engine.stats().handles == 0 and engine.stats().kv_pages.held == 0)
