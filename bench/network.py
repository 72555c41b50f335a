"""Training over slow links: tokens a second and bytes between nodes, zeropp beside DDP and FSDP2.

    sudo python bench/network.py --nodes 2 --rates none,200,50,20 --rounds 3 --save two-nodes

Nodes are network namespaces with two ranks each, joined by links whose rate a token bucket limits; the bytes are those
that the kernel counted on the first node's device, headers of 9000-byte frames included. All systems live in the same
processes, train the same model on the same data and take turns, round by round. Linux, root.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bench"))

from network_links import DEVICE, nodes, unavailable  # noqa: E402 (the path above comes first)

SYSTEMS = "ddp,fsdp2,hsdp,zeropp_s3,zeropp_hpz,zeropp_pp,zeropp_pp_loco"
PORT = "29500"  # nobody else has ports in the namespaces


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--local", type=int, default=2, help="ranks a node")
    parser.add_argument("--rates", default="none,200,50,20", help="million bits a second, one after the other")
    parser.add_argument("--systems", default=SYSTEMS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1, help="steps a system and round")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--d-model", type=int, default=384)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4, help="windows a rank")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", metavar="NAME", help="write bench/results/<date>_network-<NAME>.md and .json")
    return parser.parse_args()


def measure(args: argparse.Namespace, result: Path) -> dict:
    """Run the ranks on their nodes; what rank 0 wrote."""
    flags = {
        "systems": args.systems, "rates": args.rates, "dtype": args.dtype, "reduce-dtype": args.dtype,
        "steps": args.steps, "rounds": args.rounds, "layers": args.layers, "d-model": args.d_model,
        "heads": args.heads, "seq-len": args.seq_len, "batch": args.batch, "seed": args.seed, "node-size": args.local,
        "result": result,
    }  # fmt: skip
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": DEVICE, "OMP_NUM_THREADS": "1"}
    with nodes(args.nodes) as found:
        launchers = []
        for index, node in enumerate(found):
            words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(args.nodes)]
            words += ["--node-rank", str(index), "--nproc-per-node", str(args.local)]
            words += ["--master-addr", found[0].address, "--master-port", PORT]
            words += [str(ROOT / "bench" / "network_ranks.py")]
            words += [f"--{name}={value}" for name, value in flags.items()]
            launchers.append(subprocess.Popen(node.command(*words), env=environment))
        codes = [launcher.wait() for launcher in launchers]
    if any(codes) or not result.exists():
        raise SystemExit(f"the nodes ended with exit codes {codes}; nothing to report")
    return json.loads(result.read_text())


def table(args: argparse.Namespace, measured: dict) -> str:
    """The results for people."""
    unit = 2 * measured["numel"] * (args.nodes - 1) / args.nodes  # M (n-1)/n, M the bytes of the weights in bf16
    tokens = args.nodes * args.local * args.batch * args.seq_len
    lines = [
        f"Training over slow links, {date.today()}: {args.nodes} nodes of {args.local} ranks, {args.dtype}",
        "",
        f"GPT, {args.layers} layers, width {args.d_model}, {measured['numel'] / 1e6:.1f} M parameters, "
        f"{args.batch} x {args.seq_len} bytes a rank; {args.rounds} rounds, systems in turn. Bytes: what the first "
        "node sent to others in a step, headers included, in units of "
        f"M (n-1)/n = {unit / 1e6:.2f} MB (M: weights in bf16).",
        "",
        "| Mbit/s | system | step s (min, max) | tokens/s | / zeropp_s3 | bytes | last loss |",
        "|---|---|---|---|---|---|---|",
    ]
    for rate in dict.fromkeys(row["rate"] for row in measured["rows"]):
        rows = [row for row in measured["rows"] if row["rate"] == rate]
        seconds = {name: [r["s"] for r in rows if r["system"] == name] for name in measured["losses"]}
        base = statistics.median(seconds.get("zeropp_s3", [float("nan")]))
        for name, values in seconds.items():
            step = statistics.median(values)
            sent = statistics.median(r["bytes"] for r in rows if r["system"] == name) / unit
            lines.append(
                f"| {rate or 'none'} | {name} | {step:.2f} ({min(values):.2f}, {max(values):.2f}) "
                f"| {tokens / step:.0f} | {base / step:.2f} | {sent:.3f} | {measured['losses'][name][-1]:.4f} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    args = parse_arguments()
    reason = unavailable()
    if reason is not None:
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(args, Path(folder) / "result.json")
    text = table(args, measured)
    print(text)
    if args.save:
        stem = ROOT / "bench" / "results" / f"{date.today()}_network-{args.save}"
        stem.with_suffix(".md").write_text(text)
        stem.with_suffix(".json").write_text(json.dumps({"settings": vars(args), **measured}, indent=1))
        print("written:", stem.with_suffix(".md").relative_to(ROOT))


if __name__ == "__main__":
    main()
