"""Virtual ranks: gradients of several ranks in one process, through the engine's own paths, codecs and error feedback.

zeropp's BufferMaker builds each rank's buffers. Only the transport is replaced: each rank is a thread while gradients
are reduced, and the members of a hop wait at a barrier and copy from each other's messages. The results are bit for bit
those of separate processes (bench/tests/test_virtual_ranks.py), on CPU and GPU.
"""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from zeropp.comm.hops import Hop, Ledger, TrafficKey
from zeropp.comm.process_groups import HOST
from zeropp.comm.streams import CommStreams, InlineStream
from zeropp.config import Config
from zeropp.offload.tier_choice import at_device
from zeropp.optimizer.optimizer_step import ErrorFeedback
from zeropp.params.buffer_maker import BufferMaker
from zeropp.params.flat_buffer import FlatBuffer
from zeropp.partition.levels import BufferLayout, HopSpec
from zeropp.setup.blueprint import draw_blueprint

_AT_ONCE = CommStreams(lambda link: InlineStream())
MEETING_SECONDS = 600.0  # a rank that takes longer has failed; on a GPU the first calls compile kernels


class Meeting:
    """Exchange of message parts between the members of one hop."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=MEETING_SECONDS)
        self._offered: list[list[Tensor]] = [[] for _ in range(size)]

    def swap(self, index: int, into: list[Tensor], out_of: list[Tensor]) -> None:
        """Copy to ``into[i]`` the part that member i sends to this member; ``out_of[i]`` is the part sent to member i.

        Args:
            index: index of this member in the hop.
            into: tensors to fill, one per member. This member's own entry is not filled.
            out_of: tensors to send, one per member.
        """
        self._offered[index] = out_of
        self.barrier.wait()
        for source, parts in enumerate(self._offered):
            if source != index:
                into[source].copy_(parts[index])
        self.barrier.wait()  # only now may members change their parts


class VirtualHop(Hop):
    """A hop between threads: zeropp's messages, copied from thread to thread instead of sent."""

    def __init__(self, spec: HopSpec, meeting: Meeting, rank: int, ledger: Ledger, kind: str) -> None:
        super().__init__(spec, None, "gloo", rank, ledger, kind)  # with gloo, Hop handles messages part by part
        self._meeting = meeting

    def all_gather(self, out: Tensor, own: Tensor, key: TrafficKey) -> None:
        """Gather the members' slices into ``out``, as :meth:`Hop.all_gather` does."""
        self.ledger.count_call(key, (self.size - 1) * own.nbytes)
        self._meeting.swap(self.index, list(out.view(self.size, -1).unbind()), [own] * self.size)

    def all_to_all(self, message: Tensor, key: TrafficKey, *, apart: bool = True) -> list[Tensor]:
        """Exchange the parts of the members' messages, as :meth:`Hop.all_to_all` does."""
        self.ledger.count_call(key, message.nbytes // self.size * (self.size - 1))
        parts = list(message.view(self.size, -1).unbind())
        received = list(torch.empty_like(message).view(self.size, -1).unbind())
        received[self.index].copy_(parts[self.index])
        self._meeting.swap(self.index, received, parts)
        return received


@dataclass
class VirtualComm:
    """The part of :class:`zeropp.comm.hops.Comm` that BufferMaker uses, for one virtual rank."""

    rank: int
    local: int
    world: int
    meetings: dict[tuple[object, ...], Meeting]  # shared by all virtual ranks
    ledger: Ledger = field(default_factory=Ledger)
    device: torch.device = HOST

    def hop(self, stream: str, spec: HopSpec) -> VirtualHop:
        """Return a hop with a meeting for its kind of work (``stream``) and ranks. Comm keeps groups by kind, too."""
        meeting = self.meetings.setdefault((stream, spec), Meeting(len(spec.ranks)))
        return VirtualHop(spec, meeting, self.rank, self.ledger, stream)


@dataclass
class Reduced:
    """The gradient of one flat buffer over all virtual ranks.

    Attributes:
        layout: offsets of the parameters in the buffer, padding included.
        ranks: one flat buffer for each virtual rank; the gradient shards of these buffers are parts of ``mean``.
        mean: float32 [numel]. After :meth:`VirtualRanks.reduce`, the mean gradient as the hops delivered it.
        exact: float32 [numel]. After :meth:`VirtualRanks.reduce`, the mean of the ranks' gradients, summed in float32.
    """

    layout: BufferLayout
    ranks: list[FlatBuffer]
    mean: Tensor
    exact: Tensor


class VirtualRanks:
    """The gradients of ``nodes * local`` ranks that share one model's parameters.

    Args:
        model: model that gives shapes, dtypes and device; :meth:`take` reads ``.grad`` of its parameters.
        config: zeropp's configuration, equal on all ranks.
        nodes, local: number of nodes, and of ranks per node.

    Raises:
        ValueError: the configuration is not stage 3 with one shard per rank.
    """

    def __init__(self, model: nn.Module, config: Config, nodes: int, local: int) -> None:
        self.world = nodes * local
        drawn = [draw_blueprint(model, config, self.world, local, HOST, rank=rank) for rank in range(self.world)]
        mode = drawn[0].mode
        if mode.states != self.world or mode.cached == 1:
            raise ValueError(f"virtual ranks are for stage 3 without MiCS, got {config.zero.stage=} and {mode}")
        meetings: dict[tuple[object, ...], Meeting] = {}
        self.comms = [VirtualComm(rank, local, self.world, meetings) for rank in range(self.world)]
        parameters = dict(model.named_parameters())
        made = [
            BufferMaker(mode, own.encoding, own.dtypes, comm, at_device(comm.device)).make_units(parameters, own.units)
            for own, comm in zip(drawn, self.comms, strict=True)
        ]
        columns = zip(*([buffer for unit in units for buffer in unit.buffers] for units in made), strict=True)
        self.buffers = [self._share(list(column)) for column in columns]
        self.weight_codec = drawn[0].encoding.weights
        self._meetings = meetings
        self._messages: list[list[Tensor | None]] = [[] for _ in range(self.world)]
        self._reductions = 0  # number of reductions counted in the ledgers
        loco = config.zero.zeropp_loco_param
        self.carried = [
            ErrorFeedback(
                SimpleNamespace(trainable_buffers=[b.ranks[rank] for b in self.buffers]), loco.reset_T if loco else 1
            )
            for rank in range(self.world)
        ]
        device = next(model.parameters()).device
        # One thread per rank: with fewer threads, the first ranks would wait at a barrier for ranks that never start.
        self._threads = ThreadPoolExecutor(self.world, "rank", _use_device, (device,))

    def _share(self, ranks: list[FlatBuffer]) -> Reduced:
        """Make each rank's gradient shard a view of that rank's slice of one buffer."""
        layout, device = ranks[0].layout, ranks[0].device
        mean = torch.zeros(layout.numel, dtype=torch.float32, device=device)
        for buffer in ranks:
            start, stop = buffer.placement.slice_of(layout.numel, self.world)
            buffer.gradient.place_shard(mean[start:stop], transient=False)
        return Reduced(layout, ranks, mean, torch.zeros_like(mean))

    def take(self, rank: int) -> None:
        """Encode the gradients in ``.grad`` as the message of one rank, add them to ``exact``, and clear ``.grad``."""
        if not rank:
            for buffer in self.buffers:
                buffer.exact.zero_()
        self._messages[rank] = []
        for buffer in self.buffers:
            gradients = [parameter.grad for parameter in buffer.ranks[rank].parameters]
            views = buffer.layout.views(buffer.exact)
            there = [(view, g.float()) for view, g in zip(views, gradients, strict=True) if g is not None]
            if there:
                torch._foreach_add_([view for view, _ in there], [gradient for _, gradient in there])
            self._messages[rank].append(buffer.ranks[rank].gradient.pack(1.0, hold=False))

    def reduce(self) -> None:
        """Reduce the messages of all ranks; then ``mean`` and ``exact`` of all buffers belong to this step.

        Raises:
            Exception: the exception of a rank's thread.
        """
        futures = [self._threads.submit(self._reduce_as, rank) for rank in range(self.world)]
        errors = [error for error in (future.exception() for future in futures) if error is not None]
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        for buffer in self.buffers:
            buffer.exact.mul_(1.0 / self.world)
        for carried in self.carried:
            carried.count_step()
        self._reductions += 1

    @torch.no_grad()
    def _reduce_as(self, rank: int) -> None:
        try:
            for buffer, message in zip(self.buffers, self._messages[rank], strict=True):
                gradient = buffer.ranks[rank].gradient
                gradient.drop_sum()
                _AT_ONCE.run_work(gradient.prepare_reduce(message, 1.0 / self.world, hold=False))
        except BaseException:
            for meeting in self._meetings.values():
                meeting.barrier.abort()  # without this, the other ranks would wait for this one
            raise
        self._messages[rank] = []

    def gradient_bits(self) -> dict[str, float]:
        """Return bits per sent element on each class of link, "local" and "cross"."""
        nbytes: Counter[str] = Counter()
        for comm in self.comms:
            nbytes.update(comm.ledger.bytes_by_link())
        numel: Counter[str] = Counter()
        for buffer in self.buffers:
            for hop in buffer.ranks[0].gradient.paths.straight.hops:
                part = buffer.layout.numel // hop.spec.outer
                numel[hop.spec.link] += part * (hop.size - 1) * self.world * self._reductions
        return {link: 8 * nbytes[link] / count for link, count in numel.items() if count}

    def state_dict(self) -> dict[str, object]:
        """Return the error feedback of every rank."""
        return {"carried": [carried.state_dict() for carried in self.carried]}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Load a state of :meth:`state_dict`."""
        for carried, saved in zip(self.carried, state["carried"], strict=True):
            carried.load_state_dict(saved)

    def close(self) -> None:
        """Stop the threads."""
        self._threads.shutdown()


def _use_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
