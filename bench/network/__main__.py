"""Training over slow links: tokens per second and bytes between nodes, for zeropp, DDP and FSDP2.

    sudo python -m bench.network --nodes 2 --rates wait80,200,50 --equal zeropp_s3,zeropp_pp --save two-nodes

Each node is a network namespace with two ranks. A token bucket limits the rate of the links between nodes. The number
of bytes is read from the kernel's counter of the first node's network device. All systems live in the same processes,
train the same model on the same data, and take turns in each round. The benchmark needs Linux and root.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.common import congestion
from bench.common.flags import add_model_flags, given_flags
from bench.common.namespaces import unavailable
from bench.network import report
from bench.network.links import DEVICE, nodes

ROOT = Path(__file__).resolve().parents[2]

SYSTEMS = (
    "ddp,fsdp2,hsdp,fsdp2_two_hop,fsdp2_pp,zeropp_s3,zeropp_hpz,zeropp_pp,zeropp_pp_loco,zeropp_delta4,zeropp_lossless,"
    "zeropp_pp_x4"
)
ALSO = "ddp_zero1,fsdp2_hpz,fsdp2_a2a,deepspeed,deepspeed_hpz,zeropp,zeropp_s0,zeropp_s1,zeropp_s2,zeropp_mics"
NAMES = [name for name in f"{SYSTEMS},{ALSO}".split(",") if name != "zeropp_pp_x4"]
COPIES = ("zeropp_hpz", "zeropp_pp", "zeropp_pp_loco", "zeropp_delta4", "zeropp_lossless")
PORT = "29500"  # any port is free in a new namespace
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1  # prctl(2)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--local", type=int, default=2, help="ranks per node")
    parser.add_argument(
        "--rates",
        default="wait80,200,50",
        help="million bits per second, one after another, after a run without limit; wait80: the rate at which "
        "zeropp_s3 waits for 80 percent of its step",
    )
    parser.add_argument("--equal", default="", help="systems also run at a rate where link time equals compute time")
    parser.add_argument("--systems", default=SYSTEMS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="steps per system and round")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before anything is measured")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16", help="dtype of compute and sent gradients")
    parser.add_argument(
        "--tcp",
        metavar="NAME",
        help="congestion control of the links; default: cubic if the kernel allows it, else reno, else the current one",
    )
    add_model_flags(parser)
    parser.add_argument("--save", metavar="NAME", help="write bench/results/<date>_network-<NAME>.md, .json and .png")
    args = parser.parse_args()
    fault = wrong(args)
    if fault:
        parser.error(fault)
    return args


def wrong(args: argparse.Namespace) -> str | None:
    """Return an error text for an invalid command line, else None. Checked here so that not every rank reports it."""
    if args.tcp is not None and args.tcp not in congestion.allowed():
        return f"--tcp {args.tcp}: the kernel allows {', '.join(congestion.allowed()) or 'no choice'}"
    if args.nodes < 2:
        return f"--nodes {args.nodes}: there is nothing between fewer than 2 nodes"
    for name in ("local", "rounds", "steps", "warm_up", *(flag.replace("-", "_") for flag in given_flags(args))):
        if getattr(args, name) < (name != "seed"):
            return f"--{name.replace('_', '-')} {getattr(args, name)}: expected at least 1"
    if args.d_model % args.heads:
        return f"--d-model {args.d_model}: expected a multiple of --heads {args.heads}"
    systems = args.systems.split(",")
    bases = [re.sub(r"^(zeropp.*?)_x[1-9]\d*$", r"\1", name) for name in systems]
    unknown = [name for name, base in zip(systems, bases, strict=True) if base not in NAMES]
    if unknown:
        return f"--systems: unknown {unknown}, known are {', '.join(NAMES)}; behind ours, _x4 for 4 micro-batches"
    apart = [name for name in bases if name in COPIES]
    if args.local < 2 and apart:
        return f"--local {args.local}: {apart} keep a second copy on the ranks of a node, and need two at least"
    others = set(args.equal.split(",")) - {"", *systems}
    if others:
        return f"--equal: {sorted(others)} are not among --systems"
    for rate in args.rates.split(","):
        number = rate.removeprefix("wait")
        try:
            fits = rate == "none" or 0.01 <= float(number) < (100 if rate != number else 1e6)
        except ValueError:
            fits = False
        if not fits:
            return f"--rates {rate}: expected million bits a second, or wait80 and the like, or none"
    if "wait" in args.rates and "zeropp_s3" not in systems:
        return "--rates wait...: zeropp_s3, which is to wait, is not among --systems"
    return None


def measure(args: argparse.Namespace, result: Path) -> dict:
    """Run the ranks on their nodes, and return the results that rank 0 has written."""
    flags = {
        "systems": args.systems, "rates": args.rates, "equal": args.equal, "dtype": args.dtype,
        "reduce-dtype": args.dtype, "warm-up": args.warm_up, "steps": args.steps, "rounds": args.rounds,
        "node-size": args.local, "result": result, **given_flags(args),
    }  # fmt: skip
    words = [sys.executable, "-m", "bench.network.ranks"]
    words += [f"--{name}={value}" for name, value in flags.items()]
    with nodes(args.nodes, args.tcp) as found, contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(args.nodes * args.local):
            node, local = divmod(rank, args.local)
            # Start the ranks without torchrun, which makes each rank a session of its own. Linux may share CPU time
            # among sessions first (sched_autogroup). Some ranks would then wait for a core while all others wait for
            # them in a collective.
            own = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": args.nodes * args.local}
            own |= {"LOCAL_WORLD_SIZE": args.local, "MASTER_ADDR": found[0].address, "MASTER_PORT": PORT}
            own |= {"GLOO_SOCKET_IFNAME": DEVICE, "OMP_NUM_THREADS": 1}
            environment = {**os.environ, **{name: str(value) for name, value in own.items()}}
            command = found[node].command(*words)
            ranks.append(subprocess.Popen(command, cwd=ROOT, env=environment, preexec_fn=end_with_parent))
            stack.callback(stop, ranks[-1])
        codes = exit_codes(ranks)
    if any(codes) or not result.exists():
        raise SystemExit(f"the ranks ended with exit codes {codes}, None where one was stopped; nothing to report")
    return json.loads(result.read_text())


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent dies, because then nothing else stops it; survives ``exec``."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


def stop(rank: subprocess.Popen) -> None:
    """Kill a rank if it still runs, and wait for its end."""
    rank.kill()
    rank.wait()


def exit_codes(ranks: Sequence[subprocess.Popen]) -> list[int | None]:
    """Wait until all ranks have ended or one has failed; return the exit codes, None for ranks that still run.

    The other ranks would wait for a failed one in their next collective.
    """
    while True:
        codes = [rank.poll() for rank in ranks]
        if any(codes) or None not in codes:
            return codes
        time.sleep(0.2)


def main() -> None:
    args = parse_arguments()
    reason = unavailable("tc")
    if reason is not None:
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(args, Path(folder) / "result.json")
    settings = vars(args)
    text = report.markdown(measured, settings)
    print(text)
    if args.save:
        for path in report.save(measured, settings, text, ROOT / "bench" / "results", args.save):
            print("written:", path.relative_to(ROOT))


if __name__ == "__main__":
    main()
