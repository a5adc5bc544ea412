"""Sums and collections over the ranks of a tensor-parallel model, as operations that a compiled model may hold.

A group is no global state of `torch.distributed`: several may live in one process, and ranks may be
threads. Operations find theirs by name, since a graph can hold no group.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, library

_GROUPS: WeakValueDictionary[str, Group] = WeakValueDictionary()
LOOPBACK = "127.0.0.1"


class GroupError(RuntimeError):
    """Another rank has gone, or does not answer in time."""


class Group:
    """One rank's end of a group: NCCL between GPUs, gloo on a CPU. Every call must be made by all ranks, in order.

    `rendezvous` is a file that all ranks can reach and none has used before. Building a group waits for all of
    them. A rank that is not there `timeout_s` later, or has gone, makes a call of the others raise GroupError; on a
    GPU, whose work nobody waits for here, it is torch's own RuntimeError, from the watchdog of NCCL.
    """

    def __init__(
        self, name: str, rank: int, size: int, rendezvous: Path, device: torch.device, timeout_s: float
    ) -> None:
        self.name = name
        self.rank = rank
        self.size = size
        self._device = device
        with self._answered():
            self._backend = _backend(rank, size, rendezvous, device, timeout_s)
        _GROUPS[name] = self

    def sum_(self, x: Tensor) -> None:
        """Put the sum over all ranks in the place of each rank's `x`. On a CPU it is added up in the order of ranks,
        so that no bit depends on how many rows there are."""
        if self._device.type == "cuda":
            self._backend.allreduce([x]).wait()
            return
        first, *others = self.gather(x).unbind()
        x.copy_(first)
        for other in others:
            x.add_(other)

    def gather(self, x: Tensor) -> Tensor:
        """`x` of every rank, `[size, …]`."""
        found = x.new_empty((self.size, *x.shape))
        if x.numel():
            with self._answered():
                self._backend._allgather_base(found.view(-1), x.contiguous().view(-1)).wait()
        return found

    def tell(self, x: Tensor) -> None:
        """Put rank 0's `x` in the place of every rank's."""
        with self._answered():
            self._backend.broadcast(x, 0).wait()

    def numbers(self, mine: int) -> list[int]:
        """A number of every rank."""
        return self.gather(torch.tensor([mine], device=self._device)).flatten().tolist()

    @contextlib.contextmanager
    def _answered(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise GroupError(f"rank {self.rank} of {self.size} has no answer from another: {error}") from error

    def abort(self) -> None:
        """End what waits for other ranks: a GPU would wait for a rank that has gone until the timeout."""
        if self._device.type == "cuda":
            with contextlib.suppress(RuntimeError):
                self._backend.abort()


def find(name: str) -> Group:
    """The group of that name in this process. Raises KeyError."""
    return _GROUPS[name]


def sum_(x: Tensor, group: str) -> None:
    """`Group.sum_` as an operation that `torch.compile` leaves as it is."""
    torch.ops.thinkfold.sum_ranks(x, group)


def beside(x: Tensor, group: str, size: int) -> Tensor:
    """`x` `[…, n]` of all ranks side by side, `[…, size · n]`, as such an operation."""
    return torch.ops.thinkfold.gather_ranks(x, group, size)


def _backend(rank: int, size: int, rendezvous: Path, device: torch.device, timeout_s: float) -> Any:
    store = dist.FileStore(str(rendezvous), size)  # type: ignore[reportPrivateImportUsage]
    timeout = timedelta(seconds=timeout_s)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]  # type: ignore[attr-defined]
    return dist.ProcessGroupGloo(store, rank, size, options)


@library.custom_op("thinkfold::sum_ranks", mutates_args=("x",))
def _sum_ranks(x: Tensor, group: str) -> None:
    _GROUPS[group].sum_(x)


@library.custom_op("thinkfold::gather_ranks", mutates_args=())
def _gather_ranks(x: Tensor, group: str, size: int) -> Tensor:
    return _GROUPS[group].gather(x).movedim(0, -2).flatten(-2)


@_sum_ranks.register_fake
def _(x: Tensor, group: str) -> None:
    return None


@_gather_ranks.register_fake
def _(x: Tensor, group: str, size: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], size * x.shape[-1]))
