"""Bounds on the host's cost to gather and reshard a unit and to wrap a model, on torch's fake process group.

Each program runs in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench import host_cost
from zeropp.comm.hops import Hop, Ledger
from zeropp.partition.levels import HopSpec
from zeropp.wire import codecs
from zeropp.wire.codecs import BlockCodec, PlainCodec

ROOT = Path(__file__).resolve().parents[2]
WORLD = 8
LOCALS = [8, 4, 1]  # one node; two nodes of four; eight nodes of one
MEASURE = """
import json, sys
from bench import host_cost
rows = [host_cost.measure(int(sys.argv[1]), int(local), blocks=4, repeats=8) for local in sys.argv[2:]]
print(json.dumps(rows))
"""
# Counts calls of Python functions while a model is wrapped. The first wrapping only fills caches of the process.
COUNT = """
import collections, json, sys
import torch, torch.distributed as dist, zeropp
from bench import host_cost

def count(world, units, depth):
    host_cost.join(world, 8)
    parts = [host_cost.Block(parameters=15) for _ in range(units)]
    model = torch.nn.Sequential(*parts)
    for _ in range(depth):
        model = torch.nn.Sequential(model)
    optimizer, calls = torch.optim.SGD(model.parameters(), lr=0.1), collections.Counter()

    def note(frame, event, arg):
        if event == "call":
            calls[frame.f_code.co_name] += 1

    sys.setprofile(note)
    wrapped = zeropp.ZeroOptimizer(optimizer, model, host_cost.CONFIG)
    sys.setprofile(None)
    assert len(wrapped.engine.units) == units
    wrapped.engine.close()
    dist.destroy_process_group()
    return {"all": calls.total(), "walks": calls["_named_members"] / (15 * units)}

count(8, 4, 0)
rows = {name: count(*args) for name, args in json.loads(sys.argv[1]).items()}
print(json.dumps(rows))
"""


MEMORY = """
import json, sys
from bench import host_cost
print(json.dumps(host_cost.measure_wrap(int(sys.argv[1]), 8, 200)))
"""


def run(program: str, *args: str) -> Any:
    """Run a Python program, and return its last line of output, parsed as JSON."""
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", program, *args],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def rows() -> list[dict[str, object]]:
    """Results of bench/host_cost.py, one row per number of ranks per node."""
    found: list[dict[str, object]] = run(MEASURE, str(WORLD), *map(str, LOCALS))
    return found


def test_calls_to_wrap_grow_with_the_model_but_not_with_world_or_depth() -> None:
    """Calls are counted, because times vary. A walk is one look at all parameters by ``named_parameters``."""
    cases = {"small": (8, 20, 0), "large": (8, 80, 0), "ranks": (1024, 80, 0), "deep": (8, 80, 12)}
    found = run(COUNT, json.dumps(cases))
    assert found["large"]["all"] < 4 * found["small"]["all"]
    assert found["ranks"]["all"] < 1.02 * found["large"]["all"]
    assert found["deep"]["walks"] < 1.1 * found["large"]["walks"] < 12


def test_few_operators_and_one_collective_a_hop(rows: list[dict[str, object]]) -> None:
    for row, hops in zip(rows, [1, 2, 1], strict=True):
        assert (row["world"], row["parameters"], row["hops"]) == (WORLD, 12, hops), row
        assert row["collectives"] == hops, row["operators"]
        assert 1 <= row["aten"] <= 25, row["operators"]  # type: ignore[operator]


def test_hooks_and_schedule_add_no_operators(rows: list[dict[str, object]]) -> None:
    for row in rows:
        assert row["forward_collectives"] == row["hops"], row
        assert row["forward_aten"] <= 25, row  # type: ignore[operator]


def test_wrapping_among_many_ranks_takes_no_more_memory() -> None:
    """Padded for 1024 ranks, one unit takes 1 MiB, and only one of the 200 units may be unsharded at a time."""
    few, many = (run(MEMORY, str(world)) for world in (8, 1024))
    assert few["units"] == many["units"] == 200
    assert many["most_mib"] < few["most_mib"] + 20, (few, many)


@pytest.mark.parametrize("codec", [PlainCodec(torch.bfloat16), BlockCodec(8)], ids=str)
def test_an_exchange_makes_no_tensor_for_each_rank(
    codec: PlainCodec | BlockCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of operators is the same for 8 and 1024 ranks.

    The patched collective and the kernels' reference stand in for NCCL and for kernels on a GPU.
    """
    monkeypatch.setattr(dist, "all_to_all_single", lambda out, message, group: out.copy_(message))
    monkeypatch.setattr(codecs, "summed_by_kernels", lambda out: True)
    found = []
    for world in (8, 1024):
        hop = Hop(HopSpec(world, 1, tuple(range(world)), "cross"), None, "nccl", 0, Ledger(), "reduce")
        message, out = codec.empty(256, world, torch.device("cpu")).zero_(), torch.empty(256)
        with host_cost.Calls() as calls:
            parts = hop.all_to_all(message, hop.reduce_key("a unit", codec.name), apart=codec.apart)
            codec.decode_sum_(parts, out)
        found.append(calls.names)
    assert found[0] == found[1] and found[0].total() <= 6, found


def test_times_are_reported(rows: list[dict[str, object]]) -> None:
    """Prints the times (visible with -s). They are not compared with the target, because test machines are not idle."""
    for row in rows:
        print(f"\n{row['hops']} hops:", {key: value for key, value in row.items() if key.endswith("_us")})
    assert all(row["unit_us"] > 0 and row["thread_us"] > 0 for row in rows)  # type: ignore[operator]
