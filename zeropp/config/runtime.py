"""Blocks around the engine: file I/O, checkpoints, recomputation, compilation, optimizer, scheduler."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, JsonValue

from zeropp.config.base import Block, Count, Positive, alias, is_auto


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
    """Moves data between NVMe and GPU memory without a copy in host memory."""


class ParallelWriteConfig(Block):
    """How checkpoint files are shared out among writers."""

    pipeline_stage: bool = False
    """Lets the data-parallel ranks of a pipeline stage each write some of its layers."""


class CheckpointConfig(Block):
    """Saving and loading of training state."""

    tag_validation: Annotated[Literal["IGNORE", "WARN", "FAIL"], BeforeValidator(_upper)] = "WARN"
    """What to do when ranks save under different tags; letters may be of either case."""

    load_universal: bool = False
    """Loads a checkpoint in DeepSpeed's universal format."""

    use_node_local_storage: bool = False
    """Saves on a disk of each node instead of on one that all nodes share."""

    parallel_write: ParallelWriteConfig = ParallelWriteConfig()
    """Who writes which file."""

    writer: dict[str, JsonValue] | None = None
    """Settings of a buffered or background writer; `null` writes directly."""

    checkpoint_serialization: bool = True
    """Serializes tensors with torch's own format; false leaves the format to the writer."""


class ActivationCheckpointingConfig(Block):
    """Recomputation of activations in backward, for code that calls the checkpointing functions."""

    partition_activations: bool = False
    """Splits kept activations over model-parallel ranks."""

    number_checkpoints: Positive | None = None
    """Checkpointed segments in the model; contiguous memory needs to know it beforehand."""

    contiguous_memory_optimization: bool = False
    """Copies kept activations into one buffer, against fragmentation."""

    cpu_checkpointing: bool = False
    """Moves partitioned activations to host memory until backward."""

    synchronize_checkpoint_boundary: bool = False
    """Waits for the device at the border of each checkpointed segment."""

    profile: bool = False
    """Times forward and backward of each checkpointed segment."""


class CompileConfig(Block):
    """Passes over compiled graphs that insert communication (DeepCompile)."""

    deepcompile: bool = False
    """Replaces hooks by operations inside the compiled graph."""

    free_activation: bool = False
    """Frees large activations as soon as their last use in the graph is over."""

    free_activation_threshold: Count = 10_485_760
    """Bytes from which an activation counts as large."""

    offload_activation: bool = False
    """Moves kept activations to host memory between forward and backward."""

    offload_opt_states: bool = False
    """Moves optimizer states to host memory outside the optimizer step."""

    double_buffer: bool = True
    """Gathers into one of two buffers while the other is in use."""

    symmetric_memory: bool = False
    """Communicates through memory that peers address directly."""

    debug_log: bool = False
    """Writes the graphs to files."""

    offload_parameters: bool = False
    """Moves weight shards to host memory."""

    sync_before_reduce: bool = False
    """Waits for the device before each gradient reduction."""

    sync_after_reduce: bool = False
    """Waits for the device after each gradient reduction."""

    sync_before_allgather: bool = False
    """Waits for the device before each weight gather."""

    sync_after_allgather: bool = False
    """Waits for the device after each weight gather."""

    keep_int_input_tensors: bool = True
    """Keeps the values of integer inputs for recompilation instead of stand-ins."""

    keep_all_input_tensors: bool = False
    """Keeps the values of all inputs for recompilation instead of stand-ins."""

    passes: tuple[str, ...] | None = None
    """Names of the passes to run; `null` follows the stage."""


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
