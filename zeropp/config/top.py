"""The configuration as a whole: top-level keys, the blocks below them, and the sizes of batches."""

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


# Those keys stand at the top level of a file, so they are inherited and not a block.
class Config(OutsideKeys, NeedlessTop, UnreadTop, LaterTop):
    """Keys at the top level, and the blocks below it."""

    train_batch_size: Positive | None = None
    """Samples of one optimizer step, over all ranks and micro-batches. It is micro-batch size x
    accumulation steps x ranks; what is left out of the three is derived."""

    train_micro_batch_size_per_gpu: Positive | None = None
    """Samples that one rank takes through one forward and backward."""

    gradient_accumulation_steps: Positive | None = None
    """Micro-batches whose gradients are summed before the optimizer steps. `null` derives it, or is 1 where
    no batch size is given."""

    managed_gradient_accumulation: bool = True
    """Lets `step()` act only when at least `gradient_accumulation_steps` micro-batches have been taken since
    the last step, or with `now=True`. With false every `step()` acts."""

    gradient_clipping: NonNegative = 0.0
    """Largest norm of all gradients together; larger gradients are scaled down to it. 0 clips nothing."""

    zero_optimization: ZeroConfig = ZeroConfig()
    """Partitioning. A boolean is a deprecated form: true is stage 1, false is stage 0."""

    allgather_size: Bound | None = None
    """Elements; the `allgather_bucket_size` of a zero block in the deprecated form `true`. Read with that
    form only."""

    zeropp: ExtensionConfig = ExtensionConfig()
    """Settings that DeepSpeed's format has no key for."""

    bf16: Bf16Config = Field(default=Bf16Config(), validation_alias=alias("bf16", "bfloat16"))
    """Computation in bf16. Not together with `fp16`."""

    fp16: Fp16Config = Fp16Config()
    """Computation in fp16 with loss scaling. Not together with `bf16`."""

    torch_autocast: AutocastConfig = AutocastConfig()
    """Forward passes of the model under torch autocast."""

    data_types: DataTypesConfig = DataTypesConfig()
    """Number formats of gradient sums, weights and buffers."""

    communication_data_type: Dtype | None = None
    """Type in which plain gradients travel; `null` is the compute type. Sums are in fp32, unless
    `zeropp.reduce_scatter` leaves them to the backend."""

    gradient_allreduce_op: Annotated[Literal["mean", "sum"], BeforeValidator(_small)] = "mean"
    """Mean or sum of gradients over ranks."""

    optimizer: OptimizerConfig | None = None
    """An optimizer to make; `null` is the one that is passed in."""

    scheduler: SchedulerConfig | None = None
    """A learning rate scheduler to make; `null` is none, or the one that is passed in."""

    dataloader_drop_last: bool = False
    """Drops the last batch of an epoch where it is not full, in data loaders that `zeropp.initialize` makes."""

    aio: AioConfig = AioConfig()
    """File I/O of NVMe offload."""

    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving and loading."""

    activation_checkpointing: ActivationCheckpointingConfig = ActivationCheckpointingConfig()
    """Recomputation of activations."""

    compile: CompileConfig = CompileConfig()
    """Communication inside compiled graphs."""

    @property
    def zero(self) -> ZeroConfig:
        """The `zero_optimization` block."""
        return self.zero_optimization

    @property
    def loss_scaling(self) -> Fp16Config:
        """The `fp16` block, enabled also where autocast computes in fp16: small gradients vanish there alike."""
        autocast = self.torch_autocast.enabled and self.torch_autocast.dtype == "fp16"
        return self.fp16.model_copy(update={"enabled": True}) if autocast else self.fp16

    @property
    def main_in_16_bits(self) -> bool:
        """True if main weights, gradient sums and states have the type that the model computes in."""
        return self.bf16.bf16_master_weights_and_grads or self.fp16.fp16_master_weights_and_grads

    @property
    def checks_overflow(self) -> bool:
        """True if a step with a gradient that is not finite is skipped."""
        return not self.bf16.enabled or self.bf16.check_grad_overflow

    @property
    def steps_on_host(self) -> bool:
        """True if the host's cores step states in the host's memory or in files."""
        block = self.zero.offload_optimizer
        # A ratio of 0 leaves every state on the device.
        return block is not None and block.device != "none" and block.ratio > 0

    @property
    def offloads(self) -> bool:
        """True if anything that training needs is off the device."""
        block = self.zero.offload_param
        return self.steps_on_host or (block is not None and block.device != "none")

    def resolve_batch(self, world_size: int) -> Triple:
        """(train_batch_size, micro-batch size, accumulation steps) for a number of ranks.

        Sizes that follow from nothing are None. Raises ConfigError where the three do not agree.
        """
        return resolve_batch(
            self.train_batch_size,
            self.train_micro_batch_size_per_gpu,
            self.gradient_accumulation_steps,
            world_size,
        )

    @classmethod
    def upgrade(cls, given: dict[str, object]) -> dict[str, object]:
        """Rewrites a boolean zero block."""
        # The form as it was given: below it has been rewritten.
        zero = given.get("zero_optimization")
        if isinstance(zero, bool):
            notify_once(
                f"zero_optimization: {str(zero).lower()} is deprecated; give a block such as "
                f'{{"stage": {int(zero)}}} instead',
                FutureWarning,
            )
            given["zero_optimization"] = {"stage": int(zero)}
        # Null and absent alike ask for nothing.
        if given.get("allgather_size") is None:
            return given
        # Read with the old form only, as DeepSpeed does; a block has a key of its own for it.
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
            # Neither could win by a rule that a reader of the file would guess.
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
                f'{key} sends differences to the weights that are cached, and zeropp.secondary "codes" caches none; '
                'leave secondary at "weights"'
            )
        # 0 and 1 make no second copy; whether a size makes one on so many ranks, require_base tells.
        if zero.stage == 3 and zero.zero_hpz_partition_size < 2:
            raise ValueError(
                f"{key} sends differences to weights that are cached between steps, and stage 3 caches none; set "
                "zero_hpz_partition_size to the ranks of a node, or stage 1 or 2"
            )
        return self


# Batch sizes: global batch = micro-batch x accumulation steps x ranks.

Triple = tuple[int | None, int | None, int]


def resolve_batch(train: int | None, micro: int | None, steps: int | None, world_size: int) -> Triple:
    """Completes (train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps).

    Sizes are in samples; the first counts all ranks, the second one rank. Two of the three give the third,
    one size alone stands with a single accumulation step. Without either size both stay None, and the number
    of accumulation steps is what was given, or 1.

    Raises ConfigError where the three cannot agree, and where world_size is below 1.
    """
    # True is 1 to a comparison.
    if isinstance(world_size, bool) or world_size < 1:
        raise ConfigError(f"world_size: got {world_size!r}, expected the number of ranks, at least 1")
    # Kept for the message, which tells given sizes from derived ones.
    given = (train, micro, steps)
    if micro is None:
        steps = steps or 1
        if train is None:
            return None, None, steps
        # Divided without a remainder or not: the check at the end finds out, and names all three.
        micro = train // (steps * world_size)
    elif train is None:
        steps = steps or 1
        train = micro * steps * world_size
    else:
        # 0 where the batch is too small, which the check refuses as well.
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
    # The product of the sizes as they are, derived ones included, so that the reader can check the sum.
    product = full[1] * full[2] * world_size
    return (
        f"{', '.join(parts)} and world size {world_size} do not agree: expected train_batch_size = "
        f"micro-batch x accumulation steps x world size, which is {product}; "
        "change one of the given values, or remove one so that it is derived"
    )
