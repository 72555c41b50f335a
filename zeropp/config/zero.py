"""The `zero_optimization` block."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, ClassVar

from annotated_types import Ge, Le
from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from zeropp.config.base import Bound, Count, Integer, alias, bound
from zeropp.config.deprecated import REPLACEMENTS, upgrade_zero
from zeropp.config.inert import LaterZero, NeedlessZero
from zeropp.config.leaf import LeafModuleConfig
from zeropp.config.loco import LocoConfig
from zeropp.config.offload import OffloadOptimizerConfig, OffloadParamConfig

Stage = Annotated[Integer, Ge(0), Le(3)]
# DeepSpeed writes -1 for no MiCS.
ShardSize = Annotated[Integer, Ge(-1)]


_GONE = {
    "legacy_stage1": "each stage has one implementation",
}


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
