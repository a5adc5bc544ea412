"""The asynchronous client. `synchronous.py` is the same without `await`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import openai

from thinkfold.client import values
from thinkfold.client.branching import BranchData, branches
from thinkfold.client.values import Call, Owner
from thinkfold.types import Decision, Handle, SessionParams, SessionState, Until


class AsyncClient(openai.AsyncOpenAI):
    """`openai.AsyncOpenAI` for a thinkfold server; all of it works as it does there.

    What the server refuses is `openai.APIStatusError`, whose `param` names the field: 400 for a wrong value, 404
    for what is not there or somebody else's, 409 for what cannot be done now. ParameterError comes before the call.
    """

    def __init__(self, base_url: str = "http://127.0.0.1:8000/v1", *, api_key: str | None = None, **more: Any) -> None:
        super().__init__(base_url=base_url, api_key=api_key or values.NO_KEY, **more)

    def running(
        self, response: Any, *, cache_salt: str | None = None, prompt_cache_key: str | None = None
    ) -> AsyncRunning:
        """A response that is being written: its id, or a chunk or event of its stream. Labels are its request's."""
        return AsyncRunning(self, values.response_id(response), Owner(cache_salt, prompt_cache_key))

    async def begin(
        self,
        until: Until | None = None,
        *,
        cache_salt: str | None = None,
        prompt_cache_key: str | None = None,
        **fields: Any,
    ) -> list[AsyncBranch]:
        """Write a first part: `messages` or `prompt` and other `fields` of the API, `n` branches."""
        owner = Owner(cache_salt, prompt_cache_key)
        return branches(AsyncBranch, self, owner, None, await self.perform(values.begin(owner, until, fields)))

    def session(self, name: str, total_budget: int | None = None) -> AsyncSession:
        """An agent session; the call that begins it needs its budget of thinking tokens. Raises ParameterError."""
        return AsyncSession(self, SessionParams(name, total_budget))

    async def decide(
        self, how: Decision, messages: Sequence[Any], *, extra_body: Mapping[str, Any] | None = None, **more: Any
    ) -> Any:
        """`chat.completions.create`, answered by a vote, best of N or a search. Raises ParameterError.

        A verifier is named as the server knows it. `decision_body` is the same for other APIs.
        """
        body = values.with_decision(how, extra_body)
        return await self.chat.completions.create(messages=messages, extra_body=body, **more)

    def decision_body(self, how: Decision, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """`extra_body` for a call of another API of this client, such as `responses.create`. Raises ParameterError."""
        return values.with_decision(how, more)

    async def perform(self, call: Call) -> dict[str, Any]:
        """One call of this server's own API; the JSON that comes back."""
        options: Any = {"max_retries": 0, "params": dict(call.params)}
        body = {"body": dict(call.body)} if call.method == "post" else {}
        reply = await getattr(self, call.method)(call.path, cast_to=object, options=options, **body)
        return cast(dict[str, Any], reply)


class AsyncRunning:
    """Orders to one response; `choice` None is every choice that has not ended."""

    def __init__(self, client: AsyncClient, response_id: str, owner: Owner) -> None:
        self._client = client
        self._owner = owner
        self.id = response_id

    async def end_thinking(self, choice: int | None = None) -> None:
        """The answer begins now."""
        await self._order("end_thinking", choice=choice)

    async def set_budget(self, budget: int) -> int | None:
        """Another thinking budget, -1 for no limit; what holds now, None for no limit."""
        return (await self._order("set_budget", budget=budget))["budget"]

    async def inject(self, text: str | Sequence[int], choice: int | None = None) -> int:
        """Text or token ids that the model goes on behind; the output tokens with them."""
        kind = {"text": text} if isinstance(text, str) else {"token_ids": list(text)}
        return (await self._order("inject", choice=choice, **kind))["output_tokens"]

    async def pause(self, choice: int | None = None) -> None:
        """It stops and keeps what it holds."""
        await self._order("pause", choice=choice)

    async def resume(self, choice: int | None = None) -> None:
        """It goes on."""
        await self._order("resume", choice=choice)

    async def cancel(self, choice: int | None = None, *, keep_partial: bool = True) -> None:
        """It ends, with what is written or with nothing."""
        await self._order("cancel", choice=choice, keep_partial=keep_partial)

    async def fork(self, at: int | None = None, choice: int | None = None) -> AsyncBranch:
        """A branch that goes on from the state after `at` output tokens, None for all so far; its text is not told."""
        reply = await self._order("fork", at=at, choice=choice)
        return AsyncBranch(self._client, self._owner, None, values.handle_of(reply["handle"]), None, {})

    async def _order(self, action: str, **more: Any) -> dict[str, Any]:
        return await self._client.perform(values.order(self.id, self._owner, action, **more))


class AsyncBranch(BranchData[AsyncClient]):
    __doc__ = BranchData.__doc__

    async def extend(
        self,
        until: Until | None = None,
        *,
        n: int = 1,
        temperature: float | None = None,
        seed: int | None = None,
    ) -> list[AsyncBranch]:
        """Write the next part `n` times; without `until` to the end. Raises ParameterError without a handle."""
        call = values.extend(self._owner, self._needed(), until, n, temperature, seed)
        return branches(AsyncBranch, self._client, self._owner, self, await self._client.perform(call))

    async def rollback(self, parts: int = 1) -> AsyncBranch:
        """The branch as it was so many parts ago; the handles behind it on this branch are released."""
        back, behind = self._back(parts)
        for branch in behind:
            await branch.release()
        return back

    async def release(self) -> None:
        """Forget its handle; what has started from it goes on. Again, or without one, it does nothing."""
        handle: Handle | None = self.handle
        self.handle = None
        if handle is not None:
            await self._client.perform(values.release(self._owner, handle))


class AsyncSession:
    """Calls that share one budget of thinking tokens."""

    def __init__(self, client: AsyncClient, params: SessionParams) -> None:
        self._client = client
        self.params = params

    async def chat(self, messages: Sequence[Any], *, extra_body: Mapping[str, Any] | None = None, **more: Any) -> Any:
        """`chat.completions.create` as a call of this session."""
        body = values.with_session(self.params, extra_body)
        return await self._client.chat.completions.create(messages=messages, extra_body=body, **more)

    def extra_body(self, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """`extra_body` for a call of another API of this client, such as `responses.create`."""
        return values.with_session(self.params, more)

    async def show(self) -> SessionState:
        """Where it stands. 404 before its first call."""
        return values.session_of(await self._client.perform(values.session("get", self.params.id)))

    async def delete(self) -> None:
        """Forget it and all that its calls have left; those that run end."""
        await self._client.perform(values.session("delete", self.params.id))
