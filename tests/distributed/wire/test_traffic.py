"""``zeropp.plan.traffic`` predicts each hop, codec and byte of a real step, and the tokens that hide the traffic."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import zeropp
from tests.support.branching_models import make_config
from tests.support.rank_pool import run_ranks
from tests.support.uneven_units import Uneven
from zeropp.comm.hops import TrafficKey

HPZ = {"zero_hpz_partition_size": 2}
BF16 = {"bf16": {"enabled": True}}
LOSSLESS = {"weight_codec": "lossless"}
PP = {**HPZ, "zero_quantized_weights": True, "zero_quantized_gradients": True}
SETTINGS: dict[str, dict[str, object]] = {
    "stage 3": {},
    "stage 0": {"stage": 0, **BF16},
    "stage 1": {"stage": 1, "gradient_accumulation_steps": 3},
    "stage 2": {"stage": 2},
    "persistent": {"persist": 700},
    "hpz, bf16": {**HPZ, **BF16},
    "zero++": PP,
    "zero++, four micro-batches": {**PP, "gradient_accumulation_steps": 4, "defer_cross_reduction": True},
    "zero++, codes, feedback, hadamard": {**PP, "secondary": "codes", "zeropp_loco_param": {}, "hadamard": True},
    "delta4": {**HPZ, **BF16, "weight_codec": "delta4", "zero_quantized_gradients": True},
    "stage 0, plain and coded": {
        **BF16, "stage": 0, "zero_quantized_gradients": True, "gradient_bits": {"local": 4, "cross": 32}
    },
    "stage 0, 32 bits": {
        **BF16, "stage": 0, "zero_quantized_gradients": True, "gradient_bits": {"local": 16, "cross": 32}
    },
    "mics": {"mics_shard_size": 2, "zero_quantized_gradients": True},
    "mics, plain": {"mics_shard_size": 2, "gradient_accumulation_steps": 2},
    "plain gradients of 32 bits": {
        **BF16, "zero_quantized_gradients": True, "gradient_bits": {"local": 32, "cross": 4}
    },
    "frozen codes": {"zero_quantized_nontrainable_weights": True, **HPZ},
}  # fmt: skip

Sent = dict[TrafficKey, tuple[int, int]]  # key of the ledger -> (calls, bytes)


def step(settings: dict[str, object]) -> tuple[Sent, Sent]:
    """Train three steps.

    Args:
        settings: keys for ``make_config``.

    Returns:
        The traffic of the third step, and the predicted traffic. Collectives of all ranks, such as the step sync, are
        left out.
    """
    model = Uneven()
    config = make_config(reuse=0, **settings)
    plan = zeropp.plan.traffic(model, config, dist.get_world_size(), min(2, dist.get_world_size()))
    wanted: Sent = {}
    for row in plan.rows:
        calls, nbytes = wanted.get(row.way, (0, 0))
        wanted[row.way] = calls + row.times, nbytes + row.times * row.nbytes
    inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    optimizer = zeropp.ZeroOptimizer(inner, model, config)
    engine = optimizer.engine
    for _ in range(3):
        engine.wait_for_refresh()
        dist.barrier()
        engine.comm.ledger.reset()
        optimizer.zero_grad()
        for _ in range(plan.micro_batches):
            optimizer.backward(model(torch.randn(2, 12)).float().square().mean())
        optimizer.step()
    engine.wait_for_refresh()
    rows = engine.comm.ledger.rows
    sent = [row for row in rows if row.link != "all"]
    found = {TrafficKey(*(getattr(r, field) for field in TrafficKey._fields)): (r.calls, r.bytes) for r in sent}
    return found, wanted


@pytest.mark.every(24)
@pytest.mark.parametrize("name", SETTINGS)
def test_every_byte_is_planned(name: str) -> None:
    for found, wanted in run_ranks(4, step, SETTINGS[name], local_world_size=2):
        assert found == wanted


@pytest.mark.every(3)
@pytest.mark.parametrize("name", ["stage 3", "stage 0, plain and coded", "stage 0, 32 bits"])
@pytest.mark.parametrize("world", [1, 2])
def test_one_node_and_one_rank(world: int, name: str) -> None:
    """If gradients take a single hop, it has the bits per element that ``gradient_bits`` gives for "cross"."""
    for found, wanted in run_ranks(world, step, SETTINGS[name], local_world_size=world):
        assert found == wanted


def test_exact_differences_are_estimated() -> None:
    """The size of lossless messages depends on the weights, so the plan's estimate is within a factor of 1.4."""
    for found, wanted in run_ranks(4, step, {**HPZ, **BF16, **LOSSLESS}, local_world_size=2):
        assert set(found) == set(wanted)
        for way, (calls, nbytes) in found.items():
            times, expected = wanted[way]
            assert calls == times
            if way.codec != "lossless":
                assert nbytes == expected
        of = [sum(table[way][1] for way in table if way.codec == "lossless") for table in (found, wanted)]
        assert 0.7 < of[0] / of[1] < 1.4


class Square(torch.nn.Module):
    """A layer of ``2**20`` weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(1024, 1024, bias=False)


def test_number_of_tokens_that_hide_traffic_between_nodes() -> None:
    """Forward in bf16 sends 2 bytes per weight for 2 operations per token, backward 4 bytes for 4 operations.

    So traffic is hidden from ``flops / bandwidth * (1 - 1 / nodes)`` tokens on.
    """
    plan = zeropp.plan.traffic(Square(), make_config(**BF16), 4, 2)
    assert plan.between_nodes == 3 * 2 * 2**20 // 2
    assert plan.tokens_to_hide(flops=4e14, bandwidth=5e10) == pytest.approx(4e14 / 5e10 / 2)
    # With hpZ and deferred reductions, the same bytes cross nodes once for four micro-batches.
    deferred = {"gradient_accumulation_steps": 4, "defer_cross_reduction": True}
    longer = zeropp.plan.traffic(Square(), make_config(**BF16, **HPZ, **deferred), 4, 2)
    assert longer.tokens_to_hide(flops=4e14, bandwidth=5e10) == pytest.approx(4e14 / 5e10 / 2 / 4)
    assert "hidden from 16,000 tokens a rank and micro-batch on" in str(plan)
    assert str(plan).endswith("quantizing saves no time and adds that of its kernels")
    assert "hidden" not in str(zeropp.plan.traffic(Square(), make_config(**BF16), 4, 4)), "nothing crosses nodes"
    with pytest.raises(ValueError, match="world is 0"):
        zeropp.plan.traffic(Square(), {}, 0)


def test_a_plan_as_printed() -> None:
    """Weights are gathered twice per step, ``2**18`` per rank with 2 bytes; gradients are reduced once."""
    text = str(zeropp.plan.traffic(Square(), make_config(**BF16), 4, 2))
    assert [line.split(maxsplit=4) for line in text.splitlines()[:5]] == [
        ["gather", "2->1", "local", "bf16", "2,097,152 bytes a rank and step"],
        ["gather", "4->2", "cross", "bf16", "1,048,576 bytes a rank and step"],
        ["reduce", "1->2", "local", "bf16", "1,048,576 bytes a rank and step"],
        ["reduce", "2->4", "cross", "bf16", "524,288 bytes a rank and step"],
        ["between", "nodes", "3,145,728", "bytes", "a node and step"],
    ]
    assert [line.split(" a node")[0] for line in text.splitlines()[5:8]] == [
        f"at 4e+14 FLOP/s a device and {rate} GB/s" for rate in ("12.5", "50", "350")
    ]
    alone = str(zeropp.plan.traffic(Square(), make_config(**BF16), 4, 4)).splitlines()
    assert len(alone) == 3 and alone[2].split(maxsplit=2) == ["between", "nodes", "0 bytes a node and step"]


def test_exact_differences_are_estimated_at_4_9_bits() -> None:
    """A lossless refresh has 4.87 bits per element instead of 16, and 1/32 bit for the starts of its sections.

    4.87 is the mean in docs/convergence.md.
    """
    plans = [zeropp.plan.traffic(Square(), make_config(**BF16, **HPZ, **codec), 4, 2) for codec in ({}, LOSSLESS)]
    plain, lossless = (sum(row.nbytes for row in plan.rows if row.way.kind == "refresh") for plan in plans)
    assert plain == 2 * 2**20 // 4
    assert 0 <= lossless - plain * (4.87 + 1 / 32) / 16 < 128, "messages end at 128 bytes"


def test_tokens_that_hide_frozen_weights() -> None:
    """Backward of a trained weight sends 2 + 4 bytes for 4 operations, of a frozen one 2 bytes for 2 operations."""
    half = torch.nn.Sequential(Square(), Square().requires_grad_(False))
    plan = zeropp.plan.traffic(half, make_config(**BF16, communication_data_type="fp32"), 4, 2)
    assert plan.between_nodes == (2 + 6 + 2 + 2) * 2**20 // 2
    assert plan.tokens_to_hide(flops=4e14, bandwidth=5e10) == pytest.approx(4e14 / 5e10 * (6 + 2) / (4 + 2) / 2)
