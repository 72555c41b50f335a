"""``StrategyParts``: the code that the strategies of a Trainer and of Fabric share."""

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

# The base class is only known at run time: two packages, lightning and pytorch_lightning, have classes of these names.
if TYPE_CHECKING:
    _Base = Any
else:
    _Base = object

__all__ = ["StrategyParts"]


class StrategyParts(_Base):
    """Process group, placement of models on devices, and sharded construction, for both strategies.

    Attributes:
        packages: the modules of Lightning's package.
        precision_class: class of the precision plugin.
        config: configuration; see :class:`zeropp.integrations._lightning.arguments.TrainerArguments`.
    """

    packages: Packages
    precision_class: type
    config: dict[str, Any]
    _given: dict[str, Any]

    def setup_environment(self) -> None:
        """Create the process group, and set the level of zeropp's logger to ``logging_level``."""
        logging.getLogger("zeropp").setLevel(self._given["logging_level"])
        super().setup_environment()

    def _get_process_group_backend(self) -> str:
        backend: str = super()._get_process_group_backend()
        # zeropp's ranks exchange CPU tensors, which NCCL cannot send, so CPU tensors use gloo.
        return "cpu:gloo,cuda:nccl" if backend == "nccl" else backend

    def _plugin(self, plugin: Any) -> Any:
        """Return zeropp's plugin of the same precision in place of one of Lightning's own precision plugins.

        Raises:
            ValueError: zeropp does not support the precision.
            TypeError: the plugin's class is not one of Lightning's.
        """
        if plugin is None or isinstance(plugin, self.precision_class):
            return plugin
        # A subclass from the user is refused, because its methods would never be called.
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
        """Index of this rank's GPU; -1 if the strategy runs on the CPU, even if the machine has GPUs."""
        index = self.root_device.index
        return -1 if index is None else int(index)

    def _place(self, model: nn.Module) -> None:
        """Move all modules without parameters to the device. Parameters are moved when they are sharded."""
        # A sharded model is already on the device, and its parameters refuse to be moved.
        if core_of(model) is not None:
            return
        for each in model.modules():
            # Above all for metrics, whose states are neither parameters nor buffers.
            if next(each.parameters(), None) is None:
                each.to(self.root_device)
        update = self.packages.find("fabric", "utilities.device_dtype_mixin._update_properties")
        update(model, device=self.root_device)

    def _building(self, config: Mapping[str, Any]) -> Init:
        """Return the context in which modules are sharded as they are built; only stage 3 shards them."""
        # Init builds on a GPU if there is one, so it is disabled if the Trainer was set to the CPU of a GPU machine.
        cuts = stage_of(config) == 3 and (self.root_device.type == "cuda" or not torch.cuda.is_available())
        return Init(enabled=cuts, remote_device=self._given["remote_device"], config_dict_or_path=config)

    def _configure_recomputation(self, config: Mapping[str, Any]) -> None:
        """Configure ``zeropp.deepspeed.checkpointing`` from the ``activation_checkpointing`` block, if there is one."""
        block = config.get("activation_checkpointing")
        # The settings are global to the process. Without values in the block, a script's own settings stay.
        if isinstance(block, Mapping) and any(block.values()):
            checkpointing.configure(None, config)

    def _require_one(self, optimizers: list[Any], what: str) -> Any:
        """Return the only optimizer of a list.

        Args:
            optimizers: list of optimizers.
            what: name of the call that gave the list, for the error.

        Raises:
            MisconfigurationException: the list does not have exactly one optimizer, or the optimizer has no parameters.
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
