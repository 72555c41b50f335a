"""The estimators against numbers worked out by hand, against plan.memory, and against an engine on one rank."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable

import pytest
import torch
from gpt import GPT, GPTConfig
from torch import nn

import zeropp
from tests.support.owned_memory import owned_bytes
from zeropp.params.unit import Unit
from zeropp.partition.layout import BLOCK

GIB = 2**30
TWO = zeropp.estimate_zero2_model_states_mem_needs
THREE = zeropp.estimate_zero3_model_states_mem_needs
TWO_LIVE = zeropp.estimate_zero2_model_states_mem_needs_all_live
THREE_LIVE = zeropp.estimate_zero3_model_states_mem_needs_all_live
TWO_COLD = zeropp.estimate_zero2_model_states_mem_needs_all_cold
THREE_COLD = zeropp.estimate_zero3_model_states_mem_needs_all_cold
PLAIN: dict[str, object] = {"cpu_offload": False, "additional_buffer_factor": 1}
"""Without offload, the bytes alone."""

Rows = dict[tuple[bool, ...], tuple[float, float]]


def table(text: str) -> Rows:
    """(host, device) in GiB as printed, by the values of the settings in the order of the arguments."""
    rows: Rows = {}
    for line in text.splitlines()[2:]:
        found = re.fullmatch(r" *([\d.]+) GiB \| *([\d.]+) GiB \| (.*)", line)
        assert found is not None, line
        settings = tuple(word == "True" for word in re.findall(r"\w+=(\w+)", found[3]))
        rows[settings] = float(found[1]), float(found[2])
    return rows


def config(stage: int, **keys: object) -> dict[str, object]:
    return {"zero_optimization": {"stage": stage, **keys}, "bf16": {"enabled": True}}


def whole_units(model: nn.Module, world: int) -> zeropp.plan.MemoryPlan:
    return zeropp.plan.memory(model, config(3, stage3_param_persistence_threshold=0), world)


def counted(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def padding(model: nn.Module, units: int, world: int) -> int:
    """Elements that are there, at most, beside the parameters: behind each of them, and at the end of each unit."""
    return sum(-p.numel() % BLOCK for p in model.parameters()) + units * BLOCK * world


def meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


# by hand: 1,024,000 elements, the largest unit has 64,000; two nodes of four ranks, so 128,000 a rank

RANK = 128_000
STEPPED = 16 * RANK + RANK // BLOCK * 4 + 4  # main weights, gradients, two states; norms of blocks, and a flag
WORKING = 8 * 64_000  # two gathered units in 16 bits, and the gradients of one twice
SUMS = 2 * 4 * 64_000 // 8  # two pieces of the sum in float32
MODEL = 4 * 4 * 1_024_000  # built by the four processes of a node
BUILT = 4 * 4 * 64_000  # one unit in each of them


@pytest.mark.parametrize(
    ("settings", "host", "device"),
    [
        ((True, True, True), 4 * (STEPPED + 2 * RANK), SUMS),
        ((True, True, False), MODEL, SUMS),
        ((True, False, True), 4 * STEPPED, 2 * RANK + SUMS),
        ((True, False, False), MODEL, 2 * RANK + SUMS),
        ((False, False, True), BUILT, STEPPED),
        ((False, True, True), BUILT, STEPPED),
        ((False, False, False), MODEL, STEPPED),
    ],
)
@pytest.mark.parametrize("factor", [1, 1.5])
def test_stage_3_by_hand(settings: tuple[bool, bool, bool], host: int, device: int, factor: float) -> None:
    assert THREE(1_024_000, 64_000, 4, 2, *settings, factor) == (host * factor, device + WORKING, WORKING)


@pytest.mark.parametrize(("offload", "device"), [(True, 0), (False, STEPPED)])
def test_stage_2_by_hand(offload: bool, device: int) -> None:
    assert TWO(1_024_000, 4, 2, offload, 1) == (MODEL, 2 * 1_024_000 + device)


def test_states_on_the_host_outgrow_the_model_where_ranks_are_few() -> None:
    assert TWO(1_024_000, 1, 1, True, 1)[0] == 16 * 1_024_000 + 1_024_000 // BLOCK * 4 + 4


def test_init_does_on_one_rank_what_it_does_on_many() -> None:
    """A unit at a time is whole on the host, in float32."""
    assert THREE(1_024_000, 64_000, zero_init=True, **PLAIN)[0] == 4 * 64_000
    assert THREE(1_024_000, 64_000, zero_init=False, **PLAIN)[0] == 4 * 1_024_000


def test_pieces_lie_on_the_host_while_a_model_is_built_for_it() -> None:
    """Nearly all of the model in one unit, over many nodes: a rank's states are fewer bytes than what it builds."""
    total, largest, world = 1_024_000, 512_000, 64
    piece = total // world
    host = THREE(total, largest, 1, world, additional_buffer_factor=1)[0]
    assert host == 4 * largest + 4 * piece + 2 * piece


def test_defaults_are_the_known_ones() -> None:
    assert TWO(1024) == TWO(1024, 1, 1, True, 1.5)
    assert THREE(1024, 256) == THREE(1024, 256, 1, 1, True, True, True, 1.5)
    names = ["model", "num_gpus_per_node", "num_nodes", "additional_buffer_factor"]
    for live, cold, more in ((TWO_LIVE, TWO_COLD, []), (THREE_LIVE, THREE_COLD, ["largest_layer_params"])):
        assert list(inspect.signature(live).parameters) == names
        assert list(inspect.signature(cold).parameters) == ["total_params", *more, *names[1:]]


# against the plan, and an engine


@pytest.mark.parametrize("world", [1, 2, 3, 8, 64])
def test_stage_3_is_what_the_plan_says(world: int) -> None:
    model = meta(lambda: GPT(GPTConfig()))
    plan = whole_units(model, world)
    largest = plan.largest_unit // 2
    planned = plan.total + 2 * plan.terms["main_weights"] + 2 * plan.largest_unit
    planned += 2 * max(unit.message for unit in plan.units)
    found = THREE(counted(model), largest, world, **PLAIN)[1]
    # The flag of each unit's norms, too; the estimate has one.
    assert 0 <= planned - found <= padding(model, len(plan.units), world) / world * 16.1 + len(plan.units) * 4


@pytest.mark.parametrize("world", [1, 2, 3, 8, 64])
def test_stage_2_is_what_the_plan_says(world: int) -> None:
    model = meta(lambda: GPT(GPTConfig()))
    plan = zeropp.plan.memory(model, config(2), world)
    planned = plan.total + 2 * plan.terms["main_weights"]
    most = padding(model, len(plan.units), world) * (16.1 / world + 2) + len(plan.units) * 4
    assert 0 <= planned - TWO(counted(model), world, **PLAIN)[1] <= most


@pytest.mark.parametrize("stage", [2, 3])
def test_an_engine_owns_it(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a step on one rank; in stage 3 two units are gathered at the most, if none is to stay."""
    model = GPT(GPTConfig(layers=3, d_model=256, heads=4))
    total, numel = counted(model), max(counted(block) for block in model.blocks)
    settings = config(
        stage,
        stage3_param_persistence_threshold=0,
        stage3_max_live_parameters=numel,
        stage3_prefetch_bucket_size=numel,
        stage3_max_reuse_distance=0,
    )
    optimizer = zeropp.ZeroOptimizer(torch.optim.AdamW(model.parameters()), model, settings)
    gathered, note = [0], Unit.note_gather

    def noted(unit: Unit, event: object) -> None:
        note(unit, event)
        gathered.append(owned_bytes(optimizer)["gathered"])

    monkeypatch.setattr(Unit, "note_gather", noted)
    for _ in range(3):
        tokens = torch.randint(256, (1, 8))
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.engine.refresh.wait()
    states = sum(
        value.nbytes for state in optimizer.state.values() for value in state.values() if value.numel() > 1
    )  # fmt: skip
    owned = sum(owned_bytes(optimizer).values()) + states
    if stage == 2:
        estimate = TWO(total, **PLAIN)[1]
    else:
        _, device, working = THREE(total, numel, **PLAIN)
        estimate = device - working
        assert max(gathered) == 2 * 2 * numel == working // 2
    assert 0 <= owned - estimate <= padding(model, len(optimizer.engine.units), 1) * 18.1


# tables


def large() -> nn.Module:
    return GPT(GPTConfig(layers=24, d_model=4096, heads=32))


def test_live_is_cold_for_what_the_model_has(capsys: pytest.CaptureFixture[str]) -> None:
    model = meta(large)
    TWO_LIVE(model, 8, 4)
    stage_2 = table(capsys.readouterr().out)
    THREE_LIVE(model, 8, 4)
    stage_3 = table(capsys.readouterr().out)
    total, block = counted(model), counted(model.blocks[0])
    TWO_COLD(float(total), 8, 4)
    gradients = 2 * 2 * block / GIB  # of one unit, which the cold one does not know
    sums = 2 * 4 * block / 32 / GIB
    for (settings,), (host, device) in table(capsys.readouterr().out).items():
        expected = device + gradients + (sums if settings else 0)
        assert stage_2[settings,] == (pytest.approx(host, abs=0.03), pytest.approx(expected, abs=0.03))
    THREE_COLD(total, block, 8, 4)
    cold = table(capsys.readouterr().out)
    assert list(stage_3) == list(cold) and len(cold) == 6
    for row, numbers in cold.items():
        assert stage_3[row] == pytest.approx(numbers, abs=0.03)
        exact = THREE(total, block, 8, 4, *row)
        assert numbers == (pytest.approx(exact[0] / GIB, abs=0.006), pytest.approx(exact[1] / GIB, abs=0.006))


def test_live_counts_persistent_and_frozen_weights(capsys: pytest.CaptureFixture[str]) -> None:
    """Stage 3 on four ranks: 2000 persistent layers of 90,000 elements, and two frozen ones of 2^30 each."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small = nn.ModuleList(nn.Linear(300, 300, bias=False) for _ in range(2000))
            self.large = nn.ModuleList(nn.Linear(2**15, 2**15, bias=False) for _ in range(2)).requires_grad_(False)

    THREE_LIVE(meta(Model), 4, additional_buffer_factor=1)
    small, frozen = 2000 * 90_000 / GIB, 2
    whole, gathered, message = 2 * small, 2 * 2, 2 * 2 * 2**24 / GIB
    rows = table(capsys.readouterr().out)
    kept, near = 4 * frozen / 4, 0.05
    assert rows[False, False, True][1] == pytest.approx(whole + kept + 16 * small / 4 + gathered + message, abs=near)
    assert rows[True, False, True][1] == pytest.approx(whole + kept + gathered + message, abs=near)
    assert rows[True, True, True][1] == pytest.approx(whole + gathered + message, abs=near)
    assert rows[True, True, False][0] == pytest.approx(4 * 4 * (small + frozen), abs=near)
    # While a rank builds: one unit of 2^30 in float32, its pieces of main weights and of frozen ones.
    assert rows[True, True, True][0] == pytest.approx(4 * 4 + 4 * small + 4 * frozen, abs=near)


def test_a_table_says_what_it_is_about(capsys: pytest.CaptureFixture[str]) -> None:
    THREE_COLD(2851e6, 32e6, 8, 2)
    first, second, *rows = capsys.readouterr().out.splitlines()
    assert first.startswith("Model states of zeropp in stage 3, bf16 and AdamW: 2,851,000,000 parameters (32,000,000 ")
    assert first.endswith("2 x 8 GPUs") and second.split() == ["per", "CPU", "|", "per", "GPU", "|", "settings"]
    assert rows[0].endswith("cpu_offload=True, cpu_offload_params=True, zero_init=True") and len(rows) == 6
    TWO_COLD(2851e6, 8, 2)
    assert [line.split(" | ")[-1] for line in capsys.readouterr().out.splitlines()[2:]] == [
        "cpu_offload=True", "cpu_offload=False",
    ]  # fmt: skip


def test_the_model_is_left_alone() -> None:
    model = nn.Linear(300, 400)
    before = [(id(p), p.data_ptr(), type(p)) for p in model.parameters()]
    TWO_LIVE(model)
    THREE_LIVE(model, 2)
    assert [(id(p), p.data_ptr(), type(p)) for p in model.parameters()] == before


# refusals

COUNT = "expected a whole number of at least 1"


@pytest.mark.parametrize(
    ("value", "kind", "given"),
    [
        (0, ValueError, "0"),
        (-5, ValueError, "-5"),
        (1.5, ValueError, r"1\.5"),
        (float("nan"), ValueError, "nan"),
        (float("inf"), ValueError, "inf"),
        ("7e9", TypeError, "'7e9'"),
        (None, TypeError, "None"),
        (True, TypeError, "True"),
    ],
)
@pytest.mark.parametrize("name", ["total_params", "largest_layer_params", "num_gpus_per_node", "num_nodes"])
def test_what_is_no_count(name: str, value: object, kind: type[Exception], given: str) -> None:
    for function in (TWO, TWO_COLD, TWO_LIVE, THREE, THREE_COLD, THREE_LIVE):
        known = inspect.signature(function).parameters
        if name not in known:
            continue
        good = {"total_params": 1024, "largest_layer_params": 1024, "model": nn.Linear(4, 4)}
        arguments = {key: given for key, given in good.items() if key in known} | {name: value}
        with pytest.raises(kind, match=f"{name} is {given}; {COUNT}"):
            function(**arguments)


@pytest.mark.parametrize("model", ["gpt2", None, 7e9, [nn.Linear(2, 2)], nn.Linear, {"weight": torch.zeros(2)}])
@pytest.mark.parametrize("live", [TWO_LIVE, THREE_LIVE])
def test_what_is_no_module(live: Callable[..., None], model: object) -> None:
    with pytest.raises(TypeError, match=rf"model is a {type(model).__name__}; expected a torch\.nn\.Module"):
        live(model)


@pytest.mark.parametrize("live", [TWO_LIVE, THREE_LIVE])
def test_a_model_without_weights(live: Callable[..., None]) -> None:
    with pytest.raises(ValueError, match="model is a ReLU without floating-point parameters; expected one that has"):
        live(nn.ReLU())


@pytest.mark.parametrize("value", ["False", 1, None])
@pytest.mark.parametrize("name", ["cpu_offload", "cpu_offload_params", "zero_init"])
def test_what_is_no_flag(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"{name} is {value!r}; expected True or False"):
        THREE(1024, 1024, **{name: value})
    if name == "cpu_offload":
        with pytest.raises(TypeError, match="expected True or False"):
            TWO(1024, cpu_offload=value)


@pytest.mark.parametrize(
    ("value", "kind"),
    [(0, ValueError), (-1.5, ValueError), (0.5, ValueError), (float("nan"), ValueError), (float("inf"), ValueError),
     ("1.5", TypeError), (None, TypeError), (True, TypeError)],
)  # fmt: skip
def test_what_is_no_factor(value: object, kind: type[Exception]) -> None:
    good = {"total_params": 1024, "largest_layer_params": 1024, "model": nn.Linear(4, 4)}
    for function in (TWO, TWO_COLD, TWO_LIVE, THREE, THREE_COLD, THREE_LIVE):
        arguments = {key: given for key, given in good.items() if key in inspect.signature(function).parameters}
        with pytest.raises(kind, match=rf"additional_buffer_factor is {re.escape(repr(value))}; expected a number of"):
            function(**arguments, additional_buffer_factor=value)


@pytest.mark.parametrize("function", [THREE, THREE_COLD])
def test_a_layer_larger_than_the_model(function: Callable[..., object]) -> None:
    with pytest.raises(
        ValueError, match="largest_layer_params is 2,000; expected at most total_params, which is 1,000"
    ):
        function(1000, 2000)
