"""The stand-in named ``deepspeed`` is found after ``install`` and in commands and their children, and not otherwise."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

from zeropp.compat import deepspeed as compat
from zeropp.compat.deepspeed.__main__ import main
from zeropp.deepspeed.stand_in_path import STAND_IN, VERSION, require_not_installed, require_not_shadowed

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path with another deepspeed package and its metadata, as pip would install them."""
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text("__version__ = '0.18.0'\n")
    info = tmp_path / "deepspeed-0.18.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.18.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove libraries that look for deepspeed from sys.modules, and restore paths and environment after the test."""
    for name in list(sys.modules):
        if name.partition(".")[0] in ("accelerate", "transformers", "trl"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        del sys.modules[name]


def test_its_folder_of_metadata_has_its_version() -> None:
    """The folder of METADATA has the version in its name. test_house.py checks that the wheel contains METADATA."""
    (metadata,) = Path(STAND_IN).rglob("METADATA")
    assert metadata.parent.name == f"deepspeed-{VERSION}.dist-info"


def test_install_finds_it_once(fresh: None) -> None:
    """The stand-in is found only after the call, a second call does nothing, and versions can be looked up as usual."""
    assert importlib.util.find_spec("deepspeed") is None
    compat.install()
    compat.install()
    assert sys.path.count(STAND_IN) == 1 and os.environ["PYTHONPATH"].split(os.pathsep)[0] == STAND_IN
    try:
        found = importlib.import_module("deepspeed")
        assert found.__file__ == f"{STAND_IN}/deepspeed/__init__.py"
        assert found.__version__ == version("deepspeed") == VERSION
    finally:
        forget()


def test_a_command_and_its_children_have_it() -> None:
    """The exit status is that of the command."""
    inner = "[sys.executable, '-c', 'import deepspeed; exit(7)']"
    child = f"import subprocess, sys; sys.exit(subprocess.run({inner}).returncode)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    command = [sys.executable, "-m", "zeropp.compat.deepspeed", sys.executable, "-c", child]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 7, done.stderr


def test_a_command_that_cannot_be_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no-such-command", "x"]) == 2
    said = capsys.readouterr().err
    assert "'no-such-command': it is not on PATH; activate the virtual environment" in said and "usage" in said
    assert main(["deepspeed", "train.py"]) == 2 and "torchrun" in capsys.readouterr().err
    assert main(["train.py"]) == 2 and "python train.py" in capsys.readouterr().err
    assert main([]) == 2 and main(["--help"]) == 0


@pytest.mark.parametrize("name", ["deepspeed.py", "deepspeed/__init__.py"])
def test_a_folder_of_that_name_beside_the_script_is_not_taken_for_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    (tmp_path / "train.py").write_text("import deepspeed")
    assert main([sys.executable, str(tmp_path / "train.py")]) == 2
    assert str(tmp_path / name) in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    assert main([sys.executable, "-c", "import deepspeed"]) == 2 and name in capsys.readouterr().err


def test_an_argument_named_deepspeed_py_shadows_nothing(tmp_path: Path) -> None:
    for name in ("train.py", "configs/deepspeed.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    argument = str(tmp_path / "configs/deepspeed.py")
    require_not_shadowed(["python", str(tmp_path / "train.py"), "-c", argument])
    require_not_shadowed(["python", "-m", "train", argument])


def test_a_module_is_looked_for_where_the_command_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After ``-m``, a word that ends in .py may be an argument or a launcher's script, so both folders are checked."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "deepspeed.py").touch()
    with pytest.raises(RuntimeError, match="in place of zeropp's stand-in"):
        require_not_shadowed(["python", "-m", "train", "elsewhere/settings.py"])
    (tmp_path / "deepspeed.py").rename(tmp_path / "elsewhere/deepspeed.py")
    with pytest.raises(RuntimeError, match="in place of zeropp's stand-in"):
        require_not_shadowed(["python", "-m", "torch.distributed.run", "elsewhere/train.py"])


@pytest.mark.parametrize("how", [["-mtrain"], ["-um", "train"], ["-cimport deepspeed"], ["-"], ["--module", "train"]])
def test_names_are_told_by_options_however_they_are_written(
    how: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    require_not_shadowed(["python", *how])
    (tmp_path / "deepspeed.py").touch()
    with pytest.raises(RuntimeError, match="in place of zeropp's stand-in"):
        require_not_shadowed(["python", *how])
    require_not_shadowed(["torchrun", "--nproc-per-node", "2", "other/train.py", *how])
    for launcher in (["mpirun", "-mca", "btl", "tcp"], ["mpirun", "-map-by", "node"], ["srun", "-c4"]):
        require_not_shadowed([*launcher, "python", "-u", "other/train.py", "-model", "small"])


def test_a_script_is_where_its_link_leads_to(tmp_path: Path) -> None:
    for folder in ("real", "links"):
        (tmp_path / folder).mkdir()
    for name in ("train.py", "deepspeed.py"):
        (tmp_path / "real" / name).touch()
    (tmp_path / "links/train.py").symlink_to(tmp_path / "real/train.py")
    with pytest.raises(RuntimeError, match=r"real/deepspeed\.py would be imported"):
        require_not_shadowed(["python", str(tmp_path / "links/train.py")])


def test_a_module_that_is_run_as_a_command_warns_of_nothing() -> None:
    env = {**compat.environment(), "PYTHONPATH": os.pathsep.join([STAND_IN, str(ROOT), str(ROOT / "kernels")])}
    command = [sys.executable, "-W", "error", "-m", "deepspeed.utils.zero_to_fp32", "--help"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "usage" in done.stdout, done.stderr


def test_libraries_that_have_looked_already_are_named(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    with pytest.raises(RuntimeError, match="transformers had been imported before"):
        compat.install()
    assert STAND_IN not in sys.path


def test_it_never_hides_the_real_one(real: Path, fresh: None, capsys: pytest.CaptureFixture[str]) -> None:
    """The stand-in refuses all three ways: install(), the command, and its folder on the path."""
    with pytest.raises(RuntimeError, match=r"DeepSpeed is installed \(0\.18\.0\)"):
        compat.install()
    assert main([sys.executable, "-c", "pass"]) == 2 and "DeepSpeed is installed" in capsys.readouterr().err
    sys.path.insert(0, STAND_IN)
    with pytest.raises(ImportError, match="DeepSpeed is installed"):
        importlib.import_module("deepspeed")
    forget()
    sys.path.remove(STAND_IN)
    # The real package without metadata is found, too, if it has been imported.
    (real / "deepspeed-0.18.0.dist-info" / "METADATA").unlink()
    (real / "deepspeed-0.18.0.dist-info").rmdir()
    importlib.invalidate_caches()
    try:
        assert importlib.import_module("deepspeed").__version__ == "0.18.0"
        with pytest.raises(RuntimeError, match="installed \\(at "):
            require_not_installed()
    finally:
        forget()
