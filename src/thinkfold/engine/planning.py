"""What a card will hold and how fast it can be, before there is one: the engine's accounts on a model without weights.

Pages, planes, buffers, the reserve and admission are those of the engine; a step is as fast as memory can be read.
The equations stand in docs/three-costs.md.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace

from thinkfold.attention.fp8 import FP8
from thinkfold.config import EngineConfig
from thinkfold.engine.capacity import reserve_pages
from thinkfold.errors import CapacityError, ParameterError
from thinkfold.fold.estimate import FoldShape, middle
from thinkfold.kv.shards import Shards
from thinkfold.runner import loader, sizing
from thinkfold.runner.loader import LoadedModel
from thinkfold.runner.memory import DeviceMemory, fold_budgets
from thinkfold.scheduler.admission import Admission, Life
from thinkfold.types import FoldMode, FoldProfile


@dataclass(frozen=True, slots=True)
class Card:
    """Bytes of memory as CUDA counts them, bytes read in a second, and bytes that the engine takes beside weights,
    KV and what folds need: the CUDA context, activations and graphs."""

    memory: int
    bandwidth: float
    overhead: int


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that are all alike, in tokens."""

    prompt: int
    thinking: int
    answer: int

    @property
    def tokens(self) -> int:
        return self.prompt + self.thinking + self.answer

    @property
    def output(self) -> int:
        return self.thinking + self.answer


@dataclass(frozen=True, slots=True)
class Pool:
    """Memory of one engine, on each card if it has several.

    `fold_bytes` are what folds need beside the pool; `reserve` pages hold no raw entry.
    """

    weight_bytes: int
    fold_bytes: int
    page_bytes: int
    page_size: int
    pages: int
    reserve: int

    @property
    def capacity(self) -> int:
        """Entries that requests can hold."""
        return (self.pages - self.reserve) * self.page_size

    @property
    def entry_bytes(self) -> float:
        """KV of a token in all layers and heads of a card."""
        return self.page_bytes / self.page_size


@dataclass(frozen=True, slots=True)
class Outlook:
    """What one fold policy makes of a load.

    `peak` and `mean` are stored entries of a request; `sessions` run at whatever ages, `spread` at evenly spread ones;
    `read` entries of the whole batch are read by a step of `spread` sessions, in `step_s` seconds at best. From `bend`
    sessions on a step reads more KV than weights, and more sessions add less and less. `answers_h` end in an hour;
    `byte_seconds` of KV are held for one, on all cards. What cards tell each other in a step is not counted.
    """

    policy: FoldMode
    peak: float
    mean: float
    sessions: int
    spread: int
    read: float
    step_s: float
    bend: float
    tokens_per_s: float
    answers_h: float
    byte_seconds: float


class Planner:
    """Plans for one model on one card. Raises as `loader.load` does for a model that cannot be served."""

    def __init__(self, config: EngineConfig, card: Card) -> None:
        self._config = config
        self._card = card
        self._model = loader.outline(config)
        self.max_model_len = sizing.model_len(config, self._model.max_position)
        self._weights = _Weights(self._model)
        self._memories = {dtype: self._memory(dtype) for dtype in ("model", "fp8_e4m3")}
        self._numbers = config.fold_numbers[1].behind(self._memories["model"].window)

    def pool(self, kv_dtype: str) -> Pool:
        """The pool with KV stored as `model` or `fp8_e4m3`. Raises CapacityError if the card is too small."""
        memory, config, card = self._memories[kv_dtype], self._config, self._card
        usable = int(card.memory * config.gpu_memory_utilization)
        fold_bytes = memory.reserved_bytes
        free = usable - self._weights.total - fold_bytes - card.overhead
        pages = sizing.fitting_pages(config, self.max_model_len, memory.page_bytes, free)
        if pages < 2:
            raise CapacityError(
                "gpu_memory",
                f"of {usable / 1e9:.1f} GB, weights take {self._weights.total / 1e9:.1f}, folds of max_num_seqs "
                f"{config.max_num_seqs} take {fold_bytes / 1e9:.1f} and the rest {card.overhead / 1e9:.1f}: "
                "nothing is left for KV",
            )
        ranks, heads = config.tensor_parallel_size, memory.budgets.num_kv_heads
        reserve = reserve_pages(memory.budgets, config, pages, Shards(ranks, heads))
        return Pool(self._weights.total, fold_bytes, memory.page_bytes, config.page_size, pages, reserve)

    def outlook(self, pool: Pool, load: Load, policy: FoldMode) -> Outlook:
        """How many requests run and how fast, if there are always more of them. Raises ParameterError if one is longer
        than the model takes."""
        if load.tokens > self.max_model_len:
            raise ParameterError(
                "thinking",
                f"prompt, thinking and answer are {load.tokens:,} tokens, max_model_len is {self.max_model_len:,}",
            )
        numbers = None if policy is FoldMode.OFF or not load.thinking else self._numbers
        course = _Course(load, numbers)
        sessions, spread = (self._most(pool, course, ages) for ages in (False, True))
        if not spread:
            return Outlook(policy, course.peak, course.mean, 0, 0, *(0.0,) * 6)
        held, batch = course.mean if policy is not FoldMode.PRESSURE else _Course(load, None).mean, spread
        # Under pressure a batch holds raw entries until the pool is full.
        read = max(batch * course.mean, min(batch * held, float(pool.capacity)))
        step = (self._weights.read(batch) + read * pool.entry_bytes) / self._card.bandwidth
        seconds = load.output * step
        return Outlook(
            policy=policy,
            peak=course.peak,
            mean=course.mean,
            sessions=sessions,
            spread=spread,
            read=read,
            step_s=step,
            bend=self._weights.read(batch) / (read / batch * pool.entry_bytes),
            tokens_per_s=spread / step,
            answers_h=spread * 3600 / seconds,
            byte_seconds=read / batch * pool.entry_bytes * self._config.tensor_parallel_size * seconds,
        )

    def _most(self, pool: Pool, course: _Course, ages: bool) -> int:
        """The most requests that admission lets run together, of one age or of evenly spread ones."""
        admission = Admission(pool.capacity, pool.page_size, self._config.admission_risk)
        shape = FoldShape(middle(course.numbers)) if course.numbers is not None else FoldShape(1.0)

        def outgrows(count: int) -> bool:
            lives = [course.life(i / count if ages else 0.0) for i in range(count)]
            return not admission.fits(lives, shape)

        return bisect_right(range(1, self._config.max_num_seqs + 1), False, key=outgrows)

    def _memory(self, kv_dtype: str) -> DeviceMemory:
        """The engine's memory object with two pages, its tensors without memory."""
        model, stored = self._model, FP8 if kv_dtype == "fp8_e4m3" else self._model.dtype
        memory = DeviceMemory(self._config, model, fold_budgets(model), self.max_model_len, stored, 2)
        memory.reserve()
        return memory


@dataclass(frozen=True, slots=True)
class _Course:
    """How a request's entries grow; `numbers` None: nothing is folded."""

    load: Load
    numbers: FoldProfile | None

    @property
    def peak(self) -> float:
        """Entries at the worst moment."""
        raw = float(self.load.tokens)
        if self.numbers is None:
            return raw
        thinking = FoldShape.most(self.numbers).entries(self.numbers, self.load.thinking)
        return min(raw, self.load.prompt + thinking + self.load.answer)

    @property
    def mean(self) -> float:
        """Entries on average over the request's output."""
        points = max(1, min(self.load.output, 512))
        return sum(self.entries((i + 0.5) / points) for i in range(points)) / points

    def entries(self, age: float) -> float:
        """Entries at an `age` from 0 to 1."""
        done = age * self.load.output
        thought, answered = min(done, self.load.thinking), max(0.0, done - self.load.thinking)
        if self.numbers is not None:
            thought = FoldShape(middle(self.numbers)).entries(self.numbers, thought)
        return self.load.prompt + thought + answered

    def life(self, age: float) -> Life:
        """It as admission sees it."""
        load, done = self.load, int(age * self.load.output)
        thought, answered = min(done, load.thinking), max(0, done - load.thinking)
        return Life(
            entries=self.entries(age),
            fixed=load.prompt + answered,
            thought=thought,
            answered=answered,
            answering=done >= load.thinking,
            limit=load.output - done,
            budget=max(load.thinking, thought + 1),
            answers=(load.answer,),
            numbers=self.numbers,
        )


class _Weights:
    """Bytes of a model's weights, and of those that a step reads.

    A table of embeddings is read by a few lines, unless it is the output layer, too. Of experts a step reads those
    that its tokens are sent to, as if each were as likely.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        model, config = loaded.model, loaded.model.config
        sizes = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
        self.total = sum(sizes.values())
        table = model.get_input_embeddings().weight  # type: ignore[union-attr]
        unread = 0 if config.tie_word_embeddings else table.numel() * table.element_size()  # type: ignore[operator]
        self._experts = sum(size for name, size in sizes.items() if ".experts." in name)
        self._always = self.total - unread - self._experts
        many, few = getattr(config, "num_experts", None), getattr(config, "num_experts_per_tok", None)
        self._idle = 1.0 - few / many if self._experts and many and few else 0.0

    def read(self, batch: int) -> float:
        return self._always + self._experts * (1.0 - self._idle**batch)


def chat() -> Load:
    """What a request for a chat reply is like."""
    return Load(1_000, 0, 300)


def with_thinking(load: Load, thinking: int) -> Load:
    """The same with another length of thinking."""
    return replace(load, thinking=thinking)
