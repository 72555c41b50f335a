"""One run of the comparison: one arm and one seed, from the first step or from its last checkpoint."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn

import zeropp
from bench.convergence.arms import ARMS, Settings
from bench.convergence.ranks import VirtualRanks
from bench.convergence.weights import make_weights
from examples.gpt import GPT, GPTConfig
from examples.text_data import Batches, load_text, validation_batches

BETAS = (0.9, 0.95)
COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16}
CLASSES = ("all", "embedding", "2-D", "1-D")


def run(arm: str, seed: int, settings: Settings, folder: Path, checkpoint_every: int) -> dict[str, object]:
    """Train to the end, write the result to a file in ``folder``, and return it.

    Args:
        arm: name in ``ARMS``.
        seed: seed of initial weights and order of data.
        settings: settings of the comparison.
        folder: folder of the runs.
        checkpoint_every: number of steps between checkpoints, from which an interrupted run continues.
    """
    stem = settings.stem(arm, seed)
    result, state = folder / f"{stem}.json", folder / f"{stem}.pt"
    training = Training(arm, seed, settings)
    if state.exists():
        training.load_state_dict(torch.load(state, map_location=settings.device, weights_only=True))
    while training.step < settings.steps:
        training.train_step()
        if training.step % checkpoint_every == 0 and training.step < settings.steps:
            replace(state, lambda path: torch.save(training.state_dict(), path))
    measured = training.finish()
    replace(result, lambda path: path.write_text(json.dumps(measured) + "\n"))
    state.unlink(missing_ok=True)
    return measured


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file under another name and rename it, so that it is never incomplete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    write(fresh)
    fresh.replace(path)


class Training:
    """State of one run.

    Each flat buffer has its main weights as one float32 parameter, and AdamW steps it as a whole. AdamW is elementwise,
    so this equals the steps of the ranks that own the shards. The model computes with ``seen``, the bfloat16 weights
    that arrive at every rank.
    """

    def __init__(self, arm: str, seed: int, settings: Settings) -> None:
        self.arm, self.seed, self.settings = arm, seed, settings
        self.step = 0
        device = torch.device(settings.device)
        torch.manual_seed(seed)  # the model is built on the CPU, so weights are equal for all kinds of devices
        sizes = GPTConfig(
            layers=settings.layers, d_model=settings.d_model, heads=settings.heads, seq_len=settings.seq_len
        )
        initial = GPT(sizes)
        values = {name: parameter.detach().clone() for name, parameter in initial.named_parameters()}
        self.model = initial.to(device)
        for parameter in self.model.parameters():  # only parameters: module buffers keep their dtype, as in the engine
            parameter.data = parameter.data.to(COMPUTE[settings.compute])
        config = zeropp.load_config(ARMS[arm].config(settings.wire))
        self.ranks = VirtualRanks(self.model, config, settings.nodes, settings.local)
        self.main, self.seen, self.computed, self.weights = [], [], [], []
        parameters = dict(self.model.named_parameters())
        for buffer in self.ranks.buffers:
            main = torch.zeros(buffer.layout.numel, dtype=torch.float32, device=device)
            seen = torch.zeros_like(main, dtype=torch.bfloat16)
            computed = seen if settings.compute == "bf16" else torch.zeros_like(main)
            for slot, source, target in zip(
                buffer.layout.slots, buffer.layout.views(main), buffer.layout.views(computed), strict=True
            ):
                source.copy_(values[slot.name])
                parameters[slot.name].data = target
            self.main.append(nn.Parameter(main))
            self.main[-1].grad = buffer.mean
            self.seen.append(seen)
            self.computed.append(computed)
            codec, kind = self.ranks.weight_codec, ARMS[arm].weights
            self.weights.append(make_weights(kind, main.numel(), self.ranks.world, codec, device, settings.sample))
        self.numel = sum(buffer.layout.used_numel for buffer in self.ranks.buffers)
        self.optimizer = torch.optim.AdamW(self.main, lr=settings.lr, betas=BETAS, weight_decay=0.1, fused=True)
        self.exact_average = [torch.zeros_like(main) for main in self.main]  # exp_avg with exact gradients
        text = load_text()
        self.held_out = text.validation
        self.batches = [
            Batches(text.train, settings.batch, settings.seq_len, rank, self.ranks.world, seed)
            for rank in range(self.ranks.world)
        ]
        self.record: dict[str, list] = {"step": [], "loss": [], "single": [], "weight_bits": [], "validation": []}
        self.record.update({name: [] for name in CLASSES})
        self.seconds = 0.0
        self._refresh()

    def train_step(self) -> None:
        """Run one optimizer step of all ranks."""
        start = time.perf_counter()
        settings = self.settings
        losses = []
        for rank, batches in enumerate(self.batches):
            tokens, targets = (part.to(settings.device) for part in batches.at(self.step))
            loss = self.model(tokens, targets)
            loss.backward()
            self.ranks.take(rank)
            losses.append(loss.detach())
        self.ranks.reduce()
        for group in self.optimizer.param_groups:
            group["lr"] = settings.lr * _schedule(self.step, settings.warmup, settings.steps)
        self.optimizer.step()
        for average, buffer in zip(self.exact_average, self.ranks.buffers, strict=True):
            average.mul_(BETAS[0]).add_(buffer.exact, alpha=1 - BETAS[0])
        self._refresh()
        self.step += 1
        if self.step % settings.sample == 0 or self.step == settings.steps:
            self._sample(torch.stack(losses).mean())
        self.seconds += time.perf_counter() - start
        if self.step % settings.validate_every == 0 and self.step < settings.steps:
            self.record["validation"].append([self.step, self.validate(settings.windows // 8)])

    @torch.no_grad()
    def _refresh(self) -> None:
        for weights, main, seen, computed in zip(self.weights, self.main, self.seen, self.computed, strict=True):
            weights.refresh(main.detach(), seen)
            if computed is not seen:
                computed.copy_(seen)

    @torch.no_grad()
    def _sample(self, loss: Tensor) -> None:
        """Record this step's errors and loss; the host waits for the device.

        Raises:
            RuntimeError: the loss is not finite.
        """
        value = float(loss)
        if not math.isfinite(value):
            raise RuntimeError(f"{self.arm}, seed {self.seed}: the loss is {value} at step {self.step}")
        averages = [self.optimizer.state[main]["exp_avg"] for main in self.main]
        errors = self._relative_errors(averages, self.exact_average)
        means, exact = ([getattr(b, name) for b in self.ranks.buffers] for name in ("mean", "exact"))
        self.record["step"].append(self.step)
        self.record["loss"].append(value)
        self.record["single"].append(self._relative_errors(means, exact)["all"])
        for name in CLASSES:
            self.record[name].append(errors[name])
        weight_bits = sum(w.bits * main.numel() for w, main in zip(self.weights, self.main, strict=True))
        self.record["weight_bits"].append(weight_bits / sum(main.numel() for main in self.main))

    def _relative_errors(self, found: list[Tensor], exact: list[Tensor]) -> dict[str, float]:
        """Return ``|found - exact| / |exact|`` over all parameters and by class; padding is left out."""
        totals = {name: torch.zeros(2, dtype=torch.float64, device=found[0].device) for name in CLASSES}
        for buffer, some, right in zip(self.ranks.buffers, found, exact, strict=True):
            views = [buffer.layout.views(some - right), buffer.layout.views(right)]
            squares = torch.stack([torch.stack(torch._foreach_norm(each)).double().square() for each in views], 1)
            for slot, pair in zip(buffer.layout.slots, squares, strict=True):
                totals["all"] += pair
                totals[parameter_class(slot.name, len(slot.shape))] += pair
        return {name: float((error / norm).sqrt()) for name, (error, norm) in totals.items()}

    @torch.no_grad()
    def validate(self, windows: int) -> float:
        """Return the mean loss on held-out text, in nats per byte, with the weights that every rank has."""
        settings = self.settings
        batches = validation_batches(self.held_out, min(windows, 16), settings.seq_len, windows)
        losses = [self.model(*(part.to(settings.device) for part in batch)) for batch in batches]
        return float(torch.stack(losses).double().mean())

    def finish(self) -> dict[str, object]:
        """Return all results, and stop the virtual ranks."""
        final = self.validate(self.settings.windows)
        bits = self.ranks.gradient_bits()
        self.ranks.close()
        return {
            "arm": self.arm,
            "seed": self.seed,
            "settings": asdict(self.settings),
            "numel": self.numel,
            "final": final,
            "gradient_bits": bits,
            "seconds": self.seconds,
            "torch": torch.__version__,
            **self.record,
        }

    def state_dict(self) -> dict[str, object]:
        """Return all state that the next step depends on, and the records so far."""
        return {
            "step": self.step,
            "main": [main.detach() for main in self.main],
            "seen": self.seen,
            "optimizer": self.optimizer.state_dict(),
            "exact_average": self.exact_average,
            "weights": [weights.state_dict() for weights in self.weights],
            "ranks": self.ranks.state_dict(),
            "record": self.record,
            "seconds": self.seconds,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, object]) -> None:
        """Load a state of :meth:`state_dict`; training continues with the same bits."""
        self.step, self.record, self.seconds = state["step"], state["record"], state["seconds"]
        for own, key in ((self.main, "main"), (self.seen, "seen"), (self.exact_average, "exact_average")):
            for target, source in zip(own, state[key], strict=True):
                target.copy_(source)
        self.optimizer.load_state_dict(state["optimizer"])
        for weights, saved in zip(self.weights, state["weights"], strict=True):
            weights.load_state_dict(saved)
        self.ranks.load_state_dict(state["ranks"])
        for computed, seen in zip(self.computed, self.seen, strict=True):
            if computed is not seen:
                computed.copy_(seen)


def parameter_class(name: str, dimensions: int) -> str:
    """Return "embedding" for the input and output embeddings, else "1-D" or "2-D"."""
    return "embedding" if name.startswith(("embedding", "head")) else "1-D" if dimensions < 2 else "2-D"


def _schedule(step: int, warmup: int, steps: int) -> float:
    """Return the factor on the learning rate."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(steps - warmup, 1)))
