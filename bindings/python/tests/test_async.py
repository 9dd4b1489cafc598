"""The awaitable forms of a store's calls."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from replies import DATA, make_arrays, make_reply, make_text

import rollstore


def run(main: Callable[[], Awaitable[Any]]) -> Any:
    async def limited() -> Any:
        return await asyncio.wait_for(main(), 60)

    return asyncio.run(limited())


def test_every_call_has_an_awaitable_form(store: rollstore.Store):
    async def main() -> None:
        aio = store.aio
        assert await aio.put_reply("a", 0, make_text(3, 2), top_k=2, prompt=[1], temperature=1)
        assert not await aio.put_reply("a", 0, make_reply(3, 2), prompt=[1], temperature=1)
        assert await aio.put("a", 1, **make_arrays(4, 2))
        assert await aio.restart("a", 1)
        assert await aio.seal("a", "truncated", reward=1, group_index=2, index=3)
        assert await aio.wait(0, timeout=1) == 1
        assert (await aio.ingest(DATA / "sessions.jsonl")).sealed == 24
        store.consumer("t")
        with await aio.take("t", 5, timeout=1) as leases:
            assert len(leases) == 5
        consumer = store.consumer("t")
        consumer.commit(consumer.place())
        assert await aio.release_consumed(2) == 2
        assert await aio.release("swe-0000/rollout-0", force=True)
        await aio.sync()
        changes = store.changes()
        changes.put_reply("b", 0, make_text(1, 1))
        changes.seal("b")
        assert await aio.apply(changes) == [True, True]
        assert await aio.apply(changes) == []

    run(main)


def test_errors_are_the_same(store: rollstore.Store):
    async def main() -> None:
        with pytest.raises(rollstore.ReplyError):
            await store.aio.put_reply("a", 0, b"{")
        with pytest.raises(rollstore.NotFoundError):
            await store.aio.seal("nobody")
        with pytest.raises(rollstore.NotFoundError):
            await store.aio.take("nobody")
        with pytest.raises(rollstore.WaitTimeoutError):
            await store.aio.wait(timeout=0.02)
        with pytest.raises(ValueError, match="timeout"):
            await store.aio.wait(timeout=-1)

    run(main)


def test_many_puts_run_at_a_time(store: rollstore.Store):
    async def main() -> None:
        text = make_text(50, 8)
        puts = (store.aio.put_reply(f"s{n}", 0, text) for n in range(200))
        assert all(await asyncio.gather(*puts))
        assert not any(
            await asyncio.gather(*(store.aio.put_reply(f"s{n}", 0, text) for n in range(9)))
        )

    run(main)
    assert store.stat().turn_count == 200


def test_the_event_loop_goes_on_while_a_call_waits(store: rollstore.Store):
    async def main() -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.001)

        ticker = asyncio.create_task(tick())
        with pytest.raises(rollstore.WaitTimeoutError):
            await store.aio.wait(timeout=0.2)
        ticker.cancel()
        assert ticks > 10

    run(main)


def test_a_thousand_waiting_calls_hold_no_thread(store: rollstore.Store):
    async def main() -> None:
        before = threading.active_count()
        waits = [asyncio.create_task(store.aio.wait()) for _ in range(1000)]
        await asyncio.sleep(0.05)
        assert threading.active_count() == before
        store.put_reply("a", 0, make_text(1, 1))
        store.seal("a")
        assert set(await asyncio.gather(*waits)) == {1}

    run(main)


def fill(store: rollstore.Store) -> None:
    for number in range(10000):
        try:
            store.put_reply(f"fill-{number}", 0, make_text(200, 32), timeout=0)
        except rollstore.FullError:
            return


@pytest.mark.parametrize("form", ["reply", "arrays"])
def test_a_put_at_capacity_waits_without_a_thread(path: Path, form: str):
    def put(store: rollstore.Store, name: str, timeout: float | None) -> Awaitable[bool]:
        if form == "reply":
            return store.aio.put_reply(name, 0, make_text(200, 32), timeout=timeout)
        return store.aio.put(name, 0, **make_arrays(200, 32), timeout=timeout)

    async def main() -> None:
        with rollstore.open(path, "x", capacity="1M") as store:
            fill(store)
            with pytest.raises(rollstore.FullError):
                await put(store, "more", 0.05)
            waiting = asyncio.create_task(put(store, "more", None))
            cancelled = asyncio.create_task(put(store, "never", None))
            await asyncio.sleep(0.1)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            assert not waiting.done()
            store.release("fill-0")
            assert await waiting is True
            store.release("fill-1")
            await asyncio.sleep(0.15)
            with store.snapshot() as snapshot:
                assert "more" in snapshot.sessions and "never" not in snapshot.sessions

    run(main)


def test_sealed_sessions_are_an_async_iterator(store: rollstore.Store):
    async def write() -> None:
        for number in range(30):
            await store.aio.put_reply(f"s{number}", 0, make_text(1, 1))
            await store.aio.seal(f"s{number}")

    async def read() -> list[str]:
        seen = []
        async for info in store.aio.sealed():
            seen.append(info.id)
            if len(seen) == 30:
                return seen
        raise AssertionError("it ended")

    async def main() -> None:
        _, seen, also = await asyncio.gather(write(), read(), read())
        assert seen == also == [f"s{n}" for n in range(30)]
        rest = [info.sequence async for info in store.aio.sealed(28, timeout=0.01)]
        assert rest == [29, 30]

    run(main)


def test_taking_waits_in_the_event_loop(store: rollstore.Store):
    async def main() -> None:
        store.consumer("t")
        taking = asyncio.create_task(store.aio.take("t", 2))
        await asyncio.sleep(0.05)
        assert not taking.done()
        await store.aio.put_reply("a", 0, make_text(1, 1))
        await store.aio.seal("a")
        assert (await taking)[0].session_id == "a"
        with pytest.raises(rollstore.WaitTimeoutError):
            await store.aio.take("t", timeout=0.01)

    run(main)


def test_a_cancelled_wait_ends_at_once(store: rollstore.Store):
    async def main() -> None:
        began = time.monotonic()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(store.aio.wait(), 0.05)
        assert time.monotonic() - began < 30
        store.close()
        with pytest.raises(rollstore.ClosedError):
            await store.aio.wait()

    run(main)
