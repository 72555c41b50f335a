"""zeropp: ZeRO training for PyTorch on networks that are slower than the devices.

Optimizer states, gradients and weights are spread over the ranks of a process group; weights are gathered just before
they are used and let go right after.
"""

from __future__ import annotations

from zeropp import checkpoint, plan, zero
from zeropp.access.average import ema
from zeropp.access.state import comm_report, full_state
from zeropp.config import Config, ConfigError, load_config
from zeropp.optimizer.wrapper import ZeroOptimizer

__all__ = [
    "Config",
    "ConfigError",
    "ZeroOptimizer",
    "__version__",
    "checkpoint",
    "comm_report",
    "ema",
    "full_state",
    "load_config",
    "plan",
    "zero",
]

__version__ = "0.1.0"
