"""Copies to a GPU. Without one only the errors and the calls to the runtime are tested."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from replies import DATA, make_text

import rollstore

torch = pytest.importorskip("torch", reason="PyTorch is not installed: no test of rollstore.cuda")
cuda = pytest.importorskip("rollstore.cuda")

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU here: copies to one were NOT tested"
)
without_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a GPU is here: what happens without one was NOT tested"
)


class FakeRuntime:
    """Notes what the CUDA runtime is asked for."""

    def __init__(self, answer: int = 0) -> None:
        self.answer = answer
        self.calls: list[tuple[Any, ...]] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls.append(("register", address, size, flags))
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        return 0


@without_gpu
def test_without_a_gpu_the_error_says_so(store: rollstore.Store):
    with pytest.raises(RuntimeError, match="needs an NVIDIA GPU"):
        cuda.register(store)
    with pytest.raises(RuntimeError, match="needs an NVIDIA GPU"):
        cuda.Copier()


def test_the_whole_map_is_registered_and_kept(store: Any, monkeypatch: pytest.MonkeyPatch):
    runtime = FakeRuntime()
    monkeypatch.setattr(cuda, "_cudart", lambda: runtime)
    address, size = store.map_address, store.map_size
    with cuda.register(store) as registration:
        assert runtime.calls == [("register", address, size, 1 | 8)]
        assert (registration.address, registration.size) == (address, size)
        store.close()  # the map stays for as long as it is registered
        with rollstore.open(registration._store.path, "w") as again:
            assert again.map_address == address
    assert runtime.calls[1:] == [("unregister", address)]
    registration.unregister()
    assert len(runtime.calls) == 2
    assert "undone" in repr(registration)


def test_a_map_that_may_only_be_read_is_registered_as_such(
    path: Path, monkeypatch: pytest.MonkeyPatch
):
    runtime = FakeRuntime()
    monkeypatch.setattr(cuda, "_cudart", lambda: runtime)
    rollstore.open(path, "x").close()
    with rollstore.open(path, "r") as store, cuda.register(store):
        assert runtime.calls[0][3] == 1 | 8


def test_a_device_without_read_only_memory_gets_a_map_that_may_be_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Old(FakeRuntime):
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            super().cudaHostRegister(address, size, flags)
            return 801 if flags & 8 else 0

    runtime = Old()
    monkeypatch.setattr(cuda, "_cudart", lambda: runtime)
    rollstore.open(path, "x").close()
    with rollstore.open(path, "r") as store, pytest.raises(RuntimeError, match="refuses"):
        cuda.register(store)
    with rollstore.open(path, "w") as store, cuda.register(store):
        assert [call[3] for call in runtime.calls if call[0] == "register"] == [9, 9, 1]


def test_a_refusal_says_what_to_do(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cuda, "_cudart", lambda: FakeRuntime(801))
    rollstore.open(path, "x").close()
    with rollstore.open(path, "r") as store:
        with pytest.raises(RuntimeError, match=r"refuses.*801.*ulimit -l.*mode \"w\""):
            cuda.register(store)
    rollstore.open(path, "w").close()  # nothing of the attempt is left open


@needs_gpu
@pytest.mark.parametrize("where", ["shared memory", "disk"])
@pytest.mark.parametrize("mode", ["w", "r"])
def test_turns_are_copied_from_the_registered_map(
    path: Path, tmp_path: Path, mode: Any, where: str
):
    path = tmp_path / "on-disk" if where == "disk" else path
    with rollstore.open(path, "x") as store:
        store.put_reply("s", 0, make_text(500, 32))
    with rollstore.open(path, mode) as store, store.snapshot() as snapshot:
        turn = snapshot.sessions["s"][0]
        assert not turn.tensor("topk_ids").is_pinned()
        with cuda.register(store):
            assert turn.tensor("topk_ids").is_pinned()
            pending = cuda.Copier().copy({"ids": turn.topk_ids, "logprobs": turn.topk_logprobs})
            copied = pending.get()
            assert (copied["ids"].cpu().numpy() == turn.topk_ids).all()
            assert copied["logprobs"].cpu().numpy().tobytes() == turn.topk_logprobs.tobytes()
            pending.synchronize()
            assert pending.done
            del copied, pending


@needs_gpu
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_batches_are_copied_from_pinned_memory(store: rollstore.Store, layout: Any):
    store.ingest(DATA / "sessions.jsonl")
    copier = cuda.Copier()
    batch = None
    with store.snapshot() as snapshot:
        for _ in range(3):
            batch = snapshot.batch(snapshot.ready(), layout=layout, pin_memory=True, out=batch)
            assert batch.topk_ids.is_pinned()
            pending = copier.copy(batch)
            copied = pending.get()
            assert copied.session_ids == batch.session_ids
            for name, array in batch.arrays.items():
                assert torch.equal(getattr(copied, name).cpu(), array)
            pending.synchronize()


@needs_gpu
def test_a_map_is_locked_once_and_again_after_it_was_unlocked(store: rollstore.Store):
    with cuda.register(store), pytest.raises(RuntimeError, match="refuses to lock"):
        cuda.register(store)
    with cuda.register(store):
        pass
    assert torch.ones(1, device="cuda").item() == 1  # a refusal stays with its caller


@needs_gpu
def test_a_copy_is_not_done_while_the_stream_is_busy(store: rollstore.Store):
    """And the current stream waits for it, though the host does not."""
    store.put_reply("s", 0, make_text(4000, 64))
    store.seal("s")
    copier = cuda.Copier()
    with store.snapshot() as snapshot:
        batch = snapshot.batch(["s"], pin_memory=True)
    with torch.cuda.stream(copier.stream):
        torch.cuda._sleep(200_000_000)  # cycles: a tenth of a second
    pending = copier.copy(batch)
    assert not pending.done
    copied = pending.get()
    assert torch.equal(copied.topk_logprobs.cpu(), batch.topk_logprobs)
    pending.synchronize()
    assert pending.done


@needs_gpu
def test_other_things_are_not_copied():
    with pytest.raises(TypeError, match="source"):
        cuda.Copier().copy("text")
