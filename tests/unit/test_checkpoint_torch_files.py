"""Files of torch.save from other programs: values, tensor positions and records are read, and code is never run."""

from __future__ import annotations

import os
import pickle
import random
import resource
import warnings
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from zeropp.checkpoint.boxes import CheckpointError
from zeropp.checkpoint.foreign import find_dcp
from zeropp.checkpoint.torch_files import Record, TorchFileTensor, read_torch_file

VALUES: dict[str, Any] = {
    "numbers": [1, 2.5, True, None, -(2**70)],
    "texts": ("a", b"\x00\xff", {"set"}),
    "torch": [torch.float8_e4m3fn, torch.bfloat16],
    "ordered": OrderedDict(a=1, b={2: (3,)}),
    "counted": Counter({3: 2}),
}


def archive(path: Path, data: bytes, **entries: bytes) -> Path:
    """Write a file as torch.save does, with ``data`` as its pickle and ``entries`` as further entries."""
    with zipfile.ZipFile(path, "w") as made:
        for name, each in {"data.pkl": data, "version": b"3\n", **entries}.items():
            made.writestr(f"archive/{name.replace('_', '/')}", each)
    return path


def test_values(tmp_path: Path) -> None:
    torch.save({**VALUES, "size": torch.Size([2, 3])}, tmp_path / "a.pt")
    found = read_torch_file(tmp_path / "a.pt")
    assert found == {**VALUES, "size": (2, 3)} and type(found["counted"]) is Counter


@pytest.mark.parametrize("old", [False, True])
def test_tensors_are_where_they_lie(old: bool, tmp_path: Path) -> None:
    """The positions of tensors in the file are right for views, empty tensors, scalars and 1-byte dtypes.

    With ``old``, the file lacks the entry with the format version, as files of older versions of torch do. Then
    positions are read from the headers of the zip entries.
    """
    row = torch.arange(24, dtype=torch.float32)
    given = {
        "whole": row.reshape(4, 6),
        "turned": row.reshape(4, 6).t(),
        "part": row[5:9],
        "number": torch.tensor(7, dtype=torch.int64),
        "empty": torch.zeros(0, 3),
        "small": torch.arange(6, dtype=torch.float32).to(torch.float8_e5m2).reshape(2, 3),
        "parameter": nn.Parameter(torch.ones(2, dtype=torch.bfloat16)),
    }
    path = tmp_path / "a.pt"
    torch.save({**given, "inside": [{"deep": (row,)}]}, path)
    if old:
        with zipfile.ZipFile(path) as made:
            entries = {info.filename: made.read(info) for info in made.infolist()}
        with zipfile.ZipFile(path, "w") as made:
            for name, each in entries.items():
                if "format_version" not in name:
                    made.writestr(name, each)
    found, data = read_torch_file(path), path.read_bytes()
    assert found.pop("inside")[0]["deep"][0].begin == found["whole"].begin
    for name, stored in found.items():
        assert isinstance(stored, TorchFileTensor) and (stored.dtype, stored.shape) == (
            given[name].dtype,
            given[name].shape,
        )
        extent = 1 + sum((size - 1) * stride for size, stride in zip(stored.shape, stored.strides, strict=True))
        if given[name].numel():
            memory = bytearray(data[stored.begin : stored.begin + extent * stored.dtype.itemsize])
            row = torch.frombuffer(memory, dtype=torch.uint8).view(stored.dtype)
            values = row.as_strided(stored.shape, stored.strides)
            assert torch.equal(values.float(), given[name].detach().float())


def test_a_part_of_a_file(tmp_path: Path) -> None:
    torch.save(torch.tensor([1.0, 2.0]), tmp_path / "a.pt")
    data = (tmp_path / "a.pt").read_bytes()
    alone = read_torch_file(tmp_path / "a.pt")
    (tmp_path / "b").write_bytes(b"x" * 1000 + data + b"y" * 50)
    found = read_torch_file(tmp_path / "b", begin=1000, length=len(data))
    assert found.begin == alone.begin + 1000
    with pytest.raises(CheckpointError, match="it was cut short"):
        read_torch_file(tmp_path / "b", begin=1000, length=len(data) + 100)


def test_memory_does_not_grow_by_the_file(tmp_path: Path) -> None:
    # skip_data writes a hole instead of the values, and untouched memory of torch.empty is not resident, so the test
    # itself uses little memory.
    with torch.serialization.skip_data():
        torch.save({"large": torch.empty(2**28)}, tmp_path / "a.pt")
    assert (tmp_path / "a.pt").stat().st_size > 2**30
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert read_torch_file(tmp_path / "a.pt")["large"].shape == (2**28,)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 2**14  # in KiB, so less than 16 MiB


def test_values_in_several_places(tmp_path: Path) -> None:
    """Shared values stay one object, also in 60 levels of doubled references and in a list that contains itself."""
    shared: Any = (torch.ones(2),)
    for _ in range(60):
        shared = (shared, shared)
    loop: list[Any] = [torch.ones(1)]
    loop.append(loop)
    torch.save([shared, loop], tmp_path / "a.pt")
    found, again = read_torch_file(tmp_path / "a.pt")
    assert again[1] is again and isinstance(again[0], TorchFileTensor)
    while isinstance(found, tuple):
        found = found[0]
    assert isinstance(found, TorchFileTensor)


class Made:
    """A class that is read as a Record if the reader allows its package."""

    def __init__(self) -> None:
        self.scale = 3
        self.inner = [torch.ones(2)]


def test_records_are_inert(tmp_path: Path) -> None:
    before = torch.serialization.get_safe_globals()
    torch.save([Made(), Made, numpy.arange(3)], tmp_path / "a.pt")
    found = read_torch_file(tmp_path / "a.pt", ("tests", "numpy"))
    assert isinstance(found[0], Record) and found[0].get("scale") == 3 and found[0].get("other") is None
    assert (
        isinstance(found[0].get("inner")[0], TorchFileTensor)
        and found[0].name == "Made"
        and isinstance(found[2], Record)
    )
    assert set(torch.serialization.get_safe_globals()) == set(before)
    with pytest.raises(CheckpointError, match=r"is refused: it names numpy.*, tests\.unit\.\w+\.Made, which unpick"):
        read_torch_file(tmp_path / "a.pt")


class Calls:
    """An object that is pickled as a function call."""

    def __init__(self, *call: Any) -> None:
        self._call = call

    def __reduce__(self) -> Any:
        return self._call[0], self._call[1:]


CRAFTED = {
    "a command": (pickle.dumps(Calls(os.system, "touch {mark}"), 2), "posix.system"),
    "a function of builtins": (pickle.dumps(Calls(eval, "open('{mark}', 'w')"), 2), r"builtin(s|__)\.eval"),
    "a path of names": (b"\x80\x04\x8c\x05torch\x8c\x14serialization.os.abc\x93.", "serialization.os.abc|damaged"),
    "behind a known one": (
        b"\x80\x04\x8c\x0bcollections\x8c\x14OrderedDict.__init__\x93.",
        "OrderedDict.__init|damaged",
    ),
    "a function that is changed": (
        b"ctorch._utils\n_rebuild_tensor_v2\n}X\x01\x00\x00\x00xK\x01sb.",
        "damaged|refused",
    ),
    "a type that is changed": (b"ccollections\nOrderedDict\n}X\x01\x00\x00\x00xK\x01sb.", "is damaged"),
    "another storage": (b"\x80\x02(X\x01\x00\x00\x00axQ.", "is damaged"),
    "an object of the old form": (b"(S'touch {mark}'\niposix\nsystem\n.", "posix.system|damaged"),
    "another pickle's own loader": (pickle.dumps(Calls(pickle.loads, b"N."), 2), "pickle.loads"),
    "a large protocol": (pickle.dumps({"a": (1, 2)}, 5), "usual pickle_protocol|is damaged"),
    "nothing": (b"", "is damaged"),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_crafted_ones_run_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Crafted pickles are refused as torch.save files and as metadata of torch.distributed.checkpoint folders."""
    data, message = CRAFTED[name]
    monkeypatch.chdir(tmp_path)
    # Pad the name, because the pickle also contains the lengths of its strings.
    data = data.replace(b"{mark}", b"%-6s" % b"mark")
    with pytest.raises(CheckpointError, match=f"(?s)a.pt'.*({message})"):
        read_torch_file(archive(tmp_path / "a.pt", data))
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(CheckpointError, match=f"(?s).metadata'.*({message})"):
        find_dcp(tmp_path)
    assert not (tmp_path / "mark").exists()


def test_tensors_beyond_their_entries(tmp_path: Path) -> None:
    """Refuse tensors with more elements than their entry in the file, or than their declared storage, has."""
    torch.save(torch.arange(4.0), tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as made:
        data = made.read("a/data.pkl")
    assert data.count(b"K\x04") == 2  # one in the storage and one in the shape
    for changed in (data.replace(b"K\x04", b"K\x05"), data[::-1].replace(b"\x04K", b"\x05K", 1)[::-1]):
        path = archive(tmp_path / "b.pt", changed, data_0=bytes(16), byteorder=b"little")
        with pytest.raises(CheckpointError, match=r"no entry of it|is damaged"):
            read_torch_file(path)


def test_files_that_another_program_packed(tmp_path: Path) -> None:
    """Tensors at other positions than torch would choose, and big-endian files, are refused."""
    torch.save([torch.arange(4.0), torch.arange(9.0)], tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as made:
        entries = {info.filename.partition("/")[2]: made.read(info) for info in made.infolist()}
    for order, message in ((b"little", "no entry of it"), (b"big", "in big-endian order")):
        with zipfile.ZipFile(tmp_path / "b.pt", "w") as made:
            for name, each in {**entries, "byteorder": order}.items():
                made.writestr(f"archive/{name}", each)
        with pytest.raises(CheckpointError, match=message):
            read_torch_file(tmp_path / "b.pt")


class Own(torch.Tensor):
    pass


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # quantized tensors are deprecated, but users may have some
    QUANTIZED = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


def test_tensors_that_are_no_plain_ones(tmp_path: Path) -> None:
    complex_ones = torch.ones(2, dtype=torch.complex64)
    for value, message in (
        (complex_ones.conj(), "conjugated or negated"),
        (complex_ones.conj().imag, "conjugated or negated"),
        (torch.ones(2).to_sparse(), "class torch.Tensor, with layout torch.sparse_coo"),
        (torch.ones(2, device="meta"), "no entry of it"),
        (QUANTIZED, "is no file of torch.save .*QuantizedMeta"),
        (torch.ones(2).as_subclass(Own), "test_checkpoint_torch_files.Own"),
    ):
        torch.save([value], tmp_path / "a.pt")
        with pytest.raises(CheckpointError, match=f"a.pt.*({message})"):
            read_torch_file(tmp_path / "a.pt")


def test_damage_anywhere_gives_values_or_a_checkpoint_error(tmp_path: Path) -> None:
    """A flipped bit anywhere gives either values or a CheckpointError that names the file."""
    path, refused, numbers = tmp_path / "a.pt", 0, random.Random(5)
    torch.save({"a": torch.ones(3), "b": OrderedDict(c=[1, "two"])}, path)
    data = path.read_bytes()
    for _ in range(600):
        changed = bytearray(data)
        changed[numbers.randrange(len(data))] ^= 1 << numbers.randrange(8)
        path.write_bytes(changed)
        try:
            read_torch_file(path)
        except CheckpointError as error:
            refused += 1
            assert str(path) in str(error)
    assert refused > 50
