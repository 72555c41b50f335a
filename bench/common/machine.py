"""Description of the machine for reports: versions, processor, and the GPU with its driver and clocks."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from datetime import date
from pathlib import Path

import torch

__all__ = ["CARD", "card", "describe", "machine", "memory_bandwidth", "processor"]

CARD = {
    "name": "card",
    "driver_version": "driver",
    "clocks.sm": "SM MHz",
    "clocks.max.sm": "SM MHz at most",
    "clocks.mem": "memory MHz",
    "clocks.max.mem": "memory MHz at most",
    "power.limit": "W at most",
    "memory.total": "MiB",
}
"""Query of nvidia-smi -> name in reports."""
_SECONDS = 20  # time limit of nvidia-smi
# GB/s of memory by name of a card, from the vendors' data sheets. A slice of a card (MIG) has another name.
_BANDWIDTH = {
    "A100-PCIE-40GB": 1555.0,
    "A100-SXM4-40GB": 1555.0,
    "A100 80GB PCIe": 1935.0,
    "A100-SXM4-80GB": 2039.0,
    "H100 PCIe": 2000.0,
    "H100 80GB HBM3": 3350.0,  # SXM
    "H100 NVL": 3900.0,
    "H200": 4800.0,
    "H200 NVL": 4800.0,
    "B200": 8000.0,
    "AMD Instinct MI300X": 5300.0,
    "AMD Instinct MI300X OAM": 5300.0,
}


def machine(device: str) -> dict:
    """Return versions, processor and load of the machine, and the GPU's properties for "cuda".

    Args:
        device: "cpu" or "cuda".
    """
    found = {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "processor": processor(),
    }
    return {**found, "cuda": torch.version.cuda, **card()} if device == "cuda" else found


def card() -> dict[str, str]:
    """Return nvidia-smi's values for the first GPU, by their names in reports. Clocks are the current ones.

    Without a working nvidia-smi the result only has torch's name of the GPU, and the reason under "driver".
    """
    command = ["nvidia-smi", f"--query-gpu={','.join(CARD)}", "--format=csv,noheader,nounits"]
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    if shutil.which(command[0]) is None:
        return {"card": name, "driver": "unknown: there is no nvidia-smi"}
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True).stdout
        values = [value.strip() for value in said.splitlines()[0].split(",")]
        return dict(zip(CARD.values(), values, strict=True))
    except (OSError, subprocess.SubprocessError, IndexError, ValueError) as error:
        return {"card": name, "driver": f"unknown: {error}"}


def describe(about: dict) -> str:
    """Return one sentence for a report. Values that ``about`` lacks, such as in old reports, are left out."""
    parts = [f"{about['processor']}, {about['cores']} cores, load {about['load']}"] if "processor" in about else []
    if "card" in about:
        parts.insert(0, about["card"])
        parts.append(f"driver {about['driver']}")
        parts += [f"{name} {about[name]}" for name in CARD.values() if name not in ("card", "driver") and name in about]
    versions = [f"torch {about['torch']}", f"Triton {about['triton']}"]
    if about.get("cuda"):
        versions.append(f"CUDA {about['cuda']}")
    return ", ".join([*parts, *versions]) + "."


def memory_bandwidth(card_name: str) -> float | None:
    """Return the data sheet's GB/s of reads and writes together; None for an unknown card.

    Args:
        card_name: name that ``torch.cuda.get_device_name()`` returns.
    """
    return _BANDWIDTH.get(card_name.removeprefix("NVIDIA "))


def processor() -> str:
    """Return the processor's model name, as the kernel reports it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
