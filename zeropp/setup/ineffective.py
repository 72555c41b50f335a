"""Warnings about settings without an effect on this model and these ranks, found when the model is wrapped.

The configuration alone does not show these, because they depend on the parameters and on the number of ranks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from zeropp.comm.hops import Comm
from zeropp.comm.process_groups import Members
from zeropp.config import Config
from zeropp.config.base import notify_once, warn_user
from zeropp.params.coded_buffer import CodedBuffer
from zeropp.params.flat_buffer import FlatBuffer
from zeropp.params.unit import Unit

__all__ = ["warn_if_alone", "warn_of_ineffective"]


def warn_of_ineffective(config: Config, units: Sequence[Unit], comm: Comm) -> None:
    """Warn on rank 0 about each setting that has no effect, once per setting.

    Args:
        config: configuration.
        units: units of the model, with their flat buffers.
        comm: process groups of the run.
    """
    buffers = [buffer for unit in units for buffer in unit.buffers]
    texts = list(_ineffective_offload(config, buffers))
    # A single rank sends nothing, so warnings about communication would be noise there.
    if comm.world > 1:
        texts += _ineffective_groups(config, comm)
        texts += _ineffective_gradients(config, buffers)
        texts += _ineffective_weights(config, buffers, comm)
    for text in texts:
        notify_once(text, first=comm.rank == 0)


def warn_if_alone(members: Members) -> None:
    """Warn if a launcher started several ranks but this process has no process group, so ranks train separately."""
    launched = os.environ.get("WORLD_SIZE", "1")
    if members.backend == "none" and launched not in ("", "0", "1"):
        warn_user(
            f"WORLD_SIZE is {launched} and there is no process group, so this rank trains a model of its own; call "
            "zeropp.init_distributed() before the optimizer is wrapped"
        )


def _ineffective_offload(config: Config, buffers: Sequence[FlatBuffer]) -> Iterator[str]:
    block = config.zero.offload_param
    if config.aio.use_gds and (block is None or block.device != "nvme"):
        yield 'aio.use_gds has no effect: it reads weights from NVMe; set offload_param.device to "nvme"'
    if block is None or config.steps_on_host:
        return
    # On a CPU device, weights are in host memory in any case, so "cpu" needs no warning.
    if any(buffer.trainable and not buffer.tiers.weights.serves(buffer.device) for buffer in buffers):
        yield (
            f'offload_param.device "{block.device}" has no effect on weights that are trained: they are stepped on the '
            "device, and gathers begin with them there; set offload_optimizer.device, too"
        )


def _ineffective_groups(config: Config, comm: Comm) -> Iterator[str]:
    zero = config.zero
    own = config.zeropp
    world = comm.world
    # A MiCS group of all ranks equals plain stage 3.
    in_groups = zero.stage == 3 and 0 < zero.mics_shard_size < world
    sharded = zero.mics_shard_size if in_groups else world
    if zero.stage == 3 and zero.mics_shard_size >= world:
        yield f"mics_shard_size {zero.mics_shard_size} has no effect: stage 3 shards over these {world} ranks anyway"
    if zero.mics_hierarchical_params_gather and not (in_groups and sharded > comm.local):
        yield (
            "mics_hierarchical_params_gather has no effect: it is for a mics_shard_size of more than the "
            f"{comm.local} ranks of a node and less than all {world}"
        )
    # A second copy at the level of the shards would save no hop.
    if zero.stage == 3 and zero.zero_hpz_partition_size >= max(sharded, 2):
        also = ', nor has zeropp.secondary "codes"' if own.secondary == "codes" else ""
        remedy = "it takes several nodes" if world <= comm.local else "set it to the ranks of a node"
        yield (
            f"zero_hpz_partition_size {zero.zero_hpz_partition_size} has no effect{also}: weights are spread over "
            f"{sharded} ranks, and a second copy over as many ranks would save nothing; {remedy}"
        )
    if own.defer_cross_reduction and (sharded <= comm.local or zero.stage < 2):
        later = "gradients of several micro-batches are summed before they cross nodes anyway"
        why = f"all {world} ranks are on one node" if world <= comm.local else later
        yield f"zeropp.defer_cross_reduction has no effect: {why}"


def _ineffective_gradients(config: Config, buffers: Sequence[FlatBuffer]) -> Iterator[str]:
    zero, own = config.zero, config.zeropp
    # Look at the hops that were created, because the codec of a hop depends on the number of hops.
    paths = [buffer.gradient.paths.straight.hops for buffer in buffers if buffer.gradient is not None]
    hops = [hop for path in paths for hop in path]
    if own.reduce_scatter == "backend" and hops and not any(hop.by_backend for hop in hops):
        yield 'zeropp.reduce_scatter "backend" has no effect: gradients are quantized, and backends cannot sum codes'
    if zero.zero_quantized_gradients and hops:
        one_hop = all(len(path) == 1 for path in paths)
        named = sorted({f"{hop.codec.name} over {hop.size} ranks" for hop in hops})
        if own.hadamard and not any(hop.codec.rotate for hop in hops):
            yield f"zeropp.hadamard has no effect: gradients travel as {', '.join(named)}; set gradient_bits below 16"
        if zero.zeropp_loco_param is not None and all(hop.feedback is None for hop in hops):
            yield (
                f"zeropp_loco_param has no effect: gradients travel as {', '.join(named)}, and feedback is "
                f'"{own.feedback}"; set gradient_bits below 16 on the hops that need feedback'
            )
        # A single hop uses the inter-node settings, so "cross" already gives it error feedback.
        elif zero.zeropp_loco_param is not None and own.feedback == "both" and one_hop:
            yield f'zeropp.feedback "both" has no effect beyond that of "cross": gradients take one hop, {named[0]}'
        bits = own.gradient_bits
        if one_hop and bits is not None and "local" in bits.model_fields_set and bits.local != bits.cross:
            yield f"zeropp.gradient_bits.local has no effect: gradients take one hop, {named[0]}"


def _ineffective_weights(config: Config, buffers: Sequence[FlatBuffer], comm: Comm) -> Iterator[str]:
    zero, own = config.zero, config.zeropp
    coded = zero.zero_quantized_nontrainable_weights and zero.stage > 0
    if coded and not any(isinstance(buffer, CodedBuffer) for buffer in buffers):
        yield (
            "zero_quantized_nontrainable_weights has no effect: the model has no frozen parameters; call "
            "requires_grad_(False) on them before wrapping"
        )
    shards = zero.mics_shard_size if zero.mics_shard_size > 0 else comm.world
    # _ineffective_groups has warned about larger sizes.
    wanted = zero.stage == 3 and 1 < zero.zero_hpz_partition_size < min(shards, comm.world)
    if wanted and all(buffer.paths.fetch is None or buffer.paths.refresh is None for buffer in buffers):
        also = ', nor has zeropp.secondary "codes"' if own.secondary == "codes" else ""
        yield (
            f"zero_hpz_partition_size {zero.zero_hpz_partition_size} has no effect{also}: all parameters are so small "
            "that they stay whole; lower stage3_param_persistence_threshold to partition them"
        )
