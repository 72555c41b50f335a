"""Kernels compile for GPUs that are not here, and what comes out is as wide and as lean as it should be.

In processes of their own: the interpreter, which the other tests run under, and the compiler cannot share one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="Triton comes for Linux only")

from zeropp_kernels.aot import budgets
from zeropp_kernels.aot.binaries import Facts
from zeropp_kernels.aot.cases import Case, cases


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


@pytest.mark.campaign
@pytest.mark.timeout(1200)
def test_every_pair_of_settings_on_sm_90() -> None:
    assert " 0 wrong" in compile_all("--cover", "pairs", "--targets", "sm_90")


@pytest.mark.campaign
@pytest.mark.timeout(600)
def test_every_setting_on_sm_90() -> None:
    assert " 0 wrong" in compile_all("--cover", "each", "--targets", "sm_90")


@pytest.mark.timeout(600)
def test_every_kernel_on_two_targets() -> None:
    """One setting each, for a card of NVIDIA and one of AMD; the campaign has all settings on four targets."""
    said = compile_all("--cover", "one", "--targets", "sm_90", "gfx942")
    kernels = {case.name for case in cases("all")}
    assert f"{len(kernels)} cases on 2 targets" in said and " 0 wrong" in said


@pytest.mark.campaign
@pytest.mark.timeout(1200)
def test_every_setting_on_the_other_targets() -> None:
    assert " 0 wrong" in compile_all("--cover", "each", "--targets", "sm_80", "sm_100", "gfx942")


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_every_configuration(target: str) -> None:
    assert " 0 wrong" in compile_all("--cover", "all", "--targets", target)


LEAN = Facts(
    instructions=500, registers=64, spilled=0, wide_loads=5, wide_stores=4, narrow_loads=1, narrow_stores=0, fused=0,
    shared=0,
)  # fmt: skip


def wrong(changes: dict[str, int], **settings: object) -> list[str]:
    """What the checks say of a kernel that is in order but for ``changes``: 32 elements a thread of float16."""
    kernel = SimpleNamespace(__name__="delta_apply_kernel")
    case = Case(kernel, {"EVEN": True, **settings}, {"reference": "fp16"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budgets, "_ELEMENTS", 32)  # the interpreter's tiles are larger
        return budgets.check(case, replace(LEAN, **changes), "cuda")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"spilled": 8}, "8 spilled or on the stack"),
        ({"registers": 129}, "129 registers, more than 128"),
        ({"fused": 1}, "1 fused multiply-adds, not 0"),
        ({"wide_loads": 4}, "4 loads and 4 stores of 128 bits, not 5 and 4"),
        ({"wide_stores": 3}, "5 loads and 3 stores of 128 bits, not 5 and 4"),
        # 32 values one by one at an end, and 4 for scales.
        ({"narrow_loads": 37}, "37 loads and 0 stores below 32 bits"),
        ({"narrow_stores": 37}, "1 loads and 37 stores below 32 bits"),
    ],
)
def test_each_budget(changes: dict[str, int], said: str) -> None:
    assert wrong({}) == []
    assert wrong(changes) == [said]


def test_what_is_not_even_may_be_narrow() -> None:
    assert wrong({"wide_loads": 0, "wide_stores": 0, "narrow_loads": 32, "registers": 168}, EVEN=False) == []
    assert wrong({"registers": 169}, EVEN=False) == ["169 registers, more than 168"]


@pytest.mark.parametrize(
    ("backend", "loads", "wrong"),
    [
        # Two elements a thread of float32, so half an access a message; tile of 4 makes it two.
        ("cuda", 6, []),
        ("cuda", 8, ["8 loads and 2 stores of 128 bits, not 6 and 2"]),
        ("hip", 6, []),
        ("hip", 8, []),
        ("hip", 5, ["5 loads and 2 stores of 128 bits, not 6 and 2"]),
        ("hip", 7, ["7 loads and 2 stores of 128 bits, not 6 and 2"]),
    ],
)
def test_only_whole_messages_may_be_unrolled_and_only_on_amd(backend: str, loads: int, wrong: list[str]) -> None:
    constants = {"ACCUMULATE": False, "EVEN": True, "TILE": 4}
    case = Case(SimpleNamespace(__name__="sum_kernel"), constants, {"messages": "fp32", "out": "fp32"})
    assert budgets.check(case, replace(LEAN, wide_loads=loads, wide_stores=2), backend) == wrong


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        ({"registers": 97}, ["97 registers, more than 96"]),
        # Two escapes in one access: their places need not follow each other.
        ({"narrow_loads": 31}, ["31 loads and 0 stores below 32 bits"]),
        ({"narrow_stores": 1}, ["32 loads and 1 stores below 32 bits"]),
    ],
)
def test_escapes_are_looked_up_one_by_one(changes: dict[str, int], said: list[str]) -> None:
    """One section for 128 threads: 16 elements each, with an 8-bit access and a 16-bit one."""
    kernel = SimpleNamespace(__name__="lossless_decode_kernel")
    case = Case(kernel, {"EVEN": True, "TILE": 1}, {"reference": "bf16", "out": "bf16"})
    lean = replace(LEAN, wide_loads=2, wide_stores=2, narrow_loads=32)
    assert budgets.check(case, replace(lean, **changes), "cuda") == said


def test_every_kernel_is_compiled_for_wide_access_too() -> None:
    every = cases("all")
    assert len({(case.name, case.settings) for case in every}) == len(every)
    assert {case.name for case in every} >= {case.name for case in cases("pairs")}
    checked = {case.name for case in cases("pairs") if case.even and case.name in budgets._MOVED}
    assert {case.name for case in every} == checked


def test_what_is_launched_is_what_is_compiled() -> None:
    done = run_python("-m", "tests.kernels.launches")
    assert done.returncode == 0 and " 0 unknown" in done.stdout, done.stdout + done.stderr
    # Receivers decode the messages of all ranks: one kernel, and nothing that torch would do beside it.
    assert "calls that decode 1, 2 and 64 lossless messages: 1 1 1\n" in done.stdout, done.stdout


def test_the_checks_can_fail() -> None:
    """Without the switch that keeps bits equal there are fused multiply-adds, and the check says so."""
    program = (
        "from zeropp_kernels.aot import __main__, build\n"
        "options = build.launch_options\n"
        "build.launch_options = lambda *given: {**options(*given), 'enable_fp_fusion': True}\n"
        "given = ['--only', 'reduce_quantize', '--cover', 'each', '--targets', 'sm_90', '--processes', '1']\n"
        "raise SystemExit(__main__.main(given))\n"
    )
    done = run_python("-c", program)
    assert done.returncode == 1 and "fused multiply-adds" in done.stdout, done.stdout + done.stderr


def test_a_name_that_no_kernel_has_is_refused() -> None:
    done = run_python("-m", "zeropp_kernels.aot", "--only", "nosuch")
    assert done.returncode == 2 and "--only nosuch: no kernel has that" in done.stderr


def test_the_interpreter_is_refused() -> None:
    done = run_python("-m", "zeropp_kernels.aot", interpret="1")
    assert done.returncode == 2 and "TRITON_INTERPRET=1 is set" in done.stderr
