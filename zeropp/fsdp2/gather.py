"""All-gather of FSDP2's shards over one hop or two, as plain values or as int8 codes."""

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
"""Largest number of messages that are decoded one at a time, if their size is not a multiple of 256 elements.

More messages are decoded in one call into a padded buffer.
"""


class GatherRoute:
    """The hops that gather the parts of one process group.

    FSDP2 needs the parts in the order of ranks, and the ranks of a node are consecutive. With two hops, each rank first
    gathers between nodes: from the ranks with its own position in the other nodes. Then each node gathers inside the
    node, with one collective per source node. The parts of a source node are adjacent in the result, so no reordering
    follows.

    Args:
        hops: one hop over the whole group, or two: between nodes, then inside the node.
        codec: codec of the messages; None for plain values.
    """

    def __init__(self, hops: Sequence[Hop], codec: Codec | None) -> None:
        self.hops = hops
        self.codec = codec
        self.links = [hop.spec.link for hop in hops]

    def gather(self, whole: Tensor, own: Tensor, rank: int, unit: str) -> Iterator[None]:
        """Fill ``whole`` from every rank's ``own`` part. The generator yields between hops.

        With a codec, this rank's own part is overwritten, too, so that all ranks compute with the same decoded values.

        Args:
            whole: output [ranks * n]; any dtype, with a codec a floating one.
            own: this rank's part [n], a view of ``whole``.
            rank: index of this rank's part.
            unit: name of the unit for the ledger.
        """
        if self.codec is None:
            yield from self._send(whole, own, unit)
            return
        world = whole.numel() // own.numel()
        messages = self.codec.empty(own.numel(), world, own.device)
        mine = messages.view(world, -1)[rank]
        # ``own`` is a view of ``whole``, which decoding overwrites, so encode it first.
        self.codec.encode_(mine, own)
        for _ in self._send(messages, mine, unit):
            yield
            # The messages were allocated on the previous comm stream. See [Note: memory on several streams].
            used_here(messages)
        _decode_(self.codec, messages, whole, world)

    def _send(self, whole: Tensor, own: Tensor, unit: str) -> Iterator[None]:
        name = _name_of(self.codec, whole.dtype)
        if len(self.hops) == 1:
            self.hops[0].all_gather(whole, own, self.hops[0].gather_key(unit, name))
            return
        cross, local = self.hops
        # FSDP2 orders parts by rank, and the ranks of a node are consecutive: [nodes, ranks per node, n].
        grid = whole.view(cross.size, local.size, -1)
        # The parts from other nodes are not adjacent in ``grid``, but a collective writes one contiguous range.
        column = grid.new_empty(cross.size, grid.size(2))
        column[cross.index].copy_(own)
        cross.all_gather(column.view(-1), column[cross.index], cross.gather_key(unit, name))
        yield
        used_here(column)
        grid[:, local.index].copy_(column)
        # One collective per source node. A single collective would place all parts of one rank together, in the wrong
        # order.
        for node in grid.unbind():
            local.all_gather(node.view(-1), node[local.index], local.gather_key(unit, name))


class GatherComm(AllGather):
    """The all-gather of one unit: FSDP2 calls it on its own streams, and its hops run on comm streams.

    FSDP2 keeps the result alive until it is copied out, and its streams wait for the copy before they reuse the memory.
    So the allocator needs no record of the comm streams: see [Note: FSDP2's order].

    Args:
        unit: name of the unit for the ledger.
        routes: route of each process group that the unit is sharded over at some time.
        comm_streams: comm streams of gathers.
        before: function that is called before each gather.
        waiting: monitor that reports hops that do not end.
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
        """Return uninitialized memory for a gathered unit, and record the stream on which FSDP2 fills its input."""
        self._filled_on = callers_stream(device)
        # FSDP2's default allocates the same. FSDP2 writes this rank's part into the result, and passes both to
        # ``__call__``.
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Start filling ``output_tensor`` from every rank's ``input_tensor``.

        Args:
            output_tensor: output [ranks * n].
            input_tensor: this rank's part [n], a view of ``output_tensor``.
            group: process group that the parameters are sharded over at the moment.
            async_op: True if the caller waits for a returned work.

        Returns:
            A work to wait for, with ``async_op`` and always on CPU. Otherwise None, and the calling stream waits. None
            for an empty input, too.

        Raises:
            RuntimeError: with a codec, the unit's parameters have several dtypes, which they had not when the hooks
                were installed; an earlier hop has timed out; or an error of ``before``.
        """
        self.before()
        # After forward, FSDP2 may shard parameters over a smaller group, and then passes that group.
        route = self.routes[group]
        # FSDP2 pads shards to equal size, so they are empty on all ranks or on none.
        if not input_tensor.numel():
            return None
        # If the dtypes of a unit differ at a gather, FSDP2 sends the parameters as bytes (uint8).
        if route.codec is not None and not input_tensor.is_floating_point():
            raise RuntimeError(
                f"{self.unit}: FSDP2 sends {input_tensor.dtype}, since its parameters have had several dtypes since "
                "zeropp.fsdp2.apply was called; expected one floating dtype. Change dtypes before, or remove() and "
                "apply with weights=None"
            )
        part = route.gather(output_tensor, input_tensor, group.rank(), self.unit)
        with self._filled_on:
            event = queue(self.comm_streams, route.links, part, f"the gather of {self.unit}", self.waiting)
        # On a GPU without async_op, return None: given a work, FSDP2 makes the next gather wait for this gather's
        # copy-out. On CPU, FSDP2's events do nothing, so without a work the host would have to wait here.
        if async_op or not output_tensor.is_cuda:
            return Arrival(event, self.waiting)
        wait_for(event)
        return None


def _name_of(codec: Codec | None, dtype: torch.dtype) -> str:
    """Return the codec's name for the ledger: "bytes" where FSDP2 sends parameters of several dtypes in one buffer."""
    if codec is not None:
        return codec.name
    # Plain values may be sent as bytes, so a mix of dtypes is only refused with a codec.
    return dtype_name(dtype) if dtype.is_floating_point else "bytes"


def _decode_(codec: Codec, messages: Tensor, out: Tensor, count: int) -> None:
    """Decode ``count`` messages of n elements each into ``out`` [count * n], for any n.

    The kernel decodes several messages in one call only if n is a multiple of 256. Otherwise a few messages are decoded
    one by one, and many into a padded buffer that is copied to ``out``.
    """
    numel = out.numel() // count
    if numel % BLOCK == 0:
        codec.decode_(messages, out, count=count)
    elif count <= _MOST_CALLS:
        for message, part in zip(messages.view(count, -1).unbind(), out.view(count, -1).unbind(), strict=True):
            codec.decode_(message, part, count=1)
    else:
        # A message of n elements equals a message of whole blocks with zeros at its end, so decode whole blocks.
        padded = -(-numel // BLOCK) * BLOCK
        whole = torch.empty(count * padded, dtype=out.dtype, device=out.device)
        codec.decode_(messages, whole, count=count)
        out.view(count, numel).copy_(whole.view(count, padded)[:, :numel])
