"""From what step_time.py measured to what may be said about it."""

from __future__ import annotations

import json
import os
import platform
import statistics
from datetime import date
from pathlib import Path

import torch

REFERENCE = "fsdp2"
COMPARED_LOSSES = 4
# fp32 systems differ in the order of sums only. In bf16 weights, activations and gradients are rounded at
# different places; the first losses of this model move by some thousandths.
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2}


def problems(measured: dict) -> list[str]:
    """Why these figures must not be reported; empty if they may."""
    found = _loss_problems(measured)
    if "zeropp" in measured["systems"]:
        found += _gather_problems(measured["systems"]["zeropp"], measured["settings"]["ranks"])
    return found


def ratio(measured: dict) -> float | None:
    """Median step of zeropp over median step of FSDP2; None where one of them did not run."""
    systems = measured["systems"]
    if REFERENCE not in systems or "zeropp" not in systems:
        return None
    return statistics.median(systems["zeropp"]["step_s"]) / statistics.median(systems[REFERENCE]["step_s"])


def _loss_problems(measured: dict) -> list[str]:
    """Systems that train different models cannot be compared for speed."""
    tolerance = LOSS_TOLERANCE[measured["settings"]["dtype"]]
    names = list(measured["systems"])
    first = {name: measured["systems"][name]["losses"][:COMPARED_LOSSES] for name in names}
    found = []
    for name in names[1:]:
        gap = max(abs(a - b) for a, b in zip(first[name], first[names[0]], strict=True))
        if not gap <= tolerance:  # also when a loss is not a number
            found.append(f"losses of {name} and {names[0]} differ by {gap:.2e}, more than {tolerance}: {first}")
    return found


def _gather_problems(zeropp: dict, ranks: int) -> list[str]:
    """zeropp must have fetched each unit that is not persistent twice a step, as FSDP2 does."""
    found = []
    if zeropp["kept_after_forward"]:
        found.append(f"zeropp kept weights from forward to backward: {zeropp['kept_after_forward']}")
    calls = {unit: n for unit, n in zeropp["gathers_per_step"].items() if not unit.startswith("persistent.")}
    wrong = {unit: n for unit, n in calls.items() if n != 2}
    if wrong:
        found.append(f"zeropp's ledger has units not gathered exactly twice a step: {wrong}")
    if ranks > 1 and not calls:
        found.append("zeropp's ledger has no gather at all")
    return found


def machine(device: str) -> dict:
    """What the figures depend on besides the settings."""
    described = {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "processor": _processor(),
    }
    if device == "cuda":
        described["card"] = torch.cuda.get_device_name()
    return described


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def markdown(measured: dict) -> str:
    """One table, with what it was measured on above and how to read it below."""
    settings, about = measured["settings"], measured["machine"]
    ranks = settings["ranks"]
    lines = [
        f"Step time, {about['date']}: {ranks} rank{'s'[: ranks > 1]}, {settings['device']}, compute "
        f"{settings['dtype']}, gradients {settings['reduce_dtype']} on the wire",
        "",
        f"GPT, {settings['layers']} layers, width {settings['d_model']}, {settings['batch']} x {settings['seq_len']} "
        f"bytes a rank; fused AdamW. {settings['rounds'] - settings['discard']} rounds of {settings['steps']} steps, "
        f"systems in turn. {about.get('card', about['processor'])}, {about['cores']} cores, load {about['load']}, "
        f"torch {about['torch']}.",
        "",
        "| system | step ms (min, max) | / FSDP2 | by round (min, max) | CPU ms | sent MB | peak MiB | last loss |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row(name, measured) for name in measured["systems"]]
    lines += ["", *_notes(measured)]
    return "\n".join(lines) + "\n"


def _row(name: str, measured: dict) -> str:
    system = measured["systems"][name]
    times = [1000 * s for s in system["step_s"]]
    cells = [name, f"{statistics.median(times):.1f} ({min(times):.1f}, {max(times):.1f})"]
    reference = measured["systems"].get(REFERENCE)
    if reference:
        ratios = [own / base for own, base in zip(system["step_s"], reference["step_s"], strict=True)]
        cells.append(f"{statistics.median(times) / 1000 / statistics.median(reference['step_s']):.3f}")
        cells.append(f"{statistics.median(ratios):.3f} ({min(ratios):.3f}, {max(ratios):.3f})")
    else:
        cells += ["-", "-"]
    cells.append(f"{1000 * statistics.median(system['cpu_s']):.0f}")
    wire = system["wire_bytes"]
    cells.append(f"{statistics.median(wire) / measured['settings']['ranks'] / 1e6:.1f}" if wire else "-")
    cells.append(f"{system['peak_bytes'] / 2**20:.0f}" if "peak_bytes" in system else "-")
    cells.append(f"{system['losses'][-1]:.4f}")
    return "| " + " | ".join(cells) + " |"


def _notes(measured: dict) -> list[str]:
    notes = [
        "Step: median over rounds, of the slowest rank. By round: median of the ratios taken inside each round. "
        "CPU: all threads, a rank and step.",
    ]
    reason = measured["wire"]
    notes.append(
        "Sent: a rank and step, from the loopback counter of a network namespace holding this job alone; TCP's "
        f"congestion control there: {measured['tcp']}."
        if reason == "private"
        else f"Sent: {reason}."
    )
    notes.append("Peak: each system in a job of its own, above what the process used before the model.")
    found = ratio(measured)
    if found is not None and measured["settings"]["bound"]:
        bound = measured["settings"]["bound"]
        notes.append(f"zeropp / FSDP2: {found:.3f}, bound {bound:.2f}: {'met' if found <= bound else 'NOT MET'}.")
    zeropp = measured["systems"].get("zeropp")
    if zeropp:
        gathers = zeropp["gathers_per_step"]
        twice = sum(n == 2 for n in gathers.values())
        terms = ", ".join(f"{term} {size / 2**20:.1f}" for term, size in zeropp["predicted_bytes"].items())
        proof = f"{twice} of {len(gathers)} gathers ran twice a step, the rest are persistent parameters"
        if measured["settings"]["ranks"] == 1:
            proof = "one rank has no hops to count"
        notes.append(
            f"zeropp: ledger {zeropp['ledger_bytes'] / 1e6:.1f} MB sent by rank 0 a step; {proof}; no parameter "
            f"above the persistence threshold was whole between forward and backward. plan.memory (MiB, without "
            f"optimizer states): {terms}."
        )
    return "\n\n".join(notes).split("\n")


def save(measured: dict, text: str, folder: Path, name: str) -> list[Path]:
    """Write <date>_<name>.md and .json; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{measured['machine']['date']}_{name}"
    table, raw = folder / f"{stem}.md", folder / f"{stem}.json"
    table.write_text(text)
    raw.write_text(json.dumps(measured, indent=1) + "\n")
    return [table, raw]
