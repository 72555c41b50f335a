"""Prediction of the bytes that a step sends over each hop, and of the tokens per rank that hide them."""

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

# Mean bits per element that escapes add to the 4 bits of a "lossless" code, over 1500 steps (docs/convergence.md). The
# actual number depends on the weights.
_ESCAPED_BITS = 0.87
# FLOP/s that a device achieves, and bytes/s that a node can send: the examples of docs/multinode.md.
_FLOPS = 4e14
_BANDWIDTHS = (12.5e9, 50e9, 350e9)


@dataclass(frozen=True)
class TrafficRow:
    """The bytes that a rank sends for one unit over one hop.

    Attributes:
        way: unit, kind of work, hop, link and codec.
        nbytes: bytes per transfer.
        times: transfers per optimizer step.
        phase: pass that can hide the transfer, "forward" or "backward".
    """

    way: TrafficKey
    nbytes: int
    times: int
    phase: str


@dataclass(frozen=True)
class TrafficPlan:
    """The bytes that each rank sends in one optimizer step; escapes of "lossless" are estimated.

    Each unit is gathered once per forward and once per backward. In training, reuse between the two saves a gather, and
    a unit that is used again after it was resharded needs another one.

    Attributes:
        rows: bytes by unit and hop.
        local: number of ranks per node.
        world: number of ranks.
        numel: (number of parameter elements, number of trainable ones).
        micro_batches: number of backwards per optimizer step.
    """

    rows: tuple[TrafficRow, ...]
    local: int
    world: int
    numel: tuple[int, int]
    micro_batches: int

    def sent(self, link: str | None = None, phase: str | None = None) -> int:
        """Return the bytes that a rank sends per optimizer step.

        Args:
            link: class of links to count, "local" or "cross"; None for both.
            phase: pass to count, "forward" or "backward"; None for both.
        """
        return sum(
            row.nbytes * row.times for row in self.rows if link in (None, row.way.link) and phase in (None, row.phase)
        )

    @property
    def between_nodes(self) -> int:
        """Bytes that a node sends to other nodes per optimizer step."""
        return self.local * self.sent("cross")

    def tokens_to_hide(self, flops: float, bandwidth: float) -> float:
        """Return the tokens per rank and micro-batch from which computing takes longer than the traffic between nodes.

        ``tokens = max over phases of local * bytes / bandwidth * flops / (operations per token * micro_batches)``

        Args:
            flops: floating-point operations per second that a device achieves.
            bandwidth: bytes per second that a node can send.
        """
        every, trained = self.numel
        # Operations per token: forward takes 2 per weight. Backward takes 2 per weight for the gradients of inputs, and
        # 2 per trained weight for the gradients of weights.
        work = {"forward": 2 * every, "backward": 2 * (every + trained)}
        # A pass hides only its own messages, so the pass with the larger result decides.
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
                f"at {_FLOPS:.0e} FLOP/s a device and {bandwidth / 1e9:g} GB/s a node: traffic is hidden from "
                f"{self.tokens_to_hide(_FLOPS, bandwidth):,.0f} tokens a rank and micro-batch on"
                for bandwidth in _BANDWIDTHS
            ]
            lines.append(
                "if you train with more tokens than that, quantizing saves no time and adds that of its kernels"
            )
        return "\n".join(lines)


def traffic(model: nn.Module, config: ConfigSource, world: int, local: int | None = None) -> TrafficPlan:
    """Predict the bytes that each of ``world`` ranks sends in one optimizer step.

    Args:
        model: model that is not wrapped; meta parameters suffice.
        config: configuration as for ZeroOptimizer.
        world: number of ranks to partition over.
        local: number of ranks per node; None for a single node.

    Returns:
        The plan.

    Raises:
        ValueError: ``world`` is not positive, or the configured group sizes do not divide it.
    """
    settings, blueprint = outline(model, config, world, local, torch.device("cuda"))
    encoding = blueprint.encoding
    # One micro-batch if the configuration does not set the number.
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
    # Only trainable weights change in a step, so only these are refreshed.
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
    # Weights that are cached whole are not gathered between refreshes.
    if cached != 1:
        # A secondary shard of decoded values is gathered as plain values, whatever codec the refresh uses.
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
    """Yield the traffic of a gather hop by hop; ``nbytes`` is one message, a shard at level ``states``."""
    for hop in path:
        way = TrafficKey(unit, kind, f"{hop.outer}->{hop.inner}", hop.link, len(hop.ranks), codec)
        # Before the hop a rank holds ``states / hop.outer`` messages, and sends all of them to each other member.
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
        # Up to the level at which gradients wait, each micro-batch sends its own. Beyond that level their sum is sent
        # once.
        once = mode.sums and hop.outer > mode.held_level
        nbytes = (len(hop.ranks) - 1) * codec.nbytes(layout.numel // hop.outer)
        yield TrafficRow(way, nbytes, 1 if once else micro_batches, "backward")
    # Main weights have replicas, so reduced gradients are gathered from one piece per rank to the level of the states.
    if mode.states != world:
        back = encoding.return_codec(encoding.gradient_codecs(path, key.wire_dtype))
        nbytes = back.nbytes(layout.numel // world)
        replicas = placement.gather_path(world, mode.states)
        times = 1 if mode.sums else micro_batches
        yield from _hops(unit, "reduce", back.name, replicas, world, nbytes, times, "backward")
