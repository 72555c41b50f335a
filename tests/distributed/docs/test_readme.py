"""README's commands and code blocks run, and train like the code that they replace.

tests/unit/test_readme_figures.py checks README's figures. tests/distributed/deepspeed and
tests/distributed/integrations test the blocks about DeepSpeed and Lightning.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zeropp
from tests.support.rank_pool import run_ranks
from tests.support.readme import (
    BATCH,
    BLOCKS,
    DEEPSPEED,
    FEWER_BYTES,
    FIRST,
    FSDP2,
    LIGHTNING,
    ROOT,
    STEPS,
    TESTS,
    TEXT,
    TRAIN,
    TRAINER,
    Data,
    Losses,
    Model,
    block,
    every,
    run,
    sides,
)
from zeropp.config import load_config, require_supported


def test_the_first_diff_adds_five_lines() -> None:
    lines = block(FIRST, "diff").splitlines()
    assert sum(line.startswith("+") and len(line) > 1 for line in lines) <= 5


def sent_between_nodes(model: nn.Module, optimizer: zeropp.ZeroOptimizer) -> Counter[str]:
    """Return the bytes that this rank has sent between nodes so far, by kind and codec. Refreshes are waited for."""
    optimizer.engine.wait_for_refresh()
    found: Counter[str] = Counter()
    for row in zeropp.comm_report(model).rows:
        found[f"{row.kind} {row.codec}"] += row.bytes * (row.link == "cross")
    return +found


def bytes_by_codec(config: dict[str, Any]) -> tuple[float, dict[str, float], list[float]]:
    """Train with a configuration.

    Args:
        config: configuration from README.

    Returns:
        Number of parameters, bytes that this rank sends between nodes per step by kind and codec, and losses.
    """
    config["zero_optimization"]["zero_hpz_partition_size"] //= 4  # The test has two ranks per node, README has eight.
    model, losses, data = Model(), Losses(), Data()
    optimizer = zeropp.ZeroOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-3), model, config)
    index = dist.get_rank()
    x, y = data.pairs[:, index * BATCH : index * BATCH + BATCH]
    for step in range(4):
        optimizer.backward(losses(model(x), y.tanh()))
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            first = sent_between_nodes(model, optimizer)
    sent = sent_between_nodes(model, optimizer) - first
    return (
        sum(p.numel() for p in model.parameters()),
        {name: nbytes / 3 for name, nbytes in sent.items()},
        losses.values,
    )


def test_the_configuration_sends_int8_weights_and_int4_gradients_between_nodes() -> None:
    config = json.loads(block(FEWER_BYTES, "json"))
    assert config["bf16"] == {"enabled": True} and config["gradient_clipping"] == 1.0
    for numel, sent, losses in run_ranks(4, bytes_by_codec, config, local_world_size=2):
        assert set(sent) == {"reduce int4", "refresh int8"}
        # A node sends 0.76 bytes per parameter: 0.76 of M (n - 1) / n, with M = 2 bytes per parameter and n = 2 nodes.
        # A rank sends half of that.
        assert 0.74 < 2 * sum(sent.values()) / numel < 0.79
        assert losses[-1] < losses[0]


def fsdp2_losses(shard: str) -> list[float]:
    """Train a model that is sharded by lines of README, and return this rank's losses.

    Args:
        shard: lines that shard the model and make the optimizer.
    """
    policy = MixedPrecisionPolicy()
    given: dict[str, Any] = {"model": Model(), "policy": policy, "fully_shard": fully_shard, "zeropp": zeropp}
    given |= {"torch": torch, "config": {"zero_optimization": {"stage": 3}}}
    exec(shard, given)
    model, losses, data = given["model"], Losses(), Data()
    optimizer = given["optimizer"]
    for step in range(STEPS):
        index = step * dist.get_world_size() + dist.get_rank()
        x, y = data.pairs[:, index * BATCH : index * BATCH + BATCH]
        losses(model(x), y.tanh()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses.values


def test_one_line_quantizes_the_traffic_of_fsdp2() -> None:
    (line,) = re.findall(r"`(zeropp\.fsdp2\.[^`]*)`", TEXT)
    before = sides(FSDP2)[0]
    plain, quantized = (run_ranks(2, fsdp2_losses, each) for each in (before, f"{before}\n{line}"))
    assert plain != quantized
    for one, other in zip(plain, quantized, strict=True):
        assert other == pytest.approx(one, rel=2e-2)


def test_zeropp_alone_is_imported_for_that_line() -> None:
    """``import zeropp`` gives access to ``zeropp.fsdp2``, but loads only modules for training.

    DeepSpeed's names raise an error with the command for scripts that use them.
    """
    program = (
        "import sys, zeropp; print([n for n in sys.modules if 'lightning' in n.split('.')[0]])\n"
        "late = ('sympy', 'torch.distributed.tensor', 'zeropp.checkpoint', 'zeropp.fsdp2', 'zeropp.training')\n"
        "print([name for name in late if name in sys.modules])\n"
        "zeropp.fsdp2.apply; zeropp.add_config_arguments"
    )
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=100)
    assert done.stderr.splitlines()[-1] == (
        "AttributeError: module 'zeropp' has no attribute 'add_config_arguments'; for scripts that use it: "
        "python -m zeropp.compat.deepspeed COMMAND"
    )
    assert done.stdout == "[]\n[]\n"


def test_without_fully_shard_zeropp_trains_the_same() -> None:
    before, after = sides(FSDP2)
    for one, other in zip(run_ranks(2, fsdp2_losses, before), run_ranks(2, fsdp2_losses, after), strict=True):
        assert other == pytest.approx(one, rel=1e-5)


def accumulated(config: dict[str, Any] | None, unsynced: bool = False) -> dict[str, Tensor]:
    """Train three steps of two micro-batches and one step of a single micro-batch, in the loop of FSDP2.

    Args:
        config: configuration; None for plain torch in one process.
        unsynced: True to run the first backward of each pair inside ``no_sync()``.

    Returns:
        Weights at the end; an empty dict on ranks other than 0.
    """
    world, rank = (dist.get_world_size(), dist.get_rank()) if config is not None else (1, 0)
    model, data, rows = Model(), Data(), 8 // world
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
    if config is not None:
        optimizer = zeropp.ZeroOptimizer(optimizer, model, {"zero_optimization": {"stage": 3}, **config})
    for micro in range(7):
        begin = (micro * world + rank) * rows
        x, y = data.pairs[:, begin : begin + rows]
        with optimizer.no_sync() if unsynced and micro in (0, 2, 4) else contextlib.nullcontext():
            (nn.functional.mse_loss(model(x), y.tanh()) / 2).backward()
        if micro % 2:
            optimizer.step()
            optimizer.zero_grad()
    optimizer.step(**({} if config is None else {"now": True}))
    return zeropp.full_state(model, rank0_only=True) if config is not None else model.state_dict()


@pytest.mark.parametrize(
    ("config", "unsynced"),
    [({}, True), ({"gradient_accumulation_steps": 2}, False), pytest.param({}, False, marks=pytest.mark.campaign)],
    ids=str,
)
def test_a_loop_that_accumulates_stays(config: dict[str, Any], unsynced: bool) -> None:
    """As README's table says, a loop that accumulates drops ``set_requires_gradient_sync`` or uses ``no_sync()``.

    The key gradient_accumulation_steps is optional.
    """
    expected = accumulated(None)
    first, second = run_ranks(2, accumulated, config, unsynced)
    assert second == {}
    for name, weight in expected.items():
        torch.testing.assert_close(first[name], weight, rtol=0, atol=1e-6)


def test_the_keys_of_the_table_are_accepted() -> None:
    """Keys marked * in the table are accepted in the zero_optimization block, the other keys at the top level."""
    rows = re.findall(r"^\| .* \| (.*) \|$", TEXT.split("| in FSDP2 |")[1].split("##")[0], re.MULTILINE)
    inner: dict[str, Any] = {}
    outer: dict[str, Any] = {}
    for row in rows:
        for key, value, mark in re.findall(r'`"([a-z0-9_]+)": ([^`]+)`( \*)?', row):
            (inner if mark else outer)[key] = json.loads(value)
    assert set(outer) == {"bf16", "gradient_clipping", "communication_data_type"}
    hpz = inner.pop("zero_hpz_partition_size")
    assert (hpz, set(inner)) == (8, {"mics_shard_size", "offload_optimizer", "offload_param"})
    for zero in ({"zero_hpz_partition_size": hpz}, inner):
        require_supported(load_config({**outer, "zero_optimization": {"stage": 3, **zero}}))


@pytest.mark.campaign
def test_the_training_command(tmp_path: Path) -> None:
    """README's training command runs.

    Its virtual environment is left out, because the test command makes the same one.
    """
    setup, train = block(TRAIN, "sh").split(" '.[examples]' && ")
    assert setup == INSTALL
    small = ("--layers=2", "--d-model=64", "--heads=2", "--steps=4", "--log-every=1", "--sample=0", "--data=LICENSE")
    run(every(train, (".venv/bin/", "")), ROOT, *small, f"--metrics={tmp_path / 'metrics'}")
    records = [json.loads(line) for line in (tmp_path / "metrics").read_text().splitlines()]
    assert records[0]["world"] == 2 and records[-1] == {"event": "end", "finished": True}


INSTALL = "python3 -m venv .venv && .venv/bin/pip install -q -c constraints.txt -e"


def test_the_test_command_is_the_one_of_ci() -> None:
    """The test command of README is the one that CI runs, so CI shows that it works."""
    said = subprocess.run(["bash", str(ROOT / ".ci" / "run"), "--show"], capture_output=True, text=True, check=True)
    assert said.stdout == block(TESTS, "sh") == f"{INSTALL} '.[dev]' && .venv/bin/pytest -n 2 --dist worksteal\n"
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert {"dev", "examples"} <= set(extras) and "`pip install .`" in TEXT


def test_every_block_has_a_test_and_the_page_fits() -> None:
    run_by_tests = (FIRST, FEWER_BYTES, FSDP2, DEEPSPEED, TRAINER, LIGHTNING, TRAIN, TESTS)
    assert len(BLOCKS) == TEXT.count("\n```") / 2 == len(run_by_tests)
    for body in BLOCKS:
        assert sum(mark in body for mark in run_by_tests) == 1, body
    assert len(TEXT.splitlines()) <= 150
