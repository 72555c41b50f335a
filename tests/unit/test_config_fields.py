"""Every documented configuration key: spellings, default and bounds, listed here independently of the models."""

from __future__ import annotations

import math
import sys

import pytest

from zeropp.config import Config, ConfigError, load_config

# These tests seldom set a stage, so ignore the warning about that.
pytestmark = pytest.mark.filterwarnings("ignore:the configuration does not set")

FLAG = ("flag",)
COUNT = ("count",)  # integers >= 0
BOUND = ("bound",)  # numbers >= 0; fractions are rounded down
POSITIVE = ("positive",)  # integers >= 1
FRACTION = ("fraction",)  # numbers from 0 to 1
REAL = ("real",)  # finite numbers >= 0
DTYPE = ("dtype",)
HALF = ("half",)  # a 16-bit dtype

# block path -> {key: (default, kind)}
DOCUMENTED: dict[str, dict[str, tuple[object, tuple[str, ...]]]] = {
    "zero_optimization": {
        "stage": (0, ("range", "0", "3", "-1", "4")),
        "contiguous_gradients": (True, FLAG),
        "reduce_scatter": (True, FLAG),
        "reduce_bucket_size": (500_000_000, BOUND),
        "use_multi_rank_bucket_allreduce": (True, FLAG),
        "allgather_partitions": (True, FLAG),
        "allgather_bucket_size": (500_000_000, BOUND),
        "load_from_fp32_weights": (True, FLAG),
        "sub_group_size": (1_000_000_000, BOUND),
        "stage3_prefetch_bucket_size": (50_000_000, BOUND),
        "stage3_param_persistence_threshold": (100_000, BOUND),
        "stage3_model_persistence_threshold": (sys.maxsize, BOUND),
        "stage3_max_live_parameters": (1_000_000_000, BOUND),
        "stage3_max_reuse_distance": (1_000_000_000, BOUND),
        "stage3_gather_16bit_weights_on_model_save": (False, FLAG),
        "stage3_module_granularity_threshold": (0, ("any bound",)),
        "stage3_use_all_reduce_for_fetch_params": (False, FLAG),
        "stage3_allgather_sequential": (False, FLAG),
        "ignore_unused_parameters": (True, FLAG),
        "round_robin_gradients": (False, FLAG),
        "zero_hpz_partition_size": (1, COUNT),
        "zero_quantized_weights": (False, FLAG),
        "zero_quantized_nontrainable_weights": (False, FLAG),
        "zero_quantized_gradients": (False, FLAG),
        "mics_shard_size": (-1, ("range", "-1", "64", "-2")),
        "mics_hierarchical_params_gather": (False, FLAG),
        "memory_efficient_linear": (True, FLAG),
        "pipeline_loading_checkpoint": (False, FLAG),
        "override_module_apply": (True, FLAG),
        "log_trace_cache_warnings": (False, FLAG),
        "enable_sanity_checks": (False, FLAG),
        "compute_grad_norm": (True, FLAG),
        "parameter_alignment": (False, FLAG),
        "save_muon_momentum_buffer_in_memory": (False, FLAG),
    },
    "zero_optimization.offload_param": {
        "buffer_count": (5, COUNT),
        "buffer_size": (100_000_000, BOUND),
        "max_in_cpu": (1_000_000_000, BOUND),
        "pin_memory": (False, FLAG),
    },
    "zero_optimization.offload_optimizer": {
        "buffer_count": (4, COUNT),
        "pin_memory": (False, FLAG),
        "pipeline_read": (False, FLAG),
        "pipeline_write": (False, FLAG),
        "fast_init": (False, FLAG),
        "super_offload": (False, FLAG),
        "cpuadam_cores_perc": (0.8, FRACTION),
    },
    "zero_optimization.zeropp_loco_param": {
        "err_beta": (0.8, ("range", "0", "0.99", "-0.1", "1")),
        "reset_T": (1024, POSITIVE),
    },
    "fp16": {
        "enabled": (False, FLAG),
        "auto_cast": (False, FLAG),
        "loss_scale": (0, REAL),
        "initial_scale_power": (16, COUNT),
        "hysteresis": (2, COUNT),
        "consecutive_hysteresis": (False, FLAG),
        "loss_scale_window": (1000, ("range", "1", "5000", "-1")),
        "min_loss_scale": (1, ("range", "0.5", "1e9", "-1")),
        "fp16_master_weights_and_grads": (False, FLAG),
    },
    "bf16": {
        "enabled": (False, FLAG),
        "immediate_grad_update": (False, FLAG),
        "check_grad_overflow": (True, FLAG),
        "bf16_master_weights_and_grads": (False, FLAG),
        "bf16_optimizer_states": (False, FLAG),
    },
    "torch_autocast": {"enabled": (False, FLAG), "dtype": ("bf16", HALF)},
    "data_types": {
        "grad_accum_dtype": (None, DTYPE),
        "param_dtype": (None, DTYPE),
        "buffer_dtype": (None, DTYPE),
    },
    "aio": {
        "block_size": (1_048_576, POSITIVE),
        "queue_depth": (8, POSITIVE),
        "intra_op_parallelism": (1, POSITIVE),
        "single_submit": (False, FLAG),
        "overlap_events": (True, FLAG),
        "use_gds": (False, FLAG),
    },
    "checkpoint": {
        "load_universal": (False, FLAG),
        "use_node_local_storage": (False, FLAG),
        "checkpoint_serialization": (True, FLAG),
    },
    "checkpoint.parallel_write": {"pipeline_stage": (False, FLAG)},
    "activation_checkpointing": {
        "partition_activations": (False, FLAG),
        "number_checkpoints": (None, POSITIVE),
        "contiguous_memory_optimization": (False, FLAG),
        "cpu_checkpointing": (False, FLAG),
        "synchronize_checkpoint_boundary": (False, FLAG),
        "profile": (False, FLAG),
    },
    "compile": {
        "deepcompile": (False, FLAG),
        "free_activation": (False, FLAG),
        "free_activation_threshold": (10 * 2**20, COUNT),
        "offload_activation": (False, FLAG),
        "offload_opt_states": (False, FLAG),
        "double_buffer": (True, FLAG),
        "symmetric_memory": (False, FLAG),
        "debug_log": (False, FLAG),
        "offload_parameters": (False, FLAG),
    },
    "": {
        "train_batch_size": (None, POSITIVE),
        "train_micro_batch_size_per_gpu": (None, POSITIVE),
        "gradient_accumulation_steps": (None, POSITIVE),
        "managed_gradient_accumulation": (True, FLAG),
        "gradient_clipping": (0.0, REAL),
        "communication_data_type": (None, DTYPE),
        "seq_parallel_communication_data_type": ("fp32", DTYPE),
        "prescale_gradients": (False, FLAG),
        "sparse_gradients": (False, FLAG),
        "disable_allgather": (False, FLAG),
        "dump_state": (False, FLAG),
        "wall_clock_breakdown": (False, FLAG),
        "memory_breakdown": (False, FLAG),
        "dataloader_drop_last": (False, FLAG),
        "zero_allow_untested_optimizer": (False, FLAG),
        "zero_force_ds_cpu_optimizer": (True, FLAG),
    },
    "zeropp": {
        "local_world_size": (None, POSITIVE),
        "unit_numel": (0, BOUND),
        "unit_min_blocks": (128, COUNT),
        "cast_inputs": (True, FLAG),
        "warm_up": (True, FLAG),
        "hadamard": (False, FLAG),
        "defer_cross_reduction": (False, FLAG),
    },
}
CASES = [(block, key, *entry) for block, keys in DOCUMENTED.items() for key, entry in keys.items()]
IDS = [f"{block}.{key}".strip(".") for block, key, *_ in CASES]


def nested(block: str, content: dict[str, object]) -> dict[str, object]:
    for part in reversed(block.split(".") if block else []):
        content = {part: content}
    return content


def read(config: Config, block: str, key: str) -> object:
    value: object = config
    for part in block.split(".") if block else []:
        value = getattr(value, part)
    return getattr(value, key.removeprefix("stage3_"))


def samples(kind: tuple[str, ...]) -> tuple[list[object], list[object]]:
    """Return values that a kind of key accepts, and values that it refuses."""
    not_numbers: list[object] = [True, "many", None, [], math.nan, math.inf]
    match kind:
        case ("flag",):
            return [True, False], ["maybe", 3, None, []]
        case ("count",):
            return [0, 1, 5e8], [-1, 0.5, *not_numbers]
        case ("positive",):
            return [1, 1e6], [0, -1, 1.5, True, "many", math.inf]
        case ("bound",):
            return [1, 5e8], [-1, -0.5, *not_numbers]
        case ("any bound",):
            return [-5, 0, 7, 1e3], not_numbers
        case ("fraction",):
            return [0, 0.25, 1], [-0.1, 1.1, *not_numbers]
        case ("real",):
            return [0, 0.5, 1024], [-0.1, *not_numbers]
        case ("dtype",):
            return ["fp32", "fp16", "bf16"], ["int8", 16, True]
        case ("half",):
            return ["fp16", "bf16"], ["fp32", "int8", 16, True, None]
        case ("range", low, high, *outside):
            return [float(low), float(high)], [*map(float, outside), *not_numbers]
    raise AssertionError(kind)


@pytest.mark.parametrize(("block", "key", "default", "kind"), CASES, ids=IDS)
def test_default(block: str, key: str, default: object, kind: tuple[str, ...]) -> None:
    value = read(load_config(nested(block, {})), block, key)
    assert value == default
    assert isinstance(value, bool) == isinstance(default, bool)


@pytest.mark.parametrize(("block", "key", "default", "kind"), CASES, ids=IDS)
@pytest.mark.filterwarnings("ignore:these keys")
def test_accepted_values(block: str, key: str, default: object, kind: tuple[str, ...]) -> None:
    for value in samples(kind)[0]:
        got = read(load_config(nested(block, {key: value})), block, key)
        assert got == value
        if kind in (COUNT, POSITIVE, BOUND, ("any bound",)):
            assert type(got) is int


@pytest.mark.parametrize(("block", "key", "default", "kind"), CASES, ids=IDS)
def test_refused_values_name_the_key(block: str, key: str, default: object, kind: tuple[str, ...]) -> None:
    for value in samples(kind)[1]:
        with pytest.raises(ConfigError) as caught:
            load_config(nested(block, {key: value}))
        (problem,) = caught.value.problems
        assert problem.startswith(f"{block}.{key}: got ".lstrip(".")), problem
        assert "; expected " in problem


STAGE3 = [key for key in DOCUMENTED["zero_optimization"] if key.startswith("stage3_")]


@pytest.mark.parametrize("key", STAGE3)
def test_stage3_keys_work_without_their_prefix(key: str) -> None:
    default, kind = DOCUMENTED["zero_optimization"][key]
    value = (not default) if kind == FLAG else 7
    short = key.removeprefix("stage3_")
    assert getattr(load_config({"zero_optimization": {key: value}}).zero, short) == value
    assert getattr(load_config({"zero_optimization": {short: value}}).zero, short) == value
    with pytest.raises(ConfigError, match=f"zero_optimization: {key} and {short} are two spellings"):
        load_config({"zero_optimization": {key: value, short: value}})


def test_there_are_nine_prefixed_keys() -> None:
    assert len(STAGE3) == 9


def test_floats_above_64_bits_are_integers_too() -> None:
    distance = load_config({"zero_optimization": {"stage3_max_reuse_distance": 1e19}}).zero.max_reuse_distance
    assert type(distance) is int
    assert distance == 10**19


def test_other_spellings() -> None:
    assert load_config({"bfloat16": {"enabled": True}}).bf16.enabled
    assert load_config({"aio": {"thread_count": 4}}).aio.intra_op_parallelism == 4
    assert load_config({"seq_parallel_comm_data_type": "bf16"}).seq_parallel_communication_data_type == "bf16"
    with pytest.raises(ConfigError, match="bf16 and bfloat16 are two spellings"):
        load_config({"bf16": {}, "bfloat16": {}})


def test_dtype_spellings() -> None:
    torch = pytest.importorskip("torch")
    for value in ("BF16", "bfloat16", "torch.bfloat16", torch.bfloat16):
        assert load_config({"communication_data_type": value}).communication_data_type == "bf16"
    for value in ("half", "float16", torch.float16):
        assert load_config({"data_types": {"grad_accum_dtype": value}}).data_types.grad_accum_dtype == "fp16"


def test_optional_blocks_are_absent_by_default() -> None:
    config = load_config({})
    zero = config.zero
    assert zero.offload_param is zero.offload_optimizer is zero.zeropp_loco_param is zero.zenflow is None
    assert config.optimizer is config.scheduler is config.zeropp.gradient_bits is None
    assert zero is config.zero_optimization


@pytest.mark.parametrize("name", ["offload_param", "offload_optimizer"])
def test_offload_devices(name: str) -> None:
    def block(**content: object) -> object:
        return getattr(load_config({"zero_optimization": {"stage": 3, name: content}}).zero, name)

    assert block().device == "none"
    assert block().nvme_path is None
    assert block(device="cpu").device == "cpu"
    assert str(block(device="nvme", nvme_path="/fast/disk").nvme_path) == "/fast/disk"
    with pytest.raises(ConfigError, match=rf"{name}.device: got \"gpu\"; expected \"none\" or \"cpu\""):
        block(device="gpu")
    for path in ({}, {"nvme_path": ""}):
        with pytest.raises(ConfigError, match=f'{name}: device "nvme" needs nvme_path'):
            block(device="nvme", **path)
    with pytest.raises(ConfigError, match=rf"{name}: nvme_path 'a\\x00b' has a NUL character"):
        block(device="nvme", nvme_path="a\0b")


def test_ratio_bounds() -> None:
    def ratio(value: object) -> float:
        block = {"stage": 3, "offload_optimizer": {"ratio": value}}
        offload = load_config({"zero_optimization": block}).zero.offload_optimizer
        assert offload is not None
        return offload.ratio

    assert [ratio(0), ratio(0.3), ratio(1)] == [0, 0.3, 1]
    for bad in (-0.1, 1.1, True):
        with pytest.raises(ConfigError, match=r"offload_optimizer\.ratio: got"):
            ratio(bad)
    empty = load_config({"zero_optimization": {"offload_optimizer": {}}}).zero.offload_optimizer
    assert empty is not None and empty.ratio == 1.0


def test_leaf_module() -> None:
    default = load_config({}).zero.leaf_module
    assert [name.rpartition(".")[2] for name in default.classes] == [
        "MixtralSparseMoeBlock",
        "Qwen2MoeSparseMoeBlock",
        "Qwen3MoeSparseMoeBlock",
    ]
    assert default.names == default.name_suffixes == ()
    block = {"classes": "Experts", "names": ["a.b", "c"], "name_suffixes": []}
    given = load_config({"zero_optimization": {"leaf_module": block}}).zero.leaf_module
    assert (given.classes, given.names, given.name_suffixes) == (("Experts",), ("a.b", "c"), ())


def test_checkpoint_and_named_blocks() -> None:
    assert load_config({}).checkpoint.tag_validation == "WARN"
    assert load_config({"checkpoint": {"tag_validation": "Fail"}}).checkpoint.tag_validation == "FAIL"
    assert load_config({}).checkpoint.writer is None
    optimizer = load_config({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}).optimizer
    assert optimizer is not None
    assert (optimizer.type, optimizer.params, optimizer.legacy_fusion) == ("AdamW", {"lr": 1e-3}, False)
    scheduler = load_config({"scheduler": {"type": "WarmupLR"}}).scheduler
    assert scheduler is not None and (scheduler.type, scheduler.params) == ("WarmupLR", {})


def test_extension_choices() -> None:
    extension = load_config({}).zeropp
    assert (extension.feedback, extension.weight_codec, extension.secondary) == ("cross", None, "weights")
    assert (extension.hang_timeout, extension.warn_after) == (420.0, 30.0)
    assert load_config({"zeropp": {"warn_after": 2}}).zeropp.warn_after == 2
    assert load_config({"zeropp": {"warn_after": None}}).zeropp.warn_after is None
    bits = load_config({"zeropp": {"gradient_bits": {"local": 4.0}}}).zeropp.gradient_bits
    assert bits is not None and (bits.local, bits.cross) == (4, 4)
    bits = load_config({"zeropp": {"gradient_bits": {}}}).zeropp.gradient_bits
    assert bits is not None and (bits.local, bits.cross) == (8, 4)
    assert extension.share_communicators and extension.max_ctas.local is extension.max_ctas.cross is None
    wrong = (0, -1, 1e9, math.inf, math.nan, True)
    timeouts = ({key: seconds} for key in ("hang_timeout", "warn_after") for seconds in wrong)
    for bad in (*timeouts, {"gradient_bits": {"cross": 5}}, {"max_ctas": {"local": 0}}):
        with pytest.raises(ConfigError, match=r"^the configuration cannot be used: zeropp\."):
            load_config({"zeropp": bad})
    wrong = {"feedback": "local", "reduce_scatter": "nccl", "weight_codec": "int4", "secondary": "none"}
    for key, value in wrong.items():
        with pytest.raises(ConfigError, match=f'zeropp.{key}: got "{value}"; expected "'):
            load_config({"zeropp": {key: value}})


def test_reduction_keys() -> None:
    assert load_config({}).gradient_allreduce_op == "mean"
    assert load_config({"gradient_allreduce_op": "sum"}).gradient_allreduce_op == "sum"
    with pytest.raises(ConfigError, match='gradient_allreduce_op: got "max"'):
        load_config({"gradient_allreduce_op": "max"})
    assert load_config({}).gradient_predivide_factor == 1.0
    with pytest.raises(ConfigError, match="gradient_predivide_factor: got 0"):
        load_config({"gradient_predivide_factor": 0})


@pytest.mark.filterwarnings("ignore:these keys")
def test_steps_per_print_may_be_infinite() -> None:
    assert load_config({}).steps_per_print is None
    assert load_config({"steps_per_print": math.inf}).steps_per_print == math.inf
    assert load_config({"steps_per_print": 10}).steps_per_print == 10
    for bad in (math.nan, -1, True, "often"):
        with pytest.raises(ConfigError, match="steps_per_print: got"):
            load_config({"steps_per_print": bad})


def test_a_loss_scale_that_is_called_dynamic_is_0() -> None:
    with pytest.raises(ConfigError, match=r'fp16.loss_scale: got "dynamic"; .* set 0, which means a dynamic scale$'):
        load_config({"fp16": {"loss_scale": "dynamic"}})


def test_dynamic_loss_scale_needs_room_to_move() -> None:
    for key in ("loss_scale_window", "min_loss_scale"):
        with pytest.raises(ConfigError, match="fp16: a dynamic loss scale"):
            load_config({"fp16": {key: 0}})
        assert getattr(load_config({"fp16": {key: 0, "loss_scale": 128}}).fp16, key) == 0


def test_values_do_not_change_after_loading() -> None:
    config = load_config(None)
    with pytest.raises(ValueError, match="frozen"):
        config.zero.stage = 2  # type: ignore[misc]
