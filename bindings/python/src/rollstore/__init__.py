"""rollstore: inference engines' replies in shared memory, for reinforcement-learning trainers.

A rollout worker puts replies; a trainer, in other processes of the host, reads tokens, candidates
and log-probabilities as arrays over the same memory, without a copy:

    store = rollstore.open("/dev/shm/run1", "c", capacity=8 << 30)
    store.put_reply("math-7/0", 0, response.content, top_k=32, prompt=input_ids, temperature=1.0)
    store.seal("math-7/0", reward=1.0, group_index=7)

    with store.snapshot() as snapshot:
        for session in snapshot.ready():
            turn = session[0]
            turn.topk_logprobs  # float32 [n, 32], in the store's memory
        batch = snapshot.batch([session.id for session in snapshot.ready()])

The C library is inside the compiled module; NumPy is the only requirement. PyTorch is imported
where tensors are asked for. Submodules: rollstore.torch (datasets), rollstore.cuda (copies to a
GPU), rollstore.loss (the score-centering loss), rollstore.sglang (training requests),
rollstore.server (a proxy that records agents, over aiohttp).
"""

from __future__ import annotations

# The compiled module first: it refuses a sub-interpreter, where NumPy may crash.
import rollstore._rollstore  # noqa: F401
from rollstore._batch import Batch, Sample, SampleInfo
from rollstore._consumer import Consumer, ConsumerInfo, Lease, Leases
from rollstore._errors import (
    AccessError,
    AlignmentError,
    ArgumentError,
    BusyError,
    ClosedError,
    ConflictError,
    CorruptError,
    ExistsError,
    FileSystemError,
    ForkedError,
    FullError,
    GoneError,
    HeldError,
    InputOutputError,
    LeaseError,
    LimitError,
    NoMemoryError,
    NoSpaceError,
    NotFoundError,
    NotStoreError,
    OrderError,
    ReadersError,
    ReadOnlyError,
    ReplyError,
    RollstoreError,
    SealedError,
    VersionError,
    WaitTimeoutError,
)
from rollstore._ingest import Ingested, Refused
from rollstore._rollstore import Turn, __version__, decode, session_key, simd_path
from rollstore._snapshot import Session, SessionInfo, Sessions, Snapshot
from rollstore._store import Changes, Stat, Store, Verified, open
from rollstore._tensor import as_tensor

__all__ = [
    "AccessError",
    "AlignmentError",
    "ArgumentError",
    "Batch",
    "BusyError",
    "Changes",
    "ClosedError",
    "ConflictError",
    "Consumer",
    "ConsumerInfo",
    "CorruptError",
    "ExistsError",
    "FileSystemError",
    "ForkedError",
    "FullError",
    "GoneError",
    "HeldError",
    "Ingested",
    "InputOutputError",
    "Lease",
    "LeaseError",
    "Leases",
    "LimitError",
    "NoMemoryError",
    "NoSpaceError",
    "NotFoundError",
    "NotStoreError",
    "OrderError",
    "ReadOnlyError",
    "ReadersError",
    "Refused",
    "ReplyError",
    "RollstoreError",
    "Sample",
    "SampleInfo",
    "SealedError",
    "Session",
    "SessionInfo",
    "Sessions",
    "Snapshot",
    "Stat",
    "Store",
    "Turn",
    "Verified",
    "VersionError",
    "WaitTimeoutError",
    "__version__",
    "as_tensor",
    "decode",
    "open",
    "session_key",
    "simd_path",
]
