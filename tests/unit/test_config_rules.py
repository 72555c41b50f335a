"""Rules between configuration keys: deprecated forms, contradictions, unknown keys, and keys without effect."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest

from zeropp.config import Config, ConfigError, load_config, require_stage_for_offload, require_supported
from zeropp.config.base import UnsupportedConfigError
from zeropp.config.ignored_keys import OutsideKeys
from zeropp.config.supported import SUPPORT, Kind

STAGE = {"zero_optimization": {"stage": 3}}
# These tests seldom set a stage, so ignore the warning about that.
pytestmark = pytest.mark.filterwarnings("ignore:the configuration does not set")


def problems(source: dict[str, object]) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    return caught.value.problems


# Deprecated forms.


def loaded_with_warnings(source: dict[str, object]) -> tuple[Config, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = load_config(source)
    assert all(w.category is FutureWarning for w in caught)
    assert all(w.filename == __file__ for w in caught), "a warning should point at the caller"
    return config, [str(w.message) for w in caught]


def test_cpu_offload() -> None:
    config, messages = loaded_with_warnings({"zero_optimization": {"stage": 2, "cpu_offload": True}})
    assert config.zero.offload_optimizer is not None and config.zero.offload_optimizer.device == "cpu"
    assert config.zero.offload_param is None
    (message,) = messages
    assert message == "zero_optimization.cpu_offload is deprecated; set offload_optimizer instead"
    config, messages = loaded_with_warnings({"zero_optimization": {"stage": 2, "cpu_offload": False}})
    assert config.zero.offload_optimizer is None
    assert len(messages) == 1


def test_cpu_offload_param() -> None:
    config, messages = loaded_with_warnings({"zero_optimization": {"stage": 3, "cpu_offload_param": True}})
    assert config.zero.offload_param is not None and config.zero.offload_param.device == "cpu"
    assert config.zero.offload_optimizer is None
    assert len(messages) == 1 and "cpu_offload_param" in messages[0]


@pytest.mark.parametrize("pin", [True, False])
def test_cpu_offload_use_pin_memory(pin: bool) -> None:
    zero = {"cpu_offload_use_pin_memory": pin, "cpu_offload": True, "offload_param": {"device": "cpu"}}
    config, messages = loaded_with_warnings({"zero_optimization": {"stage": 3, **zero}})
    assert config.zero.offload_optimizer is not None and config.zero.offload_param is not None
    assert config.zero.offload_optimizer.pin_memory is config.zero.offload_param.pin_memory is pin
    assert sorted(message.split()[0] for message in messages) == [
        "zero_optimization.cpu_offload",
        "zero_optimization.cpu_offload_use_pin_memory",
    ]


def test_pin_memory_without_offload_pins_nothing() -> None:
    config, messages = loaded_with_warnings({"zero_optimization": {"stage": 3, "cpu_offload_use_pin_memory": True}})
    assert config.zero.offload_param is config.zero.offload_optimizer is None
    assert len(messages) == 1


def test_gather_fp16_weights() -> None:
    old = {"stage": 3, "stage3_gather_fp16_weights_on_model_save": True}
    config, messages = loaded_with_warnings({"zero_optimization": old})
    assert config.zero.gather_16bit_weights_on_model_save is True
    assert len(messages) == 1 and "stage3_gather_16bit_weights_on_model_save" in messages[0]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"cpu_offload": True}, {"offload_optimizer": {"device": "cpu"}}),
        ({"cpu_offload": False}, {"offload_optimizer": None}),
        ({"cpu_offload_param": True}, {"offload_param": {}}),
        ({"cpu_offload_use_pin_memory": True}, {"offload_param": {"pin_memory": True}}),
        ({"cpu_offload_use_pin_memory": False}, {"offload_optimizer": {"pin_memory": True}}),
        (
            {"stage3_gather_fp16_weights_on_model_save": True},
            {"stage3_gather_16bit_weights_on_model_save": True},
        ),
        ({"stage3_gather_fp16_weights_on_model_save": True}, {"gather_16bit_weights_on_model_save": True}),
    ],
)
@pytest.mark.filterwarnings("ignore:zero_optimization")
def test_old_and_new_together(old: dict[str, object], new: dict[str, object]) -> None:
    (problem,) = problems({"zero_optimization": {**old, **new}})
    assert problem.startswith("zero_optimization: ")
    assert next(iter(old)) in problem and "both are given" in problem


def test_deprecated_flags_are_booleans() -> None:
    (problem,) = problems({"zero_optimization": {"cpu_offload": "cpu"}})
    assert "cpu_offload: got 'cpu', expected a boolean" in problem


def test_boolean_zero_block() -> None:
    config, messages = loaded_with_warnings({"zero_optimization": True})
    assert (config.zero.stage, config.zero.allgather_bucket_size) == (1, 500_000_000)
    assert messages == ['zero_optimization: true is deprecated; give a block such as {"stage": 1} instead']
    config, messages = loaded_with_warnings({"zero_optimization": False})
    assert config.zero.stage == 0 and len(messages) == 1
    config, _ = loaded_with_warnings({"zero_optimization": True, "allgather_size": 2e8})
    assert config.zero.allgather_bucket_size == 200_000_000


def test_allgather_size_without_the_boolean_form() -> None:
    with pytest.warns(UserWarning, match="allgather_size has no effect without zero_optimization: true"):
        config = load_config({"allgather_size": 5, "zero_optimization": {"stage": 1}})
    assert config.zero.allgather_bucket_size == 500_000_000


# Contradictions.


@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        ({"stage": 3}, True),
        ({"stage": 2}, False),
        ({}, False),
        ({"stage": 3, "overlap_comm": None}, True),
        ({"stage": 3, "overlap_comm": False}, False),
        ({"stage": 1, "overlap_comm": True}, True),
        ({"overlap_comm": None, "stage": 3.0}, True),
    ],
)
def test_overlap_comm_follows_the_stage(zero: dict[str, object], expected: bool) -> None:
    assert load_config({"zero_optimization": zero}).zero.overlap_comm is expected


def refused_offload(stage: int, **blocks: object) -> tuple[str, ...]:
    # Loading raises no error yet, because some rules do not matter for a model without an optimizer.
    config = load_config({"zero_optimization": {"stage": stage, **blocks}})
    said = []
    for check in (require_supported, require_stage_for_offload):
        with pytest.raises(ConfigError) as caught:
            check(config)
        said.append(caught.value.problems)
    assert said[0] == said[1]
    return said[0]


@pytest.mark.filterwarnings("ignore:offload_optimizer.ratio has no effect")
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_ratio_needs_stage_3(stage: int) -> None:
    (problem,) = refused_offload(stage, offload_optimizer={"ratio": 0.5})
    assert problem == (
        f"zero_optimization: offload_optimizer.ratio 0.5 needs stage 3, got stage {stage}; "
        "set stage 3 or leave ratio at 1"
    )
    require_supported(load_config({"zero_optimization": {"stage": stage, "offload_optimizer": {"ratio": 1}}}))


def test_offload_needs_a_stage_that_partitions() -> None:
    cpu = {"device": "cpu"}
    (problem,) = refused_offload(0, offload_optimizer=cpu)
    assert problem.startswith('zero_optimization: offload_optimizer.device "cpu" needs stage 1, 2 or 3, got stage 0')
    for stage in (1, 2, 3):
        require_supported(load_config({"zero_optimization": {"stage": stage, "offload_optimizer": cpu}}))


def test_an_old_implementation() -> None:
    (problem,) = problems({"zero_optimization": {"legacy_stage1": True}})
    assert problem.startswith("zero_optimization.legacy_stage1: true is refused; remove the key")
    assert load_config({"zero_optimization": {"legacy_stage1": False}}).zero.legacy_stage1 is False


def test_one_compute_type() -> None:
    on = {"enabled": True}
    assert problems({"fp16": on, "bf16": on}) == ("fp16.enabled and bf16.enabled are both true; enable one of them",)
    assert load_config({"fp16": on, "bf16": {"enabled": False}}).fp16.enabled


# Unknown keys.


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            {"zero_optimization": {"stage3_prefetch_bucket_sise": 1}},
            "zero_optimization.stage3_prefetch_bucket_sise: unknown key; did you mean 'stage3_prefetch_bucket_size'?",
        ),
        (
            {"zero_optimization": {"prefetch_buket_size": 1}},
            "zero_optimization.prefetch_buket_size: unknown key; did you mean 'prefetch_bucket_size'?",
        ),
        ({"trian_batch_size": 8}, "trian_batch_size: unknown key; did you mean 'train_batch_size'?"),
        (
            {"flop_profiler": {}},
            "flop_profiler: unknown key; remove it: it looks like flops_profiler, which has no effect in this version",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"buffer_size": 1}}},
            "zero_optimization.offload_optimizer.buffer_size: unknown key; "
            "remove it: a staging buffer of states holds zero_optimization.sub_group_size elements",
        ),
        ({"stage": 3}, "stage: unknown key; it belongs elsewhere, as zero_optimization.stage"),
        (
            {"zero_optimization": {"cpu_ofload_param": True}},
            "zero_optimization.cpu_ofload_param: unknown key; set offload_param instead, which has taken the place of "
            "cpu_offload_param",
        ),
        (
            {"zeropp": {"gradient_bits": {"xyz": 8}}},
            "zeropp.gradient_bits.xyz: unknown key; remove it, or use one of: local, cross",
        ),
    ],
)
def test_unknown_keys(source: dict[str, object], expected: str) -> None:
    assert problems(source) == (expected,)


def test_every_problem_is_reported() -> None:
    found = problems(
        {"foo": 1, "gradient_clipping": -1, "zero_optimization": {"stage": 4, "offload_param": {"device": "tpu"}}}
    )
    assert sorted(problem.split(":")[0] for problem in found) == [
        "foo",
        "gradient_clipping",
        "zero_optimization.offload_param.device",
        "zero_optimization.stage",
    ]


def test_problems_name_the_given_and_the_expected_value() -> None:
    assert problems({"zero_optimization": {"sub_group_size": -1.5}}) == (
        "zero_optimization.sub_group_size: got -1.5; expected integer >= 0 (default 1,000,000,000)",
    )
    assert problems({"bf16": 3}) == ("bf16: got 3; expected an object",)
    (item,) = problems({"zero_optimization": {"leaf_module": {"names": ["a", 1]}}})
    assert item == "zero_optimization.leaf_module.names.1: got 1; expected list of strings (default [])"
    (long,) = problems({"bf16": ["x" * 1000]})
    assert len(long) < 150
    with pytest.raises(ConfigError) as caught:
        load_config({"foo": 1, "gradient_clipping": -1})
    assert str(caught.value).splitlines()[0] == "the configuration cannot be used, 2 problems:"


# Keys without effect.


UNREAD = [key for key in OutsideKeys.model_fields if SUPPORT[Config][key].kind is Kind.UNREAD]
OFF = [key for key in OutsideKeys.model_fields if SUPPORT[Config][key].kind is Kind.OFF]


@pytest.mark.parametrize("key", OFF)
def test_unsupported_features_are_refused_only_if_enabled(key: str) -> None:
    for on in ({"enabled": True}, {"enabled": "true"}, {"some": {"enabled": True}}, {"mode": 1}, True, {"tp_size": 2}):
        with pytest.raises(UnsupportedConfigError, match=f"{key}: .* is not in this version"):
            require_supported(load_config({key: on, **STAGE}))
    for off in ({"enabled": False, "x": 1}, {"enabled": "auto"}, {"some": {"enabled": False}}, {}, {"autotp_size": 1}):
        require_supported(load_config({key: off, **STAGE}))


@pytest.mark.parametrize("key", UNREAD)
def test_keys_of_other_features_are_accepted_with_a_warning(key: str) -> None:
    with pytest.warns(UserWarning, match=f"no effect: {key}$") as caught:
        config = load_config({key: {"enabled": True, "unknown": [1]}, **STAGE})
    assert len(caught) == 1
    assert getattr(config, key) == {"enabled": True, "unknown": [1]}


def test_the_named_features_are_known() -> None:
    named = {
        "flops_profiler",
        "comms_logger",
        "tensorboard",
        "wandb",
        "csv_monitor",
        "comet",
        "elasticity",
        "autotuning",
        "hybrid_engine",
        "data_efficiency",
        "amp",
        "tensor_parallel",
        "expert_parallel",
        "weight_quantization",
        "timers",
        "curriculum_learning",
        "pipeline",
        "sparse_attention",
        "eigenvalue",
        "progressive_layer_drop",
        "compression_training",
        "nebula",
        "zenflow",
    }
    assert named <= set(OutsideKeys.model_fields)


def test_one_warning_names_all() -> None:
    with pytest.warns(UserWarning) as caught:
        load_config({"wandb": {"enabled": True}, "fp32_allreduce": True, "comet": True, "dump_state": True, **STAGE})
    (warning,) = caught
    assert str(warning.message).endswith("have no effect: comet, wandb, dump_state, fp32_allreduce")
    assert warning.filename == __file__


def test_a_warning_about_a_call_through_the_library_points_at_its_caller() -> None:
    inside: dict[str, Any] = {"__name__": "zeropp.optimizer.anywhere", "load_config": load_config}
    exec(compile("def wrap(source): return load_config(source)", "wrapper.py", "exec"), inside)
    with pytest.warns(UserWarning, match="no effect: comet") as caught:
        inside["wrap"]({"comet": True, **STAGE})
    assert [w.filename for w in caught] == [__file__]


def test_disabled_features_give_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_config({"wandb": {"enabled": False, "team": "x"}, "amp": {}, "autotuning": None, **STAGE})
        load_config({"steps_per_print": math.inf, "wall_clock_breakdown": False, **STAGE})
        load_config({"timers": {"throughput": {"enabled": False}}, "monitor_config": {"enabled": False}, **STAGE})


def test_configurations_of_lightning_and_accelerate_are_accepted() -> None:
    lightning = {
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 2,
            "contiguous_gradients": True,
            "overlap_comm": True,
            "allgather_partitions": True,
            "reduce_scatter": True,
            "allgather_bucket_size": 200_000_000,
            "reduce_bucket_size": 200_000_000,
            "sub_group_size": 1_000_000_000_000,
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": "/local_nvme",
                "buffer_count": 4,
                "pin_memory": False,
            },
        },
        "activation_checkpointing": {
            "partition_activations": False,
            "cpu_checkpointing": False,
            "contiguous_memory_optimization": False,
            "synchronize_checkpoint_boundary": False,
        },
        "aio": {
            "block_size": 1048576,
            "queue_depth": 8,
            "single_submit": False,
            "overlap_events": True,
            "thread_count": 1,
        },
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "steps_per_print": math.inf,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_config(lightning).zero.sub_group_size == 10**12
