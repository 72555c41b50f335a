"""docs/configuration.md is current and complete, and takes its descriptions from the fields' docstrings."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import zeropp.config
from docs.configuration import PAGE, anchor, main, page
from zeropp.config import Config
from zeropp.config.base import spellings
from zeropp.config.describe import blocks, value_text

FIELDS = [(path, model, name) for path, model in blocks(Config) for name in model.model_fields]
UNITS = (
    "element", "byte", "bit", "block", "second", "rank", "step", "sample", "micro-batch", "fraction", "share",
    "buffer", "request", "thread", "factor", "exponent", "norm", "segment", "part of the division", "0 nothing",
)  # fmt: skip


def row(key: str, section: str) -> list[str]:
    text = page().split(f"## {section}\n")[1].split("\n## ")[0]
    (line,) = [line for line in text.splitlines() if line.startswith(f"| `{key}`")]
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_page_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().err


def test_check_notices_an_old_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "configuration.md"
    assert main(["--check", str(copy)]) == 1
    copy.write_text(PAGE.read_text().replace("50,000,000", "50,000,001", 1))
    assert main(["--check", str(copy)]) == 1
    assert "is out of date; run python -m docs.configuration" in capsys.readouterr().err
    assert main([str(copy)]) == 0
    assert main(["--check", str(copy)]) == 0


@pytest.mark.campaign
def test_it_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "docs.configuration", "--check"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def reach(status: str) -> int:
    """Return 0 if the row's last column says that a key works, 1 if it changes nothing, and 2 if it is refused."""
    return 0 if status == "works" else 1 if status in ("nothing to do", "no effect", "only switched off") else 2


def test_supported_keys_come_first_and_refused_keys_last() -> None:
    firsts = []
    for section in re.split(r"\n## (?=Top|`|Keys)", page())[1:]:
        rows = [re.split(r"(?<!\\)\|", line)[-2].strip() for line in section.splitlines() if line.startswith("| `")]
        found = [reach(status) for status in rows if status != "block"]
        assert found == sorted(found), section.splitlines()[0]
        firsts.append(found[0])
    assert firsts == sorted(firsts) and set(firsts) == {0, 1, 2}


def test_every_key_has_a_row() -> None:
    text = page()
    for path, model, name in FIELDS:
        for key in spellings(name, model.model_fields[name]):
            assert f"`{key}`" in text, (path, key)
    assert text.count("\n| `") == len(FIELDS)


def test_links_lead_to_sections() -> None:
    text = page()
    headings = {anchor(line[3:]) for line in text.splitlines() if line.startswith("## ")}
    links = re.findall(r"\]\(#([^)]*)\)", text)
    assert len(links) >= 18
    assert set(links) <= headings
    assert row("offload_param", "`zero_optimization`")[1] == (
        "[`zero_optimization.offload_param`](#zero_optimizationoffload_param) or null"
    )


@pytest.mark.parametrize(
    ("section", "key", "expected"),
    [
        ("`zero_optimization`", "stage3_prefetch_bucket_size", ("integer", "`50,000,000`", ">= 0", "works")),
        (
            "`zero_optimization`",
            "stage3_model_persistence_threshold",
            ("integer", "`sys.maxsize`", ">= 0", "works"),
        ),
        ("`zero_optimization`", "stage", ("integer", "`0`", ">= 0, <= 3", "works")),
        ("`zero_optimization`", "reduce_scatter", ("boolean", "`true`", "", "nothing to do")),
        ("`zero_optimization.offload_optimizer`", "device", ('"none" or "cpu" or "nvme"', '`"none"`', "", "works")),
        ("`zeropp`", "hang_timeout", ("number", "`420.0`", "> 0, <= 100,000,000", "works")),
        ("`zeropp`", "warn_after", ("number or null", "`30.0`", "> 0, <= 100,000,000", "works")),
        ("Top level", "managed_gradient_accumulation", ("boolean", "`true`", "", "works")),
        ("Top level", "train_batch_size", ("integer or null", "`null`", ">= 1", "works")),
        ("Top level", "log_level", ("string or null", "`null`", "", "no effect")),
        ("Keys of other DeepSpeed features", "wandb", ("any JSON", "`null`", "", "no effect")),
    ],
)
def test_rows(section: str, key: str, expected: tuple[str, ...]) -> None:
    _, kind, default, bounds, _, status = row(key, section)
    assert (kind, default, bounds, status) == expected


def test_other_spellings_and_deprecated_keys_are_shown() -> None:
    assert row("bf16", "Top level")[0] == "`bf16` or `bfloat16`"
    assert row("stage3_max_live_parameters", "`zero_optimization`")[0].endswith("or `max_live_parameters`")
    for old in ("cpu_offload", "cpu_offload_param", "stage3_gather_fp16_weights_on_model_save"):
        assert f"- `{old}`: now " in page()


def test_values_in_words() -> None:
    assert [value_text(v) for v in (True, None, 10**8, sys.maxsize, 1.5, float("inf"), "x", (1, 2))] == [
        "true", "null", "100,000,000", "sys.maxsize", "1.5", "infinity", '"x"', "[1, 2]",
    ]  # fmt: skip


@pytest.mark.parametrize(("path", "model", "name"), FIELDS, ids=[".".join((*path, name)) for path, _, name in FIELDS])
def test_every_field_has_a_docstring(path: tuple[str, ...], model: type, name: str) -> None:
    field = model.model_fields[name]
    text = field.description or ""
    assert len(text.split()) >= 3
    assert text[0].isupper() or text[0] in "`" or text.startswith("fp32")
    assert text.endswith((".", "?")), text
    # Each field must have its own docstring; a docstring that pydantic attributes wrongly would appear twice.
    assert [n for n, f in model.model_fields.items() if f.description == field.description] == [name]
    if isinstance(field.default, int | float) and not isinstance(field.default, bool):
        assert any(unit in text.lower() for unit in UNITS), f"the docstring of {name} must name its unit"


def test_every_block_has_a_docstring() -> None:
    for path, model in blocks(Config):
        assert len((model.__doc__ or "").split()) >= 4, path


def test_the_package_imports_nothing_else_of_zeropp() -> None:
    folder = Path(zeropp.config.__file__).parent
    for file in folder.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                assert not name.startswith(("zeropp", "torch")) or name.startswith("zeropp.config"), (file, name)
