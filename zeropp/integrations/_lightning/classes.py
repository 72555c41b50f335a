"""The parts on the base classes of one of Lightning's two packages, and their names in its registries."""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

from zeropp.integrations._lightning.fabric import FabricStrategyParts, NoSync
from zeropp.integrations._lightning.packages import Packages
from zeropp.integrations._lightning.precision import FabricPrecisionParts, TrainerPrecisionParts
from zeropp.integrations._lightning.strategy import TrainerStrategyParts

__all__ = ["NAMES", "Made", "make_classes"]

# The same words that follow "deepspeed" in Lightning's own names, so that a script changes one of them.
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
"""Registered names and the arguments that each stands for; Lightning turns names to small letters."""


@dataclass(frozen=True)
class Made:
    """Classes of one package.

    Attributes:
        packages: of which they are.
        strategy, precision: for its Trainer.
        fabric_strategy, fabric_precision: for its Fabric.
    """

    packages: Packages
    strategy: Any
    precision: Any
    fabric_strategy: Any
    fabric_precision: Any

    def register(self) -> None:
        """Let ``Trainer(strategy=name)`` and ``Fabric(strategy=name)`` find them. Twice is no harm."""
        # No entry point of Lightning's is read for strategies: whoever imports the module has the names.
        for half, made in (("pytorch", self.strategy), ("fabric", self.fabric_strategy)):
            registry = self.packages.find(half, "strategies.StrategyRegistry" if half == "pytorch" else _FABRIC)
            for name, given in NAMES.items():
                told = ", ".join(f"{key}={value!r}" for key, value in given.items())
                # Overriding: a module that is reloaded, as in a notebook, registers again.
                registry.register(name, made, description=f"zeropp, {told or 'stage 2'}", override=True, **given)


# Another name than the Trainer's has.
_FABRIC = "strategies.STRATEGY_REGISTRY"


def make_classes(module: str, pytorch: str, fabric: str) -> Made:
    """Import a package and make the classes for it.

    Args:
        module: in which they are going to be found, by their names.
        pytorch, fabric: names of the package's halves.

    Raises:
        ImportError: it is not installed.
    """
    packages = Packages.named(pytorch, fabric)

    def make(name: str, parts: type, base: str, half: str, **attributes: Any) -> Any:
        # As if it stood there in a class statement: pickles and messages name it by its place.
        attributes |= {"__module__": module, "__doc__": parts.__doc__, "packages": packages}
        return types.new_class(name, (parts, packages.find(half, base)), exec_body=lambda body: body.update(attributes))

    precision = make("ZeroPrecision", TrainerPrecisionParts, "plugins.precision.Precision", "pytorch")
    fabric_precision = make("FabricZeroPrecision", FabricPrecisionParts, "plugins.precision.Precision", "fabric")
    # Fabric asks whether it is one of these; that its name has an underscore is Lightning's choice.
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
