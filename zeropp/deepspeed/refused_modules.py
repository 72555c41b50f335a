"""Names of DeepSpeed that the stand-in package lacks, with the reasons, and the errors that using them raises."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn

__all__ = ["MODULES", "NO_EXPERTS", "NO_KERNELS", "NO_PIPELINES", "RefusingFinder", "refuse_attribute", "refused"]

_SEE = "see docs/migrating.md of zeropp"
_PARALLEL = "zeropp partitions over data-parallel ranks, and splits no layer, sequence or expert over them"
NO_EXPERTS = f"{_PARALLEL}; the mixture-of-experts models of transformers train without changes"
NO_PIPELINES = f"pipelines are not in zeropp: {_PARALLEL}"
NO_KERNELS = "zeropp has no inference kernels; zeropp.initialize without an optimizer makes an engine for inference"

# Module -> reason why the stand-in lacks it and all its submodules.
MODULES = {
    "deepspeed.autotuning": "zeropp.plan computes which settings fit into memory, and measures nothing",
    "deepspeed.checkpoint.constants": "DeepSpeed's own files are read by engine.load_checkpoint and zero_to_fp32",
    "deepspeed.compile": "zeropp gathers in hooks, outside of compiled graphs; engine.compile() compiles the model",
    "deepspeed.compression": "zeropp does not prune or quantize models",
    "deepspeed.datastates": "zeropp.checkpoint saves asynchronously",
    "deepspeed.elasticity": "checkpoints of zeropp load on any number of ranks; torchrun restarts them",
    "deepspeed.env_report": "zeropp compiles nothing; python -m torch.utils.collect_env reports the environment",
    "deepspeed.inference": NO_KERNELS,
    "deepspeed.linear": "use peft for adapters, and zero_quantized_nontrainable_weights for frozen weights in int8",
    "deepspeed.model_implementations": NO_KERNELS,
    "deepspeed.module_inject": "zeropp replaces no layers; tensor parallelism is not in it",
    "deepspeed.moe": NO_EXPERTS,
    "deepspeed.monitor": "zeropp writes no logs of training; the loss and engine.get_global_grad_norm() are there to"
    " be written",
    "deepspeed.nebula": "zeropp.checkpoint saves asynchronously",
    "deepspeed.ops.op_builder.builder": "zeropp compiles nothing before it runs",
    "deepspeed.ops.sparse_attention": "use torch's flex_attention",
    "deepspeed.ops.transformer": "use the layers of torch or transformers",
    "deepspeed.pipe": NO_PIPELINES,
    "deepspeed.profiling": "use torch.profiler; zeropp.comm_report(model) has the bytes sent",
    "deepspeed.runtime.data_pipeline": "sampling by difficulty is not in zeropp; give a sampler to the loader",
    "deepspeed.runtime.hybrid_engine": "generate inside zero.GatheredParameters(model.parameters())",
    "deepspeed.runtime.pipe": NO_PIPELINES,
    "deepspeed.runtime.sequence_parallel": f"Ulysses is not in zeropp: {_PARALLEL}",
    "deepspeed.runtime.tensor_parallel": f"tensor parallelism is not in zeropp: {_PARALLEL}",
    "deepspeed.sequence": f"Ulysses is not in zeropp: {_PARALLEL}",
    "deepspeed.utils.timer": "use torch.profiler, or time.perf_counter around torch.accelerator.synchronize()",
}


class RefusingFinder(importlib.abc.MetaPathFinder):
    """Import finder that raises an error with the reason when a missing submodule of ``deepspeed`` is imported.

    It is the last entry of ``sys.meta_path``, so Python only calls it if no other finder has found the module.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return None for modules outside of ``deepspeed``; raise for submodules of it.

        Raises:
            ModuleNotFoundError: ``fullname`` is below ``deepspeed``. The error is an ImportError, which scripts with a
                fallback already catch.
        """
        if not fullname.startswith("deepspeed."):
            return None
        raise ModuleNotFoundError(
            f"{fullname} is not in zeropp's stand-in for DeepSpeed: {_reason(fullname)}; {_SEE}", name=fullname
        )

    @classmethod
    def stand(cls) -> None:
        """Append a finder to ``sys.meta_path``, unless one is there."""
        if not any(isinstance(each, cls) for each in sys.meta_path):
            sys.meta_path.append(cls())


def refused(name: str, why: str = _PARALLEL) -> type[Any]:
    """Return a placeholder class for a class or function that the stand-in lacks.

    The placeholder can be imported and used in ``isinstance``, which is always False. Calling it raises RuntimeError.

    Args:
        name: dotted name below ``deepspeed``.
        why: reason and remedy for the error.
    """

    def refuse(cls: type[Any], *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"deepspeed.{name} is not in zeropp's stand-in for DeepSpeed: {why}; {_SEE}")

    # A class, and not a function, because scripts use such names in isinstance().
    return type(name.rpartition(".")[2], (), {"__new__": refuse, "__doc__": f"Refused: {why}."})


def refuse_attribute(module: str, name: str) -> NoReturn:
    """Raise the error for a missing attribute of a module of the stand-in.

    Args:
        module: dotted name of the module.
        name: missing attribute.

    Raises:
        AttributeError: always, with the reason.
    """
    # AttributeError, so that a script's hasattr() returns False.
    raise AttributeError(
        f"{module}.{name} is not in zeropp's stand-in for DeepSpeed: {_reason(f'{module}.{name}')}; {_SEE}"
    )


def _reason(fullname: str) -> str:
    """Return the reason why a dotted name is missing: that of the module itself, or of its nearest known parent."""
    # MODULES is sorted by name, so the last match is the nearest parent.
    known = [why for module, why in MODULES.items() if f"{fullname}.".startswith(f"{module}.")]
    return known[-1] if known else "no script that uses it was known"
