"""Facts about a compiled kernel: registers, spills, widths of loads and stores, fused multiply-adds."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from typing import Any

import triton

from .paths import Path, amd_code, nvidia_code, path_of

__all__ = ["Facts", "inspect"]

_TOOLS = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Facts:
    """Facts about the machine code of one kernel on one target. Instructions in loops count once.

    Attributes:
        instructions: number of machine instructions, without padding.
        registers: registers per thread (vector registers on AMD).
        spilled: on NVIDIA, bytes of stack and local memory plus number of local loads and stores. On AMD, number of
            spilled vector registers plus bytes of scratch memory. 0 if nothing spills.
        wide_loads, wide_stores: number of 128-bit loads and stores of global memory.
        narrow_loads, narrow_stores: number of loads and stores of global memory below 32 bits.
        fused: number of fused multiply-adds that are not part of a division; a packed instruction counts as two.
        shared: bytes of shared memory.
        path: counts of the instructions that a program with a complete and aligned tile executes.
    """

    instructions: int
    registers: int
    spilled: int
    wide_loads: int
    wide_stores: int
    narrow_loads: int
    narrow_stores: int
    fused: int
    shared: int
    path: Path


def inspect(kernel: Any) -> Facts:
    """Return the facts of a kernel from ``triton.compile``."""
    return _nvidia(kernel) if "cubin" in kernel.asm else _amd(kernel)


def _run(tool: str, *arguments: str) -> str:
    done = subprocess.run([str(_TOOLS / tool), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{tool} {' '.join(arguments)} failed: {done.stderr}")
    return done.stdout


def _nvidia(kernel: Any) -> Facts:
    handle, name = tempfile.mkstemp(suffix=".cubin")
    try:
        # The tools read files only.
        with os.fdopen(handle, "wb") as file:
            file.write(kernel.asm["cubin"])
        listing, labels = nvidia_code(_run("nvdisasm", "-c", name))
        usage = _run("cuobjdump", "-res-usage", name)
    finally:
        os.unlink(name)

    # Code is padded with NOP.
    code = Counter(each.opcode for each in listing if each.opcode != "NOP")

    def count(pattern: str) -> int:
        return sum(number for opcode, number in code.items() if re.match(pattern, opcode))

    # Raise if the output of a future tool does not match, because a missing number must not count as 0 spills.
    def resource(key: str) -> int:
        found = re.search(rf"{key}:(\d+)", usage)
        if found is None:
            raise RuntimeError(f"cuobjdump said nothing about {key}: {usage!r}")
        return int(found.group(1))

    return Facts(
        instructions=sum(code.values()),
        registers=resource("REG"),
        spilled=resource("STACK") + resource("LOCAL") + count(r"LDL|STL"),
        wide_loads=count(r"LDG\..*\b128"),
        wide_stores=count(r"STG\..*\b128"),
        narrow_loads=count(r"LDG\..*\b[US](8|16)\b"),
        narrow_stores=count(r"STG\..*\b[US](8|16)\b"),
        # Counted in PTX, where divisions are not yet expanded into multiply-adds.
        fused=sum(2 if packed else 1 for packed in re.findall(r"\bfma\.rn\S*\.f32(x2)?", kernel.asm["ptx"])),
        shared=kernel.metadata.shared,
        path=path_of(listing, labels),
    )


def _amd(kernel: Any) -> Facts:
    text = kernel.asm["amdgcn"]
    listing, labels = amd_code(text)
    code = Counter(each.opcode for each in listing)

    def count(pattern: str) -> int:
        return sum(number for opcode, number in code.items() if re.fullmatch(pattern, opcode))

    def resource(key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", text)
        if found is None:
            raise RuntimeError(f"the code object says nothing about {key}")
        return int(found.group(1))

    # A division expands to v_div_fmas and five multiply-adds before it, which do not count. A packed instruction counts
    # as two.
    fused = count(r"v_(fma|fmac|fmaak|fmamk|mad)_f32(_e32|_e64)?") + 2 * count(r"v_pk_(fma|fmac|mad)_f32(_e32|_e64)?")
    fused -= 5 * count(r"v_div_fmas_f32(_e64)?")
    return Facts(
        instructions=sum(code.values()),
        registers=resource("vgpr_count"),
        # Scalar registers spill into lanes of vector registers, which takes no memory, so they do not count.
        spilled=resource("vgpr_spill_count") + resource("private_segment_fixed_size"),
        wide_loads=count(r"(global|buffer)_load_dwordx4"),
        wide_stores=count(r"(global|buffer)_store_dwordx4"),
        narrow_loads=count(r"(global|buffer)_load_[us]?(byte|short).*"),
        narrow_stores=count(r"(global|buffer)_store_(byte|short).*"),
        fused=max(fused, 0),
        shared=kernel.metadata.shared,
        path=path_of(listing, labels),
    )
