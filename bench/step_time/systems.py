"""The systems that ``bench.step_time`` compares, each built from the same seed and run through one interface."""

from __future__ import annotations

import argparse
import contextlib
import gc
import resource
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import zeropp
import zeropp.fsdp2
from bench.common import peak_rate
from bench.common.contestant import ADAMW, LIKE_FSDP2, Contestant, adamw, over_ranks, samples
from bench.step_time.deepspeed_system import build_deepspeed
from bench.step_time.report import AGAIN, CLIP, CLIPPED, clips
from examples.gpt import GPT, GPTConfig
from examples.text_data import Batches

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_FSDP2 = (
    "fsdp2", "fsdp2_clipped", "fsdp2_again", "fsdp2_clipped_again", "hsdp", "fsdp2_hpz", "fsdp2_a2a", "fsdp2_two_hop",
    "fsdp2_pp",
)  # fmt: skip


class AllToAllReduceScatter(ReduceScatter):
    """A reduce-scatter made of an all-to-all and a local sum in fp32.

    gloo's own reduce-scatter sends as much as an all-reduce, twice the necessary bytes. FSDP2 with this class shows how
    much of its difference to zeropp comes from that.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM) or async_op:
            raise ValueError(f"expected a synchronous SUM or AVG, got op={op}, async_op={async_op}")
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        total = received.view(group.size(), -1).sum(dim=0, dtype=torch.float32)  # [ranks, shard] -> [shard]
        if op == dist.ReduceOp.AVG:
            total /= group.size()
        output_tensor.copy_(total)
        return None


class MainWeights(torch.optim.AdamW):
    """Fused AdamW on float32 copies of a model's 16-bit weights, with copies in both directions and nothing else.

    Float32 gradients stay allocated between steps.

    Args:
        model: model; its parameters become bfloat16.
    """

    def __init__(self, model: nn.Module) -> None:
        main = [parameter.detach().clone() for parameter in model.parameters()]
        self.parameters = list(model.bfloat16().parameters())
        for weight in main:
            weight.grad = torch.zeros_like(weight)
        self.gradients = [weight.grad for weight in main]
        super().__init__(main, **ADAMW)

    def backward(self, loss: Tensor) -> None:
        """Run backward of one micro-batch; its gradients overwrite those of the main weights."""
        loss.backward()
        torch._foreach_copy_(self.gradients, [parameter.grad for parameter in self.parameters])
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Step the main weights, and copy them, rounded to bfloat16, to the model's weights."""
        super().step()
        torch._foreach_copy_(self.parameters, self.param_groups[0]["params"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the next backward overwrites gradients."""


class Reversed(Batches):
    """Batches with their rows in reverse order: mathematically equal, but sums have another order."""

    def at(self, step: int, micro: int = 0) -> tuple[Tensor, Tensor]:
        x, y = super().at(step, micro)
        return x.flip(0), y.flip(0)


def build(name: str, args: argparse.Namespace, device: torch.device, batches: Batches) -> Contestant:
    """Create the model from the seed, and build the system called ``name`` around it."""
    torch.manual_seed(args.seed)
    with device:
        model = GPT(GPTConfig(args.vocab, args.layers, args.d_model, args.heads, args.seq_len))
    # Take the samples before the model is wrapped; all systems start from the same weights.
    before = samples(model.parameters())
    if getattr(args, "compiled", False):
        for block in model.blocks:
            block.compile()
    builders = {"ddp": _build_ddp, "zeropp": _build_zeropp, "deepspeed": build_deepspeed, "plain": _build_plain}
    make = next((make for family, make in builders.items() if name.startswith(family)), _build_fsdp2)
    contestant = make(name, model, args, device, Reversed(**vars(batches)) if name.endswith(AGAIN) else batches)
    contestant.before = before
    contestant.rate = peak_rate(args.d_model)
    contestant.clip = CLIP if clips(name) else None
    return contestant


def _build_plain(
    name: str, model: nn.Module, args: argparse.Namespace, device: torch.device, batches: Batches
) -> Contestant:
    """Build full weights without an engine: the least cost of training in this precision."""
    if args.dtype == "fp32":
        return Contestant(name, model, adamw(model), batches, device)
    optimizer = MainWeights(model)
    return Contestant(name, model, optimizer, batches, device, backward=optimizer.backward)


def _build_ddp(
    name: str, model: nn.Module, args: argparse.Namespace, device: torch.device, batches: Batches
) -> Contestant:
    # DDP has no mixed precision of its own. In bf16 it computes under autocast and reduces fp32 gradients.
    precision = contextlib.nullcontext
    if args.dtype == "bf16":
        precision = partial(torch.autocast, device.type, torch.bfloat16)
    wrapped = DistributedDataParallel(model)
    optimizer = adamw(wrapped)
    if name == "ddp_zero1":
        optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), type(optimizer), **ADAMW)
    return Contestant(name, wrapped, optimizer, batches, device, precision=precision)


def _build_fsdp2(
    name: str, model: nn.Module, args: argparse.Namespace, device: torch.device, batches: Batches
) -> Contestant:
    if name not in _FSDP2:
        raise ValueError(f"unknown system {name!r}; of FSDP2's there are {', '.join(_FSDP2)}")
    policy = MixedPrecisionPolicy()
    if args.dtype != "fp32" or args.reduce_dtype != "fp32":
        policy = MixedPrecisionPolicy(param_dtype=DTYPES[args.dtype], reduce_dtype=DTYPES[args.reduce_dtype])
    half = ranks_per_node(args)
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    if name == "hsdp":
        shape = (dist.get_world_size() // half, half)
        mesh = dist.init_device_mesh(device.type, shape, mesh_dim_names=("replicas", "shards"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=half if name == "fsdp2_hpz" else None)
    # By default FSDP2's root unit, with embedding and head, stays unsharded from forward to backward.
    root = True if getattr(args, "release_root", False) else None
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=root)
    if name == "fsdp2_a2a":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(AllToAllReduceScatter())
    if name == "fsdp2_two_hop":  # plain values over zeropp's hops
        zeropp.fsdp2.apply(model, weights=None, gradient_bits=None, local_world_size=half)
    if name == "fsdp2_pp":
        zeropp.fsdp2.apply(model, local_world_size=half)
    return Contestant(name, model, adamw(model), batches, device)


def _build_zeropp(
    name: str, model: nn.Module, args: argparse.Namespace, device: torch.device, batches: Batches
) -> Contestant:
    half = ranks_per_node(args)
    nodes = None if name in LIKE_FSDP2 else half  # ranks of a pretended node
    base, _, times = name.removesuffix(CLIPPED).partition("_x")
    zero, own = zeropp_modes(half)[base]
    micro_batches = int(times or 1)
    config = {
        # As in FSDP2, nothing is cached from forward to backward; small parameters are persistent by default.
        "zero_optimization": {"stage": 3, "stage3_max_reuse_distance": 0, **zero},
        "zeropp": {
            "local_world_size": nodes, "defer_cross_reduction": micro_batches > 1, **own
        },
        "bf16": {"enabled": args.dtype == "bf16"},
        "communication_data_type": args.reduce_dtype,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": CLIP if clips(name) else 0.0,
    }  # fmt: skip
    predicted = zeropp.plan.memory(model, config, dist.get_world_size(), nodes).terms
    optimizer = zeropp.ZeroOptimizer(adamw(model), model, config)
    return Contestant(
        name, model, optimizer, batches, device, backward=optimizer.backward, predicted=dict(predicted),
        micro_batches=micro_batches,
    )  # fmt: skip


def ranks_per_node(args: argparse.Namespace) -> int:
    """Return the given number of ranks per node; without one, half of the ranks, as if there were two nodes."""
    return getattr(args, "local", None) or dist.get_world_size() // 2


def zeropp_modes(local: int) -> dict[str, tuple[dict[str, object], dict[str, object]]]:
    """Return keys of the ``zero_optimization`` and ``zeropp`` blocks for each zeropp system.

    A name with the suffix "_x4" is the same system with 4 micro-batches.
    """
    hpz = {"zero_hpz_partition_size": local}
    gradients = {"zero_quantized_gradients": True}
    quantized = {**hpz, **gradients, "zero_quantized_weights": True}
    loco = {"zeropp_loco_param": {}}
    return {
        "zeropp": ({}, {}),
        "zeropp_s0": ({"stage": 0}, {}),
        "zeropp_s1": ({"stage": 1}, {}),
        "zeropp_s2": ({"stage": 2}, {}),
        "zeropp_s3": ({}, {}),
        "zeropp_hpz": (hpz, {}),
        "zeropp_mics": ({"mics_shard_size": local}, {}),
        "zeropp_pp": (quantized, {}),
        "zeropp_pp_loco": ({**quantized, **loco}, {}),
        "zeropp_delta4": ({**hpz, **gradients, **loco}, {"weight_codec": "delta4"}),
        "zeropp_lossless": ({**hpz, **gradients, **loco}, {"weight_codec": "lossless"}),
    }


class MemoryMeter:
    """Peak memory in bytes since the meter's creation, above the memory in use then, for a process with one system."""

    def __init__(self, device: torch.device) -> None:
        gc.collect()
        self.device = device
        if device.type == "cuda":
            torch._C._cuda_clearCublasWorkspaces()  # otherwise only the first system's peak would include them
            torch.cuda.empty_cache()  # otherwise memory freed by the previous system would count as reserved
            torch.cuda.reset_peak_memory_stats(device)
        else:
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")  # reset the peak, which importing torch has raised
        self.start = self._peak()

    def _peak(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        status = Path("/proc/self/status")
        if status.exists():
            line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
            return int(line.split()[1]) * 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def reserved_bytes(self) -> int:
        """Return the peak of torch's reserved memory over ranks, in bytes; on a CPU the memory peak. Collective."""
        on_card = self.device.type == "cuda"
        kept = torch.cuda.max_memory_reserved(self.device) if on_card else self._peak()
        return int(over_ranks([float(kept)], dist.ReduceOp.MAX)[0])

    def peak_bytes(self) -> int:
        """Return the largest peak over ranks, in bytes. Collective."""
        return int(over_ranks([float(self._peak() - self.start)], dist.ReduceOp.MAX)[0])
