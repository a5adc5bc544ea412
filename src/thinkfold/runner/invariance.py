"""What keeps a row's bits the same in every batch: how products must be padded, and sums of long rows.

BLAS libraries choose kernels, and with them the order of additions, by the number of rows.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

from thinkfold.runner.cpu_layers import PackedLinear

logger = logging.getLogger(__name__)

Linear = nn.Linear | PackedLinear
# FBGEMM with AVX2 adds in another order for 1 and 2 rows than for 3 to 6.
TILES = (1, 2, 3, 4, 8, 16, 32)
PROBE_TILES = 12


def row_tile(model: nn.Module) -> int:
    """How rows are padded: `invariant_tile`, or not at all and with a warning where there is none."""
    tile = invariant_tile(model)
    if tile is None:
        logger.warning("matrix products of this machine change with the batch: equal bits are not promised")
    return tile or 1


def invariant_tile(model: nn.Module) -> int | None:
    """The smallest tile T such that products of T, 2T, 3T … rows give each row the same bits, if one up to 32 does.

    Measured on one linear layer of each shape of the model.
    """
    linears = _of_each_shape(model)
    return next((tile for tile in TILES if all(_invariant(linear, tile) for linear in linears)), None)


@torch.inference_mode()
def threads_change_no_bit(model: nn.Module) -> bool:
    """Whether products have the same bits with one thread and with all; measured like `row_tile`."""
    most = torch.get_num_threads()
    inputs = [(linear, _probe(linear, PROBE_TILES)) for linear in _of_each_shape(model)]
    found = []
    try:
        for threads in sorted({1, 2, most - 1, most} & set(range(1, most + 1))):
            torch.set_num_threads(threads)
            found.append([linear(rows) for linear, rows in inputs])
    finally:
        torch.set_num_threads(most)
    return all(torch.equal(one, other) for others in found[1:] for one, other in zip(found[0], others, strict=True))


def row_sums(rows: Tensor) -> Tensor:
    """Sums `[R]` of `rows` `[R, V]`; torch alone would split the sum of a single long row over threads."""
    return (rows.expand(2, -1) if len(rows) == 1 else rows).sum(dim=-1)[: len(rows)]


def _of_each_shape(model: nn.Module) -> list[Linear]:
    shapes: dict[tuple[int, int], Linear] = {}
    for module in model.modules():
        if isinstance(module, nn.Linear | PackedLinear):
            shapes.setdefault((module.in_features, module.out_features), module)
    return list(shapes.values())


def _probe(linear: Linear, num_rows: int) -> Tensor:
    rows = torch.randn(num_rows, linear.in_features, generator=torch.Generator().manual_seed(0))
    return rows.to(linear.weight.dtype) if isinstance(linear, nn.Linear) else rows


@torch.inference_mode()
def _invariant(linear: Linear, tile: int) -> bool:
    rows = _probe(linear, tile * PROBE_TILES)
    whole = linear(rows)
    return all(
        torch.equal(linear(rows[tile * lo : tile * hi]), whole[tile * lo : tile * hi])
        for lo in range(2)
        for hi in range(lo + 1, PROBE_TILES + 1)
    )
