"""Runs a core: takes commands, steps while there is work, sends events. One thread or process.

A failure of a step is final for the core: it says `Dead` and returns.
"""

from __future__ import annotations

import gc
import logging
import queue
import time
from collections.abc import Callable
from typing import Protocol

from thinkfold.config import EngineConfig
from thinkfold.engine.commands import Order
from thinkfold.engine.core import EngineCore
from thinkfold.engine.device import OtherRanks
from thinkfold.engine.messages import Abort, Command, Dead, Event, ModelInfo, News, Ready, Stop
from thinkfold.errors import EngineDeadError, ParameterError

logger = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.5
_QUIET_S = 0.2  # a step without news is still a sign of life, told this often
# Deltas of this long travel together, but for the first and the last of a request: each message costs both sides time.
_COALESCE_S = 0.02
_COALESCE_MAX_S = 0.1
_TELL_SHARE = 0.1  # of its time that a core with many requests spends on telling, at most


class Inbox(Protocol):
    """Where commands come from: `queue.Queue` or `multiprocessing.Queue`."""

    def get(self, block: bool = True, timeout: float | None = None) -> Command: ...


def run_core(
    build: Callable[[EngineConfig], tuple[EngineCore, ModelInfo]],
    config: EngineConfig,
    inbox: Inbox,
    send: Callable[[Event], None],
) -> None:
    """Build the core and serve until `Stop` or a failure, then end its other ranks; the last event is always `Dead`."""
    ranks: OtherRanks | None = None
    try:
        core, model = build(config)
        ranks = core.ranks
        gc.collect()
        gc.freeze()  # modules, model and graphs stay: no collection need look at them again
        send(Ready(model))
        _serve(core, inbox, send)
    except ParameterError as error:
        send(Dead(str(error), error))
    except EngineDeadError as error:
        logger.error("the engine core has failed: %s", error)
        send(Dead(str(error)))
    except BaseException as error:  # a panic of the tokenizer's Rust code is no Exception
        logger.exception("the engine core has failed")
        send(Dead(f"{type(error).__name__}: {error}"))
    else:
        send(Dead(""))
    finally:
        if ranks is not None:
            ranks.close()
        gc.unfreeze()  # or the model would stay for as long as the process


def _serve(core: EngineCore, inbox: Inbox, send: Callable[[Event], None]) -> None:
    told, pause = 0.0, _COALESCE_S
    idle_checked = True
    while True:
        commands = _commands(inbox, wait=not core.has_work)
        if core.ranks is not None:
            core.ranks.check()
        for command in commands:
            if isinstance(command, Stop):
                return
            if isinstance(command, Abort):
                core.abort(command.request_id)
            elif isinstance(command, Order):
                core.orders.give(command)
            else:
                core.add(command)
        expired = core.handles.expire() | core.prefixes.expire()
        if expired or core.has_work or commands or core.prefixes.answered:
            core.advance()
            now = time.monotonic()
            answers = core.orders.take()
            due = now - told > (pause if core.has_news else _QUIET_S)
            if due or answers or core.urgent or core.idle:
                send(News(core.news(), core.stats(), answers))
                told = time.monotonic()
                pause = min(max(_COALESCE_S, (told - now) / _TELL_SHARE), _COALESCE_MAX_S)
            idle_checked = False
        else:
            if core.has_requests:  # all paused: nothing happens, and all is well
                send(News([], core.stats()))
            if not idle_checked:
                core.check_integrity()
                idle_checked = True


def _commands(inbox: Inbox, *, wait: bool) -> list[Command]:
    commands: list[Command] = []
    try:
        commands.append(inbox.get(wait, _IDLE_WAIT_S if wait else None))
        while True:
            commands.append(inbox.get(False))
    except queue.Empty:
        return commands
