"""What all tests share."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from thinkfold.engine import loop


@pytest.fixture(scope="session", autouse=True)
def few_full_collections() -> Iterator[None]:
    """An engine that starts looks for garbage in its whole process, half a second where all libraries are loaded.

    Here one start in four does: what an engine leaves, its weights among it, is garbage until then.
    """
    starts = count()

    def collect() -> int:
        return gc.collect(2 if next(starts) % 4 == 0 else 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "gc", SimpleNamespace(collect=collect, freeze=gc.freeze, unfreeze=gc.unfreeze))
        yield


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """A benchmark chooses the threads of its process, which here is that of later tests, too."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
