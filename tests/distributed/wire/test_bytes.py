"""The ledger counts the bytes that formulas from the layout give, and the network device carries the ledger's bytes."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
import torch.distributed as dist

import zeropp
from tests.support.branching_models import make_config
from tests.support.network_namespace import ROOT, UNDER, beside, private_network
from tests.support.rank_pool import run_ranks
from tests.support.uneven_units import Uneven
from zeropp.comm.hops import Ledger
from zeropp.partition.levels import BLOCK

SCRIPT = ROOT / "tests" / "support" / "step_bytes_job.py"
Traffic = dict[tuple[str, str, str, str], tuple[int, int]]  # (unit, kind, hop, link) -> (calls, bytes sent)


def traffic(ledger: Ledger) -> Traffic:
    """Return (calls, bytes sent) for each (unit, kind, hop, link) in a ledger."""
    return {(r.unit, r.kind, r.hop, r.link): (r.calls, r.bytes) for r in ledger.rows}


def one_step(settings: dict[str, object], warm: int, micro: int = 1) -> tuple[Traffic, dict[str, list[int]], list[int]]:
    """Train ``warm + 1`` steps, and return the traffic of the last one.

    Args:
        settings: keys for ``make_config``.
        warm: number of steps before the step that is counted.
        micro: micro-batches per step.

    Returns:
        The traffic; for each unit, the elements of its parameters; the number of units and the number of trainable
        parameters, which the vector of the step sync has entries for.
    """
    model = Uneven()
    config = make_config(reuse=0, gradient_accumulation_steps=micro, **settings)
    optimizer = zeropp.ZeroOptimizer(
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1), model, config
    )
    ledger = optimizer.engine.comm.ledger
    for _ in range(warm + 1):
        optimizer.engine.wait_for_refresh()
        dist.barrier()
        ledger.reset()
        optimizer.zero_grad()
        for _ in range(micro):
            optimizer.backward(model(torch.randn(2, 12)).square().mean())
        optimizer.step()
    optimizer.engine.wait_for_refresh()
    sizes = {unit.name: [p.numel() for p in unit.parameters] for unit in optimizer.engine.units}
    trainable = sum(len(buffer.parameters) for buffer in optimizer.engine.trainable_buffers)
    return traffic(ledger), sizes, [len(optimizer.engine.units), trainable]


def padded(sizes: list[int], world: int) -> int:
    """Return the elements of a flat buffer for parameters of these sizes.

    Each parameter starts at a multiple of 256 elements, and the slice of each rank is a multiple of 256 elements.
    """
    blocks = sum(-(-size // BLOCK) for size in sizes)
    return -(-blocks // world) * world * BLOCK


def formula(
    world: int,
    local: int,
    sizes: dict[str, list[int]],
    itemsize: int,
    wire: int,
    persistent: set[str],
    frozen: set[str],
    backwards: int = 1,
) -> Traffic:
    """Return the traffic of one rank in one step.

    On a gather hop of n ranks, a rank sends n - 1 times its piece. On a reduce hop, it sends (n - 1) / n of the
    message.

    Args:
        world: number of ranks.
        local: ranks per node.
        sizes: for each unit, the elements of its parameters.
        itemsize: bytes per element in gathers.
        wire: bytes per element in reductions.
        persistent: names of persistent units, which are refreshed once per step.
        frozen: names of frozen units, which have no reductions.
        backwards: number of backwards per step.
    """
    nodes = world // local
    gather = [(world, local, nodes, "cross"), (local, 1, local, "local")]
    if local in (1, world):
        gather = [(world, 1, world, "local" if local == world else "cross")]
    found: Traffic = {}
    for unit, parameters in sizes.items():
        numel = padded(parameters, world)
        calls = 1 if unit in persistent else 2 * backwards
        for outer, inner, n, link in gather:
            piece = numel // outer * itemsize
            kind = "refresh" if unit in persistent else "gather"
            found[unit, kind, f"{outer}->{inner}", link] = (calls, calls * (n - 1) * piece)
            if unit not in frozen:
                message = numel // inner * wire
                found[unit, "reduce", f"{inner}->{outer}", link] = (backwards, backwards * message // n * (n - 1))
    return found


# Number of ranks, ranks per node, settings, bytes per element in gathers, bytes per element in reductions, warm-up
# steps.
CASES = {
    "two": (2, 2, {}, 4, 4, 2),
    "two-no-prefetch": (2, 2, {"prefetch": 0}, 4, 4, 2),
    "two-while-learning": (2, 2, {}, 4, 4, 0),
    "two-nodes-of-one": (2, 1, {}, 4, 4, 2),
    "one-by-four": (4, 4, {}, 4, 4, 1),
    "two-by-two": (4, 2, {}, 4, 4, 1),
    "two-by-two-bf16": (4, 2, {"bf16": {"enabled": True}}, 2, 2, 1),
    "two-by-two-fp32-wire": (4, 2, {"bf16": {"enabled": True}, "communication_data_type": "fp32"}, 2, 4, 1),
    "four-by-one": (4, 1, {"bf16": {"enabled": True}}, 2, 2, 1),
}


def named(found: Traffic, *, control: bool) -> Traffic:
    """Return the control traffic, or all other traffic."""
    return {key: value for key, value in found.items() if (key[1] == "control") is control}


@pytest.mark.every(6)
@pytest.mark.parametrize("name", CASES)
def test_the_ledger_follows_the_formulas(name: str) -> None:
    world, local, settings, itemsize, wire, warm = CASES[name]
    for rank, (found, sizes, _) in enumerate(run_ranks(world, one_step, settings, warm, local_world_size=local)):
        frozen = {unit for unit in sizes if unit.startswith("frozen")}
        assert len(sizes) == 4 and len(frozen) == 1
        wanted = formula(world, local, sizes, itemsize, wire, set(), frozen)
        assert named(found, control=False) == wanted, f"rank {rank}"


@pytest.mark.every(2)
@pytest.mark.parametrize(("world", "local"), [(4, 2), (2, 2)])
def test_persistent_units_are_gathered_once_a_step(world: int, local: int) -> None:
    """Frozen persistent weights never change, so they are not refreshed."""
    settings = {"persist": 700}
    for found, sizes, _ in run_ranks(world, one_step, settings, 2, local_world_size=local):
        persistent = {unit for unit in sizes if unit.startswith("persistent")}
        frozen = {unit for unit in sizes if unit.startswith("frozen")}
        assert persistent and len(sizes) > len(persistent)
        wanted = formula(world, local, sizes, 4, 4, persistent, frozen)
        assert named(found, control=False) == wanted


# Settings, and the traffic of a trained unit in a step of four micro-batches: kind, hop and calls. There are two nodes
# of two ranks, so hops from or to level 4 cross nodes.
PLACED: dict[str, tuple[dict[str, object], str]] = {
    "stage 0": ({"stage": 0}, "reduce 1->2 1, reduce 2->4 1, reduce 4->2 1, reduce 2->1 1"),
    "stage 1": ({"stage": 1}, "refresh 4->2 1, refresh 2->1 1, reduce 1->2 1, reduce 2->4 1"),
    "stage 2": ({"stage": 2}, "refresh 4->2 1, refresh 2->1 1, reduce 1->2 4, reduce 2->4 4"),
    "stage 3": ({}, "gather 4->2 8, gather 2->1 8, reduce 1->2 4, reduce 2->4 4"),
    "deferred": ({"defer_cross_reduction": True}, "gather 4->2 8, gather 2->1 8, reduce 1->2 4, reduce 2->4 1"),
    "hpz": ({"zero_hpz_partition_size": 2}, "refresh 4->2 1, gather 2->1 8, reduce 1->2 4, reduce 2->4 4"),
    "hpz deferred": (
        {"zero_hpz_partition_size": 2, "defer_cross_reduction": True},
        "refresh 4->2 1, gather 2->1 8, reduce 1->2 4, reduce 2->4 1",
    ),
    "mics": ({"mics_shard_size": 2}, "gather 2->1 8, reduce 1->2 4, reduce 2->4 1, reduce 4->2 1"),
    "mics 1": ({"mics_shard_size": 1}, "reduce 1->2 1, reduce 2->4 1, reduce 4->2 1, reduce 2->1 1"),
}


def placed(unit: str, numel: int, hops: str) -> Traffic:
    """Return the traffic of one rank for one float32 unit.

    Each hop connects two ranks. A rank sends half of the elements that both have after a gather, or before a reduction.

    Args:
        unit: name of the unit; a frozen one has gathers only.
        numel: elements of the unit.
        hops: kind, hop and calls of each hop, as in ``PLACED``.
    """
    found: Traffic = {}
    for kind, hop, calls in (text.split() for text in hops.split(", ")):
        if not unit.startswith("frozen") or kind == "gather":
            level = min(map(int, hop.split("->")))
            link = "cross" if "4" in hop else "local"
            found[unit, kind, hop, link] = int(calls), int(calls) * numel // level // 2 * 4
    return found


@pytest.mark.parametrize("name", PLACED)
def test_each_placement_sends_the_bytes_of_its_levels(name: str) -> None:
    """Steps have four micro-batches, so that hops used once per step differ from hops used in each micro-batch."""
    settings, hops = PLACED[name]
    for rank, (found, sizes, _) in enumerate(run_ranks(4, one_step, settings, 2, 4, local_world_size=2)):
        wanted: Traffic = {}
        for unit, parameters in sizes.items():
            wanted |= placed(unit, padded(parameters, 4), hops)
        assert named(found, control=False) == wanted, f"rank {rank}"


def test_a_replica_over_nodes_gathers_by_hops_or_at_once() -> None:
    """With one rank per node and shards over two ranks, a gather is one hop between two nodes."""
    for found, sizes, _ in run_ranks(4, one_step, {"mics_shard_size": 2}, 2, local_world_size=1):
        (unit,) = [name for name in sizes if name.startswith("frozen")]
        assert found[unit, "gather", "2->1", "cross"] == (2, 2 * padded(sizes[unit], 4) // 2 * 4)


def test_accumulation_reduces_every_micro_batch() -> None:
    for found, sizes, _ in run_ranks(2, one_step, {}, 2, 3):
        frozen = {unit for unit in sizes if unit.startswith("frozen")}
        assert named(found, control=False) == formula(2, 2, sizes, 4, 4, set(), frozen, backwards=3)


def test_control_traffic_is_one_small_vector_a_step() -> None:
    """Each step sums one vector, the step sync's, and one float32, which shows if all gradients are finite.

    The vector is float64: the squared norm, two hashes of three numbers, five flags, a flag per unit, and a flag per
    trainable parameter.
    """
    for found, _, (units, trainable) in run_ranks(4, one_step, {}, 2, local_world_size=2):
        ((_, calls_bytes),) = named(found, control=True).items()
        nbytes = 8 * (12 + units + trainable)
        assert calls_bytes == (2, 2 * 3 * nbytes // 4 + 2 * 3 * 4 // 4)


def totals(settings: dict[str, object]) -> tuple[dict[str, int], int, list[int]]:
    """Return the bytes by class of link, the total bytes and the calls of each row, from one step's report."""
    model = Uneven()
    optimizer = zeropp.ZeroOptimizer(
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1), model, make_config(**settings)
    )
    model(torch.randn(2, 12)).sum().backward()
    optimizer.step()
    report = zeropp.comm_report(model)
    links = Counter[str]()
    for row in report.rows:
        links[row.link] += row.bytes
    assert report.bytes_by_link() == dict(links)
    assert f"{report.total_bytes:,}" in str(report)
    calls = [row.calls for row in report.rows]
    return report.bytes_by_link(), report.total_bytes, calls


def test_the_report_adds_up() -> None:
    """One rank without torch.distributed sends nothing."""
    for links, total, calls in run_ranks(4, totals, {}, local_world_size=2):
        assert sum(links.values()) == total
        assert links["cross"] > 0 and links["local"] > links["cross"] / 2 and min(calls) > 0
    assert run_ranks(1, totals, {}, init=False) == [({}, 0, [])]


def check_the_device(tcp: str | None, busy: bool, *, ranks: int, local: int, dtype: str) -> None:
    """Compare the ledger with the counters of the network device.

    The model has 5 M parameters, so that barriers and the vector of the step sync are below a thousandth of the bytes.

    Args:
        tcp: TCP congestion control; None for the default choice.
        busy: True to keep a core busy meanwhile.
        ranks: number of ranks.
        local: ranks per node.
        dtype: compute dtype, "fp32" or "bf16".
    """
    with private_network(tcp) as network, beside(busy):
        done = network.torchrun(SCRIPT, str(local), "3", dtype, ranks=ranks)
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["ledger"] > 50e6
    assert found["payload"] / found["ledger"] <= 1.002, found
    assert found["most"] / found["ledger"] >= 0.998, found


@pytest.mark.campaign
@pytest.mark.root
@pytest.mark.parametrize(("tcp", "busy"), UNDER)
def test_the_device_carries_the_bytes_of_the_ledger(tcp: str | None, busy: bool) -> None:
    check_the_device(tcp, busy, ranks=2, local=2, dtype="fp32")


@pytest.mark.campaign
@pytest.mark.root
@pytest.mark.parametrize(("tcp", "busy"), UNDER)
def test_the_device_carries_the_bytes_of_the_ledger_of_two_nodes(tcp: str | None, busy: bool) -> None:
    check_the_device(tcp, busy, ranks=4, local=2, dtype="bf16")


def state_traffic() -> tuple[list[tuple[str, int]], int]:
    """Return (codec, bytes) of the gathers of a state dict with bf16 weights, and the bytes of one shared edit."""
    model = Uneven()
    config = make_config(bf16={"enabled": True})
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, config)
    ledger = optimizer.engine.comm.ledger
    optimizer.engine.wait_for_refresh()
    ledger.reset()
    zeropp.full_state(model)
    rows = [row for row in ledger.rows if row.kind == "gather"]
    assert all(row.unit.endswith(" <state>") for row in rows)
    codecs = {row.codec for row in rows}
    sent = [(codec, sum(row.bytes for row in rows if row.codec == codec)) for codec in sorted(codecs)]
    parameter = next(parameter for parameter in model.parameters() if parameter.requires_grad)
    with zeropp.zero.GatheredParameters([parameter], modifier_rank=1), torch.no_grad():
        parameter.mul_(2)
    return sent, sum(row.bytes for row in ledger.rows if row.unit == "<broadcast>")


def test_traffic_of_states_and_edits_is_counted_in_its_own_codec() -> None:
    model = Uneven()
    first = next(parameter for parameter in model.parameters() if parameter.requires_grad)
    for rank, (sent, shared) in enumerate(run_ranks(2, state_traffic)):
        assert [codec for codec, _ in sent] == ["fp32"], "main weights travel in float32"
        assert sent[0][1] >= 4 * sum(p.numel() for p in model.parameters() if p.requires_grad) // 2
        assert shared == (4 * first.numel() if rank == 1 else 0)
