"""The cut of a model into units: sets of parameters that are gathered together.

The cut reads no values and needs no process group. The rules, in order of priority:

- Small parameters become persistent, within the thresholds of `UnitOptions`, and so do PEFT's prompts of any size.
- A leaf module, a compiled module or a subtree with few elements per module is one unit.
- Several children of one class in a ModuleList, ModuleDict or Sequential are one unit each. A child that exceeds
  ``unit_numel`` or has no forward is cut further.
- All other parameters merge with their neighbours below the nearest common parent, up to ``unit_numel`` elements.
- A unit too small to be spread over the ranks without much padding merges with the next one. Flat buffers that are
  still too small become persistent parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from zeropp._compat import is_compiled
from zeropp.partition.levels import BLOCK

__all__ = [
    "LEAF_AS",
    "Owner",
    "UnitOptions",
    "UnitSpec",
    "direct_parameters",
    "form_units",
    "have_tensors",
    "never_called",
]

LEAF_AS = "_z3_leaf"
"""Attribute that marks a module as a leaf. The name is DeepSpeed's, because some users set it by hand."""

# Largest number of elements in a persistent unit of several parameters. Several units let the reduction of one overlap
# the rest of backward.
_PERSISTENT_NUMEL = 1 << 24
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True)
class Owner:
    """A module whose forward begins and ends a use of a unit."""

    path: str
    recurse: bool  # True if the use covers the whole subtree, not only the module's direct parameters


def never_called(module: nn.Module) -> bool:
    """Return True if a module has no forward of its own, like a ModuleList, so no use of a unit can begin there."""
    # Check the instance, too: wrappers and patches often set ``forward`` on it.
    return type(module).forward is nn.Module.forward and "forward" not in module.__dict__


def direct_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters that this module's forward uses: its own, and those of children that are never called."""
    yield from (parameter for parameter in module._parameters.values() if parameter is not None)
    for child in module.children():
        # Such a child is a ParameterList or a plain nn.Module used as a namespace. Hooks on it would never run.
        if never_called(child):
            yield from direct_parameters(child)


def have_tensors(modules: Sequence[nn.Module], tables: Sequence[str]) -> list[bool]:
    """Return one flag per module: True if its subtree has tensors.

    The time is linear in the size of the model.

    Args:
        modules: all modules of a model.
        tables: names of the attributes to search: "_parameters", "_buffers" or both.
    """
    above: dict[int, list[nn.Module]] = {}
    for module in modules:
        for child in module.children():
            above.setdefault(id(child), []).append(module)
    found = set[int]()
    for module in modules:
        # Walk up from a module with tensors to all modules above it. Stop at modules that were found before: all
        # modules above them were found, too, and modules may refer to each other in a circle.
        ahead = [module] if any(each is not None for t in tables for each in getattr(module, t).values()) else []
        while ahead:
            holder = ahead.pop()
            if id(holder) not in found:
                found.add(id(holder))
                ahead += above.get(id(holder), ())
    return [id(module) in found for module in modules]


def _callers(module: nn.Module, path: str) -> list[Owner]:
    """Return the modules whose forwards together contain all uses of a module's parameters.

    That is the module itself, or, if its own forward is never called (a ModuleList), the children that are called.
    """
    if not never_called(module):
        return [Owner(path, recurse=True)]
    owners = []
    for name, child in module.named_children():
        if any(True for _ in child.parameters()):
            owners += _callers(child, f"{path}.{name}" if path else name)
    return owners


@dataclass(frozen=True)
class UnitSpec:
    """One unit: the first qualified names of its parameters, and the modules that use it."""

    name: str
    owners: tuple[Owner, ...]
    parameters: tuple[str, ...]
    # True if the weights are cached whole in every stage. Such a unit has no owners, because its parameters may be used
    # anywhere.
    persistent: bool = False


@dataclass(frozen=True)
class UnitOptions:
    """The settings that determine the cut, with sizes in elements. Defaults are those of the configuration.

    Attributes:
        unit_numel: limit on the elements of a unit that merges neighbours; larger blocks are cut further. 0 for no
            limit. Single parameters, leaf modules and merges of too short units may exceed the limit.
        unit_min_blocks: smallest number of blocks per rank in the largest flat buffer of a unit.
        param_persistence_threshold: largest number of elements of a parameter that becomes persistent.
        model_persistence_threshold: largest total number of elements of these persistent parameters.
        module_granularity_threshold: a subtree with at most this many elements per module is one unit; 0 for no such
            rule.
        leaf_classes: names of module classes, bare or qualified, whose modules are leaf modules.
        leaf_names: qualified names of leaf modules.
        leaf_suffixes: endings of the qualified names of leaf modules.
    """

    unit_numel: int = 0
    unit_min_blocks: int = 128
    param_persistence_threshold: int = 100_000
    model_persistence_threshold: int = 2**63 - 1
    module_granularity_threshold: int = 0
    leaf_classes: tuple[str, ...] = ()
    leaf_names: tuple[str, ...] = ()
    leaf_suffixes: tuple[str, ...] = ()


# (own dtype of a parameter, trainable). Parameters of a unit with equal keys count as one flat buffer. This is an
# estimate, because flat buffers are divided by the dtypes of BufferKey, such as the compute dtype.
_BufferKey = tuple[torch.dtype, bool]


@dataclass
class _Run:
    """Neighbouring parameters that are about to become one unit; a closed run does not merge with neighbours."""

    owners: list[Owner]
    names: list[str]
    sizes: Counter[_BufferKey]  # number of elements in each estimated flat buffer
    closed: bool = False

    @property
    def numel(self) -> int:
        """Number of elements of all parameters in the run."""
        return sum(self.sizes.values())

    def absorb(self, other: _Run) -> None:
        self.owners += other.owners
        self.names += other.names
        self.sizes += other.sizes


@dataclass
class _UnitBuilder:
    """The state of one walk over the module tree."""

    options: UnitOptions
    parameters: dict[str, nn.Parameter]  # parameters that are not persistent, by first name
    claimed: set[str] = field(default_factory=set)
    first_name: dict[int, str] = field(default_factory=dict)
    holding: set[int] = field(default_factory=set)  # ids of modules with parameters in their subtree

    def claim(self, found: Iterable[nn.Parameter], owners: list[Owner]) -> _Run | None:
        """Return a run of those parameters that no run contains yet; None if there are none."""
        names = []
        for parameter in found:
            # A tied parameter belongs to one unit, at its first place in the order of definition. Other modules that
            # use the parameter get hooks of that unit.
            name = self.first_name[id(parameter)]
            if name in self.parameters and name not in self.claimed:
                names.append(name)
                self.claimed.add(name)
        return _Run(owners, names, _buffer_sizes(names, self.parameters)) if names else None

    def is_leaf(self, module: nn.Module, path: str) -> bool:
        options = self.options
        cls = type(module)
        if cls.__name__ in options.leaf_classes or f"{cls.__module__}.{cls.__qualname__}" in options.leaf_classes:
            return True
        if path in options.leaf_names or any(path.endswith(suffix) for suffix in options.leaf_suffixes if path):
            return True
        # Users mark a module object by a call such as zeropp.zero.set_z3_leaf_module(), because they may not know its
        # path.
        if module.__dict__.get(LEAF_AS) is True:
            return True
        # A compiled region has no place where zeropp can gather, so all its weights must be present when it begins.
        return is_compiled(module) or self.is_fine_grained(module)

    def is_fine_grained(self, module: nn.Module) -> bool:
        """Return True if a subtree has few elements per module, so that more hooks would cost more than they save."""
        threshold = self.options.module_granularity_threshold
        if threshold <= 0 or never_called(module):
            return False
        modules = sum(1 for _ in module.modules())
        total = sum(parameter.numel() for parameter in module.parameters())
        return modules > 1 and total // modules <= threshold

    def is_small_enough(self, module: nn.Module) -> bool:
        """Return True if a module fits into one unit."""
        limit = self.options.unit_numel
        # Count elements only if there is a limit. Each level of the tree counts all elements below it, which takes
        # time.
        return limit == 0 or not module._modules or sum(p.numel() for p in module.parameters()) <= limit

    def form(self, module: nn.Module, path: str, repeated: bool) -> list[_Run]:
        """Return the runs of a subtree, in the order of definition.

        Args:
            module: root of the subtree.
            path: qualified name of ``module``; "" for the model.
            repeated: True if ``module`` is one of several children of the same class in a container.
        """
        limit = self.options.unit_numel
        # A repeated ModuleList cannot be a block, because it has no forward that begins a use. Its parts are cut one by
        # one.
        block = repeated and not never_called(module)
        if self.is_leaf(module, path) or (block and self.is_small_enough(module)):
            run = self.claim(module.parameters(), _callers(module, path))
            if run is not None:
                # Do not merge blocks. A merged block could not be freed, and its gradients not sent, before its
                # neighbour is done. `_merge_short` still merges blocks that are too short.
                run.closed = True
            return [run] if run else []
        # Parameters of a module that is never called belong to the nearest called module above. The root has none above
        # it.
        uncalled = never_called(module) and path != ""
        direct = None if uncalled else self.claim(direct_parameters(module), [Owner(path, recurse=False)])
        runs = [direct] if direct else []
        children = [(name, child) for name, child in module.named_children() if id(child) in self.holding]
        classes = Counter(type(child) for _, child in children)
        for name, child in children:
            one_of_many = isinstance(module, _CONTAINERS) and classes[type(child)] > 1
            runs += self.form(child, f"{path}.{name}" if path else name, one_of_many)
        runs = _merge_open(runs, limit)
        if len(runs) == 1 and not runs[0].closed and not uncalled:
            # If one run contains everything left below, the module's own forward covers every use, with one pair of
            # hooks.
            runs[0].owners = [Owner(path, recurse=True)]
        if repeated:
            # These are parts of a block that was too large or is a list. They merge with each other but not with the
            # next block.
            for run in runs:
                run.closed = True
        return runs


def form_units(model: nn.Module, world: int, options: UnitOptions) -> list[UnitSpec]:
    """Cut a model into units.

    Args:
        model: model to cut; only names, shapes, dtypes and ``requires_grad`` are read. Parameters that are not floating
            point belong to no unit.
        world: number of ranks that the units are spread over.
        options: settings of the cut.

    Returns:
        Units in the order of definition, persistent ones last. Every floating-point parameter is in exactly one unit.
    """
    named = list(model.named_parameters())
    parameters = {name: p for name, p in named if p.is_floating_point()}
    persistent = _small_parameters(parameters, options) | (_of_prompts(model) & parameters.keys())
    builder = _UnitBuilder(options, {name: p for name, p in parameters.items() if name not in persistent})
    builder.first_name = {id(p): name for name, p in named}
    modules = list(model.modules())
    builder.holding = {
        id(m) for m, found in zip(modules, have_tensors(modules, ("_parameters",)), strict=True) if found
    }
    runs = builder.form(model, "", repeated=False)
    minimum = options.unit_min_blocks * BLOCK * world
    # The end of a buffer is padded by less than one block per rank. With at least ``unit_min_blocks`` blocks per rank,
    # this padding is at most 1 / unit_min_blocks of the buffer.
    runs = _merge_short(runs, minimum)
    specs = []
    for run in runs:
        # A run counts as one flat buffer for each dtype, trainable and frozen apart. Merging considered only the
        # largest of them. Other buffers that are too short, such as adapters in a large layer, become persistent.
        short = _short_buffers(run.names, parameters, minimum)
        persistent |= short
        rest = tuple(name for name in run.names if name not in short)
        if rest:
            specs.append(UnitSpec(_unit_name(run.owners), tuple(run.owners), rest))
    # List persistent parameters in the order of the model. The order of a set of strings differs between processes, and
    # all ranks must build the same units.
    return specs + _persistent_units([name for name in parameters if name in persistent], parameters)


def _small_parameters(parameters: dict[str, nn.Parameter], options: UnitOptions) -> set[str]:
    """Return the names of small parameters to cache whole: each within the threshold, all within the model's total."""
    chosen = set()
    total = 0
    for name, parameter in parameters.items():
        numel = parameter.numel()
        # As in DeepSpeed, a parameter that does not fit into the total is skipped, and a smaller one after it may still
        # fit.
        if numel <= options.param_persistence_threshold and total + numel <= options.model_persistence_threshold:
            chosen.add(name)
            total += numel
    return chosen


def _of_prompts(model: nn.Module) -> set[str]:
    """Return the names of the parameters of PEFT's prompt encoders, of any size.

    These parameters must be persistent, because PEFT runs the encoders to save them, and does so on one rank only.
    """
    encoders = [
        module._modules.get("prompt_encoder")
        for module in model.modules()
        if any(cls.__module__.partition(".")[0] == "peft" for cls in type(module).__mro__)
    ]
    own = {id(parameter) for encoder in encoders if encoder is not None for parameter in encoder.parameters()}
    if not own:
        return set()
    return {name for name, parameter in model.named_parameters() if id(parameter) in own}


def _merge_open(runs: Sequence[_Run], limit: int) -> list[_Run]:
    """Merge neighbouring runs that are not closed, up to ``limit`` elements per run."""
    merged: list[_Run] = []
    for run in runs:
        last = merged[-1] if merged else None
        # ``limit`` bounds merged runs. A single parameter may exceed it, because parameters are not cut.
        fits = last is not None and (limit == 0 or last.numel + run.numel <= limit)
        if last is not None and fits and not (last.closed or run.closed):
            last.absorb(run)
        else:
            merged.append(run)
    return merged


def _merge_short(runs: Sequence[_Run], minimum: int) -> list[_Run]:
    """Merge neighbours until the largest buffer of each run has ``minimum`` elements, or only one run is left."""
    merged: list[_Run] = []
    for run in runs:
        # Compare the largest buffer, not the sum of all. By the sum, a layer with an adapter would pass although both
        # of its buffers are too short.
        if merged and max(merged[-1].sizes.values()) < minimum:
            merged[-1].absorb(run)
        else:
            merged.append(run)
    if len(merged) > 1 and max(merged[-1].sizes.values()) < minimum:
        # The last run has no next one, so it merges with the one before.
        last = merged.pop()
        merged[-1].absorb(last)
    return merged


def _buffer_sizes(names: Iterable[str], parameters: dict[str, nn.Parameter]) -> Counter[_BufferKey]:
    sizes: Counter[_BufferKey] = Counter()
    for name in names:
        sizes[parameters[name].dtype, parameters[name].requires_grad] += parameters[name].numel()
    return sizes


def _short_buffers(names: Sequence[str], parameters: dict[str, nn.Parameter], minimum: int) -> set[str]:
    """Return the names of parameters whose flat buffer would be mostly padding."""
    sizes = _buffer_sizes(names, parameters)
    return {name for name in names if sizes[parameters[name].dtype, parameters[name].requires_grad] < minimum}


def _persistent_units(names: Sequence[str], parameters: dict[str, nn.Parameter]) -> list[UnitSpec]:
    groups: list[list[str]] = []
    total = 0
    for name in names:
        numel = parameters[name].numel()
        if not groups or total + numel > _PERSISTENT_NUMEL:
            groups.append([])
            total = 0
        groups[-1].append(name)
        total += numel
    return [UnitSpec(f"persistent.{i}", (), tuple(group), persistent=True) for i, group in enumerate(groups)]


def _unit_name(owners: Sequence[Owner]) -> str:
    paths = [owner.path or "<root>" for owner in owners]
    return paths[0] if len(paths) == 1 else f"{paths[0]}..{paths[-1]}"
