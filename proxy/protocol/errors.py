"""The one error type. It is raised where the fact is known and turned into HTTP in one place, `api/errors.py`.

A message says what was wrong, what was expected and what to do; it never holds a credential or a prompt.
The body is the OpenAI API's: `{"error": {"message", "type", "param", "code"}}`.
"""

from typing import Any


class ApiError(Exception):
    """A failure that a client sees.

    `status` is the HTTP status, `type` and `code` the OpenAI API's strings, `param` the request field at fault (dotted
    path) or None, `headers` extra response headers such as `Retry-After`.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.code = code
        self.param = param
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class BadRequest(ApiError):
    """400: the request is at fault; `param` names the field."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(400, message, type="invalid_request_error", param=param, code=code)


class NotFound(ApiError):
    """404: an unknown model or route."""

    def __init__(self, message: str, *, param: str | None = None, code: str = "not_found") -> None:
        super().__init__(404, message, type="not_found_error", param=param, code=code)
