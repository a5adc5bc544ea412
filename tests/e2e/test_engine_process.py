"""The core in its own process: same answers, and its death is noticed."""

import asyncio

import pytest

from tests.small_pebble import small_pebble
from thinkfold.config import EngineConfig
from thinkfold.engine.async_engine import AsyncEngine
from thinkfold.errors import EngineDeadError, ParameterError
from thinkfold.llm import collect
from thinkfold.types import SamplingParams, ThinkingParams

SMALL = {"model": small_pebble(), "load_format": "dummy", "kv_cache_bytes": 32 << 20}
NO_LIMIT = ThinkingParams(thinking_token_budget=-1)


async def test_a_process_of_its_own_answers_the_same_and_its_death_is_told():
    config = EngineConfig(**SMALL, own_process=True)
    engine = await AsyncEngine.start(config)
    sampling = SamplingParams(seed=3, max_tokens=12, ignore_eos=True)
    prompt = engine.prompts.encode_chat([{"role": "user", "content": "hi"}])
    there = await collect(engine, prompt, sampling, NO_LIMIT)
    here_engine = await AsyncEngine.start(EngineConfig(**SMALL))
    here = await collect(here_engine, prompt, sampling, NO_LIMIT)
    await here_engine.stop()
    assert there.outputs[0].token_ids == here.outputs[0].token_ids

    stream = engine.generate(prompt, SamplingParams(max_tokens=8000, ignore_eos=True), NO_LIMIT)
    await anext(stream)
    engine._client._process.kill()
    with pytest.raises(EngineDeadError, match="core process has gone"):
        async for _ in stream:
            pass
    await asyncio.wait_for(engine.ended.wait(), 5)
    assert not engine.health().alive
    await engine.stop()


async def test_a_wrong_parameter_comes_back_from_the_process_by_name():
    with pytest.raises(ParameterError) as caught:
        await AsyncEngine.start(EngineConfig(**SMALL, max_model_len=10**6, own_process=True))
    assert caught.value.field == "max_model_len"
