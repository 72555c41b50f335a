"""Gathering FSDP2's shards: over one hop or two, as they are or as int8."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from zeropp.comm.hops import Hop
from zeropp.comm.streams import CommStreams, callers_stream, used_here
from zeropp.fsdp2.overlap import Arrival, Waiting, queue, wait_for
from zeropp.fsdp2.shards import AllGather
from zeropp.partition.levels import BLOCK
from zeropp.wire.codecs import Codec, dtype_name

__all__ = ["GatherComm", "GatherRoute"]

_MOST_CALLS = 16
"""Up to so many pieces are decoded one by one, each straight to its place."""


class GatherRoute:
    """The hops over which the parts of one process group come together.

    FSDP2 wants the parts in order of rank, node after node. Between nodes every rank collects the parts of those who
    have its place in the other nodes; then each node's parts are gathered inside the node, for one node after the
    other, since they lie together in the result and nothing has to be put in order afterwards.

    Args:
        hops: one over the whole group, or two: between nodes, inside the node.
        codec: of what is sent; None for values as they are.
    """

    def __init__(self, hops: Sequence[Hop], codec: Codec | None) -> None:
        self.hops = hops
        self.codec = codec
        self.links = [hop.spec.link for hop in hops]

    def gather(self, whole: Tensor, own: Tensor, rank: int, unit: str) -> Iterator[None]:
        """Fill ``whole`` [ranks * n], any dtype, from ``own`` [n], which is part ``rank`` of it; pauses between hops.

        With codes this rank's part is overwritten too: all ranks compute with the decoded values.
        """
        if self.codec is None:
            yield from self._send(whole, own, unit)
            return
        world = whole.numel() // own.numel()
        messages = self.codec.empty(own.numel(), world, own.device)
        mine = messages.view(world, -1)[rank]
        # This rank's part lies in the result, which decoding overwrites, so it is read before.
        self.codec.encode_(mine, own)
        for _ in self._send(messages, mine, unit):
            yield
            # Made on the comm stream before. See [Note: memory on several streams].
            used_here(messages)
        _decode_(self.codec, messages, whole, world)

    def _send(self, whole: Tensor, own: Tensor, unit: str) -> Iterator[None]:
        name = _name_of(self.codec, whole.dtype)
        if len(self.hops) == 1:
            self.hops[0].all_gather(whole, own, unit, name)
            return
        cross, local = self.hops
        # FSDP2's order is that of ranks, and the ranks of a node follow each other: [nodes, ranks of a node, n].
        grid = whole.view(cross.size, local.size, -1)
        # What comes from other nodes belongs a node apart in the grid, and a collective writes to one range.
        column = grid.new_empty(cross.size, grid.size(2))
        column[cross.index].copy_(own)
        cross.all_gather(column.view(-1), column[cross.index], unit, name)
        yield
        used_here(column)
        grid[:, local.index].copy_(column)
        # One call a node: one for all would bring the parts of one rank together, and they would have to be put in
        # order.
        for node in grid.unbind():
            local.all_gather(node.view(-1), node[local.index], unit, name)


class GatherComm(AllGather):
    """The all-gather of one unit; FSDP2 calls it on its own streams, the hops run on comm streams.

    FSDP2 keeps the result until it has been copied out, and its streams wait for that before they use the memory
    again. So it needs no record of the comm streams: see [Note: FSDP2's order].

    Args:
        unit: for the ledger.
        routes: for each process group that the unit is sharded over at some time.
        comm_streams: of gathers.
        before: called before each gather.
        waiting: watches them.
    """

    def __init__(
        self,
        unit: str,
        routes: dict[dist.ProcessGroup, GatherRoute],
        comm_streams: CommStreams,
        before: Callable[[], None],
        waiting: Waiting,
    ) -> None:
        self.unit = unit
        self.routes = routes
        self.comm_streams = comm_streams
        self.before = before
        self.waiting = waiting
        self._filled_on: contextlib.AbstractContextManager[object] = contextlib.nullcontext()

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a result."""
        self._filled_on = callers_stream(device)
        # What FSDP2's own does. It takes the whole result here, writes this rank's part into it, and hands over both.
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Fill ``output_tensor`` [ranks * n] from every rank's ``input_tensor`` [n], a view of its part in it.

        Returns:
            What to wait for, with ``async_op`` and always on CPU; else None, and the calling stream waits.

        Raises:
            RuntimeError: values of several dtypes, which the unit did not have when the hooks were installed.
                Or what ``before`` raises.
        """
        self.before()
        # FSDP2 passes the group over which the parameters are sharded just now: the smaller one after forward, if there
        # is one.
        route = self.routes[group]
        # FSDP2 pads shards to one size, so this is so on every rank or on none.
        if not input_tensor.numel():
            return None
        # FSDP2 looks at dtypes at each gather, and sends bytes (uint8) where they differ.
        if route.codec is not None and not input_tensor.is_floating_point():
            raise RuntimeError(
                f"{self.unit}: FSDP2 sends {input_tensor.dtype}, since its parameters have had several dtypes since "
                "zeropp.fsdp2.apply was called; expected one floating dtype. Change dtypes before, or remove() and "
                "apply with weights=None"
            )
        part = route.gather(output_tensor, input_tensor, group.rank(), self.unit)
        with self._filled_on:
            event = queue(self.comm_streams, route.links, part, f"the gather of {self.unit}", self.waiting)
        # On a device without async_op FSDP2 takes a work for a reason to let the next gather wait for this one's copy.
        # On CPU its events say nothing, and only a work lets the host go on.
        if async_op or not output_tensor.is_cuda:
            return Arrival(event, self.waiting)
        wait_for(event)
        return None


def _name_of(codec: Codec | None, dtype: torch.dtype) -> str:
    """The name for the ledger. FSDP2 sends bytes where one buffer has parameters of several dtypes."""
    if codec is not None:
        return codec.name
    # Without a codec bytes are as good as numbers, so they are not refused.
    return dtype_name(dtype) if dtype.is_floating_point else "bytes"


def _decode_(codec: Codec, messages: Tensor, out: Tensor, count: int) -> None:
    """``out`` [count * n] becomes what ``count`` messages of [n] say, for any n.

    A kernel decodes several messages at once if each begins on a block of 256 elements. Where n is no multiple of
    that, a few messages are decoded one by one, and many into a padded buffer that is copied.
    """
    numel = out.numel() // count
    if numel % BLOCK == 0:
        codec.decode_(messages, out, count=count)
    elif count <= _MOST_CALLS:
        for message, part in zip(messages.view(count, -1).unbind(), out.view(count, -1).unbind(), strict=True):
            codec.decode_(message, part, count=1)
    else:
        # A message of n elements is one of n filled up with zeros, so it can be read as one of whole blocks.
        padded = -(-numel // BLOCK) * BLOCK
        whole = torch.empty(count * padded, dtype=out.dtype, device=out.device)
        codec.decode_(messages, whole, count=count)
        out.view(count, numel).copy_(whole.view(count, padded)[:, :numel])
