"""What a request over a remote server costs. Tokens and times are counted here, memory is estimated."""

from __future__ import annotations

from collections.abc import Sequence

from thinkfold.deploy.remote.choice import Choice
from thinkfold.types import Costs, EngineRequest


class Meter:
    """Adds up one request. Its KV is what its tokens would take with nothing shared but the prompt.

    The server's time is split evenly among the choices that draw.
    """

    def __init__(self, request: EngineRequest, entry_bytes: int, now: float) -> None:
        self.costs = Costs(prompt_tokens=len(request.prompt_token_ids))
        self._entry_bytes = entry_bytes
        self._then = request.arrival_time or now

    def tick(self, choices: Sequence[Choice], all_drawing: int, now: float) -> None:
        """Charge the time since the last call to what the request has been doing."""
        costs, seconds = self.costs, max(0.0, now - self._then)
        self._then = now
        live = [choice for choice in choices if not choice.ended and choice.begun]
        if not live:
            costs.queue_s += seconds if not any(choice.begun for choice in choices) else 0.0
            return
        entries = costs.prompt_tokens + sum(choice.control.num_output_tokens for choice in live)
        costs.kv_byte_seconds += entries * self._entry_bytes * seconds
        costs.kv_peak_entries = max(costs.kv_peak_entries, entries)
        costs.device_s += seconds * sum(choice.drawing for choice in live) / max(1, all_drawing)
        if not any(choice.control.num_output_tokens for choice in choices):
            costs.prefill_s += seconds
        elif any(choice.thinks for choice in live):
            costs.thinking_s += seconds
        else:
            costs.answer_s += seconds

    def count(self, choices: Sequence[Choice]) -> Costs:
        """Bring the token counts up to date and return the costs."""
        costs = self.costs
        kept = [choice.control for choice in choices if not choice.control.discarded]
        gone = [choice.control for choice in choices if choice.control.discarded]
        costs.thinking_tokens = sum(control.num_thinking_tokens for control in kept)
        costs.injected_tokens = sum(control.num_injected_tokens for control in kept)
        costs.answer_tokens = sum(control.num_output_tokens for control in kept) - costs.thinking_tokens
        costs.discarded_tokens = sum(choice.discarded for choice in choices)
        costs.discarded_tokens += sum(control.num_output_tokens for control in gone)
        told = [choice.cached_tokens for choice in choices if choice.cached_tokens is not None]
        costs.cached_tokens = min(told[0], costs.prompt_tokens) if told else 0
        costs.computed_prompt_tokens = costs.prompt_tokens - costs.cached_tokens
        return costs
