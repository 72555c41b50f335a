"""``Engine``: a model with its optimizer, scheduler and counters, under the method names of DeepSpeed's engine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from zeropp import checkpoint
from zeropp._compat import is_compiled, uncompiled
from zeropp.access.ownership import cached_whole, unshard_parameters
from zeropp.checkpoint.boxes import CheckpointError
from zeropp.checkpoint.export import gather_16bit
from zeropp.checkpoint.files import FILE_NBYTES
from zeropp.checkpoint.metadata import METADATA, write_synced
from zeropp.checkpoint.rank_sync import absolute, path_of_rank_0
from zeropp.checkpoint.saving import begin_save
from zeropp.config import Config
from zeropp.config.base import warn_user
from zeropp.deepspeed.config_accessors import ABSENT, answers_configuration
from zeropp.deepspeed.data import make_loader
from zeropp.deepspeed.readable_weights import ReadableWeights
from zeropp.deepspeed.training_optimizer import CalledWindows
from zeropp.deepspeed.zero_checkpoints import RunValues, read_run_values
from zeropp.deepspeed.zero_inference import unfreeze
from zeropp.deepspeed.zero_to_fp32 import make_executable, write_script
from zeropp.engine.engine import Engine as Core
from zeropp.engine.engine import engine_of
from zeropp.engine.engine_state import EngineState
from zeropp.engine.preconditions import refuse_retired
from zeropp.optimizer.wrapper import ZeroOptimizer
from zeropp.params.loss_scale import LossScaleError

__all__ = ["MODULE_STATES", "Engine"]

_LATEST, _UNIVERSAL = "latest", "latest_universal"
MODULE_STATES = "mp_rank_00_model_states.pt"
_COUNTS = ("global_steps", "global_samples")


@contextlib.contextmanager
def _together(engine: Core) -> Iterator[None]:
    """Context manager inside which ``state_dict()`` returns full values, gathered from all ranks if necessary.

    Under the stand-in for ``deepspeed`` a script's own ``state_dict()`` call never communicates.
    """
    readable_weights = engine.readable_weights
    if readable_weights is None:
        yield
        return
    before, readable_weights.alone = readable_weights.alone, False
    try:
        yield
    finally:
        readable_weights.alone = before


class TagError(CheckpointError, AssertionError):
    """Error for a checkpoint whose tag differs between ranks; an AssertionError, as in DeepSpeed."""


@answers_configuration
class Engine(nn.Module):
    """The engine that ``zeropp.initialize`` returns, with the methods of DeepSpeed's engine.

    A training loop calls the engine (forward), ``backward(loss)`` and ``step()`` for each micro-batch. An accumulation
    window is ``gradient_accumulation_steps`` calls of ``step()``. All calls but the last only count. The last call
    steps the optimizer, sets gradients to None, and steps the scheduler unless the optimizer step was skipped.

    Attributes that the engine lacks are looked up in the model.

    Attributes:
        module: the model, partitioned in place.
        optimizer: the `ZeroOptimizer`; None for inference.
        lr_scheduler: scheduler that ``step()`` steps; None for constant learning rates.
        training_dataloader: data loader of the data set given to ``initialize``; None without one.
        config: the configuration as the user gave it, a plain dict.
        core: the core engine, which gathers weights and reduces gradients; see `zeropp.engine`.
        device: device of the model.
        micro_steps: number of ``step()`` calls since this engine was made; not saved in checkpoints, as in DeepSpeed.
        global_steps: number of optimizer steps, including skipped ones.
        global_samples: number of samples of these steps, over all ranks.
        writes_module_states: True to save the model's weights of stages 0 to 2 a second time, under the key "module" in
            DeepSpeed's file `MODULE_STATES`, for scripts that read that file. The stand-in for ``deepspeed`` sets it.
    """

    writes_module_states = False
    optimizer: ZeroOptimizer | None

    def __init__(
        self,
        module: nn.Module,
        optimizer: ZeroOptimizer | None,
        lr_scheduler: Any,
        loaded: Config,
        given: dict[str, Any],
        *,
        core: Core,
        local_rank: int,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        """Make an engine of parts that ``zeropp.initialize`` has made.

        Args:
            module: partitioned model.
            optimizer: the model's `ZeroOptimizer`; None for inference.
            lr_scheduler: object with ``step()``; None for constant learning rates.
            loaded: checked configuration.
            given: the configuration as the user gave it.
            core: core engine of the model.
            local_rank: rank of this process on its node.
            collate_fn: function from a list of samples to a batch, for data loaders that this engine makes.
        """
        super().__init__()
        self.module = module
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.loaded_config = loaded
        self.config = given
        # A strong reference: an engine for inference has no optimizer that owns the core engine.
        self.core = core
        self.device = core.device
        # A plain loss.backward() also divides by gradient_accumulation_steps, as DeepSpeed documents.
        core.loss_scale.averages_unscaled = True
        # With an optimizer, GatheredParameters gives values to read in the compute dtype, as scripts expect. Without an
        # optimizer it gives main weights: rounding would lose bits of weights that have no other copy.
        core.gather_contexts.computed = optimizer is not None
        # DeepSpeed's scripts read and edit weights between passes if every rank caches them.
        core.let_weights_be_read(ReadableWeights())
        # Rank and world size of the model's process group, which may be a part of the job.
        self.global_rank = core.comm.rank
        self.world_size = core.comm.world
        self.local_rank = local_rank
        self.dp_world_size = core.comm.world
        self.collate_fn = collate_fn
        self.training_dataloader: DataLoader[Any] | None = None
        self.batch = loaded.resolve_batch(core.comm.world)
        self.micro_steps = self.global_steps = self.global_samples = 0
        self._coalescing = self._applied = False

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the model, if the engine itself has none of this name."""
        # nn.Module finds the engine's own parameters and submodules through __getattr__, so they are tried first.
        try:
            return super().__getattr__(name)
        except AttributeError:
            # self.module would call __getattr__ again, endlessly, before __init__ or unpickling has set the attribute.
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or name.startswith("__"):
                raise
        try:
            return getattr(module, name)
        except AttributeError:
            kind = type(module).__name__
            why = f": {ABSENT[name]}" if name in ABSENT else ""
            raise AttributeError(f"neither zeropp's Engine nor the model, a {kind}, has {name!r}{why}") from None

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the model with the given arguments, and return its output."""
        return self.core.call_model(self.module, *inputs, **kwargs)

    # The calls of a training loop.

    @uncompiled
    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Run backward of ``loss * loss_scale / gradient_accumulation_steps``.

        Args:
            loss: scalar loss of a micro-batch.
            retain_graph: as in ``Tensor.backward``.
            scale_wrt_gas: False if the caller has already divided the loss by ``gradient_accumulation_steps``.

        Returns:
            The loss divided by ``gradient_accumulation_steps``, without the loss scale.
        """
        self._trained("backward").backward(loss, retain_graph=retain_graph, scale_wrt_gas=scale_wrt_gas)
        # Scripts log this value, so it is returned without the loss scale.
        return loss / self.gradient_accumulation_steps() if scale_wrt_gas else loss

    @uncompiled
    def scale(self, loss: Tensor, scale_wrt_gas: bool = True) -> Tensor:
        """Return ``loss * loss_scale / gradient_accumulation_steps``, for ``engine.scale(loss).backward()``.

        Args:
            loss: complete scalar loss of a micro-batch; terms added to the result are neither divided nor scaled.
            scale_wrt_gas: False if the caller has already divided the loss by ``gradient_accumulation_steps``.
        """
        return self._trained("scale").scale(loss, scale_wrt_gas=scale_wrt_gas)

    @uncompiled
    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Count a micro-batch; at the end of an accumulation window, step the optimizer and the scheduler.

        Args:
            lr_kwargs: keyword arguments of the scheduler's ``step``.

        Raises:
            RuntimeError: the call is inside ``coalesce_grad_reduction()`` or ``no_sync()``, or ``ZeroOptimizer.step``
                raises.
        """
        optimizer = self._trained("step")
        if self._coalescing:
            raise RuntimeError(
                "step() was called inside coalesce_grad_reduction() or no_sync(); call it after the block"
            )
        self._applied = False
        if self._windows.note_engine_step():
            self._take_step(optimizer, lr_kwargs)
        # micro_steps is only for scripts that print it. Window ends are counted separately: after a change of the
        # number of micro-batches, multiples of gradient_accumulation_steps would no longer be window ends.
        self.micro_steps += 1

    def _take_step(self, optimizer: ZeroOptimizer, lr_kwargs: Mapping[str, Any] | None) -> None:
        """Step the optimizer, drop gradients, step the scheduler, and count the step."""
        count = self.core.accumulation.count
        # now=True, because the engine decides where a window ends, whatever the number of micro-batches.
        try:
            optimizer.step(now=True)
        except LossScaleError:
            # Drop the gradients for a caller that catches the error: they are not finite, and later gradients would be
            # added to them.
            optimizer.zero_grad(now=True)
            raise
        # Also after a skipped step, whose gradients are not finite.
        optimizer.zero_grad(now=True)
        # On a GPU this waits for the result of the step sync, because a scheduler step cannot be undone.
        self._applied = optimizer.step_was_taken
        if self._applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        self.global_steps += 1
        # A caller that sets the boundaries itself may have run another number of micro-batches than is configured.
        micro = self.train_micro_batch_size_per_gpu() or 0
        self.global_samples += (self.train_batch_size() or 0) if self._managed else micro * count * self.world_size

    @uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients and start the accumulation window again. No effect after a ``step()`` that only counted.

        Because of that exception a loop may call it for every micro-batch, as in torch, and still accumulate gradients.
        ``optimizer.zero_grad(now=True)`` drops them at any time. ``set_to_none`` is as in torch.
        """
        if self.optimizer is not None:
            self._trained("zero_grad").zero_grad(set_to_none)

    # Ends of accumulation windows.

    @property
    def _windows(self) -> CalledWindows:
        """The counter of micro-batches and ``step()`` calls."""
        windows = self.core.accumulation
        # TrainingOptimizer and wrap_for_inference both set this class.
        assert isinstance(windows, CalledWindows)
        return windows

    @property
    def _managed(self) -> bool:
        """True if the engine counts micro-batches; False if every ``step()`` is a boundary."""
        return self.loaded_config.managed_gradient_accumulation

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return True if the next ``step()`` steps the optimizer.

        With ``managed_gradient_accumulation`` false the result is False, although every ``step()`` steps.
        """
        return self._managed and self._windows.at_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set, before a forward, whether the next ``step()`` steps the optimizer. Holds until the next call.

        Args:
            is_boundary: True if the next micro-batch is the last one before an optimizer step.

        Raises:
            RuntimeError: ``managed_gradient_accumulation`` is false, so every ``step()`` is a boundary.
        """
        if not self._managed:
            raise RuntimeError(
                "set_gradient_accumulation_boundary() has no effect with managed_gradient_accumulation false, where "
                "every step() is a boundary; set it to true, or leave the call out"
            )
        # Counting by the engine does not resume: as in DeepSpeed, the caller sets all later boundaries.
        self._windows.set_boundary(bool(is_boundary))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager in which backward keeps gradients local; a later backward or the step reduces them."""
        with self._trained("no_sync").no_sync():
            # step() raises inside the block: it would reduce all gradients at once and so defeat the block.
            before, self._coalescing = self._coalescing, True
            try:
                yield
            finally:
                self._coalescing = before

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Context manager with the effect of :meth:`no_sync`, under another of DeepSpeed's names."""
        with self.no_sync():
            yield

    def was_step_applied(self) -> bool:
        """Return True if the last ``step()`` changed weights: it was at a boundary, and the step was not skipped."""
        return self._applied

    # Batch sizes, and results of steps.

    def gradient_accumulation_steps(self) -> int:
        """Return the number of micro-batches of an accumulation window."""
        return self.batch[2]

    def train_micro_batch_size_per_gpu(self) -> int | None:
        """Return the samples of a micro-batch on one rank; None if the configuration does not give it."""
        return self.batch[1]

    def train_batch_size(self) -> int | None:
        """Return the samples of an accumulation window over all ranks; None if the configuration does not give it."""
        return self.batch[0]

    def get_batch_info(self) -> tuple[int | None, int | None, int]:
        """Return samples of a window over all ranks, samples of a micro-batch per rank, micro-batches of a window."""
        return self.batch

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples of an accumulation window by changing the number of micro-batches.

        Call it on every rank, between two windows.

        Args:
            train_batch_size: samples of a window over all ranks; a multiple of ``micro-batch size * ranks``.

        Raises:
            TypeError: ``train_batch_size`` is not an int.
            ValueError: ``train_batch_size`` is not such a multiple, or the micro-batch size is not configured.
            RuntimeError: a window is not finished.
        """
        micro = self.batch[1]
        if not isinstance(train_batch_size, int):
            raise TypeError(f"train_batch_size is {train_batch_size!r}; expected an int")
        if micro is None or train_batch_size <= 0 or train_batch_size % (micro * self.dp_world_size):
            raise ValueError(
                f"train_batch_size {train_batch_size} is no multiple of micro-batch size {micro} x "
                f"{self.dp_world_size} ranks"
            )
        self._set_batch(train_batch_size, micro, train_batch_size // (micro * self.dp_world_size))

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples of a micro-batch on one rank. The number of micro-batches of a window stays.

        Args:
            micro_batch_size: samples per micro-batch, at least 1.

        Raises:
            ValueError: ``micro_batch_size`` is below 1.
            RuntimeError: an accumulation window is not finished.
        """
        if micro_batch_size <= 0:
            raise ValueError(f"micro_batch_size is {micro_batch_size}; expected at least 1")
        # The number of micro-batches stays, so gradients keep their divisor. The window size follows.
        steps = self.batch[2]
        self._set_batch(micro_batch_size * steps * self.dp_world_size, micro_batch_size, steps)

    def _set_batch(self, train: int, micro: int, steps: int) -> None:
        """Store the batch sizes: samples of a window, samples of a micro-batch, micro-batches of a window."""
        # resize() comes first, because it may raise, and then the stored sizes must stay.
        if self.optimizer is not None:
            self._windows.resize(steps)
        self.batch = (train, micro, steps)

    @property
    def skipped_steps(self) -> int:
        """Number of optimizer steps that were skipped because a gradient was not finite."""
        return 0 if self.optimizer is None else self.optimizer.skipped_steps

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of all gradients at the last step, before clipping; None before the first step."""
        return None if self.optimizer is None else self.optimizer.grad_norm

    def get_lr(self) -> list[Any]:
        """Return the learning rate of each parameter group."""
        return [group["lr"] for group in self._trained("get_lr").param_groups]

    def get_mom(self) -> list[Any]:
        """Return ``betas`` of each parameter group; a group without ``betas`` gives its ``momentum``, or None."""
        groups = self._trained("get_mom").param_groups
        return [group["betas"] if "betas" in group else group.get("momentum") for group in groups]

    def get_type(self) -> list[Any]:
        """Return the entry ``type`` of each parameter group; None for a group without that entry."""
        return [group.get("type") for group in self._trained("get_type").param_groups]

    # Accessors of the configuration beyond those of config_accessors.py.

    def zero_optimization(self) -> bool:
        """Return True in stages 1 to 3, which partition optimizer states."""
        return self.loaded_config.zero.stage > 0

    def zero_optimization_partition_gradients(self) -> bool:
        """Return True in stages 2 and 3, which partition gradients."""
        return self.loaded_config.zero.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Return True in stage 3, which partitions weights."""
        return self.loaded_config.zero.stage == 3

    def dynamic_loss_scale(self) -> bool:
        """Return True if ``fp16.loss_scale`` is 0, which selects a dynamic loss scale."""
        return self.loaded_config.fp16.loss_scale == 0

    # Data loaders, offload, compilation, and the end of the engine.

    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Any = None,
        num_local_io_workers: int | None = None,
    ) -> DataLoader[Any]:
        """Return a data loader of this rank's micro-batches.

        Args:
            dataset: data set. A map-style data set is divided among the ranks.
            batch_size: samples of a micro-batch; None for the configured size.
            route: "train" to shuffle a map-style data set; "eval" or "predict" to keep its order.
            pin_memory: True to put batches into page-locked memory, if the model is on a GPU.
            data_sampler: sampler to use instead of the one that divides the data set among the ranks.
            collate_fn: function from a list of samples to a batch; None for that given to ``initialize``.
            num_local_io_workers: number of worker processes that load samples; None for 0.

        Raises:
            ValueError: no batch size is given or configured.
        """
        size = self.train_micro_batch_size_per_gpu() if batch_size is None else batch_size
        # DataLoader's default batch size of 1 would be used by mistake, so a missing size raises.
        if size is None:
            raise ValueError("a data loader needs a batch size; set train_micro_batch_size_per_gpu, or give batch_size")
        return make_loader(
            dataset, size, rank=self.global_rank, world=self.dp_world_size, sampler=data_sampler,
            shuffle=route == "train", collate_fn=collate_fn or self.collate_fn, workers=num_local_io_workers or 0,
            pin_memory=pin_memory and self.device.type == "cuda", drop_last=self.loaded_config.dataloader_drop_last,
        )  # fmt: skip

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """Move states of this rank from the device to the host; arguments as of ``ZeroOptimizer.offload_states``."""
        self._trained("offload_states").offload_states(*args, **kwargs)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move back to the device all that :meth:`offload_states` moved; ``non_blocking`` returns before copies end."""
        self._trained("reload_states").reload_states(non_blocking)

    def empty_partition_cache(self) -> None:
        """Free weights that stay gathered between passes; the next pass gathers them again. Collective."""
        if self.optimizer is not None:
            self.optimizer.empty_partition_cache()

    def compile(
        self,
        backend: Any = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the model in place, as ``module.compile(backend=backend, **compile_kwargs)`` does.

        Args:
            backend, compile_kwargs: arguments of ``torch.compile``.
            schedule: must be None: zeropp has no DeepCompile passes.
            compiled_autograd_enabled: must be False: zeropp reduces gradients in hooks.

        Raises:
            ValueError: a schedule is given, or compiled autograd is enabled.
        """
        if schedule is not None or compiled_autograd_enabled:
            raise ValueError(
                "compile() takes no schedule and no compiled autograd: zeropp gathers and reduces in hooks, outside of "
                "compiled graphs; leave both out"
            )
        # zeropp's hooks cause graph breaks. Compiling each block by itself avoids breaks inside of the blocks.
        self.module.compile(backend=backend, **(compile_kwargs or {}))

    @property
    def is_compiled(self) -> bool:
        """True if the model is compiled in place, by :meth:`compile` or by ``module.compile()``."""
        return is_compiled(self.module)

    def destroy(self) -> None:
        """End this engine and its optimizer, and keep the model's weights. Collective.

        If every rank has full weights, as in stages 0 to 2, the model becomes a plain module in its compute dtype.
        Otherwise, and under ``torch_autocast`` or while an average is applied, the model stays partitioned and runs
        without an optimizer; zeropp's threads and process groups then end when the model is deleted. In both cases the
        model can be given to ``initialize`` again. A model that stayed partitioned continues from its main weights.
        """
        if self.core.retired or self.core.closed:  # destroyed before, or taken over by a newer engine
            return
        weights = cached_whole(self.core)
        if weights or self.core.agreement.lost is not None:
            # The optimizer's close() waits for a step on the host before it closes the core engine.
            (self.core if self.optimizer is None else self.optimizer).close()
            unshard_parameters(weights)
        # A core engine that was not closed stays owned by the model's modules until the model is wrapped again.
        self.core.set_state(EngineState.RETIRED)
        self.core.loss_scale.drop_losses()
        # Last, because unfreeze() may warn, and the user may have turned warnings into errors.
        unfreeze(self.core, self.module)

    # Checkpoints.

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        weights_only: bool = False,
        in_window: bool = False,
    ) -> bool:
        """Save model, optimizer, scheduler, counters and ``client_state`` as ``save_dir/tag``. Collective.

        The format is zeropp's own, which loads on any number of ranks: see docs/checkpoints.md. Gradients are not
        saved. A job about to be stopped may save inside an accumulation window; a warning then names this loss.

        Args:
            save_dir: directory that all ranks can access. If they give different ones, rank 0's is used with a warning.
            tag: name of the checkpoint; None for ``global_step{global_steps}``. If ranks give different tags, rank 0's
                is used, or the call raises, depending on ``checkpoint.tag_validation``.
            client_state: values that :meth:`load_checkpoint` returns: JSON values, tensors, numpy arrays, and objects
                with ``state_dict`` and ``load_state_dict``. Other objects are refused, because nothing is pickled.
            save_latest: True to write the tag into ``save_dir/latest``, which is read by loads without a tag.
            exclude_frozen_parameters: True to leave out frozen parameters, as for adapters.
            weights_only: True to leave out optimizer states.
            in_window: True to save inside an accumulation window without a warning.

        Returns:
            True.

        Raises:
            ValueError: ``save_dir`` is empty on some rank.
            CheckpointError, RuntimeError: saving failed, or ranks gave different tags and ``tag_validation`` is "FAIL".
                Raised on every rank.
        """
        given = f"global_step{self.global_steps}" if tag is None else str(tag)
        root, name = self._agreed_names(absolute(save_dir), given)
        # The client's values have an entry of their own, so that their keys cannot collide with the engine's.
        extra: dict[str, Any] = {"client_state": dict(client_state or {}), "engine": self._counts()}
        if self.lr_scheduler is not None and hasattr(self.lr_scheduler, "state_dict"):
            extra["lr_scheduler"] = self.lr_scheduler
        if not in_window:
            self._warn_of_window(name)
        own = self.writes_module_states and self.loaded_config.zero.stage < 3
        # gather_16bit copies weights to the first rank's CPU. state_dict() would need a second copy on every GPU.
        states = gather_16bit(self.module, exclude_frozen_parameters) if own else None
        completed = partial(self._completed, root, name, save_latest, states)
        # Remove the file of an older checkpoint with the same tag, whose weights would no longer fit.
        if engine_of(self.module).comm.rank == 0:
            (root / name / MODULE_STATES).unlink(missing_ok=True)
        begin_save(
            root / name, self.module, None if weights_only else self.optimizer, extra, asynchronous=False, busy="wait",
            file_nbytes=FILE_NBYTES, trained_only=exclude_frozen_parameters, progress=False, completed=completed,
            in_window=True,
        )  # fmt: skip
        return True

    def _completed(self, root: Path, name: str, save_latest: bool, states: dict[str, Tensor] | None) -> None:
        """Write module states, ``latest`` and the conversion script. The first rank calls it after all other files."""
        # ``latest`` comes after the checkpoint's files: if it named an incomplete checkpoint, the next job would fail.
        if states is not None:
            torch.save({"module": states, **self._counts()}, root / name / MODULE_STATES)
        if save_latest:
            write_synced(root / _LATEST, name.encode())
        write_script(root)

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint of :meth:`save_checkpoint` or of DeepSpeed, in any stage and on any number of ranks.

        Collective. A checkpoint of DeepSpeed may be of ZeRO stage 1, 2 or 3.

        Args:
            load_dir: directory given as ``save_dir`` when saving.
            tag: name of the checkpoint; None for the name in ``load_dir/latest``.
            load_module_strict: True to raise if model and checkpoint have different parameters or buffers.
            load_optimizer_states: True to load optimizer states.
            load_lr_scheduler_states: True to load the scheduler's state.
            load_module_only: True to load only weights and buffers, and no counters.
            custom_load_fn: refused; use ``load_module_strict=False``, or edit weights in ``GatheredParameters``.

        Returns:
            The checkpoint's path and its ``client_state``; (None, None) if no tag is given and ``latest`` is missing.

        Raises:
            CheckpointError: the checkpoint is damaged or does not fit the model; on every rank.
            TypeError: ``custom_load_fn`` is given.
        """
        if custom_load_fn is not None:
            raise TypeError(
                "custom_load_fn copies a whole state dict into a whole module, and a rank has parts of both; load with "
                "load_module_strict=False, or edit weights in zeropp.zero.GatheredParameters"
            )
        path = self._checkpoint_path(absolute(load_dir), tag)
        if path is None:
            return None, None
        optimizer = self.optimizer if load_optimizer_states and not load_module_only else None
        # A folder without zeropp's metadata was written by another program. load_foreign raises if it cannot read it.
        if not (path / METADATA).is_file():
            checkpoint.load_foreign(path, self.module, optimizer, strict=load_module_strict)
            counts, states = not load_module_only, optimizer is not None
            return str(path), self._take_run_values(path, counts, load_lr_scheduler_states, states)
        extra = {}
        if load_lr_scheduler_states and not load_module_only and hasattr(self.lr_scheduler, "load_state_dict"):
            extra["lr_scheduler"] = self.lr_scheduler
        # Random number generator states are only loaded with optimizer states: a new run that starts from these weights
        # uses its own seed.
        only = ["model", "extra"] if optimizer is None else None
        found = checkpoint.load(path, self.module, optimizer, extra, strict=load_module_strict, only=only)
        if not load_module_only:
            for name, count in found.extra.get("engine", {}).items():
                setattr(self, name, count)
        return str(path), dict(found.extra.get("client_state", {}))

    def _take_run_values(self, path: Path, counts: bool, schedule: bool, states: bool) -> dict[str, Any]:
        """Load counters, loss scale and scheduler state of DeepSpeed's checkpoint; return its ``client_state``.

        Args:
            path: folder of the checkpoint.
            counts: True to load the counters.
            schedule: True to load the scheduler's state; only done together with the counters.
            states: True to load skipped steps and loss scale.
        """
        engine = engine_of(self.module)
        # Only the first rank reads, because a network file system may show other ranks older files.
        own: RunValues | CheckpointError | None = None
        try:
            own = read_run_values(path) if path.is_dir() and engine.comm.rank == 0 else None
        except CheckpointError as error:
            # Send the error to the other ranks. Otherwise they would wait in the exchange below.
            own = error
        found = engine.agreement.exchange_objects(own, "reading the counters of a checkpoint")[0]
        if isinstance(found, CheckpointError):
            raise found
        if found is None:
            return {}
        for name, count in found.counts.items() if counts else ():
            setattr(self, name, count)
        if states and self.optimizer is not None:
            self.optimizer.step_result.load(found.skipped_steps, found.loss_scale)
        if counts and schedule and found.lr_scheduler is not None and hasattr(self.lr_scheduler, "load_state_dict"):
            self.lr_scheduler.load_state_dict(found.lr_scheduler)
        if found.left_out:
            warn_user(
                f"{str(path)!r} has values that hold tensors or objects and were not read: {', '.join(found.left_out)}"
            )
        return dict(found.client)

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save full 16-bit weights in one file, as :func:`zeropp.checkpoint.save_16bit_model` does. Collective."""
        return checkpoint.save_16bit_model(save_dir, self.module, save_filename, exclude_frozen_parameters)

    def save_fp16_model(self, save_dir: str | os.PathLike[str], save_filename: str = "pytorch_model.bin") -> bool:
        """Call :meth:`save_16bit_model`; this is its older name."""
        return self.save_16bit_model(save_dir, save_filename)

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor]:
        """Return the model's ``state_dict()`` with full tensors on every rank. Collective.

        ``exclude_frozen_parameters`` leaves out frozen parameters.
        """
        # Without duplicates removed: a tied parameter is in the state dict under each of its names.
        named = self.module.named_parameters(remove_duplicate=False)
        frozen = {name for name, parameter in named if not parameter.requires_grad}
        with _together(engine_of(self.module)):
            state = self.module.state_dict()
        return {name: value for name, value in state.items() if not (exclude_frozen_parameters and name in frozen)}

    def load_module_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = True) -> None:
        """Load full tensors into the model. Collective.

        Args:
            state_dict: name -> full tensor, equal on every rank.
            strict: True to raise if names differ from the model's.

        Raises:
            RuntimeError: names or shapes differ from the model's.
        """
        # zeropp's hooks in load_state_dict copy this rank's part of each tensor into the main weights.
        self.module.load_state_dict(state_dict, strict=strict)

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """Return full weights and buffers in 16 bits on the first rank's CPU; None on other ranks. Collective.

        Accelerate, transformers and other libraries call this method and :meth:`_zero3_consolidated_16bit_state_dict`.
        """
        return gather_16bit(self.module, exclude_frozen_parameters)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """Return :meth:`_consolidated_16bit_state_dict` in stage 3.

        Raises:
            ValueError: the stage is not 3; use ``module_state_dict()`` there.
        """
        # Raise as DeepSpeed does, because callers use the error to choose another way.
        if self.loaded_config.zero.stage != 3:
            raise ValueError(
                f"_zero3_consolidated_16bit_state_dict() is of stage 3, and this is {self.loaded_config.zero.stage}; "
                "use module_state_dict()"
            )
        return self._consolidated_16bit_state_dict(exclude_frozen_parameters)

    def _get_optimizer_ckpt_name(self, checkpoints_path: str | os.PathLike[str], tag: str, expp_rank: int = 0) -> str:
        """Return the path of a checkpoint's optimizer states; subclasses of DeepSpeed's engine call this method.

        The path is the checkpoint's directory, because a rank's files in it hold weights and states together.
        """
        return str(Path(checkpoints_path) / tag)

    def _change_recovery_script_permissions(self, dst: str | os.PathLike[str]) -> None:
        """Make the script ``zero_to_fp32.py`` beside checkpoints executable, as DeepSpeed's method does."""
        make_executable(dst)

    def _warn_of_window(self, name: str) -> None:
        """Warn on the first rank if checkpoint ``name`` is saved inside an accumulation window."""
        if (engine := engine_of(self.module)).accumulation.count > 0 and engine.comm.rank == 0:
            warn_user(
                f"the checkpoint {name!r} is saved inside a window of micro-batches, whose gradients are not in it; "
                "a run that resumes from it starts the window again"
            )

    def _counts(self) -> dict[str, int]:
        """Return the counters to save. Skipped steps are missing, because the optimizer's state has them."""
        return {name: getattr(self, name) for name in _COUNTS}

    def _agreed_names(self, own_root: str, own_tag: str) -> tuple[Path, str]:
        """Return directory and tag of the checkpoint to save, agreed on from each rank's arguments. Collective."""
        engine = engine_of(self.module)
        engine.require_idle("save_checkpoint()")
        told = engine.agreement.exchange_objects((own_root, own_tag), "agreeing on the name of a checkpoint")
        root = path_of_rank_0(engine, [path for path, _ in told], "save_checkpoint()")
        names = [tag for _, tag in told]
        other = next((rank for rank, name in enumerate(names) if name != names[0]), None)
        if other is None:
            return root, names[0]
        text = f"ranks gave save_checkpoint() different tags: rank 0 {names[0]!r}, and rank {other} {names[other]!r}"
        how = self.loaded_config.checkpoint.tag_validation
        if how == "FAIL":
            raise TagError(f"{text}; give the same one on every rank, without the time of day in it")
        # Only the first rank warns, because one warning is enough.
        if how == "WARN" and engine.comm.rank == 0:
            warn_user(f"{text}; the checkpoint is saved under the first rank's")
        return root, names[0]

    def _checkpoint_path(self, own_root: str, tag: str | int | None) -> Path | None:
        """Return the path of the checkpoint to load, equal on all ranks; None if ``latest`` is missing. Collective."""
        engine = engine_of(self.module)
        # Only the first rank reads ``latest``: a network file system may show other ranks an older one.
        own = str(tag) if tag is not None else None
        latest = Path(own_root) / (_UNIVERSAL if self.loaded_config.checkpoint.load_universal else _LATEST)
        if tag is None and engine.comm.rank == 0 and latest.is_file():
            own = latest.read_text().strip()
        told = engine.agreement.exchange_objects((own_root, own), "looking for the checkpoint to load")
        root = path_of_rank_0(engine, [path for path, _ in told], "load_checkpoint()")
        name = told[0][1]
        if name is None:
            warn_user(f"{str(latest)!r} is not there, and no tag was given: nothing was loaded")
            return None
        return root / name

    def _trained(self, what: str) -> ZeroOptimizer:
        """Return the optimizer; raise RuntimeError for an engine for inference or one that was destroyed."""
        if self.optimizer is None:
            raise RuntimeError(
                f"{what}() needs an optimizer, and this engine was made without one, for inference; give initialize() "
                'an optimizer, or an "optimizer" block in the configuration'
            )
        refuse_retired(self.core, what)
        return self.optimizer
