"""Conversion between the tensors in transformers' files and the parameters of transformers' models, both ways.

A mixture-of-experts model, for example, has one parameter with the weights of all experts, but its files have one
tensor per expert. transformers' own conversion mapping says which tensors to rename, join and split. Each conversion is
first run on meta tensors, so that an impossible one fails before any value is read.
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
"""Prefix of the names of stored tensors that only serve as inputs of a conversion."""


@dataclass
class _Group:
    """One conversion: its input tensors and the output tensors that are made of them together.

    Attributes:
        model: the model, a transformers model if ``converter`` is given.
        first: name that identifies the conversion.
        converter: transformers' ``WeightConverter``; None if one tensor is only renamed.
        inputs: (transformers' name pattern that the input matches, name of the input).
        outputs: (final name, dtype, shape) of each output, by the name that the converter returns it under.
    """

    model: nn.Module
    first: str
    converter: Any
    inputs: list[tuple[str, str]] = field(default_factory=list)
    outputs: dict[str, tuple[str, torch.dtype, tuple[int, ...]]] = field(default_factory=dict)

    def convert_tensors(self, get: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Return the output tensors, by the converter's names.

        Args:
            get: returns the values of the input with a given name.
        """
        if self.converter is None:
            return {self.first: get(self.inputs[0][1])}
        # A converter stores its inputs and can be used only once, so each call uses a copy.
        converter = deepcopy(self.converter)
        for pattern, name in self.inputs:
            converter.add_tensor(self.first, name, pattern, get(name))
        made = converter.convert(self.first, model=self.model, config=getattr(self.model, "config", None))
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def plan(self, kinds: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], rename: Callable[[str], str]) -> None:
        """Set ``outputs`` by running the conversion on meta tensors.

        Args:
            kinds: dtype and shape of each input, by name.
            rename: returns the final name of an output, given the converter's name.

        Raises:
            CheckpointError: transformers cannot convert the inputs.
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
    """Return transformers' conversion module and the mapping for a model.

    None if the model is not a transformers model, or if the installed transformers has no conversions.
    """
    # Compare class names instead of importing transformers: the import takes seconds, and transformers may be missing.
    bases = {f"{each.__module__}.{each.__qualname__}" for each in type(model).__mro__}
    if "transformers.modeling_utils.PreTrainedModel" not in bases:
        return None
    try:
        tools = importlib.import_module("transformers.core_model_loading")
        found = importlib.import_module("transformers.conversion_mapping").get_model_conversion_mapping
    except ImportError:
        # Before version 5 of transformers, files have the model's own names and need no conversion.
        return None
    return tools, found(model)


def convert_source(source: TensorReader, model: nn.Module, names: Iterable[str]) -> TensorReader:
    """Give a source of transformers' files the tensor names and shapes that the model has.

    Args:
        source: reader of the files; changed in place.
        model: the model that the tensors are for. For other models than transformers' the source is not changed.
        names: names of all parameters and buffers of the model, with every name of tied ones.

    Returns:
        ``source``.

    Raises:
        CheckpointError: transformers cannot convert the tensors of the files.
    """
    tools = _tools(model)
    if tools is None:
        return source
    stored = {key.removeprefix(MODEL): entry for key, entry in source.metadata.tensors.items() if key.startswith(MODEL)}
    kinds = {name: (DTYPES[entry.dtype], entry.shape) for name, entry in stored.items()}
    tensors = {key: entry for key, entry in source.metadata.tensors.items() if not key.startswith(MODEL)}
    built: dict[str, ConvertedTensors] = {}
    # transformers' natural order puts expert 10 behind expert 9. The order matters because experts are stacked in the
    # order in which their tensors are added.
    for group in _incoming(*tools, model, sorted(stored, key=tools[0].dot_natural_key), set(names)):
        if group.converter is None:
            tensors[MODEL + group.first] = stored[group.inputs[0][1]]
            continue
        group.plan(kinds, str)
        # If the output is only a stack or concatenation, describe it by boxes of the files. Each rank then reads only
        # its own part instead of building the whole tensor.
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
    """Yield the conversions for loading, grouped as transformers' ``convert_and_load_state_dict_in_model`` does.

    Args:
        tools: transformers' conversion module.
        mapping: the model's renamings and converters.
        model: the transformers model.
        keys: names of the tensors in the files, in transformers' order.
        names: names of the model's parameters and buffers.
    """
    renamings = [each for each in mapping if isinstance(each, tools.WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, tools.WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    prefix = getattr(model, "base_model_prefix", "")
    known = dict.fromkeys(names, True)
    groups: dict[str, _Group] = {}
    for key in keys:
        name, pattern = tools.rename_source_key(key, renamings, converters, prefix, known)
        # A renaming for files of older versions may match a name that the model has as well, and turn it into a name
        # that the model lacks. Keep the original name then.
        if name not in names and key in names:
            name, pattern = tools.rename_source_key(key, [], [], prefix, known)
        converter = None if pattern is None else by_pattern[pattern]
        groups.setdefault(name, _Group(model, name, converter)).inputs.append((pattern or key, key))
    yield from groups.values()


def _maker(group: _Group) -> Callable[[Callable[[str], Tensor]], Mapping[str, Tensor]]:
    """Return the ``make`` function of :class:`ConvertedTensors` for a group."""

    def make(get: Callable[[str], Tensor]) -> Mapping[str, Tensor]:
        made = group.convert_tensors(lambda name: get(_STORED + name))
        return {MODEL + group.outputs[name][0]: value for name, value in made.items()}

    return make


def _joined(group: _Group, stored: Mapping[str, TensorEntry]) -> TensorEntry | None:
    """Return the entry of an output that is only a stack of stored tensors, made of boxes that lie in the files.

    Boxes can describe experts stacked along dimension 0, with or without a concatenation along dimension 1. The result
    is None for every other conversion, for strided or partial inputs, and for inputs with another dtype.

    Args:
        group: the conversion, planned.
        stored: entries of the tensors in the files, by name.
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
    """Converter of a model's tensors to the tensors of the files that transformers would save.

    Tensors are given one by one; the outputs of a conversion are made when its last input arrives.

    Args:
        model: the model. Tensors of other models than transformers' keep their names and shapes.
        kinds: dtype and shape of each of the model's tensors, by name.

    Attributes:
        kinds: dtype and shape of each tensor in the files, by name.

    Raises:
        CheckpointError: transformers cannot convert the model's tensors.
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
        """Return True if a tensor of the model is an input of a file tensor for which ``writes`` returns True.

        Args:
            name: name of the model's tensor.
            writes: returns True if this rank writes the file tensor of the given name.
        """
        return any(writes(made) for made, _, _ in self._group[name].outputs.values())

    def give(self, name: str, values: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Add one tensor of the model and yield the file tensors that it completes, with their names.

        ``values`` stay in memory until the last input of their conversion is given.
        """
        group = self._group[name]
        there = self._waiting.setdefault(group.first, {})
        there[name] = values
        if len(there) == len(group.inputs):
            made = group.convert_tensors(self._waiting.pop(group.first).__getitem__)
            yield from ((group.outputs[key][0], value) for key, value in made.items())


def _plain(model: nn.Module, kinds: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> Iterator[_Group]:
    """Yield one group per tensor that leaves the tensor as it is."""
    for name, (dtype, shape) in kinds.items():
        yield _Group(model, name, None, [(name, name)], {name: (name, dtype, shape)})


def _outgoing(
    tools: Any, model: nn.Module, kinds: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
) -> Iterator[_Group]:
    """Yield the conversions for saving, grouped as transformers' ``revert_weight_conversion`` does.

    Args:
        tools: transformers' conversion module.
        model: the transformers model.
        kinds: dtype and shape of each of the model's tensors, by name.
    """
    mapping = getattr(model, "_weight_conversions", None)
    if mapping is None:
        find = importlib.import_module("transformers.conversion_mapping").get_model_conversion_mapping
        # transformers did not load this model, so nothing shows if the original files had the prefix that a
        # PrefixChange removes. Its reverse would add an unwanted prefix.
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
        # A tensor that is only renamed got its final name above; renaming it again would be wrong.
        renames = renamings if group.converter is not None else []
        group.plan(kinds, partial(_renamed, tools, renames))
        yield group


def _renamed(tools: Any, renamings: list[Any], name: str) -> str:
    """Return a tensor's name after transformers' renamings."""
    return str(tools.apply_renamings(name, renamings))
