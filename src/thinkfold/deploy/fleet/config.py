"""What a fleet is: pools of replicas, each for one tier, behind one door."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

from thinkfold.config import EngineConfig
from thinkfold.errors import ParameterError
from thinkfold.server.tiers import ServedTier, TierTable
from thinkfold.types.checks import choice, integer, number

# Settings of a core alone; all others are about the door, which pools of one model share.
POOL_SETTINGS = frozenset(
    (
        "load_format",
        "dtype",
        "device",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "admission",
        "admission_risk",
        "max_waiting",
        "page_size",
        "kv_cache_bytes",
        "kv_cache_dtype",
        "swap_space_bytes",
        "tensor_parallel_size",
        "gpu_memory_utilization",
        "pipeline_depth",
        "enforce_eager",
        "own_process",
        "seed",
        "fold_storage",
        "watchdog_s",
        "attention_backend",
    )
)


@dataclass(frozen=True, slots=True)
class Replicas:
    """How many replicas a pool has. Raises ParameterError.

    There are `min` to `max`, as many as keep the predicted KV peak at `target` of their pools. It must ask for more
    for `up_delay_s` seconds, or for fewer for `down_delay_s`, before anything happens.
    """

    min: int = 1
    max: int = 1
    target: float = 0.8
    up_delay_s: float = 10.0
    down_delay_s: float = 300.0

    def __post_init__(self) -> None:
        integer("replicas.min", self.min, 1)
        integer("replicas.max", self.max, self.min)
        number("replicas.target", self.target, 0.0, 1.0, open_low=True)
        number("replicas.up_delay_s", self.up_delay_s, 0.0, 86_400.0)
        number("replicas.down_delay_s", self.down_delay_s, 0.0, 86_400.0)


@dataclass(frozen=True, slots=True)
class Pool:
    """The replicas of one tier. Raises ParameterError.

    Each takes `cpus` and `gpus` of a node. One that is to go has `drain_s` seconds for what it runs.
    """

    tier: ServedTier
    engine: EngineConfig
    replicas: Replicas = field(default_factory=Replicas)
    cpus: float = 1.0
    gpus: float = 0.0
    drain_s: float = 600.0

    def __post_init__(self) -> None:
        number("cpus", self.cpus, 0.0, 4096.0)
        number("gpus", self.gpus, 0.0, 64.0)
        number("drain_s", self.drain_s, 0.0, 86_400.0)
        ranks = self.engine.tensor_parallel_size
        if 0.0 < self.gpus < ranks:
            raise ParameterError("gpus", f"must be at least tensor_parallel_size ({ranks}), got {self.gpus:g}")

    @property
    def name(self) -> str:
        """The tier's, which is the pool's."""
        return self.tier.tier.name


@dataclass(frozen=True, slots=True)
class Fleet:
    """An application, which serves one model at the paths below `prefix`. Raises ParameterError.

    `default` is the pool of requests that name no tier, nor does their key. `routing` random is to compare with.
    """

    pools: Mapping[str, Pool]
    default: str
    name: str = "thinkfold"
    host: str = "127.0.0.1"
    port: int = 8000
    prefix: str = "/"
    routing: Literal["affinity", "random"] = "affinity"

    def __post_init__(self) -> None:
        choice("routing", self.routing, ("affinity", "random"))
        integer("port", self.port, 0, 65_535)
        if not self.name or "/" in self.name or "#" in self.name:
            raise ParameterError("name", f"must be a word without / and #, got {self.name!r:.60}")
        if not self.prefix.startswith("/") or (self.prefix.endswith("/") and self.prefix != "/"):
            raise ParameterError("prefix", f"must begin with a slash and not end with one, got {self.prefix!r:.60}")
        self.tiers()
        first = self.pools[self.default].engine
        for name, pool in self.pools.items():
            for each in fields(EngineConfig):
                if each.name not in POOL_SETTINGS and getattr(pool.engine, each.name) != getattr(first, each.name):
                    message = "is the same for all pools of an application: set it under engine"
                    raise ParameterError(f"pools.{name}.engine.{each.name}", message)

    @property
    def url(self) -> str:
        """What clients take for OpenAI's address."""
        return f"http://{self.host}:{self.port}{self.prefix.rstrip('/')}/v1"

    def tiers(self) -> TierTable:
        """What the server knows of the pools."""
        return TierTable({name: pool.tier for name, pool in self.pools.items()}, self.default)
