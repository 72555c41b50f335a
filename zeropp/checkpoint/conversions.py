"""transformers' own mapping between the names and shapes of files and those of its models.

Mixtures of experts, for one, have the weights of all experts in one parameter, and files of one tensor an expert. What
is to be renamed, joined and split is asked of transformers, and tried on tensors without values before any is read.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zeropp.checkpoint.boxes import MODEL, Box, CheckpointError
from zeropp.checkpoint.metadata import DTYPES, BoxEntry, TensorEntry, dtype_code
from zeropp.checkpoint.tensor_reader import ConvertedTensors, StridedBox, TensorReader

__all__ = ["Outgoing", "convert_source"]

_STORED = "zeropp.stored."
"""Prefix of names of tensors that others are made of."""


@dataclass
class _Group:
    """Tensors that are converted together.

    Attributes:
        model: of transformers.
        first: name that the conversion goes by.
        converter: of transformers; None for one that is only renamed.
        inputs: the pattern that each fits, and its name.
        outputs: names of what is made, by those that the converter gives; dtype and shape of each.
    """

    model: nn.Module
    first: str
    converter: Any
    inputs: list[tuple[str, str]] = field(default_factory=list)
    outputs: dict[str, tuple[str, torch.dtype, tuple[int, ...]]] = field(default_factory=dict)

    def convert_tensors(self, get: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """The tensors that the group makes, by the converter's names."""
        if self.converter is None:
            return {self.first: get(self.inputs[0][1])}
        # It collects what it is given, and is used once.
        converter = deepcopy(self.converter)
        for pattern, name in self.inputs:
            converter.add_tensor(self.first, name, pattern, get(name))
        made = converter.convert(self.first, model=self.model, config=getattr(self.model, "config", None))
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def plan(self, kinds: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], rename: Callable[[str], str]) -> None:
        """Find out what is made, without values.

        Raises:
            CheckpointError: transformers cannot convert what is there.
        """
        try:
            made = self.convert_tensors(lambda name: torch.empty(kinds[name][1], dtype=kinds[name][0], device="meta"))
        except Exception as error:
            names = [name for _, name in self.inputs]
            raise CheckpointError(
                f"transformers cannot make {self.first!r} of {names[:3]}{' and others' if names[3:] else ''}: "
                f"{type(error).__name__}: {error}"
            ) from error
        self.outputs = {name: (rename(name), value.dtype, tuple(value.shape)) for name, value in made.items()}


def _tools(model: nn.Module) -> tuple[Any, list[Any]] | None:
    """transformers' module of conversions and the mapping of a model, if transformers has made it and has both."""
    # By name, since importing transformers takes seconds and may not be possible.
    bases = {f"{each.__module__}.{each.__qualname__}" for each in type(model).__mro__}
    if "transformers.modeling_utils.PreTrainedModel" not in bases:
        return None
    try:
        tools = importlib.import_module("transformers.core_model_loading")
        found = importlib.import_module("transformers.conversion_mapping").get_model_conversion_mapping
    except ImportError:
        # Before transformers 5 files had the names of models.
        return None
    return tools, found(model)


def convert_source(source: TensorReader, model: nn.Module, names: Iterable[str]) -> TensorReader:
    """The tensors of files of transformers under the names and in the shapes of a model.

    Args:
        source: of the files.
        model: of transformers; others are left as they are.
        names: of all its parameters and buffers, of tied ones each.

    Raises:
        CheckpointError: transformers cannot convert what is there.
    """
    tools = _tools(model)
    if tools is None:
        return source
    stored = {key.removeprefix(MODEL): entry for key, entry in source.metadata.tensors.items() if key.startswith(MODEL)}
    kinds = {name: (DTYPES[entry.dtype], entry.shape) for name, entry in stored.items()}
    tensors = {key: entry for key, entry in source.metadata.tensors.items() if not key.startswith(MODEL)}
    built: dict[str, ConvertedTensors] = {}
    # In transformers' order, in which expert 10 follows expert 9: experts are stacked as they come.
    for group in _incoming(*tools, model, sorted(stored, key=tools[0].dot_natural_key), set(names)):
        if group.converter is None:
            tensors[MODEL + group.first] = stored[group.inputs[0][1]]
            continue
        group.plan(kinds, str)
        # As boxes of the files, so that each rank reads its own part and none holds the whole.
        joined = _joined(group, stored)
        if joined is not None:
            tensors[MODEL + group.first] = joined
            continue
        tensors |= {_STORED + name: stored[name] for _, name in group.inputs}
        make = _maker(group)
        for name, dtype, shape in group.outputs.values():
            tensors[MODEL + name] = TensorEntry(dtype=dtype_code(dtype, name), shape=shape, boxes=())
            built[MODEL + name] = ConvertedTensors(group.first, make)
    source.metadata = source.metadata.model_copy(update={"tensors": tensors})
    source.built = built
    return source


def _incoming(tools: Any, mapping: list[Any], model: nn.Module, keys: list[str], names: set[str]) -> Iterator[_Group]:
    """As transformers groups the tensors of files; see its ``convert_and_load_state_dict_in_model``."""
    renamings = [each for each in mapping if isinstance(each, tools.WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, tools.WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    prefix = getattr(model, "base_model_prefix", "")
    known = dict.fromkeys(names, True)
    groups: dict[str, _Group] = {}
    for key in keys:
        name, pattern = tools.rename_source_key(key, renamings, converters, prefix, known)
        # A renaming that is meant for older files may fit a name that the model has as it is.
        if name not in names and key in names:
            name, pattern = tools.rename_source_key(key, [], [], prefix, known)
        converter = None if pattern is None else by_pattern[pattern]
        groups.setdefault(name, _Group(model, name, converter)).inputs.append((pattern or key, key))
    yield from groups.values()


def _maker(group: _Group) -> Callable[[Callable[[str], Tensor]], Mapping[str, Tensor]]:
    def make(get: Callable[[str], Tensor]) -> Mapping[str, Tensor]:
        made = group.convert_tensors(lambda name: get(_STORED + name))
        return {MODEL + group.outputs[name][0]: value for name, value in made.items()}

    return make


def _joined(group: _Group, stored: Mapping[str, TensorEntry]) -> TensorEntry | None:
    """A tensor that is others side by side, which boxes can say: experts stacked, and their rows joined or not.

    None for any other conversion.
    """
    operations = [(type(each).__name__, getattr(each, "dim", None)) for each in group.converter.operations]
    if operations not in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)]):
        return None
    (name, dtype, shape), *others = group.outputs.values()
    patterns = [each for each in group.converter.source_patterns if any(each == own for own, _ in group.inputs)]
    boxes: list[BoxEntry] = []
    row = 0
    for pattern in patterns:
        rows = 0
        for number, each in enumerate(n for own, n in group.inputs if own == pattern):
            entry = stored[each]
            whole = Box((0,) * len(entry.shape), entry.shape)
            plain = len(entry.boxes) == 1 and entry.boxes[0].box == whole and not isinstance(entry.boxes[0], StridedBox)
            if others or not plain or DTYPES[entry.dtype] != dtype:
                return None
            offsets, sizes = (number, row, *whole.offsets[1:]), (1, *entry.shape)
            boxes.append(BoxEntry(file=entry.boxes[0].file, begin=entry.boxes[0].begin, offsets=offsets, sizes=sizes))
            rows = entry.shape[0]
        row += rows
    fits = all(len(each.offsets) == len(shape) and each.box.inside(shape) for each in boxes)
    if not fits or sum(each.box.numel for each in boxes) != torch.Size(shape).numel():
        return None
    return TensorEntry(dtype=dtype_code(dtype, name), shape=shape, boxes=tuple(boxes))


class Outgoing:
    """The tensors of a model as files of transformers have them, made one group at a time.

    Args:
        model: of any kind; only transformers' are converted.
        kinds: dtype and shape of each of its tensors, by name.

    Attributes:
        kinds: likewise of each tensor of the files.

    Raises:
        CheckpointError: transformers cannot convert what is there.
    """

    def __init__(self, model: nn.Module, kinds: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        self._group: dict[str, _Group] = {}
        self._waiting: dict[str, dict[str, Tensor]] = {}
        self.kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        tools = _tools(model)
        for group in _plain(model, kinds) if tools is None else _outgoing(tools[0], model, kinds):
            self._group |= dict.fromkeys((name for _, name in group.inputs), group)
            self.kinds |= {name: (dtype, shape) for name, dtype, shape in group.outputs.values()}

    def wanted(self, name: str, writes: Callable[[str], bool]) -> bool:
        """Tell whether a tensor of the model is a part of one for which ``writes`` returns true."""
        return any(writes(made) for made, _, _ in self._group[name].outputs.values())

    def give(self, name: str, values: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Give one tensor of the model; yields what is complete with it, by name.

        ``values`` are kept until then.
        """
        group = self._group[name]
        there = self._waiting.setdefault(group.first, {})
        there[name] = values
        if len(there) == len(group.inputs):
            made = group.convert_tensors(self._waiting.pop(group.first).__getitem__)
            yield from ((group.outputs[key][0], value) for key, value in made.items())


def _plain(model: nn.Module, kinds: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> Iterator[_Group]:
    for name, (dtype, shape) in kinds.items():
        yield _Group(model, name, None, [(name, name)], {name: (name, dtype, shape)})


def _outgoing(
    tools: Any, model: nn.Module, kinds: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
) -> Iterator[_Group]:
    """As transformers groups the tensors of a model; see its ``revert_weight_conversion``."""
    mapping = getattr(model, "_weight_conversions", None)
    if mapping is None:
        find = importlib.import_module("transformers.conversion_mapping").get_model_conversion_mapping
        # A prefix that files may or may not have had is one only where they were read.
        mapping = [each for each in find(model, add_legacy=False) if not isinstance(each, tools.PrefixChange)]
    try:
        reverse = [each.reverse_transform() for each in mapping[::-1]]
    except (NotImplementedError, ValueError) as error:
        raise CheckpointError(
            f"transformers cannot convert {type(model).__name__} back to what files have: {error}"
        ) from error
    renamings = [each for each in reverse if isinstance(each, tools.WeightRenaming)]
    converters = [each for each in reverse if isinstance(each, tools.WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    groups: dict[str, _Group] = {}
    for name in sorted(kinds, key=tools.dot_natural_key):
        first, pattern = tools.apply_converters(name, converters)
        if pattern is None:
            first = tools.apply_renamings(name, renamings)
        converter = None if pattern is None else by_pattern[pattern]
        groups.setdefault(first, _Group(model, first, converter)).inputs.append((pattern or name, name))
    for group in groups.values():
        # What is only renamed has its name by now.
        renames = renamings if group.converter is not None else []
        group.plan(kinds, partial(_renamed, tools, renames))
        yield group


def _renamed(tools: Any, renamings: list[Any], name: str) -> str:
    return str(tools.apply_renamings(name, renamings))
