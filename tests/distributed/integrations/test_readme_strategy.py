"""README's block for Lightning works, and importing the integrations does not import Lightning."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import pytest

from tests.support.readme import LIGHTNING, ROOT, every, sides


def test_the_lightning_strategy() -> None:
    """The strategy that README replaces is one of Lightning's, and the new one has the same ZeRO stage."""
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")
    from lightning.pytorch.strategies import StrategyRegistry

    before, after = sides(LIGHTNING)
    (known,) = re.findall(r'strategy="(\w+)"', before)
    assert known in StrategyRegistry.available_strategies() and known.startswith("deepspeed")
    given: dict[str, Any] = {"L": lightning}
    exec(every(after, ("devices=8", 'devices=8, accelerator="cpu", logger=False')), given)
    from zeropp.integrations.lightning import ZeroStrategy

    strategy = given["trainer"].strategy
    assert isinstance(strategy, ZeroStrategy)
    assert strategy.config["zero_optimization"]["stage"] == 3 == int(known[-1])


def test_lightning_is_imported_when_it_is_asked_for() -> None:
    program = "import sys, zeropp.integrations; print([n for n in sys.modules if 'lightning' in n.split('.')[0]])"
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=100)
    assert done.stdout == "[]\n", done.stderr
