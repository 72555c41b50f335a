"""Pickles that others wrote, read without running anything that they name.

A pickle is a program: it names functions and classes, which loading calls. Here every name stands for a tensor that
lies in a file, a plain value, or a :class:`Record`, which does nothing; whatever else it names is an error.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from zeropp.checkpoint.errors import CheckpointError

__all__ = ["Record", "Stored", "read_pickle"]


class Record:
    """A stand-in for an object of a class that is known here by its name alone.

    Attributes:
        name: of the class.
        args: that it would have been made with.
        state: that it would have been given.
    """

    name = ""

    def __new__(cls, *args: object) -> Record:
        made = super().__new__(cls)
        made.args, made.state = args, {}
        return made

    args: tuple[Any, ...]
    state: Any

    def __setstate__(self, state: object) -> None:
        self.state = state

    def __hash__(self) -> int:
        return id(self)

    def get(self, key: str) -> Any:
        """One attribute that the object would have had, or None."""
        return self.state.get(key) if isinstance(self.state, dict) else None


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: first byte of its first element, dtype, shape, and strides in elements."""

    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def extent(self) -> int:
        """Elements of memory from its first to its last."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))


@dataclass(frozen=True)
class _Storage:
    begin: int
    nbytes: int
    dtype: torch.dtype | None


class _Call:
    """A function that pickles may name. They can neither look into it nor change it, as they could a plain one."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function

    def __call__(self, *args: object) -> object:
        return self._function(*args)

    def __setstate__(self, state: object) -> NoReturn:
        raise ValueError("a function was to be changed")


def _tensor(
    storage: _Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], grad: object = None,
    hooks: object = None, metadata: object = None,
) -> Stored:  # fmt: skip
    _refuse_lazy(metadata)
    return _checked(storage, storage.dtype, offset, shape, strides)


def _tensor_v3(
    storage: _Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], grad: object, hooks: object,
    dtype: torch.dtype, metadata: object = None,
) -> Stored:  # fmt: skip
    _refuse_lazy(metadata)
    return _checked(storage, dtype, offset, shape, strides)


def _refuse_lazy(metadata: object) -> None:
    """Refuse what is negated or conjugated only when it is read: here bytes go to where they belong as they are."""
    if isinstance(metadata, dict) and (metadata.get("conj") or metadata.get("neg")):
        raise CheckpointError(
            "a tensor was saved as a conjugated or negated view, whose values are not what lies in the file; save it "
            "again after resolve_conj().resolve_neg()"
        )


def _checked(
    storage: _Storage, dtype: torch.dtype | None, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> Stored:
    if not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor has no dtype")
    if len(shape) != len(strides) or any(type(each) is not int or each < 0 for each in (*shape, *strides, offset)):
        raise ValueError(f"a tensor has shape {shape} and strides {strides}")
    found = Stored(storage.begin + offset * dtype.itemsize, dtype, tuple(shape), tuple(strides))
    if (offset + found.extent) * dtype.itemsize > storage.nbytes:
        raise ValueError(f"a tensor of shape {shape} lies beyond the {storage.nbytes} bytes of its storage")
    return found


# Functions that pickles of torch.save name, and those called in their place. Tensors become notes of where they lie.
_FUNCTIONS: dict[tuple[str, str], Callable[..., object]] = {
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_v3,
    ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
    ("torch._utils", "_rebuild_parameter_with_state"): lambda data, *_: data,
    ("torch.serialization", "_get_layout"): str,
    ("torch", "device"): lambda *args: ":".join(map(str, args)),
    ("collections", "OrderedDict"): OrderedDict,
    # Protocol 2, which torch.save uses, has bytes as text that is to be encoded.
    ("_codecs", "encode"): lambda text, *_: text.encode("latin1"),
    ("builtins", "set"): set,
    # Python 2's name of the module, which protocol 2 writes.
    ("__builtin__", "set"): set,
}
_STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64, "ComplexDoubleStorage": torch.complex128,
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        data: bytes,
        records: Callable[[str, str], bool],
        storage: Callable[[str], tuple[int, int]],
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._records = records
        self._storage = storage
        # Made anew for each pickle, so that none finds what another left.
        self._found: dict[tuple[str, str], object] = {}

    def find_class(self, module: str, name: str) -> Any:
        key = module, name
        if key not in self._found:
            self._found[key] = self._find(module, name)
        return self._found[key]

    def _find(self, module: str, name: str) -> object:
        if (module, name) in _FUNCTIONS:
            return _Call(_FUNCTIONS[module, name])
        if (module, name) == ("torch", "Size"):
            return _Call(lambda sizes=(): tuple(sizes))
        # What is there: asked for, some attributes of torch would be imported.
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        # Without a dtype of its own: each tensor in it brings one.
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return None
        if self._records(module, name):
            return type("Record", (Record,), {"name": name})
        raise CheckpointError(
            f"it names {module}.{name}, which unpickling would call. Nothing was called: values, "
            "tensors and records of the format are all that is read. Save it again without such objects"
        )

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, _, numel = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype | None):
            raise ValueError(f"a storage is given as {pid!r}")
        begin, nbytes = self._storage(str(key))
        if numel * (1 if dtype is None else dtype.itemsize) > nbytes:
            raise ValueError(f"storage {key!r} has {nbytes} bytes, too few for its {numel} elements")
        return _Storage(begin, nbytes, dtype)


def _no_records(module: str, name: str) -> bool:
    return False


def _no_storage(key: str) -> tuple[int, int]:
    raise ValueError("it has tensors, and is no file that could hold them")


def read_pickle(
    data: bytes,
    where: str,
    records: Callable[[str, str], bool] = _no_records,
    storage: Callable[[str], tuple[int, int]] = _no_storage,
) -> Any:
    """The values of a pickle: plain ones, :class:`Stored` for tensors, strings for devices and layouts.

    Args:
        data: the pickle.
        where: file that it is of, for errors.
        records: whether a class, of a module and a name, is to become a :class:`Record`.
        storage: first byte and length of the storage of a key.

    Raises:
        CheckpointError: it names something else, or is damaged. Nothing is run.
    """
    try:
        return _Unpickler(data, records, storage).load()
    except CheckpointError as error:
        raise CheckpointError(f"{where} is refused: {error}") from None
    except Exception as error:
        # Whatever a damaged one leads to.
        raise CheckpointError(f"{where} is damaged: {type(error).__name__}: {error}") from error
