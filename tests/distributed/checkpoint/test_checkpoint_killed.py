"""After a kill at a random moment of saving, a checkpoint loads bit for bit, and the next save succeeds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.rank_pool import ROOT

CASES = [
    pytest.param(2, 3, marks=pytest.mark.campaign),
    pytest.param(4, 50, marks=[pytest.mark.campaign, pytest.mark.timeout(1800)]),
]


@pytest.mark.parametrize(("runs", "moments"), CASES)
def test_killed_at_random_moments(runs: int, moments: int, tmp_path: Path) -> None:
    """One rank or both are killed. A surviving rank must raise an error by itself."""
    command = [sys.executable, "-m", "tests.support.saves_killed_at_random", str(tmp_path), str(runs), str(moments)]
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), *(each for each in sys.path if each)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    inside, saved = map(int, done.stdout.split())
    assert saved >= runs and inside >= runs * moments // 4
