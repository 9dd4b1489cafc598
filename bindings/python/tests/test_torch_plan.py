"""Plans: order, ranks, workers, what is left out, and the state."""

from __future__ import annotations

import io
import itertools
import json
from typing import Any

import pytest

import rollstore

torch = pytest.importorskip("torch", reason="no PyTorch here: plans were NOT tested")

from torch_stores import flat, put, seal, seal_one, seal_unusable  # noqa: E402

import rollstore.torch as rt  # noqa: E402
from rollstore.torch.plan import Shard  # noqa: E402


def read(plan: rt.Plan, shard: Shard, done: int, size: int, **more: Any) -> list[list[int]]:
    return [flat(units) for _, units in plan.batches(shard, done, size, **more)]


def test_without_a_seed_the_ready_order_is_kept(store: rollstore.Store):
    seal(store, 7)
    assert read(rt.Plan.of(store), Shard(), 0, 3) == [[1, 2, 3], [4, 5, 6], [7]]


def test_a_seeded_order_is_the_same_for_ever(store: rollstore.Store):
    seal(store, 10)
    plan = rt.Plan.of(store, seed=5)
    assert flat(read(plan, Shard(), 0, 4)) == [5, 3, 2, 10, 1, 6, 8, 7, 9, 4]
    assert flat(read(plan.with_epoch(1), Shard(), 0, 4)) == [7, 10, 9, 3, 4, 8, 2, 5, 1, 6]


def test_seeds_and_epochs_give_different_orders_of_the_same_sessions(store: rollstore.Store):
    seal(store, 40)
    plans = [rt.Plan.of(store, seed=seed, epoch=epoch) for seed in (0, 1) for epoch in (0, 1)]
    orders = [tuple(flat(read(plan, Shard(), 0, 8))) for plan in plans]
    assert len(set(orders)) == 4
    assert {tuple(sorted(order)) for order in orders} == {tuple(range(1, 41))}


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_share_a_plan_with_nothing_twice_or_left_out(
    store: rollstore.Store, world: int, size: int
):
    seal(store, 23)
    plan = rt.Plan.of(store, seed=1)
    parts = [flat(read(plan, Shard(rank, world), 0, size)) for rank in range(world)]
    assert sorted(flat(parts)) == list(range(1, 24))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_the_first_batches_of_all_ranks_are_the_beginning_of_the_order(store: rollstore.Store):
    seal(store, 24)
    plan = rt.Plan.of(store, seed=1)
    whole = flat(read(plan, Shard(), 0, 1))
    for batches in (1, 2, 3):
        done = [read(plan, Shard(rank, 3), 0, 2)[:batches] for rank in range(3)]
        assert sorted(flat(flat(done))) == sorted(whole[: batches * 2 * 3])


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("drop_last", [False, True])
def test_workers_by_turns_give_the_ranks_order(
    store: rollstore.Store, workers: int, drop_last: bool
):
    seal(store, 31)
    plan = rt.Plan.of(store, seed=2)
    for rank, done in itertools.product(range(2), (0, 4, 6)):
        shard = Shard(rank, 2)
        alone = read(plan, shard, done, 2, drop_last=drop_last)
        each = [
            read(plan, shard, done, 2, worker=worker, workers=workers, drop_last=drop_last)
            for worker in range(workers)
        ]
        by_turns = [it for turn in itertools.zip_longest(*each) for it in turn if it is not None]
        assert by_turns == alone


@pytest.mark.parametrize("world", [1, 2, 3])
def test_drop_last_gives_each_rank_as_many_full_batches(store: rollstore.Store, world: int):
    seal(store, 23)
    plan = rt.Plan.of(store, seed=1)
    for done in (0, 2):
        parts = [read(plan, Shard(r, world), done, 2, drop_last=True) for r in range(world)]
        assert {len(part) for part in parts} == {(23 - done * world) // (2 * world)}
        assert {len(batch) for part in parts for batch in part} == {2}


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (3, 2), (3, 1), (4, 4)])
def test_other_ranks_go_on_with_exactly_the_rest(store: rollstore.Store, before: int, after: int):
    seal(store, 29)
    plan = rt.Plan.of(store, seed=9)
    size = 2
    for batches in range(29 // (size * before) + 2):
        first = [read(plan, Shard(r, before), 0, size)[:batches] for r in range(before)]
        shards = [Shard(0, before).resharded(batches * size, rank, after) for rank in range(after)]
        rest = [read(plan, shard, 0, 3) for shard in shards]
        assert sorted(flat(flat(first)) + flat(flat(rest))) == list(range(1, 30))


def test_bounds(store: rollstore.Store):
    seal(store, 9)
    assert read(rt.Plan.of(store, after=2, until=6), Shard(), 0, 10) == [[3, 4, 5, 6]]
    assert len(rt.Plan.of(store, after=9)) == 0
    assert read(rt.Plan.of(store, after=9), Shard(), 0, 4) == []


# ---------------------------------------------------------------- groups


def test_whole_groups_only_and_what_is_left_out_is_counted(store: rollstore.Store):
    for number, group in enumerate([0, 1, 0, 1, 1, 2, 0, 2], 1):
        seal_one(store, number, group_index=group, index=-number + 100)
    plan = rt.Plan.of(store, group_size=3)
    # By index within a group; groups in the order in which they became whole.
    assert plan.units.tolist() == [[5, 4, 2], [7, 3, 1]]
    assert plan.left_out.incomplete == 2
    assert plan.session_count == 6
    with pytest.raises(rt.GroupError, match=r'"s6".*group_index 2'):
        rt.Plan.of(store, group_size=3, incomplete="raise")


def test_a_group_index_that_comes_again_begins_another_group(store: rollstore.Store):
    seal(store, 5, group_index=3, index=None)
    plan = rt.Plan.of(store, group_size=2)
    assert plan.units.tolist() == [[1, 2], [3, 4]]
    assert plan.left_out.incomplete == 1


def test_a_session_without_a_group_is_named(store: rollstore.Store):
    seal(store, 1)
    with pytest.raises(rt.GroupError, match='"s1" was sealed without a group_index'):
        rt.Plan.of(store, group_size=2)


def test_ranks_and_workers_keep_groups_whole(store: rollstore.Store):
    seal(store, 30, group_size=3)
    plan = rt.Plan.of(store, group_size=3, seed=4)
    for world in (1, 2, 3):
        batches = flat(read(plan, Shard(r, world), 0, 2) for r in range(world))
        assert sorted(flat(batches)) == list(range(1, 31))
        for batch in batches:
            groups = [(number - 1) // 3 for number in batch]
            assert groups == [group for group in dict.fromkeys(groups) for _ in range(3)]


def test_statuses_leave_sessions_out(store: rollstore.Store):
    for number, status in enumerate(["completed", "failed", "truncated", "aborted"], 1):
        seal_one(store, number, status=status)
    plan = rt.Plan.of(store, statuses={"completed", "truncated"})
    assert plan.units.ravel().tolist() == [1, 3]
    assert plan.left_out.status == 2


# ---------------------------------------------------------------- staleness


def test_staleness_is_judged_by_the_oldest_turn(store: rollstore.Store):
    turns = {1: [5, 9], 2: [7, 9], 3: [9], 4: [6]}
    seal(store, 4, versions=turns.__getitem__)
    plan = rt.Plan.of(store, staleness=rt.Staleness(limit=2, current=9))
    assert plan.units.ravel().tolist() == [2, 3]
    assert plan.left_out.stale == 2
    with pytest.raises(
        rt.StaleError, match='"s1".*version 5, 4 behind the trainer\'s 9.*limit is 2'
    ):
        rt.Plan.of(store, staleness=rt.Staleness(2, lambda: 9, over="raise"))


def test_one_stale_session_leaves_its_group_out(store: rollstore.Store):
    seal(store, 4, group_size=2, versions=lambda number: [1 if number == 2 else 8])
    plan = rt.Plan.of(store, group_size=2, staleness=rt.Staleness(3, 8))
    assert plan.units.tolist() == [[3, 4]]
    assert plan.left_out.stale == 2


def test_a_trainer_that_counts_anew_is_noticed(store: rollstore.Store):
    seal(store, 3, versions=lambda number: [number, number])
    with pytest.raises(rt.VersionRestartError, match='"s2".*version 2.*the trainer is at 1'):
        rt.Plan.of(store, staleness=rt.Staleness(5, 1))
    with pytest.warns(rt.VersionRestartWarning, match="restarted trainer"):
        plan = rt.Plan.of(store, staleness=rt.Staleness(5, 1, restart="warn"))
    assert len(plan) == 3
    dropped = rt.Plan.of(store, staleness=rt.Staleness(5, 1, restart="drop"))
    assert dropped.units.ravel().tolist() == [1]
    assert dropped.left_out.restarted == 2


@pytest.mark.parametrize("turns", [["default"], [None], [3, "default"], [None, 3]])
def test_a_turn_without_a_version_is_not_taken_for_fresh(
    store: rollstore.Store, turns: list[int | str | None]
):
    seal_one(store, 1, versions=turns)
    with pytest.raises(rt.UnversionedError, match='"s1"'):
        rt.Plan.of(store, staleness=rt.Staleness(5, 3))
    assert len(rt.Plan.of(store, staleness=rt.Staleness(5, 3, unknown="keep"))) == 1
    dropped = rt.Plan.of(store, staleness=rt.Staleness(5, 3, unknown="drop"))
    assert (len(dropped), dropped.left_out.unversioned) == (0, 1)


def test_what_numbers_there_are_count_where_unknown_ones_are_kept(store: rollstore.Store):
    seal_one(store, 1, versions=["default", 3])
    assert rt.Plan.of(store, staleness=rt.Staleness(5, 9, unknown="keep")).left_out.stale == 1


# ---------------------------------------------------------------- sessions that give no sample


def test_unusable_sessions_can_be_left_out(store: rollstore.Store):
    seal(store, 2)
    seal_unusable(store, "torn")
    put(store, "long", 0, [1] * 50, [2])
    store.seal("long", reward=1.0)
    plan = rt.Plan.of(store, unusable="drop", token_max=40)
    assert plan.units.ravel().tolist() == [1, 2]
    assert plan.left_out.unusable == 2
    assert len(rt.Plan.of(store)) == 4  # found out, and raised, when they are read


def test_a_session_without_a_reward_is_unusable_in_a_group(store: rollstore.Store):
    seal_one(store, 1, group_size=2)
    seal_one(store, 2, group_size=2, reward=None)
    plan = rt.Plan.of(store, group_size=2, unusable="drop")
    assert (len(plan), plan.left_out.unusable) == (0, 2)


# ---------------------------------------------------------------- the state


def test_the_state_is_numbers_and_strings_and_gives_the_same_plan(store: rollstore.Store):
    seal(store, 12, group_size=3)
    plan = rt.Plan.of(store, group_size=3, seed=11, epoch=2)
    state = json.loads(json.dumps(plan.state_dict()))
    again = rt.Plan.from_state(state)
    assert again.order.tolist() == plan.order.tolist()
    assert again.units.tolist() == plan.units.tolist()
    assert (again.group_size, again.seed, again.epoch) == (3, 11, 2)
    assert again.left_out == plan.left_out
    saved = io.BytesIO()
    torch.save(plan.state_dict(), saved)
    saved.seek(0)
    assert torch.load(saved) == plan.state_dict()  # weights_only where that is the default


def test_the_state_of_an_empty_plan(store: rollstore.Store):
    assert len(rt.Plan.from_state(rt.Plan.of(store).state_dict())) == 0


def test_a_plan_does_not_change_with_the_store(store: rollstore.Store):
    seal(store, 8)
    plan = rt.Plan.of(store, seed=1)
    order = read(plan, Shard(), 0, 3)
    seal(store, 8)
    store.release("s3", force=True)
    again = rt.Plan.from_state(plan.state_dict())
    again.check_store(store)
    assert read(again, Shard(), 0, 3) == order


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", 2),
        ("units", "?"),
        ("units", "AAAA"),
        ("unit_count", 4),
        ("unit_count", 6),
        ("unit_count", -1),
        ("unit_count", "5"),
        ("group_size", 2),
        ("left_out", [1]),
        ("left_out", None),
    ],
)
def test_a_damaged_state_is_refused(store: rollstore.Store, field: str, value: Any):
    seal(store, 5)
    state = rt.Plan.of(store).state_dict()
    with pytest.raises(rt.StateError):
        rt.Plan.from_state({**state, field: value})
    del state[field]
    with pytest.raises(rt.StateError):
        rt.Plan.from_state(state)


def test_a_plan_of_another_store_is_refused(store: rollstore.Store, tmp_path: Any):
    seal(store, 3)
    plan = rt.Plan.of(store)
    with rollstore.open(tmp_path / "other", "x", capacity=4 << 20) as other:
        seal(other, 3)
        with pytest.raises(rt.StateError, match="another store"):
            plan.check_store(other)


@pytest.mark.parametrize(
    "wrong",
    [
        {"group_size": 0},
        {"incomplete": "skip"},
        {"unusable": "skip"},
    ],
)
def test_arguments_are_checked(store: rollstore.Store, wrong: dict[str, Any]):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        rt.Plan.of(store, **wrong)


@pytest.mark.parametrize(
    "wrong", [{"limit": -1}, {"over": "x"}, {"restart": "x"}, {"unknown": "x"}]
)
def test_limits_are_checked(wrong: dict[str, Any]):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        rt.Staleness(**{"limit": 1, "current": 1, **wrong})
