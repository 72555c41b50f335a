"""Names: what a model calls its tensors, and what a checkpoint calls the same ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from zeropp.checkpoint.errors import CheckpointError
from zeropp.checkpoint.metadata import Metadata
from zeropp.checkpoint.parts import MODEL, STATE
from zeropp.checkpoint.source import Source
from zeropp.checkpoint.values import comparable
from zeropp.optimizer.wrapper import ZeroOptimizer

__all__ = ["compare", "has_extra_state", "match", "match_groups", "model_names"]


def model_names(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Parameters and persistent buffers by first name, and all other names of tied ones with that."""
    first: dict[int, str] = {}
    named: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        kept = {k: b for k, b in module._buffers.items() if k not in module._non_persistent_buffers_set}
        for key, tensor in (*module._parameters.items(), *kept.items()):
            if tensor is None:
                continue
            name = first.setdefault(id(tensor), prefix + key)
            named.setdefault(name, tensor)
            if name != prefix + key:
                aliases[prefix + key] = name
    return named, aliases


def has_extra_state(module: nn.Module) -> bool:
    """Tell whether a module has a state besides tensors; torch's own test."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


def match(named: Mapping[str, Tensor], aliases: Mapping[str, str], metadata: Metadata) -> dict[str, str]:
    """The checkpoint's name of each of the model's tensors that it has.

    What is tied here may have been apart there, and the other way round: any name will do.

    Args:
        named, aliases: of :func:`model_names`.
        metadata: of the checkpoint.
    """
    further: dict[str, list[str]] = {}
    for alias, first in aliases.items():
        further.setdefault(first, []).append(alias)
    found: dict[str, str] = {}
    for name in named:
        for each in (name, *further.get(name, ())):
            there = metadata.aliases.get(each, each)
            if metadata.shape_of(there) is not None:
                found[name] = there
                break
    return found


def compare(
    named: Mapping[str, Tensor],
    aliases: Mapping[str, str],
    matched: Mapping[str, str],
    metadata: Metadata,
    strict: bool,
) -> tuple[list[str], list[str]]:
    """The model's tensors that the checkpoint does not have, and the other way round.

    Args:
        named, aliases: of :func:`model_names`.
        matched: of :func:`match`.
        metadata: of the checkpoint.
        strict: refuse both.

    Raises:
        CheckpointError: refused; or a tensor has another shape.
    """
    saved = {name.removeprefix(MODEL) for name in metadata.tensors if name.startswith(MODEL)} | metadata.coded.keys()
    missing = [name for name in named if name not in matched]
    # Others save tied tensors under every name; here one that has a name of its own was apart.
    apart = sorted(saved.intersection(aliases).difference(matched.values())) if metadata.world else []
    unexpected = sorted(saved.difference(named, aliases, matched.values()))
    # What was frozen there and is here comes from elsewhere; what is trained here has been somewhere by then.
    said = metadata.values.get("left_out", [])
    left_out = {name for name in said if name in named and not named[name].requires_grad}
    wanted = [name for name in missing if name not in left_out]
    if strict and (wanted or unexpected or apart):
        why = ", which were frozen and left out when it was saved" if set(wanted) & set(said) else ""
        lacks = [f"the checkpoint has no {_list(wanted)}{why}"] if wanted else []
        lacks += [f"the model has no {_list(unexpected)}"] if unexpected else []
        lacks += [f"{_list(apart)} is tied to {aliases[apart[0]]!r} here, and was not there"] if apart else []
        raise CheckpointError(
            f"model and checkpoint differ: {', and '.join(lacks)}. strict=False leaves them as they are"
        )
    wrong = []
    for name, there in matched.items():
        here, shape = tuple(named[name].shape), metadata.shape_of(there)
        if here != shape:
            wrong.append(f"{name!r} is of shape {here} here and of {shape} there")
    if wrong:
        raise CheckpointError(f"it is a checkpoint of another model: {'; '.join(wrong[:5])}")
    return missing, sorted(unexpected + apart)


def match_groups(
    optimizer: ZeroOptimizer, named: Mapping[str, Tensor], matched: Mapping[str, str], source: Source
) -> tuple[list[dict[str, Any]], list[str]]:
    """Settings for each group, encoded, as the checkpoint has them for its parameters; and trained ones without states.

    Args:
        optimizer: whose groups they are.
        named: of :func:`model_names`.
        matched: of :func:`match`.
        source: of the checkpoint; settings that are tensors are read where they have to be compared.

    Raises:
        CheckpointError: parameters that are one group here had different settings there.
    """
    metadata = source.metadata
    groups = metadata.values["groups"]
    saved = {name: index for index, group in enumerate(groups) for name in group["parameters"]}
    names = {id(tensor): name for name, tensor in named.items()}
    stepped = {name.removeprefix(STATE).rpartition(".")[0] for name in metadata.tensors if name.startswith(STATE)}
    found, fresh = [], []
    for number, given in enumerate(optimizer.slices.given):
        own = [names[id(parameter)] for parameter in given if id(parameter) in names]
        # By its own name where the checkpoint has left it out.
        there = {name: saved[matched.get(name, name)] for name in own if matched.get(name, name) in saved}
        # An optimizer may keep no states at all.
        trained = [name for name in own if stepped and named[name].requires_grad and named[name].numel()]
        fresh += [name for name in trained if matched.get(name) not in stepped]
        settings = [groups[index]["settings"] for index in dict.fromkeys(there.values())]
        if len(settings) > 1 and len({comparable(each, source.tensor) for each in settings}) > 1:
            raise CheckpointError(
                f"parameters of group {number} were in groups {sorted(set(there.values()))} with different settings "
                "when they were saved; put them into groups as they were, or load without the optimizer"
            )
        found.append(settings[0] if settings else {})
    return found, fresh


def _list(names: list[str]) -> str:
    return f"{', '.join(map(repr, names[:5]))}{f' and {len(names) - 5} more' if names[5:] else ''}"
