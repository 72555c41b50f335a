"""``FabricStrategyParts``: Fabric's strategy over :func:`zeropp.initialize`."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeropp.checkpoint import CheckpointError
from zeropp.deepspeed.initialization import initialize
from zeropp.deepspeed.training_engine import Engine
from zeropp.integrations._lightning.arguments import FabricArguments
from zeropp.integrations._lightning.client_state import TAG, local_folder, pack, require_folder, unpack
from zeropp.integrations._lightning.common import StrategyParts
from zeropp.integrations._lightning.configuration import for_inference, with_precision

__all__ = ["FabricStrategyParts", "NoSync"]


class NoSync:
    """What ``fabric.no_backward_sync`` asks; goes onto Lightning's own base class."""

    def no_backward_sync(self, module: Engine, enabled: bool) -> Any:
        """A block whose backward passes send nothing; the first one outside sends all of it."""
        return module.no_sync() if enabled else contextlib.nullcontext()


class FabricStrategyParts(StrategyParts, FabricArguments):
    """What Fabric calls. The loop is the user's: it divides losses, unless the configuration has windows of its own.

    Attributes:
        sync_control_class: made of :class:`NoSync`.
    """

    sync_control_class: type

    @functools.cached_property
    def _engines(self) -> weakref.WeakSet[Engine]:
        # For a backward without a model, and a step of an optimizer. Weakly, since models are the user's to keep.
        return weakref.WeakSet()

    @property
    def _backward_sync_control(self) -> Any:
        return self.sync_control_class()

    @_backward_sync_control.setter
    def _backward_sync_control(self, control: Any) -> None:
        """Nothing: Lightning's constructor sets one for its own wrapper."""

    @property
    def precision(self) -> Any:
        """A ``FabricZeroPrecision``, whatever was given."""
        return self._precision if self._precision is not None else self.precision_class()

    @precision.setter
    def precision(self, plugin: Any) -> None:
        self._precision = self._plugin(plugin)

    def _config(self) -> dict[str, Any]:
        return with_precision(self.config, self.precision.precision, self._given)

    # Models and optimizers.

    def module_sharded_context(self) -> Any:
        """A block in which modules are built in pieces, in stage 3."""
        return self._building(self._config())

    def module_init_context(self, empty_init: bool | None = None) -> contextlib.ExitStack:
        """Lightning's, and inside it that of pieces."""
        stack = contextlib.ExitStack()
        # First the device and the dtype: parameters are cut as they come.
        stack.enter_context(super().module_init_context(empty_init=empty_init))
        stack.enter_context(self.module_sharded_context())
        return stack

    def module_to_device(self, module: nn.Module) -> None:
        """What is no parameter; parameters go there as they are partitioned."""
        self._place(module)

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[Engine, list[Any], Any]:
        """Partition a model for its optimizer. A scheduler that is given here is stepped by the engine.

        Raises:
            MisconfigurationException: there are several optimizers.
        """
        optimizer = self._require_one(optimizers, "fabric.setup")
        engine, wrapped, _, scheduler = initialize(
            {"device_rank": self._device_rank},
            model=module,
            optimizer=optimizer,
            lr_scheduler=scheduler,
            config=self._config(),
        )
        self._engines.add(engine)
        self._configure_recomputation(self._config())
        # Of the engine's making if the configuration names one.
        return engine, [wrapped], scheduler

    def setup_module(self, module: nn.Module) -> Engine:
        """Partition a model that is not going to be trained."""
        config = for_inference(self._config())
        engine, *_ = initialize({"device_rank": self._device_rank}, model=module, config=config)
        self._engines.add(engine)
        return engine

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Refused: an optimizer steps parts of a model's parameters, and is set up with it."""
        # In the class and the words in which Fabric's own sharding strategies say so.
        raise NotImplementedError(self._err_msg_joint_setup_required())

    # The loop.

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Backward of a loss, times the scale of float16.

        Raises:
            ValueError: there are several models, and none is given.
        """
        if module is None:
            # Whatever else is set up, a frozen teacher say, has no backward.
            trained = [each for each in self._engines if each.optimizer is not None]
            if len(trained) != 1:
                raise ValueError(
                    f"{len(trained)} models are set up to be trained; say whose loss it is, "
                    "fabric.backward(loss, model=model)"
                )
            module = trained[0]
        super().backward(tensor, module, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """The engine's step, which forgets gradients, too."""
        return self.precision.optimizer_step(self._engine_of(optimizer), **kwargs)

    def clip_gradients_norm(
        self,
        module: Engine,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Scale gradients so that their norm over the whole model is at most ``max_norm``; the norm before.

        Raises:
            ValueError: another norm than the Euclidean; RuntimeError: it is not finite, and that is an error.
        """
        # What ranks agree on before a step is a sum of squares.
        if float(norm_type) != 2.0:
            raise ValueError(f"norm_type is {norm_type}; zeropp clips by the Euclidean norm, 2.0")
        norm: Tensor = optimizer.clip_grad_norm_(max_norm, now=True)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(
                f"the norm of all gradients is {norm.item()}; pass error_if_nonfinite=False to have the step skipped"
            )
        return norm

    def clip_gradients_value(self, module: Engine, optimizer: Any, clip_val: float) -> None:
        """Refused, as by a Trainer's strategy."""
        raise self.packages.misuse(
            f"clip_val is {clip_val}; zeropp clips by norm: fabric.clip_gradients(..., max_norm=...)"
        )

    def _engine_of(self, optimizer: Any) -> Engine:
        for engine in self._engines:
            # Fabric has taken its own wrapper off by now.
            if engine.optimizer is optimizer:
                return engine
        raise ValueError(f"this {type(optimizer).__name__} was not set up with its model by fabric.setup()")

    # Checkpoints.

    def get_module_state_dict(self, module: Any) -> dict[str, Any]:
        """Whole weights on every rank. Collective."""
        found: dict[str, Any] = (
            module.module_state_dict() if isinstance(module, Engine) else super().get_module_state_dict(module)
        )
        return found

    def load_module_state_dict(self, module: Any, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load whole weights, the same ones on every rank. Collective."""
        if isinstance(module, Engine):
            module.load_module_state_dict(state_dict, strict=strict)
        else:
            super().load_module_state_dict(module, state_dict, strict=strict)

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Mapping[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Make the folder ``path`` a checkpoint of a model, its optimizer, if that is given, and the rest. Collective.

        Raises:
            TypeError: with ``storage_options`` or ``filter``; ValueError: there is no model, or another one.
        """
        for name, given in (("storage_options", storage_options), ("filter", filter)):
            # Not in silence: what a filter was to leave out would be in the files.
            if given:
                raise TypeError(f"{name} is not in zeropp, where ranks write parts of a folder; leave it out")
        engine = _only_engine(state)
        rest = {key: value for key, value in state.items() if value is not engine and value is not engine.optimizer}
        engine.save_checkpoint(
            local_folder(self.broadcast(path)),
            TAG,
            pack(self._convert_stateful_objects_in_state(rest, filter={})),
            exclude_frozen_parameters=self._given["exclude_frozen_parameters"],
            in_window=True,
            weights_only=not _has_optimizer(state),
        )

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Restore what :meth:`save_checkpoint` saved; or a single file, with ``load_full_weights``. Collective.

        Returns:
            What nobody has asked for by a key of ``state``.

        Raises:
            CheckpointError: it does not fit; ValueError: there is no model in ``state``, or another one; KeyError.
        """
        path = local_folder(self.broadcast(path))
        # A bare object is Fabric's load_raw, which is of single files.
        if isinstance(state, (nn.Module, Optimizer)) or (self._given["load_full_weights"] and path.is_file()):
            found: dict[str, Any] = super().load_checkpoint(path, state, strict, weights_only is not False)
            return found
        require_folder(path)
        engine = _only_engine(state or {})
        _, saved = engine.load_checkpoint(
            path, load_module_strict=strict, load_optimizer_states=_has_optimizer(state), load_lr_scheduler_states=False
        )
        rest = unpack(saved or {}, weights_only)
        asked = [key for key, value in state.items() if value is not engine and value is not engine.optimizer]
        missing = [key for key in asked if key not in rest]
        if missing and strict:
            raise CheckpointError(f"the checkpoint {str(path)!r} has no {missing}; leave them out, or strict=False")
        for key in asked:
            if key not in rest:
                continue
            # Into the caller's own object, where it has a state, as a sampler or a loader has.
            if hasattr(state[key], "load_state_dict"):
                state[key].load_state_dict(rest.pop(key))
            else:
                state[key] = rest.pop(key)
        return rest


def _has_optimizer(state: Mapping[str, Any]) -> bool:
    return any(isinstance(value, Optimizer) for value in state.values())


def _only_engine(state: Mapping[str, Any]) -> Engine:
    found = [value for value in state.values() if isinstance(value, Engine)]
    if len(found) != 1:
        raise ValueError(
            f"the state has {len(found)} models that were set up by fabric.setup(), and a checkpoint is of one; give "
            '{"model": model, ...}, and a path of its own for each'
        )
    return found[0]
