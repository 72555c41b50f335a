"""The two offload blocks: where weights and optimizer states live when they do not live on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Le
from pydantic import model_validator

from zeropp.config.base import Block, Bound, Count, NonNegative

Device = Literal["none", "cpu", "nvme"]


class _OffloadBlock(Block):
    device: Device = "none"
    """Place of these numbers between uses: `none` leaves them on the device that computes, `cpu` puts
    them in host memory, `nvme` in files below `nvme_path`."""

    nvme_path: Path | None = None
    """Directory of the swap files, on a file system that supports direct I/O. Needed with `nvme`, unused
    otherwise."""

    # After all fields, of which one alone cannot be judged.
    @model_validator(mode="after")
    def _has_what_it_needs(self) -> _OffloadBlock:
        # An empty one, as of a variable that is not set, would be the directory that the program runs in.
        if self.device == "nvme" and (self.nvme_path is None or self.nvme_path == Path()):
            raise ValueError('device "nvme" needs nvme_path; give the directory that the swap files go to')
        # The system's own error would name neither the path nor the key.
        if self.nvme_path is not None and "\0" in str(self.nvme_path):
            raise ValueError(f"nvme_path {str(self.nvme_path)!r} has a NUL character in it, which no path may have")
        # Zero is DeepSpeed's lower bound, and does no harm where nothing is offloaded.
        if self.device != "none" and getattr(self, "buffer_count", 1) < 1:
            raise ValueError(
                f'buffer_count 0 leaves device "{self.device}" no staging buffer; give at least 1, or leave it out'
            )
        return self


class OffloadParamConfig(_OffloadBlock):
    """Keeps the weight shards of released parameters outside device memory. Stage 3 only."""

    buffer_count: Count = 5
    """Staging buffers in the pool for weights. More of them let more reads be under way at once."""

    buffer_size: Bound = 100_000_000
    """Elements that one staging buffer holds. A larger shard takes several."""

    max_in_cpu: Bound = 1_000_000_000
    """Elements of weights that stay in host memory although `nvme` is set, so that they need no read."""

    pin_memory: bool = False
    """Page-locks the staging buffers: copies to the device run faster and beside computing, and the host
    cannot page them out."""


class OffloadOptimizerConfig(_OffloadBlock):
    """Keeps optimizer states outside device memory and steps on the host."""

    buffer_count: Count = 4
    """Staging buffers in the pool for optimizer states. A tile under way takes one, or a
    part of one, for each kind of number that is not in the host's memory: main weights, gradients, each
    state, and new weights as they travel."""

    pin_memory: bool = False
    """Page-locks the staging buffers: copies to and from the device run faster and beside computing, and
    the host cannot page them out."""

    pipeline_read: bool = False
    """Reads the next tile from NVMe while the present one is stepped."""

    pipeline_write: bool = False
    """Writes a stepped tile back to NVMe while the next one is stepped."""

    fast_init: bool = False
    """Nothing is left to do: the first weights go to where they stay unit by unit."""

    ratio: Annotated[NonNegative, Le(1)] = 1.0
    """Fraction of the states, from 0 to 1, that goes to the host and is stepped there; the rest stays on the
    device, with its weights and gradients, and is stepped there: that of the units that the model defines
    first. Below 1 it needs stage 3."""

    super_offload: bool = False
    """Speculative host stepping for machines whose host and device share one fast memory link."""

    cpuadam_cores_perc: Annotated[NonNegative, Le(1)] = 0.8
    """Fraction of the host's cores, from 0 to 1, that step states under `super_offload`."""

    @property
    def pipeline(self) -> bool:
        """True if files are read or written beside the step."""
        return self.pipeline_read or self.pipeline_write
