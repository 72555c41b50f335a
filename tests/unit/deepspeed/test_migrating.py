"""The migration pages name every key and public name of the stand-in with the right verdict, and no others.

docs/migrating-calls.md has the names of the stand-in, docs/migrating-keys.md the keys; docs/migrating.md links both.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import json
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import zeropp
from zeropp.config import Config
from zeropp.config.base import UnsupportedConfigError, spellings
from zeropp.config.blocks import ExtensionConfig
from zeropp.config.describe import blocks, nested_block
from zeropp.config.supported import SUPPORT, Kind
from zeropp.config.zero_block import ZeroConfig
from zeropp.deepspeed import extension
from zeropp.deepspeed.refused_modules import MODULES
from zeropp.deepspeed.stand_in_path import STAND_IN
from zeropp.deepspeed.training_optimizer import TrainingOptimizer
from zeropp.engine.hooks import EXTERNAL_AS

ROOT = Path(__file__).resolve().parents[3]
PAGE, CALLS, KEYS = (ROOT / "docs" / f"migrating{part}.md" for part in ("", "-calls", "-keys"))
VERDICTS = {"same", "better", "differs", "nothing to do", "no effect", "refused", "absent"}
ACTS = {"same", "better", "differs"}
# Verdicts on the page that fit each kind of support. Keys in MADE may also work, because `initialize` constructs
# optimizers and schedulers, which the wrapper refuses.
FITTING = {
    Kind.EFFECT: ACTS, Kind.NEEDLESS: {"nothing to do"}, Kind.UNREAD: {"no effect"},
    Kind.LIMITED: {"refused"}, Kind.GOVERNED: {"refused"}, Kind.OFF: {"refused"}, Kind.BLOCK: ACTS,
}  # fmt: skip
MADE = {"optimizer.type", "optimizer.params", "scheduler.type", "scheduler.params"}
# Full module paths below deepspeed, by the short names that scripts use.
SHORT = {
    "zero": "runtime.zero",
    "checkpointing": "runtime.activation_checkpointing.checkpointing",
    "lr_schedules": "runtime.lr_schedules",
}


def rows(text: str) -> Iterator[tuple[str, str, list[str]]]:
    """Yield (section, verdict, names) of each row whose second cell is a verdict; names with braces are expanded."""
    for section in re.split(r"\n(?=##+ )", text):
        for line in section.splitlines():
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            if len(cells) == 3 and cells[1] in VERDICTS and cells[0] not in VERDICTS:
                yield section.splitlines()[0].strip("# "), cells[1], list(expanded(re.findall(r"`([^`]+)`", cells[0])))


def expanded(names: list[str]) -> Iterator[str]:
    for name in names:
        found = re.fullmatch(r"(.*)\{(.*)\}(.*)", name)
        yield from (found[1] + part + found[3] for part in found[2].split(",")) if found else [name]


def rows_of(*pages: Path) -> list[tuple[str, str, list[str]]]:
    """Return the rows of all tables on these pages."""
    return [row for page in pages for row in rows(page.read_text())]


def fields() -> Iterator[tuple[str, list[str], Kind]]:
    """Yield (block, spellings, kind) of each field that is not a block."""
    for path, model in blocks(Config):
        where = ".".join(path)
        for name, field in model.model_fields.items():
            if nested_block(field) is None:
                yield where, spellings(name, field), SUPPORT[model][name].kind


def keys() -> dict[str, str]:
    """Return the verdicts of the page's keys, by full path. Two sections of the page leave out `zero_optimization`."""
    below = {"zero_optimization": "", "Offload": "offload_"}
    return {
        f"zero_optimization.{name}" if name.startswith(below.get(section, " ")) else name: verdict
        for section, verdict, names in rows_of(KEYS)
        for name in names
    }


def test_the_page_names_every_key_with_the_right_verdict() -> None:
    said, wrong = keys(), []
    for block, names, kind in fields():
        full = [f"{block}.{name}" if block else name for name in names]
        verdict = next((said[name] for name in [*full, f"{block}.*"] if name in said), None)
        fits = FITTING[kind] | (ACTS if set(full) & MADE else set())
        if verdict not in fits:
            wrong.append(f"{full[0]} ({kind.name}): the page says {verdict}")
    assert wrong == []


def test_no_other_keys_are_named() -> None:
    there = {f"{block}.{name}" if block else name for block, names, _ in fields() for name in names}
    there |= {f"{block}.*" for block, _, _ in fields()} | {"zero_optimization"}
    there |= {f"zero_optimization.{key}" for key in ZeroConfig.retired}
    assert sorted(keys().keys() - there) == []


# Source files of the stand-in and of the integrations are parsed instead of imported, because the real DeepSpeed may be
# installed.
STAND_IN_ROOT, INTEGRATIONS = Path(STAND_IN, "deepspeed"), ROOT / "zeropp" / "integrations"


def file_of(folder: Path, module: str) -> Path | None:
    base = folder.joinpath(*module.split(".")) if module else folder
    path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    return path if path.is_file() else None


@cache
def defined(module: str, folder: Path = STAND_IN_ROOT) -> dict[str, ast.AST]:
    """Return the names defined at the top of a module with their AST nodes; empty if the module does not exist."""
    found: dict[str, ast.AST] = {}
    path = file_of(folder, module)
    for node in [] if path is None else ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom | ast.Import):
            found |= {(alias.asname or alias.name): node for alias in node.names}
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {each.id: node for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}
    return found


def full_name(name: str) -> str:
    first, dot, rest = name.partition(".")
    return SHORT.get(first, first) + dot + rest


def is_there(name: str) -> bool:
    module, _, last = full_name(name).rpartition(".")
    return file_of(STAND_IN_ROOT, full_name(name)) is not None or last in defined(module)


def is_refused(name: str) -> bool:
    """Return True if importing the name's module or a parent module is refused, or the name is a refusing class."""
    full = full_name(name)
    if f"deepspeed.{full}" in MODULES:
        return True
    if not is_there(full):
        return any(f"deepspeed.{full}.".startswith(f"{module}.") for module in MODULES)
    module, _, last = full.rpartition(".")
    made = defined(module).get(last)
    if isinstance(made, ast.ImportFrom) and made.level == 1 and made.module:
        return is_refused(f"{module}.{made.module}.{last}".lstrip("."))
    return made is not None and "refused(" in ast.unparse(made)


def public() -> Iterator[str]:
    for path in sorted(STAND_IN_ROOT.rglob("*.py")):
        module = ".".join(path.relative_to(STAND_IN_ROOT).with_suffix("").parts).removesuffix("__init__").rstrip(".")
        made = defined(module).get("__all__")
        if isinstance(made, ast.Assign):
            yield from (f"{module}.{name}".lstrip(".") for name in ast.literal_eval(made.value))


def calls() -> dict[str, set[str]]:
    """Return the verdicts of the page's names below ``deepspeed``, by full name."""
    found: dict[str, set[str]] = {}
    for _, verdict, names in rows_of(PAGE, CALLS):
        for name in names:
            if re.fullmatch(r"[\w.]+", name) and name.split(".")[0] not in ("engine", "optimizer", "p", "module"):
                found.setdefault(full_name(name), set()).add(verdict)
    return found


def test_every_public_name_of_the_stand_in_is_named() -> None:
    said = calls()
    missing = [name for name in public() if full_name(name) not in said]
    assert missing == []
    assert sorted(set(MODULES) - {f"deepspeed.{name}" for name, how in said.items() if "refused" in how}) == []


def test_no_other_calls_are_named() -> None:
    """Names that work exist, refused names are refused by name, and absent names do not exist."""
    wrong = []
    for name, verdicts in calls().items():
        for verdict in verdicts:
            fits = {"refused": is_refused, "absent": lambda name: not is_there(name)}.get(verdict, is_there)
            if not fits(name):
                wrong.append(f"{name}: {verdict}")
            elif verdict in ACTS and is_refused(name) and "refused" not in verdicts:
                wrong.append(f"{name}: {verdict}, and it is refused")
    assert wrong == []


ENGINE = inspect.getsource(zeropp.training.Engine)
OPTIMIZER = inspect.getsource(TrainingOptimizer)
CARRIED = inspect.getsource(extension)
OWNERS = {
    "engine": lambda name: hasattr(zeropp.training.Engine, name) or re.search(rf"self\.{name}\b", ENGINE),
    "optimizer": lambda name: hasattr(TrainingOptimizer, name) or re.search(rf"self\.{name} = ", OPTIMIZER),
    "p": lambda name: re.search(rf"\b{name}=", CARRIED),
    "module": lambda name: name == EXTERNAL_AS,
}  # fmt: skip


def test_attributes_are_where_the_page_says() -> None:
    wrong, seen = [], set()
    for _, verdict, names in rows_of(PAGE, CALLS):
        for name in names:
            found = re.fullmatch(r"(engine|optimizer|p|module)\.(\w+)", name)
            # These attributes exist in torch, and are refused for some values only, so they are not checked by name.
            if found and name not in ("p.data", "p.grad", "p.shape"):
                seen.add(found[1])
                if bool(OWNERS[found[1]](found[2])) != (verdict != "absent"):
                    wrong.append(f"{name}: {verdict}")
    assert wrong == [] and seen == set(OWNERS)


def resolves(dotted: str) -> bool:
    parts = dotted.split(".")
    if parts[:2] == ["zeropp", "integrations"]:
        return file_of(INTEGRATIONS, parts[2]) is not None and set(parts[3:]) <= defined(parts[2], INTEGRATIONS).keys()
    for cut in range(len(parts), 0, -1):
        with contextlib.suppress(ModuleNotFoundError):
            found: object = importlib.import_module(".".join(parts[:cut]))
            for part in parts[cut:]:
                found = getattr(found, part, None)
            return found is not None
    return False


def test_names_of_zeropp_exist() -> None:
    texts = [re.sub(r"\]\([^)]*\)", "]", page.read_text()) for page in (PAGE, CALLS, KEYS)]  # without addresses
    found = [set(re.findall(r"(?<![\w/])zeropp(?:\.\w+)+", text)) for text in texts]
    # The block of the configuration has the package's name.
    block = {f"zeropp.{name}" for name in ExtensionConfig.model_fields}
    names = found[0] | found[1] | (found[2] - block)
    assert len(names) > 12 and [name for name in sorted(names) if not resolves(name)] == []


@pytest.mark.parametrize("page", [PAGE, CALLS, KEYS], ids=lambda page: page.stem)
@pytest.mark.parametrize("name", ["README.md", "docs/README.md", "docs/training.md"])
def test_it_is_linked(name: str, page: Path) -> None:
    assert re.search(rf"\((docs/)?{re.escape(page.name)}", (ROOT / name).read_text())


def test_the_pages_link_each_other() -> None:
    pages = {PAGE, CALLS, KEYS}
    assert all(f"({other.name})" in page.read_text() for page in pages for other in pages - {page})


def test_each_introduction_explains_the_verdicts_of_its_page() -> None:
    explained = {}
    for page in (CALLS, KEYS):
        table = page.read_text().split("\n## ")[0].split("\n|---|---|\n")[1]
        explained[page] = set(re.findall(r"^\| ([a-z ]+?) \| \S", table, re.MULTILINE))
        assert explained[page] == {verdict for _, verdict, _ in rows_of(page)}
    assert explained[CALLS] | explained[KEYS] == VERDICTS


def test_every_row_has_a_verdict() -> None:
    """A verdict that is misspelt would take its row out of the other tests."""
    for page in (CALLS, KEYS):
        lines = [line for line in page.read_text().splitlines() if re.match(r"\| .*\|.*\|.*\|$", line)]
        headers = [line for line in lines if line.split("|")[2].strip() == "in zeropp"]
        assert len(lines) - len(headers) == len(rows_of(page)) and len(headers) > 5


def test_the_recipe_lists_names_of_a_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import deepspeed\nengine = deepspeed.zero.Init()\nengine.step()\n")
    command = CALLS.read_text().split("```sh\n")[1].split("```")[0]
    found = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert found.split() == ["1", "deepspeed.zero.Init", "1", "engine.step"]


@pytest.mark.parametrize("more", [{}, {"zenflow": {}}], ids=["accepted", "refused"])
def test_the_recipe_checks_a_file(more: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with blocks that ``initialize`` makes passes; a key that is refused does not."""
    monkeypatch.chdir(tmp_path)
    block = {"stage": 3, **more}
    optimizer = {"type": "AdamW", "params": {"lr": "auto"}}
    Path("zero3.json").write_text(json.dumps({"zero_optimization": block, "optimizer": optimizer}))
    recipe = KEYS.read_text().split("```python\n")[1].split("```")[0]
    with pytest.raises(UnsupportedConfigError, match="zenflow") if more else contextlib.nullcontext():
        exec(compile(recipe, "migrating-keys.md", "exec"), {})
