"""Keys that change nothing here, as tables: their names, what values they take, and what they are in DeepSpeed.

Configurations written for DeepSpeed may carry all of them. What belongs to other features, leaves nothing to do or is
read by nothing is accepted whatever its value; the rest at its default alone. `supported` says so of each.
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

_Row = tuple[Any, ...]  # key, type, default, description, spellings where there are several

# accelerate writes infinity for never; nan is no number that Ge lets through
Steps = Annotated[float, AllowInfNan(True), BeforeValidator(number), Ge(0)]


class _Described(Block):
    """A block whose fields say what they are without docstrings, for which pydantic would search a second."""

    model_config = ConfigDict(use_attribute_docstrings=False)


def _block(name: str, text: str, *rows: _Row) -> type[Block]:
    fields: dict[str, Any] = {
        key: (kind, Field(default=default, description=description, validation_alias=keys[0] if keys else None))
        for key, kind, default, description, *keys in rows
    }
    made = create_model(name, __base__=_Described, __doc__=text, **fields)
    made.model_config = Block.model_config  # of classes that are derived from it, whose own fields have docstrings
    return made


_OUTSIDE = {
    "amp": "Mixed precision through Apex.",
    "autotuning": "Search for a fast configuration by trial runs.",
    "comet": "Reports to Comet.",
    "comms_logger": "Log of collective calls.",
    "compression_training": "Quantization and pruning while training.",
    "csv_monitor": "Reports to CSV files.",
    "curriculum_learning": "Growing difficulty of training data, in its older form.",
    "data_efficiency": "Sampling and routing of training data.",
    "eigenvalue": "Estimates of curvature for compression schedules.",
    "elasticity": "Batch sizes that suit a changing number of devices.",
    "expert_parallel": "Experts spread over ranks.",
    "flops_profiler": "Count and timing of operations, module by module.",
    "graph_harvesting": "Capture of short kernel sequences as CUDA graphs.",
    "hybrid_engine": "Alternation of training and generation with one model.",
    "nebula": "Checkpoints through Azure's Nebula service.",
    "pipeline": "Layers dealt out to ranks as the stages of a pipeline.",
    "progressive_layer_drop": "Skipping of layers with growing probability.",
    "quantize_training": "Quantization-aware training in its older form.",
    "sparse_attention": "Block-sparse attention kernels.",
    "tensor_parallel": "Layers split over ranks.",
    "tensorboard": "Reports to TensorBoard.",
    "timers": "Timers of throughput and of the phases of a step.",
    "use_data_before_expert_parallelism": "Order of ranks between data and expert parallelism.",
    "vocabulary_size": "Size of the vocabulary, for a check on its alignment.",
    "wandb": "Reports to Weights & Biases.",
    "weight_quantization": "Quantized weights for inference.",
    "zenflow": "ZenFlow set beside, not inside, the zero block.",
}

if TYPE_CHECKING:
    # Nobody reads a field of theirs by its name, which is all that a checker could be told.
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
        "Configurations written for DeepSpeed may carry these keys. What only reports or measures has no effect, and "
        "one warning names those that are not plainly switched off; what would change the training is refused where it "
        "is switched on.",
        # Any JSON: nothing here reads the values, so nothing is checked.
        *((key, JsonValue, None, text) for key, text in _OUTSIDE.items()),
    )

    NeedlessZero = _block(
        "NeedlessZero",
        "Keys of the zero block that leave nothing to do, each for a reason of its own.",
        ("contiguous_gradients", bool, True,
         "Asks for gradients in one buffer, against fragmentation. Nothing is left to do: a unit's gradients are "
         "packed into one message anyway."),
        ("reduce_scatter", bool, True,
         "Asks for gradients to be reduced to their owners only, not to everyone. Nothing is left to do: a reduce "
         "hop always leaves each rank with its own piece. Who adds up is `zeropp.reduce_scatter`."),
        ("reduce_bucket_size", Bound, 500_000_000,
         "Elements collected before gradients are reduced. Nothing is left to do: the unit, whose size "
         "`zeropp.unit_numel` steers, is what is reduced at a time."),
        ("use_multi_rank_bucket_allreduce", bool, True,
         "Asks to reduce for several owners in one call. Nothing is left to do: one collective serves all owners."),
        ("allgather_partitions", bool, True,
         "Asks for an all-gather instead of broadcasts when weights are collected. Nothing is left to do: weights "
         "are always all-gathered."),
        ("allgather_bucket_size", Bound, 500_000_000,
         "Elements of updated weights gathered at a time after a step in stages 1 and 2. Nothing is left to do: "
         "weights are gathered unit by unit."),
        ("allgather_sequential", bool, False,
         "Asks for one gather per parameter, to save the buffer that several share. Nothing is left to do: that "
         "buffer is the parameters' own storage.", alias("stage3_allgather_sequential", "allgather_sequential")),
        ("use_all_reduce_for_fetch_params", bool, False,
         "Asks to fetch by an all-reduce of zero-filled buffers, which saves a copy at twice the bytes. Nothing is "
         "left to do: a gather writes to its final place and has no copy to save.",
         alias("stage3_use_all_reduce_for_fetch_params", "use_all_reduce_for_fetch_params")),
        ("round_robin_gradients", bool, False,
         "Asks to deal gradients out to ranks in turn, so that all ranks copy at once. Nothing is left to do: each "
         "rank owns a piece of every unit."),
        ("memory_efficient_linear", bool, True,
         "Asks that linear layers keep no gathered weights alive until backward. Nothing is left to do: what "
         "autograd saves is a view of the unit's buffer, which is emptied whoever holds views of it."),
        ("enable_sanity_checks", bool, False,
         "Asks for checks that ranks agree on what they communicate. Nothing is left to do: these checks always "
         "run, on a hash that travels with the reduction before each step."),
        ("compute_grad_norm", bool, True,
         "Asks for the norm of gradients where clipping does not. Nothing is left to do: the vector by which ranks "
         "agree on a step carries it anyway."),
        ("parameter_alignment", bool, False,
         "Asks that each parameter begins at a multiple of 16 bytes in a flat buffer, by padding between them. Nothing "
         "is left to do: each begins on a block of 256 elements, which is such a place in any dtype."),
        ("elastic_checkpoint", bool, False,
         "Asks for checkpoints that load at another world size. Nothing is left to do: they hold true shapes, and load "
         "at any."),
    )  # fmt: skip

    LaterZero = _block(
        "LaterZero",
        "Keys of the zero block for what this version does not have.",
        ("zenflow", dict[str, JsonValue] | None, None,
         "Stepping part of the states on the host while the next micro-batches run (ZenFlow)."),
        ("save_muon_momentum_buffer_in_memory", bool, False,
         "Keeps the momentum of the Muon optimizer in memory while its other states are swapped."),
        ("legacy_stage1", bool, False, "An old implementation of stage 1. True is an error."),
    )  # fmt: skip

    NeedlessTop = _block(
        "NeedlessTop",
        "Keys at the top level that leave nothing to do, each for a reason of its own.",
        ("zero_allow_untested_optimizer", bool, False,
         "Asks to accept optimizers that DeepSpeed's list does not have. Nothing is left to do: there is no list, "
         "and an optimizer that cannot step shards is refused by name whatever this says."),
        ("zero_force_ds_cpu_optimizer", bool, True,
         "Asks to insist on DeepSpeed's own optimizer when states are offloaded. Nothing is left to do: the "
         "optimizer that is passed in is the one that steps."),
        ("disable_allgather", bool, False, "A key that DeepSpeed reads and never uses. Nothing is left to do."),
        ("prescale_gradients", bool, False,
         "Asks to divide gradients by the number of ranks before they are reduced, against overflow. Nothing is left "
         "to do: sums are in fp32, and those that go on in fp16 are made smaller by a power of two on the way."),
        ("gradient_predivide_factor", PositiveReal, 1.0,
         "Asks for a part of that division, a factor, before the reduction. Nothing is left to do, likewise."),
    )  # fmt: skip

    UnreadTop = _block(
        "UnreadTop",
        "Keys at the top level that nothing reads.",
        ("steps_per_print", Steps | None, None,
         "Optimizer steps between two progress messages; a number or infinity, which is never, like `null`."),
        ("wall_clock_breakdown", bool, False, "Times forward, backward and step."),
        ("memory_breakdown", bool, False, "Reports memory use."),
        ("dump_state", bool, False, "Prints the configuration and the engine's state at the start."),
        ("log_level", str | None, None, "Level of the library's log messages."),
        ("disable_python_gc", bool, False, "Collects Python's garbage at chosen times alone."),
    )  # fmt: skip

    LaterTop = _block(
        "LaterTop",
        "Keys at the top level for what this version does not have.",
        ("sequence_parallel_size", Positive, 1, "Ranks that share one sequence. They count once in the batch sizes."),
        ("seq_parallel_communication_data_type", Dtype, "fp32",
         "Type in which gradients travel with sequence parallelism.",
         alias("seq_parallel_communication_data_type", "seq_parallel_comm_data_type")),
        ("sparse_gradients", bool, False, "Reduces the gradients of embeddings as lists of rows."),
    )  # fmt: skip

    CompileConfig = _block(
        "CompileConfig",
        "Passes over compiled graphs that insert communication (DeepCompile).",
        ("deepcompile", bool, False, "Replaces hooks by operations inside the compiled graph."),
        ("free_activation", bool, False, "Frees large activations as soon as their last use in the graph is over."),
        ("free_activation_threshold", Count, 10_485_760, "Bytes from which an activation counts as large."),
        ("offload_activation", bool, False, "Moves kept activations to host memory between forward and backward."),
        ("offload_opt_states", bool, False, "Moves optimizer states to host memory outside the optimizer step."),
        ("double_buffer", bool, True, "Gathers into one of two buffers while the other is in use."),
        ("symmetric_memory", bool, False, "Communicates through memory that peers address directly."),
        ("debug_log", bool, False, "Writes the graphs to files."),
        ("offload_parameters", bool, False, "Moves weight shards to host memory."),
        ("sync_before_reduce", bool, False, "Waits for the device before each gradient reduction."),
        ("sync_after_reduce", bool, False, "Waits for the device after each gradient reduction."),
        ("sync_before_allgather", bool, False, "Waits for the device before each weight gather."),
        ("sync_after_allgather", bool, False, "Waits for the device after each weight gather."),
        ("keep_int_input_tensors", bool, True,
         "Keeps the values of integer inputs for recompilation instead of stand-ins."),
        ("keep_all_input_tensors", bool, False,
         "Keeps the values of all inputs for recompilation instead of stand-ins."),
        ("passes", tuple[str, ...] | None, None, "Names of the passes to run; `null` follows the stage."),
    )  # fmt: skip
