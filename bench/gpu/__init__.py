"""Measurements and checks on one CUDA card, in eight parts; started by ``bench/gpu.sh``.

A part is a list of steps (:mod:`bench.gpu.part`), each a process with a time limit whose outcome is kept
(:mod:`bench.gpu.run`): :mod:`~bench.gpu.look`, :mod:`~bench.gpu.examples`, :mod:`~bench.gpu.bits`,
:mod:`~bench.gpu.nccl`, :mod:`~bench.gpu.offload`, :mod:`~bench.gpu.engine`, :mod:`~bench.gpu.kernels` and
:mod:`~bench.gpu.reasons`. Sizes of everything, on a card and in a dry run, stand in :mod:`bench.gpu.scale`.
"""

import os

# Before torch starts: with one thread a process, ranks of a dry run do not fight over cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
