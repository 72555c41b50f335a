"""What checkpoints keep besides tensors of the model: there and back, or refused by name."""

from __future__ import annotations

import enum
import json
from collections import Counter, OrderedDict
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from zeropp.checkpoint.errors import CheckpointError
from zeropp.checkpoint.values import decode, encode


def there_and_back(value: object) -> Any:
    tensors: dict[str, Tensor] = {}
    text = json.dumps(encode(value, "it", tensors), allow_nan=False)
    return decode(json.loads(text), tensors.__getitem__)


PLAIN: list[object] = [
    None, True, 3, -1.5, "words", [1, [2, "three"]], (1, (2.0, None)), {"a": {"b": [1]}},
    {1: "one", (2, 3): "pair", None: 0}, {"~tensor": "not one"}, [], {}, (), 10**30, 1e-300,
    Counter({3: 2, 5: 1}), {"": {"": ""}}, {True: 1, 2.5: 2},
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


class Colour(enum.IntEnum):
    RED = 1


REFUSED: dict[str, object] = {
    "a class": {"inner": [object()]},
    "bytes": b"raw",
    "a set": {1, 2},
    "a function": len,
    "an enumeration": Colour.RED,
    "a key of a class": {Colour: 1},
    "numpy objects": numpy.array([object()]),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_others_are_refused_by_name(kind: str) -> None:
    """Nothing is pickled, so nothing runs when a checkpoint is read."""
    with pytest.raises(CheckpointError, match="it"):
        encode(REFUSED[kind], "it", {})


def test_the_name_says_where() -> None:
    with pytest.raises(CheckpointError, match=r"extra\.sampler\.parts\.1 is b'raw', a builtins\.bytes"):
        encode({"sampler": OrderedDict(parts=[1, b"raw"])}, "extra", {})
