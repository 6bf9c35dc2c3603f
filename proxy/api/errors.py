"""Errors into HTTP, in one middleware: whatever a handler raises becomes `{"error": {...}}` with the right status.

Also gives every response its `x-request-id`: the client's own, or a new one.
"""

import logging
from collections.abc import Awaitable, Callable

import orjson
from aiohttp import web

from proxy.api.requests import client_request_id, new_request_id
from proxy.protocol.errors import ApiError, BadRequest, NotFound

logger = logging.getLogger("proxy.api")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
REQUEST_ID = web.RequestKey("request_id", str)


STOPPING = ApiError(
    503,
    "the server is stopping and takes or finishes no more",
    type="service_unavailable",
    headers={"Retry-After": "1"},
)


def reported(error: Exception, request_id: str) -> ApiError:
    """What the client is told of a failure, with a line in the log where it is not the client's own.

    Of a fault of ours the client gets the id that the log has the traceback under, and nothing else.
    """
    if not isinstance(error, ApiError):
        logger.error("request %s failed", request_id, exc_info=error)
        message = f"internal error; the log has it under the request id {request_id}"
        return ApiError(500, message, type="internal_error")
    if error.status >= 500:
        logger.warning("request %s: %s: %s", request_id, error.type, error.message)
    return error


def json_error(error: ApiError) -> web.Response:
    return web.Response(
        status=error.status, body=orjson.dumps(error.body()), content_type="application/json", headers=error.headers
    )


def _http_error(error: web.HTTPException, request: web.Request) -> ApiError:
    """aiohttp's own refusals: no such route, a method that a route does not have."""
    if isinstance(error, web.HTTPNotFound):
        return NotFound(f"there is nothing at {request.method} {request.path}")
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"{request.path} takes {allowed}, not {request.method}"
        return ApiError(405, message, type="invalid_request_error", headers={"Allow": allowed})
    return ApiError(error.status, error.reason, type="invalid_request_error" if error.status < 500 else "server_error")


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    request[REQUEST_ID] = request_id = client_request_id(request) or new_request_id()
    try:
        response = await handler(request)
    except web.HTTPException as error:
        response = json_error(_http_error(error, request))
    except web.RequestPayloadError as error:
        response = json_error(BadRequest(f"the body cannot be read: {error}"))
        response.force_close()  # where it ends is not known
    except Exception as error:
        response = json_error(reported(error, request_id))
    if not response.prepared:
        response.headers["x-request-id"] = request_id
    return response
