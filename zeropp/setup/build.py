"""Wrapping a model: check it, compare it between ranks, form units, shard the weights and install hooks.

If the model was built under ``zero.Init``, the configuration must agree with the settings of that block. With
``torch_autocast`` in the configuration, whole forwards run under ``torch.autocast``.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import inspect
import uuid
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from zeropp._compat import is_dtensor, sharing_versions, unguarded
from zeropp._extensions import extensions
from zeropp.access.gathered import external_parameters
from zeropp.access.ownership import PreviousWeights, former_engines, give_to_modules
from zeropp.access.refusals import holding_tensors, refuse_changes, refuse_cuda_graphs, restorer, watch_structure
from zeropp.access.state import awaited_names, install_state_hooks, refuse_until_loaded
from zeropp.comm.agreement import Agreement
from zeropp.comm.collective import exchange, naming_absence, run_on_all_ranks
from zeropp.comm.communicators import processors
from zeropp.comm.hops import Comm, make_comm
from zeropp.comm.process_groups import Group, Members, find_members, whereabouts
from zeropp.config import Config
from zeropp.config.base import notify_once
from zeropp.engine.accumulation import Listener
from zeropp.engine.engine import Engine
from zeropp.engine.rehearsal import rehearse, require_room_on_all
from zeropp.offload.tier_choice import Tiers, open_tiers
from zeropp.params.buffer_maker import BufferMaker, UnitOutline
from zeropp.params.dtypes import DTYPES, keeps_float32
from zeropp.params.guard import is_managed, own_dtype, register
from zeropp.params.loss_scale import LossScale
from zeropp.params.sharded_build import ShardedBuild, piece_of
from zeropp.params.unit import Unit
from zeropp.partition.levels import dense_strides
from zeropp.partition.units import LEAF_AS, direct_parameters, never_called
from zeropp.setup.blueprint import Blueprint, draw_blueprint
from zeropp.setup.ineffective import warn_if_alone, warn_of_ineffective
from zeropp.setup.placing import find_device, place, require_values
from zeropp.setup.warm_up import warm_up

__all__ = ["build_engine", "built_for", "check_built", "complete"]


def _autocast_forwards(model: nn.Module, engine: Engine, dtype: torch.dtype) -> None:
    """Run every forward of ``model`` under autocast to ``dtype`` until the engine is closed.

    If other code calls a submodule directly, that call does not run under this autocast.
    """
    device_type = engine.device.type
    # A weak reference: the new forward is stored in the model's own __dict__, and must not keep the model alive.
    ref = weakref.ref(model)
    own = model.__dict__.get("forward")
    plain = type(model).forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        # Autocast's cache would keep cast copies of all units' weights until the forward ends, although stage 3 frees
        # the weights after each unit.
        with torch.autocast(device_type, dtype, cache_enabled=False):
            return plain(ref(), *args, **kwargs) if own is None else own(*args, **kwargs)

    # Trainers read the signature of ``forward`` to select the columns of a batch.
    forward.__signature__ = inspect.signature(model.forward)  # type: ignore[attr-defined]
    # Replace ``forward`` instead of using hooks: after Ctrl-C torch does not call forward hooks, and autocast would
    # stay on.
    model.__dict__["forward"] = forward
    engine.on_close(restorer(model, "forward", own))


def _builds(parameters: Iterable[nn.Parameter]) -> list[ShardedBuild]:
    found: dict[int, ShardedBuild] = {}
    for parameter in parameters:
        piece = piece_of(parameter)
        if piece is not None and isinstance(piece.fetcher, ShardedBuild):
            found[id(piece.fetcher)] = piece.fetcher
    return list(found.values())


def built_for(parameters: Collection[nn.Parameter]) -> torch.device | None:
    """Return the device that a model from ``zero.Init`` trains on, if any of its parameters is elsewhere; else None."""
    spreads = _builds(parameters)
    if not spreads or all(parameter.device == spreads[0].trains_on for parameter in parameters):
        return None
    return spreads[0].trains_on


def complete(model: nn.Module) -> None:
    """Finish building a model that is wrapped inside its ``zero.Init`` block. Collective in that case.

    The block stays active for modules that are created later.
    """
    for build in _builds(model.parameters()):
        if build.building:
            build.complete()


def check_built(parameters: Collection[nn.Parameter], config: Config, ranks: tuple[int, ...]) -> None:
    """Raise an error unless the model is wrapped with the settings that it was built with. Local.

    Args:
        parameters: all parameters of the model.
        config: configuration that the model is wrapped with.
        ranks: global ranks of the process group that the model is wrapped for.

    Raises:
        ValueError: the model was built for other ranks, or with another value of a setting.
        RuntimeError: the model is inside GatheredParameters.
    """
    if any(piece is not None and piece.is_gathered for piece in map(piece_of, parameters)):
        raise RuntimeError("the model was wrapped inside GatheredParameters; leave that block first")
    for build in _builds(parameters):
        if build.world > 1 and build.carrier.ranks != ranks:
            raise ValueError(
                f"the model was built in zero.Init for ranks {list(build.carrier.ranks)}, and process_group has ranks "
                f"{list(ranks)}; give both the same group"
            )
        for key, value in build.asked.items():
            found = getattr(config.zero, key)
            if found != value:
                raise ValueError(
                    f"zero.Init was given {key} {value}, and the configuration has zero_optimization.{key} {found}; "
                    "give both the same"
                )


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Disable Python's garbage collector inside the ``with`` block."""
    # Wrapping creates many objects that stay alive. Each collection would scan all of them and find nothing to free,
    # which is slow for a model of thousands of units.
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_no_collections()
def build_engine(
    model: nn.Module,
    config: Config,
    group: Group,
    listener: Listener,
    scale: float | None,
    trained_on: torch.device | str | int | None,
    others: Callable[[], list[str]],
    plan_space: Callable[[Blueprint], Mapping[str, int]],
) -> Engine:
    """Partition a model in place, with rank 0's weights and buffers on all ranks, and return its engine. Collective.

    Args:
        model: model on the device that trains, all parameters initialised; ``trained_on`` lifts both conditions.
        config: configuration, already checked to be supported.
        group: ranks to partition over.
        listener: the wrapper, whose methods the engine calls at forward, backward and step; not kept alive.
        scale: factor on gradients summed over ranks; None to follow the configuration (1 / world for a mean).
        trained_on: device that trains. With it, the model may be elsewhere; the meta device will do except on rank 0.
        others: returns more lines of text that must be equal on all ranks, such as the optimizer's settings.
        plan_space: returns bytes of files per directory; raises if the host's memory is too small.

    Raises:
        ConfigError: offloaded tensors need more host memory than the limit allows.
        TypeError, ValueError: the model or the group cannot be used; the message has the reason and the remedy.
    """
    # Each step raises on all ranks if it raises on one rank. Otherwise the other ranks would wait for it forever.
    extension = config.zeropp
    together = partial(run_on_all_ranks, group, patience=lambda result: extension.hang_timeout)
    parameters = _named_parameters(model)
    trained_on = built_for(parameters.values()) if trained_on is None else trained_on
    device = together("checking the model", lambda: _check_model(model, parameters, config, trained_on))
    hosts = dict(exchange(group, whereabouts(), "finding nodes", extension.hang_timeout))
    find = partial(find_members, group, device, extension.local_world_size, hosts)
    # ``same=True`` raises if ranks find different nodes: they would create different process groups and hang.
    members = together("finding nodes", find, same=True)
    warn_if_alone(members)
    choose = partial(_choose, model, parameters, config, members, plan_space)
    blueprint, space = together("choosing groups", choose)
    # All ranks use rank 0's name. Groups and store keys need a unique prefix, since a process may wrap several models.
    job = exchange(group, f"zeropp-{uuid.uuid4().hex[:12]}", "naming the job", extension.hang_timeout)[0]
    patience = members.patience(extension.hang_timeout)
    with naming_absence("wrapping the model"):
        comm = make_comm(members, blueprint.mode.chain, patience, job, blueprint.sharing, blueprint.ctas)
        agreement = Agreement(comm, patience, extension.warn_after, device, overlap=blueprint.engine.overlap)
        # Compare ranks before the model is changed. A later mismatch would show as a hang or as wrong values.
        _check_agreement([*_describe(model, parameters), f"configuration {config.model_dump_json()}", *others()], comm)
        # Every rank calls this, even if only some ranks name a device, because each rank waits for the others here.
        together("placing the model", lambda: place(model, device) if trained_on is not None else None)
        together("looking for CUDA graphs", lambda: _check_graphs(model, parameters, blueprint))
        if extension.warm_up and device.type == "cuda":
            together("compiling kernels", lambda: warm_up(blueprint))
        # Reserve all space in files now, also for optimizer states that the first step creates, so that a full disk
        # shows before the model is changed.
        open_all = partial(open_tiers, blueprint.tiers, device, blueprint.staging, space)
        tiers = together("making room for what is offloaded", open_all)
        with agreement.reporting_errors("wrapping a model"):
            return _partition(model, parameters, config, blueprint, agreement, tiers, listener, scale)


def _named_parameters(model: object) -> dict[str, nn.Parameter]:
    """Return all parameters of a model by name; one walk over the modules serves all callers."""
    if not isinstance(model, nn.Module):
        return {}  # ``_check_model`` raises the error
    complete(model)
    return dict(model.named_parameters())


def _partition(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    config: Config,
    blueprint: Blueprint,
    agreement: Agreement,
    tiers: Tiers,
    listener: Listener,
    scale: float | None,
) -> Engine:
    """Shard a model that is equal on all ranks, and return its engine."""
    comm = agreement.comm
    _warn_of_unknown_names(model, parameters, config, first=comm.rank == 0)
    maker = BufferMaker(blueprint.mode, blueprint.encoding, blueprint.dtypes, comm, tiers)
    units = maker.make_units(parameters, blueprint.units)
    comm.end_of_wrap()
    require_room_on_all(comm, len(parameters))
    # Warn before the model is partitioned: a warning filter may turn warnings into errors.
    warn_of_ineffective(config, units, comm)
    # Record dtypes now, because sharding sets the parameters' dtype to the compute dtype.
    own = {id(parameter): own_dtype(parameter) for parameter in parameters.values()}
    awaited = awaited_names(parameters)
    with agreement.watching("receiving the values of rank 0"):
        _adopt(model, parameters, units, comm)
        _share_buffers(model, parameters, config, comm, comm.device)
    mean = 1.0 if config.gradient_allreduce_op == "sum" else 1.0 / comm.world
    steps = config.resolve_batch(comm.world)[2] or 1
    accumulation = listener.accumulation_type(steps, managed=config.managed_gradient_accumulation)
    loss_scale = LossScale(blueprint.loss_scaling, mean if scale is None else scale)
    engine = Engine(agreement, maker, units, comm.device, accumulation, listener, loss_scale, blueprint.engine)
    engine.on_close(tiers.close)
    engine.on_close(loss_scale.drop_losses)
    # The guard would route every attribute access through Python, and installation does not read values.
    with unguarded():
        _install(model, parameters, engine, blueprint.units, own)
    if blueprint.dtypes.autocast is not None:
        _autocast_forwards(model, engine, blueprint.dtypes.autocast)
    refuse_until_loaded(model, engine, awaited)
    rehearse(engine)
    # Fill the cached weights (secondary shards, persistent parameters) for the first time.
    engine.start_refresh()
    return engine


def _adopt(model: nn.Module, parameters: Mapping[str, nn.Parameter], units: Sequence[Unit], comm: Comm) -> None:
    """Fill the units' buffers with the model's values, from rank 0 or from an earlier engine over the same model."""
    former = PreviousWeights(model, parameters)
    for unit in units:
        for buffer in unit.buffers:
            former.fill_buffer(buffer, comm)
    # Close the earlier engine first: closing removes its hooks and attributes from the same modules.
    former.close()


def _install(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    engine: Engine,
    outlines: Sequence[UnitOutline],
    own: dict[int, torch.dtype],
) -> None:
    """Attach a finished engine to the model's modules and parameters; ``own`` has their dtypes before wrapping."""
    for buffer in engine.buffers:
        for slot, parameter in zip(buffer.layout.slots, buffer.parameters, strict=True):
            # The guard, watch_structure and a later wrapping recognise a managed parameter by this registration.
            register(parameter, slot.name, engine, slot.strides, own[id(parameter)])
    _hook_modules(model, parameters, engine, outlines)
    for unit in engine.units:
        engine.watch_gradients(unit)
    modules = holding_tensors(model)
    install_state_hooks(modules, engine)
    refuse_changes(model, modules, engine)
    give_to_modules(modules, engine)
    # Below stage 3 weights stay whole, so extensions have nothing to gather.
    if not engine.mode.stays_whole:
        for extension in extensions():
            extension.model_wrapped(model, engine)
    # Install this hook last. It is prepended, and must run before the hook that begins a forward.
    watch_structure(model, engine)


def _choose(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    config: Config,
    members: Members,
    plan_space: Callable[[Blueprint], Mapping[str, int]],
) -> tuple[Blueprint, Mapping[str, int]]:
    """Return this rank's blueprint, and the bytes of files that its engine will have below each path."""
    own = whereabouts()[0]
    if own == members.ranks[0]:
        require_values(model, parameters)
    for engine in former_engines(model, parameters):
        # A former engine's weights are gathered by its own ranks into buffers of the new ones, so the ranks must be
        # equal.
        if engine.comm.ranks != members.ranks:
            raise ValueError(
                f"an earlier wrapping sharded the model over ranks {list(engine.comm.ranks)}, and process_group has "
                f"ranks {list(members.ranks)}; wrap the model again over the same ranks"
            )
    check_built(parameters.values(), config, members.ranks)
    world, device = len(members.ranks), members.device
    config.resolve_batch(world)  # raises if batch sizes contradict each other
    blueprint = draw_blueprint(
        model,
        config,
        world,
        members.local,
        device,
        rank=members.ranks.index(own),
        processors=processors(device) if device.type == "cuda" else None,
    )
    return blueprint, plan_space(blueprint)


def _check_model(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    config: Config,
    device: torch.device | str | int | None,
) -> torch.device:
    """Check a model for everything that this rank can refuse by itself, and return the device that trains."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise TypeError(
            f"model is wrapped in {type(model).__name__}, which replicates what zeropp partitions; give the module "
            "inside, model.module"
        )
    if torch.is_inference_mode_enabled():
        raise RuntimeError("a model was wrapped inside torch.inference_mode(), where autograd is off; leave the block")
    for name, parameter in parameters.items():
        if nn.parameter.is_lazy(parameter):
            raise ValueError(f"parameter {name!r} has no shape yet; run the model once before wrapping")
        if is_dtensor(parameter):
            raise TypeError(
                f"parameter {name!r} is a DTensor, already distributed by another library; give zeropp a model of "
                "plain parameters"
            )
        if parameter.layout is not torch.strided or parameter.is_inference():
            kind = "was made in inference mode" if parameter.is_inference() else f"has layout {parameter.layout}"
            raise ValueError(f"parameter {name!r} {kind}; expected a dense tensor that autograd can track")
        if parameter.is_complex() and parameter.requires_grad:
            raise ValueError(f"parameter {name!r} is complex and trainable; train its real view, torch.view_as_real")
    # A version counter shows whether a weight is stale. If two parameters shared one, each would invalidate autograd
    # graphs of the other. See [Note: versions].
    sharing = sharing_versions(list(parameters.values()))
    if sharing:
        raise ValueError(
            f"parameter {list(parameters)[sharing[0]]!r} was made from a view of another tensor and shares its version "
            "counter; make it from a copy: nn.Parameter(view.clone())"
        )
    for path, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ValueError(f"module {path!r} makes sparse gradients; build it with sparse=False")
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise ValueError(
                f"module {path!r} has max_norm {module.max_norm}: its forward edits its weight, which zeropp manages. "
                "Build it without max_norm, and normalise what it returns"
            )
    # former_engines is called here for its errors only; functions that need the engines call it again.
    former_engines(model, parameters)
    return find_device(model, parameters, device)


def _check_graphs(model: nn.Module, parameters: Mapping[str, nn.Parameter], blueprint: Blueprint) -> None:
    """Refuse compiled modules with CUDA graphs: a graph stores addresses of weights, and gathered weights move."""
    if not blueprint.mode.stays_whole:
        specs = [unit.spec for unit in blueprint.units if not unit.spec.persistent]
        moving = {id(parameters[name]) for spec in specs for name in spec.parameters}
        refuse_cuda_graphs(model, blueprint.device, lambda parameter: id(parameter) in moving)


def _warn_of_unknown_names(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], config: Config, first: bool
) -> None:
    leaves = config.zero.leaf_module.names
    known = {name for name, _ in model.named_modules()} if leaves else set()
    unknown = [name for name in leaves if name not in known]
    if unknown:
        notify_once(f"leaf_module.names: the model has no modules {unknown}; these have no effect", first=first)
    kept = config.data_types.keep_in_fp32_modules or ()
    unknown = [part for part in kept if not any(keeps_float32(part, name) for name in parameters)]
    if unknown:
        told = f"data_types.keep_in_fp32_modules: no parameter's name has a part {unknown}; these have no effect"
        notify_once(told, first=first)


def _describe(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> list[str]:
    # Weights of a former engine are gathered collectively, so ranks must agree on which parameters are wrapped already.
    # Strides decide the layout of buffers, so ranks with other strides would cut other shards; overlapping strides are
    # replaced by contiguous ones first.
    rows = [
        f"{name} {tuple(p.shape)} {p.dtype} {'trainable' if p.requires_grad else 'frozen'}"
        f"{f' strides {dense_strides(tuple(p.shape), p.stride())}' if p.is_floating_point() else ''}"
        f"{' (wrapped before)' if is_managed(p) else ''}"
        for name, p in parameters.items()
    ]
    # Ranks with other leaf modules would form other units.
    leaves = [f"leaf module {path}" for path, module in model.named_modules() if module.__dict__.get(LEAF_AS) is True]
    return [*rows, *leaves, *(f"buffer {name} {tuple(b.shape)} {b.dtype}" for name, b in model.named_buffers())]


def _check_agreement(own: list[str], comm: Comm) -> None:
    """Raise an error if ranks have different models, configurations or optimizers."""
    # Compare digests: a description has megabytes, and every rank would receive those of all ranks.
    digests = comm.all_gather_objects(hashlib.sha256(repr(own).encode()).digest())
    rank = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if rank is None:
        return
    first, table = (comm.send_to_all(own, source) for source in (0, rank))
    width = max(len(table), len(first))
    rows = zip(table + ["nothing"] * width, first + ["nothing"] * width, strict=False)
    there, here = _where_they_differ(*next((a, b) for a, b in rows if a != b))
    raise ValueError(
        f"ranks 0 and {rank} bring different models, configurations or optimizers: rank 0 has {here!r} where "
        f"rank {rank} has {there!r}. Build the same model, configuration and optimizer on every rank"
    )


def _where_they_differ(left: str, right: str, around: int = 60) -> tuple[str, str]:
    """Return both texts, or the parts around their first difference if they are long."""
    start = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    cut = slice(start - around, start + around) if start > around else slice(0, start + around)
    return tuple(text if len(text) <= 2 * around else f"...{text[cut]}..." for text in (left, right))  # type: ignore


def _share_buffers(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], config: Config, comm: Comm, device: torch.device
) -> None:
    """Send rank 0's buffers, and its parameters of integer or other non-floating dtypes, to all ranks."""
    named = config.data_types.buffer_dtype
    dtype = None if named is None else DTYPES[named]
    with torch.no_grad():
        for buffer in model.buffers():
            if dtype is not None and buffer.is_floating_point():
                # Assign to .data to keep the tensor object, because several modules may share it.
                buffer.data = buffer.data.to(dtype)
            if buffer.numel():
                _broadcast(buffer, comm, device)
        for parameter in parameters.values():
            # Floating parameters have rank 0's values already: sharding sent them.
            if not own_dtype(parameter).is_floating_point:
                _broadcast(parameter, comm, device)


def _broadcast(tensor: torch.Tensor, comm: Comm, device: torch.device) -> None:
    """Broadcast a tensor from rank 0 in place, as bytes on ``device``, for any strides and dtype."""
    # A buffer may be on the CPU, where NCCL cannot send. Backends support few dtypes, but all support bytes.
    values = tensor.detach().to(device).contiguous()
    comm.broadcast(values.reshape(-1).view(torch.uint8))
    tensor.detach().copy_(values)


def _reached_outside(model: nn.Module, whole: set[int]) -> set[int]:
    """Return the ids of modules that can be reached from the root without passing a module in ``whole``.

    A module with two parents can be in both sets.

    Args:
        model: the root.
        whole: ids of modules that are fetched with all their submodules.
    """
    found: set[int] = set()
    ahead = [model]
    while ahead:
        module = ahead.pop()
        # Check ``found`` first, because modules may refer to each other in a cycle.
        if id(module) not in found and id(module) not in whole:
            found.add(id(module))
            ahead += module.children()
    return found


def _hook_modules(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], engine: Engine, outlines: Sequence[UnitOutline]
) -> None:
    """Install hooks on modules that use units, and on all their parents, because a forward may begin at any of these.

    A module uses a unit if it owns the unit, or if it shares a parameter with a module of that unit.
    """
    modules = dict(model.named_modules())
    specs = [outline.spec for outline in outlines]
    unit_of = {name: unit for unit, spec in zip(engine.units, specs, strict=True) for name in spec.parameters}
    # ``unit_of`` has a tied parameter by its first name only, which belongs to the unit of its first owner.
    by_id = {id(parameters[name]): unit for name, unit in unit_of.items()}
    needs: dict[str, dict[int, Unit]] = {"": {}}

    def need(path: str, recurse: bool) -> None:
        found = needs.setdefault(path, {})
        module = modules[path]
        for parameter in module.parameters() if recurse else direct_parameters(module):
            unit = by_id.get(id(parameter))
            # Persistent units stay unsharded for the whole pass, so they need no hooks.
            if unit is not None and unit.hooked:
                found[unit.index] = unit

    # Owners that fetch all their submodules' parameters: hooks on those submodules would have nothing to do.
    whole: set[int] = set()
    for owner in (owner for spec in specs for owner in spec.owners):
        need(owner.path, owner.recurse)
        if owner.recurse:
            whole.add(id(modules[owner.path]))
    outside = _reached_outside(model, whole)
    for path, module in modules.items():
        uses = not never_called(module) and any(True for _ in direct_parameters(module))
        if id(module) in outside and path not in needs and uses:
            need(path, recurse=False)
    # Parents without units get hooks, too: these begin a pass when the user calls the parent directly.
    for path in [path for path in needs if path]:
        parts = path.split(".")
        for depth in range(len(parts)):
            needs.setdefault(".".join(parts[:depth]), {})
    for path, found in needs.items():
        # Sort, so that all ranks gather the units of a module in the same order.
        units = tuple(found[index] for index in sorted(found))
        engine.install_hooks(modules[path], path, units)
    for module in modules.values():
        # Call use_in after all hooks are installed, because it extends the units of modules that have hooks.
        for parameter in external_parameters(module):
            if id(parameter) in by_id:
                engine.use_in(module, parameter)
