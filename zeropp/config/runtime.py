"""Blocks around the engine: file I/O, checkpoints, recomputation, optimizer, scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, JsonValue

from zeropp.config.base import Block, Positive, alias, is_auto, read_number


def _upper(value: object) -> object:
    return value.upper() if isinstance(value, str) else value


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


class ParallelWriteConfig(Block):
    """The division of checkpoint files among writers."""

    pipeline_stage: bool = False
    """Lets the data-parallel ranks of a pipeline stage each write some of its layers. Nothing is left to do: every
    rank writes its own part, and no other's."""


class CheckpointConfig(Block):
    """Saving and loading of training state, by the engine that `zeropp.initialize` makes."""

    tag_validation: Annotated[Literal["IGNORE", "WARN", "FAIL"], BeforeValidator(_upper)] = "WARN"
    """Reaction to ranks that call `save_checkpoint` with different tags: "FAIL" raises on all of them; otherwise the
    first rank's names the checkpoint, which is complete, with a warning or, with "IGNORE", without. Letters may be of
    either case."""

    load_universal: bool = False
    """Lets `load_checkpoint` without a tag load what `latest_universal` names, in place of `latest`. Checkpoints need
    no conversion to load on other ranks; the files that DeepSpeed's own converter makes are not read."""

    use_node_local_storage: bool = False
    """Saves on a disk of each node instead of on one that all nodes share."""

    parallel_write: ParallelWriteConfig = ParallelWriteConfig()
    """Who writes which file."""

    writer: dict[str, JsonValue] | None = None
    """Settings of a buffered or background writer; `null` writes directly."""

    checkpoint_serialization: bool = True
    """Serializes tensors with torch's own format; false leaves the format to the writer. Nothing is left to do: files
    are safetensors, which are written as they lie in memory."""


class ActivationCheckpointingConfig(Block):
    """Recomputation of activations in backward, for code that calls `zeropp.training.checkpointing.checkpoint`. The
    block acts where it is given to `configure` beside that, as in DeepSpeed."""

    partition_activations: bool = False
    """Splits kept activations over model-parallel ranks. Nothing is left to do: there is one such rank."""

    number_checkpoints: Positive | None = None
    """Checkpointed segments of a forward, for `contiguous_memory_optimization`. Nothing is left to do, likewise."""

    contiguous_memory_optimization: bool = False
    """Asks for the inputs of segments in one buffer, against fragmentation. Nothing is left to do: torch's allocator
    reuses the memory of equal inputs, and `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` avoids fragments."""

    cpu_checkpointing: bool = False
    """Keeps the inputs of segments in the host's page-locked memory until backward."""

    synchronize_checkpoint_boundary: bool = False
    """Waits for the GPU where a checkpointed segment begins and where it ends."""

    profile: bool = False
    """Logs how long forward and recomputation of each checkpointed segment take."""


def _with_numbers(value: object) -> object:
    """Arguments with a number for each string that is written as one; no argument of theirs is such a string."""
    if isinstance(value, Mapping):
        return {key: _with_numbers(inner) for key, inner in value.items()}
    return [_with_numbers(inner) for inner in value] if isinstance(value, list | tuple) else read_number(value)


class NamedBlock(Block):
    """An object to make: its class and the arguments."""

    harmless: ClassVar[Mapping[str, object]] = {}
    """Arguments that change nothing at these values."""

    # Pydantic copies such a default for each object.
    params: Annotated[dict[str, JsonValue], BeforeValidator(_with_numbers)] = Field(default={})
    """Keyword arguments of its constructor."""

    @property
    def unresolved(self) -> list[str]:
        """Arguments at "auto", which no default of ours can stand for."""
        return [key for key, value in self.params.items() if is_auto(value)]

    @classmethod
    def upgrade(cls, given: dict[str, object]) -> dict[str, object]:
        """Leaves out arguments beside `params` that repeat what is in it, or what holds anyway."""
        inside = given.get("params")
        # DeepSpeed reads `params` alone, so what stands beside it and says the same changes nothing there, either.
        known = {**cls.harmless, **inside} if isinstance(inside, Mapping) else cls.harmless
        fields = {*cls.model_fields}
        return {key: value for key, value in given.items() if key in fields or key not in known or known[key] != value}


class OptimizerConfig(NamedBlock):
    """An optimizer that the library makes."""

    harmless: ClassVar[Mapping[str, object]] = {
        "adam_w_mode": True, "torch_adam": False, "bias_correction": True, "amsgrad": False, "set_grad_none": True,
        "fp32_optimizer_states": True, "maximize": False, "nesterov": False, "momentum": 0, "dampening": 0,
        "centered": False, "lr_decay": 0, "initial_accumulator_value": 0,
    }  # fmt: skip

    type: str | None = None
    """Name of the optimizer, in letters of either case for the well-known ones, else a class of
    `torch.optim`."""

    legacy_fusion: bool = False
    """Chooses the older fusion of DeepSpeed's LAMB and Adam variants."""


class SchedulerConfig(NamedBlock):
    """A learning rate scheduler that the library makes and advances at each step that is not skipped."""

    type: str | None = None
    """Name of the scheduler, one of DeepSpeed's or a class of `torch.optim.lr_scheduler`."""
