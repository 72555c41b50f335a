"""What each rank of network.py runs: systems take turns over a link of one rate after the other.

Started by network.py on every node; writes what it measured from rank 0.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parents[1]
for _source in (ROOT, ROOT / "kernels", ROOT / "examples", ROOT / "bench"):
    sys.path.insert(0, str(_source))

import torch  # noqa: E402 (the path above comes first)
import torch.distributed as dist  # noqa: E402
from network_links import sent_bytes, set_rate  # noqa: E402
from step_time_systems import Contestant, build, meet  # noqa: E402
from text_data import Batches, load_text  # noqa: E402


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("--systems", "--rates", "--dtype", "--reduce-dtype", "--result"):
        parser.add_argument(name, required=True)
    numbers = "steps rounds layers d-model heads seq-len batch seed"
    for name in numbers.split():
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--node-size", dest="local", type=int, required=True)
    return parser.parse_args()


def turn(contestant: Contestant, steps: int) -> tuple[float, float]:
    """(seconds, bytes that this node sent to others) a step."""
    device = torch.device("cpu")
    meet(device)
    sent, start = sent_bytes(), time.perf_counter()
    for _ in range(steps):
        contestant.one_step()
    contestant.settle()
    meet(device)
    return (time.perf_counter() - start) / steps, (sent_bytes() - sent) / steps


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    rates = [None if rate == "none" else float(rate) for rate in args.rates.split(",")]
    device = torch.device("cpu")
    batches = Batches(load_text().train, args.batch, args.seq_len, rank, world, args.seed)
    contestants = [build(name, args, device, batches) for name in args.systems.split(",")]
    for contestant in contestants:  # the first steps learn, compile and allocate
        turn(contestant, 2)
    rows = []
    for rate in rates:
        if int(os.environ["LOCAL_RANK"]) == 0:
            set_rate(rate)
        for number in range(args.rounds):
            for contestant in contestants:
                seconds, sent = turn(contestant, args.steps)
                rows.append({"rate": rate, "round": number, "system": contestant.name, "s": seconds, "bytes": sent})
    if int(os.environ["LOCAL_RANK"]) == 0:
        set_rate(None)
    measured = {contestant.name: contestant.measured()["losses"] for contestant in contestants}
    if rank == 0:
        numel = sum(p.numel() for p in build_plain(args).parameters())
        Path(args.result).write_text(json.dumps({"rows": rows, "losses": measured, "numel": numel}))
    meet(device)
    dist.destroy_process_group()


def build_plain(args: argparse.Namespace) -> torch.nn.Module:
    """The model that every system trains, without values."""
    from gpt import GPT, GPTConfig

    with torch.device("meta"):
        return GPT(GPTConfig(256, args.layers, args.d_model, args.heads, args.seq_len))


if __name__ == "__main__":
    main()
