"""``python -m deepspeed.checkpoint.ds_to_universal``: nothing has to be converted, so a checkpoint gets a second name.

zeropp's checkpoints, and its loading of DeepSpeed's, do not depend on the number of ranks. Scripts convert all the
same, and then load what ``latest_universal`` names.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

__all__ = ["main"]

# Of conversions in parallel, and of the forms that DeepSpeed's own files have: none of them is converted here.
_UNUSED = ("--num_extract_workers", "--num_merge_workers")
_FLAGS = ("--keep_temp_folder", "--no_strict", "--inject_missing_state")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """DeepSpeed's arguments."""
    parser = argparse.ArgumentParser(prog="python -m deepspeed.checkpoint.ds_to_universal", description=__doc__)
    parser.add_argument("--input_folder", type=Path, required=True, help="a checkpoint: the folder named by its tag")
    parser.add_argument("--output_folder", type=Path, required=True, help="where a script will look for it")
    for name in _UNUSED:
        parser.add_argument(name, type=int, default=1, help="accepted; nothing is converted")
    for name in _FLAGS:
        parser.add_argument(name, action="store_true", help="accepted; nothing is converted")
    return parser.parse_args(argv)


def main(args: argparse.Namespace | None = None) -> None:
    """Give the checkpoint the other name: hard links where the file system has them, copies elsewhere."""
    given = parse_arguments() if args is None else args
    source, target = Path(given.input_folder), Path(given.output_folder)
    if not source.is_dir():
        sys.exit(f"--input_folder {str(source)!r} is no folder; expected a checkpoint, as save_checkpoint made it")
    if target.resolve() != source.resolve():
        # Whoever converts twice means the newer one.
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target, copy_function=_link)
    (target.parent / "latest_universal").write_text(target.name)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


if __name__ == "__main__":
    main()
