"""Consumers: who has trained on what."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from rollstore._errors import NotFoundError

if TYPE_CHECKING:
    from rollstore._snapshot import Session, Snapshot
    from rollstore._store import Store

__all__ = ["Consumer", "ConsumerInfo", "Lease", "Leases"]

LEASE_SECONDS = 600.0  # the library's default: longer than a training step


class ConsumerInfo(NamedTuple):
    """A consumer's place and counts.

    next: the first sequence number never given out. settled: everything below is committed.
    waiting_count: sealed sessions it was never given. free_count: given and come back.
    held_count: leased now. trained_count: acknowledged, not committed. committed_count: committed
    and still stored. given_total, again_total, trained_total: ever given, of these again, ever
    acknowledged. created_ns, changed_ns: Unix time, nanoseconds.
    """

    name: str
    next: int
    settled: int
    waiting_count: int
    free_count: int
    held_count: int
    trained_count: int
    committed_count: int
    given_total: int
    again_total: int
    trained_total: int
    created_ns: int
    changed_ns: int


class Lease:
    """One session, leased: sequence, key, given_count (1 the first time), session_id.

    As a context manager it is acknowledged at the end, or given back when an exception ends it.
    """

    __slots__ = ("_consumer", "_fields", "_session_id", "settled")

    def __init__(self, consumer: Consumer, fields: tuple[int, int, bytes, int, int]) -> None:
        self._consumer = consumer
        self._fields = fields
        self._session_id: str | None = None
        self.settled = False
        """True after it was acknowledged or given back through this object."""

    @property
    def sequence(self) -> int:
        """The session's place in the ready order."""
        return self._fields[0]

    @property
    def lease_id(self) -> int:
        """Names this giving, so that a late acknowledgement is told apart."""
        return self._fields[1]

    @property
    def key(self) -> bytes:
        """The session's key."""
        return self._fields[2]

    @property
    def given_count(self) -> int:
        """How often the session was given; 1 the first time."""
        return self._fields[3]

    @property
    def expires(self) -> float:
        """When the lease ends, in seconds of time.clock_gettime(time.CLOCK_BOOTTIME)."""
        return self._fields[4] / 1e9

    @property
    def seconds_left(self) -> float:
        """Until the lease ends; below 0 it has ended."""
        return self.expires - time.clock_gettime(time.CLOCK_BOOTTIME)

    @property
    def session_id(self) -> str:
        """The session's name; looked up once. NotFoundError when it was released by force."""
        if self._session_id is None:
            with self._consumer.store.snapshot() as snapshot:
                self._session_id = self.session(snapshot).id
        return self._session_id

    def session(self, snapshot: Snapshot) -> Session:
        """The session, in a snapshot that was opened after the lease was given."""
        session = snapshot.session_by_sequence(self.sequence)
        if session.key != self.key:
            raise NotFoundError(
                "the leased session was released", code=40, kind="not_found", field="key"
            )
        return session

    def acknowledge(self) -> None:
        """The session was trained on. LeaseError when the lease had ended and is somebody's."""
        self._consumer.acknowledge([self])

    def give_back(self) -> None:
        """Hand the session back untrained: it is given again first."""
        self._consumer.give_back([self])

    def renew(self, lease: float = LEASE_SECONDS) -> None:
        """Make it last `lease` seconds from now."""
        self._consumer.renew([self], lease)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self.settled:
            (self.acknowledge if exc_type is None else self.give_back)()

    def __repr__(self) -> str:
        state = "settled" if self.settled else f"{self.seconds_left:.0f} s left"
        return f"<rollstore.Lease of session {self.sequence}: {state}>"


class Leases(Sequence[Lease]):
    """What Consumer.take gave. As a context manager: all are acknowledged at the end, or given
    back when an exception ends it, except those that were settled by hand."""

    __slots__ = ("_consumer", "_leases")

    def __init__(self, consumer: Consumer, leases: Iterable[Lease]) -> None:
        self._consumer = consumer
        self._leases = tuple(leases)

    def __len__(self) -> int:
        return len(self._leases)

    @overload
    def __getitem__(self, index: int) -> Lease: ...
    @overload
    def __getitem__(self, index: slice) -> Leases: ...
    def __getitem__(self, index: int | slice) -> Lease | Leases:
        if isinstance(index, slice):
            return Leases(self._consumer, self._leases[index])
        return self._leases[index]

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases)

    @property
    def unsettled(self) -> list[Lease]:
        """Those that were neither acknowledged nor given back."""
        return [lease for lease in self._leases if not lease.settled]

    def acknowledge(self) -> None:
        """Acknowledge what is not settled, all or none."""
        self._consumer.acknowledge(self.unsettled)

    def give_back(self) -> None:
        """Give back what is not settled, all or none."""
        self._consumer.give_back(self.unsettled)

    def renew(self, lease: float = LEASE_SECONDS) -> None:
        """Make what is not settled last `lease` seconds from now."""
        self._consumer.renew(self.unsettled, lease)

    def __enter__(self) -> Leases:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        (self.acknowledge if exc_type is None else self.give_back)()

    def __repr__(self) -> str:
        return f"<rollstore.Leases: {len(self)}, {len(self.unsettled)} unsettled>"


class Consumer:
    """A name in the store with its own place in the ready order; see rollstore/consumer.h.

    Sessions given to it are leased; acknowledged when trained on; committed when a checkpoint that
    holds its place is safe. Made by Store.consumer; pickles as the store and the name.
    """

    __slots__ = ("_name", "_store")

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name

    @property
    def store(self) -> Store:
        """The store it is in."""
        return self._store

    @property
    def name(self) -> str:
        """Its name."""
        return self._name

    def take(
        self, max: int = 1, *, lease: float = LEASE_SECONDS, timeout: float | None = None
    ) -> Leases:
        """Lease up to `max` sessions in ready order: first those that came back, then new ones.

        lease: seconds that each lasts. timeout: seconds to wait for the first, None without end.
        WaitTimeoutError when none came. The GIL is free; a signal is noticed within 0.1 s.
        """
        return self._leases(self._store._consumer_take(self._name, max, lease, timeout))

    def _leases(self, fields: Iterable[tuple[int, int, bytes, int, int]]) -> Leases:
        return Leases(self, [Lease(self, each) for each in fields])

    def acknowledge(self, leases: Iterable[Lease]) -> None:
        """These were trained on; all or none. Twice is fine.

        LeaseError: one had ended and was given to somebody else; `error.index` is its place.
        """
        leases = list(leases)
        if leases:
            self._store._consumer_acknowledge(self._name, tuple(each._fields for each in leases))
        for each in leases:
            each.settled = True

    def give_back(self, leases: Iterable[Lease]) -> None:
        """Hand these back untrained: they are given again first. Errors as acknowledge."""
        leases = list(leases)
        if leases:
            self._store._consumer_return(self._name, tuple(each._fields for each in leases))
        for each in leases:
            each.settled = True

    def renew(self, leases: Iterable[Lease], lease: float = LEASE_SECONDS) -> None:
        """Make these last `lease` seconds from now. Errors as acknowledge."""
        leases = list(leases)
        if not leases:
            return
        fields = tuple(each._fields for each in leases)
        for each, renewed in zip(leases, self._store._consumer_renew(self._name, fields, lease)):
            each._fields = renewed

    def place(self) -> bytes:
        """What is trained or committed now, as bytes to store in a checkpoint."""
        return self._store._consumer_place(self._name)

    def commit(self, place: bytes) -> None:
        """The checkpoint that holds `place` is safe: what it holds as trained is committed."""
        self._store._consumer_commit(self._name, place)

    def resume(self, place: bytes) -> int:
        """Go back to `place`; what is not in it is available again, leases of before are void.

        Returns the number of sessions that are not in it but were released since.
        """
        return self._store._consumer_resume(self._name, place)

    def stat(self) -> ConsumerInfo:
        """Its place and counts. NotFoundError when it was dropped."""
        with self._store.snapshot() as snapshot:
            return ConsumerInfo._make(snapshot._consumer(self._name))

    def drop(self) -> None:
        """Forget it and its leases. NotFoundError."""
        self._store._consumer_drop(self._name)

    def __reduce__(self) -> tuple[Any, ...]:
        return Consumer, (self._store, self._name)

    def __repr__(self) -> str:
        return f"<rollstore.Consumer {self._name!r} of {self._store.path}>"
