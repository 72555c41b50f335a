"""Bytes that a step will send over each hop, and how many tokens a rank needs for computing to hide them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from zeropp.comm.hops import TrafficKey
from zeropp.config import ConfigSource
from zeropp.params.buffer_maker import BufferKey
from zeropp.partition.levels import BufferLayout, HopSpec, Placement
from zeropp.plan.outline import outline
from zeropp.wire.codecs import Codec, PlainCodec
from zeropp.wire.differences import Lossless, make_difference_codec
from zeropp.wire.encoding import Encoding

__all__ = ["TrafficPlan", "TrafficRow", "traffic"]

# Of an element, beside its 4: the mean over 1500 steps (docs/convergence.md). How many escape depends on the weights.
_ESCAPED_BITS = 0.87
# What a device really achieves, and what a node can send: the examples of docs/multinode.md.
_FLOPS = 4e14
_BANDWIDTHS = (12.5e9, 50e9, 350e9)


@dataclass(frozen=True)
class TrafficRow:
    """The bytes that a rank sends of one unit over one hop."""

    way: TrafficKey  # over which hop, and how
    nbytes: int  # each time
    times: int  # in an optimizer step
    phase: str  # the pass that it can hide behind, "forward" or "backward"


@dataclass(frozen=True)
class TrafficPlan:
    """The bytes that each rank sends in an optimizer step; escapes of "lossless" are estimated.

    Every unit is counted once in forward and once in backward: reuse between them saves a gather, and a unit that is
    used again after it was released takes one more.

    Attributes:
        rows: by unit and hop.
        local: ranks per node.
        world: ranks.
        numel: parameters, and those that are trained.
        micro_batches: backwards before each optimizer step.
    """

    rows: tuple[TrafficRow, ...]
    local: int
    world: int
    numel: tuple[int, int]
    micro_batches: int

    def sent(self, link: str | None = None, phase: str | None = None) -> int:
        """Bytes that a rank sends in a step, over a class of links ("local", "cross") and in a pass, or all."""
        return sum(
            row.nbytes * row.times for row in self.rows if link in (None, row.way.link) and phase in (None, row.phase)
        )

    @property
    def between_nodes(self) -> int:
        """Bytes that a node sends to others in a step."""
        return self.local * self.sent("cross")

    def tokens_to_hide(self, flops: float, bandwidth: float) -> float:
        """Tokens per rank and micro-batch from which computing takes longer than what crosses nodes.

        Args:
            flops: floating-point operations per second that a device really achieves.
            bandwidth: bytes per second that a node can send.
        """
        every, trained = self.numel
        # Operations a token: a product and a sum for each weight in forward. Backward takes as many again for the
        # inputs of all weights, and for the gradients of those that are trained.
        work = {"forward": 2 * every, "backward": 2 * (every + trained)}
        # A pass hides its own messages only, so the worse of the two counts.
        return max(
            self.local * self.sent("cross", phase) / bandwidth * flops / (work[phase] * self.micro_batches)
            for phase in work
        )

    def __str__(self) -> str:
        totals: Counter[str] = Counter()
        for row in self.rows:
            totals[f"{row.way.kind} {row.way.hop} {row.way.link} {row.way.codec}"] += row.nbytes * row.times
        lines = [f"{name:44}{nbytes:>18,} bytes a rank and step" for name, nbytes in sorted(totals.items())]
        lines.append(f"{'between nodes':44}{self.between_nodes:>18,} bytes a node and step")
        if self.world > self.local:
            lines += [
                f"at {_FLOPS:.0e} operations and {bandwidth / 1e9:g} GB/s a node: hidden from "
                f"{self.tokens_to_hide(_FLOPS, bandwidth):,.0f} tokens a rank and micro-batch on"
                for bandwidth in _BANDWIDTHS
            ]
            lines.append("where that is below what you train with, quantizing buys nothing but the time of its kernels")
        return "\n".join(lines)


def traffic(model: nn.Module, config: ConfigSource, world: int, local: int | None = None) -> TrafficPlan:
    """Predict what each of ``world`` ranks will send.

    Args:
        model: not wrapped; meta parameters will do.
        config: as given to ZeroOptimizer.
        world: ranks to partition over.
        local: ranks per node; None for a single node.

    Raises:
        ValueError: ``world`` is not positive, or the groups that the configuration asks for do not fit it.
    """
    settings, blueprint = outline(model, config, world, local, torch.device("cuda"))
    encoding = blueprint.encoding
    # One where the configuration leaves it open.
    micro_batches = settings.resolve_batch(world)[2] or 1
    rows: list[TrafficRow] = []
    for unit in blueprint.units:
        name = unit.spec.name
        for buffer in unit.buffers:
            rows += _weights(name, unit.placement, buffer.key, buffer.layout, encoding, micro_batches)
            if buffer.key.trainable:
                rows += _gradients(name, unit.placement, buffer.key, buffer.layout, encoding, micro_batches)
    every = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return TrafficPlan(tuple(rows), blueprint.local, world, (every, trained), micro_batches)


def _weights(
    unit: str, placement: Placement, key: BufferKey, layout: BufferLayout, encoding: Encoding, micro_batches: int
) -> Iterator[TrafficRow]:
    states = placement.mode.states
    cached = placement.mode.cached
    piece = layout.numel // states
    codec: Codec = encoding.weight_codec(key.trainable) or PlainCodec(key.dtype)
    name = codec.name
    nbytes = codec.nbytes(piece)
    # Only what a step changes is refreshed.
    if cached is not None and key.trainable:
        if encoding.differences is not None:
            difference = make_difference_codec(encoding.differences)
            if isinstance(difference, Lossless):
                difference.room = int(piece * _ESCAPED_BITS / 8), 0
            yield from _hops(
                unit,
                "refresh",
                difference.name,
                placement.gather_path(states, cached),
                states,
                difference.nbytes(piece),
                1,
            )
        else:
            yield from _hops(unit, "refresh", name, placement.gather_path(states, cached), states, nbytes, 1)
    # What is cached whole is not gathered between refreshes.
    if cached != 1:
        # From a secondary shard of values, values travel, whatever the refresh has brought.
        if cached is not None and not encoding.cache_codes:
            name = PlainCodec(key.dtype).name
            nbytes = PlainCodec(key.dtype).nbytes(piece)
        path = placement.gather_path(cached or states, 1)
        for phase in ("forward", "backward"):
            yield from _hops(unit, "gather", name, path, states, nbytes, micro_batches, phase)


def _hops(
    unit: str,
    kind: str,
    codec: str,
    path: Sequence[HopSpec],
    states: int,
    nbytes: int,
    times: int,
    phase: str = "forward",
) -> Iterator[TrafficRow]:
    """Messages of a piece of the states each, brought together hop by hop."""
    for hop in path:
        way = TrafficKey(unit, kind, f"{hop.outer}->{hop.inner}", hop.link, len(hop.ranks), codec)
        # Before the hop a rank has this many pieces of the states together, and sends all of them to each other member.
        yield TrafficRow(way, (len(hop.ranks) - 1) * (states // hop.outer) * nbytes, times, phase)


def _gradients(
    unit: str, placement: Placement, key: BufferKey, layout: BufferLayout, encoding: Encoding, micro_batches: int
) -> Iterator[TrafficRow]:
    mode = placement.mode
    world = placement.chain.world
    path = placement.reduce_path(1, world)
    for hop, codec in zip(path, encoding.gradient_codecs(path, key.wire_dtype), strict=True):
        fed_back = codec.feedback_nbytes(layout.numel // hop.outer) > 0 and encoding.feeds_back(path, hop)
        name = f"feedback({codec.name})" if fed_back else codec.name
        way = TrafficKey(unit, "reduce", f"{hop.inner}->{hop.outer}", hop.link, len(hop.ranks), name)
        # Up to the level where gradients wait, every micro-batch's travel; beyond it their sum.
        once = mode.sums and hop.outer > mode.held_level
        nbytes = (len(hop.ranks) - 1) * codec.nbytes(layout.numel // hop.outer)
        yield TrafficRow(way, nbytes, 1 if once else micro_batches, "backward")
    # States have replicas, so what was reduced to a piece for each rank is gathered back.
    if mode.states != world:
        back = encoding.return_codec(encoding.gradient_codecs(path, key.wire_dtype))
        nbytes = back.nbytes(layout.numel // world)
        replicas = placement.gather_path(world, mode.states)
        times = 1 if mode.sums else micro_batches
        yield from _hops(unit, "reduce", back.name, replicas, world, nbytes, times, "backward")
