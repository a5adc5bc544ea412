"""Errors a caller can meet.

ThinkfoldError
├── ParameterError      a request or configuration value is wrong (HTTP 400)
├── UnsupportedError    a value is understood but cannot be honoured here (HTTP 400)
├── CapacityError       the request can never fit the KV pool (HTTP 400)
├── NotFoundError       no such running response or handle (HTTP 404)
├── ConflictError       the response is not in a state for this (HTTP 409)
│   └── PositionError   a branch cannot be cut at this position (HTTP 409)
├── QueueFullError      the waiting queue is full, try again later (HTTP 429)
│   ├── SessionsFullError  all agent sessions that are kept are busy (HTTP 429)
│   └── RemoteBusyError    the engine behind this one is busy (HTTP 429)
├── RequestFailedError  this one request failed inside the engine (HTTP 500)
│   ├── RemoteError     the engine behind this one failed it (HTTP 502)
│   └── ReplicaLostError  the replica that ran it has gone (HTTP 503)
└── EngineDeadError     the engine has stopped (HTTP 503)
"""


class ThinkfoldError(Exception):
    """Base of every error that thinkfold raises on purpose."""


class ParameterError(ThinkfoldError, ValueError):
    """A value is wrong; `field` names the parameter as the user wrote it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.field, self.message)


class UnsupportedError(ParameterError):
    """A value is understood but cannot be honoured by this model or engine."""


class CapacityError(ParameterError):
    """The request can never fit; the message gives both numbers."""


class NotFoundError(ThinkfoldError):
    """There is no such running response, choice or handle, or it is somebody else's."""


class ConflictError(ThinkfoldError):
    """The response or handle is there, but not in a state in which this can be done."""


class PositionError(ConflictError):
    """A branch cannot be cut after `position` output tokens; `nearest` are those next to it where it can."""

    def __init__(self, position: int, nearest: tuple[int, ...]) -> None:
        where = " and ".join(map(str, nearest))
        super().__init__(f"position {position} cannot be gone back to; the nearest valid positions are {where}")
        self.position = position
        self.nearest = nearest

    def __reduce__(self) -> tuple[type, tuple[int, tuple[int, ...]]]:
        return type(self), (self.position, self.nearest)


class QueueFullError(ThinkfoldError):
    """The waiting queue is full; `retry_after` is in seconds."""

    def __init__(self, retry_after: float) -> None:
        super().__init__(f"the waiting queue is full, retry after {retry_after:.0f} s")
        self.retry_after = retry_after


class SessionsFullError(QueueFullError):
    """As many agent sessions as are kept at once are all busy."""

    def __init__(self, most: int, retry_after: float) -> None:
        ThinkfoldError.__init__(self, f"all {most} sessions are busy, retry after {retry_after:.0f} s")
        self.retry_after = retry_after


class RemoteBusyError(QueueFullError):
    """The engine behind this one takes no more requests now; `retry_after` is in seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        ThinkfoldError.__init__(self, message)
        self.retry_after = retry_after


class RequestFailedError(ThinkfoldError):
    """One request failed inside the engine; others go on."""


class RemoteError(RequestFailedError):
    """The engine behind this one failed the request or refused it, there with `status`; or cannot be reached."""

    def __init__(self, message: str, status: int | None = None, *, unreachable: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.unreachable = unreachable


class ReplicaLostError(RequestFailedError):
    """The replica that ran the request has gone, and parts of its reply may have been sent; it can be sent again."""


class EngineDeadError(ThinkfoldError):
    """The engine has stopped and will not answer again."""
