"""More of what projects do with ``deepspeed``'s names (`test_stand_in_replays`): calls besides training."""

from __future__ import annotations

import inspect
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from torch import nn

import zeropp
from tests.support.deepspeed_stand_in import (
    ADAMW,
    EPSILON,
    Net,
    distance,
    engine_of,
    plain,
    standing_in,
    steps,
    zero3,
)
from tests.support.rank_pool import run_ranks


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
        # Accelerate, LLaMA-Factory and axolotl name experts here, when the model is in pieces already.
        assert deepspeed.utils.set_z3_leaf_modules(model, [nn.Linear]) == [model.lin]
        # There is a module of this name, too.
        assert deepspeed.utils.z3_leaf_module(model.lin) and not deepspeed.utils.z3_leaf_module(model)
        engine, *_ = deepspeed.initialize(model=model, config=config)
        return distance(zeropp.full_state(engine.module), saved)


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


def weights_in_a_file(folder: Path) -> list[float]:
    """Scripts for generation read a checkpoint of stages 0 to 2 without DeepSpeed: one file, and its key "module"."""
    with standing_in() as deepspeed:
        from deepspeed.checkpoint.utils import get_model_ckpt_name_for_rank

        engine = engine_of(deepspeed, zero={"stage": 1})
        steps(engine, 0, 2)
        engine.save_checkpoint(folder, tag="here")
        saved = torch.load(get_model_ckpt_name_for_rank(str(folder / "here"), "00"))
        assert saved["global_steps"] == engine.global_steps == 2
        reloaded = engine_of(deepspeed, zero={"stage": 3})
        reloaded.load_checkpoint(folder, "here")
        reloaded.save_checkpoint(folder, tag="pieces")
        assert not list((folder / "pieces").glob("mp_rank*"))
        found = [zeropp.full_state(each.module) for each in (engine, reloaded)]
        assert all(state.keys() == saved["module"].keys() for state in found)
        return [max(float((state[n] - v).abs().max()) for n, v in saved["module"].items()) for state in found]


def one_rank_asks_for_names() -> list[float]:
    """OpenRLHF and peft list names on the rank that writes; loaders copy on the first into what all have gathered."""
    with standing_in() as deepspeed:
        found = []
        for stage in (1, 3):
            engine = engine_of(deepspeed, zero={"stage": stage, "stage3_param_persistence_threshold": 0})
            whole = engine.module_state_dict()
            if dist.get_rank() == 0:
                for module in (engine.module, engine.module.head):
                    state = module.state_dict()
                    assert state.keys() == module.state_dict().keys()
                    assert [v.shape for v in state.values()] == [p.shape for p in module.state_dict().values()]
                if stage == 1:
                    state = engine.module.state_dict()
                    found.append(max(float((state[name] - value).abs().max()) for name, value in whole.items()))
                else:
                    with pytest.raises(RuntimeError, match="keeps its values elsewhere"):
                        engine.module.state_dict()["head.weight"].sum()
            with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
                state = engine.module.state_dict()
                found.append(max(float((state[name] - value).abs().max()) for name, value in whole.items()))
                if dist.get_rank() == 0:
                    engine.module.load_state_dict({name: value + 1 for name, value in state.items()})
                # A helper gathers what its caller has gathered.
                with deepspeed.zero.GatheredParameters([engine.module.head.weight, None]):
                    found.append(float((engine.module.head.weight - whole["head.weight"]).abs().max()))
            later = engine.module_state_dict()
            found.append(max(float((later[name] - value - 1).abs().max()) for name, value in whole.items()))
        with deepspeed.zero.GatheredParameters(None, enabled=False):
            return found


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


def a_model_is_given_twice() -> float:
    """The newer of two engines has the model, with the weights of then; the older one says that it is over."""
    with standing_in() as deepspeed:
        first = engine_of(deepspeed)
        steps(first, 0, 2)
        before = zeropp.full_state(first.module)
        second, *_ = deepspeed.initialize(model=first.module, config=zero3(optimizer=ADAMW))
        wanted = Net()
        wanted.load_state_dict(before)
        steps(second, 0, 3)
        with pytest.raises(RuntimeError, match=r"after close\(\)"):
            first.step()
        return distance(zeropp.full_state(second.module), plain(3, model=wanted))


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
        # As attributes, too: what is there without an import of its own, and what is not, with the reason.
        assert deepspeed.runtime.utils.see_memory_usage and deepspeed.comm.comm is deepspeed.comm
        try:
            deepspeed.monitor  # noqa: B018
        except AttributeError as error:
            said.append(str(error))
        assert deepspeed.utils.groups._get_data_parallel_world_size() == 2
        return said


def test_others_end_as_they_should(tmp_path: Path) -> None:
    assert run_ranks(2, swift_replaces_initialize) == [["Net"]] * 2
    assert max(run_ranks(2, a_model_is_given_twice)) < EPSILON
    assert run_ranks(2, transformers_loads_under_init) == [0.0] * 2
    assert run_ranks(2, open_instruct_joins) == [3, 3]
    assert max(run_ranks(2, clones_for_torch_save, tmp_path)) < 4000
    assert run_ranks(2, weights_in_a_file, tmp_path) == [[0.0, 0.0]] * 2
    first, second = run_ranks(2, one_rank_asks_for_names)
    assert first == pytest.approx([0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0], abs=EPSILON) and second == pytest.approx(
        [0.0] * 6
    )
    # Rounded to bfloat16 nowhere: the model computes in float64, and so its state is.
    assert max(max(each) for each in run_ranks(2, states_in_16_bits)) < EPSILON
    assert run_ranks(2, accelerate_knows_schedules)[0][0] < 0.4
    assert run_ranks(2, versions_are_compared) == ["{'0.19.8'}"] * 2
    assert max(run_ranks(2, open_instruct_resumes, tmp_path)) < EPSILON


def test_what_is_not_there_is_refused_with_a_reason() -> None:
    for said in run_ranks(2, refused_by_name):
        assert len(said) == 11 and all("zeropp" in each for each in said)
        assert "Ulysses" in said[0] and "checkpoints" in said[1] and "mixtures" in said[2] and "pipelines" in said[4]
        assert "no script" in said[5] and "tp_model_init" in said[6]


def test_the_path_is_as_before() -> None:
    with standing_in():
        pass
    assert "deepspeed" not in sys.modules
