"""Frozen weights that exist in codes only: saved and restored as codes and scales, or decoded where values are wanted.

To encode decoded values once more would change some of them, so codes go to codes as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from zeropp.checkpoint.boxes import Box
from zeropp.checkpoint.metadata import DTYPES, CodedEntry, Metadata, dtype_code
from zeropp.checkpoint.parts import MODEL, Part, Which, fragments, parts_of_range
from zeropp.engine.engine import Engine
from zeropp.params.coded_buffer import CodedBuffer
from zeropp.params.flat_buffer import FlatBuffer
from zeropp.partition.layout import Fragment
from zeropp_kernels import dequantize_, message_layout
from zeropp_kernels.wire import BLOCK

__all__ = ["CODES", "SCALES", "Encoded", "coded_entries", "coded_parts", "decoded"]

CODES, SCALES = "zeropp.codes.", "zeropp.scales."
"""Prefixes: codes are uint8 [blocks, 256], scales bfloat16 [blocks], of the parameter in the order of its memory."""


def coded_entries(engine: Engine) -> dict[str, CodedEntry]:
    """Metadata of the parameters that exist in codes."""
    return {
        slot.name: CodedEntry(dtype=dtype_code(buffer.main_dtype, slot.name), shape=slot.shape, strides=slot.strides)
        for buffer in engine.buffers
        if isinstance(buffer, CodedBuffer)
        for slot in buffer.layout.slots
    }


def coded_parts(engine: Engine, which: Which) -> Iterator[Part]:
    """Codes and scales of this rank's shards, or what it saves of them."""
    for buffer in engine.buffers:
        if not isinstance(buffer, CodedBuffer):
            continue
        codes, scales = buffer.blocks()
        for slot, each in fragments(buffer, buffer.placement.mode.states, which):
            # Parameters begin on a block, and pieces are whole blocks.
            here, there, count = each.offset // BLOCK, each.start // BLOCK, -(-(each.stop - each.start) // BLOCK)
            blocks = -(-slot.numel // BLOCK)
            box = Box((there, 0), (count, BLOCK))
            yield Part(CODES + slot.name, (blocks, BLOCK), box, codes[here : here + count])
            yield Part(SCALES + slot.name, (blocks,), Box((there,), (count,)), scales[here : here + count])


class Encoded:
    """Values that are read for a buffer which has codes: encoded once they are there.

    Args:
        engine: of the model.
        matched: the checkpoint's names of the model's tensors.
        metadata: of the checkpoint.
    """

    def __init__(self, engine: Engine, matched: Mapping[str, str], metadata: Metadata) -> None:
        self._rows: list[tuple[FlatBuffer, Fragment, Tensor]] = []
        self.parts: list[Part] = []
        for buffer in engine.buffers:
            if not isinstance(buffer, CodedBuffer):
                continue
            for slot, each in fragments(buffer, buffer.placement.mode.states, "slice"):
                there = matched.get(slot.name)
                entry = metadata.coded.get(there or "")
                # Else codes fit as they are.
                if there is not None and (entry is None or entry.strides != slot.strides):
                    row = torch.empty(each.stop - each.start, dtype=buffer.main_dtype, device=buffer.device)
                    self._rows.append((buffer, each, row))
                    self.parts += parts_of_range(MODEL + slot.name, slot, each.start, row)

    def encode(self) -> None:
        """Once the parts are read."""
        for buffer, fragment, row in self._rows:
            buffer.put(fragment, row, row.dtype)


def decoded(codes: Tensor, scales: Tensor, entry: CodedEntry) -> Tensor:
    """The values of a parameter.

    Args:
        codes: uint8 [blocks, 256].
        scales: bfloat16 [blocks].
        entry: of the parameter.
    """
    numel = codes.numel()
    layout = message_layout(numel, 8)
    message = torch.zeros(layout.nbytes, dtype=torch.uint8, device="cpu")
    message[: layout.codes_nbytes] = codes.reshape(-1)
    message[layout.scales_offset : layout.scales_offset + 2 * layout.groups] = scales.view(torch.uint8)
    out = torch.empty(numel, dtype=torch.float32, device="cpu")
    dequantize_(message, out)
    return out.to(DTYPES[entry.dtype]).as_strided(entry.shape, entry.strides)
