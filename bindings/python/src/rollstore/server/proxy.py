"""One call, from an agent's request to its answer."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time

import aiohttp
from aiohttp import web

from rollstore import RollstoreError
from rollstore.server.engines import CHAT, Engines
from rollstore.server.errors import JSON, Refusal
from rollstore.server.metrics import Metrics
from rollstore.server.recording import Last, Prepared, Recorder, Workers
from rollstore.server.rewrite import Training, training
from rollstore.server.sessions import Call, Session, Sessions
from rollstore.server.settings import Settings

__all__ = ["Proxy", "gone"]

log = logging.getLogger("rollstore.server")

_SWEEP_SECONDS = 0.25
# A request of as many bytes is looked at in a thread.
_LARGE = 256 << 10
# What a passed-on answer says of itself; the rest of an engine's headers is between it and us.
_ANSWER_HEADERS = ("Content-Type", "Cache-Control", "Retry-After")


def _look(body: bytes, settings: Settings) -> tuple[Training, str]:
    """What is asked, and by what the same request is known when it comes again."""
    return training(body, settings), hashlib.blake2b(body, digest_size=16).hexdigest()


class Proxy:
    """Calls of agents."""

    def __init__(
        self,
        settings: Settings,
        sessions: Sessions,
        engines: Engines,
        recorder: Recorder,
        workers: Workers,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._sessions = sessions
        self._engines = engines
        self._recorder = recorder
        self._workers = workers
        self._metrics = metrics
        self._warned = False
        self._passing = 0  # evaluation calls that run

    @property
    def running(self) -> int:
        """Calls that run now."""
        return len(self._sessions.calls()) + self._passing

    # ------------------------------------------------------------ training

    async def chat(self, request: web.Request, session: Session) -> web.StreamResponse:
        """A call of any session."""
        body = await self._body(request)
        if session.evaluation:
            return await self._pass_on(request, session, body)
        if len(body) < _LARGE:
            asked, fingerprint = _look(body, self._settings)
        else:
            asked, fingerprint = await self._workers.run(_look, body, self._settings)
        call = Call(request, fingerprint)
        await session.claim(call)
        call.task = asyncio.ensure_future(self._run(session, call, asked))
        # Not the task's own last act: one that is cancelled before its first step has none.
        call.task.add_done_callback(lambda _: session.release(call))
        try:
            # The call outlives a handler that is cancelled: a reply that has come is stored whole.
            prepared = await asyncio.shield(call.task)
        except asyncio.CancelledError:
            if call.reason is None:  # this handler is cancelled, by the server's end
                call.abort(Refusal(503, "draining", "the server is stopping", retry=True))
                raise
            raise call.reason from None
        return self._answer(prepared, asked)

    async def _body(self, request: web.Request) -> bytes:
        """As request.read(), which copies on the event loop: a request with pictures is large."""
        pieces: list[bytes] = []
        size = 0
        async for piece in request.content.iter_any():
            size += len(piece)
            if size > self._settings.body_limit:
                raise web.HTTPRequestEntityTooLarge(self._settings.body_limit, size)
            pieces.append(piece)
        self._metrics.request_bytes += size
        return b"".join(pieces) if size < _LARGE else await self._workers.run(b"".join, pieces)

    async def _run(self, session: Session, call: Call, asked: Training) -> Prepared:
        """Ask, and store. The session's next call begins when this is done."""
        reply = await self._engines.ask(session, asked.body)
        self._metrics.engine.add(reply.seconds)
        self._metrics.reply_bytes += sum(map(len, reply.pieces))
        if call.is_gone():
            raise gone()
        call.storing = True
        return await self._store(session, call, reply.pieces, asked)

    async def _store(
        self, session: Session, call: Call, pieces: list[bytes], asked: Training
    ) -> Prepared:
        before = Last(session.turn_count, session.fingerprint, session.digest)
        try:
            prepared, seconds = await self._recorder.record(
                session.id, before, call.fingerprint, pieces, asked
            )
        except RollstoreError as error:
            log.error("session %s: storing failed: %s", session.id, error.message)
            raise Refusal(500, "store", f"storing the turn failed: {error.message}") from None
        session.turn_count = prepared.turn + 1
        session.tokens += prepared.tokens
        session.fingerprint, session.digest = call.fingerprint, prepared.digest
        self._count(prepared, seconds)
        if call.is_gone():
            await self._take_back(session, before, prepared)
            raise gone()
        return prepared

    async def _take_back(self, session: Session, before: Last, prepared: Prepared) -> None:
        """The agent closed its connection before the answer: it never saw the turn."""
        await self._sessions.drop_turns(session, prepared.turn)
        if not prepared.replaces:
            session.fingerprint, session.digest = before.fingerprint, before.digest
        self._metrics.dropped_turns += 1

    def _count(self, prepared: Prepared, seconds: float) -> None:
        metrics = self._metrics
        metrics.tokens += prepared.tokens
        metrics.prompt_tokens += prepared.prompt_tokens
        metrics.replaced_turns += prepared.replaces
        metrics.decode.add(prepared.decode_seconds)
        metrics.commit.add(seconds)
        if prepared.prompt_tokens == 0:
            metrics.turns_without_prompt += 1
            if not self._warned:
                self._warned = True
                log.warning(
                    "the engine does not say its prompts' token ids (return_prompt_token_ids): "
                    "turns are stored without a prompt, and no samples can be made of them"
                )

    def _answer(self, prepared: Prepared, asked: Training) -> web.Response:
        headers = {"x-rollstore-turn": str(prepared.turn)}
        if asked.stream:
            headers["Content-Type"] = "text/event-stream; charset=utf-8"
            headers["Cache-Control"] = "no-cache"
        else:
            headers["Content-Type"] = JSON
        self._metrics.answer_bytes += len(prepared.answer)
        return web.Response(body=prepared.answer, headers=headers)

    # ------------------------------------------------------------ passed through

    async def _pass_on(
        self, request: web.Request, session: Session, body: bytes
    ) -> web.StreamResponse:
        """An evaluation call: the request and the answer as they are, piece by piece."""
        if session.ending:
            raise Refusal(409, "ended", "the session has ended", retry=False)
        url = self._engines.of(session).url + CHAT
        self._passing += 1
        try:
            return await self._relay(request, "POST", url, body)
        finally:
            self._passing -= 1

    async def models(self, request: web.Request, session: Session) -> web.StreamResponse:
        """The engine's list of models, which some agents ask for first."""
        url = self._engines.of(session).url + "/v1/models"
        return await self._relay(request, "GET", url, None)

    async def _relay(
        self, request: web.Request, method: str, url: str, body: bytes | None
    ) -> web.StreamResponse:
        response: web.StreamResponse | None = None
        try:
            async with self._engines.client.request(
                method, url, data=body, allow_redirects=False
            ) as reply:
                if not (reply.status == 200 or 400 <= reply.status < 600):
                    message = f"the engine answered with status {reply.status}"
                    raise Refusal(502, "engine_error", message, retry=False)
                headers = {n: reply.headers[n] for n in _ANSWER_HEADERS if n in reply.headers}
                response = web.StreamResponse(status=reply.status, headers=headers)
                # Of a compressed body, which was not asked for, the length is another one here.
                if reply.content_length is not None and "Content-Encoding" not in reply.headers:
                    response.content_length = reply.content_length
                await response.prepare(request)
                async for piece in reply.content.iter_any():
                    self._metrics.answer_bytes += len(piece)
                    await response.write(piece)
                await response.write_eof()
                return response
        except (aiohttp.ClientError, TimeoutError) as error:
            if response is None or not response.prepared:
                raise self._relay_refusal(error) from None
            # The agent has a part of an answer: only a connection that breaks says that.
            if request.transport is not None:
                request.transport.abort()
            return response

    def _relay_refusal(self, error: Exception) -> Refusal:
        if isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError)):
            return Refusal(502, "engine_unreachable", "the engine cannot be reached", retry=True)
        if isinstance(error, TimeoutError):
            message = f"the engine gave no reply within {self._settings.timeout:g} s"
            return Refusal(504, "engine_timeout", message, retry=False)
        message = f"the engine's reply broke off: {type(error).__name__}"
        return Refusal(502, "engine_broke_off", message, retry=True)

    # ------------------------------------------------------------ beside the calls

    async def sweep(self) -> None:
        """For ever: stop asking engines for agents that are gone."""
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            for _, call in self._sessions.calls():
                if call.is_gone():
                    call.abort(gone())

    async def watch_loop(self) -> None:
        """For ever: how late the event loop wakes up."""
        pause = 0.02
        while True:
            began = time.perf_counter()
            await asyncio.sleep(pause)
            self._metrics.loop_lag.add(max(time.perf_counter() - began - pause, 0.0))

    def abort_all(self) -> None:
        """At the end of draining."""
        for _, call in self._sessions.calls():
            call.abort(Refusal(503, "draining", "the server is stopping", retry=True))


def gone() -> Refusal:
    return Refusal(499, "aborted", "the agent closed its connection", retry=False)
