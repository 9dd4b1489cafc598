"""Snapshots, sessions and turns: reading without a copy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np

from rollstore import _rollstore
from rollstore._batch import Batch, Sample, make_batch, make_sample
from rollstore._consumer import ConsumerInfo
from rollstore._errors import NotFoundError
from rollstore._rollstore import Turn

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from rollstore._batch import Layout, Named
    from rollstore._store import Store

__all__ = ["Session", "SessionInfo", "Sessions", "Snapshot"]


class SessionInfo(NamedTuple):
    """What the store knows of a session beside its turns.

    id: its name; bytes that are no UTF-8 are surrogates (os.fsencode gives them back).
    key: 16 bytes, by which it is found.
    state: "open" or "sealed".
    sequence: its place in the ready order, from 1; 0 while open.
    turn_count, top_k: turns, and the widest turn's candidates a token.
    status: "completed", "truncated", "aborted", "failed"; None while open.
    reward, group_index, index: as sealed, or None.
    generated_count: generated tokens of all turns.
    sequence_count: tokens of prompt and output after the last turn.
    size: bytes that its turns take.
    weight_version_min, weight_version_max: over the turns that have a number, or None.
    created_ns, changed_ns: Unix time of the first turn and the last change, nanoseconds.
    """

    id: str
    key: bytes
    state: str
    sequence: int
    turn_count: int
    top_k: int
    status: str | None
    reward: float | None
    group_index: int | None
    index: int | None  # type: ignore[assignment]  # in place of tuple.index
    generated_count: int
    sequence_count: int
    size: int
    weight_version_min: int | None
    weight_version_max: int | None
    created_ns: int
    changed_ns: int


class Session(Sequence[Turn]):
    """A session of a snapshot: a sequence of its turns, and what SessionInfo has.

    `session[0]` is its first turn, `session[-1]` its last; `len(session)` the number of turns.
    """

    __slots__ = ("_snapshot", "info")

    def __init__(self, snapshot: Snapshot, info: SessionInfo) -> None:
        self._snapshot = snapshot
        self.info = info

    @property
    def snapshot(self) -> Snapshot:
        """The snapshot it is of."""
        return self._snapshot

    @property
    def id(self) -> str:
        """Its name."""
        return self.info.id

    @property
    def key(self) -> bytes:
        """16 bytes, by which it is found."""
        return self.info.key

    @property
    def state(self) -> str:
        """ "open" or "sealed"."""
        return self.info.state

    @property
    def sequence(self) -> int:
        """Its place in the ready order, from 1; 0 while open."""
        return self.info.sequence

    @property
    def turn_count(self) -> int:
        """Number of turns."""
        return self.info.turn_count

    @property
    def top_k(self) -> int:
        """The widest turn's candidates a token."""
        return self.info.top_k

    @property
    def status(self) -> str | None:
        """ "completed", "truncated", "aborted", "failed"; None while open."""
        return self.info.status

    @property
    def reward(self) -> float | None:
        """As sealed, or None."""
        return self.info.reward

    @property
    def group_index(self) -> int | None:
        """As sealed, or None."""
        return self.info.group_index

    @property
    def index(self) -> int | None:  # type: ignore[override]
        """As sealed, or None. (Sequence.index, a search, is not offered: turns do not compare.)"""
        return self.info.index

    @property
    def generated_count(self) -> int:
        """Generated tokens of all turns."""
        return self.info.generated_count

    @property
    def sequence_count(self) -> int:
        """Tokens of prompt and output after the last turn."""
        return self.info.sequence_count

    @property
    def size(self) -> int:
        """Bytes that its turns take."""
        return self.info.size

    @property
    def weight_version_min(self) -> int | None:
        """Over the turns that have a number, or None."""
        return self.info.weight_version_min

    @property
    def weight_version_max(self) -> int | None:
        """Over the turns that have a number, or None."""
        return self.info.weight_version_max

    @property
    def created(self) -> float:
        """Unix time of the first turn, seconds."""
        return self.info.created_ns / 1e9

    @property
    def changed(self) -> float:
        """Unix time of the last change, seconds."""
        return self.info.changed_ns / 1e9

    @property
    def weight_versions(self) -> list[str | None]:
        """The weight version of each turn, as the engine gave it."""
        return [turn.weight_version for turn in self]

    def __len__(self) -> int:
        return self.info.turn_count

    @overload
    def __getitem__(self, turn: int) -> Turn: ...
    @overload
    def __getitem__(self, turn: slice) -> list[Turn]: ...
    def __getitem__(self, turn: int | slice) -> Turn | list[Turn]:
        if isinstance(turn, slice):
            return [self[i] for i in range(*turn.indices(len(self)))]
        count = self.info.turn_count
        number = turn + count if turn < 0 else turn
        if not 0 <= number < count:
            raise NotFoundError(
                f'session "{self.info.id}" has {count} turns: there is no turn {turn}',
                code=40,
                kind="not_found",
                field="turn",
            )
        return self._snapshot._turn(self.info.key, number)

    def __iter__(self) -> Iterator[Turn]:
        for number in range(self.info.turn_count):
            yield self._snapshot._turn(self.info.key, number)

    def __repr__(self) -> str:
        info = self.info
        return f"<rollstore.Session {info.id!r}: {info.state}, {info.turn_count} turns>"

    def prompt(self, turn: int) -> NDArray[np.int32]:
        """The whole prompt of a turn, int32, as the request had it: a new array.

        Stored is only what it adds to the turns before; these are put together here.
        """
        tokens: NDArray[np.int32] = np.empty(0, np.int32)
        number = range(self.info.turn_count)[turn]
        for i in range(number + 1):
            found = self[i]
            tokens = np.concatenate([tokens[: found.prefix_count], found.prompt_ids])
            if i < number:
                tokens = np.concatenate([tokens, found.token_ids])
        return tokens

    def sample(
        self,
        *,
        top_k: int = 0,
        trim_max: int = 1,
        token_max: int = 0,
        torch: bool = False,
    ) -> Sample:
        """The training sample of the session, open ones too: new arrays.

        top_k: candidates a token of the arrays; 0: the widest turn's.
        trim_max: most tokens at a turn's end that the next prompt may leave out.
        token_max: leave out the last turns, whole, until the sample fits; 0: no limit.
        torch: torch tensors in place of NumPy arrays.

        AlignmentError names session and turn where a prompt contradicts the tokens before it;
        LimitError when the first turn alone is over token_max.
        """
        return make_sample(
            self._snapshot,
            self.info.id,
            top_k=top_k,
            trim_max=trim_max,
            token_max=token_max,
            torch=torch,
        )


class Sessions(Mapping[str, Session]):
    """All sessions of a snapshot by id.

    Iterates over the ids of sealed sessions in ready order, then of open ones.
    """

    __slots__ = ("_snapshot",)

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def __getitem__(self, session: str | bytes) -> Session:
        return Session(self._snapshot, SessionInfo._make(self._snapshot._get(session)))

    def __contains__(self, session: object) -> bool:
        if not isinstance(session, (str, bytes)):
            return False
        try:
            self._snapshot._get(session)
        except NotFoundError:
            return False
        return True

    def __len__(self) -> int:
        return sum(1 for _ in self._snapshot._all())

    def __iter__(self) -> Iterator[str]:
        for session in self._snapshot.ready():
            yield session.id
        for session in self._snapshot.open_sessions():
            yield session.id

    def __repr__(self) -> str:
        return f"<rollstore.Sessions: {len(self)} sessions>"


class Snapshot(_rollstore.Snapshot):
    """The store as of the last commit. Use it as a context manager, and soon close it.

    Everything read from it points into the store's memory, and does not change until it is closed.
    Each array keeps it alive; closing it while arrays are out is a BusyError (a BufferError, as
    with memoryview). An open snapshot keeps released space from being used again.
    """

    __slots__ = ()

    @property
    def sessions(self) -> Sessions:
        """All sessions by id."""
        return Sessions(self)

    def session_by_key(self, key: bytes) -> Session:
        """The session of that key (SessionInfo.key). NotFoundError."""
        # The first one after the number before it.
        before = (int.from_bytes(key, "big") - 1) % (1 << 128)
        found = self._next(None if before == (1 << 128) - 1 else before.to_bytes(16, "big"))
        if len(key) != 16 or found is None or found[1] != key:
            raise NotFoundError(
                f"there is no session of key {key.hex()}", code=40, kind="not_found", field="key"
            )
        return Session(self, SessionInfo._make(found))

    def session_by_sequence(self, sequence: int) -> Session:
        """The sealed session of that place in the ready order. NotFoundError."""
        found = self._next_ready(sequence - 1) if sequence > 0 else None
        if found is None or found[3] != sequence:
            raise NotFoundError(
                f"there is no session of sequence number {sequence}",
                code=40,
                kind="not_found",
                field="sequence",
            )
        return Session(self, SessionInfo._make(found))

    def ready(self, after: int = 0) -> Iterator[Session]:
        """The sealed sessions in ready order, those with a sequence number over `after`."""
        found = self._next_ready(after)
        while found is not None:
            info = SessionInfo._make(found)
            yield Session(self, info)
            found = self._next_ready(info.sequence)

    def open_sessions(self) -> Iterator[Session]:
        """The sessions without an outcome, in no order that means anything."""
        for info in self._all():
            if info.state == "open":
                yield Session(self, info)

    def _all(self) -> Iterator[SessionInfo]:
        found = self._next(None)
        while found is not None:
            info = SessionInfo._make(found)
            yield info
            found = self._next(info.key)

    def consumers(self) -> list[ConsumerInfo]:
        """All consumers."""
        return [ConsumerInfo._make(fields) for fields in self._consumers()]

    def batch(
        self,
        sessions: Iterable[Named],
        *,
        layout: Layout = "packed",
        top_k: int = 0,
        trim_max: int = 1,
        token_max: int = 0,
        pad_id: int = 0,
        length: int | None = None,
        response_length: int | None = None,
        torch: bool = False,
        pin_memory: bool = False,
        out: Batch | None = None,
        threads: int = 1,
    ) -> Batch:
        """The samples of several sessions as one batch of new arrays, or written into `out`.

        sessions: ids, Session, SessionInfo or Lease objects.
        layout: "packed" (one after another, with cu_seqlens) or "padded" ([batch, length]).
        top_k, trim_max, token_max: as with Session.sample; top_k 0 is the widest of the batch.
        pad_id: token that fills padded rows on the right.
        length, response_length: of padded rows, at least the largest; None: the largest.
        torch: torch tensors; pin_memory: in page-locked memory, for copies to a GPU that overlap
            (implies torch; RuntimeError where no GPU is).
        out: a batch whose arrays are written to again when they are large enough; what is returned
            has views of them. None makes new arrays.
        threads: how many copy at once, 1 to 64.

        The GIL is free while it is filled. Errors name the session: `error.index` is its place.
        """
        return make_batch(
            self,
            sessions,
            layout=layout,
            top_k=top_k,
            trim_max=trim_max,
            token_max=token_max,
            pad_id=pad_id,
            length=length,
            response_length=response_length,
            torch=torch or pin_memory,
            pin_memory=pin_memory,
            out=out,
            threads=threads,
        )

    @property
    def store(self) -> Store:  # what a Store was given comes back as one
        """The store it is of."""
        found: Any = super().store
        return found  # type: ignore[no-any-return]

    def __reduce__(self) -> Any:
        raise TypeError("a snapshot belongs to its process: pickle the store and session ids")

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"transaction {self.id}"
        return f"<rollstore.Snapshot of {self.store.path}: {state}>"
