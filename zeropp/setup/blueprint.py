"""The blueprint of one rank's engine: all decisions that follow from a model, a configuration and the ranks.

The blueprint is computed once, before the model is partitioned. The engine, the warm-up of kernels and `zeropp.plan`
all read it, so a plan describes the engine that training gets.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from zeropp.comm.communicators import Ctas, Sharing
from zeropp.config import Config
from zeropp.engine.engine_state import EngineOptions
from zeropp.offload.tier_choice import Staging, TierOptions, choose_staging, divide_steps
from zeropp.params.buffer_maker import BufferKey, BufferOutline, UnitOutline, buffer_layouts
from zeropp.params.dtypes import ComputedWith, DtypeOptions, computed_with
from zeropp.params.loss_scale import LossScaling
from zeropp.partition.levels import BufferLayout, Mode, Placement
from zeropp.partition.units import form_units
from zeropp.setup.choices import (
    choose_ctas_limits,
    choose_dtypes,
    choose_encoding,
    choose_engine_options,
    choose_loss_scaling,
    choose_mode,
    choose_sharing,
    choose_tier_options,
    choose_unit_options,
    require_base,
    require_dtypes,
)
from zeropp.wire.encoding import Encoding

__all__ = ["Blueprint", "draw_blueprint"]


@dataclass(frozen=True)
class Blueprint:
    """All decisions about one rank's engine, made before the engine exists. Sizes are the same on all ranks.

    Attributes:
        rank: this rank in the process group.
        local: number of ranks per node.
        device: device that trains.
        mode: levels of weights, gradients and optimizer states, for units that are not persistent.
        encoding: codecs of gathers, refreshes and reductions.
        dtypes: dtypes of weights, gradients and messages.
        units: units of the model in order, each with its flat buffers.
        tiers: storage tiers of offloaded tensors.
        staging: rings of staging buffers by name; empty where nothing is offloaded.
        sharing: which kinds of work and which engines share NCCL communicators.
        ctas: limits of thread blocks of NCCL kernels; other backends have no limit.
        loss_scaling: settings of the loss scale.
        engine: settings of forward, backward, saving and loading.
    """

    rank: int
    local: int
    device: torch.device
    mode: Mode
    encoding: Encoding
    dtypes: DtypeOptions
    units: tuple[UnitOutline, ...]
    tiers: TierOptions
    staging: dict[str, Staging]
    sharing: Sharing
    ctas: Ctas
    loss_scaling: LossScaling
    engine: EngineOptions

    @property
    def world(self) -> int:
        """Number of ranks in the process group."""
        return self.mode.chain.world


def draw_blueprint(
    model: nn.Module,
    config: Config,
    world: int,
    local: int,
    device: torch.device,
    *,
    rank: int = 0,
    processors: int | None = None,
) -> Blueprint:
    """Compute the blueprint of one rank's engine, without communication and without allocating memory.

    Args:
        model: model that is not partitioned by this engine yet; meta parameters suffice.
        config: configuration, already checked to be supported.
        world: number of ranks to partition over.
        local: number of ranks per node.
        device: device that trains; it need not exist on this machine.
        rank: number of the rank, in ``range(world)``.
        processors: SMs of the GPU that trains; None without a GPU.

    Returns:
        The blueprint.

    Raises:
        ConfigError: group sizes do not divide each other, or differences have no cached weights to refer to.
        ValueError: the configured messages cannot carry the dtype that the model computes in.
    """
    mode = choose_mode(config, world, local)
    encoding = choose_encoding(config)
    require_base(config, encoding, mode)
    dtypes = choose_dtypes(config)
    parameters = computed_with(model, dtypes)
    require_dtypes(config, encoding, parameters)
    tiers = choose_tier_options(config)
    units = _outline_units(model, config, Placement(mode, rank, local), parameters, dtypes, tiers)
    buffers = [buffer for unit in units for buffer in unit.buffers]
    return Blueprint(
        rank,
        local,
        device,
        mode,
        encoding,
        dtypes,
        units,
        tiers,
        choose_staging(
            tiers,
            device,
            largest=max((buffer.shard for buffer in buffers), default=0),
            itemsize=max((buffer.key.main_dtype.itemsize for buffer in buffers), default=1),
        ),
        choose_sharing(config, device),
        Ctas() if processors is None else choose_ctas_limits(config, processors),
        choose_loss_scaling(config),
        choose_engine_options(config, dtypes),
    )


def _outline_units(
    model: nn.Module,
    config: Config,
    placement: Placement,
    parameters: ComputedWith,
    dtypes: DtypeOptions,
    tiers: TierOptions,
) -> tuple[UnitOutline, ...]:
    """Return the units of a model with their flat buffers, and the part of each buffer that the device steps."""
    world = placement.chain.world
    specs = form_units(model, world, choose_unit_options(config))
    layouts = [list(buffer_layouts(parameters, spec, dtypes, world)) for spec in specs]
    states = placement.mode.states
    stepped = [layout.numel // states for own in layouts for key, layout in own if key.trainable]
    parts = iter(divide_steps(tiers, stepped))

    def buffer(key: BufferKey, layout: BufferLayout) -> BufferOutline:
        return BufferOutline(key, layout, layout.numel // states, next(parts) if key.trainable else 0)

    return tuple(
        UnitOutline(
            spec,
            Placement(placement.mode.for_unit(spec.persistent), placement.rank, placement.local),
            tuple(buffer(key, layout) for key, layout in own),
        )
        for spec, own in zip(specs, layouts, strict=True)
    )
