"""Kernels compile for GPUs that are not here, and what comes out is as wide and as lean as it should be.

In processes of their own: the interpreter, which the other tests run under, and the compiler cannot share one.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton comes for Linux only")


def run_python(*arguments: str, interpret: str = "0") -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([entry for entry in sys.path if entry])
    env = {**os.environ, "TRITON_INTERPRET": interpret, "PYTHONPATH": path}
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True)


def compile_all(*arguments: str) -> str:
    """What `python -m zeropp_kernels.aot` prints."""
    done = run_python("-m", "zeropp_kernels.aot", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    return done.stdout


@pytest.mark.timeout(600)
def test_every_pair_of_settings_on_sm_90() -> None:
    assert " 0 wrong" in compile_all("--cover", "pairs", "--targets", "sm_90")


@pytest.mark.timeout(600)
def test_every_setting_on_the_other_targets() -> None:
    assert " 0 wrong" in compile_all("--cover", "each", "--targets", "sm_80", "sm_100", "gfx942")


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_every_configuration(target: str) -> None:
    assert " 0 wrong" in compile_all("--cover", "all", "--targets", target)


def test_the_checks_can_fail() -> None:
    """Without the switch that keeps bits equal there are fused multiply-adds, and the check says so."""
    program = (
        "from zeropp_kernels import aot\n"
        "aot.LAUNCH = {**aot.LAUNCH, 'enable_fp_fusion': True}\n"
        "raise SystemExit(aot.main(['--only', 'quantize', '--cover', 'each', '--targets', 'sm_90']))\n"
    )
    done = run_python("-c", program)
    assert done.returncode == 1 and "fused multiply-adds" in done.stdout, done.stdout + done.stderr


def test_the_interpreter_is_refused() -> None:
    done = run_python("-m", "zeropp_kernels.aot", interpret="1")
    assert done.returncode == 2 and "TRITON_INTERPRET=1 is set" in done.stderr
