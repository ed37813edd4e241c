"""Errors of the HTTP API.

ApiError                 any error that a client sees
├── InvalidRequest   400 a field or the body is wrong
├── Unauthorized     401 no key or a wrong one
├── UnknownModel     404 no such model or adapter
├── Conflict         409 another call is at it
├── BodyTooLarge     413 the body is over the limit
├── SourceFailed     502 an adapter's source cannot be reached
├── Unavailable      503 starting, draining or overloaded: worth another try
├── NoAnswer         504 the engine takes too long over an operator's call
└── EngineDead       503 the engine has gone; this server ends
"""

from __future__ import annotations

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

_UNAVAILABLE = {"overloaded", "shutting_down"}
_UNAVAILABLE |= {f"adapter_{word}" for word in ("loading", "unavailable", "unloaded", "draining")}
_ROUTE_CODES = {404: "not_found", 405: "method_not_allowed"}


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """The inside of an error body."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """What every error response consists of."""

    error: ErrorDetail


class ApiError(Exception):
    """An error with everything that its response needs."""

    status = 500
    type = "server_error"
    code: str | None = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code if code is not None else type(self).code
        self.headers: dict[str, str] = {}

    @property
    def body(self) -> ErrorBody:
        """The JSON body."""
        detail = ErrorDetail(message=self.message, type=self.type, param=self.param, code=self.code)
        return ErrorBody(error=detail)

    def response(self) -> Response:
        """The HTTP response."""
        content = msgspec.json.encode(self.body)
        return Response(content, self.status, self.headers, "application/json")


class InvalidRequest(ApiError):
    """The request can never succeed as it stands."""

    status = 400
    type = "invalid_request_error"
    code = None


class Unauthorized(ApiError):
    """No key, or one that is not in the key file."""

    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.headers = {"www-authenticate": "Bearer"}


class UnknownModel(ApiError):
    """The model field names neither the base nor a registered adapter."""

    status = 404
    type = "invalid_request_error"
    code = "model_not_found"


class Conflict(ApiError):
    """Another call is changing the same thing."""

    status = 409
    type = "invalid_request_error"
    code = "conflict"


class BodyTooLarge(ApiError):
    """The body is longer than the server reads."""

    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class SourceFailed(ApiError):
    """Where an adapter should come from cannot be reached, or breaks off again and again."""

    status = 502
    type = "server_error"
    code = "source_failed"


class Unavailable(ApiError):
    """Not now; the same request may succeed later or elsewhere."""

    status = 503
    type = "service_unavailable"
    code = "overloaded"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.headers = {"retry-after": "1"}


class NoAnswer(ApiError):
    """The engine has not answered a call in time; it may still do what was asked."""

    status = 504
    type = "server_error"
    code = "no_answer"


class EngineDead(ApiError):
    """The engine process has ended or can no longer be understood."""

    status = 503
    type = "server_error"
    code = "engine_dead"


def failure(code: str, message: str, param: str | None) -> ApiError:
    """The error for what the engine reports in `Failed`, by its ``code``."""
    if code == "model_not_found":
        return UnknownModel(message, param=param or "model")
    if code == "invalid_request":
        return InvalidRequest(message, param=param)
    if code == "context_length_exceeded":
        return InvalidRequest(message, param=param, code=code)
    if code in _UNAVAILABLE:
        return Unavailable(message, code=code)
    if code == "engine_dead":
        return EngineDead(message)
    return ApiError(message, param=param, code=code)


def install_handlers(app: FastAPI) -> None:
    """Give every error of ``app``, the framework's own included, the one shape."""
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnect, _on_client_gone)
    app.add_exception_handler(Exception, _on_other_error)


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    shown = ApiError(
        f"{request.method} {request.url.path}: {error.detail}",
        code=_ROUTE_CODES.get(error.status_code, "http_error"),
    )
    shown.status = error.status_code
    shown.type = "invalid_request_error" if error.status_code < 500 else "server_error"
    shown.headers = dict(error.headers or {})
    return shown.response()


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody is left to read it


async def _on_other_error(request: Request, error: Exception) -> Response:
    return ApiError("internal error; the server's log has the details").response()
