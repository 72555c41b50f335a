"""The rehearsal: while a model is wrapped, each collective runs once.

NCCL connects the ranks of a communicator at the first use of each kind of collective, takes memory and loads kernels.
Without a rehearsal this happens in the first step. There one rank could block in the middle of an order of collectives,
and activations leave the least memory. A network that does not work is found here, with the hop that failed.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist

from zeropp.comm.communicators import require_room
from zeropp.comm.hops import Comm, Hop, Ledger
from zeropp.comm.process_groups import name_ranks
from zeropp.comm.streams import issued_here
from zeropp.engine.engine import Engine
from zeropp.params.buffer_maker import Transfer, transfers

__all__ = ["rehearse", "require_room_on_all", "warn_of_no_room"]

_log = logging.getLogger("zeropp")
_ITEM = torch.float64.itemsize  # bytes of one element of the sums over all ranks


def require_room_on_all(comm: Comm, parameters: int) -> None:
    """Call :func:`require_room`, and raise on every rank if it raises on any: GPUs and variables may differ.

    Args:
        comm: process groups of the engine.
        parameters: number of parameters, which gives the size of a step's sum.

    Raises:
        ValueError: the communicators of some rank do not fit on its GPU.
    """
    if comm.device.type != "cuda":
        return
    error: ValueError | None = None
    try:
        require_room(comm.communicators, comm.device, sums_nbytes=_sums(parameters) * comm.uses_users_group)
    except ValueError as caught:
        error = caught
    for rank, told in zip(comm.ranks, comm.all_gather_objects(error and str(error)), strict=True):
        if told is not None:
            raise error or ValueError(f"rank {rank}: {told}")


def warn_of_no_room(comm: Comm, parameters: int) -> None:
    """Log a warning if new communicators do not fit on the GPU. Called after unfreezing, when an error is too late."""
    if len(comm.communicators) > comm.rehearsed:
        try:
            require_room_on_all(comm, parameters)
        except ValueError as error:
            _log.warning("parameters were unfrozen, and since then %s", error)


def rehearse(engine: Engine) -> None:
    """Run each kind of collective of each hop once with its largest message, and once with its smallest.

    Does nothing unless there are new communicators, after wrapping or unfreezing. Collective over the engine's ranks.
    The ledger counts none of it. Groups over gloo are left out, because they connect when they are made.

    Args:
        engine: engine whose collectives are run.

    Raises:
        RuntimeError: a collective failed or did not end within ``hang_timeout``; the text names its hop and ranks.
    """
    comm = engine.comm
    device = engine.device
    if len(comm.communicators) == comm.rehearsed:
        return
    before = _outside(device)
    for transfer in _transfers(engine):
        hop = transfer.hop
        members = name_ranks(comm.ranks[rank] for rank in hop.spec.ranks)
        levels = f"{hop.spec.outer} to {hop.spec.inner}"
        doing = f"the first {transfer.collective} of {members} ({hop.kind}, level {levels})"
        stream = engine.comm_streams[hop.kind][hop.spec.link]
        # Watched from here on, because NCCL connects in the launch, and the launch may not return.
        with engine.agreement.watching(doing), comm.launching(doing):
            event = stream.run(partial(_carry_out, transfer, device))
            engine.agreement.wait_for_event(event.wait, engine.agreement.watching(doing))
        _finish(engine, doing)
    for group, numbers, op in _for_all(engine):
        doing = "the first all_reduce of all ranks"
        with engine.agreement.watching(doing), comm.launching(doing):
            dist.all_reduce(numbers, op, group=group)
        _finish(engine, doing)
    comm.rehearsed = len(comm.communicators)
    if device.type == "cuda":
        # Free cached memory. The allocator would keep it for the comm streams, but training allocates its messages on
        # the compute stream.
        torch.cuda.empty_cache()
        _log.info(
            "rank %d: %d communicators have taken %s bytes outside of torch's allocator for their first collectives",
            comm.rank,
            len(comm.communicators),
            f"{_outside(device) - before:,}",
        )


def _finish(engine: Engine, doing: str) -> None:
    """Wait on the host until the device has finished the collective."""
    with engine.agreement.watching(doing):
        issued_here(engine.device).wait(engine.agreement.hang_timeout)


def _transfers(engine: Engine) -> Iterator[Transfer]:
    """Yield the largest transfer of each kind, and the smallest if it is smaller; in the same order on all ranks."""
    found: dict[tuple[str, int, int, str, torch.dtype], tuple[Transfer, Transfer]] = {}
    for buffer in engine.buffers:
        gradient = buffer.gradient
        for each in transfers(buffer.paths, None if gradient is None else gradient.paths, buffer.layout.numel):
            spec = each.hop.spec
            key = (each.hop.kind, spec.outer, spec.inner, each.collective, each.dtype)
            small, large = found.get(key, (each, each))
            found[key] = min(small, each, key=_nbytes), max(large, each, key=_nbytes)
    for small, large in found.values():
        yield large
        if small.nbytes < large.nbytes:
            yield small


def _nbytes(transfer: Transfer) -> int:
    """Return the size of a transfer in bytes."""
    return transfer.nbytes


def _carry_out(transfer: Transfer, device: torch.device) -> None:
    """Run a transfer with a message of zeros."""
    hop = _uncounted(transfer.hop)
    message = torch.zeros(transfer.nbytes // transfer.dtype.itemsize, dtype=transfer.dtype, device=device)
    if transfer.collective == "all_gather":
        hop.all_gather(message, message.view(hop.size, -1)[hop.index], hop.gather_key("", ""))
    elif transfer.collective == "all_to_all":
        hop.all_to_all(message, hop.reduce_key("", ""))
    else:
        hop.reduce_scatter(message, hop.reduce_key("", ""))


def _uncounted(hop: Hop) -> Hop:
    """Return a copy of a hop with a ledger of its own, so that the engine's ledger counts nothing."""
    other = copy.copy(hop)
    other.ledger = Ledger()
    return other


def _for_all(engine: Engine) -> Iterator[tuple[dist.ProcessGroup | None, torch.Tensor, dist.ReduceOp.RedOpType]]:
    """Yield the sums and maxima over all ranks, which belong to no hop: process group, numbers, operation."""
    # The sums have one element (a flag), or about two for each parameter (the vector of the step sync).
    for nbytes in (_ITEM, _sums(len(engine.unit_of))):
        numbers = torch.zeros(nbytes // _ITEM, dtype=torch.float64, device=engine.device)
        yield engine.comm.world_group, numbers, dist.ReduceOp.SUM
    if any(buffer.paths.counts_escapes for buffer in engine.buffers):
        rooms = torch.zeros(2, dtype=torch.int64, device=engine.device)
        yield engine.comm.all_ranks("refresh"), rooms, dist.ReduceOp.MAX


def _sums(parameters: int) -> int:
    """Return the bytes of a step's sum, which has about two numbers for each parameter."""
    return 2 * parameters * _ITEM


def _outside(device: torch.device) -> int:
    """Return the bytes of a GPU's memory in use outside of torch's allocator; 0 without a GPU."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)
