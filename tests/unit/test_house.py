"""House rules: allowed imports between rooms, lengths, words, commands of the README, and complete packages.

A room is a folder or a file directly in zeropp/.
"""

from __future__ import annotations

import ast
import email
import functools
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tokenize
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import zeropp

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"zeropp": ROOT / "zeropp", "zeropp_kernels": ROOT / "kernels" / "zeropp_kernels"}
SOURCES = sorted(path for folder in PACKAGES.values() for path in folder.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

FILE_LINES = 800
FUNCTION_LINES = 60
KERNEL_LINES = 120
SMALL_FILE_LINES = 80  # a file with fewer lines needs at least two importers

# Words that identifiers and docstrings must not use, and the words to use instead.
RETIRED = {
    "company": "what else is set, or who else calls",
    "distrust": "invalidate",
    "driver": "handler",
    "holders": "ranks that cache it",
    "leg": "hop",
    "legs": "hops",
    "settle": "wait",
    "settled": "waited for",
    "settles": "waits",
}
# Files that need a retired word because another package has a name with it.
NAMED_BY_OTHERS = {("kernels/zeropp_kernels/device/prepared.py", "driver")}
# Modules that zeropp/order may not import, because the order of collectives must not depend on them. `refresh` is an
# exception for threading: it waits for an event on a comm stream without a time limit.
NO_ORDER = {
    "asyncio", "multiprocessing", "random", "subprocess", "threading", "time", "torch.distributed",
    "zeropp.comm.hops", "zeropp.comm.process_groups",
}  # fmt: skip
LIMITLESS = {"refresh": "threading"}

# Files that re-export names under old import paths. They count as part of the room `compat`.
OLD_PATHS = {PACKAGES["zeropp"] / "checkpoint" / name for name in ("to_fp32_command.py", "zero_to_fp32.py")}

# Levels of rooms. A room may import itself and rooms with a lower number. A room is a folder or file in zeropp/.
ROOMS = {
    "zeropp_kernels": 0,
    "config": 0,
    "_compat": 0,
    "_extensions": 0,
    "partition": 1,
    "comm": 2,
    "wire": 3,
    "offload": 3,
    "params": 4,
    "order": 5,
    "fsdp2": 5,
    "engine": 6,
    "access": 7,
    "setup": 8,
    "plan": 9,
    "optimizer": 10,
    "init": 10,
    "checkpoint": 11,
    "deepspeed": 12,
    "integrations": 13,
    "zero": 14,
    "training": 14,
    "compat": 14,
    "__init__": 15,
}

# Names of zeropp.config that rooms below setup may import: functions for warnings, and a bound.
OF_CONFIG = {
    "zeropp.config.base.line_of_user", "zeropp.config.base.notify_once", "zeropp.config.base.warn_user",
    "zeropp.config.blocks.LONGEST_TIMEOUT",
}  # fmt: skip

# Rooms without which the core's tests must pass, and the folders of the tests that need these rooms.
REMOVABLE = {"deepspeed", "integrations"}
OUTSIDE = ("unit/deepspeed", "distributed/deepspeed", "distributed/integrations")


def short(path: Path) -> str:
    return str(path.relative_to(ROOT))


def room_of(module: str) -> str | None:
    """Return the room of a dotted name; None for names outside of zeropp and zeropp_kernels."""
    parts = module.split(".")
    if parts[0] == "zeropp_kernels":
        return "zeropp_kernels"
    if parts[0] != "zeropp":
        return None
    return parts[1] if len(parts) > 1 else "__init__"


def module_name(path: Path) -> str:
    for package, folder in PACKAGES.items():
        if path.is_relative_to(folder):
            parts = path.relative_to(folder).with_suffix("").parts
            return ".".join((package, *parts))
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


@functools.cache
def walk(path: Path) -> list[ast.AST]:
    """Return all AST nodes of a file; cached, because many tests use them."""
    return list(ast.walk(ast.parse(path.read_text())))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of every import in a file, also inside functions and under TYPE_CHECKING."""
    own = module_name(path).split(".")
    for node in walk(path):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            prefix = own[: len(own) - node.level] if node.level else []
            base = ".".join([*prefix, *([node.module] if node.module else [])])
            if base == "zeropp":  # `from zeropp import comm` imports a room
                for alias in node.names:
                    yield node.lineno, f"zeropp.{alias.name}"
            else:
                yield node.lineno, base


def forbidden(path: Path) -> Iterator[str]:
    room = "compat" if path in OLD_PATHS else room_of(module_name(path))
    for line, name in imports(path):
        target = room_of(name)
        if target is None or target == room:
            continue
        where = f"{short(path)}:{line} imports {name}"
        if room not in ROOMS:
            yield f"{where}: zeropp/{room} has no place in ROOMS"
        elif target not in ROOMS:
            yield f"{where}: zeropp/{target} has no place in ROOMS (or a room imports a name from the top)"
        elif ROOMS[target] >= ROOMS[room]:
            yield f"{where}: {room} may not know of {target}"


def of_configuration(path: Path) -> Iterator[str]:
    """Yield the places where a file imports a configuration or uses its class, except the names in `OF_CONFIG`."""
    for node in walk(path):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Name) and node.id.endswith("Config"):
            names = [f"zeropp.config.{node.id}"]
        elif isinstance(node, ast.Attribute) and node.attr in ("config", "settings") and "maker" in ast.unparse(node):
            names = [f"zeropp.config, by {ast.unparse(node)}"]
        for name in names:
            if name.startswith("zeropp.config") and name not in OF_CONFIG:
                yield f"{short(path)}:{getattr(node, 'lineno', 0)} {name}"


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in walk(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_dependencies_point_down() -> None:
    assert [problem for path in SOURCES for problem in forbidden(path)] == []


def test_nothing_below_setup_sees_a_configuration() -> None:
    """Rooms below setup get plain values from the blueprint, which setup/ makes from the configuration."""
    below = {room for room, floor in ROOMS.items() if floor < ROOMS["setup"]} - {"config"}
    files = [path for path in SOURCES if room_of(module_name(path)) in below]
    assert len(files) > 50
    assert [problem for path in files for problem in of_configuration(path)] == []


def test_the_rule_for_configurations_finds_every_violation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "unit.py").write_text(
        "import zeropp.config.top\nfrom zeropp.config import Config\nfrom zeropp import config, comm\n"
        "from zeropp.config.base import warn_user, is_auto\n"
        "def f(block: AioConfig, engine):\n    return engine.maker.config.zero, block.config\n"
    )
    found = {problem.partition(":")[2] for problem in of_configuration(tmp_path / "unit.py")}
    assert found == {
        "1 zeropp.config.top", "2 zeropp.config.Config", "3 zeropp.config", "4 zeropp.config.base.is_auto",
        "5 zeropp.config.AioConfig", "6 zeropp.config, by engine.maker.config",
    }  # fmt: skip


def test_a_blueprint_alone_derives() -> None:
    """Only the blueprint computes values from a model and a configuration; other code reads them from the blueprint."""
    setup = ROOT / "zeropp" / "setup"
    derive = {node.name for node in functions(setup / "choices.py") if not node.name.startswith("_")}
    derive |= {"buffer_layouts", "choose_staging", "computed_with", "divide_steps", "form_units"}
    assert len(derive) > 15
    found = {
        (short(path), name.rpartition(".")[2])
        for path in SOURCES
        for _, name in imported(path)
        if name.rpartition(".")[2] in derive
    }
    assert {path for path, _ in found} == {"zeropp/setup/blueprint.py"}
    assert derive - {name for _, name in found} <= {"named"}  # `named` is a function inside another function


def test_rooms_are_those_that_exist() -> None:
    found = (ROOT / "zeropp").iterdir()
    there = {path.stem for path in found if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert {*there, "zeropp_kernels", *REMOVABLE} == set(ROOMS)


def test_the_map_shows_every_room() -> None:
    shown = (ROOT / "docs" / "design" / "README.md").read_text().split("\n## Map\n")[1].split("```")[1]
    folders = {name for name in ROOMS if (ROOT / "zeropp" / name).is_dir()} | REMOVABLE
    rooms = {name if name in folders else f"{name}.py" for name in ROOMS}
    missing = {room for room in rooms - {"zeropp_kernels.py", "__init__.py"} if room not in shown}
    assert not missing and "zeropp_kernels" in shown, f"the map in docs/design/README.md does not show {missing}"


def names_in(path: Path) -> set[str]:
    """Return the names that a file defines or imports, also inside classes."""
    found = set()
    for node in walk(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def test_code_that_docs_name_is_there() -> None:
    """Check names such as ``room.module.Name``, paths such as ``room/module.py``, and a name right after a path."""
    gone = []
    # The pages on migrating name modules and keys of DeepSpeed. zeropp/training only re-exports names, so its prefix
    # is removed.
    pages = [path for path in sorted((ROOT / "docs").rglob("*.md")) if not path.name.startswith("migrating")]
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *pages]:
        text = path.read_text().replace("`zeropp.training.", "`")
        for room, module, rest in re.findall(r"`(?:zeropp\.)?([a-z_0-9]+)\.([a-z_0-9]+)\.([A-Za-z_0-9.]+)`", text):
            file = ROOT / "zeropp" / room / f"{module}.py"
            if (ROOT / "zeropp" / room).is_dir() and not (file.is_file() and {*rest.split(".")} <= names_in(file)):
                gone.append(f"{path.name}: {room}.{module}.{rest}")
        for name, after in re.findall(r"`([a-z_]+/[a-z_0-9]+\.py)`(?:, `([A-Za-z_.]+)`)?", text):
            file = ROOT / "zeropp" / name
            if (ROOT / name).is_file() or not file.parent.is_dir():
                continue
            if not file.is_file() or not {*filter(None, after.split("."))} <= names_in(file):
                gone.append(f"{path.name}: {name} {after}")
    assert gone == []


def test_rooms_name_modules_that_exist() -> None:
    """Each word in backticks in a room's docstring is a module or name of the room, or another room."""
    gone = []
    for room in (path for path in (ROOT / "zeropp").iterdir() if (path / "__init__.py").is_file()):
        said = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
        known = {*ROOMS, *(path.stem for path in room.glob("*.py"))}.union(
            *(names_in(path) for path in room.glob("*.py"))
        )
        gone += [f"{room.name}: {word}" for word in re.findall(r"(?<!`)`([a-z_0-9]+)`(?!`)", said) if word not in known]
    assert gone == []


def test_notes_are_defined_once_and_named() -> None:
    """A note is defined once, where its name begins a line, and named at least once inside a sentence."""
    text = {short(path): path.read_text() for path in SOURCES}
    named = [name for source in text.values() for name in re.findall(r"\[Note: [^\]]+\]", source)]
    for name in sorted(set(named)):
        defined = [path for path, source in text.items() if re.search(rf"^{re.escape(name)} \S", source, re.MULTILINE)]
        assert len(defined) == 1, f"{name} is defined in {defined}"
        assert named.count(name) > 1, f"{name} is named nowhere"
    assert len(set(named)) >= 4


def test_order_knows_no_clock_and_no_process_group() -> None:
    """The order may depend only on values that all ranks agreed on, so clocks and process groups are not imported."""
    found = [
        f"{short(path)}:{line} imports {name}"
        for path in sorted((ROOT / "zeropp" / "order").glob("*.py"))
        for line, name in imported(path)
        for banned in NO_ORDER
        if f"{name}.".startswith(f"{banned}.") and name != LIMITLESS.get(path.stem)
    ]
    assert found == []


def test_four_files_resize_storages() -> None:
    found = {str(path.relative_to(ROOT)) for path in (ROOT / "zeropp").rglob("*.py") if ".resize_(" in path.read_text()}
    assert found == {
        "zeropp/params/flat_buffer.py", "zeropp/params/gradient.py", "zeropp/offload/parked.py",
        "zeropp/setup/placing.py",
    }  # fmt: skip


# Public attributes of DeepSpeed's engine, which zeropp/deepspeed sets through a variable that is also named "engine".
_OF_DEEPSPEED = {"lr_scheduler", "training_dataloader", "writes_module_states"}


def test_other_rooms_use_only_public_attributes_of_the_engine() -> None:
    """Other rooms set no attribute of the engine and use no private one."""
    found = []
    for path in SOURCES:
        if "engine" in path.relative_to(ROOT).parts[1:-1] or path.name == "hops.py":
            continue
        for node in walk(path):
            if not isinstance(node, ast.Attribute):
                continue
            owner = ast.unparse(node.value).rpartition(".")[2].lstrip("_")
            private = node.attr.startswith("_") and not node.attr.startswith("__")
            sets = isinstance(node.ctx, ast.Store) and node.attr not in _OF_DEEPSPEED
            if owner in ("engine", "core") and (private or sets):
                found.append(f"{short(path)}:{node.lineno} {ast.unparse(node)}")
    assert found == []


# Ways to intercept tensor operations, and the files that may use them: the guard, gradients that refuse norms of a
# part, the optimizer's parameters that wait for a step, and graphs that begin inside GatheredParameters.
INTERCEPTING = {
    "sets a class": {"params/guard.py", "params/parameter_swap.py"},
    "makes tensors of a subclass": {"params/guard.py", "optimizer/partial_gradient.py"},
    "defines __torch_function__": {
        "access/gathered.py", "optimizer/partial_gradient.py", "optimizer/sharded_params.py", "params/guard.py",
    },
    "has a TorchFunctionMode": {"access/gathered.py"},
}  # fmt: skip


def intercepts(node: ast.AST) -> str:
    """Return the way in which an AST node intercepts tensor operations; "" if it does not intercept any."""
    if isinstance(node, ast.Attribute) and node.attr == "__class__" and isinstance(node.ctx, ast.Store):
        return "sets a class"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "as_subclass":
        return "" if ast.unparse(node.args[0]).endswith("Tensor") else "makes tensors of a subclass"
    if isinstance(node, ast.Dict) and any(ast.unparse(key) == "'__torch_function__'" for key in node.keys if key):
        return "defines __torch_function__"
    if isinstance(node, ast.FunctionDef) and node.name == "__torch_function__":
        return "defines __torch_function__"
    bases = map(ast.unparse, node.bases) if isinstance(node, ast.ClassDef) else ()
    return "has a TorchFunctionMode" if any(base.endswith("TorchFunctionMode") for base in bases) else ""


def test_one_way_to_intercept() -> None:
    found: dict[str, set[str]] = {}
    for path in SOURCES:
        for how in filter(None, map(intercepts, walk(path))):
            found.setdefault(how, set()).add(short(path).removeprefix("zeropp/"))
    assert found == INTERCEPTING


def test_one_file_looks_at_stack_frames() -> None:
    """Only a message's line of user code is read from stack frames. Behaviour must not depend on the caller."""
    frames = re.compile(r"_getframe|currentframe|_current_frames|\.f_back\b")
    assert [short(path) for path in SOURCES if frames.search(path.read_text())] == ["zeropp/config/base.py"]


def test_one_file_registers_for_forks_and_for_the_end_of_the_program() -> None:
    found = []
    for path in SOURCES:
        source = path.read_text()
        if "register_at_fork" in source or "atexit" in source:
            nodes = walk(path)
            names = [ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)]
            names += [name for node in nodes if isinstance(node, ast.ImportFrom) for name in imported_from(node)]
            found += [(short(path), name) for name in names if name in ("os.register_at_fork", "atexit.register")]
    assert sorted(found) == [
        ("zeropp/comm/threads.py", "atexit.register"),
        ("zeropp/comm/threads.py", "os.register_at_fork"),
    ]


def imported_from(node: ast.ImportFrom) -> list[str]:
    return [f"{node.module}.{alias.name}" for alias in node.names]


def test_every_room_has_a_docstring_with_a_starting_point() -> None:
    """A room's docstring has at least three lines, one of which says where to start reading."""
    for room in (path for path in (ROOT / "zeropp").iterdir() if (path / "__init__.py").is_file()):
        said = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
        assert len(said.splitlines()) >= 3 and "Start with" in said, f"zeropp/{room.name}/__init__.py says {said!r}"


def importers() -> dict[str, set[str]]:
    """Return the modules of zeropp that each module imports, with imports inside functions."""
    paths = (path for path in SOURCES if path.is_relative_to(PACKAGES["zeropp"]))
    names = {module_name(path).removesuffix(".__init__"): path for path in paths}
    return {name: {target for _, target in imports(path) if target in names} - {name} for name, path in names.items()}


def test_modules_import_each_other_in_no_circle() -> None:
    left = importers()
    while free := {name for name, targets in left.items() if not targets & left.keys()}:
        left = {name: targets for name, targets in left.items() if name not in free}
    assert left == {}, "these modules import each other, or import a module of a cycle"


def test_the_import_rule_finds_every_violation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGES, "zeropp", tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "engine").mkdir()
    engine = tmp_path / "engine" / "hooks.py"
    engine.write_text(
        "import torch\nfrom ..params.unit import Unit\nfrom .plan import x\nfrom zeropp import optimizer, comm\n"
        "def f():\n    from ..setup import y\n    import zeropp.nowhere\n"
    )
    lines = [problem.split(" imports ", 1)[1] for problem in forbidden(engine)]
    assert lines == [
        "zeropp.optimizer: engine may not know of optimizer",
        "zeropp.setup: engine may not know of setup",
        "zeropp.nowhere: zeropp/nowhere has no place in ROOMS (or a room imports a name from the top)",
    ]


def test_files_are_short() -> None:
    lines = {short(path): len(path.read_text().splitlines()) for path in [*SOURCES, *TESTS]}
    assert {name: count for name, count in lines.items() if count > FILE_LINES} == {}


def test_small_files_serve_at_least_two_others() -> None:
    """A short file with a single importer belongs into that file. Files that users import or run are exempt."""
    users = ("zero", "training", "compat")
    counts: dict[str, int] = {}
    for targets in importers().values():
        for target in targets:
            counts[target] = counts.get(target, 0) + 1
    small = [
        short(path)
        for path in SOURCES
        if path.is_relative_to(PACKAGES["zeropp"])
        and "stand_in" not in path.parts
        and path.name not in ("__init__.py", "__main__.py")
        and room_of(module_name(path)) not in users
        and path.parent.name != "integrations"
        and path not in OLD_PATHS
        and len(path.read_text().splitlines()) < SMALL_FILE_LINES
        and counts.get(module_name(path), 0) < 2
    ]
    assert small == []


def test_files_of_different_rooms_have_different_names() -> None:
    found: dict[str, list[str]] = {}
    for path in SOURCES:
        if path.is_relative_to(PACKAGES["zeropp"]) and "stand_in" not in path.parts and path not in OLD_PATHS:
            found.setdefault(path.name, []).append(short(path))
    assert {name: paths for name, paths in found.items() if len(paths) > 1 and not name.startswith("__")} == {}


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of every name in a file's import statements, since each name may be a module."""
    for node in walk(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = f"{'.' * node.level}{node.module or ''}"
            yield node.lineno, base
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def test_no_test_imports_another_test() -> None:
    """Code that two test files share belongs into a file whose name does not begin with ``test_``."""
    tests = {path.stem for path in TESTS if path.stem.startswith("test_")}
    found = [
        f"{short(path)}:{line} imports {name}"
        for path in TESTS
        for line, name in imported(path)
        if name.startswith(("tests.", ".")) and name.rpartition(".")[2] in tests
    ]
    assert found == []


def of_the_outside(path: Path) -> Iterator[str]:
    """Yield "path:line name" for each use of a removable room in a test module or helper."""
    rooms = {*REMOVABLE, "training", "compat"}
    for line, name in imports(path):
        if room_of(name) in rooms or name.removeprefix("zeropp.") in zeropp._FUNCTIONS:
            yield f"{short(path)}:{line} {name}"
    for node in walk(path):
        if isinstance(node, ast.Attribute):
            of_zeropp = isinstance(node.value, ast.Name) and node.value.id == "zeropp"
            names, line = [node.attr], node.lineno
        elif isinstance(node, ast.ImportFrom):
            of_zeropp, names, line = False, [alias.name for alias in node.names], node.lineno
        else:
            continue
        for name in names:
            known = of_zeropp and (name in rooms or name in zeropp._FUNCTIONS)
            if known or "z3_leaf" in name or name == "ZeroParamStatus" or name.startswith("ds_"):
                yield f"{short(path)}:{line} {name}"


def test_tests_of_the_core_need_the_core_alone() -> None:
    """The rule includes helpers that tests import, and helpers of helpers."""
    paths = {module_name(path).removesuffix(".__init__"): path for path in TESTS}
    apart = tuple(str(ROOT / "tests" / folder) for folder in OUTSIDE)
    left = [path for path in TESTS if path.name.startswith("test_") and not str(path).startswith(apart)]
    seen = set(left)
    while left:
        path = left.pop()
        named = {name for _, name in imports(path)} | {name for _, name in imported(path)}
        more = {paths[name] for name in named & paths.keys()} - seen
        seen |= more
        left += more
    assert len(seen) > 200
    assert [problem for path in sorted(seen) for problem in of_the_outside(path)] == []


def test_the_rule_for_tests_of_the_core_finds_every_violation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "test_one.py").write_text(
        "import zeropp.training as t\nfrom zeropp import compat, checkpoint, initialize\n"
        "from zeropp.zero import Init, set_z3_leaf_module\nfrom zeropp.deepspeed.data import x\n"
        "def f(model):\n    zeropp.init_distributed()\n    zeropp.zero.ZeroParamStatus\n"
        "    zeropp.integrations.lightning\n    return model.weight.ds_id, model.training, zeropp.plan\n"
    )
    found = {problem.partition(":")[2] for problem in of_the_outside(tmp_path / "test_one.py")}
    assert found == {
        "1 zeropp.training", "2 zeropp.compat", "2 zeropp.initialize", "3 set_z3_leaf_module",
        "4 zeropp.deepspeed.data", "6 init_distributed", "7 ZeroParamStatus", "8 integrations", "9 ds_id",
    }  # fmt: skip


WITHOUT = """
import sys
import torch
import zeropp

model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
twin = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
twin.load_state_dict(model.state_dict())
config = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
optimizer = zeropp.ZeroOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), model, config)
plain = torch.optim.AdamW(twin.parameters(), lr=0.1)


def check():
    for name, value in zeropp.full_state(model).items():
        torch.testing.assert_close(value, twin.state_dict()[name])


for step in range(2):
    optimizer.backward(model(torch.ones(2, 8)).sum())
    optimizer.step()
    optimizer.zero_grad()
    plain.zero_grad()
    twin(torch.ones(2, 8)).sum().backward()
    plain.step()
    if step == 0:
        zeropp.checkpoint.save(sys.argv[1], model, optimizer)
        first = zeropp.full_state(model)
check()
zeropp.checkpoint.load(sys.argv[1], model, optimizer)
assert all(torch.equal(value, first[name]) for name, value in zeropp.full_state(model).items())


def attempt(package, use):
    try:
        use()
    except ImportError as error:
        assert package in str(error), error
    else:
        raise AssertionError(f"there is no {package}")


def lightning():
    import zeropp.integrations.lightning


assert not any("_mem_needs" in name or name == "initialize" for name in vars(zeropp))
attempt("zeropp.deepspeed", lambda: zeropp.initialize)
attempt("zeropp.deepspeed", lambda: zeropp.training)
attempt("zeropp.deepspeed", lambda: zeropp.zero.set_z3_leaf_module)
attempt("zeropp.integrations", lightning)
print(zeropp.__file__)
"""


def test_the_core_works_without_the_removable_rooms(tmp_path: Path) -> None:
    """Train two steps in stage 3 like plain torch, save and load a checkpoint, and use names of the missing rooms."""
    for folder in PACKAGES.values():
        shutil.copytree(
            folder,
            tmp_path / folder.name,
            ignore=lambda place, names: {"__pycache__", *(REMOVABLE if Path(place) == PACKAGES["zeropp"] else ())},
        )
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", WITHOUT, str(tmp_path / "saved")]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "zeropp" / "__init__.py")


def test_functions_are_short() -> None:
    """The length counts from ``def`` to the last line, with docstring and comments."""
    long = []
    for path in SOURCES:
        for node in functions(path):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > (KERNEL_LINES if "kernel" in node.name else FUNCTION_LINES):
                long.append(f"{short(path)}:{node.lineno} {node.name}: {length} lines")
    assert long == []


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of every docstring in a file."""
    for node in walk(path):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                yield node.body[0].lineno, text


def test_docstrings_do_not_begin_with_a_bare_genitive() -> None:
    """A docstring must not be a bare genitive such as "Of all units."."""
    everywhere = [*SOURCES, *TESTS, *sorted((ROOT / "bench").rglob("*.py"))]
    bare = [f"{short(path)}:{line}" for path in everywhere for line, text in docstrings(path) if text.startswith("Of ")]
    assert bare == []


def words(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, word) for every part of an identifier and every word of a docstring, in lower case."""
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.NAME:
                yield from ((token.start[0], word.lower()) for word in token.string.split("_"))
    for line, text in docstrings(path):
        yield from ((line, word.lower()) for word in re.findall("[A-Za-z]+", text))


def test_retired_words_stay_away() -> None:
    """docs/concepts.md has one word for each thing, and code must not use a second one."""
    found = [(short(path), line, word) for path in SOURCES for line, word in words(path) if word in RETIRED]
    found = [(path, line, word) for path, line, word in found if (path, word) not in NAMED_BY_OTHERS]
    assert [f"{path}:{line} {word}: say {RETIRED[word]}" for path, line, word in found] == []


def test_every_argument_is_annotated() -> None:
    """Triton kernels are exempt: their arguments are pointers and sizes, whose types only Triton's compiler knows."""
    missing = []
    for path in SOURCES:
        for node in functions(path):
            if any(re.search("jit|launched", ast.unparse(decorator)) for decorator in node.decorator_list):
                continue
            given = node.args
            every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
            for argument in every:
                if argument is None or argument.annotation is not None or argument.arg in ("self", "cls"):
                    continue
                missing.append(f"{short(path)}:{node.lineno} {node.name}({argument.arg})")
    assert missing == []


def test_fast_tests_exist() -> None:
    """Each entry of FAST in conftest.py is a test file, or a test function in that file."""
    from tests.conftest import FAST

    for beginning in FAST:
        file, _, name = beginning.partition("::")
        text = (ROOT / file).read_text()
        assert re.search(rf"^def {re.escape(name.partition('[')[0])}", text, re.MULTILINE), f"{beginning} is no test"


def readme_block(mark: str) -> str:
    """Return the fenced block after the HTML comment ``mark`` in README.md."""
    found = re.search(rf"<!-- {mark} -->\n```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found is not None, f"README.md has no fenced block marked {mark!r}"
    return found.group(1).strip()


def test_ci_runs_the_test_command_of_the_readme() -> None:
    shown = subprocess.run([ROOT / ".ci" / "run", "--show"], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == readme_block("test command")


@pytest.mark.parametrize("mark", ["test command", "train command"])
def test_readme_commands_are_one_line_and_pinned(mark: str) -> None:
    block = readme_block(mark)
    assert "\n" not in block
    assert "-c constraints.txt" in block
    for script in re.findall(r"\S+\.py", block):
        assert (ROOT / script).is_file()


def test_installed_version_is_the_version() -> None:
    try:
        installed = importlib.metadata.version("zeropp")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("zeropp is used from its source tree, not installed")
    assert installed == zeropp.__version__


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel from an unpacked source distribution, as an installer without git would do, and return its path."""
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed; it comes with the extra 'dev'")
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run([*build, "-t", "sdist"], cwd=ROOT, check=True, capture_output=True)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    subprocess.run([*build, "-t", "wheel"], cwd=folder / sdist.name[: -len(".tar.gz")], check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


def test_wheel_has_both_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    info = f"zeropp-{zeropp.__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {"zeropp", "zeropp_kernels", info}
    expected = {"zeropp/py.typed", "zeropp_kernels/py.typed", f"{info}/licenses/LICENSE"}
    for package, folder in PACKAGES.items():
        sources = [*folder.rglob("*.py"), *folder.rglob("METADATA")]
        expected |= {f"{package}/{path.relative_to(folder).as_posix()}" for path in sources}
    assert expected - names == set()


def test_wheel_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        # Read the metadata by its full path, because the stand-in for deepspeed has a METADATA file, too.
        metadata = email.message_from_bytes(archive.read(f"zeropp-{zeropp.__version__}.dist-info/METADATA"))
    assert metadata["Name"] == "zeropp"
    assert metadata["Version"] == zeropp.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    needs = [line.replace('"', "'") for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert sorted(needs) == ["pydantic>=2.7", "torch>=2.11", "triton>=3.6; platform_system == 'Linux'"]
    extras = ["bench", "checkpoint", "dev", "examples", "gds", "lightning"]
    assert sorted(metadata.get_all("Provides-Extra", [])) == extras
