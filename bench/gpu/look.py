"""A short look at all aspects: checks side by side, then steps, kernels, memory and offload, most useful first.

Estimated seconds on an H200. Times of training steps are from a first run. A process is assumed to need 12 s until it
trains, and 5 s more if it compiles Triton kernels.

    checks          50   3 calls of pytest side by side
    1.3 B           75   4 processes x 12, 5 for kernels, 10 for DeepSpeed's extension, 12 steps of 0.15 to 0.33 s
    256 MiB         30   limit 50; mostly compilation
    0.37 B          25   one process, 4 x 12 steps of 0.03 to 0.15 s
    live memory     25   one process, 2 x 5 steps
    compiled        50   one process, 25 for the first compilation, 10 for the second, which finds cached kernels
    offload 1.3 B   45   2 processes x 12, 6 steps of 1.4 and of 1.0 s, page-locking of 16 GB
    together       300   limit 345
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from bench.gpu.bits import check
from bench.gpu.engine import common, job, too_small
from bench.gpu.kernels import bandwidth
from bench.gpu.offload import race_step
from bench.gpu.part import Ended, Outcome, Part, Row, State, Step, last_words, missing
from bench.gpu.scale import Model, Scale
from bench.step_time import report
from bench.step_time.__main__ import parse_arguments
from bench.step_time.launch import rank_command

__all__ = ["PART"]

_CHECK_SECONDS = 75.0
# As in the first run: gradients are reduced in float32, and FSDP2 also frees its root unit after forward.
_ALIKE = ("--reduce-dtype=fp32", "--release-root")
_PAIR = "--systems=fsdp2_clipped,zeropp_clipped"
_SMALL = "--systems=plain_clipped,zeropp_clipped,fsdp2_clipped,fsdp2_clipped_again"


def steps(scale: Scale) -> list[Step]:
    """Return the steps: all checks at the same time, then the measurements one after another."""
    look = scale.look
    found = [
        replace(check(scale, name, chosen), seconds=_CHECK_SECONDS, together=True, lacks=missing("pytest"))
        for name, chosen in look.checks.items()
    ]
    found += _alone(scale)
    # The first entry has the largest size, and only large sizes have targets.
    fastest = replace(bandwidth(*scale.bandwidth[0]), lacks=missing("pytest", "pytest_benchmark"))
    found.append(_as(fastest, {"operation": "subject", "by": "note"}))
    found.append(_race(scale, look.small, look.small.name, _SMALL, 60.0))
    found.append(_memory(scale, look.large))
    compiled = _race(scale, look.large, f"{look.large.name} compiled", _PAIR, 100.0, "--compiled")
    found.append(replace(compiled, environment={**compiled.environment, **look.compiled}))
    model = Model(f"offload {look.large.name}", look.large.flags)
    for system, turns in look.offloaded.items():
        step = race_step(scale, model, system, turns)
        found.append(_as(replace(step, seconds=80.0), {"how": "subject", "card MiB": "peak MiB"}))
    return found


def _alone(scale: Scale) -> list[Step]:
    """Return one step per system for the large model, in separate processes, so that one failure stops no other."""
    found: list[Step] = []
    for system in scale.look.systems:
        beside = [step.name for step in found]
        name = f"{scale.look.large.name} {system}"
        step = _race(scale, scale.look.large, name, f"--systems={system}", 80.0, beside=beside)
        found.append(replace(step, lacks=step.lacks or _lacks(scale, system)))
    return found


def _lacks(scale: Scale, system: str) -> str | None:
    if system != "deepspeed_clipped":
        return None
    return missing("deepspeed") or ("left out of a dry run: it compiles an extension" if scale.dry else None)


def _race(
    scale: Scale, model: Model, name: str, systems: str, seconds: float, *more: str, beside: Sequence[str] = ()
) -> Step:
    """Return a step with systems one after another in one process."""
    flags = [*common(scale, 1), *_ALIKE, systems, "--alone", *scale.look.turns, *model.flags, *more]
    label = f"{model.name}{', blocks compiled' * ('--compiled' in more)}"
    step = job(name, flags, label, seconds, too_small(scale, model), beside)
    return _as(step, {"model": "check", "system": "subject"})


def _as(step: Step, columns: Mapping[str, str]) -> Step:
    """Return another part's step with its columns renamed; rows without a check get the step's name."""

    def read(ended: Ended) -> Outcome:
        outcome = step.read(ended)
        rows = [{columns.get(name, name): text for name, text in row.items()} for row in outcome.rows]
        return replace(outcome, rows=[{"check": step.name, **row} for row in rows])

    return replace(step, read=read)


def _memory(scale: Scale, model: Model) -> Step:
    flags = [*common(scale, 1), *_ALIKE, _PAIR, *model.flags]
    _, environment = rank_command(parse_arguments(flags), Path("memory.json"), "not counted here")
    command = [sys.executable, "-m", "bench.gpu.memory", "{folder}", *flags]
    return Step("live memory", command, 60.0, partial(_read_memory, model.name), environment, too_small(scale, model))


def _read_memory(model: str, ended: Ended) -> Outcome:
    path = ended.folder / "memory.json"
    if ended.code is None:
        return Outcome(State.UNFINISHED, [], last_words(ended))
    if ended.code or not path.exists():
        return Outcome(State.WRONG, [], last_words(ended))
    rows: list[Row] = []
    for system, took in json.loads(path.read_text()).items():
        head = {"check": f"{model}, live memory"}
        for phase in took["phases"]:
            live, peak = (f"{phase[key] / 2**20:.0f}" for key in ("live_bytes", "peak_bytes"))
            rows.append({**head, "subject": f"{system}, {phase['phase']}", "live MiB": live, "peak MiB": peak})
        for each in took["held"]:
            live, note = f"{each['bytes'] / 2**20:.0f}", f"{each['tensors']} from {each['frame']}"
            rows.append({**head, "subject": f"{system}, peak of backward", "live MiB": live, "note": note})
    return Outcome(State.MEASURED, rows)


PART = Part(
    "look",
    "One look at one card",
    [
        "check", "subject", "passed", "failed", "skipped", "seconds", "step ms", "/ plain", "/ FSDP2", "host ms",
        "live MiB", "peak MiB", "reserved MiB", "us", "GB/s", "% of copy", "% of data sheet",
        "target", "note",
    ],
    steps,
    notes=(
        "Checks: a selection of the part `bits`, at the same time. Steps: systems alone, bf16, every unit released "
        f"after forward; clipped ones to {report.CLIP:g}; times while steps follow each other without waiting. plain: "
        "bf16 weights kept whole, fp32 main weights, copies between them, fused AdamW, no engine; the least that mixed "
        f"precision costs. Losses of the first {report.COMPARED} steps agree within {report.LOSS_TOLERANCE['bf16']:g} "
        f"and norms within {report.NORM_TOLERANCE['bf16']:g} of them. At 1.3 B, where each system has a process of its "
        "own, the lengths of their weights' ways are compared; elsewhere the weights.",
        report.ONE_RANK,
        "Live memory: of tensors at the end of a phase of one step, and at its peak; that of `between steps` covers "
        "all earlier steps. Then the largest holders at the peak of backward, by the line of Python that allocated "
        "since the step began. Kernels: as in the part `kernels`. Offload: as in the part `offload`, with fewer steps; "
        "FSDP2 with CPUOffloadPolicy beside states on the host.",
    ),
    needs=("pydantic",),
)  # fmt: skip
