"""Part of a step on the host's cores that is hidden behind the next forward.

    python -m bench.offload.hidden --units 14 --numel 8000000 --wait 15 --rounds 12

The forward of each unit sleeps for ``--wait`` milliseconds, as a host does while a GPU computes, so the step can use
the cores. Each round trains once with the lazy step and once with a step that ``step()`` waits for (eager). The forward
after an eager step waits for nothing, and gathers as many new weights.

With s_i = time of unit i's step and f = time of a unit's forward:

    unavoidable exposed time = max(0, max over i of (s_0 + ... + s_i - i * f))

``--wait 0`` shows the cost of the lazy step if nothing can be hidden.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import zeropp
from bench.common import results
from bench.common.machine import machine
from bench.offload.unit_steps import bound, unit_steps

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = ("", "ms")
EXPOSED, ALLOWED = "exposed", "that and a tenth of the step"


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the part of a step on the host that is hidden.")
    parser.add_argument("--units", type=int, default=14)
    parser.add_argument("--numel", type=int, default=8_000_000, help="elements per unit")
    parser.add_argument("--wait", type=float, default=15.0, help="milliseconds that a unit's forward sleeps")
    parser.add_argument("--rounds", type=int, default=12, help="measured rounds, after two more that warm up")
    parser.add_argument("--save", metavar="NAME", help="write bench/results/<date>_<NAME>.md, .json and .png")
    args = parser.parse_args(argv)
    if args.units < 2 or args.numel < 1 or args.wait < 0 or args.rounds < 1:
        parser.error("--units must be at least 2, --numel and --rounds 1, --wait 0")
    return args


class Waiting(nn.Module):
    """A unit whose forward sleeps, as a host does while a GPU computes."""

    def __init__(self, numel: int, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((numel,), 1e-3))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        # Read one element in 1024, because the memory bandwidth should be left to the step.
        return x + self.weight[::1024].sum()


@dataclass
class Times:
    """Seconds of each round: of ``step()``, of the forward after it, and of each unit's step."""

    step: list[float] = field(default_factory=list)
    forward: list[float] = field(default_factory=list)
    units: list[list[float]] = field(default_factory=list)

    def both(self) -> list[float]:
        """Return the seconds of a step plus the next forward, by round."""
        return [one + other for one, other in zip(self.step, self.forward, strict=True)]


def make(args: argparse.Namespace, lazy: bool) -> tuple[nn.Module, zeropp.ZeroOptimizer]:
    model = nn.Sequential(*(Waiting(args.numel, args.wait / 1000) for _ in range(args.units)))
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_optimizer": {"device": "cpu"}}
    config = {"gradient_clipping": 1.0, "zero_optimization": zero, "zeropp": {"lazy_step": lazy, "unit_min_blocks": 0}}
    inner = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return model, zeropp.ZeroOptimizer(inner, model, config)


def train(pair: tuple[nn.Module, zeropp.ZeroOptimizer], times: Times) -> None:
    """Run one backward, one step and the forward after it, and append the times."""
    model, optimizer = pair
    optimizer.zero_grad()
    optimizer.backward(model(torch.zeros(())))
    with unit_steps() as seen, torch.no_grad():
        begin = time.perf_counter()
        optimizer.step()
        stepped = time.perf_counter()
        model(torch.zeros(()))
        done = time.perf_counter()
    times.step.append(stepped - begin)
    times.forward.append(done - stepped)
    times.units.append(seen)


def summary(lazy: Times, eager: Times) -> dict[str, float]:
    """Return seconds by description, in the order of the table."""
    # Use the eager runs: beside a forward a unit's step takes longer, and that increase is part of the exposed time.
    steps = [median(column) for column in zip(*eager.units, strict=True)]
    forward = median(eager.forward)
    least = bound(eager.units, forward)
    return {
        "a forward with nothing to wait for": forward,
        "the step of all units": sum(steps),
        "eager: step() and the next forward": median(eager.both()),
        "eager: step() alone": median(eager.step),
        "lazy: step() and the next forward": median(lazy.both()),
        "lazy: step() alone": median(lazy.step),
        EXPOSED: median(one - other for one, other in zip(lazy.both(), eager.forward, strict=True)),
        "what cannot be hidden": least,
        ALLOWED: least + 0.1 * sum(steps),
    }


def report(figures: dict[str, float], lazy: Times, eager: Times) -> str:
    """Return the table, and "yes" if the exposed time is within the bound plus a tenth of the step."""
    ratio = median(a / b for a, b in zip(lazy.both(), eager.both(), strict=True))
    hidden = 1 - figures[EXPOSED] / figures["the step of all units"]
    lines = [f"| {' | '.join(COLUMNS)} |", "|---|---|"]
    lines += [f"| {name} | {1000 * seconds:.2f} |" for name, seconds in figures.items()]
    verdict = "yes" if figures[EXPOSED] <= figures[ALLOWED] else "no"
    said = f"lazy / eager {ratio:.3f}; hidden {100 * hidden:.0f} % of the step; within the bound: {verdict}"
    return "\n".join([*lines, "", said])


def drawn(measured: dict[str, Any]) -> Figure:
    """Return the plot of the results."""
    from bench.offload import plot  # imported here because it needs matplotlib

    return plot.hidden(measured)


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    about = machine("cpu")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    pairs = {lazy: make(args, lazy) for lazy in (True, False)}
    for pair in pairs.values():
        for _ in range(2):
            train(pair, Times())
    times = {lazy: Times() for lazy in pairs}
    for _ in range(args.rounds):
        for lazy in pairs:
            train(pairs[lazy], times[lazy])
    figures = summary(times[True], times[False])
    body = report(figures, times[True], times[False])
    text = results.page("A step hidden behind the next forward", "bench.offload.hidden", argv, about, body)
    print(text)
    if args.save:
        rounds = {"lazy": asdict(times[True]), "eager": asdict(times[False])}
        measured = {"machine": about, "settings": vars(args), "figures": figures, "rounds": rounds}
        results.save(measured, text, args.save, partial(drawn, measured))
    for _, optimizer in pairs.values():
        optimizer.close()
    torch.set_num_threads(before)


if __name__ == "__main__":
    main()
