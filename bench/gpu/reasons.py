"""Performance counters of kernels, read by Nsight Compute, with one step per operation."""

from __future__ import annotations

import shutil
import sys
from functools import partial

from bench.gpu import counters
from bench.gpu.part import Ended, Outcome, Part, Row, State, Step, last_words
from bench.gpu.scale import Scale
from bench.kernels.operations import OPERATIONS

__all__ = ["PART"]

_TOOL = "ncu"
_LOG = "counters.csv"
_WRONG = "other bits than by hand"  # part of the error text of bench.gpu.counted


def steps(scale: Scale) -> list[Step]:
    """Return one step per operation, in the order of the table of kernels."""
    found = []
    lacks = _lacks(scale)
    for operation in scale.counted or [operation.name for operation in OPERATIONS]:
        profiler = counters.command(_TOOL, "{folder}/" + _LOG)
        if scale.dry:
            profiler = [sys.executable, "-m", "bench.gpu.stand_in", *profiler[1:]]
        program = [sys.executable, "-m", "bench.gpu.counted", "--operation", operation]
        command = [*profiler, *program, "--mebibytes", str(scale.counted_mebibytes)]
        found.append(Step(operation, command, 45.0, partial(_read, operation), lacks=lacks))
    return found


def _lacks(scale: Scale) -> str | None:
    if scale.dry or shutil.which(_TOOL) is not None:
        return None
    return f"{_TOOL} is not on PATH: counters need NVIDIA Nsight Compute, which comes with the CUDA toolkit"


def _read(operation: str, ended: Ended) -> Outcome:
    if ended.code is None:
        return Outcome(State.UNFINISHED, [], last_words(ended))
    if _WRONG in ended.log.read_text(errors="replace"):
        return Outcome(State.WRONG, [], last_words(ended))
    path = ended.folder / _LOG
    text = path.read_text(errors="replace") if path.exists() else ""
    # A driver may only allow root to read counters. A virtual machine may not allow any user to.
    denied = next((line for line in text.splitlines() if "ERR_NVGPUCTRPERM" in line or "LibraryNotLoaded" in line), "")
    if denied:
        return Outcome(State.ABSENT, [], denied)
    if ended.code:
        return Outcome(State.WRONG, [], f"{last_words(ended)}; {text[-300:]}")
    try:
        rows = [_row(operation, row) for row in counters.parse(text)]
    except ValueError as error:
        return Outcome(State.WRONG, [], str(error))
    return Outcome(State.MEASURED, rows)


def _row(operation: str, found: dict[str, str]) -> Row:
    row = {"operation": operation, "kernel": found["Kernel Name"].partition("(")[0]}
    for counter, column in counters.COUNTERS.items():
        value = counters.number(found, counter)
        scale = {"us": 1e-3, "MB of DRAM": 1e-6}.get(column, 1.0)
        row[column] = "-" if value is None else f"{value * scale:.1f}"
    return {**row, "bound by": counters.bound(found), "warps wait for": counters.stalls(found)}


PART = Part(
    "reasons",
    "Counters of kernels on one card",
    ["operation", "kernel", *counters.COUNTERS.values(), "bound by", "warps wait for"],
    steps,
    notes=(
        "DRAM and SM: percent of what the card can sustain, over the kernel's time. Bound by: the larger of them from "
        "60 % on, else latency. Occupancy: warps that were active, of as many as a multiprocessor holds. Warps wait "
        "for: the three commonest stall reasons, in warps for each instruction issued. Caches are flushed before each "
        "pass, clocks are as they were. Of every operation the results are compared with those by hand first.",
    ),
    needs=("pydantic",),
)
