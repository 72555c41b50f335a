"""Step time, bytes and memory of zeropp beside DDP and FSDP2: same model, data, seeds and fused AdamW.

    python -m bench.step_time --ranks 2 --dtype fp32 --rounds 8 --bound 0.90 --save fp32
    python -m bench.step_time --ranks 4 --systems ddp,ddp_zero1,fsdp2,hsdp,fsdp2_hpz,zeropp,zeropp_s1,zeropp_hpz ...
    python -m bench.step_time --device cuda --ranks 1 --dtype bf16 --systems fsdp2,zeropp --layers 20 --d-model 2048 ...

Two jobs on a shared machine, one after the other, differ by more than the systems do. So the systems live in the
same processes and take turns, A B C D A B C D ...; the ratio to FSDP2 is also taken round by round. Nothing is
reported if the systems do not compute the same losses, or if zeropp kept weights that FSDP2 had to fetch again.

The launcher starts its ranks itself. As root on Linux they get a network namespace of their own, whose loopback
counter then holds this job's bytes and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.common.flags import add_model_flags, given_flags
from bench.step_time import report
from bench.step_time.launch import free_port, private_network

ROOT = Path(__file__).resolve().parents[2]

SYSTEMS = ("ddp", "fsdp2", "fsdp2_a2a", "zeropp")
# Placements on two nodes that are only pretended: the ranks are halved.
PLACED = ("ddp_zero1", "hsdp", "fsdp2_hpz", "zeropp_s0", "zeropp_s1", "zeropp_s2", "zeropp_hpz", "zeropp_mics")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Step time of zeropp and its peers.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--staged", action="store_true", help="all ranks on one card, through gloo and host memory")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="compute and weight gathers")
    parser.add_argument("--reduce-dtype", choices=("fp32", "bf16"), help="gradients on the wire; default: as --dtype")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="which, and in which order they take turns")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--discard", type=int, default=2, help="first rounds, not reported")
    parser.add_argument("--steps", type=int, default=3, help="steps a system and round")
    add_model_flags(parser)
    parser.add_argument("--bound", type=float, help="largest zeropp / FSDP2 to end with exit code 0; default: none")
    parser.add_argument("--no-memory", action="store_true", help="leave out the extra run a system that measures it")
    parser.add_argument("--save", metavar="NAME", help="write bench/results/<date>_<NAME>.md and .json")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)  # where rank 0 of the child writes
    args = parser.parse_args(argv)
    args.reduce_dtype = args.reduce_dtype or args.dtype
    args.systems = args.systems.split(",")
    unknown = sorted(set(args.systems) - {*SYSTEMS, *PLACED})
    if unknown:
        parser.error(f"--systems: unknown {unknown}, known are {[*SYSTEMS, *PLACED]}")
    if args.ranks < 1 or args.steps < 1:
        parser.error(f"--ranks {args.ranks} and --steps {args.steps} must be at least 1")
    if args.ranks % 2 and set(args.systems) & set(PLACED):
        parser.error(f"--ranks {args.ranks} cannot be halved, which {PLACED} need")
    if args.discard >= args.rounds:
        parser.error(f"--discard {args.discard} leaves none of --rounds {args.rounds}")
    return args


def launch(args: argparse.Namespace, systems: list[str], rounds: int, discard: int, scratch: Path) -> dict:
    """Run one job of ``args.ranks`` ranks over these systems and return what its rank 0 measured."""
    result = scratch / "result.json"
    result.unlink(missing_ok=True)
    flags = {
        "device": args.device, "dtype": args.dtype, "reduce-dtype": args.reduce_dtype, "steps": args.steps,
        "ranks": args.ranks, "systems": ",".join(systems), "rounds": rounds, "discard": discard, "result": result,
        **given_flags(args),
    }  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(args.ranks)]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), "-m", "bench.step_time"]
    command += [f"--{name}={value}" for name, value in flags.items()]
    command += ["--staged"] * args.staged
    environment = dict(os.environ, GLOO_SOCKET_IFNAME="lo") if sys.platform == "linux" else dict(os.environ)
    # NCCL needs devices, not interfaces; its bytes do not pass the loopback, so a namespace would tell nothing.
    isolate, reason = private_network() if args.device == "cpu" else (None, "not counted on CUDA")
    environment["STEP_TIME_WIRE"] = reason or "private"
    code = subprocess.run(command, env=environment, cwd=ROOT, preexec_fn=isolate).returncode
    if code or not result.exists():
        raise SystemExit(f"the ranks ended with exit code {code}; nothing to report")
    return json.loads(result.read_text())


def supervise(args: argparse.Namespace) -> None:
    """The launcher: the interleaved job, then one short job a system for its memory, then the report."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        measured = launch(args, args.systems, args.rounds, args.discard, scratch)
        for system in args.systems if not args.no_memory else ():
            # Memory of several systems in one process cannot be told apart, so each runs alone for it.
            measured["systems"][system]["peak_bytes"] = launch(args, [system], 2, 1, scratch)["peak_bytes"]
    measured["settings"] = {k: v for k, v in vars(args).items() if k not in ("save", "result", "no_memory")}
    measured["machine"] = report.machine(args.device)
    problems = report.problems(measured)
    if problems:
        raise SystemExit("not reported:\n- " + "\n- ".join(problems))
    text = report.markdown(measured)
    print(text)
    if args.save:
        for path in report.save(measured, text, ROOT / "bench" / "results", args.save):
            print("written:", path.relative_to(ROOT))
    found = report.ratio(measured)
    if args.bound and found is not None and found > args.bound:
        raise SystemExit(f"zeropp took {found:.3f} of FSDP2's step, more than {args.bound}")


def work(args: argparse.Namespace) -> None:
    """One rank: build the systems, take turns, and let rank 0 write the numbers down."""
    import torch
    import torch.distributed as dist

    from bench.common import congestion, staged
    from bench.common.contestant import Contestant
    from bench.step_time.systems import MemoryMeter, build
    from examples.text_data import Batches, load_text

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", 0 if args.staged else int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo"
    if args.staged:
        staged.register()
        backend = staged.NAME
    dist.init_process_group(backend)
    batches = Batches(load_text().train, args.batch, args.seq_len, rank, world, args.seed)
    meter = MemoryMeter(device)
    contestants: dict[str, Contestant] = {}
    for name in args.systems:
        contestants[name] = build(name, args, device, batches)
    for turn in range(args.rounds):
        for contestant in contestants.values():
            contestant.take_turn(args.steps, measure=turn >= args.discard)
    measured = {"systems": {name: contestant.measured() for name, contestant in contestants.items()}}
    measured["peak_bytes"] = meter.peak_bytes()
    measured["wire"] = os.environ["STEP_TIME_WIRE"]
    measured["tcp"] = congestion.in_force()
    if rank == 0:
        args.result.write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    args = parse_arguments()
    if args.result:
        work(args)
    else:
        supervise(args)


if __name__ == "__main__":
    main()
