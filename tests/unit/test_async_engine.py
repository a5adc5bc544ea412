"""AsyncEngine: checks, streams, back-pressure, aborts and failures, with a scripted core."""

import asyncio
import pickle
import threading
from dataclasses import replace
from types import MappingProxyType

import pytest
from scripted import OPEN_PROMPT, ids, loop, make_engine

from thinkfold.config import EngineConfig
from thinkfold.engine.async_engine import AsyncEngine
from thinkfold.engine.limits import Wish
from thinkfold.engine.messages import ModelInfo
from thinkfold.errors import CapacityError, EngineDeadError, ParameterError, QueueFullError, UnsupportedError
from thinkfold.llm import collect
from thinkfold.types import (
    Clamp,
    FinishReason,
    FoldMode,
    FoldParams,
    FoldPolicy,
    Limits,
    SamplingParams,
    ThinkingParams,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=60)


class Gate:
    """Lets a test hold the device: a launch waits while the gate is shut, and for one of `permits` if there are any."""

    def __init__(self):
        self.open = threading.Event()
        self.open.set()
        self.permits = None  # a semaphore
        self.engine = None
        self.fail = False
        self.max_model_len = 1600

    def build(self, config):
        self.engine = engine = make_engine(max_num_seqs=config.max_num_seqs)
        runner, launch = engine.runner, engine.runner.launch
        runner.scripts["any"] = (loop(), len(ids(OPEN_PROMPT)))

        def gated(plan):
            assert self.open.wait(20)
            assert self.permits is None or self.permits.acquire(timeout=20)
            if self.fail:
                raise RuntimeError("CUDA error: device-side assert triggered")
            return launch(plan)

        runner.launch = gated
        model = ModelInfo("pebble", "qwen3", self.max_model_len, 1536, 400, 4, 100, 1600, "qwen3", True, True)
        return engine.core, model


@pytest.fixture
async def gate():
    return Gate()


CONFIG = EngineConfig(max_num_seqs=2, max_waiting=2, stall_timeout_s=0.05, own_process=False)


@pytest.fixture
async def engine(gate):
    engine = await AsyncEngine.start(CONFIG, build=gate.build)
    yield engine
    gate.open.set()
    await engine.stop()


PROMPT = ids(OPEN_PROMPT)
BUDGET = ThinkingParams(thinking_token_budget=9)
NO_LIMIT = ThinkingParams(thinking_token_budget=-1)


async def until(condition):
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("did not happen")


async def test_a_request_runs_to_its_end(engine):
    total = await collect(engine, PROMPT, GREEDY, BUDGET)
    assert total.outputs[0].reasoning == "a" * 9
    assert total.outputs[0].text == "B C"
    assert total.policy.budget == 9
    assert total.finished


async def test_deltas_of_a_slow_reader_are_merged(engine):
    outputs = []
    async for output in engine.generate(PROMPT, GREEDY, BUDGET):
        outputs.append(output)
        await asyncio.sleep(0.05)
    assert len(outputs) < 9
    assert "".join(o.outputs[0].reasoning for o in outputs if o.outputs) == "a" * 9


@pytest.mark.parametrize(
    ("kwargs", "field"),
    [
        ({"logit_bias": {1536: 1.0}}, "logit_bias"),
        ({"stop_token_ids": (5000,)}, "stop_token_ids"),
        ({"forced_tokens": (1536,)}, "forced_tokens"),
    ],
)
async def test_case_52_ids_outside_the_vocabulary_are_refused_before_the_engine(engine, kwargs, field):
    with pytest.raises(ParameterError) as caught:
        await collect(engine, PROMPT, SamplingParams(max_tokens=5, **kwargs))
    assert caught.value.field == field
    assert engine.stats().steps == 0


async def test_case_39_a_prompt_larger_than_the_pool_is_refused_with_both_numbers(engine):
    with pytest.raises(CapacityError, match=r"1700 tokens.*1600.*400 pages of 4"):
        await collect(engine, [1] * 1700, GREEDY)
    assert (await collect(engine, PROMPT, GREEDY, BUDGET)).finished


async def test_case_39_max_tokens_beyond_the_pool_are_refused_and_the_small_request_behind_is_served(gate):
    gate.max_model_len = 4096
    engine = await AsyncEngine.start(CONFIG, build=gate.build)
    try:
        off = FoldParams(policy="off")
        with pytest.raises(CapacityError, match=r"max_tokens: 1590 tokens.*prompt of 40 .* 1560 .*400 pages of 4"):
            await collect(engine, [5] * 40, SamplingParams(max_tokens=1590), fold=off)
        total = await collect(engine, PROMPT, GREEDY, BUDGET)
        assert total.finished and (total.limits.max_tokens, total.limits.clamped) == (60, ())
        told = await collect(engine, PROMPT, SamplingParams(temperature=0.0), BUDGET, fold=off)
        room = 1600 - len(PROMPT)
        assert told.limits == Limits(room, (Clamp("max_tokens", None, room, "kv_pool"),))
    finally:
        await engine.stop()


async def test_equal_greedy_choices_are_computed_once(engine):
    outputs = [o async for o in engine.generate(PROMPT, replace(GREEDY, n=3), BUDGET)]
    one = await collect(engine, PROMPT, GREEDY, BUDGET)
    total = outputs[0]
    for output in outputs[1:]:
        total.merge(output)
    assert [o.index for o in total.outputs] == [0, 1, 2] and total.finished
    assert all(replace(o, index=0) == one.outputs[0] for o in total.outputs)
    assert total.costs.thinking_tokens == one.costs.thinking_tokens == 9
    assert total.costs.copied_tokens == 2 * one.outputs[0].num_output_tokens and one.costs.copied_tokens == 0


async def test_bad_prompts_are_refused(engine):
    for prompt in ([], [-1], [99999]):
        with pytest.raises(ParameterError, match="prompt"):
            await collect(engine, prompt, GREEDY)


async def test_a_full_queue_says_when_to_come_back(engine, gate):
    gate.open.clear()
    tasks = [asyncio.create_task(collect(engine, PROMPT, GREEDY, BUDGET)) for _ in range(4)]
    await asyncio.sleep(0.02)
    with pytest.raises(QueueFullError) as caught:
        await collect(engine, PROMPT, GREEDY, BUDGET)
    assert caught.value.retry_after >= 1
    gate.open.set()
    assert all(t.finished for t in await asyncio.gather(*tasks))
    assert (await collect(engine, PROMPT, GREEDY, BUDGET)).finished


async def test_closing_the_iterator_aborts_and_returns_the_pages(engine, gate):
    stream = engine.generate(PROMPT, SamplingParams(max_tokens=1000), ThinkingParams(thinking_token_budget=-1))
    await anext(stream)
    await stream.aclose()
    await until(lambda: engine.stats().running == 0 and engine.stats().pages_by_class.get("thinking") == 0)
    assert engine.stats().requests_by_reason == {"abort": 1}


async def test_abort_gives_the_reader_a_final_output(engine):
    outputs = []
    stream = engine.generate(
        PROMPT, SamplingParams(max_tokens=1500), ThinkingParams(thinking_token_budget=-1), request_id="mine"
    )
    async for output in stream:
        outputs.append(output)
        await engine.abort("mine")
        await engine.abort("unknown")
    assert outputs[-1].finished
    assert outputs[-1].outputs[0].finish_reason is FinishReason.ABORT


async def test_a_running_request_id_cannot_be_used_twice(engine, gate):
    gate.open.clear()
    first = asyncio.create_task(anext(engine.generate(PROMPT, GREEDY, request_id="same")))
    await asyncio.sleep(0.02)
    with pytest.raises(ParameterError, match="request_id"):
        await anext(engine.generate(PROMPT, GREEDY, request_id="same"))
    gate.open.set()
    await first


async def test_a_request_id_is_free_again_only_when_the_core_has_told_the_end(engine, gate):
    gate.open.clear()
    first = asyncio.create_task(anext(engine.generate(PROMPT, GREEDY, BUDGET, request_id="same")))
    await asyncio.sleep(0.02)
    first.cancel()
    await asyncio.wait([first])
    with pytest.raises(ParameterError, match="request_id"):
        await anext(engine.generate(PROMPT, GREEDY, BUDGET, request_id="same"))
    gate.open.set()
    await until(lambda: not engine._readers)
    outputs = [output async for output in engine.generate(PROMPT, GREEDY, BUDGET, request_id="same")]
    assert outputs[-1].outputs[0].finish_reason is FinishReason.STOP


async def test_a_generator_closed_before_its_first_item_leaves_nothing(engine, gate):
    await engine.generate(PROMPT, GREEDY, BUDGET).aclose()
    assert engine.stats().steps == 0
    gate.open.clear()
    first = asyncio.create_task(anext(engine.generate(PROMPT, SamplingParams(max_tokens=1000), NO_LIMIT)))
    await asyncio.sleep(0.02)
    first.cancel()
    gate.open.set()
    await until(lambda: engine.stats().requests_by_reason == {"abort": 1})
    assert not engine._readers


async def test_stop_ends_running_streams_once_and_may_be_called_again(engine):
    stream = engine.generate(PROMPT, SamplingParams(max_tokens=1500), NO_LIMIT)
    await anext(stream)
    await engine.stop()
    with pytest.raises(EngineDeadError, match="stopped"):
        async for _ in stream:
            pass
    await engine.stop()
    assert not engine.health().alive


async def test_giving_up_while_the_model_loads_ends_the_core(gate):
    loading = threading.Event()

    def slow(config):
        assert loading.wait(20)
        return gate.build(config)

    before = set(threading.enumerate())
    start = asyncio.create_task(AsyncEngine.start(EngineConfig(own_process=False), build=slow))
    await until(lambda: any(t.name == "thinkfold-core" for t in set(threading.enumerate()) - before))
    start.cancel()
    loading.set()
    with pytest.raises(asyncio.CancelledError):
        await start
    await until(lambda: not any(t.name == "thinkfold-core" for t in set(threading.enumerate()) - before))


def accepted(engine, sampling):
    """The request that would go to the core."""
    wish = Wish(len(PROMPT), sampling.max_tokens, ThinkingParams(), FoldPolicy())
    return engine._accept(PROMPT, sampling, wish, ())


async def test_requests_can_be_sent_to_a_process_whatever_mapping_holds_their_bias(engine):
    sampling = SamplingParams(logit_bias=MappingProxyType({3: 1.0}))
    request = accepted(engine, sampling)
    assert pickle.loads(pickle.dumps(request)) == request


class Panic(BaseException):
    """What a crash inside a tokenizer's Rust code looks like."""


def _panic(config):
    raise Panic("index out of bounds")


async def test_a_panic_while_loading_is_told_like_any_failure():
    with pytest.raises(EngineDeadError, match="Panic: index out of bounds"):
        await asyncio.wait_for(AsyncEngine.start(EngineConfig(own_process=False), build=_panic), 10)


async def test_case_59_a_stuck_step_is_alive_but_not_ready(engine, gate):
    assert engine.health().ready
    await asyncio.sleep(0.1)
    assert engine.health().ready  # idle is not stuck
    gate.open.clear()
    task = asyncio.create_task(collect(engine, PROMPT, GREEDY, BUDGET))
    await until(lambda: not engine.health().ready)
    assert engine.health().alive
    assert "no step has finished" in engine.health().reason
    gate.open.set()
    await task
    assert engine.health().ready


async def test_a_device_error_ends_every_request_once_and_the_engine(engine, gate):
    gate.open.clear()
    tasks = [asyncio.create_task(collect(engine, PROMPT, GREEDY, BUDGET)) for _ in range(3)]
    await asyncio.sleep(0.02)
    gate.fail = True
    gate.open.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(r, EngineDeadError) and "device-side assert" in str(r) for r in results)
    assert engine.ended.is_set()
    assert not engine.health().alive
    with pytest.raises(EngineDeadError):
        await collect(engine, PROMPT, GREEDY)


async def test_the_watchdog_ends_a_hung_engine(gate):
    config = EngineConfig(max_num_seqs=2, stall_timeout_s=0.02, watchdog_s=0.1, own_process=False)
    engine = await AsyncEngine.start(config, build=gate.build)
    gate.open.clear()
    with pytest.raises(EngineDeadError, match="no step has finished"):
        await asyncio.wait_for(collect(engine, PROMPT, GREEDY, BUDGET), 10)
    assert engine.ended.is_set()
    gate.open.set()
    await engine.stop()


async def test_a_model_that_cannot_be_loaded_says_why():
    with pytest.raises(ParameterError, match="model"):
        await AsyncEngine.start(EngineConfig(model="/nowhere/at/all", own_process=False))


def _refuse(config):
    raise UnsupportedError("model", "bert is not supported")


async def test_a_refused_model_reaches_the_caller_by_name():
    with pytest.raises(UnsupportedError, match="bert"):
        await AsyncEngine.start(EngineConfig(own_process=False), build=_refuse)


async def test_fold_parameters_are_resolved_on_the_way_to_the_core(engine):
    sent = []
    send = engine._send
    engine._send = lambda command: (sent.append(command), send(command))
    asked = FoldParams(policy="eager", profile="fine", gate=0.5)
    assert (await collect(engine, PROMPT, GREEDY, BUDGET, asked)).finished
    assert (await collect(engine, PROMPT, GREEDY, BUDGET)).finished
    assert sent[0].fold == FoldPolicy(FoldMode.EAGER, "fine", "conclusion_attention", 32, 0.5)
    assert sent[1].fold == FoldPolicy(FoldMode.PRESSURE, "pebble", "conclusion_attention", 32)
    assert pickle.loads(pickle.dumps(sent[0])) == sent[0]


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"selector": "nothing"}, "fold.selector"),
        ({"entries": 128}, "fold.entries"),
        ({"at_answer": "swap"}, "fold.at_answer"),
    ],
)
async def test_folds_that_cannot_be_had_are_refused_before_the_engine(engine, asked, field):
    with pytest.raises(ParameterError) as caught:
        await collect(engine, PROMPT, GREEDY, BUDGET, FoldParams(**asked))
    assert caught.value.field == field
    assert engine.stats().steps == 0 and not engine._readers


@pytest.mark.parametrize("config", [{"fold_selector": "nothing"}, {"fold_at_answer": "swap"}])
async def test_a_default_that_cannot_be_had_ends_the_start(gate, config):
    with pytest.raises(ParameterError) as caught:
        await AsyncEngine.start(EngineConfig(own_process=False, **config), build=gate.build)
    assert caught.value.field == next(iter(config)) and gate.engine is None


async def test_no_seed_differs_and_a_seed_repeats(engine):
    seeds = [accepted(engine, SamplingParams()).sampling.seed for _ in range(3)]
    assert len(set(seeds)) == 3
    assert accepted(engine, SamplingParams(seed=5)).sampling.seed == 5
