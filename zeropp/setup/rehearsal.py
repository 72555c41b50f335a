"""Each collective runs once while a model is wrapped.

NCCL connects the ranks of a communicator at the first use of each kind of collective. It takes memory then, and loads
kernels. Without a rehearsal all of that happens in the first step, when one rank may stand still in the middle of an
order of collectives, and when activations leave the least memory. A network that does not work shows here, by the hop.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist

from zeropp.comm.accounts import name_ranks
from zeropp.comm.copies import issued_here
from zeropp.comm.hops import Hop
from zeropp.comm.ledger import Ledger
from zeropp.comm.streams import Lanes
from zeropp.engine.engine import Engine
from zeropp.params.transfers import Transfer, transfers

__all__ = ["rehearse"]

_log = logging.getLogger("zeropp")


def rehearse(engine: Engine) -> None:
    """Run every collective of a training step once, with its largest message, over communicators.

    Collective over the engine's ranks. Nothing is counted in the ledger, and nothing happens over gloo, which connects
    when a group is made.

    Raises:
        RuntimeError: a collective fails, or does not end within ``hang_timeout``: with its hop and ranks.
    """
    comm = engine.comm
    if not comm.communicates:
        return
    before = _outside(engine.device)
    lanes = {"gather": engine.gather_lanes, "refresh": engine.refresh.lanes, "reduce": engine.reduce_lanes}
    for transfer in _largest(engine):
        hop = transfer.hop
        members = name_ranks(comm.ranks[rank] for rank in hop.spec.ranks)
        doing = f"connecting for {transfer.collective} of hop {hop.kind} {hop.spec.outer}->{hop.spec.inner}, {members}"
        _run(engine, lanes[hop.kind], hop.spec.link, partial(_carry_out, transfer, engine.device), doing)
    for group, numbers in _for_all(engine):
        with engine.agreement.watching("connecting for all_reduce of all ranks"):
            dist.all_reduce(numbers, group=group)
            issued_here(engine.device).wait(engine.agreement.hang_timeout)
    if engine.device.type == "cuda":
        _log.info(
            "rank %d: %d communicators have taken %s bytes outside of torch's allocator for their first collectives",
            comm.rank, len(comm.communicators), f"{_outside(engine.device) - before:,}",
        )  # fmt: skip


def _run(engine: Engine, lanes: Lanes, link: str, work: Callable[[], object], doing: str) -> None:
    """Do work on a lane, to its end."""
    with engine.agreement.watching(doing):
        event = lanes.stream(link).run(work)
    engine.agreement.monitors(event, doing)
    engine.agreement.wait(event.wait, doing)
    # On a card that has let the stream wait, and not the host.
    with engine.agreement.watching(doing):
        issued_here(engine.device).wait(engine.agreement.hang_timeout)


def _largest(engine: Engine) -> Iterator[Transfer]:
    """The largest transfer of each kind, in one order on all ranks."""
    found: dict[tuple[str, int, int, str, torch.dtype], Transfer] = {}
    for buffer in engine.buffers:
        gradient = buffer.gradient
        for each in transfers(buffer.paths, None if gradient is None else gradient.paths, buffer.layout.numel):
            spec = each.hop.spec
            key = (each.hop.kind, spec.outer, spec.inner, each.collective, each.dtype)
            if key not in found or found[key].nbytes < each.nbytes:
                found[key] = each
    yield from found.values()


def _carry_out(transfer: Transfer, device: torch.device) -> None:
    """Run a transfer with memory of its own."""
    hop = _uncounted(transfer.hop)
    message = torch.zeros(transfer.nbytes // transfer.dtype.itemsize, dtype=transfer.dtype, device=device)
    if transfer.collective == "all_gather":
        hop.all_gather(message, message.view(hop.size, -1)[hop.index], "", "")
    elif transfer.collective == "all_to_all":
        hop.all_to_all(message, "", "")
    else:
        hop.reduce_scatter(message, "", "")


def _uncounted(hop: Hop) -> Hop:
    """The same hop with a ledger that nobody reads."""
    other = copy.copy(hop)
    other.ledger = Ledger()
    return other


def _for_all(engine: Engine) -> Iterator[tuple[dist.ProcessGroup | None, torch.Tensor]]:
    """Sums and maxima of all ranks, which are of no hop: the group and small numbers."""
    yield engine.comm.world_group, torch.zeros(2, dtype=torch.float64, device=engine.device)
    if any(buffer.paths.counts_escapes for buffer in engine.buffers):
        yield engine.comm.all_ranks("refresh"), torch.zeros(2, dtype=torch.int64, device=engine.device)


def _outside(device: torch.device) -> int:
    """Bytes of a card that are in use and that torch's allocator does not have."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)
