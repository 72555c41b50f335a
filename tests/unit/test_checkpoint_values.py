"""Values that checkpoints store besides the model's tensors come back unchanged, or are refused by name."""

from __future__ import annotations

import enum
import json
import warnings
from collections import Counter, OrderedDict
from typing import Any

import numpy
import pytest
import torch
from pydantic_core import from_json
from torch import Tensor, nn

from zeropp.checkpoint.boxes import CheckpointError
from zeropp.checkpoint.metadata import comparable, decode, encode, tensors_in


def there_and_back(value: object) -> Any:
    tensors: dict[str, Tensor] = {}
    text = json.dumps(encode(value, "it", tensors), allow_nan=False)
    # Checkpoints are read by pydantic's parser, which refuses some texts that json writes.
    return decode(from_json(text), tensors.__getitem__)


PLAIN: list[object] = [
    None, True, 3, -1.5, "words", [1, [2, "three"]], (1, (2.0, None)), {"a": {"b": [1]}},
    {1: "one", (2, 3): "pair", None: 0}, {"~tensor": "not one"}, [], {}, (), 2**128 - 1, -(2**127), 1e-300,
    Counter({3: 2, 5: 1}), {"": {"": ""}}, {True: 1, 2.5: 2}, "\u00fc \0 \U0001f600",
]  # fmt: skip


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_values_come_back_as_they_were(value: object) -> None:
    found = there_and_back(value)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_numbers_that_json_has_not(value: float) -> None:
    assert repr(there_and_back([value])[0]) == repr(value)


def test_tensors_and_arrays() -> None:
    given = {
        "deep": [{"t": torch.arange(6).reshape(2, 3)}, torch.tensor(1.5, dtype=torch.bfloat16)],
        "array": numpy.arange(4, dtype=numpy.uint16).reshape(2, 2),
        "number": numpy.float32(0.1),
        7: torch.tensor([True]),
    }
    found = there_and_back(given)
    assert torch.equal(found["deep"][0]["t"], given["deep"][0]["t"])  # type: ignore[index]
    assert torch.equal(found["deep"][1], given["deep"][1]) and torch.equal(found[7], given[7])  # type: ignore[index, arg-type]
    assert (found["array"] == given["array"]).all() and found["array"].dtype == numpy.uint16
    assert found["number"] == given["number"] and type(found["number"]) is numpy.float32


def test_states_of_torch_s_schedulers() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    schedules = torch.optim.lr_scheduler
    for made in (
        schedules.MultiStepLR(optimizer, [2, 2, 5]),
        schedules.CosineAnnealingWarmRestarts(optimizer, 3),
        schedules.OneCycleLR(optimizer, 0.1, total_steps=10),
        schedules.ReduceLROnPlateau(optimizer),
        schedules.SequentialLR(
            optimizer, [schedules.ConstantLR(optimizer), schedules.ExponentialLR(optimizer, 0.9)], [2]
        ),
    ):
        state = made.state_dict()
        assert there_and_back(state) == state


def test_no_two_tensors_have_one_name() -> None:
    one, two = torch.tensor([1.0]), torch.tensor([2.0])
    found = there_and_back([{"a.b": one, "a": {"b": two}}, {"s": {0: one, "~0": two}}])
    assert [found[0]["a.b"], found[0]["a"]["b"]] == [1, 2] and list(found[1]["s"].values()) == [1, 2]
    keys = {(numpy.int64(1),): "a", (numpy.int64(2),): "b"}
    assert there_and_back(keys) == keys


def test_conjugates_and_negatives_have_values_of_their_own() -> None:
    given = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64)
    tensors: dict[str, Tensor] = {}
    encode([given.conj(), given.conj().imag, nn.Parameter(given.real)], "it", tensors)
    assert all(not each.is_conj() and not each.is_neg() for each in tensors.values())
    assert torch.equal(tensors["it.0"], given.conj()) and torch.equal(tensors["it.1"], -given.imag)


def nested(depth: int) -> dict[int, Any]:
    found: dict[int, Any] = {0: torch.ones(1)}
    for _ in range(depth):
        found = {0: found}
    return found


def test_values_nested_too_deep_to_be_read_are_refused() -> None:
    assert there_and_back(nested(49))
    loop: list[Any] = []
    loop.append(loop)
    for value in (nested(51), loop):
        with pytest.raises(CheckpointError, match="nested more than 50 deep, or contains itself"):
            encode(value, "it", {})


def test_equal_values_compare_equal_under_other_names() -> None:
    tensors: dict[str, Tensor] = {}
    groups = [{"lr": torch.tensor(lr), "eps": [1, "x"]} for lr in (0.5, 0.5, 0.25)]
    encoded = [encode(group, f"group.{index}", tensors) for index, group in enumerate(groups)]
    first, same, other = (comparable(each, tensors.__getitem__) for each in encoded)
    assert first == same != other
    assert list(tensors_in(encoded)) == list(tensors)


class Colour(enum.IntEnum):
    RED = 1


class Shade(str, enum.Enum):  # the form of string enumerations in Python 3.10
    DARK = "dark"


class Own(Tensor):
    pass


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # these tensors are deprecated, but users may have some
    QUANTIZED = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    NESTED = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])

REFUSED: dict[str, object] = {
    "a large integer": {"it": [2**128]},
    "half of a surrogate pair": ["words", "\udcff/x"],
    "a key with half of one": {"\ud800": 1},
    "a class": {"inner": [object()]},
    "bytes": b"raw",
    "a set": {1, 2},
    "a function": len,
    "an enumeration": Colour.RED,
    "a key of a class": {Colour: 1},
    "numpy objects": numpy.array([object()]),
    "an enumeration of strings": Shade.DARK,
    "a key that is one": {Shade.DARK: 1},
    "a string of numpy": numpy.str_("words"),
    "a key of numpy": {numpy.str_("words"): 1},
    "the other order of bytes": numpy.arange(3, dtype=">i4"),
    "a masked array": numpy.ma.masked_array([1.0, 2.0], mask=[True, False]),
    "complex128": torch.ones(1, dtype=torch.complex128),
    "complex128 of numpy": numpy.ones(1, dtype=numpy.complex128),
    "quantized": QUANTIZED,
    "sparse": torch.ones(2).to_sparse(),
    "mkldnn": torch.ones(2).to_mkldnn(),
    "meta": torch.ones(2, device="meta"),
    "nested": NESTED,
    "jagged": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "a class of tensors": torch.ones(2).as_subclass(Own),
    "not materialised": nn.UninitializedParameter(),
}


def test_tensors_without_memory_are_refused_by_name() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(3)
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    for value in (fake, freed):
        with pytest.raises(CheckpointError, match=r"it\.t is a tensor .*which a checkpoint cannot keep"):
            encode({"t": value}, "it", {})
    with pytest.raises(CheckpointError, match="it is a tensor without values"):
        torch.func.vmap(lambda row: encode(row, "it", {}))(torch.ones(2))


@pytest.mark.parametrize("kind", REFUSED)
def test_others_are_refused_by_name(kind: str) -> None:
    """Unsupported values raise an error instead of being pickled, so reading a checkpoint runs no code."""
    with pytest.raises(CheckpointError, match="it"):
        encode(REFUSED[kind], "it", {})


def test_values_of_older_versions_are_read() -> None:
    """Older checkpoints contain integers of any size and strings with half of a surrogate pair; both are read."""
    assert decode(from_json(f'[{3**300}, {{"~utf8": "edb3bf2f78"}}]'), {}.__getitem__) == [3**300, "\udcff/x"]


def test_the_state_of_a_data_loader_s_generator() -> None:
    state = numpy.random.default_rng(5).bit_generator.state
    assert there_and_back(state) == state and state["state"]["state"].bit_length() > 64


def test_the_name_says_where() -> None:
    with pytest.raises(CheckpointError, match=r"extra\.sampler\.parts\.1 is b'raw', a builtins\.bytes"):
        encode({"sampler": OrderedDict(parts=[1, b"raw"])}, "extra", {})
    with pytest.raises(CheckpointError, match=r"extra\.seed\.1 is an integer of 129 bits; 128 are the most"):
        encode({"seed": [0, -(2**128)]}, "extra", {})
    with pytest.raises(CheckpointError, match=r"extra\.files\.0 is '\\udcff/x', a string with half of a surrogate"):
        encode({"files": ["\udcff/x"]}, "extra", {})
