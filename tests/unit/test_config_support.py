"""No setting is silently ignored: each field works, has nothing to do, or is refused."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
from pydantic import JsonValue

from zeropp.config import Config, ConfigError, UnsupportedConfigError, load_config, require_supported
from zeropp.config.base import Block, spellings
from zeropp.config.describe import blocks, nested_block
from zeropp.config.supported import SUPPORT, Kind, uncovered
from zeropp.config.zero_block import OffloadParamConfig, ZeroConfig

# These tests seldom set a stage, so ignore the warning about that.
pytestmark = pytest.mark.filterwarnings("ignore:the configuration does not set")

FIELDS = [(path, model, name) for path, model in blocks(Config) for name in model.model_fields]
LIMITED = [
    (path, model, name)
    for path, model, name in FIELDS
    if SUPPORT[model][name].kind is Kind.LIMITED and name != "legacy_stage1"
]


def refusals(source: dict[str, object]) -> tuple[str, ...]:
    zero = {"stage": 3, **source.get("zero_optimization", {})}  # type: ignore[dict-item]
    try:
        require_supported(load_config({**source, "zero_optimization": zero}))
    except UnsupportedConfigError as error:
        return error.problems
    return ()


def test_every_field_is_classified() -> None:
    assert uncovered(Config) == []


def test_an_unclassified_field_is_found() -> None:
    class More(OffloadParamConfig):
        extra: int = 0

    class Whole(Config):
        added: More | None = None

    found = uncovered(Whole)
    assert "More.extra" in found
    assert "Whole.added" in found


def test_there_are_blocks_below_the_top() -> None:
    assert ("zero_optimization", "offload_param") in [path for path, _ in blocks(Config)]
    assert len(FIELDS) > 150


def test_nested_blocks_are_looked_into_or_refused_whole() -> None:
    for _, model, name in FIELDS:
        if nested_block(model.model_fields[name]) is not None:
            assert SUPPORT[model][name].kind in (Kind.BLOCK, Kind.LIMITED), name
        else:
            assert SUPPORT[model][name].kind is not Kind.BLOCK, name


def test_governors_exist_and_are_limited() -> None:
    for path, model, name in FIELDS:
        support = SUPPORT[model][name]
        if support.kind is not Kind.GOVERNED:
            continue
        # The governor of a field is a key of the same block, or the key that names the block.
        owner = model if support.governor in model.model_fields else parent(path)
        assert SUPPORT[owner][support.governor].kind is Kind.LIMITED, (path, name)


def parent(path: tuple[str, ...]) -> type[Block]:
    return next(model for where, model in blocks(Config) if where == path[:-1])


def test_keys_with_nothing_to_do_say_why() -> None:
    for path, model, name in FIELDS:
        if SUPPORT[model][name].kind is Kind.NEEDLESS:
            text = " ".join((model.model_fields[name].description or "").split())
            assert "zeropp" in text, (path, name)


def others(model: type[Block], name: str) -> Iterator[object]:
    """Return values of a limited field that this version does not support."""
    special: dict[str, list[object]] = {
        "ratio": [0.5],
        "passes": [["prefetch"]],
    }
    field = model.model_fields[name]
    if name in special:
        yield from special[name]
    elif isinstance(field.default, bool):
        yield not field.default
    elif isinstance(field.default, int | float):
        yield field.default + 1
    else:
        assert nested_block(field) is not None or field.annotation == dict[str, JsonValue] | None, name
        yield {}


@pytest.mark.filterwarnings("ignore:offload_optimizer.super_offload has no effect")
@pytest.mark.parametrize(("path", "model", "name"), LIMITED, ids=[".".join((*path, name)) for path, _, name in LIMITED])
def test_every_limited_field_is_refused_by_name(path: tuple[str, ...], model: type[Block], name: str) -> None:
    key = spellings(name, model.model_fields[name])[0]
    for value in others(model, name):
        content: dict[str, object] = {key: value}
        for part in reversed(path):
            content = {part: content}
        (problem,) = refusals(content)
        assert problem.startswith(f"{'.'.join((*path, key))}: ")
        assert " is not in this version; " in problem


@pytest.mark.filterwarnings('ignore:the configuration has "auto":UserWarning')
def test_defaults_at_stage_3_are_supported() -> None:
    require_supported(load_config(None))
    assert refusals({}) == ()
    # Write every block with its defaults, because a written default must be accepted like an absent key.
    written = load_config(None).model_dump(exclude_none=True, exclude={"zero_optimization": {"overlap_comm"}})
    require_supported(load_config(written))


@pytest.mark.filterwarnings("ignore:these keys")
def test_supported_settings_pass() -> None:
    config = {
        "zero_optimization": {
            "stage": 3,
            "stage3_prefetch_bucket_size": 0,
            "stage3_param_persistence_threshold": 10,
            "stage3_model_persistence_threshold": 10,
            "stage3_max_live_parameters": 10,
            "stage3_max_reuse_distance": 10,
            "stage3_module_granularity_threshold": 10,
            "overlap_comm": False,
            "ignore_unused_parameters": False,
            "log_trace_cache_warnings": True,
            "leaf_module": {"classes": [], "names": ["a"], "name_suffixes": ["b"]},
            "zero_hpz_partition_size": 0,
            "mics_shard_size": 0,
            "offload_param": {"device": "none", "pin_memory": True},
            "offload_optimizer": {"device": "none", "buffer_count": 0},
        },
        "bf16": {"enabled": True, "immediate_grad_update": True, "check_grad_overflow": True},
        "fp16": {"enabled": False, "loss_scale": 128},
        "torch_autocast": {"enabled": False, "dtype": "bf16"},
        "gradient_clipping": 1.0,
        "gradient_accumulation_steps": 4,
        "managed_gradient_accumulation": False,
        "gradient_allreduce_op": "sum",
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32", "buffer_dtype": "bf16"},
        "steps_per_print": 10,
        "tensor_parallel": {"autotp_size": 1},
        "zeropp": {
            "local_world_size": 8,
            "unit_numel": 10,
            "unit_min_blocks": 0,
            "hang_timeout": 5,
            "warn_after": None,
            "cast_inputs": False,
        },
    }
    require_supported(load_config(config))


MASTER = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


@pytest.mark.parametrize(
    ("blocks", "types", "refused"),
    [
        ({}, {"param_dtype": "fp32"}, ""),
        ({}, {"param_dtype": "bf16"}, ""),
        ({}, {"param_dtype": "fp16"}, "needs a loss scale"),
        ({"bf16": {"enabled": True}}, {"param_dtype": "bf16", "grad_accum_dtype": "fp32"}, ""),
        ({"bf16": {"enabled": True}}, {"param_dtype": "fp32"}, "bf16.enabled say different things"),
        ({"fp16": {"enabled": True}}, {"param_dtype": "bf16"}, "fp16.enabled say different things"),
        ({"bf16": {"enabled": True}}, {"grad_accum_dtype": "bf16"}, 'unless main weights are in 16 bits: set "fp32"'),
        ({"bf16": MASTER}, {"grad_accum_dtype": "bf16"}, ""),
        ({"bf16": MASTER}, {"grad_accum_dtype": "fp32"}, 'since main weights are in 16 bits: set "bf16"'),
    ],
)
def test_types_that_contradict_each_other(blocks: dict[str, object], types: dict[str, object], refused: str) -> None:
    problems = refusals({**blocks, "data_types": types})
    assert len(problems) == bool(refused) and all(refused in problem for problem in problems)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", None])
def test_wire_types(dtype: str | None) -> None:
    assert refusals({"communication_data_type": dtype}) == ()


@pytest.mark.parametrize("name", [n for n, s in SUPPORT[ZeroConfig].items() if s.kind is Kind.NEEDLESS])
def test_both_values_of_a_key_with_nothing_to_do_pass(name: str) -> None:
    values = (True, False) if isinstance(load_config(None).zero.model_dump()[name], bool) else (0, 17)
    for value in values:
        assert refusals({"zero_optimization": {name: value}}) == ()


def test_all_refusals_come_together() -> None:
    config = load_config(
        {
            "zero_optimization": {
                "stage": 1,
                "save_muon_momentum_buffer_in_memory": True,
                "offload_optimizer": {"device": "cpu", "super_offload": True},
            },
            "sparse_gradients": True,
            "optimizer": {"type": "AdamW"},
        }
    )
    with pytest.raises(UnsupportedConfigError) as caught:
        require_supported(config)
    assert set(caught.value.problems) == {
        "zero_optimization.save_muon_momentum_buffer_in_memory: true is not in this version; leave it at false "
        "(stage 1 is implemented once)",
        "zero_optimization.offload_optimizer.super_offload: true is not in this version; leave it at false "
        "(with lazy_step, offloaded states are stepped during the next forward, with the same results)",
        "sparse_gradients: true is not in this version; leave it at false "
        "(gradients of embeddings are reduced like all others)",
        'optimizer: {"params": {}, "type": "AdamW", "legacy_fusion": false} is not in this version; '
        "call zeropp.initialize, which makes it, or make it in your code and pass it in",
    }
    assert "features that are not in this version, 4 problems:" in str(caught.value)


@pytest.mark.parametrize(("kind", "told"), [("FusedAdam", ', with type "Adam"'), ("adamw", ""), ("SGD", "")])
def test_a_class_in_place_of_a_type_is_named_with_its_type(kind: str, told: str) -> None:
    (problem,) = refusals({"optimizer": {"type": kind}})
    assert problem.endswith(f"make it in your code and pass it in{told}")


IDLE_ALONE: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "not encoded in stage 0": ({"zero_quantized_weights": True}, {"stage": 3}),
    "weights are not encoded in": ({"zero_quantized_nontrainable_weights": True}, {"stage": 3}),
    'secondary "codes" has no effect': (
        {"zeropp": {"secondary": "codes"}},
        {"stage": 3, "zero_hpz_partition_size": 2, "zero_quantized_weights": True},
    ),
    "zeropp_loco_param has no effect": ({"zeropp_loco_param": {}}, {"zero_quantized_gradients": True}),
    "hadamard has no effect": ({"zeropp": {"hadamard": True}}, {"zero_quantized_gradients": True}),
    "gradient_bits has no effect": ({"zeropp": {"gradient_bits": {}}}, {"zero_quantized_gradients": True}),
    'feedback "both" has no effect': ({"zeropp": {"feedback": "both"}}, {"zeropp_loco_param": {}}),
}


@pytest.mark.parametrize("text", IDLE_ALONE)
def test_a_setting_that_does_nothing_alone_is_named(text: str) -> None:
    setting, others = IDLE_ALONE[text]
    own = {"zeropp": setting["zeropp"]} if "zeropp" in setting else {}
    zero = {} if "zeropp" in setting else setting
    with pytest.warns(UserWarning, match=text):
        load_config({**own, "zero_optimization": zero})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_config({**own, "zero_optimization": {**zero, **others}})
    assert not [each for each in caught if text in str(each.message)]


@pytest.mark.parametrize("key", ["zero_hpz_partition_size", "mics_shard_size"])
def test_groups_of_stage_3_are_named_where_they_have_no_effect(key: str) -> None:
    with pytest.warns(UserWarning, match=rf"{key} 2 has no effect in stage 1"):
        load_config({"zero_optimization": {"stage": 1, key: 2}})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_config({"zero_optimization": {"stage": 3, key: 2}})


def test_unsupported_is_a_config_error_and_a_value_error() -> None:
    assert issubclass(UnsupportedConfigError, ConfigError)
    assert issubclass(ConfigError, ValueError)
