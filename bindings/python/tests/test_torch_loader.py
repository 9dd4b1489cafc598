"""Loader: batches ahead of training, and a state that tells what was trained on."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
from typing import Any

import pytest

import rollstore

torch = pytest.importorskip("torch", reason="no PyTorch here: loaders were NOT tested")

from torch_stores import flat, seal, seal_unusable, sequences  # noqa: E402

import rollstore.torch as rt  # noqa: E402

WORKERS = [0, 1, 4]

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def make(store: rollstore.Store, workers: int = 0, **arguments: Any) -> rt.Loader:
    """A loader over a seeded plan of all that is sealed."""
    names = ("rank", "world", "drop_last", "missing")
    own = {name: arguments.pop(name) for name in names if name in arguments}
    plan = arguments.pop("plan", None) or rt.Plan.of(store, seed=6)
    dataset = rt.SealedSessions(store, plan, batch_size=arguments.pop("batch_size", 2), **own)
    context = "fork" if workers else None
    return rt.Loader(dataset, num_workers=workers, multiprocessing_context=context, **arguments)


@pytest.mark.parametrize(("workers", "prefetch"), [(0, 0), (0, 1), (0, 3), (1, 2), (4, 2)])
def test_the_batches_are_those_of_the_dataset(store: rollstore.Store, workers: int, prefetch: int):
    seal(store, 13)
    loader = make(store, workers, prefetch=prefetch)
    assert len(loader) == 7
    assert sequences(loader) == sequences(loader.dataset)
    assert sequences(loader) == sequences(loader.dataset)


@pytest.mark.parametrize("before", WORKERS)
@pytest.mark.parametrize("after", WORKERS)
def test_a_resume_in_the_middle_gives_exactly_the_rest(
    store: rollstore.Store, before: int, after: int
):
    seal(store, 14, group_size=2)
    plan = rt.Plan.of(store, group_size=2, seed=6)
    whole = sequences(make(store, plan=plan))
    # Every position where nothing is forked; with workers the first, the last and one between.
    positions = range(8) if not before + after else (0, 3, 7)
    for position in positions:
        loader = make(store, before, plan=plan)
        read, state = [], loader.state_dict()
        for batch in loader:
            if len(read) == position:
                break
            read.append(batch.sequences.tolist())
            state = loader.state_dict()
        assert read == whole[:position]
        again = make(store, after)
        again.load_state_dict(json.loads(json.dumps(state)))
        assert len(again) == len(whole) - position
        assert sequences(again) == whole[position:]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 3), (3, 1), (2, 2), (3, 2)])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_resume_with_other_ranks_gives_exactly_the_rest(
    store: rollstore.Store, before: int, after: int, workers: int
):
    seal(store, 17)
    plan = rt.Plan.of(store, seed=6)
    for position in (0, 1, 2) if workers else range(17 // (2 * before) + 1):
        read: list[int] = []
        states = []
        for rank in range(before):
            loader = make(store, plan=plan, rank=rank, world=before)
            reading = iter(loader)
            read += flat(next(reading).sequences.tolist() for _ in range(position))
            states.append(loader.state_dict())
        for rank in range(after):
            loader = make(store, workers, rank=rank, world=after)
            loader.load_state_dict(states[0])
            read += flat(sequences(loader))
        assert sorted(read) == list(range(1, 18))


def test_ranks_out_of_step_resume_from_their_own_states(store: rollstore.Store):
    seal(store, 18)
    plan = rt.Plan.of(store, seed=6)
    read: list[int] = []
    for rank, position in enumerate((1, 3, 2)):
        loader = make(store, plan=plan, rank=rank, world=3)
        reading = iter(loader)
        read += flat(next(reading).sequences.tolist() for _ in range(position))
        again = make(store, rank=rank, world=3)
        again.load_state_dict(loader.state_dict())
        read += flat(sequences(again))
    assert sorted(read) == list(range(1, 19))


def test_resumes_follow_each_other(store: rollstore.Store):
    """One batch, then a resume with another number of ranks, and so on."""
    seal(store, 40)
    state = make(store).state_dict()
    read: list[int] = []
    for world in (2, 3, 1, 2, 2, 3, 1, 1):
        loaders = [make(store, rank=rank, world=world) for rank in range(world)]
        for loader in loaders:
            loader.load_state_dict(state)
            for batch in loader:
                read += batch.sequences.tolist()
                break
        state = loaders[0].state_dict()
    rest = make(store)
    rest.load_state_dict(state)
    read += flat(sequences(rest))
    assert sorted(read) == list(range(1, 41))


def test_what_was_released_before_the_place_is_not_missed(store: rollstore.Store):
    seal(store, 10)
    loader = make(store)
    reading = iter(loader)
    done = [next(reading).session_ids for _ in range(2)]
    state = loader.state_dict()
    reading.close()
    for name in flat(done):
        store.release(name, force=True)
    seal(store, 5)
    again = make(store)
    again.load_state_dict(state)
    rest = [name for batch in again for name in batch.session_ids]
    assert sorted(flat(done) + rest) == sorted(f"s{n}" for n in range(1, 11))


# ---------------------------------------------------------------- what counts as trained on


@pytest.mark.parametrize("workers", [0, 2])
def test_reading_ahead_does_not_move_the_place(store: rollstore.Store, workers: int):
    seal(store, 20)
    loader = make(store, workers, prefetch=4)
    begin = loader.state_dict()
    reading = iter(loader)
    assert loader.state_dict() == begin
    for count in range(1, 4):
        next(reading)
        assert loader.state_dict()["done"] == 2 * count
    reading.close()
    assert loader.state_dict()["done"] == 6


def test_asking_for_the_next_batch_counts_the_one_before(store: rollstore.Store):
    seal(store, 8)
    loader = make(store)
    reading = iter(loader)
    next(reading)
    assert loader.dataset.state_dict()["done"] == 0
    next(reading)
    assert loader.dataset.state_dict()["done"] == 2


def test_a_step_that_fails_is_not_counted(store: rollstore.Store):
    seal(store, 8)
    loader = make(store)

    def train() -> None:
        for number, _ in enumerate(loader):
            if number == 2:
                raise RuntimeError("the step failed")

    with pytest.raises(RuntimeError, match="the step failed"):
        train()
    gc.collect()
    assert loader.dataset.state_dict()["done"] == 4


@pytest.mark.parametrize("workers", [0, 2])
def test_explicitly_only_what_was_said_to_be_trained_counts(store: rollstore.Store, workers: int):
    seal(store, 12)
    loader = make(store, workers, acknowledge="explicit")
    whole = sequences(loader)
    reading = iter(loader)
    first, second, third = (next(reading) for _ in range(3))
    assert loader.state_dict()["done"] == 0
    loader.trained(second)
    assert loader.state_dict()["done"] == 0  # the first one is not done
    loader.trained(first.to("cpu"))
    assert loader.state_dict()["done"] == 4
    with pytest.raises(ValueError, match="not given out"):
        loader.trained(first)
    state = loader.state_dict()
    loader.trained()
    assert loader.state_dict()["done"] == 6
    again = make(store)
    again.load_state_dict(state)
    assert sequences(again) == whole[2:]
    assert third.sequences.tolist() == whole[2]
    reading.close()


def test_a_batch_of_a_pass_before_is_refused(store: rollstore.Store):
    seal(store, 4)
    loader = make(store, acknowledge="explicit")
    (old, _) = loader
    reading = iter(loader)
    next(reading)
    with pytest.raises(ValueError, match="not given out"):
        loader.trained(old)
    reading.close()


@pytest.mark.parametrize("acknowledge", ["auto", "explicit"])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_released_sessions_count_as_done(
    store: rollstore.Store, acknowledge: str, workers: int
):
    seal(store, 8)
    plan = rt.Plan.of(store)
    store.release("s3", force=True)
    store.release("s4", force=True)
    loader = make(store, workers, plan=plan, missing="skip", acknowledge=acknowledge)
    read = []
    for batch in loader:
        read.append(batch.sequences.tolist())
        loader.trained(batch)
    assert read == [[1, 2], [5, 6], [7, 8]]
    assert loader.state_dict()["done"] == 8


# ---------------------------------------------------------------- epochs


def test_a_run_over_epochs_resumes_anywhere(store: rollstore.Store):
    seal(store, 9)

    def run(loader: rt.Loader, stop_after: int | None) -> tuple[list[list[int]], dict[str, Any]]:
        read: list[list[int]] = []
        for epoch in range(loader.epoch, 3):
            loader.set_epoch(epoch)
            for batch in loader:
                read.append(batch.sequences.tolist())
                if len(read) == stop_after:
                    return read, loader.state_dict()
        return read, loader.state_dict()

    whole, _ = run(make(store), None)
    assert len(whole) == 15
    for stop_after in range(1, 15):
        read, state = run(make(store), stop_after)
        again = make(store)
        again.load_state_dict(state)
        assert read + run(again, None)[0] == whole


# ---------------------------------------------------------------- the end, and errors


@pytest.mark.parametrize("workers", [0, 1])
def test_the_readers_error_is_raised_in_the_loop(store: rollstore.Store, workers: int):
    seal(store, 3)
    seal_unusable(store, "torn")
    loader = make(store, workers, plan=rt.Plan.of(store))
    read: list[Any] = []
    with pytest.raises(rollstore.AlignmentError, match="torn"):
        read.extend(loader)
    assert sequences(read) == [[1, 2]]
    assert loader.state_dict()["done"] == 2


def test_a_loop_left_early_leaves_no_thread(store: rollstore.Store):
    seal(store, 20)
    before = set(threading.enumerate())
    loader = make(store, prefetch=1)
    for _ in loader:
        break
    gc.collect()
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("workers", [0, 2])
def test_following_ends_when_the_loop_is_left(store: rollstore.Store, workers: int):
    seal(store, 4)
    loader = make(store, workers, plan=rt.Follow())
    with pytest.raises(TypeError):
        len(loader)
    reading = iter(loader)
    assert sequences([next(reading), next(reading)]) == [[1, 2], [3, 4]]
    seal(store, 3)
    assert next(reading).sequences.tolist() == [5, 6]
    state = loader.state_dict()
    reading.close()
    again = make(store, plan=rt.Follow(timeout=0))
    again.load_state_dict(state)
    assert sequences(again) == [[7]]


def test_an_interrupt_while_waiting_leaves_nothing_behind(store: rollstore.Store):
    loader = make(store, plan=rt.Follow())
    before = set(threading.enumerate())
    interrupt = threading.Timer(0.3, signal_this_process)
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        next(iter(loader))
    interrupt.join()
    gc.collect()
    assert set(threading.enumerate()) <= before


def signal_this_process() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"num_workers": -1}, "num_workers"),
        ({"prefetch": -1}, "prefetch"),
        ({"num_workers": 1, "prefetch": 0}, "prefetch"),
        ({"acknowledge": "never"}, "acknowledge"),
    ],
)
def test_arguments_are_checked(store: rollstore.Store, arguments: dict[str, Any], named: str):
    seal(store, 2)
    with pytest.raises(ValueError, match=named):
        rt.Loader(rt.SealedSessions(store, batch_size=2), **arguments)
    with pytest.raises(ValueError, match="batch_size"):
        rt.Loader(rt.SealedSessions(store))


def test_memory_is_pinned_where_there_is_a_gpu(store: rollstore.Store):
    seal(store, 2)
    loader = make(store, pin_memory=True)
    if torch.cuda.is_available():
        assert all(tensor.is_pinned() for batch in loader for tensor in batch.tensors.values())
    else:
        with pytest.raises(RuntimeError):
            list(loader)
