"""Steps, memory and host time compared with FSDP2, with and without clipping; a timeline; several ranks on one GPU."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from bench.common import WARM_UP
from bench.gpu.part import Ended, Outcome, Part, Row, State, Step, last_words
from bench.gpu.scale import Model, Scale
from bench.step_time import report
from bench.step_time.__main__ import parse_arguments
from bench.step_time.launch import rank_command

__all__ = ["PART", "SYSTEMS", "common", "job", "too_small"]

SYSTEMS = ("fsdp2", "zeropp", "fsdp2_clipped", "fsdp2_clipped_again", "zeropp_clipped")
_STATES = 16  # bytes per parameter: weights, gradients and both of Adam's averages, in float32
_BESIDE = 8  # bytes per parameter for activations, gathered weights and the copy of the weights that is compared
_RESULT = "{folder}/result.json"


def steps(scale: Scale) -> list[Step]:
    """Return the steps: a race per model (small ones also alone), a timeline of the smallest, ranks on one GPU."""
    found = []
    for model in scale.models:
        ways = ("in turns", "alone") if model.side_by_side else ("alone",)
        found += [_race(scale, model, way) for way in ways]
    found.append(_timeline(scale, scale.models[0]))
    found += [_staged(scale, ranks) for ranks in scale.staged]
    return found


def _race(scale: Scale, model: Model, way: str) -> Step:
    """Return a step with all systems in one process, "in turns" or one after another ("alone")."""
    # A model with a race in turns runs alone only to measure memory, so a few steps suffice.
    turns = ("--rounds=2", "--discard=1", "--steps=2") if model.side_by_side and way == "alone" else scale.turns
    flags = [*common(scale, 1), f"--systems={','.join(SYSTEMS)}", *turns, *model.flags]
    flags += ["--alone"] * (way == "alone")
    beside = len(SYSTEMS) if model.side_by_side else 1
    return job(f"{model.name} {way}", flags, model.name, 110.0, too_small(scale, model, beside))


def _staged(scale: Scale, ranks: int) -> Step:
    """Return a step with several ranks on one GPU over the staged backend. It tests streams under load, not speed."""
    flags = [*common(scale, ranks), "--staged", "--systems=fsdp2_clipped,zeropp_clipped", *scale.staged_flags]
    return job(f"staged {ranks}", flags, "staged", 80.0, None)


def common(scale: Scale, ranks: int) -> list[str]:
    """Return the flags of ``bench.step_time`` that all races share."""
    return [f"--device={scale.device}", f"--ranks={ranks}", "--dtype=bf16"]


def job(
    name: str, flags: Sequence[str], model: str, seconds: float, lacks: str | None, beside: Sequence[str] = ()
) -> Step:
    """Return a step that races systems.

    Args:
        name: name of the step.
        flags: arguments of ``bench.step_time``.
        model: name of the model in the table.
        seconds: time limit.
        lacks: reason why the machine cannot run the step; None if it can.
        beside: names of earlier steps whose losses and norms must agree.
    """
    args = parse_arguments(list(flags))
    command, environment = rank_command(args, Path(_RESULT), "not counted here")
    return Step(name, command, seconds, partial(_read, name, model, args, beside), environment, lacks)


def too_small(scale: Scale, model: Model, beside: int = 1) -> str | None:
    """Return the reason why a GPU is too small for a model in ``beside`` systems; None if it fits or in a dry run."""
    needed = model.numel * (_STATES * beside + _BESIDE)
    has = needed if scale.dry else torch.cuda.get_device_properties(0).total_memory
    return None if needed <= has else f"needs about {needed >> 30} GiB, and the card has {has >> 30}"


def _read(name: str, model: str, args: argparse.Namespace, beside: Sequence[str], ended: Ended) -> Outcome:
    """Return the outcome with one row per system; wrong if the systems did not do equal work."""
    if ended.code is None:
        return Outcome(State.UNFINISHED, [], last_words(ended))
    path = ended.folder / "result.json"
    if ended.code or not path.exists():
        return Outcome(State.WRONG, [], last_words(ended))
    measured = json.loads(path.read_text())
    own = measured["systems"]
    others = [ended.folder.parent / each.replace(" ", "-") / path.name for each in beside]
    found = [json.loads(other.read_text())["systems"] for other in others if other.exists()]
    measured["systems"] = {system: took for systems in [*found, own] for system, took in systems.items()}
    report.complete(measured, args)
    problems = report.problems(measured)
    rows = [_row(name, model, system, measured) for system in own]
    return Outcome(State.WRONG if problems else State.MEASURED, rows, "; ".join(problems))


def _row(name: str, model: str, system: str, measured: dict) -> Row:
    found = measured["systems"][system]
    step = statistics.median(found["step_s"])
    row = {
        "model": model,
        "how": name.removeprefix(model).strip(),
        "ranks": str(measured["settings"]["ranks"]),
        "system": system,
        "step ms": f"{1000 * step:.1f}",
        "host ms": f"{1000 * statistics.median(found['host_s']):.1f}",
        "CPU ms": f"{1000 * statistics.median(found['cpu_s']):.1f}",
        "weights apart": report.weights_apart(system, measured),
    }
    for column, base in (("/ FSDP2", report.REFERENCE), ("/ plain", "plain")):
        other = measured["systems"].get(base + report.CLIPPED * report.clips(system))
        row |= {column: f"{step / statistics.median(other['step_s']):.3f}"} if other else {}
    memory = {"peak MiB": "peak_bytes", "reserved MiB": "reserved_bytes"}
    return row | {column: f"{found[key] / 2**20:.0f}" for column, key in memory.items() if key in found}


def _timeline(scale: Scale, model: Model) -> Step:
    """Return a step that runs one training step of each clipped system under torch's profiler."""
    command = [sys.executable, "-m", "bench.gpu.timeline", "{folder}"]
    flags = [*common(scale, 1), "--systems=fsdp2_clipped,zeropp_clipped", *model.flags]
    _, environment = rank_command(parse_arguments(flags), Path(_RESULT), "not counted here")
    return Step("timeline", [*command, *flags], 80.0, partial(_read_timeline, model.name), environment)


def _read_timeline(model: str, ended: Ended) -> Outcome:
    path = ended.folder / "timeline.json"
    if ended.code is None:
        return Outcome(State.UNFINISHED, [], last_words(ended))
    if ended.code or not path.exists():
        return Outcome(State.WRONG, [], last_words(ended))
    found = json.loads(path.read_text())
    rows = []
    for system, took in found.items():
        row = {"model": model, "how": "timeline", "ranks": "1", "system": system}
        row |= {"step ms": f"{took['step_ms']:.1f}", "launches": str(took["launches"]), "NCCL": str(took["nccl"])}
        row |= {"device busy ms": f"{took['busy_ms']:.1f}", "host waits ms": f"{took['waits_ms']:.1f}"}
        rows.append(row)
    return Outcome(State.MEASURED, rows, artefacts=[str(each) for each in sorted(ended.folder.glob("*.json.gz"))])


PART = Part(
    "engine",
    "The engine beside FSDP2 on one card",
    [
        "model", "how", "ranks", "system", "step ms", "/ FSDP2", "host ms", "CPU ms", "peak MiB", "reserved MiB",
        "weights apart", "device busy ms", "host waits ms", "launches", "NCCL",
    ],
    steps,
    notes=(
        report.ONE_RANK,
        "bf16, fused AdamW, inputs from pinned memory. / FSDP2: to the arm of the same run that clips, or not, as it "
        f"does. Clipped arms clip to {report.CLIP:g}. Equal work: losses of the first {report.COMPARED} steps agree "
        f"within {report.LOSS_TOLERANCE['bf16']:g}, norms before clipping within {report.NORM_TOLERANCE['bf16']:g} of "
        "them; weights apart, at the end and as a share of the way that they have gone, at most "
        f"{report.WEIGHT_TOLERANCE['bf16']:g}.{report.yardstick_note('bf16')} The learning rate rises over the first "
        f"{WARM_UP} steps to 3e-4 * min(1, 384 / width). In turns: systems side by side, A B A B. Alone: one after "
        "another, each gone before the next is built, so that its peaks of allocated and reserved memory are its own. "
        "Host: until the last call of a step had returned. Staged: ranks share the card through gloo and host memory, "
        "which shows streams under load and nothing of speed.",
        "Timeline: one step under torch's profiler, which makes the host slower; a trace a system is kept beside this "
        "report, for chrome://tracing or Perfetto. Device busy: some kernel or copy runs. Host waits: inside calls "
        "that synchronise. NCCL: kernels of that name.",
    ),
    needs=("pydantic",),
)  # fmt: skip
