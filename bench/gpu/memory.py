"""Live memory of each system after each phase of one step, and the code lines that hold it at the peak of backward.

    python -m bench.gpu.memory FOLDER ...      # further arguments are those of bench.step_time

The program needs the environment variables of a rank. It writes FOLDER/memory.json. On a CPU torch's allocator keeps no
statistics, so all sizes are zero.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist

import zeropp
from bench.common.contestant import Contestant, meet
from bench.gpu.timeline import require_finite
from bench.step_time.__main__ import parse_arguments
from bench.step_time.ranks import join
from bench.step_time.systems import MemoryMeter, build
from examples.text_data import Batches, load_text

_WARM = 4  # steps before the measurement, which learn the order, compile kernels and create optimizer states
_EVENTS = 200_000  # number of allocator events that are kept, more than a step has
_MOST = 8  # number of code lines in the report
_SIGN = {"alloc": 1, "free_completed": -1}


def frame(event: dict) -> str:
    """Return the innermost Python line of an allocation's stack."""
    for each in event.get("frames", ()):
        path = Path(each["filename"])
        if path.suffix == ".py":
            return f"{path.parent.name}/{path.name}:{each['line']} {each['name']}"
    return "autograd's threads, without a line of Python"


def holders(events: list[dict], begun: int) -> list[dict]:
    """Return the Python lines that hold the most memory at the peak of backward.

    Args:
        events: allocator events since before the forward; older allocations are not counted.
        begun: number of events before backward.
    """
    totals = list(itertools.accumulate(_SIGN.get(event["action"], 0) * event.get("size", 0) for event in events))
    peak = max(range(begun, len(events)), key=totals.__getitem__, default=-1)
    live: dict[int, dict] = {}
    for event in events[: peak + 1]:
        if event["action"] == "alloc":
            live[event["addr"]] = event
        elif event["action"] == "free_completed":
            live.pop(event["addr"], None)
    held, count = Counter[str](), Counter[str]()
    for event in live.values():
        held[frame(event)] += event["size"]
        count[frame(event)] += 1
    return [{"bytes": size, "tensors": count[name], "frame": name} for name, size in held.most_common(_MOST)]


class Recorder:
    """Statistics of torch's allocator on one device, relative to the moment of creation.

    Attributes:
        phases: for each phase, the live bytes at its end and the peak bytes in it, above those at the creation.
    """

    def __init__(self, device: torch.device) -> None:
        MemoryMeter(device)  # frees memory that the previous system has left
        self.device, self.before = device, torch.cuda.memory_allocated(device)
        self.phases: list[dict] = []

    def end(self, phase: str) -> None:
        """Store the memory of the phase that ends now."""
        meet(self.device)
        live, peak = torch.cuda.memory_allocated(self.device), torch.cuda.max_memory_allocated(self.device)
        self.phases.append({"phase": phase, "live_bytes": live - self.before, "peak_bytes": peak - self.before})
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def record(self, on: bool) -> None:
        """Start or stop the recording of allocator events with their Python lines."""
        if self.device.type == "cuda":
            torch.cuda.memory._record_memory_history(
                "all" if on else None, context="alloc", stacks="python", max_entries=_EVENTS
            )

    def events(self) -> list[dict]:
        """Return the recorded events."""
        if self.device.type != "cuda":
            return []
        return torch.cuda.memory._snapshot()["device_traces"][self.device.index]


def step_by_phases(contestant: Contestant, recorder: Recorder) -> dict:
    """Run one step, phase by phase, and return its memory for JSON."""
    recorder.end("between steps")
    recorder.record(True)
    loss = contestant.forward()
    recorder.end("after forward")
    begun = len(recorder.events())
    contestant.backward(loss)
    recorder.end("after backward")
    held = holders(recorder.events(), begun)
    recorder.record(False)
    contestant.finish_step(loss)
    del loss
    recorder.end("after the step")
    return {"phases": recorder.phases, "held": held}


def main() -> None:
    folder, args = Path(sys.argv[1]), parse_arguments(sys.argv[2:])
    device = join(args)
    batches = Batches(load_text().train, args.batch, args.seq_len, seed=args.seed)
    found = {}
    for name in args.systems:
        recorder = Recorder(device)
        contestant = build(name, args, device, batches)
        for _ in range(_WARM):
            contestant.one_step()
        found[name] = step_by_phases(contestant, recorder)
        require_finite(name, torch.stack(contestant.losses))
        if isinstance(contestant.optimizer, zeropp.ZeroOptimizer):
            contestant.optimizer.close()
        del contestant
    (folder / "memory.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
