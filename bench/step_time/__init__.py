"""Step time, bytes and memory of zeropp beside its peers, on one machine."""

import os

# Before torch starts: one thread a rank, or ranks fight over cores and sums change their order.
os.environ.setdefault("OMP_NUM_THREADS", "1")
