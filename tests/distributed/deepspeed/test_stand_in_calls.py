"""More uses of ``deepspeed``'s names by other projects, besides those in `test_stand_in_replays`."""

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
    """ms-swift replaces ``deepspeed.initialize`` by a function of its own, and restores it.

    Returns:
        Class names of the models that the replacement was called with.
    """
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
    """transformers builds a model in zero.Init, loads its weights on rank 0 module by module, and broadcasts buffers.

    Returns:
        Largest difference from the saved weights.
    """
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
        # Accelerate, LLaMA-Factory and axolotl declare leaf modules at this point, when the model is already sharded.
        assert deepspeed.utils.set_z3_leaf_modules(model, [nn.Linear]) == [model.lin]
        # z3_leaf_module is also the name of a submodule in DeepSpeed; here the function must be found.
        assert deepspeed.utils.z3_leaf_module(model.lin) and not deepspeed.utils.z3_leaf_module(model)
        engine, *_ = deepspeed.initialize(model=model, config=config)
        return distance(zeropp.full_state(engine.module), saved)


def open_instruct_joins() -> int:
    """open-instruct calls ``init_distributed`` with an existing group, from both modules, and uses ``deepspeed.comm``.

    Returns:
        Sum over the ranks of ``rank + 1``.
    """
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
    """clone_tensors_for_torch_save copies views, so that a file does not have the base tensors, and keeps the nesting.

    Returns:
        Size of the saved file in bytes.
    """
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
    """Scripts read an engine's checkpoint of stages 0 to 2 without DeepSpeed: from one file, under its key "module".

    Returns:
        Largest difference of the file from the weights of the saving engine, and of an engine that loads the
        checkpoint.
    """
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
    """OpenRLHF and peft call state_dict() on the writing rank only. Loaders copy on rank 0 inside GatheredParameters.

    Returns:
        Differences of state dicts and weights from the expected values, in stage 1 and in stage 3.
    """
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
                # A helper function may gather parameters that its caller has already gathered.
                with deepspeed.zero.GatheredParameters([engine.module.head.weight, None]):
                    found.append(float((engine.module.head.weight - whole["head.weight"]).abs().max()))
            later = engine.module_state_dict()
            found.append(max(float((later[name] - value - 1).abs().max()) for name, value in whole.items()))
        with deepspeed.zero.GatheredParameters(None, enabled=False):
            return found


def states_in_16_bits() -> list[float]:
    """Accelerate calls _zero3_consolidated_16bit_state_dict; ms-swift inspects its signature and replaces it.

    Returns:
        Differences of the state dicts from plain torch.
    """
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
    """Accelerate recognizes DeepSpeed's schedules by their class names.

    Returns:
        Learning rates after one step of the schedule.
    """
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
    """Projects read the version from the module, from package metadata, and from git_version_info (OpenRLHF)."""
    with standing_in() as deepspeed:
        from deepspeed.git_version_info import version as built

        assert Version(deepspeed.__version__) >= Version("0.18.9")
        return str({deepspeed.__version__, deepspeed.version, version("deepspeed"), built})


def open_instruct_resumes(folder: Path) -> float:
    """open-instruct converts a checkpoint to DeepSpeed's "universal" format, and patches the loader to accept pickles.

    Returns:
        Largest difference of weights from plain torch after the resumed step.
    """
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
    """A model that is given to a second engine keeps its weights. Calls of the first engine raise an error.

    Returns:
        Largest difference of weights from plain torch.
    """
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
    """Use features that zeropp does not have: imports raise ImportError with the reason, calls raise RuntimeError.

    Returns:
        The error messages.
    """
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
            """A class like those that scripts derive at import. Deriving must work even if the class cannot be used."""

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
        # Existing submodules are also attributes without an import. Missing ones raise AttributeError with the reason.
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
    # The "16-bit" state is in the compute dtype, which is float64 here, so nothing is rounded.
    assert max(max(each) for each in run_ranks(2, states_in_16_bits)) < EPSILON
    assert run_ranks(2, accelerate_knows_schedules)[0][0] < 0.4
    assert run_ranks(2, versions_are_compared) == ["{'0.19.8'}"] * 2
    assert max(run_ranks(2, open_instruct_resumes, tmp_path)) < EPSILON


def test_missing_features_are_refused_with_a_reason() -> None:
    for said in run_ranks(2, refused_by_name):
        assert len(said) == 11 and all("zeropp" in each for each in said)
        assert "Ulysses" in said[0] and "checkpoints" in said[1] and "mixture" in said[2] and "pipelines" in said[4]
        assert "no script" in said[5] and "tp_model_init" in said[6]


def test_the_path_is_as_before() -> None:
    with standing_in():
        pass
    assert "deepspeed" not in sys.modules
