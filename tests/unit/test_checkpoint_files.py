"""Checkpoint files of tensors: readable by other programs, written and read in blocks, with either checksum."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from zeropp.checkpoint import rank_sync
from zeropp.checkpoint.boxes import Box, CheckpointError, TensorBox, as_bytes, whole
from zeropp.checkpoint.files import ReadRange, read_blocks, write_blocks, write_files
from zeropp.checkpoint.metadata import DTYPES, STRETCH, Checksums, FileEntry, write_synced
from zeropp.checkpoint.rank_sync import in_threads


def values(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    count = int(torch.Size(shape).numel())
    numbers = torch.randint(0, 2, (count * dtype.itemsize,), dtype=torch.uint8)
    if dtype.is_complex:
        return torch.view_as_complex(numbers.view(torch.float32).reshape(*shape, 2))
    return numbers.view(dtype).reshape(shape)


def test_other_programs_read_them(tmp_path: Path) -> None:
    """safetensors reads every dtype, scalars, transposed tensors, and boxes, whose names contain their ranges."""
    tensors = {f"t.{code}": values((3, 5), dtype) for code, dtype in DTYPES.items()}
    tensors |= {"scalar": torch.tensor(2.5), "transposed": torch.arange(12.0).reshape(3, 4).t()}
    parts = [whole(name, tensor) for name, tensor in tensors.items()]
    parts.append(TensorBox("part", (4, 6), Box((1, 2), (2, 3)), torch.arange(24.0).reshape(4, 6)[1:3, 2:5]))
    found = write_files(tmp_path, "rank", parts, Checksums.best())
    (file,) = found.files
    with safe_open(tmp_path / file.name, "pt") as opened:
        read = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no dict)
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and torch.equal(as_bytes(read[name]), as_bytes(tensor.contiguous()))
    assert torch.equal(read["part[1:3, 2:5]"], torch.arange(24.0).reshape(4, 6)[1:3, 2:5])


def test_no_file_is_larger_than_the_limit(tmp_path: Path) -> None:
    """A tensor larger than the limit is split over several files, and reading all boxes gives the tensor back."""
    tensor = torch.arange(100_000, dtype=torch.float32).reshape(100, 1000)
    found = write_files(
        tmp_path, "rank", [whole("large", tensor), whole("small", torch.ones(3))], Checksums.best(), 1 << 17
    )
    assert len(found.files) > 3
    assert all(file.nbytes <= (1 << 17) + 8192 for file in found.files)
    _, shape, boxes = found.tensors["large"]
    again = torch.zeros(shape)
    for entry in boxes:
        room = torch.empty(entry.sizes)
        file = found.files[entry.file]
        read_blocks(tmp_path / file.name, file.nbytes, [ReadRange(entry.begin, as_bytes(room))], (), lambda *_: None)
        entry.box.of(again).copy_(room)
    assert torch.equal(again, tensor)


@pytest.mark.parametrize("nbytes", [0, 1, 511, 4096, STRETCH, STRETCH + 1, 8 * STRETCH, 19 * STRETCH + 77])
def test_blocks(nbytes: int, tmp_path: Path) -> None:
    """Any ranges can be read from a file written in blocks, and checksums are computed over whole stretches."""
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    checks = Checksums.best()
    sums = write_blocks(
        tmp_path / "file", nbytes, lambda b, room: room.copy_(data[b : b + room.numel()]), checks.of_bytes
    )
    assert (tmp_path / "file").read_bytes() == bytes(data.tolist())
    assert len(sums) == -(-nbytes // STRETCH)
    seen: dict[int, int] = {}
    wanted = [(begin, min(begin + 70_000, nbytes)) for begin in range(3, nbytes, max(nbytes // 7, 1))]
    places = [ReadRange(b, torch.empty(e - b, dtype=torch.uint8)) for b, e in wanted]
    every = range(len(sums))
    count = read_blocks(
        tmp_path / "file", nbytes, places, set(every), lambda n, memory: seen.update({n: checks.of_bytes(memory)})
    )
    assert all(torch.equal(each.into, data[b:e]) for each, (b, e) in zip(places, wanted, strict=True))
    assert seen == dict(enumerate(sums)) and count == nbytes


def test_ranges_that_overlap(tmp_path: Path) -> None:
    """Ranges may be equal, contain each other, and cross borders of blocks."""
    data = torch.randint(0, 256, (20 * STRETCH,), dtype=torch.uint8)
    (tmp_path / "file").write_bytes(bytes(data.numpy()))
    block = 8 * STRETCH
    ranges = [(0, 20 * STRETCH), (block - 5, block + 5), (block, block + 9), (block, block + 9), (block, 2 * block + 1)]
    rooms = [torch.zeros(end - begin, dtype=torch.uint8) for begin, end in ranges]
    wanted = [ReadRange(begin, room) for (begin, _), room in zip(ranges, rooms, strict=True)]
    read_blocks(tmp_path / "file", data.numel(), wanted, (), lambda *_: None)
    assert all(torch.equal(room, data[begin:end]) for (begin, end), room in zip(ranges, rooms, strict=True))
    rooms[2].zero_()
    read_blocks(tmp_path / "file", data.numel(), wanted[2:4], (), lambda *_: None)
    assert torch.equal(rooms[2], rooms[3])


def test_a_file_that_ends_early(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1234")
    with pytest.raises(OSError, match="the file ends at byte 4, before 10"):
        read_blocks(tmp_path / "file", 10, [ReadRange(0, torch.empty(10, dtype=torch.uint8))], (), lambda *_: None)


@pytest.mark.parametrize("name", ["crc32", "xxh3_64"])
def test_either_algorithm(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "xxh3_64":
        pytest.importorskip("xxhash", reason="xxhash is not installed")
    checks = Checksums.by_name(name)
    sums = [checks.of_bytes(b"a"), checks.of_bytes(b"b" * 1000)]
    entry = FileEntry(name="f", nbytes=2, sums=FileEntry.pack(sums, checks.width))
    assert entry.checksums(checks.width) == sums and len(checks.hexdigest(b"")) == 2 * checks.width


def test_where_xxhash_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without xxhash, CRC-32 is used for writing, and a checkpoint with XXH3 checksums asks for xxhash."""
    real = importlib.import_module

    def without(module: str, *rest: Any) -> Any:
        if module == "xxhash":
            raise ImportError(module)
        return real(module, *rest)

    monkeypatch.setattr(importlib, "import_module", without)
    assert Checksums.best().name == "crc32"
    with pytest.raises(CheckpointError, match="pip install xxhash"):
        Checksums.by_name("xxh3_64")
    with pytest.raises(CheckpointError, match="of the unknown kind 'md5'"):
        Checksums.by_name("md5")


def test_threads_share_work_also_when_the_program_has_ended() -> None:
    """Work is still done after the main thread has ended, where a thread pool executor would accept no more work."""
    program = """
import runpy, sys, threading
tasks = runpy.run_path(sys.argv[1])
def late():
    threading.main_thread().join()
    tasks["in_threads"](5, lambda numbers: print(*numbers), 1)
tasks["Task"](late, "late").start()
"""
    done = subprocess.run(
        [sys.executable, "-c", program, rank_sync.__file__], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("0 1 2 3 4\n", "")


def test_the_first_error_of_a_thread_ends_all() -> None:
    taken: list[int] = []

    def work(numbers: Iterator[int]) -> None:
        for number in numbers:
            taken.append(number)
            raise OSError(number, "full")

    with pytest.raises(OSError, match="full"):
        in_threads(100, work, 4)
    assert len(taken) <= 4


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, int]] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        events.append(("fsync", os.fstat(descriptor).st_ino))
        fsync(descriptor)

    def renamed(source: Path, target: Path) -> None:
        events.append(("replace", source.stat().st_ino))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    path = tmp_path / "metadata.json"
    write_synced(path, b"{}")
    file, folder = path.stat().st_ino, tmp_path.stat().st_ino
    assert events == [("fsync", file), ("replace", file), ("fsync", folder)]
