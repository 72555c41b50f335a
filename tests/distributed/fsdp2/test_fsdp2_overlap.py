"""Hops of different units of zeropp.fsdp2 overlap: a hop of one unit can wait until a hop of another unit begins.

Also the limit on reductions in flight, errors of hops, and the lifetime of the memory that hops use. Unless a test says
otherwise, the job has two nodes of two ranks.
"""

from __future__ import annotations

import gc
import threading
import weakref
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.fsdp2_models import PLAIN, buffers, gradients, hooks, sharded
from tests.support.fsdp2_reference import tokens
from tests.support.rank_pool import run_ranks
from zeropp import fsdp2
from zeropp.comm.hops import Hop, TrafficKey
from zeropp.comm.process_groups import CollectiveError
from zeropp.fsdp2.shards import parameter_groups
from zeropp.wire import paths

PATIENCE = 8.0  # seconds after which the test fails because hops do not overlap
SIZE = 700


class Gate:
    """Wrapper of two hops: one unit's hop waits until another unit's hop begins."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.begun = threading.Event()

    def opened_by(self, hop: Hop, unit: str) -> None:
        """Let the gate open when ``hop`` begins for ``unit``."""

        def before(name: str) -> None:
            if name == unit:
                self.begun.set()

        self._watch(hop, before)

    def holds(self, hop: Hop, unit: str) -> None:
        """Let ``hop`` wait for the gate when it begins for ``unit``; raise an error after ``PATIENCE`` seconds."""

        def before(name: str) -> None:
            if name == unit and not self.begun.wait(PATIENCE):
                raise AssertionError(f"hops do not overlap: {unit} waited {PATIENCE:g} s for the other; {self.log}")

        self._watch(hop, before)

    def _watch(self, hop: Any, before: Any) -> None:
        for kind in ("all_gather", "all_to_all"):
            setattr(hop, kind, self._watched(getattr(hop, kind), hop, before))

    def _watched(self, send: Any, hop: Hop, before: Any) -> Any:
        def sent(*args: Any, **options: Any) -> Any:
            unit = args[-2]
            self.log.append(f"{unit} {hop.spec.link} begins")
            before(unit)
            result = send(*args, **options)
            self.log.append(f"{unit} {hop.spec.link} ends")
            return result

        return sent


def gathers_ahead(settings: dict[str, Any]) -> bool:
    """Gather both blocks ahead; the intra-node hop of block 0 waits for the inter-node hop of block 1.

    Returns:
        True if the loss equals the loss without the gate.
    """
    losses = []
    for gated in (False, True):
        model = sharded()
        model.set_modules_to_forward_prefetch(list(model.blocks))
        fsdp2.apply(model, **settings)
        if gated:
            gather, _, group = hooks(model)
            cross, local = gather.routes[group].hops
            gate = Gate()
            gate.opened_by(cross, "blocks.1")
            gate.holds(local, "blocks.0")
        losses.append(model(tokens(0, dist.get_rank())).detach())
    return torch.equal(*losses)


@pytest.mark.every(2)
@pytest.mark.parametrize("settings", [{}, PLAIN], ids=["coded", "plain"])
def test_gathers_of_two_units_overlap(settings: dict[str, Any]) -> None:
    assert run_ranks(4, gathers_ahead, settings, local_world_size=2) == [True] * 4


def reductions_at_once(settings: dict[str, Any], gated: bool) -> list[Tensor]:
    """Start both reductions before waiting for a result, as FSDP2 does on a GPU.

    Args:
        settings: arguments of ``fsdp2.apply``.
        gated: True to hold the inter-node hop of block 0 until the reduction of block 1 begins. False to run one
            reduction after the other.

    Returns:
        The two results.
    """
    rank, model = dist.get_rank(), sharded()
    fsdp2.apply(model, **settings)
    comms = [hooks(block)[1] for block in model.blocks]
    _, _, group = hooks(model.blocks[0])
    if gated:
        local, cross = comms[0].route.hops
        gate = Gate()
        gate.opened_by(local, "blocks.1")
        gate.holds(cross, "blocks.0")
    outs = [torch.empty(SIZE) for _ in comms]
    for factor, comm, out in zip((1, 2), comms, outs, strict=True):
        comm(out, (factor * buffers(SIZE, torch.float32)[rank]).view(-1), group, dist.ReduceOp.AVG)
        if not gated:
            comm.finish_reduction(out)
    for comm, out in zip(comms, outs, strict=True):
        comm.finish_reduction(out)
    return outs


@pytest.mark.every(2)
@pytest.mark.parametrize("settings", [{"gradient_bits": (8, 4)}, PLAIN], ids=["coded", "plain"])
def test_reductions_of_two_units_overlap(settings: dict[str, Any]) -> None:
    apart, together = (run_ranks(4, reductions_at_once, settings, on, local_world_size=2) for on in (False, True))
    for one, other in zip(apart, together, strict=True):
        assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def gathered_while_reducing() -> list[str]:
    """Let the gather of block 0, which FSDP2 starts ahead in backward, wait for the reduction of block 1.

    Returns:
        Names of the parameters whose gradients differ from those without the gate.
    """
    found = []
    for gated in (False, True):
        model = sharded()
        fsdp2.apply(model)
        loss = model(tokens(0, dist.get_rank()))
        if gated:
            gather, reduce, group = hooks(model)
            gate = Gate()
            gate.opened_by(reduce.route.hops[0], "blocks.1")
            gate.holds(gather.routes[group].hops[0], "blocks.0")
        loss.backward()
        found.append(gradients(model))
    return [name for name, value in found[0].items() if not torch.equal(value, found[1][name])]


def test_a_gather_overlaps_with_a_reduction() -> None:
    assert run_ranks(4, gathered_while_reducing, local_world_size=2) == [[]] * 4


def third_in_line() -> list[bool]:
    """Return [True] if a third reduction is queued while the first one has not finished its inter-node hop."""
    rank, model, queued, seen = dist.get_rank(), sharded(), threading.Event(), []
    fsdp2.apply(model)
    comms = [hooks(part)[1] for part in (*model.blocks, model)]
    _, _, group = hooks(model)
    cross: Any = comms[0].route.hops[1]
    send = cross.all_to_all

    def held(message: Tensor, key: TrafficKey, **options: Any) -> list[Tensor]:
        if key.unit == "blocks.0":
            seen.append(queued.wait(0.5))
        return send(message, key, **options)

    cross.all_to_all = held
    outs = [torch.empty(SIZE) for _ in comms]
    for comm, out in zip(comms, outs, strict=True):
        comm(out, buffers(SIZE, torch.float32)[rank].view(-1), group, dist.ReduceOp.AVG)
    queued.set()
    for comm, out in zip(comms, outs, strict=True):
        comm.finish_reduction(out)
    return seen


def test_two_reductions_are_under_way_at_most() -> None:
    """The limit bounds the memory of messages in flight."""
    assert run_ranks(4, third_in_line, local_world_size=2) == [[False]] * 4


def broken_hops(error: Exception) -> list[str]:
    """Return the errors of a forward, of a later gather and of a backward after a hop of one unit has failed.

    Args:
        error: error that the hop raises.
    """
    said, batch = [], tokens(0, dist.get_rank())

    def broken(*args: Any, **options: Any) -> None:
        raise error

    model = sharded()
    fsdp2.apply(model)
    gather, _, group = hooks(model)
    gather.routes[group].hops[1].all_gather = broken
    out = torch.ones(4 * SIZE)
    for call in (lambda: model(batch), lambda: gather(out, out[:SIZE], group).wait()):
        with pytest.raises((ValueError, RuntimeError)) as caught:
            call()
        said.append(str(caught.value))
    model = sharded()
    fsdp2.apply(model)
    loss = model(batch)
    hooks(model)[1].route.hops[1].all_to_all = broken
    with pytest.raises((ValueError, RuntimeError)) as caught:
        loss.backward()
    return [*said, str(caught.value)]


def test_errors_of_hops_reach_the_caller() -> None:
    """Errors of a hop reach the caller unchanged. If a rank is absent, the error names the collective and the unit."""
    for said in run_ranks(4, broken_hops, ValueError("own"), local_world_size=2):
        assert said == ["own"] * 3
    for said in run_ranks(4, broken_hops, CollectiveError("Connection closed by peer"), local_world_size=2):
        gathers, reduction = "not come to the gather of (root)", "not come to the reduction of blocks.1"
        assert gathers in said[0] and gathers in said[1] and reduction in said[2]


def alone() -> str:
    """Return the error of a forward that the last of four ranks does not run."""
    model = sharded()
    # apply is collective with the same limit of 3 seconds. The first import of torch's sharding modules takes seconds
    # on a busy machine, so wait for all ranks before apply.
    dist.barrier()
    fsdp2.apply(model, hang_timeout=3.0)
    if dist.get_rank() == 3:
        return ""
    with pytest.raises(RuntimeError) as caught:
        model(tokens(0, 0))
    return str(caught.value)


def test_a_rank_that_does_not_come_ends_the_others_wait() -> None:
    *others, _ = run_ranks(4, alone, local_world_size=2)
    assert all("not come to the gather of (root), which is collective" in said for said in others), others


def message_of_the_caller() -> list[bool]:
    """Drop FSDP2's buffer before the hop has read it.

    With one hop of plain values, FSDP2's own buffer is the message, without a copy.

    Returns:
        Three flags: the buffer exists when the hop reads it, the result is right, and the buffer is free after the next
        reduction.
    """
    rank, model, dropped, found = dist.get_rank(), sharded(), threading.Event(), []
    fsdp2.apply(model, **PLAIN)
    _, reduce, group = hooks(model)
    (hop,) = reduce.route.hops
    send = hop.all_to_all
    given = buffers(SIZE, torch.float32)[rank].view(-1)
    expected = torch.stack(buffers(SIZE, torch.float32)).mean(0)[rank]
    watch = weakref.ref(given)

    def held(*args: Any, **options: Any) -> list[Tensor]:
        assert dropped.wait(PATIENCE)
        found.append(watch() is not None)
        return send(*args, **options)

    hop.all_to_all = held
    out = torch.empty(SIZE)
    reduce(out, given, group, dist.ReduceOp.AVG)
    del given
    gc.collect()
    # If the buffer were free, these tensors would reuse its memory, and the result would be NaN.
    others = [torch.full((4 * SIZE,), torch.nan) for _ in range(8)]
    dropped.set()
    reduce.finish_reduction(out)
    found.append(torch.allclose(out, expected, atol=1e-6))
    # After its next work, the comm stream must not keep a reference to the buffer of the previous one.
    hop.all_to_all = send
    reduce(out, others[0], group, dist.ReduceOp.AVG)
    reduce.finish_reduction(out)
    return [*found, watch() is None]


def test_the_buffer_that_a_hop_reads_is_kept_until_the_hop_ends() -> None:
    assert run_ranks(4, message_of_the_caller, local_world_size=4) == [[True, True, True]] * 4


class FakeStreams:
    """Recorder of the memory that hops use, in place of the allocator of a GPU.

    Attributes:
        named: (thread name, data pointer) of each storage that was passed to ``used_here``.
        taken: (thread name, data pointer) of each storage that a hop received.
    """

    def __init__(self) -> None:
        self.named: set[tuple[str, int]] = set()
        self.taken: list[tuple[str, int]] = []

    def name(self, tensor: Tensor) -> None:
        """Record that memory is marked as used on the current thread; a replacement of ``used_here``."""
        self.named.add((threading.current_thread().name, tensor.untyped_storage().data_ptr()))

    def watch(self, hop: Any) -> None:
        """Record the memory that a hop receives."""
        for kind in ("all_gather", "all_to_all"):
            setattr(hop, kind, self._noting(getattr(hop, kind)))

    def _noting(self, send: Any) -> Any:
        def noted(first: Tensor, *args: Any, **options: Any) -> Any:
            self.taken.append((threading.current_thread().name, first.untyped_storage().data_ptr()))
            return send(first, *args, **options)

        return noted


def named_memory(settings: dict[str, Any]) -> list[bool]:
    """Return one flag per use of memory on another stream than the one that allocated it.

    A flag is True if the memory is marked as used there with ``used_here``, or is the gather's result, which FSDP2
    keeps alive. The uses are on comm streams and on FSDP2's stream.
    """
    comm_streams, model, rank = FakeStreams(), sharded(), dist.get_rank()
    modules = (fsdp2.gather, fsdp2.reduce, paths)
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(module, "used_here", comm_streams.name)
        fsdp2.apply(model, **settings)
        gather, reduce, group = hooks(model)
        for hop in (*gather.routes[group].hops, *reduce.route.hops):
            comm_streams.watch(hop)
        out = gather.allocate((4 * SIZE,), dtype=torch.float32, device=torch.device("cpu"))
        whole = out.fill_(1.0).untyped_storage().data_ptr()
        gather(out, out[rank * SIZE : (rank + 1) * SIZE], group).wait()
        (_, column), *inside = comm_streams.taken
        found = [("zeropp fsdp2 gather local", column) in comm_streams.named]
        # FSDP2 keeps the gather's result alive until it is copied out, so the result itself needs no mark.
        found += [taken[1] == whole or taken in comm_streams.named for taken in inside]
        comm_streams.taken.clear()
        out = torch.empty(SIZE)
        reduce(out, buffers(SIZE, torch.float32)[rank].view(-1), group, dist.ReduceOp.AVG)
        total = reduce._pending.total
        reduce.finish_reduction(out)
        found += [taken in comm_streams.named for taken in comm_streams.taken]
        main = threading.current_thread().name
        found += [(main, each.untyped_storage().data_ptr()) in comm_streams.named for each in (out, total)]
    return found


@pytest.mark.every(2)
@pytest.mark.parametrize("settings", [{}, PLAIN], ids=["coded", "plain"])
def test_memory_on_several_streams_is_named_there(settings: dict[str, Any]) -> None:
    """See [Note: memory on several streams]. A CPU has no such streams, so the test records the calls."""
    assert run_ranks(4, named_memory, settings, local_world_size=2) == [[True] * 7] * 4


def _note_sum(sums: list[float], out: Tensor) -> None:
    sums.append(float(out.sum()))


def with_a_hook(when: str) -> list[str]:
    """Return the parameters whose gradients differ if the user sets an all-reduce hook.

    The hook must be called for each of the three units, and must stay after ``remove()``.

    Args:
        when: "before" or "after" ``fsdp2.apply``.
    """
    found = []
    for own in (False, True):
        model, sums = sharded(), list[float]()
        for stage in ("before", "after"):
            if own and stage == when:
                for part in (*model.blocks, model):
                    part.set_all_reduce_hook(partial(_note_sum, sums))
            if stage == "before":
                adapter = fsdp2.apply(model)
        model(tokens(0, dist.get_rank())).backward()
        adapter.remove()
        left = hooks(model)[1].__class__.__name__, parameter_groups(model._get_fsdp_state())[0]._all_reduce_hook
        assert left[0] == "DefaultReduceScatter" and (left[1] is not None) == own and len(sums) == 3 * own
        found.append(gradients(model))
    return [name for name, value in found[0].items() if not torch.equal(value, found[1][name])]


@pytest.mark.campaign
@pytest.mark.parametrize("when", ["before", "after"])
def test_beside_an_all_reduce_hook(when: str) -> None:
    assert run_ranks(4, with_a_hook, when, local_world_size=2) == [[]] * 4


def without_gradients() -> bool:
    """Return True if a forward in inference mode gives the loss of a usual forward."""
    model = sharded()
    fsdp2.apply(model)
    batch = tokens(0, dist.get_rank())
    expected = model(batch).detach()
    with torch.inference_mode():
        return torch.equal(model(batch), expected)


def test_in_inference_mode() -> None:
    """Hops run on other threads, and inference mode is per thread, so zeropp must set it there."""
    assert run_ranks(4, without_gradients, local_world_size=2) == [True] * 4
