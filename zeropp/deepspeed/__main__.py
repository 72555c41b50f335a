"""``python -m zeropp.compat.deepspeed CMD...``: run a command with the stand-in for ``deepspeed`` on its path."""

from __future__ import annotations

import os
import sys

from zeropp.deepspeed.stand_in_path import environment, require_not_installed, require_not_shadowed

_USAGE = "usage: python -m zeropp.compat.deepspeed CMD ...   (as in: ... torchrun --nproc-per-node 8 train.py)"


def main(command: list[str]) -> int:
    """Replace this process by ``command``, with the stand-in on ``PYTHONPATH``.

    Args:
        command: the command and its arguments.

    Returns:
        Exit status, if the process was not replaced: 0 for ``--help``; 2 if no command was given or the command cannot
        be run, and the reason is printed to stderr.
    """
    if not command or command[0] in ("-h", "--help"):
        print(_USAGE, file=sys.stdout if command else sys.stderr)
        return 0 if command else 2
    try:
        require_not_installed()
        require_not_shadowed(command)
        # exec replaces this process, so signals reach the command itself and the caller gets its exit status.
        os.execvpe(command[0], command, environment())
    except FileNotFoundError:
        print(f"cannot run {command[0]!r}: it is not on PATH{_advice(command[0])}\n{_USAGE}", file=sys.stderr)
    except (OSError, RuntimeError) as error:
        print(f"cannot run {command[0]!r}: {error}{_advice(command[0])}\n{_USAGE}", file=sys.stderr)
    return 2


def _advice(name: str) -> str:
    """Return the likely remedy for a command that cannot be run, as an addition to its error message."""
    if name == "deepspeed":
        return "; zeropp has no launcher, and torchrun --nproc-per-node N starts ranks"
    if name.endswith(".py"):
        return f"; a script needs its interpreter: python {name}"
    return "" if os.path.sep in name else "; activate the virtual environment that has it, or give its path"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
