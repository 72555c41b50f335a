"""The strategies of :mod:`zeropp.integrations.lightning` for ``import pytorch_lightning`` and ``lightning_fabric``.

The two packages contain the same code, but separate classes: a Trainer of one package refuses strategies of the other.
"""

from __future__ import annotations

from zeropp.integrations._lightning.classes import make_classes
from zeropp.integrations._lightning.single_file import convert_zero_checkpoint_to_fp32_state_dict

__all__ = [
    "FabricZeroPrecision",
    "FabricZeroStrategy",
    "ZeroPrecision",
    "ZeroStrategy",
    "convert_zero_checkpoint_to_fp32_state_dict",
]

# pytorch_lightning has its own registries, so the same names refer to these classes there.
_made = make_classes(__name__, "pytorch_lightning", "lightning_fabric")
ZeroStrategy, ZeroPrecision = _made.strategy, _made.precision
FabricZeroStrategy, FabricZeroPrecision = _made.fabric_strategy, _made.fabric_precision
_made.register()
