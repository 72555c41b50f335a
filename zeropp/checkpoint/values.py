"""Values of a checkpoint besides the model's tensors: settings, state_dicts, positions, as JSON and named tensors.

Nothing is pickled, so that nothing runs when a checkpoint is read. JSON has no tuples and no keys but strings; they,
and tensors, are objects of one key that begins with ``~``.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zeropp.checkpoint.dtypes import as_bytes, dtype_code
from zeropp.checkpoint.errors import CheckpointError

__all__ = ["comparable", "decode", "encode", "tensors_in"]

_Json = Any
_TENSORS = ("~tensor", "~array", "~scalar")
# Three levels of JSON for each at most, and what reads it takes 200.
_DEPTH = 50
_INTEGER_BITS = 128  # in the state of numpy's usual generator, which data loaders keep


def encode(value: object, name: str, tensors: dict[str, Tensor]) -> _Json:
    """JSON that stands for a value.

    Args:
        value: None, a bool, number, string, tensor, numpy array, or a dict, list or tuple of such.
        name: of the value, for tensors inside and for errors.
        tensors: takes the tensors inside, by name; no two have one.

    Raises:
        CheckpointError: it is, or has inside, something else, or is nested too deep; with its name.
    """
    return _encode(value, name, tensors, 0)


def _encode(value: object, name: str, tensors: dict[str, Tensor], depth: int) -> _Json:
    if depth > _DEPTH:
        raise CheckpointError(
            f"{name[:60]}... is nested more than {_DEPTH} deep, or contains itself; give it as tensors, or flatter"
        )
    # The exact types: a numpy number, an enumeration or a user's int would come back as something else.
    if value is None or type(value) is bool:
        return value
    if type(value) is int:
        if value.bit_length() > _INTEGER_BITS:
            raise CheckpointError(
                f"{name} is an integer of {value.bit_length()} bits; {_INTEGER_BITS} are the most. Give it as a string"
            )
        return value
    if type(value) is str:
        _require_text(value, name)
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"~float": repr(value)}
    if isinstance(value, Tensor):
        return {"~tensor": _keep(_plain(value, name), name, tensors)}
    if isinstance(value, Mapping):
        return _encode_mapping(value, name, tensors, depth)
    if type(value) in (list, tuple):
        assert isinstance(value, (list, tuple))
        found = [_encode(each, f"{name}.{index}", tensors, depth + 1) for index, each in enumerate(value)]
        return found if isinstance(value, list) else {"~tuple": found}
    array = _encode_array(value, name, tensors)
    if array is not None:
        return array
    raise CheckpointError(
        f"{name} is {_short(value)}, a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot "
        "keep: it has numbers, strings, None, tensors, numpy arrays, and dicts, lists and tuples of such. Give its "
        "state as one of these, or leave it out"
    )


def _require_text(value: str, name: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        # Readers of JSON refuse it.
        raise CheckpointError(
            f"{name} is {ascii(value)[:60]}, a string with half of a surrogate pair, as of a file's name that is no "
            "UTF-8; give it as list(os.fsencode(...)), or leave it out"
        ) from error


def _encode_mapping(value: Mapping[Any, Any], name: str, tensors: dict[str, Tensor], depth: int) -> _Json:
    pairs = []
    for index, (key, each) in enumerate(value.items()):
        if type(key) not in (str, int, float, bool, tuple) and key is not None:
            raise CheckpointError(
                f"{name} has the key {_short(key)}, a {type(key).__module__}.{type(key).__qualname__}; expected "
                "strings, numbers or tuples"
            )
        # Numbered where the key is no name.
        inner = f"{name}.{key}" if isinstance(key, str) else f"{name}.~{index}"
        pairs.append((_encode(key, f"{name}.~{index}.key", tensors, depth + 1), each, inner))
    # torch's MultiStepLR counts its milestones, and asks them for more than a dict has.
    tag = "~counter" if isinstance(value, Counter) else "~dict"
    if tag == "~dict" and all(isinstance(key, str) and not key.startswith("~") for key, _, _ in pairs):
        return {key: _encode(each, inner, tensors, depth + 1) for key, each, inner in pairs}
    return {tag: [[key, _encode(each, inner, tensors, depth + 1)] for key, each, inner in pairs]}


def _encode_array(value: object, name: str, tensors: dict[str, Tensor]) -> _Json | None:
    # PyTorch does not need numpy: what is its array has imported it.
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, (numpy.ndarray, numpy.generic)):
        return None
    if isinstance(value, numpy.ndarray) and type(value) not in (numpy.ndarray, numpy.memmap):
        # A mask, fields or units would be lost.
        raise CheckpointError(
            f"{name} is an array of class {type(value).__module__}.{type(value).__qualname__}, which a checkpoint "
            "cannot keep: it has plain arrays. Give it as one, or leave it out"
        )
    array = numpy.array(value)
    try:
        tensor = torch.from_numpy(array.reshape(-1)).reshape(array.shape)
    except (TypeError, ValueError):
        raise CheckpointError(
            f"{name} is of numpy with the dtype {array.dtype.str}, which no tensor has; give it as numbers or strings, "
            "or in another dtype or the machine's order of bytes"
        ) from None
    tag = "~scalar" if isinstance(value, numpy.generic) else "~array"
    return {tag: _keep(_plain(tensor, name), name, tensors)}


def _plain(value: Tensor, name: str) -> Tensor:
    """A tensor in the form that files can hold."""
    kind = type(value)
    # Others have no memory of their own, or mean something else by it; to ask them for it may end the process.
    if kind not in (Tensor, nn.Parameter):
        raise _not_plain(name, f"of class {kind.__module__}.{kind.__qualname__}")
    if value.is_nested or value.layout is not torch.strided:
        raise _not_plain(name, "nested" if value.is_nested else f"of layout {value.layout}")
    dtype_code(value.dtype, name)
    try:
        found = value.detach().resolve_conj().resolve_neg()
        there = found.numel() == 0 or found.data_ptr() != 0
    except RuntimeError:
        there = False
    if not there or value.device.type == "meta":
        raise _not_plain(name, f"without values, on {value.device}")
    return found


def _not_plain(name: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{name} is a tensor {what}, which a checkpoint cannot keep: it has plain dense tensors with values. Give it "
        "as one, or leave it out"
    )


def _keep(tensor: Tensor, name: str, tensors: dict[str, Tensor]) -> str:
    """Add a tensor under its name, or one like it if another has that already."""
    found, number = name, 1
    while found in tensors:
        number += 1
        found = f"{name}~{number}"
    tensors[found] = tensor
    return found


def decode(value: _Json, tensor: Callable[[str], Tensor]) -> Any:
    """The values that JSON of :func:`encode` stands for.

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
    if tag == "~utf8":
        # Such strings are no longer written; checkpoints from before the first release may have them.
        return bytes.fromhex(inner).decode("utf-8", "surrogatepass")
    if tag in ("~array", "~scalar"):
        array = tensor(inner).numpy()
        return array if tag == "~array" else array[()]
    if tag == "~tuple":
        return tuple(decode(each, tensor) for each in inner)
    if tag in ("~dict", "~counter"):
        found = {decode(key, tensor): decode(each, tensor) for key, each in inner}
        return Counter(found) if tag == "~counter" else found
    raise CheckpointError(f"a value is of the unknown kind {tag!r}; it was written by a later version of zeropp")


def tensors_in(value: _Json) -> Iterator[str]:
    """Names of the tensors that :func:`decode` will ask for."""
    if isinstance(value, list):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, dict):
        tag = next(iter(value), "")
        if len(value) == 1 and tag in _TENSORS:
            yield value[tag]
        else:
            yield from tensors_in(list(value.values()))


def comparable(value: _Json, tensor: Callable[[str], Tensor]) -> str:
    """Equal where values are, whatever their tensors are called.

    Args:
        value: JSON of :func:`encode`.
        tensor: gives the tensor of a name, on the CPU.
    """
    told = {}
    for name in tensors_in(value):
        found = tensor(name)
        told[name] = f"{found.dtype} {tuple(found.shape)} {as_bytes(found.contiguous()).tolist()}"
    return json.dumps(_with_names(value, told), sort_keys=True)


def _with_names(value: _Json, names: Mapping[str, str]) -> _Json:
    """JSON of :func:`encode` with other names of its tensors."""
    if isinstance(value, list):
        return [_with_names(each, names) for each in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and (tag := next(iter(value))) in _TENSORS:
        return {tag: names[value[tag]]}
    return {key: _with_names(each, names) for key, each in value.items()}


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
