"""Training with offloaded optimizer states, gradients and weights, by zeropp and other systems on one machine.

    python -m bench.offload.peers --ranks 1 --dtype fp32 --save offload-peers
    python -m bench.offload.peers --ranks 2 --systems none,cpu,nvme,fsdp2,fsdp2_cpu --folder /somewhere/on/the/disk

If the model trains on a CPU, offload to "cpu" moves nothing to another memory. It only shows the step on spare cores
beside the next forward. Offload to files is real. All systems live in the same processes, take turns, and clip to the
same norm; ratios are computed per round. Memory is measured in an extra process per system. Nothing is reported if
losses differ.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import subprocess
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.common import results
from bench.common.flags import add_model_flags, given_flags
from bench.common.machine import machine
from bench.offload import peers_report as report
from bench.step_time.launch import torchrun

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
OURS = ("none", "cpu", "cpu_eager", "cpu_part", "nvme", "nvme_all")
SYSTEMS = (*OURS, "fsdp2", "fsdp2_cpu", "deepspeed_cpu")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure training with offload, by zeropp and other systems.")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="threads per rank")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="dtype of compute and communication")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="systems, in the order of their turns")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--discard", type=int, default=1, help="number of first rounds that are not reported")
    parser.add_argument("--steps", type=int, default=2, help="measured steps per system and round, after one more")
    add_model_flags(parser)
    # Many weights and few tokens, so that the step is a visible part of the time.
    parser.set_defaults(layers=8, d_model=640, heads=10, batch=2)
    parser.add_argument("--folder", type=Path, help="folder on the disk to use; default: a temporary folder")
    parser.add_argument("--no-memory", action="store_true", help="leave out the extra run per system for its memory")
    parser.add_argument("--save", metavar="NAME", help="write bench/results/<date>_<NAME>.md, .json and .png")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)  # for ranks: measure memory
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)  # for ranks: file that rank 0 writes
    args = parser.parse_args(argv)
    args.reduce_dtype = args.dtype
    args.systems = args.systems.split(",")
    unknown = sorted(set(args.systems) - set(SYSTEMS))
    if unknown:
        parser.error(f"--systems: unknown {unknown}, known are {', '.join(SYSTEMS)}")
    if min(args.ranks, args.threads, args.steps) < 1:
        parser.error("--ranks, --threads and --steps must be at least 1")
    if not 0 <= args.discard < args.rounds:
        parser.error(f"--discard {args.discard} leaves none of --rounds {args.rounds}")
    return args


def why_not(system: str) -> str | None:
    """Return the reason why a system cannot run here; None if it can."""
    if system != "deepspeed_cpu":
        return None
    if importlib.util.find_spec("deepspeed") is None:
        return "DeepSpeed is not installed"
    return None if shutil.which("g++") else "DeepSpeed compiles its Adam when it starts, and there is no g++"


def launch(args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Run one job with ``args.ranks`` ranks, and return the measurements of rank 0."""
    result = scratch / "result.json"
    result.unlink(missing_ok=True)
    flags = {
        "ranks": args.ranks, "threads": args.threads, "dtype": args.dtype, "systems": ",".join(args.systems),
        "rounds": args.rounds, "discard": args.discard, "steps": args.steps, "folder": scratch, "result": result,
        **given_flags(args),
    }  # fmt: skip
    words = ["bench.offload.peers", *(f"--{name}={value}" for name, value in flags.items())]
    command, environment = torchrun(args.ranks, words + ["--alone"] * args.alone)
    environment["OMP_NUM_THREADS"] = str(args.threads)
    code = subprocess.run(command, env=environment, cwd=ROOT).returncode
    if code or not result.exists():
        raise SystemExit(f"the ranks with {args.systems} ended with exit code {code}; nothing to report")
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def supervise(args: argparse.Namespace) -> dict[str, Any]:
    """Run the job of all systems in turns, then one job per system for its memory; return all results."""
    reasons = {name: why_not(name) for name in args.systems}
    skipped = {name: reason for name, reason in reasons.items() if reason}
    args.systems = [name for name in args.systems if name not in skipped]
    if not args.systems:
        raise SystemExit(f"nothing can run here: {skipped}")
    about = machine("cpu")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        systems = launch(args, Path(folder))
        for name in () if args.no_memory else args.systems:
            single = argparse.Namespace(**{**vars(args), "systems": [name], "alone": True})
            systems[name] |= launch(single, Path(folder))
    settings = {name: value for name, value in vars(args).items() if name not in ("folder", "result", "save")}
    return {"machine": about, "settings": settings, "systems": systems, "skipped": skipped}


def drawn(measured: dict[str, Any]) -> Figure:
    """Return the plot of the results."""
    from bench.offload import plot  # imported here because it needs matplotlib

    return plot.peers(measured)


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    if args.result:
        from bench.offload.ranks import work  # imported here because it imports zeropp, which only ranks need

        work(args)
        return
    measured = supervise(args)
    problems = report.problems(measured)
    if problems:
        raise SystemExit("not reported:\n- " + "\n- ".join(problems))
    text = results.page(
        "Offload beside its peers", "bench.offload.peers", argv, measured["machine"], report.table(measured)
    )
    print(text)
    if args.save:
        for path in results.save(measured, text, args.save, partial(drawn, measured)):
            print("written:", path.relative_to(ROOT))


if __name__ == "__main__":
    main()
