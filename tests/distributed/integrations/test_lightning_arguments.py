"""Each argument of zeropp's strategies for Lightning reaches its setting, and docs/lightning.md has a row for it."""

from __future__ import annotations

import datetime
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from zeropp.config import Config, ConfigError, load_config, require_supported
from zeropp.integrations._lightning.arguments import FabricArguments, TrainerArguments
from zeropp.integrations._lightning.classes import NAMES
from zeropp.integrations._lightning.configuration import for_inference, for_training, with_precision

PAGE = Path(__file__).resolve().parents[3] / "docs" / "lightning.md"
STORED = {"offload_optimizer": True, "offload_optimizer_device": "nvme", "nvme_path": "/disk"}
PARAMS = {"stage": 3, "offload_parameters": True, "offload_params_device": "nvme", "nvme_path": "/disk"}

# Argument -> (a value other than the default, the value's path in a loaded configuration, further arguments). After "="
# comes the loaded value if it differs from the given one.
IN_CONFIG: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "stage": (1, "zero.stage", {}),
    "offload_optimizer": (True, "zero.offload_optimizer.device=cpu", {}),
    "offload_parameters": (True, "zero.offload_param.device=cpu", {"stage": 3}),
    "offload_params_device": ("nvme", "zero.offload_param.device", {**PARAMS}),
    "nvme_path": ("/other", "zero.offload_param.nvme_path", {**PARAMS}),
    "params_buffer_count": (7, "zero.offload_param.buffer_count", {**PARAMS}),
    "params_buffer_size": (9_000_000, "zero.offload_param.buffer_size", {**PARAMS}),
    "max_in_cpu": (5_000_000, "zero.offload_param.max_in_cpu", {**PARAMS}),
    "offload_optimizer_device": ("nvme", "zero.offload_optimizer.device", {**STORED}),
    "optimizer_buffer_count": (6, "zero.offload_optimizer.buffer_count", {**STORED}),
    "pin_memory": (True, "zero.offload_optimizer.pin_memory", {"offload_optimizer": True}),
    "sub_group_size": (50_000, "zero.sub_group_size", {}),
    "overlap_comm": (False, "zero.overlap_comm", {}),
    "block_size": (4096 * 16, "aio.block_size", {}),
    "queue_depth": (3, "aio.queue_depth", {}),
    "single_submit": (True, "aio.single_submit", {}),
    "overlap_events": (False, "aio.overlap_events", {}),
    "thread_count": (2, "aio.intra_op_parallelism", {}),
    "logging_batch_size_per_gpu": (6, "train_micro_batch_size_per_gpu", {}),
    "loss_scale": (128.0, "fp16.loss_scale", {}),
    "initial_scale_power": (9, "fp16.initial_scale_power", {}),
    "loss_scale_window": (33, "fp16.loss_scale_window", {}),
    "hysteresis": (4, "fp16.hysteresis", {}),
    "min_loss_scale": (2, "fp16.min_loss_scale=2.0", {}),
    "partition_activations": (True, "activation_checkpointing.partition_activations", {}),
    "cpu_checkpointing": (True, "activation_checkpointing.cpu_checkpointing", {}),
    "contiguous_memory_optimization": (True, "activation_checkpointing.contiguous_memory_optimization", {}),
    "synchronize_checkpoint_boundary": (True, "activation_checkpointing.synchronize_checkpoint_boundary", {}),
    # These arguments have no effect, as docs/lightning.md says, but they reach the configuration.
    "contiguous_gradients": (False, "zero.contiguous_gradients", {}),
    "allgather_partitions": (False, "zero.allgather_partitions", {}),
    "reduce_scatter": (False, "zero.reduce_scatter", {}),
    "allgather_bucket_size": (1000, "zero.allgather_bucket_size", {}),
    "reduce_bucket_size": (1000, "zero.reduce_bucket_size", {}),
    "zero_allow_untested_optimizer": (False, "zero_allow_untested_optimizer", {}),
}
NONE = {
    "contiguous_gradients", "allgather_partitions", "reduce_scatter", "allgather_bucket_size", "reduce_bucket_size",
    "zero_allow_untested_optimizer",
}  # fmt: skip
# Arguments that Lightning's base class receives.
HANDED_ON: dict[str, Any] = {
    "accelerator": object(),
    "parallel_devices": [torch.device("cpu")],
    "cluster_environment": object(),
    "process_group_backend": "gloo",
    "timeout": datetime.timedelta(seconds=5),
}
# Arguments whose effect other tests in this folder check on ranks.
ON_RANKS = {"remote_device", "logging_level", "load_full_weights", "exclude_frozen_parameters"}
ELSEWHERE = {"zero_optimization", "config"}


class Base:
    """A stand-in for Lightning's strategies, which stores the arguments that it receives."""

    def __init__(self, **given: Any) -> None:
        self.handed_on = given


class ForTrainer(TrainerArguments, Base):
    """The arguments of the Trainer's strategy on the stand-in."""


class ForFabric(FabricArguments, Base):
    """The arguments of Fabric's strategy on the stand-in."""


KINDS = {"precision_plugin": ForTrainer, "precision": ForFabric}


def loaded(strategy: Any, precision: str = "16-mixed") -> Config:
    """Return the loaded configuration of a strategy for a precision."""
    return load_config(with_precision(strategy.config, precision, strategy._given))


def value_at(config: Config, place: str) -> object:
    """Return the value at a dotted path in a configuration."""
    value: Any = config
    for name in place.split("."):
        value = getattr(value, name)
    return value


@pytest.mark.parametrize("plugin", KINDS)
def test_every_argument_goes_somewhere(plugin: str) -> None:
    """Each argument changes the configuration, or goes to Lightning's base class, or is tested on ranks."""
    kind = KINDS[plugin]
    names = set(inspect.signature(kind.__init__).parameters) - {"self"}
    assert names == IN_CONFIG.keys() | HANDED_ON.keys() | ON_RANKS | ELSEWHERE | {plugin} and len(names) == 46
    assert kind(**{plugin: 3}).handed_on[plugin] == 3
    for name, value in HANDED_ON.items():
        assert kind(**{name: value}).handed_on[name] is value
    for name, (value, place, others) in IN_CONFIG.items():
        path, _, wanted = place.partition("=")
        others = {key: other for key, other in others.items() if key != name}
        found = value_at(loaded(kind(**{**others, name: value})), path)
        assert str(found) == (wanted or str(value)), name
        without = loaded(kind(**others))
        assert wanted or value_at(without, path) != found, f"{name} has its default"


@pytest.mark.parametrize("plugin", KINDS)
def test_defaults_are_honoured(plugin: str) -> None:
    """The settings behind each registered strategy name are supported in each precision."""
    for given in NAMES.values():
        for precision in ("32-true", "16-mixed", "bf16-true"):
            require_supported(loaded(KINDS[plugin](**given), precision))
    assert loaded(KINDS[plugin](zero_optimization=False)).zero.stage == 0


def test_a_configuration_is_all_that_counts() -> None:
    """If a configuration is given, all other arguments are ignored. The strategy copies the configuration."""
    given = {"zero_optimization": {"stage": 1}, "aio": {"queue_depth": 2}}
    found = ForTrainer(config=given, stage=3, queue_depth=5, offload_optimizer=True)
    assert found.config == given and found.config is not given
    found.config["zero_optimization"]["stage"] = 2
    assert given["zero_optimization"] == {"stage": 1}
    # A precision in the configuration is kept, too.
    own = with_precision({"bf16": {"enabled": False}}, "bf16-mixed", found._given)
    assert own == {"bf16": {"enabled": False}}


def test_settings_of_a_trainer_enter_the_configuration() -> None:
    """A Trainer's accumulation and clipping enter the configuration; values in both places are an error.

    A configuration for inference has no optimizer settings.
    """
    assert for_training({}, steps=3, clip=0.5) == {
        "gradient_accumulation_steps": 3, "managed_gradient_accumulation": False, "gradient_clipping": 0.5,
    }  # fmt: skip
    assert for_training({"gradient_clipping": 2.0}, steps=1, clip=None)["gradient_clipping"] == 2.0
    with pytest.raises(ConfigError, match="accumulate_grad_batches"):
        for_training({"gradient_accumulation_steps": 1}, steps=1, clip=None)
    with pytest.raises(ConfigError, match="give one"):
        for_training({"gradient_clipping": 2.0}, steps=1, clip=1.0)
    config = ForTrainer(stage=3, offload_optimizer=True, offload_parameters=True).config
    kept = for_inference({**config, "optimizer": {"type": "Adam"}, "gradient_clipping": 1.0})
    assert "optimizer" not in kept and "gradient_clipping" not in kept
    assert "offload_optimizer" not in kept["zero_optimization"] and "offload_param" in kept["zero_optimization"]


def test_the_page_has_a_row_for_each() -> None:
    """Rows of arguments without an effect begin with "none"."""
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE))
    names = inspect.signature(TrainerArguments.__init__).parameters.keys() - {"self"}
    assert names - rows.keys() == set()
    assert {name for name, text in rows.items() if "| none: " in f"| {text}"} == NONE


def test_fabric_takes_a_trainers_arguments_but_for_two() -> None:
    """Only the name of the precision argument and the default of ``logging_batch_size_per_gpu`` differ."""
    one, other = (inspect.signature(kind.__init__).parameters for kind in (ForTrainer, ForFabric))
    renamed = {"precision_plugin": "precision"}
    assert [renamed.get(name, name) for name in one] == list(other)
    different = [name for name in one if one[name].default != other[renamed.get(name, name)].default]
    assert different == ["logging_batch_size_per_gpu"] and other[different[0]].default is None
    assert loaded(ForFabric(None, True, 1)).zero.stage == 1
    with pytest.raises(TypeError, match="precision_plugin"):
        ForFabric(precision_plugin=3)
