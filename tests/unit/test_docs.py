"""The documentation: an index of all pages, a working recipe at the top of each page, and working links.

The first Python blocks of concepts.md, design/README.md, models.md, contracts.md, offload-states.md and
kernels/README.md run here, and printed output is compared. The first blocks of using.md, checkpoints.md, fsdp2.md and
training.md need several ranks and names that the reader defines. tests/distributed/comm/test_process_groups.py and the
test_docs_recipes.py files run them. The first block of lightning.md is only compiled.
"""

from __future__ import annotations

import ast
import importlib.util
import io
import json
import re
import shlex
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.distributed.run import get_args_parser

from bench.convergence.__main__ import parse_arguments as convergence_arguments
from bench.step_time.__main__ import parse_arguments as step_time_arguments
from docs.configuration import anchor
from docs.pictures import PICTURES
from zeropp.config import load_config, require_supported

ROOT = Path(__file__).resolve().parents[2]
INDEX, KERNELS = ROOT / "docs" / "README.md", ROOT / "kernels" / "README.md"
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [page for page in [*DOCS, KERNELS] if page != INDEX]
LINKING = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + [*DOCS, KERNELS]
DESIGN = ROOT / "docs" / "design"
TOP = 20  # last line in which the first recipe of a page may begin
RUN_HERE = ("concepts", "design", "models", "contracts", "offload-states", "kernels")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        language: word after the opening fence.
        line: line number of the opening fence, from 1.
        text: text between the fences.
    """

    language: str
    line: int
    text: str


def name_of(page: Path) -> str:
    return page.parent.name if page.name == "README.md" else page.stem


@cache
def read(page: Path) -> tuple[list[str], list[Block]]:
    """Return the lines outside of fenced blocks, and the fenced blocks."""
    outside, blocks, opened = list[str](), list[Block](), None
    for number, line in enumerate(page.read_text().splitlines(), 1):
        fence = re.match(r"\s*```(\w*)", line)
        if fence and opened is None:
            opened = Block(fence[1], number, "")
        elif fence:
            assert opened is not None
            blocks.append(opened)
            opened = None
        elif opened is not None:
            opened = Block(opened.language, opened.line, f"{opened.text}{line}\n")
        else:
            outside.append(line)
    assert opened is None, f"{page}: the block of line {opened.line} does not end"
    return outside, blocks


def recipe(name: str) -> Block:
    """Return the first fenced block of a page."""
    return next(read(page)[1][0] for page in PAGES if name_of(page) == name)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent != DESIGN or page.name == "README.md"], ids=name_of
)
def test_a_recipe_begins_within_twenty_lines(page: Path) -> None:
    """A title and at least a sentence that ends with a colon stand before the recipe."""
    block = read(page)[1][0]
    assert block.line <= TOP and block.language in ("python", "sh", "json")
    title, *words = re.sub(r"<!--.*?-->", "", "\n".join(page.read_text().splitlines()[: block.line - 1])).split("\n")
    assert title.startswith("# ") and not any(word.startswith("#") for word in words)
    assert len(" ".join(words).split()) > 12 and " ".join(words).rstrip().endswith(":")


def headings(page: Path) -> set[str]:
    """Return the anchors of a page's headings as GitHub makes them; repeated titles get a number."""
    found, seen = set[str](), Counter[str]()
    for line in read(page)[0]:
        title = re.match(r"#{1,6} +(.*)", line)
        if title:
            slug = anchor(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title[1]))
            found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
            seen[slug] += 1
    return found


def links(page: Path) -> list[str]:
    """Return the targets of links to files and headings; links to other sites are left out."""
    text = re.sub(r"`[^`\n]*`", "", "\n".join(read(page)[0]))
    found = [*re.findall(r"\]\(([^)\s]+)\)", text), *re.findall(r"^\[[^\]]+\]: (\S+)", text, re.MULTILINE)]
    return [target for target in found if not re.match(r"[a-z]+:", target)]


def fault(page: Path, target: str) -> str | None:
    """Return the fault of a link as text; None if the link works."""
    name, _, title = target.partition("#")
    path = (page.parent / name).resolve() if name else page
    if not path.exists():
        return f"{page.relative_to(ROOT)}: {target} is not there"
    if title and (path.suffix != ".md" or title not in headings(path)):
        return f"{page.relative_to(ROOT)}: {target} has no such heading"
    return None


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    assert [found for target in links(page) if (found := fault(page, target)) is not None] == []


def test_anchors_are_those_that_github_gives(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Is `a_b` it?\n```sh\n# no heading\n```\n## With [a link](x.md), twice\n## With a link, twice\n")
    assert headings(page) == {"is-a_b-it", "with-a-link-twice", "with-a-link-twice-1"}


def test_the_index_has_every_page() -> None:
    reached = {(INDEX.parent / target.partition("#")[0]).resolve() for target in links(INDEX)}
    assert set(PAGES) <= reached
    assert len(INDEX.read_text().splitlines()) <= 60
    assert "docs/README.md" in links(ROOT / "README.md")


def words(cell: str) -> int:
    """Return the number of words of a table cell; a code span or the target of a link counts as one or none."""
    return len(re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "code", cell)).split())


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_and_cells_are_short(page: Path) -> None:
    """Prose lines have at most 120 characters, and table cells at most 25 words."""
    lines = read(page)[0]
    assert [line for line in lines if len(line) > 120 and not line.startswith("|")] == []
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines if line.startswith("|")]
    assert [cell for row in rows for cell in row if words(cell) > 25] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem != "configuration"], ids=name_of)
def test_pages_have_at_most_2500_words(page: Path) -> None:
    assert len(page.read_text().split()) <= 2500


def test_every_picture_has_a_script_and_a_page() -> None:
    drawn = {path.stem for path in (ROOT / "docs" / "images").glob("*.png")}
    shown = {Path(target).stem for page in DOCS for target in links(page) if target.endswith(".png")}
    assert drawn == set(PICTURES) and drawn <= shown


def messages() -> list[str]:
    """Return all string literals of the package, with NUL in place of inserted values."""
    found = []
    for path in (ROOT / "zeropp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_troubleshooting_quotes_messages_of_the_code() -> None:
    """Each quote occurs in a string literal. An ellipsis in a quote stands for inserted values."""
    quotes = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    text = "\n\n".join(messages())
    gone = [quote for quote in quotes if not re.search("[^\n]*?".join(map(re.escape, quote.split(" … "))), text)]
    assert len(quotes) > 40 and gone == []


@pytest.mark.parametrize("page", [ROOT / "README.md", *DOCS, KERNELS], ids=lambda page: str(page.relative_to(ROOT)))
def test_python_compiles_and_json_parses(page: Path) -> None:
    for block in read(page)[1]:
        if block.language == "python":
            compile(block.text, f"{page}:{block.line}", "exec")
        elif block.language == "json":
            json.loads(block.text)


@pytest.mark.parametrize("name", RUN_HERE)
def test_a_first_recipe_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # contracts.md saves a file
    torch.manual_seed(0)
    printed, space = io.StringIO(), dict[str, object]()
    with redirect_stdout(printed):
        exec(compile(recipe(name).text, name, "exec"), space)
    if name in ("concepts", "design"):
        page = next(page for page in PAGES if name_of(page) == name)
        assert read(page)[1][1] == Block("text", read(page)[1][1].line, printed.getvalue())
    elif name == "models":
        assert float(printed.getvalue()) > 0
    elif name == "contracts":
        assert torch.load("model.pt").keys() == {"weight", "bias"}
    elif name == "offload-states":
        assert printed.getvalue() == ""
    else:
        sent, plain, error = (float(word) for word in re.findall(r"\d+(?:\.\d+)?", printed.getvalue()))
        assert sent / plain == pytest.approx(0.516 / 2, abs=0.001)
        # The error is at most half a step of the largest scale, plus rounding of differences and values to bfloat16.
        x = space["x"]
        assert isinstance(x, torch.Tensor) and 0 < error < 0.52 * float(x.abs().max()) / 7


@pytest.mark.parametrize("name", ["configuration", "offload", "zeropp"])
def test_a_first_configuration_is_accepted(name: str) -> None:
    require_supported(load_config(json.loads(recipe(name).text)))


COMMANDS = {"step_time": step_time_arguments, "convergence": convergence_arguments}


@pytest.mark.parametrize("name", ["benchmarks", "convergence", "migrating", "multinode"])
def test_a_first_command_is_understood(name: str) -> None:
    """The argument parser of the benchmark or of torchrun accepts the command."""
    assert recipe(name).language == "sh"
    words = shlex.split(recipe(name).text)
    if name == "migrating":
        assert words[:2] == ["python", "-m"] and importlib.util.find_spec(words[2]) is not None
        words = words[3:]
    if words[0] == "torchrun":
        assert get_args_parser().parse_args(words[1:]).training_script == "train.py"
    else:
        assert words[:2] == ["python", "-m"]
        COMMANDS[words[2].removeprefix("bench.")](words[3:])
