"""ConsumerLoader: each session is trained on once, whatever happens in between."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import rollstore

torch = pytest.importorskip("torch", reason="no PyTorch here: loaders were NOT tested")

from torch_stores import (  # noqa: E402
    flat,
    put,
    seal,
    seal_one,
    seal_unusable,
    sequences,
)

import rollstore.torch as rt  # noqa: E402


def make(store: rollstore.Store, **arguments: Any) -> rt.ConsumerLoader:
    """A loader that ends when nothing more is sealed."""
    return rt.ConsumerLoader(store, "trainer", **{"batch_size": 2, "follow": False, **arguments})


def until(condition: Callable[[], bool]) -> None:
    """Wait for it; a test that waits for ever would say nothing."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


def stat(store: rollstore.Store) -> rollstore.ConsumerInfo:
    return store.consumer("trainer", create=False).stat()


# ---------------------------------------------------------------- what is given


def test_each_session_once_in_ready_order(store: rollstore.Store):
    seal(store, 7)
    with make(store) as loader:
        assert sequences(loader) == [[1, 2], [3, 4], [5, 6], [7]]
        assert loader.counts == rt.Counts(batches=4, trained=7)
        assert sequences(loader) == []
    info = stat(store)
    assert (info.trained_count, info.held_count, info.free_count) == (7, 0, 0)


def test_a_loop_that_ended_goes_on_with_what_came_since(store: rollstore.Store):
    seal(store, 3)
    with make(store) as loader:
        assert sequences(loader) == [[1, 2], [3]]
        seal(store, 2)
        assert sequences(loader) == [[4, 5]]


def test_the_last_batch_can_be_left_for_later(store: rollstore.Store):
    seal(store, 5)
    with make(store, drop_last=True) as loader:
        assert sequences(loader) == [[1, 2], [3, 4]]
        assert stat(store).free_count == 1
        seal(store, 1)
        assert sequences(loader) == [[5, 6]]


def test_sessions_are_waited_for(store: rollstore.Store):
    with rt.ConsumerLoader(store, "trainer", batch_size=3, timeout=60) as loader:
        sealing = threading.Thread(target=seal, args=(store, 6))
        sealing.start()
        assert sequences([next(loader), next(loader)]) == [[1, 2, 3], [4, 5, 6]]
        sealing.join()


def test_a_batch_is_the_stores_own(store: rollstore.Store):
    seal(store, 4, group_size=2)
    with make(store, batch_size=4, group_size=2, layout="padded", pad_id=9) as loader:
        (batch,) = loader
        plan = rt.Plan.of(store, group_size=2)
        own = rt.SessionDataset(store, plan, batch_size=4, layout="padded", pad_id=9)[0]
        for name, tensor in own.tensors.items():
            assert torch.equal(batch.tensors[name], tensor), name
        assert batch.samples == own.samples
        moved = batch.to("meta")
        assert moved.units is batch.units


def test_a_new_consumer_can_begin_at_the_newest(store: rollstore.Store):
    seal(store, 3)
    with make(store, start="newest") as loader:
        assert sequences(loader) == []
        seal(store, 2)
        assert sequences(loader) == [[4, 5]]


def test_a_path_is_opened_to_write_and_closed(store: rollstore.Store):
    seal(store, 2)
    store.close()
    with make(store.path) as loader:
        assert sequences(loader) == [[1, 2]]
    with rollstore.open(store.path, "w") as again:
        assert stat(again).trained_count == 2


def test_a_device_is_copied_to_in_the_thread(store: rollstore.Store):
    seal(store, 2)
    with make(store, device="meta") as loader:
        (batch,) = loader
        assert {tensor.device.type for tensor in batch.tensors.values()} == {"meta"}
        assert batch.session_ids == ["s1", "s2"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: NOT tested")
def test_batches_are_copied_to_a_gpu(store: rollstore.Store):
    seal(store, 6, group_size=2)
    plan = rt.Plan.of(store, group_size=2)
    own = rt.SessionDataset(store, plan, batch_size=2)
    with make(store, group_size=2, device="cuda") as loader:
        for number, batch in enumerate(loader):
            assert {tensor.device.type for tensor in batch.tensors.values()} == {"cuda"}
            for name, tensor in own[number].tensors.items():
                assert torch.equal(batch.tensors[name].cpu(), tensor), name


# ---------------------------------------------------------------- groups


def test_only_whole_groups_are_given(store: rollstore.Store):
    for number, group in enumerate([0, 1, 0, 2, 1, 2, 3], 1):
        seal_one(store, number, group_index=group)
    with make(store, group_size=2) as loader:
        assert sequences(loader) == [[1, 3], [2, 5], [4, 6]]
        assert stat(store).free_count == 1
        seal_one(store, 8, group_index=3)
        assert sequences(loader) == [[7, 8]]


def test_a_group_is_waited_for(store: rollstore.Store):
    seal_one(store, 1, group_index=0)
    seal_one(store, 2, group_index=1)
    with rt.ConsumerLoader(store, "trainer", batch_size=2, group_size=2, timeout=0.3) as loader:
        with pytest.raises(rollstore.WaitTimeoutError, match="2 sessions wait for the rest"):
            next(loader)
        seal_one(store, 3, group_index=1)
        loader._timeout = 60
        assert next(loader).sequences.tolist() == [2, 3]
    assert stat(store).free_count == 1


def test_a_group_that_is_never_whole_is_dropped_in_time(store: rollstore.Store):
    seal_one(store, 1, group_index=0)
    seal(store, 2, group_index=1)
    with make(store, group_size=2, group_timeout=0.0) as loader:
        assert flat(sequences(loader)) in ([2, 3], [])
        counts = loader.counts
    assert counts.incomplete + counts.trained == 3
    assert counts.incomplete >= 1
    assert stat(store).trained_count == 3


def test_a_session_without_a_group_is_raised_in_the_loop(store: rollstore.Store):
    seal(store, 2)
    with make(store, group_size=2) as loader, pytest.raises(rt.GroupError, match='"s1"'):
        next(loader)
    assert stat(store).held_count == 0


def test_a_reward_that_is_missing_is_raised_or_its_group_dropped(store: rollstore.Store):
    seal(store, 4, group_size=2)
    seal_one(store, 5, group_size=2, reward=None)
    seal_one(store, 6, group_size=2)
    with make(store, group_size=2) as loader:
        assert next(loader).sequences.tolist() == [1, 2]
        assert next(loader).sequences.tolist() == [3, 4]
        for _ in range(2):
            with pytest.raises(rt.RewardError, match='"s5"'):
                next(loader)
    with make(store, group_size=2, unusable="drop") as loader:
        assert sequences(loader) == []
        assert loader.counts.unusable == 2
    assert stat(store).trained_count == 6


# ---------------------------------------------------------------- what is left out


def test_statuses(store: rollstore.Store):
    for number, status in enumerate(["failed", "completed", "aborted", "truncated"], 1):
        seal_one(store, number, status=status)
    with make(store, statuses=["completed", "truncated"]) as loader:
        assert sequences(loader) == [[2, 4]]
        assert loader.counts.status == 2
    assert stat(store).trained_count == 4


@pytest.mark.parametrize("bad", [1, 2, 5])
def test_a_session_without_a_sample_is_raised_or_dropped(store: rollstore.Store, bad: int):
    for number in range(1, 6):
        seal_unusable(store, "torn") if number == bad else seal_one(store, number)
    with make(store) as loader, pytest.raises(rollstore.AlignmentError, match="torn"):
        list(loader)
    with make(store, unusable="drop") as loader:
        list(loader)
        assert loader.counts.unusable == 1
    assert stat(store).trained_count == 5
    assert stat(store).held_count == 0


def test_a_session_released_by_force_while_it_waits(store: rollstore.Store):
    seal(store, 4, group_size=2)
    with rt.ConsumerLoader(store, "trainer", batch_size=4, group_size=4, timeout=0.3) as loader:
        with pytest.raises(rollstore.WaitTimeoutError):
            next(loader)
        store.release("s2", force=True)
    with make(store) as loader:
        assert sequences(loader) == [[1, 3], [4]]


def test_staleness_is_judged_when_a_batch_is_handed_out(store: rollstore.Store):
    seal(store, 12, group_size=2, versions=lambda number: [number, number])
    version = [12]
    staleness = rt.Staleness(6, lambda: version[0])
    with make(store, group_size=2, prefetch=2, staleness=staleness) as loader:
        assert next(loader).sequences.tolist() == [7, 8]  # 1 to 6 are too old
        until(lambda: len(loader._feeder._prefetcher.ready()) == 2)
        version[0] = 16  # 9 to 12 were read ahead as fresh, and 9 is not any more
        assert next(loader).sequences.tolist() == [11, 12]
        with pytest.raises(StopIteration):
            next(loader)
        assert loader.counts.stale == 8
        assert loader.counts.trained == 4
    assert stat(store).trained_count == 12


def test_what_is_left_of_a_batch_goes_into_another(store: rollstore.Store):
    seal(store, 6, versions=lambda number: [number])
    version = [6]
    staleness = rt.Staleness(4, lambda: version[0])
    with make(store, batch_size=2, prefetch=2, staleness=staleness) as loader:
        assert next(loader).sequences.tolist() == [2, 3]
        until(lambda: len(loader._feeder._prefetcher.ready()) == 2)  # [4, 5] and [6]
        version[0] = 9
        assert sorted(flat(sequences(loader))) == [5, 6]
        assert loader.counts.stale == 2


def test_staleness_can_be_raised(store: rollstore.Store):
    seal(store, 4, versions=lambda number: [number])
    version = [4]
    staleness = rt.Staleness(3, lambda: version[0], over="raise")
    with make(store, staleness=staleness, prefetch=1) as loader:
        next(loader)
        until(lambda: len(loader._feeder._prefetcher.ready()) == 1)
        version[0] = 9
        for _ in range(2):
            with pytest.raises(rt.StaleError, match='"s3".*version 3, 6 behind'):
                next(loader)
    assert stat(store).held_count == 0
    assert stat(store).trained_count == 2


def test_a_trainer_that_counts_anew_is_noticed(store: rollstore.Store):
    seal(store, 4, versions=lambda number: [30 + number])
    with make(store, staleness=rt.Staleness(9, 1)) as loader:
        with pytest.raises(rt.VersionRestartError, match="version 31.*trainer is at 1"):
            next(loader)
    with make(store, staleness=rt.Staleness(9, 1, restart="drop")) as loader:
        assert sequences(loader) == []
        assert loader.counts.restarted == 4


def test_a_version_behind_the_checkpoints_is_noticed_though_no_session_tells(
    store: rollstore.Store,
):
    seal(store, 2, versions=lambda number: [3])
    version = [40]
    with make(store, staleness=rt.Staleness(99, lambda: version[0])) as loader:
        list(loader)
        state = loader.state_dict()
    assert state["weight_version"] == 40
    version[0] = 1
    with make(store, staleness=rt.Staleness(99, lambda: version[0])) as loader:
        with pytest.raises(rt.VersionRestartError, match="is 1, but it was 40"):
            loader.load_state_dict(state)
        version[0] = 41
        loader.load_state_dict(state)
    version[0] = 5
    warning = rt.Staleness(99, lambda: version[0], restart="warn")
    with make(store, staleness=warning) as loader:
        with pytest.warns(rt.VersionRestartWarning):
            loader.load_state_dict(state)


def test_a_version_that_goes_back_in_the_run_is_noticed(store: rollstore.Store):
    seal(store, 4)
    version = [5]
    with make(store, staleness=rt.Staleness(99, lambda: version[0]), prefetch=1) as loader:
        next(loader)
        version[0] = 2
        with pytest.raises(rt.VersionRestartError, match="is 2, but it was 5"):
            next(loader)


# ---------------------------------------------------------------- what counts as trained on


def test_reading_ahead_is_not_training(store: rollstore.Store):
    seal(store, 10)
    with make(store, prefetch=3) as loader:
        next(loader)
        until(lambda: len(loader._feeder._prefetcher.ready()) == 3)
        info = stat(store)
        assert (info.held_count, info.trained_count) == (8, 0)
        place = store.consumer("trainer").place()
        next(loader)
        assert stat(store).trained_count == 2
    store.consumer("trainer").resume(place)
    with make(store) as again:
        assert flat(sequences(again)) == list(range(1, 11))


def test_explicitly_only_what_was_said_to_be_trained_counts(store: rollstore.Store):
    seal(store, 8)
    with make(store, acknowledge="explicit") as loader:
        first, second, _third = next(loader), next(loader), next(loader)
        loader.trained(second.to("cpu"))
        loader.state_dict()
        assert stat(store).trained_count == 2
        with pytest.raises(ValueError, match="not handed out"):
            loader.trained(second)
        loader.trained(first)
    assert stat(store).trained_count == 4
    with make(store) as loader:
        assert sequences(loader) == [[5, 6], [7, 8]]


def test_leaving_the_block_counts_the_batch_at_hand_unless_by_an_exception(
    store: rollstore.Store,
):
    seal(store, 8)
    with make(store) as loader:
        for _ in loader:
            break
    assert stat(store).trained_count == 2
    with pytest.raises(RuntimeError, match="the step failed"), make(store) as loader:
        for _ in loader:
            raise RuntimeError("the step failed")
    info = stat(store)
    assert (info.trained_count, info.held_count) == (2, 0)
    with make(store) as loader:
        assert sequences(loader) == [[3, 4], [5, 6], [7, 8]]


def test_close_gives_back_what_was_not_acknowledged(store: rollstore.Store):
    seal(store, 8)
    before = set(threading.enumerate())
    loader = make(store)
    next(loader)
    loader.close()
    loader.close()
    info = stat(store)
    assert (info.trained_count, info.held_count, info.free_count) == (0, 0, info.next - 1)
    assert set(threading.enumerate()) <= before
    for call in (lambda: next(loader), loader.state_dict, loader.release):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_a_loader_that_nobody_closed_gives_back_too(store: rollstore.Store):
    seal(store, 4)
    before = set(threading.enumerate())
    loader = make(store)
    next(loader)
    del loader
    gc.collect()
    assert stat(store).held_count == 0
    assert set(threading.enumerate()) <= before


def test_a_store_that_was_closed_first_is_told(store: rollstore.Store):
    seal(store, 6)
    loader = make(store)
    next(loader)
    until(lambda: len(loader._feeder._prefetcher.ready()) == 2)
    store.close()
    with pytest.raises(rollstore.ClosedError):
        loader.close()


def test_a_lost_lease_is_told_and_the_others_are_acknowledged(store: rollstore.Store):
    seal(store, 6)
    consumer = store.consumer("trainer")
    place = consumer.place()
    loader = make(store, prefetch=1, batch_size=3)
    next(loader)
    until(lambda: len(loader._feeder._prefetcher.ready()) == 1)
    consumer.resume(place)
    taken = consumer.take(1, timeout=0)
    taken.acknowledge()
    with pytest.raises(rollstore.LeaseError, match="3 of 3 sessions.*trained on twice"):
        loader.trained()
    assert loader.counts.lost == 3
    loader.close()
    with make(store) as again:
        assert sequences(again) == [[2, 3], [4, 5], [6]]


def test_a_batch_whose_lease_is_lost_is_not_handed_out(store: rollstore.Store):
    seal(store, 4)
    consumer = store.consumer("trainer")
    with make(store, prefetch=2) as loader:
        next(loader)
        until(lambda: loader._feeder._prefetcher._ended)  # or it would take what is given back
        # As after a renewal that came too late for one of the two.
        loader._feeder._held._lost.add(3)
        (lease,) = [it for it in loader._feeder._held.all() if it.sequence == 3]
        lease.give_back()
        (other,) = consumer.take(1, timeout=0)
        assert flat(sequences(loader)) == [4]
        other.acknowledge()
        assert loader.counts.lost == 1
    assert stat(store).trained_count == 4


def test_leases_are_renewed_while_they_wait_and_while_training(store: rollstore.Store):
    seal(store, 6)
    with make(store, lease=2.0, prefetch=1) as loader:
        next(loader)
        until(lambda: len(loader._feeder._prefetcher.ready()) == 1)
        leases = loader._feeder._held.all()
        assert len(leases) == 4
        first = [lease.expires for lease in leases]
        until(lambda: all(lease.expires > was for lease, was in zip(leases, first)))
        second = [lease.expires for lease in leases]
        until(lambda: all(lease.expires > was for lease, was in zip(leases, second)))
    assert stat(store).trained_count == 2


# ---------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("group_size", [None, 2])
def test_a_resume_at_every_position_gives_exactly_the_rest(path: Any, group_size: int | None):
    for position in range(8):
        with rollstore.open(f"{path}-{position}", "x", capacity="4M") as store:
            seal(store, 14, group_size=group_size)
            with make(store, group_size=group_size, acknowledge="explicit") as loader:
                read = []
                for _ in range(position):
                    batch = next(loader)
                    loader.trained(batch)
                    read.append(batch.sequences.tolist())
                state = json.loads(json.dumps(loader.state_dict()))
                for batch in loader:  # trained on after the checkpoint: it is done again
                    loader.trained(batch)
                    break
            with make(store, group_size=group_size) as again:
                again.load_state_dict(state)
                assert again.lost == 0
                rest = sequences(again)
            assert sorted(flat(read) + flat(rest)) == list(range(1, 15))


def test_only_what_a_checkpoint_holds_is_released(store: rollstore.Store):
    seal(store, 10)
    with make(store) as loader:
        next(loader)
        next(loader)
        assert loader.release() == 0
        state = loader.state_dict()
        next(loader)
        loader.trained()
        assert loader.checkpointed(state, release=False) == 0
        assert store.stat().session_count == 10
        assert loader.checkpointed(state) == 4
        assert store.stat().session_count == 6
        assert loader.release() == 0
        later = loader.state_dict()
        assert loader.checkpointed(later) == 2
    with make(store) as again:
        again.load_state_dict(later)
        assert flat(sequences(again)) == [7, 8, 9, 10]


def test_what_was_released_since_a_checkpoint_is_told(store: rollstore.Store):
    seal(store, 6)
    with make(store) as loader:
        next(loader)
        old = loader.state_dict()
        next(loader)
        loader.checkpointed(loader.state_dict())
    with make(store) as again:
        with pytest.warns(RuntimeWarning, match="2 sessions"):
            again.load_state_dict(old)
        assert again.lost == 2
        assert flat(sequences(again)) == [5, 6]


def test_the_state_can_be_saved_with_the_model(store: rollstore.Store, tmp_path: Any):
    seal(store, 4)
    with make(store) as loader:
        next(loader)
        torch.save({"loader": loader.state_dict()}, tmp_path / "checkpoint")
    with make(store) as again:
        again.load_state_dict(torch.load(tmp_path / "checkpoint")["loader"])
        assert flat(sequences(again)) == [3, 4]


@pytest.mark.parametrize(
    "damage",
    [
        {"version": 2},
        {"kind": "plan"},
        {"consumer": "other"},
        {"place": "?"},
        {"place": "AAAA"},
        {"place": 7},
        {"place": None},
    ],
)
def test_a_damaged_state_is_refused(store: rollstore.Store, damage: dict[str, Any]):
    seal(store, 4)
    with make(store) as loader:
        next(loader)
        state = loader.state_dict()
    with make(store) as again:
        with pytest.raises((rt.StateError, rollstore.ArgumentError)):
            again.load_state_dict({**state, **damage})
        for name in ("version", "kind", "consumer", "place"):
            cut = {key: value for key, value in state.items() if key != name}
            with pytest.raises(rt.StateError):
                again.load_state_dict(cut)
            with pytest.raises(rt.StateError):
                again.checkpointed(cut)
        assert flat(sequences(again)) == [3, 4]


def test_a_state_is_loaded_before_the_first_batch(store: rollstore.Store):
    seal(store, 4)
    with make(store) as loader:
        next(loader)
        state = loader.state_dict()
        with pytest.raises(rt.StateError, match="before the first batch"):
            loader.load_state_dict(state)


# ---------------------------------------------------------------- ends


def test_no_batch_in_time_says_what_is_missing_and_can_be_passed_over(store: rollstore.Store):
    seal(store, 1)
    with rt.ConsumerLoader(store, "trainer", batch_size=2, timeout=0.3) as loader:
        with pytest.raises(
            rollstore.WaitTimeoutError, match=r'no batch for consumer "trainer".*1 of 2 sessions'
        ):
            next(loader)
        seal(store, 1)
        loader._timeout = 60
        assert next(loader).sequences.tolist() == [1, 2]


def test_an_interrupt_while_waiting_gives_back(store: rollstore.Store):
    seal(store, 1)
    before = set(threading.enumerate())
    interrupt = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        with rt.ConsumerLoader(store, "trainer", batch_size=2) as loader:
            next(loader)
    interrupt.join()
    assert stat(store).held_count == 0
    assert set(threading.enumerate()) <= before


def test_a_forked_process_leaves_the_parents_leases_alone(store: rollstore.Store):
    seal(store, 6)
    with make(store) as loader:
        next(loader)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                next(loader)
            except RuntimeError as error:
                code = 0 if "forked" in str(error) else 2
            finally:
                loader.close()
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert stat(store).free_count == 0
        assert flat(sequences(loader)) == [3, 4, 5, 6]


def test_a_batch_does_not_leave_its_process(store: rollstore.Store):
    import pickle

    seal(store, 2)
    with make(store) as loader:
        (batch,) = loader
        with pytest.raises(TypeError, match="belongs to its process"):
            pickle.dumps(batch)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 3, "group_size": 2}, "batch_size"),
        ({"group_size": 0}, "group_size"),
        ({"rank": 2, "world": 2}, "rank"),
        ({"acknowledge": "no"}, "acknowledge"),
        ({"unusable": "no"}, "unusable"),
        ({"prefetch": 0}, "prefetch"),
        ({"lease": 0}, "lease"),
        ({"layout": "no"}, "layout"),
        ({"start": "middle"}, "start"),
    ],
)
def test_arguments_are_checked(store: rollstore.Store, arguments: dict[str, Any], named: str):
    with pytest.raises(ValueError, match=named):
        make(store, **arguments)


def test_a_store_to_read_only_is_refused(store: rollstore.Store):
    put(store, "s", 0, [1], [2])
    store.close()
    with rollstore.open(store.path) as reader, pytest.raises(rollstore.ReadOnlyError):
        make(reader)
