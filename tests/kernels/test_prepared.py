"""Prepared launches pass what the general way passes, and are not repeated after an event that the general way notices.

Each test runs a program with a driver that launches nothing, because the other tests run under Triton's interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton comes for Linux only")

pytestmark = pytest.mark.timeout(600)  # the first run compiles about 70 kernels


def run(rows: str) -> str:
    path = os.pathsep.join([entry for entry in sys.path if entry])
    env = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path}
    command = [sys.executable, "-m", "tests.kernels.prepared", rows]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_operation_has_the_arguments_of_the_general_way() -> None:
    assert " 0 wrong" in run("agree")


def test_events_after_which_no_launch_is_repeated() -> None:
    assert " 0 wrong" in run("events")


def test_each_event_is_missed_without_its_check() -> None:
    """Remove the checks one at a time: the event of each is then handled wrongly."""
    assert " 0 wrong" in run("mutations")
