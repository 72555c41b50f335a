"""Saving and loading by a training engine: DeepSpeed's calls over zeropp's checkpoints."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeropp import checkpoint
from zeropp.access.state import engine_of
from zeropp.checkpoint.boxes import CheckpointError
from zeropp.checkpoint.export import gather_16bit
from zeropp.checkpoint.files import FILE_NBYTES
from zeropp.checkpoint.metadata import METADATA, write_synced
from zeropp.checkpoint.save import begin
from zeropp.checkpoint.together import absolute, path_of_rank_0
from zeropp.config import Config
from zeropp.config.base import notify
from zeropp.deepspeed.zero_checkpoints import RunValues, read_run_values
from zeropp.deepspeed.zero_to_fp32 import make_executable, write_script
from zeropp.engine.engine import Engine as Core
from zeropp.optimizer.wrapper import ZeroOptimizer

__all__ = ["MODULE_STATES", "Saving"]

_LATEST, _UNIVERSAL = "latest", "latest_universal"
MODULE_STATES = "mp_rank_00_model_states.pt"
_COUNTS = ("global_steps", "global_samples")


@contextlib.contextmanager
def _together(engine: Core) -> Iterator[None]:
    """Inside, a state has whole values also where a script's own ``state_dict()`` takes no other rank."""
    resting = engine.resting
    if resting is None:
        yield
        return
    before, resting.alone = resting.alone, False
    try:
        yield
    finally:
        resting.alone = before


class TagError(CheckpointError, AssertionError):
    """Ranks gave a checkpoint different tags; DeepSpeed raises an AssertionError then."""


class Saving:
    """A part of :class:`zeropp.training.Engine`.

    Attributes:
        writes_module_states: checkpoints of stages 0 to 2 have the model's weights once more, in a file of torch's with
            DeepSpeed's name and its key "module", for scripts that read them from there. Set by the stand-in.
    """

    writes_module_states = False

    module: nn.Module
    optimizer: ZeroOptimizer | None
    lr_scheduler: Any
    loaded_config: Config
    global_steps: int
    global_samples: int

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
        begin(
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
            self.optimizer.outcome.load(found.skipped_steps, found.loss_scale)
        if counts and schedule and found.lr_scheduler is not None and hasattr(self.lr_scheduler, "load_state_dict"):
            self.lr_scheduler.load_state_dict(found.lr_scheduler)
        if found.left_out:
            notify(f"of {str(path)!r} these are tensors or objects, and were not read: {', '.join(found.left_out)}")
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
        if (engine := engine_of(self.module)).window.count > 0 and engine.comm.rank == 0:
            notify(
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
            notify(f"{text}; the checkpoint is saved under the first rank's")
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
        root, name = path_of_rank_0(engine, [path for path, _ in told], "load_checkpoint()"), told[0][1]
        if name is None:
            notify(f"{str(latest)!r} is not there, and no tag was given: nothing was loaded")
            return None
        return root / name
