"""What a checkpoint keeps besides the model's tensors: settings, state_dicts, positions, as JSON and named tensors.

Nothing is pickled, so that nothing runs when a checkpoint is read. JSON has no tuples and no keys but strings; they,
and tensors, are objects of one key that begins with ``~``.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from zeropp.checkpoint.errors import CheckpointError

__all__ = ["decode", "encode"]

_Json = Any


def encode(value: object, name: str, tensors: dict[str, Tensor]) -> _Json:
    """JSON that stands for a value.

    Args:
        value: None, a bool, number, string, tensor, numpy array, or a dict, list or tuple of such.
        name: of the value, for tensors inside and for errors.
        tensors: takes the tensors inside, by name.

    Raises:
        CheckpointError: it is, or has inside, something else; with its name.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    # The exact types: a numpy number, an enumeration or a user's int would come back as something else.
    if type(value) is int or (type(value) is float and math.isfinite(value)):
        return value
    if type(value) is float:
        return {"~float": repr(value)}
    if isinstance(value, Tensor):
        tensors[name] = value.detach()
        return {"~tensor": name}
    if isinstance(value, Mapping):
        return _encode_mapping(value, name, tensors)
    if type(value) in (list, tuple):
        assert isinstance(value, (list, tuple))
        found = [encode(each, f"{name}.{index}", tensors) for index, each in enumerate(value)]
        return found if isinstance(value, list) else {"~tuple": found}
    array = _encode_array(value, name, tensors)
    if array is not None:
        return array
    raise CheckpointError(
        f"{name} is {_short(value)}, a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot "
        "keep: it has numbers, strings, None, tensors, numpy arrays, and dicts, lists and tuples of such. Give its "
        "state as one of these, or leave it out"
    )


def _encode_mapping(value: Mapping[Any, Any], name: str, tensors: dict[str, Tensor]) -> _Json:
    pairs = []
    for index, (key, each) in enumerate(value.items()):
        if not isinstance(key, str) and (type(key) not in (int, float, bool, tuple) and key is not None):
            raise CheckpointError(
                f"{name} has the key {_short(key)}, a {type(key).__qualname__}; expected strings, numbers or tuples"
            )
        # Numbered where the key is no name, so that tensors inside keep names of their own.
        inner = f"{name}.{key}" if isinstance(key, str) else f"{name}.~{index}"
        pairs.append((key, encode(each, inner, tensors)))
    # torch's MultiStepLR counts its milestones, and asks them for more than a dict has.
    if isinstance(value, Counter):
        return {"~counter": [[encode(key, name, tensors), each] for key, each in pairs]}
    if all(isinstance(key, str) and not key.startswith("~") for key, _ in pairs):
        return dict(pairs)
    return {"~dict": [[encode(key, name, tensors), each] for key, each in pairs]}


def _encode_array(value: object, name: str, tensors: dict[str, Tensor]) -> _Json | None:
    # PyTorch does not need numpy: what is its array has imported it.
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, (numpy.ndarray, numpy.generic)):
        return None
    array = numpy.array(value)
    try:
        tensors[name] = torch.from_numpy(array.reshape(-1)).reshape(array.shape)
    except TypeError:
        raise CheckpointError(
            f"{name} is a numpy array of dtype {array.dtype}, which no tensor has; give it as numbers or strings"
        ) from None
    return {"~scalar" if isinstance(value, numpy.generic) else "~array": name}


def decode(value: _Json, tensor: Callable[[str], Tensor]) -> Any:
    """What JSON of :func:`encode` stands for.

    Args:
        value: the JSON.
        tensor: gives the tensor of a name.

    Raises:
        CheckpointError: it is none that :func:`encode` makes.
    """
    if isinstance(value, list):
        return [decode(each, tensor) for each in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if len(value) != 1 or not tag.startswith("~"):
        return {key: decode(each, tensor) for key, each in value.items()}
    inner = value[tag]
    if tag == "~float":
        return float(inner)
    if tag == "~tensor":
        return tensor(inner)
    if tag in ("~array", "~scalar"):
        array = tensor(inner).numpy()
        return array if tag == "~array" else array[()]
    if tag == "~tuple":
        return tuple(decode(each, tensor) for each in inner)
    if tag in ("~dict", "~counter"):
        found = {decode(key, tensor): decode(each, tensor) for key, each in inner}
        return Counter(found) if tag == "~counter" else found
    raise CheckpointError(f"a value is of the unknown kind {tag!r}; it was written by a later version of zeropp")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
