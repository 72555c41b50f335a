"""``python -m deepspeed.checkpoint.ds_to_universal``: gives a checkpoint a second name, without converting it.

DeepSpeed converts a checkpoint before another number of ranks can load it. zeropp loads its own checkpoints and
DeepSpeed's on any number of ranks. Scripts still run the conversion, and load the folder that the file
``latest_universal`` names.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

__all__ = ["main"]

# Arguments about parallel conversion and about DeepSpeed's file formats. They are accepted and ignored.
_UNUSED = ("--num_extract_workers", "--num_merge_workers")
_FLAGS = ("--keep_temp_folder", "--no_strict", "--inject_missing_state")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the parsed command line, which has the arguments of DeepSpeed's command."""
    parser = argparse.ArgumentParser(prog="python -m deepspeed.checkpoint.ds_to_universal", description=__doc__)
    parser.add_argument("--input_folder", type=Path, required=True, help="a checkpoint: the folder named by its tag")
    parser.add_argument("--output_folder", type=Path, required=True, help="where a script will look for it")
    for name in _UNUSED:
        parser.add_argument(name, type=int, default=1, help="accepted; nothing is converted")
    for name in _FLAGS:
        parser.add_argument(name, action="store_true", help="accepted; nothing is converted")
    return parser.parse_args(argv)


def main(args: argparse.Namespace | None = None) -> None:
    """Make the output folder from hard links to the checkpoint's files, or from copies if hard links fail."""
    given = parse_arguments() if args is None else args
    source, target = Path(given.input_folder), Path(given.output_folder)
    if not source.is_dir():
        sys.exit(f"--input_folder {str(source)!r} is no folder; expected a checkpoint, as save_checkpoint made it")
    if target.resolve() != source.resolve():
        # A folder from an earlier conversion is replaced by the new one.
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
