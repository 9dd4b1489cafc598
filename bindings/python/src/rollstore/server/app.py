"""Routes, and what is checked before them."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import math
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

from aiohttp import web

import rollstore
from rollstore import HeldError, RollstoreError, Store
from rollstore.server.engines import Engines
from rollstore.server.errors import JSON, Refusal, error_response
from rollstore.server.journal import Journal
from rollstore.server.metrics import Metrics
from rollstore.server.proxy import Proxy, gone
from rollstore.server.recording import Recorder, Workers
from rollstore.server.sessions import Session, Sessions
from rollstore.server.settings import Settings, is_loopback

__all__ = ["Server"]

log = logging.getLogger("rollstore.server")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Middleware(Protocol):
    """What aiohttp calls with every request."""

    def __call__(self, request: web.Request, handler: Handler) -> Awaitable[web.StreamResponse]: ...


_STATUSES = ("completed", "truncated", "aborted", "failed")
_CONTROL_LIMIT = 1 << 16  # bytes of a request about a session
_INT64 = 1 << 63


class Server:
    """What the routes share."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.draining = False
        self.app = web.Application(
            client_max_size=settings.body_limit, middlewares=[self._outermost]
        )
        self.app.cleanup_ctx.append(self._life)
        self.app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/metrics", self._metrics_text),
                web.post("/sessions", self._create),
                web.get("/sessions/{id}", self._show),
                web.delete("/sessions/{id}", self._drop),
                web.post("/sessions/{id}/end", self._end),
                web.post("/sessions/{id}/v1/chat/completions", self._chat),
                web.get("/sessions/{id}/v1/models", self._models),
            ]
        )

    # ------------------------------------------------------------ beginning and end

    async def _life(self, _: web.Application) -> AsyncIterator[None]:
        settings = self.settings
        self.store: Store = rollstore.open(
            settings.store, "c", capacity=settings.capacity, durability=settings.durability
        )
        path = settings.journal or os.path.join(settings.store, "server.journal")
        try:
            self.journal = Journal(path)
        except BaseException:
            self.store.close()
            raise
        self.workers = Workers(settings.threads)
        self.engines = Engines(settings, self.metrics)
        self.sessions = Sessions(self.store, self.journal, self.engines, self.workers, self.metrics)
        recorder = Recorder(self.store, self.journal, self.workers, settings)
        self.proxy = Proxy(
            settings, self.sessions, self.engines, recorder, self.workers, self.metrics
        )
        beside = [
            asyncio.ensure_future(self.proxy.sweep()),
            asyncio.ensure_future(self.proxy.watch_loop()),
        ]
        yield
        for task in beside:
            task.cancel()
        await self.drain(0.0)
        await self.engines.close()
        self.workers.close()
        self.journal.close()
        self.store.close()

    async def drain(self, seconds: float) -> None:
        """Take no new calls, and wait for those that run; after `seconds` they are aborted, but
        for those that are being stored."""
        self.draining = True
        until = time.monotonic() + seconds
        while self.proxy.running and time.monotonic() < until:
            await asyncio.sleep(0.02)
        self.proxy.abort_all()
        for _, call in self.sessions.calls():
            await call.done.wait()

    # ------------------------------------------------------------ every request

    @property
    def _outermost(self) -> Middleware:
        @web.middleware
        async def outermost(request: web.Request, handler: Handler) -> web.StreamResponse:
            began = time.perf_counter()
            try:
                self._check(request)
                response = await handler(request)
            except Refusal as refusal:
                response = self._refused(refusal)
            except web.HTTPException as error:
                response = self._refused(_of_http(error, request))
            except RollstoreError as error:
                log.error("%s %s: %s", request.method, request.path, error.message)
                response = self._refused(Refusal(500, "store", error.message))
            except asyncio.CancelledError:
                raise
            except ConnectionError:  # while its body was read: nobody reads the answer
                response = self._refused(gone())
            except OSError as error:
                log.error("%s: %s", request.method, error)
                message = f"the session server's journal: {error.strerror}"
                response = self._refused(Refusal(503, "journal", message, retry=True))
            except Exception:
                log.exception("%s: a fault of the session server", request.method)
                response = self._refused(Refusal(500, "internal", "a fault of the session server"))
            self._log(request, response, time.perf_counter() - began)
            return response

        return outermost

    def _refused(self, refusal: Refusal) -> web.Response:
        # Its frames hold the call, and the call's reply, and are held by it through these.
        refusal.__traceback__ = refusal.__context__ = None
        self.metrics.refusal(refusal.kind)
        return error_response(refusal)

    def _log(self, request: web.Request, response: web.StreamResponse, seconds: float) -> None:
        """One line, of which nothing is a secret: no headers, no texts, no query."""
        if self.settings.log_calls:
            path, size = request.rel_url.raw_path, response.content_length or 0
            log.info(
                "%s %s %d %d bytes %.1f ms",
                request.method,
                path,
                response.status,
                size,
                seconds * 1e3,
            )

    # ------------------------------------------------------------ checks

    def _check(self, request: web.Request) -> None:
        self._check_host(request)
        if request.path != "/health":
            self._check_token(request)
        if request.method == "POST" and request.body_exists and request.content_type != JSON:
            # Pages in a browser cannot send this type to other hosts without asking.
            message = "the body's Content-Type must be application/json"
            raise Refusal(415, "content_type", message, retry=False)
        if "Content-Encoding" in request.headers:
            raise Refusal(415, "content_encoding", "the body must not be compressed", retry=False)

    def _check_host(self, request: web.Request) -> None:
        """Where only this host is served, a page whose name was pointed here is not."""
        if not self.settings.loopback:
            return
        try:
            name = urlsplit("//" + request.headers.get("Host", "")).hostname or ""
        except ValueError:
            name = ""
        if not is_loopback(name) and name not in self.settings.allow_hosts:
            message = "this server is not called by that name here (--allow-host)"
            raise Refusal(421, "host", message, retry=False)

    def _check_token(self, request: web.Request) -> None:
        """The server's token opens everything; a session's key its calls and its state."""
        token = self.settings.token
        if token is None:
            return
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        allowed = [token]
        session_id = request.match_info.get("id")
        if session_id is not None and self._is_agents(request):
            allowed.append(session_key(token, session_id))
        given_bytes = _bytes(given.strip())
        found = [hmac.compare_digest(given_bytes, one.encode()) for one in allowed]
        if scheme.lower() != "bearer" or not any(found):
            raise Refusal(401, "token", "no or a wrong bearer token", retry=False)

    def _is_agents(self, request: web.Request) -> bool:
        handler = request.match_info.handler
        return handler in (self._chat, self._models, self._show)

    # ------------------------------------------------------------ sessions

    async def _create(self, request: web.Request) -> web.Response:
        self._check_running()
        given = await _object(request, ("id", "group", "index", "evaluation"))
        session_id = given.get("id")
        evaluation = given.get("evaluation")
        if session_id is not None and not isinstance(session_id, str):
            raise _bad("id", "a string is needed")
        if evaluation is not None and not isinstance(evaluation, bool):
            raise _bad("evaluation", "true or false is needed")
        session, new = await self.sessions.create(
            session_id, bool(evaluation), _integer(given, "group"), _integer(given, "index")
        )
        shown = self._shown(session)
        base = f"{request.scheme}://{request.host}/sessions/{quote(session.id, safe='')}/v1"
        shown["base_url"] = base
        if self.settings.token is not None:
            shown["api_key"] = session_key(self.settings.token, session.id)
        return web.json_response(shown, status=201 if new else 200)

    async def _show(self, request: web.Request) -> web.Response:
        session_id = self.sessions.check_id(request.match_info["id"])
        found = await self.sessions.find(session_id)
        if isinstance(found, Session):
            return web.json_response(self._shown(found))
        ended = self.sessions.ended(session_id, found)
        return web.json_response({"id": session_id, "state": "ended", **ended})

    def _shown(self, session: Session) -> dict[str, Any]:
        return {
            "id": session.id,
            "state": "open",
            "evaluation": session.evaluation,
            "group": session.group,
            "index": session.index,
            "turns": session.turn_count,
            "tokens": session.tokens,
            "running": session.call is not None,
        }

    async def _end(self, request: web.Request) -> web.Response:
        given = await _object(request, ("status", "reward", "group", "index", "replace"))
        status = given.get("status", "completed")
        if status not in _STATUSES:
            raise _bad("status", "one of " + ", ".join(_STATUSES) + " is needed")
        outcome: dict[str, Any] = {"status": status, "reward": _reward(given)}
        for name in ("group", "index"):
            if given.get(name) is not None:
                outcome[name] = _integer(given, name)
        session_id = request.match_info["id"]
        ended = await self.sessions.end(session_id, outcome, given.get("replace") is True)
        return web.json_response({"id": session_id, "state": "ended", **ended})

    async def _drop(self, request: web.Request) -> web.Response:
        session_id = request.match_info["id"]
        try:
            turns = await self.sessions.drop(session_id)
        except HeldError as error:
            raise Refusal(409, "held", error.message, retry=False) from None
        return web.json_response({"id": session_id, "state": "dropped", "turns": turns})

    # ------------------------------------------------------------ calls

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        kind, outcome = "unknown", "refused"
        try:
            self._check_running()
            session = await self.sessions.get(request.match_info["id"])
            kind = "evaluation" if session.evaluation else "training"
            response = await self.proxy.chat(request, session)
            outcome = "answered" if response.status == 200 else "passed"
            return response
        except Refusal as refusal:
            outcome = refusal.kind
            raise
        finally:
            self.metrics.call(kind, outcome)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._check_running()
        return await self.proxy.models(request, await self.sessions.get(request.match_info["id"]))

    def _check_running(self) -> None:
        if self.draining:
            raise Refusal(503, "draining", "the server is stopping", retry=True)

    # ------------------------------------------------------------ looking after it

    async def _health(self, _: web.Request) -> web.Response:
        engines = self.engines.all
        shown = {
            "status": "draining" if self.draining else "ok",
            "version": rollstore.__version__,
            "engines": len(engines),
            "engines_up": sum(not engine.is_down() for engine in engines),
            "running": self.proxy.running,
        }
        return web.json_response(shown, status=503 if self.draining else 200)

    async def _metrics_text(self, _: web.Request) -> web.Response:
        stat = await self.workers.run(self.store.stat)
        engines = self.engines.all
        gauges: dict[str, tuple[str, float]] = {
            "open_sessions": ("Sessions that take calls.", len(self.sessions.open)),
            "running_calls": ("Calls that run now.", self.proxy.running),
            "engines": ("Engines.", len(engines)),
            "engines_up": (
                "Engines that are not left alone.",
                sum(not e.is_down() for e in engines),
            ),
            "store_capacity_bytes": ("The store's capacity.", stat.capacity_size),
            "store_used_bytes": ("Pages in use.", stat.used_size),
            "store_free_bytes": ("Pages that the next writes can take.", stat.free_size),
            "store_pinned_bytes": ("Freed pages that a snapshot holds.", stat.pinned_size),
            "store_open_sessions": ("The store's open sessions.", stat.open_count),
            "store_sealed_sessions": ("The store's sealed sessions.", stat.sealed_count),
            "store_turns": ("Turns stored now.", stat.turn_count),
        }
        return web.Response(
            body=self.metrics.text(gauges).encode(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )


def _bytes(text: str) -> bytes:
    """Of a header or a path, in which aiohttp keeps what is not UTF-8 as surrogates."""
    return text.encode("utf-8", "surrogateescape")


def session_key(token: str, session_id: str) -> str:
    """What an agent may know instead of the server's token: it opens one session's calls."""
    message = b"rollstore session " + _bytes(session_id)
    digest = hmac.new(token.encode(), message, hashlib.sha256).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def _bad(param: str, message: str) -> Refusal:
    return Refusal(400, "argument", f"{param}: {message}", param=param, retry=False)


def _of_http(error: web.HTTPException, request: web.Request) -> Refusal:
    """aiohttp's own refusals, in the shape of the others."""
    if error.status == 413:
        message = "the request is larger than the server takes (--body-limit)"
        return Refusal(413, "body_limit", message, retry=False)
    if error.status == 404 and "/v1/" in request.path:
        message = "only /v1/chat/completions is recorded here, and /v1/models passed on"
        return Refusal(404, "not_found", message, retry=False)
    return Refusal(error.status, "not_found", error.reason, retry=False)


async def _object(request: web.Request, names: tuple[str, ...]) -> dict[str, Any]:
    """The body's JSON object, {} where there is none."""
    body = await request.read()
    if len(body) > _CONTROL_LIMIT:
        raise Refusal(413, "body_limit", "a request about a session is short", retry=False)
    if not body.strip():
        return {}
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        raise _bad("body", "it is not JSON") from None
    if not isinstance(given, dict):
        raise _bad("body", "an object is needed")
    for name in given:
        if name not in names:
            raise _bad(str(name)[:64], "unknown here; there are " + ", ".join(names))
    return given


def _integer(given: dict[str, Any], name: str) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not -_INT64 < value < _INT64:
        raise _bad(name, "a 64-bit integer is needed")
    return int(value)


def _reward(given: dict[str, Any]) -> float | None:
    value = given.get("reward")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _bad("reward", "a number is needed")
    try:
        reward = float(value)
    except OverflowError:
        reward = math.inf
    if not math.isfinite(reward):
        raise _bad("reward", "a finite number is needed")
    return reward
