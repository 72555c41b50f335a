"""Pickles of others: values, places of tensors and records; whatever else they name is refused and not run."""

from __future__ import annotations

import os
import pickle
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from zeropp.checkpoint.errors import CheckpointError
from zeropp.checkpoint.pickles import Record, Stored, read_pickle
from zeropp.checkpoint.torch_files import read_torch_file

VALUES: dict[str, Any] = {
    "numbers": [1, 2.5, True, None, -(2**70)],
    "texts": ("a", b"\x00\xff", {"set"}),
    "torch": [torch.float8_e4m3fn, torch.bfloat16],
    "ordered": OrderedDict(a=1, b={2: (3,)}),
}


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_values(protocol: int) -> None:
    assert read_pickle(pickle.dumps(VALUES, protocol), "it") == VALUES
    assert read_pickle(pickle.dumps((torch.Size([2, 3]), torch.device("cuda:1")), protocol), "it") == ((2, 3), "cuda:1")


def test_tensors_are_where_they_lie(tmp_path: Path) -> None:
    """Views, transposed and empty ones, numbers, and dtypes that torch stores without a type."""
    row = torch.arange(24, dtype=torch.float32)
    given = {
        "whole": row.reshape(4, 6),
        "turned": row.reshape(4, 6).t(),
        "part": row[5:9],
        "number": torch.tensor(7, dtype=torch.int64),
        "empty": torch.zeros(0, 3),
        "small": torch.arange(6, dtype=torch.float32).to(torch.float8_e5m2).reshape(2, 3),
        "parameter": torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)),
    }
    torch.save(given, tmp_path / "a.pt")
    data = (tmp_path / "a.pt").read_bytes()
    for name, stored in read_torch_file(tmp_path / "a.pt").items():
        assert isinstance(stored, Stored) and (stored.dtype, stored.shape) == (given[name].dtype, given[name].shape)
        end = stored.begin + stored.extent * stored.dtype.itemsize
        memory = torch.frombuffer(bytearray(data[stored.begin : end] or b"\0"), dtype=torch.uint8)
        if stored.extent:
            values = memory.view(stored.dtype).as_strided(stored.shape, stored.strides)
            assert torch.equal(values.float(), given[name].detach().float())


class Made:
    """Becomes a record, if its module is asked for."""

    def __init__(self) -> None:
        self.scale = 3


def test_records_are_inert() -> None:
    def known(module: str, name: str) -> bool:
        return name == "Made"

    found = read_pickle(pickle.dumps([Made(), Made]), "it", known)
    assert isinstance(found[0], Record) and found[0].get("scale") == 3 and found[0].get("other") is None
    with pytest.raises(CheckpointError, match=r"it is refused: it names tests\.unit\.test_checkpoint_pickles\.Made"):
        read_pickle(pickle.dumps(Made()), "it")


class Calls:
    """Pickled as a call."""

    def __init__(self, *call: Any) -> None:
        self._call = call

    def __reduce__(self) -> Any:
        return self._call[0], self._call[1:]


CRAFTED = {
    "a command": (pickle.dumps(Calls(os.system, "touch {mark}")), "posix.system"),
    "a function of builtins": (pickle.dumps(Calls(eval, "open('{mark}', 'w')")), "builtins.eval"),
    "a path of names": (b"\x80\x04\x8c\x05torch\x8c\x14serialization.os.abc\x93.", "torch.serialization.os.abc"),
    "behind a known one": (
        b"\x80\x04\x8c\x0bcollections\x8c\x14OrderedDict.__init__\x93.",
        "OrderedDict.__init",
    ),
    "a function that is changed": (
        b"ctorch._utils\n_rebuild_tensor_v2\n}S'x'\nI1\nsb.",
        "a function was to be changed",
    ),
    "a type that is changed": (b"ccollections\nOrderedDict\n}S'x'\nI1\nsb.", "a function was to be changed"),
    "another storage": (b"\x80\x02(X\x01\x00\x00\x00axQ.", "is damaged"),
    "an object of the old form": (b"(S'touch {mark}'\niposix\nsystem\n.", "posix.system"),
    "another pickle's own loader": (pickle.dumps(Calls(pickle.loads, b"N.")), "_pickle.loads"),
    "nothing": (b"", "is damaged"),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_crafted_ones_run_nothing(name: str, tmp_path: Path) -> None:
    data, message = CRAFTED[name]
    mark = tmp_path / "mark"
    # Lengths of texts are in the pickle, so they are not changed.
    with pytest.raises(CheckpointError, match="(?s)'some file'.*" + message):
        read_pickle(data.replace(b"{mark}", b"%-6s" % b"mark"), "'some file'")
    assert not mark.exists() and not Path("mark").exists()


def test_whatever_is_damaged_is_an_error_of_its_own(tmp_path: Path) -> None:
    """A flipped bit anywhere leads to values or to a CheckpointError."""
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
