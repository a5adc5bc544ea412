"""The model as one compiled function, which runs every step whatever its shape.

A step of the uncompiled model is many small operations around each product; compiled they are few.
All sizes of a step are dynamic, those of none and one too, so nothing is compiled a second time;
attention stays the one opaque op. What is compiled goes through `runner.graph_passes` first. It knows
no CUDA graphs (see `runner.graphs`) and draws no tokens.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from textwrap import shorten
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as shapes

from thinkfold.runner import forward_batch, graph_passes
from thinkfold.runner.forward import forward
from thinkfold.runner.forward_batch import ForwardBatch, StepInputs
from thinkfold.runner.graph_passes import Backend
from thinkfold.runner.loader import LoadedModel
from thinkfold.runner.memory import DeviceMemory
from thinkfold.scheduler.output import BatchRow, StepPlan

logger = logging.getLogger(__name__)

# The difference of the trial's logits that rounding explains, as a share of them; a wrong result is about 1.
TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-6}
TOLERANCE = 0.1  # of half precision: fused operations round less often
# Dimensions that differ from step to step, or between a trial's memory and the pool.
DYNAMIC: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        "kv": (0,),
        "cu_seqlens_q": (0,),
        "kv_lens": (0,),
        "page_table": (0, 1),
        "slot_mapping": (0,),
        "summary_rows": (0,),
        "bias": (0,),
        "kv_scales": (0,),
        "query_sink_rows": (0,),
        "query_sink": (1,),
        "lse_sink": (1,),
    }
)


class CompiledModel:
    """Called as `forward` calls a model. `backend` is one of `torch.compile`, by name or itself."""

    def __init__(self, model: nn.Module, backend: str | Backend) -> None:
        self._no_sink: tuple[Tensor, Tensor, Tensor] | None = None
        self._call = torch.compile(model.forward, fullgraph=True, backend=graph_passes.with_passes(backend))

    def __call__(
        self,
        *,
        input_ids: Tensor,
        position_ids: Tensor,
        logits_to_keep: Tensor,
        forward_batch: ForwardBatch,
        **rest: Any,
    ) -> Any:
        # A view drags the sizes of its base along, and where it begins.
        position_ids, logits_to_keep = position_ids.clone(), logits_to_keep.data
        forward_batch = ForwardBatch(*(tensor.data for tensor in self._with_sinks(forward_batch)))
        input_ids = input_ids.data
        _mark(input_ids, (1,))
        _mark(position_ids, (1,))
        _mark(logits_to_keep, (0,))
        for name, dims in DYNAMIC.items():
            _mark(getattr(forward_batch, name), dims)
        # Sizes 0 and 1 are no cases of their own, and sizes that are equal once need not be so again.
        with shapes.patch(backed_size_oblivious=True, use_duck_shape=False):  # type: ignore[reportAttributeAccessIssue]
            return self._call(
                input_ids=input_ids,
                position_ids=position_ids,
                logits_to_keep=logits_to_keep,
                forward_batch=forward_batch,
                **rest,
            )

    def _with_sinks(self, batch: ForwardBatch) -> ForwardBatch:
        """A batch that keeps no query gets a row that keeps none: the strides of nothing are a case of their own."""
        if batch.query_sink_rows.numel():
            return batch
        if self._no_sink is None:
            rows = torch.full_like(batch.slot_mapping[:1], -1)
            queries, lse = (sink.new_empty((sink.shape[0], 1, *sink.shape[2:])) for sink in batch[-2:])
            self._no_sink = (rows, queries, lse)
        return ForwardBatch(*batch[:-3], *self._no_sink)


@torch.no_grad()
def compile_model(
    loaded: LoadedModel, memory: DeviceMemory, page_size: int, backend: str | Backend
) -> Callable[..., Any]:
    """`loaded.model` compiled, or itself where a trial fails or its logits differ; a warning says so then.

    Weights are moved in memory. The trial writes into the first two pages of `memory`, which must have
    all that folds may need.
    """
    started = time.monotonic()
    run = partial(forward, memory=memory, inputs=_trial_inputs(loaded, page_size))
    moved = graph_passes.lay_side_by_side(loaded.model, partial(run, loaded.model))
    compiled = CompiledModel(loaded.model, backend)
    try:
        own, other = (run(model).double() for model in (loaded.model, compiled))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        logger.warning("%s runs uncompiled: %s", loaded.model_type, shorten(str(error), 200))
        return loaded.model
    difference = ((other - own).norm() / own.norm()).item()
    if not difference <= TOLERANCES.get(loaded.dtype, TOLERANCE):
        logger.warning("%s runs uncompiled: compiled logits differ by %.1e of them", loaded.model_type, difference)
        return loaded.model
    seconds = time.monotonic() - started
    logger.info("compiled in %.1f s, %d products joined, logits within %.1e", seconds, moved, difference)
    return compiled


def _trial_inputs(loaded: LoadedModel, page_size: int) -> StepInputs:
    """Two prompts of a page each, whose logits are all wanted; some of their queries are kept."""
    draw = random.Random(0)
    rows = [
        BatchRow(slot, [draw.randrange(loaded.vocab_size) for _ in range(page_size)], False, 0, 0, [slot])
        for slot in (0, 1)
    ]
    inputs, _ = forward_batch.build(StepPlan(0, rows), page_size, 1, loaded.device, [], [-1] * len(rows))
    every = torch.arange(2 * page_size, device=loaded.device)
    some = every[::3].clone()
    return inputs._replace(sample_rows=every, sink_rows=some, sink_lines=some)


def _mark(tensor: Tensor, dims: tuple[int, ...]) -> None:
    for dim in dims:
        torch._dynamo.maybe_mark_dynamic(tensor, dim)
