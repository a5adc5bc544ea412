"""One branch of a response that is written in parts; how its next parts are asked for is left to subclasses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, Self, TypeVar

from thinkfold.client.values import Owner, Written, handle_of, written_of
from thinkfold.errors import ParameterError
from thinkfold.types import Handle

C = TypeVar("C")


class BranchData(Generic[C]):
    """The response so far, and the handle behind its last part: None once it has ended or was released.

    `reasoning` and `text` are those of the whole branch, `part` is the last part, `usage` that of the call
    which wrote it (and its siblings).
    """

    def __init__(
        self,
        client: C,
        owner: Owner,
        parent: Self | None,
        handle: Handle | None,
        part: Written | None,
        usage: Mapping[str, Any],
    ) -> None:
        self._client = client
        self._owner = owner
        self.parent = parent
        self.handle = handle
        self.part = part
        self.usage = usage

    @property
    def reasoning(self) -> str:
        return "".join(each.part.reasoning for each in self._line() if each.part)

    @property
    def text(self) -> str:
        return "".join(each.part.text for each in self._line() if each.part)

    @property
    def finished(self) -> bool:
        """Whether the response has ended, so that nothing can follow."""
        return self.part is not None and self.part.finish_reason != "boundary"

    def _line(self) -> list[Self]:
        line: list[Self] = [self]
        while line[-1].parent is not None:
            line.append(line[-1].parent)
        return line[::-1]

    def _needed(self) -> Handle:
        if self.handle is None:
            raise ParameterError("handle", "there is none: the response has ended, or its handle was released")
        return self.handle

    def _back(self, parts: int) -> tuple[Self, list[Self]]:
        """The branch so many parts ago, and those behind it. Raises ParameterError."""
        line = self._line()
        if not 1 <= parts < len(line):
            raise ParameterError("parts", f"must be in [1, {len(line) - 1}], got {parts}")
        return line[-1 - parts], line[-parts:]


B = TypeVar("B", bound=BranchData[Any])


def branches(kind: type[B], client: Any, owner: Owner, parent: B | None, reply: Mapping[str, Any]) -> list[B]:
    """One branch a choice of a reply."""
    found: list[B] = []
    for choice in reply["choices"]:
        handle = None if choice["handle"] is None else handle_of(choice["handle"])
        found.append(kind(client, owner, parent, handle, written_of(choice), reply["usage"]))
    return found
