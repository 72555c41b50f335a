"""A program that writes or compares the hashes of the golden runs; see :mod:`tests.golden.runs`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tests.golden import runs
from tests.golden.runs import CASES, differences, run


def main() -> int:
    parser = argparse.ArgumentParser(description=runs.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--write", type=Path, help="file for the hashes of the code as it is")
    which.add_argument("--compare", type=Path, help="file that --write has made")
    args = parser.parse_args()
    found = run(CASES)
    if args.write is not None:
        args.write.write_text(json.dumps(found, indent=1))
        return 0
    different = differences(json.loads(args.compare.read_text()), found)
    print("\n".join(different) or f"all {len(found)} cases are bit-equal, with the same bytes and calls")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
