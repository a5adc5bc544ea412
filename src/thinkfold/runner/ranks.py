"""The other ranks of a tensor-parallel model: processes that load their shard and follow rank 0's plans.

They live as long as rank 0: a rank that ends before it was told to is an error of rank 0's, and the
end of rank 0, whatever kills it, is theirs.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

import torch

from thinkfold.config import EngineConfig
from thinkfold.errors import EngineDeadError, ParameterError
from thinkfold.runner import loader
from thinkfold.runner.collectives import Group, GroupError
from thinkfold.runner.model_runner import ModelRunner, PendingStep
from thinkfold.runner.plan_wire import PlanReader, PlanWriter
from thinkfold.runner.shard import Shard
from thinkfold.runner.tensor_parallel import check_heads
from thinkfold.scheduler.output import StepPlan, StepResult

logger = logging.getLogger(__name__)

_READY = "ready"
_STOP = b""
_JOIN_S = 5.0
GC_OBJECTS = 50_000  # a step makes thousands that live for a step; next to none are cycles
_LAST_WORDS_S = 2.0  # what a rank has to say arrives after its peers have noticed


class Worker(Protocol):
    """A running rank: a process, or in tests a thread."""

    def join(self, timeout: float | None = None) -> None: ...
    def is_alive(self) -> bool: ...


Start = Callable[[EngineConfig, Shard, Path, Connection], Worker]


class Ranks:
    """Ranks 1 to N - 1 and what they say. `close` ends them; a lost one is told by `check`."""

    def __init__(self, config: EngineConfig, start: Start) -> None:
        self._config = config
        self._folder = tempfile.TemporaryDirectory(prefix="thinkfold-ranks-")
        self._rendezvous = Path(self._folder.name) / "group"
        self.shard = self._shard(0)
        self._group: Group | None = None
        self._news = threading.Condition()
        self._ready = 0
        self._lost: Exception | None = None
        self._closing = self._broken = False
        self._writer = PlanWriter()
        self._lines: list[Connection] = []
        self._workers: list[Worker] = []
        for rank in range(1, config.tensor_parallel_size):
            mine, other = multiprocessing.Pipe()
            self._lines.append(mine)
            self._workers.append(start(config, self._shard(rank), self._rendezvous, other))
        self._listener = threading.Thread(target=self._listen, name="thinkfold-ranks", daemon=True)
        self._listener.start()

    def connect(self, device: torch.device) -> None:
        """Wait until all have loaded their shard, then join them in a group. Raises as `check`."""
        with self._news:
            self._news.wait_for(lambda: self._lost is not None or self._ready == len(self._workers))
        self.check()
        for line in self._lines:
            line.send(_READY)
        self._group = _group(self.shard, self._rendezvous, device, self._config)

    def send(self, plan: StepPlan) -> None:
        """Let all do their part of a step. Raises EngineDeadError where one is lost."""
        self.check()
        data = self._writer.write(plan)
        for line in self._lines:
            line.send_bytes(data)

    def check(self) -> None:
        """Raise EngineDeadError, or at the start what a rank has raised, if one is lost."""
        if self._lost is not None:
            raise self._lost

    def blame(self, error: BaseException) -> BaseException:
        """What is behind an error of rank 0: what a lost rank has said, if one is, else the error itself.

        The others may wait for rank 0 now, and so do not hear any more that they should stop.
        """
        self._broken = True
        if not isinstance(error, RuntimeError):
            return error
        with self._news:
            self._news.wait_for(lambda: self._lost is not None, _LAST_WORDS_S)
        return self._lost or (EngineDeadError(str(error)) if isinstance(error, GroupError) else error)

    def close(self) -> None:
        """End all, by force what does not end in 5 s, or what may wait for a rank 0 that has failed."""
        self._closing = True
        for line in self._lines:
            with contextlib.suppress(OSError):
                line.send_bytes(_STOP)
        for worker in self._workers:
            worker.join(0 if self._broken else _JOIN_S)
            if worker.is_alive() and isinstance(worker, BaseProcess):
                worker.kill()
                worker.join()
        self._group = None
        self._listener.join(_JOIN_S)
        for line in self._lines:
            line.close()
        self._folder.cleanup()

    def _shard(self, rank: int) -> Shard:
        return Shard(rank, self._config.tensor_parallel_size, f"{self._folder.name}/{rank}")

    def _listen(self) -> None:
        """Note who is ready and who has gone, until all have gone."""
        open_lines = {line: rank for rank, line in enumerate(self._lines, 1)}
        while open_lines:
            for line in wait(list(open_lines)):
                try:
                    said: Any = line.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    said = None
                if said == _READY:
                    with self._news:
                        self._ready += 1
                        self._news.notify_all()
                else:
                    self._lose(open_lines.pop(line), said)  # type: ignore[call-overload]

    def _lose(self, rank: int, said: ParameterError | str | None) -> None:
        if self._closing or self._lost is not None:
            return
        where = f"rank {rank} of {self._config.tensor_parallel_size}"
        if isinstance(said, ParameterError):
            lost: Exception = said
        else:
            lost = EngineDeadError(f"{where} has gone" if said is None else f"{where} has failed: {said}")
        with self._news:
            self._lost = lost
            self._news.notify_all()
        if self._group is not None:
            self._group.abort()


class RankedRunner:
    """Rank 0's runner together with the others: a step of it is one of all."""

    def __init__(self, runner: ModelRunner, ranks: Ranks) -> None:
        self._runner = runner
        self._ranks = ranks

    def launch(self, plan: StepPlan) -> PendingStep:
        """As `ModelRunner.launch`. Raises EngineDeadError where a rank is lost."""
        return self._with_ranks(self._launch, plan)

    def collect(self, pending: PendingStep) -> StepResult:
        """As `ModelRunner.collect`. Raises EngineDeadError where a rank is lost."""
        return self._with_ranks(self._runner.collect, pending)

    def check(self) -> None:
        """Raise EngineDeadError where a rank is lost."""
        self._ranks.check()

    def close(self) -> None:
        """End the other ranks."""
        self._ranks.close()

    def _launch(self, plan: StepPlan) -> PendingStep:
        self._ranks.send(plan)
        return self._runner.launch(plan)

    def _with_ranks(self, call: Callable[[Any], Any], value: Any) -> Any:
        try:
            result = call(value)
        except Exception as error:
            raise self._ranks.blame(error) from error
        self._ranks.check()  # a group that was aborted lets wrong numbers through
        return result


def start_ranks(config: EngineConfig, start: Start | None = None, **options: Any) -> tuple[ModelRunner, RankedRunner]:
    """Rank 0's runner of a model that is split over several, with the `options` of ModelRunner, and all of them as one.

    `start` starts a rank; None starts a process. Raises ParameterError or UnsupportedError for a model that cannot be
    loaded or split so.
    """
    size = config.tensor_parallel_size
    check_heads(loader.read_config(config.model), size)
    device = loader.pick_device(config.device, Shard(size - 1, size))
    if device.type == "cuda" and config.own_process is False:
        raise ParameterError("own_process", "must be true on GPUs: a core that waits for a lost rank is ended by force")
    ranks = Ranks(config, start or start_process)
    try:
        loaded = loader.load(config, ranks.shard)
        ranks.connect(loaded.device)
        runner = ModelRunner(config, loaded=loaded, **options)
    except BaseException as error:
        found = ranks.blame(error)
        ranks.close()
        raise found from error
    return runner, RankedRunner(runner, ranks)


def start_process(config: EngineConfig, shard: Shard, rendezvous: Path, line: Connection) -> Worker:
    """Start a rank in a process of its own."""
    process = multiprocessing.get_context("spawn").Process(
        target=_run_process,
        args=(config, shard, rendezvous, line),
        name=f"thinkfold-rank-{shard.rank}",
        daemon=True,
    )
    process.start()
    line.close()  # the process has its own, whose end is then the only one
    return process


def follow(config: EngineConfig, shard: Shard, rendezvous: Path, line: Connection) -> None:
    """Be a rank: load its shard, then follow the plans that come over the line until it is told to stop."""
    with line:
        try:
            _follow(config, shard, rendezvous, line)
        except (EOFError, ConnectionError):
            return  # rank 0 has gone, and takes what it started along
        except BaseException as error:
            logger.exception("rank %d has failed", shard.rank)
            with contextlib.suppress(OSError):
                line.send(error if isinstance(error, ParameterError) else f"{type(error).__name__}: {error}")
            traceback.clear_frames(error.__traceback__)  # its end of the group goes, so that nobody waits for it


def _follow(config: EngineConfig, shard: Shard, rendezvous: Path, line: Connection) -> None:
    loaded = loader.load(config, shard)
    line.send(_READY)
    line.recv()
    group = _group(shard, rendezvous, loaded.device, config)
    runner, reader = ModelRunner(config, loaded=loaded), PlanReader()
    gc.collect()
    while (data := line.recv_bytes()) != _STOP:
        runner.follow(reader.read(data))
    del group


def _run_process(config: EngineConfig, shard: Shard, rendezvous: Path, line: Connection) -> None:
    """Follow in this process, which ends with rank 0's, not on the terminal's Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.set_threshold(GC_OBJECTS)
    threading.Thread(target=_end_with_parent, name="thinkfold-parent", daemon=True).start()
    torch.set_num_threads(max(1, torch.get_num_threads() // shard.size))
    follow(config, shard, rendezvous, line)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _group(shard: Shard, rendezvous: Path, device: torch.device, config: EngineConfig) -> Group:
    """A hang is over when the engine's watchdog gives up."""
    return Group(shard.group, shard.rank, shard.size, rendezvous, device, config.watchdog_s)
