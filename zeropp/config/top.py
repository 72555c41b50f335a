"""The whole configuration: the top-level keys, their blocks, and the computation of batch sizes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from zeropp.config.base import Bound, ConfigError, NonNegative, Positive, alias, notify_once
from zeropp.config.blocks import (
    ActivationCheckpointingConfig,
    AioConfig,
    AutocastConfig,
    Bf16Config,
    CheckpointConfig,
    DataTypesConfig,
    Dtype,
    ExtensionConfig,
    Fp16Config,
    OptimizerConfig,
    SchedulerConfig,
)
from zeropp.config.ignored_keys import CompileConfig, LaterTop, NeedlessTop, OutsideKeys, UnreadTop
from zeropp.config.zero_block import ZeroConfig


def _small(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


# The keys of the base classes are at the top level of a file, so Config inherits them instead of nesting them as
# blocks.
class Config(OutsideKeys, NeedlessTop, UnreadTop, LaterTop):
    """A checked configuration: the keys at the top level of the JSON, some of which are blocks of further keys."""

    train_batch_size: Positive | None = None
    """Number of samples per optimizer step, over all ranks and micro-batches: `train_micro_batch_size_per_gpu` x
    `gradient_accumulation_steps` x ranks. Any one of the three keys can be left out and is then computed."""

    train_micro_batch_size_per_gpu: Positive | None = None
    """Number of samples per rank in one forward and backward."""

    gradient_accumulation_steps: Positive | None = None
    """Number of micro-batches whose gradients are summed for one optimizer step. `null` computes it from the batch
    sizes, and means 1 unless both batch sizes are given."""

    managed_gradient_accumulation: bool = True
    """With true, `step()` does nothing before `gradient_accumulation_steps` micro-batches have run since the last step,
    unless it is called with `now=True`. With false, every call of `step()` takes a step."""

    gradient_clipping: NonNegative = 0.0
    """Largest L2 norm of the gradient of the whole model. A larger gradient is scaled down to this norm. 0 disables
    clipping."""

    zero_optimization: ZeroConfig = ZeroConfig()
    """Sharding of the model (ZeRO). A boolean is a deprecated form: true means stage 1 and false means stage 0."""

    allgather_size: Bound | None = None
    """The `zero_optimization.allgather_bucket_size`, in elements, for the deprecated form `"zero_optimization": true`.
    It is read with that form only."""

    zeropp: ExtensionConfig = ExtensionConfig()
    """Settings of zeropp that DeepSpeed's format does not have."""

    bf16: Bf16Config = Field(default=Bf16Config(), validation_alias=alias("bf16", "bfloat16"))
    """Computation in bf16. It excludes `fp16`."""

    fp16: Fp16Config = Fp16Config()
    """Computation in fp16 with a loss scale. It excludes `bf16`."""

    torch_autocast: AutocastConfig = AutocastConfig()
    """Forward passes of the model under `torch.autocast`."""

    data_types: DataTypesConfig = DataTypesConfig()
    """Dtypes of gradient sums, weights and module buffers."""

    communication_data_type: Dtype | None = None
    """Dtype of unquantized gradient messages. `null` means the compute dtype. Sums are computed in fp32, unless
    `zeropp.reduce_scatter` selects the backend's reduce-scatter."""

    gradient_allreduce_op: Annotated[Literal["mean", "sum"], BeforeValidator(_small)] = "mean"
    """Reduction of gradients over ranks: mean or sum."""

    optimizer: OptimizerConfig | None = None
    """Optimizer that `zeropp.initialize` creates. `null` means the optimizer that is passed in."""

    scheduler: SchedulerConfig | None = None
    """Learning rate scheduler that `zeropp.initialize` creates. `null` means the scheduler that is passed in, if
    any."""

    dataloader_drop_last: bool = False
    """With true, data loaders that `zeropp.initialize` creates drop the last batch of an epoch if it is incomplete."""

    aio: AioConfig = AioConfig()
    """Asynchronous file I/O of NVMe offload."""

    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving and loading of checkpoints."""

    activation_checkpointing: ActivationCheckpointingConfig = ActivationCheckpointingConfig()
    """Recomputation of activations in backward."""

    compile: CompileConfig = CompileConfig()
    """DeepCompile: communication inside compiled graphs."""

    @property
    def zero(self) -> ZeroConfig:
        """The `zero_optimization` block."""
        return self.zero_optimization

    @property
    def loss_scaling(self) -> Fp16Config:
        """The `fp16` block, with `enabled` true also if autocast computes in fp16.

        Autocast in fp16 needs a loss scale, too, because small gradients become zero in fp16.
        """
        autocast = self.torch_autocast.enabled and self.torch_autocast.dtype == "fp16"
        return self.fp16.model_copy(update={"enabled": True}) if autocast else self.fp16

    @property
    def main_in_16_bits(self) -> bool:
        """True if main weights, gradient sums and optimizer states have the 16-bit compute dtype."""
        return self.bf16.bf16_master_weights_and_grads or self.fp16.fp16_master_weights_and_grads

    @property
    def checks_overflow(self) -> bool:
        """True if a step with a non-finite gradient is skipped."""
        return not self.bf16.enabled or self.bf16.check_grad_overflow

    @property
    def steps_on_host(self) -> bool:
        """True if the host's CPU steps optimizer states, which are in host memory or in files."""
        block = self.zero.offload_optimizer
        # A ratio of 0 offloads no states.
        return block is not None and block.device != "none" and block.ratio > 0

    @property
    def offloads(self) -> bool:
        """True if weights or optimizer states are offloaded."""
        block = self.zero.offload_param
        return self.steps_on_host or (block is not None and block.device != "none")

    def resolve_batch(self, world_size: int) -> Triple:
        """Compute the batch sizes for a number of ranks.

        Args:
            world_size: number of ranks.

        Returns:
            train_batch_size, train_micro_batch_size_per_gpu and gradient_accumulation_steps. Both sizes are None if
            neither is given.

        Raises:
            ConfigError: the three values contradict each other.
        """
        return resolve_batch(
            self.train_batch_size,
            self.train_micro_batch_size_per_gpu,
            self.gradient_accumulation_steps,
            world_size,
        )

    @classmethod
    def upgrade(cls, given: dict[str, object]) -> dict[str, object]:
        """Rewrite the deprecated boolean form of `zero_optimization`, and `allgather_size` with it."""
        # Keep the original value: the block below replaces it in `given`.
        zero = given.get("zero_optimization")
        if isinstance(zero, bool):
            notify_once(
                f"zero_optimization: {str(zero).lower()} is deprecated; give a block such as "
                f'{{"stage": {int(zero)}}} instead',
                FutureWarning,
            )
            given["zero_optimization"] = {"stage": int(zero)}
        # A null value means the same as an absent key.
        if given.get("allgather_size") is None:
            return given
        # As in DeepSpeed, the boolean form reads this key. A block has the key allgather_bucket_size instead.
        if zero is True:
            given["zero_optimization"] = {"stage": 1, "allgather_bucket_size": given["allgather_size"]}
        else:
            notify_once(
                "allgather_size has no effect without zero_optimization: true; set "
                "zero_optimization.allgather_bucket_size instead",
                UserWarning,
            )
        return given

    @model_validator(mode="after")
    def _one_compute_type(self) -> Config:
        if self.fp16.enabled and self.bf16.enabled:
            # Raise instead of choosing one, because readers of the file could not guess the choice.
            raise ValueError("fp16.enabled and bf16.enabled are both true; enable one of them")
        return self

    @model_validator(mode="after")
    def _differences_need_a_base(self) -> Config:
        zero = self.zero
        codec = self.zeropp.weight_codec
        if codec not in ("delta4", "lossless"):
            return self
        key = f'zeropp.weight_codec "{codec}"'
        if zero.zero_quantized_weights:
            raise ValueError(f"{key} and zero_quantized_weights ask for different codecs; leave one of them out")
        if self.zeropp.secondary == "codes":
            raise ValueError(
                f'{key} sends weights as differences from cached weights, and zeropp.secondary "codes" caches codes; '
                'leave secondary at "weights"'
            )
        # Sizes 0 and 1 mean no secondary shards. Larger sizes depend on the number of ranks; require_base checks them.
        if zero.stage == 3 and zero.zero_hpz_partition_size < 2:
            raise ValueError(
                f"{key} sends weights as differences from weights that are cached between steps, and stage 3 caches "
                "none; set zero_hpz_partition_size to the ranks of a node, or stage 1 or 2"
            )
        return self


# Batch sizes: global batch = micro-batch x accumulation steps x ranks.

Triple = tuple[int | None, int | None, int]


def resolve_batch(train: int | None, micro: int | None, steps: int | None, world_size: int) -> Triple:
    """Compute missing batch sizes from ``train = micro * steps * world_size``.

    If only one size is given, steps is 1. If neither size is given, both stay None.

    Args:
        train: samples per optimizer step over all ranks, or None.
        micro: samples per micro-batch of one rank, or None.
        steps: micro-batches per optimizer step, or None.
        world_size: number of ranks.

    Returns:
        The completed (train, micro, steps).

    Raises:
        ConfigError: the values contradict each other, or world_size is below 1.
    """
    # Reject booleans: True would pass the comparison as 1.
    if isinstance(world_size, bool) or world_size < 1:
        raise ConfigError(f"world_size: got {world_size!r}, expected the number of ranks, at least 1")
    # The error message distinguishes given values from computed ones.
    given = (train, micro, steps)
    if micro is None:
        steps = steps or 1
        if train is None:
            return None, None, steps
        # This division may have a remainder. The check at the end finds that and names all three values.
        micro = train // (steps * world_size)
    elif train is None:
        steps = steps or 1
        train = micro * steps * world_size
    else:
        # The result is 0 if the batch is too small. The check at the end rejects that, too.
        steps = steps or train // (micro * world_size)
    full = (train, micro, steps)
    if train != micro * steps * world_size:
        raise ConfigError(_disagreement(given, full, world_size))
    return full


def _disagreement(given: tuple[int | None, ...], full: tuple[int, int, int], world_size: int) -> str:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    parts = [
        f"{name} {value} ({'given' if had is not None else 'derived'})"
        for name, had, value in zip(names, given, full, strict=True)
    ]
    # Include the computed values in the product, so that the reader can check the calculation.
    product = full[1] * full[2] * world_size
    return (
        f"{', '.join(parts)} and world size {world_size} do not agree: expected train_batch_size = "
        f"micro-batch x accumulation steps x world size, which is {product}; "
        "change one of the given values, or remove one so that it is derived"
    )
