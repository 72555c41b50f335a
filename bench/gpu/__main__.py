"""One part, as ``bench/gpu.sh`` starts it: runs its steps, prints a table, and returns an exit code."""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch

from bench.common.machine import describe, machine
from bench.gpu import bits, engine, examples, kernels, look, nccl, offload, reasons
from bench.gpu.part import Outcome, Part, Row, State, Step, missing
from bench.gpu.run import Runner, digest
from bench.gpu.scale import CARD, DRY, Scale

ROOT = Path(__file__).resolve().parents[2]
_MODULES = (look, examples, bits, nccl, offload, engine, kernels, reasons)
PARTS = {module.PART.name: module.PART for module in _MODULES}
CODES = {State.WRONG: 1, State.UNFINISHED: 3}
DRY_RUN = "**Dry run on CPU with tiny sizes: no figure below was measured on a card.**"


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One part of bench/gpu.sh.")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--dry-run", action="store_true", help="run on CPU, with tiny sizes")
    parser.add_argument("--keep", type=Path, help="folder for results of steps; default: runs/gpu")
    parser.add_argument("--results", type=Path, help="folder for the report; default: bench/results")
    parser.add_argument("--only", default="", metavar="NAME", help="run the steps whose names begin with NAME")
    parser.add_argument("--seconds", type=float, help="time limit of the part; default: its own limit")
    args = parser.parse_args(argv)
    scratch = (
        Path(tempfile.mkdtemp(prefix="zeropp-gpu-")) if args.dry_run and not (args.keep and args.results) else ROOT
    )
    args.keep = args.keep or scratch / "runs" / "gpu"
    args.results = args.results or scratch / "bench" / "results"
    return args


def unusable(part: Part, scale: Scale) -> str | None:
    """Return the reason why no step of a part can run on this machine; None if the part can run."""
    absent = missing(*part.needs)
    if absent:
        return f"{absent}; put wheels into a folder and set WHEELS to it"
    if not scale.dry and not torch.cuda.is_available():
        return "torch sees no CUDA device; --dry-run goes through the same on CPU"
    return None


def table(part: Part, rows: list[Row]) -> list[str]:
    """Return a Markdown table; cells that a row lacks are dashes."""
    lines = ["| " + " | ".join(part.columns) + " |", "|" + "---|" * len(part.columns)]
    return lines + ["| " + " | ".join(row.get(column, "-") for column in part.columns) + " |" for row in rows]


def report(part: Part, scale: Scale, about: dict, outcomes: dict[str, Outcome]) -> str:
    """Return the report of a part in Markdown."""
    lines = [f"# {part.title}, {about['date']}", "", *([DRY_RUN, ""] if scale.dry else []), describe(about), ""]
    lines += table(part, [row for outcome in outcomes.values() for row in outcome.rows])
    for note in part.notes:
        lines += ["", note]
    told = [f"- {name}: {outcome.state.value}: {outcome.why}" for name, outcome in outcomes.items() if outcome.why]
    return "\n".join([*lines, *(["", "What is missing or wrong:", "", *told] if told else [])]) + "\n"


def save(args: argparse.Namespace, part: Part, text: str, about: dict, outcomes: dict[str, Outcome]) -> list[Path]:
    """Write report, data and artefacts under dated names; return their paths.

    Nothing is written if a step is wrong, unless the part has ``keeps_wrong``.
    """
    if not part.keeps_wrong and any(outcome.state is State.WRONG for outcome in outcomes.values()):
        return []
    args.results.mkdir(parents=True, exist_ok=True)
    stem = args.results / f"{about['date']}_gpu-{part.name}"
    paths = [Path(f"{stem}.md"), Path(f"{stem}.json")]
    paths[0].write_text(text)
    data = {"machine": about, "steps": {name: asdict(outcome) for name, outcome in outcomes.items()}}
    paths[1].write_text(json.dumps(data, indent=1) + "\n")
    for outcome in outcomes.values():
        for artefact in map(Path, outcome.artefacts):
            paths.append(Path(f"{stem}-{artefact.name}"))
            shutil.copyfile(artefact, paths[-1])
    return paths


def run(args: argparse.Namespace, part: Part, steps: list[Step], about: dict) -> dict[str, Outcome]:
    """Return outcomes by step, until the time runs out. Neighbouring steps with ``together`` run at the same time."""
    lasting = [str(about.get(key)) for key in ("torch", "triton", "python", "cuda", "card", "driver", "processor")]
    key = digest([*lasting, str(args.dry_run)])
    # A dry run must not use the GPU of the machine.
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if args.dry_run else None
    runner = Runner(args.keep / part.name, key, args.began + (args.seconds or part.seconds), hidden)
    outcomes: dict[str, Outcome] = {}
    for _, group in itertools.groupby(steps, lambda step: step.together or step.name):
        begin, now = time.monotonic(), list(group)
        for step, (outcome, kept) in zip(now, runner.outcomes(now), strict=True):
            outcomes[step.name] = outcome
            how = "kept from an earlier start" if kept else f"{time.monotonic() - begin:.0f} s"
            print(f"{part.name}: {step.name}: {outcome.state.value} ({how})", file=sys.stderr, flush=True)
    return outcomes


def main(argv: list[str] | None = None) -> int:
    began = time.monotonic()
    args = parse_arguments(argv)
    args.began = began
    part, scale = PARTS[args.part], DRY if args.dry_run else CARD
    why = unusable(part, scale)
    if why is not None:
        print(f"{part.name}: {why}", file=sys.stderr)
        return 2
    about = machine(scale.device)
    steps = [step for step in part.steps(scale) if step.name.startswith(args.only)]
    if not steps:
        print(
            f"--only={args.only}: no step's name begins so; {[step.name for step in part.steps(scale)]}",
            file=sys.stderr,
        )
        return 2
    outcomes = run(args, part, steps, about)
    # Read the machine again: the clocks are now those of a GPU that has just worked.
    about = machine(scale.device)
    text = report(part, scale, about, outcomes)
    print(text, flush=True)
    for path in save(args, part, text, about, outcomes):
        print("written:", path, file=sys.stderr)
    return next((code for state, code in CODES.items() if state in {each.state for each in outcomes.values()}), 0)


if __name__ == "__main__":
    # Exit normally on SIGTERM, so that the processes of steps are ended, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    sys.exit(main())
