"""The whole engine against transformers' own forward and a sampler written for reading, token by token.

Penalties, bias, filters, seeds, n > 1 and end-token bans, while prompts are cut into chunks and
branches are preempted, one step ahead or not.
"""

import asyncio
import math
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.unit.thread_ranks import checkpoint
from thinkfold.config import EngineConfig
from thinkfold.engine.async_engine import AsyncEngine
from thinkfold.llm import collect
from thinkfold.pebble import pebble_path
from thinkfold.runner import rng
from thinkfold.runner.storage import page_bytes
from thinkfold.types import SamplingParams, ThinkingParams

NO_LIMIT = ThinkingParams(thinking_token_budget=-1)
LENGTH = 18
QUESTIONS = ["What is 12 * 3?", "Sort 3 1 2 please. " * 5, "hello", "x = 4. " * 9]
PARAMS = [
    SamplingParams(n=2, seed=1, temperature=0.9, repetition_penalty=1.4, top_p=0.9, min_tokens=LENGTH),
    SamplingParams(n=2, seed=2, temperature=0.0, frequency_penalty=1.5, presence_penalty=0.7, min_tokens=9),
    SamplingParams(n=3, seed=3, temperature=1.3, top_k=7, min_p=0.05, logit_bias={9: 3.0, 17: -100.0, 300: 7.5}),
    SamplingParams(n=2, seed=-4, temperature=2.0, top_p=0.6, top_k=40, frequency_penalty=-0.8, repetition_penalty=0.7),
]


def changed(logits: list[float], params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    """Logits after penalties and bias."""
    logits = list(logits)
    for token in {*prompt, *output}:
        up = logits[token] < 0
        logits[token] *= params.repetition_penalty if up else 1 / params.repetition_penalty
    for token in set(output):
        logits[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    return logits


def draw(logits: list[float], params: SamplingParams, u: float) -> int:
    """Top-k, top-p of the rest, min-p, then inverse CDF in id order."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if params.temperature == 0:
        return order[0]
    weights = [math.exp((x - logits[order[0]]) / params.temperature) for x in logits]
    kept = order[: params.top_k] if params.top_k > 0 else order
    mass, total, nucleus = 0.0, sum(weights[i] for i in kept), []
    for i in kept:
        if params.top_p < 1 and mass >= params.top_p * total:
            break
        nucleus.append(i)
        mass += weights[i]
    nucleus = sorted(i for i in nucleus if weights[i] >= params.min_p)
    target = u * sum(weights[i] for i in nucleus)
    for i in nucleus:
        target -= weights[i]
        if target < 0:
            return i
    return nucleus[-1]


@torch.inference_mode()
def naive(model, prompt: list[int], params: SamplingParams, branch: int, eos: frozenset[int]) -> list[int]:
    output: list[int] = []
    for index in range(LENGTH):
        logits = model(torch.tensor([prompt + output])).logits[0, -1].tolist()
        logits = changed(logits, params, prompt, output)
        if index < params.min_tokens:
            for token in eos:
                logits[token] = -math.inf
        output.append(draw(logits, params, rng.uniform(params.seed or 0, branch, len(prompt) + index)))
    return output


class Reference:
    """What a model in a folder draws, each choice once."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._known: dict[tuple[int, int], list[int]] = {}

    def draws(self, number: int, prompt: list[int], branch: int, eos: frozenset[int]) -> list[int]:
        if (number, branch) not in self._known:
            self._known[number, branch] = naive(self._model, prompt, PARAMS[number], branch, eos)
        return self._known[number, branch]

    def page_bytes(self, page_size: int) -> int:
        config = self._model.config
        return page_bytes(
            config.num_hidden_layers, config.num_key_value_heads, page_size, config.head_dim, torch.float32
        )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Reference:
    """Random weights, which draw from all that the sampler leaves."""
    return Reference(str(checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3", tie_word_embeddings=True)))


async def check(reference: Reference, pages: int, page_size: int, params: list[SamplingParams], **changes) -> None:
    """The engine draws what the naive loop draws, for all prompts that `pages` hold."""
    config = EngineConfig(
        model=reference.folder,
        kv_cache_bytes=pages * reference.page_bytes(page_size),
        page_size=page_size,
        max_num_seqs=4,
        own_process=False,
        fold_policy="off",
        **changes,
    )
    engine = await AsyncEngine.start(config)
    try:
        prompts = [engine.prompts.encode_chat([{"role": "user", "content": q}]) for q in QUESTIONS]
        kept = [i for i, p in enumerate(prompts) if len(p) + LENGTH <= engine.model.max_prompt_len]
        assert len(kept) >= 2

        asked = [replace(p, max_tokens=LENGTH, ignore_eos=True) for p in params]
        results = await asyncio.gather(*(collect(engine, prompts[i], asked[i], NO_LIMIT) for i in kept))
        assert engine.family is not None
        eos = engine.family.vocabulary.eos_ids
        for i, result in zip(kept, results, strict=True):
            for choice in result.outputs:
                assert choice.token_ids == reference.draws(i, prompts[i], choice.index, eos), (i, choice.index)
        assert engine.stats().preemptions > 0 or pages >= 400
    finally:
        await engine.stop()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("pages", "budget", "page_size"), [(400, 512, 16), (8, 11, 16), (15, 3, 8)])
async def test_tokens_equal_a_naive_loop(tiny, depth, pages, budget, page_size):
    await check(tiny, pages, page_size, PARAMS, max_num_batched_tokens=budget, pipeline_depth=depth)


async def test_those_of_the_shipped_weights_do_too():
    await check(Reference(str(pebble_path())), 400, 16, [replace(p, n=1) for p in PARAMS])
