"""What all tests share."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace

import pytest

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
