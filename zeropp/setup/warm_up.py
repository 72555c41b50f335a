"""Compilation of Triton kernels while the model is wrapped, instead of during the first step.

During the first step, a rank that compiles would keep the other ranks waiting in collectives. So small buffers run
through every path of a training step here, over hops that send nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from zeropp.comm.hops import Hop, TrafficKey
from zeropp.offload.tier_choice import at_device
from zeropp.params.buffer_maker import BufferKey, NoGroups, gradient_paths, weight_paths
from zeropp.params.flat_buffer import WeightPaths
from zeropp.params.gradient import Gradient
from zeropp.partition.levels import Placement, build_layout
from zeropp.setup.blueprint import Blueprint
from zeropp.wire.paths import GatherPath
from zeropp_kernels.wire import BLOCK

__all__ = ["warm_up"]


def warm_up(blueprint: Blueprint) -> None:
    """Run, on small buffers, the kernels of this rank's gathers, refreshes and reductions.

    The caller calls this on GPUs only, because CPU tensors need no compiled kernels.

    Args:
        blueprint: blueprint of the engine; each kind of buffer in it is run in two sizes.
    """
    world = blueprint.world
    seen: set[tuple[BufferKey, bool]] = set()
    for unit in blueprint.units:
        for key in (buffer.key for buffer in unit.buffers):
            if (key, unit.spec.persistent) not in seen:
                seen.add((key, unit.spec.persistent))
                # Run once with padding in every rank's shard, and once without: with rotated codes, padding is cleared,
                # and the shard is then measured, by operations of their own.
                for numels in ([3] * world, [BLOCK * world]):
                    _Rehearsal(blueprint, unit.placement, key, numels).rehearse()


class _SilentHop(Hop):
    """A hop without communication, which returns copies of this rank's own part in the shapes of a real hop."""

    def all_gather(self, out: Tensor, own: Tensor, key: TrafficKey) -> None:
        # Copy the own message to all places: the decoder must read valid messages, and uninitialized memory is none.
        out.view(self.size, -1).copy_(own.clone().view(1, -1).expand(self.size, -1))

    def all_to_all(self, message: Tensor, key: TrafficKey, *, apart: bool = True) -> Tensor:
        return message.clone().view(self.size, -1)

    def reduce_scatter(self, message: Tensor, key: TrafficKey) -> Tensor:
        return message.view(self.size, -1)[0].clone()


class _Rehearsal:
    """Warm-up of one kind of buffer: gathers and refreshes of its weights, and reductions of its gradients."""

    def __init__(self, blueprint: Blueprint, placement: Placement, key: BufferKey, numels: Sequence[int]) -> None:
        world, encoding, device = blueprint.world, blueprint.encoding, blueprint.device
        silence = NoGroups(world, blueprint.rank, _SilentHop)
        self._layout = build_layout([(str(index), (numel,), (1,)) for index, numel in enumerate(numels)], world)
        self._numels = numels
        self._placement = placement
        self._key = key
        self._device = device
        self._weights = weight_paths(silence, placement, key, encoding)
        self._frozen = None if key.trainable else encoding.frozen
        self._travels = None
        if key.trainable:
            self._travels = gradient_paths(silence, placement, self._layout, key, encoding, device)

    @torch.no_grad()
    def rehearse(self) -> None:
        """Run the refresh and the gather of this kind of buffer, and four reductions if it is trainable."""
        self._gather(self._weights)
        if self._travels is not None:
            values = [torch.ones(numel, dtype=self._key.dtype, device=self._device) for numel in self._numels]
            parameters = [nn.Parameter(value) for value in values]
            main_dtype = self._key.main_dtype
            tiers = at_device(self._device)
            gradient = Gradient("warm-up", parameters, self._layout, main_dtype, self._device, self._travels, tiers)
            # The second reduction adds to the first. The third one only holds its gradient, and the fourth reduces
            # both.
            for hold in (False, False, True, False):
                for parameter in parameters:
                    parameter.grad = torch.ones_like(parameter)
                _reduce(gradient, hold=hold)

    def _gather(self, paths: WeightPaths) -> None:
        numel = self._layout.numel // self._placement.mode.states
        shard = torch.ones(numel, dtype=self._key.main_dtype, device=self._device)
        if self._frozen is not None:
            codes = self._frozen.empty(numel, 1, self._device)
            self._frozen.encode_(codes, shard)
            shard = codes
        secondary = shard
        if paths.refresh is not None:
            secondary = self._run(paths.refresh, shard)
        if paths.differences is not None:
            base = paths.differences.places(secondary)
            if (counted := paths.differences.counted) is not None:
                room8, room16 = counted.count_escapes(shard, base[0]).tolist()
                counted.set_capacity((room8, room16), shard.numel(), shard.numel() * self._key.dtype.itemsize)
            paths.differences.gather_at_once(shard, base, "warm-up")
        if paths.fetch is not None:
            self._run(paths.fetch, secondary)

    def _run(self, path: GatherPath, own: Tensor) -> Tensor:
        whole = path.empty(self._layout.numel // path.inner, self._device)
        path.gather_at_once(own, path.places(whole), "warm-up")
        return whole


def _reduce(gradient: Gradient, *, hold: bool) -> None:
    message = gradient.pack(1.0, hold=hold)
    if message is not None:
        work = gradient.prepare_reduce(message, 1.0, hold=hold)
        for _, calls in work.steps:
            for call in calls:
                call()
