"""The tool reads and writes stores of every released format."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tool_support import DATA, floats, good, integers, ls, read_lines, refused, reply_bytes, sha


@pytest.fixture
def old(folder: Path) -> Path:
    """A copy of the store that version 0.1.0 wrote."""
    path = folder / "old"
    shutil.copytree(DATA / "format-1", path)
    return path


def test_a_store_of_format_1_gives_its_samples(old: Path) -> None:
    assert b" 0 faults" in good("verify", old)
    assert json.loads(good("stat", old, "--json"))["format_version"] == 1
    wanted = {line["session_id"]: line["sha256"] for line in read_lines("sessions_expected.jsonl")}
    recorded = [s["session_id"] for s in ls(old, "--sealed") if s["session_id"] in wanted]
    assert len(recorded) == 4
    for name in recorded:
        sample = json.loads(good("dump", old, name, "--sample"))
        assert wanted[name] == {
            "tokens_i32": sha(integers(sample["tokens"])),
            "loss_mask_u8": sha(integers(sample["loss_mask"]).astype("u1")),
            "rollout_logprobs_f32": sha(floats(sample["rollout_logprobs"])),
            "topk_ids_i32": sha(integers(sample["topk_ids"])),
            "topk_logprobs_f32": sha(floats(sample["topk_logprobs"])),
        }


def test_a_store_of_format_1_is_written_and_copied(old: Path, folder: Path) -> None:
    good("put", old, "new", "0", stdin=reply_bytes())
    good("release", old, "new", "--force")
    good("copy", old, folder / "copy")
    for path in (old, folder / "copy"):
        assert b" 0 faults" in good("verify", path)
        assert len(ls(path)) == 11
    assert good("dump", old) == good("dump", folder / "copy")


def test_a_newer_format_is_refused(old: Path) -> None:
    data = (old / "data.mdb").read_bytes()
    entry = b"RSTF\x01\x00"
    assert entry in data
    (old / "data.mdb").write_bytes(data.replace(entry, b"RSTF\x02\x00"))
    for command in ("ls", "verify", "release"):
        text = refused("version", command, old, *(["new"] if command == "release" else []))
        assert "format version 2" in text and "newer rollstore" in text
