"""Top-level keys of DeepSpeed features that are not part of ZeRO: accepted, without effect."""

from __future__ import annotations

from pydantic import JsonValue

from zeropp.config.base import Block


class OutsideKeys(Block):
    """Configurations written for DeepSpeed may carry these keys, so they are accepted whatever their value.
    They have no effect; one warning names those that are not plainly switched off."""

    # Any JSON for all of them: nothing here reads the values, so nothing is checked.
    amp: JsonValue = None
    """Mixed precision through Apex."""

    autotuning: JsonValue = None
    """Search for a fast configuration by trial runs."""

    comet: JsonValue = None
    """Reports to Comet."""

    comms_logger: JsonValue = None
    """Log of collective calls."""

    compression_training: JsonValue = None
    """Quantization and pruning while training."""

    csv_monitor: JsonValue = None
    """Reports to CSV files."""

    curriculum_learning: JsonValue = None
    """Growing difficulty of training data, in its older form."""

    data_efficiency: JsonValue = None
    """Sampling and routing of training data."""

    eigenvalue: JsonValue = None
    """Estimates of curvature for compression schedules."""

    elasticity: JsonValue = None
    """Batch sizes that suit a changing number of devices."""

    expert_parallel: JsonValue = None
    """Experts spread over ranks."""

    flops_profiler: JsonValue = None
    """Count and timing of operations, module by module."""

    graph_harvesting: JsonValue = None
    """Capture of short kernel sequences as CUDA graphs."""

    hybrid_engine: JsonValue = None
    """Alternation of training and generation with one model."""

    nebula: JsonValue = None
    """Checkpoints through Azure's Nebula service."""

    pipeline: JsonValue = None
    """Layers dealt out to ranks as the stages of a pipeline."""

    progressive_layer_drop: JsonValue = None
    """Skipping of layers with growing probability."""

    quantize_training: JsonValue = None
    """Quantization-aware training in its older form."""

    sparse_attention: JsonValue = None
    """Block-sparse attention kernels."""

    tensor_parallel: JsonValue = None
    """Layers split over ranks."""

    tensorboard: JsonValue = None
    """Reports to TensorBoard."""

    timers: JsonValue = None
    """Timers of throughput and of the phases of a step."""

    use_data_before_expert_parallelism: JsonValue = None
    """Order of ranks between data and expert parallelism."""

    vocabulary_size: JsonValue = None
    """Size of the vocabulary, for a check on its alignment."""

    wandb: JsonValue = None
    """Reports to Weights & Biases."""

    weight_quantization: JsonValue = None
    """Quantized weights for inference."""

    zenflow: JsonValue = None
    """ZenFlow set beside, not inside, the zero block."""
