"""What is done to the graph of a model before it is compiled, and to the weights for its sake.

Products that share an input become one: on a GPU a small product takes as long as one three times its size.
What very many operations read is computed once: a compiler that joins element-wise operations would compute
the cosines of rotary positions anew in every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, library, nn
from torch.nn import functional

MANY = 8  # readers of a result that is computed once

Backend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def lay_side_by_side(model: nn.Module, run: Callable[[], object]) -> int:
    """Move weights of linear layers that `run` calls with the same input next to each other; returns how many layers.

    Their values stay, and so do the layers. Each group is copied once, so that is the room it takes.
    """
    calls: dict[int, tuple[Tensor, list[nn.Linear]]] = {}  # the inputs are held: a freed one gives its id away
    owners = [id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)]

    def note(layer: nn.Module, args: tuple[Any, ...]) -> None:
        if type(layer) is nn.Linear and args and owners.count(id(layer.weight)) == 1:
            calls.setdefault(id(args[0]), (args[0], []))[1].append(layer)

    hooks = [layer.register_forward_pre_hook(note) for layer in model.modules() if type(layer) is nn.Linear]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    moved = 0
    for _, layers in calls.values():
        alike = {(layer.bias is None, layer.weight.dtype, layer.weight.device) for layer in layers}
        if len(layers) == len(set(layers)) > 1 == len(alike):
            _join([layer.weight for layer in layers])
            _join([layer.bias for layer in layers if layer.bias is not None])
            moved += len(layers)
    return moved


def with_passes(backend: str | Backend) -> Backend:
    """`backend`, one of `torch.compile`, behind both passes."""
    inner: Any = torch._dynamo.lookup_backend(backend) if isinstance(backend, str) else backend
    return partial(_compile, inner)


def join_products(graph: fx.Graph, tensors: Mapping[fx.Node, Any]) -> None:
    """One product in place of those that share an input and have weights side by side, and views of its result.

    `tensors` are the values of the graph's inputs.
    """
    groups: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target is functional.linear and len(node.args) == 3 and not node.kwargs:
            groups.setdefault(node.args[0], []).append(node)
    for products in groups.values():
        weights, biases = ([_value(tensors, product.args[at]) for product in products] for at in (1, 2))
        plain = all(product.args[2] is None for product in products)
        if len(products) > 1 and _adjoin(weights) and (plain or _adjoin(biases)):
            _replace(graph, products, [weight.shape[0] for weight in weights if weight is not None], plain)


def compute_once(graph: fx.Graph, many: int = MANY) -> None:
    """Mark what at least `many` operations read as something that is not to be computed within them."""
    for node in [node for node in graph.nodes if node.op in ("call_function", "call_method")]:
        if len(node.users) >= many and isinstance(node.meta.get("example_value"), Tensor):
            with graph.inserting_after(node):
                held = graph.call_function(torch.ops.thinkfold.held.default, (node,))
            node.replace_all_uses_with(held, delete_user_cb=lambda user, held=held: user is not held)


def _compile(backend: Backend, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    names = [node for node in module.graph.nodes if node.op == "placeholder"]
    join_products(module.graph, dict(zip(names, inputs, strict=True)))
    compute_once(module.graph)
    module.graph.lint()
    module.recompile()
    return backend(module, inputs)


def _value(tensors: Mapping[fx.Node, Any], argument: Any) -> Any:
    return tensors.get(argument) if isinstance(argument, fx.Node) else None


def _copied(x: Tensor) -> Tensor:
    return x.clone()


library.custom_op("thinkfold::held", _copied, mutates_args=()).register_fake(torch.empty_like)


def _join(parts: list[Tensor]) -> None:
    if parts:
        whole = torch.cat([part.data for part in parts])
        for part, own in zip(parts, whole.split([len(part) for part in parts]), strict=True):
            part.data = own


def _adjoin(tensors: list[Any]) -> bool:
    """Whether each of these begins in memory where the one before it ends."""
    return all(isinstance(tensor, Tensor) and tensor.is_contiguous() for tensor in tensors) and all(
        a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and b.storage_offset() == a.storage_offset() + a.numel()
        and (a.dtype, a.shape[1:]) == (b.dtype, b.shape[1:])
        for a, b in pairwise(tensors)
    )


def _replace(graph: fx.Graph, products: list[fx.Node], rows: list[int], plain: bool) -> None:
    first = products[0]
    source, weight, bias = first.args
    with graph.inserting_before(first):
        width = graph.call_method("size", (weight, 1))
        joined = graph.call_function(torch.as_strided, (weight, (sum(rows), width), (width, 1)))
        offsets = None if plain else graph.call_function(torch.as_strided, (bias, (sum(rows),), (1,)))
        whole = graph.call_function(functional.linear, (source, joined, offsets))
        pieces = graph.call_function(torch.split, (whole, rows, -1))
        own: list[fx.Node] = [graph.call_method("__getitem__", (pieces, i)) for i in range(len(rows))]
    for product, piece in zip(products, own, strict=True):
        product.replace_all_uses_with(piece)
        graph.erase_node(product)
