"""Speed of kernels: bandwidth compared with a copy and with torch, host time, copies between host and device."""

from __future__ import annotations

import json
import sys
from functools import partial

from bench.gpu.part import Ended, Outcome, Part, Row, State, Step, last_words
from bench.gpu.scale import Scale
from bench.kernels.report import percents, rows_of

__all__ = ["PART", "bandwidth"]


def steps(scale: Scale) -> list[Step]:
    """Return the steps. The largest sizes come first, because only they have targets."""
    found = [bandwidth(*each) for each in scale.bandwidth]
    calls, rounds = scale.calls
    launch = [sys.executable, "-m", "bench.kernels.launch", f"--calls={calls}", f"--rounds={rounds}"]
    found.append(Step("host time", [*launch, "--json={folder}/launch.json"], 60.0, _read_launch))
    bus = [sys.executable, "-m", "bench.kernels.pinned", f"--mebibytes={scale.pinned_mebibytes}"]
    read = partial(_read_bus, scale.pinned_mebibytes)
    found.append(Step("bus", [*bus, "--json={folder}/bus.json"], 60.0, read))
    return found


def bandwidth(name: str, mebibytes: int, chosen: str, seconds: float) -> Step:
    """Return a step that measures the kernels' bandwidth at one size; ``chosen`` is pytest's argument ``-k``."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", "bench/kernels"]
    command += ["--sizes", str(mebibytes), "-k", chosen, "--benchmark-json={folder}/measured.json"]
    return Step(name, command, seconds, _read_bandwidth)


def _read_bandwidth(ended: Ended) -> Outcome:
    # pytest-benchmark writes nothing if it is interrupted, so an unfinished size is measured again as a whole.
    if ended.code is None:
        return Outcome(State.UNFINISHED, [], last_words(ended))
    if ended.code:
        return Outcome(State.WRONG, [], last_words(ended))
    rows = [_row(row) for row in rows_of(json.loads((ended.folder / "measured.json").read_text()))]
    return Outcome(State.MEASURED, rows)


def _row(found: dict) -> Row:
    return {
        "operation": found["operation"],
        "by": found["contender"],
        "MiB": str(found["mebibytes"]),
        "us": f"{1e6 * found['seconds']:.0f}",
        "GB/s": f"{found['gigabytes_per_second']:.2f}",
        **percents(found),
        "target": str(found["target"]) if found["target"] and found["contender"] == "zeropp_kernels" else "-",
    }


def _read_launch(ended: Ended) -> Outcome:
    found, outcome = _read_json(ended, "launch.json")
    named = {
        "call": "host time of a call",
        "torch": "host time, dispatcher alone",
        "general": "host time, general, no launch",
        "prepared": "host time, prepared, no launch",
    }
    rows = [
        {"operation": name, "by": named[which], "us": f"{taken:.1f}"}
        for name, times in found.items()
        for which, taken in times.items()
    ]
    return outcome or Outcome(State.MEASURED, rows)


def _read_bus(mebibytes: int, ended: Ended) -> Outcome:
    found, outcome = _read_json(ended, "bus.json")
    rows = []
    for name, took in found.items():
        rate = took["bytes"] / took["seconds"] / 1e9
        # Matrix products beside a copy move no bytes themselves.
        moved = f"{rate:.2f}" if took["bytes"] else "-"
        cells = {"MiB": str(mebibytes), "us": f"{1e6 * took['seconds']:.0f}", "GB/s": moved}
        rows.append({"operation": name, "by": "bus", **cells})
    return outcome or Outcome(State.MEASURED, rows)


def _read_json(ended: Ended, name: str) -> tuple[dict, Outcome | None]:
    """Return a step's results, or an empty dict and the outcome if there are none."""
    if ended.code is None:
        return {}, Outcome(State.UNFINISHED, [], last_words(ended))
    if ended.code:
        return {}, Outcome(State.WRONG, [], last_words(ended))
    return json.loads((ended.folder / name).read_text()), None


PART = Part(
    "kernels",
    "Kernels on one card",
    ["operation", "by", "MiB", "us", "GB/s", "% of copy", "% of data sheet", "target"],
    steps,
    notes=(
        "GB/s of bytes that must move; percent of a copy in that run, and of the memory's bandwidth in the card's data "
        "sheet; target: of the copy, on a GPU at 256 MiB and more. By hand in torch, the results have the same bits, "
        "which is checked. Other libraries are rated by the bytes that our operation must move. Host time: of queueing "
        "a call on buffers too small to matter; without a launch: torch's dispatcher alone, all checks and Triton's "
        "own code (general), and later calls of the same sizes (prepared). Bus: bfloat16 values between device and "
        "host memory; what arrives is checked.",
    ),
    needs=("pytest", "pytest_benchmark"),
)
