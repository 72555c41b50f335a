"""What projects do with ``deepspeed``'s names, replayed under the stand-in; each as in the project that it names."""

from __future__ import annotations

import argparse
import contextlib
import copy
import inspect
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from torch import Tensor, nn

import zeropp
from tests.distributed.harness import run_ranks
from tests.distributed.stand_in import LR, Net, distance, loss_of, plain, standing_in, steps, zero3

ADAMW = {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.0}}
EPSILON = 1e-12  # float64; only the order of additions differs


def engine_of(deepspeed: Any, **more: Any) -> Any:
    model = Net()
    return deepspeed.initialize(model=model, config=zero3(optimizer=ADAMW, **more))[0]


def accelerate_prepares() -> float:
    """Optimizer and schedule as Accelerate hands them over: the older name, and a function that makes the schedule."""
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
        # extract_model_from_parallel
        unwrapped = engine.module if isinstance(engine, deepspeed.DeepSpeedEngine) else engine
        assert unwrapped is model
        return distance(zeropp.full_state(model), plain(3))


def lightning_initializes() -> float:
    """A namespace with the device's number, a group that is there already, and an optimizer of its own."""
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
    """The policy's configuration without its optimizer, with dotted keys; then no gradients."""
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


def swift_replaces_initialize() -> list[str]:
    """A function of its own in the module's place, and back."""
    with standing_in() as deepspeed:
        import deepspeed as seen

        before, called = seen.initialize, []

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            called.append(type(kwargs["model"]).__name__)
            return before(*args, **kwargs)

        seen.initialize = wrapped
        engine_of(deepspeed)
        seen.initialize = before
        assert deepspeed.initialize is before
        return called


def transformers_loads_under_init() -> float:
    """Built in zero.Init; the first rank reads weights, module by module, and shares buffers."""
    with standing_in() as deepspeed:
        from deepspeed.accelerator import get_accelerator
        from deepspeed.runtime.zero import partition_parameters as pp

        assert pp._orig_torch_arange is torch.arange and callable(pp.zero_wrapper_for_fp_tensor_constructor)
        torch.manual_seed(1 + dist.get_rank())
        config = zero3(optimizer=ADAMW)
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = nn.Module()
            model.lin, model.norm = nn.Linear(300, 400), nn.BatchNorm1d(7)
        torch.manual_seed(9)
        saved = nn.Module()
        saved.lin, saved.norm = nn.Linear(300, 400), nn.BatchNorm1d(7)
        nn.init.normal_(saved.norm.running_mean)
        for name, module in model.named_children():
            own = dict(module.named_parameters(recurse=False))
            with deepspeed.zero.GatheredParameters(list(own.values()), modifier_rank=0):
                if deepspeed.comm.get_rank() == 0:
                    module.load_state_dict(getattr(saved, name).state_dict())
            for key, buffer in module.named_buffers(recurse=False):
                value = getattr(saved, name).state_dict()[key].to(get_accelerator().current_device_name())
                value = value if dist.get_rank() == 0 else torch.empty_like(value)
                dist.broadcast(value, src=0)
                buffer.copy_(value)
        assert model.lin.weight.numel() == 120_000, "logical sizes, whatever a rank has"
        engine, *_ = deepspeed.initialize(model=model, config=config)
        return distance(zeropp.full_state(engine.module), saved)


def peft_saves_adapters() -> float:
    """What stands in LLaVA, FastChat, Qwen and others: each parameter whole, where it is not there already."""
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
    """New rows get values on the first rank, which all have after the block."""
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
    """Parts of weights to the host's memory between phases and back; training goes on."""
    with standing_in() as deepspeed:
        engine = engine_of(deepspeed)
        steps(engine, 0, 1)
        for there in ("cpu", engine.device):
            for param in engine.module.parameters():
                param.ds_tensor.data = param.ds_tensor.data.to(there, non_blocking=True)
        steps(engine, 1, 3)
        return distance(zeropp.full_state(engine.module), plain(3))


def accelerate_sets_leaves() -> float:
    """Classes of a mixture of experts are whole units."""
    with standing_in() as deepspeed:
        from deepspeed.utils import get_z3_leaf_modules, set_z3_leaf_modules

        model = Net()
        found = set_z3_leaf_modules(model, [nn.Sequential])
        assert found == list(model.blocks) == get_z3_leaf_modules(model)
        engine, *_ = deepspeed.initialize(model=model, config=zero3(optimizer=ADAMW))
        assert sum(unit.name.startswith("blocks.") for unit in engine.core.units) == 2
        steps(engine, 0, 2)
        return distance(zeropp.full_state(model), plain(2))


def open_instruct_joins() -> int:
    """``init_distributed`` where there is a group, by either module; ranks and collectives by ``deepspeed.comm``."""
    with standing_in() as deepspeed:
        import deepspeed.comm as comm
        from deepspeed import comm as same

        deepspeed.init_distributed(timeout=None)
        comm.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
        assert same.is_initialized() and comm.get_world_size() == 2 and comm.get_local_rank() == comm.get_rank()
        mine = torch.tensor(float(comm.get_rank() + 1))
        comm.all_reduce(mine, op=comm.ReduceOp.SUM)
        comm.barrier()
        return int(mine)


def openrlhf_offloads_states() -> float:
    """States to the host between phases, asked for by enums, where the configuration does not keep them there."""
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


def clones_for_torch_save(folder: Path) -> int:
    """A view is saved without what it is a view of; nesting stays."""
    with standing_in():
        from deepspeed.checkpoint.utils import clone_tensors_for_torch_save

        whole = torch.arange(100_000.0)
        copied = clone_tensors_for_torch_save({"a": [whole[:10], {"b": (whole[5:7], 3)}]})
        path = folder / f"{dist.get_rank()}.pt"
        torch.save(copied, path)
        assert torch.equal(copied["a"][0], whole[:10]) and torch.equal(copied["a"][1]["b"][0], whole[5:7])
        assert copied["a"][1]["b"][1] == 3
        return path.stat().st_size


def states_in_16_bits() -> list[float]:
    """Accelerate asks for it; ms-swift inspects its signature and puts a function of its own in its place."""
    with standing_in() as deepspeed:
        engine = engine_of(deepspeed, zero={"stage3_gather_16bit_weights_on_model_save": True})
        assert engine.zero_gather_16bit_weights_on_model_save() and engine.zero_optimization_partition_weights()
        steps(engine, 0, 2)
        found = [engine._zero3_consolidated_16bit_state_dict(), engine._consolidated_16bit_state_dict()]
        assert "exclude_frozen_parameters" in inspect.signature(engine._zero3_consolidated_16bit_state_dict).parameters
        before = engine._zero3_consolidated_16bit_state_dict
        engine._zero3_consolidated_16bit_state_dict = lambda **_: before(exclude_frozen_parameters=True)
        engine.module.embed.weight.requires_grad_(False)
        less = engine._zero3_consolidated_16bit_state_dict()
        if dist.get_rank() != 0:
            assert found == [None, None] and less is None
            return [0.0]
        assert "embed.weight" not in less and len(less) == len(found[0]) - 1
        return [distance(state, plain(2)) for state in found]


def trl_takes_hooks_off() -> float:
    """Generation inside GatheredParameters without hooks, on each rank as often as it likes; then training goes on."""
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
    """Configured once, where it is not yet; blocks are run through it."""
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
    """Blocks, run by ``checkpoint``: their forward happens again in backward."""
    for block in model.blocks:
        own = type(block).forward.__get__(block)
        block.forward = lambda x, own=own: deepspeed.checkpointing.checkpoint(own, x)
    yield
    for block in model.blocks:
        del block.forward


def accelerate_maps_optimizers() -> float:
    """For states on the host it makes DeepSpeed's optimizers of torch's, from their groups."""
    with standing_in() as deepspeed:
        from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
        from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
        from deepspeed.ops.lion import DeepSpeedCPULion

        spare = nn.Linear(2, 2)
        assert isinstance(DeepSpeedCPUAdagrad(spare.parameters(), lr=0.1), torch.optim.Adagrad)
        assert isinstance(DeepSpeedCPULion(spare.parameters(), lr=0.1), zeropp.training.Lion)
        plain_adam = FusedAdam(spare.parameters(), adam_w_mode=False)
        assert isinstance(plain_adam, torch.optim.Adam) and not isinstance(plain_adam, torch.optim.AdamW)
        model = Net()
        given = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
        optimizer = DeepSpeedCPUAdam(given.param_groups, lr=LR, weight_decay=0.0, adamw_mode=True)
        assert optimizer.param_groups[0]["fused"]
        offloaded = zero3(zero={"offload_optimizer": {"device": "cpu"}})
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config_params=offloaded)
        steps(engine, 0, 3)
        return distance(zeropp.full_state(model), plain(3))


def accelerate_knows_schedules() -> list[float]:
    """A schedule is DeepSpeed's by the name of its class."""
    with standing_in() as deepspeed:
        optimizer = torch.optim.SGD(Net().parameters(), lr=1.0)
        schedule = deepspeed.runtime.lr_schedules.WarmupLR(optimizer, warmup_max_lr=0.4, warmup_num_steps=4)
        assert type(schedule).__name__ in deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES
        engine, _, _, found = deepspeed.initialize(
            model=nn.Linear(2, 2), optimizer=optimizer_of_another(), lr_scheduler=None, config=zero3()
        )
        assert found is None and engine.lr_scheduler is None
        schedule.step()
        return [float(group["lr"]) for group in optimizer.param_groups]


def optimizer_of_another() -> Any:
    return lambda params: torch.optim.SGD(params, lr=0.1)


def versions_are_compared() -> str:
    """By the module, by its metadata, and by another name (OpenRLHF)."""
    with standing_in() as deepspeed:
        from deepspeed.git_version_info import version as built

        assert Version(deepspeed.__version__) >= Version("0.18.9")
        return str({deepspeed.__version__, deepspeed.version, version("deepspeed"), built})


def adalora_reads_gradients() -> float:
    """``safe_get_full_grad`` between backward and step, where peft asks for importance."""
    with standing_in() as deepspeed:
        engine = engine_of(deepspeed)
        engine.backward(loss_of(engine, 0, dist.get_rank()))
        found = {name: deepspeed.utils.safe_get_full_grad(p) for name, p in engine.module.named_parameters()}
        wanted = Net()
        sum(loss_of(wanted, 0, rank) / 2 for rank in range(2)).backward()  # type: ignore[union-attr]
        return max(float((found[name] - p.grad).abs().max()) for name, p in wanted.named_parameters())


def open_instruct_resumes(folder: Path) -> float:
    """A checkpoint made "universal" on the command line; its loader patched to take pickles."""
    with standing_in() as deepspeed:
        from deepspeed.checkpoint import ds_to_universal
        from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

        TorchCheckpointEngine.load = lambda self, path, map_location=None: torch.load(path, weights_only=False)
        engine = engine_of(deepspeed)
        steps(engine, 0, 2)
        engine.save_checkpoint(str(folder), tag="global_step2", client_state={"episode": 7})
        if dist.get_rank() == 0:
            source, target = folder / "global_step2", folder / "global_step2_universal"
            given = ["--input_folder", str(source), "--output_folder", str(target), "--inject_missing_state"]
            ds_to_universal.main(ds_to_universal.parse_arguments(given))
        dist.barrier()
        again = engine_of(deepspeed, checkpoint={"load_universal": True})
        path, state = again.load_checkpoint(str(folder))
        assert Path(path).name == "global_step2_universal" and state == {"episode": 7}
        steps(again, 2, 3)
        return distance(zeropp.full_state(again.module), plain(3))


def refused_by_name() -> list[str]:
    """What is not here: imports fail as those of an absent package, with the reason; calls raise."""
    with standing_in() as deepspeed:
        said = []
        for name in (
            "deepspeed.runtime.sequence_parallel.ulysses_sp", "deepspeed.elasticity", "deepspeed.moe.sharded_moe",
            "deepspeed.module_inject", "deepspeed.pipe.module", "deepspeed.nothing_known",
        ):  # fmt: skip
            try:
                __import__(name)
            except ImportError as error:
                said.append(str(error))
        from deepspeed.moe.layer import MoE
        from deepspeed.moe.utils import is_moe_param, split_params_into_different_moe_groups_for_optimizer
        from deepspeed.pipe import PipelineModule

        class Derived(PipelineModule):
            """Scripts derive theirs as they are imported, whether it is used or not."""

        groups = [{"params": list(Net().parameters())}]
        assert split_params_into_different_moe_groups_for_optimizer(groups) == groups
        assert not any(map(is_moe_param, groups[0]["params"]))
        for call in (deepspeed.tp_model_init, Derived, deepspeed.init_inference, MoE):
            try:
                call(model=None)
            except RuntimeError as error:
                said.append(str(error))
        assert not isinstance(Net(), deepspeed.PipelineModule)
        assert not hasattr(deepspeed.utils.groups, "_get_sequence_parallel_group")
        assert deepspeed.utils.groups._get_data_parallel_world_size() == 2
        return said


EXACT = [
    accelerate_prepares, lightning_initializes, trl_makes_a_reference_model, peft_saves_adapters,
    llama_factory_edits_embeddings, swift_offloads_the_model, accelerate_sets_leaves, openrlhf_offloads_states,
    trl_takes_hooks_off, diffsynth_checkpoints, accelerate_maps_optimizers, adalora_reads_gradients,
]  # fmt: skip


@pytest.mark.parametrize("replay", EXACT, ids=lambda replay: replay.__name__)
def test_ends_as_plain_torch(replay: Any) -> None:
    assert max(run_ranks(2, replay)) < EPSILON


def test_others_end_as_they_should(tmp_path: Path) -> None:
    assert run_ranks(2, swift_replaces_initialize) == [["Net"]] * 2
    assert run_ranks(2, transformers_loads_under_init) == [0.0] * 2
    assert run_ranks(2, open_instruct_joins) == [3, 3]
    assert max(run_ranks(2, clones_for_torch_save, tmp_path)) < 4000
    # Rounded to bfloat16 nowhere: the model computes in float64, and so its state is.
    assert max(max(each) for each in run_ranks(2, states_in_16_bits)) < EPSILON
    assert run_ranks(2, accelerate_knows_schedules)[0][0] < 0.4
    assert run_ranks(2, versions_are_compared) == ["{'0.19.8'}"] * 2
    assert max(run_ranks(2, open_instruct_resumes, tmp_path)) < EPSILON


def test_what_is_not_there_is_refused_with_a_reason() -> None:
    for said in run_ranks(2, refused_by_name):
        assert len(said) == 10 and all("zeropp" in each for each in said)
        assert "Ulysses" in said[0] and "checkpoints" in said[1] and "mixtures" in said[2] and "pipelines" in said[4]
        assert "no script" in said[5] and "tp_model_init" in said[6]


def test_the_path_is_as_before() -> None:
    with standing_in():
        pass
    assert "deepspeed" not in sys.modules
