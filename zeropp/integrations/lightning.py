"""``ZeroStrategy`` for ``import lightning``. The import registers names such as ``strategy="zeropp_stage_3"``.

docs/lightning.md explains the use. For ``import pytorch_lightning``, see :mod:`zeropp.integrations.pytorch_lightning`.
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

# Made by a function, because the same code is also combined with the base classes of pytorch_lightning.
_made = make_classes(__name__, "lightning.pytorch", "lightning.fabric")
ZeroStrategy, ZeroPrecision = _made.strategy, _made.precision
FabricZeroStrategy, FabricZeroPrecision = _made.fabric_strategy, _made.fabric_precision
_made.register()
