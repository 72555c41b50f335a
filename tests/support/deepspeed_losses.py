"""Losses of ``examples/deepspeed_style.py`` trained by DeepSpeed itself, stored in ``deepspeed_losses.json``.

    python -m tests.support.deepspeed_losses PEER/bin/python

writes the file again. PEER is an environment with DeepSpeed, the torch of ``constraints.txt``, a C++ compiler, and
ninja on PATH. Each stage from 1 to 3 trains in fp32 on two CPU ranks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["FILE", "STAGES", "made_with"]

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_suffix(".json")
STAGES = (1, 2, 3)
VERSIONS = """
import json, sys, deepspeed, torch
json.dump([deepspeed.__version__, torch.__version__], open(sys.argv[1], "w"))
"""
# Generous, because DeepSpeed compiles its shared-memory collectives in the first run.
SECONDS = 600.0


def run(python: str, *arguments: str) -> None:
    """Run a program in the other environment, on CPU, without this environment's PYTHONPATH."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["PATH"] = os.pathsep.join([str(Path(python).parent), os.environ["PATH"]])
    done = subprocess.run(
        [python, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr


def made_with(python: str) -> dict[str, Any]:
    """Return the content of ``deepspeed_losses.json``, computed by an interpreter that can import DeepSpeed."""
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    losses = {}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        run(python, "-c", VERSIONS, str(out))
        deepspeed, torch = json.loads(out.read_text())
        for stage in STAGES:
            run(
                python, *launch, "examples/deepspeed_style.py", "--engine=deepspeed", f"--stage={stage}",
                f"--losses={out}",
            )  # fmt: skip
            losses[str(stage)] = json.loads(out.read_text())
    command = f"python -m {__spec__.name} PEER/bin/python"
    return {"deepspeed": deepspeed, "torch": torch, "command": command, "losses": losses}


if __name__ == "__main__":
    FILE.write_text(json.dumps(made_with(sys.argv[1]), indent=1) + "\n")
