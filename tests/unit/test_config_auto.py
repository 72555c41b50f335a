"""Values that a configuration leaves open: `"auto"` that no trainer filled in, and a stage that is not set."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from zeropp.config import Config, ConfigError, load_config, require_supported

NO_STAGE = (
    "the configuration does not set zero_optimization.stage, which is then 0 and partitions nothing; "
    "set 1, 2 or 3, or 0 to keep it"
)
HEADLINE = 'the configuration has "auto" where no trainer filled in a value, so the default is used'
OWN_TYPE = "false, so the model computes in its parameters' own type, float32 unless it was cast"
STAGE = {"zero_optimization": {"stage": 3}}

# The ZeRO-3 example of the transformers documentation.
PUBLISHED: dict[str, Any] = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}


def loaded(source: dict[str, Any] | str | Path | None) -> tuple[Config, list[str]]:
    """Return the configuration and the messages of its warnings, and check that warnings point at the caller."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = load_config(source)
    assert all(w.filename == __file__ for w in caught), "a warning should point at the caller"
    return config, [str(w.message) for w in caught]


# Values of "auto".


def test_auto_is_the_default() -> None:
    config, _ = loaded(
        {
            "zero_optimization": {
                "stage": 3,
                "reduce_bucket_size": "auto",
                "stage3_prefetch_bucket_size": "auto",
                "overlap_comm": "auto",
                "offload_optimizer": {"device": "auto", "buffer_count": "auto"},
            },
            "fp16": {"enabled": "auto", "loss_scale_window": 7},
            "bf16": {"enabled": "auto"},
            "gradient_clipping": "auto",
            "train_batch_size": "auto",
            "optimizer": {"type": "AdamW", "legacy_fusion": "auto"},
        }
    )
    assert config.zero.reduce_bucket_size == 500_000_000
    assert config.zero.prefetch_bucket_size == 50_000_000
    assert config.zero.overlap_comm is True
    assert config.zero.offload_optimizer is not None
    assert (config.zero.offload_optimizer.device, config.zero.offload_optimizer.buffer_count) == ("none", 4)
    assert (config.fp16.enabled, config.fp16.loss_scale_window, config.bf16.enabled) == (False, 7, False)
    assert (config.gradient_clipping, config.train_batch_size) == (0.0, None)


@pytest.mark.parametrize("key", ["bf16", "bfloat16"])
def test_bf16_at_auto_is_named_as_it_was_spelled(key: str) -> None:
    _, messages = loaded({**STAGE, key: {"enabled": "auto"}})
    assert messages == [f"{HEADLINE}: {key}.enabled: {OWN_TYPE}; set true or false"]


def test_compute_type_that_is_set_answers_for_the_other() -> None:
    config, messages = loaded({**STAGE, "bf16": {"enabled": True}, "fp16": {"enabled": "auto"}})
    assert config.bf16.enabled and not config.fp16.enabled
    assert messages == [f"{HEADLINE}: fp16.enabled: false"]


def test_stage_at_auto_is_named_once() -> None:
    config, messages = loaded({"zero_optimization": {"stage": "auto"}})
    assert config.zero.stage == 0
    assert messages == [
        f"{HEADLINE}: zero_optimization.stage: 0, which partitions nothing; set 1, 2 or 3, or 0 to keep it"
    ]


def test_a_block_at_auto_has_its_defaults() -> None:
    config, messages = loaded({"zero_optimization": "auto"})
    assert config.zero.stage == 0
    assert messages == [f"{HEADLINE}: zero_optimization: its defaults", NO_STAGE]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ("null", "null", "1")),
        ({"train_batch_size": 8}, ("", "derived from the other two", "1")),
        ({"train_micro_batch_size_per_gpu": 2}, ("derived from the other two", "", "1")),
        (
            {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2},
            ("", "", "derived from the other two"),
        ),
        ({"gradient_accumulation_steps": 2}, ("null", "null", "")),
    ],
)
def test_messages_on_auto_batch_sizes_name_their_source(given: dict[str, object], expected: tuple[str, ...]) -> None:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    _, messages = loaded({**STAGE, **dict.fromkeys(keys, "auto"), **given})
    for key, text in zip(keys, expected, strict=True):
        assert (f"{key}: {text}" in messages[0]) if text else (f"{key}: " not in messages[0]), messages


def test_unknown_key_at_auto_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"zero_optimization\.stgae: unknown key; did you mean 'stage'"):
        load_config({"zero_optimization": {"stgae": "auto"}})


@pytest.mark.parametrize("key", ["cpu_offload", "stage3_gather_fp16_weights_on_model_save"])
def test_deprecated_key_at_auto_is_as_good_as_absent(key: str) -> None:
    config, (message,) = loaded({"zero_optimization": {"stage": 3, key: "auto"}})
    assert message.startswith(f"zero_optimization.{key} is deprecated; set ")
    assert config == load_config(None)


def test_a_value_given_under_another_spelling_is_no_default() -> None:
    zero = {"stage": 3, "stage3_prefetch_bucket_size": "auto", "prefetch_bucket_size": 5}
    with pytest.raises(ConfigError, match="are two spellings of one key"):
        load_config({"zero_optimization": zero})


# A stage that is not set.


@pytest.mark.parametrize("source", [{}, {"bf16": {"enabled": True}}, {"zero_optimization": {"overlap_comm": True}}])
def test_a_stage_that_is_not_set_is_named(source: dict[str, Any]) -> None:
    config, messages = loaded(source)
    assert config.zero.stage == 0
    assert messages == [NO_STAGE]


def test_a_stage_that_is_set_is_no_news() -> None:
    for stage in range(4):
        assert loaded({"zero_optimization": {"stage": stage}})[1] == []
    assert loaded(None) == (load_config(None), [])
    _, messages = loaded({"zero_optimization": False})
    assert messages == ['zero_optimization: false is deprecated; give a block such as {"stage": 0} instead']


def test_a_file_is_named_by_its_path(tmp_path: Path) -> None:
    file = tmp_path / "zero.json"
    file.write_text(json.dumps({"bf16": {"enabled": "auto"}, "memory_breakdown": True}))
    for source in (file, str(file)):
        auto, stage, idle = loaded(source)[1]
        assert auto.startswith(f'{file} has "auto" where')
        assert stage.startswith(f"{file} does not set zero_optimization.stage")
        assert idle == f"these keys of {file} have no effect: memory_breakdown"


def test_one_line_of_code_warns_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            load_config({"bf16": {"enabled": "auto"}})
    assert len(caught) == 2


# The configuration file published by Hugging Face.


def variant(*dropped: str, **more: object) -> dict[str, Any]:
    source = copy.deepcopy({**PUBLISHED, **more})
    return {key: value for key, value in source.items() if key not in dropped}


def test_published_file_is_refused_in_one_message() -> None:
    config, _ = loaded(PUBLISHED)
    with pytest.raises(ConfigError) as caught:
        require_supported(config)
    assert caught.value.problems == (
        'optimizer: {"params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}, '
        '"type": "AdamW", "legacy_fusion": false} is not in this version; call zeropp.initialize, which makes it, '
        'or make it in your code and pass it in, with values in place of "auto" for lr, betas, eps, weight_decay',
        'scheduler: {"params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}, '
        '"type": "WarmupLR"} is not in this version; call zeropp.initialize, which makes it, or make it in your code '
        'and step it, with values in place of "auto" for warmup_min_lr, warmup_max_lr, warmup_num_steps',
    )


def test_published_file_without_unsupported_keys_loads() -> None:
    for source in (variant("optimizer", "scheduler"), variant(optimizer=None, scheduler=None)):
        config, messages = loaded(source)
        require_supported(config)
        assert type(config.zero.sub_group_size) is int
        assert config.zero.gather_16bit_weights_on_model_save is True
        assert config.resolve_batch(4) == (None, None, 1)
        (auto,) = messages
        assert auto.splitlines() == [
            f"{HEADLINE}, 8 keys:",
            f"  fp16.enabled: {OWN_TYPE}; enable bf16 for 16 bits, or set false",
            "  zero_optimization.reduce_bucket_size: 500,000,000",
            "  zero_optimization.stage3_prefetch_bucket_size: 50,000,000",
            "  zero_optimization.stage3_param_persistence_threshold: 100,000",
            "  gradient_accumulation_steps: 1",
            "  gradient_clipping: 0.0, so no gradient is clipped (Hugging Face's trainers fill in 1.0)",
            "  train_batch_size: null, any size that your loop passes in",
            "  train_micro_batch_size_per_gpu: null, any size that your loop passes in",
        ]


def test_published_file_for_bf16_loads() -> None:
    config, (message,) = loaded(variant("optimizer", "scheduler", bf16={"enabled": "auto"}))
    require_supported(config)
    assert f"{HEADLINE}, 9 keys:" in message
    assert f"  bf16.enabled: {OWN_TYPE}; set true or false" in message.splitlines()
