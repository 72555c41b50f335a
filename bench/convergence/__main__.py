"""Effect of quantized communication on training: pairs of runs with the same seed, on virtual ranks in one process.

    python -m bench.convergence --jobs 2                 # all arms and seeds; a second call continues a stopped one
    python -m bench.convergence --jobs 2 --save          # also writes docs/convergence.{md,png} and bench/results/
    python -m bench.convergence --quick                  # a minute: check that everything runs
    python -m bench.convergence --device cuda --compute bf16 --layers 12 --d-model 768 --heads 12 --seq-len 512 \
        --batch 4 --steps 3000 --seeds 3 --name 100m --save

Each rank of 2 nodes x 2 has its own micro-batch. Its gradient passes through the engine's own paths and codecs, with
one thread per rank (`ranks`). The benchmark measures the relative error of Adam's average of gradients against the
exact mean on the same weights, and the loss on held-out text relative to the plain arm of the same seed.

Each finished run is a file in --runs; an interrupted run continues from its last checkpoint. File names depend on the
settings, but not on zeropp's version: use another folder after a change to the code.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path

from bench.convergence.arms import ARMS, DEFAULT_ARMS, SEEDS, Settings

ROOT = Path(__file__).resolve().parents[2]

QUICK = Settings(steps=12, layers=2, d_model=64, heads=2, seq_len=32, warmup=2, sample=2, windows=8, validate_every=6)
QUICK_ARMS = ("plain", "zeropp", "hadamard-loco", "delta4")


def parse_arguments(argv: list[str] | None = None) -> tuple[argparse.Namespace, Settings]:
    """Return the parsed command line, and the settings in it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model, few steps, two seeds, four arms")
    parser.add_argument("--arms", help=f"comma-separated, of {','.join(ARMS)}")
    parser.add_argument("--seeds", type=int, help=f"number of seeds, taken from {SEEDS}")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time, one core each; 1: in this process")
    runs = ROOT / "bench" / "results" / "convergence"
    parser.add_argument("--runs", type=Path, default=runs, help="folder of the runs")
    parser.add_argument("--checkpoint-every", type=int, default=250, help="steps between checkpoints")
    parser.add_argument("--save", action="store_true", help="write docs/<page>.{md,png} and bench/results/")
    parser.add_argument("--name", default="", help="name of saved files, if it is not the comparison of the docs")
    parser.add_argument("--one", metavar="ARM:SEED", help=argparse.SUPPRESS)  # the run of a child process
    group = parser.add_argument_group("settings (their defaults are shown)")
    for field in fields(Settings):
        group.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), metavar=str(field.default))
    args = parser.parse_args(argv)
    given = {f.name: getattr(args, f.name) for f in fields(Settings) if getattr(args, f.name) is not None}
    settings = replace(QUICK if args.quick else Settings(), **given)
    chosen = args.arms.split(",") if args.arms else QUICK_ARMS if args.quick else DEFAULT_ARMS
    args.arms = tuple(dict.fromkeys(("plain", *chosen)))  # always with "plain", which differences are relative to
    args.seeds = (2 if args.quick else len(SEEDS)) if args.seeds is None else args.seeds
    unknown = sorted(set(args.arms) - set(ARMS))
    if unknown:
        parser.error(f"--arms: unknown {unknown}, known are {list(ARMS)}")
    if not 2 <= args.seeds <= len(SEEDS):
        parser.error(f"--seeds {args.seeds}: expected 2 to {len(SEEDS)}, an interval needs two at least")
    if args.jobs < 1 or args.checkpoint_every < 1:
        parser.error("--jobs and --checkpoint-every must be at least 1")
    fault = settings.fault()
    if fault:
        parser.error(fault)
    return args, settings


def supervise(args: argparse.Namespace, settings: Settings) -> None:
    """Run all runs without a result, ``--jobs`` at a time.

    Raises:
        SystemExit: a run failed; results of other runs are kept.
    """
    # Order by seed, so that an early report has complete pairs.
    wanted = [(arm, seed) for seed in SEEDS[: args.seeds] for arm in args.arms]
    waiting = [(arm, seed) for arm, seed in wanted if not (args.runs / f"{settings.stem(arm, seed)}.json").exists()]
    print(f"{len(wanted) - len(waiting)} of {len(wanted)} runs are done, in {args.runs}", flush=True)
    if args.jobs == 1:
        from bench.convergence.run import run

        for arm, seed in waiting:
            run(arm, seed, settings, args.runs, args.checkpoint_every)
        return
    running: dict[subprocess.Popen, tuple[str, int, float]] = {}
    failed: list[str] = []
    try:
        while waiting or running:
            while waiting and len(running) < args.jobs and not failed:
                arm, seed = waiting.pop(0)
                running[subprocess.Popen(_command(args, settings, arm, seed), cwd=ROOT)] = (arm, seed, time.monotonic())
            for child in [child for child in running if child.poll() is not None]:
                arm, seed, start = running.pop(child)
                if child.returncode:
                    failed.append(f"{arm}, seed {seed}: exit code {child.returncode}")
                    waiting = []
                print(f"{arm:16} seed {seed:3}  {time.monotonic() - start:6.0f} s  {len(waiting)} waiting", flush=True)
            time.sleep(0.1)
    finally:
        for child in running:
            child.terminate()
    if failed:
        raise SystemExit("failed: " + "; ".join(failed))


def _command(args: argparse.Namespace, settings: Settings, arm: str, seed: int) -> list[str]:
    words = [sys.executable, "-m", "bench.convergence", f"--one={arm}:{seed}", f"--runs={args.runs}"]
    words += [f"--checkpoint-every={args.checkpoint_every}"]
    return words + [f"--{f.name.replace('_', '-')}={getattr(settings, f.name)}" for f in fields(Settings)]


def main() -> None:
    args, settings = parse_arguments()
    if args.one:
        from bench.convergence.run import run

        arm, seed = args.one.split(":")
        run(arm, int(seed), settings, args.runs, args.checkpoint_every)
        return
    from bench.convergence import report

    supervise(args, settings)
    stems = [settings.stem(arm, seed) for arm in args.arms for seed in SEEDS[: args.seeds]]
    runs = [json.loads((args.runs / f"{stem}.json").read_text()) for stem in stems]
    print(report.table(runs), end="")
    if args.save:
        for path in report.save(runs, ROOT, args.name):
            print("written:", path.relative_to(ROOT))


if __name__ == "__main__":
    main()
