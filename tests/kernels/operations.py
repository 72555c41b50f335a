"""One call of every registered operation, and the tensors that its schema declares as written."""

from __future__ import annotations

import torch
from torch import Tensor

import zeropp_kernels as kernels
from tests.kernels.cases import values
from zeropp_kernels import block_table, lossless_layout, message_layout, state_layout

__all__ = ["NAMES", "NUMEL", "listed", "messages_for", "real_messages", "real_messages_of", "samples", "written"]

NUMEL = 600


def messages_for(numel: int, bits: int, count: int = 1) -> Tensor:
    return torch.zeros(message_layout(numel, bits).nbytes * count, dtype=torch.uint8)


def real_messages(numel: int, bits: int, count: int = 1) -> Tensor:
    messages = messages_for(numel, bits, count)
    kernels.quantize_(values(numel * count, torch.float32, 3), messages, count=count, bits=bits)
    return messages


def real_messages_of(x: Tensor, rotate: bool = False) -> Tensor:
    message = messages_for(x.numel(), 8)
    kernels.quantize_(x, message, rotate=rotate)
    return message


def samples() -> dict[str, tuple[object, ...]]:
    """Return the arguments of one call of each operation, in the order of its torch.ops schema."""
    x = values(NUMEL, torch.bfloat16)
    state = torch.zeros(state_layout(NUMEL, 4).nbytes, dtype=torch.uint8)
    held = values(NUMEL, torch.bfloat16, 1)
    starts = torch.zeros(2, 2, dtype=torch.int64)
    kernels.lossless_count_(x, held, starts)
    lossless = torch.zeros(lossless_layout(NUMEL, NUMEL, NUMEL).nbytes, dtype=torch.uint8)
    tensors, table = [values(100, torch.float32), values(300, torch.float32)], block_table([100, 300], [0, 256], NUMEL)
    places = (table.host, table.entries, table.owners)
    shard, flat = values(NUMEL, torch.float32).clone(), torch.zeros(NUMEL)

    def stats() -> tuple[Tensor, Tensor]:
        return torch.zeros(3), torch.zeros(1, dtype=torch.int32)

    return {
        "quantize_": (x, messages_for(NUMEL, 4), 1, 4, True, state, 0.8, False),
        "quantize_tensors_": (tensors, *places, NUMEL, messages_for(NUMEL, 8), 1, 8, False, None, 0.0, False),
        "reduce_quantize_": (
            real_messages(NUMEL, 8, 2), NUMEL, 2, 8, 0.5, messages_for(NUMEL, 4), 1, 4, False, state, 0.8, True,
            torch.tensor(0.5),
        ),
        "dequantize_": (real_messages(NUMEL, 8), torch.zeros(NUMEL), 1, 8, False),
        "reduce_": (real_messages(NUMEL, 8, 3), torch.zeros(NUMEL), 3, 8, False, 0.5, True, *stats(), None),
        "sum_": (torch.cat([x, held]), torch.zeros(NUMEL), 2, 1.0, True, *stats(), torch.tensor([0.5])),
        "delta_encode_": (shard, held.clone(), messages_for(NUMEL, 4), True),
        "delta_apply_": (real_messages(NUMEL, 4), held.clone(), 1),
        "lossless_count_": (x, held, torch.zeros_like(starts)),
        "lossless_encode_": (x, held, starts, lossless, NUMEL, NUMEL),
        "lossless_decode_": (lossless, held, torch.full_like(held, 9.0), 1, NUMEL, NUMEL),
        "gather_": (tensors, *places, flat, 1.0, *stats(), False, torch.tensor(3.0)),
        "scatter_": (shard, [tensor.clone() for tensor in tensors], *places, 2.0, None, None, None),
    }  # fmt: skip


NAMES = list(samples())


def written(name: str, arguments: tuple[object, ...]) -> list[Tensor]:
    """Return the tensors among ``arguments`` that the operation's schema declares as written."""
    declared = getattr(torch.ops.zeropp, name).default._schema.arguments
    pairs = zip(declared, arguments, strict=True)
    return [t for each, value in pairs if each.alias_info and each.alias_info.is_write for t in listed(value)]


def listed(argument: object) -> list[Tensor]:
    """Return the tensors of one argument: itself, the tensors in a list, or none."""
    found = argument if isinstance(argument, list) else [argument]
    return [tensor for tensor in found if isinstance(tensor, Tensor)]
