"""Engine configuration: every default in one place, validated when built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from thinkfold.errors import ParameterError
from thinkfold.types import DEFAULT_THINKING_BUDGET, FOLD_PROFILES, UNLIMITED, AtAnswer, FoldMode, FoldProfile

PAGE_SIZES = (8, 16, 32, 64)
EMBEDDED_MODEL = "pebble"
ALIASES: Mapping[str, str] = {"block_size": "page_size"}  # other names, and what they stand for
_CHOICES: Mapping[str, tuple[object, ...]] = {
    "load_format": ("auto", "dummy"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "kv_cache_dtype": ("auto", "model", "fp8_e4m3"),
    "pipeline_depth": (0, 1, None),
    "admission": ("predicted", "greedy"),
    "fold_policy": tuple(FoldMode),
    "fold_profile": (*FOLD_PROFILES, None),
    "fold_at_answer": tuple(AtAnswer),
    "fold_prefer": ("fold", "queue"),
    "fold_storage": ("model", "int4"),
    "attention_backend": ("auto", "reference", "triton"),
}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How an engine is built. Names follow vLLM where the meaning is the same.

    Raises ParameterError. The command line shows these sentences as the help of its flags.

    `model` is a folder, a hub id, or pebble, the reasoner inside the package.
    `served_model_name` is the name that clients use; None takes `model`.
    `load_format` dummy makes random weights, for benchmarks.
    `dtype` auto is the checkpoint's on a GPU and float32 on a CPU.
    `device` is auto, cpu, cuda or cuda:N.
    `tensor_parallel_size` splits the model and its KV heads over so many GPUs from `device` on, or processes of a CPU.
    `max_model_len` bounds prompt and output together; None takes the model's own length.
    `max_num_seqs` bounds the branches that run at once.
    `max_num_batched_tokens` is the token budget of one step.
    `admission` predicted starts a branch if the pool will hold the batch to its end; greedy if its prompt fits.
    `admission_risk` of outgrowing the pool is what predicted takes with a branch: more runs sooner, and is forced out.
    `max_waiting` bounds the queue behind the running branches; beyond it the server answers 429.
    `max_handles` bounds the kept states of branches; one more drives out the one not used for longest.
    `handle_ttl_s` is the seconds after which an unused one goes.
    `page_size` is the tokens of one KV page: 8, 16, 32 or 64.
    `kv_cache_bytes` fixes the KV pool, of each rank if there are several; None sizes it by a profiling run.
    `kv_cache_dtype` model is the model's dtype; fp8_e4m3 has a scale a token and head; auto measures which of them.
    `swap_space_bytes` is host memory for KV that leaves the device, of each rank; 0 is none.
    `gpu_memory_utilization` is the share of the device (of free memory on a CPU) to stay within.
    `enable_prefix_caching` shares the KV of equal visible prefixes between requests.
    `turn_ahead` computes in idle steps what a chat's next turn will begin with, where templates strip its thinking.
    `pin_ttl_s` is the seconds for which that is kept from being evicted; memory that others need it gives up.
    `pin_share` is the share of the KV pool that pinned prefixes of one tenant may hold.
    `pipeline_depth` 1 plans a step ahead of the device, 0 waits for each; None is 1 on a GPU.
    `enforce_eager` compiles nothing and makes no CUDA graphs; a CPU and the reference attention never do.
    `own_process` runs the core in a process of its own; None does so on a GPU.
    `seed` makes the random weights of load_format dummy repeatable.
    `default_thinking_budget` is the thinking limit of requests that name none; -1 is no limit.
    `enable_thinking` is the choice of requests that name none.
    `think_start` is the start marker of a model that is not in the family table.
    `think_end` is its end marker.
    `think_force` is the text that ends its thinking by force; None takes `think_end`.
    `closing_words` are written before a forced end and count against the budget.
    `answer_opener` is how the model begins its final answer; probes of unfinished thinking ask with it.
    `answer_embedder` compares prose answers of votes: a folder, an /embeddings URL or minilm; None compares letters.
    `answer_embedder_model` is the model that such a URL is asked for; its key is THINKFOLD_EMBEDDER_KEY.
    `answer_min_cosine` is how near each two answers of one class must be, 0 to 1.
    `verifiers` score answers for `best_of` and `search`, each written NAME=URL; requests over HTTP know them by name.
    `normalize_prompts` unifies line ends and trailing blanks of system and few-shot text.
    `fold_policy` says when finished thinking is folded: off, pressure (memory is short) or eager.
    `fold_profile` names the numbers of segments and folds; None is pebble for pebble, else default.
    `fold_selector` names what chooses the entries that a fold keeps.
    `fold_entries` are kept of a segment in each KV head, on average; None takes the profile's.
    `fold_gate` is the largest estimated error, 0 to 1, with which a fold is still committed.
    `fold_at_answer` is what becomes of raw thinking then: keep, recycle (fold it) or swap.
    `fold_prefer` is the peak that admission counts on: fold (folded) or queue (raw).
    `fold_storage` is how summaries are kept: model is as raw entries are; int4 is 4 bits a number, more entries a byte.
    `fold_delimiter_token` is one more token that ends a segment of thinking.
    `fold_delimiter_regex` ends a segment where it matches, in the syntax of RE2.
    `stall_timeout_s` without a finished step makes the server not ready.
    `watchdog_s` without a finished step ends the engine.
    `attention_backend` auto is triton on a GPU and reference (plain PyTorch) on a CPU.
    """

    model: str = "pebble"
    served_model_name: str | None = None
    load_format: Literal["auto", "dummy"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    tensor_parallel_size: int = 1
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    admission: Literal["predicted", "greedy"] = "predicted"
    admission_risk: float = 0.02
    max_waiting: int = 512
    max_handles: int = 64
    handle_ttl_s: float = 300.0
    page_size: int = 16
    kv_cache_bytes: int | None = None
    kv_cache_dtype: Literal["auto", "model", "fp8_e4m3"] = "model"
    swap_space_bytes: int = 0
    gpu_memory_utilization: float = 0.90
    enable_prefix_caching: bool = True
    turn_ahead: bool = True
    pin_ttl_s: float = 300.0
    pin_share: float = 0.25
    pipeline_depth: Literal[0, 1] | None = None
    enforce_eager: bool = False
    own_process: bool | None = None
    seed: int | None = None
    default_thinking_budget: int = DEFAULT_THINKING_BUDGET
    enable_thinking: bool = True
    think_start: str | None = None
    think_end: str | None = None
    think_force: str | None = None
    closing_words: str = ""
    answer_opener: str = "The answer is \\boxed{"
    answer_embedder: str | None = None
    answer_embedder_model: str = ""
    answer_min_cosine: float = 0.90
    verifiers: tuple[str, ...] = ()
    normalize_prompts: bool = True
    fold_policy: Literal["off", "pressure", "eager"] = "pressure"
    fold_profile: Literal["default", "fine", "coarse", "pebble"] | None = None
    fold_selector: str = "conclusion_attention"
    fold_entries: int | None = None
    fold_gate: float = 1.0
    fold_at_answer: Literal["keep", "recycle", "swap"] = "keep"
    fold_prefer: Literal["fold", "queue"] = "fold"
    fold_storage: Literal["model", "int4"] = "model"
    fold_delimiter_token: str | None = None
    fold_delimiter_regex: str | None = None
    stall_timeout_s: float = 60.0
    watchdog_s: float = 600.0
    attention_backend: Literal["auto", "reference", "triton"] = "auto"

    def __post_init__(self) -> None:
        counts = ("tensor_parallel_size", "max_num_seqs", "max_num_batched_tokens", "max_waiting", "max_handles")
        for name in counts:
            if getattr(self, name) < 1:
                raise ParameterError(name, f"must be at least 1, got {getattr(self, name)}")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                shown = ", ".join(map(str, allowed))
                raise ParameterError(name, f"must be one of {shown}, got {getattr(self, name)!r}")
        if not 0.0 < self.admission_risk < 1.0:
            raise ParameterError("admission_risk", f"must be between 0 and 1, got {self.admission_risk}")
        for name in ("stall_timeout_s", "watchdog_s", "handle_ttl_s", "pin_ttl_s"):
            if not getattr(self, name) > 0.0:
                raise ParameterError(name, f"must be positive, got {getattr(self, name)}")
        if self.page_size not in PAGE_SIZES:
            raise ParameterError("page_size", f"must be one of {PAGE_SIZES}, got {self.page_size}")
        for name in ("pin_share", "answer_min_cosine"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ParameterError(name, f"must be in [0, 1], got {getattr(self, name)}")
        if self.answer_embedder_model and "://" not in (self.answer_embedder or ""):
            raise ParameterError("answer_embedder_model", "belongs to an answer_embedder that is a URL")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ParameterError("gpu_memory_utilization", f"must be in (0, 1], got {self.gpu_memory_utilization}")
        if self.kv_cache_bytes is not None and self.kv_cache_bytes < 1:
            raise ParameterError("kv_cache_bytes", f"must be positive, got {self.kv_cache_bytes}")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ParameterError("max_model_len", f"must be at least 2, got {self.max_model_len}")
        if self.seed is not None and self.load_format != "dummy":
            raise ParameterError("seed", "needs load_format dummy; requests carry their own seed")
        if self.swap_space_bytes < 0:
            raise ParameterError("swap_space_bytes", f"must be 0 or more, got {self.swap_space_bytes}")
        if self.default_thinking_budget < UNLIMITED:
            raise ParameterError("default_thinking_budget", f"must be -1 or more, got {self.default_thinking_budget}")
        markers = (self.think_start, self.think_end)
        if any(markers) and not all(markers):
            raise ParameterError("think_start", "think_start and think_end go together")
        self._check_fold()
        if len(self.verifier_urls) < len(self.verifiers):
            raise ParameterError("verifiers", "a name stands there twice")

    @property
    def fold_numbers(self) -> tuple[str, FoldProfile]:
        """Name and numbers of the profile that requests get which name none."""
        name = self.fold_profile or ("pebble" if self.model == EMBEDDED_MODEL else "default")
        profile = FOLD_PROFILES[name]
        return name, profile if self.fold_entries is None else replace(profile, entries=self.fold_entries)

    @property
    def verifier_urls(self) -> dict[str, str]:
        """Addresses of verifiers by name. Raises ParameterError."""
        found: dict[str, str] = {}
        for each in self.verifiers:
            name, _, url = each.partition("=")
            if not name or not url.startswith(("http://", "https://")):
                raise ParameterError("verifiers", f"must each be written NAME=http(s)://…, got one for {name!r:.60}")
            found[name] = url
        return found

    def _check_fold(self) -> None:
        if not 0.0 <= self.fold_gate <= 1.0:
            raise ParameterError("fold_gate", f"must be in [0, 1], got {self.fold_gate}")
        _, numbers = self.fold_numbers
        if not 0 <= numbers.entries < numbers.min_segment_tokens:
            limit = numbers.min_segment_tokens
            raise ParameterError(
                "fold_entries", f"must be at least 0 and less than the {limit} tokens of the shortest segment"
            )


def own_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with the names of `EngineConfig` in place of `ALIASES`. Raises ParameterError where both are given."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        own = ALIASES.get(name, name)
        if own in found:
            raise ParameterError(name, f"{own} is given, too, under another name; give it once")
        found[own] = value
    return found
