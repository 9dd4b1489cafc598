"""Consumers: leases, acknowledgements, places and checkpoints."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
import time

import pytest
from replies import make_text

import rollstore

SPAWN = multiprocessing.get_context("spawn")


def seal(store: rollstore.Store, count: int, first: int = 0) -> None:
    for number in range(first, first + count):
        store.put_reply(f"s{number}", 0, make_text(2, 2, seed=number), prompt=[1])
        store.seal(f"s{number}", reward=float(number))


@pytest.fixture
def consumer(store: rollstore.Store) -> rollstore.Consumer:
    seal(store, 10)
    return store.consumer("trainer")


def test_sessions_are_given_in_ready_order_and_once(consumer: rollstore.Consumer):
    first = consumer.take(4, timeout=0)
    second = consumer.take(100, timeout=0)
    assert [lease.session_id for lease in (*first, *second)] == [f"s{n}" for n in range(10)]
    assert [lease.sequence for lease in first] == [1, 2, 3, 4]
    assert {lease.given_count for lease in first} == {1}
    with pytest.raises(rollstore.WaitTimeoutError, match="trainer"):
        consumer.take(1, timeout=0)


def test_what_is_acknowledged_is_not_given_again(consumer: rollstore.Consumer):
    with consumer.take(4, timeout=0) as leases:
        assert len(leases.unsettled) == 4
    assert leases.unsettled == []
    info = consumer.stat()
    assert (info.trained_count, info.held_count, info.waiting_count) == (4, 0, 6)
    leases.acknowledge()
    consumer.acknowledge(leases)
    assert consumer.take(1, timeout=0)[0].sequence == 5


def test_what_an_exception_ends_is_given_back_and_comes_first(consumer: rollstore.Consumer):
    with pytest.raises(ZeroDivisionError), consumer.take(4, timeout=0) as leases:
        leases[1].acknowledge()
        1 / 0  # noqa: B018
    assert consumer.stat().free_count == 3
    again = consumer.take(4, timeout=0)
    assert [lease.sequence for lease in again] == [1, 3, 4, 5]
    assert [lease.given_count for lease in again] == [2, 2, 2, 1]


def test_one_lease_is_a_context_of_its_own(consumer: rollstore.Consumer):
    leases = consumer.take(3, timeout=0)
    with leases[0] as lease:
        assert 590 < lease.seconds_left <= 600
    assert leases[0].settled
    with pytest.raises(ZeroDivisionError), leases[1]:
        1 / 0  # noqa: B018
    with leases[2]:
        leases[2].give_back()
    info = consumer.stat()
    assert (info.trained_count, info.free_count) == (1, 2)
    assert len(leases[1:]) == 2


def test_a_lease_that_ended_is_somebody_elses(consumer: rollstore.Consumer):
    leases = consumer.take(2, lease=0.01, timeout=0)
    time.sleep(0.03)
    assert leases[0].seconds_left < 0
    assert [lease.sequence for lease in consumer.take(2, timeout=5)] == [1, 2]
    with pytest.raises(rollstore.LeaseError) as caught:
        leases.acknowledge()
    assert caught.value.index == 0
    assert len(leases.unsettled) == 2


def test_a_lease_is_renewed(consumer: rollstore.Consumer):
    leases = consumer.take(2, lease=1, timeout=0)
    leases.renew(1000)
    assert all(lease.seconds_left > 900 for lease in leases)
    leases[0].renew(5)
    assert leases[0].seconds_left <= 5
    leases.acknowledge()


def test_taking_waits_for_new_sessions(consumer: rollstore.Consumer):
    consumer.take(10, timeout=0).acknowledge()
    thread = threading.Timer(0.05, seal, [consumer.store, 1, 10])
    thread.start()
    assert consumer.take(5)[0].session_id == "s10"
    thread.join()


def test_a_batch_is_made_of_leases(consumer: rollstore.Consumer):
    with consumer.take(4, timeout=0) as leases, consumer.store.snapshot() as snapshot:
        assert snapshot.batch(leases).session_ids == ["s0", "s1", "s2", "s3"]
        assert leases[2].session(snapshot).reward == 2.0


def test_two_consumers_do_not_disturb_each_other(consumer: rollstore.Consumer):
    store = consumer.store
    other = store.consumer("evaluation")
    consumer.take(10, timeout=0).acknowledge()
    assert len(other.take(100, timeout=0)) == 10
    newest = store.consumer("late", start="newest")
    with pytest.raises(rollstore.WaitTimeoutError):
        newest.take(timeout=0)
    seal(store, 1, 10)
    assert newest.take(5, timeout=0)[0].session_id == "s10"
    assert {info.name for info in store.consumers()} == {"trainer", "evaluation", "late"}
    other.drop()
    with pytest.raises(rollstore.NotFoundError):
        other.stat()
    with pytest.raises(rollstore.NotFoundError):
        store.consumer("nobody", create=False)
    assert store.consumer("trainer", create=False).stat().next == 11


def test_only_what_is_committed_can_be_released(consumer: rollstore.Consumer):
    store = consumer.store
    consumer.take(6, timeout=0).acknowledge()
    place = consumer.place()
    consumer.take(2, timeout=0).acknowledge()
    with pytest.raises(rollstore.HeldError):
        store.release("s0")
    assert store.release_consumed() == 0
    consumer.commit(place)
    info = consumer.stat()
    assert (info.committed_count, info.trained_count) == (6, 2)
    assert store.release_consumed(4) == 4
    assert store.release_consumed() == 2
    store.release("s7", force=True)
    with store.snapshot() as snapshot:
        assert list(snapshot.sessions) == ["s6", "s8", "s9"]


def test_a_resume_gives_everything_that_the_place_does_not_hold(consumer: rollstore.Consumer):
    consumer.take(3, timeout=0).acknowledge()
    held = consumer.take(2, timeout=0)
    place = consumer.place()
    consumer.take(2, timeout=0).acknowledge()
    assert consumer.resume(place) == 0
    with pytest.raises(rollstore.LeaseError):
        held.acknowledge()
    left = consumer.take(100, timeout=0)
    assert [lease.session_id for lease in left] == [f"s{n}" for n in range(3, 10)]
    for wrong in (b"", b"nonsense", place[:-1]):
        with pytest.raises(rollstore.ArgumentError):
            consumer.resume(wrong)
        with pytest.raises(rollstore.ArgumentError):
            consumer.commit(wrong)
    consumer.store.release("s9", force=True)
    assert consumer.resume(place) == 1


def test_the_session_of_a_lease_that_was_released_by_force_is_not_found(
    consumer: rollstore.Consumer,
):
    lease = consumer.take(1, timeout=0)[0]
    consumer.store.release("s0", force=True)
    with pytest.raises(rollstore.NotFoundError):
        lease.session_id  # noqa: B018


@pytest.mark.parametrize("max", [0, -1, 10**9])
def test_how_many_to_take_is_checked(consumer: rollstore.Consumer, max: int):
    with pytest.raises(ValueError, match="max: 1 to"):
        consumer.take(max, timeout=0)


def test_arguments_are_checked(consumer: rollstore.Consumer):
    store = consumer.store
    with pytest.raises(ValueError, match="start"):
        store.consumer("x", start="middle")  # type: ignore[arg-type]
    with pytest.raises(rollstore.ArgumentError):
        store.consumer("")
    with pytest.raises(ValueError, match="lease: seconds"):
        consumer.take(1, lease=-1, timeout=0)
    with pytest.raises(TypeError):
        store._consumer_acknowledge("trainer", ((1, 2),))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        store._consumer_acknowledge("trainer", (3,))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="16 bytes"):
        store._consumer_acknowledge("trainer", ((1, 2, b"short", 1, 1),))
    consumer.acknowledge([])


def test_a_consumer_travels_by_pickle(consumer: rollstore.Consumer):
    copy = pickle.loads(pickle.dumps(consumer))
    assert copy.name == "trainer"
    assert copy.take(1, timeout=0)[0].sequence == 1
    assert consumer.take(1, timeout=0)[0].sequence == 2
    copy.store.close()


def take_in_process(consumer: rollstore.Consumer, queue: object, count: int) -> None:
    taken = []
    while len(taken) < count:
        with consumer.take(3, timeout=30) as leases:
            taken += [lease.sequence for lease in leases]
    queue.put(taken)  # type: ignore[attr-defined]


def test_processes_of_one_consumer_never_get_the_same_session(consumer: rollstore.Consumer):
    seal(consumer.store, 50, 10)
    queue = SPAWN.Queue()
    ranks = [
        SPAWN.Process(target=take_in_process, args=(consumer, queue, 15), daemon=True)
        for _ in range(3)
    ]
    for rank in ranks:
        rank.start()
    taken = [sequence for _ in ranks for sequence in queue.get(timeout=60)]
    for rank in ranks:
        rank.join(30)
        assert rank.exitcode == 0
    assert len(taken) == len(set(taken)) >= 45
    assert consumer.stat().trained_count == len(taken)


def take_and_die(consumer: rollstore.Consumer) -> None:
    consumer.take(4, timeout=5)
    os.kill(os.getpid(), 9)


def test_what_a_dead_process_held_is_given_again(consumer: rollstore.Consumer):
    rank = SPAWN.Process(target=take_and_die, args=(consumer,), daemon=True)
    rank.start()
    rank.join(60)
    assert rank.exitcode == -9
    again = consumer.take(100, timeout=10)
    assert sorted(lease.sequence for lease in again) == list(range(1, 11))
    assert [lease.given_count for lease in again[:4]] == [2, 2, 2, 2]
