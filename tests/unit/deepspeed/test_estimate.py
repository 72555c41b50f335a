"""The estimators give numbers computed by hand, and the bytes that an engine on one rank owns."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable

import pytest
import torch
from gpt import GPT, GPTConfig
from torch import nn

import zeropp
from docs.sizing import DOCUMENT, render
from tests.support.owned_memory import owned_bytes
from zeropp.partition.levels import BLOCK

GIB = 2**30
TWO = zeropp.estimate_zero2_model_states_mem_needs
THREE = zeropp.estimate_zero3_model_states_mem_needs
TWO_LIVE = zeropp.estimate_zero2_model_states_mem_needs_all_live
THREE_LIVE = zeropp.estimate_zero3_model_states_mem_needs_all_live
TWO_COLD = zeropp.estimate_zero2_model_states_mem_needs_all_cold
THREE_COLD = zeropp.estimate_zero3_model_states_mem_needs_all_cold

Rows = dict[tuple[bool, ...], tuple[float, float]]


def table(text: str) -> Rows:
    """Return the printed (host, device) numbers in GiB, by the values of the settings in the order of the arguments."""
    rows: Rows = {}
    for line in text.splitlines()[2:]:
        found = re.fullmatch(r" *([\d.]+) GiB \| *([\d.]+) GiB \| (.*)", line)
        assert found is not None, line
        settings = tuple(word == "True" for word in re.findall(r"\w+=(\w+)", found[3]))
        rows[settings] = float(found[1]), float(found[2])
    return rows


def counted(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# Numbers computed by hand: 16 units of 2^26 elements on two nodes of four ranks, so each rank has 2^27 elements.
LARGEST = 2**26
TOTAL = 16 * LARGEST
RANK = TOTAL // 8
MARKERS = 2 * 4 * 4
STEPPED = 16 * RANK + RANK // BLOCK * 4 + 16 * 4  # main weights, gradients, two states; norms of blocks, flags
NORMS = RANK // BLOCK * 4 + 16 * 4
WORKING = 8 * LARGEST  # two gathered units in 16 bits, and one unit's gradients twice
SUMS = 2 * 4 * LARGEST // 8  # two pieces of a reduced gradient in float32
MODEL = 4 * 4 * TOTAL  # the model as built in each of the node's 4 processes
BUILT = 4 * 4 * LARGEST  # one unit in each process


@pytest.mark.parametrize(
    ("settings", "host", "device"),
    [
        ((True, True, True), 4 * (16 + 2) * RANK, NORMS + SUMS),
        ((True, True, False), MODEL, NORMS + SUMS),
        ((True, False, True), 4 * 16 * RANK, NORMS + 2 * RANK + SUMS),
        ((False, False, True), BUILT, STEPPED),
        ((False, True, True), BUILT, STEPPED),
        ((False, False, False), MODEL, STEPPED),
    ],
)
@pytest.mark.parametrize("factor", [1, 1.5])
def test_stage_3_by_hand(settings: tuple[bool, bool, bool], host: int, device: int, factor: float) -> None:
    found = THREE(TOTAL, LARGEST, 4, 2, *settings, factor)
    assert found[1:] == (device + WORKING + MARKERS, WORKING)
    # Staging buffers of offloaded states take host memory in addition.
    staging = 4 * 1.3 * 2**30 if settings[0] and settings[2] else 0
    assert host * factor <= found[0] <= (host + staging) * factor


def test_stage_2_by_hand() -> None:
    """The stage 2 estimator assumes 64 units, so a unit has a quarter of the elements of ``LARGEST``."""
    norms, message, sums = RANK // BLOCK * 4 + 64 * 4, 4 * TOTAL // 64, 2 * 4 * TOTAL // 64 // 8
    assert TWO(TOTAL, 4, 2, False, 1) == (MODEL, 2 * TOTAL + 16 * RANK + norms + message + MARKERS)
    assert TWO(TOTAL, 4, 2, True, 1) == (MODEL, 2 * TOTAL + norms + message + sums + MARKERS)


def test_pieces_lie_on_the_host_while_a_model_is_built_for_it() -> None:
    """With half of the model in one unit and many ranks, a rank's states are fewer bytes than the unit being built."""
    world = 64
    piece = 2 * LARGEST // world
    assert THREE(2 * LARGEST, LARGEST, 1, world, additional_buffer_factor=1)[0] == 4 * LARGEST + (4 + 2) * piece


def test_defaults_are_the_known_ones() -> None:
    assert TWO(1024) == TWO(1024, 1, 1, True, 1.5)
    assert THREE(1024, 256) == THREE(1024, 256, 1, 1, True, True, True, 1.5)
    names = ["model", "num_gpus_per_node", "num_nodes", "additional_buffer_factor"]
    for live, cold, more in ((TWO_LIVE, TWO_COLD, []), (THREE_LIVE, THREE_COLD, ["largest_layer_params"])):
        assert list(inspect.signature(live).parameters) == names
        assert list(inspect.signature(cold).parameters) == ["total_params", *more, *names[1:]]


@pytest.mark.parametrize("stage", [2, 3])
def test_an_engine_owns_it(stage: int) -> None:
    """The engine runs on one rank, and bytes are counted after a step, before its gradients are dropped."""
    model = GPT(GPTConfig(layers=3, d_model=256, heads=4))
    total, numel = counted(model), max(counted(block) for block in model.blocks)
    settings = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}
    optimizer = zeropp.ZeroOptimizer(torch.optim.AdamW(model.parameters()), model, settings)
    tokens = torch.randint(256, (1, 8))
    model(tokens, tokens).backward()
    optimizer.step()
    optimizer.engine.wait_for_refresh()
    states = sum(value.nbytes for state in optimizer.state.values() for value in state.values() if value.numel() > 1)
    owned = sum(owned_bytes(optimizer).values()) + states
    plain = {"cpu_offload": False, "additional_buffer_factor": 1}
    if stage == 2:
        # The estimate contains gradients of one unit in flight, at most 4 bytes per element of this small model. Leave
        # them out.
        estimate = TWO(total, **plain)[1] - 4 * total
    else:
        _, device, working = THREE(total, numel, **plain)
        estimate = device - working
    # The estimate does not include persistent weights and gathered units, and padding of less than a block per
    # parameter.
    small = sum(p.numel() for p in model.parameters() if p.numel() <= 100_000) * 2 + owned_bytes(optimizer)["gathered"]
    padding = (len(list(model.parameters())) + len(optimizer.engine.units)) * BLOCK * 18
    assert abs(owned - estimate) <= small + padding


def test_live_is_cold_for_a_model_of_equal_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(layers=24, d_model=4096, heads=32))
    total, block = counted(model), counted(model.blocks[0])
    for live, cold in ((TWO_LIVE, lambda *args: TWO_COLD(total, *args)),
                       (THREE_LIVE, lambda *args: THREE_COLD(float(total), block, *args))):  # fmt: skip
        live(model, 8, 4)
        found = table(capsys.readouterr().out)
        cold(8, 4)
        expected = table(capsys.readouterr().out)
        assert list(found) == list(expected) and len(found) == (2 if live is TWO_LIVE else 6)
        # Without the model, stage 2 assumes a unit of 1/64 of the model. Its gradients take 4 bytes per element, their
        # sums 8.
        allowed = (4 + 8 / 32) * (block - total // 64) / GIB if live is TWO_LIVE else 0
        for row, numbers in expected.items():
            assert found[row][0] == pytest.approx(numbers[0], rel=0.01)
            assert 0 <= found[row][1] - numbers[1] + 0.03 <= allowed + 0.06
            exact = TWO(total, 8, 4, *row) if live is TWO_LIVE else THREE(total, block, 8, 4, *row)
            assert numbers == tuple(pytest.approx(each / GIB, abs=0.006) for each in exact[:2])


def test_live_counts_persistent_and_frozen_weights(capsys: pytest.CaptureFixture[str]) -> None:
    """Stage 3 on four ranks: 2000 persistent layers of 90,000 elements, and two frozen layers of 2^30 elements."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small = nn.ModuleList(nn.Linear(300, 300, bias=False) for _ in range(2000))
            self.large = nn.ModuleList(nn.Linear(2**15, 2**15, bias=False) for _ in range(2)).requires_grad_(False)

    with torch.device("meta"):
        model = Model()
    THREE_LIVE(model, 4, additional_buffer_factor=1)
    small, frozen = 2000 * 90_000 / GIB, 2
    whole, gathered, message = 2 * small, 2 * 2, 2 * 2 * 2**24 / GIB
    rows = table(capsys.readouterr().out)
    kept, near = 4 * frozen / 4, 0.05
    assert rows[False, False, True][1] == pytest.approx(whole + kept + 16 * small / 4 + gathered + message, abs=near)
    assert rows[True, False, True][1] == pytest.approx(whole + kept + gathered + message, abs=near)
    assert rows[True, True, True][1] == pytest.approx(whole + gathered + message, abs=near)
    assert rows[True, True, False][0] == pytest.approx(4 * 4 * (small + frozen), abs=near)


def test_the_model_is_left_alone() -> None:
    model = nn.Linear(300, 400)
    before = [(id(p), p.data_ptr(), type(p)) for p in model.parameters()]
    TWO_LIVE(model)
    THREE_LIVE(model, 2)
    assert [(id(p), p.data_ptr(), type(p)) for p in model.parameters()] == before


@pytest.mark.parametrize(
    ("value", "kind"),
    [(0, ValueError), (1.5, ValueError), (float("nan"), ValueError), ("7e9", TypeError), (True, TypeError)],
)
@pytest.mark.parametrize("name", ["total_params", "largest_layer_params", "num_gpus_per_node", "num_nodes"])
def test_no_count(name: str, value: object, kind: type[Exception]) -> None:
    for function in (TWO, TWO_COLD, TWO_LIVE, THREE, THREE_COLD, THREE_LIVE):
        known = inspect.signature(function).parameters
        good = {"total_params": 1024, "largest_layer_params": 1024, "model": nn.Linear(4, 4)}
        arguments = {key: given for key, given in good.items() if key in known} | {name: value}
        if name in known:
            with pytest.raises(kind, match=re.escape(f"{name} is {value!r}; expected a whole number of at least 1")):
                function(**arguments)


@pytest.mark.parametrize("live", [TWO_LIVE, THREE_LIVE])
def test_no_module(live: Callable[..., None]) -> None:
    with pytest.raises(TypeError, match=r"model is a str; expected a torch\.nn\.Module"):
        live("gpt2")


@pytest.mark.parametrize("function", [THREE, THREE_COLD])
def test_a_layer_larger_than_the_model(function: Callable[..., object]) -> None:
    with pytest.raises(
        ValueError, match="largest_layer_params is 2,000; expected at most total_params, which is 1,000"
    ):
        function(1000, 2000)


def test_the_numbers_of_the_sizing_page_are_current() -> None:
    """If the page is out of date, run ``python -m docs.sizing``; an edited number is noticed."""
    text = DOCUMENT.read_text()
    old = text.replace("| 7B, nothing | 1", "| 7B, nothing | 2", 1)
    assert old != text and render(old) == text
