"""Functions that make the strategies for one of Lightning's two packages and register the strategies' names."""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

from zeropp.integrations._lightning.fabric import FabricStrategyParts, NoSync
from zeropp.integrations._lightning.packages import Packages
from zeropp.integrations._lightning.precision import FabricPrecisionParts, TrainerPrecisionParts
from zeropp.integrations._lightning.strategy import TrainerStrategyParts

__all__ = ["NAMES", "Made", "make_classes"]

# Lightning's own names with "zeropp" in place of "deepspeed", so that a script has to change one word.
_OFFLOADED = {"offload_optimizer": True, "offload_parameters": True}
NAMES: dict[str, dict[str, Any]] = {
    "zeropp": {},
    "zeropp_stage_1": {"stage": 1},
    "zeropp_stage_2": {"stage": 2},
    "zeropp_stage_2_offload": {"stage": 2, "offload_optimizer": True},
    "zeropp_stage_3": {"stage": 3},
    "zeropp_stage_3_offload": {"stage": 3, **_OFFLOADED},
    "zeropp_stage_3_offload_nvme": {
        "stage": 3, **_OFFLOADED, "remote_device": "nvme", "offload_params_device": "nvme",
        "offload_optimizer_device": "nvme",
    },
}  # fmt: skip
"""Registered name -> arguments of the strategy. The names are lower case, because Lightning lowers names."""


@dataclass(frozen=True)
class Made:
    """The classes made for one of Lightning's packages.

    Attributes:
        packages: the modules of the package.
        strategy, precision: strategy and precision plugin for the package's Trainer.
        fabric_strategy, fabric_precision: strategy and precision plugin for the package's Fabric.
    """

    packages: Packages
    strategy: Any
    precision: Any
    fabric_strategy: Any
    fabric_precision: Any

    def register(self) -> None:
        """Register the names for ``Trainer(strategy=name)`` and ``Fabric(strategy=name)``. May be called twice."""
        # Lightning has no entry point for strategies, so the names exist only after a module of zeropp.integrations has
        # been imported.
        for half, made in (("pytorch", self.strategy), ("fabric", self.fabric_strategy)):
            registry = self.packages.find(half, "strategies.StrategyRegistry" if half == "pytorch" else _FABRIC)
            for name, given in NAMES.items():
                told = ", ".join(f"{key}={value!r}" for key, value in given.items())
                # override=True, because a module that is reloaded, as in a notebook, registers its names again.
                registry.register(name, made, description=f"zeropp, {told or 'stage 2'}", override=True, **given)


# Fabric's registry, whose name differs from that of the Trainer's registry.
_FABRIC = "strategies.STRATEGY_REGISTRY"


def make_classes(module: str, pytorch: str, fabric: str) -> Made:
    """Import one of Lightning's packages and make the classes for it.

    Args:
        module: name of the module that will hold the classes.
        pytorch: module with the package's Trainer.
        fabric: module with the package's Fabric.

    Raises:
        ImportError: the package is not installed.
    """
    packages = Packages.named(pytorch, fabric)

    def make(name: str, parts: type, base: str, half: str, **attributes: Any) -> Any:
        # Set __module__ as a class statement in that module would: pickle finds classes by it. Copy __doc__, which
        # classes do not inherit.
        attributes |= {"__module__": module, "__doc__": parts.__doc__, "packages": packages}
        return types.new_class(name, (parts, packages.find(half, base)), exec_body=lambda body: body.update(attributes))

    precision = make("ZeroPrecision", TrainerPrecisionParts, "plugins.precision.Precision", "pytorch")
    fabric_precision = make("FabricZeroPrecision", FabricPrecisionParts, "plugins.precision.Precision", "fabric")
    # Fabric only calls no_backward_sync of subclasses of this class, which Lightning has named as private.
    control = make("NoSyncControl", NoSync, "strategies.strategy._BackwardSyncControl", "fabric")
    return Made(
        packages=packages,
        strategy=make(
            "ZeroStrategy", TrainerStrategyParts, "strategies.DDPStrategy", "pytorch", precision_class=precision
        ),
        precision=precision,
        fabric_strategy=make(
            "FabricZeroStrategy",
            FabricStrategyParts,
            "strategies.DDPStrategy",
            "fabric",
            precision_class=fabric_precision,
            sync_control_class=control,
        ),
        fabric_precision=fabric_precision,
    )
