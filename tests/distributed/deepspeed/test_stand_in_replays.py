"""Uses of ``deepspeed``'s names by other projects, replayed with the stand-in. Each function is named after a project.

A replay returns the largest difference of its weights, or of its values, from plain torch.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.support.deepspeed_stand_in import (
    ADAMW,
    EPSILON,
    LR,
    Net,
    distance,
    engine_of,
    loss_of,
    plain,
    standing_in,
    steps,
    zero3,
)
from tests.support.rank_pool import run_ranks
from zeropp.deepspeed.json_optimizers import UncorrectedAdam


def accelerate_prepares() -> float:
    """Accelerate passes ``config_params`` (the older name) and a function that makes the schedule."""
    with standing_in() as deepspeed:
        model = Net()
        schedule = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # noqa: E731
        engine, optimizer, _, scheduler = deepspeed.initialize(
            model=model, config_params=zero3(optimizer=ADAMW), model_parameters=list(model.parameters()),
            lr_scheduler=schedule,
        )  # fmt: skip
        assert isinstance(engine, deepspeed.DeepSpeedEngine) and hasattr(optimizer, "overflow")
        assert isinstance(optimizer, torch.optim.Optimizer) and scheduler.get_last_lr() == [LR]
        for step in range(3):
            engine.set_gradient_accumulation_boundary(is_boundary=True)
            engine.backward(loss_of(engine, step, dist.get_rank()), scale_wrt_gas=False)
            engine.step()
        assert optimizer.overflow is False and float(engine.get_global_grad_norm()) > 0
        # like Accelerate's extract_model_from_parallel
        unwrapped = engine.module if isinstance(engine, deepspeed.DeepSpeedEngine) else engine
        assert unwrapped is model
        return distance(zeropp.full_state(model), plain(3))


def lightning_initializes() -> float:
    """Lightning passes a namespace with the device's number, an existing process group, and its own optimizer."""
    with standing_in() as deepspeed:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
        engine, *_ = deepspeed.initialize(
            args=argparse.Namespace(device_rank=dist.get_rank()), config=zero3(), model=model,
            model_parameters=model.parameters(), optimizer=optimizer, lr_scheduler=None, dist_init_required=False,
        )  # fmt: skip
        steps(engine, 0, 3)
        return distance(zeropp.full_state(model), plain(3))


def trl_makes_a_reference_model() -> float:
    """TRL makes a reference model with the policy's configuration, without the optimizer and with dotted keys."""
    with standing_in() as deepspeed:
        given = copy.deepcopy(zero3(optimizer=ADAMW))
        given.update(
            {"zero_optimization.reduce_bucket_size": 64, "zero_optimization.stage3_prefetch_bucket_size": 57.6}
        )
        given.pop("optimizer")
        model, *_ = deepspeed.initialize(model=Net(), config=given)
        model.eval()
        with torch.no_grad():
            found = loss_of(model, 0, dist.get_rank())
        return abs(float(found) - float(loss_of(Net(), 0, dist.get_rank())))


def peft_saves_adapters() -> float:
    """LLaVA, FastChat, Qwen and others gather each parameter that is not available to save adapters."""
    with standing_in() as deepspeed:
        from deepspeed import zero
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        def maybe_zero_3(param: Any) -> Tensor:
            if hasattr(param, "ds_id"):
                assert param.ds_status == ZeroParamStatus.NOT_AVAILABLE
                with zero.GatheredParameters([param]):
                    return param.data.detach().cpu().clone()
            return param.detach().cpu().clone()

        engine = engine_of(deepspeed)
        steps(engine, 0, 2)
        counted = sum(
            p.ds_numel if p.numel() == 0 and hasattr(p, "ds_numel") else p.numel() for p in engine.parameters()
        )
        assert counted == sum(p.numel() for p in Net().parameters())
        return distance({name: maybe_zero_3(p) for name, p in engine.module.named_parameters()}, plain(2))


def llama_factory_edits_embeddings() -> float:
    """LLaMA-Factory gives new embedding rows values on rank 0 inside GatheredParameters; all ranks must get them."""
    with standing_in() as deepspeed:
        engine, wanted = engine_of(deepspeed), Net()
        weight = engine.module.embed.weight
        with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
            if dist.get_rank() == 0:
                weight.data[-2:] = weight.data[:-2].mean(0)
        with torch.no_grad():
            wanted.embed.weight[-2:] = wanted.embed.weight[:-2].mean(0)
        steps(engine, 0, 2)
        return distance(zeropp.full_state(engine.module), plain(2, model=wanted))


def swift_offloads_the_model() -> float:
    """ms-swift moves ``ds_tensor`` of all parameters to host memory and back between phases."""
    with standing_in() as deepspeed:
        engine = engine_of(deepspeed)
        steps(engine, 0, 1)
        for there in ("cpu", engine.device):
            for param in engine.module.parameters():
                param.ds_tensor.data = param.ds_tensor.data.to(there, non_blocking=True)
        steps(engine, 1, 3)
        return distance(zeropp.full_state(engine.module), plain(3))


def accelerate_sets_leaves() -> float:
    """Accelerate declares the classes of a mixture of experts as leaf modules, which become whole units."""
    with standing_in() as deepspeed:
        from deepspeed.utils import get_z3_leaf_modules, set_z3_leaf_modules

        model = Net()
        found = set_z3_leaf_modules(model, [nn.Sequential])
        assert found == list(model.blocks) == get_z3_leaf_modules(model)
        engine, *_ = deepspeed.initialize(model=model, config=zero3(optimizer=ADAMW))
        assert sum(unit.name.startswith("blocks.") for unit in engine.core.units) == 2
        steps(engine, 0, 2)
        return distance(zeropp.full_state(model), plain(2))


def openrlhf_offloads_states() -> float:
    """OpenRLHF offloads states between phases, selected by DeepSpeed's enums, without offload in the configuration."""
    with standing_in() as deepspeed:
        from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum

        engine = engine_of(deepspeed)
        steps(engine, 0, 2)
        given = engine.config["zero_optimization"].get("offload_optimizer", {}).get("device", "none")
        assert given == OffloadDeviceEnum.none and type(engine.config) is dict
        kinds = [
            OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.contiguous_grad_buffer,
            OffloadStateTypeEnum.hp_params,
        ]  # fmt: skip
        engine.optimizer.offload_states(include=kinds, device=OffloadDeviceEnum.cpu, pin_memory=True, non_blocking=True)
        engine.empty_partition_cache()
        with pytest.raises(RuntimeError, match="reload_states"):
            engine.optimizer.state  # noqa: B018
        engine.reload_states(non_blocking=True)
        steps(engine, 2, 3)
        return distance(zeropp.full_state(engine.module), plain(3))


def trl_takes_hooks_off() -> float:
    """TRL removes hooks inside GatheredParameters and generates with a different number of forwards on each rank."""
    with standing_in() as deepspeed:
        engine = engine_of(deepspeed)
        for step in range(3):
            steps(engine, step, step + 1)
            offload = engine.optimizer.parameter_offload
            with deepspeed.zero.GatheredParameters(engine.module.parameters()):
                for module in offload.module.modules():
                    for _, param in [*module.named_parameters(recurse=False), *module.ds_external_parameters()]:
                        param.ds_active_sub_modules.clear()
                for hook in [*offload.forward_hooks, *offload.backward_hooks]:
                    hook.remove()
                offload.forward_hooks, offload.backward_hooks = [], []
                ids = torch.zeros(1, 1, dtype=torch.long)
                with torch.no_grad():
                    for _ in range(3 + 2 * dist.get_rank()):
                        ids = torch.cat([ids, engine.module(ids)[:, -1:].argmax(-1)], 1)
                if not offload.param_coordinator.is_invalid_trace():
                    offload.param_coordinator._invalidate_trace()
                offload._register_deepspeed_module(offload.module)
        with deepspeed.zero.unwrap_model_for_generation(engine) as unwrapped, torch.no_grad():
            assert unwrapped(ids).shape == (1, ids.shape[1], 12)
        return distance(zeropp.full_state(engine.module), plain(3))


def diffsynth_checkpoints() -> float:
    """DiffSynth configures activation checkpointing once, and runs blocks through it."""
    with standing_in() as deepspeed:
        if not deepspeed.checkpointing.is_configured():
            deepspeed.checkpointing.configure(mpu_=None, checkpoint_in_cpu=True)
        engine = engine_of(deepspeed)
        for step in range(2):
            with _checkpointed(deepspeed, engine.module):
                engine.backward(loss_of(engine, step, dist.get_rank()))
            engine.step()
        found = distance(zeropp.full_state(engine.module), plain(2))
        deepspeed.checkpointing.reset()
        return found


@contextlib.contextmanager
def _checkpointed(deepspeed: Any, model: Net) -> Any:
    """Run each block of the model through ``deepspeed.checkpointing.checkpoint`` inside the context."""
    for block in model.blocks:
        own = type(block).forward.__get__(block)
        block.forward = lambda x, own=own: deepspeed.checkpointing.checkpoint(own, x)
    yield
    for block in model.blocks:
        del block.forward


def accelerate_maps_optimizers() -> float:
    """Accelerate replaces torch's optimizers by DeepSpeed's, made from the same groups, if states are offloaded."""
    with standing_in() as deepspeed:
        from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
        from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
        from deepspeed.ops.lion import DeepSpeedCPULion

        spare = nn.Linear(2, 2)
        assert isinstance(DeepSpeedCPUAdagrad(spare.parameters(), lr=0.1), torch.optim.Adagrad)
        assert isinstance(DeepSpeedCPULion(spare.parameters(), lr=0.1), zeropp.training.Lion)
        plain_adam = FusedAdam(spare.parameters(), adam_w_mode=False)
        assert isinstance(plain_adam, torch.optim.Adam) and not isinstance(plain_adam, torch.optim.AdamW)
        uncorrected = FusedAdam(spare.parameters(), bias_correction=False, adam_w_mode=False)
        assert isinstance(uncorrected, UncorrectedAdam) and uncorrected.param_groups[0]["decoupled"] is False
        model = Net()
        given = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
        optimizer = DeepSpeedCPUAdam(given.param_groups, lr=LR, weight_decay=0.0, adamw_mode=True)
        assert optimizer.param_groups[0]["fused"]
        offloaded = zero3(zero={"offload_optimizer": {"device": "cpu"}})
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config_params=offloaded)
        steps(engine, 0, 3)
        return distance(zeropp.full_state(model), plain(3))


def adalora_reads_gradients() -> float:
    """peft's AdaLoRA calls ``safe_get_full_grad`` between backward and step."""
    with standing_in() as deepspeed:
        engine = engine_of(deepspeed)
        engine.backward(loss_of(engine, 0, dist.get_rank()))
        found = {name: deepspeed.utils.safe_get_full_grad(p) for name, p in engine.module.named_parameters()}
        wanted = Net()
        sum(loss_of(wanted, 0, rank) / 2 for rank in range(2)).backward()  # type: ignore[union-attr]
        return max(float((found[name] - p.grad).abs().max()) for name, p in wanted.named_parameters())


EXACT = [
    accelerate_prepares, lightning_initializes, trl_makes_a_reference_model, peft_saves_adapters,
    llama_factory_edits_embeddings, swift_offloads_the_model, accelerate_sets_leaves, openrlhf_offloads_states,
    trl_takes_hooks_off, diffsynth_checkpoints, accelerate_maps_optimizers, adalora_reads_gradients,
]  # fmt: skip


@pytest.mark.parametrize("replay", EXACT, ids=lambda replay: replay.__name__)
def test_ends_as_plain_torch(replay: Any) -> None:
    assert max(run_ranks(2, replay)) < EPSILON
