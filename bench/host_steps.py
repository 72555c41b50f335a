"""Host work of a whole training step beside plain torch and FSDP2: calls of Python and C, and time.

The model is a GPT with many narrow blocks, so it computes next to nothing and the step is the host's work. "plain" is
the least that mixed precision costs: bf16 weights kept whole, float32 main weights, fused AdamW, clipping. FSDP2 and
zeropp do the same and reshard every unit after forward. Calls are counted in one step by ``sys.setprofile`` on the main
thread, so they are exact. Times are the smallest of many steps.

Cases: one process, two gloo ranks, and torch's fake group of 64 and 1024 ranks, whose collectives return at once. Each
case runs in new processes.

Run: ``python -m bench.host_steps``, or with names of cases and ``--json host_steps.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zeropp
from bench.common.machine import describe, machine
from bench.host_cost import join
from bench.step_time.systems import ADAMW, MainWeights
from examples.gpt import GPT, GPTConfig

__all__ = ["CASES", "LAYERS", "measure", "run_case"]

LAYERS, WIDTH, CLIP = 24, 16, 1.0
CODECS = {"zero_quantized_weights": True, "zero_quantized_gradients": True}

# Name -> (system, ranks, True for a fake group, keys of the zero block, micro-batches).
CASES: dict[str, tuple[str, int, bool, dict[str, Any], int]] = {
    "plain": ("plain", 1, False, {}, 1),
    "fsdp2": ("fsdp2", 1, False, {}, 1),
    "zeropp": ("zeropp", 1, False, {}, 1),
    "plain, 2 micro-batches": ("plain", 1, False, {}, 2),
    "zeropp, 2 micro-batches": ("zeropp", 1, False, {}, 2),
    "zeropp, offload": ("zeropp", 1, False, {"offload_optimizer": {"device": "cpu"}}, 1),
    "fsdp2, 2 ranks": ("fsdp2", 2, False, {}, 1),
    "zeropp, 2 ranks": ("zeropp", 2, False, {}, 1),
    "zeropp, 2 ranks, codecs": ("zeropp", 2, False, CODECS, 1),
    "zeropp, 64 ranks": ("zeropp", 64, True, {}, 1),
    "zeropp, 64 ranks, hpZ": ("zeropp", 64, True, {"zero_hpz_partition_size": 8}, 1),
    "zeropp, 64 ranks, codecs": ("zeropp", 64, True, CODECS, 1),
    "zeropp, 1024 ranks": ("zeropp", 1024, True, {}, 1),
    "zeropp, 1024 ranks, hpZ and codecs": ("zeropp", 1024, True, {**CODECS, "zero_hpz_partition_size": 8}, 1),
}


def _system(name: str, model: nn.Module, zero: dict[str, Any], micros: int) -> Callable[[list[Tensor]], None]:
    """Return a function that takes one step on batches of tokens."""
    if name == "plain":
        plain = MainWeights(model)

        def step(batches: list[Tensor]) -> None:
            for tokens in batches:
                plain.backward(model(tokens, tokens) / micros)
            nn.utils.clip_grad_norm_(plain.param_groups[0]["params"], CLIP)
            plain.step()

        return step
    if name == "fsdp2":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (*model.blocks, model):  # type: ignore[misc]
            fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        adam = torch.optim.AdamW(model.parameters(), **ADAMW)

        def step_fsdp2(batches: list[Tensor]) -> None:
            for tokens in batches:
                (model(tokens, tokens) / micros).backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            adam.step()
            adam.zero_grad()

        return step_fsdp2
    config = {
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_max_live_parameters": 0,
            **zero,
        },
        "bf16": {"enabled": True},
        "gradient_clipping": CLIP,
        "gradient_accumulation_steps": micros,
        "zeropp": {"unit_min_blocks": 0},
    }
    optimizer = zeropp.ZeroOptimizer(torch.optim.AdamW(model.parameters(), **ADAMW), model, config)

    def step_zeropp(batches: list[Tensor]) -> None:
        for tokens in batches:
            optimizer.backward(model(tokens, tokens))
        optimizer.step()
        optimizer.zero_grad()

    return step_zeropp


def measure(name: str, steps: int = 40, layers: int = LAYERS) -> dict[str, Any]:
    """Return calls and times of one step in this process, whose process group exists if the case has one.

    Args:
        name: name of the case.
        steps: number of steps that are timed.
        layers: number of blocks.
    """
    system, _, _, zero, micros = CASES[name]
    torch.manual_seed(0)
    sizes = GPTConfig(vocab=32, layers=layers, d_model=WIDTH, heads=2, seq_len=8)
    take = _system(system, GPT(sizes), zero, micros)
    draw = torch.Generator().manual_seed(1)

    def batches() -> list[Tensor]:
        return [torch.randint(32, (1, 8), generator=draw) for _ in range(micros)]

    for _ in range(10):
        take(batches())
    wall, own = [], []
    for _ in range(steps):
        given = batches()
        begin, used = time.perf_counter(), time.thread_time()
        take(given)
        wall.append(time.perf_counter() - begin)
        own.append(time.thread_time() - used)
    counts: Counter[str] = Counter()

    def count(frame: object, event: str, argument: object) -> None:
        counts[event] += 1

    given = batches()
    sys.setprofile(count)
    take(given)
    sys.setprofile(None)
    times = {"ms": 1e3 * min(wall), "main_thread_ms": 1e3 * min(own)} if steps else {}
    return {"case": name, "layers": layers, "python": counts["call"], "c": counts["c_call"], **times}


def _child(name: str, steps: int) -> None:
    torch.set_num_threads(1)
    _, world, fake, _, _ = CASES[name]
    if fake:
        join(world, 8)
    elif world > 1 or name.startswith("fsdp2"):
        dist.init_process_group("gloo")
    row = measure(name, steps)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(json.dumps(row), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def run_case(name: str, steps: int = 40) -> dict[str, Any]:
    """Run one case in new processes, and return its row."""
    _, world, fake, _, _ = CASES[name]
    ranks = 1 if fake else world
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(ranks):
        env = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        env |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
        command = [sys.executable, "-m", "bench.host_steps", "--child", name, "--steps", str(steps)]
        children.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    printed = [child.communicate()[0] for child in children]
    if any(child.returncode for child in children):
        raise RuntimeError(f"case {name!r} failed: its processes ended with {[c.returncode for c in children]}")
    row: dict[str, Any] = json.loads(printed[0].splitlines()[-1])
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a text table; columns "over plain" are for one block and step."""
    plain = {row["case"].partition(",")[2]: row for row in rows if row["case"].startswith("plain")}
    lines = [
        f"{'case':38}{'python':>9}{'c':>9}{'a block':>9}{'over plain':>12}{'ms':>9}{'main ms':>9}{'ms over plain':>15}"
    ]
    for row in rows:
        own = row["python"] / row["layers"]
        base = plain.get(" 2 micro-batches" if "micro" in row["case"] else "")
        calls = ms = ""
        if base is not None and base is not row:
            calls = f"{(row['python'] - base['python']) / row['layers']:.0f}"
            ms = f"{(row['ms'] - base['ms']) / row['layers']:.2f}"
        lines.append(
            f"{row['case']:38}{row['python']:>9}{row['c']:>9}{own:>9.0f}{calls:>12}{row['ms']:>9.1f}"
            f"{row['main_thread_ms']:>9.1f}{ms:>15}"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"cases to run: {', '.join(CASES)}; all by default")
    parser.add_argument("--steps", type=int, default=40, help="steps that are timed")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        _child(args.child, args.steps)
        return
    unknown = [name for name in args.cases if name not in CASES]
    if unknown:
        parser.error(f"unknown cases {unknown}; expected some of {', '.join(CASES)}")
    rows = [run_case(name, args.steps) for name in args.cases or CASES]
    print(f"{describe(machine('cpu'))}\nPython {sys.version.split()[0]}, torch {torch.__version__}\n{table(rows)}")
    if args.json is not None:
        args.json.write_text(json.dumps({"torch": torch.__version__, "python": sys.version, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
