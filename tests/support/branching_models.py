"""Small models whose forward takes the order of blocks as an argument, their configuration, and values read from them.

A *route* is a tuple of stages. A stage is a tuple of block numbers; its blocks are called in that order on the same
input, and their outputs are summed. So ``((0,), (1, 2))`` is ``b1(b0(x)) + b2(b0(x))``, and ``((0,), (2, 1))`` is the
same function with another order of calls.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from zeropp.config.blocks import ExtensionConfig
from zeropp.config.zero_block import ZeroConfig
from zeropp.params.unit import Unit, UnitState

__all__ = [
    "WIDTH",
    "Block",
    "Route",
    "Routed",
    "apart",
    "chain",
    "gathers",
    "logged",
    "make_config",
    "shards",
    "share",
    "worst",
]

WIDTH = 8
Route = tuple[tuple[int, ...], ...]


class Block(nn.Module):
    """A residual block of one linear layer: ``x + tanh(lin(x))``."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.lin = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.lin(x))


class Routed(nn.Module):
    """Equal blocks, called as the route says. Each block is a unit."""

    def __init__(self, count: int = 4, width: int = WIDTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(count))

    def forward(self, x: Tensor, route: Route | None = None) -> Tensor:
        for stage in chain(len(self.blocks)) if route is None else route:
            if stage:
                x = sum((self.blocks[index](x) for index in stage), torch.zeros_like(x))
        return x


def chain(*stages: int) -> Route:
    """Return a route of one block per stage: ``chain(3)`` calls blocks 0, 1 and 2; ``chain(0, 2)`` only 0 and 2."""
    return tuple((index,) for index in (range(stages[0]) if len(stages) == 1 else stages))


def make_config(**settings: object) -> dict[str, object]:
    """Return a configuration of stage 3 in which every parameter is partitioned and every block is a unit.

    Args:
        settings: keys of the zero block, of the zeropp block, or of the top level. ``persist``, ``live``, ``reuse`` and
            ``prefetch`` are short for the long names in the zero block.
    """
    short = {
        "persist": "stage3_param_persistence_threshold",
        "live": "stage3_max_live_parameters",
        "reuse": "stage3_max_reuse_distance",
        "prefetch": "stage3_prefetch_bucket_size",
    }
    zero: dict[str, object] = {"stage": 3, "stage3_param_persistence_threshold": 0}
    own: dict[str, object] = {"unit_min_blocks": 0, "hang_timeout": 20}
    top: dict[str, object] = {}
    for key, value in settings.items():
        if key in short:
            zero[short[key]] = value
        elif key in ExtensionConfig.model_fields:
            own[key] = value
        elif key in ZeroConfig.model_fields:
            zero[key] = value
        else:
            top[key] = value
    return {"zero_optimization": zero, "zeropp": own, **top}


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Collect the messages that the package logs inside the block."""
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = Keep()
    logging.getLogger("zeropp").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("zeropp").removeHandler(handler)


def share(model: nn.Module) -> None:
    """Broadcast rank 0's parameters and buffers, so that all ranks have the same plain copy."""
    if dist.is_initialized():
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), 0)


def apart(left: Tensor | float, right: Tensor | float) -> float:
    """Return the largest absolute difference, infinity if any difference is NaN.

    Python's ``max`` would ignore a NaN.
    """
    a, b = (torch.as_tensor(each, device="cpu", dtype=torch.float64) for each in (left, right))
    return float((a - b).abs().nan_to_num(math.inf).max())


def worst(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """Return the largest absolute difference of two state dicts with the same keys, infinity if any is NaN."""
    assert left.keys() == right.keys(), (sorted(left), sorted(right))
    return max(apart(left[key], right[key]) for key in left)


def shards(optimizer: zeropp.ZeroOptimizer) -> list[Tensor]:
    """Return copies of this rank's shards."""
    return [buffer.shard.clone() for buffer in optimizer.engine.buffers]


def gathers(optimizer: zeropp.ZeroOptimizer) -> dict[str, int]:
    """Return the number of gathers of each unit so far, counted on the first hop of the unit's path."""
    found: dict[str, int] = {}
    for row in optimizer.engine.comm.ledger.rows:
        if row.kind == "gather":
            found[row.unit] = max(found.get(row.unit, 0), row.calls)
    return found


def live(units: Sequence[Unit], *, held: bool) -> int:
    """Return the elements of gathered units.

    Args:
        units: the units; persistent ones are not counted.
        held: True to count units in use by a module call or an unfinished gradient; False to count all other units.
    """
    return sum(
        u.numel for u in units if not u.persistent and u.state is not UnitState.SHARDED and (u.users > 0) is held
    )
