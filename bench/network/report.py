"""Table and plot of the results of ``bench.network``."""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
from datetime import date
from pathlib import Path

from bench.common.machine import describe, machine
from bench.network.measured import BASE, Measured, rate_name

__all__ = ["markdown", "save"]


def _speed_table(measured: Measured, kind: str, rate: float | None) -> list[str]:
    lines = [
        "", f"## {rate_name(kind, rate)}", "",
        "| system | step s (min, max) | tokens/s | / zeropp_s3 | by round (min, max) | bytes |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    base = measured.values("s", kind, rate, BASE)
    for name in measured.systems(kind, rate):
        seconds = measured.values("s", kind, rate, name)
        step, times = statistics.median(seconds), measured.micro_batches(name)
        sent = statistics.median(measured.values("bytes", kind, rate, name)) / measured.unit
        cells = [name, f"{step:.2f} ({min(seconds):.2f}, {max(seconds):.2f})"]
        cells.append(f"{measured.speed(kind, rate, name):.0f}")
        if base:
            ratios = [times * one / own for one, own in zip(base, seconds, strict=True)]
            cells.append(f"{times * statistics.median(base) / step:.2f}")
            cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f}, {max(ratios):.2f})")
        else:
            cells += ["-", "-"]
        lines.append("| " + " | ".join([*cells, f"{sent:.3f}"]) + " |")
    return lines


def _equal_table(measured: Measured) -> list[str]:
    rows = [r for r in measured.found["rows"] if r["kind"] == "equal"]
    if not rows:
        return []
    lines = [
        "", "## Where the time on the link equals the time of the rest", "",
        "Each system at a rate of its own, at which its bytes take as long as its step does without a limit; a turn "
        "without one beside each turn at that rate.", "",
        "| system | Mbit/s | on the link s | step without a limit s | step s "
        "| / max(compute, communication) by round (min, max) |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, rate in dict.fromkeys((r["system"], r["rate"]) for r in rows):
        own = [r for r in rows if r["system"] == name]
        ratios = [r["s"] / max(r["free"], r["link"]) for r in own]
        free, step = (statistics.median(r[key] for r in own) for key in ("free", "s"))
        lines.append(
            f"| {name} | {rate:g} | {own[0]['link']:.2f} | {free:.2f} | {step:.2f} "
            f"| {statistics.median(ratios):.2f} ({min(ratios):.2f}, {max(ratios):.2f}) |"
        )
    return lines


def _bytes_table(measured: Measured) -> list[str]:
    lines = [
        "", "## Bytes between nodes, ledger and device", "",
        "What the ledgers of the first node's ranks count a step, in units; the device counts the headers of 9000-byte "
        "frames, acknowledgements and small control messages, too.", "",
        "| system | ledger | device | device / ledger | of which |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for name, each in measured.found["counted"].items():
        device = f"{each['device'] / measured.unit:.3f}"
        if each["ledger"] is None:
            lines.append(f"| {name} | - | {device} | - | - |")
            continue
        total = sum(each["ledger"].values())
        parts = ", ".join(f"{what} {n / measured.unit:.3f}" for what, n in each["ledger"].items())
        lines.append(f"| {name} | {total / measured.unit:.3f} | {device} | {each['device'] / total:.4f} | {parts} |")
    return lines


def _loss_table(measured: Measured) -> list[str]:
    lines = ["", "## Losses", "", "| system | steps | first | last |", "|---|---|---|---|"]
    for name, losses in measured.found["losses"].items():
        times = measured.micro_batches(name)
        lines.append(f"| {name} | {len(losses) // times} | {losses[0]:.4f} | {losses[-1]:.4f} |")
    return lines


def markdown(found: dict, settings: dict) -> str:
    """Return the report in Markdown."""
    measured = Measured(found, settings)
    s = settings
    lines = [
        f"# Training over slow links, {date.today()}: {s['nodes']} nodes of {s['local']} ranks, {s['dtype']}",
        "",
        f"GPT, {s['layers']} layers, width {s['d_model']}, {found['numel'] / 1e6:.1f} M parameters, {s['batch']} x "
        f"{s['seq_len']} bytes a rank; {s['rounds']} rounds of {s['steps']} steps, systems in turn. All ranks share "
        f"{len(os.sched_getaffinity(0))} cores, so the step without a limit is mostly computing. FSDP2's own "
        "collectives hide nothing behind that: its streams are CUDA's. TCP's congestion "
        f"control: {found['tcp']}. {describe(machine('cpu'))}",
        "",
        "Bytes: what the first node's device sent to other nodes in a step, in units of M (n-1)/n = "
        f"{measured.unit / 1e6:.2f} MB (M: the weights in bf16). In the tables of speed they are those between two "
        "moments of rank 0, with headers once for the up to six frames that TCP hands the device together; the table "
        "of bytes has all that some steps sent, with the headers of every 9000-byte frame.",
    ]
    for kind, rate in measured.kinds:
        lines += _speed_table(measured, kind, rate)
    lines += [*_equal_table(measured), *_bytes_table(measured), *_loss_table(measured)]
    return "\n".join(lines) + "\n"


def save(found: dict, settings: dict, text: str, folder: Path, name: str) -> list[Path]:
    """Write <date>_network-<name>.md, .json and, if matplotlib is installed, .png; return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"{date.today()}_network-{name}"
    paths = [stem.with_suffix(suffix) for suffix in (".md", ".json", ".png")]
    paths[0].write_text(text)
    paths[1].write_text(json.dumps({"settings": settings, **found}, indent=1) + "\n")
    if importlib.util.find_spec("matplotlib") is None:
        return paths[:2]
    from bench.network import plot as network_plot  # imported here because it needs matplotlib

    network_plot.draw(Measured(found, settings)).savefig(paths[2], dpi=110)
    return paths
