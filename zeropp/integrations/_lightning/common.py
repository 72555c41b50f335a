"""``StrategyParts``: what the strategies of a Trainer and of Fabric share."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zeropp.deepspeed import checkpointing
from zeropp.init.context import Init
from zeropp.integrations._lightning.configuration import stage_of
from zeropp.integrations._lightning.owners import core_of
from zeropp.integrations._lightning.packages import Packages

# Lightning's classes are nobody's types: those of two packages take their place.
if TYPE_CHECKING:
    _Base = Any
else:
    _Base = object

__all__ = ["StrategyParts"]


class StrategyParts(_Base):
    """Joining ranks, placing models, and building them in pieces.

    Attributes:
        packages: of Lightning.
        precision_class: of this strategy's plugin.
        config: see :class:`zeropp.integrations._lightning.arguments.TrainerArguments`.
    """

    packages: Packages
    precision_class: type
    config: dict[str, Any]
    _given: dict[str, Any]

    def setup_environment(self) -> None:
        """Join the process group, and let zeropp log from ``logging_level`` on."""
        logging.getLogger("zeropp").setLevel(self._given["logging_level"])
        super().setup_environment()

    def _get_process_group_backend(self) -> str:
        backend: str = super()._get_process_group_backend()
        # Ranks agree by the CPU, and NCCL has no way for that.
        return "cpu:gloo,cuda:nccl" if backend == "nccl" else backend

    def _plugin(self, plugin: Any) -> Any:
        """Ours in the place of one of Lightning's plain plugins, which do not know the engine.

        Raises:
            ValueError: it is of a precision that zeropp has not; TypeError, of a class that is not Lightning's.
        """
        if plugin is None or isinstance(plugin, self.precision_class):
            return plugin
        # A subclass of the user's has methods that would never be called.
        if type(plugin).__module__.partition(".")[0] not in (
            half.__name__.partition(".")[0] for half in (self.packages.pytorch, self.packages.fabric)
        ):
            raise TypeError(
                f"the precision plugin is a {type(plugin).__qualname__}; expected a precision by its name, as "
                '"bf16-mixed", or a ZeroPrecision'
            )
        return self.precision_class(plugin.precision)

    @property
    def _device_rank(self) -> int:
        """Number of this rank's GPU; -1 on a CPU, also of a machine that has GPUs."""
        index = self.root_device.index
        return -1 if index is None else int(index)

    def _place(self, model: nn.Module) -> None:
        """Bring what is no parameter to the device; parameters go there as they are partitioned."""
        # What was partitioned before is there, and refuses to be moved.
        if core_of(model) is not None:
            return
        for each in model.modules():
            # Metrics, above all, whose states are neither parameters nor buffers.
            if next(each.parameters(), None) is None:
                each.to(self.root_device)
        update = self.packages.find("fabric", "utilities.device_dtype_mixin._update_properties")
        update(model, device=self.root_device)

    def _building(self, config: Mapping[str, Any]) -> Init:
        """A block in which modules are built in pieces, in stage 3."""
        # Init builds for a GPU where there is one, and a Trainer may have been told to stay away from it.
        cuts = stage_of(config) == 3 and (self.root_device.type == "cuda" or not torch.cuda.is_available())
        return Init(enabled=cuts, remote_device=self._given["remote_device"], config_dict_or_path=config)

    def _configure_recomputation(self, config: Mapping[str, Any]) -> None:
        """Let ``zeropp.deepspeed.checkpointing`` do what the configuration says, if it says anything."""
        block = config.get("activation_checkpointing")
        # It is one for the process: a script that has configured it by itself keeps that.
        if isinstance(block, Mapping) and any(block.values()):
            checkpointing.configure(None, config)

    def _require_one(self, optimizers: list[Any], what: str) -> Any:
        """The only optimizer.

        Raises:
            MisconfigurationException: there are others, or it has no parameters.
        """
        if len(optimizers) != 1:
            names = ", ".join(type(each).__name__ for each in optimizers)
            raise self.packages.misuse(
                f"{what} gave {len(optimizers)} optimizers ({names}); zeropp partitions a model for one optimizer, "
                "which may have several parameter groups"
            )
        if not any(group["params"] for group in optimizers[0].param_groups):
            raise self.packages.misuse(
                f"{what} gave no optimizer with parameters; return one, or validate, test or predict instead"
            )
        return optimizers[0]
