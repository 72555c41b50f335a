"""A stand-in for Nsight Compute on machines without a GPU: runs the program, and writes a table in ncu's format.

    python -m bench.gpu.stand_in --log-file FILE --metrics A,B ... python -m bench.gpu.counted ...

The numbers are invented; reports of dry runs say so.
"""

from __future__ import annotations

import csv
import itertools
import subprocess
import sys
from pathlib import Path

_FIXED = ("ID", "Process ID", "Kernel Name")


def main() -> None:
    words = sys.argv[1:]
    program = words.index(sys.executable)
    options = dict(itertools.pairwise(words[:program]))
    code = subprocess.run(words[program:]).returncode
    metrics = options["--metrics"].split(",")
    with Path(options["--log-file"]).open("w") as file:
        print("==PROF== Connected to process 1", file=file)
        writer = csv.writer(file, quoting=csv.QUOTE_ALL)
        writer.writerow([*_FIXED, *metrics])
        writer.writerow([""] * (len(_FIXED) + len(metrics)))
        writer.writerow(["0", "1", "made_up", *(f"1,{index:03}.5" for index in range(len(metrics)))])
    sys.exit(code)


if __name__ == "__main__":
    main()
