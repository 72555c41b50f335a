"""The recipes of CONTRIBUTING.md work in a copy of the tree: a new codec, code width, placement and key."""

from __future__ import annotations

import ast
import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import zeropp
from tests.support.branching_models import make_config
from zeropp.config.blocks import Bits, ExtensionConfig
from zeropp.config.supported import SUPPORT, Kind
from zeropp.config.zero_block import ZeroConfig
from zeropp.setup.choices import choose_mode
from zeropp_kernels.wire import GROUPS

ROOT = Path(__file__).resolve().parents[3]


# A copy of the tree, and functions that follow each recipe in it.


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for room in ("zeropp", "docs", "kernels", "tests"):
        shutil.copytree(ROOT / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def python(tree: Path, *arguments: str) -> str:
    """Run Python with the copy's packages on its path, and return its output.

    Args:
        tree: copy of the tree.
        arguments: arguments of the interpreter.
    """
    path = os.pathsep.join(map(str, (tree, tree / "kernels")))
    done = subprocess.run(
        [sys.executable, *arguments], cwd=tree, env={**os.environ, "PYTHONPATH": path}, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


def insert(path: Path, before: str, text: str) -> None:
    replace(path, before, text + before)


def replace(path: Path, old: str, new: str) -> None:
    source = path.read_text()
    assert source.count(old) == 1, f"{old!r} is there {source.count(old)} times"
    path.write_text(source.replace(old, new))


def insert_key(tree: Path, name: str, field: str) -> None:
    insert(tree / "zeropp/config/blocks.py", "    unit_numel: Bound", field)
    insert(
        tree / "zeropp/config/supported.py",
        '        **_each(BLOCK, "gradient_bits max_ctas"),',
        f'        "{name}": EFFECT,\n',
    )


# A codec that keeps the upper half of a float32: the sign, the exponent and seven bits.

CUT_CODEC = '''@dataclass(frozen=True)
class CutCodec(PlainCodec):
    """float32 with its lower 16 bits left out: bfloat16, rounded towards zero."""

    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        return "cut16"

    def encode_(self, messages: Tensor, values: Tensor, *, count: int = 1, feedback: Feedback | None = None) -> None:
        bits = values.float().view(torch.int32) & -65536
        super().encode_(messages, bits.view(torch.float32), count=count, feedback=feedback)

    def pack_(self, messages: Tensor, gradients: Sequence[Tensor | None], layout: BufferLayout,
              table: BlockTable | None, *, count: int, feedback: Feedback | None) -> None:
        whole = torch.empty(layout.numel, dtype=torch.float32, device=messages.device)
        super().pack_(whole, gradients, layout, table, count=count, feedback=feedback)
        self.encode_(messages, whole, count=count)


'''


def follow_codec(tree: Path) -> None:
    insert(tree / "zeropp/wire/codecs.py", "@dataclass(frozen=True)\nclass BlockCodec", CUT_CODEC)
    encoding = tree / "zeropp/wire/encoding.py"
    replace(encoding, "import BlockCodec, Codec, ", "import BlockCodec, Codec, CutCodec, ")
    insert(encoding, "    weights: Codec | None = None", "    cut: bool = False\n")
    insert(encoding, "        if self.bits is None:", "        if self.cut:\n            return CutCodec()\n")
    choices = tree / "zeropp/setup/choices.py"
    replace(choices, "import BlockCodec, dtype_name", "import BlockCodec, CutCodec, dtype_name")
    insert(choices, "        weights=BlockCodec(8)", "        cut=extension.cut_gradients,\n")
    # For weights, the codec is a new value of an existing key.
    replace(choices, "weights=BlockCodec(8) if", 'weights=CutCodec() if codec == "cut16" else BlockCodec(8) if')
    insert_key(tree, "cut_gradients", '    cut_gradients: bool = False\n    """Cuts gradients."""\n\n')
    replace(tree / "zeropp/config/blocks.py", 'Literal["int8", ', 'Literal["int8", "cut16", ')


# A placement that no configuration gives: stage 1 within pairs of ranks, and the pairs are replicas of each other.


def follow_placement(tree: Path) -> None:
    chosen = "    if config.zeropp.replicated_pairs:\n        return Mode(build_chain(world, [2]), 2, 1, 1)\n"
    insert(tree / "zeropp/setup/choices.py", "    zero = config.zero\n    states = group", chosen)
    insert_key(tree, "replicated_pairs", '    replicated_pairs: bool = False\n    """Pairs of ranks."""\n\n')


# A width of two bits: codes -1, 0 and 1, four to a byte. Only the plain torch version is made, which CPU ranks use.

TWO_BITS_IN = """    if bits == 2:
        quarters = work.to(torch.int8).view(rows, 4, group // 4).bitwise_and_(3)
        part.codes.view(torch.int8).copy_((quarters << _QUARTERS).sum(1, dtype=torch.int8))
        return spoilt
"""
TWO_BITS_OUT = """    if bits == 2:
        codes = ((part.codes.unsqueeze(1) >> _QUARTERS) & 3).view(rows, group).to(torch.int8).bitwise_xor_(2).sub_(2)
"""


def follow_width(tree: Path) -> None:
    replace(tree / "kernels/zeropp_kernels/wire.py", "GROUPS = {8: 256,", "GROUPS = {2: 128, 8: 256,")
    blocks = tree / "kernels/zeropp_kernels/reference/blocks.py"
    insert(blocks, "_LEVELS = {", '_QUARTERS = torch.tensor([[0], [2], [4], [6]], dtype=torch.int8, device="cpu")\n')
    replace(blocks, "_LEVELS = {", '_LEVELS = {2: torch.tensor(1.0, device="cpu"), ')
    replace(blocks, "_LARGEST_SCALE = {", "_LARGEST_SCALE = {2: 0x7F7F, ")
    insert(blocks, "    if bits == 8:\n", TWO_BITS_IN)
    insert(blocks, "    if bits == 4:\n", TWO_BITS_OUT)
    replace(tree / "zeropp/config/blocks.py", "Bits = Annotated[Literal[", "Bits = Annotated[Literal[2, ")


@pytest.mark.campaign
def test_a_codec_a_width_and_a_placement_by_their_recipes(tree: Path) -> None:
    """Following the recipes changes only the files that they name.

    The copy trains: see :mod:`tests.support.contributing_checks`.
    """
    follow_codec(tree)
    follow_width(tree)
    follow_placement(tree)
    assert python(tree, "-c", "from tests.support.contributing_checks import main; main()") == ""


def test_a_placement_of_a_configuration_is_levels_and_nothing_else() -> None:
    config = zeropp.load_config(make_config(zero_hpz_partition_size=2))
    mode = choose_mode(config, 4, 2)
    # Equal results: a placement is a value without a state or processes.
    assert choose_mode(config, 4, 2) == mode and mode.cached == 2


# A new configuration key of zeropp.


WRITES_AND_LOADS = """
import zeropp
from docs.configuration import main
print(main(["--check"]), main([]), main(["--check"]))
print(zeropp.load_config({"zeropp": {"patience": 4}}).zeropp.patience)
try:
    zeropp.load_config({"zeropp": {"patience": 0}})
except ValueError as error:
    print(" ".join(str(error).split()))
"""


@pytest.mark.campaign
def test_a_key_by_its_recipe(tree: Path) -> None:
    field = '    patience: Positive = 3\n    """Seconds to be patient for."""\n\n'
    insert(tree / "zeropp/config/blocks.py", "    unit_numel: Bound", field)
    forgotten = (
        "from zeropp.config.supported import uncovered; from zeropp.config import Config; print(uncovered(Config))"
    )
    assert python(tree, "-c", forgotten).strip() == "['ExtensionConfig.patience']"
    insert(
        tree / "zeropp/config/supported.py",
        '        **_each(BLOCK, "gradient_bits max_ctas"),',
        '        "patience": EFFECT,\n',
    )
    told = python(tree, "-W", "ignore", "-c", f"{forgotten}\n{WRITES_AND_LOADS}").splitlines()
    assert told[:3] == ["[]", "1 0 0", "4"] and "zeropp.patience" in told[3] and "is out of date" in told[-1]
    row = "| `patience` | integer | `3` | >= 1 | Seconds to be patient for. | works |"
    assert row in (tree / "docs/configuration.md").read_text()


@functools.cache
def names_read() -> set[str]:
    """Return the names of all attributes that code outside of the configuration reads."""
    found = set()
    for path in (ROOT / "zeropp").rglob("*.py"):
        if "config" not in path.relative_to(ROOT).parts[:2]:
            found |= {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    return found


@pytest.mark.parametrize("model", [ExtensionConfig, ZeroConfig])
def test_a_key(model: type[ExtensionConfig | ZeroConfig]) -> None:
    """A key has a docstring, an entry in SUPPORT, and a row in the reference.

    A key that has an effect is read by some code.
    """
    reference, read = (ROOT / "docs" / "configuration.md").read_text(), names_read()
    assert SUPPORT[model].keys() == model.model_fields.keys()
    for name, field in model.model_fields.items():
        assert field.description, f"{name} has no docstring"
        assert re.search(rf"\| `(stage3_)?{name}`", reference), f"{name} is not in docs/configuration.md"
        if SUPPORT[model][name].kind in (Kind.EFFECT, Kind.BLOCK) and not name.startswith("offload_"):
            assert name in read, f"{name} is said to have an effect, and nobody reads it"


# Code that depends on the width of codes must be in few files, which the recipe names.

_BITS, _TOLD = r"(?:bits|BITS|source_bits)\b", r"(==|!=|//|%|<=?|>=?)"
_WIDTH = re.compile(
    rf"\b{_BITS} *(?:{_TOLD}(?![<>])|in [({{\[])|\b\d+ *{_TOLD} *(\w+\.)?{_BITS}|\}}\[(\w+\.)?{_BITS}"
    r"|\bGROUPS\b.* = \{|Literal\[4, 8"
)


def test_a_configuration_has_every_width() -> None:
    widths = {width for part in get_args(Bits) for width in get_args(part)}
    assert widths == {16, 32, *GROUPS}  # widths of plain values, and of codes


@pytest.mark.parametrize(
    "line", ["{4:1,8:2}[bits]", "8 // bits", "bits < 8", "if self.bits <= 4:", "BITS == 4", "source_bits in (4, 8)"]
)
def test_a_line_that_tells_widths_apart_is_seen(line: str) -> None:
    assert _WIDTH.search(line)


def test_few_files_tell_widths_apart() -> None:
    sources = [path for room in ("zeropp", "kernels") for path in (ROOT / room).rglob("*.py")]
    found = {str(path.relative_to(ROOT)) for path in sources if _WIDTH.search(path.read_text())}
    recipe = (ROOT / "CONTRIBUTING.md").read_text().split("### A width of codes")[1].split("###")[0]
    named = set(re.findall(r"`((?:zeropp|kernels)/[\w/.]+\.py)`", recipe))
    assert found <= named and len(named) <= 5, f"widths are told apart in {found}, the recipe names {named}"
