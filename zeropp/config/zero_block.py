"""The `zero_optimization` block: partitioning, offload, leaf modules, error feedback, and deprecated keys."""

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
# DeepSpeed writes -1 for no MiCS.
ShardSize = Annotated[Integer, Ge(-1)]
_GONE = {
    "legacy_stage1": "each stage has one implementation",
}


# Places of states and weights.

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


# Modules whose parameters are fetched as one.


def _listed(value: object) -> object:
    # A string is a sequence, too, of its letters.
    return (value,) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_listed)]


# Sparse expert blocks run a different subset of their experts on each rank, so per-expert units would ask for
# collectives that other ranks do not join.
# By name, since transformers need not be there.
SPARSE_BLOCKS = (
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
)


class LeafModuleConfig(Block):
    """Modules that are fetched and released whole: no unit boundary is put inside them. A single string is
    taken for a list of one."""

    classes: Names = SPARSE_BLOCKS
    """Classes whose every instance is a leaf, by class name or by full dotted name. Names that nothing in
    the model has are skipped."""

    names: Names = ()
    """Qualified names of single modules, as `model.named_modules()` spells them."""

    name_suffixes: Names = ()
    """Endings of qualified names: each module whose name ends with one of them is a leaf."""


# Error feedback of quantized gradients.


class LocoConfig(Block):
    """Carries what quantizing a gradient lost over to the next step (LoCo). It acts on quantized
    gradients. Where a step is skipped, or gradients are forgotten before a step, what was carried is
    lost with them, on every rank, and carrying begins anew."""

    # 1 would keep the old error for ever and take nothing new in. The default is DeepSpeed's.
    err_beta: Annotated[NonNegative, Lt(1)] = 0.8
    """Share of the carried error that is kept at each step, below 1; the newest error gets the rest. 0.5
    leaves less than DeepSpeed's 0.8 in Adam's averages, see docs/convergence.md."""

    reset_T: Positive = 1024
    """Optimizer steps after which the carried errors are cleared; skipped ones clear them, too."""


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
    """Rewrites the deprecated keys of a zero block, with one warning for each that is present.

    Raises ValueError where an old key and the one that took its place are both given.
    """
    # Taken out first, used last: it goes into blocks that other old keys may have yet to make.
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
            # Pinning without offload pins nothing.
            if given.get(block) is not None:
                given[block] = _pinned(block, given[block], pin)
    return given


def _taken(given: dict[str, object], old: str, *new: str) -> bool | None:
    """Removes a deprecated key and returns its value; None where it is absent or "auto"."""
    if old not in given:
        return None
    value = given.pop(old)
    clash = [key for key in new if key in given]
    if clash:
        raise ValueError(f"{old} is the old form of {clash[0]} and both are given; keep only {clash[0]}")
    if not isinstance(value, bool) and not is_auto(value):
        raise ValueError(f"{old}: got {value!r}, expected a boolean; set {REPLACEMENTS[old]} instead")
    # FutureWarning, since Python hides DeprecationWarning outside of __main__.
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
    """The partitioning of a model over ranks: which parts, when they are fetched, and how they travel."""

    retired: ClassVar[Mapping[str, str]] = REPLACEMENTS

    # DeepSpeed's default for a file that does not say. Without any file load_config sets 3.
    stage: Stage = 0
    """Parts that the ranks share out: 0 nothing, 1 optimizer states, 2 also gradients, 3 also weights. Without a
    configuration the stage is 3. In stages 0 and 1 gradients of several micro-batches are summed on each rank before
    they travel, if `gradient_accumulation_steps` says how many there are; in stage 2 each micro-batch's travel."""

    offload_param: OffloadParamConfig | None = None
    """Place of weight shards; `null` is on the device. It acts in stage 3 only: elsewhere `device` is read as `none`,
    with a note."""

    offload_optimizer: OffloadOptimizerConfig | None = None
    """Place where optimizer states are kept and stepped; `null` is on the device."""

    sub_group_size: Bound = 1_000_000_000
    """Elements of a rank's shard that are stepped at a time where states are in files: what a staging buffer holds, at
    most; 0 stands for the default. Elsewhere nothing is left to do, since a step in parts gives the same bits."""

    # Absent and null mean the same, so the default goes through the validator, too.
    overlap_comm: bool | None = Field(default=None, validate_default=True)
    """Runs gathers and reductions beside the computation, on a GPU on streams of their own, on CPU on threads. False
    runs each of them in its turn, which gives the same bits more slowly (close ones where gradients are quantized and
    ranks go different ways through the model: what they send in two parts then depends on timing). `null` means true
    in stage 3 and where the host steps, and false elsewhere."""

    prefetch_bucket_size: Bound = Field(
        default=50_000_000, validation_alias=alias("stage3_prefetch_bucket_size", "prefetch_bucket_size")
    )
    """Elements of coming units that may be gathered ahead of their use. 0 turns prefetching off."""

    param_persistence_threshold: Bound = Field(
        default=100_000, validation_alias=alias("stage3_param_persistence_threshold", "param_persistence_threshold")
    )
    """Elements up to which a parameter is persistent: its full weights stay gathered between uses and are
    refreshed after each step. Its optimizer states are partitioned all the same."""

    # sys.maxsize stands for no bound, as in DeepSpeed.
    model_persistence_threshold: Bound = Field(
        default=sys.maxsize, validation_alias=alias("stage3_model_persistence_threshold", "model_persistence_threshold")
    )
    """Elements that all persistent parameters may have together, counted in the order of the model."""

    max_live_parameters: Bound = Field(
        default=1_000_000_000, validation_alias=alias("stage3_max_live_parameters", "max_live_parameters")
    )
    """Elements that may be gathered at once on a rank. Prefetching stops and reuse gives way before the
    bound is passed; what the modules now running need comes on top."""

    max_reuse_distance: Bound = Field(
        default=1_000_000_000, validation_alias=alias("stage3_max_reuse_distance", "max_reuse_distance")
    )
    """A unit stays gathered after its use if its next use comes within this many elements of uses, that one
    included; where the next use is further, units behind it are not fetched ahead of it."""

    module_granularity_threshold: Annotated[int, BeforeValidator(bound)] = Field(
        default=0, validation_alias=alias("stage3_module_granularity_threshold", "module_granularity_threshold")
    )
    """A module with at most this many elements of parameters for each module in its tree is a leaf module:
    many tiny modules are then one unit. 0 and below make none."""

    gather_16bit_weights_on_model_save: bool = Field(
        default=False,
        validation_alias=alias("stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save"),
    )
    """Lets `zeropp.checkpoint.save_16bit_model` gather whole weights in the compute dtype on the first rank and write
    them in stage 3; false makes it write nothing and return False there, as in DeepSpeed. Other stages write them in
    any case. `model.state_dict()` and `checkpoint.export`, which are asked for by name, do not depend on it."""

    load_from_fp32_weights: bool = True
    """Main weights that are loaded are those of the file in full precision. False rounds them to the compute dtype, so
    that training goes on from exactly what it computes with. It holds for every function of `zeropp.checkpoint` that
    loads into a managed model, in each stage."""

    pipeline_loading_checkpoint: bool = False
    """Ranks of a node read a checkpoint one after the other. What a rank needs for reading alone (at most 256 MB that
    wait to be converted, tensors that others are made of, buffers) is there once a node at a time then; its own
    weights and states, and so what is left afterwards, are the same. Loading takes longer."""

    ignore_unused_parameters: bool = True
    """Leaves a parameter that got no gradient on any rank as it is, like plain PyTorch. False makes the
    step raise and name such parameters."""

    zero_hpz_partition_size: Count = 1
    """Ranks, usually those of a node, among which a second copy of the weights is spread, so that weights cross
    nodes only once an optimizer step (hpZ); for stage 3. It, the ranks of a node and the number of ranks divide each
    other. 0 and 1, and as many ranks as the first copy has or a multiple, mean no second copy."""

    zero_quantized_weights: bool = False
    """Sends weights as 8-bit blocks when they are gathered (qwZ)."""

    zero_quantized_nontrainable_weights: bool = False
    """Keeps frozen weights as 8-bit blocks and gathers them as such."""

    zero_quantized_gradients: bool = False
    """Sends gradients as 8-bit blocks inside a node and 4-bit blocks between nodes (qgZ)."""

    zeropp_loco_param: LocoConfig | None = None
    """Error feedback of quantized gradients; `null` is none."""

    mics_shard_size: ShardSize = -1
    """Ranks among which a replica of the model is partitioned; the world holds several replicas, which are
    synchronised once an optimizer step (MiCS); for stage 3. It, the ranks of a node and the number of ranks divide each
    other. -1 and 0 partition over all ranks."""

    mics_hierarchical_params_gather: bool = False
    """Gathers between nodes first and inside the node second where a MiCS replica spans nodes, which sends each
    weight to a node once. False gathers over the whole replica in one step."""

    log_trace_cache_warnings: bool = False
    """Logs a warning when a known order of units is given up because a pass ran differently, and is learned
    anew."""

    override_module_apply: bool = True
    """Inside `zero.Init`, `Module.apply` fetches the parameters of each module together before the function gets it.
    False fetches each one when the function touches it, and none that it does not."""

    leaf_module: LeafModuleConfig = LeafModuleConfig()
    """Modules whose parameters are always fetched together."""

    @classmethod
    def upgrade(cls, given: dict[str, object]) -> dict[str, object]:
        """Rewrites deprecated keys, one warning each."""
        return upgrade_zero(given)

    @field_validator("offload_param")
    @classmethod
    def _keep_weights_below_stage_3(cls, value: OffloadParamConfig | None, info: ValidationInfo) -> object:
        # Ranks have whole weights there, which are used all the time. Fields above have been validated; one that is
        # wrong is not there.
        if value is None or info.data.get("stage", 3) == 3:
            return value
        return value.model_copy(update={"device": "none"})

    @field_validator("sub_group_size")
    @classmethod
    def _default_for_zero(cls, value: int) -> int:
        # DeepSpeed's smallest sub-group is one parameter, and nothing here is as small as 0 elements.
        return value or 1_000_000_000

    @field_validator("overlap_comm")
    @classmethod
    def _overlap_follows_stage(cls, value: bool | None, info: ValidationInfo) -> bool:
        if value is not None:
            return value
        # Fields are validated in the order of the class, and these stand above. One that is wrong is not there.
        offload = info.data.get("offload_optimizer")
        return info.data.get("stage") == 3 or (offload is not None and offload.device != "none")

    @field_validator(*_GONE)
    @classmethod
    def _refuse_what_is_gone(cls, value: bool, info: ValidationInfo) -> bool:
        # An error when loading already: there is nothing that a later version could add.
        if value:
            raise ValueError(f"true is refused; remove the key: {_GONE[info.field_name or '']}")
        return value
