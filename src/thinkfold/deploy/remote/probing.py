"""Finds out at start what a remote server can: a few completions of a token or two, and what comes back."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from thinkfold.config import EngineConfig
from thinkfold.deploy.remote.choice import COMPLETIONS
from thinkfold.deploy.remote.dialect import NEUTRAL, Dialect
from thinkfold.deploy.remote.http import Api, Remote
from thinkfold.deploy.remote.rows import read_rows
from thinkfold.deploy.remote.tokens import TokenReader
from thinkfold.engine.language import Language
from thinkfold.errors import ParameterError, RemoteBusyError, RemoteError, UnsupportedError
from thinkfold.types import Phase

logger = logging.getLogger(__name__)

MODELS = "/v1/models"
TOPS = (20, 5, 1)  # log-probs a token that servers allow
SAMPLE = "Seven times eight is 56,\nand nine times nine is 81."
LONG, SHORT = 48, 1  # tokens of the two requests that tell whether both are worked on at once
BUDGET, AFTER = 2, 16  # thinking tokens to end behind, and those in which that must show
FORCED = 100.0  # a bias that nothing outweighs
_TOKENIZERS = (("/tokenize", "prompt"), ("/tokenize", "content"), ("/extras/tokenize", "input"))


async def find_dialect(api: Api, remote: Remote, language: Language, config: EngineConfig) -> Dialect:
    """What the server is and can. Raises RemoteError where it does not answer.

    ParameterError names what does not fit: the model's name, or a tokenizer that is not the server's.
    """
    dialect = await _model(api, remote)
    found = _Probing(api, language, dialect)
    await found.check_completions()
    await found.tokenizer()
    await found.prompts()
    await found.fields()
    await found.answers()
    await found.markers()
    await found.budget()
    await found.parallel()
    return found.dialect


async def _model(api: Api, remote: Remote) -> Dialect:
    listed = await api.get(MODELS)
    data = listed.get("data") if isinstance(listed, dict) else None
    cards = [card for card in data or () if isinstance(card, dict) and isinstance(card.get("id"), str)]
    names = [card["id"] for card in cards]
    if not cards:
        raise ParameterError("base_url", "the remote engine lists no models")
    if remote.model is None and len(cards) > 1:
        raise ParameterError("remote_model", f"the remote engine has several, name one of {', '.join(names)}")
    card = next((card for card in cards if remote.model in (None, card["id"])), None)
    if card is None:
        raise ParameterError(
            "remote_model", f"the remote engine has no {remote.model!r:.100}, it has {', '.join(names)}"
        )
    length = card.get("max_model_len")
    return Dialect(card["id"], length if type(length) is int and length > 1 else None)


class _Probing:
    """`dialect` grows with each question."""

    def __init__(self, api: Api, language: Language, dialect: Dialect) -> None:
        self.dialect = dialect
        self._api, self._language = api, language
        self._reader = TokenReader(language)
        self._sample = self._reader.encode(SAMPLE)

    async def check_completions(self) -> None:
        """Raises ParameterError for a server that only knows chats."""
        try:
            await self._ask(self._reader.text(self._sample))
        except RemoteError as error:
            if error.status in (404, 405):
                raise ParameterError(
                    "base_url", "the remote engine has no /v1/completions, which all of this needs"
                ) from None
            raise

    async def tokenizer(self) -> None:
        """Compare tokens where the server tells them. Raises ParameterError for others than ours."""
        for path, name in _TOKENIZERS:
            body = {name: SAMPLE, "model": self.dialect.model, "add_special_tokens": False, "add_special": False}
            try:
                answer = await self._api.post(path, body)
            except (RemoteError, RemoteBusyError):
                continue
            tokens = answer.get("tokens") if isinstance(answer, dict) else None
            if isinstance(tokens, list) and tokens and all(type(each) is int for each in tokens):
                if tokens[-len(self._sample) :] != self._sample:
                    raise ParameterError("model", f"its tokenizer is not the remote engine's: {SAMPLE!r} differs")
                return

    async def prompts(self) -> None:
        """Whether prompts go as ids, and whether the server counts their tokens as we do."""
        try:
            answer = await self._ask(list(self._sample))
        except RemoteError:
            answer = {}
        ids = _counted(answer) == len(self._sample)
        self.dialect = replace(self.dialect, prompt_ids=ids)
        if ids:
            return
        counted = _counted(await self._ask(self._reader.text(self._sample)))
        if counted is not None and counted != len(self._sample):
            raise ParameterError(
                "model",
                f"its tokenizer is not the remote engine's, or that one adds tokens to a prompt: {SAMPLE!r} has "
                f"{len(self._sample)} tokens here and {counted} there",
            )

    async def fields(self) -> None:
        """Which sampling fields the server takes."""
        known = {name for name, (_, neutral) in NEUTRAL.items() if await self._takes({name: neutral})}
        all_k = 0
        if "top_k" not in known and await self._takes({"top_k": -1}):
            known, all_k = known | {"top_k"}, -1
        bias = {str(self._sample[0]): -1.0}
        biased = await self._takes({"logit_bias": bias})
        self.dialect = replace(self.dialect, fields=frozenset(known), all_k=all_k, logit_bias=biased)

    async def answers(self) -> None:
        """What comes with a drawn token: its id, and log-probs of how many."""
        more: dict[str, Any] = {}
        for name, value in (("return_token_ids", True), ("skip_special_tokens", False)):
            if await self._takes({name: value}):
                more[name] = value
        if await self._takes({"stream_options": {"include_usage": True}, "stream": True}):
            more["stream_options"] = {"include_usage": True}
        self.dialect = replace(self.dialect, extra=more)
        ids = bool(_first(await self._ask_alike()).get("token_ids"))
        for top in TOPS:
            try:
                rows = read_rows(_first(await self._ask_alike(logprobs=top)).get("logprobs"))
            except (RemoteError, AttributeError, KeyError, TypeError, ValueError):
                continue
            if rows:
                told = rows[0].token_id is not None
                most = min(top, len(rows[0].top))
                self.dialect = replace(self.dialect, top=most, token_ids=ids, row_ids=told and not ids)
                return
        self.dialect = replace(self.dialect, token_ids=ids)

    async def markers(self) -> None:
        """Raises UnsupportedError for a server that hides the end marker: its thinking could not be told."""
        family = self._language.family
        if family is None or not family.tokens.ends or not self.dialect.logit_bias or self.dialect.token_ids:
            return
        end = family.tokens.ends[0][0]
        answer = await self._ask_alike(logit_bias={str(end): FORCED})
        shown, marker = _first(answer).get("text"), self._reader.text((end,))
        if "reasoning" in _first(answer):  # it tells thinking apart, and needs no marker for that
            return
        if shown == "":
            raise UnsupportedError("base_url", f"the remote engine does not print {marker}: thinking cannot be told")
        if shown != marker:
            logger.warning("the remote engine takes logit_bias and does not honour it")
            self.dialect = replace(self.dialect, logit_bias=False)

    async def budget(self) -> None:
        """Whether the server ends thinking by itself, and would not have done so anyway."""
        family = self._language.family
        if family is None or not family.force_ids or not family.tokens.starts or not family.tokens.ends:
            return
        prompt = [*self._sample, *family.tokens.starts[0]]
        sent: str | list[int] = prompt if self.dialect.prompt_ids else self._reader.text(prompt)

        async def ends(**more: int) -> bool:
            piece = self._reader.part(Phase.THINKING).read(await self._ask_alike(sent, max_tokens=AFTER, **more))
            return self._reader.end_ids[0] in [token.token_id for token in piece.tokens]

        try:
            native = await ends(thinking_token_budget=BUDGET)
        except RemoteError:
            return
        self.dialect = replace(self.dialect, native_budget=native and not await ends())

    async def parallel(self) -> None:
        """Whether a second request is answered while a first one is still written."""
        first = {**self._body(self._reader.text(self._sample), LONG), "stream": True}
        second: asyncio.Task[Any] | None = None
        done = False
        try:
            async with aclosing(self._api.stream(COMPLETIONS, first)) as events:
                async for _ in events:
                    second = second or asyncio.create_task(self._ask(self._reader.text(self._sample)))
                    done = done or second.done()
        finally:
            if second is not None:
                await asyncio.wait({second})
        self.dialect = replace(self.dialect, parallel=done)

    async def _takes(self, more: dict[str, Any]) -> bool:
        """Whether a request with these fields is accepted."""
        try:
            body = {**self._body(self._reader.text(self._sample), 1), **more}
            if more.get("stream"):
                async with aclosing(self._api.stream(COMPLETIONS, body)) as events:
                    return [event async for event in events] != []
            await self._api.post(COMPLETIONS, body)
        except RemoteError as error:
            if error.unreachable:
                raise
            return False
        return True

    async def _ask(self, prompt: str | list[int], **more: Any) -> Any:
        """One token behind a prompt."""
        return await self._api.post(COMPLETIONS, {**self._body(prompt, 1), **more})

    async def _ask_alike(self, prompt: str | list[int] | None = None, **more: Any) -> Any:
        """The same with all that goes with every request, but streaming."""
        extra = {name: value for name, value in self.dialect.extra.items() if name != "stream_options"}
        return await self._ask(self._reader.text(self._sample) if prompt is None else prompt, **extra, **more)

    def _body(self, prompt: str | list[int], tokens: int) -> dict[str, Any]:
        return {"model": self.dialect.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0.0}


def _first(answer: Any) -> dict[str, Any]:
    choices = answer.get("choices") if isinstance(answer, dict) else None
    return choices[0] if choices and isinstance(choices[0], dict) else {}


def _counted(answer: Any) -> int | None:
    usage = answer.get("usage") if isinstance(answer, dict) else None
    counted = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    return counted if type(counted) is int else None
