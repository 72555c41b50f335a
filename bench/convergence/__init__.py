"""Benchmark of the effect of quantized communication on training."""

import os

# Set before torch is imported. With more threads than cores, ranks would slow each other down, and sums would have a
# different order.
os.environ.setdefault("OMP_NUM_THREADS", "1")
