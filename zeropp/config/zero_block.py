"""The `zero_optimization` block: sharding, offload, leaf modules, error feedback, and deprecated keys."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Le, Lt
from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from zeropp.config.base import (
    AUTO,
    Block,
    Bound,
    Count,
    Integer,
    NonNegative,
    Positive,
    alias,
    bound,
    is_auto,
    notify_once,
)
from zeropp.config.ignored_keys import LaterZero, NeedlessZero

Stage = Annotated[Integer, Ge(0), Le(3)]
# DeepSpeed's value for "no MiCS" is -1.
ShardSize = Annotated[Integer, Ge(-1)]
_GONE = {
    "legacy_stage1": "each stage has one implementation",
}


# Storage tiers of states and weights.

Device = Literal["none", "cpu", "nvme"]


class _OffloadBlock(Block):
    device: Device = "none"
    """Storage tier: `none` keeps the data in device memory, `cpu` moves it to host memory, and `nvme` moves it to files
    in `nvme_path`."""

    nvme_path: Path | None = None
    """Directory of the swap files, required with `nvme` and unused otherwise. Use a local disk: on a file system
    without direct I/O, a warning is logged, and the files also take memory in the page cache."""

    # This validator runs after all fields are set, because the rules involve several fields.
    @model_validator(mode="after")
    def _has_what_it_needs(self) -> _OffloadBlock:
        # Reject an empty path, which comes from an unset variable, for example. It would mean the working directory.
        if self.device == "nvme" and (self.nvme_path is None or self.nvme_path == Path()):
            raise ValueError('device "nvme" needs nvme_path; give the directory that the swap files go to')
        # Without this check, the operating system's error would name neither the path nor the key.
        if self.nvme_path is not None and "\0" in str(self.nvme_path):
            raise ValueError(f"nvme_path {str(self.nvme_path)!r} has a NUL character in it, which no path may have")
        # The bound of the field is 0, as in DeepSpeed, so that 0 is accepted without offload.
        if self.device != "none" and getattr(self, "buffer_count", 1) < 1:
            raise ValueError(
                f'buffer_count 0 leaves device "{self.device}" no staging buffer; give at least 1, or leave it out'
            )
        return self


class OffloadParamConfig(_OffloadBlock):
    """Offload of weight shards to host memory or NVMe. It applies to stage 3 only."""

    buffer_count: Count = 5
    """Number of staging buffers for weights in files. More buffers allow more reads in flight."""

    buffer_size: Bound = 100_000_000
    """Size of one staging buffer, in elements. A larger shard is copied through several buffers."""

    max_in_cpu: Bound = 1_000_000_000
    """Number of weight elements per rank that stay in host memory with `nvme`, so that they need no read from files."""

    pin_memory: bool = False
    """Page-locks the weights in host memory and the staging buffers. Copies to the device are then faster and overlap
    with computation. Page-locked memory cannot be swapped out."""


class OffloadOptimizerConfig(_OffloadBlock):
    """Offload of main weights, gradients and optimizer states to host memory or NVMe. The host's CPU steps them."""

    buffer_count: Count = 4
    """Number of staging buffers for steps of data that is not in host memory. A sub-group in flight takes one buffer,
    or a part of one, for each kind of such data: main weights, gradients, each optimizer state, and new weights."""

    pin_memory: bool = False
    """Page-locks the gradients in host memory, the main weights if gathers read them there, and the staging buffers.
    Copies to and from the device are then faster and overlap with computation. Page-locked memory cannot be swapped
    out."""

    pipeline_read: bool = False
    """Reads the next sub-group from NVMe while the current one is stepped."""

    pipeline_write: bool = False
    """Writes a stepped sub-group back to NVMe while the next one is stepped."""

    fast_init: bool = False
    """In DeepSpeed, true speeds up the first copy of weights to NVMe. zeropp always writes the first weights to their
    storage tier unit by unit."""

    ratio: Annotated[NonNegative, Le(1)] = 1.0
    """Fraction of the optimizer states, from 0 to 1, that is offloaded and stepped on the host. The remaining states,
    those of the units that the model defines first, stay on the device with their main weights and gradients and are
    stepped there. A value below 1 requires stage 3."""

    super_offload: bool = False
    """Speculative steps on the host, for machines with a fast memory link between host and device."""

    cpuadam_cores_perc: Annotated[NonNegative, Le(1)] = 0.8
    """Fraction of the host's cores, from 0 to 1, that step states with `super_offload`."""

    @property
    def pipeline(self) -> bool:
        """True if files are read or written while another sub-group is stepped."""
        return self.pipeline_read or self.pipeline_write


# Leaf modules.


def _listed(value: object) -> object:
    # A single string would otherwise be read as a sequence of its letters.
    return (value,) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_listed)]


# Sparse expert blocks run different experts on different ranks. With one unit per expert, a rank would issue gathers
# that other ranks do not issue. So these blocks are leaf modules. They are given by name, because transformers may be
# missing.
SPARSE_BLOCKS = (
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
)


class LeafModuleConfig(Block):
    """Leaf modules: the parameters of a leaf module form one unit, so they are gathered and freed together.

    A single string means a list with one item.
    """

    classes: Names = SPARSE_BLOCKS
    """Classes whose instances are leaf modules, by class name or full dotted name. Names that match no module of the
    model are ignored."""

    names: Names = ()
    """Qualified names of leaf modules, as in `model.named_modules()`."""

    name_suffixes: Names = ()
    """Endings of qualified names. Each module whose name ends with one of them is a leaf module."""


# Error feedback of quantized gradients.


class LocoConfig(Block):
    """Error feedback of quantized gradients (LoCo).

    The quantization error of one reduction is added to the gradients of the next. If a step is skipped, or gradients
    are dropped before a step, all ranks reset the stored errors to zero.
    """

    # A value of 1 would keep the first error forever. The default is DeepSpeed's.
    err_beta: Annotated[NonNegative, Lt(1)] = 0.8
    """Share of the old error in the stored one: stored = err_beta * stored + (1 - err_beta) * new error. The default
    0.8 is DeepSpeed's; 0.5 leaves less error in Adam's averages (docs/convergence.md)."""

    reset_T: Positive = 1024
    """Number of optimizer steps after which the stored errors are reset to zero. Skipped steps also reset them."""


# Deprecated keys.

REPLACEMENTS: Mapping[str, str] = {
    "cpu_offload": "offload_optimizer",
    "cpu_offload_param": "offload_param",
    "cpu_offload_use_pin_memory": "pin_memory in offload_optimizer and offload_param",
    "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
}


_RENAMED = ("stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save")
_OFFLOAD = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}


def upgrade_zero(given: dict[str, object]) -> dict[str, object]:
    """Rewrite the deprecated keys of a `zero_optimization` block, with one warning for each.

    Args:
        given: the block; changed in place.

    Returns:
        The same dict with current keys.

    Raises:
        ValueError: a deprecated key and its replacement are both given, or the value is not a boolean.
    """
    # Apply cpu_offload_use_pin_memory last: it sets a key in offload blocks, and the other deprecated keys may create
    # these blocks.
    pin = _taken(given, "cpu_offload_use_pin_memory")
    for old, new in _OFFLOAD.items():
        wanted = _taken(given, old, new)
        if wanted is not None:
            given[new] = {"device": "cpu"} if wanted else None
    gather = _taken(given, "stage3_gather_fp16_weights_on_model_save", *_RENAMED)
    if gather is not None:
        given[_RENAMED[0]] = gather
    if pin is not None:
        for block in _OFFLOAD.values():
            # Without an offload block there is nothing to page-lock.
            if given.get(block) is not None:
                given[block] = _pinned(block, given[block], pin)
    return given


def _taken(given: dict[str, object], old: str, *new: str) -> bool | None:
    """Remove a deprecated key and return its value; return None if the key is absent or "auto".

    Args:
        given: the block; changed in place.
        old: the deprecated key.
        new: keys that have replaced it.
    """
    if old not in given:
        return None
    value = given.pop(old)
    clash = [key for key in new if key in given]
    if clash:
        raise ValueError(f"{old} is the old form of {clash[0]} and both are given; keep only {clash[0]}")
    if not isinstance(value, bool) and not is_auto(value):
        raise ValueError(f"{old}: got {value!r}, expected a boolean; set {REPLACEMENTS[old]} instead")
    # Python hides DeprecationWarning outside of __main__, so use FutureWarning.
    notify_once(f"zero_optimization.{old} is deprecated; set {REPLACEMENTS[old]} instead", FutureWarning)
    return value if isinstance(value, bool) else None


def _pinned(name: str, block: object, pin: bool) -> dict[str, object]:
    if not isinstance(block, Mapping) or block.get("pin_memory", AUTO) != AUTO:
        raise ValueError(
            f"cpu_offload_use_pin_memory is the old form of {name}.pin_memory and both are given; "
            f"keep only {name}.pin_memory"
        )
    return {**block, "pin_memory": pin}


# The block.


class ZeroConfig(NeedlessZero, LaterZero):
    """Sharding of a model over ranks: the sharded parts, the times of gathers, and the communication."""

    retired: ClassVar[Mapping[str, str]] = REPLACEMENTS

    # The default is DeepSpeed's, for a configuration without this key. Without a configuration, load_config sets 3.
    stage: Stage = 0
    """Parts that are sharded over ranks: 0 nothing, 1 optimizer states, 2 also gradients, 3 also weights. Without any
    configuration the stage is 3. With `gradient_accumulation_steps`, stages 0 and 1 sum the gradients of all
    micro-batches on each rank before they reduce them; stages 2 and 3 reduce the gradients of every micro-batch."""

    offload_param: OffloadParamConfig | None = None
    """Offload of weight shards. `null` keeps them on the device. In stages 0 to 2 its `device` has no effect, and a
    warning says so."""

    offload_optimizer: OffloadOptimizerConfig | None = None
    """Offload of optimizer states, which the host then steps. `null` keeps them on the device."""

    sub_group_size: Bound = 1_000_000_000
    """Largest sub-group, in elements. With offloaded optimizer states, the host steps one sub-group of a rank's shard
    at a time, and a staging buffer holds one. It does not change the results. 0 means the default."""

    # Validate the default, so that an absent key gets the value that null gets.
    overlap_comm: bool | None = Field(default=None, validate_default=True)
    """With true, gathers and reductions overlap with the computation, in CUDA streams on a GPU and in threads on CPU.
    With false they run in sequence, which is slower and gives the same results, except for rounding if gradients are
    quantized and ranks use different modules. `null` means true in stage 3 and with offloaded optimizer states, and
    false otherwise."""

    prefetch_bucket_size: Bound = Field(
        default=50_000_000, validation_alias=alias("stage3_prefetch_bucket_size", "prefetch_bucket_size")
    )
    """Largest number of elements that are prefetched, i.e. gathered before their use. A single unit may be larger. 0
    turns prefetching off."""

    param_persistence_threshold: Bound = Field(
        default=100_000, validation_alias=alias("stage3_param_persistence_threshold", "param_persistence_threshold")
    )
    """Largest size of a persistent parameter, in elements. The full weights of persistent parameters stay gathered
    between uses and are refreshed after each step. Their optimizer states are still sharded."""

    # sys.maxsize means no bound, as in DeepSpeed.
    model_persistence_threshold: Bound = Field(
        default=sys.maxsize, validation_alias=alias("stage3_model_persistence_threshold", "model_persistence_threshold")
    )
    """Largest total size of all persistent parameters, in elements. In the order of the model, a parameter that would
    exceed the total is not persistent."""

    max_live_parameters: Bound = Field(
        default=1_000_000_000, validation_alias=alias("stage3_max_live_parameters", "max_live_parameters")
    )
    """Largest number of elements that are gathered at once on a rank, in addition to the unit in use. To stay below it,
    zeropp prefetches less and frees units that it would otherwise keep for reuse."""

    max_reuse_distance: Bound = Field(
        default=1_000_000_000, validation_alias=alias("stage3_max_reuse_distance", "max_reuse_distance")
    )
    """Largest reuse distance, in elements. A unit stays gathered after its use if the units used from then on, up to
    and including its next use, have at most this many elements. Otherwise it is freed and gathered again, before the
    units that are used after it."""

    module_granularity_threshold: Annotated[int, BeforeValidator(bound)] = Field(
        default=0, validation_alias=alias("stage3_module_granularity_threshold", "module_granularity_threshold")
    )
    """Largest average number of parameter elements per submodule with which a module becomes a leaf module. Many tiny
    modules then form one unit. 0 and negative values make no leaf modules."""

    gather_16bit_weights_on_model_save: bool = Field(
        default=False,
        validation_alias=alias("stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save"),
    )
    """In stage 3, true lets `zeropp.checkpoint.save_16bit_model` gather the weights in the compute dtype and write them
    on the first rank. With false it writes nothing and returns False in stage 3, as in DeepSpeed. Other stages,
    `model.state_dict()` and `checkpoint.export` do not depend on this key."""

    load_from_fp32_weights: bool = True
    """With true, functions of `zeropp.checkpoint` load main weights in full precision. With false they round them to
    the compute dtype, so that the main weights equal the weights in the computation. It applies to every stage."""

    pipeline_loading_checkpoint: bool = False
    """With true, the ranks of a node read a checkpoint one after the other. The temporary memory for reading (up to 256
    MB of unconverted values, source tensors and module buffers) is then used by one rank per node at a time. Loading
    takes longer."""

    ignore_unused_parameters: bool = True
    """With true, a parameter without a gradient on any rank stays unchanged, as in plain PyTorch. With false the step
    raises an error that names such parameters."""

    zero_hpz_partition_size: Count = 1
    """Number of ranks, usually those of a node, that share a second copy of the weights in stage 3 (hpZ). Weights are
    then sent between nodes only once per optimizer step. The first copy is shared by S ranks: all ranks, or
    `mics_shard_size`. This number, the ranks per node and S must divide each other. 0, 1 and multiples of S mean no
    second copy."""

    zero_quantized_weights: bool = False
    """Gathers weights quantized to 8 bits, in blocks of 256 elements (qwZ)."""

    zero_quantized_nontrainable_weights: bool = False
    """Stores and gathers frozen weights quantized to 8 bits, in blocks of 256 elements."""

    zero_quantized_gradients: bool = False
    """Reduces gradients quantized to 8 bits inside a node and to 4 bits between nodes (qgZ)."""

    zeropp_loco_param: LocoConfig | None = None
    """Error feedback of quantized gradients. `null` means none."""

    mics_shard_size: ShardSize = -1
    """Number of ranks that share one replica of the model in stage 3 (MiCS). The replicas are synchronised once per
    optimizer step. This number, the ranks per node and the number of all ranks must divide each other. -1 and 0 shard
    over all ranks."""

    mics_hierarchical_params_gather: bool = False
    """With true, a MiCS replica that spans nodes gathers between nodes first and inside the node second. Each weight is
    then sent to a node once. With false, one collective gathers over the whole replica."""

    log_trace_cache_warnings: bool = False
    """Logs a warning when a pass uses units in another order than the known one, so that the order must be learned
    again."""

    override_module_apply: bool = True
    """Inside `zero.Init`, true makes `Module.apply` gather all parameters of a module before it calls the function.
    With false, each parameter is gathered when the function accesses it."""

    leaf_module: LeafModuleConfig = LeafModuleConfig()
    """Modules whose parameters are always gathered together."""

    @classmethod
    def upgrade(cls, given: dict[str, object]) -> dict[str, object]:
        """Rewrite deprecated keys, with one warning for each."""
        return upgrade_zero(given)

    @field_validator("offload_param")
    @classmethod
    def _keep_weights_below_stage_3(cls, value: OffloadParamConfig | None, info: ValidationInfo) -> object:
        # Below stage 3 each rank keeps whole weights on the device, so there is nothing to offload. info.data holds the
        # fields above this one; an invalid field is missing.
        if value is None or info.data.get("stage", 3) == 3:
            return value
        return value.model_copy(update={"device": "none"})

    @field_validator("sub_group_size")
    @classmethod
    def _default_for_zero(cls, value: int) -> int:
        # DeepSpeed accepts 0, where a sub-group has one parameter. A staging buffer here cannot have 0 elements.
        return value or 1_000_000_000

    @field_validator("overlap_comm")
    @classmethod
    def _overlap_follows_stage(cls, value: bool | None, info: ValidationInfo) -> bool:
        if value is not None:
            return value
        # Fields are validated in the order of the class, so the fields above are in info.data. An invalid field is
        # missing.
        offload = info.data.get("offload_optimizer")
        return info.data.get("stage") == 3 or (offload is not None and offload.device != "none")

    @field_validator(*_GONE)
    @classmethod
    def _refuse_what_is_gone(cls, value: bool, info: ValidationInfo) -> bool:
        # Raise when loading: no later version will add these features.
        if value:
            raise ValueError(f"true is refused; remove the key: {_GONE[info.field_name or '']}")
        return value
