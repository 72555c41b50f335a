"""Names of files that DeepSpeed's launcher reads. zeropp has no launcher."""

from __future__ import annotations

import sys

__all__ = ["DEEPSPEED_ENVIRONMENT_NAME", "main"]

# Accelerate's launcher writes variables for other nodes into it, which only the deepspeed command would read.
DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"


def main(args: list[str] | None = None) -> int:
    """Say what to use; nothing is started."""
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
