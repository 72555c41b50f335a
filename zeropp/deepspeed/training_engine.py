"""``Engine``: a model with its optimizer, scheduler and counters behind DeepSpeed's calls."""

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
from zeropp.deepspeed.zero_inference import thaw
from zeropp.deepspeed.zero_to_fp32 import make_executable, write_script
from zeropp.engine.engine import Engine as Core
from zeropp.engine.engine import engine_of
from zeropp.engine.engine_state import EngineState
from zeropp.engine.preconditions import refuse_retired
from zeropp.optimizer.wrapper import ZeroOptimizer
from zeropp.params.gradient import LossScaleError

__all__ = ["MODULE_STATES", "Engine"]

_LATEST, _UNIVERSAL = "latest", "latest_universal"
MODULE_STATES = "mp_rank_00_model_states.pt"
_COUNTS = ("global_steps", "global_samples")


@contextlib.contextmanager
def _together(engine: Core) -> Iterator[None]:
    """Inside, a state has whole values also where a script's own ``state_dict()`` takes no other rank."""
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
    """Ranks gave a checkpoint different tags; DeepSpeed raises an AssertionError then."""


@answers_configuration
class Engine(nn.Module):
    """The first result of ``zeropp.initialize``: forward, ``backward(loss)``, ``step()``, and all that is asked of it.

    A window is ``gradient_accumulation_steps`` calls of ``step()``: all but the last do nothing but count, and the last
    steps the optimizer, forgets gradients, and steps the scheduler unless the step was skipped. Attributes that it has
    not are the model's.

    Attributes:
        module: the model, partitioned in place.
        optimizer: a `ZeroOptimizer`; None for inference.
        lr_scheduler: stepped here; None leaves rates alone.
        training_dataloader: of the data set that was given; else None.
        config: the configuration as it was given, a plain dict.
        core: what gathers and reduces; see `zeropp.engine`.
        device: on which the model is.
        micro_steps: calls of ``step()`` since this engine was made; not saved, as in DeepSpeed.
        global_steps: optimizer steps, skipped ones included.
        global_samples: samples of these, over all ranks.
        writes_module_states: checkpoints of stages 0 to 2 have the model's weights once more, in a file of torch's with
            DeepSpeed's name and its key "module", for scripts that read them from there. Set by the stand-in.
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
        """Put the parts together; ``zeropp.initialize`` makes them.

        Args:
            module: partitioned.
            optimizer: of it.
            lr_scheduler: of the optimizer; anything with ``step()``.
            loaded: the configuration, checked.
            given: the same as the user gave it.
            core: that the model has.
            local_rank: of this process on its node.
            collate_fn: makes batches, in loaders that are made here.
        """
        super().__init__()
        self.module = module
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.loaded_config = loaded
        self.config = given
        # Held here: without an optimizer nobody else would.
        self.core = core
        self.device = core.device
        # loss.backward() is as good as engine.backward(loss), which DeepSpeed documents.
        core.loss_scale.divides_plain = True
        # Of what no step changes, as an average of weights, rounded values would be all there is.
        core.gather_contexts.computed = optimizer is not None
        # Scripts of DeepSpeed's read and edit weights that every rank caches, at any time.
        core.let_weights_be_read(ReadableWeights())
        # Ranks of the group; whatever else runs in the job has no part in this model.
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
        """The model's attributes."""
        # Parameters and modules of this one first: nn.Module finds them by this call, too.
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Not by self.module, which would ask here again while it is being made, or unpickled.
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
        """The model's."""
        return self.core.call_model(self.module, *inputs, **kwargs)

    # A micro-batch.

    @uncompiled
    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Backward of a micro-batch's loss, divided by ``gradient_accumulation_steps`` and times the loss scale.

        Args:
            loss: scalar.
            retain_graph: as in ``Tensor.backward``.
            scale_wrt_gas: False if the loss has been divided already.

        Returns:
            The loss, divided; not scaled.
        """
        self._trained("backward").backward(loss, retain_graph=retain_graph, scale_wrt_gas=scale_wrt_gas)
        # For logs: without the scale of float16, which nobody wants to read there.
        return loss / self.gradient_accumulation_steps() if scale_wrt_gas else loss

    @uncompiled
    def scale(self, loss: Tensor, scale_wrt_gas: bool = True) -> Tensor:
        """The loss as :meth:`backward` would take it, for ``engine.scale(loss).backward()``: divided, and scaled.

        Args:
            loss: scalar, and all of it: what is added afterwards is neither divided nor scaled.
            scale_wrt_gas: False if the loss has been divided already.
        """
        return self._trained("scale").scale(loss, scale_wrt_gas=scale_wrt_gas)

    @uncompiled
    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Step the optimizer at the end of a window; before, count.

        Args:
            lr_kwargs: arguments of the scheduler's ``step``.

        Raises:
            RuntimeError: inside ``coalesce_grad_reduction()`` or ``no_sync()``; and as of ``ZeroOptimizer.step``.
        """
        optimizer = self._trained("step")
        if self._coalescing:
            raise RuntimeError(
                "step() was called inside coalesce_grad_reduction() or no_sync(); call it after the block"
            )
        self._applied = False
        if self._windows.note_engine_step():
            self._take_step(optimizer, lr_kwargs)
        # Whether or not it has stepped: scripts print it. Where windows end does not depend on it, as it would no
        # longer fit once the number of ranks, or of micro-batches, is another.
        self.micro_steps += 1

    def _take_step(self, optimizer: ZeroOptimizer, lr_kwargs: Mapping[str, Any] | None) -> None:
        count = self.core.accumulation.count
        # Now: it ends where the caller says, however many micro-batches have come.
        try:
            optimizer.step(now=True)
        except LossScaleError:
            # For whoever goes on: added to these sums, no later gradient would be finite.
            optimizer.zero_grad(now=True)
            raise
        # Also after a skipped step, whose gradients are of no use.
        optimizer.zero_grad(now=True)
        # On a card this waits for the step's sum; a scheduler that had gone on could not be called back.
        self._applied = optimizer.step_was_taken
        if self._applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        self.global_steps += 1
        # A caller who says where windows end may have had more or fewer micro-batches than the file says.
        micro = self.train_micro_batch_size_per_gpu() or 0
        self.global_samples += (self.train_batch_size() or 0) if self._managed else micro * count * self.world_size

    @uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, and begin the window again; after a ``step()`` that only counted, nothing.

        So a loop that calls it in every micro-batch, as in torch, loses nothing: ``optimizer.zero_grad(now=True)``
        forgets at any time.
        """
        if self.optimizer is not None:
            self._trained("zero_grad").zero_grad(set_to_none)

    # Where windows end.

    @property
    def _windows(self) -> CalledWindows:
        windows = self.core.accumulation
        # Both wrappings, to train and for inference, have asked for this class.
        assert isinstance(windows, CalledWindows)
        return windows

    @property
    def _managed(self) -> bool:
        return self.loaded_config.managed_gradient_accumulation

    def is_gradient_accumulation_boundary(self) -> bool:
        """Tell whether the ``step()`` that follows steps the optimizer."""
        return self._managed and self._windows.at_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say, before a forward, whether its micro-batch is the last before a step; until it is said otherwise.

        Raises:
            RuntimeError: with ``managed_gradient_accumulation`` false, where every ``step()`` is a boundary.
        """
        if not self._managed:
            raise RuntimeError(
                "set_gradient_accumulation_boundary() has no effect with managed_gradient_accumulation false, where "
                "every step() is a boundary; set it to true, or leave the call out"
            )
        # Until the caller takes it back, which DeepSpeed's does not offer, either.
        self._windows.set_boundary(bool(is_boundary))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside keep their gradients on this rank; see ``ZeroOptimizer.no_sync``. In every stage."""
        with self._trained("no_sync").no_sync():
            # A step inside would send all of it at once, and the block would have been for nothing.
            before, self._coalescing = self._coalescing, True
            try:
                yield
            finally:
                self._coalescing = before

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Backward passes inside send nothing; the step that follows sends all of it at once."""
        with self.no_sync():
            yield

    def was_step_applied(self) -> bool:
        """Tell whether the last ``step()`` changed weights: at a boundary, and not skipped."""
        return self._applied

    # Sizes of batches, and what steps have come to.

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a window."""
        return self.batch[2]

    def train_micro_batch_size_per_gpu(self) -> int | None:
        """Samples of a micro-batch on one rank; None where the configuration does not say."""
        return self.batch[1]

    def train_batch_size(self) -> int | None:
        """Samples of a window over all ranks; None where the configuration does not say."""
        return self.batch[0]

    def get_batch_info(self) -> tuple[int | None, int | None, int]:
        """Samples of a window over all ranks, samples of a micro-batch on one, micro-batches of a window."""
        return self.batch

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples of a window, by more or fewer micro-batches. Between two windows, on every rank.

        Raises:
            ValueError: it is no multiple of what a micro-batch has over all ranks.
        """
        # Without a micro-batch size there is nothing to count in.
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
        """Change the samples of a micro-batch, and with them those of a window; their number stays."""
        if micro_batch_size <= 0:
            raise ValueError(f"micro_batch_size is {micro_batch_size}; expected at least 1")
        # A window has as many as before, and so no gradients of another divisor.
        steps = self.batch[2]
        self._set_batch(micro_batch_size * steps * self.dp_world_size, micro_batch_size, steps)

    def _set_batch(self, train: int, micro: int, steps: int) -> None:
        # First, since it may refuse; sizes here must not say otherwise then.
        if self.optimizer is not None:
            self._windows.resize(steps)
        self.batch = (train, micro, steps)

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps that were skipped, since a gradient was not finite."""
        return 0 if self.optimizer is None else self.optimizer.skipped_steps

    def get_global_grad_norm(self) -> float | None:
        """Norm of all gradients at the last step, before clipping; None before the first one."""
        return None if self.optimizer is None else self.optimizer.grad_norm

    def get_lr(self) -> list[Any]:
        """Learning rate of each parameter group."""
        return [group["lr"] for group in self._trained("get_lr").param_groups]

    def get_mom(self) -> list[Any]:
        """Momentum of each group, or an Adam's ``betas``."""
        groups = self._trained("get_mom").param_groups
        return [group["betas"] if "betas" in group else group.get("momentum") for group in groups]

    def get_type(self) -> list[Any]:
        """The ``type`` of each group; None where a group has none."""
        return [group.get("type") for group in self._trained("get_type").param_groups]

    # Stages, beside the calls of the table in config_accessors.py.

    def zero_optimization(self) -> bool:
        """Tell whether anything is partitioned: stage 1 or more."""
        return self.loaded_config.zero.stage > 0

    def zero_optimization_partition_gradients(self) -> bool:
        """Tell whether gradients are partitioned: stage 2 or 3."""
        return self.loaded_config.zero.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Tell whether weights are partitioned: stage 3."""
        return self.loaded_config.zero.stage == 3

    def dynamic_loss_scale(self) -> bool:
        """Tell whether the loss scale of float16 is dynamic."""
        return self.loaded_config.fp16.loss_scale == 0

    # Data, phases, compilation, the end.

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
        """A loader of this rank's micro-batches.

        Args:
            dataset: map-style ones are dealt out to the ranks, shuffled for training alone.
            batch_size: samples of a micro-batch; None as configured.
            route: "train", "eval" or "predict".
            pin_memory: in page-locked memory, where the model is on a GPU.
            data_sampler: in place of the one that deals out.
            collate_fn: makes a batch of samples; None for the one that ``initialize`` was given.
            num_local_io_workers: processes that load; None for none.

        Raises:
            ValueError: no batch size is given or configured.
        """
        size = self.train_micro_batch_size_per_gpu() if batch_size is None else batch_size
        # torch's own default is 1, which nobody who left it out has meant.
        if size is None:
            raise ValueError("a data loader needs a batch size; set train_micro_batch_size_per_gpu, or give batch_size")
        return make_loader(
            dataset, size, rank=self.global_rank, world=self.dp_world_size, sampler=data_sampler,
            shuffle=route == "train", collate_fn=collate_fn or self.collate_fn, workers=num_local_io_workers or 0,
            pin_memory=pin_memory and self.device.type == "cuda", drop_last=self.loaded_config.dataloader_drop_last,
        )  # fmt: skip

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """See ``ZeroOptimizer.offload_states``."""
        self._trained("offload_states").offload_states(*args, **kwargs)

    def reload_states(self, non_blocking: bool = False) -> None:
        """See ``ZeroOptimizer.reload_states``."""
        self._trained("reload_states").reload_states(non_blocking)

    def empty_partition_cache(self) -> None:
        """See ``ZeroOptimizer.empty_partition_cache``."""
        if self.optimizer is not None:
            self.optimizer.empty_partition_cache()

    def compile(
        self,
        backend: Any = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the model in place, as ``module.compile(backend=backend, **compile_kwargs)``.

        Args:
            backend, compile_kwargs: of ``torch.compile``.
            schedule: passes of DeepCompile; None, since there are none here.
            compiled_autograd_enabled: not here: gradients leave in hooks.

        Raises:
            ValueError: a schedule, or compiled autograd.
        """
        if schedule is not None or compiled_autograd_enabled:
            raise ValueError(
                "compile() takes no schedule and no compiled autograd: zeropp gathers and reduces in hooks, outside of "
                "compiled graphs; leave both out"
            )
        # Hooks stay outside of graphs; blocks compiled one by one have no breaks in theirs.
        self.module.compile(backend=backend, **(compile_kwargs or {}))

    @property
    def is_compiled(self) -> bool:
        """True if the model is compiled in place, by :meth:`compile` or otherwise."""
        return is_compiled(self.module)

    def destroy(self) -> None:
        """End this engine and its optimizer, but not the model's weights. Collective.

        Where every rank has whole weights, as in stages 0 to 2, the model is a plain one again, in the dtype that it
        computed with. In stage 3, under ``torch_autocast`` and inside an average it stays partitioned, each rank with
        its part, and runs as one without an optimizer; that, and zeropp's threads and groups, goes with the model.
        Either can be given to ``initialize`` once more, and main weights that were left go on from there.
        """
        if self.core.retired or self.core.closed:  # before, or by a newer engine, whose the model is now
            return
        weights = cached_whole(self.core)
        if weights or self.core.agreement.lost is not None:
            # The optimizer closes what gathers and reduces, after the step that the host may be at.
            (self.core if self.optimizer is None else self.optimizer).close()
            unshard_parameters(weights)
        # Where it is not closed, the model's modules have it until somebody takes it over.
        self.core.set_state(EngineState.RETIRED)
        self.core.loss_scale.drop_losses()
        # Last: a warning of it may be an error.
        thaw(self.core, self.module)

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

        The directory is one of zeropp's checkpoints, which loads on any number of ranks: see docs/checkpoints.md.
        Inside a window its gradients are not in it, with a warning: whoever is told to end has what there is by then.

        Args:
            save_dir: a directory that all ranks see. Where ranks give different ones it is rank 0's, with a warning.
            tag: name of the checkpoint; None for ``global_step`` and their number. Where ranks give different ones it
                is rank 0's, or as ``tag_validation`` says.
            client_state: values to get back from :meth:`load_checkpoint`: JSON, tensors, numpy arrays, and objects with
                ``state_dict`` and ``load_state_dict``. Others are refused: nothing is pickled.
            save_latest: name it in ``save_dir/latest``, for loads without a tag.
            exclude_frozen_parameters: leave out those, as around adapters; whoever loads has them from elsewhere.
            weights_only: leave out states of the optimizer.
            in_window: between two steps, too, without that warning.

        Returns:
            True.

        Raises:
            ValueError: ``save_dir`` is empty, on some rank.
            CheckpointError, RuntimeError: it cannot be saved, or ranks gave different tags where ``tag_validation`` is
                "FAIL"; on every rank.
        """
        given = f"global_step{self.global_steps}" if tag is None else str(tag)
        root, name = self._agreed_names(absolute(save_dir), given)
        # Three names of our own, so that a client's keys cannot be taken for counters.
        extra: dict[str, Any] = {"client_state": dict(client_state or {}), "engine": self._counts()}
        if self.lr_scheduler is not None and hasattr(self.lr_scheduler, "state_dict"):
            extra["lr_scheduler"] = self.lr_scheduler
        if not in_window:
            self._warn_of_window(name)
        own = self.writes_module_states and self.loaded_config.zero.stage < 3
        # On the first rank's CPU: a state_dict() would be one more copy of the weights on every card.
        states = gather_16bit(self.module, exclude_frozen_parameters) if own else None
        completed = partial(self._completed, root, name, save_latest, states)
        # Of a checkpoint that this one replaces; the weights in it are in the checkpoint, too.
        if engine_of(self.module).comm.rank == 0:
            (root / name / MODULE_STATES).unlink(missing_ok=True)
        begin_save(
            root / name, self.module, None if weights_only else self.optimizer, extra, asynchronous=False, busy="wait",
            file_nbytes=FILE_NBYTES, trained_only=exclude_frozen_parameters, progress=False, completed=completed,
            in_window=True,
        )  # fmt: skip
        return True

    def _completed(self, root: Path, name: str, save_latest: bool, states: dict[str, Tensor] | None) -> None:
        """By the first rank, when all of it is on the disk: a name of what is not there would end the next job."""
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
        """Restore what :meth:`save_checkpoint` saved, on any ranks and in any stage; or DeepSpeed. Collective.

        Args:
            load_dir: as saved.
            tag: name of the checkpoint; None for the one that ``load_dir/latest`` names.
            load_module_strict: raise if model and checkpoint have other parameters or buffers.
            load_optimizer_states: also the optimizer's, and the counters.
            load_lr_scheduler_states: also the scheduler's.
            load_module_only: weights and buffers alone.
            custom_load_fn: refused; use ``load_module_strict=False``, or edit weights in ``GatheredParameters``.

        Returns:
            The checkpoint's path and its ``client_state``; (None, None) if no tag is given and there is no ``latest``.

        Raises:
            CheckpointError: it is damaged, or does not fit; on every rank.
        """
        # Before any rank reads: it is asked of the call, and not of the files.
        if custom_load_fn is not None:
            raise TypeError(
                "custom_load_fn copies a whole state dict into a whole module, and a rank has parts of both; load with "
                "load_module_strict=False, or edit weights in zeropp.zero.GatheredParameters"
            )
        path = self._checkpoint_path(absolute(load_dir), tag)
        if path is None:
            return None, None
        optimizer = self.optimizer if load_optimizer_states and not load_module_only else None
        # What has no metadata of ours is another program's, or nothing; the error names which.
        if not (path / METADATA).is_file():
            checkpoint.load_foreign(path, self.module, optimizer, strict=load_module_strict)
            counts, states = not load_module_only, optimizer is not None
            return str(path), self._take_run_values(path, counts, load_lr_scheduler_states, states)
        extra = {}
        if load_lr_scheduler_states and not load_module_only and hasattr(self.lr_scheduler, "load_state_dict"):
            extra["lr_scheduler"] = self.lr_scheduler
        # Random numbers go with states: a run that begins anew with these weights draws its own.
        only = ["model", "extra"] if optimizer is None else None
        found = checkpoint.load(path, self.module, optimizer, extra, strict=load_module_strict, only=only)
        if not load_module_only:
            for name, count in found.extra.get("engine", {}).items():
                setattr(self, name, count)
        return str(path), dict(found.extra.get("client_state", {}))

    def _take_run_values(self, path: Path, counts: bool, schedule: bool, states: bool) -> dict[str, Any]:
        """Go on where a run of DeepSpeed's has stopped; returns its ``client_state``."""
        engine = engine_of(self.module)
        # The first rank's: others may see the files later, and all are to count alike.
        own: RunValues | CheckpointError | None = None
        try:
            own = read_run_values(path) if path.is_dir() and engine.comm.rank == 0 else None
        except CheckpointError as error:
            # Told to the others, who would wait for what does not come.
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
            warn_user(f"of {str(path)!r} these are tensors or objects, and were not read: {', '.join(found.left_out)}")
        return dict(found.client)

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """See :func:`zeropp.checkpoint.save_16bit_model`."""
        return checkpoint.save_16bit_model(save_dir, self.module, save_filename, exclude_frozen_parameters)

    def save_fp16_model(self, save_dir: str | os.PathLike[str], save_filename: str = "pytorch_model.bin") -> bool:
        """:meth:`save_16bit_model` by its older name."""
        return self.save_16bit_model(save_dir, save_filename)

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor]:
        """The model's ``state_dict()``: whole tensors on every rank. Collective."""
        # With aliases: what is tied stands in the state under each of its names.
        named = self.module.named_parameters(remove_duplicate=False)
        frozen = {name for name, parameter in named if not parameter.requires_grad}
        with _together(engine_of(self.module)):
            state = self.module.state_dict()
        return {name: value for name, value in state.items() if not (exclude_frozen_parameters and name in frozen)}

    def load_module_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = True) -> None:
        """Load whole tensors, the same ones on every rank, into the model. Collective.

        Raises:
            RuntimeError: names or shapes are others than the model's.
        """
        # The module's own, whose hooks take this rank's pieces.
        self.module.load_state_dict(state_dict, strict=strict)

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """Whole weights and buffers in 16 bits on the first rank's CPU, None on others, in any stage. Collective.

        Accelerate, transformers and others call it, and :meth:`_zero3_consolidated_16bit_state_dict`, by these names.
        """
        return gather_16bit(self.module, exclude_frozen_parameters)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """:meth:`_consolidated_16bit_state_dict`, in stage 3.

        Raises:
            ValueError: in another stage, where ``module_state_dict()`` takes no gathering.
        """
        # As in DeepSpeed: whoever falls back on it has asked by an error.
        if self.loaded_config.zero.stage != 3:
            raise ValueError(
                f"_zero3_consolidated_16bit_state_dict() is of stage 3, and this is {self.loaded_config.zero.stage}; "
                "use module_state_dict()"
            )
        return self._consolidated_16bit_state_dict(exclude_frozen_parameters)

    def _get_optimizer_ckpt_name(self, checkpoints_path: str | os.PathLike[str], tag: str, expp_rank: int = 0) -> str:
        """The place of the optimizer's states of a checkpoint; by DeepSpeed's name, which subclasses look at.

        There is no file of one rank's states alone: it is the checkpoint's directory.
        """
        return str(Path(checkpoints_path) / tag)

    def _change_recovery_script_permissions(self, dst: str | os.PathLike[str]) -> None:
        """Make the script that is left beside checkpoints executable, if that can be; as in DeepSpeed."""
        make_executable(dst)

    def _warn_of_window(self, name: str) -> None:
        if (engine := engine_of(self.module)).accumulation.count > 0 and engine.comm.rank == 0:
            warn_user(
                f"the checkpoint {name!r} is saved inside a window of micro-batches, whose gradients are not in it; "
                "whoever resumes begins the window again"
            )

    def _counts(self) -> dict[str, int]:
        # Skipped steps are the optimizer's, which saves them itself.
        return {name: getattr(self, name) for name in _COUNTS}

    def _agreed_names(self, own_root: str, own_tag: str) -> tuple[Path, str]:
        """Directory and tag of the checkpoint that ranks are about to save, of those that each rank was given."""
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
        # One warning is enough; a rank of many would say it of names that nobody sees any more.
        if how == "WARN" and engine.comm.rank == 0:
            warn_user(f"{text}; the checkpoint is saved under the first rank's")
        return root, names[0]

    def _checkpoint_path(self, own_root: str, tag: str | int | None) -> Path | None:
        """Path of the checkpoint to load; the first rank's answer, on every rank."""
        engine = engine_of(self.module)
        # Other ranks may see an older state of a network's file system, and would load another checkpoint.
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
        if self.optimizer is None:
            raise RuntimeError(
                f"{what}() needs an optimizer, and this engine was made without one, for inference; give initialize() "
                'an optimizer, or an "optimizer" block in the configuration'
            )
        refuse_retired(self.core, what)
        return self.optimizer
