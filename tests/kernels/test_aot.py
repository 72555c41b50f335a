"""Kernels compile for GPUs that this machine lacks, and their machine code keeps within the expected properties.

Each compilation runs in a process of its own, because the other tests run under Triton's interpreter, and compiler and
interpreter cannot share a process.
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
from zeropp_kernels.aot.paths import Path, amd_code, nvidia_code, path_of


def run_python(*arguments: str, interpret: str = "0") -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([entry for entry in sys.path if entry])
    env = {**os.environ, "TRITON_INTERPRET": interpret, "PYTHONPATH": path}
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True)


def compile_all(*arguments: str) -> str:
    """Return the output of `python -m zeropp_kernels.aot`."""
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
    """Compile one setting of each kernel for one NVIDIA and one AMD GPU; the campaign compiles all for four targets."""
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
    instructions=500, registers=64, spilled=0, wide_loads=4, wide_stores=4, narrow_loads=1, narrow_stores=0, fused=0,
    shared=0, path=Path(300, 0, 64),
)  # fmt: skip


def wrong(changes: dict[str, int], **settings: object) -> list[str]:
    """Return the messages of ``budgets.check`` for a correct kernel with ``changes``; 32 fp16 values per thread."""
    kernel = SimpleNamespace(__name__="delta_apply_kernel")
    case = Case(kernel, {"EVEN": True, **settings}, {"reference": "fp16"})
    return budgets.check(case, replace(LEAN, **changes), "cuda")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"spilled": 8}, "8 spilled or on the stack"),
        ({"registers": 65}, "65 registers, more than 64"),
        ({"fused": 1}, "1 fused multiply-adds, not 0"),
        ({"wide_loads": 3}, "3 loads and 4 stores of 128 bits, not 4 and 4"),
        ({"wide_stores": 3}, "4 loads and 3 stores of 128 bits, not 4 and 4"),
        # The limit is 36: 32 values one by one in a tile at an end, and 4 scales.
        ({"narrow_loads": 37}, "37 loads and 0 stores below 32 bits"),
        ({"narrow_stores": 37}, "1 loads and 37 stores below 32 bits"),
    ],
)
def test_each_budget(changes: dict[str, int], said: str) -> None:
    assert wrong({}) == []
    assert wrong(changes) == [said]


def test_kernels_for_uneven_sizes_may_use_narrow_accesses() -> None:
    assert wrong({"wide_loads": 0, "wide_stores": 0, "narrow_loads": 32}, EVEN=False) == []


@pytest.mark.parametrize(
    ("backend", "loads", "wrong"),
    [
        # A thread has 8 float32 elements of each message (TILE 4), so two loads. The code loads three messages: 6.
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
        # Two escapes loaded in one access would be wrong, because places of escapes need not be adjacent.
        ({"narrow_loads": 17}, ["17 loads and 2 stores below 32 bits"]),
        ({"narrow_stores": 3}, ["18 loads and 3 stores below 32 bits"]),
    ],
)
def test_escapes_are_looked_up_one_by_one(changes: dict[str, int], said: list[str]) -> None:
    """A thread has 16 elements of a section, and reads an 8-bit place for each: 16 narrow loads.

    It has two words, and copies a 16-bit value for each in the body of a loop: two more loads, and two stores.
    """
    kernel = SimpleNamespace(__name__="lossless_decode_kernel")
    case = Case(kernel, {"EVEN": True, "TILE": 1}, {"reference": "bf16", "out": "bf16"})
    lean = replace(LEAN, wide_loads=2, wide_stores=2, narrow_loads=18, narrow_stores=2)
    assert budgets.check(case, replace(lean, **changes), "cuda") == said


SASS = """
.text.kernel:
        /*0000*/                   S2R R0, SR_TID.X ;
        /*0010*/              @!P0 BRA `(.L_x_0) ;
        /*0020*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0030*/                   LDG.E.128 R8, desc[UR4][R2.64+0x10] ;
        /*0040*/                   BRA `(.L_x_1) ;
.L_x_0:
        /*0050*/              @!P1 LDG.E.U16 R4, desc[UR4][R2.64] ;
        /*0060*/              @!P2 LDG.E.U16 R8, desc[UR4][R2.64+0x2] ;
.L_x_1:
        /*0070*/                   LDG.E R12, desc[UR4][R2.64+0x80] ;
        /*0080*/                   FADD R4, R4, R8 ;
        /*0090*/              @!P3 LDG.E.64 R8, desc[UR4][R2.64+0x100] ;
        /*00a0*/                   FADD R4, R4, R12 ;
        /*00b0*/               @P4 BRA `(.L_x_1) ;
        /*00c0*/               @P5 EXIT ;
        /*00d0*/                   STG.E.U16 desc[UR4][R2.64], R4 ;
        /*00e0*/                   EXIT ;
"""
AMD = """
kernel:
	s_load_dwordx2 s[0:1], s[0:1], 0x0
	s_cbranch_scc0 .LBB0_2
	global_load_dwordx4 v[4:7], v[2:3], off
	global_load_dwordx4 v[8:11], v[2:3], off offset:16
	s_branch .LBB0_3
.LBB0_2:
	global_load_ushort v4, v[2:3], off
.LBB0_3:
	s_and_saveexec_b64 s[2:3], vcc
	s_cbranch_execz .LBB0_5
	global_load_dword v12, v[2:3], off
.LBB0_5:
	v_add_f32_e32 v4, v4, v8
	global_store_dword v[2:3], v4, off
	s_endpgm
"""


def test_the_path_of_a_complete_tile() -> None:
    """The wide branch, the body of the loop once, and no scales that only some threads store."""
    # Two loads of 16 bytes and one of 4 come before the first use.
    assert path_of(*nvidia_code(SASS)) == Path(instructions=11, repeated=5, in_flight=36)
    assert path_of(*amd_code(AMD)) == Path(instructions=11, repeated=0, in_flight=36)


def test_every_kernel_is_compiled_for_wide_access_too() -> None:
    every = cases("all")
    assert len({(case.name, case.settings) for case in every}) == len(every)
    assert {case.name for case in every} >= {case.name for case in cases("pairs")}
    checked = {case.name for case in cases("pairs") if case.even and case.name in budgets._MOVED}
    assert {case.name for case in every} == checked


def test_every_launched_kernel_is_among_the_compiled_ones() -> None:
    done = run_python("-m", "tests.kernels.launches")
    assert done.returncode == 0 and " 0 unknown" in done.stdout, done.stdout + done.stderr
    # One kernel decodes the messages of all ranks, without further torch operations.
    assert "calls that decode 1, 2 and 64 lossless messages: 1 1 1\n" in done.stdout, done.stdout


def test_the_checks_can_fail() -> None:
    """With fused multiply-adds enabled, bits would differ from the reference's, and the check reports them."""
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
