"""``FabricStrategyParts``: Fabric's strategy, implemented by :func:`zeropp.initialize`."""

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
    """Implementation of ``fabric.no_backward_sync``, to be combined with Lightning's base class."""

    def no_backward_sync(self, module: Engine, enabled: bool) -> Any:
        """Return a context whose backwards reduce no gradients; a later backward or the step reduces them.

        Without ``enabled``, the context does nothing.
        """
        return module.no_sync() if enabled else contextlib.nullcontext()


class FabricStrategyParts(StrategyParts, FabricArguments):
    """Methods that Fabric calls. The user's loop divides losses, unless the configuration sets accumulation windows.

    Attributes:
        sync_control_class: class made from :class:`NoSync` and Lightning's base class.
    """

    sync_control_class: type

    @functools.cached_property
    def _engines(self) -> weakref.WeakSet[Engine]:
        # The engines made by this strategy. backward() without a model and optimizer_step() search them. The references
        # are weak, so that the user's script decides how long a model lives.
        return weakref.WeakSet()

    @property
    def _backward_sync_control(self) -> Any:
        return self.sync_control_class()

    @_backward_sync_control.setter
    def _backward_sync_control(self, control: Any) -> None:
        """Ignore the assignment, which Lightning's constructor makes for its own DDP wrapper."""

    @property
    def precision(self) -> Any:
        """The precision plugin, always a ``FabricZeroPrecision``."""
        return self._precision if self._precision is not None else self.precision_class()

    @precision.setter
    def precision(self, plugin: Any) -> None:
        self._precision = self._plugin(plugin)

    def _config(self) -> dict[str, Any]:
        return with_precision(self.config, self.precision.precision, self._given)

    # Models and optimizers.

    def module_sharded_context(self) -> Any:
        """Return the context in which modules are sharded as they are built, in stage 3."""
        return self._building(self._config())

    def module_init_context(self, empty_init: bool | None = None) -> contextlib.ExitStack:
        """Return Lightning's context for new modules, with zeropp's context for sharded construction inside it."""
        stack = contextlib.ExitStack()
        # Lightning's context sets device and dtype, so it comes first: parameters are sharded as soon as they exist.
        stack.enter_context(super().module_init_context(empty_init=empty_init))
        stack.enter_context(self.module_sharded_context())
        return stack

    def module_to_device(self, module: nn.Module) -> None:
        """Move modules without parameters to the device; parameters are moved when they are sharded."""
        self._place(module)

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[Engine, list[Any], Any]:
        """Shard a model and wrap its optimizer. Collective.

        Args:
            module: model to train.
            optimizers: list with one optimizer.
            scheduler: learning rate scheduler, or None; the engine steps it.

        Returns:
            The engine, a list with the wrapped optimizer, and the scheduler that the engine steps.

        Raises:
            MisconfigurationException: there is not exactly one optimizer, or it has no parameters.
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
        # ``scheduler`` is the given scheduler, or one made from the configuration's ``scheduler`` block.
        return engine, [wrapped], scheduler

    def setup_module(self, module: nn.Module) -> Engine:
        """Shard a model that is not trained, and return its engine."""
        config = for_inference(self._config())
        engine, *_ = initialize({"device_rank": self._device_rank}, model=module, config=config)
        self._engines.add(engine)
        return engine

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Refuse to set up an optimizer without its model, because the optimizer steps shards of the model.

        Raises:
            NotImplementedError: always, as from Lightning's own sharding strategies.
        """
        raise NotImplementedError(self._err_msg_joint_setup_required())

    # Steps of the user's loop.

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Run backward for a loss, multiplied by the loss scale of float16.

        Args:
            tensor: loss.
            module: engine of the model; None if only one model is trained.
            args, kwargs: arguments of ``Tensor.backward``.

        Raises:
            ValueError: ``module`` is None, and not exactly one model is set up with an optimizer.
        """
        if module is None:
            # Models without an optimizer, such as a frozen teacher, have no backward.
            trained = [each for each in self._engines if each.optimizer is not None]
            if len(trained) != 1:
                raise ValueError(
                    f"{len(trained)} models are set up to be trained; say whose loss it is, "
                    "fabric.backward(loss, model=model)"
                )
            module = trained[0]
        super().backward(tensor, module, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step the engine of an optimizer; the step also sets gradients to None."""
        return self.precision.optimizer_step(self._engine_of(optimizer), **kwargs)

    def clip_gradients_norm(
        self,
        module: Engine,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Scale gradients so that their norm over the whole model is at most ``max_norm``. Collective.

        Args:
            module: engine of the model.
            optimizer: the model's wrapped optimizer.
            max_norm: upper bound of the norm.
            norm_type: must be 2.0.
            error_if_nonfinite: True to raise if the norm is not finite.

        Returns:
            The norm before clipping.

        Raises:
            ValueError: ``norm_type`` is not 2.
            RuntimeError: the norm is not finite, and ``error_if_nonfinite`` is True.
        """
        # The ranks' collective before a step sums squares, so no other norm is available.
        if float(norm_type) != 2.0:
            raise ValueError(f"norm_type is {norm_type}; zeropp clips by the Euclidean norm, 2.0")
        norm: Tensor = optimizer.clip_grad_norm_(max_norm, now=True)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(
                f"the norm of all gradients is {norm.item()}; pass error_if_nonfinite=False to have the step skipped"
            )
        return norm

    def clip_gradients_value(self, module: Engine, optimizer: Any, clip_val: float) -> None:
        """Refuse to clip by value.

        Raises:
            MisconfigurationException: always.
        """
        raise self.packages.misuse(
            f"clip_val is {clip_val}; zeropp clips by norm: fabric.clip_gradients(..., max_norm=...)"
        )

    def _engine_of(self, optimizer: Any) -> Engine:
        for engine in self._engines:
            # ``engine.optimizer`` is the object without Fabric's wrapper, which Fabric has removed before this call.
            if engine.optimizer is optimizer:
                return engine
        raise ValueError(f"this {type(optimizer).__name__} was not set up with its model by fabric.setup()")

    # Checkpoints.

    def get_module_state_dict(self, module: Any) -> dict[str, Any]:
        """Return full weights on every rank. Collective."""
        found: dict[str, Any] = (
            module.module_state_dict() if isinstance(module, Engine) else super().get_module_state_dict(module)
        )
        return found

    def load_module_state_dict(self, module: Any, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load full weights; every rank must pass the same ones. Collective."""
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
        """Save a model, its optimizer if given, and other values in the folder ``path``. Collective.

        Args:
            path: folder to create, the same on all ranks.
            state: dict with one engine, its optimizer or not, and other values.
            storage_options, filter: not supported.

        Raises:
            TypeError: ``storage_options`` or ``filter`` is given.
            ValueError: ``state`` does not contain exactly one engine.
        """
        for name, given in (("storage_options", storage_options), ("filter", filter)):
            # Raise instead of ignoring them: a file would contain values that the filter should leave out.
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
        """Load a folder that :meth:`save_checkpoint` saved, or a single file with ``load_full_weights``. Collective.

        Args:
            path: the folder, or the file.
            state: dict with the engine, its optimizer or not, and keys to fill with other saved values. A single module
                or optimizer loads a single file (Fabric's ``load_raw``).
            strict: True to raise if the checkpoint lacks weights of the model or keys of ``state``.
            weights_only: False to load pickled objects of any class.

        Returns:
            The saved values that ``state`` has no key for.

        Raises:
            CheckpointError: there is no such checkpoint, or it does not fit.
            ValueError: ``state`` does not contain exactly one engine.
            KeyError: a single file lacks keys of ``state``.
        """
        path = local_folder(self.broadcast(path))
        # Fabric's load_raw passes a module or an optimizer instead of a dict, to load a single file.
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
            # Objects with load_state_dict(), such as samplers and loaders, load the value; others are replaced.
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
