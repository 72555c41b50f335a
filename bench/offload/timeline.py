"""Timeline of an offloaded training step: computing, copies over the bus, and the step on the host's cores.

    python -m bench.offload.timeline --save offload-timeline

The program needs no GPU. Units sleep in forward and backward, as a host does while a GPU computes. Copies and steps are
slowed down to the stated rates. The defaults have the proportions of the model of 1.34 B parameters on one H200
(bench/results/2026-11-27_gpu-first-run.md): 45 ms of forward, 95 ms of backward, 50 GB/s over the bus, and 5.4 billion
elements per second, which is 16 cores at 160 GB/s. Everything takes four times as long here, with 1/28 of the
parameters.

The bound of a period uses the stated times and rates only. No order of the parts is faster: a unit's parts follow each
other (backward, copy down, step, copy up, forward), each resource (device, one direction of the bus, cores) has one
part at a time, and no step begins before the last backward, because the norm is unknown until then.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import zeropp
from bench.common import results
from bench.common.machine import machine
from bench.offload.spans import DOWN, STEP, UP, Rates, Spans, apart, sleep_until

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORWARD, BACKWARD = "forward", "backward"
WAYS: dict[str, dict[str, Any]] = {
    "cpu": {},
    "cpu, lazy_step false": {"lazy_step": False},
    "cpu, offload_param": {"offload_param": {"device": "cpu"}},
    "nvme": {"device": "nvme", "pipeline_read": True, "pipeline_write": True, "buffer_count": 12},
}
"""Name of a way -> settings of its offload."""
COLUMNS = (
    "way", "period", "bound", "period / bound", BACKWARD, DOWN, STEP, UP, FORWARD, "step() returns after",
    "then forward takes",
)  # fmt: skip
ALLOWED = 1.1  # largest period, as a multiple of the bound


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Record the timeline of an offloaded step, with stated rates.")
    parser.add_argument("--units", type=int, default=24)
    parser.add_argument("--numel", type=int, default=2_000_000, help="elements per unit")
    parser.add_argument("--forward", type=float, default=180.0, help="milliseconds of all units' forward")
    parser.add_argument("--backward", type=float, default=380.0, help="milliseconds of all units' backward")
    parser.add_argument("--bus", type=float, default=0.45, help="GB/s in each direction; 0 for no limit")
    parser.add_argument("--step", type=float, default=0.0482, help="billion elements per second; 0 for no limit")
    parser.add_argument("--rounds", type=int, default=6, help="measured steps, after three that warm up")
    parser.add_argument("--ways", default=";".join(WAYS), help="names of ways, separated by semicolons")
    parser.add_argument("--folder", help="folder for files with states; default: a temporary folder")
    parser.add_argument("--save", metavar="NAME", help="write bench/results/<date>_<NAME>.md, .json and .png")
    args = parser.parse_args(argv)
    if args.units < 2 or args.numel < 1 or args.rounds < 1 or min(args.forward, args.backward, args.bus, args.step) < 0:
        parser.error("--units must be at least 2, --numel and --rounds 1, and times and rates 0 or more")
    if unknown := set(args.ways.split(";")) - set(WAYS):
        parser.error(f"unknown ways {sorted(unknown)}; choose from {list(WAYS)}")
    return args


class _Compute(torch.autograd.Function):
    """A unit's forward and backward, which sleep and are recorded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, unit: Unit) -> Tensor:
        ctx.unit, ctx.like = unit, weight.shape
        with unit.spans.span(FORWARD):
            sleep_until(time.perf_counter() + unit.seconds[0])
        return x + weight[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        with ctx.unit.spans.span(BACKWARD):
            until = time.perf_counter() + ctx.unit.seconds[1]
            grad = torch.full(ctx.like, float(gradients[0]), dtype=torch.bfloat16)
            sleep_until(until)
        return gradients[0], grad, None


class Unit(nn.Module):
    """A module with one parameter whose forward and backward take a stated time and no core."""

    def __init__(self, numel: int, seconds: tuple[float, float], spans: Spans) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((numel,), 1e-3))
        self.seconds, self.spans = seconds, spans

    def forward(self, x: Tensor) -> Tensor:
        return _Compute.apply(x, self.weight, self)


@dataclass
class Parts:
    """Stated seconds of one unit's parts.

    Attributes:
        backward: backward of the unit.
        down: copy of its gradient to the host.
        step: step on the host.
        up: copy of its weights to the device.
        forward: forward of the unit.
    """

    backward: float
    down: float
    step: float
    up: float
    forward: float

    @staticmethod
    def stated(args: argparse.Namespace) -> Parts:
        """Return the parts of a run; float32 gradients go down and bfloat16 weights up."""
        bus, step = 1e9 * args.bus or float("inf"), 1e9 * args.step or float("inf")
        forward, backward = args.forward / 1000 / args.units, args.backward / 1000 / args.units
        return Parts(backward, 4 * args.numel / bus, args.numel / step, 2 * args.numel / bus, forward)


def bound(units: int, parts: Parts, *, gathers: bool) -> float:
    """Return a number of seconds that no period can be shorter than, from one backward to the next.

    Args:
        units: number of units.
        parts: seconds of each unit's parts.
        gathers: True if weights are copied up for each gather, also in backward, instead of once per step.
    """
    computed = units * parts.backward
    after = parts.step + parts.up
    return max(
        # The last unit in backward is the first in forward, so all forwards come after its step.
        computed + parts.down + after + units * parts.forward,
        # The last gradient that arrives over the bus.
        parts.backward + units * parts.down + after + parts.forward,
        # The last step on the cores.
        computed + (units - 1) * parts.step + after + parts.forward,
        # All copies to the device.
        units * parts.up * (2 if gathers else 1),
    )


@dataclass
class Measured:
    """Times of one way.

    Attributes:
        marks: for each round, the times when backward began, when ``step()`` was called, when it returned, and when
            the next backward began.
        spans: the recorded spans.
        loss: loss of the last round.
    """

    marks: list[tuple[float, float, float, float]] = field(default_factory=list)
    spans: Spans = field(default_factory=Spans)
    loss: float = 0.0

    def summary(self, args: argparse.Namespace, *, gathers: bool, bounded: bool) -> dict[str, float | None]:
        """Return seconds by column; the bound only if ``bounded``."""
        busy = {
            kind: median(self.spans.seconds(kind, begin, end) for begin, *_, end in self.marks)
            for kind in (BACKWARD, DOWN, STEP, UP, FORWARD)
        }
        period = median(end - begin for begin, *_, end in self.marks)
        least = bound(args.units, Parts.stated(args), gathers=gathers) if bounded else None
        return {
            "period": period, "bound": least, "period / bound": least and period / least, **busy,
            "step() returns after": median(returned - called for _, called, returned, _ in self.marks),
            "then forward takes": median(end - returned for _, _, returned, end in self.marks),
        }  # fmt: skip


def measure(args: argparse.Namespace, way: str, folder: str) -> Measured:
    """Train in one way, and return its times."""
    own = dict(WAYS[way])
    lazy, weights = own.pop("lazy_step", True), own.pop("offload_param", None)
    block = {"device": "cpu", **own} | ({"nvme_path": folder} if own.get("device") == "nvme" else {})
    zero = {
        "stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0,
        "offload_optimizer": block, **({"offload_param": weights} if weights else {}),
    }  # fmt: skip
    config = {
        "zero_optimization": zero, "bf16": {"enabled": True}, "gradient_clipping": 1.0,
        "zeropp": {"lazy_step": lazy, "unit_min_blocks": 0},
    }  # fmt: skip
    found = Measured(spans=Spans(Rates(1e9 * args.bus, 1e9 * args.step)))
    seconds = args.forward / 1000 / args.units, args.backward / 1000 / args.units
    with apart(), found.spans.recorded():
        torch.manual_seed(0)
        model = nn.Sequential(*(Unit(args.numel, seconds, found.spans) for _ in range(args.units)))
        inner = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        optimizer = zeropp.ZeroOptimizer(inner, model, config)
        loss = model(torch.ones((), requires_grad=True))
        for number in range(3 + args.rounds):
            begin = time.perf_counter()
            optimizer.backward(loss)
            called = time.perf_counter()
            optimizer.step()
            returned = time.perf_counter()
            optimizer.zero_grad()
            loss = model(torch.ones((), requires_grad=True))
            found.loss = float(loss.detach())
            if number >= 3:
                found.marks.append((begin, called, returned, time.perf_counter()))
        optimizer.close()
    return found


def report(figures: dict[str, dict[str, float | None]]) -> str:
    """Return the table in milliseconds, and "yes" or "no" for each way with a bound."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    for way, row in figures.items():
        shown = {
            name: "-" if value is None else f"{value:.3f}" if name == "period / bound" else f"{1000 * value:.1f}"
            for name, value in row.items()
        }
        lines.append(f"| {' | '.join([way, *(shown[name] for name in COLUMNS[1:])])} |")
    said = [
        f"{way}: within {ALLOWED:g} of the bound: {'yes' if ratio <= ALLOWED else 'no'}."
        for way, row in figures.items()
        if (ratio := row["period / bound"]) is not None
    ]
    return "\n".join([*lines, "", "Milliseconds. " + " ".join(said)])


def drawn(measured: dict[str, Any]) -> Figure:
    """Return the plot of the results."""
    from bench.offload import plot  # imported here because it needs matplotlib

    return plot.timeline(measured)


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    about = machine("cpu")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    figures, recorded, losses = {}, {}, {}
    with contextlib.ExitStack() as opened:
        folder = args.folder or opened.enter_context(tempfile.TemporaryDirectory())
        for way in args.ways.split(";"):
            found = measure(args, way, folder)
            # Only these two ways have all their parts on the resources of the bound.
            bounded = way in ("cpu", "cpu, offload_param")
            figures[way] = found.summary(args, gathers="offload_param" in way, bounded=bounded)
            begin, called, returned, end = found.marks[-1]
            spans = [(kind, a - begin, b - begin) for kind, a, b in found.spans.found if begin <= a < end]
            recorded[way] = {"spans": spans, "marks": [called - begin, returned - begin, end - begin]}
            losses[way] = found.loss
    if len(set(losses.values())) > 1:
        raise SystemExit(f"losses differ: {losses}")
    text = results.page("Timeline of an offloaded step", "bench.offload.timeline", argv, about, report(figures))
    print(text)
    if args.save:
        settings = vars(args) | {"folder": None}
        measured = {"machine": about, "settings": settings, "figures": figures, "ways": recorded}
        results.save(measured, text, args.save, partial(drawn, measured))
    torch.set_num_threads(before)


if __name__ == "__main__":
    main()
