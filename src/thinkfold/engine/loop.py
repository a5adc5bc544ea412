"""Runs a core: takes commands, steps while there is work, sends events. One thread or process.

A failure of a step is final for the core: it says `Dead` and returns.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from typing import Protocol

from thinkfold.config import EngineConfig
from thinkfold.engine.commands import Order
from thinkfold.engine.core import EngineCore
from thinkfold.engine.messages import Abort, Command, Dead, Event, ModelInfo, News, Ready, Stop
from thinkfold.errors import ParameterError
from thinkfold.types import RequestOutput

logger = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.5
_QUIET_S = 0.2  # a step without news is still a sign of life, told this often
_COALESCE_S = 0.02  # deltas of this long travel together: each message wakes the reader's thread


class Inbox(Protocol):
    """Where commands come from: `queue.Queue` or `multiprocessing.Queue`."""

    def get(self, block: bool = True, timeout: float | None = None) -> Command: ...


def run_core(
    build: Callable[[EngineConfig], tuple[EngineCore, ModelInfo]],
    config: EngineConfig,
    inbox: Inbox,
    send: Callable[[Event], None],
) -> None:
    """Build the core and serve until `Stop` or a failure; the last event is always `Dead`."""
    try:
        core, model = build(config)
        send(Ready(model))
        _serve(core, inbox, send)
    except ParameterError as error:
        send(Dead(str(error), error))
    except BaseException as error:  # a panic of the tokenizer's Rust code is no Exception
        logger.exception("the engine core has failed")
        send(Dead(f"{type(error).__name__}: {error}"))
    else:
        send(Dead(""))


class _Mail:
    """Outputs on their way: first and last ones of a request go at once, others together."""

    def __init__(self) -> None:
        self._outputs: dict[str, RequestOutput] = {}
        self._begun: set[str] = set()
        self._urgent = False
        self._last_sent = 0.0

    def add(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            name = output.request_id
            self._urgent |= output.finished or name not in self._begun
            self._begun.add(name)
            if output.finished:
                self._begun.discard(name)
            if name in self._outputs:
                self._outputs[name].merge(output)
            else:
                self._outputs[name] = output

    def due(self, now: float) -> bool:
        return self._urgent or now - self._last_sent > (_COALESCE_S if self._outputs else _QUIET_S)

    def take(self, now: float) -> list[RequestOutput]:
        outputs, self._outputs = list(self._outputs.values()), {}
        self._urgent, self._last_sent = False, now
        return outputs


def _serve(core: EngineCore, inbox: Inbox, send: Callable[[Event], None]) -> None:
    mail = _Mail()
    idle_checked = True
    while True:
        commands = _commands(inbox, wait=not core.has_work)
        for command in commands:
            if isinstance(command, Stop):
                return
            if isinstance(command, Abort):
                core.abort(command.request_id)
            elif isinstance(command, Order):
                core.orders.give(command)
            else:
                core.add(command)
        if core.has_work or commands:
            mail.add(core.step())
            now = time.monotonic()
            answers = core.orders.take()
            if answers or not core.has_work or mail.due(now):
                send(News(mail.take(now), core.stats(), answers))
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
