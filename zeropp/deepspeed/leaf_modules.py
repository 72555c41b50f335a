"""Leaf modules by a call: modules whose parameters are fetched as one, as DeepSpeed's users mark them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from zeropp.config.zero_block import LeafModuleConfig
from zeropp.engine.engine import Engine
from zeropp.params.guard import handler_of
from zeropp.partition.units import LEAF_AS

__all__ = [
    "get_z3_leaf_modules",
    "mark_configured",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
]


CONFIGURED = "by the configuration"
"""A mark that a configuration has made: for :func:`z3_leaf_module` alone, until another one takes its place."""


def mark_configured(model: nn.Module, leaf: LeafModuleConfig) -> None:
    """Let :func:`z3_leaf_module` know what a configuration makes leaves, and forget what the one before did."""
    for module in model.modules():
        if module.__dict__.get(LEAF_AS) == CONFIGURED:
            del module.__dict__[LEAF_AS]
    ends = tuple(leaf.name_suffixes)
    named = [module for path, module in model.named_modules() if path in leaf.names or (ends and path.endswith(ends))]
    for module in [*_of_classes(model, leaf.classes), *named]:
        # A mark that a call has made stays as it is: a later configuration takes back only marks like this one.
        module.__dict__.setdefault(LEAF_AS, CONFIGURED)


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Make one module a leaf, or take that back. On every rank, before the model is wrapped.

    Raises:
        RuntimeError: it is wrapped already, and cut into units.
    """
    # Units do not change any more; a mark that nobody reads would be taken for one that acts.
    # Models that were built in zero.Init are in pieces, and not in units yet.
    if any(isinstance(handler_of(parameter), Engine) for parameter in model.parameters()):
        raise RuntimeError(
            f"a {type(model).__name__} was made a leaf module after the model was wrapped, when it had been cut into "
            "units; do it before, or name it in zero_optimization.leaf_module"
        )
    if flag:
        model.__dict__[LEAF_AS] = True
    else:
        model.__dict__.pop(LEAF_AS, None)


def z3_leaf_module(model: nn.Module) -> bool:
    """Tell whether a call, or the configuration of ``zeropp.initialize``, has made this very module a leaf."""
    return bool(model.__dict__.get(LEAF_AS, False))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Modules for which :func:`z3_leaf_module` is true."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Make every module of some classes a leaf. On every rank, before the model is wrapped.

    Experts that not every rank comes to, say, whose class is then fetched as a whole.

    Args:
        model: to look in.
        leaf_module_classes: classes, which count those that derive from them; or names of classes, which do not.
        raise_if_not_found: whether it is an error if there is none of them.

    Returns:
        The modules.

    Raises:
        TypeError: a class is something else.
        ValueError: the model has none of them.
        RuntimeError: see :func:`set_z3_leaf_module`.
    """
    found = _of_classes(model, leaf_module_classes)
    # A name that nothing has is a typing error, mostly, and shows as a hang.
    if not found and raise_if_not_found:
        raise ValueError(f"a {type(model).__name__} has no modules of classes {list(leaf_module_classes)}")
    for module in found:
        set_z3_leaf_module(module, True)
    return found


def unset_z3_leaf_modules(model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str]) -> list[nn.Module]:
    """Take :func:`set_z3_leaf_modules` back."""
    found = _of_classes(model, leaf_module_classes)
    for module in found:
        set_z3_leaf_module(module, False)
    return found


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Make modules leaves by their qualified names; returns them, and names that the model has not.

    Raises:
        ValueError: it has one of them not.
    """
    named = dict(model.named_modules())
    missing = [name for name in module_names if name not in named]
    if missing and raise_if_not_found:
        raise ValueError(f"a {type(model).__name__} has no modules {missing}")
    found = [named[name] for name in module_names if name in named]
    for module in found:
        set_z3_leaf_module(module, True)
    return found, missing


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Make modules leaves whose qualified names end so; returns them, and suffixes that no name has.

    Raises:
        ValueError: no name ends with one of them.
    """
    named = dict(model.named_modules())
    missing = [suffix for suffix in module_name_suffixes if not any(name.endswith(suffix) for name in named)]
    if missing and raise_if_not_found:
        raise ValueError(f"a {type(model).__name__} has no modules whose names end with {missing}")
    found = [module for name, module in named.items() if any(name.endswith(each) for each in module_name_suffixes)]
    for module in found:
        set_z3_leaf_module(module, True)
    return found, missing


def _of_classes(model: nn.Module, classes: Sequence[type[nn.Module] | str]) -> list[nn.Module]:
    wrong = [each for each in classes if not isinstance(each, str | type)]
    if wrong:
        raise TypeError(f"leaf_module_classes has {wrong}; expected classes of modules, or their names")
    return [module for module in model.modules() if any(_is_a(module, each) for each in classes)]


def _is_a(module: nn.Module, given: type[nn.Module] | str) -> bool:
    if isinstance(given, type):
        return isinstance(module, given)
    cls = type(module)
    # A name means that very class: whoever writes one sees no others that derive from it.
    return given in (cls.__name__, cls.__qualname__, f"{cls.__module__}.{cls.__qualname__}")
