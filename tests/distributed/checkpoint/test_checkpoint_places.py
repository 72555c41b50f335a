"""Target folders of checkpoints and exports: replaced and foreign folders, links, mount points, and series."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import zeropp
from tests.support.checkpoint_training import train, wrap
from zeropp import checkpoint
from zeropp.checkpoint.files import WholeFiles

Pair = tuple[torch.nn.Module, zeropp.ZeroOptimizer]


@pytest.fixture(scope="module")
def trained() -> Pair:
    model, optimizer = wrap("stage 3")
    train(model, optimizer, range(1))
    return model, optimizer


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def contents(folder: Path) -> dict[str, bytes]:
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


def a_dataset(folder: Path, trained: Pair) -> None:
    """Make a folder of another program that has a metadata.json, too."""
    folder.mkdir()
    (folder / "metadata.json").write_text('{"rows": 10}')
    (folder / "rows.bin").write_bytes(b"rows")


def a_description_alone(folder: Path, trained: Pair) -> None:
    folder.mkdir()
    (folder / "metadata.json").write_text('{"rows": 10}')


def consolidated(folder: Path, trained: Pair) -> None:
    """Make a checkpoint with an export inside."""
    checkpoint.save(folder, *trained)
    checkpoint.consolidate(folder, folder / "out")


@pytest.mark.parametrize("make", [a_dataset, a_description_alone, consolidated])
def test_save_replaces_checkpoints_alone(make: Callable[[Path, Pair], None], trained: Pair, tmp_path: Path) -> None:
    folder = tmp_path / "there"
    make(folder, trained)
    before = contents(folder)
    with pytest.raises(checkpoint.CheckpointError, match="it is left as it is"):
        checkpoint.save(folder, *trained)
    assert contents(folder) == before and names(tmp_path) == ["there"]


def test_files_created_during_a_save_are_kept(trained: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, write = tmp_path / "there", os.pwrite
    checkpoint.save(folder, *trained)

    def writes(*arguments: object) -> int:
        (folder / "notes").write_text("keep me")
        return write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "pwrite", writes)
    checkpoint.save(folder, *trained)
    monkeypatch.undo()
    assert (folder / "notes").read_text() == "keep me" and len(names(folder)) == 3
    with pytest.raises(checkpoint.CheckpointError, match=r"has other files in it: \['notes'\]"):
        checkpoint.save(folder, *trained)
    (folder / "notes").unlink()
    checkpoint.save(folder, *trained)
    assert len(names(folder)) == 2 and names(tmp_path) == ["there"]


def test_a_damaged_checkpoint_is_replaced(trained: Pair, tmp_path: Path) -> None:
    """A checkpoint with damaged metadata is replaced.

    ``.nfs`` files, which NFS keeps while a file is open, are no obstacle.
    """
    folder = tmp_path / "there"
    checkpoint.save(folder, *trained)
    text = (folder / "metadata.json").read_bytes()
    (folder / "metadata.json").write_bytes(text[: len(text) // 2])
    (folder / ".nfs0000000000a1b2c3").write_bytes(b"")
    checkpoint.save(folder, *trained)
    checkpoint.load(folder, *trained)


def test_export_replaces_its_own_alone(trained: Pair, tmp_path: Path) -> None:
    """An export replaces an earlier export only if the folder has no other files.

    A folder with foreign weights is refused, even if it looks like an export.
    """
    model, optimizer = trained
    checkpoint.save(tmp_path / "here", model, optimizer)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    checkpoint.export(ours, model, file_nbytes=20_000)
    (ours / "tokenizer.json").write_text("{}")
    theirs.mkdir()
    (theirs / "config.json").write_text("{}")
    save_file({"weight": torch.zeros(2)}, theirs / "model.safetensors", metadata={"format": "pt"})
    for folder in (ours, theirs):
        before = contents(folder)
        with pytest.raises(checkpoint.CheckpointError, match="is no export of zeropp, or has other files in it"):
            checkpoint.export(folder, model)
        with pytest.raises(checkpoint.CheckpointError, match="is no export of zeropp, or has other files in it"):
            checkpoint.consolidate(tmp_path / "here", folder)
        assert contents(folder) == before
    assert names(tmp_path) == ["here", "ours", "theirs"]
    (ours / "tokenizer.json").unlink()
    (ours / "config.json").write_text("{}")
    checkpoint.export(ours, model)
    checkpoint.consolidate(tmp_path / "here", ours)
    assert names(ours) == ["model.safetensors"]


def test_links_are_followed(trained: Pair, tmp_path: Path) -> None:
    """A target may be a link to a folder, also to one that does not exist yet. The link stays a link."""
    model, optimizer = trained
    link, disk = tmp_path / "link", tmp_path / "disk"
    disk.mkdir()
    link.symlink_to(disk / "deeper" / "run")
    for _ in range(2):
        checkpoint.save(link, model, optimizer)
        checkpoint.load(link, model, optimizer)
    out = tmp_path / "out"
    out.symlink_to(disk / "export")
    for _ in range(2):
        checkpoint.export(out, model)
        checkpoint.consolidate(link, out)
    assert link.is_symlink() and out.is_symlink() and names(tmp_path) == ["disk", "link", "out"]
    assert names(disk) == ["deeper", "export"] and names(disk / "deeper") == ["run"]


def test_the_working_directory_stays(trained: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for _ in range(2):
        checkpoint.save(".", *trained)
        assert os.path.samefile(os.getcwd(), folder)
        checkpoint.load(folder, *trained)
    assert len(names(folder)) == 2 and names(tmp_path) == ["here"]
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    for _ in range(2):
        checkpoint.export(".", trained[0])
        assert names(Path(".")) == ["model.safetensors"] and os.path.samefile(".", tmp_path / "out")


@pytest.mark.parametrize("how", ["disk", "bound"])
def test_mount_points(how: str, trained: Pair, tmp_path: Path) -> None:
    """A target may be a mount point: of another disk, or of a folder of the same disk."""
    place, source = tmp_path / "a point", tmp_path / "source"
    for each in (place, source):
        each.mkdir()
    options = ["-t", "tmpfs", "none"] if how == "disk" else ["--bind", str(source)]
    mounted = os.geteuid() == 0 and subprocess.run(["mount", *options, str(place)], capture_output=True).returncode == 0
    if not mounted:
        pytest.skip("cannot mount anything here")
    try:
        for _ in range(2):
            checkpoint.save(place, *trained)
            checkpoint.load(place, *trained)
        assert len(names(place)) == 2 and names(tmp_path) == ["a point", "source"]
        shutil.copytree(place, tmp_path / "saved")
        for each in place.iterdir():
            each.unlink()
        for _ in range(2):
            checkpoint.consolidate(tmp_path / "saved", place)
        assert names(place) == ["model.safetensors"]
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_exports_that_fail(trained: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed export leaves no files, keeps the earlier export, and says so in the error."""
    checkpoint.save(tmp_path / "here", *trained)
    checkpoint.export(tmp_path / "there", trained[0])
    before = contents(tmp_path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(WholeFiles, "write", full)
    for out in (tmp_path / "new", tmp_path / "there"):
        with pytest.raises(OSError, match="No space left"):
            checkpoint.export(out, trained[0])
        with pytest.raises(checkpoint.CheckpointError, match=r"No space left .*what was there before is as it was"):
            checkpoint.consolidate(tmp_path / "here", out)
    assert contents(tmp_path) == before and names(tmp_path) == ["here", "there"]


def test_a_series_that_goes_back(trained: Pair, tmp_path: Path) -> None:
    """After a series is resumed at an earlier step, the later steps are deleted first, then the earliest ones.

    Files of other programs in these folders stay.
    """
    series = checkpoint.Series(tmp_path, keep=2)
    left = []
    for step in (200, 300, 250, 260):
        series.save(step, *trained)
        left.append(series.steps())
        if step == 300:
            checkpoint.consolidate(series.path(300), series.path(300) / "out")
    assert left == [[200], [200, 300], [200, 250], [250, 260]] and series.latest() == 260
    assert names(series.path(300)) == ["out"] and not series.path(200).exists()
