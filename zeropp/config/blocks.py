"""The other blocks: number formats, files, checkpoints, optimizer, scheduler, and `zeropp` for settings of our own."""

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
    """Accepts `float32`, `torch.float32` (string or dtype object) and the like beside `fp32`."""
    # str() of a dtype object is "torch.float32". What is not known goes on, for pydantic to refuse as it was given.
    return _SPELLINGS.get(str(value).lower().removeprefix("torch."), value)


def _scale(value: object) -> object:
    """Refuse "dynamic", which other libraries write for a dynamic loss scale; here it is 0."""
    if isinstance(value, str) and value.lower() == "dynamic":
        raise ValueError(f"got {value_text(value)}; expected a number >= 0; set 0, which means a dynamic scale")
    return value


Dtype = Annotated[Literal["fp32", "fp16", "bf16"], BeforeValidator(_canonical)]


class Fp16Config(Block):
    """Computes in fp16 with a loss scale that keeps small gradients from vanishing."""

    enabled: bool = False
    """Holds weights and activations in fp16; main weights and optimizer states stay in fp32. Losses go through
    `optimizer.backward(loss)` or `optimizer.scale(loss)`."""

    auto_cast: bool = False
    """Asks that the floating inputs of the model are cast to fp16. Nothing is left to do: they are, unless
    `zeropp.cast_inputs` is false."""

    loss_scale: Annotated[NonNegative, BeforeValidator(_scale)] = 0.0
    """Factor on the loss before backward, taken out of the gradients again before the step. 0 chooses it
    dynamically, any other value is kept throughout."""

    initial_scale_power: Count = 16
    """The first dynamic scale, as an exponent of 2: 16 starts at a factor of 65,536."""

    loss_scale_window: Count = 1000
    """Consecutive steps with finite gradients after which the dynamic scale is doubled."""

    hysteresis: Count = 2
    """Steps with overflowed gradients until the dynamic scale is halved, that one included. It is full again
    when the scale is doubled."""

    consecutive_hysteresis: bool = False
    """Refills the hysteresis at each step without overflow, so that only overflows in a row add up."""

    min_loss_scale: NonNegative = 1.0
    """The factor below which the dynamic scale is never lowered; an overflow there is an error."""

    fp16_master_weights_and_grads: bool = False
    """Keeps main weights, gradients and optimizer states in fp16 instead of fp32: half the memory, lower
    precision. For optimizers that divide by no second moments, such as SGD and Lion: those of AdamW vanish."""

    @model_validator(mode="after")
    def _dynamic_scale_can_move(self) -> Fp16Config:
        # 0 means dynamic. Halving has to end above 0, and 0 steps say nothing of when to double.
        if self.loss_scale == 0 and (self.loss_scale_window == 0 or self.min_loss_scale == 0):
            raise ValueError(
                "a dynamic loss scale (loss_scale 0) needs loss_scale_window and min_loss_scale above 0, got "
                f"{self.loss_scale_window} and {self.min_loss_scale:g}; raise them or fix loss_scale"
            )
        return self


class Bf16Config(Block):
    """Computes in bf16. Its exponent range is that of fp32, so there is no loss scale."""

    enabled: bool = False
    """Holds weights and activations in bf16; the optimizer steps fp32 weights."""

    immediate_grad_update: bool = False
    """Adds a gradient to the fp32 sum as soon as backward has made it. There is nothing to choose here: a
    unit's gradients always go to its fp32 shard when they are complete."""

    check_grad_overflow: bool = True
    """Skips and counts a step whose gradients are not finite, on every rank alike. With `false` such a step
    is taken, as plain torch takes it: a single NaN reaches the weights. The check costs no message."""

    bf16_master_weights_and_grads: bool = False
    """Keeps main weights and gradients of the optimizer in bf16 instead of fp32: half the memory, updates
    that are small beside their weight are lost. Only together with `bf16_optimizer_states`."""

    bf16_optimizer_states: bool = False
    """Keeps optimizer states in bf16 instead of fp32. Only together with `bf16_master_weights_and_grads`:
    optimizers of torch make states in the type of the weights that they step."""


class AutocastConfig(Block):
    """Runs the forward pass under torch autocast, with main weights and most others in fp32."""

    enabled: bool = False
    """Wraps the model's forward in `torch.autocast`. Losses of fp16 are scaled as the `fp16` block says."""

    dtype: Annotated[Literal["fp16", "bf16"], BeforeValidator(_canonical)] = "bf16"
    """Type that autocast lowers to."""

    lower_precision_safe_modules: tuple[str, ...] | None = None
    """Classes of the modules whose weights are gathered, and whose gradients travel, in the autocast type, by
    names such as `torch.nn.Linear`; `null` is that and `Conv1d`, `Conv2d`, `Conv3d`. Not their subclasses."""


class DataTypesConfig(Block):
    """Number formats of what is kept rather than computed with."""

    grad_accum_dtype: Dtype | None = None
    """Type of the gradients summed over micro-batches: fp32, or that of main weights that are kept in 16 bits.
    `null` is that type, and another one is refused."""

    param_dtype: Dtype | None = None
    """Type of the weights in the computation, which must not be another than that of a `bf16` or `fp16` block that
    is enabled; `null` is that, or without one each parameter's own."""

    buffer_dtype: Dtype | None = None
    """Type that floating module buffers are converted to; `null` leaves each as it is."""

    keep_in_fp32_modules: tuple[str, ...] | None = None
    """Modules, by parts of their names, whose parameters are computed with in fp32 though `bf16` or `fp16` is
    enabled. The model converts what it hands them."""


# Files, checkpoints, recomputation.


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


# Optimizer and scheduler.


def _upper(value: object) -> object:
    return value.upper() if isinstance(value, str) else value


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


# The zeropp block.

# older pydantic does not find 8.0 among the choices
Bits = Annotated[Literal[4, 8, 16, 32], BeforeValidator(integer)]
# Seconds; backends count nanoseconds in 64 bits, which hold about 9e9 seconds.
LONGEST_TIMEOUT = 100_000_000
Seconds = Annotated[PositiveReal, Le(LONGEST_TIMEOUT)]


class GradientBitsConfig(Block):
    """Width of gradients on the wire, hop by hop. 16 and 32 are plain values, fewer are quantized."""

    local: Bits = 8
    """Bits an element takes between ranks of one node."""

    cross: Bits = 4
    """Bits an element takes between nodes; also the width where there is only one hop."""


class MaxCtasConfig(Block):
    """Thread blocks that the kernels of one NCCL communicator have at most; NCCL calls it maxCTAs.

    More of them move bytes faster and leave fewer multiprocessors to the model. Wrapping refuses limits whose sum over
    the communicators is more than the card has.
    """

    local: Positive | None = None
    """Of a communicator inside a node. `null` takes 16, and at most an eighth of the card's multiprocessors."""

    cross: Positive | None = None
    """Of a communicator between nodes. `null` takes 8, and at most a sixteenth."""


class ExtensionConfig(Block):
    """Settings of zeropp itself. DeepSpeed does not know this block."""

    local_world_size: Positive | None = None
    """Ranks on one node. `null` takes the environment variable `LOCAL_WORLD_SIZE`, which launchers set; where
    there is none, each host is a node."""

    unit_numel: Bound = 0
    """Elements above which a unit is cut into the units of its submodules, further down the module tree.
    Smaller units need less memory at once and more collectives. 0 cuts nothing beyond the default units."""

    unit_min_blocks: Count = 128
    """Blocks of 256 elements that each rank's piece of a unit holds at least. A smaller unit merges with
    its neighbours, or its parameters become persistent, which bounds padding by 1 %. 0 merges nothing."""

    host_memory_limit: Positive | None = None
    """Bytes of a host's memory that the ranks of a node may have together. A configuration that cannot stay below is
    refused on every rank, with what takes how much and which settings take less, before the model is changed; so is, in
    `zero.Init` and `materialize`, a model as soon as its pieces alone are more. `zeropp.plan.memory` counts; Python,
    torch, activations, buffers and the model as it was built are not in it. `null` asks for no limit."""

    hang_timeout: Seconds = 420.0
    """Seconds that a rank waits for a collective before it raises and names the units each rank waits for. Torch ends
    the process without these names 480 s after its own watchdog stands still, unless
    `TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC` says otherwise."""

    max_ctas: MaxCtasConfig = MaxCtasConfig()
    """Thread blocks of NCCL's kernels, by link."""

    share_communicators: bool = True
    """Lets the engines of one process use the same NCCL communicators where their ranks are the same. Then all ranks
    must use the engines in the same order. False gives each engine its own, and costs their memory."""

    warn_after: Seconds | None = 30.0
    """Seconds after which a rank that waits for others logs once who waits where; long before
    `hang_timeout`. `null` never does."""

    static_graph: bool = False
    """Promises that all passes of a kind (training forwards, their backwards, evaluation) use the same modules in
    the same order, on every rank and every time. Passes that have varied, or that do not use all modules, then
    exchange nothing at their end either, and nothing else is ever learned: a pass that needs another module is an error
    on every rank. On a card, hosts then go on without waiting for the sum of gradient norms, if a fused Adam steps."""

    lazy_step: bool = True
    """Lets `step()` return once it is decided, where states are offloaded: the host then steps one unit after
    another in the order of the next forward, beside it, and whatever uses a unit waits for that one. The results are
    the same. False steps all of them first."""

    warm_up: bool = True
    """On a card, compiles kernels while the model is wrapped, and not in the middle of its first step."""

    cast_inputs: bool = True
    """Casts floating inputs of the root module to the compute type when `bf16` or `fp16` is enabled."""

    # Null and not a block of defaults: to set it without zero_quantized_gradients is worth a warning.
    gradient_bits: GradientBitsConfig | None = None
    """Bits of a gradient element on each hop, in place of what `zero_quantized_gradients` stands for."""

    reduce_scatter: Literal["auto", "exchange", "backend", "low_latency"] = "auto"
    """Who sums gradients that travel as plain values: each rank, in float32, after an exchange, or the backend's
    reduce-scatter, on the way and in the type on the wire, in an order of its own. The latter needs no memory for the
    messages of all ranks, rounds 16-bit sums once a rank, and sends twice the bytes over gloo. `auto` takes it over
    NCCL on a 32-bit wire. `low_latency` does, too, and takes it between 32 nodes or more for 16-bit parts below
    512 KiB, where NCCL's PAT algorithm has log2(n) steps in place of n - 1 messages. PAT rounds the sum to 16 bits at
    each step: in bf16 over 128 nodes up to 7 x 2^-9 = 1.4 % of the largest partial sum, where an exchange rounds
    once."""

    feedback: Literal["cross", "both"] = "cross"
    """Hops that carry quantization errors over when `zeropp_loco_param` is given. `cross` costs 1/L byte
    per parameter on a rank, L ranks to a node; `both` costs 1 byte more, unsharded."""

    hadamard: bool = False
    """Rotates groups of 32 gradient elements before they are quantized, which spreads outliers over a
    group."""

    weight_codec: Literal["int8", "delta4", "lossless"] | None = None
    """Encoding of weights when they are gathered: 8-bit blocks, 4-bit differences to what every rank holds, or
    lossless differences. `null` follows `zero_quantized_weights`."""

    secondary: Literal["weights", "codes"] = "weights"
    """Contents of a secondary shard: weights in the compute type, or the received codes at half the
    bytes."""

    defer_cross_reduction: bool = False
    """Sums gradients inside a node over all micro-batches and sends them between nodes once an optimizer
    step, if `gradient_accumulation_steps` says how many there are. It costs fp32 gradients at the level of the node."""
