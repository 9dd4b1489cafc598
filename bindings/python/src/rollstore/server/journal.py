"""What a store does not hold of a session, kept over a restart of the server.

A file of JSON lines beside the store's data: sessions that were opened (also those without a turn
yet), the request that a turn answers (so that a retry is known), and outcomes. Lines are appended
whole; a torn last one, of a server that was killed, is passed over. At the start, and when it has
grown, the file is written anew with what still matters.
"""

from __future__ import annotations

import copy
import fcntl
import json
import os
import threading
from typing import Any

__all__ = ["Journal", "JournalHeld", "Kept"]

# Outcomes that are remembered for runners that say them again.
ENDED_MAX = 20_000
# Bytes of lines that do not matter any more, at least, before the file is written anew.
_SIZE_MIN = 8 << 20


class JournalHeld(RuntimeError):
    """Another server uses the journal."""


class Kept:
    """A session as the journal knows it."""

    __slots__ = ("digest", "evaluation", "fingerprint", "group", "index", "turn")

    def __init__(self, evaluation: bool, group: int | None, index: int | None) -> None:
        self.evaluation = evaluation
        self.group = group
        self.index = index
        self.turn = -1  # the last turn that was about to be stored
        self.fingerprint: str | None = None  # of the request it answers
        self.digest: str | None = None  # of that request's prompt


class _State:
    """What the lines of a journal come to."""

    def __init__(self) -> None:
        self.sessions: dict[str, Kept] = {}
        self.ended: dict[str, dict[str, Any]] = {}

    def take(self, line: dict[str, Any]) -> None:
        if "open" in line:
            kept = Kept(bool(line["evaluation"]), line["group"], line["index"])
            self.sessions[line["open"]] = kept
            self.ended.pop(line["open"], None)
        elif "turn" in line:
            kept = self.sessions.setdefault(line["turn"], Kept(False, None, None))
            kept.turn, kept.fingerprint, kept.digest = line["n"], line["request"], line["prompt"]
        elif "end" in line:
            self.sessions.pop(line["end"], None)
            self.ended[line["end"]] = line["outcome"]
            if len(self.ended) > ENDED_MAX:
                del self.ended[next(iter(self.ended))]
        elif "drop" in line:
            self.sessions.pop(line["drop"], None)
            self.ended.pop(line["drop"], None)

    def lines(self) -> list[dict[str, Any]]:
        """The shortest journal that comes to the same."""
        lines: list[dict[str, Any]] = []
        for session, kept in self.sessions.items():
            lines.append(_opened(session, kept.evaluation, kept.group, kept.index))
            if kept.fingerprint is not None:
                lines.append(_turn(session, kept.turn, kept.fingerprint, kept.digest))
        lines.extend(
            {"end": session, "outcome": outcome} for session, outcome in self.ended.items()
        )
        return lines


class Journal:
    """The file. `sessions` and `ended` are what was found in it. Any thread may append."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._state = _State()
        self._size = 0
        self._size_max = 0
        self._meanwhile: list[bytes] | None = None  # lines that came while it is written anew
        self._file = _open_held(path)
        self._read()
        self.sessions = copy.deepcopy(self._state.sessions)
        self.ended = dict(self._state.ended)
        self._rewrite()

    def opened(self, session: str, evaluation: bool, group: int | None, index: int | None) -> None:
        self._append(_opened(session, evaluation, group, index))

    def turn(self, session: str, turn: int, fingerprint: str, digest: str | None) -> None:
        """To be said before the turn is stored, and in a thread: now and then it takes long."""
        self._append(_turn(session, turn, fingerprint, digest))
        self._shorten()

    def end(self, session: str, outcome: dict[str, Any]) -> None:
        self._append({"end": session, "outcome": outcome})

    def drop(self, session: str) -> None:
        self._append({"drop": session})

    def close(self) -> None:
        with self._lock:
            os.close(self._file)
            self._file = -1

    def _append(self, line: dict[str, Any]) -> None:
        data = _line(line)
        with self._lock:
            _append_whole(self._file, data)
            self._state.take(line)
            self._size += len(data)
            if self._meanwhile is not None:
                self._meanwhile.append(data)

    def _read(self) -> None:
        with open(self.path, "rb") as file:
            for line in file:
                try:
                    self._state.take(json.loads(line))
                except (ValueError, KeyError, TypeError):
                    continue  # torn: what it was to say was not answered either

    def _shorten(self) -> None:
        with self._lock:
            if self._size <= self._size_max or self._meanwhile is not None:
                return
            self._meanwhile = []
        try:
            self._rewrite()
        except OSError:  # the old one goes on; once more when it has grown again
            with self._lock:
                self._size_max = self._size + _SIZE_MIN
        finally:
            with self._lock:
                self._meanwhile = None

    def _rewrite(self) -> None:
        """Write what still matters to a new file and take it in the old one's place. Others append
        to the old one meanwhile, and what they wrote goes into the new one at the end."""
        with self._lock:
            lines = self._state.lines()
        data = b"".join(map(_line, lines))
        new = self.path + ".new"
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        file = os.open(new, flags, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write(file, data)
            with self._lock:
                meanwhile = b"".join(self._meanwhile or ())
                _write(file, meanwhile)
                os.rename(new, self.path)
                self._file, file = file, self._file
                self._size = len(data) + len(meanwhile)
                self._size_max = 2 * len(data) + _SIZE_MIN
        finally:
            os.close(file)


def _opened(session: str, evaluation: bool, group: int | None, index: int | None) -> dict[str, Any]:
    return {"open": session, "evaluation": evaluation, "group": group, "index": index}


def _turn(session: str, turn: int, fingerprint: str, digest: str | None) -> dict[str, Any]:
    return {"turn": session, "n": turn, "request": fingerprint, "prompt": digest}


def _line(content: dict[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


def _append_whole(file: int, data: bytes) -> None:
    """Or nothing: what was written of a line would take the next one with it."""
    end = os.fstat(file).st_size
    try:
        _write(file, data)
    except OSError:
        os.ftruncate(file, end)
        raise


def _open_held(path: str) -> int:
    """The file, locked until it is closed or this process ends."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # It may be one in whose place its holder has just put another.
        if os.path.samestat(os.fstat(file), os.stat(path)):
            return file
    except BlockingIOError:
        pass
    except BaseException:
        os.close(file)
        raise
    os.close(file)
    raise JournalHeld(
        f"another server uses {path}: one server at a time serves a store's sessions; name "
        "another file with --journal for a second one"
    )
