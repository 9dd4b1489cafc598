"""How long a sample takes from a writer process into a reader's training batch, by one way.

    channels.py WAY FOLDER

prints microseconds for one sample. A sample is 2000 tokens with 32 candidates each, 0.53 MB in
four arrays; the writer has them in memory, the reader fills batches of 64 in memory that is there
already, and deletes what it has read. The writer is at most 128 samples ahead. Every way writes and
reads the same samples; the first quarter is a warm-up, and the last batch is compared with what was
written.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

TOKENS = 2000
TOP_K = 32
BATCH = 64
COUNT = 1024
AHEAD = 128
WARM = COUNT // 4

Arrays = dict[str, Any]


def make_samples() -> list[Arrays]:
    """A few, written again and again: more would only fill memory."""
    random = np.random.default_rng(3)
    samples = []
    for _ in range(8):
        first = random.integers(0, 150000, (TOKENS, 1), dtype=np.int32)
        logprobs = -random.random((TOKENS, TOP_K), dtype=np.float32)
        samples.append(
            {
                "token_ids": first[:, 0].copy(),
                "token_logprobs": logprobs[:, 0].copy(),
                "topk_ids": first + np.arange(TOP_K, dtype=np.int32) * 31,
                "topk_logprobs": np.sort(logprobs, axis=1)[:, ::-1].copy(),
            }
        )
    return samples


def make_batch(samples: list[Arrays]) -> Arrays:
    return {k: np.ones((BATCH, *v.shape), v.dtype) for k, v in samples[0].items()}


def fill(batch: Arrays, samples: Iterable[Arrays]) -> None:
    for i, sample in enumerate(samples):
        for name, array in batch.items():
            array[i] = sample[name]


def batches_of(read: Callable[[int], Arrays], batch: Arrays) -> Iterator[Arrays]:
    for begin in range(0, COUNT, BATCH):
        fill(batch, (read(i) for i in range(begin, begin + BATCH)))
        yield batch


# ---------------------------------------------------------------- the ways
# begin() and write() are called in the writer's process, read() in the reader's: it gives the
# batches, and deletes one when asked for the next. `pipe` tells the reader that a sample is there
# where the way itself does not.


class Pickle:
    """pickle over a pipe."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def begin(self) -> None:
        pass

    def write(self, sample: Arrays, number: int, pipe: Connection) -> None:
        pipe.send_bytes(pickle.dumps(sample, protocol=5))

    def read(self, batch: Arrays, pipe: Connection) -> Iterator[Arrays]:
        def one(number: int) -> Arrays:
            sample: Arrays = pickle.loads(pipe.recv_bytes())
            return sample

        return batches_of(one, batch)


class Safetensors(Pickle):
    """A safetensors file for each sample."""

    def path(self, number: int) -> str:
        return f"{self.folder}/{number}.safetensors"

    def write(self, sample: Arrays, number: int, pipe: Connection) -> None:
        from safetensors.numpy import save_file

        save_file(sample, self.path(number))
        pipe.send_bytes(b".")

    def read(self, batch: Arrays, pipe: Connection) -> Iterator[Arrays]:
        from safetensors.numpy import load_file

        def one(number: int) -> Arrays:
            pipe.recv_bytes()
            sample: Arrays = load_file(self.path(number))
            os.unlink(self.path(number))
            return sample

        return batches_of(one, batch)


class Lmdb(Pickle):
    """py-lmdb with the arrays' raw bytes."""

    def open(self) -> Any:
        import lmdb

        return lmdb.open(self.folder, map_size=1 << 29, writemap=True, sync=False, metasync=False)

    def begin(self) -> None:
        self.environment = self.open()

    def write(self, sample: Arrays, number: int, pipe: Connection) -> None:
        with self.environment.begin(write=True) as txn:
            txn.put(b"%08d" % number, b"".join(a.tobytes() for a in sample.values()))
        pipe.send_bytes(b".")

    def read(self, batch: Arrays, pipe: Connection) -> Iterator[Arrays]:
        environment = self.open()
        shapes = {name: (array.dtype, array.shape[1:]) for name, array in batch.items()}

        def one(number: int) -> Arrays:
            pipe.recv_bytes()
            sample = {}
            at = 0
            with environment.begin(buffers=True) as txn:
                value = txn.get(b"%08d" % number)
                for name, (dtype, shape) in shapes.items():
                    count = int(np.prod(shape))
                    sample[name] = np.frombuffer(value, dtype, count, at).reshape(shape).copy()
                    at += count * dtype.itemsize
            return sample

        for begin, arrays in zip(range(0, COUNT, BATCH), batches_of(one, batch), strict=True):
            yield arrays
            with environment.begin(write=True) as txn:
                for number in range(begin, begin + BATCH):
                    txn.delete(b"%08d" % number)
        environment.close()


class FileSet:
    """One .npz for each sample, as a torch data set; it waits for a file that is not there yet."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, number: int) -> Arrays:
        path = f"{self.folder}/{number}.npz"
        while not os.path.exists(path):
            time.sleep(0.0005)
        with np.load(path) as arrays:
            sample = dict(arrays)
        os.unlink(path)
        return sample


class DataLoader(Pickle):
    """torch's DataLoader with one worker over per-sample files."""

    def write(self, sample: Arrays, number: int, pipe: Connection) -> None:
        path = f"{self.folder}/{number}"
        np.savez(f"{path}.new.npz", **sample)
        os.rename(f"{path}.new.npz", f"{path}.npz")

    def read(self, batch: Arrays, pipe: Connection) -> Iterator[Arrays]:
        import torch.utils.data

        loader: Any = torch.utils.data.DataLoader(
            FileSet(self.folder),  # type: ignore[arg-type]  # duck-typed, as torch allows
            batch_size=BATCH,
            num_workers=1,
        )
        for tensors in loader:
            yield {name: tensor.numpy() for name, tensor in tensors.items()}


class Rollstore(Pickle):
    """This project: each sample is a sealed session."""

    def begin(self) -> None:
        import rollstore

        self.store = rollstore.open(f"{self.folder}/store", "c", capacity="256M")

    def write(self, sample: Arrays, number: int, pipe: Connection) -> None:
        self.store.put(f"s-{number}", 0, **sample)
        self.store.seal(f"s-{number}")

    def read(self, batch: Arrays, pipe: Connection) -> Iterator[Arrays]:
        import rollstore

        names = ("tokens", "rollout_logprobs", "topk_ids", "topk_logprobs")
        memory = None
        with rollstore.open(f"{self.folder}/store", "w") as store:
            for begin in range(0, COUNT, BATCH):
                store.wait(begin + BATCH - 1)
                with store.snapshot() as snapshot:
                    ids = [f"s-{number}" for number in range(begin, begin + BATCH)]
                    memory = snapshot.batch(ids, out=memory)
                arrays = (getattr(memory, name) for name in names)
                yield {
                    name: array.reshape(batch[name].shape)
                    for name, array in zip(batch, arrays, strict=True)
                }
                with store.changes() as changes:
                    for session in ids:
                        changes.release(session)


def write_all(way: Pickle, pipe: Connection, ahead: Any, done: Any) -> None:
    """The writer's process."""
    samples = make_samples()
    way.begin()
    pipe.send_bytes(b"ready")
    for number in range(COUNT):
        ahead.acquire()
        way.write(samples[number % len(samples)], number, pipe)
    done.wait()


def check(last: Arrays, samples: list[Arrays]) -> None:
    for i in range(BATCH):
        sample = samples[(COUNT - BATCH + i) % len(samples)]
        for name, array in sample.items():
            if not np.array_equal(last[name][i], array):
                raise AssertionError(f"{name} of sample {i} is not what was written")


def through_processes(way: Pickle, samples: list[Arrays], batch: Arrays) -> float:
    """Seconds from the end of the warm-up to the last batch."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    ahead, done = context.Semaphore(AHEAD), context.Event()
    writer = context.Process(target=write_all, args=(way, theirs, ahead, done))
    writer.start()
    theirs.close()
    if mine.recv_bytes() != b"ready":
        raise RuntimeError("the writer did not begin")
    begun = 0.0
    last: Arrays = {}
    for count, arrays in enumerate(way.read(batch, mine), start=1):
        last = arrays
        for _ in range(BATCH):
            ahead.release()
        if count * BATCH == WARM:
            begun = time.perf_counter()
    seconds = time.perf_counter() - begun
    check(last, samples)
    done.set()
    writer.join()
    return seconds


# ---------------------------------------------------------------- with processes of their own


def through_ray(samples: list[Arrays], batch: Arrays) -> float:
    """An actor returns the samples; the reader gets them from Ray's object store."""
    import ray

    ray.init(num_cpus=2, log_to_driver=False, include_dashboard=False)

    class Writer:
        def __init__(self) -> None:
            self.samples = make_samples()

        def make(self, number: int) -> Arrays:
            return self.samples[number % len(self.samples)]

    writer = ray.remote(Writer).remote()
    references = {number: writer.make.remote(number) for number in range(AHEAD)}

    def one(number: int) -> Arrays:
        if number + AHEAD < COUNT:
            references[number + AHEAD] = writer.make.remote(number + AHEAD)
        return ray.get(references.pop(number))  # type: ignore[no-any-return]

    begun = 0.0
    for count, _ in enumerate(batches_of(one, batch), start=1):
        if count * BATCH == WARM:
            begun = time.perf_counter()
    seconds = time.perf_counter() - begun
    check(batch, samples)
    ray.shutdown()
    return seconds


def through_transferqueue(samples: list[Arrays], batch: Arrays) -> float:
    """An actor puts batches into TransferQueue by key; the reader gets them by key."""
    import ray
    import torch
    import transfer_queue
    from tensordict import TensorDict

    ray.init(num_cpus=8, log_to_driver=False, include_dashboard=False)
    transfer_queue.init()

    class Writer:
        def __init__(self) -> None:
            transfer_queue.init()
            self.samples = make_samples()

        def put(self, begin: int) -> None:
            rows = [self.samples[(begin + i) % len(self.samples)] for i in range(BATCH)]
            fields = {k: torch.from_numpy(np.stack([row[k] for row in rows])) for k in rows[0]}
            transfer_queue.kv_batch_put(
                keys=[str(number) for number in range(begin, begin + BATCH)],
                partition_id="bench",
                fields=TensorDict(fields, batch_size=BATCH),
                tags=[{}] * BATCH,
            )

    writer = ray.remote(Writer).remote()
    starts = range(0, COUNT, BATCH)
    pending = [writer.put.remote(begin) for begin in starts[: AHEAD // BATCH]]
    begun_at = 0.0
    for place, begin in enumerate(starts):
        if place + len(pending) < len(starts):
            pending.append(writer.put.remote(starts[place + len(pending)]))
        ray.get(pending.pop(0))
        keys = [str(number) for number in range(begin, begin + BATCH)]
        got = transfer_queue.kv_batch_get(keys=keys, partition_id="bench")
        for name, array in batch.items():
            # A nested tensor, whose rows have a length each.
            for i, row in enumerate(got[name].unbind()):
                array[i] = row.numpy()
        transfer_queue.kv_clear(keys=keys, partition_id="bench")
        if begin + BATCH == WARM:
            begun_at = time.perf_counter()
    seconds = time.perf_counter() - begun_at
    check(batch, samples)
    transfer_queue.close()
    ray.shutdown()
    return seconds


PROCESSES: dict[str, type[Pickle]] = {
    "rollstore": Rollstore,
    "pickle": Pickle,
    "safetensors": Safetensors,
    "lmdb": Lmdb,
    "dataloader": DataLoader,
}
FRAMEWORKS = {"ray": through_ray, "transferqueue": through_transferqueue}


def main(name: str, folder: str) -> None:
    samples = make_samples()
    batch = make_batch(samples)
    if name in FRAMEWORKS:
        seconds = FRAMEWORKS[name](samples, batch)
    else:
        seconds = through_processes(PROCESSES[name](folder), samples, batch)
    print(seconds / (COUNT - WARM) * 1e6)


if __name__ == "__main__":
    main(*sys.argv[1:])
