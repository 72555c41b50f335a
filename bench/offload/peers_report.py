"""The table of ``bench.offload.peers``, and the checks without which it is not printed."""

from __future__ import annotations

import math
from statistics import median
from typing import Any

from bench.step_time.report import CLIP, LOSS_TOLERANCE, NORM_TOLERANCE

__all__ = ["problems", "reference", "table", "visible"]

COLUMNS = (
    "system", "s a step", "/ none (min, max)", "step() s", "visible s", "M parameters/s", "peak MiB", "building MiB",
    "disk MiB", "losses apart",
)  # fmt: skip
PEERS = ("fsdp2", "deepspeed")
NOISE = 0.01  # part of a step below which times cannot be measured


def reference(name: str, names: list[str]) -> str:
    """Return the system whose forward and backward contain no part of a step: of the same library, if there is one."""
    if name.startswith("fsdp2"):
        return "fsdp2" if "fsdp2" in names else name
    if name.startswith("deepspeed"):
        return name
    return "none" if "none" in names else name


def visible(name: str, systems: dict[str, Any]) -> list[float]:
    """Return, for each round, the seconds of a step beyond its reference's forward and backward.

    The result is at least the time of ``step()``, because two forwards differ by more than a short step takes.
    """
    own, base = systems[name], systems[reference(name, list(systems))]
    computing = [sum(pair) for pair in zip(base["forward_s"], base["backward_s"], strict=True)]
    longer = [whole - without for whole, without in zip(own["step_s"], computing, strict=True)]
    return [max(pair) for pair in zip(longer, own["step_call_s"], strict=True)]


def _apart(one: list[float], other: list[float]) -> float:
    """Return the largest difference, or NaN if there is one, which Python's ``max`` might skip."""
    gaps = [abs(a - b) for a, b in zip(one, other, strict=True)]
    return math.nan if any(math.isnan(gap) for gap in gaps) else max(gaps)


def problems(measured: dict[str, Any]) -> list[str]:
    """Return the reasons for not reporting these results; empty if there are none."""
    systems, dtype = measured["systems"], measured["settings"]["dtype"]
    first = next(iter(systems))
    ours = [name for name in systems if not name.startswith(PEERS)]
    found = []
    for name, system in systems.items():
        # Offload must not change any bit of zeropp's losses.
        other, tolerance = (ours[0], 0.0) if name in ours else (first, LOSS_TOLERANCE[dtype])
        gap = _apart(system["losses"], systems[other]["losses"])
        if not gap <= tolerance:
            found.append(f"losses of {name} and {other} differ by {gap:.2e}, more than {tolerance:g}")
    norms = {name: system["norms"] for name, system in systems.items() if system["norms"]}
    for name, own in norms.items():
        if not max(own) > CLIP:
            found.append(f"{name} clipped nothing: no norm exceeds {CLIP}, the largest is {max(own)}")
        gap = _apart([1.0] * len(own), [a / b for a, b in zip(own, next(iter(norms.values())), strict=True)])
        if not gap <= NORM_TOLERANCE[dtype]:
            found.append(f"norms of {name} and {next(iter(norms))} differ by {gap:.2e} of them")
    return found


def table(measured: dict[str, Any]) -> str:
    """Return the report: settings, the table and notes."""
    settings, systems = measured["settings"], measured["systems"]
    rounds = settings["rounds"] - settings["discard"]
    lines = [
        f"GPT of {numel(settings) / 1e6:.1f} M parameters ({settings['layers']} layers, width {settings['d_model']}), "
        f"{settings['batch']} x {settings['seq_len']} bytes a rank; {settings['ranks']} "
        f"rank{'s'[: settings['ranks'] > 1]} of {settings['threads']} thread{'s'[: settings['threads'] > 1]}, "
        f"{settings['dtype']}; AdamW, gradients clipped to {CLIP:g}. {rounds} rounds of {settings['steps']} steps.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{'---|' * len(COLUMNS)}",
        *(_row(name, measured) for name in systems),
        "",
        *_notes(measured),
    ]
    return "\n".join(lines)


def numel(settings: dict[str, Any]) -> int:
    """Return the number of parameters of the model."""
    from examples.gpt import GPTConfig, parameter_count  # imported here because a launcher otherwise needs no torch

    return parameter_count(GPTConfig(256, settings["layers"], settings["d_model"], settings["heads"]))


def _row(name: str, measured: dict[str, Any]) -> str:
    systems = measured["systems"]
    system, base = systems[name], systems["none" if "none" in systems else next(iter(systems))]
    ratios = [own / other for own, other in zip(system["step_s"], base["step_s"], strict=True)]
    seen = median(visible(name, systems))
    # Below NOISE, the visible time is too small for a meaningful speed.
    speed = f"{numel(measured['settings']) / seen / 1e6:.0f}" if seen > NOISE * median(system["step_s"]) else "-"
    mebibytes = [f"{system[key] / 2**20:.0f}" if key in system else "-" for key in _BYTES]
    cells = [
        name,
        f"{median(system['step_s']):.3f}",
        f"{median(ratios):.3f} ({min(ratios):.3f}, {max(ratios):.3f})",
        f"{median(system['step_call_s']):.3f}",
        f"{seen:.3f}",
        speed,
        *mebibytes,
        f"{_apart(system['losses'], base['losses']):.1e}",
    ]
    return f"| {' | '.join(cells)} |"


_BYTES = ("peak_bytes", "building_bytes", "disk_bytes")


def _notes(measured: dict[str, Any]) -> list[str]:
    dtype, skipped = measured["settings"]["dtype"], measured["skipped"]
    notes = [
        "Medians over rounds; ratios by round. step(): clipping, the optimizer's call and `zero_grad()`. Visible: by "
        "how much a step is longer than forward and backward of `none` (for FSDP2: of `fsdp2`; for DeepSpeed: of its "
        "own), by round, but no less than step(); parameters a second are all of the model's by that time, on all "
        f"ranks, if it is more than {NOISE:.0%} of a step.",
        "Peak: anonymous memory of the rank that has most, in a job of its own: above what the process had before the "
        "model, while it trains, and while it is built. Disk: of all ranks.",
        "none: zeropp's stage 3; cpu: its `offload_optimizer` with the lazy step, cpu_eager: waited for, cpu_part: a "
        "half of it; nvme: in files, pipelined; nvme_all: weights, too. fsdp2_cpu: CPUOffloadPolicy; deepspeed_cpu: "
        "ZeRO-3 with `offload_optimizer` and DeepSpeedCPUAdam. On a CPU, offload to it moves nothing.",
        f"Losses of ours agree to the bit, those of peers within {LOSS_TOLERANCE[dtype]:g} over all "
        f"{len(next(iter(measured['systems'].values()))['losses'])} steps; norms before clipping within "
        f"{NORM_TOLERANCE[dtype]:g} of them.",
    ]
    notes += [f"{name} did not run: {reason}." for name, reason in skipped.items()]
    return "\n\n".join(notes).split("\n")
