"""Properties of public DeepSpeed configurations: comments, dead or misplaced keys, fractions, numbers in strings."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args, get_origin

import pytest

from zeropp.config import Config, ConfigError, load_config, require_supported
from zeropp.config.base import Block, spellings
from zeropp.config.blocks import NamedBlock
from zeropp.config.describe import blocks, bounds_text, nested_block
from zeropp.config.foreign_keys import FOREIGN, MOVED, REMOVED
from zeropp.config.loading import parse
from zeropp.config.supported import is_accepted, is_recommended

STAGE = {"zero_optimization": {"stage": 2}}


def zero(stage: int = 2, **keys: object) -> dict[str, object]:
    return {"zero_optimization": {"stage": stage, **keys}}


def loaded(source: dict[str, Any]) -> tuple[Config, list[str]]:
    """Return the configuration, after checking that this version supports it, and the messages of its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = load_config({**STAGE, **source})
    require_supported(config.model_copy(update={"optimizer": None, "scheduler": None}))
    return config, [str(each.message) for each in caught]


def nested(path: str, value: object) -> dict[str, Any]:
    """Return ``{"a": {"b": value}}`` for the path "a.b", with the keys that the blocks above require."""
    content = value
    for part in reversed(path.split(".")):
        content = {part: content}
    assert isinstance(content, dict)
    for block, kind in (("optimizer", "AdamW"), ("scheduler", "WarmupDecayLR")):
        if isinstance(content.get(block), dict):
            content[block].setdefault("type", kind)
    if isinstance(content.get("zero_optimization"), dict):
        content["zero_optimization"].setdefault("stage", 3)
    return content


def remedies(source: dict[str, Any]) -> dict[str, str]:
    """Return the remedies for unknown keys, by the keys' full paths."""
    with pytest.raises(ConfigError) as caught:
        load_config({**STAGE, **source}, final=False)
    return dict(
        problem.split(": unknown key; ", 1) for problem in caught.value.problems if ": unknown key; " in problem
    )


def read(config: object, path: str) -> object:
    for part in path.split("."):
        config = config.get(part) if isinstance(config, dict) else getattr(config, part.removeprefix("stage3_"))
    return config


TAKEN: dict[str, tuple[dict[str, Any], str, object, tuple[str, ...]]] = {
    # Name of the case: (configuration, path of a key, its expected value, parts of the expected warnings).
    "sub-groups of nothing": (zero(3, sub_group_size=0), "zero_optimization.sub_group_size", 10**9, ()),
    "sub-groups of a fraction": (zero(3, sub_group_size=0.3), "zero_optimization.sub_group_size", 10**9, ()),
    "weights on the host below stage 3": (
        zero(2, offload_param={"device": "cpu", "pin_memory": True}),
        "zero_optimization.offload_param.device", "none",
        ('offload_param.device "cpu" has no effect in stage 2',),
    ),
    "weights in files below stage 3": (
        zero(1, offload_param={"device": "nvme", "nvme_path": "/x"}),
        "zero_optimization.offload_param.device", "none",
        ('offload_param.device "nvme" has no effect in stage 1',),
    ),
    "weights on the host in stage 0": (
        zero(0, offload_param={"device": "cpu"}), "zero_optimization.offload_param.device", "none", ("stage 0",),
    ),
    "weights on no other device below stage 3": (
        zero(2, offload_param={"device": "none"}), "zero_optimization.offload_param.device", "none", (),
    ),
    "weights on the host in stage 3": (
        zero(3, offload_param={"device": "cpu"}), "zero_optimization.offload_param.device", "cpu", (),
    ),
    "messages every so many steps": ({"steps_per_print": 2000}, "steps_per_print", 2000, ()),
    "no timers": ({"wall_clock_breakdown": False}, "wall_clock_breakdown", False, ()),
    "timers": ({"wall_clock_breakdown": True}, "wall_clock_breakdown", True, ("no effect: wall_clock_breakdown",)),
    "dead keys": (
        {"fp32_allreduce": True, "monitor_config": {"enabled": True, "tag": "x"}, "comms_config": {"verbose": False}},
        "gradient_clipping", 0.0, ("no effect: fp32_allreduce, monitor_config, comms_config",),
    ),
    "dead keys that say nothing": (
        {"fp32_allreduce": False, "monitor_config": {"enabled": False, "tag": "x"}, "seed": None, "dataset": "auto"},
        "gradient_clipping", 0.0, (),
    ),
    "a launcher's keys": (
        {"distributed_type": "DEEPSPEED", "num_processes": 8, "zero3_init_flag": True}, "gradient_clipping", 0.0,
        ("no effect: distributed_type, num_processes, zero3_init_flag",),
    ),
    "a number in a string": (zero(3, stage3_max_live_parameters="5e8"), "zero_optimization.max_live_parameters",
                             500_000_000, ()),
    "an argument beside params that holds anyway": (
        {"optimizer": {"type": "Adam", "adam_w_mode": True, "params": {"lr": 0.1}}}, "optimizer.params", {"lr": 0.1}, ()
    ),
    "an argument beside params that repeats it": (
        {"optimizer": {"type": "SGD", "lr": 0.1, "momentum": 0.5, "params": {"lr": 0.1, "momentum": 0.5}}},
        "optimizer.params", {"lr": 0.1, "momentum": 0.5}, (),
    ),
    "arguments of a schedule in strings": (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "3e-5", "warmup_num_steps": "100"}}},
        "scheduler.params", {"warmup_max_lr": 3e-5, "warmup_num_steps": 100}, (),
    ),
    "arguments of an optimizer in strings": (
        {"optimizer": {"type": "AdamW", "params": {"eps": "1e-6", "betas": ["0.9", ".95"], "kind": "1e-6x"}}},
        "optimizer.params", {"eps": 1e-6, "betas": [0.9, 0.95], "kind": "1e-6x"}, (),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", TAKEN)
def test_unusual_values_are_accepted_with_the_expected_warnings(kind: str) -> None:
    source, path, expected, notes = TAKEN[kind]
    config, told = loaded(source)
    assert read(config, path) == expected
    assert len(told) == len(notes)
    for part, message in zip(notes, told, strict=True):
        assert part in message


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bf16.loss_scale": ({"bf16": {"enabled": True, "loss_scale": 0}}, "remove it: bf16 has no loss scale"),
    "bf16.hysteresis": ({"bf16": {"enabled": False, "hysteresis": 2}}, "remove it: bf16 has no loss scale"),
    "fp16.fp16": ({"fp16": {"fp16": True, "enabled": True}}, "set fp16.enabled instead"),
    "fp16.bf16": ({"fp16": {"bf16": True}}, "set bf16.enabled instead"),
    "fp16.type": ({"fp16": {"enabled": True, "type": "bfloat16"}}, "set bf16.enabled instead"),
    "loss_scale": ({"loss_scale": 0}, "it belongs elsewhere, as fp16.loss_scale"),
    "zero_optimization.loss_scale_window": (
        zero(loss_scale_window=5), "it belongs elsewhere, as fp16.loss_scale_window",
    ),
    "zero_optimization.gradient_clipping": (zero(gradient_clipping=1), "it belongs to the top level"),
    "zero_optimization.bf16": (zero(bf16={"enabled": True}), "it belongs to the top level"),
    "fp16.fp16_master_weights_and_gradients": (
        {"fp16": {"fp16_master_weights_and_gradients": True}},
        "did you mean 'fp16_master_weights_and_grads'?",
    ),
    "gradient_accumulation_dtype": (
        {"gradient_accumulation_dtype": "fp32"}, "set data_types.grad_accum_dtype instead",
    ),
    "max_grad_norm": ({"max_grad_norm": 1.0}, "set gradient_clipping instead"),
    "zero_optimization.max_grad_norm": (zero(max_grad_norm=1.0), "set gradient_clipping instead"),
    "optimizer.max_grad_norm": (
        {"optimizer": {"type": "Adam", "max_grad_norm": 1.0}}, "set gradient_clipping instead",
    ),
    "optimizer.gradient_clipping": (
        {"optimizer": {"type": "Adam", "gradient_clipping": 1.0}}, "it belongs to the top level",
    ),
    "scheduler.loss_scale": (
        {"scheduler": {"type": "WarmupLR", "loss_scale": 0}}, "it belongs elsewhere, as fp16.loss_scale",
    ),
    "optimizer.lr": ({"optimizer": {"type": "Adam", "lr": 0.1}}, "it belongs into optimizer.params"),
    "optimizer.adam_w_mode": (
        {"optimizer": {"type": "Adam", "adam_w_mode": False}}, "it belongs into optimizer.params",
    ),
    "optimizer.momentum": ({"optimizer": {"type": "sgd", "momentum": 0.9}}, "it belongs into optimizer.params"),
    "optimizer.betas": ({"optimizer": {"type": "Lion", "betas": [0.9, 0.99]}}, "it belongs into optimizer.params"),
    "optimizer.eps": ({"optimizer": {"type": "Lion", "eps": 1e-8}}, "remove it: Lion does not take it"),
    "optimizer.learning_rate": (
        {"optimizer": {"type": "Adagrad", "learning_rate": 1}}, "set optimizer.params.lr instead",
    ),
    "optimizer.rho": ({"optimizer": {"type": "Adadelta", "rho": 1}}, "remove it, or put it into optimizer.params if"),
    "scheduler.warmup_num_steps": (
        {"scheduler": {"type": "WarmupLR", "warmup_num_steps": 5}}, "it belongs into scheduler.params",
    ),
    "offload_optimizer": ({"offload_optimizer": {}}, "it belongs elsewhere, as zero_optimization.offload_optimizer"),
    "zero_optimization.device": (
        zero(device="cpu"),
        "it belongs elsewhere, as zero_optimization.offload_param.device or zero_optimization.offload_optimizer.device",
    ),
    "zero_optimization.offload_parameters": (
        zero(offload_parameters={"device": "cpu"}), "set zero_optimization.offload_param instead",
    ),
    "zero_stage": ({"zero_stage": 3}, "set zero_optimization.stage instead"),
    "prefetch_bucket_sze": ({"prefetch_bucket_sze": 3}, "did you mean 'zero_optimization.prefetch_bucket_size'?"),
    "zero_optimization.allgather_bucket_sze": (
        zero(allgather_bucket_sze=3), "remove it: it looks like allgather_bucket_size, which has no effect",
    ),
    "zero_optimization.contigious_gradients": (
        zero(contigious_gradients=True), "remove it: it looks like contiguous_gradients, which has no effect",
    ),
    "zero_optimization.steps_per_print": (
        zero(steps_per_print=3), "remove it, since steps_per_print has no effect in this version",
    ),
    "zero_optimization.tensor_parallel": (zero(tensor_parallel={}), "remove it, since it is not in this version"),
    "zero_optimization.offload_optimizer.enabled": (
        zero(offload_optimizer={"device": "cpu", "enabled": False}),
        'remove it: the key "device" switches the block on, and "none" switches it off',
    ),
    "aio.enabled": ({"aio": {"enabled": True}}, "remove it: this block has no such key and takes effect by being"),
    "zeropp.enable": ({"zeropp": {"enable": True}}, "remove it: this block has no such key and takes effect by being"),
    "zero_optimization.zeropp_loco_param.enabled": (
        zero(zeropp_loco_param={"enabled": True}), "remove it: this block has no such key and takes effect by being",
    ),
    "optimizer.enabled": (
        {"optimizer": {"type": "AdamW", "enabled": True}}, "remove it: this block has no such key and takes effect",
    ),
    "enabled": ({"enabled": True}, "remove it: it does not say what is to be enabled"),
    "torch_autocast.enable": ({"torch_autocast": {"enable": True}}, "did you mean 'enabled'?"),
    "bf16.type_": ({"bf16": {"type_": "x"}}, "remove it, or use one of: enabled, check_grad_overflow, bf16_master_"),
    "aio.type": ({"aio": {"type": "x"}}, "remove it, or use one of: block_size, queue_depth"),
    "cpu_offload": (
        {"cpu_offload": True}, "it is an old key of zero_optimization; set offload_optimizer there instead",
    ),
    "zero_optimization.cpu_ofload": (
        zero(cpu_ofload=True), "set offload_optimizer instead, which has taken the place of cpu_offload",
    ),
    "fp16.fp16_optimizer_states": (
        {"fp16": {"fp16_optimizer_states": True}}, "remove it: fp16.fp16_master_weights_and_grads also stores",
    ),
    "bf16.bf16_optimizer_state": (
        {"bf16": {"enabled": True, "bf16_optimizer_state": True}},
        "did you mean 'bf16_optimizer_states'?",
    ),
    "bf16_optimizer_states": (
        {"bf16_optimizer_states": True},
        "it belongs elsewhere, as bf16.bf16_optimizer_states",
    ),
    "nvme_path": (
        {"nvme_path": "/x"},
        "it belongs elsewhere, as zero_optimization.offload_param.nvme_path or "
        "zero_optimization.offload_optimizer.nvme_path",
    ),
    "betas": (
        {"betas": [0.9, 0.99], "optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
        "remove it: SGD does not take betas",
    ),
    "learning_rate": (
        {"learning_rate": 0.1},
        "set optimizer.params.lr instead",
    ),
    "optimizer.momentun": (
        {"optimizer": {"momentun": 0.1}},
        "did you mean 'optimizer.params.momentum'?",
    ),
    "adam_w_mode": (
        {"adam_w_mode": False},
        "set optimizer.params.adam_w_mode instead",
    ),
    "scheduler.total_num_steps": (
        {"scheduler": {"total_num_steps": 9}},
        "it belongs into scheduler.params",
    ),
    "total_num_steps": (
        {"total_num_steps": 9},
        "set scheduler.params.total_num_steps instead",
    ),
    # Keys that look like a known key but mean the opposite.
    "fp16.max_loss_scales": ({"fp16": {"max_loss_scales": 2}}, "did you mean 'loss_scale'?"),
    "fp16.loss_scaler": ({"fp16": {"enabled": False, "loss_scaler": 2}}, "did you mean 'loss_scale'?"),
    "fp16.max_loss_scale": ({"fp16": {"max_loss_scale": 2}}, "remove it: the dynamic scale has no upper bound"),
    "fp16.bf16_master_weights_and_grad": (
        {"fp16": {"bf16_master_weights_and_grad": True}},
        "did you mean 'bf16.bf16_master_weights_and_grads'?",
    ),
    "clip_grad_value": ({"clip_grad_value": 1}, "remove it: gradients are clipped by their norm, by gradient_clipping"),
    "eval_micro_batch_size": ({"eval_micro_batch_size": 4}, "remove it: an evaluation takes the batches that your"),
    "test_batch_size": ({"test_batch_size": 4}, "remove it: an evaluation takes the batches that your"),
    "inner_batch_size": (
        {"inner_batch_size": 4}, "set train_batch_size or train_micro_batch_size_per_gpu instead",
    ),
    "train_batch_sise": ({"train_batch_sise": 4}, "did you mean 'train_batch_size'?"),
    "compile.backend": ({"compile": {"backend": "inductor"}}, "remove it: engine.compile() compiles the model"),
    "zero_optimization.sparse_gradients": (zero(sparse_gradients=True), "remove it, since it is not in this version"),
    "FP16": ({"FP16": {"enabled": True}}, "did you mean 'fp16'?"),
}  # fmt: skip


@pytest.mark.parametrize("key", REFUSED)
def test_refused_keys_are_named_with_their_remedy(key: str) -> None:
    source, expected = REFUSED[key]
    assert remedies(source)[key].startswith(expected)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({"bf16": True}, 'bf16: got true; expected an object; write {"enabled": true}'),
        ({"zero_optimization": 2}, 'zero_optimization: got 2; expected an object; write {"stage": 2}'),
        ({"optimizer": "AdamW"}, 'write {"type": "AdamW"}'),
        (zero(offload_optimizer="cpu"), 'write {"device": "cpu"}'),
        (zero(offload_optimizer="CPU"), 'write {"device": "cpu"}'),
        (zero(offload_param=True), 'write {"device": "cpu"}'),
        (zero(offload_param=False), 'write {"device": "none"}'),
        ({"optimizer": "FusedAdam"}, 'write {"type": "Adam"}'),
        ({"compile": True}, "remove it: engine.compile() compiles the model"),
        ({"activation_checkpointing": True}, "remove it: the block takes effect when code calls"),
        (zero(stage3_prefetch_bucket_size="1e6 elements"), "stage3_prefetch_bucket_size: got "),
        ({"gradient_clipping": "large"}, "gradient_clipping: got "),
    ],
)
def test_a_wrong_type_is_answered_with_the_right_one(source: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    (problem,) = caught.value.problems
    assert expected in problem and "; expected " in problem


@pytest.mark.parametrize("source", [zero(offload_optimizer="gpu"), {"zero_optimization": 7}])
def test_a_block_that_would_be_refused_is_not_written_out(source: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    assert "write" not in str(caught.value)


# Numbers.


def numeric() -> Iterator[tuple[str, str]]:
    """Yield (path, bounds) of every numeric key of the configuration."""
    for where, model in blocks(Config):
        for name, field in model.model_fields.items():
            is_number = isinstance(field.default, int | float) and not isinstance(field.default, bool)
            if is_number or any(f"{kind} | None" in str(field.annotation) for kind in ("int", "float")):
                yield ".".join((*where, spellings(name, field)[0])), bounds_text(field)


@pytest.mark.parametrize(("path", "bounds"), list(numeric()))
def test_numbers_may_be_written_as_strings(path: str, bounds: str) -> None:
    block = path.rpartition(".")[0]
    number = 0.5 if "<= 1" in bounds.split(", ") or "< 1" in bounds else 4 if "_bits" in block else 2
    for text in (str(number), f" {number}e0", f"+{number}"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = load_config(nested(path, text))
            assert config == load_config(nested(path, number))
    for text in ("1,000", "0x10", "2 GB", "many", ""):
        with pytest.raises(ConfigError, match=rf"{re.escape(path)}: got "):
            load_config(nested(path, text), final=False)


BUCKETS = (
    "reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
    "stage3_model_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance", "sub_group_size",
    "stage3_module_granularity_threshold", "offload_param.buffer_size", "offload_param.max_in_cpu",
)  # fmt: skip


@pytest.mark.parametrize("key", [*(f"zero_optimization.{each}" for each in BUCKETS), "zeropp.unit_numel"])
@pytest.mark.parametrize("value", [15099494.4, "15099494.4", "1.50994944e7"])
@pytest.mark.filterwarnings("ignore:offload_param")
def test_fractions_of_a_bound_are_rounded_down(key: str, value: object) -> None:
    config = load_config({**STAGE, **nested(key, value)})
    number = read(config, key)
    assert type(number) is int and number == 15099494


@pytest.mark.parametrize("key", ["train_batch_size", "gradient_accumulation_steps", "fp16.hysteresis"])
def test_fractions_of_a_count_are_not(key: str) -> None:
    with pytest.raises(ConfigError, match="expected integer"):
        load_config({**STAGE, **nested(key, 1.5)})


# Comments.


@pytest.mark.parametrize("key", ["_comment", "comment", "Comment 2", "__fp16__", "//", "# note", "_stage"])
def test_comments_may_stand_in_every_block(key: str) -> None:
    for where, _ in blocks(Config):
        config, told = loaded(nested(".".join((*where, key)), {"any": ["thing"]}))
        plain, before = loaded(nested(".".join(where), {}) if where else {})
        assert config == plain and told == before, where
    config, told = loaded({"optimizer": {"type": "AdamW", "params": {"lr": 0.1, key: "x"}}, "amp": {key: "off"}})
    assert config.optimizer is not None and config.optimizer.params == {"lr": 0.1}
    assert told == []


def test_comments_may_repeat_their_key() -> None:
    assert parse('{"_comment": 1, "stage": 3, "_comment": 2}', "text") == {"_comment": 2, "stage": 3}
    with pytest.raises(ConfigError, match="given twice"):
        parse('{"stage": 1, "stage": 3}', "text")


# Tables of foreign, moved and removed keys.


def value_for(path: str) -> object:
    """Return a value that a key accepts; mostly not its default."""
    samples: dict[str, object] = {
        "train_batch_size": 8, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2,
        "data_types.grad_accum_dtype": "fp32", "data_types.param_dtype": "bf16", "communication_data_type": "fp32",
        "checkpoint.tag_validation": "FAIL",
        "zero_optimization.offload_optimizer.nvme_path": "/x", "zero_optimization.offload_param.nvme_path": "/x",
        "optimizer.type": "AdamW", "scheduler.type": "WarmupLR", "optimizer.params.betas": [0.8, 0.9],
        "scheduler.params.warmup_type": "linear", "torch_autocast.dtype": "bf16", "gradient_allreduce_op": "sum",
    }  # fmt: skip
    if path in samples:
        return samples[path]
    if path.endswith(".device"):
        return "cpu"
    if path.endswith((".enabled", "_mode", "_adam", "_save", "_comm", "_checkpointing", "_universal", "_memory",
                      "quantized_weights", "quantized_gradients", "drop_last",
                      "_read", "_write")):  # fmt: skip
        return True
    return {} if path in PLACES else 2


PLACES = {".".join(where) for where, _ in blocks(Config)} | {"optimizer.params", "scheduler.params"}


def written_in_full(name: str) -> str:
    """Return the full path of a key as the tables name it."""
    block, _, key = name.rpartition(".")
    (where,) = [each for each in PLACES if f".{each}".endswith(f".{block}")] if block else [""]
    return f"{where}.{key}" if where else key


@pytest.mark.parametrize("name", MOVED)
def test_a_key_of_known_meaning_is_led_to_one_that_is_taken(name: str) -> None:
    written = written_in_full(name)
    if not written.startswith(("optimizer.params.", "scheduler.params.")):
        told = remedies(nested(written, 1))[written]
        assert told.startswith((f"set {MOVED[name]} instead", "it belongs into ")), told
    for place in MOVED[name].split(" or "):
        loaded(nested(place, value_for(place)))


@pytest.mark.parametrize("name", REMOVED)
def test_a_key_without_a_place_is_told_why(name: str) -> None:
    written = written_in_full(name) if "." in name else f"aio.{name}"
    if not written.startswith("scheduler.params."):
        assert remedies(nested(written, 1))[written] == f"remove it: {REMOVED[name]}"


def test_tables_and_keys_do_not_overlap() -> None:
    top = {key for name, field in Config.model_fields.items() for key in spellings(name, field)}
    assert not FOREIGN & {*top, *MOVED, *REMOVED}
    assert not {*MOVED} & {*top, *REMOVED}


@pytest.mark.parametrize("key", sorted(FOREIGN))
def test_foreign_keys_are_named_once(key: str) -> None:
    assert loaded({key: "x"})[1] == [f"these keys of the configuration have no effect: {key}"]
    # Below the top level, keys of other libraries are refused, as in DeepSpeed.
    assert f"zero_optimization.{key}" in remedies({"zero_optimization": {"stage": 2, key: "x"}})


def keys_and_fields() -> Iterator[tuple[str, type[Block], str]]:
    """Yield (path, block, field) for every spelling of every key."""
    for where, model in blocks(Config):
        for name, field in model.model_fields.items():
            yield from ((".".join((*where, key)), model, name) for key in spellings(name, field))


RECOMMENDED = {path: (model, name) for path, model, name in keys_and_fields() if is_recommended(model, name)}


def another(path: str, model: type[Block], name: str) -> object:
    """Return a value other than the key's default, which needs no further keys except those in NEEDED."""
    field = model.model_fields[name]
    samples: dict[str, object] = {
        "weight_codec": "int8", "nvme_path": "/x", "device": "cpu", "keep_in_fp32_modules": ["norm"],
        "lower_precision_safe_modules": ["torch.nn.Linear"], "zero_quantized_gradients": True, "param_dtype": "bf16",
        "grad_accum_dtype": "fp32", "optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupLR"},
        "type": "AdamW", "params": {"lr": 0.1}, "stage": 2, "overlap_comm": False, "buffer_dtype": "fp32",
        "communication_data_type": "fp32",
    }  # fmt: skip
    if name in samples:
        return samples[name]
    if nested_block(field) is not None:
        return {"device": "cpu"} if "offload" in name else {}
    if isinstance(field.default, bool):
        return not field.default
    choices = [each for part in (field.annotation, *get_args(field.annotation)) if get_origin(part) is Literal
               for each in get_args(part)]  # fmt: skip
    if choices:
        return next(each for each in choices if each != field.default)
    if isinstance(field.default, tuple):
        return ["x"]
    if "<= 1" in bounds_text(field) or "< 1" in bounds_text(field):
        return 0.5
    return 4 if field.default != 4 else 3


def put(source: dict[str, Any], path: str, value: object) -> None:
    *above, last = path.split(".")
    for part in above:
        source = source.setdefault(part, {})
    source[last] = value


# Keys that other keys need to have an effect or to be accepted: prefix of a path -> configuration.
NEEDED: dict[str, dict[str, object]] = {
    "zero_optimization.offload_param.": {"zero_optimization.offload_param.device": "cpu"},
    "zero_optimization.offload_optimizer.": {"zero_optimization.offload_optimizer.device": "cpu"},
    "zero_optimization.zeropp_loco_param": {"zero_optimization.zero_quantized_gradients": True},
    "fp16.": {"fp16.enabled": True},
    "bf16.bf16_": {
        "bf16.enabled": True, "bf16.bf16_optimizer_states": True, "bf16.bf16_master_weights_and_grads": True,
    },
    "zeropp.gradient_bits": {"zero_optimization.zero_quantized_gradients": True},
    "zeropp.hadamard": {"zero_optimization.zero_quantized_gradients": True},
    "zeropp.feedback": {
        "zero_optimization.zeropp_loco_param": {}, "zero_optimization.zero_quantized_gradients": True,
    },
    "zeropp.secondary": {
        "zero_optimization.zero_quantized_weights": True, "zero_optimization.zero_hpz_partition_size": 2,
    },
}  # fmt: skip


def needed(path: str) -> dict[str, object]:
    return {key: value for start, keys in NEEDED.items() if path.startswith(start) for key, value in keys.items()}


def completed(path: str, model: type[Block], name: str) -> dict[str, Any]:
    """Return a stage 3 configuration that sets a key and the keys that it needs."""
    source: dict[str, Any] = {"zero_optimization": {"stage": 3}}
    for key, value in needed(path).items():
        put(source, key, value)
    put(source, path, another(path, model, name))
    if path.startswith("scheduler.") and "type" not in source["scheduler"]:
        source["scheduler"]["type"] = "WarmupLR"
    return source


@pytest.mark.parametrize("path", RECOMMENDED)
def test_a_recommended_key_is_neither_refused_nor_ignored(path: str) -> None:
    told = loaded(completed(path, *RECOMMENDED[path]))[1]
    assert not [each for each in told if "no effect" in each], told


def suggested(told: str, where: Sequence[str], key: str) -> list[str]:
    """Return the paths of the keys that a remedy suggests for ``key`` in the block at ``where``."""
    here = [".".join((*where, each)) for each in re.split(r" or |, ", told.partition(": ")[2])]
    if told.startswith("remove it, or use one of: "):
        return here
    if told.startswith("remove it"):
        return []
    if told == "it belongs to the top level":
        return [key]
    if found := re.fullmatch(r"it belongs into (\S+)", told):
        return [f"{found[1]}.{key}"]
    if found := re.fullmatch(r"it is an old key of (\S+); set (\w+).* there instead", told):
        return [f"{found[1]}.{found[2].replace('pin_memory', 'offload_param.pin_memory')}"]
    if found := re.fullmatch(r"set (\w+).* instead, which has taken the place of \w+", told):
        return [".".join((*where, found[1].replace("pin_memory", "offload_param.pin_memory")))]
    if found := re.fullmatch(r"did you mean '(.*)'( at the top level)?\?", told):
        return [found[1] if "." in found[1] or found[2] else ".".join((*where, found[1]))]
    found = re.fullmatch(r"it belongs elsewhere, as (.*)|set (.*) instead", told)
    assert found is not None, told
    return (found[1] or found[2]).split(" or ")


def test_no_remedy_names_a_key_that_is_refused_or_ignored() -> None:
    """Try every key in every block where it does not belong, and every key of a block with a letter missing."""
    refused = {path.rpartition(".")[2] for path, model, name in keys_and_fields() if not is_accepted(model, name)}
    assert {"deepcompile", "super_offload", "sparse_gradients", "legacy_stage1", "zenflow"} <= refused
    every = {path.rpartition(".")[2] for path in (*(path for path, _, _ in keys_and_fields()), *MOVED, *REMOVED)}
    count = 0
    for where, model in blocks(Config):
        own = {key for name, field in model.model_fields.items() for key in spellings(name, field)} | {*model.retired}
        wrong = sorted({*every, *(key[:-2] + key[-1] for key in own)} - own - (FOREIGN if not where else set()))
        if issubclass(model, NamedBlock):
            wrong = [key for key in wrong if key not in model.harmless]
        content: dict[str, Any] = dict.fromkeys(wrong, "?")
        for part in reversed(where):
            content = {part: content}
        for path, told in remedies(content).items():
            key = path.rpartition(".")[2]
            for target in suggested(told, where, key):
                argument = re.fullmatch(r"(optimizer|scheduler)\.params\.\w+", target)
                assert argument or target in RECOMMENDED, (path, told)
                # "enabled" means something different in each block, so it must not be suggested from another block.
                assert target.rpartition(".")[2] != "enabled" or key != "enabled", (path, told)
            count += 1
    assert count > 5000


def test_reasons_name_keys_that_are_recommended() -> None:
    for reason in {*REMOVED.values()}:
        for path in re.findall(r"\b[a-z]\w+(?:\.\w+)+\b(?!\()", reason):
            if not path.startswith(("scheduler.params.", "zeropp.training.", "zeropp.init_", "engine.", "torch.")):
                assert path in RECOMMENDED, reason


# Wrong keys of public files, each with a value and the key where the value belongs.
FOLLOWED: dict[str, tuple[object, str]] = {
    # Batch sizes, accumulation and clipping.
    "micro_batch": (4, "train_micro_batch_size_per_gpu"),
    "microbatch_size": (4, "train_micro_batch_size_per_gpu"),
    "per_device_batch_size": (4, "train_micro_batch_size_per_gpu"),
    "local_batch_size": (4, "train_micro_batch_size_per_gpu"),
    "mini_batch_size": (4, "train_micro_batch_size_per_gpu"),
    "microBatchSize": (4, "train_micro_batch_size_per_gpu"),
    "device_train_microbatch_size": (4, "train_micro_batch_size_per_gpu"),
    "train_batch_size_per_device": (4, "train_micro_batch_size_per_gpu"),
    "samples_per_gpu": (4, "train_micro_batch_size_per_gpu"),
    "total_train_batch": (4, "train_batch_size"),
    "effective_batch_size": (4, "train_batch_size"),
    "accum_steps": (4, "gradient_accumulation_steps"),
    "num_micro_batches": (4, "gradient_accumulation_steps"),
    "accumulate_grad": (4, "gradient_accumulation_steps"),
    "grad_acc_iters_accum": (4, "gradient_accumulation_steps"),
    "update_freq_accum_steps": (4, "gradient_accumulation_steps"),
    "clip_gradients": (1.0, "gradient_clipping"),
    "clip_grad_norm_value": (1.0, "gradient_clipping"),
    "grad_norm_clipping": (1.0, "gradient_clipping"),
    "fp16.grad_clip": (1.0, "gradient_clipping"),
    "accumulate_in_fp32": ("fp32", "data_types.grad_accum_dtype"),
    # Precision.
    "autocast": (True, "torch_autocast.enabled"),
    "bf16.enable": (True, "bf16.enabled"),
    "fp16.active": (True, "fp16.enabled"),
    "fp16.initial_scale_pow": (8, "fp16.initial_scale_power"),
    # The zero_optimization block.
    "zero_optimization.level": (2, "zero_optimization.stage"),
    "zero_optimization.zero_stage": (2, "zero_optimization.stage"),
    "zero_optimization.offload": ({"device": "cpu"}, "zero_optimization.offload_optimizer"),
    "zero_optimization.hpz": (2, "zero_optimization.zero_hpz_partition_size"),
    "zero_optimization.overlap_communication": (False, "zero_optimization.overlap_comm"),
    "zero_optimization.quantized_weights": (True, "zero_optimization.zero_quantized_weights"),
    "zero_optimization.stage3_max_live_params": (9, "zero_optimization.stage3_max_live_parameters"),
    "zero_optimization.offload_optimizer.type": ("cpu", "zero_optimization.offload_optimizer.device"),
    "zero_optimization.offload_param.target": ("cpu", "zero_optimization.offload_param.device"),
    "zero_optimization.offload_optimizer.pipeline": (True, "zero_optimization.offload_optimizer.pipeline_read"),
    "zero_optimization.offload_optimizer.pinned": (True, "zero_optimization.offload_optimizer.pin_memory"),
    "zero_optimization.offload_param.swap_dir": ("/x", "zero_optimization.offload_param.nvme_path"),
    # Other keys.
    "timeout": (9, "zeropp.hang_timeout"),
    "drop_last": (True, "dataloader_drop_last"),
    "allreduce_op": ("sum", "gradient_allreduce_op"),
    "zero_optimization.qwz": (True, "zero_optimization.zero_quantized_weights"),
    "zero_optimization.offload_optimizer.num_buffers": (9, "zero_optimization.offload_optimizer.buffer_count"),
    "data_types.compute_dtype": ("bf16", "data_types.param_dtype"),
    "bs": (4, "train_batch_size"),
    "aio.depth": (16, "aio.queue_depth"),
    "aio.threads": (2, "aio.intra_op_parallelism"),
    "activation_checkpointing.cpu_offload": (True, "activation_checkpointing.cpu_checkpointing"),
    "checkpoint.tag_validate": ("FAIL", "checkpoint.tag_validation"),
    "zeropp.hang_time_out": (9, "zeropp.hang_timeout"),
}


@pytest.mark.parametrize("key", FOLLOWED)
def test_a_remedy_that_is_followed_leads_to_a_key_that_acts(key: str) -> None:
    value, expected = FOLLOWED[key]
    told = remedies(nested(key, value))[key]
    target = suggested(told, key.split(".")[:-1], key.rpartition(".")[2])[0]
    assert target == expected, told
    source: dict[str, Any] = {"zero_optimization": {"stage": 3}}
    without: dict[str, Any] = {"zero_optimization": {"stage": 3}}
    for needed_key, needed_value in needed(target).items():
        if needed_key != target:
            put(source, needed_key, needed_value)
            put(without, needed_key, needed_value)
    put(source, target, value)
    assert not [each for each in loaded(source)[1] if "no effect" in each]
    assert loaded(source)[0] != loaded(without)[0]


# Ranks that warn.


def test_the_first_rank_alone_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    source = {"dump_state": True, "zero_optimization": True, "fp32_allreduce": True, "bf16": {"enabled": "auto"}}
    for variable in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        with monkeypatch.context() as patch:
            patch.setenv(variable, "0")
            assert len(loaded(source)[1]) == 3
            patch.setenv(variable, "3")
            assert loaded(source)[1] == []
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)
                with pytest.raises(UserWarning, match="fp32_allreduce"):
                    load_config({**STAGE, "fp32_allreduce": True})
