"""Stores of many small sessions, for the tests of datasets and loaders."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

import rollstore


def seal(
    store: rollstore.Store,
    count: int,
    *,
    group_size: int | None = None,
    versions: Callable[[int], Iterable[int | str | None]] = lambda number: [1],
    **outcome: Any,
) -> None:
    """Put and seal `count` more sessions: s1, s2, ... by their sequence numbers.

    Their lengths, prompts and numbers of turns differ. versions: of each turn of a session.
    """
    first = store.stat().newest_sequence + 1
    for number in range(first, first + count):
        seal_one(store, number, group_size=group_size, versions=versions(number), **outcome)


def seal_one(
    store: rollstore.Store,
    number: int,
    *,
    group_size: int | None = None,
    versions: Iterable[int | str | None] = (1,),
    **outcome: Any,
) -> None:
    """Put and seal the session s<number>."""
    name = f"s{number}"
    prompt = [number, 7]
    for turn, version in enumerate(versions):
        tokens = [number % 100 + token for token in range(1 + (number + turn) % 4)]
        put(store, name, turn, prompt, tokens, version)
        prompt = [*prompt, *tokens, 9]
    given = {"reward": float(number * number % 7), "index": number}
    if group_size is not None:
        given["group_index"] = (number - 1) // group_size
    store.seal(name, **{**given, **outcome})


def put(
    store: rollstore.Store,
    name: str,
    turn: int,
    prompt: list[int],
    tokens: list[int],
    version: int | str | None = 1,
) -> None:
    """One turn with two candidates a token."""
    store.put(
        name,
        turn,
        prompt=prompt,
        token_ids=tokens,
        token_logprobs=np.full(len(tokens), -0.25, np.float32),
        topk_ids=[[token, token + 1000] for token in tokens],
        topk_logprobs=np.tile(np.array([-0.25, -2.0], np.float32), (len(tokens), 1)),
        weight_version=version,
    )


def seal_unusable(store: rollstore.Store, name: str, **outcome: Any) -> None:
    """A session whose second prompt contradicts its first turn: it gives no sample."""
    put(store, name, 0, [1, 2], [3, 4])
    put(store, name, 1, [1, 2, 8, 8, 8], [5])
    store.seal(name, **{"reward": 1.0, **outcome})


def sequences(batches: Iterable[Any]) -> list[list[int]]:
    """The sequence numbers of batches or samples."""
    return [
        batch.sequences.tolist() if hasattr(batch, "sequences") else [batch["sequence"]]
        for batch in batches
    ]


def flat(lists: Iterable[Iterable[int]]) -> list[int]:
    """All of them in one list."""
    return [number for each in lists for number in each]
