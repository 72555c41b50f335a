"""The table of ``bench.step_time``, and the checks without which it is not printed."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterable, Sequence

from bench.common import COMPARED, WARM_UP, peak_rate
from bench.common.machine import describe, machine

REFERENCE = "fsdp2"
CLIPPED = "_clipped"
AGAIN = "_again"  # suffix of a system whose batches have their rows in reverse order
OURS = ("zeropp", "zeropp_clipped")
CLIP = 1.0  # gradient norm that clipped systems clip to
ONE_RANK = (
    "One rank: nothing is sent. FSDP2 of torch 2.13 calls no NCCL then: it copies its shard for each all-gather and "
    "its gradient for each reduce-scatter. zeropp has no hops then: it casts its shard and sums its gradient, on the "
    "streams that many ranks would use. So this shows what hooks, copies, casts, clipping and the optimizer cost on "
    "host and device, and memory without partitioning. It cannot show collectives, what of them hides behind "
    "computing, bytes, or the memory of a part."
)
"""Text about the limits of a table with one rank."""
# Losses of the first steps. fp32 systems only differ in the order of sums. In bf16, systems round weights, activations
# and gradients at different places, which changes the first losses of this model by some thousandths.
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2}
# Relative differences of the gradient norms before clipping, at the same steps.
NORM_TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2}
# Distance of the final weights, relative to the distance from the initial weights. Adam divides by the size of a
# gradient, so the last bits of small gradients change weights as much as the first bits of large ones.
WEIGHT_TOLERANCE = {"fp32": 2e-2, "bf16": 0.1}
# With an FSDP2 that runs on reversed rows: bound = max(WEIGHT_FLOOR, TIMES * distance of the two FSDP2 systems). That
# distance itself must be within WEIGHT_TOLERANCE, so the bound is at most TIMES * WEIGHT_TOLERANCE.
TIMES = 3.0
WEIGHT_FLOOR = {"fp32": 1e-3, "bf16": 3e-2}


def clips(name: str) -> bool:
    """Return True if a system clips its gradients."""
    return name.removesuffix(AGAIN).endswith(CLIPPED)


def counterpart(name: str, names: Sequence[str]) -> str:
    """Return the system to compare with: FSDP2 (clipped, if ``name`` clips), else the first that clips alike."""
    alike = [each for each in names if clips(each) == clips(name)]
    reference = REFERENCE + CLIPPED * clips(name)
    return reference if reference in alike else alike[0]


def weight_bound(name: str, measured: dict) -> float:
    """Return the largest allowed distance of a system's weights from its counterpart's, relative to their change."""
    systems, dtype = measured["systems"], measured["settings"]["dtype"]
    yardstick = systems.get(counterpart(name, list(systems)) + AGAIN)
    # The second FSDP2 is held to the fixed tolerance: beyond that, the runs diverge by themselves and show nothing.
    if yardstick is None or name.endswith(AGAIN):
        return WEIGHT_TOLERANCE[dtype]
    # max() keeps the floor if the second FSDP2's distance is NaN, which _weight_problems reports.
    return max(WEIGHT_FLOOR[dtype], TIMES * yardstick["weights_apart"])


def complete(measured: dict, args: argparse.Namespace) -> None:
    """Add the job's settings and the machine to the measurements of its ranks."""
    measured["settings"] = {k: v for k, v in vars(args).items() if k not in ("save", "result", "no_memory")}
    # Clocks are those read at the end of the work.
    measured["machine"] = {**machine(args.device), **measured.pop("card")}


def problems(measured: dict) -> list[str]:
    """Return the reasons for not reporting these results; empty if there are none."""
    found = _loss_problems(measured) + _norm_problems(measured) + _weight_problems(measured) + _way_problems(measured)
    for name in OURS:
        if name in measured["systems"]:
            found += _gather_problems(name, measured["systems"][name], measured["settings"]["ranks"])
    return found


def ratio(measured: dict) -> float | None:
    """Return the median step of zeropp divided by that of FSDP2; None if one of them did not run."""
    systems = measured["systems"]
    if REFERENCE not in systems or "zeropp" not in systems:
        return None
    return statistics.median(systems["zeropp"]["step_s"]) / statistics.median(systems[REFERENCE]["step_s"])


def _largest(gaps: Iterable[float]) -> float:
    """Return the largest gap, or NaN if there is one. Python's ``max`` may skip NaN, which must fail every bound."""
    found = list(gaps)
    return math.nan if any(math.isnan(gap) for gap in found) else max(found)


def _loss_problems(measured: dict) -> list[str]:
    """Return a problem for each system whose first losses differ, because it trains another model."""
    tolerance = LOSS_TOLERANCE[measured["settings"]["dtype"]]
    names = list(measured["systems"])
    first = {name: measured["systems"][name]["losses"][:COMPARED] for name in names}
    found = []
    for name in names:
        other = counterpart(name, names)
        gap = _largest(abs(a - b) for a, b in zip(first[name], first[other], strict=True))
        if not gap <= tolerance:
            found.append(f"losses of {name} and {other} differ by {gap:.2e}, more than {tolerance}: {first}")
    return found


def _norm_problems(measured: dict) -> list[str]:
    """Return a problem for each clipped system whose norms differ from its counterpart's, or that clipped nothing."""
    systems, tolerance = measured["systems"], NORM_TOLERANCE[measured["settings"]["dtype"]]
    found = []
    for name in filter(clips, systems):
        norms, other = systems[name]["norms"], counterpart(name, list(systems))
        pairs = list(zip(norms, systems[other]["norms"], strict=True))[:COMPARED]
        gap = _largest(abs(a - b) / b for a, b in pairs)
        if not gap <= tolerance:
            found.append(f"norms of {name} and {other} differ by {gap:.2e} of them, more than {tolerance}: {pairs}")
        if not max(norms) > CLIP:
            found.append(f"{name} clipped nothing: no norm exceeds {CLIP}, the largest is {max(norms)}")
    return found


def _weight_problems(measured: dict) -> list[str]:
    """Return a problem for each system whose final weights are too far from its counterpart's."""
    apart = {name: system["weights_apart"] for name, system in measured["systems"].items()}
    return [
        f"weights of {name} end {gap:.2e} of their way from those of {counterpart(name, list(apart))}, more than "
        f"{weight_bound(name, measured):.2g}"
        for name, gap in apart.items()
        if not gap <= weight_bound(name, measured)
    ]


def _way_problems(measured: dict) -> list[str]:
    """Return a problem for each system whose weights changed less or more in total than its counterpart's.

    This check also works for systems in different processes, because it compares two norms.
    """
    ways, tolerance = {}, WEIGHT_TOLERANCE[measured["settings"]["dtype"]]
    for name, system in measured["systems"].items():
        ways[name] = system["weights_way"]
    found = []
    for name, way in ways.items():
        other = counterpart(name, list(ways))
        if not abs(way / ways[other] - 1) <= tolerance:
            found.append(
                f"weights of {name} have gone {way:.2e} from where they began, those of {other} {ways[other]:.2e}, "
                f"more than {tolerance} apart"
            )
    return found


def weights_apart(name: str, measured: dict) -> str:
    """Return the table cell with a system's distance of weights, and the bound in brackets."""
    if counterpart(name, list(measured["systems"])) == name:
        return "-"
    return f"{measured['systems'][name]['weights_apart']:.1e} ({weight_bound(name, measured):.1e})"


def _gather_problems(name: str, zeropp: dict, ranks: int) -> list[str]:
    """Return problems if zeropp did not gather each unit that is not persistent twice per step, as FSDP2 does."""
    found = []
    if zeropp["kept_after_forward"]:
        found.append(f"{name} kept weights from forward to backward: {zeropp['kept_after_forward']}")
    calls = {unit: n for unit, n in zeropp["gathers_per_step"].items() if not unit.startswith("persistent.")}
    wrong = {unit: n for unit, n in calls.items() if n != 2}
    if wrong:
        found.append(f"{name}'s ledger has units not gathered exactly twice a step: {wrong}")
    if ranks > 1 and not calls:
        found.append(f"{name}'s ledger has no gather at all")
    return found


def markdown(measured: dict) -> str:
    """Return the report: the settings, one table, and notes."""
    settings, about = measured["settings"], measured["machine"]
    ranks = settings["ranks"]
    rate = f"AdamW, its rate rising over the first {WARM_UP} steps to {peak_rate(settings['d_model']):.1e}"
    lines = [
        f"Step time, {about['date']}: {ranks} rank{'s'[: ranks > 1]}, {settings['device']}, compute "
        f"{settings['dtype']}, gradients {settings['reduce_dtype']} on the wire",
        "",
        f"GPT, {settings['layers']} layers, width {settings['d_model']}, vocabulary {settings['vocab']}, "
        f"{settings['batch']} x {settings['seq_len']} bytes a rank{', blocks compiled' * settings['compiled']}; fused "
        f"{rate}. {settings['rounds'] - settings['discard']} rounds of {settings['steps']} steps, "
        f"{'one system after another' if settings['alone'] else 'systems in turn'}. {describe(about)}",
        "",
        "| system | step ms (min, max) | / FSDP2 | by round (min, max) | host ms | CPU ms | sent MB | peak MiB "
        "| last loss | weights apart |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row(name, measured) for name in measured["systems"]]
    lines += ["", *_notes(measured)]
    return "\n".join(lines) + "\n"


def _row(name: str, measured: dict) -> str:
    system = measured["systems"][name]
    times = [1000 * s for s in system["step_s"]]
    cells = [name, f"{statistics.median(times):.1f} ({min(times):.1f}, {max(times):.1f})"]
    other = counterpart(name, list(measured["systems"]))
    if other.startswith(REFERENCE):
        reference = measured["systems"][other]
        ratios = [own / base for own, base in zip(system["step_s"], reference["step_s"], strict=True)]
        cells.append(f"{statistics.median(times) / 1000 / statistics.median(reference['step_s']):.3f}")
        rounds = f"{statistics.median(ratios):.3f} ({min(ratios):.3f}, {max(ratios):.3f})"
        cells.append("-" if measured["settings"]["alone"] else rounds)
    else:
        cells += ["-", "-"]
    cells.append(f"{1000 * statistics.median(system['host_s']):.1f}")
    cells.append(f"{1000 * statistics.median(system['cpu_s']):.0f}")
    wire = system["wire_bytes"]
    cells.append(f"{statistics.median(wire) / measured['settings']['ranks'] / 1e6:.1f}" if wire else "-")
    cells.append(f"{system['peak_bytes'] / 2**20:.0f}" if "peak_bytes" in system else "-")
    cells.append(f"{system['losses'][-1]:.4f}")
    cells.append(weights_apart(name, measured))
    return "| " + " | ".join(cells) + " |"


def _notes(measured: dict) -> list[str]:
    notes = [
        "Step: median over rounds, of the slowest rank. / FSDP2: clipped arms to the FSDP2 that clips to the same "
        "norm. By round: median of the ratios taken inside each round. Host: until the last call of a step had "
        "returned; reading a norm waits for the device. CPU: all threads, a rank and step.",
        _equality_note(measured),
    ]
    if measured["settings"]["ranks"] == 1:
        notes.append(ONE_RANK)
    reason = measured["wire"]
    notes.append(
        "Sent: a rank and step, from the loopback counter of a network namespace holding this job alone; TCP's "
        f"congestion control there: {measured['tcp']}."
        if reason == "private"
        else f"Sent: {reason}."
    )
    in_its_turn = measured["settings"]["alone"] and measured["settings"]["device"] == "cuda"
    place = "in its turn, alone" if in_its_turn else "in a job of its own"
    notes.append(f"Peak: each system {place}, above what the process used before the model.")
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


def _equality_note(measured: dict) -> str:
    """Return the note about the checked values and their tolerances."""
    dtype = measured["settings"]["dtype"]
    clipped = f"; clipped arms clip to {CLIP:g}, their norms before it agree within {NORM_TOLERANCE[dtype]:g} of them"
    some = any(map(clips, measured["systems"]))
    return (
        f"Equal work: losses of the first {COMPARED} steps agree within {LOSS_TOLERANCE[dtype]:g}{clipped * some}; "
        f"weights apart, at the end and as a share of the way that they have gone, at most {WEIGHT_TOLERANCE[dtype]:g}."
        f"{yardstick_note(dtype) * any(name.endswith(AGAIN) for name in measured['systems'])}"
    )


def yardstick_note(dtype: str) -> str:
    """Return the sentence about systems whose bound comes from the second FSDP2."""
    return (
        f" Beside FSDP2 on rows in reverse order (its name ends with {AGAIN}), at most {TIMES:g} times that arm's "
        f"distance from FSDP2, or {WEIGHT_FLOOR[dtype]:g} if that is more. The bound stands in brackets."
    )
