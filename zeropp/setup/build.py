"""The way from a model and a configuration to a running engine: check, agree, cut into units, shard, hook.

For a model that was built under ``zero.Init``, the configuration must agree with the settings that it was built
with. ``torch_autocast`` runs whole forwards under ``torch.autocast``.
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
from zeropp.params.gradient import LossScale
from zeropp.params.guard import is_managed, own_dtype, register
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
    """Have every forward of ``model`` run under autocast to ``dtype`` until the engine is closed.

    Calls of modules inside it, from elsewhere, are the caller's.
    """
    device_type = engine.device.type
    # Weakly: what is in the model's own dict must not hold the model.
    ref = weakref.ref(model)
    own = model.__dict__.get("forward")
    plain = type(model).forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        # Its cache would keep converted weights of all units until the forward ends, which stage 3 has just released.
        with torch.autocast(device_type, dtype, cache_enabled=False):
            return plain(ref(), *args, **kwargs) if own is None else own(*args, **kwargs)

    # Trainers look at it for the names of a batch's columns.
    forward.__signature__ = inspect.signature(model.forward)  # type: ignore[attr-defined]
    # In place of hooks, which torch does not call after Ctrl-C: autocast would stay on.
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
    """The device that a model was built to train on, if it is elsewhere and was built to be partitioned."""
    spreads = _builds(parameters)
    if not spreads or all(parameter.device == spreads[0].trains_on for parameter in parameters):
        return None
    return spreads[0].trains_on


def complete(model: nn.Module) -> None:
    """If a model is wrapped inside the block that builds it, it is built now. Collective if it is.

    Its block goes on with what is built after it.
    """
    for build in _builds(model.parameters()):
        if build.building:
            build.complete()


def check_built(parameters: Collection[nn.Parameter], config: Config, ranks: tuple[int, ...]) -> None:
    """Make sure that a model is wrapped as it was built. Local.

    Args:
        parameters: all of the model's.
        config: to wrap it with.
        ranks: global ones, of the group to wrap it for.

    Raises:
        ValueError: other ranks, or another setting.
        RuntimeError: its values are gathered.
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
                    f"zero.Init was told of {key} {value}, and the configuration has zero_optimization.{key} {found}; "
                    "give both the same"
                )


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Keep Python's garbage collector from running."""
    # It runs each time so many objects have been made, and goes through all that there are: a model of thousands of
    # units would have it search, again and again, for garbage among objects all of which stay.
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
    """Partition a model in place.

    Collective over the group. Rank 0's weights and buffers become everyone's.

    Args:
        model: on the device it trains on, all parameters initialised; or see ``trained_on``.
        config: checked to be supported.
        group: ranks to partition over.
        listener: the engine tells it what becomes of gradients, and does not keep it.
        scale: factor on gradients summed over ranks; None for what the configuration says.
        trained_on: a device; the model may be elsewhere then, and without values on all ranks but the first.
        others: further lines that must be the same on every rank.
        plan_space: tells how many bytes below each path files will take; refuses what the host's memory cannot hold.

    Raises:
        ConfigError: the host's memory has a limit that is too low.
        TypeError, ValueError: the model or the group cannot be used; the message says why and what to do.
    """
    # Step by step, each failing on all ranks if it fails on one: none goes on and waits for the others.
    extension = config.zeropp
    together = partial(run_on_all_ranks, group, patience=lambda result: extension.hang_timeout)
    parameters = _named_parameters(model)
    trained_on = built_for(parameters.values()) if trained_on is None else trained_on
    device = together("checking the model", lambda: _check_model(model, parameters, config, trained_on))
    hosts = dict(exchange(group, whereabouts(), "finding nodes", extension.hang_timeout))
    find = partial(find_members, group, device, extension.local_world_size, hosts)
    # Asked for the same result: ranks that see other nodes would make other groups, and hang in them.
    members = together("finding nodes", find, same=True)
    warn_if_alone(members)
    choose = partial(_choose, model, parameters, config, members, plan_space)
    blueprint, space = together("choosing groups", choose)
    # Rank 0's: names of groups and keys in the store must be the job's own, also for the second model in it.
    job = exchange(group, f"zeropp-{uuid.uuid4().hex[:12]}", "naming the job", extension.hang_timeout)[0]
    patience = members.patience(extension.hang_timeout)
    with naming_absence("wrapping the model"):
        comm = make_comm(members, blueprint.mode.chain, patience, job, blueprint.sharing, blueprint.ctas)
        agreement = Agreement(comm, patience, extension.warn_after, device, overlap=blueprint.engine.overlap)
        # Before the model is changed, and in words: a mismatch found later is a hang, or wrong numbers.
        _check_agreement([*_describe(model, parameters), f"configuration {config.model_dump_json()}", *others()], comm)
        # Asked by every rank, also where only some name a device: each waits for the others here.
        together("placing the model", lambda: place(model, device) if trained_on is not None else None)
        together("looking for CUDA graphs", lambda: _check_graphs(model, parameters, blueprint))
        if extension.warm_up and device.type == "cuda":
            together("compiling kernels", lambda: warm_up(blueprint))
        # All the space that files will take, also of optimizer states, which are made in the first step: what is
        # missing is to show before anything is cut.
        open_all = partial(open_tiers, blueprint.tiers, device, blueprint.staging, space)
        tiers = together("making room for what is offloaded", open_all)
        with agreement.reporting_errors("wrapping a model"):
            return _partition(model, parameters, config, blueprint, agreement, tiers, listener, scale)


def _named_parameters(model: object) -> dict[str, nn.Parameter]:
    """All parameters of a model, by name, once for all that look at them: it takes a walk over all modules."""
    if not isinstance(model, nn.Module):
        return {}  # it is refused a little later
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
    """Cut a model that all ranks have alike, and give it an engine."""
    comm = agreement.comm
    _warn_of_unknown_names(model, parameters, config, first=comm.rank == 0)
    maker = BufferMaker(blueprint.mode, blueprint.encoding, blueprint.dtypes, comm, tiers)
    units = maker.make_units(parameters, blueprint.units)
    comm.end_of_wrap()
    require_room_on_all(comm, len(parameters))
    # Before anything is partitioned: warnings may be errors.
    warn_of_ineffective(config, units, comm)
    # Before they are sharded, which gives parameters the compute dtype.
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
    # Every question to a guarded parameter would go through Python, and none here is about values.
    with unguarded():
        _install(model, parameters, engine, blueprint.units, own)
    if blueprint.dtypes.autocast is not None:
        _autocast_forwards(model, engine, blueprint.dtypes.autocast)
    refuse_until_loaded(model, engine, awaited)
    rehearse(engine)
    # What is cached between uses has never been filled.
    engine.start_refresh()
    return engine


def _adopt(model: nn.Module, parameters: Mapping[str, nn.Parameter], units: Sequence[Unit], comm: Comm) -> None:
    """Cut the model's values, rank 0's or those of an engine from before, into the units' buffers."""
    former = PreviousWeights(model, parameters)
    for unit in units:
        for buffer in unit.buffers:
            former.fill_buffer(buffer, comm)
    # Before new hooks are installed: closing takes the former engine's off the same modules, and its attributes.
    former.close()


def _install(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    engine: Engine,
    outlines: Sequence[UnitOutline],
    own: dict[int, torch.dtype],
) -> None:
    """Tie an engine that is ready to the model's modules and parameters, which had dtypes of their ``own``."""
    for buffer in engine.buffers:
        for slot, parameter in zip(buffer.layout.slots, buffer.parameters, strict=True):
            # By this tag the guard, watch_structure and a later wrapping know a managed parameter.
            register(parameter, slot.name, engine, slot.strides, own[id(parameter)])
    _hook_modules(model, parameters, engine, outlines)
    for unit in engine.units:
        engine.watch_gradients(unit)
    modules = holding_tensors(model)
    install_state_hooks(modules, engine)
    refuse_changes(model, modules, engine)
    give_to_modules(modules, engine)
    # Below stage 3 nothing is away that a script would gather.
    if not engine.mode.stays_whole:
        for extension in extensions():
            extension.model_wrapped(model, engine)
    # Last: its hook is prepended, and must run before the one that begins a pass.
    watch_structure(model, engine)


def _choose(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    config: Config,
    members: Members,
    plan_space: Callable[[Blueprint], Mapping[str, int]],
) -> tuple[Blueprint, Mapping[str, int]]:
    """This rank's blueprint, and the bytes of files that its engine will have below each path."""
    own = whereabouts()[0]
    if own == members.ranks[0]:
        require_values(model, parameters)
    for engine in former_engines(model, parameters):
        # Former values are gathered by the ranks that hold them, into buffers of these ranks.
        if engine.comm.ranks != members.ranks:
            raise ValueError(
                f"the model's values are spread over ranks {list(engine.comm.ranks)}, from before, and process_group "
                f"has ranks {list(members.ranks)}; wrap it again over the same ranks"
            )
    check_built(parameters.values(), config, members.ranks)
    world, device = len(members.ranks), members.device
    config.resolve_batch(world)  # for its errors: sizes may contradict each other
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
    """Everything about a model that can be refused without asking other ranks."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise TypeError(
            f"model is wrapped in {type(model).__name__}, which replicates what zeropp partitions; give the module "
            "inside, model.module"
        )
    if torch.is_inference_mode_enabled():
        raise RuntimeError("a model was wrapped inside torch.inference_mode(), where nothing can be trained; leave it")
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
    # Versions tell of a stale weight: two parameters with one counter would refuse each other's graphs. See
    # [Note: versions].
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
    # Only for what it refuses; what it finds is asked for again where it is used.
    former_engines(model, parameters)
    return find_device(model, parameters, device)


def _check_graphs(model: nn.Module, parameters: Mapping[str, nn.Parameter], blueprint: Blueprint) -> None:
    """Refuse compiled modules whose CUDA graphs would keep the addresses of weights that move."""
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
        notify_once(f"leaf_module.names: the model has no modules {unknown}; they change nothing", first=first)
    kept = config.data_types.keep_in_fp32_modules or ()
    unknown = [part for part in kept if not any(keeps_float32(part, name) for name in parameters)]
    if unknown:
        told = f"data_types.keep_in_fp32_modules: no parameter's name has a part {unknown}; they change nothing"
        notify_once(told, first=first)


def _describe(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> list[str]:
    # Values of a former engine are gathered, which is collective: ranks must know of the same ones.
    # Buffers are laid out by strides, those of overlapping elements aside: with others a rank would cut other pieces.
    rows = [
        f"{name} {tuple(p.shape)} {p.dtype} {'trainable' if p.requires_grad else 'frozen'}"
        f"{f' strides {dense_strides(tuple(p.shape), p.stride())}' if p.is_floating_point() else ''}"
        f"{' (wrapped before)' if is_managed(p) else ''}"
        for name, p in parameters.items()
    ]
    # Ranks with other leaves would cut other units.
    leaves = [f"leaf module {path}" for path, module in model.named_modules() if module.__dict__.get(LEAF_AS) is True]
    return [*rows, *leaves, *(f"buffer {name} {tuple(b.shape)} {b.dtype}" for name, b in model.named_buffers())]


def _check_agreement(own: list[str], comm: Comm) -> None:
    """Every rank must bring the same parameters, configuration and optimizer."""
    # A digest: whole descriptions are megabytes a rank, and every rank would receive those of all others.
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
    """Both texts, or what lies around their first difference if they are long."""
    start = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    cut = slice(start - around, start + around) if start > around else slice(0, start + around)
    return tuple(text if len(text) <= 2 * around else f"...{text[cut]}..." for text in (left, right))  # type: ignore


def _share_buffers(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], config: Config, comm: Comm, device: torch.device
) -> None:
    """Give everyone rank 0's buffers, and rank 0's parameters that are not floating point."""
    named = config.data_types.buffer_dtype
    dtype = None if named is None else DTYPES[named]
    with torch.no_grad():
        for buffer in model.buffers():
            if dtype is not None and buffer.is_floating_point():
                # Through .data the object stays: modules may share it.
                buffer.data = buffer.data.to(dtype)
            if buffer.numel():
                _broadcast(buffer, comm, device)
        for parameter in parameters.values():
            # The others have rank 0's values from being sharded.
            if not own_dtype(parameter).is_floating_point:
                _broadcast(parameter, comm, device)


def _broadcast(tensor: torch.Tensor, comm: Comm, device: torch.device) -> None:
    """In place, whatever the strides and dtype: bytes travel, from the model's device, where a group can send them."""
    # A buffer may lie on the CPU, where NCCL cannot send; and backends know few dtypes, but all know bytes.
    values = tensor.detach().to(device).contiguous()
    comm.broadcast(values.reshape(-1).view(torch.uint8))
    tensor.detach().copy_(values)


def _reached_outside(model: nn.Module, whole: set[int]) -> set[int]:
    """Modules on any way down from the root that avoids those in ``whole``; one that two parents share may be in both.

    Identities go in and come out.
    """
    found: set[int] = set()
    ahead = [model]
    while ahead:
        module = ahead.pop()
        # Modules may refer to each other in a circle.
        if id(module) not in found and id(module) not in whole:
            found.add(id(module))
            ahead += module.children()
    return found


def _hook_modules(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], engine: Engine, outlines: Sequence[UnitOutline]
) -> None:
    """Hook owners, modules that share another unit's parameters, and every module above, where a forward may begin."""
    modules = dict(model.named_modules())
    specs = [outline.spec for outline in outlines]
    unit_of = {name: unit for unit, spec in zip(engine.units, specs, strict=True) for name in spec.parameters}
    # A tied parameter has its first name here, and so its first owner's unit.
    by_id = {id(parameters[name]): unit for name, unit in unit_of.items()}
    needs: dict[str, dict[int, Unit]] = {"": {}}

    def need(path: str, recurse: bool) -> None:
        found = needs.setdefault(path, {})
        module = modules[path]
        for parameter in module.parameters() if recurse else direct_parameters(module):
            unit = by_id.get(id(parameter))
            # Small persistent parameters are shown for the whole pass, and bracketed by nobody.
            if unit is not None and unit.hooked:
                found[unit.index] = unit

    # Modules that an owner fetches with everything in them: hooks further down would find nothing to do.
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
    # A forward from outside may begin at any module above: it gets hooks without units, which begin the pass.
    for path in [path for path in needs if path]:
        parts = path.split(".")
        for depth in range(len(parts)):
            needs.setdefault(".".join(parts[:depth]), {})
    for path, found in needs.items():
        # In one order on every rank: the units of a module are gathered in it.
        units = tuple(found[index] for index in sorted(found))
        engine.install_hooks(modules[path], path, units)
    for module in modules.values():
        # After all hooked modules are there, since these only add to them.
        for parameter in external_parameters(module):
            if id(parameter) in by_id:
                engine.use_in(module, parameter)
