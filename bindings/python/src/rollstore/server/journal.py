"""What a store does not hold of a session, kept over a restart of the server.

A file of JSON lines beside the store's data: sessions that were opened (also those without a turn
yet), the request that a turn answers (so that a retry is known), and outcomes. Lines are appended
whole; a torn last one, of a server that was killed, is passed over. At the start the file is
written anew with what still matters.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from typing import Any

__all__ = ["Journal", "JournalHeld", "Kept"]

# Outcomes that are remembered for runners that say them again.
ENDED_MAX = 20_000


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


class Journal:
    """The file. `sessions` and `ended` are what was found in it. Any thread may append."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.sessions: dict[str, Kept] = {}
        self.ended: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._file = _open_held(path)
        self._read()
        self._rewrite()

    def opened(self, session: str, evaluation: bool, group: int | None, index: int | None) -> None:
        self._append(_opened(session, evaluation, group, index))

    def turn(self, session: str, turn: int, fingerprint: str, digest: str | None) -> None:
        """To be said before the turn is stored."""
        self._append(_turn(session, turn, fingerprint, digest))

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
            while data:
                data = data[os.write(self._file, data) :]

    def _read(self) -> None:
        with open(self.path, "rb") as file:
            for line in file:
                try:
                    self._take(json.loads(line))
                except (ValueError, KeyError, TypeError):
                    continue  # torn: what it was to say was not answered either

    def _take(self, line: dict[str, Any]) -> None:
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

    def _rewrite(self) -> None:
        """Write what still matters to a new file and take it in the old one's place."""
        lines: list[dict[str, Any]] = []
        for session, kept in self.sessions.items():
            group, index = kept.group, kept.index
            lines.append(_opened(session, kept.evaluation, group, index))
            if kept.fingerprint is not None:
                lines.append(_turn(session, kept.turn, kept.fingerprint, kept.digest))
        lines.extend(
            {"end": session, "outcome": outcome} for session, outcome in self.ended.items()
        )
        new = self.path + ".new"
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(b"".join(map(_line, lines)))
        held = self._file
        os.rename(new, self.path)
        self._file = _open_held(self.path)
        os.close(held)


def _opened(session: str, evaluation: bool, group: int | None, index: int | None) -> dict[str, Any]:
    return {"open": session, "evaluation": evaluation, "group": group, "index": index}


def _turn(session: str, turn: int, fingerprint: str, digest: str | None) -> dict[str, Any]:
    return {"turn": session, "n": turn, "request": fingerprint, "prompt": digest}


def _line(content: dict[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"


def _open_held(path: str) -> int:
    """The file, locked until it is closed or this process ends."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise JournalHeld(
            f"another server uses {path}: one server at a time serves a store's sessions; name "
            "another file with --journal for a second one"
        ) from None
    return file
