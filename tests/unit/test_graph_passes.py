"""Passes over the graph of a model: products that share an input, and results that very many operations read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from thinkfold.runner.graph_passes import MANY, lay_side_by_side, with_passes


class Layer(nn.Module):
    """Three products of one input and one of their sum."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, n, bias=bias) for n in (6, 2, 2))
        self.o = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        return self.o(torch.cat((q, k * v), -1))


class Nodes:
    """A backend that runs the graph as it is and keeps the targets of its nodes."""

    def __init__(self) -> None:
        self.targets: list[Any] = []

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.targets = [node.target for node in module.graph.nodes]
        return module

    @property
    def products(self) -> int:
        return self.targets.count(torch.nn.functional.linear)


def compiled(model: nn.Module) -> tuple[Callable[..., Any], Nodes]:
    torch._dynamo.reset()
    nodes = Nodes()
    return torch.compile(model.forward, fullgraph=True, backend=with_passes(nodes)), nodes


@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_products_of_one_input_become_one(bias: bool) -> None:
    model, x = Layer(bias), torch.randn(5, 8)
    own = model(x)
    weights = [p.clone() for p in model.parameters()]
    assert lay_side_by_side(model, partial(model, x)) == 3
    assert all(map(torch.equal, model.parameters(), weights))
    torch.testing.assert_close(model(x), own)
    call, nodes = compiled(model)
    torch.testing.assert_close(call(x), own)
    assert nodes.products == 2


@torch.no_grad()
def test_weights_that_lie_apart_stay_apart() -> None:
    model, x = Layer(), torch.randn(5, 8)
    call, nodes = compiled(model)
    torch.testing.assert_close(call(x), model(x))
    assert nodes.products == 4


@torch.no_grad()
def test_some_layers_are_not_moved() -> None:
    """One whose weight another layer has, too, one with a bias beside one without, and one that is called twice."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.b(x) + self.c(x) * self.c(x)

    model, x = Odd(), torch.randn(3, 4)
    assert lay_side_by_side(model, partial(model, x)) == 0
    call, nodes = compiled(model)
    torch.testing.assert_close(call(x), model(x))
    assert nodes.products == 4


@torch.no_grad()
def test_what_many_read_is_computed_once() -> None:
    class Rotary(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            angle = x.cos()
            for shift in range(MANY):
                x = x * angle + shift
            return x

    model, x = Rotary(), torch.randn(6)
    call, nodes = compiled(model)
    torch.testing.assert_close(call(x), model(x))
    assert nodes.targets.count(torch.ops.thinkfold.held.default) == 1
