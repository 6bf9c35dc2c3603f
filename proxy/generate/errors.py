"""What can go wrong between the proxy and an engine: each kind with a type, a status, and the engine's name.

The name is the engine's URL, which never holds credentials. Only after an `EngineUnreachable` is it certain that no
event had reached the sink, so that another engine may be asked without the client seeing it.
"""

from proxy.protocol.errors import ApiError, BadRequest


class EngineError(ApiError):
    """An engine's failure. 502: it answered wrongly; 503: it cannot be reached or is too busy; 504: it is too slow."""

    def __init__(self, engine: str, message: str, *, type: str, status: int = 502) -> None:
        super().__init__(status, f"engine {engine}: {message}", type=type, code=type)
        self.engine = engine


class EngineUnreachable(EngineError):
    """Nothing came: connection refused, or lost before the first token."""

    def __init__(self, engine: str, message: str) -> None:
        super().__init__(engine, message, type="engine_unreachable", status=503)


class EngineTimeout(EngineError):
    """Silent for too long; which limit it was stands in the message."""

    def __init__(self, engine: str, message: str) -> None:
        super().__init__(engine, message, type="engine_timeout", status=504)


class EngineDisconnected(EngineError):
    """The response broke off: the connection was lost, or ended, before every choice had finished."""

    def __init__(self, engine: str, message: str) -> None:
        super().__init__(engine, message, type="engine_disconnected")


class EngineProtocolError(EngineError):
    """The engine said something that its protocol does not have."""

    def __init__(self, engine: str, message: str) -> None:
        super().__init__(engine, message, type="engine_protocol_error")


class EngineFailed(EngineError):
    """The engine reported an error of its own, as an HTTP status or in the stream."""

    def __init__(self, engine: str, message: str, *, status: int = 502) -> None:
        super().__init__(engine, message, type="engine_error", status=status)


class EngineRefused(BadRequest):
    """400: the engine says that the request is at fault."""

    def __init__(self, engine: str, message: str, *, param: str | None) -> None:
        super().__init__(f"engine {engine} refused the request: {message}", param=param, code="engine_refused")
        self.engine = engine
