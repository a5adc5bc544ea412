"""Work in several processes at once: what they tell comes back one by one."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from queue import Empty
from typing import Any, TypeVar

from thinkfold.errors import ThinkfoldError

VISIBLE = "CUDA_VISIBLE_DEVICES"
PATIENCE = 5.0  # seconds without news after which the processes are looked at

Share = TypeVar("Share")
News = TypeVar("News")


def spread(
    work: Callable[[Share, Callable[[News], None]], None], shares: Sequence[Share], gpus: int = 0
) -> Iterator[News]:
    """All that `work(share, tell)` tells, each share in a process of its own, until every one is through.

    With `gpus`, process k sees GPU k modulo so many, of those that are visible here, and no other. `work` and shares
    are pickled: `work` is a function of the package. Raises ThinkfoldError where a process has died.
    """
    context = multiprocessing.get_context("spawn")
    told: Queue[tuple[bool, Any]] = context.Queue()
    workers = [
        context.Process(target=_run, args=(work, share, told, k % gpus if gpus else None))
        for k, share in enumerate(shares)
    ]
    for worker in workers:
        worker.start()
    running = len(workers)
    try:
        while running:
            ended, news = _next(told, workers)
            if ended:
                running -= 1
            else:
                yield news
        for worker in workers:
            worker.join()  # they are through, and go by themselves
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()


def _run(
    work: Callable[[Any, Callable[[Any], None]], None], share: Any, told: Queue[tuple[bool, Any]], gpu: int | None
) -> None:
    if gpu is not None:
        seen = os.environ.get(VISIBLE)
        os.environ[VISIBLE] = seen.split(",")[gpu] if seen else str(gpu)  # read when this process first asks for one
    work(share, lambda news: told.put((False, news)))
    told.put((True, None))


def _next(told: Queue[tuple[bool, Any]], workers: Sequence[BaseProcess]) -> tuple[bool, Any]:
    """What is told next. Raises ThinkfoldError where a process has died instead."""
    while True:
        died = [worker for worker in workers if worker.exitcode]
        try:
            return told.get(timeout=PATIENCE)
        except Empty:
            if died:
                raise ThinkfoldError(f"a process has ended with exit code {died[0].exitcode}") from None
