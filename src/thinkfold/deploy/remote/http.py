"""Calls to the remote server and what can go wrong with them. Knows no tokens and no policy."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from thinkfold.deploy.remote.events import DONE, DataLines
from thinkfold.errors import ParameterError, RemoteBusyError, RemoteError

CONNECT_S = 10.0
_SHOWN = 300  # characters of a remote message that are passed on
_BUSY = (429, 503)


@dataclass(frozen=True, slots=True)
class Remote:
    """Where the server is. `timeout_s` of silence end a request; `model` None is the only one it has.

    Raises ParameterError.
    """

    base_url: str
    key: str | None = None
    model: str | None = None
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ParameterError("base_url", f"must begin with http:// or https://, got {self.base_url!r:.60}")
        if not self.timeout_s > 0.0:
            raise ParameterError("remote_timeout_s", f"must be positive, got {self.timeout_s}")

    @property
    def root(self) -> str:
        """The address without `/v1`."""
        return self.base_url.rstrip("/").removesuffix("/v1")


class Api:
    """One remote server. `close` it."""

    def __init__(self, remote: Remote) -> None:
        self._client = httpx.AsyncClient(
            base_url=remote.root,
            headers={"Authorization": f"Bearer {remote.key}"} if remote.key else {},
            timeout=httpx.Timeout(remote.timeout_s, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=32),
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def get(self, path: str) -> Any:
        """JSON. Raises RemoteError."""
        try:
            return _json(await self._client.get(path))
        except httpx.HTTPError as error:
            raise _failure(error) from error

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """JSON. Raises RemoteError, RemoteBusyError."""
        try:
            return _json(await self._client.post(path, json=body))
        except httpx.HTTPError as error:
            raise _failure(error) from error

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        """The JSON of each event; closing it closes the connection, which ends the work there.

        Raises RemoteError, RemoteBusyError, also in the middle.
        """
        try:
            async with self._client.stream("POST", path, json=body) as response:
                if response.status_code != httpx.codes.OK:
                    await response.aread()
                    raise _refusal(response)
                lines = DataLines()
                async for chunk in response.aiter_bytes():
                    for data in lines.read(chunk):
                        if data == DONE:
                            return
                        yield _event(data)
        except httpx.HTTPError as error:
            raise _failure(error) from error


def _event(data: bytes) -> Any:
    event = _parsed(data)
    if isinstance(event, dict) and event.get("error"):
        raise RemoteError(f"the remote engine failed: {_message(event)}")
    return event


def _json(response: httpx.Response) -> Any:
    if response.status_code != httpx.codes.OK:
        raise _refusal(response)
    return _parsed(response.text)


def _parsed(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise RemoteError(f"the remote engine sent no JSON: {text!r:.{_SHOWN}}") from None


def _refusal(response: httpx.Response) -> RemoteError | RemoteBusyError:
    try:
        message = _message(response.json())
    except ValueError:
        message = response.text[:_SHOWN]
    status = response.status_code
    if status in _BUSY:
        return RemoteBusyError(f"the remote engine is busy ({status}): {message}", _retry_after(response))
    return RemoteError(f"the remote engine refused the request ({status}): {message}", status)


def _retry_after(response: httpx.Response) -> float:
    try:
        return max(1.0, float(response.headers.get("Retry-After", "")))
    except ValueError:  # none, or a date
        return 1.0


def _message(body: Any) -> str:
    """What an error's body says, in OpenAI's shape or another one."""
    found = body
    for name in ("error", "detail", "message"):
        if isinstance(found, dict) and name in found:
            found = found[name]
    text = found if isinstance(found, str) else json.dumps(found)
    return text[:_SHOWN]


def _failure(error: httpx.HTTPError) -> RemoteError:
    what = str(error) or type(error).__name__
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return RemoteError(f"the remote engine cannot be reached: {what}", unreachable=True)
    if isinstance(error, httpx.TimeoutException):
        return RemoteError(f"the remote engine was silent for too long ({type(error).__name__})")
    return RemoteError(f"the connection to the remote engine broke: {what}")
