"""Requests that begin in one step: in which step each would come depends on the machine, and with it what is short."""

from __future__ import annotations

import time
from dataclasses import dataclass

from thinkfold.config import EngineConfig
from thinkfold.engine.build import build_core
from thinkfold.engine.client import Build
from thinkfold.engine.core import EngineCore
from thinkfold.engine.messages import ModelInfo


@dataclass(frozen=True, slots=True)
class Together:
    """Builds a core that makes no step before `count` requests have come."""

    count: int
    build: Build = build_core

    def __call__(self, config: EngineConfig) -> tuple[EngineCore, ModelInfo]:
        core, model = self.build(config)
        advance = core.advance

        def wait() -> None:
            if len(core.running()) >= self.count:
                del core.advance
                advance()
            else:
                time.sleep(0.001)

        core.advance = wait
        return core, model
