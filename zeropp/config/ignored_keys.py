"""DeepSpeed keys that have no effect in zeropp, as tables of names, types, defaults and descriptions.

Configurations written for DeepSpeed may contain all of them. zeropp accepts keys of other features, keys that need no
action and keys that it does not read at any value, or at least when they are switched off. The keys in the `Later...`
classes are accepted at their defaults only. `supported` stores the status of each key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge
from pydantic import AllowInfNan, BeforeValidator, ConfigDict, Field, JsonValue, create_model

from zeropp.config.base import Block, Bound, Count, Positive, PositiveReal, alias, number
from zeropp.config.blocks import Dtype

__all__ = [
    "CompileConfig",
    "LaterTop",
    "LaterZero",
    "NeedlessTop",
    "NeedlessZero",
    "OutsideKeys",
    "UnreadTop",
]

_Row = tuple[Any, ...]  # key, type, default, description, and an optional alias with all accepted keys

# Accept infinity, because Accelerate writes it for "never". Ge(0) rejects NaN.
Steps = Annotated[float, AllowInfNan(True), BeforeValidator(number), Ge(0)]


class _Described(Block):
    """Base class of blocks whose fields have explicit descriptions.

    Pydantic would search the source code for attribute docstrings. That is slow, and these classes have none.
    """

    model_config = ConfigDict(use_attribute_docstrings=False)


def _block(name: str, text: str, *rows: _Row) -> type[Block]:
    fields: dict[str, Any] = {
        key: (kind, Field(default=default, description=description, validation_alias=keys[0] if keys else None))
        for key, kind, default, description, *keys in rows
    }
    made = create_model(name, __base__=_Described, __doc__=text, **fields)
    # Classes that derive from this one have fields with docstrings, so enable the search for them again.
    made.model_config = Block.model_config
    return made


_OUTSIDE = {
    "amp": "Mixed precision with Apex.",
    "autotuning": "Search for a fast configuration by trial runs.",
    "comet": "Reports to Comet.",
    "comms_logger": "A log of collective calls.",
    "compression_training": "Quantization and pruning while training.",
    "csv_monitor": "Reports to CSV files.",
    "curriculum_learning": "Training data of increasing difficulty, in DeepSpeed's older format.",
    "data_efficiency": "Sampling and routing of training data.",
    "eigenvalue": "Estimates of curvature for compression schedules.",
    "elasticity": "Batch sizes that suit a changing number of devices.",
    "expert_parallel": "Expert parallelism: experts distributed over ranks.",
    "flops_profiler": "Number and time of floating-point operations for each module.",
    "graph_harvesting": "Capture of short kernel sequences as CUDA graphs.",
    "hybrid_engine": "Alternating training and generation with one model.",
    "nebula": "Checkpoints with Azure's Nebula service.",
    "pipeline": "Pipeline parallelism: layers distributed over ranks.",
    "progressive_layer_drop": "Skipping of layers with increasing probability.",
    "quantize_training": "Quantization-aware training, in DeepSpeed's older format.",
    "sparse_attention": "Block-sparse attention kernels.",
    "tensor_parallel": "Tensor parallelism: each layer split over ranks.",
    "tensorboard": "Reports to TensorBoard.",
    "timers": "Timers of throughput and of the phases of a step.",
    "use_data_before_expert_parallelism": "Order of ranks in data and expert parallelism.",
    "vocabulary_size": "Size of the vocabulary, for a check of its alignment.",
    "wandb": "Reports to Weights & Biases.",
    "weight_quantization": "Quantized weights for inference.",
    "zenflow": "ZenFlow at the top level instead of in `zero_optimization`.",
}

if TYPE_CHECKING:
    # The classes are built at run time, which type checkers cannot follow. No code reads their fields by name, so
    # empty classes are enough for type checkers.
    class OutsideKeys(Block): ...

    class NeedlessTop(Block): ...

    class UnreadTop(Block): ...

    class LaterTop(Block): ...

    class NeedlessZero(Block): ...

    class LaterZero(Block): ...

    class CompileConfig(Block): ...

else:
    OutsideKeys = _block(
        "OutsideKeys",
        "Configurations written for DeepSpeed may contain these keys. Keys that only report or measure have no effect; "
        "one warning names those that are switched on. Keys that would change the training raise an error if they are "
        "switched on.",
        # Accept any JSON value, because zeropp does not use the values.
        *((key, JsonValue, None, text) for key, text in _OUTSIDE.items()),
    )

    NeedlessZero = _block(
        "NeedlessZero",
        "Keys of `zero_optimization` that need no action in zeropp. The description of each key gives the reason.",
        ("contiguous_gradients", bool, True,
         "In DeepSpeed, true copies gradients into one buffer to avoid fragmentation. zeropp always packs the "
         "gradients of a unit into one message."),
        ("reduce_scatter", bool, True,
         "In DeepSpeed, true reduces each gradient to the rank that owns it instead of all ranks. zeropp always leaves "
         "each rank with its own shard only. `zeropp.reduce_scatter` selects the method of summing."),
        ("reduce_bucket_size", Bound, 500_000_000,
         "In DeepSpeed, the number of gradient elements collected for one reduction. zeropp reduces the gradients of "
         "one unit at a time; `zeropp.unit_numel` sets the size of units."),
        ("use_multi_rank_bucket_allreduce", bool, True,
         "In DeepSpeed, true reduces gradients of several ranks in one call. zeropp always reduces a unit for all "
         "ranks in one collective."),
        ("allgather_partitions", bool, True,
         "In DeepSpeed, true collects weights with all-gathers and false with broadcasts. zeropp always uses "
         "all-gathers."),
        ("allgather_bucket_size", Bound, 500_000_000,
         "In DeepSpeed, the number of elements of updated weights per all-gather after a step in stages 1 and 2. "
         "zeropp gathers one unit at a time."),
        ("allgather_sequential", bool, False,
         "In DeepSpeed, true gathers parameters one by one to save a shared buffer. zeropp gathers into the memory of "
         "the parameters themselves, so there is no such buffer.",
         alias("stage3_allgather_sequential", "allgather_sequential")),
        ("use_all_reduce_for_fetch_params", bool, False,
         "In DeepSpeed, true gathers weights with an all-reduce of zero-filled buffers, which saves a copy and sends "
         "twice the bytes. zeropp gathers into the memory of the parameters themselves, so there is no copy to save.",
         alias("stage3_use_all_reduce_for_fetch_params", "use_all_reduce_for_fetch_params")),
        ("round_robin_gradients", bool, False,
         "In DeepSpeed, true assigns gradients to ranks in rotation, so that all ranks copy at once. In zeropp each "
         "rank owns a shard of every unit, so the work is already distributed."),
        ("memory_efficient_linear", bool, True,
         "In DeepSpeed, true keeps linear layers from holding gathered weights until backward. In zeropp no layer "
         "does: autograd saves views of the unit's flat buffer, and resharding frees the memory of all views."),
        ("enable_sanity_checks", bool, False,
         "In DeepSpeed, true checks that all ranks issue the same communication. zeropp always checks this, with a "
         "hash in the small collective before each step."),
        ("compute_grad_norm", bool, True,
         "In DeepSpeed, true computes the gradient norm even without clipping. zeropp always computes it, in the small "
         "collective before each step."),
        ("parameter_alignment", bool, False,
         "In DeepSpeed, true aligns each parameter in a flat buffer to 16 bytes. zeropp always starts each "
         "parameter at a multiple of 256 elements, which is a multiple of 16 bytes in every dtype."),
        ("elastic_checkpoint", bool, False,
         "In DeepSpeed, true saves checkpoints that load at another world size. zeropp's checkpoints store whole "
         "shapes and load at any world size."),
    )  # fmt: skip

    LaterZero = _block(
        "LaterZero",
        "Keys of `zero_optimization` for features that this version does not have.",
        ("zenflow", dict[str, JsonValue] | None, None,
         "ZenFlow: the host steps part of the states while the next micro-batches run."),
        ("save_muon_momentum_buffer_in_memory", bool, False,
         "Keeps the momentum of the Muon optimizer in memory while its other states are swapped to files."),
        ("legacy_stage1", bool, False, "DeepSpeed's old implementation of stage 1. True is an error."),
    )  # fmt: skip

    NeedlessTop = _block(
        "NeedlessTop",
        "Keys at the top level that need no action in zeropp. The description of each key gives the reason.",
        ("zero_allow_untested_optimizer", bool, False,
         "In DeepSpeed, true accepts optimizers that are not on its list of tested ones. zeropp has no such list. "
         "It always raises an error for optimizers that cannot step shards."),
        ("zero_force_ds_cpu_optimizer", bool, True,
         "In DeepSpeed, true requires its own optimizer when states are offloaded. zeropp always steps with the "
         "optimizer that you pass in."),
        ("disable_allgather", bool, False, "DeepSpeed reads this key and does not use it. zeropp ignores it."),
        ("prescale_gradients", bool, False,
         "In DeepSpeed, true divides gradients by the number of ranks before they are reduced, to avoid overflow. "
         "zeropp sums in fp32, and scales partial sums that are sent in fp16 down by a power of two."),
        ("gradient_predivide_factor", PositiveReal, 1.0,
         "In DeepSpeed, the factor by which gradients are divided before they are reduced, for `prescale_gradients`. "
         "zeropp avoids overflow as described there."),
    )  # fmt: skip

    UnreadTop = _block(
        "UnreadTop",
        "Keys at the top level that zeropp does not read.",
        ("steps_per_print", Steps | None, None,
         "Number of optimizer steps between two progress messages. Infinity and `null` mean no messages."),
        ("wall_clock_breakdown", bool, False, "Measures the time of forward, backward and step."),
        ("memory_breakdown", bool, False, "Reports memory use."),
        ("dump_state", bool, False, "Prints the configuration and the engine's state at the start."),
        ("log_level", str | None, None, "Level of the library's log messages."),
        ("disable_python_gc", bool, False, "Runs Python's garbage collection only at certain points of a step."),
    )  # fmt: skip

    LaterTop = _block(
        "LaterTop",
        "Keys at the top level for features that this version does not have.",
        ("sequence_parallel_size", Positive, 1,
         "Number of ranks that share one sequence. They count as one rank in the batch sizes."),
        ("seq_parallel_communication_data_type", Dtype, "fp32",
         "Dtype of gradient messages with sequence parallelism.",
         alias("seq_parallel_communication_data_type", "seq_parallel_comm_data_type")),
        ("sparse_gradients", bool, False, "Sends the gradients of embeddings as lists of rows."),
    )  # fmt: skip

    CompileConfig = _block(
        "CompileConfig",
        "DeepCompile: compiler passes that insert communication into compiled graphs.",
        ("deepcompile", bool, False, "Replaces hooks with operations inside the compiled graph."),
        ("free_activation", bool, False, "Frees large activations right after their last use in the graph."),
        ("free_activation_threshold", Count, 10_485_760, "Smallest size of a large activation, in bytes."),
        ("offload_activation", bool, False, "Moves saved activations to host memory between forward and backward."),
        ("offload_opt_states", bool, False, "Moves optimizer states to host memory outside the optimizer step."),
        ("double_buffer", bool, True, "Gathers into one of two buffers while the other is in use."),
        ("symmetric_memory", bool, False, "Communicates through memory that other GPUs access directly."),
        ("debug_log", bool, False, "Writes the graphs to files."),
        ("offload_parameters", bool, False, "Moves weight shards to host memory."),
        ("sync_before_reduce", bool, False, "Waits for the device before each gradient reduction."),
        ("sync_after_reduce", bool, False, "Waits for the device after each gradient reduction."),
        ("sync_before_allgather", bool, False, "Waits for the device before each weight gather."),
        ("sync_after_allgather", bool, False, "Waits for the device after each weight gather."),
        ("keep_int_input_tensors", bool, True,
         "Keeps the values of integer inputs for recompilation instead of placeholders."),
        ("keep_all_input_tensors", bool, False,
         "Keeps the values of all inputs for recompilation instead of placeholders."),
        ("passes", tuple[str, ...] | None, None, "Names of the compiler passes to run. `null` follows the stage."),
    )  # fmt: skip
