"""What a fleet knows of each replica and of each request that is under way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from thinkfold.deploy.fleet.demand import Demand, Need
from thinkfold.engine.commands import Extend
from thinkfold.engine.messages import Command, EngineStats, ModelInfo
from thinkfold.engine.samples import question_of
from thinkfold.errors import ReplicaLostError, RequestFailedError
from thinkfold.types import (
    CompletionOutput,
    Costs,
    EngineRequest,
    FinishReason,
    RequestOutput,
    ThinkingPolicy,
)


class Link(Protocol):
    """The way to one core. Commands arrive in the order in which they were sent, or the link breaks."""

    @property
    def name(self) -> str: ...
    @property
    def pool(self) -> str: ...

    def send(self, command: Command) -> None: ...


@dataclass(slots=True, eq=False)
class Replica:
    """`draining`: it ends what it runs and takes nothing new."""

    link: Link
    model: ModelInfo
    stats: EngineStats = field(default_factory=EngineStats)
    draining: bool = False
    flights: dict[str, Flight] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.link.name

    @property
    def pool(self) -> str:
        return self.link.pool

    def predicted(self, demand: Demand) -> int:
        """KV entries of all that runs and waits there, each at its peak."""
        return sum(demand.entries(flight.need) for flight in self.flights.values())


@dataclass(slots=True, eq=False)
class Flight:
    """A request under way. `replica` None: it waits for one."""

    request: EngineRequest | Extend
    pool: str
    need: Need
    replica: Replica | None = None
    last: RequestOutput | None = None
    told: dict[int, CompletionOutput] = field(default_factory=dict)  # the last news of each choice

    @property
    def name(self) -> str:
        return self.request.request_id

    @property
    def question(self) -> str:
        return question_of(self.name)

    @property
    def choices(self) -> int:
        return self.request.n if isinstance(self.request, Extend) else self.request.sampling.n

    @property
    def can_restart(self) -> bool:
        """Whether it may begin again elsewhere: nobody has seen anything of it, and it needs nothing but its prompt."""
        return self.last is None and isinstance(self.request, EngineRequest)

    def note(self, output: RequestOutput) -> None:
        """Something of it is about to be told."""
        self.last = output
        self.told |= {news.index: news for news in output.outputs}

    def ended(self, reason: FinishReason, failure: RequestFailedError | None = None) -> RequestOutput:
        """The last output of a request whose replica will not tell one."""
        open_choices = [i for i in range(self.choices) if i not in self.told or self.told[i].finish_reason is None]
        outputs = [_last_news(index, self.told.get(index), reason) for index in open_choices]
        message = str(failure) if failure is not None else None
        known = self.last or self.request
        news = RequestOutput(self.name, outputs, self._policy, Costs(), finished=True, error=message, failure=failure)
        if isinstance(known, RequestOutput):
            news.costs = known.costs
        if isinstance(known, RequestOutput | EngineRequest):
            news.fold, news.limits = known.fold, known.limits
        return news

    @property
    def _policy(self) -> ThinkingPolicy:
        """As it was told last; of a part that has told nothing it is not known here."""
        if self.last is not None:
            return self.last.policy
        return (
            self.request.thinking if isinstance(self.request, EngineRequest) else ThinkingPolicy(True, None, "default")
        )


def lost(replica: str, reason: str) -> ReplicaLostError:
    """What is said of a request whose replica has gone."""
    return ReplicaLostError(f"the replica {replica} that ran this has gone ({reason}); send the request again")


def _last_news(index: int, told: CompletionOutput | None, reason: FinishReason) -> CompletionOutput:
    if told is None:
        return CompletionOutput(index, finish_reason=reason)
    return CompletionOutput(
        index,
        phase=told.phase,
        num_output_tokens=told.num_output_tokens,
        num_thinking_tokens=told.num_thinking_tokens,
        num_injected_tokens=told.num_injected_tokens,
        thinking_end_reason=told.thinking_end_reason,
        finish_reason=reason,
    )
