"""Training data on the fly: worker processes generate, encode and pack windows of whole texts."""

import multiprocessing as mp
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from queue import Queue
from random import Random
from threading import Thread
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from training.mixture import STAGES
from training.samples import Template, sample
from training.tokenizer import FastEncoder
from training.traces import UNLEARNED

UNLEARNED_BIT = 0x8000  # set on tokens that are read but not learned
LONGEST = (4096, 8192, 16384)  # of a text, by stage
POOL = 24

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Window:
    """Whole texts side by side: marked ids [window], and each text's length."""

    ids: Array
    lengths: list[int]


class TextSource:
    """An endless stream of encoded training texts."""

    def __init__(self, folder: Path, seed: str) -> None:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.pad = tokenizer.token_to_id("<|endoftext|>")
        self._encoder = FastEncoder(tokenizer)
        self._template = Template(folder)
        self._rng = Random(seed)

    def text(self, stage: int, most: int) -> Array:
        """The next text of a stage that is short enough for it and for `most`."""
        while True:
            prompt, completion = sample(stage, self._rng, self._template)
            encoded = self.encode(prompt, completion)
            if len(encoded) <= min(LONGEST[stage], most):
                return encoded

    def encode(self, prompt: str, completion: str) -> Array:
        """Marked ids of a prompt and a completion."""
        ids = [token | UNLEARNED_BIT for token in self._encoder.encode(prompt)]
        for k, part in enumerate(completion.split(UNLEARNED)):
            tokens = self._encoder.encode(part)
            ids += [token | UNLEARNED_BIT for token in tokens] if k % 2 else tokens
        return np.array(ids, dtype=np.uint16)


def pack(pool: list[Array], size: int, pad: int) -> Window:
    """Take texts that fit from the pool, the oldest first; the rest of the window is padding."""
    chosen: list[Array] = []
    room = size
    k = 0
    while k < len(pool):
        if len(pool[k]) <= room:
            text = pool.pop(k)
            chosen.append(text)
            room -= len(text)
        else:
            k += 1
    if room:
        chosen.append(np.full(room, pad | UNLEARNED_BIT, dtype=np.uint16))
    return Window(np.concatenate(chosen), [len(text) for text in chosen])


def windows(source: TextSource, size: int, stage: "Synchronized[int]") -> Iterator[Window]:
    """Endless packed windows; the stage may change at any moment."""
    pool: list[Array] = []
    while True:
        now = stage.value
        while len(pool) < POOL or sum(map(len, pool)) < 2 * size:
            pool.append(source.text(now, size))
        yield pack(pool, size, source.pad)


def _work(folder: Path, seed: str, size: int, stage: "Synchronized[int]", queue: "mp.Queue[Window]") -> None:
    for window in windows(TextSource(folder, seed), size, stage):
        queue.put(window)


@dataclass(frozen=True, slots=True)
class Batch:
    """Windows laid end to end: ids, labels (-100 = not learned), positions [tokens]; text bounds [texts + 1]."""

    ids: Array
    labels: Array
    positions: Array
    bounds: Array
    longest: int


def batch_of(parts: list[Window]) -> Batch:
    """Join windows to one flat batch."""
    marked = np.concatenate([part.ids for part in parts]).astype(np.int64)
    lengths = np.array([length for part in parts for length in part.lengths])
    bounds = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    ids = marked & ~UNLEARNED_BIT
    learned = np.where(marked & UNLEARNED_BIT, -100, ids)
    labels = np.append(learned[1:], -100)
    labels[bounds[1:] - 1] = -100
    positions = np.arange(len(ids)) - np.repeat(bounds[:-1], lengths)
    return Batch(ids, labels, positions, bounds, int(lengths.max()))


class Feeder:
    """Runs the workers and hands out batches, a few ahead."""

    def __init__(self, folder: Path, workers: int, window: int, batch_windows: int, seed: str) -> None:
        context = mp.get_context("spawn")
        self._stage = context.Value("i", 0)
        self._queue: mp.Queue[Window] = context.Queue(maxsize=4 * batch_windows)
        self._workers = [
            context.Process(target=_work, args=(folder, f"{seed}:{k}", window, self._stage, self._queue), daemon=True)
            for k in range(workers)
        ]
        for worker in self._workers:
            worker.start()
        self._count = batch_windows
        self._ready: Queue[Batch] = Queue(maxsize=3)
        Thread(target=self._collate, daemon=True).start()

    def set_stage(self, stage: int) -> None:
        """Let the workers draw from a stage; what is queued already still comes first."""
        self._stage.value = min(stage, len(STAGES) - 1)

    def next(self) -> Batch:
        """The next batch; blocks while the workers are behind."""
        return self._ready.get()

    def _collate(self) -> None:
        while True:
            self._ready.put(batch_of([self._queue.get() for _ in range(self._count)]))

    def close(self) -> None:
        """Stop the workers."""
        for worker in self._workers:
            worker.terminate()
