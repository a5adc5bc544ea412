"""With whom a request shares the engine and what it may spend: its tier, session, limits and kept answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from fastapi import Request

from thinkfold.engine.sessions import SessionCall
from thinkfold.errors import ParameterError
from thinkfold.server.agents.step_cache import Answer, StepCache, key_of
from thinkfold.server.errors import renamed
from thinkfold.server.folds import FIELD_NAMES, ThinkfoldFields
from thinkfold.server.replies import DriftRecord, ServingCosts, ServingNews
from thinkfold.server.state import ServerState, state_of, tenant_of
from thinkfold.server.tiers import ServedTier, Slo
from thinkfold.types import (
    CompletionOutput,
    ControlParams,
    Costs,
    FinishReason,
    FoldParams,
    RequestOutput,
    SamplingParams,
    Service,
    ThinkingEndReason,
    Tier,
)

NO_WISH = ThinkfoldFields()
ESTIMATED = ("kv", "time.device_s")  # over a remote engine


@dataclass(frozen=True, slots=True)
class Asks:
    """How much a request asks for: so many `samples` of each prompt, by its field of that name, and which rules.

    `can_stop` says that this model's thinking can be ended from outside.
    """

    prompts: int = 1
    samples: int = 1
    field: str = "n"
    control: ControlParams | None = None
    can_stop: bool = True


@dataclass(slots=True)
class Serving:
    """`fold` and `control` are the request's wishes with its tier's behind them.

    `close` it once the request has ended, however.
    """

    tenant: str
    service: Service
    fold: FoldParams | None = None
    control: ControlParams | None = None
    slo: Slo | None = None
    call: SessionCall | None = None
    cache: StepCache | None = None
    key: tuple[str, str] = ("", "")
    answer: Answer | None = None  # kept for this step
    estimated: Sequence[str] = ()  # costs that are not measured
    drift: DriftRecord | None = None  # what of the conversation's earlier text had changed

    @property
    def session(self) -> str:
        """The agent session's name; "" is none."""
        return self.service.session

    @property
    def leaves_traces(self) -> bool:
        """Whether anything of it may be kept: nothing of a session that was deleted while it ran."""
        return self.call is None or self.call.live

    def note(self, prompt: int, output: RequestOutput) -> None:
        """News of one of the request's prompts."""
        if self.call is not None:
            self.call.note(prompt, output)

    def keep(self, text: str, output: RequestOutput) -> None:
        """The only choice has ended: keep its answer if it is a finished one."""
        last = output.outputs[-1] if output.outputs else None
        if self.cache is None or self.answer is not None or last is None or output.error is not None:
            return
        if not self.leaves_traces:
            return
        ended = last.thinking_end_reason
        short = ended is ThinkingEndReason.BUDGET and any(clamp.by == "session" for clamp in output.limits.clamped)
        if last.finish_reason is not FinishReason.STOP or ended is ThinkingEndReason.UNCLOSED or short:
            return  # half an answer, or one that only this session had too little thinking left for
        policies = (output.policy, output.fold, output.limits)
        made = self.cache.clock()
        answer = Answer(text, last.stop_reason, *policies, made=made, outcome=output.outcome, session=self.session)
        self.cache.put(self.key, answer)

    async def kept(self, request_id: str) -> AsyncGenerator[RequestOutput, None]:
        """The kept answer as an engine would tell it; it costs nothing."""
        answer = self.answer
        assert answer is not None, "there is a kept answer"
        news = CompletionOutput(0, text=answer.text, finish_reason=FinishReason.STOP, stop_reason=answer.stop_reason)
        yield RequestOutput(
            request_id,
            [news],
            answer.thinking,
            Costs(),
            finished=True,
            fold=answer.fold,
            limits=answer.limits,
            outcome=answer.outcome,
        )

    def shown(self) -> ServingNews:
        """What the reply's own object says of the session and of the conversation's earlier turns."""
        shown: ServingNews = {}
        if self.call is not None:
            shown["session"] = self.call.view()
        if self.drift is not None:
            shown["drift"] = self.drift
        return shown

    def control_shown(self) -> dict[str, Any] | None:
        """What the reply's policy says of early stopping: the effective wish, null where nothing was asked for."""
        return None if self.control is None or not self.control.asks else asdict(self.control)

    def usage(self, costs: Costs) -> ServingCosts:
        """What usage says beside the three costs: the bill where a limit or a price is set, the cache's mark."""
        service = self.service
        more: ServingCosts = {"estimated": list(self.estimated)} if self.estimated else {}
        if service.max_cost is not None or service.prices != Service().prices:
            more["cost"] = service.prices.cost(costs)
        if self.cache is not None:
            more["step_cache"] = {"hit": self.answer is not None}
            if self.answer is not None:
                more["step_cache"]["age_s"] = round(self.cache.clock() - self.answer.made, 3)
        return more

    def close(self) -> None:
        if self.call is not None:
            self.call.close(hit=self.answer is not None)


def tier_of(request: Request, state: ServerState, wish: ThinkfoldFields) -> ServedTier | None:
    """The tier of a request. Raises ParameterError for one that is not there."""
    if state.options.tiers is None:
        if wish.tier is not None:
            raise ParameterError("thinkfold.tier", "this server has no tiers")
        return None
    return state.options.tiers.choose(wish.tier, getattr(request.state, "api_key", None))


def open_serving(
    request: Request,
    wish: ThinkfoldFields | None,
    sampling: SamplingParams,
    asks: Asks,
    parameters: Sequence[object] = (),
) -> Serving:
    """What a request gets. `parameters` are what else than its step an answer depends on. Raises ParameterError."""
    state, tenant, wish = state_of(request), tenant_of(request), wish or NO_WISH
    served, asked = tier_of(request, state, wish), wish.fold_params()
    prompts, prices = asks.prompts, state.options.prices
    if served is not None:
        served.check_samples(asks.field, asks.samples)
        prices = served.prices or prices
    if wish.step_cache is not None:
        wish.step_cache.check(sampling, prompts)
    try:
        session = wish.session.params() if wish.session is not None else None
        service = Service(
            Tier() if served is None else served.tier,
            deadline_ms=wish.deadline_ms,
            max_cost=wish.max_cost,
            prices=prices,
        )
    except ParameterError as error:
        raise renamed(error, FIELD_NAMES) from None
    serving = Serving(
        tenant,
        service,
        asked if served is None else served.fold_of(asked),
        _control_of(asks, served, state.options.control),
        served.slo if served else None,
        estimated=ESTIMATED if state.slot.require().model.engine == "openai" else (),
    )
    if wish.step_cache is not None:
        if state.step_cache.most < 1:
            raise ParameterError("thinkfold.step_cache", "this server keeps no answers of steps")
        tier = service.tier.name
        serving.cache = state.step_cache
        limits = (serving.fold, service.deadline_ms, service.max_cost)
        serving.key = key_of(tenant, wish.step_cache.step, tier, request.url.path, sampling, *limits, *parameters)
        serving.answer = None if wish.step_cache.bypass else state.step_cache.get(serving.key)
    if session is not None:
        choices = 0 if serving.answer is not None else prompts * asks.samples
        try:
            serving.call = state.sessions.open(tenant, session, choices)
        except ParameterError as error:
            raise renamed(error, FIELD_NAMES) from None
        serving.service = replace(service, session=session.id, session_budget=serving.call.budget)
    return serving


def _control_of(asks: Asks, served: ServedTier | None, default: ControlParams | None) -> ControlParams | None:
    """The request's own rules first, then its tier's, then the server's; only its own where nothing can be ended."""
    if not asks.can_stop:
        return asks.control
    behind = served.control if served is not None and served.control is not None else default
    return behind if asks.control is None else asks.control.over(behind)
