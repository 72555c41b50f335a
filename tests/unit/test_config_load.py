"""The forms of a configuration (dict, file, base64), and the errors for each form."""

from __future__ import annotations

import base64
import copy
import json
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeropp.config import Config, ConfigError, load_config
from zeropp.config.loading import parse

# These tests seldom set a stage, so ignore the warning about that.
pytestmark = pytest.mark.filterwarnings("ignore:the configuration does not set")

GIVEN = {"gradient_clipping": 0.25, "zero_optimization": {"stage": 3, "stage3_max_live_parameters": 1e6}}


def encoded(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode()


def test_none_is_stage_3_and_an_empty_dict_is_stage_0() -> None:
    assert load_config(None).zero.stage == 3
    assert load_config().zero.stage == 3
    assert load_config({}).zero.stage == 0
    assert load_config({"zero_optimization": {}}).zero.stage == 0


def test_a_config_is_returned_as_it_is() -> None:
    config = load_config(GIVEN)
    assert load_config(config) is config


def test_all_sources_give_the_same(tmp_path: Path) -> None:
    file = tmp_path / "zero.json"
    file.write_text(json.dumps(GIVEN))
    text = encoded(GIVEN)
    assert text.endswith("=")
    sources = [GIVEN, file, str(file), text, text.rstrip("=")]
    for source in sources:
        config = load_config(source)
        assert config == load_config(GIVEN)
        assert config.zero.max_live_parameters == 1_000_000


def test_base64_may_use_the_url_safe_letters() -> None:
    config = {"log_level": "~~~???>>>ÿÿ"}
    text = encoded(config)
    assert "-" in text or "_" in text
    with pytest.warns(UserWarning, match="log_level"):
        assert load_config(text).log_level == config["log_level"]


def test_the_source_is_not_changed() -> None:
    source = {
        "zero_optimization": {"stage": 3, "cpu_offload": True, "sub_group_size": "auto"},
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "Adam", "params": {"betas": [0.9, 0.99]}},
    }
    before = copy.deepcopy(source)
    with pytest.warns(FutureWarning), pytest.warns(UserWarning, match='has "auto"'):
        config = load_config(source)
    assert source == before
    source["optimizer"]["params"]["betas"].append(1)
    assert config.optimizer is not None and config.optimizer.params == {"betas": [0.9, 0.99]}


def test_file_with_comments_and_trailing_commas(tmp_path: Path) -> None:
    file = tmp_path / "zero.json"
    file.write_text(
        """\ufeff// head
        {
          # hash
          "zero_optimization": {"stage": 3, /* inside, } */ "stage3_prefetch_bucket_size": 1e7, }, // tail
          "optimizer": {"type": "a // b # c /* d */ , }", "params": {"betas": [0.9, 0.99,],},},
        } # end""",
        encoding="utf-8",
    )
    config = load_config(file)
    assert config.zero.prefetch_bucket_size == 10_000_000
    assert config.optimizer is not None
    assert config.optimizer.type == "a // b # c /* d */ , }"
    assert config.optimizer.params == {"betas": [0.9, 0.99]}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(JSON, st.integers(0, 3))
def test_plain_json_is_read_as_json_reads_it(value: object, indent: int) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    assert parse(text, "text") == value


@given(JSON, st.sampled_from(["//x,]\n", "# }\n", '/* , " ] */', "/**/"]))
def test_comments_between_tokens_change_nothing(value: object, comment: str) -> None:
    # json.dumps writes separators only between tokens. The NUL marks these places, because no string can contain it.
    text = json.dumps(value, separators=("\0,\0", "\0:\0")).replace("\0", comment)
    assert parse(comment + text + comment, "text") == value


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("{\n  // c\n  /* d\n */ 'a': 1}", "line 4, column 5"),
        ('{"a": 1,, }', "column 9"),
        ('{"a": 1 /* open }', "line 1, column 9"),
        ("[,]", "column 2"),
        ('{"a": ,}', "column 7"),
        ("{,}", "column 2"),
        ('{"a": "open}', "column 7"),
        ("", "column 1"),
        ("// only a comment", "Expecting value"),
    ],
)
def test_errors_keep_their_line_and_column(text: str, where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, "some.json")
    assert "some.json" in str(caught.value)
    assert where in str(caught.value)


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '{"b": {"a": 1, "c": 0, "a": 2}}', '[{"a": 1, "a": 2}]'])
def test_doubled_keys(text: str) -> None:
    with pytest.raises(ConfigError, match="the key 'a' is given twice, as 1 and 2; keep one"):
        parse(text, "text")


def test_doubled_keys_in_a_file_and_in_base64(tmp_path: Path) -> None:
    text = '{"fp16": {}, "fp16": {"enabled": true}}'
    file = tmp_path / "zero.json"
    file.write_text(text)
    for source in (file, base64.urlsafe_b64encode(text.encode()).decode()):
        with pytest.raises(ConfigError, match="'fp16' is given twice"):
            load_config(source)


@pytest.mark.parametrize(
    "source", ["no/such/file.json", "conf", "abcd" * 40, '{"bf16": {}}', "", "a\0b", encoded([1]), encoded("x")]
)
def test_strings_that_are_no_source(source: str) -> None:
    with pytest.raises(ConfigError, match="neither the path of an existing file nor base64 of a JSON object"):
        load_config(source)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\xfa")
    for source in (tmp_path, binary, tmp_path / "missing.json"):
        with pytest.raises(ConfigError, match="cannot be read"):
            load_config(source)


@pytest.mark.parametrize("source", [3, [1], b"{}", True])
def test_other_types_are_no_source(source: object) -> None:
    with pytest.raises(ConfigError, match=f"got {type(source).__name__} .*; expected a dict, a path"):
        load_config(source)  # type: ignore[arg-type]


def test_the_top_level_must_be_an_object(tmp_path: Path) -> None:
    file = tmp_path / ("a_folder_with_a_long_name_" * 3) / "list.json"
    file.parent.mkdir()
    file.write_text("[1, 2]")
    with pytest.raises(ConfigError, match=r"list.json: got \[1, 2\]; expected a JSON object"):
        load_config(file)


def test_keys_must_be_strings() -> None:
    with pytest.raises(ConfigError, match="should be strings"):
        load_config({1: 2})  # type: ignore[dict-item]


@pytest.mark.filterwarnings('ignore:the configuration has "auto":UserWarning')
def test_config_survives_a_round_trip() -> None:
    config = load_config({"zero_optimization": {"stage": 3}, "gradient_clipping": 1, "bfloat16": {"enabled": True}})
    assert load_config(config.model_dump(exclude_none=True)) == config
    assert isinstance(Config.model_validate_json(config.model_dump_json()), Config)


def test_keys_with_dots_are_named_and_left_out() -> None:
    """A top-level key such as "fp16.enabled" only warns, because TRL writes such keys. Other dotted keys are errors."""
    given = {"zero_optimization": {"stage": 3}, "zero_optimization.stage3_prefetch_bucket_size": 3686.4}
    with pytest.warns(UserWarning, match=r"no effect: zero_optimization\.stage3_prefetch_bucket_size; the keys of"):
        config = load_config(given)
    assert (
        config.zero.prefetch_bucket_size == load_config({"zero_optimization": {"stage": 3}}).zero.prefetch_bucket_size
    )
    with pytest.raises(ConfigError, match=r"zero\.optimisation"):
        load_config({"zero.optimisation": {}})


def test_a_configuration_that_is_not_final_says_nothing_of_auto() -> None:
    given = {"zero_optimization": {"stage": 3}, "train_batch_size": "auto", "wandb": {"enabled": True}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_config(given, final=False)
    with pytest.warns(UserWarning, match='"auto" where no trainer'), pytest.warns(UserWarning, match="wandb"):
        load_config(given)
