"""Several processes, killed ones and resumed ones, over one consumer."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path
from typing import Any

import pytest

import rollstore

torch = pytest.importorskip("torch", reason="no PyTorch here: loaders were NOT tested")

from torch_stores import flat, seal, sequences  # noqa: E402

import rollstore.torch as rt  # noqa: E402
from rollstore.torch.ranks import Ranks  # noqa: E402

FORK = multiprocessing.get_context("fork")
PATIENCE = 60.0  # a test that waits for ever would say nothing


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


class Run:
    """Processes of one training run; each one's function gets its rank first."""

    def __init__(self, world: int, target: Callable[..., Any], *arguments: Any) -> None:
        self._results = [FORK.Pipe(duplex=False) for _ in range(world)]
        self.processes = [
            FORK.Process(target=self._main, args=(rank, target, *arguments), daemon=True)
            for rank in range(world)
        ]
        for process in self.processes:
            process.start()

    def _main(self, rank: int, target: Callable[..., Any], *arguments: Any) -> None:
        self._results[rank][1].send(target(rank, *arguments))

    def results(self) -> list[Any]:
        """What each function returned."""
        found = []
        for process, (receiver, _) in zip(self.processes, self._results):
            assert receiver.poll(PATIENCE), "a process gave no result"
            found.append(receiver.recv())
            process.join(PATIENCE)
            assert process.exitcode == 0
        return found

    def kill(self) -> None:
        """As the kernel does it when memory is short."""
        for process in self.processes:
            os.kill(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.join()


def held(store: rollstore.Store) -> int:
    return store.consumer("trainer").stat().held_count


# ---------------------------------------------------------------- a fair share


def train_in_step(
    rank: int, path: str, world: int, steps: int, group_size: int | None, step_done: Barrier
) -> list[list[int]]:
    """Each step needs a batch on every rank, and the next step's sessions come only after it."""
    read = []
    with rt.ConsumerLoader(
        path,
        "trainer",
        batch_size=4,
        group_size=group_size,
        rank=rank,
        world=world,
        prefetch=2,
        timeout=PATIENCE,
    ) as loader:
        for batch in loader:
            read.append(batch.sequences.tolist())
            step_done.wait(PATIENCE)
            if len(read) == steps:
                break
    return read


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("group_size", [None, 2, 4])
def test_no_rank_reads_ahead_what_another_one_waits_for(
    store: rollstore.Store, world: int, group_size: int | None
):
    steps, each = 5, 4 * world
    step_done = FORK.Barrier(world + 1)
    run = Run(world, train_in_step, store.path, world, steps, group_size, step_done)
    for _ in range(steps):
        seal(store, each, group_size=group_size)
        step_done.wait(PATIENCE)
    read = run.results()
    for step in range(steps):
        together = sorted(flat(ranks[step] for ranks in read))
        assert together == list(range(step * each + 1, (step + 1) * each + 1))
    if group_size is not None:
        for batch in flat(read):
            groups = [(number - 1) // group_size for number in batch]
            assert all(groups.count(group) == group_size for group in groups)
    info = store.consumer("trainer").stat()
    assert (info.trained_count, info.held_count) == (steps * each, 0)


def drain(rank: int, path: str, world: int, arguments: dict[str, Any]) -> list[int]:
    with rt.ConsumerLoader(
        path, "trainer", batch_size=2, rank=rank, world=world, follow=False, **arguments
    ) as loader:
        return flat(sequences(loader))


@pytest.mark.parametrize("group_size", [None, 2])
def test_ranks_end_when_nothing_is_left_though_not_all_have_as_much(
    store: rollstore.Store, group_size: int | None
):
    seal(store, 14, group_size=group_size)
    read = Run(3, drain, store.path, 3, {"group_size": group_size}).results()
    assert sorted(flat(read)) == list(range(1, 15))


def hold_a_batch(rank: int, path: str, holding: Event) -> None:
    loader = rt.ConsumerLoader(path, "trainer", batch_size=2, rank=rank, world=2)
    next(loader)
    holding.set()
    time.sleep(PATIENCE)


def test_what_a_killed_rank_held_goes_to_the_others(store: rollstore.Store):
    seal(store, 12)
    holding = FORK.Event()
    run = Run(2, hold_a_batch_or_drain, store.path, holding)
    assert holding.wait(PATIENCE)
    os.kill(run.processes[1].pid, signal.SIGKILL)
    run.processes[1].join()
    assert run._results[0][0].poll(PATIENCE)
    assert sorted(run._results[0][0].recv()) == list(range(1, 13))


def hold_a_batch_or_drain(rank: int, path: str, holding: Event) -> list[int]:
    if rank == 1:
        hold_a_batch(rank, path, holding)
    read: list[int] = []
    with rt.ConsumerLoader(path, "trainer", batch_size=2, rank=0, world=2, timeout=5) as loader:
        for batch in loader:
            read += batch.sequences.tolist()
            if len(read) == 12:
                return read
    return read


# ---------------------------------------------------------------- killed and resumed


def train_and_save(
    rank: int,
    path: str,
    world: int,
    folder: Path,
    group_size: int | None,
    together: Barrier,
) -> None:
    """Every second step is a checkpoint: what each rank has trained on, and rank 0's state."""
    trained: list[int] = []
    with rt.ConsumerLoader(
        path, "trainer", batch_size=2, group_size=group_size, rank=rank, world=world, prefetch=3
    ) as loader:
        for step, batch in enumerate(loader, 1):
            trained += batch.sequences.tolist()
            together.wait(PATIENCE)  # the gradients
            if step % 2:
                continue
            state = loader.state_dict()
            (folder / f"{step}.{rank}.json").write_text(json.dumps([trained, state]))
            together.wait(PATIENCE)  # every rank has written
            if rank == 0:
                (folder / f"{step}.{rank}.json").rename(folder / f"{step}.complete.json")
                loader.checkpointed(state)


@pytest.mark.parametrize(
    ("before", "after", "group_size"),
    [(1, 1, None), (1, 2, 2), (2, 3, None), (2, 1, 2), (3, 2, None)],
)
def test_a_run_that_is_killed_and_resumed_trains_on_each_session_once(
    store: rollstore.Store, tmp_path: Path, before: int, after: int, group_size: int | None
):
    seal(store, 80, group_size=group_size)
    together = FORK.Barrier(before)
    run = Run(before, train_and_save, store.path, before, tmp_path, group_size, together)
    until(lambda: len(list(tmp_path.glob("*.complete.json"))) >= 2)
    run.kill()
    step = max(int(path.name.split(".")[0]) for path in tmp_path.glob("*.complete.json"))
    trained, state = json.loads((tmp_path / f"{step}.complete.json").read_text())
    for rank in range(1, before):
        trained += json.loads((tmp_path / f"{step}.{rank}.json").read_text())[0]
    assert len(trained) == step * 2 * before
    rest = Run(after, resume_and_drain, store.path, after, state, group_size).results()
    assert sorted(trained + flat(rest)) == list(range(1, 81))


def resume_and_drain(
    rank: int, path: str, world: int, state: dict[str, Any], group_size: int | None
) -> list[int]:
    with rt.ConsumerLoader(
        path,
        "trainer",
        batch_size=2,
        group_size=group_size,
        rank=rank,
        world=world,
        follow=False,
    ) as loader:
        loader.load_state_dict(state)
        assert loader.lost == 0
        return flat(sequences(loader))


def test_a_process_that_ends_without_closing_gives_back(store: rollstore.Store):
    seal(store, 8)
    program = (
        "import sys, rollstore.torch\n"
        "loader = rollstore.torch.ConsumerLoader(sys.argv[1], 'trainer', batch_size=2)\n"
        "print(next(loader).sequences.tolist())\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, store.path],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "[1, 2]\n", "")
    assert held(store) == 0


# ---------------------------------------------------------------- the ranks' own file


def ranks_of(store: rollstore.Store, world: int) -> list[Ranks]:
    return [Ranks(store, "trainer", rank, world) for rank in range(world)]


def test_nobody_takes_before_all_are_there(store: rollstore.Store):
    first = Ranks(store, "trainer", 0, 3)
    second = Ranks(store, "trainer", 2, 3)
    assert not first.may_take()
    assert first.missing() == [1]
    third = Ranks(store, "trainer", 1, 3)
    assert first.missing() == []
    assert first.may_take()
    # One that came and went before another looked was there, too.
    first.leave()
    assert second.may_take()
    assert third.may_take()
    second.leave()
    third.leave()


def test_ranks_take_by_turns(store: rollstore.Store):
    first, second = ranks_of(store, 2)
    first.took(1)
    assert not first.may_take()
    assert second.may_take()
    second.took(1)
    assert first.may_take()
    first.took(1)
    first.took(-1)
    assert first.may_take()
    second.ended()
    first.took(3)
    assert first.may_take()
    second.took(0)
    assert not first.may_take()
    second.leave()
    assert first.may_take()
    first.leave()


def test_a_new_run_begins_anew_and_one_that_comes_late_where_the_others_are(
    store: rollstore.Store,
):
    first, second = ranks_of(store, 2)
    first.took(5)
    second.took(4)
    first.trained()
    second.trained()
    second.leave()
    second = Ranks(store, "trainer", 1, 2)
    assert second.may_take()  # all were there once, and nobody waits again
    second.wait_for_others(0)
    assert not second.missing()
    second.took(1)
    assert not second.may_take()
    first.leave()
    second.leave()
    alone = Ranks(store, "trainer", 0, 2)
    assert not alone.may_take()
    alone.leave()


def test_a_checkpoint_waits_for_the_other_ranks(store: rollstore.Store):
    first, second = ranks_of(store, 2)
    first.trained()
    with pytest.raises(rollstore.WaitTimeoutError, match="rank 1 has acknowledged 0 batches"):
        first.wait_for_others(0.05)
    later = threading.Timer(0.1, second.trained)
    later.start()
    first.wait_for_others(PATIENCE)
    later.join()
    first.trained()
    second.finished()
    first.wait_for_others(0)
    first.leave()
    second.leave()


def test_only_one_rank_is_in_the_middle_of_taking(store: rollstore.Store):
    first, second = ranks_of(store, 2)
    with first.taking(lambda: False) as inside:
        assert inside
        with second.taking(lambda: True) as also:
            assert not also
    with second.taking(lambda: True) as inside:
        assert inside
    first.leave()
    second.leave()


def test_a_rank_is_there_once(store: rollstore.Store):
    first = Ranks(store, "trainer", 0, 1)
    with pytest.raises(rollstore.HeldError, match=r'rank 0 of consumer "trainer"'):
        Ranks(store, "trainer", 0, 1)
    other = Ranks(store, "another", 0, 1)
    first.leave()
    first.leave()
    again = Ranks(store, "trainer", 0, 1)
    again.leave()
    other.leave()


def test_two_loaders_of_groups_that_do_not_know_of_each_other_are_told(store: rollstore.Store):
    seal(store, 4, group_size=2)
    arguments = {"batch_size": 2, "group_size": 2, "follow": False}
    with rt.ConsumerLoader(store, "trainer", **arguments) as loader:
        next(loader)
        with rt.ConsumerLoader(store, "trainer", **arguments) as other:
            with pytest.raises(rollstore.HeldError, match="as world"):
                next(other)


def test_a_forked_process_does_not_keep_a_rank_alive(store: rollstore.Store):
    first = Ranks(store, "trainer", 0, 2)
    proceed = FORK.Event()
    child = FORK.Process(target=proceed.wait, args=(PATIENCE,))
    child.start()
    first.leave()
    other = Ranks(store, "trainer", 1, 2)
    assert other.missing() == [0]
    proceed.set()
    child.join()
    other.leave()


def test_the_ranks_file_has_the_stores_rights(path: Any):
    with rollstore.open(path, "x", capacity="4M", group=True) as store:
        Ranks(store, "trainer", 0, 2).leave()
        (file,) = Path(store.path).glob("ranks-*")
        data = Path(store.path) / "data.mdb"
        assert file.stat().st_mode & 0o777 == data.stat().st_mode & 0o666


def test_ranks_other_than_0_have_no_place_of_their_own(store: rollstore.Store):
    seal(store, 8)
    loaders = [
        rt.ConsumerLoader(store, "trainer", batch_size=2, rank=rank, world=2) for rank in range(2)
    ]
    states: list[Any] = [None, None]

    def train(rank: int) -> None:
        next(loaders[rank])
        states[rank] = loaders[rank].state_dict()

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert states[0]["place"] is not None
    assert states[1]["place"] is None
    assert loaders[1].checkpointed(states[1]) == 0
    assert loaders[0].checkpointed(states[0]) == 4
    for loader in loaders:
        loader.close()
    with rt.ConsumerLoader(store, "trainer", batch_size=2, rank=1, world=2) as other:
        with pytest.raises(rt.StateError, match="rank 1"):
            other.load_state_dict(states[1])
        taken = store.consumer("trainer").take(2, timeout=0)
        other.load_state_dict(states[0])
        taken.acknowledge()  # rank 0 resumes, nobody else


def test_a_rank_that_is_missing_is_named(store: rollstore.Store):
    seal(store, 8)
    with rt.ConsumerLoader(store, "trainer", batch_size=2, rank=0, world=2, timeout=0.3) as loader:
        with pytest.raises(rollstore.WaitTimeoutError, match="rank 1 is not loading"):
            next(loader)
