"""A real core around a scripted runner: Script, Loop and Flat of the case notation."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache

from fakes import TokenFunction
from transformers import AutoTokenizer

from thinkfold.control.budget import resolve_policy
from thinkfold.control.parts import PartControl
from thinkfold.engine.core import EngineCore
from thinkfold.kv.manager import KVManager
from thinkfold.pebble import pebble_path
from thinkfold.scheduler.scheduler import Scheduler
from thinkfold.text.vocabulary import Vocabulary
from thinkfold.thinking.families import resolve_family
from thinkfold.types import EngineRequest, RequestOutput, SamplingParams, Service, ThinkingParams

PAGE = 4


@cache
def language():
    """(tokenizer, vocabulary, family) of the embedded reasoner."""
    tokenizer = AutoTokenizer.from_pretrained(pebble_path())
    vocabulary = Vocabulary.from_tokenizer(tokenizer)
    return tokenizer, vocabulary, resolve_family(tokenizer, vocabulary, "qwen3")


def ids(text: str) -> list[int]:
    return language()[0].encode(text, add_special_tokens=False)


THINK, CLOSE, EOS = "<think>", "</think>", "<|im_end|>"
OPEN_PROMPT = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\n"
BARE_PROMPT = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"


def script(text: str):
    """Emits the tokens of `text` by output position, then EOS for ever."""
    tokens = ids(text)

    def token_of(sample, context, prompt_len):
        index = sample.position - prompt_len
        return tokens[index] if index < len(tokens) else ids(EOS)[0]

    return token_of


def loop(letter: str = "a", answer: str = "B C"):
    """`letter` while thinking is open; after the close the answer, then EOS."""
    (a,), (close,), tail = ids(letter), ids(CLOSE), [*ids(answer), *ids(EOS)]
    newlines = set(ids("\n")) | set(ids("\n\n"))

    def token_of(sample, context, prompt_len):
        output = context[prompt_len:]
        if close not in output:
            return a
        after = [t for t in output[output.index(close) + 1 :] if t not in newlines]
        return tail[min(len(after), len(tail) - 1)]

    return token_of


@dataclass
class Engine:
    """A core, its runner, and the outputs so far by request."""

    core: EngineCore
    runner: ScriptRunner
    outputs: dict[str, RequestOutput]
    finals: dict[str, int]

    def add(
        self,
        prompt=OPEN_PROMPT,
        *,
        request_id="r",
        token_of=None,
        budget=None,
        thinking=None,
        service=None,
        until=None,
        **sampling,
    ):
        """Queue one request as AsyncEngine would resolve it."""
        prompt_ids = ids(prompt) if isinstance(prompt, str) else list(prompt)
        sampling = {"max_tokens": 200, "seed": 0, "temperature": 0.0, **sampling}
        params = thinking or ThinkingParams(thinking_token_budget=budget)
        family = language()[2]
        request = EngineRequest(
            request_id=request_id,
            prompt_token_ids=tuple(prompt_ids),
            prompt=family.prompt_state(prompt_ids),
            sampling=SamplingParams(**sampling),
            thinking=resolve_policy(
                params,
                family=family,
                default_budget=16384,
                default_enabled=True,
                template_switch=True,
                max_tokens=sampling["max_tokens"],
                max_model_len=4096,
            ),
            service=service or Service(),
            until=until,
        )
        if token_of is not None:
            self.runner.scripts[request_id] = (token_of, len(prompt_ids))
        self.core.add(request)
        return request

    def step(self):
        for output in self.core.step():
            if output.request_id in self.outputs:
                self.outputs[output.request_id].merge(output)
            else:
                self.outputs[output.request_id] = output
            self.finals[output.request_id] = self.finals.get(output.request_id, 0) + output.finished
        self.core.check_integrity()

    def run(self, limit=5000):
        for _ in range(limit):
            if not self.core.has_work:
                return self
            self.step()
        raise AssertionError(f"not finished after {limit} steps")

    def one(self, request_id="r", index=0):
        return next(o for o in self.outputs[request_id].outputs if o.index == index)


class ScriptRunner(TokenFunction):
    """Finds the script of a row by the seed, which tests make unique per request."""

    def __init__(self):
        super().__init__(token_of=None)
        self.page_size = PAGE
        self.scripts = {}
        self.by_seed = {}
        self.fail_at: int | None = None
        self.nan_at: set[tuple[int, int]] = set()  # (seed, position)

    def draw(self, sample, context):
        if (sample.seed, sample.position) in self.nan_at:
            return -1
        name = self.by_seed.get(sample.seed, next(iter(self.scripts)))
        token_of, prompt_len = self.scripts[name]
        token = token_of(sample, context, prompt_len)
        if sample.ban_eos and token == ids(EOS)[0]:
            return ids("x")[0]
        return token

    def launch(self, plan):
        if self.fail_at is not None and self.launched >= self.fail_at:
            raise RuntimeError("device-side assert triggered")
        return super().launch(plan)


def make_engine(*, depth=0, num_pages=400, max_num_seqs=16, budget=64, caching=True, closing="", host_pages=0):
    _, vocabulary, family = language()
    kv = KVManager(num_pages, PAGE, enable_prefix_caching=caching, host_pages=host_pages)
    scheduler = Scheduler(kv, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)

    def make_control(request, branch):
        return PartControl(request, branch, vocabulary, family, closing_ids=tuple(ids(closing)) if closing else ())

    ticks = itertools.count()
    runner = ScriptRunner()
    core = EngineCore(
        runner, scheduler, make_control, page_bytes=100, pipeline_depth=depth, clock=lambda: next(ticks) * 0.25
    )
    return Engine(core, runner, {}, {})
