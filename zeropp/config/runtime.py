"""Blocks around the engine: file I/O, recomputation, optimizer, scheduler."""

from __future__ import annotations

from pydantic import Field, JsonValue

from zeropp.config.base import Block, Positive, alias, is_auto


class AioConfig(Block):
    """Asynchronous file I/O of NVMe offload."""

    block_size: Positive = 1_048_576
    """Bytes in one read or write request."""

    queue_depth: Positive = 8
    """Requests that a thread keeps under way at once."""

    intra_op_parallelism: Positive = Field(default=1, validation_alias=alias("intra_op_parallelism", "thread_count"))
    """Threads that share the requests of one transfer."""

    single_submit: bool = False
    """Hands requests to the kernel one by one instead of in batches."""

    overlap_events: bool = True
    """Collects finished requests while later ones are still being handed in."""

    use_gds: bool = False
    """Reads what gathers begin with from NVMe into the GPU's memory without a copy in the host's, by kvikio
    (`zeropp[gds]`). The host steps, so the rest goes through its memory."""


class ActivationCheckpointingConfig(Block):
    """Recomputation of activations in backward, for code that calls `zeropp.training.checkpointing.checkpoint`. The
    block acts where it is given to `configure` beside that, as in DeepSpeed."""

    partition_activations: bool = False
    """Splits kept activations over model-parallel ranks. Nothing is left to do: there is one such rank."""

    number_checkpoints: Positive | None = None
    """Checkpointed segments of a forward, for whose inputs `contiguous_memory_optimization` makes room."""

    contiguous_memory_optimization: bool = False
    """Keeps the inputs of segments in one buffer, against fragmentation. Needs `number_checkpoints`."""

    cpu_checkpointing: bool = False
    """Keeps the inputs of segments in the host's page-locked memory until backward."""

    synchronize_checkpoint_boundary: bool = False
    """Waits for the GPU where a checkpointed segment begins and where it ends."""

    profile: bool = False
    """Logs how long forward and recomputation of each checkpointed segment take."""


class NamedBlock(Block):
    """An object to make: its class and the arguments."""

    # Pydantic copies such a default for each object.
    params: dict[str, JsonValue] = Field(default={})
    """Keyword arguments of its constructor."""

    @property
    def unresolved(self) -> list[str]:
        """Arguments at "auto", which no default of ours can stand for."""
        return [key for key, value in self.params.items() if is_auto(value)]


class OptimizerConfig(NamedBlock):
    """An optimizer that the library makes."""

    type: str | None = None
    """Name of the optimizer, in letters of either case for the well-known ones, else a class of
    `torch.optim`."""

    legacy_fusion: bool = False
    """Chooses the older fusion of DeepSpeed's LAMB and Adam variants."""


class SchedulerConfig(NamedBlock):
    """A learning rate scheduler that the library makes and advances at each step that is not skipped."""

    type: str | None = None
    """Name of the scheduler, one of DeepSpeed's or a class of `torch.optim.lr_scheduler`."""
