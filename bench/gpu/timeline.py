"""One step of each system under torch's profiler: a trace file, and counts from it.

    python -m bench.gpu.timeline FOLDER ...      # further arguments are those of bench.step_time

The program needs the environment variables of a rank. It writes FOLDER/<system>.json.gz and FOLDER/timeline.json.
"""

from __future__ import annotations

import gzip
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from bench.common.contestant import meet
from bench.step_time.__main__ import parse_arguments
from bench.step_time.ranks import join
from bench.step_time.systems import build
from examples.text_data import Batches, load_text

_WARM = 4  # steps before the measurement, which learn the order, compile kernels and allocate memory
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of events that run on a GPU


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of (begin, end) spans."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def counts(events: list[dict]) -> dict[str, float]:
    """Return busy time, waiting time, launches and NCCL kernels of a trace's complete events; times in milliseconds."""
    spans = [event for event in events if event.get("ph") == "X"]
    device = [event for event in spans if event.get("cat") in _DEVICE]
    waits = [event for event in spans if event.get("cat") == "cuda_runtime" and "Synchronize" in event["name"]]
    busy, waited = (covered((each["ts"], each["ts"] + each["dur"]) for each in some) for some in (device, waits))
    return {
        "busy_ms": busy / 1000,
        "waits_ms": waited / 1000,
        "launches": len(device),
        "nccl": sum("nccl" in event["name"].lower() for event in device),
    }


def require_finite(name: str, losses: Tensor) -> None:
    """Raise if a loss is not finite, because measurements of such a step have no meaning.

    Raises:
        SystemExit: some loss of the system is not finite.
    """
    if not losses.isfinite().all():
        raise SystemExit(f"{name}: losses are not finite: {losses.tolist()}")


def main() -> None:
    folder, args = Path(sys.argv[1]), parse_arguments(sys.argv[2:])
    device = join(args)
    batches = Batches(load_text().train, args.batch, args.seq_len, seed=args.seed)
    found = {}
    for name in args.systems:
        contestant = build(name, args, device, batches)
        for _ in range(_WARM):
            contestant.one_step()
        meet(device)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        with profile(activities=activities) as profiled:
            begin = time.perf_counter()
            contestant.one_step()
            meet(device)
            seconds = time.perf_counter() - begin
        path = folder / f"{name}.json.gz"
        profiled.export_chrome_trace(str(path))
        with gzip.open(path, "rt") as file:
            found[name] = {"step_ms": 1000 * seconds, **counts(json.load(file)["traceEvents"])}
        require_finite(name, torch.stack(contestant.losses))
        del contestant
    (folder / "timeline.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
