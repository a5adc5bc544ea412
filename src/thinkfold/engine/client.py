"""Carries commands to a core and events back, with the core in a thread or in its own process.

Events are handed to `on_event` on the caller's event loop. Knows nothing about requests.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable
from multiprocessing.queues import Queue
from typing import Protocol

from thinkfold.config import EngineConfig
from thinkfold.engine.core import EngineCore
from thinkfold.engine.loop import run_core
from thinkfold.engine.messages import Command, Dead, Event, ModelInfo, Stop
from thinkfold.runner.loader import pick_device
from thinkfold.runner.ranks import GC_OBJECTS

Build = Callable[[EngineConfig], tuple[EngineCore, ModelInfo]]
_JOIN_S = 10.0


class CoreClient(Protocol):
    """A running core, wherever it lives."""

    def send(self, command: Command) -> None: ...
    def stop(self) -> None: ...


def local_client(build: Build, config: EngineConfig, on_event: Callable[[Event], None]) -> CoreClient:
    """A core on this machine, in its own process on a GPU or where the configuration says so."""
    own_process = config.own_process
    if own_process is None:
        own_process = pick_device(config.device).type == "cuda"
    return (ProcessClient if own_process else ThreadClient)(build, config, on_event)


class ThreadClient:
    """A core in a thread of this process: CPU serving and tests."""

    def __init__(self, build: Build, config: EngineConfig, on_event: Callable[[Event], None]) -> None:
        self._inbox: queue.Queue[Command] = queue.Queue()
        send = _post_to(asyncio.get_running_loop(), on_event)
        self._thread = threading.Thread(
            target=run_core, args=(build, config, self._inbox, send), name="thinkfold-core", daemon=True
        )
        self._thread.start()

    def send(self, command: Command) -> None:
        self._inbox.put(command)

    def stop(self) -> None:
        """Ask the core to end and wait for it; blocks up to 10 s."""
        self._inbox.put(Stop())
        self._thread.join(_JOIN_S)


class ProcessClient:
    """A core in its own process, so that the server's Python never delays a step."""

    def __init__(self, build: Build, config: EngineConfig, on_event: Callable[[Event], None]) -> None:
        context = multiprocessing.get_context("spawn")
        self._inbox = context.Queue()
        self._inbox.cancel_join_thread()  # commands that a hung core never reads must not keep this process from ending
        self._outbox = context.Queue()
        self._process = context.Process(
            target=_run_process, args=(build, config, self._inbox, self._outbox), name="thinkfold-core"
        )
        self._process.start()
        # A daemon would end with this process, too, but it may have no children, such as other ranks.
        atexit.register(self._process.kill)
        post = _post_to(asyncio.get_running_loop(), on_event)
        self._reader = threading.Thread(target=self._read, args=(post,), name="thinkfold-events", daemon=True)
        self._reader.start()

    def send(self, command: Command) -> None:
        self._inbox.put(command)

    def stop(self) -> None:
        """Ask the core to end and wait for it; ended by force after 10 s."""
        self._inbox.put(Stop())
        self._process.join(_JOIN_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._reader.join(_JOIN_S)
        atexit.unregister(self._process.kill)

    def _read(self, post: Callable[[Event], None]) -> None:
        while True:
            alive = self._process.is_alive()  # asked first: what it sent before its end is read
            try:
                event = self._outbox.get(timeout=0.5)
            except queue.Empty:
                if alive:
                    continue
                event = Dead(f"the core process has gone (exit code {self._process.exitcode})")
            post(event)
            if isinstance(event, Dead):
                return


def _run_process(build: Build, config: EngineConfig, inbox: Queue[Command], outbox: Queue[Event]) -> None:
    """Run the core in this process, which ends on `Stop` or with its parent, not on the terminal's Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.set_threshold(GC_OBJECTS)
    threading.Thread(target=_end_with_parent, name="thinkfold-parent", daemon=True).start()
    run_core(build, config, inbox, outbox.put)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _post_to(loop: asyncio.AbstractEventLoop, on_event: Callable[[Event], None]) -> Callable[[Event], None]:
    def post(event: Event) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody is left to tell
            loop.call_soon_threadsafe(on_event, event)

    return post
