"""``TrainerStrategyParts``: the Trainer's strategy, implemented by :func:`zeropp.initialize`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from zeropp.deepspeed.initialization import initialize
from zeropp.deepspeed.training_engine import Engine
from zeropp.integrations._lightning.arguments import TrainerArguments
from zeropp.integrations._lightning.client_state import FOREIGN, TAG, local_folder, pack, require_folder, unpack
from zeropp.integrations._lightning.common import StrategyParts
from zeropp.integrations._lightning.configuration import for_inference, for_training, with_precision
from zeropp.integrations._lightning.owners import claim, current_engine

__all__ = ["TrainerStrategyParts"]


class TrainerStrategyParts(StrategyParts, TrainerArguments):
    """Methods that Lightning's Trainer calls, in the order of its calls.

    Lightning divides losses, decides where accumulation windows end, and steps schedulers. The engine shards, reduces,
    clips and steps. The model stays sharded after a Trainer has finished, and the next Trainer takes it over.

    Attributes:
        own_engine: engine that this strategy made; None before ``setup``, and after another strategy has wrapped the
            model.
        optimizers: list with the wrapped optimizer.
        lr_scheduler_configs: Lightning's records of the learning rate schedulers.
    """

    strategy_name = "zeropp"
    own_engine: Engine | None = None
    optimizers: list[Any]
    lr_scheduler_configs: list[Any]
    # Parameters that an evaluation has frozen; teardown() makes them trainable again.
    _trained: tuple[nn.Parameter, ...] = ()

    @property
    def engine(self) -> Engine | None:
        """The engine of the model, whichever strategy made it; None before ``setup``."""
        if self.own_engine is not None or self.lightning_module is None:
            return self.own_engine
        return current_engine(self.lightning_module)

    @property
    def precision_plugin(self) -> Any:
        """The precision plugin, always a ``ZeroPrecision``."""
        return self._precision_plugin if self._precision_plugin is not None else self.precision_class()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        self._precision_plugin = self._plugin(plugin)

    # Before training.

    @contextlib.contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Context around ``configure_model`` in which modules are sharded as they are built, in stage 3."""
        with self._building(self._config()):
            yield

    def setup(self, trainer: Any) -> None:
        """Shard the model: with its optimizer for ``fit``, otherwise without an optimizer."""
        self.accelerator.setup(trainer)
        model = self.lightning_module
        fitting = trainer.state.fn == "fit"
        # Before sharding, because the layer sync replaces BatchNorm modules by SyncBatchNorm modules.
        if fitting and self._layer_sync is not None:
            model = self._layer_sync.apply(model)
        self.precision_plugin.convert_module(model)
        self._place(model)
        if fitting:
            self._wrap_to_train(model)
        elif self.engine is None:
            self._wrap_to_evaluate(model)
        self.model = self.engine
        self.barrier()

    def _config(self) -> dict[str, Any]:
        """Return the strategy's configuration with the Trainer's settings added."""
        trainer, model = self.lightning_module.trainer, self.lightning_module
        config = with_precision(self.config, self.precision_plugin.precision, self._given)
        if trainer.state.fn != "fit":
            return for_inference(config)
        # The enumeration of algorithms in Lightning derives from str, so this comparison works for its members.
        if trainer.gradient_clip_algorithm == "value":
            raise self.packages.misuse(
                "gradient_clip_algorithm is 'value'; zeropp clips by the norm of all gradients, 'norm'"
            )
        finetuning = self.packages.find("pytorch", "callbacks.BaseFinetuning")
        if any(isinstance(callback, finetuning) for callback in trainer.callbacks):
            raise self.packages.misuse(
                "callbacks that derive from BaseFinetuning look for the model's parameters in the optimizer's groups, "
                "which hold this rank's slices; give the optimizer all parameters, and call requires_grad_() on those "
                "to freeze and unfreeze, in a hook of the module"
            )
        # Raise here, because these callbacks fail only when they copy weights, late in the training. Older versions of
        # Lightning have only one of the two.
        names = ("StochasticWeightAveraging", "WeightAveraging")
        known = vars(self.packages.pytorch.callbacks)
        if any(isinstance(each, tuple(known[name] for name in names if name in known)) for each in trainer.callbacks):
            raise self.packages.misuse(
                "StochasticWeightAveraging and WeightAveraging copy a whole model's weights, and a rank has parts; "
                "keep an average with zeropp.ema in hooks of the module"
            )
        overridden = self.packages.find("pytorch", "utilities.model_helpers.is_overridden")
        # A user's hook may clip to another norm at each step, so the engine must not clip. The hook calls the precision
        # plugin.
        clip = None if overridden("configure_gradient_clipping", model) else trainer.gradient_clip_val
        return for_training(config, steps=trainer.accumulate_grad_batches, clip=clip)

    def _wrap_to_train(self, model: Any) -> None:
        claim(model, self)
        config = self._config()
        optimizer = None
        if "optimizer" not in config:
            super().setup_optimizers(model.trainer)
            optimizer = self._require_one(self.optimizers, "configure_optimizers")
        if self.lr_scheduler_configs and "scheduler" in config:
            raise self.packages.misuse(
                "there is a scheduler in the strategy's config, and one of configure_optimizers; leave one of them out"
            )
        engine, wrapped, _, scheduler = initialize(
            {"device_rank": self._device_rank}, model=model, optimizer=optimizer, config=config
        )
        if scheduler is not None:
            made = self.packages.find("pytorch", "utilities.types.LRSchedulerConfig")
            self.lr_scheduler_configs = [made(scheduler, interval="step")]
            # Lightning steps the scheduler, so the engine must not step it, too.
            engine.lr_scheduler = None
        self.own_engine = engine
        self.optimizers = [wrapped]
        self._configure_recomputation(config)

    def _wrap_to_evaluate(self, model: Any) -> None:
        claim(model, self)
        # initialize() freezes the parameters of a model without an optimizer. teardown() undoes that.
        trained = tuple(each for each in model.parameters() if each.requires_grad)
        self.own_engine = initialize({"device_rank": self._device_rank}, model=model, config=self._config())[0]
        self._trained = trained

    def release(self) -> None:
        """Drop the engine, its optimizer and its schedulers; the model keeps its weights."""
        self.own_engine = None
        self.model = None
        self.optimizers = []
        self.lr_scheduler_configs = []

    # During training.

    def on_train_start(self) -> None:
        """Set the engine's micro-batch size, which its counters need, unless the configuration has set it."""
        engine = self.engine
        assert engine is not None  # setup() has made it
        if engine.train_micro_batch_size_per_gpu() is None:
            # Read the size here and not in setup(), where the loader does not exist yet: Lightning's DeepSpeedStrategy
            # reads it in setup() and thereby builds the user's loader twice.
            sampler = getattr(self.lightning_module.trainer.train_dataloader, "batch_sampler", None)
            size = getattr(sampler, "batch_size", None)
            engine.set_train_micro_batch_size(size if isinstance(size, int) else 1)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Pass a new ``accumulate_grad_batches``, set by a callback between two windows, to the engine."""
        engine, steps = self.engine, self.lightning_module.trainer.accumulate_grad_batches
        assert engine is not None  # setup() has made it
        if steps != engine.gradient_accumulation_steps() and not engine.core.accumulation.count:
            micro = engine.train_micro_batch_size_per_gpu() or 1
            engine.set_train_batch_size(micro * steps * engine.dp_world_size)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training step: inside the engine's forward, unless the module uses manual optimization."""
        module = self.lightning_module
        if module.automatic_optimization:
            return super().training_step(*args, **kwargs)
        # With manual optimization the module's step runs backward and steps the optimizer, which must not happen inside
        # a forward. The module calls the model itself.
        with self.precision_plugin.train_step_context():
            return module.training_step(*args, **kwargs)

    # Checkpoints.

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: weights are loaded after the model has been sharded."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """False: the engine loads optimizer states with the weights. A single file has no optimizer states that fit."""
        if self._given["load_full_weights"] and self.lightning_module.trainer.state.fn == "fit":
            warn = self.packages.find("fabric", "utilities.rank_zero.rank_zero_warn")
            warn("load_full_weights loads weights alone from a single file; the optimizer's states begin anew")
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return an empty dict: each rank saves its own weights in :meth:`save_checkpoint`."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return an empty dict: each rank saves its own optimizer states in :meth:`save_checkpoint`."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save a checkpoint in the folder ``filepath``; each rank writes its own part. Collective.

        A save inside an accumulation window leaves out the gradients of its micro-batches, as Lightning's saves do.

        Args:
            checkpoint: Lightning's checkpoint dict.
            filepath: folder to create.
            storage_options: not supported.

        Raises:
            TypeError: ``storage_options`` is given.
            CheckpointError, RuntimeError: the checkpoint cannot be saved.
        """
        if storage_options is not None:
            raise TypeError("storage_options are not used: ranks write parts of a folder, without a CheckpointIO")
        engine = self.engine
        assert engine is not None  # Lightning saves only with a model
        # Leave out weights and optimizer states, which are empty here and which ranks write by themselves.
        rest = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        engine.save_checkpoint(
            local_folder(self.broadcast(filepath)),
            TAG,
            pack(rest),
            in_window=True,
            exclude_frozen_parameters=self._given["exclude_frozen_parameters"],
            weights_only="optimizer_states" not in checkpoint,
        )

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a folder into the shards, or read a single file with ``load_full_weights``. Collective.

        Args:
            checkpoint_path: folder that this strategy or DeepSpeed saved, or a single file. From DeepSpeed's folders
                only weights and optimizer states are loaded.
            weights_only: False to load pickled objects of any class.

        Returns:
            Lightning's checkpoint dict. For DeepSpeed's folders it has the minimal values of ``FOREIGN``.

        Raises:
            CheckpointError: there is no such checkpoint, or it does not fit.
        """
        path = local_folder(self.broadcast(checkpoint_path))
        if self._given["load_full_weights"] and path.is_file():
            # mmap=True: the ranks of a node share the file's pages, and each rank reads the weights of its shards only.
            found: dict[str, Any] = torch.load(
                path, map_location="cpu", mmap=True, weights_only=weights_only is not False
            )
            return found
        require_folder(path)
        engine, model = self.engine, self.lightning_module
        assert engine is not None  # setup() has made it
        _, state = engine.load_checkpoint(
            path,
            load_module_strict=model.strict_loading,
            load_lr_scheduler_states=False,
            load_optimizer_states=model.trainer.state.fn == "fit",
        )
        found = unpack(state or {}, weights_only)
        if not found:
            warn = self.packages.find("fabric", "utilities.rank_zero.rank_zero_warn")
            warn(f"{str(path)!r} gave weights and states of the optimizer; the Trainer's own position begins anew")
        return found or dict(FOREIGN)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load full weights from a single file. Weights of a folder were loaded in :meth:`load_checkpoint`."""
        engine = self.engine
        if engine is not None and "state_dict" in checkpoint:
            engine.load_module_state_dict(checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing: the engine loads optimizer states, see :attr:`lightning_restore_optimizer`."""

    # After the run.

    def teardown(self) -> None:
        """Leave the model sharded, with its engine, so that it may be saved, tested and trained again."""
        # Unlike Lightning, do not move the model to the CPU: shards stay on their device.
        self.model = None
        for parameter in self._trained:
            parameter.requires_grad_(True)
        self._trained = ()
        for part in (self.precision_plugin, self.accelerator, self.cluster_environment, self.checkpoint_io):
            part.teardown()
