"""Refusals, in the shape in which OpenAI's API gives errors."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web

__all__ = ["Refusal", "engine_refusal", "error_response"]

JSON = "application/json"


class Refusal(Exception):
    """A request that gets an error.

    kind: counted by metrics, and the error's `code`.
    retry: may the same request succeed later? Clients that try again by themselves are told.
    """

    def __init__(
        self,
        status: int,
        kind: str,
        message: str,
        *,
        param: str | None = None,
        retry: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.param = param
        self.retry = retry

    def body(self) -> bytes:
        """The error as JSON."""
        error = {
            "message": self.message,
            "type": "invalid_request_error" if self.status < 500 else "server_error",
            "param": self.param,
            "code": self.kind,
        }
        return json.dumps({"error": error}).encode()


class EngineRefusal(Refusal):
    """An engine's own error, passed on with its status."""

    def __init__(self, status: int, message: str, body: bytes) -> None:
        super().__init__(status, "engine_error", message)
        self._body = body

    def body(self) -> bytes:
        """The engine's body where it has OpenAI's shape already."""
        return self._body


def engine_refusal(status: int, body: bytes) -> EngineRefusal:
    """From an engine's answer that is no 200."""
    # A redirect, say, is not followed, and is no error that agents know.
    told = status if 400 <= status < 600 else 502
    try:
        found: Any = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict) and isinstance(found.get("error"), dict):
        return EngineRefusal(told, str(found["error"].get("message")), body)
    message, error = body[:500].decode("utf-8", "replace"), {}
    if isinstance(found, dict):
        error = {name: found.get(name) for name in ("type", "param", "code")}
        said = found.get("message") or found.get("detail") or found.get("error")
        message = said if isinstance(said, str) else message
    shaped = {"type": "engine_error", "param": None, "code": "engine_error"}
    shaped.update({name: value for name, value in error.items() if value is not None})
    shaped["message"] = message or f"the engine answered with status {status}"
    return EngineRefusal(told, str(shaped["message"]), json.dumps({"error": shaped}).encode())


def error_response(refusal: Refusal) -> web.Response:
    """The answer that a refused request gets."""
    response = web.Response(status=refusal.status, body=refusal.body(), content_type=JSON)
    if refusal.retry is not None:
        # OpenAI's clients look at it before they try again by themselves.
        response.headers["x-should-retry"] = "true" if refusal.retry else "false"
    if refusal.retry:
        response.headers["Retry-After"] = "1"
    if refusal.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response
