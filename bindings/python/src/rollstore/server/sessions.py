"""What the server knows of each session, and the one call that it may have at a time."""

from __future__ import annotations

import asyncio
import re
import secrets
from typing import Any

from aiohttp import web

from rollstore import AlignmentError, NotFoundError, SessionInfo, Store
from rollstore.server.engines import Engine, Engines
from rollstore.server.errors import Refusal
from rollstore.server.journal import ENDED_MAX, Journal, Kept
from rollstore.server.metrics import Metrics
from rollstore.server.recording import Workers, prompt_digest

__all__ = ["Call", "Session", "Sessions"]

# What is safe in a path, once percent-encoded, and in a log.
_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@+=,/~-]{0,255}")


class Call:
    """A call while it runs."""

    __slots__ = ("done", "fingerprint", "reason", "request", "storing", "task")

    def __init__(self, request: web.Request, fingerprint: str) -> None:
        self.request = request
        self.fingerprint = fingerprint
        self.task: asyncio.Task[Any] | None = None
        self.storing = False  # the reply is there: it is stored now, whatever happens
        self.reason: Refusal | None = None
        self.done = asyncio.Event()

    def is_gone(self) -> bool:
        """Has the agent closed its connection?"""
        transport = self.request.transport
        return transport is None or transport.is_closing()

    def abort(self, reason: Refusal) -> None:
        """Stop asking the engine; a call that is storing goes on to its end."""
        if self.task is not None and not self.storing and self.reason is None:
            self.reason = reason
            self.task.cancel()


class Session:
    """An open session. turn_count is the store's; fingerprint and digest are of the last turn's
    request and its prompt, by which a retry of it is known."""

    __slots__ = (
        "call",
        "digest",
        "ending",
        "engine",
        "evaluation",
        "fingerprint",
        "group",
        "id",
        "index",
        "lock",
        "tokens",
        "turn_count",
    )

    def __init__(self, session_id: str, evaluation: bool, group: int | None, index: int | None):
        self.id = session_id
        self.evaluation = evaluation
        self.group = group
        self.index = index
        self.turn_count = 0
        self.tokens = 0
        self.fingerprint: str | None = None
        self.digest: str | None = None
        self.engine: Engine | None = None
        self.call: Call | None = None
        self.ending = False
        self.lock = asyncio.Lock()  # of ending and dropping

    async def claim(self, call: Call) -> None:
        """Make `call` the session's. A session is one sequence, so it has one call at a time: a
        second one is refused, unless the first one's agent is gone or it is the same request
        again, which then takes its place."""
        while self.call is not None:
            other = self.call
            if not other.is_gone() and other.fingerprint != call.fingerprint:
                message = "another call of this session is running: one at a time"
                raise Refusal(409, "concurrent_call", message, retry=True)
            other.abort(Refusal(409, "superseded", "the same request came again", retry=False))
            await other.done.wait()
        if self.ending:
            raise Refusal(409, "ended", "the session has ended", retry=False)
        self.call = call

    def release(self, call: Call) -> None:
        """The call is over: the next one may begin. A failed task has its exception, and that one
        the frames that know the call: a ring, with the reply in it, for the collector to find."""
        self.call = None
        call.task = None
        call.done.set()

    async def stop_call(self) -> None:
        """No more calls; the running one is aborted, or waited for when it is storing."""
        self.ending = True
        while self.call is not None:
            self.call.abort(Refusal(409, "ended", "the session was ended", retry=False))
            await self.call.done.wait()

    def restore(self, kept: Kept) -> None:
        """What the journal says of the last turn, if that turn was stored."""
        if kept.turn == self.turn_count - 1:
            self.fingerprint = kept.fingerprint
            self.digest = kept.digest or self.digest


class Sessions:
    """All sessions that this server serves."""

    def __init__(
        self, store: Store, journal: Journal, engines: Engines, workers: Workers, metrics: Metrics
    ) -> None:
        self.open: dict[str, Session] = {}
        self._store = store
        self._journal = journal
        self._engines = engines
        self._workers = workers
        self._metrics = metrics
        self._locks: dict[str, asyncio.Lock] = {}

    # ------------------------------------------------------------ ids

    def check_id(self, session_id: str) -> str:
        if not _ID.fullmatch(session_id):
            message = (
                "a session id is 1 to 256 of A-Z a-z 0-9 and _.:@+=,/~-, and begins with a letter, "
                "a digit or _"
            )
            raise Refusal(400, "session_id", message, param="id", retry=False)
        return session_id

    # ------------------------------------------------------------ finding

    async def create(
        self, session_id: str | None, evaluation: bool, group: int | None, index: int | None
    ) -> tuple[Session, bool]:
        """A new session, and True; or the one that was opened by the same request, and False."""
        if session_id is None:
            return self._new(secrets.token_hex(16), evaluation, group, index), True
        found = await self.find(self.check_id(session_id))
        if found is None and session_id not in self._journal.ended:
            return self._new(session_id, evaluation, group, index), True
        if isinstance(found, Session) and not found.ending:
            if (found.evaluation, found.group, found.index) == (evaluation, group, index):
                return found, False
        message = "there is a session of that id already: drop it first, or take another id"
        raise Refusal(409, "session_exists", message, param="id", retry=False)

    def _new(
        self, session_id: str, evaluation: bool, group: int | None, index: int | None
    ) -> Session:
        session = Session(session_id, evaluation, group, index)
        self._journal.opened(session_id, evaluation, group, index)
        self.open[session_id] = session
        return session

    async def find(self, session_id: str) -> Session | SessionInfo | None:
        """An open session, a sealed one's entry, or None. A session that the store or the journal
        has open, of before a restart, is taken up again."""
        session = self.open.get(session_id)
        if session is not None:
            return session
        lock = self._locks.setdefault(session_id, asyncio.Lock())
        try:
            async with lock:
                return self.open.get(session_id) or await self._take_up(session_id)
        finally:
            if not lock.locked():
                self._locks.pop(session_id, None)

    async def _take_up(self, session_id: str) -> Session | SessionInfo | None:
        info, digest = await self._workers.run(_look, self._store, session_id)
        if info is not None and info.state == "sealed":
            self._journal.sessions.pop(session_id, None)
            return info
        kept = self._journal.sessions.pop(session_id, None)
        if info is None and kept is None:
            return None
        kept = kept or Kept(False, None, None)
        session = Session(session_id, kept.evaluation, kept.group, kept.index)
        if info is not None:
            session.turn_count, session.tokens = info.turn_count, info.generated_count
            session.digest = digest
            session.restore(kept)
        self.open[session_id] = session
        return session

    async def get(self, session_id: str) -> Session:
        """An open session; Refusal for one that is not."""
        found = await self.find(self.check_id(session_id))
        if isinstance(found, Session):
            if found.ending:
                raise Refusal(409, "ended", "the session has ended", retry=False)
            return found
        if found is not None or session_id in self._journal.ended:
            raise Refusal(409, "ended", "the session has ended", retry=False)
        raise unknown()

    # ------------------------------------------------------------ ending

    async def end(self, session_id: str, outcome: dict[str, Any], replace: bool) -> dict[str, Any]:
        """Seal. The same outcome again is a success and changes nothing."""
        found = await self.find(self.check_id(session_id))
        if isinstance(found, Session):
            async with found.lock:
                if self.open.get(session_id) is found:
                    return await self._end_open(found, outcome)
        return await self._end_again(session_id, outcome, replace)

    async def _end_open(self, session: Session, outcome: dict[str, Any]) -> dict[str, Any]:
        await session.stop_call()
        outcome = with_defaults(outcome, session)
        stored = session.turn_count > 0 and not session.evaluation
        misaligned = None
        try:
            if stored:
                misaligned = await self._workers.run(_seal, self._store, session.id, outcome, False)
        except BaseException:
            session.ending = False
            raise
        ended: dict[str, Any] = {
            **outcome,
            "turns": session.turn_count,
            "tokens": session.tokens,
            "evaluation": session.evaluation,
            "stored": stored,
        }
        if misaligned is not None:
            self._metrics.misaligned_sessions += 1
            ended["misaligned"] = misaligned
        self._metrics.end(outcome["status"])
        self._forget(session)
        self._remember(session.id, ended)
        return ended

    async def _end_again(
        self, session_id: str, outcome: dict[str, Any], replace: bool
    ) -> dict[str, Any]:
        found = await self.find(session_id)
        ended = self.ended(session_id, found)
        outcome = {**{name: ended[name] for name in ("group", "index")}, **outcome}
        if all(ended[name] == value for name, value in outcome.items()):
            return ended
        if not replace or not isinstance(found, SessionInfo):
            message = "the session has ended with another outcome"
            raise Refusal(409, "ended", message, retry=False)
        await self._workers.run(_seal, self._store, session_id, outcome, True)
        ended = {**ended, **outcome}
        self._remember(session_id, ended)
        return ended

    def ended(self, session_id: str, found: Session | SessionInfo | None) -> dict[str, Any]:
        """How a session ended; Refusal for one that is not known."""
        ended = self._journal.ended.get(session_id)
        if ended is not None:
            return ended
        if not isinstance(found, SessionInfo):
            raise unknown()
        return ended_of(found)

    def _remember(self, session_id: str, ended: dict[str, Any]) -> None:
        self._journal.end(session_id, ended)
        self._journal.ended[session_id] = ended
        if len(self._journal.ended) > ENDED_MAX:
            del self._journal.ended[next(iter(self._journal.ended))]

    async def drop(self, session_id: str) -> int:
        """Delete the session, whatever its state; returns the number of its turns."""
        found = await self.find(self.check_id(session_id))
        if isinstance(found, Session):
            async with found.lock:
                await found.stop_call()
                if found.turn_count > 0:
                    await self._workers.run(self._store.restart, session_id, 0)
                turns = found.turn_count
                self._forget(found)
        elif found is not None:
            await self._workers.run(self._store.release, session_id)
            turns = found.turn_count
        else:
            if session_id not in self._journal.ended:
                raise unknown()
            turns = 0
        self._journal.drop(session_id)
        self._journal.ended.pop(session_id, None)
        self._metrics.end("dropped")
        return turns

    async def drop_turns(self, session: Session, turn: int) -> None:
        """Drop the open session's turns from `turn` on."""
        await self._workers.run(self._store.restart, session.id, turn)
        info, digest = await self._workers.run(_look, self._store, session.id)
        session.turn_count = 0 if info is None else info.turn_count
        session.tokens = 0 if info is None else info.generated_count
        session.fingerprint, session.digest = None, digest

    def _forget(self, session: Session) -> None:
        self._engines.leave(session)
        self.open.pop(session.id, None)

    # ------------------------------------------------------------ all of them

    def calls(self) -> list[tuple[Session, Call]]:
        """Running calls."""
        return [(s, s.call) for s in self.open.values() if s.call is not None]


def unknown() -> Refusal:
    return Refusal(404, "session", "there is no such session", retry=False)


def with_defaults(outcome: dict[str, Any], session: Session) -> dict[str, Any]:
    """Group and index as the session was opened with, unless the outcome says others."""
    return {"group": session.group, "index": session.index, **outcome}


def ended_of(info: SessionInfo) -> dict[str, Any]:
    """A sealed session's entry as `end` answers it."""
    return {
        "group": info.group_index,
        "index": info.index,
        "status": info.status,
        "reward": info.reward,
        "turns": info.turn_count,
        "tokens": info.generated_count,
        "evaluation": False,
        "stored": True,
    }


def _look(store: Store, session_id: str) -> tuple[SessionInfo | None, str | None]:
    """The store's entry, and the digest of the last turn's prompt."""
    with store.snapshot() as snapshot:
        try:
            session = snapshot.sessions[session_id]
        except NotFoundError:
            return None, None
        if session.state == "sealed":
            return session.info, None
        return session.info, prompt_digest(session.prompt(session.turn_count - 1).tobytes())


def _seal(store: Store, session_id: str, outcome: dict[str, Any], replace: bool) -> str | None:
    """Returns why no sample can be made of the session, or None."""
    store.seal(
        session_id,
        outcome["status"],
        reward=outcome["reward"],
        group_index=outcome["group"],
        index=outcome["index"],
        replace=replace,
    )
    return misalignment(store, session_id)


def misalignment(store: Store, session_id: str) -> str | None:
    """Why the session's prompts do not continue one another, or None when they do."""
    with store.snapshot() as snapshot:
        try:
            snapshot._measure([session_id])
        except AlignmentError as error:
            return error.message
        except NotFoundError:
            return None  # taken and released already
    return None
