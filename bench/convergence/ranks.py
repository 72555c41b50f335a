"""Virtual ranks: several ranks' gradients in one process, on the engine's own paths, codecs and feedback.

zeropp's BufferMaker puts together what each rank has of each flat buffer; only the transport is another. A rank is a
thread while gradients are reduced, and a hop's members meet at a barrier and copy from each other's messages. So the
bits are those of as many processes (bench/tests/test_virtual_ranks.py), on CPU and on a card.
"""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from zeropp.comm.hops import Hop, Ledger
from zeropp.comm.process_groups import HOST
from zeropp.comm.streams import CommStreams, InlineStream
from zeropp.config import Config
from zeropp.offload.storage_tiers import MemoryTensor
from zeropp.offload.tier_choice import at_device
from zeropp.optimizer.optimizer_step import ErrorFeedback
from zeropp.params.buffer_maker import BufferMaker
from zeropp.params.unit import FlatBuffer
from zeropp.partition.levels import BufferLayout, HopSpec
from zeropp.setup.blueprint import draw_blueprint

_AT_ONCE = CommStreams(lambda link: InlineStream())
MEETING_SECONDS = 600.0  # a rank that does not come has failed; on a card the first calls compile kernels


class Meeting:
    """Where the members of one hop hand each other the parts of their messages."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=MEETING_SECONDS)
        self._offered: list[list[Tensor]] = [[] for _ in range(size)]

    def swap(self, index: int, into: list[Tensor], out_of: list[Tensor]) -> None:
        """Member ``index`` offers ``out_of[i]`` to member i and copies into ``into[i]`` what i offers it."""
        self._offered[index] = out_of
        self.barrier.wait()
        for source, parts in enumerate(self._offered):
            if source != index:
                into[source].copy_(parts[index])
        self.barrier.wait()  # what was offered may change from here on


class VirtualHop(Hop):
    """A hop between threads: zeropp's own bytes, but for how parts get from member to member."""

    def __init__(self, spec: HopSpec, meeting: Meeting, rank: int, ledger: Ledger, kind: str) -> None:
        super().__init__(spec, None, "gloo", rank, ledger, kind)  # gloo: part by part
        self._meeting = meeting

    def all_gather(self, out: Tensor, piece: Tensor, unit: str, codec: str) -> None:
        """See :class:`Hop`."""
        self._note(f"{self.spec.outer}->{self.spec.inner}", unit, codec, (self.size - 1) * piece.nbytes)
        self._meeting.swap(self.index, list(out.view(self.size, -1).unbind()), [piece] * self.size)

    def all_to_all(self, message: Tensor, unit: str, codec: str, *, apart: bool = True) -> list[Tensor]:
        """See :class:`Hop`."""
        sent = message.nbytes // self.size * (self.size - 1)
        self._note(f"{self.spec.inner}->{self.spec.outer}", unit, codec, sent)
        parts = list(message.view(self.size, -1).unbind())
        received = list(torch.empty_like(message).view(self.size, -1).unbind())
        received[self.index].copy_(parts[self.index])
        self._meeting.swap(self.index, received, parts)
        return received


@dataclass
class VirtualComm:
    """What BufferMaker asks of a :class:`zeropp.comm.hops.Comm`, for one of the virtual ranks."""

    rank: int
    local: int
    world: int
    meetings: dict[tuple[object, ...], Meeting]  # of all ranks
    ledger: Ledger = field(default_factory=Ledger)
    device: torch.device = HOST

    def hop(self, stream: str, spec: HopSpec) -> VirtualHop:
        """A hop on a meeting that belongs to a stream, as a process group would."""
        meeting = self.meetings.setdefault((stream, spec), Meeting(len(spec.ranks)))
        return VirtualHop(spec, meeting, self.rank, self.ledger, stream)


@dataclass
class Reduced:
    """The gradient of one flat buffer over all virtual ranks.

    Attributes:
        layout: where parameters lie; blocks of 256, cut for the world.
        ranks: the buffer as each rank's engine would have it; their gradients' shards are parts of ``mean``.
        mean: float32 [numel], after :meth:`VirtualRanks.reduce` the mean gradient as it came over the hops.
        exact: float32 [numel], the mean of the ranks' gradients, summed in float32.
    """

    layout: BufferLayout
    ranks: list[FlatBuffer]
    mean: Tensor
    exact: Tensor


class VirtualRanks:
    """Gradients of ``nodes`` x ``local`` ranks that share one model's parameters.

    Args:
        model: its parameters' shapes, dtypes and device count; :meth:`take` reads their ``.grad``.
        config: of zeropp, as each rank would have it.
        nodes, local: number of nodes, and of ranks on each.

    Raises:
        ValueError: the configuration is not one of stage 3 with a shard for every rank.
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
        self._reductions = 0  # of which the ledgers know
        loco = config.zero.zeropp_loco_param
        self.carried = [
            ErrorFeedback(
                SimpleNamespace(trainable_buffers=[b.ranks[rank] for b in self.buffers]), loco.reset_T if loco else 1
            )
            for rank in range(self.world)
        ]
        device = next(model.parameters()).device
        # One thread a rank, or the first ones would wait for the others for ever.
        self._threads = ThreadPoolExecutor(self.world, "rank", _use_device, (device,))

    def _share(self, ranks: list[FlatBuffer]) -> Reduced:
        """Make the ranks' gradient shards parts of one buffer, in the order of pieces."""
        layout, device = ranks[0].layout, ranks[0].device
        mean = torch.zeros(layout.numel, dtype=torch.float32, device=device)
        for buffer in ranks:
            start, stop = buffer.placement.slice_of(layout.numel, self.world)
            buffer.gradient.row = MemoryTensor(mean[start:stop])
        return Reduced(layout, ranks, mean, torch.zeros_like(mean))

    def take(self, rank: int) -> None:
        """Encode, as rank ``rank``, the gradients that a backward left in ``.grad``, and take them away."""
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
        """Send what every rank has taken: ``mean`` and ``exact`` of all buffers are of this step then.

        Raises:
            Exception: what a rank's thread raised.
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
                meeting.barrier.abort()  # the others shall not wait for this one
            raise
        self._messages[rank] = []

    def gradient_bits(self) -> dict[str, float]:
        """Bits of an element on each class of link, "local" and "cross": what was sent by what there was to send."""
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
        """Errors carried over on every rank."""
        return {"carried": [carried.state_dict() for carried in self.carried]}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Take back what :meth:`state_dict` gave."""
        for carried, saved in zip(self.carried, state["carried"], strict=True):
            carried.load_state_dict(saved)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()


def _use_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
