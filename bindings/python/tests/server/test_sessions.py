"""Sessions from their opening to their end, and over a restart of the server."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from lab import WORDS, Lab, run

import rollstore
from rollstore.server.journal import Journal, JournalHeld


def test_opening(path: Path) -> None:
    async def main() -> None:
        async with Lab(path) as lab:
            answer = await lab.ask("POST", "/sessions")
            assert answer.status == 201
            assert len(answer.json["id"]) == 32
            assert answer.json["base_url"] == f"{lab.url}/sessions/{answer.json['id']}/v1"
            given = {"id": "swe-1/r 0", "group": 1}
            assert (await lab.ask("POST", "/sessions", given)).status == 400
            given = {"id": "swe-1/r0", "group": 1, "index": 2}
            answer = await lab.ask("POST", "/sessions", given)
            assert answer.json["base_url"].endswith("/sessions/swe-1%2Fr0/v1")
            # The same again, as after a lost answer; and another one of that id.
            assert (await lab.ask("POST", "/sessions", given)).status == 200
            answer = await lab.ask("POST", "/sessions", {**given, "index": 3})
            assert (answer.status, answer.error["code"]) == (409, "session_exists")
            shown = (await lab.ask("GET", "/sessions/swe-1%2Fr0")).json
            assert (shown["state"], shown["group"], shown["turns"]) == ("open", 1, 0)
            assert lab.store().stat().session_count == 0

    run(main)


def test_ending_twice_is_the_same_as_once(path: Path) -> None:
    async def main() -> None:
        async with Lab(path) as lab:
            session = await lab.open(group=4)
            await lab.chat(session)
            first = await lab.end(session, reward=1)
            assert (await lab.end(session, reward=1)).json == first.json
            assert (await lab.end(session, reward=1, group=4)).json == first.json
            other = await lab.end(session, reward=0)
            assert (other.status, other.error["code"]) == (409, "ended")
            assert (await lab.end(session, status="failed", reward=0, replace=True)).status == 200
            with lab.store().snapshot() as snapshot:
                entry = snapshot.sessions[session]
                assert (entry.status, entry.reward, entry.group_index) == ("failed", 0.0, 4)
            assert (await lab.chat(session)).error["code"] == "ended"
            assert (await lab.ask("GET", f"/sessions/{session}")).json["status"] == "failed"
            # Also when a trainer has taken and released it.
            lab.store().release(session)
            again = await lab.end(session, status="failed", reward=0)
            assert again.json["turns"] == 1

    run(main)


def test_a_session_without_turns_stores_nothing(path: Path) -> None:
    async def main() -> None:
        async with Lab(path) as lab:
            session = await lab.open()
            for _ in range(2):
                ended = await lab.end(session, status="aborted")
                assert (ended.status, ended.json["stored"]) == (200, False)
            assert lab.store().stat().session_count == 0

    run(main)


def test_dropping(path: Path) -> None:
    async def main() -> None:
        async with Lab(path) as lab:
            session = await lab.open(id="a")
            await lab.talk(session, 2)
            answer = await lab.ask("DELETE", "/sessions/a")
            assert answer.json == {"id": "a", "state": "dropped", "turns": 2}
            assert (await lab.ask("DELETE", "/sessions/a")).status == 404
            assert (await lab.ask("GET", "/sessions/a")).status == 404
            assert lab.store().stat().turn_count == 0
            # The id is free, and a sealed session can be dropped too, unless it is being read.
            await lab.open(id="a")
            await lab.chat("a")
            await lab.end("a")
            consumer = lab.store().consumer("trainer")
            leases = consumer.take(1, timeout=0)
            assert (await lab.ask("DELETE", "/sessions/a")).error["code"] == "held"
            place = None
            consumer.acknowledge(leases)
            place = consumer.place()
            consumer.commit(place)
            assert (await lab.ask("DELETE", "/sessions/a")).status == 200
            assert lab.store().stat().session_count == 0

    run(main)


@pytest.mark.parametrize(
    "outcome",
    [
        {"status": "done"},
        {"reward": "1"},
        {"reward": True},
        {"reward": 10**400},
        {"group": 1.5},
        {"index": 2**63},
        {"rewards": 1},
    ],
)
def test_outcomes_that_are_none(path: Path, outcome: dict[str, object]) -> None:
    async def main() -> None:
        async with Lab(path) as lab:
            session = await lab.open()
            await lab.chat(session)
            answer = await lab.end(session, **outcome)
            assert answer.status == 400
            assert answer.error["param"] == next(iter(outcome))
            nan = await lab.ask("POST", f"/sessions/{session}/end", b'{"reward": NaN}')
            assert nan.status == 400
            assert (await lab.ask("GET", f"/sessions/{session}")).json["state"] == "open"

    run(main)


def test_a_restart_changes_nothing(path: Path) -> None:
    async def main() -> None:
        async with Lab(path) as lab:
            session = await lab.open(group=9)
            empty = await lab.open(group=8)
            evaluation = await lab.open(evaluation=True)
            ended = await lab.open()
            await lab.chat(ended)
            await lab.end(ended, reward=2)
            messages = await lab.talk(session, 2)
            await lab.stop()
            await lab.start()
            # A retry of the last call, then the conversation goes on.
            lab.engine.salt = 1
            again = {**WORDS, "messages": messages[:-2]}
            answer = await lab.chat(session, again)
            assert answer.headers["x-rollstore-turn"] == "1"
            messages[-2]["content"] = answer.text
            answer = await lab.chat(session, {**WORDS, "messages": messages})
            assert answer.headers["x-rollstore-turn"] == "2"
            final = (await lab.end(session)).json
            assert (final["turns"], final["group"], "misaligned" in final) == (3, 9, False)
            assert (await lab.chat(empty)).headers["x-rollstore-turn"] == "0"
            assert (await lab.ask("GET", f"/sessions/{empty}")).json["group"] == 8
            await lab.chat(evaluation)
            assert (await lab.ask("GET", f"/sessions/{evaluation}")).json["turns"] == 0
            assert (await lab.end(ended, reward=2)).json["turns"] == 1
            assert (await lab.end(ended, reward=3)).status == 409

    run(main)


def test_what_the_store_has_open_is_taken_up(path: Path) -> None:
    """Also without the journal: the store is what counts."""

    async def main() -> None:
        async with Lab(path) as lab:
            session = await lab.open()
            messages = await lab.talk(session, 2)
            await lab.stop()
            (path / "server.journal").unlink()
            await lab.start()
            # The prompt tells the retry of the last turn from the next one.
            again = await lab.chat(session, {**WORDS, "messages": messages[:-2], "seed": 3})
            assert again.headers["x-rollstore-turn"] == "1"
            answer = await lab.chat(session, {**WORDS, "messages": messages})
            assert answer.headers["x-rollstore-turn"] == "2"
            assert (await lab.end(session)).json["turns"] == 3

    run(main)


# ---------------------------------------------------------------- the journal


def test_a_torn_journal_is_read(tmp_path: Path) -> None:
    path = str(tmp_path / "journal")
    journal = Journal(path)
    journal.opened("a", False, 1, None)
    journal.turn("a", 0, "f0", "p0")
    journal.opened("b", True, None, None)
    journal.opened("c", False, None, None)
    journal.drop("c")
    journal.end("d", {"status": "failed"})
    journal.close()
    with open(path, "ab") as file:
        file.write(b'{"turn":"a","n":1,"requ')
    again = Journal(path)
    kept = again.sessions["a"]
    assert (kept.group, kept.turn, kept.fingerprint, kept.digest) == (1, 0, "f0", "p0")
    assert set(again.sessions) == {"a", "b"}
    assert again.sessions["b"].evaluation
    assert again.ended == {"d": {"status": "failed"}}
    again.turn("a", 1, "f1", None)
    again.close()
    lines = [json.loads(line) for line in Path(path).read_bytes().splitlines()]
    assert lines[-1] == {"turn": "a", "n": 1, "request": "f1", "prompt": None}


def test_a_journal_that_grows_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While four threads append: it stays short, and nothing is lost."""
    from rollstore.server import journal as module

    monkeypatch.setattr(module, "_SIZE_MIN", 20_000)
    path = str(tmp_path / "journal")
    journal = Journal(path)

    def append(thread: int) -> None:
        for number in range(300):
            name = f"{thread}.{number}"
            journal.opened(name, False, thread, number)
            for turn in range(5):
                journal.turn(name, turn, f"f{turn}", "p")
            if number >= 10:
                journal.drop(name)

    threads = [threading.Thread(target=append, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    journal.close()
    assert Path(path).stat().st_size < 60_000  # of 600,000 that were written
    again = Journal(path)
    assert set(again.sessions) == {f"{t}.{number}" for t in range(4) for number in range(10)}
    assert {(kept.turn, kept.fingerprint) for kept in again.sessions.values()} == {(4, "f4")}
    again.close()


def test_one_server_a_journal(tmp_path: Path) -> None:
    path = str(tmp_path / "journal")
    journal = Journal(path)
    with pytest.raises(JournalHeld, match="--journal"):
        Journal(path)
    journal.close()
    Journal(path).close()


def test_the_store_is_whole(path: Path) -> None:
    """The journal beside the data disturbs nobody who looks after the store."""

    async def main() -> None:
        async with Lab(path) as lab:
            session = await lab.open()
            await lab.talk(session, 3)
            await lab.end(session)
        with rollstore.open(path, "r") as store:
            assert store.verify().faults == []
            store.copy(path.parent / "copy")

    run(main)
