"""Rewrites the numbers of docs/sizing.md with what the code computes: ``python -m docs.sizing``."""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zeropp
from zeropp.plan import MemoryPlan

__all__ = ["DOCUMENT", "LADDER", "SHAPES", "Decoder", "Shape", "build", "device_bytes", "render"]

DOCUMENT = Path(__file__).with_suffix(".md")
_MARKS = "<!-- tables of python -m docs.sizing -->", "<!-- end of tables -->"
_EXECUTED = re.compile(r"(<!-- executed -->\n```python\n)(.*?)(```\n```text\n)(.*?)(```\n)", re.DOTALL)
_GB = 10**9
# Fractions of the memory of a GPU and of a host that a plan may fill. The rest of a GPU is for activations,
# communicators and buffers; the rest of a host is for the system, Python and torch, data workers and the page cache.
_USABLE = {"card": 0.75, "host": 0.8}
_NVME = {"nvme_path": "/local_nvme"}
_LEAN = {"buffer_count": 4, "buffer_size": 50_000_000, "max_in_cpu": 0}


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder with the layers of Llama."""

    hidden: int
    layers: int
    inner: int
    heads: int
    shared: int  # heads of keys and values
    vocabulary: int = 32_000


SHAPES = {
    "7B": Shape(4096, 32, 11008, 32, 32),
    "13B": Shape(5120, 40, 13824, 40, 40),
    "70B": Shape(8192, 80, 28672, 64, 8),
}

LADDER: dict[str, dict[str, Any]] = {
    "nothing": {},
    "optimizer on cpu": {"offload_optimizer": {"device": "cpu"}},
    "optimizer and param on cpu": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    "optimizer on nvme": {"offload_optimizer": {"device": "nvme", **_NVME}},
    "optimizer on nvme, param on cpu": {
        "offload_optimizer": {"device": "nvme", **_NVME}, "offload_param": {"device": "cpu"}
    },
    "both on nvme, lean": {
        "offload_optimizer": {"device": "nvme", **_NVME}, "offload_param": {"device": "nvme", **_NVME, **_LEAN},
        "sub_group_size": 100_000_000,
    },
}  # fmt: skip
"""Offload settings by name, from the fastest to the one that needs the least memory."""


class Block(nn.Module):
    """Attention without positions, and a gated layer. It is one module with a forward, so it becomes one unit."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, width = shape.heads, shape.hidden // shape.heads * shape.shared
        self.before, self.between = nn.RMSNorm(shape.hidden), nn.RMSNorm(shape.hidden)
        self.query, self.out = (nn.Linear(shape.hidden, shape.hidden, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(shape.hidden, width, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(shape.hidden, shape.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y, width = self.before(x), x.shape[-1] // self.heads
        q, k, v = (layer(y).unflatten(-1, (-1, width)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        y = self.between(x)
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return x


class Decoder(nn.Module):
    """A decoder that returns the logits of tokens."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocabulary, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build(shape: Shape) -> nn.Module:
    """Return a model of this shape on the meta device."""
    with torch.device("meta"):
        return Decoder(shape)


def device_bytes(plan: MemoryPlan) -> int:
    """Return the bytes that a GPU needs besides activations: states, and two units in flight with gradients."""
    moving = max((unit.gathered + unit.message for unit in plan.units if not unit.persistent), default=0)
    arriving = max(unit.arriving for unit in plan.units)
    return plan.total + plan.gradients + plan.device_states + plan.new_weights + 2 * (moving + arriving)


@cache
def plans(ranks: int) -> list[tuple[str, str, MemoryPlan]]:
    """Return (model, setting, plan) for every model and setting on one node with this number of GPUs."""
    found = []
    for name, shape in SHAPES.items():
        model = build(shape)
        for setting, blocks in LADDER.items():
            config = {"zero_optimization": {"stage": 3, **blocks}, "bf16": {"enabled": True}}
            found.append((name, setting, zeropp.plan.memory(model, config, ranks)))
    return found


def _needs(ranks: int) -> list[str]:
    lines = [f"| {'1 card' if ranks == 1 else f'{ranks} cards'} | a card | the host | its disks |", "|---|---|---|---|"]
    for name, setting, plan in plans(ranks):
        columns = [device_bytes(plan), ranks * plan.host_total, ranks * plan.disk_total]
        lines.append(f"| {name}, {setting} | " + " | ".join(f"{each / _GB:.1f}" for each in columns) + " |")
    return lines


def _choices(ranks: int) -> list[str]:
    hosts, cards = (64, 256, 1024), (24, 80)
    names = [f"{card} GB, host {host} GB" for card in cards for host in hosts]
    lines = [f"| {'1 card' if ranks == 1 else f'{ranks} cards'} of | {' | '.join(names)} |", "|---" * 7 + "|"]
    found: dict[str, list[str]] = {}
    for name, setting, plan in plans(ranks):
        cells = found.setdefault(name, [""] * 6)
        for index, (card, host) in enumerate((card, host) for card in cards for host in hosts):
            fits = device_bytes(plan) <= card * _GB * _USABLE["card"]
            fits &= ranks * plan.host_total <= host * _GB * _USABLE["host"]
            if fits and not cells[index]:
                cells[index] = setting
    lines += [f"| {name} | {' | '.join(cell or 'more cards' for cell in cells)} |" for name, cells in found.items()]
    return lines


def render(text: str) -> str:
    """Return the document with its tables and the output of its examples computed anew."""
    before, rest = text.split(_MARKS[0])
    after = rest.split(_MARKS[1])[1]
    tables = ["\n".join(table) for ranks in (1, 8) for table in (_needs(ranks), _choices(ranks))]
    text = f"{before}{_MARKS[0]}\n\n" + "\n\n".join(tables) + f"\n\n{_MARKS[1]}{after}"
    names: dict[str, Any] = {}

    def execute(found: re.Match[str]) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            # One after another, with the names of those before.
            exec(found[2], names)
        return found[1] + found[2] + found[3] + printed.getvalue() + found[5]

    return _EXECUTED.sub(execute, text)


if __name__ == "__main__":
    DOCUMENT.write_text(render(DOCUMENT.read_text()))
