"""A complete checkpoint survives killed jobs and failing disks, and damaged or foreign files are refused."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import zeropp
from tests.support.branching_models import make_config
from tests.support.checkpoint_training import train, wrap
from tests.support.rank_pool import ROOT, run_ranks
from tests.support.saves_killed_at_calls import CALLS
from tests.support.tmpfs import tmpfs
from zeropp import checkpoint
from zeropp.checkpoint.metadata import Checksums

Pair = tuple[torch.nn.Module, zeropp.ZeroOptimizer]


# Kind of save, and file systems to simulate: "renames" supports rename, "none" does not.
CUT_OFF = [
    ("in place", ("renames",)),
    ("an export", ("renames",)),
    pytest.param("in place", ("none",), marks=pytest.mark.campaign),
    pytest.param("in a series", ("renames", "none"), marks=pytest.mark.campaign),
]


@pytest.mark.parametrize(("how", "renames"), CUT_OFF)
def test_killed_at_every_call_that_changes_the_disk(how: str, renames: tuple[str, ...]) -> None:
    """After a kill at any call, the older or the new checkpoint loads.

    The next save leaves no files of the killed save. An export may be missing after the kill, because it is not
    replaced atomically.
    """
    command = [sys.executable, "-m", "tests.support.saves_killed_at_calls", how, *renames]
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), *(each for each in sys.path if each)])
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(renames)
    for calls, old in (map(int, line.split()) for line in lines):
        assert calls > 15 and 5 < old <= calls


@pytest.fixture(scope="module")
def trained() -> Pair:
    model, optimizer = wrap("stage 3")
    train(model, optimizer, range(2))
    return model, optimizer


@pytest.fixture
def saved(trained: Pair, tmp_path: Path) -> Path:
    checkpoint.save(tmp_path / "here", *trained)
    return tmp_path / "here"


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return zeropp.full_state(model)


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in right)


@pytest.mark.every(2)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_disk_that_fails_at_any_call(
    code: int, trained: Pair, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that fails at a system call raises an error with the reason.

    The earlier or the new checkpoint loads, and the next save succeeds.
    """
    model, optimizer = trained
    before = weights(model)
    train(model, optimizer, [7])
    after = weights(model)
    shutil.copytree(saved, tmp_path / "kept")
    failures = 0
    for number in range(100):
        made, failed = 0, False

        def counted(call: Any, number: int = number) -> Any:
            def instead(*arguments: Any, **named: Any) -> Any:
                nonlocal made
                made += 1
                if made == number + 1:
                    raise OSError(code, os.strerror(code))
                return call(*arguments, **named)

            return instead

        with monkeypatch.context() as patch:
            # Calls that delete the earlier checkpoint are left out, because the new checkpoint is complete by then.
            for name in (name for name in CALLS if name not in ("unlink", "rmdir")):
                patch.setattr(os, name, counted(getattr(os, name)))
            try:
                checkpoint.save(saved, model, optimizer)
            except checkpoint.CheckpointError as error:
                failed = "Nothing was saved" in str(error)
                assert failed == ("It is in place and complete" not in str(error))
                assert os.strerror(code) in str(error) and "saving again is possible" in str(error)
        other = wrap("stage 3")
        checkpoint.load(saved, *other)
        # Some calls may fail without an error of the save: mkdir of an existing folder, or fsync of a folder.
        assert same(weights(other[0]), before if failed else after)
        failures += failed
        if made <= number:
            break
        checkpoint.save(saved, model, optimizer)
        assert len(list(saved.iterdir())) == 2 and not list(tmp_path.glob(".*"))
        shutil.rmtree(saved)
        shutil.copytree(tmp_path / "kept", saved)
    assert failures > 8 and not failed


def of_two(path: Path, failing: bool) -> str:
    """Save on two ranks, with rank 1 unable to write if ``failing``. Then load, and save again.

    Args:
        path: folder of the checkpoint.
        failing: True to let rank 1's writes fail.

    Returns:
        The error on this rank; "" if there is none.
    """
    import torch.distributed as dist

    model, optimizer = wrap("stage 3")
    train(model, optimizer, range(1))
    checkpoint.save(path, model, optimizer)
    before, error = weights(model), ""
    train(model, optimizer, range(1, 2))
    write = os.pwrite
    if failing and dist.get_rank() == 1:
        os.pwrite = lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "the disk is broken"))
    try:
        checkpoint.save(path, model, optimizer)
    except checkpoint.CheckpointError as caught:
        error = str(caught)
    finally:
        os.pwrite = write
    after = weights(model)
    checkpoint.load(path, model, optimizer)
    assert same(weights(model), before if failing else after)
    checkpoint.save(path, model, optimizer)
    return error


def test_one_rank_s_disk_fails(tmp_path: Path) -> None:
    """Every rank raises an error that names the failed rank, and later saves succeed."""
    for told in run_ranks(2, of_two, tmp_path / "here", True):
        assert "failed on rank 1: OSError: [Errno 5] the disk is broken" in told
    assert run_ranks(2, of_two, tmp_path / "there", False) == ["", ""]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with tmpfs(tmp_path / "small", "-o", "size=300k") as place:
        yield place


def test_a_full_disk(small_disk: Path, trained: Pair) -> None:
    model, optimizer = trained
    checkpoint.save(small_disk / "here", model, optimizer)
    with pytest.raises(checkpoint.CheckpointError, match="No space left on device"):
        checkpoint.save(small_disk / "second", model, optimizer)
    assert sorted(each.name for each in small_disk.iterdir()) == ["here"]
    checkpoint.load(small_disk / "here", model, optimizer)


def test_every_flipped_byte_is_found(trained: Pair, saved: Path) -> None:
    """One flipped bit in any byte of any file is an error if all is verified, in headers and metadata, too."""
    model, optimizer = trained
    chosen = random.Random(0)
    files = sorted(saved.iterdir())
    for number in range(120):
        path = files[number % len(files)]
        data = bytearray(path.read_bytes())
        place = chosen.randrange(len(data))
        data[place] ^= 1 << chosen.randrange(8)
        kept = path.read_bytes()
        path.write_bytes(data)
        with pytest.raises(checkpoint.CheckpointError, match=r"damaged|checksum|format"):
            checkpoint.load(saved, model, optimizer, verify="all")
        path.write_bytes(kept)
    checkpoint.load(saved, model, optimizer)


def test_errors_of_damage_name_the_file_and_the_value(trained: Pair, saved: Path) -> None:
    (path,) = saved.glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(checkpoint.CheckpointError, match=rf"{path.name}.*damaged between bytes.*model\.") as caught:
        checkpoint.load(saved, *trained)
    assert "changed in part" in str(caught.value)
    checkpoint.load(saved, *trained, verify="none")


def test_damage_in_unread_bytes_is_found_if_all_is_verified(tmp_path: Path) -> None:
    """Loading the model alone reads no optimizer state, which is megabytes behind the weights in the file.

    So verify="all" must read more than the load needs.
    """
    model = torch.nn.Linear(700, 700)
    optimizer = zeropp.ZeroOptimizer(torch.optim.AdamW(model.parameters()), model, make_config())
    model(torch.ones(1, 700)).sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path / "here", model, optimizer)
    (path,) = (tmp_path / "here").glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(checkpoint.CheckpointError, match="damaged"):
        checkpoint.load(tmp_path / "here", model, only=["model"], verify="all")
    checkpoint.load(tmp_path / "here", model, only=["model"], verify="none")


def rewrite(saved: Path, **changes: Any) -> None:
    """Replace entries of the metadata, and write the matching checksum."""
    path = saved / "metadata.json"
    found = json.loads(path.read_bytes())["checkpoint"]
    found.update(changes)
    body = json.dumps(found, separators=(",", ":")).encode()
    digest = Checksums.by_name(found["algorithm"]).hexdigest(body).encode()
    path.write_bytes(b'{"checksum": "' + digest + b'", "checkpoint": ' + body + b"}\n")


def truncate(saved: Path) -> None:
    (path,) = saved.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-100])


def remove(saved: Path) -> None:
    (path,) = saved.glob("*.safetensors")
    path.unlink()


def away(saved: Path) -> None:
    shutil.rmtree(saved)


def unfinished(saved: Path) -> None:
    (saved / "metadata.json").unlink()


def foreign(saved: Path) -> None:
    (saved / "metadata.json").write_text('{"weight_map": {}}')


def reaching_out(saved: Path) -> None:
    found = json.loads((saved / "metadata.json").read_bytes())["checkpoint"]["files"]
    rewrite(saved, files=[{**found[0], "name": "../secret"}])


def too_few_sums(saved: Path) -> None:
    found = json.loads((saved / "metadata.json").read_bytes())["checkpoint"]["files"]
    rewrite(saved, files=[{**found[0], "sums": ""}])


def odd_sums(saved: Path) -> None:
    found = json.loads((saved / "metadata.json").read_bytes())["checkpoint"]["files"]
    rewrite(saved, files=[{**found[0], "sums": "no base64!"}])


def beyond(saved: Path) -> None:
    tensors = json.loads((saved / "metadata.json").read_bytes())["checkpoint"]["tensors"]
    tensors["model.head.weight"]["boxes"][0]["begin"] = 1 << 40
    rewrite(saved, tensors=tensors)


def of(saved: Path) -> Any:
    return json.loads((saved / "metadata.json").read_bytes())["checkpoint"]


def overlapping(saved: Path) -> None:
    """Replace a tensor's box by its first half twice. The number of elements is right, but the boxes overlap."""
    tensors = of(saved)["tensors"]
    (box,) = tensors["model.head.weight"]["boxes"]
    rows = box["sizes"][0] // 2
    half = {**box, "sizes": [rows, *box["sizes"][1:]]}
    tensors["model.head.weight"]["boxes"] = [half, half]
    rewrite(saved, tensors=tensors)


def no_ranks(saved: Path) -> None:
    rewrite(saved, ranks=[])


def no_groups(saved: Path) -> None:
    rewrite(saved, values={k: v for k, v in of(saved)["values"].items() if k != "groups"})


def nul(saved: Path) -> None:
    rewrite(saved, files=[{**of(saved)["files"][0], "name": "a\0b"}])


UNUSABLE = {
    overlapping: "parts of 'model.head.weight' that overlap",
    no_ranks: "lacks values that each of 1 ranks",
    no_groups: "or the optimizer, saves",
    nul: "is no plain name",
    truncate: "has .* bytes, and was written with",
    remove: "cannot be read: .*No such file",
    away: "nothing of that name is there",
    unfinished: "is no complete checkpoint: it has no metadata.json",
    foreign: "was not written by zeropp",
    reaching_out: "is no plain name",
    too_few_sums: "there are 0 checksums of .rank",
    odd_sums: "are damaged",
    beyond: "beyond the end of its file",
}


@pytest.mark.parametrize("change", UNUSABLE, ids=lambda change: change.__name__)
def test_unusable_checkpoints_are_refused_by_name(change: Any, trained: Pair, saved: Path) -> None:
    change(saved)
    with pytest.raises(checkpoint.CheckpointError, match=UNUSABLE[change]):
        checkpoint.load(saved, *trained)


def test_a_later_format_is_refused_before_anything_else(trained: Pair, saved: Path) -> None:
    rewrite(saved, format=2, zeropp="9.1", new_key=1)
    with pytest.raises(checkpoint.CheckpointError, match=r"is of format 2, .* read it with zeropp 9\.1 or later"):
        checkpoint.load(saved, *trained)


def test_latest_that_is_damaged_or_ahead(trained: Pair, tmp_path: Path) -> None:
    """A series takes the newest complete checkpoint and warns if "latest" is damaged or names no complete one."""
    series = checkpoint.Series(tmp_path, keep=2)
    for step in (1, 2, 3):
        series.save(step, *trained)
    assert series.steps() == [2, 3] and series.latest() == 3
    latest = tmp_path / "latest"
    for number in range(len(latest.read_bytes())):
        kept = latest.read_bytes()
        data = bytearray(kept)
        data[number] ^= 1
        latest.write_bytes(data)
        with pytest.warns(UserWarning, match="damaged or names no complete"):
            assert series.latest() == 3
        latest.write_bytes(kept)
    (tmp_path / "step-00000003" / "metadata.json").unlink()
    with pytest.warns(UserWarning, match="damaged or names no complete"):
        assert series.latest() == 2


def test_unfinished_checkpoints_of_killed_jobs_are_deleted(trained: Pair, tmp_path: Path) -> None:
    """A series deletes step folders with tensor files but without metadata, of any step.

    Other files and folders stay.
    """
    (tmp_path / "step-00000050").mkdir()
    (tmp_path / "step-00000050" / "rank-00000-01234567-00000.safetensors").write_text("half")
    (tmp_path / "step-00000051").mkdir()
    (tmp_path / "step-00000051" / "notes").write_text("keep me")
    (tmp_path / "step-00000052").write_text("keep me, too")
    series = checkpoint.Series(tmp_path)
    series.save(1, *trained)
    left = ["latest", "step-00000001", "step-00000051", "step-00000052"]
    assert sorted(each.name for each in tmp_path.iterdir()) == left and series.steps() == [1]


def test_foreign_folders_are_not_overwritten(trained: Pair, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "important.txt").write_text("keep me")
    with pytest.raises(checkpoint.CheckpointError, match="is no checkpoint of zeropp; it is left as it is"):
        checkpoint.save(tmp_path / "notes", *trained)
    assert (tmp_path / "notes" / "important.txt").read_text() == "keep me"
