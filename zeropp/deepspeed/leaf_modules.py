"""DeepSpeed's calls that mark leaf modules: modules whose parameters, with all submodules, are gathered as one unit."""

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
"""Mark of a module that the configuration makes a leaf.

Only :func:`z3_leaf_module` reads this mark. The division into units reads the configuration instead, so an old mark has
no effect on a later wrapping.
"""


def mark_configured(model: nn.Module, leaf: LeafModuleConfig) -> None:
    """Mark the leaf modules of a configuration, so that :func:`z3_leaf_module` returns True for them.

    Marks of an earlier configuration are removed. Marks made by :func:`set_z3_leaf_module` stay.

    Args:
        model: wrapped model.
        leaf: the configuration's ``leaf_module`` block.
    """
    for module in model.modules():
        if module.__dict__.get(LEAF_AS) == CONFIGURED:
            del module.__dict__[LEAF_AS]
    ends = tuple(leaf.name_suffixes)
    named = [module for path, module in model.named_modules() if path in leaf.names or (ends and path.endswith(ends))]
    for module in [*_of_classes(model, leaf.classes), *named]:
        # setdefault keeps the mark True of a call. A later configuration removes only marks with the value CONFIGURED.
        module.__dict__.setdefault(LEAF_AS, CONFIGURED)


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Make one module a leaf, or undo that. Call it on every rank, before the model is wrapped.

    Args:
        model: module to mark.
        flag: True to make the module a leaf, False to undo that.

    Raises:
        RuntimeError: the module is part of a wrapped model, whose units cannot change any more.
    """
    # After wrapping a mark would have no effect, so it is refused. Parameters built in zero.Init have a Piece as their
    # handler and no Engine: they are not divided into units yet.
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
    """Return True if a call or the configuration of ``zeropp.initialize`` made this module itself a leaf."""
    return bool(model.__dict__.get(LEAF_AS, False))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return all modules of ``model`` for which :func:`z3_leaf_module` is True, in the order of ``model.modules()``."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Make every module of the given classes a leaf. Call it on every rank, before the model is wrapped.

    Example: a mixture-of-experts block, of which different ranks may call different experts. As a leaf, all its experts
    are gathered together, so all ranks issue the same collectives.

    Args:
        model: model to search.
        leaf_module_classes: classes, which match subclasses as well; or names of classes, which match exactly.
        raise_if_not_found: True to raise if no module matches.

    Returns:
        The modules that were marked.

    Raises:
        TypeError: an entry of ``leaf_module_classes`` is neither a class nor a string.
        ValueError: no module matches, and ``raise_if_not_found`` is True.
        RuntimeError: the model is already wrapped.
    """
    found = _of_classes(model, leaf_module_classes)
    # A name without a match is usually misspelled. Without this error the unmarked modules could make ranks hang.
    if not found and raise_if_not_found:
        raise ValueError(f"a {type(model).__name__} has no modules of classes {list(leaf_module_classes)}")
    for module in found:
        set_z3_leaf_module(module, True)
    return found


def unset_z3_leaf_modules(model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str]) -> list[nn.Module]:
    """Undo :func:`set_z3_leaf_modules` for modules of the given classes, and return these modules."""
    found = _of_classes(model, leaf_module_classes)
    for module in found:
        set_z3_leaf_module(module, False)
    return found


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Make modules leaves by their qualified names. Call it on every rank, before the model is wrapped.

    Args:
        model: model to search.
        module_names: names as in ``model.named_modules()``.
        raise_if_not_found: True to raise if the model lacks one of the names.

    Returns:
        The modules that were marked, and the names that the model lacks.

    Raises:
        ValueError: the model lacks one of the names, and ``raise_if_not_found`` is True.
        RuntimeError: the model is already wrapped.
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
    """Make modules leaves by the ends of their qualified names. Call it on every rank, before the model is wrapped.

    Args:
        model: model to search.
        module_name_suffixes: ends of names as in ``model.named_modules()``.
        raise_if_not_found: True to raise if one of the suffixes matches no module.

    Returns:
        The modules that were marked, and the suffixes that match no module.

    Raises:
        ValueError: one of the suffixes matches no module, and ``raise_if_not_found`` is True.
        RuntimeError: the model is already wrapped.
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
    """Return the modules of ``model`` that match one of the classes or class names; see `set_z3_leaf_modules`."""
    wrong = [each for each in classes if not isinstance(each, str | type)]
    if wrong:
        raise TypeError(f"leaf_module_classes has {wrong}; expected classes of modules, or their names")
    return [module for module in model.modules() if any(_is_a(module, each) for each in classes)]


def _is_a(module: nn.Module, given: type[nn.Module] | str) -> bool:
    """Return True if a module is an instance of a class, or if its class has exactly the given name."""
    if isinstance(given, type):
        return isinstance(module, given)
    cls = type(module)
    # A name matches only the class itself: a user who writes a name does not expect subclasses with other names.
    return given in (cls.__name__, cls.__qualname__, f"{cls.__module__}.{cls.__qualname__}")
