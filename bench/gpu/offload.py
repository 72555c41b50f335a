"""Offload on a GPU: results bit for bit, delayed streams, steps compared with FSDP2's offload, copies over the bus."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch

from bench.gpu.bits import tests_step
from bench.gpu.part import Ended, Outcome, Part, Row, State, Step, last_words
from bench.gpu.scale import Model, Scale
from bench.offload import bus, race
from bench.step_time.__main__ import parse_arguments
from bench.step_time.launch import rank_command
from bench.step_time.report import COMPARED, LOSS_TOLERANCE

__all__ = ["PART", "race_step"]

_CHECKS = {
    "offload": (["tests/gpu/test_offload.py"], 90.0),
    "late offload": (["tests/gpu/test_delayed_offload.py"], 90.0),
}
"""Name of a step -> its test files and its time limit in seconds."""
_RESULT = "race.json"
# Bytes per parameter: GPU memory without offload; GPU memory with offload, which holds the full model while it is
# wrapped; host memory; disk.
_CARD, _WHOLE, _HOST, _DISK = 24, 8, 20, 16


def steps(scale: Scale) -> list[Step]:
    """Return the steps: checks first, then each system with all models."""
    found = [
        tests_step(scale, name, _CHECKS[name][0], chosen, _CHECKS[name][1]) for name, chosen in scale.offloaded.items()
    ]
    command = [sys.executable, "-m", "bench.offload.bus", f"--mebibytes={scale.bus_mebibytes}"]
    found.append(Step("bus", [*command, "--json={folder}/bus.json"], 40.0, _read_bus))
    # Grouped by system, because NVMe may take longer than all other systems together.
    for system in scale.offload_systems:
        turns = scale.slow_turns if system == "nvme" else scale.offload_turns
        found += [race_step(scale, model, system, turns) for model in scale.offload_models]
    return found


def race_step(scale: Scale, model: Model, system: str, turns: Sequence[str]) -> Step:
    """Return a step that runs a system of ``bench.offload.race``; ``turns`` are further arguments of that program."""
    flags = [f"--system={system}", f"--device={scale.device}", *turns, *model.flags]
    command = [sys.executable, "-m", "bench.offload.race", *flags, "--json={folder}/" + _RESULT]
    alone = parse_arguments([f"--device={scale.device}", "--ranks=1"])
    _, environment = rank_command(alone, Path(_RESULT), "not counted here")
    # Both zeropp and FSDP2 step on the host with all cores.
    cores = 1 if scale.dry else len(os.sched_getaffinity(0))
    name = f"{model.name} {system}"
    lacks = None if scale.dry else _lacks(model.numel, system)
    return Step(
        name, command, 300.0 if system == "nvme" else 120.0, partial(_read, name, model.name, system),
        {**environment, "OMP_NUM_THREADS": str(cores)}, lacks,
    )  # fmt: skip


def _lacks(numel: int, system: str) -> str | None:
    """Return a text about memory or disk space that is too small for a system; None if all suffice."""
    card = torch.cuda.get_device_properties(0).total_memory
    host = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    disk = shutil.disk_usage(tempfile.gettempdir()).free
    needed = {
        "the card": (numel * (_CARD if system == "none" else _WHOLE), card),
        "the host's free memory": (numel * (0 if system in ("none", "nvme") else _HOST), host),
        "the disk's free space": (numel * _DISK * (system == "nvme"), disk),
    }
    for what, (least, has) in needed.items():
        if least > has:
            return f"needs about {least >> 30} GiB of {what}, and there are {has >> 30}"
    return None


def _read(name: str, model: str, system: str, ended: Ended) -> Outcome:
    """Return the outcome with one row per way; wrong if the losses differ from those of another measured system."""
    if ended.code is None:
        return Outcome(State.UNFINISHED, [], last_words(ended))
    path = ended.folder / _RESULT
    if ended.code or not path.exists():
        return Outcome(State.WRONG, [], last_words(ended))
    found = json.loads(path.read_text())
    others = {each: _beside(ended.folder, model, each) for each in race.SYSTEMS if each != system}
    wrong = [
        f"losses of {name}, {found['losses'][:COMPARED]}, are not those of {each}, {other['losses'][:COMPARED]}"
        for each, other in others.items() if other is not None and not _agree(found["losses"], other["losses"])
    ]  # fmt: skip
    rows = [_row(model, system, way, found, others.get("fsdp2")) for way in found["arms"]]
    return Outcome(State.WRONG if wrong else State.MEASURED, rows, "; ".join(wrong))


def _beside(folder: Path, model: str, system: str) -> dict | None:
    """Return the results of another system; None if it has not been measured."""
    path = folder.parent / f"{model} {system}".replace(" ", "-") / _RESULT
    return json.loads(path.read_text()) if path.exists() else None


def _agree(losses: Sequence[float], others: Sequence[float]) -> bool:
    pairs = zip(losses[:COMPARED], others[:COMPARED], strict=True)
    return all(abs(a - b) <= LOSS_TOLERANCE["bf16"] * abs(b) for a, b in pairs)  # NaN also gives False


def _row(model: str, system: str, way: str, found: dict, fsdp2: dict | None) -> Row:
    arm = found["arms"][way]
    step, forward = median(arm["step_s"]), median(arm["forward_s"])
    row = {
        "check": f"{model} {system}",
        "how": way or "-",
        "step ms": f"{1000 * step:.1f}",
        "exposed ms": f"{1000 * (median(arm['both_s']) - forward):.1f}",
        "forward ms": f"{1000 * forward:.1f}",
    }
    if fsdp2 is not None or system == "fsdp2":
        other = found if fsdp2 is None else fsdp2
        row["/ FSDP2"] = f"{step / median(other['arms']['']['step_s']):.3f}"
    row |= {f"{kind} ms": f"{1000 * seconds:.1f}" for kind, seconds in (found["parts_s"] or {}).items()}
    if found["bound_s"] is not None:
        row["bound ms"] = f"{1000 * found['bound_s']:.1f}"
    memory = {
        "card MiB": "peak_bytes", "card planned": "planned_bytes", "host MiB": "host_bytes",
        "host planned": "planned_host_bytes", "locked MiB": "locked_bytes", "locked planned": "pinned_bytes",
        "disk planned": "planned_disk_bytes",
    }  # fmt: skip
    return row | {name: f"{found[key] / 2**20:.0f}" for name, key in memory.items() if found.get(key) is not None}


def _read_bus(ended: Ended) -> Outcome:
    if ended.code is None:
        return Outcome(State.UNFINISHED, [], last_words(ended))
    if ended.code:
        return Outcome(State.WRONG, [], last_words(ended))
    found = json.loads((ended.folder / "bus.json").read_text())
    rates = {name: took["bytes"] / took["seconds"] / 1e9 for name, took in found.items()}
    rows = []
    for name, took in found.items():
        share = rates[name] / rates[bus.RAW[took["direction"]]]
        rows.append({"check": "bus", "how": name, "GB/s": f"{rates[name]:.2f}", "% of bare": f"{100 * share:.0f}"})
    return Outcome(State.MEASURED, rows)


PART = Part(
    "offload",
    "Offload on one card",
    [
        "check", "how", "passed", "failed", "skipped", "seconds", "step ms", "/ FSDP2", "exposed ms", "bound ms",
        "forward ms", "copy down ms", "step on host ms", "copy up ms", "card MiB", "card planned", "host MiB",
        "host planned", "locked MiB", "locked planned",
        "disk planned", "GB/s", "% of bare", "note",
    ],
    steps,
    notes=(
        "Offload: losses of ten float32 steps within 1e-6 of those without offload on the card, whose fused AdamW "
        "rounds otherwise than the host's; the same bits whether states and weights are in the host's memory or in "
        "files, the rings page-locked or not, steps lazy or eager; page-locked is what the plan says. Late offload: "
        "the bits of a run without delays, with sleeping kernels at the start of streams' work and of computing, and "
        "steps, reads and copies of the host that are late.",
        "Systems, each in a process of its own, in bf16 with fused AdamW, clipped: FSDP2 with "
        "CPUOffloadPolicy(pin_memory=True); zeropp without offload, with states on the host, with a half of them, and "
        f"in files. Losses of the first {COMPARED} steps agree within {LOSS_TOLERANCE['bf16']:g}. Exposed: a step and "
        "the forward after it, less that forward with nothing to wait for; bound: the least that any order leaves of "
        "it. Copy down, step on host and copy up: their times in a step, added up; they run beside each other and "
        "beside computing. Card: peak of allocated memory while it trains; planned: the plan's terms, states and new "
        "weights, and two units under way; what is between them is activations. Host: anonymous memory, at most, "
        "which page-locked memory is no part of. Locked: page-locked memory of zeropp, which is shared memory.",
        "Bus: of one unit's float32 values; the share is of a bare copy of pinned memory the same way.",
    ),
    needs=("pytest", "pydantic"),
)  # fmt: skip
