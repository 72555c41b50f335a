"""The `zero_optimization` block."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, ClassVar

from annotated_types import Ge, Le
from pydantic import AliasChoices, Field, JsonValue, ValidationInfo, field_validator, model_validator

from zeropp.config.base import Block, Count, Integer, alias
from zeropp.config.deprecated import REPLACEMENTS, upgrade_zero
from zeropp.config.leaf import LeafModuleConfig
from zeropp.config.loco import LocoConfig
from zeropp.config.offload import OffloadOptimizerConfig, OffloadParamConfig

Stage = Annotated[Integer, Ge(0), Le(3)]
# DeepSpeed writes -1 for no MiCS.
ShardSize = Annotated[Integer, Ge(-1)]


def stage3(name: str) -> AliasChoices:
    """Keys of a stage 3 setting: DeepSpeed's prefixed form, and the plain name."""
    # The documented one first, which is what files have.
    return alias(f"stage3_{name}", name)


class ZeroConfig(Block):
    """What is partitioned over ranks, when it is fetched, and how it travels."""

    retired: ClassVar[Mapping[str, str]] = REPLACEMENTS

    # DeepSpeed's default for a file that does not say. Without any file load_config sets 3.
    stage: Stage = 0
    """What the ranks share out: 0 nothing, 1 optimizer states, 2 also gradients, 3 also weights. Without a
    configuration the stage is 3. In stages 0 and 1 gradients of several micro-batches are summed on each rank before
    they travel, if `gradient_accumulation_steps` says how many there are; in stage 2 each micro-batch's travel."""

    contiguous_gradients: bool = True
    """Asks for gradients in one buffer, against fragmentation. Nothing is left to do: a unit's gradients
    are packed into one message anyway."""

    reduce_scatter: bool = True
    """Asks for gradients to be reduced to their owners only, not to everyone. Nothing is left to do: a
    reduce hop is always an all-to-all and one fp32 sum, and leaves each rank with its own piece."""

    reduce_bucket_size: Count = 500_000_000
    """Elements collected before gradients are reduced. Nothing is left to do: the unit, whose size
    `zeropp.unit_numel` steers, is what is reduced at a time."""

    use_multi_rank_bucket_allreduce: bool = True
    """Asks to reduce for several owners in one call. Nothing is left to do: one all-to-all serves all
    owners."""

    allgather_partitions: bool = True
    """Asks for an all-gather instead of broadcasts when weights are collected. Nothing is left to do:
    weights are always all-gathered."""

    allgather_bucket_size: Count = 500_000_000
    """Elements of updated weights gathered at a time after a step in stages 1 and 2. Nothing is left to do:
    weights are gathered unit by unit."""

    # Absent and null mean the same, so the default goes through the validator, too.
    overlap_comm: bool | None = Field(default=None, validate_default=True)
    """Runs gathers and reductions beside the computation, on a GPU on streams of their own, on CPU on threads. False
    runs each of them in its turn, which gives the same bits more slowly (close ones where gradients are quantized and
    ranks go different ways through the model: what they send in two parts then depends on timing). `null` means true
    in stage 3 and false below."""

    load_from_fp32_weights: bool = True
    """Restores fp32 main weights from a checkpoint rather than widening its 16-bit weights."""

    elastic_checkpoint: bool = False
    """An old checkpoint format for a changing world size. True is an error: checkpoints hold true shapes
    and load at any world size."""

    offload_param: OffloadParamConfig | None = None
    """Where weight shards are kept; `null` is on the device."""

    offload_optimizer: OffloadOptimizerConfig | None = None
    """Where optimizer states are kept and stepped; `null` is on the device."""

    zenflow: dict[str, JsonValue] | None = None
    """Stepping part of the states on the host while the next micro-batches run (ZenFlow)."""

    sub_group_size: Count = 1_000_000_000
    """Elements of a rank's shard that are stepped, and swapped when offloaded, at a time. Nothing is left
    to do without offload: states are on the device and stepping them in pieces would give the same bits."""

    prefetch_bucket_size: Count = Field(default=50_000_000, validation_alias=stage3("prefetch_bucket_size"))
    """Elements of coming units that may be gathered ahead of their use. 0 turns prefetching off."""

    param_persistence_threshold: Count = Field(default=100_000, validation_alias=stage3("param_persistence_threshold"))
    """Elements up to which a parameter is persistent: its full weights stay gathered between uses and are
    refreshed after each step. Its optimizer states are partitioned all the same."""

    # sys.maxsize stands for no bound, as in DeepSpeed.
    model_persistence_threshold: Count = Field(
        default=sys.maxsize, validation_alias=stage3("model_persistence_threshold")
    )
    """Elements that all persistent parameters may have together, counted in the order of the model."""

    max_live_parameters: Count = Field(default=1_000_000_000, validation_alias=stage3("max_live_parameters"))
    """Elements that may be gathered at once on a rank. Prefetching stops and reuse gives way before the
    bound is passed; what the modules now running need comes on top."""

    max_reuse_distance: Count = Field(default=1_000_000_000, validation_alias=stage3("max_reuse_distance"))
    """A unit stays gathered after its use if its next use comes within this many elements of uses, that one
    included; where the next use is further, units behind it are not fetched ahead of it."""

    gather_16bit_weights_on_model_save: bool = Field(
        default=False,
        validation_alias=stage3("gather_16bit_weights_on_model_save"),
    )
    """Asks to collect whole weights in the compute type for saving. Nothing is left to do: `model.state_dict()`,
    called on every rank, gives whole weights anyway."""

    module_granularity_threshold: Integer = Field(default=0, validation_alias=stage3("module_granularity_threshold"))
    """A module with at most this many elements of parameters for each module in its tree is a leaf module:
    many tiny modules are then one unit. 0 and below make none."""

    use_all_reduce_for_fetch_params: bool = Field(
        default=False, validation_alias=stage3("use_all_reduce_for_fetch_params")
    )
    """Asks to fetch by an all-reduce of zero-filled buffers, which saves a copy at twice the bytes. Nothing
    is left to do: a gather writes to its final place and has no copy to save."""

    allgather_sequential: bool = Field(default=False, validation_alias=stage3("allgather_sequential"))
    """Asks for one gather per parameter, to save the buffer that several share. Nothing is left to do: that
    buffer is the parameters' own storage."""

    ignore_unused_parameters: bool = True
    """Leaves a parameter that got no gradient on any rank as it is, like plain PyTorch. False makes the
    step raise and name such parameters."""

    legacy_stage1: bool = False
    """An old implementation of stage 1. True is an error."""

    compute_grad_norm: bool = True
    """Asks for the norm of gradients where clipping does not. Nothing is left to do: the vector by which ranks agree on
    a step carries it anyway."""

    parameter_alignment: Count | None = None
    """Elements to a multiple of which parameters are padded in a buffer. Nothing is left to do: each begins on a block
    of 256."""

    round_robin_gradients: bool = False
    """Asks to deal gradients out to ranks in turn, so that all ranks copy at once. Nothing is left to do:
    each rank owns a piece of every unit."""

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

    memory_efficient_linear: bool = True
    """Asks that linear layers keep no gathered weights alive until backward. Nothing is left to do: what
    autograd saves is a view of the unit's buffer, which is emptied whoever holds views of it."""

    pipeline_loading_checkpoint: bool = False
    """Lets ranks load a checkpoint one after the other, for less host memory at once."""

    override_module_apply: bool = True
    """Gathers parameters around the functions that `Module.apply` runs under `zero.Init`."""

    log_trace_cache_warnings: bool = False
    """Logs a warning when a known order of units is given up because a pass ran differently, and is learned
    anew."""

    enable_sanity_checks: bool = False
    """Asks for checks that ranks agree on what they communicate. Nothing is left to do: these checks always
    run, on a hash that travels with the reduction before each step."""

    save_muon_momentum_buffer_in_memory: bool = False
    """Keeps the momentum of the Muon optimizer in memory while its other states are swapped."""

    leaf_module: LeafModuleConfig = LeafModuleConfig()
    """Modules whose parameters are always fetched together."""

    @classmethod
    def upgrade(cls, given: dict[str, object]) -> dict[str, object]:
        """Rewrites deprecated keys, one warning each."""
        return upgrade_zero(given)

    @field_validator("overlap_comm")
    @classmethod
    def _overlap_follows_stage(cls, value: bool | None, info: ValidationInfo) -> bool:
        # Fields are validated in the order of the class, and the stage stands above. One that is wrong is not there.
        return info.data.get("stage") == 3 if value is None else value

    @field_validator("elastic_checkpoint")
    @classmethod
    def _no_elastic_checkpoint(cls, value: bool) -> bool:
        # An error when loading already: there is nothing that a later version could add.
        if value:
            raise ValueError("true is refused; remove the key: checkpoints load at any world size without it")
        return value

    @field_validator("legacy_stage1")
    @classmethod
    def _no_legacy_stage1(cls, value: bool) -> bool:
        if value:
            raise ValueError("true is refused; remove the key: each stage has one implementation")
        return value

    @model_validator(mode="after")
    def _ratio_needs_stage_3(self) -> ZeroConfig:
        offload = self.offload_optimizer
        # Checked here, since a block does not see the stage beside it.
        if offload is not None and offload.ratio < 1 and self.stage != 3:
            raise ValueError(
                f"offload_optimizer.ratio {offload.ratio:g} needs stage 3, got stage {self.stage}; "
                "set stage 3 or leave ratio at 1"
            )
        return self
