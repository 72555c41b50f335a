"""Keys that change nothing here, as tables: their names, what values they take, and what they are in DeepSpeed.

Configurations written for DeepSpeed may carry all of them. Those of other features are accepted whatever their value;
the others at their default alone, and `support` says so of each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, JsonValue, create_model

from zeropp.config.base import Block, Count

__all__ = ["CheckpointConfig", "CompileConfig", "OutsideKeys", "ParallelWriteConfig"]

_Row = tuple[str, Any, object, str]  # key, type, default, description


def _block(name: str, text: str, *rows: _Row) -> type[Block]:
    fields: dict[str, Any] = {key: (kind, Field(default=default, description=of)) for key, kind, default, of in rows}
    return create_model(name, __base__=Block, __doc__=text, **fields)


def _upper(value: object) -> object:
    return value.upper() if isinstance(value, str) else value


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

    class CheckpointConfig(Block): ...

    class CompileConfig(Block): ...

    class ParallelWriteConfig(Block): ...
else:
    OutsideKeys = _block(
        "OutsideKeys",
        "Configurations written for DeepSpeed may carry these keys, so they are accepted whatever their value. They "
        "have no effect; one warning names those that are not plainly switched off.",
        # Any JSON: nothing here reads the values, so nothing is checked.
        *((key, JsonValue, None, text) for key, text in _OUTSIDE.items()),
    )

    ParallelWriteConfig = _block(
        "ParallelWriteConfig",
        "How checkpoint files are shared out among writers.",
        ("pipeline_stage", bool, False,
         "Lets the data-parallel ranks of a pipeline stage each write some of its layers."),
    )  # fmt: skip

    CheckpointConfig = _block(
        "CheckpointConfig",
        "Saving and loading of training state.",
        ("tag_validation", Annotated[Literal["IGNORE", "WARN", "FAIL"], BeforeValidator(_upper)], "WARN",
         "What to do when ranks save under different tags; letters may be of either case."),
        ("load_universal", bool, False, "Loads a checkpoint in DeepSpeed's universal format."),
        ("use_node_local_storage", bool, False, "Saves on a disk of each node instead of on one that all nodes share."),
        ("parallel_write", ParallelWriteConfig, ParallelWriteConfig(), "Who writes which file."),
        ("writer", dict[str, JsonValue] | None, None,
         "Settings of a buffered or background writer; `null` writes directly."),
        ("checkpoint_serialization", bool, True,
         "Serializes tensors with torch's own format; false leaves the format to the writer."),
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
