"""The attention API: checks, names, and what a compiler sees."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from thinkfold.attention import ops
from thinkfold.errors import ParameterError


def arguments(tokens: int = 3) -> dict[str, object]:
    return {
        "q": torch.randn(tokens, 4, 8),
        "k": torch.randn(tokens, 2, 8),
        "v": torch.randn(tokens, 2, 8),
        "kv": torch.zeros(4, 2, 2, 2, 8, 8),
        "layer": 1,
        "cu_seqlens_q": torch.tensor([0, 1, tokens], dtype=torch.int32),
        "kv_lens": torch.tensor([1, tokens - 1], dtype=torch.int32),
        "page_table": torch.tensor([[0], [1]], dtype=torch.int32),
        "slot_mapping": torch.tensor([0, *range(8, 7 + tokens)]),
        "summary_rows": torch.tensor([-1, 2]),
        "summary_table": torch.zeros(2, 3, 2, 1, dtype=torch.int32),
        "summary_lens": torch.zeros(2, 3, 2, dtype=torch.int32),
        "bias": torch.zeros(0),
        "kv_scales": torch.zeros(0, dtype=torch.float16),
        "scale": 0.5,
        "sliding_window": 0,
        "query_sink_rows": torch.zeros(0, dtype=torch.int64),
        "query_sink": torch.zeros(2, 0, 4, 8),
        "lse_sink": torch.zeros(2, 0, 4),
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("q", torch.randn(3, 3, 8)),
        ("q", torch.randn(3, 4, 9)),
        ("k", torch.randn(2, 2, 8)),
        ("v", torch.randn(3, 2, 8, dtype=torch.float64)),
        ("kv", torch.zeros(4, 2, 2, 8, 8)),
        ("kv", torch.zeros(4, 2, 2, 2, 128, 8)),
        ("kv", torch.zeros(4, 2, 2, 2, 8, 8).to(torch.float8_e4m3fn)),
        ("layer", 2),
        ("cu_seqlens_q", torch.zeros(2, dtype=torch.int32)),
        ("page_table", torch.zeros(3, 1, dtype=torch.int32)),
        ("slot_mapping", torch.zeros(4, dtype=torch.int64)),
        ("query_sink_rows", torch.zeros(1, dtype=torch.int64)),
        ("summary_rows", torch.zeros(3, dtype=torch.int64)),
        ("summary_rows", torch.zeros(2, dtype=torch.int32)),
        ("summary_rows", torch.tensor([-1, 3])),
        ("summary_table", torch.zeros(2, 3, 1, 1, dtype=torch.int32)),
        ("summary_table", torch.zeros(2, 3, 2, 1)),
        ("summary_lens", torch.zeros(2, 4, 2, dtype=torch.int32)),
        ("summary_lens", torch.full((2, 3, 2), 9, dtype=torch.int32)),
        ("summary_lens", torch.full((2, 3, 2), -1, dtype=torch.int32)),
        ("bias", torch.zeros(4, 2, 2, 7)),
        ("bias", torch.zeros(4, 2, 2, 8, dtype=torch.float64)),
        ("kv_scales", torch.zeros(4, 2, 2, 2, 8, dtype=torch.float16)),
    ],
)
def test_shapes_are_checked(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name.split("_")[0]):
        ops.paged_attention(**{**arguments(), name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("query_sink", torch.zeros(2, 2, 4, 8)),
        ("query_sink", torch.zeros(2, 1, 4, 8, dtype=torch.float64)),
        ("lse_sink", torch.zeros(2, 0, 4)),
        ("lse_sink", torch.zeros(2, 1, 4, dtype=torch.float64)),
    ],
)
def test_sinks_are_checked_where_rows_are_sunk(name: str, value: Tensor) -> None:
    sinks = {
        "query_sink_rows": torch.tensor([2]),
        "query_sink": torch.zeros(2, 1, 4, 8),
        "lse_sink": torch.zeros(2, 1, 4),
    }
    ops.paged_attention(**{**arguments(), **sinks})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=name):
        ops.paged_attention(**{**arguments(), **sinks, name: value})  # type: ignore[arg-type]


def test_an_unknown_body_is_refused_by_name() -> None:
    with pytest.raises(ParameterError, match="reference"):
        ops.paged_attention(**arguments(), backend="fast")  # type: ignore[arg-type]


def with_summaries(tokens: int) -> dict[str, object]:
    """Arguments with summaries of fp8, a bias and sinks: everything that the op may mutate."""
    return {
        **arguments(tokens),
        "kv": torch.zeros(4, 2, 2, 2, 8, 8).to(torch.float8_e4m3fn),
        "kv_scales": torch.ones(4, 2, 2, 2, 8, dtype=torch.float16),
        "summary_table": torch.arange(12, dtype=torch.int32).view(2, 3, 2, 1),
        "summary_lens": torch.arange(12, dtype=torch.int32).view(2, 3, 2) % 8,
        "bias": torch.zeros(4, 2, 2, 8),
        "query_sink_rows": torch.tensor([1]),
        "query_sink": torch.zeros(2, 1, 4, 8),
        "lse_sink": torch.zeros(2, 1, 4),
    }


@pytest.mark.parametrize("make", [arguments, with_summaries])
def test_compiles_whole_and_once_over_many_token_counts(make: Callable[[int], dict[str, object]]) -> None:
    """One graph with the op inside, and no recompile when the number of tokens changes."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    def layer(kwargs: dict[str, Tensor]) -> Tensor:
        out, lse = ops.paged_attention(**kwargs)  # type: ignore[arg-type]
        return out * 2 + lse[..., None]

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for tokens in (3, 4, 5, 8):
        kwargs = make(tokens)
        for name in ("q", "k", "v", "slot_mapping"):
            torch._dynamo.mark_dynamic(kwargs[name], 0)
        expected_kwargs = {n: t.clone() if isinstance(t, Tensor) else t for n, t in kwargs.items()}
        got = compiled(kwargs)
        assert torch.equal(got, layer(expected_kwargs))  # type: ignore[arg-type]
        for name in ("kv", "kv_scales", "query_sink", "lse_sink"):
            assert torch.equal(kwargs[name].float(), expected_kwargs[name].float())  # type: ignore[union-attr]
        assert kwargs["kv"].float().any()  # type: ignore[union-attr]
    assert len(graphs) == 1
    names = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert any("thinkfold.paged_attention" in name for name in names)
