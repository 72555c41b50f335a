"""``python -m zeropp.compat.deepspeed CMD...``: run a command with the stand-in for ``deepspeed`` on its path."""

from __future__ import annotations

import sys

from zeropp.deepspeed.__main__ import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
