"""The `openai` client with what only this server can do: control, branches, sessions. Needs the extra `client`."""

try:
    import openai as _openai
except ImportError as _error:
    raise ImportError("thinkfold.Client needs the package openai: pip install 'thinkfold[client]'") from _error

from thinkfold.client.asynchronous import AsyncBranch, AsyncClient, AsyncRunning, AsyncSession
from thinkfold.client.synchronous import Branch, Client, Running, Session
from thinkfold.client.values import Written

del _openai
__all__ = [
    "AsyncBranch",
    "AsyncClient",
    "AsyncRunning",
    "AsyncSession",
    "Branch",
    "Client",
    "Running",
    "Session",
    "Written",
]
