"""Train a small GPT with ZeRO-3 on the source files of Python's standard library.

    python examples/train_gpt.py                                         # one process
    torchrun --nproc-per-node 2 examples/train_gpt.py                    # two ranks, all states sharded
    torchrun --nproc-per-node 2 examples/train_gpt.py --config zero.json # a configuration in DeepSpeed's format
    torchrun --nproc-per-node 8 examples/train_gpt.py --layers 24 --d-model 2048 --heads 16 --seq-len 2048
    torchrun --nproc-per-node 2 examples/train_gpt.py --checkpoint runs/first --resume  # see below

The script runs on CUDA devices (NCCL) or on CPUs (gloo). On two CPU cores the default model with 10.8 million
parameters takes about three minutes to get from 5.5 to below 2 nats per byte.

A run resumes on any number of ranks if that number times ``--batch`` divides the windows of a step.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from checkpoints import Checkpoints
from gpt import GPT, GPTConfig, generate, parameter_count
from job import INTERRUPTED, Job, Metrics, memory_bytes, start_job
from text_data import Batches, Text, load_text, on_device, validation_batches
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from tqdm import tqdm

import zeropp


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level GPT with zeropp.")
    model = parser.add_argument_group("model")
    model.add_argument("--layers", type=int, default=6)
    model.add_argument("--d-model", type=int, default=384)
    model.add_argument("--heads", type=int, default=6)
    model.add_argument("--seq-len", type=int, default=128, help="bytes of context")
    model.add_argument("--vocab", type=int, default=256, help="256 covers every byte")
    model.add_argument("--tied", action="store_true", help="share embedding and output head")
    data = parser.add_argument_group("data")
    data.add_argument(
        "--data", type=Path, nargs="+", default=[], help="files or directories; default: Python's own library"
    )
    data.add_argument("--batch", type=positive, help="windows per rank and micro-batch; default: the config's, or 8")
    data.add_argument(
        "--accumulate", type=positive, help="micro-batches per optimizer step; default: the config's, or 1"
    )
    run = parser.add_argument_group("run")
    run.add_argument("--config", type=Path, help="JSON for zeropp; default: stage 3, clipping at 1.0")
    run.add_argument(
        "--bf16",
        action=argparse.BooleanOptionalAction,
        help="compute in bf16; default: the config's setting, else the faster dtype on this machine",
    )
    run.add_argument("--plain", action="store_true", help="one process with torch only, as a reference")
    run.add_argument("--steps", type=int, default=240)
    run.add_argument("--lr", type=float, default=1e-3)
    run.add_argument("--warmup", type=int, default=20, help="steps of linear warmup")
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--log-every", type=positive, default=5)
    run.add_argument("--validate-every", type=positive, default=50)
    run.add_argument("--validate-windows", type=int, default=64)
    run.add_argument("--sample", type=int, default=200, help="bytes to generate at the end, 0 for none")
    run.add_argument("--prompt", default="def ")
    run.add_argument("--checkpoint", type=Path, help="folder for the run's checkpoints; default: no checkpoints")
    run.add_argument("--save-every", type=positive, default=50, help="steps between checkpoints; the last is saved")
    run.add_argument("--resume", action="store_true", help="continue from --checkpoint's newest checkpoint, if any")
    run.add_argument("--metrics", type=Path, help="JSONL; --resume appends to it; default: runs/<time>/metrics.jsonl")
    args = parser.parse_args(argv)
    if not args.prompt:
        parser.error("--prompt is empty; the model needs a byte to go on from")
    if args.plain and args.checkpoint is not None:
        parser.error("--checkpoint is for zeropp's own runs, not for --plain")
    if args.resume and args.checkpoint is None:
        parser.error("--resume needs --checkpoint, the directory to resume from")
    return args


def positive(text: str) -> int:
    """Return an argument of the command line as an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


# -- Configuration and optimizer


def bf16_is_faster(device: torch.device) -> bool:
    """Return True if a matrix product is faster in bf16 than in fp32; on CPUs it may be twice or half as fast."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.ones(512, 512, dtype=dtype)
        times = []
        for _ in range(6):
            start = time.perf_counter()
            a @ a
            times.append(time.perf_counter() - start)
        seconds[dtype] = min(times)
    return seconds[torch.bfloat16] < seconds[torch.float32]


def read_config(args: argparse.Namespace) -> zeropp.Config:
    """Return the configuration of the given file, or a default with stage 3 and clipping at norm 1."""
    return zeropp.load_config(args.config or {"zero_optimization": {"stage": 3}, "gradient_clipping": 1.0})


def make_config(
    config: zeropp.Config, args: argparse.Namespace, job: Job, checkpoints: Checkpoints | None = None
) -> zeropp.Config:
    """Return ``config`` with the changes that flags ask for. Sets ``args.batch`` and ``args.accumulate``."""
    bf16 = args.bf16
    if bf16 is None and not args.config:
        # Ranks may measure different results, but all ranks must compute in one dtype: take the majority.
        _, votes = job.agree(float(bf16_is_faster(job.device)))
        bf16 = votes > 0.5
    changes: dict[str, object] = {}
    if bf16 is not None:
        changes["bf16"] = config.bf16.model_copy(update={"enabled": bf16})
    if args.accumulate is not None:
        changes["gradient_accumulation_steps"] = args.accumulate
    config = config.model_copy(update=changes)
    _, batch, args.accumulate = config.resolve_batch(job.world)
    if batch is not None and args.batch not in (None, batch):
        raise ValueError(f"--batch {args.batch}, and {args.config} makes it {batch}: leave one of them out")
    args.batch = args.batch or batch or 8
    steps = args.accumulate if checkpoints is None else checkpoints.accumulation(args.batch, args.accumulate, job)
    if steps != args.accumulate:
        config, args.accumulate = config.model_copy(update={"gradient_accumulation_steps": steps}), steps
    return config


class PlainOptimizer:
    """The methods of ZeroOptimizer that the training loop uses, in plain torch: the reference for ``--plain``."""

    def __init__(self, inner: torch.optim.Optimizer, model: nn.Module, config: zeropp.Config) -> None:
        self.inner = inner
        self.parameters = list(model.parameters())
        self.micro_steps = config.resolve_batch(1)[2]
        self.max_norm = config.gradient_clipping or math.inf
        self.grad_norm: float | None = None
        self.skipped_steps = 0

    def backward(self, loss: Tensor) -> None:
        (loss / self.micro_steps).backward()

    def step(self) -> None:
        self.grad_norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.max_norm))
        self.inner.step()

    def zero_grad(self) -> None:
        self.inner.zero_grad()


AnyOptimizer: TypeAlias = "zeropp.ZeroOptimizer | PlainOptimizer"


def make_optimizer(
    model: nn.Module, config: zeropp.Config, args: argparse.Namespace
) -> tuple[AnyOptimizer, LRScheduler]:
    inner = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def factor(step: int) -> float:
        return learning_rate_factor(step, args.steps, args.warmup)

    if args.plain:
        return PlainOptimizer(inner, model, config), LambdaLR(inner, factor)
    # From here on each rank holds only its shards of weights, gradients and optimizer states.
    optimizer = zeropp.ZeroOptimizer(inner, model, config)
    return optimizer, LambdaLR(optimizer, factor)


def learning_rate_factor(step: int, steps: int, warmup: int) -> float:
    """Return the factor on the learning rate: linear warmup to 1, then half a cosine down to 0.1 at ``steps``."""
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done))


def plain_precision(args: argparse.Namespace, config: zeropp.Config, job: Job) -> contextlib.AbstractContextManager:
    """Return the autocast context for ``--plain`` in bf16; no effect with zeropp, which computes in bf16 itself."""
    if not (args.plain and config.bf16.enabled):
        return contextlib.nullcontext()
    # Disable autocast's cache of cast weights: it is cleared only when the context ends, so around a whole run every
    # forward would use the weights of the first step.
    return torch.autocast(job.device.type, torch.bfloat16, cache_enabled=False)


# -- Measurements


@dataclass(frozen=True)
class Traffic:
    """Bytes that this rank has sent and seconds that it has waited, since sharding or between two such readings.

    Attributes:
        by_hop: bytes of each hop, by a string of kind, levels and codec.
        total: bytes of all hops.
        between_nodes: bytes sent to other nodes.
        exposed: seconds in which computation waited for communication.
    """

    by_hop: Counter[str]
    total: int
    between_nodes: int
    exposed: float

    def __sub__(self, other: Traffic) -> Traffic:
        by_hop = self.by_hop - other.by_hop
        apart = self.between_nodes - other.between_nodes
        return Traffic(by_hop, self.total - other.total, apart, self.exposed - other.exposed)


def traffic(model: nn.Module, args: argparse.Namespace) -> Traffic:
    """Return a reading of the model's communication ledger; zeros with ``--plain``."""
    if args.plain:
        return Traffic(Counter(), 0, 0, 0.0)
    ledger = zeropp.comm_report(model)
    between = ledger.bytes_by_link().get("cross", 0)
    return Traffic(Counter(ledger.bytes_by_hop()), ledger.total_bytes, between, sum(r.exposed for r in ledger.rows))


# -- Validation, training and sampling


@torch.no_grad()
def validate(model: nn.Module, text: Text, job: Job, args: argparse.Namespace) -> float:
    """Return the mean loss over the held-out windows of all ranks, in nats per byte. Collective."""
    model.eval()
    losses = []
    for batch in validation_batches(
        text.validation, args.batch, args.seq_len, args.validate_windows, job.rank, job.world
    ):
        losses.append(model(*on_device(batch, job.device)))
    model.train()
    return job.agree(torch.stack(losses).mean().item())[1]


class Meter:
    """Loss, speed and traffic since the last line of metrics."""

    def __init__(self, model: nn.Module, job: Job, args: argparse.Namespace) -> None:
        self.model, self.job, self.args = model, job, args
        self.tokens_per_step = args.batch * args.seq_len * job.world * args.accumulate
        self.loss_sum = torch.zeros((), device=job.device)  # on the device: reading each loss would make the host wait
        self.restart()

    def restart(self) -> None:
        self.loss_sum.zero_()
        self.steps, self.before = 0, traffic(self.model, self.args)
        self.clock = time.perf_counter()

    def skip(self, seconds: float, sent: Traffic) -> None:
        """Exclude the time and the traffic of a validation from the next line of metrics."""
        self.clock += seconds
        before = self.before
        self.before = Traffic(
            before.by_hop + sent.by_hop, before.total + sent.total, before.between_nodes + sent.between_nodes,
            before.exposed + sent.exposed,
        )  # fmt: skip

    def mean_loss(self) -> float:
        return self.loss_sum.item() / self.steps

    def rates(self) -> dict[str, object]:
        seconds = time.perf_counter() - self.clock
        sent = traffic(self.model, self.args) - self.before
        return {
            "tokens_per_s": self.tokens_per_step * self.steps / seconds,
            "sent_bytes_per_step": sent.total // self.steps,
            "sent_between_nodes_per_step": sent.between_nodes // self.steps,
            "sent_bytes_per_step_by_hop": {hop: nbytes // self.steps for hop, nbytes in sent.by_hop.items()},
            "exposed_s_per_step": sent.exposed / self.steps,
            "memory_bytes": memory_bytes(self.job.device),
        }


def train(
    model: nn.Module,
    optimizer: AnyOptimizer,
    scheduler: LRScheduler,
    text: Text,
    job: Job,
    args: argparse.Namespace,
    metrics: Metrics,
    checkpoints: Checkpoints,
) -> bool:
    """Run all steps, and return True; return False if any rank gets a signal to stop before the end."""
    batches = Batches(text.train, args.batch, args.seq_len, job.rank, job.world, args.seed, args.accumulate)
    done = checkpoints.resume(model, optimizer, scheduler)
    meter = Meter(model, job, args)
    interval = 0.5 if sys.stderr.isatty() else 10
    with tqdm(total=args.steps, initial=done, disable=job.rank != 0, mininterval=interval, unit="step") as bar:
        for step in range(done + 1, args.steps + 1):
            for micro in range(args.accumulate):
                loss = model(*on_device(batches.at(step - 1, micro), job.device))
                optimizer.backward(loss)  # divides the loss by the number of micro-batches
                meter.loss_sum += loss.detach() / args.accumulate
            lr = scheduler.get_last_lr()[0]
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            bar.update()
            meter.steps += 1
            # agree() is a collective, so every rank calls it in every step, also to learn of a signal to another rank.
            log = step % args.log_every == 0 or step == args.steps
            stop, loss_mean = job.agree(meter.mean_loss() if log else 0.0)
            if log:
                health = {"grad_norm": optimizer.grad_norm, "skipped_steps": optimizer.skipped_steps}
                record = {"step": step, "loss": loss_mean, "lr": lr, **health, **meter.rates()}
                metrics.write("train", **record)
                bar.set_postfix_str(describe(record))
                meter.restart()
            if stop or step == args.steps or checkpoints.due(step):
                checkpoints.save(step, model, optimizer, scheduler)
            if stop:
                metrics.write("interrupted", step=step)
                return False
            if step % args.validate_every == 0 or step == args.steps:
                clock, before = time.perf_counter(), traffic(model, args)
                held_out = validate(model, text, job, args)
                meter.skip(time.perf_counter() - clock, traffic(model, args) - before)
                metrics.write("validation", step=step, loss=held_out)
                if job.rank == 0:
                    bar.write(f"step {step}: validation loss {held_out:.3f} nats per byte", file=sys.stderr)
    return True


def describe(record: dict) -> str:
    """Return the text at the end of the progress bar; the metrics file also has the bytes of each hop."""
    between = record["sent_between_nodes_per_step"] / 1e6
    return (
        f"loss {record['loss']:.3f}, {record['tokens_per_s']:,.0f} tokens/s, "
        f"{record['memory_bytes'] / 2**20:,.0f} MiB peak; a step sent {record['sent_bytes_per_step'] / 1e6:.1f} MB"
        f"{f' ({between:.1f} between nodes)' if between else ''}, waited {1000 * record['exposed_s_per_step']:.0f} ms"
    )


def sample(model: nn.Module, job: Job, args: argparse.Namespace) -> bool:
    """Continue the prompt with the sharded model. Forward gathers weights, so all ranks run it; rank 0 prints."""
    prompt = torch.tensor(list(args.prompt.encode()), device=job.device)
    text = bytearray(args.prompt.encode())
    for token in generate(model, prompt, args.sample, args.seq_len, seed=args.seed):
        text.append(min(token, 255))  # tokens above 255, which a larger --vocab has, stand for no byte
        if job.agree()[0]:
            return False
    if job.rank == 0:
        print("-" * 40, text.decode(errors="replace"), "-" * 40, sep="\n", flush=True)
    return True


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    if args.vocab < 256:
        raise ValueError(f"--vocab {args.vocab}: the text is bytes, expected at least 256")
    config = read_config(args)
    with start_job(args.plain, config.zeropp.hang_timeout) as job:
        torch.manual_seed(args.seed)
        checkpoints = Checkpoints(args.checkpoint, args.save_every, args.resume)
        config = make_config(config, args, job, checkpoints)
        text = load_text(args.data)
        sizes = GPTConfig(args.vocab, args.layers, args.d_model, args.heads, args.seq_len, args.tied)
        with job.device:
            model = GPT(sizes)
        metrics = Metrics(args.metrics, job, append=args.resume)
        shape = {"parameters": parameter_count(sizes), "world": job.world, "device": job.device.type}
        settings = config.model_dump(mode="json", exclude_unset=True)
        metrics.write("start", **shape, files=text.files, train_bytes=len(text.train), config=settings)
        if job.rank == 0:
            print(f"{shape}, {len(text.train):,} bytes of text, metrics in {metrics.path}", file=sys.stderr)
        # A variable of main(), not of train(): the optimizer holds the weights, so it must live as long as the model.
        optimizer, scheduler = make_optimizer(model, config, args)
        with plain_precision(args, config, job):
            finished = train(model, optimizer, scheduler, text, job, args, metrics, checkpoints)
            checkpoints.wait()
            if finished and args.sample:
                finished = sample(model, job, args)
        metrics.write("end", finished=finished)
        metrics.close()
        if job.rank == 0:
            end = f"trained {args.steps} steps; metrics" if finished else "stopped on request; metrics so far"
            print(f"{end} in {metrics.path}", file=sys.stderr)
    return 0 if finished else INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
