"""``Engine``: a model with its optimizer, scheduler and counters behind DeepSpeed's calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from zeropp._compat import is_compiled, uncompiled
from zeropp.access.ownership import cached_whole, give_back
from zeropp.access.resting import RestingWeights
from zeropp.config import Config
from zeropp.engine.engine import Engine as Core
from zeropp.engine.preconditions import refuse_retired
from zeropp.optimizer.wrapper import ZeroOptimizer
from zeropp.params.loss_scale import LossScaleError
from zeropp.training.accessors import ABSENT, Accessors
from zeropp.training.data import make_loader
from zeropp.training.inference import thaw
from zeropp.training.saving import Saving

__all__ = ["Engine"]


class Engine(Saving, Accessors, nn.Module):
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
    """

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
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self.loaded_config, self.config = loaded, given
        # Held here: without an optimizer nobody else would.
        self.core, self.device = core, core.device
        # loss.backward() is as good as engine.backward(loss), which DeepSpeed documents.
        core.reductions.loss_scale.divides_plain = True
        # Of what no step changes, as an average of weights, rounded values would be all there is.
        core.loans.computed = optimizer is not None
        # Scripts of DeepSpeed's read weights of stages 0 to 2 at any time.
        core.resting = RestingWeights(core)
        # Ranks of the group; whatever else runs in the job has no part in this model.
        self.global_rank, self.world_size, self.local_rank = core.comm.rank, core.comm.world, local_rank
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
        return self.module(*inputs, **kwargs)

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
        if self.core.window.call():
            self._take_step(optimizer, lr_kwargs)
        # Whether or not it has stepped: scripts print it. Where windows end does not depend on it, as it would no
        # longer fit once the number of ranks, or of micro-batches, is another.
        self.micro_steps += 1

    def _take_step(self, optimizer: ZeroOptimizer, lr_kwargs: Mapping[str, Any] | None) -> None:
        count = self.core.window.count
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
        # A caller who owns the boundary may have had more or fewer micro-batches than the file says.
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
    def _managed(self) -> bool:
        return self.loaded_config.managed_gradient_accumulation

    def is_gradient_accumulation_boundary(self) -> bool:
        """Tell whether the ``step()`` that follows steps the optimizer."""
        return self._managed and self.core.window.at_boundary

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
        self.core.window.force(bool(is_boundary))

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
            self.optimizer.engine.window.resize(steps)
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
            give_back(weights)
        self.core.retired = True  # where it is not closed, the model's modules have it until somebody takes it over
        self.core.reductions.loss_scale.forget()
        # Last: a warning of it may be an error.
        thaw(self.core, self.module)

    def _trained(self, what: str) -> ZeroOptimizer:
        if self.optimizer is None:
            raise RuntimeError(
                f"{what}() needs an optimizer, and this engine was made without one, for inference; give initialize() "
                'an optimizer, or an "optimizer" block in the configuration'
            )
        refuse_retired(self.core, what)
        return self.optimizer
