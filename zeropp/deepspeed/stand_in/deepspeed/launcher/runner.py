"""``main`` of DeepSpeed's launcher, which only prints a remedy, and the name of the launcher's environment file."""

from __future__ import annotations

import sys

__all__ = ["DEEPSPEED_ENVIRONMENT_NAME", "main"]

# Accelerate's launcher writes environment variables for other nodes into this file. Only DeepSpeed's launcher reads
# the file.
DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"


def main(args: list[str] | None = None) -> int:
    """Print that zeropp has no launcher and which command to use; start nothing and return 2."""
    given = " ".join(sys.argv[1:] if args is None else args)
    print(
        f"zeropp's stand-in for DeepSpeed has no launcher, and did not start {given!r}; use torchrun: `python -m "
        "zeropp.compat.deepspeed torchrun --nproc-per-node GPUS SCRIPT ...` on one node, and docs/multinode.md of "
        "zeropp on several",
        file=sys.stderr,
    )
    return 2


if __name__ == "__main__":
    sys.exit(main())
