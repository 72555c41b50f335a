"""Blocks of the configuration for number formats, file I/O, checkpoints, optimizer, scheduler and zeropp's own keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from annotated_types import Le
from pydantic import BeforeValidator, Field, JsonValue, model_validator

from zeropp.config.base import (
    Block,
    Bound,
    Count,
    NonNegative,
    Positive,
    PositiveReal,
    alias,
    integer,
    is_auto,
    read_number,
)
from zeropp.config.describe import value_text

# Number formats.

_SPELLINGS = {
    "fp32": "fp32", "float32": "fp32", "float": "fp32",
    "fp16": "fp16", "float16": "fp16", "half": "fp16",
    "bf16": "bf16", "bfloat16": "bf16",
}  # fmt: skip


def _canonical(value: object) -> object:
    """Convert other spellings of a dtype, such as "float32" or the object torch.float32, to "fp32"."""
    # str() of a dtype object is "torch.float32". Return an unknown value unchanged: pydantic names it in its error.
    return _SPELLINGS.get(str(value).lower().removeprefix("torch."), value)


def _scale(value: object) -> object:
    """Raise an error for a loss scale of "dynamic". Other libraries use this string; here 0 means a dynamic scale."""
    if isinstance(value, str) and value.lower() == "dynamic":
        raise ValueError(f"got {value_text(value)}; expected a number >= 0; set 0, which means a dynamic scale")
    return value


Dtype = Annotated[Literal["fp32", "fp16", "bf16"], BeforeValidator(_canonical)]


class Fp16Config(Block):
    """Computation in fp16. A loss scale keeps small gradients from becoming zero."""

    enabled: bool = False
    """Computes with weights and activations in fp16. Main weights and optimizer states stay in fp32. Call
    `optimizer.backward(loss)` or `optimizer.scale(loss).backward()`, so that the loss is scaled."""

    auto_cast: bool = False
    """In DeepSpeed, true casts the floating-point inputs of the model to fp16. zeropp always casts them, unless
    `zeropp.cast_inputs` is false."""

    loss_scale: Annotated[NonNegative, BeforeValidator(_scale)] = 0.0
    """Factor that multiplies the loss before backward. The gradients are divided by it before the step. 0 means a
    dynamic loss scale; any other value stays constant."""

    initial_scale_power: Count = 16
    """Initial dynamic loss scale, as an exponent of 2. 16 means a factor of 65,536."""

    loss_scale_window: Count = 1000
    """Number of consecutive steps with finite gradients after which the next such step doubles the dynamic loss
    scale."""

    hysteresis: Count = 2
    """Number of steps with overflowed gradients up to and including the step that first halves the dynamic loss scale.
    From then on every overflow halves it. When the scale is doubled, the count starts again."""

    consecutive_hysteresis: bool = False
    """With true, each step without overflow restarts the count of `hysteresis`, so only consecutive overflows
    count."""

    min_loss_scale: NonNegative = 1.0
    """Smallest factor that the dynamic loss scale may reach. An overflow at this scale raises an error when
    `hysteresis` calls for a lower one."""

    fp16_master_weights_and_grads: bool = False
    """Stores main weights, gradients and optimizer states in fp16 instead of fp32. This halves their memory and lowers
    the precision. Use it with optimizers without second moments, such as SGD and Lion; the small second moments of
    AdamW become zero in fp16."""

    @model_validator(mode="after")
    def _dynamic_scale_can_move(self) -> Fp16Config:
        # A loss scale of 0 means dynamic. Without a positive minimum, repeated halving ends at 0. A window of 0 steps
        # does not define when to double the scale.
        if self.loss_scale == 0 and (self.loss_scale_window == 0 or self.min_loss_scale == 0):
            raise ValueError(
                "a dynamic loss scale (loss_scale 0) needs loss_scale_window and min_loss_scale above 0, got "
                f"{self.loss_scale_window} and {self.min_loss_scale:g}; raise them or fix loss_scale"
            )
        return self


class Bf16Config(Block):
    """Computation in bf16. bf16 has the exponent range of fp32, so there is no loss scale."""

    enabled: bool = False
    """Computes with weights and activations in bf16. The optimizer steps main weights in fp32."""

    immediate_grad_update: bool = False
    """In DeepSpeed, true adds each gradient to the fp32 sum as soon as backward has computed it. zeropp has no such
    choice: when all gradients of a unit are computed, it always reduces them into the unit's gradient shard."""

    check_grad_overflow: bool = True
    """With true, all ranks skip and count a step whose gradients contain Inf or NaN. With false the step is taken, as
    in plain PyTorch, and a NaN reaches the weights. The check needs no extra communication."""

    bf16_master_weights_and_grads: bool = False
    """Stores main weights and gradient sums in bf16 instead of fp32. This halves their memory, but updates that are
    small relative to their weight are lost. Requires `bf16_optimizer_states`."""

    bf16_optimizer_states: bool = False
    """Stores optimizer states in bf16 instead of fp32. Requires `bf16_master_weights_and_grads`, because PyTorch's
    optimizers create states in the dtype of the weights that they step."""


class AutocastConfig(Block):
    """Forward passes under torch autocast, with main weights in fp32.

    Weights that autocast converts anyway are gathered in the autocast dtype.
    """

    enabled: bool = False
    """Runs the model's forward inside `torch.autocast`. With dtype fp16, the loss is scaled by the settings of the
    `fp16` block."""

    dtype: Annotated[Literal["fp16", "bf16"], BeforeValidator(_canonical)] = "bf16"
    """The 16-bit dtype of autocast."""

    lower_precision_safe_modules: tuple[str, ...] | None = None
    """Names of module classes, such as `torch.nn.Linear`, whose weights and gradients are communicated in the autocast
    dtype. Subclasses do not count. `null` means `torch.nn.Linear`, `Conv1d`, `Conv2d` and `Conv3d`."""


class DataTypesConfig(Block):
    """Dtypes of gradient sums, of the weights in the computation, and of module buffers."""

    grad_accum_dtype: Dtype | None = None
    """Dtype of the gradients summed over micro-batches. The only accepted values are `null` and the dtype in use: fp32,
    or the compute dtype if main weights are stored in 16 bits."""

    param_dtype: Dtype | None = None
    """Dtype of the weights in forward and backward. If the `bf16` or `fp16` block is enabled, the value must agree with
    it. `null` means the dtype of the enabled block, or each parameter's own dtype if neither is enabled."""

    buffer_dtype: Dtype | None = None
    """Dtype that floating-point module buffers are converted to. `null` keeps each buffer's dtype."""

    keep_in_fp32_modules: tuple[str, ...] | None = None
    """Names of modules whose parameters stay in fp32 in the computation although a 16-bit dtype is enabled. A name must
    match one or several whole components of a parameter's dotted name. The model itself must convert the inputs of
    these modules."""


# Files, checkpoints, recomputation.


class AioConfig(Block):
    """Asynchronous file I/O of NVMe offload.

    At most `queue_depth` x `intra_op_parallelism` requests, and at most 64, are in flight at once.
    """

    block_size: Positive = 1_048_576
    """Bytes of one read or write request."""

    queue_depth: Positive = 8
    """Number of requests in flight at once, multiplied by `intra_op_parallelism`."""

    intra_op_parallelism: Positive = Field(default=1, validation_alias=alias("intra_op_parallelism", "thread_count"))
    """Factor on `queue_depth`: the number of I/O threads is `queue_depth` x `intra_op_parallelism`, at most 64, and
    each thread runs one request at a time."""

    single_submit: bool = False
    """With true, each transfer has at most one request in flight. With false, the threads run several requests of one
    transfer at once."""

    overlap_events: bool = True
    """With true, requests of several transfers are in flight at once. With false, a transfer starts when the one before
    it has finished."""

    use_gds: bool = False
    """Reads offloaded weight shards from NVMe directly into GPU memory, without a copy in host memory. Needs the
    package kvikio (`zeropp[gds]`). Optimizer states still pass through host memory, because the host steps them."""


class ParallelWriteConfig(Block):
    """The distribution of checkpoint files over the ranks that write them."""

    pipeline_stage: bool = False
    """In DeepSpeed, true distributes the layers of a pipeline stage over its data-parallel ranks for writing. zeropp
    has no pipeline stages, and each rank always writes its own shards only."""


class CheckpointConfig(Block):
    """Saving and loading of training state by the engine that `zeropp.initialize` returns."""

    tag_validation: Annotated[Literal["IGNORE", "WARN", "FAIL"], BeforeValidator(_upper)] = "WARN"
    """Reaction if ranks call `save_checkpoint` with different tags. `"FAIL"` raises an error on all ranks. `"WARN"` and
    `"IGNORE"` save a complete checkpoint under the first rank's tag, with and without a warning. Upper and lower case
    are both accepted."""

    load_universal: bool = False
    """With true, `load_checkpoint` without a tag loads the checkpoint that the file `latest_universal` names, not the
    one in `latest`. zeropp's checkpoints load on any number of ranks without conversion. Files of DeepSpeed's universal
    checkpoint converter cannot be loaded."""

    use_node_local_storage: bool = False
    """Saves checkpoints on a local disk of each node instead of a disk that all nodes share."""

    parallel_write: ParallelWriteConfig = ParallelWriteConfig()
    """The distribution of files over writing ranks."""

    writer: dict[str, JsonValue] | None = None
    """Settings of a buffered or background writer. `null` writes directly."""

    checkpoint_serialization: bool = True
    """In DeepSpeed, true serializes tensors in PyTorch's format, and false lets the writer choose. zeropp always writes
    safetensors files, which hold the bytes of the tensors without serialization."""


class ActivationCheckpointingConfig(Block):
    """Recomputation of activations in backward, for code that calls `zeropp.training.checkpointing.checkpoint`.

    As in DeepSpeed, the block takes effect when it is passed to `zeropp.training.checkpointing.configure`.
    """

    partition_activations: bool = False
    """In DeepSpeed, true splits saved activations over the model-parallel ranks. zeropp has no model parallelism, so
    there is nothing to split."""

    number_checkpoints: Positive | None = None
    """Number of checkpointed segments in a forward. DeepSpeed needs it for `contiguous_memory_optimization`; zeropp
    does not."""

    contiguous_memory_optimization: bool = False
    """In DeepSpeed, true copies the inputs of segments into one buffer to avoid fragmentation. zeropp does not need it:
    PyTorch's allocator reuses the memory of inputs of equal size, and
    `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` avoids fragmentation."""

    cpu_checkpointing: bool = False
    """Stores the inputs of checkpointed segments in page-locked host memory until backward."""

    synchronize_checkpoint_boundary: bool = False
    """Waits for the GPU at the start and at the end of each checkpointed segment."""

    profile: bool = False
    """Logs the time of forward and recomputation of each checkpointed segment."""


# Optimizer and scheduler.


def _upper(value: object) -> object:
    return value.upper() if isinstance(value, str) else value


def _with_numbers(value: object) -> object:
    """Convert numeric strings inside the arguments to numbers, at any depth.

    No optimizer or scheduler takes an argument that must stay a numeric string.
    """
    if isinstance(value, Mapping):
        return {key: _with_numbers(inner) for key, inner in value.items()}
    return [_with_numbers(inner) for inner in value] if isinstance(value, list | tuple) else read_number(value)


class NamedBlock(Block):
    """Base class of the blocks that describe an object to create: its class and its constructor's arguments."""

    harmless: ClassVar[Mapping[str, object]] = {}
    """Arguments that have no effect at these values."""

    # A mutable default is safe here, because pydantic copies it for each object.
    params: Annotated[dict[str, JsonValue], BeforeValidator(_with_numbers)] = Field(default={})
    """Keyword arguments of the constructor."""

    @property
    def unresolved(self) -> list[str]:
        """Names of the arguments that are "auto". The library has no defaults for them."""
        return [key for key, value in self.params.items() if is_auto(value)]

    @classmethod
    def upgrade(cls, given: dict[str, object]) -> dict[str, object]:
        """Drop keys beside `params` that repeat an argument of `params` or have no effect at the given value."""
        inside = given.get("params")
        # DeepSpeed reads arguments from `params` only, so a key beside it with the same value has no effect there.
        known = {**cls.harmless, **inside} if isinstance(inside, Mapping) else cls.harmless
        fields = {*cls.model_fields}
        return {key: value for key, value in given.items() if key in fields or key not in known or known[key] != value}


class OptimizerConfig(NamedBlock):
    """An optimizer that `zeropp.initialize` creates."""

    harmless: ClassVar[Mapping[str, object]] = {
        "adam_w_mode": True, "torch_adam": False, "bias_correction": True, "amsgrad": False, "set_grad_none": True,
        "fp32_optimizer_states": True, "maximize": False, "nesterov": False, "momentum": 0, "dampening": 0,
        "centered": False, "lr_decay": 0, "initial_accumulator_value": 0,
    }  # fmt: skip

    type: str | None = None
    """Name of the optimizer: one of the well-known names in upper or lower case, or the name of a class in
    `torch.optim`."""

    legacy_fusion: bool = False
    """Selects the older fused implementation of DeepSpeed's LAMB and Adam variants."""


class SchedulerConfig(NamedBlock):
    """A learning rate scheduler that `zeropp.initialize` creates. It advances at each step that is not skipped."""

    type: str | None = None
    """Name of the scheduler: one of DeepSpeed's, or the name of a class in `torch.optim.lr_scheduler`."""


# The zeropp block.

# Older versions of pydantic do not accept the float 8.0 for the choice 8, so convert it first.
Bits = Annotated[Literal[4, 8, 16, 32], BeforeValidator(integer)]
# Longest accepted timeout, in seconds. Backends store timeouts as nanoseconds in 64 bits, which overflow at about 9e9
# seconds.
LONGEST_TIMEOUT = 100_000_000
Seconds = Annotated[PositiveReal, Le(LONGEST_TIMEOUT)]


class GradientBitsConfig(Block):
    """Bits per gradient element in messages, for each kind of hop.

    16 and 32 are plain bf16 and fp32 values; 4 and 8 are quantized.
    """

    local: Bits = 8
    """Bits per element between ranks of one node."""

    cross: Bits = 4
    """Bits per element between nodes. If gradients take a single hop, this width applies to it, even inside a node."""


class MaxCtasConfig(Block):
    """Largest number of thread blocks in the kernels of one NCCL communicator (NCCL's maxCTAs).

    More thread blocks transfer faster, but leave fewer streaming multiprocessors (SMs) to the model. Wrapping raises an
    error if the limits of all communicators add up to more than the SMs of the GPU.
    """

    local: Positive | None = None
    """Limit for a communicator inside a node. `null` means 16, but at most an eighth of the GPU's SMs."""

    cross: Positive | None = None
    """Limit for a communicator between nodes. `null` means 8, but at most a sixteenth of the GPU's SMs."""


class ExtensionConfig(Block):
    """Settings of zeropp itself. DeepSpeed has no such block."""

    local_world_size: Positive | None = None
    """Number of ranks per node. `null` reads the environment variable `LOCAL_WORLD_SIZE`, which launchers set. Without
    that variable, each host is a node."""

    unit_numel: Bound = 0
    """Largest size of a unit, in elements. A larger unit is split along its submodules; single parameters and leaf
    modules are not split. Smaller units need less memory at once but more collectives. 0 keeps the default units."""

    unit_min_blocks: Count = 128
    """Smallest shard of a unit, in blocks of 256 elements. A smaller unit is merged with its neighbours, or its
    parameters become persistent. The default keeps the padding of the shards below 1 %. 0 merges nothing."""

    host_memory_limit: Positive | None = None
    """Limit on the host memory of all ranks of a node together, in bytes. If the sizes computed by `zeropp.plan.memory`
    exceed it, wrapping raises an error on every rank before the model is changed; the error lists the largest parts
    and the settings that reduce them. `zero.Init` and `materialize` also check the shards of the model. Python,
    PyTorch, activations, module buffers and the unwrapped model are not counted. `null` means no limit."""

    hang_timeout: Seconds = 420.0
    """Seconds that a rank waits for a collective. Then it raises an error that names the unit each rank waits for. Keep
    the value below the 480 s (`TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC`) after which PyTorch ends a process whose NCCL
    watchdog is stuck, because PyTorch does so without these names."""

    max_ctas: MaxCtasConfig = MaxCtasConfig()
    """Limits on the thread blocks of NCCL's kernels, inside a node and between nodes."""

    share_communicators: bool = True
    """With true, the engines of one process share the NCCL communicators that have the same ranks. All ranks must then
    use the engines in the same order. False creates communicators for each engine, which takes more GPU memory."""

    warn_after: Seconds | None = 30.0
    """Seconds that a rank waits for other ranks before it logs, once, where each rank waits. It should be much shorter
    than `hang_timeout`. `null` disables this log message."""

    static_graph: bool = False
    """A promise that all passes of one kind (training forward, backward, evaluation) always use the same modules in the
    same order on every rank. After the first pass of each kind, the ranks then exchange no messages about
    the order, and a pass that uses a unit outside that order is an error. On a GPU with a fused Adam, the host also
    does not wait for the gradient norm before the step."""

    lazy_step: bool = True
    """For offloaded optimizer states: with true, `step()` returns before the host has stepped the units. The host steps
    them one by one during the next forward, in the order that the forward uses them, and each use of a unit waits for
    that unit's step. With false, `step()` waits for all units. The results are the same."""

    warm_up: bool = True
    """With true, zeropp's GPU kernels are compiled while the model is wrapped. With false they are compiled when the
    first passes and the first step use them."""

    cast_inputs: bool = True
    """With true, floating-point inputs of the root module are cast to the compute dtype that `bf16`, `fp16` or
    `data_types.param_dtype` selects."""

    # The default is None instead of a default block, so that loading can warn if the key is set without
    # zero_quantized_gradients.
    gradient_bits: GradientBitsConfig | None = None
    """Bits per gradient element on each hop, in place of the 8 and 4 bits of `zero_quantized_gradients`."""

    reduce_scatter: Literal["auto", "exchange", "backend", "low_latency"] = "auto"
    """Method of summing unquantized gradients over ranks. `exchange`: an all-to-all, then each rank sums in fp32.
    `backend`: the backend's reduce-scatter, which sums in the message dtype. It needs no memory for the messages of all
    ranks, but rounds 16-bit sums at every addition and sends twice the bytes over gloo. `auto`: `backend` for 32-bit
    messages over NCCL, otherwise `exchange`. `low_latency`: as `auto`, and `backend` over NCCL also for 16-bit parts
    below 512 KiB between 32 or more nodes. There NCCL's PAT algorithm takes log2(n) steps instead of n - 1 messages,
    but rounds at each step: in bf16 over 128 nodes up to 7 x 2^-9 = 1.4 % of the largest partial sum."""

    feedback: Literal["cross", "both"] = "cross"
    """Hops with error feedback when `zeropp_loco_param` is given: only those between nodes (or a single hop), or also
    those inside a node. On each rank, with L ranks per node, `cross` takes 1/L byte per model parameter, and `both`
    takes 1 byte more."""

    hadamard: bool = False
    """Applies a Hadamard rotation to groups of 32 gradient elements before quantization. The rotation spreads an
    outlier over its group, so the others are rounded less coarsely."""

    weight_codec: Literal["int8", "delta4", "lossless"] | None = None
    """Codec of trained weights. `int8`: 8-bit blocks in every gather. `delta4` and `lossless`: 4-bit or exact
    differences to the weights of the last step that the ranks have cached, sent once per optimizer step. `null` follows
    `zero_quantized_weights`."""

    secondary: Literal["weights", "codes"] = "weights"
    """Contents of hpZ's secondary shards: `weights` in the compute dtype, or the received quantized `codes`, which take
    half the bytes of 16-bit weights."""

    defer_cross_reduction: bool = False
    """With true, gradients are summed inside a node over all `gradient_accumulation_steps` micro-batches and sent
    between nodes once per optimizer step. On each rank, with L ranks per node, this takes the fp32 gradients of 1/L of
    the model."""
