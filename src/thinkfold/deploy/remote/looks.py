"""Probes of a running choice: short greedy completions behind what it has written, which its prefix cache pays for."""

from __future__ import annotations

import math
from contextlib import aclosing

from thinkfold.control.side import SideControl
from thinkfold.deploy.remote.choice import COMPLETIONS, Choice, Line
from thinkfold.engine.commands import Probe
from thinkfold.errors import ConflictError, RemoteBusyError, RemoteError
from thinkfold.types import EngineRequest, Phase, ProbeResult, SamplingParams, TokenLogprobs, TokenStats

_UNSEEN = TokenStats(-math.inf, math.nan, math.nan, math.nan)  # without log-probs nothing is likely


async def look(line: Line, request: EngineRequest, choice: Choice, order: Probe) -> ProbeResult:
    """What the model would write behind `order.token_ids`; a server that is busy or fails drops the probe.

    A server that works on one request at a time is asked while the choice is held. Raises ConflictError.
    """
    if not choice.begun:
        raise ConflictError(f"{order.request_id!r} has no state to ask yet")
    if order.logprobs and not line.dialect.top:
        return ProbeResult(dropped="the remote engine gives no log-probs")
    if line.dialect.parallel:
        return await _ask(line, request, choice, order)
    async with choice.held():
        if choice.ended:
            raise ConflictError(f"{order.request_id!r} has ended")
        return await _ask(line, request, choice, order)


async def _ask(line: Line, request: EngineRequest, choice: Choice, order: Probe) -> ProbeResult:
    control = SideControl(choice.control.vocabulary, choice.control.phase, order.n, order.stop)
    ids, after = [*choice.ids, *order.token_ids], choice.control.num_output_tokens
    if len(ids) + order.n > order.max_len:
        raise ConflictError(f"{len(ids)} tokens and {order.n} more are longer than the model's {order.max_len}")
    greedy = SamplingParams(temperature=0.0, logit_bias=request.sampling.logit_bias)
    more = line.dialect.sampled(greedy)
    if greedy.logit_bias:
        more["logit_bias"] = {str(i): b for i, b in greedy.logit_bias.items()}
    body = line.dialect.body(line.prompt(ids), order.n, look=True, **more)
    finish, dropped, reader = None, None, line.reader.part(Phase.ANSWER)
    try:
        async with aclosing(line.api.stream(COMPLETIONS, body)) as events:
            async for event in events:
                piece = reader.read(event)
                finish = piece.finish or finish
                for token in piece.tokens:
                    if control.finish_reason is None:
                        found = token.logprobs
                        top = () if found is None else found.top[: order.logprobs]
                        logprobs = TokenLogprobs(token.token_id, 0.0 if found is None else found.logprob, top)
                        control.accept(token.token_id, token.stats or _UNSEEN, logprobs if order.logprobs else None)
                if control.finish_reason is not None:
                    break
        if control.finish_reason is None and finish == "stop" and choice.control.vocabulary.eos_ids:
            control.accept(min(choice.control.vocabulary.eos_ids), _UNSEEN, None)
    except (RemoteError, RemoteBusyError) as error:
        dropped = str(error)
    result = control.result(len(order.token_ids) + len(control.result(0).token_ids))
    result.after, result.dropped = after, dropped
    return result
