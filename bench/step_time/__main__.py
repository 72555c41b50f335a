"""Step time, bytes and memory of zeropp, DDP and FSDP2, with the same model, data, seeds and fused AdamW.

    python -m bench.step_time --ranks 2 --dtype fp32 --rounds 8 --bound 0.90 --save fp32
    python -m bench.step_time --ranks 4 --systems ddp,ddp_zero1,fsdp2,hsdp,fsdp2_hpz,zeropp,zeropp_s1,zeropp_hpz ...
    python -m bench.step_time --ranks 2 --systems fsdp2,fsdp2_clipped,zeropp,zeropp_clipped --no-memory
    python -m bench.step_time --device cuda --ranks 1 --dtype bf16 --systems fsdp2,zeropp --layers 20 --d-model 2048 ...
    python -m bench.step_time --device cuda --ranks 1 --dtype bf16 --alone --vocab 32000 --compiled \
        --systems plain_clipped,fsdp2_clipped,fsdp2_clipped_again,zeropp_clipped,deepspeed_clipped ...

On a shared machine, two jobs one after another differ by more than the systems do. So all systems live in the same
processes and take turns (A B C D A B C D ...), and the ratio to FSDP2 is also computed per round. Systems that clip are
compared with an FSDP2 that clips to the same norm.

There is no report if a system's losses, norms or weights differ from those of its counterpart, or if zeropp cached
weights that FSDP2 had to gather again. ``plain`` has no engine and gives the least cost of mixed precision.
``fsdp2_clipped_again`` is FSDP2 with the rows of each batch reversed; its distance from FSDP2 is the yardstick for
differences of weights.

The launcher starts the ranks itself. As root on Linux, the ranks get their own network namespace, so the loopback
counter only counts bytes of this job.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

from bench.common import results
from bench.common.flags import add_model_flags
from bench.step_time import report
from bench.step_time.launch import private_network, rank_command

ROOT = Path(__file__).resolve().parents[2]

SYSTEMS = ("ddp", "fsdp2", "fsdp2_a2a", "zeropp")
CLIPPED = ("fsdp2_clipped", "fsdp2_clipped_again", "zeropp_clipped", "deepspeed_clipped")
# Systems without an engine, which need a single rank.
PLAIN = ("plain", "plain_clipped")
# Placements on two pretended nodes: each half of the ranks is a node.
PLACED = ("ddp_zero1", "hsdp", "fsdp2_hpz", "zeropp_s0", "zeropp_s1", "zeropp_s2", "zeropp_hpz", "zeropp_mics")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Step time of zeropp and other systems.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--staged", action="store_true", help="all ranks on one GPU, through gloo and host memory")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="compute and weight gathers")
    parser.add_argument("--reduce-dtype", choices=("fp32", "bf16"), help="dtype of sent gradients; default: as --dtype")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="systems, in the order of their turns")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--discard", type=int, default=2, help="number of first rounds that are not reported")
    parser.add_argument("--steps", type=int, default=3, help="steps per system and round")
    add_model_flags(parser)
    parser.add_argument("--compiled", action="store_true", help="compile each block before the model is wrapped")
    parser.add_argument("--release-root", action="store_true", help="FSDP2 also frees its root unit after forward")
    parser.add_argument("--bound", type=float, help="largest zeropp / FSDP2 to end with exit code 0; default: none")
    parser.add_argument(
        "--alone", action="store_true", help="one system after another, not in turns: for models that fit only once"
    )
    parser.add_argument("--no-memory", action="store_true", help="leave out the extra run per system for its memory")
    parser.add_argument("--save", metavar="NAME", help="write bench/results/<date>_<NAME>.md and .json")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)  # file that rank 0 of the child process writes
    args = parser.parse_args(argv)
    args.reduce_dtype = args.reduce_dtype or args.dtype
    args.systems = args.systems.split(",")
    known = [*SYSTEMS, "fsdp2_again", *CLIPPED, *PLAIN, *PLACED]
    unknown = sorted(set(args.systems) - set(known))
    if unknown:
        parser.error(f"--systems: unknown {unknown}, known are {known}")
    if args.ranks < 1 or args.steps < 1:
        parser.error(f"--ranks {args.ranks} and --steps {args.steps} must be at least 1")
    if args.ranks % 2 and set(args.systems) & set(PLACED):
        parser.error(f"--ranks {args.ranks} cannot be halved, which {PLACED} need")
    if args.ranks > 1 and set(args.systems) & set(PLAIN):
        parser.error(f"--ranks {args.ranks}: {PLAIN} have no way to share work; leave them out, or give --ranks 1")
    if args.discard >= args.rounds:
        parser.error(f"--discard {args.discard} leaves none of --rounds {args.rounds}")
    return args


def launch(args: argparse.Namespace, scratch: Path) -> dict:
    """Run one job with ``args.ranks`` ranks, and return the measurements of rank 0."""
    result = scratch / "result.json"
    result.unlink(missing_ok=True)
    # NCCL needs the devices of the host's namespace, and its bytes do not pass the loopback.
    isolate, reason = private_network() if args.device == "cpu" else (None, "not counted on CUDA")
    command, environment = rank_command(args, result, reason or "private")
    code = subprocess.run(command, env=environment, cwd=ROOT, preexec_fn=isolate).returncode
    if code or not result.exists():
        raise SystemExit(f"the ranks ended with exit code {code}; nothing to report")
    return json.loads(result.read_text())


def supervise(args: argparse.Namespace) -> None:
    """Run the job of all systems, then one short job per system for its memory, then write the report."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        measured = launch(args, scratch)
        told = args.no_memory or (args.alone and args.device == "cuda")
        for system in () if told else args.systems:
            # One process cannot separate the memory of several systems, so each system runs alone.
            single = argparse.Namespace(**{**vars(args), "systems": [system], "rounds": 2, "discard": 1})
            measured["systems"][system]["peak_bytes"] = launch(single, scratch)["peak_bytes"]
    report.complete(measured, args)
    problems = report.problems(measured)
    if problems:
        raise SystemExit("not reported:\n- " + "\n- ".join(problems))
    text = report.markdown(measured)
    print(text)
    if args.save:
        for path in results.save(measured, text, args.save):
            print("written:", path.relative_to(ROOT))
    found = report.ratio(measured)
    if args.bound and found is not None and found > args.bound:
        raise SystemExit(f"zeropp took {found:.3f} of FSDP2's step, more than {args.bound}")


def main() -> None:
    args = parse_arguments()
    if args.result:
        from bench.step_time.ranks import work  # imported here because it imports zeropp, which only ranks need

        work(args)
    else:
        supervise(args)


if __name__ == "__main__":
    main()
