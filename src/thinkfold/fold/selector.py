"""The one interface of all fold methods."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from thinkfold.fold.segments import Segments, Summary


class Selector(Protocol):
    """A way to compact segments. One file in `selectors/` holds one class with this method and names its source."""

    def select(self, segments: Segments, budget: Tensor) -> Summary:
        """Compact every segment of the batch to at most `budget[l, h]` entries in layer l and KV head h.

        Raises ParameterError for a budget that is not `[layers, kv_heads]` integers within `[0, tokens]`.
        """
        ...
