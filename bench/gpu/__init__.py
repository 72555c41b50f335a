"""Measurements and checks on one CUDA GPU, in eight parts; started by ``bench/gpu.sh``.

A part is a list of steps (:mod:`bench.gpu.part`). Each step is a process with a time limit, and its outcome is stored
(:mod:`bench.gpu.run`). The parts are :mod:`~bench.gpu.look`, :mod:`~bench.gpu.examples`, :mod:`~bench.gpu.bits`,
:mod:`~bench.gpu.nccl`, :mod:`~bench.gpu.offload`, :mod:`~bench.gpu.engine`, :mod:`~bench.gpu.kernels` and
:mod:`~bench.gpu.reasons`. :mod:`bench.gpu.scale` has the sizes of all parts, for a GPU and for a dry run.
"""

import os

# Set before torch is imported: with more threads than cores, the ranks of a dry run would slow each other down.
os.environ.setdefault("OMP_NUM_THREADS", "1")
