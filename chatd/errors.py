"""Every error that can reach a client, translated once; the three wire formats are made from the same Problem.

    exception ── problem_of ── Problem ──┬── problem+json (RFC 9457)   /api/v1 and everything else
                                         ├── OpenAI error object       /v1
                                         └── error frame               WebSocket

No text in here repeats what a client sent, except names that look like a parameter's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from engine.errors import EngineBroken, EngineError, EngineStopped, QueueFull, RequestError, RequestTooLong
from sessions import (
    BadCursor,
    ContextOverflow,
    IdempotencyConflict,
    InvalidInput,
    LogGone,
    NotFound,
    SessionBusy,
    SessionsError,
    StorageBusy,
)

_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,39}")
_RETRY_LOADING_S = 2


class ChatdError(Exception):
    """The base of what chatd/ itself raises on the way to a client."""


class ModelLoading(ChatdError):
    """The model is still being loaded."""


class ModelUnavailable(ChatdError):
    """The model could not be loaded; the server is about to stop."""


class UnsupportedParameter(ChatdError):
    """A parameter that would change the answer and is not built. The name is shown, so it must be a plain one."""

    def __init__(self, name: str) -> None:
        self.name = name if _PLAIN_NAME.fullmatch(name) else "an unknown name"
        super().__init__(f"the parameter {self.name} is not supported")


class InvalidParameter(ChatdError):
    """A parameter of /v1 with a value that cannot be used."""

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        super().__init__(f"{name}: {reason}")


class ModelNotFound(ChatdError):
    """A request to /v1 names a model that is not served here."""

    def __init__(self, served: str, adapters: Sequence[str] = ()) -> None:
        names = ", ".join((f"{served}, also called default", *adapters))
        super().__init__(f"there is no such model; this server has {names}")


_FAILURES: Mapping[str, str] = {
    "shutdown": "the server is shutting down",
    "no_room": "the cache has no room for background work now",
    "no_candidate": "no token is left that the grammar, biases and penalties of the request allow",
}


class GenerationFailed(ChatdError):
    """The engine could not finish a completion; `code` is its own."""

    def __init__(self, code: str) -> None:
        self.code = code
        super().__init__(_FAILURES.get(code, "the model failed on this request"))

    @property
    def status(self) -> int:
        return {"shutdown": 503, "no_room": 503, "no_candidate": 400}.get(self.code, 500)


@dataclass(frozen=True, slots=True)
class FieldError:
    """One field that cannot be used; `field` is a dotted path of plain names."""

    field: str
    reason: str


@dataclass(frozen=True, slots=True)
class Problem:
    """An error as a client sees it. retry_after in seconds; set where trying again later makes sense."""

    status: int
    code: str
    detail: str
    retry_after: int | None = None
    errors: tuple[FieldError, ...] = ()
    param: str | None = None

    @property
    def retryable(self) -> bool:
        return self.retry_after is not None

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}

    def problem_json(self, request_id: str) -> dict[str, Any]:
        return {
            "type": f"urn:chatd:problem:{self.code}",
            "title": HTTPStatus(self.status).phrase,
            "status": self.status,
            "detail": self.detail,
            "code": self.code,
            "request_id": request_id,
            "errors": [{"field": error.field, "reason": error.reason} for error in self.errors],
        }

    def openai_json(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}

    def as_bad_request(self) -> Problem:
        """The same as OpenAI's interface says it, where all invalid requests are 400."""
        return replace(self, status=400, code="invalid_value")

    def frame_data(self) -> dict[str, Any]:
        return {"code": self.code, "message": self.detail, "retryable": self.retryable}


Translate = Callable[[Any], Problem]

_TRANSLATIONS: Mapping[type[Exception], Translate] = {
    NotFound: lambda e: Problem(404, "not_found", str(e)),
    SessionBusy: lambda e: Problem(409, "session_busy", str(e), retry_after=1),
    InvalidInput: lambda e: Problem(
        422, "invalid_input", str(e), errors=(FieldError(e.field, e.reason),), param=e.field
    ),
    ContextOverflow: lambda e: Problem(400, "context_length_exceeded", str(e)),
    IdempotencyConflict: lambda e: Problem(422, "idempotency_conflict", str(e)),
    LogGone: lambda e: Problem(410, "log_gone", str(e)),
    BadCursor: lambda e: Problem(400, "bad_cursor", str(e)),
    StorageBusy: lambda e: Problem(503, "storage_busy", str(e), retry_after=e.retry_after),
    SessionsError: lambda e: Problem(500, "internal_error", "something went wrong on the server"),
    RequestTooLong: lambda e: Problem(400, "context_length_exceeded", str(e), param="messages"),
    QueueFull: lambda e: Problem(503, "queue_full", str(e), retry_after=e.retry_after),
    EngineBroken: lambda e: Problem(503, "engine_failed", "the engine has failed: the server must be restarted"),
    EngineStopped: lambda e: Problem(503, "shutting_down", "the server is shutting down", retry_after=_RETRY_LOADING_S),
    RequestError: lambda e: Problem(400, "invalid_request", str(e)),
    EngineError: lambda e: Problem(500, "internal_error", "something went wrong on the server"),
    ModelLoading: lambda e: Problem(503, "model_loading", "the model is being loaded", retry_after=_RETRY_LOADING_S),
    ModelUnavailable: lambda e: Problem(503, "model_unavailable", "the model could not be loaded"),
    ModelNotFound: lambda e: Problem(404, "model_not_found", str(e), param="model"),
    UnsupportedParameter: lambda e: Problem(400, "unsupported_parameter", str(e), param=e.name),
    GenerationFailed: lambda e: Problem(e.status, e.code, str(e)),
    InvalidParameter: lambda e: Problem(400, "invalid_value", str(e), param=e.name),
}

_HTTP_CODES = {400: "bad_request", 404: "not_found", 405: "method_not_allowed", 413: "too_large"}


def problem_of(error: Exception) -> Problem:
    """The Problem for any exception; what nobody foresaw is an internal error that says nothing about itself."""
    if isinstance(error, RequestValidationError | ValidationError):
        return _validation_problem(error.errors())
    if isinstance(error, HTTPException):
        code = _HTTP_CODES.get(error.status_code, "http_error")
        detail = "the body is not valid JSON" if error.status_code == 400 else HTTPStatus(error.status_code).phrase
        return Problem(error.status_code, code, detail)
    for kind in type(error).__mro__:
        if kind in _TRANSLATIONS:
            return _TRANSLATIONS[kind](error)
    return Problem(500, "internal_error", "something went wrong on the server")


def _validation_problem(found: Sequence[Any]) -> Problem:
    if any(error["type"] == "json_invalid" for error in found):
        return Problem(400, "bad_request", "the body is not valid JSON")
    errors = tuple(_field_error(error) for error in found)
    detail = f"{errors[0].field}: {errors[0].reason}" if errors else "the request is not valid"
    return Problem(422, "invalid_input", detail, errors=errors, param=errors[0].field if errors else None)


def _field_error(error: Mapping[str, Any]) -> FieldError:
    loc = list(error["loc"])
    if loc and loc[0] in ("body", "query", "path", "header"):
        loc = loc[1:]
    if error["type"] == "extra_forbidden":
        reason = "there is no such field"
    elif error["type"] == "union_tag_invalid":
        reason = "there is no such type"  # pydantic's own words would repeat what was sent
    elif error["type"] == "string_unicode":
        reason = "must not contain lone surrogates"
    else:
        reason = str(error["msg"]).removeprefix("Value error, ")
    names = [str(part) for part in loc if isinstance(part, int) or _PLAIN_NAME.fullmatch(str(part))]
    return FieldError(".".join(names) or "body", reason)
