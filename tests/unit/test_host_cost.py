"""What one fetch and release costs the host, on torch's fake process group in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORLD = 8
LOCALS = [8, 4, 1]  # one node; two nodes of four; eight nodes of one
MEASURE = """
import json, sys
from bench import host_cost
rows = [host_cost.measure(int(sys.argv[1]), int(local), blocks=4, repeats=8) for local in sys.argv[2:]]
print(json.dumps(rows))
"""


@pytest.fixture(scope="module")
def rows() -> list[dict[str, object]]:
    """One row of bench/host_cost.py for each number of ranks to a node."""
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(WORLD), *map(str, LOCALS)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, object]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_few_operators_and_one_collective_a_hop(rows: list[dict[str, object]]) -> None:
    for row, hops in zip(rows, [1, 2, 1], strict=True):
        assert (row["world"], row["parameters"], row["hops"]) == (WORLD, 12, hops), row
        assert row["collectives"] == hops, row["operators"]
        assert 1 <= row["aten"] <= 25, row["operators"]  # type: ignore[operator]


def test_hooks_and_schedule_add_no_operators(rows: list[dict[str, object]]) -> None:
    for row in rows:
        assert row["forward_collectives"] == row["hops"], row
        assert row["forward_aten"] <= 25, row  # type: ignore[operator]


def test_times_are_reported(rows: list[dict[str, object]]) -> None:
    """Shown with -s. The target of 60 microseconds is no assertion: a machine under test is not idle."""
    for row in rows:
        print(f"\n{row['hops']} hops:", {key: value for key, value in row.items() if key.endswith("_us")})
    assert all(row["unit_us"] > 0 and row["thread_us"] > 0 for row in rows)  # type: ignore[operator]
