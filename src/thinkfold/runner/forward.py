"""One forward of the model over a step's inputs; it draws no tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from thinkfold.runner.forward_batch import ForwardBatch, StepInputs
from thinkfold.runner.memory import DeviceMemory


def forward(model: Callable[..., Any], memory: DeviceMemory, inputs: StepInputs, *, folded: bool = True) -> Tensor:
    """Logits `[S, V]` of the token rows that are sampled; keys, values and kept queries go to `memory`.

    All ids must be known: `late_rows` are not looked at. Without `folded` no row has a summary,
    and none is looked for.
    """
    query_sink, lse_sink = memory.queries.sinks(inputs.sink_rows.numel())
    batch = ForwardBatch(
        kv=memory.storage.tensor,
        cu_seqlens_q=inputs.cu_seqlens_q,
        kv_lens=inputs.kv_lens,
        page_table=inputs.page_table,
        slot_mapping=inputs.slot_mapping,
        summary_rows=inputs.summary_rows if folded else inputs.summary_rows[:0],
        summary_table=memory.tables.table,
        summary_lens=memory.tables.lens,
        bias=memory.storage.bias,
        kv_scales=memory.storage.scales,
        query_sink_rows=inputs.sink_rows,
        query_sink=query_sink,
        lse_sink=lse_sink,
    )
    output = model(
        input_ids=inputs.input_ids,
        position_ids=inputs.position_ids,
        use_cache=False,
        logits_to_keep=inputs.sample_rows,
        forward_batch=batch,
    )
    if inputs.sink_rows.numel():
        memory.queries.keep(inputs.sink_lines, query_sink, lse_sink)
    return output.logits[0]
