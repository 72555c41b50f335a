"""Compiles every kernel for GPUs that need not be there, and checks what came out.

    python -m zeropp_kernels.aot                     cases that together have every pair of settings
    python -m zeropp_kernels.aot --cover each        fewer: every setting once
    python -m zeropp_kernels.aot --cover all         every configuration that can be launched
    python -m zeropp_kernels.aot --only quantize --targets sm_90

Exit code 1 if a kernel does not compile, or has spills, local memory, too many registers, fused multiply-adds, or no
128-bit access where the tensors allow it. Wants a process of its own: Triton's interpreter must be off.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from . import copy, delta, lossless, quantize, reduce
from .binaries import Facts, inspect
from .blocks import LAUNCH, ROWS

__all__ = ["TARGETS", "Case", "cases", "check", "compile_case", "main"]

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
REGISTERS = {True: 128, False: 168}  # of a thread: room for four programs on a multiprocessor; three if not even

_INDICES = ("groups", "slots", "source_groups", "blocks", "count", "reset")  # int32; other sizes are int64
_FLOATS = ("beta", "rest", "scale")
_ALIGNED = ("numel", "nbytes", "scales_offset", "state_nbytes", "state_scales_offset", "source_nbytes",
            "source_scales_offset", "room8_offset", "room16_offset")  # fmt: skip
_POINTERS = {
    "messages": "u8", "message": "u8", "sources": "u8", "state": "u8", "table": "i64", "tensor_of_block": "i32",
    "norms": "fp32", "flag": "i32", "offsets": "i64", "offsets8": "i64", "offsets16": "i64", "counts8": "i64",
    "counts16": "i64", "shard": "fp32",
}  # fmt: skip
_DTYPES = {"fp32": triton.language.float32, "bf16": triton.language.bfloat16, "fp16": triton.language.float16}


@dataclass(frozen=True)
class Case:
    """A kernel with its constants, and the dtypes of the pointers that have a choice."""

    kernel: Any
    constants: Mapping[str, object]
    pointers: Mapping[str, str]

    @property
    def name(self) -> str:
        return str(self.kernel.__name__).removesuffix("_kernel")

    @property
    def settings(self) -> str:
        shown = [f"{key.lower()}={int(value)}" for key, value in self.constants.items() if isinstance(value, int)]
        return " ".join([*dict.fromkeys(self.pointers.values()), *(text for text in shown if "tile" not in text)])

    @property
    def even(self) -> bool:
        """Whether wide loads and stores are possible throughout."""
        return all(self.constants.get(key, True) for key in ("EVEN", "FLAT_EVEN"))

    def source(self) -> ASTSource:
        """For triton.compile, specialised as its launcher would for large aligned buffers."""
        names = self.kernel.arg_names
        signature, aligned = {}, {}
        for position, name in enumerate(names):
            if name in self.constants:
                signature[name] = "constexpr"
                continue
            pointer = self.pointers.get(name) or _POINTERS.get(name)
            if pointer is not None:
                signature[name] = f"*{pointer}"
            elif name in _FLOATS:
                signature[name] = "fp32"
            else:
                signature[name] = "i32" if name in _INDICES else "i64"
            if (pointer is not None and name not in ("counts8", "counts16")) or name in _ALIGNED:
                aligned[(position,)] = [["tt.divisibility", 16]]
        return ASTSource(
            self.kernel, signature, {(names.index(key),): value for key, value in self.constants.items()}, aligned
        )


def _product(**rows: Sequence[object]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*rows.values()):
        yield dict(zip(rows, values, strict=True))


_BOTH = (False, True)
_ENCODING = {"BITS": (8, 4), "ROTATE": _BOTH, "FEEDBACK": _BOTH}


def _tile(bits: int) -> int:
    return ROWS * 4 // bits


def _quantize() -> Iterator[Case]:
    for row in _product(dtype=tuple(_DTYPES), EVEN=_BOTH, **_ENCODING):
        dtype = row.pop("dtype")
        row["TILE"] = _tile(row["BITS"])
        yield Case(quantize.quantize_kernel, row, {"x": dtype})
        yield Case(quantize.quantize_tensors_kernel, {**row, "DTYPE": _DTYPES[dtype]}, {"": dtype})
    for row in _product(SOURCE_BITS=(8, 4), **_ENCODING):
        yield Case(quantize.reduce_quantize_kernel, {**row, "TILE": _tile(row["BITS"])}, {})


def _reduce() -> Iterator[Case]:
    for row in _product(dtype=tuple(_DTYPES), BITS=(8, 4), ROTATE=_BOTH, ACCUMULATE=_BOTH, EVEN=_BOTH):
        dtype = row.pop("dtype")
        if dtype == "fp32" or not row["ACCUMULATE"]:
            yield Case(reduce.reduce_kernel, {**row, "TILE": _tile(row["BITS"])}, {"out": dtype})


def _delta() -> Iterator[Case]:
    for row in _product(dtype=("bf16", "fp16"), UPDATE=_BOTH, EVEN=_BOTH):
        pointers = {"reference": row.pop("dtype")}
        yield Case(delta.delta_encode_kernel, {**row, "TILE": ROWS}, pointers)
        if row["UPDATE"]:
            yield Case(delta.delta_apply_kernel, {"EVEN": row["EVEN"], "TILE": ROWS}, pointers)


def _lossless() -> Iterator[Case]:
    tile = {"TILE": lossless.TILE}
    for dtype in ("fp32", "bf16"):
        pointers = {"values": dtype, "reference": "bf16"}
        yield Case(lossless.lossless_count_kernel, tile, pointers)
        yield Case(lossless.lossless_encode_kernel, tile, pointers)
    yield Case(lossless.lossless_count4_kernel, tile, {})
    yield Case(lossless.lossless_count8_kernel, tile, {})
    yield Case(lossless.lossless_decode_kernel, tile, {"reference": "bf16", "out": "bf16"})


def _copy() -> Iterator[Case]:
    for row in _product(dtype=tuple(_DTYPES), flat=tuple(_DTYPES), EVEN=_BOTH, FLAT_EVEN=_BOTH, NORM=_BOTH, FLAG=_BOTH):
        dtype, flat = row.pop("dtype"), row.pop("flat")
        row.update(DTYPE=_DTYPES[dtype], TILE=ROWS // 2)
        yield Case(copy.gather_kernel, row, {"": dtype, "flat": flat})
        yield Case(copy.scatter_kernel, row, {"": dtype, "flat": flat})


def _covering(every: Sequence[Case], size: int) -> list[Case]:
    """Cases that together have every combination of ``size`` settings of each kernel."""
    chosen: list[Case] = []
    for kernel in dict.fromkeys(case.kernel for case in every):
        own = [case for case in every if case.kernel is kernel]
        has = {id(case): _combinations(case, size) for case in own}
        left = set().union(*has.values())
        while left:
            best = max(own, key=lambda case: len(has[id(case)] & left))
            left -= has[id(best)]
            chosen.append(best)
    return chosen


def _combinations(case: Case, size: int) -> set[object]:
    items = [(key, str(value)) for key, value in (*case.constants.items(), *case.pointers.items())]
    return set(itertools.combinations(items, size)) or {()}


def cases(cover: str = "pairs") -> list[Case]:
    """What is compiled: "each" setting once, all "pairs" of settings, or "all" configurations that can be launched."""
    found = [*_quantize(), *_reduce(), *_delta(), *_lossless(), *_copy()]
    return found if cover == "all" else _covering(found, {"each": 1, "pairs": 2}[cover])


def compile_case(case: Case, target: GPUTarget) -> Any:
    """Machine code of a case, from Triton's cache where it has been made before."""
    warps = 128 // target.warp_size
    return triton.compile(case.source(), target=target, options={**LAUNCH, "num_warps": warps})


def check(case: Case, facts: Facts) -> list[str]:
    """What is wrong with the machine code."""
    wrong = []
    if facts.spilled:
        wrong.append(f"{facts.spilled} spilled or on the stack")
    if facts.registers > REGISTERS[case.even]:
        wrong.append(f"{facts.registers} registers, more than {REGISTERS[case.even]}")
    if facts.fused:
        wrong.append(f"{facts.fused} fused multiply-adds")
    if case.even and not case.name.startswith("lossless"):
        if not facts.wide_loads or not facts.wide_stores:
            wrong.append(f"{facts.wide_loads} loads and {facts.wide_stores} stores of 128 bits")
        # Scales are 16 bits each: one access of a thread, or of a thread and message.
        scales = 4
        if facts.narrow_loads > scales or facts.narrow_stores > scales:
            wrong.append(f"{facts.narrow_loads} loads and {facts.narrow_stores} stores below 32 bits")
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cover", default="pairs", choices=["each", "pairs", "all"], help="how many configurations")
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    given = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1 is set; the interpreter and the compiler cannot share a process")
    chosen = [case for case in cases(given.cover) if given.only in case.name]
    failures = 0
    print(f"{'kernel':<18} {'target':<7} {'code':>5} {'regs':>4} {'wide':>7} {'narrow':>7} {'shared':>6}  settings")
    for case, target in itertools.product(chosen, given.targets):
        facts = inspect(compile_case(case, TARGETS[target]))
        wrong = check(case, facts)
        failures += bool(wrong)
        print(
            f"{case.name:<18} {target:<7} {facts.instructions:>5} {facts.registers:>4} "
            f"{facts.wide_loads:>3}/{facts.wide_stores:<3} {facts.narrow_loads:>3}/{facts.narrow_stores:<3} "
            f"{facts.shared:>6}  {case.settings}{'  WRONG: ' + ', '.join(wrong) if wrong else ''}",
            flush=True,
        )
    print(f"{len(chosen)} cases on {len(given.targets)} targets, {failures} wrong")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
