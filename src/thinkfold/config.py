"""Engine configuration: every default in one place, validated when built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from thinkfold.errors import ParameterError
from thinkfold.types import DEFAULT_THINKING_BUDGET, UNLIMITED

PAGE_SIZES = (8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How an engine is built. Names follow vLLM where the meaning is the same.

    `model` is a folder, a hub id, or `pebble`, the reasoner inside the package.
    `kv_cache_bytes` fixes the KV pool; otherwise a profiling run sizes it so that the
    process stays within `gpu_memory_utilization` of the device (of free memory on a CPU).
    `pipeline_depth` 1 plans a step ahead of the device, 0 waits for each step; None picks
    1 on a GPU and 0 on a CPU. `own_process` None runs the core in its own process on a GPU.
    """

    model: str = "pebble"
    served_model_name: str | None = None
    load_format: Literal["auto", "dummy"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    max_waiting: int = 512
    page_size: int = 16
    kv_cache_bytes: int | None = None
    kv_cache_dtype: Literal["auto"] = "auto"
    gpu_memory_utilization: float = 0.90
    enable_prefix_caching: bool = True
    pipeline_depth: Literal[0, 1] | None = None
    own_process: bool | None = None
    seed: int | None = None
    default_thinking_budget: int = DEFAULT_THINKING_BUDGET
    enable_thinking: bool = True
    think_start: str | None = None
    think_end: str | None = None
    think_force: str | None = None
    closing_words: str = ""
    normalize_prompts: bool = True
    min_segment_tokens: int = 1
    max_segment_tokens: int = 1024
    stall_timeout_s: float = 60.0
    watchdog_s: float = 600.0

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_waiting", "min_segment_tokens"):
            if getattr(self, name) < 1:
                raise ParameterError(name, f"must be at least 1, got {getattr(self, name)}")
        if self.page_size not in PAGE_SIZES:
            raise ParameterError("page_size", f"must be one of {PAGE_SIZES}, got {self.page_size}")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ParameterError("gpu_memory_utilization", f"must be in (0, 1], got {self.gpu_memory_utilization}")
        if self.kv_cache_bytes is not None and self.kv_cache_bytes < 1:
            raise ParameterError("kv_cache_bytes", f"must be positive, got {self.kv_cache_bytes}")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ParameterError("max_model_len", f"must be at least 2, got {self.max_model_len}")
        if self.kv_cache_dtype != "auto":
            raise ParameterError(
                "kv_cache_dtype", f"only auto (the model's dtype) is available, got {self.kv_cache_dtype}"
            )
        if self.default_thinking_budget < UNLIMITED:
            raise ParameterError("default_thinking_budget", f"must be -1 or more, got {self.default_thinking_budget}")
        if self.max_segment_tokens < self.min_segment_tokens:
            raise ParameterError("max_segment_tokens", "must be at least min_segment_tokens")
        markers = (self.think_start, self.think_end)
        if any(markers) and not all(markers):
            raise ParameterError("think_start", "think_start and think_end go together")
