"""thinkfold: an inference engine and server for reasoning models.

Names load on first use, so that `import thinkfold` (and `thinkfold --help`) does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinkfold.client import AsyncClient, Client
    from thinkfold.config import EngineConfig
    from thinkfold.engine.async_engine import AsyncEngine
    from thinkfold.llm import LLM
    from thinkfold.types import FoldParams, Grammar, RequestOutput, SamplingParams, ThinkingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncClient",
    "AsyncEngine",
    "Client",
    "EngineConfig",
    "FoldParams",
    "Grammar",
    "RequestOutput",
    "SamplingParams",
    "ThinkingParams",
    "__version__",
]

_HOME = {
    "LLM": "thinkfold.llm",
    "AsyncClient": "thinkfold.client",
    "Client": "thinkfold.client",
    "AsyncEngine": "thinkfold.engine.async_engine",
    "EngineConfig": "thinkfold.config",
    "FoldParams": "thinkfold.types",
    "Grammar": "thinkfold.types",
    "RequestOutput": "thinkfold.types",
    "SamplingParams": "thinkfold.types",
    "ThinkingParams": "thinkfold.types",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
