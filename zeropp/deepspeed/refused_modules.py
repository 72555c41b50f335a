"""The parts of DeepSpeed that the stand-in lacks, by name, with the reasons."""

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
NO_EXPERTS = f"{_PARALLEL}; mixtures of experts of transformers train as they are"
NO_PIPELINES = f"pipelines are not in zeropp: {_PARALLEL}"
NO_KERNELS = "zeropp has no inference kernels; zeropp.initialize without an optimizer makes an engine that only runs"

# Module, with all below it -> why it is not there.
MODULES = {
    "deepspeed.autotuning": "zeropp.plan says which settings fit, and measures nothing",
    "deepspeed.checkpoint.constants": "DeepSpeed's own files are read by engine.load_checkpoint and zero_to_fp32",
    "deepspeed.compile": "zeropp gathers in hooks, outside of compiled graphs; engine.compile() compiles the model",
    "deepspeed.compression": "zeropp does not prune or quantize models",
    "deepspeed.datastates": "zeropp.checkpoint saves asynchronously",
    "deepspeed.elasticity": "checkpoints of zeropp load on any number of ranks; torchrun restarts them",
    "deepspeed.env_report": "nothing is compiled; python -m torch.utils.collect_env says what there is",
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
    """Says why, where a module below ``deepspeed`` is imported that is not there. Asked after all others."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Nothing of other packages; of this one, an error.

        Raises:
            ModuleNotFoundError: always, below ``deepspeed``; scripts that can do without catch it as any ImportError.
        """
        if not fullname.startswith("deepspeed."):
            return None
        raise ModuleNotFoundError(
            f"{fullname} is not in zeropp's stand-in for DeepSpeed: {_reason(fullname)}; {_SEE}", name=fullname
        )

    @classmethod
    def stand(cls) -> None:
        """Be asked, once."""
        if not any(isinstance(each, cls) for each in sys.meta_path):
            sys.meta_path.append(cls())


def refused(name: str, why: str = _PARALLEL) -> type[Any]:
    """A class in the place of what is not there: it can be imported and compared with, and raises when it is called.

    Args:
        name: dotted, below ``deepspeed``.
        why: and what to do.
    """

    def refuse(cls: type[Any], *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"deepspeed.{name} is not in zeropp's stand-in for DeepSpeed: {why}; {_SEE}")

    # Scripts ask isinstance of such classes, to which the answer is no.
    return type(name.rpartition(".")[2], (), {"__new__": refuse, "__doc__": f"Refused: {why}."})


def refuse_attribute(module: str, name: str) -> NoReturn:
    """Say why a package below ``deepspeed`` has not got something, where it is asked for as an attribute.

    Raises:
        AttributeError: always.
    """
    # As of any module: hasattr() is how scripts find out.
    raise AttributeError(
        f"{module}.{name} is not in zeropp's stand-in for DeepSpeed: {_reason(f'{module}.{name}')}; {_SEE}"
    )


def _reason(fullname: str) -> str:
    # The nearest: modules below a refused one are refused for its reason.
    known = [why for module, why in MODULES.items() if f"{fullname}.".startswith(f"{module}.")]
    return known[-1] if known else "no script was known to use it"
