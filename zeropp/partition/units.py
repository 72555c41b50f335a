"""Units, the parameters that are gathered together: a model's module tree is cut. Pure: no process, no data read.

The rules, in order: a leaf module or a compiled module is one unit; children of one class in a ModuleList, ModuleDict
or Sequential are a unit each; what is left merges with its neighbours below the nearest common parent; units too small
to be spread over the ranks without waste merge with the next, and parameters still too few become persistent. So do
prompts of PEFT, whatever their size.
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
"""In the dict of a module that a call has made a leaf; DeepSpeed's name, which some set by hand."""

# A persistent unit is cut here, so that reducing one overlaps the rest of backward.
_PERSISTENT_NUMEL = 1 << 24
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True)
class Owner:
    """A module whose forward brackets a use of a unit."""

    path: str
    recurse: bool  # the use covers the whole subtree, not only the module's direct parameters


def never_called(module: nn.Module) -> bool:
    """Tell whether a module has no forward of its own, like a ModuleList: no use of a unit can begin there."""
    # The instance is looked at, too: wrappers and patches often set ``forward`` on it.
    return type(module).forward is nn.Module.forward and "forward" not in module.__dict__


def direct_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters that only the module's own forward can be meant to use: its own, and those of lists it holds."""
    yield from (parameter for parameter in module._parameters.values() if parameter is not None)
    for child in module.children():
        # A ParameterList, or a bare nn.Module that holds things: no hook of its own would ever fire.
        if never_called(child):
            yield from direct_parameters(child)


def have_tensors(modules: Sequence[nn.Module], tables: Sequence[str]) -> list[bool]:
    """Tell for each module whether it has tensors, or one below it has, in time linear in all of them.

    Args:
        modules: all of a model's.
        tables: "_parameters", "_buffers" or both.
    """
    above: dict[int, list[nn.Module]] = {}
    for module in modules:
        for child in module.children():
            above.setdefault(id(child), []).append(module)
    found = set[int]()
    for module in modules:
        # Upwards, until one is reached that is known: then so is all above it. Modules may refer to each other in a
        # circle.
        ahead = [module] if any(each is not None for t in tables for each in getattr(module, t).values()) else []
        while ahead:
            holder = ahead.pop()
            if id(holder) not in found:
                found.add(id(holder))
                ahead += above.get(id(holder), ())
    return [id(module) in found for module in modules]


def _callers(module: nn.Module, path: str) -> list[Owner]:
    """Modules whose forwards together bracket the uses of a subtree."""
    if not never_called(module):
        return [Owner(path, recurse=True)]
    owners = []
    for name, child in module.named_children():
        if any(True for _ in child.parameters()):
            owners += _callers(child, f"{path}.{name}" if path else name)
    return owners


@dataclass(frozen=True)
class UnitSpec:
    """One unit: its parameters by first qualified name, and the modules that use it."""

    name: str
    owners: tuple[Owner, ...]
    parameters: tuple[str, ...]
    # Cached whole in every stage; such a unit has no owners, its parameters may be used anywhere.
    persistent: bool = False


@dataclass(frozen=True)
class UnitOptions:
    """The settings that decide the cut; sizes in elements. Defaults as in the configuration."""

    unit_numel: int = 0
    unit_min_blocks: int = 128
    param_persistence_threshold: int = 100_000
    model_persistence_threshold: int = 2**63 - 1
    module_granularity_threshold: int = 0
    leaf_classes: tuple[str, ...] = ()
    leaf_names: tuple[str, ...] = ()
    leaf_suffixes: tuple[str, ...] = ()


_BufferKey = tuple[torch.dtype, bool]  # dtype, trainable: one flat buffer for each


@dataclass
class _Run:
    """Neighbouring parameters on their way to become a unit; a closed run takes in no neighbour."""

    owners: list[Owner]
    names: list[str]
    sizes: Counter[_BufferKey]  # elements of each of its flat buffers
    closed: bool = False

    @property
    def numel(self) -> int:
        """Elements of all its parameters."""
        return sum(self.sizes.values())

    def absorb(self, other: _Run) -> None:
        self.owners += other.owners
        self.names += other.names
        self.sizes += other.sizes


@dataclass
class _UnitBuilder:
    """State of one walk over the module tree."""

    options: UnitOptions
    parameters: dict[str, nn.Parameter]  # not persistent, by first name
    claimed: set[str] = field(default_factory=set)
    first_name: dict[int, str] = field(default_factory=dict)
    holding: set[int] = field(default_factory=set)  # modules with parameters, or with one below that has

    def claim(self, found: Iterable[nn.Parameter], owners: list[Owner]) -> _Run | None:
        """Those parameters that no unit has yet, as a run."""
        names = []
        for parameter in found:
            # A tied parameter has one place, the first in the order of definition. Other modules that use it are
            # hooked as users of that unit.
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
        # By a call of the user's, who has no path of it.
        if module.__dict__.get(LEAF_AS) is True:
            return True
        # Inside a compiled region there is no place to gather: all its weights must be there when it begins.
        return is_compiled(module) or self.is_fine_grained(module)

    def is_fine_grained(self, module: nn.Module) -> bool:
        """Fewer parameters per module than the threshold: fetched as one, since hooks would cost more."""
        threshold = self.options.module_granularity_threshold
        if threshold <= 0 or never_called(module):
            return False
        modules = sum(1 for _ in module.modules())
        total = sum(parameter.numel() for parameter in module.parameters())
        return modules > 1 and total // modules <= threshold

    def is_small_enough(self, module: nn.Module) -> bool:
        """Tell whether a module need not be cut further."""
        limit = self.options.unit_numel
        # Counted only where there is a limit: each level of the tree would count all that is below it.
        return limit == 0 or not module._modules or sum(p.numel() for p in module.parameters()) <= limit

    def form(self, module: nn.Module, path: str, repeated: bool) -> list[_Run]:
        """Runs of a subtree, in the order of definition."""
        limit = self.options.unit_numel
        # A repeated list cannot be a block itself, since no forward of it brackets a use: its parts are cut one by one.
        block = repeated and not never_called(module)
        if self.is_leaf(module, path) or (block and self.is_small_enough(module)):
            run = self.claim(module.parameters(), _callers(module, path))
            if run is not None:
                # A block stays alone unless it is too short: merged, it could not be released, nor its gradients sent,
                # before its neighbour is done.
                run.closed = True
            return [run] if run else []
        # Parameters of a namespace belong to the nearest module above that is called. The root has none above it.
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
            # One run holds all that is left below: the module's own forward brackets every use, with one pair of hooks.
            runs[0].owners = [Owner(path, recurse=True)]
        if repeated:
            # Parts of a block that was too large, or is a list, merge among themselves, not with the next one's.
            for run in runs:
                run.closed = True
        return runs


def form_units(model: nn.Module, world: int, options: UnitOptions) -> list[UnitSpec]:
    """Cut a model into units.

    Args:
        model: any module; only names, shapes, dtypes and ``requires_grad`` are read. Parameters that are not floating
            point belong to no unit.
        world: ranks the units are spread over.
        options: thresholds.

    Returns:
        Units in the order of definition, persistent ones last. Every floating parameter is in exactly one.
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
    # The end of a buffer is padded by less than a block for each rank. With so many blocks a rank, that is at most
    # one part in so many.
    runs = _merge_short(runs, minimum)
    specs = []
    for run in runs:
        # A run has a flat buffer for each dtype, trainable and frozen apart, and only the largest has been looked at.
        # Short ones among the others (adapters in a large layer) become persistent.
        short = _short_buffers(run.names, parameters, minimum)
        persistent |= short
        rest = tuple(name for name in run.names if name not in short)
        if rest:
            specs.append(UnitSpec(_unit_name(run.owners), tuple(run.owners), rest))
    # In the order of the model: a set of strings has another order in every process, and units must be the same.
    return specs + _persistent_units([name for name in parameters if name in persistent], parameters)


def _small_parameters(parameters: dict[str, nn.Parameter], options: UnitOptions) -> set[str]:
    """Parameters to cache whole: at most the threshold each, within the model's total, first come first served."""
    chosen = set()
    total = 0
    for name, parameter in parameters.items():
        numel = parameter.numel()
        # As in DeepSpeed, what does not fit the total is passed over, and a smaller parameter after it may still fit.
        if numel <= options.param_persistence_threshold and total + numel <= options.model_persistence_threshold:
            chosen.add(name)
            total += numel
    return chosen


def _of_prompts(model: nn.Module) -> set[str]:
    """Parameters of PEFT's prompts, of any size: PEFT runs their modules on one rank alone to save them."""
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
    merged: list[_Run] = []
    for run in runs:
        last = merged[-1] if merged else None
        # ``limit`` bounds what merging makes; a single parameter may exceed it, since parameters are not cut.
        fits = last is not None and (limit == 0 or last.numel + run.numel <= limit)
        if last is not None and fits and not (last.closed or run.closed):
            last.absorb(run)
        else:
            merged.append(run)
    return merged


def _merge_short(runs: Sequence[_Run], minimum: int) -> list[_Run]:
    """Join neighbours until the largest buffer of each run holds ``minimum`` elements, or only one run is left."""
    merged: list[_Run] = []
    for run in runs:
        # The largest buffer counts. By the sum, an adapter would let a layer pass whose buffers are both too short.
        if merged and max(merged[-1].sizes.values()) < minimum:
            merged[-1].absorb(run)
        else:
            merged.append(run)
    if len(merged) > 1 and max(merged[-1].sizes.values()) < minimum:
        # The last run has no next one to take it in, so it goes to the one before.
        last = merged.pop()
        merged[-1].absorb(last)
    return merged


def _buffer_sizes(names: Iterable[str], parameters: dict[str, nn.Parameter]) -> Counter[_BufferKey]:
    sizes: Counter[_BufferKey] = Counter()
    for name in names:
        sizes[parameters[name].dtype, parameters[name].requires_grad] += parameters[name].numel()
    return sizes


def _short_buffers(names: Sequence[str], parameters: dict[str, nn.Parameter], minimum: int) -> set[str]:
    """Parameters whose flat buffer would be mostly padding."""
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
