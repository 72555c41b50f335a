"""``ZeroStrategy`` for ``import lightning``; importing it registers names: ``Trainer(strategy="zeropp_stage_3")``.

See docs/lightning.md. For ``import pytorch_lightning`` there is :mod:`zeropp.integrations.pytorch_lightning`.
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

# Not by a class statement: the same parts go onto another package's classes, too.
_made = make_classes(__name__, "lightning.pytorch", "lightning.fabric")
ZeroStrategy, ZeroPrecision = _made.strategy, _made.precision
FabricZeroStrategy, FabricZeroPrecision = _made.fabric_strategy, _made.fabric_precision
_made.register()
